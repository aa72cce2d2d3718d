"""Closed forms of what generation costs against sums over tokens."""

import jax
import pytest
from fast import noisy_params
from hypothesis import given
from hypothesis import strategies as some
from lm_configs import lm_config

from jaxpar.decode.cost import ModelSizes, decoding_cost, tokens_read
from jaxpar.lm import num_params
from jaxpar.lm.sample import empty_cache, extend
from jaxpar.lower.flops import count_flops
from jaxpar.types import UsageError

COUNT = some.integers(0, 40)


def tokens_seen(prompt, token, budget):
    """Returns how many tokens a new token sees, the number of those before it being `token`."""
    if budget is None:
        return prompt + token
    return min(budget, prompt + token)


@given(COUNT, COUNT, some.none() | COUNT)
def test_tokens_are_summed(prompt, new, budget):
    want = sum(tokens_seen(prompt, t, budget) for t in range(new))
    assert tokens_read(prompt, new, budget) == want


@given(
    COUNT,
    some.integers(1, 20),
    some.integers(1, 5),
    some.booleans(),
    some.none() | some.integers(1, 30),
    some.integers(1, 4),
)
def test_costs_are_sums_over_tokens_and_samples(prompt, new, samples, shared, budget, itemsize):
    block = 4
    options = {"samples": samples, "shared": shared, "budget": budget, "block": block}
    sizes = ModelSizes(
        num_params=1000, num_layers=3, num_heads=4, num_kv_heads=2, head_dim=8, itemsize=itemsize
    )
    found = decoding_cost(sizes, prompt, new, **options)
    query = sizes.num_layers * sizes.num_heads * sizes.head_dim
    key = sizes.num_layers * sizes.num_kv_heads * sizes.head_dim
    flops = 0.0
    cache = 0.0
    for t in range(new):
        for sample in range(samples):
            seen = tokens_seen(prompt, t, budget)
            read = seen
            if shared and budget is None and sample:
                read = seen - prompt
            flops += 2 * sizes.num_params + 4 * query * seen
            cache += 2 * key * itemsize * read
            if budget is not None:
                flops += 2 * query * (prompt + t) / block
                cache += key * itemsize * (prompt + t) / block
    weights = float(new * itemsize * sizes.num_params)
    want = flops, weights, cache
    assert (found.flops, found.weight_bytes, found.cache_bytes) == pytest.approx(want)
    assert found.equivalent_flops(10.0) == pytest.approx(flops + 10 * cache)
    # Operations and transfers overlap.
    overlapped = max(flops / 3, (weights + cache) / 5)
    assert found.seconds(3.0, 5.0) == pytest.approx(overlapped)
    assert found.seconds(2.0, 1e30) == pytest.approx(flops / 2)
    assert found.seconds(1e30, 2.0) == pytest.approx((weights + cache) / 2)


def test_flops_are_those_of_the_program():
    """A token with a full cache of 64: the program also multiplies what it then masks, and its own token."""
    config = lm_config(
        vocab_size=64,
        num_layers=2,
        embed_dim=32,
        mlp_dim=64,
        num_heads=4,
        num_kv_heads=2,
        tied=True,
    )
    cache = jax.eval_shape(lambda: empty_cache(config, 1, 64))
    program = count_flops(
        lambda params, tokens, cache: extend(params, tokens, cache, config),
        noisy_params(config), jax.ShapeDtypeStruct((1, 1), "int32"), cache,
    )  # fmt: skip
    head_dim = 32 // 4
    cost = decoding_cost(ModelSizes(num_params(config), 2, 4, 2, head_dim), 64, 1)
    assert program.total == pytest.approx(cost.flops, rel=0.02)


def test_negative_tokens_are_refused():
    with pytest.raises(UsageError, match="budget=-1 tokens must be at least 0"):
        tokens_read(1, 2, -1)
