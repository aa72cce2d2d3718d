"""What decisions lose, exactly, in models that are small enough to be solved."""

from typing import Any

import jax
import numpy as np

from jaxpar.env import capabilities
from jaxpar.pomdp import from_environment, solve_exact
from jaxpar.types import PyTree, UsageError

__all__ = ["Judge"]

MOST_STATES = 64


class Judge:
    """Values of beliefs and actions by the alpha vectors of `solve_exact`, of an environment with `tabular`.

    By the performance difference lemma the sum of discounted regrets `V(b) - Q(b, a)` along a policy's own episodes has
    the mean of what it returns less than the best policy, with a far smaller spread than the returns.

    Attributes:
        value: of the best policy at the start, over an infinite horizon.

    Raises:
        UsageError: the environment has no `tabular`, or more than 64 states.
    """

    def __init__(self, env: Any, params: PyTree):
        if capabilities(env).tabular is None:
            raise UsageError(
                f"judge=true needs arrays to solve, and {env.name} has no tabular(params)."
            )
        model = from_environment(env, params)
        if len(model.states) > MOST_STATES:
            raise UsageError(
                f"judge=true solves models of at most {MOST_STATES} states, and {env.name} has {len(model.states)}."
            )
        exact = solve_exact(model, tol=1e-3)
        arrays = (
            model.transition,
            model.observation,
            model.expected_reward,
            model.start,
            exact.alphas,
        )
        self.transition, self.observation, self.reward, self.start, self.alphas = jax.tree.map(
            lambda x: np.asarray(x, np.float64), arrays
        )
        self.discount, self.value = float(model.discount), float(exact.value)

    def losses(self, actions: np.ndarray, obs: np.ndarray, live: np.ndarray) -> np.ndarray:
        """Sums of discounted regrets, float64 `[E]`, of integer actions and observations `[E, T]` while `live`."""
        episodes = np.arange(len(actions))
        beliefs, total = np.tile(self.start, (len(actions), 1)), np.zeros(len(actions))
        for t in range(actions.shape[1]):
            joint = np.einsum("es,ast,ato->eaot", beliefs, self.transition, self.observation)
            ahead = (joint @ self.alphas.T).max(-1).sum(-1)
            values = beliefs @ self.reward.T + self.discount * ahead
            regret = values.max(1) - values[episodes, actions[:, t]]
            total += np.where(live[:, t], self.discount**t * regret, 0.0)
            mass = joint[episodes, actions[:, t], obs[:, t]]
            chance = mass.sum(1, keepdims=True)
            beliefs = np.where(chance > 0, mass / np.where(chance > 0, chance, 1), beliefs)
        return total
