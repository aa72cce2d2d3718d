"""Proof that a model keeps its promises: what planners and filters take for granted."""

import dataclasses
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np

from jaxpar.env import Environment, capabilities, check_environment
from jaxpar.env.check import Report
from jaxpar.pomdp.tabular import TabularPomdp, from_environment
from jaxpar.types import Array, PRNGKey, PyTree, UsageError

__all__ = ["check_model", "check_tabular"]

MAX_PAIRS = 256


def check_model(
    env: Environment | TabularPomdp,
    params: PyTree = None,
    *,
    key: PRNGKey | None = None,
    num_samples: int = 4096,
) -> Report:
    """Checks a model for planning: an environment with its optional parts, or a `TabularPomdp`.

    All of `jaxpar.env.check_environment` (types, spaces, masks; the likelihoods of discrete observations sum to one and
    agree with draws; terminal states absorb where that is claimed), and, where the model is finite, `check_tabular`.

    Args:
        env: the environment, or a `TabularPomdp`.
        params: its parameters; the default ones if None.
        key: consumed; `jax.random.key(0)` if None.
        num_samples: draws for each row of probabilities.

    Returns:
        What was checked; `checks` has "tabular" where arrays were compared with draws.

    Raises:
        UsageError: the first promise that is broken.
    """
    if isinstance(env, TabularPomdp):
        env, params = env.environment, env
    params = env.default_params if params is None else params
    check_key, tabular_key = jax.random.split(jax.random.key(0) if key is None else key)
    report = check_environment(env, params, key=check_key, num_samples=num_samples)
    if capabilities(env).tabular is not None and check_tabular(
        tabular_key, env, params, num_samples=num_samples
    ):
        report = dataclasses.replace(report, checks=(*report.checks, "tabular"))
    return report


def check_tabular(
    key: PRNGKey, env: Environment, params: PyTree, *, num_samples: int = 4096, max_z: float = 5.0
) -> bool:
    """The arrays of `tabular(params)` against draws of the parts; consumes `key`.

    Rows sum to one; `init`, `transition` and `observe` draw with the frequencies of their rows, by the bound of
    `jaxpar.env.check.check_likelihood`; rewards, terminal states and likelihoods equal their entries. At most 256 pairs
    of action and state are drawn from. For states that are one integer, which is then the index in the arrays; returns
    False, unchecked, for others.

    Raises:
        UsageError: the first disagreement, by name.
    """
    model = from_environment(env, params)
    shape = jax.eval_shape(env.init, key, params)
    leaves, tree = jax.tree.flatten(shape)
    if (
        len(leaves) != 1
        or leaves[0].shape != ()
        or not jnp.issubdtype(leaves[0].dtype, jnp.integer)
    ):
        return False

    def state_of(index):
        return jax.tree.unflatten(tree, [index.astype(leaves[0].dtype)])

    def index_of(state):
        return jax.tree.leaves(state)[0]

    pairs = np.argwhere(np.ones((len(model.actions), len(model.states)), bool))
    init_key, choice_key, transition_key, observe_key = jax.random.split(key, 4)
    if len(pairs) > MAX_PAIRS:
        pairs = pairs[
            np.asarray(jax.random.choice(choice_key, len(pairs), (MAX_PAIRS,), replace=False))
        ]

    @jax.vmap
    def of_pair(keys, pair):
        action, state = pair[0], state_of(pair[1])
        go, look = (jax.random.split(key, num_samples) for key in keys)
        following = jax.vmap(lambda key: index_of(env.transition(key, state, action, params)))(go)
        # The second index is that of the next state for what is seen.
        seen = jax.vmap(lambda key: env.observe(key, state, action, params))(look)
        rewards = jax.vmap(lambda s: env.reward(state, action, state_of(s), params))(
            jnp.arange(len(model.states))
        )
        counts = (
            jnp.bincount(following, length=len(model.states)),
            jnp.bincount(seen, length=len(model.observations)),
        )
        return (*counts, rewards)

    keys = jax.random.split(transition_key, (len(pairs), 2))
    nexts, seen, rewards = (
        np.asarray(x) for x in jax.jit(of_pair)(keys, jnp.asarray(pairs, jnp.int32))
    )
    begun = jax.vmap(lambda key: index_of(env.init(key, params)))(
        jax.random.split(init_key, num_samples)
    )
    begun = np.bincount(np.asarray(begun), minlength=len(model.states))
    actions, states = pairs.T
    rows = [f"action {model.actions[a]!r} in state {model.states[s]!r}" for a, s in pairs]
    _frequencies(
        f"{env.name}: a first state", begun[None], np.asarray(model.start)[None], ["init"], max_z
    )
    _frequencies(
        f"{env.name}: a next state",
        nexts,
        np.asarray(model.transition)[actions, states],
        rows,
        max_z,
    )
    into = [f"action {model.actions[a]!r} into state {model.states[s]!r}" for a, s in pairs]
    _frequencies(
        f"{env.name}: an observation",
        seen,
        np.asarray(model.observation)[actions, states],
        into,
        max_z,
    )
    _rewards(env, model, rewards, actions, states, rows)
    _ends(env, model, params, state_of)
    return True


def _frequencies(
    what: str, counts: np.ndarray, p: np.ndarray, rows: list[str], max_z: float
) -> None:
    n = counts.sum(-1, keepdims=True)
    bound = max_z * np.sqrt(np.maximum(n * p * (1 - p), 0) + max_z**2 / 36) + max_z**2 / 6
    wrong = np.abs(counts - n * p) > np.where(p == 0, 0, bound)
    if wrong.any():
        row, which = np.argwhere(wrong)[0]
        raise UsageError(
            f"{what}, number {which}, came {counts[row, which]} times in {n[row, 0]} draws after {rows[row]}, but its "
            f"probability in tabular(params) is {p[row, which]:.4g}"
        )


def _rewards(
    env: Environment,
    model: TabularPomdp,
    rewards: np.ndarray,
    actions: np.ndarray,
    states: np.ndarray,
    rows: list[str],
) -> None:
    """Rewards of possible transitions, or their means where the arrays have those."""
    possible, wanted = (
        np.asarray(model.transition)[actions, states],
        np.asarray(model.reward)[actions, states],
    )
    if wanted.ndim == 1:
        rewards = np.where(possible > 0, possible * rewards, 0).sum(-1)[:, None]
        possible, wanted = np.ones((len(rows), 1)), wanted[:, None]
    is_near = np.abs(rewards - wanted) <= 1e-4 * (1 + np.abs(wanted))  # false of NaN
    wrong = (possible > 0) & ~is_near
    if wrong.any():
        row, which = np.argwhere(wrong)[0]
        raise UsageError(
            f"{env.name}: the reward of {rows[row]} is {rewards[row, which]:g}, but {wanted[row, which]:g} in "
            f"tabular(params)"
        )


def _ends(
    env: Environment, model: TabularPomdp, params: PyTree, state_of: Callable[[Array], PyTree]
) -> None:
    ended = np.asarray(
        jax.vmap(lambda s: env.terminal(state_of(s), params))(jnp.arange(len(model.states)))
    )
    if (wrong := ended & ~np.asarray(model.terminal)).any():
        state = model.states[int(np.argmax(wrong))]
        raise UsageError(
            f"{env.name}: state {state!r} is terminal, but in tabular(params) it does not absorb at no reward"
        )
