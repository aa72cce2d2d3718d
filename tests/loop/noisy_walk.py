"""A noisy walk as an algorithm, its plain loop, and a writer that keeps its rows.

All its numbers are multiples of 2^-8 under 4, and those of its losses of 2^-19: no operation
rounds, so that equal bits are asked of the drivers and not of how a compiler fuses a program of
another length.
"""

import dataclasses
import functools

import flax.struct
import jax
import jax.numpy as jnp
import numpy as np

from jaxpar.loop import run

KEY = jax.random.key(7)
SIZE = 8


@flax.struct.dataclass
class State:
    position: jax.Array
    count: jax.Array
    memory: jax.Array  # a typed key, which every driver and checkpoint has to carry


def on_grid(x):
    return jnp.round(256 * x) / 256


@dataclasses.dataclass(frozen=True)
class Walk:
    """A noisy tent map; done when it has made `patience` steps."""

    patience: int = 5

    def init(self, key, inputs=None):
        return State(on_grid(jax.random.uniform(key, (SIZE,))), jnp.int32(0), key)

    def step(self, key, state, inputs):
        noise = jax.random.uniform(key, (SIZE,))
        position = (
            1 - jnp.abs(state.position) + on_grid(noise) + (0.0 if inputs is None else inputs)
        )
        info = {"loss": jnp.mean(position**2), "draw": noise[0]}
        return State(position, state.count + 1, jax.random.fold_in(state.memory, 1)), info

    def done(self, state):
        return state.count >= self.patience


WALK = Walk()


def batch(step):
    return on_grid(jnp.cos(step + jnp.arange(SIZE, dtype=jnp.float32)))


def first():
    return WALK.init(jax.random.fold_in(KEY, 2**32 - 1))


def python_loop(num_steps, state):
    infos = []
    for step in range(num_steps):
        state, info = WALK.step(jax.random.fold_in(KEY, step), state, batch(step))
        infos.append(info)
    return state, infos


def stacked(num_steps, start=0):
    return jnp.stack([batch(step) for step in range(start, start + num_steps)])


@functools.cache
def whole(num_steps):
    return jax.jit(run, static_argnums=(0, 4))(WALK, KEY, first(), stacked(num_steps), num_steps)


def assert_same_bits(got, want):
    def words(x):
        return jax.random.key_data(x) if jnp.issubdtype(x.dtype, jax.dtypes.prng_key) else x

    jax.tree.map(lambda a, b: np.testing.assert_array_equal(words(a), words(b)), got, want)


class Recorder:
    """A writer that keeps its rows, and appends to a common log."""

    def __init__(self, log=None):
        self.rows, self.log = [], [] if log is None else log

    def write(self, step, values):
        self.rows.append((step, dict(values)))
        self.log.append(f"write {step}")

    def column(self, name):
        return {step: values[name] for step, values in self.rows if name in values}
