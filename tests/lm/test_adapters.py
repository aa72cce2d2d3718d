"""Adapters beside a frozen base: what is trained, that it is the adapted model's own gradient, merging, fusing."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tiny
from fast import jit
from lm_configs import with_fields
from tolerance import LAYOUT, assert_close

from jaxpar.lm import (
    AdapterConfig,
    OptimizerConfig,
    Trainer,
    fuse_adapters,
    loss,
    merge_adapters,
    num_adapted,
    with_adapters,
)
from jaxpar.lm.adapters import begin_adapters, frozen
from jaxpar.mesh import MeshSpec, make_mesh, shard, use_mesh
from jaxpar.nn.linear import Lora
from jaxpar.types import UsageError

MODEL = tiny.LLAMA
WIDE = tiny.exact(MODEL)
LORA = AdapterConfig("lora", target=("w[qo]", "w_*"), rank=3, alpha=6.0)
OPTIMIZER = OptimizerConfig(warmup_steps=1, learning_rate=1e-2, eps=1e-6)
BATCH = tiny.batch_of(batch=4)
PACKED = BATCH | {
    "segments": np.repeat([[0, 0, 0, 1, 1, 2, 2, 2]], 4, 0).astype(np.int32),
    "positions": np.repeat([[0, 1, 2, 0, 1, 0, 1, 2]], 4, 0).astype(np.int32),
    "weights": np.repeat([[1, 1, 0, 1, 0, 1, 1, 0]], 4, 0).astype(np.float32),
}


def noisy(tree, seed=1, std=0.3):
    rng = np.random.default_rng(seed)
    return jax.tree.map(
        lambda x: x + jnp.asarray(std * rng.standard_normal(x.shape), x.dtype), tree
    )


def adapters_of(model=MODEL, adapter=LORA):
    base = frozen(tiny.params_of(model), model, adapter.base)
    return base, noisy(begin_adapters(jax.random.key(0), base, model, adapter))


def logits(params):
    return tiny.logits(params, tiny.tokens(), MODEL)


@pytest.mark.parametrize("rank", [0, 3])
def test_a_change_of_rank_0_or_of_zeros_is_none_to_the_bit(rank):
    adapter, params = dataclasses.replace(LORA, rank=rank), tiny.params_of(MODEL)
    adapters = begin_adapters(jax.random.key(0), params, MODEL, adapter)
    np.testing.assert_array_equal(
        logits(with_adapters(params, adapters, adapter.scale)), logits(params)
    )


@pytest.mark.parametrize(
    "changes",
    [
        {"dora": True, "base": "int8"},
        {"rslora": True},
        pytest.param({"base": "nf4"}, marks=pytest.mark.slow),
    ],  # 2 s
)
def test_merged_is_kept(changes):
    adapter = with_fields(LORA, **changes)
    base, adapters = adapters_of(adapter=adapter)
    kept = with_adapters(base, adapters, adapter.scale)
    merged = merge_adapters(kept)
    assert all(isinstance(leaf, jax.Array) for leaf in jax.tree.leaves(merged))
    assert jax.tree.structure(merged) == jax.tree.structure(tiny.params_of(MODEL))
    assert_close(logits(kept), logits(merged), 1e-6)


def test_the_scale_is_that_of_the_papers():
    assert LORA.scale == 2.0 and dataclasses.replace(LORA, rslora=True, rank=4).scale == 3.0


@pytest.mark.parametrize("base", [pytest.param("full", marks=pytest.mark.slow), "nf4"])  # 3 s
def test_gradients_are_those_of_the_merged_weights_by_the_chain_rule(base, x64):
    """dA = s dW' B^T and dB = s A^T dW', of packed rows with weights; dW' is the plain model's."""
    adapter = dataclasses.replace(LORA, base=base)
    base, adapters = adapters_of(WIDE, adapter)

    def adapted(adapters):
        return loss(with_adapters(base, adapters, adapter.scale), PACKED, WIDE)

    value, grads = jit(jax.value_and_grad(adapted))(adapters)
    merged = merge_adapters(with_adapters(base, adapters, adapter.scale))
    want, whole = tiny.loss_and_gradient(merged, PACKED, WIDE)
    np.testing.assert_allclose(value, want, rtol=1e-12)
    assert set(adapters["layers"]) == {"wq", "wo", "w_gate", "w_up", "w_down"}
    for name, own in adapters["layers"].items():
        a, b = (np.asarray(own[part]) for part in ("down", "up"))
        flat = np.asarray(whole["layers"][name]).reshape(2, np.prod(a.shape[1:-1]), -1)
        a, b = a.reshape(2, -1, 3), b.reshape(2, 3, -1)
        for part, theirs in (("down", 2 * flat @ b.mT), ("up", 2 * a.mT @ flat)):
            ours = np.asarray(grads["layers"][name][part])
            np.testing.assert_allclose(ours.reshape(theirs.shape), theirs, rtol=1e-9, atol=1e-12)


def trained(trainer, steps=2, spec=None, batch=BATCH):
    def run():
        state = trainer.begin(tiny.params_of(trainer.model), jax.random.key(1))
        state = state.replace(adapters=noisy(state.adapters))
        if spec is not None:
            state = shard(state, trainer.axes())
        step = jit(trainer.step)
        for number in range(steps):
            state, info = step(jax.random.key(number), state, batch)
        return jax.device_get((state, info))

    if spec is None:
        return run()
    with use_mesh(make_mesh(spec)):
        return run()


PLAIN = Trainer(MODEL, OPTIMIZER, adapter=LORA)


@pytest.fixture(scope="module")
def plain():
    return trained(PLAIN)


def test_only_adapters_are_trained_and_have_moments(plain):
    state, info = plain
    began = PLAIN.begin(tiny.params_of(MODEL), jax.random.key(1))
    jax.tree.map(np.testing.assert_array_equal, state.base, jax.device_get(began.base))
    moved = jax.tree.map(
        lambda new, old: np.abs(new - old).min() > 0,
        state.adapters,
        jax.device_get(noisy(began.adapters)),
    )
    assert all(jax.tree.leaves(moved)) and info["skipped"] == 0 and state.step == 2
    count = sum(leaf.size for leaf in jax.tree.leaves(state.adapters))
    assert count == num_adapted(MODEL, LORA)
    moments = [leaf for leaf in jax.tree.leaves(state.opt_state) if leaf.ndim]
    assert sum(leaf.size for leaf in moments) == 2 * count and all(leaf.any() for leaf in moments)
    assert isinstance(state.params["layers"]["wq"], Lora) and isinstance(
        state.params["layers"]["wk"].weight, np.ndarray
    )


@pytest.mark.parametrize("base", ["full", pytest.param("int8", marks=pytest.mark.slow),  # 8 s each
                                  pytest.param("nf4", marks=pytest.mark.slow)])  # fmt: skip
def test_a_mesh_trains_the_same(base, plain):
    # Of nf4 the mesh splits whole blocks, of 64 numbers.
    model = with_fields(MODEL, embed_dim=128, mlp_dim=128, head_dim=4) if base == "nf4" else MODEL
    trainer = dataclasses.replace(
        PLAIN, model=model, adapter=dataclasses.replace(LORA, base=base, dora=base == "int8")
    )
    want = plain if base == "full" else trained(trainer)
    got = trained(trainer, spec=MeshSpec(data=2, fsdp=2, tensor=2))
    assert_close((got[0].adapters, got[1]), (want[0].adapters, want[1]), LAYOUT["float32"])


@pytest.mark.slow  # 6 s each
@pytest.mark.parametrize(
    "changes",
    [{"remat": "full"}, {"scan_layers": False}, {"remat": "blockwise"}, {"remat": "dots"}],
)
def test_what_is_recomputed_changes_nothing(changes, plain):
    got = trained(dataclasses.replace(PLAIN, model=with_fields(MODEL, **changes)))
    assert_close((got[0].adapters, got[1]), (plain[0].adapters, plain[1]), LAYOUT["float32"])


@pytest.mark.slow  # 8 s
def test_blocks_of_tokens_on_a_mesh(plain):
    trainer = dataclasses.replace(PLAIN, model=with_fields(MODEL, remat="blockwise"))
    got = trained(trainer, spec=MeshSpec(data=2, fsdp=2, tensor=2))
    assert_close((got[0].adapters, got[1]), (plain[0].adapters, plain[1]), LAYOUT["float32"])


@pytest.mark.slow  # 5 s
def test_parts_are_the_whole_batch(plain):
    got = trained(dataclasses.replace(PLAIN, accumulate=2))
    assert_close(got[0].adapters, plain[0].adapters, LAYOUT["float32"])


def test_dropout_follows_the_key_and_what_is_recomputed():
    adapter = dataclasses.replace(LORA, dropout=0.5)
    base, adapters = adapters_of(adapter=adapter)

    def value(model, key):
        def one(key):
            return loss(with_adapters(base, adapters, adapter.scale, 0.5, key), BATCH, model)

        return float(jit(one)(jax.random.key(key)))

    first = value(MODEL, 0)
    assert value(with_fields(MODEL, remat="full", scan_layers=False), 0) == pytest.approx(
        first, rel=1e-6
    )
    assert value(MODEL, 1) != first
    kept = with_adapters(base, adapters, adapter.scale, 0.5)
    assert float(tiny.loss_of(kept, BATCH, MODEL)) != first


@pytest.mark.parametrize(
    "make, sentence",
    [
        (lambda: AdapterConfig(rank=-1), "adapter.rank=-1"),
        (lambda: dataclasses.replace(PLAIN, adapter=AdapterConfig("lora", rank=0)), "has nothing to train"),
        (lambda: dataclasses.replace(PLAIN, adapter=AdapterConfig("lora", ("q_proj",))),
         "adapter.target=q_proj matches no product of the layers; legal are patterns of .*w_up"),
        (lambda: dataclasses.replace(PLAIN, model=with_fields(MODEL, tied=True),
                                     adapter=AdapterConfig("lora", ("embedding",))), "of the layers, and tied"),
        (lambda: dataclasses.replace(PLAIN, adapter=dataclasses.replace(LORA, dropout=0.1),
                                     model=with_fields(MODEL, remat="blockwise")), "drop alike in all blocks"),
        (lambda: dataclasses.replace(PLAIN, optimizer=OptimizerConfig(name="muon")), "muon is not for adapters"),
        (lambda: dataclasses.replace(PLAIN, model=dataclasses.replace(MODEL, weights="ternary")), "has no adapters"),
        (lambda: fuse_adapters({}, [{}], 1.0, jnp.ones(1), 0.0), "top_p=0.0 is none"),
        (lambda: fuse_adapters({}, [{}], 1.0, jnp.ones(2)), "1 adapters of 1 structures have 2 shares"),
    ],
)  # fmt: skip
def test_what_there_is_no_adapter_for_is_refused(make, sentence):
    with pytest.raises(UsageError, match=sentence):
        make()


# ---------------------------------------------------------------- several adapters, by sentence


def test_several_adapters_are_fused_as_a_classifier_of_sentences_says():
    """Three kinds of strings, each with an adapter; a linear classifier of the mean embedding weighs them."""
    params = tiny.params_of(MODEL)
    every = [noisy(begin_adapters(jax.random.key(n), params, MODEL, LORA), n) for n in range(3)]
    rng = np.random.default_rng(0)
    kinds = np.repeat(np.arange(3), 40)
    sentences = 5 * kinds[:, None] + rng.integers(
        0, 7, (120, 8)
    )  # symbols overlap between neighbours
    features = np.asarray(params["embedding"])[sentences % 16].mean(1)
    features = np.concatenate([features, np.ones((120, 1))], 1)
    even, odd = slice(0, None, 2), slice(1, None, 2)
    weights = np.linalg.lstsq(features[even], 8 * np.eye(3)[kinds[even]], rcond=None)[0]
    assert ((features[odd] @ weights).argmax(1) == kinds[odd]).mean() >= 0.9

    shares = np.array([0.2, 0.5, 0.3])
    for top_p, want in (
        (1.0, shares),
        (0.75, np.array([0, 0.625, 0.375])),
        (0.5, np.array([0, 1.0, 0])),
    ):
        got = merge_adapters(
            fuse_adapters(params, every, LORA.scale, jnp.asarray(shares, jnp.float32), top_p)
        )
        merged = [merge_adapters(with_adapters(params, one, LORA.scale)) for one in every]
        mean = jax.tree.map(
            lambda *w, p=want: sum(p * x for p, x in zip(p, w, strict=True)), *merged
        )
        assert_close(got, mean, 1e-5)
    fused = fuse_adapters(
        params, every, LORA.scale, jax.nn.softmax(jnp.asarray(features[60] @ weights)), 0.9
    )
    assert fused["layers"]["wq"].down.shape[-1] == 9
    assert_close(logits(fused), logits(merge_adapters(fused)), 1e-5)
