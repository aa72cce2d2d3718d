"""Value decomposition: the value of a team's joint action from those of its agents, as a sum (VDN) or by QMIX."""

import math

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from jaxpar.nn.cells.cell import along
from jaxpar.types import PRNGKey, PyTree

__all__ = ["DECOMPOSITIONS", "init_decomposition", "joint_value"]

DECOMPOSITIONS = ("none", "vdn", "qmix")
"""Legal names; "none" leaves every agent with its own values and rewards."""


def init_decomposition(
    key: PRNGKey, decomposition: str, state_size: int, num_agents: int, width: int
) -> PyTree:
    """Draws the parameters of `joint_value`; consumes `key`.

    Every hypernetwork starts normal with variance 1 / inputs, that of w2 smaller by `width`, so that a total starts as
    large as its parts.

    Args:
        key: consumed.
        decomposition: of `DECOMPOSITIONS`.
        state_size: S, of the state that hypernetworks read.
        num_agents: N.
        width: M, hidden units.
    """
    if decomposition != "qmix":
        return {}
    sizes = {
        "w1": (state_size, num_agents * width, 1.0),
        "b1": (state_size, width, 1.0),
        "w2": (state_size, width, 1 / width),
        "v1": (state_size, width, 1.0),
        "v2": (width, 1, 1.0),
    }
    kernels = {
        name: gain
        / math.sqrt(rows)
        * jax.random.normal(jax.random.fold_in(key, place), (rows, columns))
        for place, (name, (rows, columns, gain)) in enumerate(sizes.items())
    }
    return {
        name: {"kernel": kernel, "bias": jnp.zeros(kernel.shape[1])}
        for name, kernel in kernels.items()
    }


def joint_value(
    params: PyTree, decomposition: str, state: Float[Array, "*L S"], q: Float[Array, "*L N"]
) -> Float[Array, "*L"]:
    """The value of a team's joint action, from the values of its agents' actions.

        vdn:   Q = sum_i q_i                                           (Sunehag et al. 2017, arXiv:1706.05296)
        qmix:  Q = elu(q abs(W1(s)) + b1(s)) . abs(w2(s)) + v2(relu(v1(s)))   (Rashid et al. 2018, arXiv:1803.11485)

    W1, b1, w2, v1 are affine in the state s, v2 in the hidden units. Both rise with every q_i, so the best action of
    each agent is the best for the team. Unlike in the papers, the state is first brought to mean 0 and variance 1 over
    its numbers: without a target network, hypernetworks of large inputs diverge.

    Args:
        params: of `init_decomposition`.
        decomposition: "vdn" or "qmix".
        state: what the hypernetworks read.
        q: of the agents.
    """
    if decomposition == "vdn":
        return jnp.sum(q, -1)

    def affine(name, x):
        return x @ params[name]["kernel"] + along(params[name]["bias"], x)

    state = jax.nn.standardize(state, epsilon=1e-6)
    first = jnp.abs(affine("w1", state)).reshape(*q.shape, -1)
    hidden = jax.nn.elu(jnp.einsum("...n,...nm->...m", q, first) + affine("b1", state))
    free = affine("v2", jax.nn.relu(affine("v1", state)))[..., 0]
    return jnp.sum(hidden * jnp.abs(affine("w2", state)), -1) + free
