"""Random numbers of environments: independent of the others, never repeated, uniform, in both families of keys."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from scipy import stats

from jaxpar.rollout.prng import PRNGS, env_keys, first_key, step_keys

KEY = jax.random.key(11)
T, B = 40, 500
each_prng = pytest.mark.parametrize("prng", PRNGS)


def drawn(prng, fn, steps=T, env_state=B):
    """`fn` of the first key of every step and environment, `[T, B, ...]`."""
    bases = step_keys(KEY, jnp.arange(steps), 2, prng)
    return jax.jit(jax.vmap(lambda base: jax.vmap(fn)(env_keys(base[0], jnp.arange(env_state)))))(
        bases
    )


def child(key):
    """A number from keys as environments make them: split, folded, split again."""
    first, second = jax.random.split(key)
    third = jax.random.fold_in(jax.random.split(second, 3)[1], 5)
    return jnp.stack([jax.random.uniform(k) for k in (key, first, second, third)])


@each_prng
def test_uniform_over_environments_time_and_kin(prng):
    x = np.asarray(drawn(prng, child))
    for one in (
        x.ravel(),
        *x.reshape(-1, 4).T,
        *x[:3].reshape(3, -1),
        *x[:, :3].transpose(1, 0, 2).reshape(3, -1),
    ):
        assert stats.kstest(one, "uniform").pvalue > 1e-4
    assert (
        len(np.unique(x)) > 0.99 * x.size
    )  # float32 has 2^23 values, of which 80,000 draws coincide in 0.5 %


@each_prng
def test_bits_are_even_and_unrelated(prng):
    bits = np.asarray(drawn(prng, lambda key: jax.random.bits(key, (3,)), 200, 50))
    flips = np.unpackbits(bits.view(np.uint8)).reshape(-1, 32)
    excess = (flips.sum(0) - len(flips) / 2) ** 2 / (len(flips) / 4)
    assert stats.chi2.sf(excess.sum(), 32) > 1e-4
    counts = np.bincount(bits.ravel() >> 24, minlength=256)
    assert stats.chisquare(counts).pvalue > 1e-4
    x = bits / 2.0**32 - 0.5
    pairs = {
        "neighbouring environments": (x[:, 1:], x[:, :-1]),
        "following steps": (x[1:], x[:-1]),
        "numbers of a draw": (x[..., 1:], x[..., :-1]),
        "distant environments": (x[:, 32:], x[:, :-32]),
    }
    for name, (a, b) in pairs.items():
        correlation = np.mean(a * b) * 12
        assert abs(correlation) < 4.5 / np.sqrt(a.size), name


@pytest.mark.slow
@each_prng
def test_families_have_the_distributions_of_jax(prng):
    steps, env_state = 10, 1000
    action = np.asarray(
        drawn(prng, lambda key: jax.random.randint(key, (), 0, 5), steps, env_state)
    )
    assert stats.chisquare(np.bincount(action.ravel(), minlength=5)).pvalue > 1e-4
    assert (
        stats.kstest(np.ravel(drawn(prng, jax.random.normal, steps, env_state)), "norm").pvalue
        > 1e-4
    )
    order = np.asarray(
        drawn(prng, lambda key: jax.random.permutation(key, 3), steps, env_state)
    ).reshape(-1, 3)
    assert stats.chisquare(np.unique(order @ [9, 3, 1], return_counts=True)[1]).pvalue > 1e-4


@each_prng
def test_a_environments_numbers_do_not_depend_on_its_company(prng):
    base = step_keys(KEY, jnp.arange(3), 2, prng)[1, 0]
    together = jax.vmap(child)(env_keys(base, jnp.arange(40)))
    few = jax.vmap(child)(env_keys(base, jnp.array([17, 3])))
    np.testing.assert_array_equal(together[jnp.array([17, 3])], few)


@each_prng
def test_loops_that_run_on_for_other_environments_repeat_nothing(prng):
    """Each environment draws until a number is small; batched, the loop goes on for the last one."""

    def trials(key):
        def body(c):
            key, count, _ = c
            key, mine = jax.random.split(key)
            return key, count + 1, jax.random.uniform(mine)

        return jax.lax.while_loop(lambda c: c[2] > 0.2, body, (key, 0, 1.0))[1:]

    base = step_keys(KEY, jnp.arange(1), 1, prng)[0, 0]
    counts, last = jax.vmap(trials)(env_keys(base, jnp.arange(3000)))
    alone = jax.jit(trials)(env_keys(base, jnp.array([7]))[0])
    assert (counts[7], last[7]) == alone
    assert abs(counts.mean() - 5) < 4 * np.sqrt(20 / 3000)
    assert stats.kstest(np.asarray(last) / 0.2, "uniform").pvalue > 1e-4


@pytest.mark.slow
@each_prng
def test_words_of_every_width(prng, x64):
    for width in (8, 16, 32, 64):
        bits = drawn(
            prng, lambda key, width=width: jax.random.bits(key, (4,), f"uint{width}"), 5, 200
        )
        assert bits.dtype == f"uint{width}"
        top = np.asarray(bits >> (width - 4)).ravel()
        assert stats.chisquare(np.bincount(top.astype(int), minlength=16)).pvalue > 1e-4


def test_children_of_environment_keys_never_coincide():
    key = env_keys(first_key(KEY, "batch"), jnp.arange(2))[1]
    children = jax.random.key_data(jax.random.split(key, 200_000))
    assert len(np.unique(np.asarray(children), axis=0)) == 200_000
    assert (children[:, 2] == 1).all()
    grand = jax.random.key_data(
        jax.vmap(lambda k: jax.random.split(k, 300))(jax.random.split(key, 300))
    ).reshape(-1, 3)
    assert len(np.unique(np.asarray(grand), axis=0)) == len(grand)


def test_steps_uses_and_beginnings_have_keys_of_their_own():
    for prng in PRNGS:
        keys = jax.random.key_data(step_keys(KEY, jnp.arange(50), 3, prng)).reshape(150, -1)
        first = jax.random.key_data(
            jnp.stack([first_key(KEY, prng), first_key(KEY, prng, of_pool=True)])
        )
        assert len(np.unique(np.concatenate([keys, first]), axis=0)) == 152
