"""Other suites' environments as ours: `reset` and `step` without an auto-reset, hashable by value.

Nothing is imported but what the user's environment has imported already; a suite is told by the methods it has.
"""

import dataclasses
import functools
from collections.abc import Callable, Hashable

import jax
import jax.numpy as jnp
from jax.core import Tracer

from jaxpar.env import _suites
from jaxpar.env._convert import Foreign, fingerprint
from jaxpar.env.capabilities import is_adapter
from jaxpar.env.protocols import Adapter, Environment, Transition
from jaxpar.env.spaces import Space
from jaxpar.types import PRNGKey, PyTree, UsageError

__all__ = ["Adapted", "adapt"]


@dataclasses.dataclass(frozen=True)
class Adapted:
    """A foreign environment for `jaxpar.env.reset` and `step`; made by `adapt`.

    Equal to another made from an equal environment. States and observations of a step have the dtypes of those of a
    reset (the wider of both, where a suite changes them), and no weak types. `action_mask` and `num_agents` are there
    where the suite has them.

    Attributes:
        name: of the environment.
        value: what equality goes by.
        parts: how the suite is read.
    """

    name: str
    value: Hashable = dataclasses.field(repr=False)
    parts: _suites.Parts = dataclasses.field(repr=False, compare=False)

    @property
    def default_params(self) -> PyTree:
        """The parameters that `adapt` was given, or the suite's default; `()` where the suite has none."""
        return self.parts.params

    def observation_space(self, params: PyTree) -> Space:
        """The bounds that the suite tells (for the default parameters, if these are traced), with its real dtypes."""
        obs, _ = jax.eval_shape(self.reset, jax.random.key(0), params)
        with jax.ensure_compile_time_eval():
            return self.parts.observation_space(self._known(params), obs)

    def action_space(self, params: PyTree) -> Space:
        """The space of the actions, of the default parameters if these are traced."""
        with jax.ensure_compile_time_eval():
            return self.parts.action_space(self._known(params))

    def _known(self, params: PyTree) -> PyTree:
        is_traced = any(isinstance(leaf, Tracer) for leaf in jax.tree.leaves(params))
        return self.default_params if is_traced else params

    def reset(self, key: PRNGKey, params: PyTree) -> tuple[PyTree, PyTree]:
        """Begins an episode: `(obs, state)`; consumes `key`."""
        obs, state = self.parts.reset(key, params)
        types = _settled(self, *_abstract(params))
        return _cast(obs, types[0]), _cast(state, types[1])

    def step(self, key: PRNGKey, state: PyTree, action: PyTree, params: PyTree) -> Transition:
        """One step without a reset, `obs` being the last of an episode that ends; consumes `key`."""
        obs, state, reward, terminated, truncated, info = self.parts.step(
            key, state, action, params
        )
        types = _settled(self, *_abstract(params))
        return Transition(
            _cast(obs, types[0]),
            _cast(state, types[1]),
            jnp.asarray(reward, jnp.float32),
            jnp.asarray(terminated, bool),
            jnp.asarray(truncated, bool),
            {str(name): jax.tree.map(jnp.asarray, value) for name, value in info.items()},
        )

    def __getattr__(self, name: str) -> object:
        optional = self.__dict__["parts"].optional if "parts" in self.__dict__ else {}
        if name in optional:
            return optional[name]
        raise AttributeError(f"{type(self).__name__} has no {name!r}")


def adapt(env: Foreign, params: PyTree = None) -> Environment | Adapter:
    """A foreign environment for our rollouts and learners; one of ours comes back as it is.

    gymnax 1.0 and all that keeps to gymnax's older five values (told apart by abstract evaluation), JaxMARL, Jumanji,
    XLand-MiniGrid, Navix, pgx, and Brax with its likes. Auto-resets are bypassed, so the last observation of an episode
    is kept; whatever else a suite does not tell, its function in `jaxpar/env/_suites.py` says.

    Args:
        env: their environment, without wrappers that reset it.
        params: what `default_params` shall be; the suite's own if None.

    Raises:
        UsageError: the environment is of no known kind, or a wrapper hides it or resets it.
    """
    if isinstance(env, Adapted) or not is_adapter(env):
        return env
    kind = type(env)
    if hasattr(env, "step_env") and not hasattr(kind, "step_env"):
        raise UsageError(
            f"{kind.__name__} hides an environment that resets itself; adapt the one inside it"
        )
    if "AutoReset" in kind.__name__ and not hasattr(kind, "step_env"):
        raise UsageError(
            f"{kind.__name__} resets by itself, so last observations are lost; adapt the one inside it"
        )
    suite = _suite_of(env)
    parts = suite(env, params)
    name = getattr(env, "name", None)
    name = name if isinstance(name, str) else kind.__name__
    return Adapted(name, (suite.__name__, fingerprint(env), fingerprint(params)), parts)


def _suite_of(env: Foreign) -> Callable[[Foreign, PyTree], _suites.Parts]:
    """The suite whose methods `env` has."""
    if hasattr(env, "step_env"):
        return _suites.jaxmarl if hasattr(env, "agents") else _suites.gymnax
    marks = {
        "observation_spec": _suites.jumanji,
        "_generate_problem": _suites.xminigrid,
        "observation_fn": _suites.navix,
        "num_players": _suites.pgx,
        "observation_size": _suites.brax,
    }
    for mark, suite in marks.items():
        if hasattr(env, mark):
            return suite
    raise UsageError(
        f"{type(env).__name__} is no environment of ours (it has no `transition`), nor of gymnax, Craftax, POPGym "
        f"Arcade, JaxMARL, Jumanji, XLand-MiniGrid, Navix, pgx or Brax"
    )


def _abstract(params: PyTree) -> tuple[PyTree, tuple]:
    leaves, structure = jax.tree.flatten(params)
    kinds = (jax.typeof(leaf) for leaf in leaves)
    return structure, tuple(
        jax.ShapeDtypeStruct(kind.shape, kind.dtype, weak_type=kind.weak_type) for kind in kinds
    )


@functools.lru_cache(maxsize=256)
def _settled(env: Adapted, structure: PyTree, leaves: tuple) -> tuple[PyTree, PyTree]:
    """The types of observation and state, wide enough for both a reset and a step."""
    params, key = jax.tree.unflatten(structure, leaves), jax.random.key(0)
    first = jax.eval_shape(env.parts.reset, key, params)

    def after(state, params):
        action = env.action_space(params).sample(key)
        return env.parts.step(key, state, action, params)[:2]

    made = jax.eval_shape(after, first[1], params)
    if jax.tree.structure(first) != jax.tree.structure(made):
        raise UsageError(f"{env.name} changes the structure of its state or observation in a step")
    return jax.tree.map(_wider, first, made)


def _wider(first: jax.ShapeDtypeStruct, second: jax.ShapeDtypeStruct) -> jax.ShapeDtypeStruct:
    dtype = (
        first.dtype if first.dtype == second.dtype else jnp.promote_types(first.dtype, second.dtype)
    )
    return jax.ShapeDtypeStruct(first.shape, dtype)


def _cast(tree: PyTree, types: PyTree) -> PyTree:
    """`tree` with the dtypes of `types` and no weak types."""

    def settle(x, kind):
        x = jnp.asarray(x)
        return (
            x
            if x.dtype == kind.dtype and not jax.typeof(x).weak_type
            else jnp.asarray(x, kind.dtype)
        )

    return jax.tree.map(settle, tree, types)
