"""Keys of environments: derived from a step's key and the environment's number, never stored.

There are two families of keys. In either, an environment's random numbers depend on nothing but (root key, step, use,
environment). So they are the same for any number of devices, for environments that are reset together or in chunks, and
inside loops that run on for other environments; and no two environments of a batch share a number, as they could where
a batch has one key and counts its rows.

- "env", the reference: JAX's own keys, one `fold_in` for each environment. Every `split` hashes once for each child.
- "batch": keys of three words, `(step's key, environment)`. Children come from the first two by mixing, so `split`
  costs a few integer operations; bits are Threefry of (step's key) at counters (index, environment): under `vmap` that
  is one call for the whole batch. Equal in distribution, other numbers.

Threefry-2x32 with 20 rounds: Salmon, Moraes, Dror & Shaw, "Parallel random numbers: as easy as 1, 2, 3" (2011).
"""

import math

import jax
import jax.extend.random
import jax.numpy as jnp

from jaxpar.mesh import platform
from jaxpar.types import Array, PRNGKey, UsageError

__all__ = ["ENV_KEYS", "check_prng", "env_keys", "step_keys"]

PRNGS = ("env", "batch")

# Steps count from 0, so these two numbers are free.
_INIT, _POOL = 2**32 - 1, 2**32 - 2


def check_prng(prng: str) -> None:
    """Refuses an unknown family of keys."""
    if prng not in PRNGS:
        raise UsageError(f"prng={prng!r} is unknown; legal are {' and '.join(PRNGS)}.")


def step_keys(key: PRNGKey, steps: Array, num_uses: int, prng: str) -> Array:
    """The keys of steps, `[T, num_uses]`, of the family `prng`; that of step s comes from `fold_in(key, s)`.

    Args:
        key: root key; consumed.
        steps: int32 `[T]`.
        num_uses: keys a step, one for each use.
        prng: "env" or "batch".
    """
    if prng == "env":
        return jax.vmap(lambda s: jax.random.split(jax.random.fold_in(key, s), num_uses))(steps)
    words = jax.vmap(
        lambda s: jax.random.bits(jax.random.fold_in(key, s), (num_uses, 2), jnp.uint32)
    )(steps)
    words = jnp.concatenate([words, jnp.zeros_like(words[..., :1])], -1)
    return jax.random.wrap_key_data(words, impl=ENV_KEYS)


def first_key(key: PRNGKey, prng: str, of_pool: bool = False) -> Array:
    """The key of `init`, or of a pool of states: no step has it."""
    return step_keys(key, jnp.uint32([_POOL if of_pool else _INIT]), 1, prng)[0, 0]


def env_keys(base: PRNGKey, index: Array) -> Array:
    """One key for each environment, `[B]`, from a key of `step_keys` and the environments' numbers, int32 `[B]`."""
    data = jax.random.key_data(base)
    if data.shape == (3,):
        rows = jnp.broadcast_to(data[:2], (*index.shape, 2))
        return jax.random.wrap_key_data(
            jnp.concatenate([rows, index[:, None].astype(jnp.uint32)], 1), impl=ENV_KEYS
        )
    return jax.vmap(jax.random.fold_in, (None, 0))(base, index)


def _mixed(x: Array) -> Array:
    """The finalizer of MurmurHash3: a bijection of 32 bits."""
    x = (x ^ (x >> 16)) * jnp.uint32(0x85EBCA6B)
    x = (x ^ (x >> 13)) * jnp.uint32(0xC2B2AE35)
    return x ^ (x >> 16)


def _child(key: Array, number: Array) -> Array:
    """The child of a key: three Feistel rounds over its two words, so children of one key never coincide."""
    left, right, index = key[0], key[1], key[2]
    left = left ^ _mixed(
        right + jnp.uint32(0x9E3779B9) * (number.astype(jnp.uint32) + jnp.uint32(1))
    )
    right = right ^ _mixed(left + jnp.uint32(0x7F4A7C15))
    left = left ^ _mixed(right + jnp.uint32(0x1CE4E5B9))
    return jnp.stack(
        [left, jnp.broadcast_to(right, left.shape), jnp.broadcast_to(index, left.shape)], -1
    )


def _split(key: Array, shape: tuple[int, ...]) -> Array:
    return _child(key, jax.lax.iota(jnp.uint32, math.prod(shape))).reshape(*shape, 3)


def _threefry(key0: Array, key1: Array, x0: Array, x1: Array) -> tuple[Array, Array]:
    # Written out, so that XLA fuses it with what reads it; on CPU `jax.random` keeps it as a loop of five trips.
    keys = (key0, key1, key0 ^ key1 ^ jnp.uint32(0x1BD11BDA))
    x0, x1 = x0 + key0, x1 + key1
    for group in range(5):
        for turn in ((13, 15, 26, 6), (17, 29, 16, 24))[group % 2]:
            x0 = x0 + x1
            x1 = x0 ^ ((x1 << turn) | (x1 >> (32 - turn)))
        x0, x1 = x0 + keys[(group + 1) % 3], x1 + keys[(group + 2) % 3] + jnp.uint32(group + 1)
    return x0, x1


def _bits(key: Array, width: int, shape: tuple[int, ...]) -> Array:
    size = math.prod(shape)
    if size >= 2**32:
        raise UsageError(
            f"an environment draws {size} numbers at once; prng=batch gives fewer than 2**32, prng=env any."
        )
    high, low = _threefry(
        key[0], key[1], jax.lax.iota(jnp.uint32, size), jnp.broadcast_to(key[2], (size,))
    )
    if width == 64:
        words = (high.astype(jnp.uint64) << 32) | low.astype(jnp.uint64)
    else:
        words = (high ^ low).astype(f"uint{width}")
    words = words.reshape(shape)
    # On CPU every loop that reads the words would hash them anew.
    return jax.lax.optimization_barrier(words) if platform() == "cpu" else words


def _seed(seed: Array) -> Array:
    words = jax.random.key_data(jax.random.key(seed, impl="threefry2x32"))
    return jnp.concatenate([words, jnp.zeros_like(words[:1])])


ENV_KEYS = jax.extend.random.define_prng_impl(
    # Checkpoints hold the tag in the dtype of keys, so it stays as it was first called.
    key_shape=(3,),
    seed=_seed,
    split=_split,
    random_bits=_bits,
    fold_in=_child,  # type: ignore[arg-type]  # JAX makes an array of the number
    name="jaxpar_lanes",
    tag="lanes",
)
"""Keys `(word, word, environment)`, for all of `jax.random` but what is bound to one generator (poisson)."""
