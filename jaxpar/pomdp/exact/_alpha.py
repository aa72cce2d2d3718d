"""Value iteration over sets of alpha vectors, exact up to float64 rounding, on the host.

`V(b) = max_i alpha_i·b` after any number of steps (Sondik). A step backs up every action apart, one observation after
the other with pruning between (incremental pruning: Cassandra, Littman and Zhang, 1997). Pruning with two states is
the upper envelope of lines; with more, vectors that win at sampled beliefs stay at once, and a linear program decides
about the rest. Sets can grow doubly exponentially: this is for small models.
"""

import numpy as np
import scipy  # its parts are loaded when they are first used

from jaxpar.types import UsageError

GAIN = 1e-9
"""How much, relative to the largest entry, a vector must add somewhere in order to stay."""


def backup(
    transition: np.ndarray,
    observation: np.ndarray,
    reward: np.ndarray,
    discount: float,
    alphas: np.ndarray,
    max_vectors: int,
) -> tuple[np.ndarray, np.ndarray]:
    """One exact step.

    Args:
        transition: `[A, S, S]`.
        observation: `[A, S, O]`.
        reward: `[A, S]`.
        discount: gamma.
        alphas: `[N, S]`, the value function of the steps to go after this one.
        max_vectors: the largest set that is still pruned.

    Returns:
        The vectors `[M, S]` and their actions int32 `[M]`.

    Raises:
        UsageError: a set has more than `max_vectors` before it is pruned.
    """
    sets, actions = [], []
    num_observations = observation.shape[-1]
    for action in range(len(transition)):
        made = np.zeros((1, alphas.shape[1]))
        for obs in range(num_observations):
            part = discount * (alphas * observation[action, :, obs]) @ transition[action].T
            part = prune(part + reward[action] / num_observations)
            if len(made) * len(part) > max_vectors:
                raise UsageError(
                    f"exact value iteration would prune {len(made) * len(part)} vectors at once, more than "
                    f"max_vectors = {max_vectors}; use method='points'"
                )
            made = prune((made[:, None] + part[None]).reshape(-1, alphas.shape[1]))
        sets.append(made)
        actions.append(np.full(len(made), action, np.int32))
    everything, actions = np.concatenate(sets), np.concatenate(actions)
    kept = _useful(everything)
    return everything[kept], actions[kept]


def prune(alphas: np.ndarray) -> np.ndarray:
    """The vectors of `[N, S]` that are best for some belief, without repetitions."""
    return alphas[_useful(alphas)]


def _useful(alphas: np.ndarray) -> np.ndarray:
    """Indices of a smallest set with the same maximum."""
    gain = GAIN * max(1.0, np.abs(alphas).max())
    order = np.lexsort(np.round(alphas / gain).T)
    rounded = np.round(alphas[order] / gain)
    order = np.sort(order[np.r_[True, (np.diff(rounded, axis=0) != 0).any(1)]])
    if alphas.shape[1] == 2:
        return order[_envelope(alphas[order])]
    order = order[~_dominated(alphas[order], gain)]
    return order if len(order) == 1 else order[_by_witness(alphas[order], gain)]


def _dominated(alphas: np.ndarray, gain: float) -> np.ndarray:
    """Whether a vector that stays is nowhere worse; of several that are equal the last stays."""
    result = np.zeros(len(alphas), bool)
    for i, alpha in enumerate(alphas):
        over = (alphas >= alpha - gain).all(1) & ~result
        over[i] = False
        result[i] = over.any()
    return result


def _envelope(alphas: np.ndarray) -> np.ndarray:
    """Two states: the lines over p = b(1) that are on top somewhere, from p = 0 to 1."""
    p, chosen = 0.0, []
    slopes = alphas[:, 1] - alphas[:, 0]
    here = int(np.lexsort((-slopes, -alphas[:, 0]))[0])
    while True:
        chosen.append(here)
        steeper = np.flatnonzero(slopes > slopes[here] + 1e-15)
        if len(steeper) == 0:
            return np.asarray(chosen)
        crossing = (alphas[here, 0] - alphas[steeper, 0]) / (slopes[steeper] - slopes[here])
        first = crossing.min()
        if first >= 1:
            return np.asarray(chosen)
        ties = steeper[crossing <= first + 1e-15]
        p, here = max(p, first), int(ties[np.argmax(slopes[ties])])


def _by_witness(alphas: np.ndarray, gain: float) -> np.ndarray:
    """Any number of states: winners at sampled beliefs, then Lark's linear programs for the others."""
    num_states = alphas.shape[1]
    beliefs = np.random.default_rng(0).dirichlet(np.full(num_states, 0.5), 64 * num_states)
    beliefs = np.concatenate(
        [np.eye(num_states), np.full((1, num_states), 1 / num_states), beliefs]
    )
    kept = list(np.unique(np.argmax(beliefs @ alphas.T, axis=1)))
    left = [i for i in range(len(alphas)) if i not in kept]
    while left:
        belief, excess = _witness(alphas[left[-1]], alphas[kept])
        if excess <= gain:
            left.pop()
            continue
        best = left[int(np.argmax(alphas[left] @ belief))]
        kept.append(best)
        left.remove(best)
    return np.asarray(sorted(kept))


def _witness(alpha: np.ndarray, others: np.ndarray) -> tuple[np.ndarray, float]:
    """The belief where `alpha` is farthest above all of `others`, and by how much."""
    num_states = len(alpha)
    found = scipy.optimize.linprog(
        np.r_[np.zeros(num_states), -1.0],
        A_ub=np.c_[others - alpha, np.ones(len(others))],
        b_ub=np.zeros(len(others)),
        A_eq=np.r_[np.ones(num_states), 0.0][None],
        b_eq=[1.0],
        bounds=[(0, 1)] * num_states + [(None, None)],
    )
    return found.x[:num_states], float(found.x[-1])
