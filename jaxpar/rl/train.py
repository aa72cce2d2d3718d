"""Whole runs: of one learner as a pure function, of many seeds side by side."""

import dataclasses

import jax
import jax.numpy as jnp

from jaxpar.fields import AtLeast, check_fields, field
from jaxpar.loop import run
from jaxpar.rl.learner import Learner
from jaxpar.types import Info, PRNGKey, PyTree

__all__ = ["Seeds", "train"]


def train(learner: Learner, key: PRNGKey, params: PyTree, num_updates: int) -> tuple[PyTree, Info]:
    """A whole run as a pure function: `jit` it, and `vmap` it over keys, or over the environment's parameters.

    The same steps as `jaxpar.loop.fit` makes with this key.

    Args:
        learner: static.
        key: root key: folded with 2^32-1 for the first state, with s for update s.
        params: of the environment; None for the default ones.
        num_updates: static.

    Returns:
        The last state, and every update's info stacked.
    """
    state = learner.init(jax.random.fold_in(key, 2**32 - 1), params)
    each = jax.tree.map(lambda x: jnp.broadcast_to(x, (num_updates, *jnp.shape(x))), params)
    return run(learner, key, state, each, num_updates)


@dataclasses.dataclass(frozen=True)
class Seeds:
    """Many learners that differ in their keys alone, as one `Algorithm`.

    Attributes:
        learner: what each of them is.
        num_seeds: how many.
        params: of the environment in which they begin, where `init` is given none, as `jaxpar.loop.fit` does; None for
            the default ones.
    """

    learner: Learner
    num_seeds: int = field(legal=AtLeast(1))
    params: PyTree = dataclasses.field(default=None, compare=False)

    __post_init__ = check_fields

    def init(self, key: PRNGKey, inputs: PyTree) -> PyTree:
        """The first states, with a leading axis of seeds; consumes `key`."""
        inputs = self.params if inputs is None else inputs
        return jax.vmap(self.learner.init, (0, None))(self._keys(key), inputs)

    def step(self, key: PRNGKey, state: PyTree, inputs: PyTree) -> tuple[PyTree, Info]:
        """Makes a step of each; consumes `key`.

        Returns:
            The states; the mean of each metric over seeds, the least "converged", and each one's return, "seed_00", ...
        """
        state, infos = jax.vmap(self.learner.step, (0, 0, None))(self._keys(key), state, inputs)
        info = {name: jnp.mean(x, 0) for name, x in infos.items()}
        info["converged"] = jnp.min(infos["converged"])
        return state, info | {
            f"seed_{i:02}": infos["return_mean"][i] for i in range(self.num_seeds)
        }

    def axes(self) -> PyTree:
        """Logical axes of the states: those of the learner, seeds in front on every device."""
        one = jax.eval_shape(lambda: self.learner.init(jax.random.key(0), None))
        return jax.tree.map(lambda _, axes: (None, *axes), one, self.learner.axes())

    def _keys(self, key: PRNGKey) -> PRNGKey:
        return jax.vmap(jax.random.fold_in, (None, 0))(key, jnp.arange(self.num_seeds))
