"""Steps of simulated systems, for `parallel_scan` as for `lax.scan`: differential equations and Markov chains.

Each builder returns f(state, x) -> (state, state), so that the ys are the trajectory. States are any pytree of floats.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from jaxpar.types import PyTree

__all__ = ["langevin_step", "leapfrog", "leapfrog_step", "ode_step", "sde_step"]

Step = Callable[[PyTree, Any], tuple[PyTree, PyTree]]


def ode_step(field: Callable[[PyTree, Any], PyTree], dt: float | Array) -> Step:
    """Returns a step of the classical Runge-Kutta method of order four for dh/dt = field(h, x), x fixed in a step.

    Args:
      field: (h, x) -> dh/dt of h's structure; x is what the scan's xs hold for the step (None if there are none).
      dt: Length of a step, in the units of time of `field`.
    """

    def step(h: PyTree, x: Any) -> tuple[PyTree, PyTree]:
        k1 = field(h, x)
        k2 = field(_moved(h, dt / 2, k1), x)
        k3 = field(_moved(h, dt / 2, k2), x)
        k4 = field(_moved(h, dt, k3), x)
        new = jax.tree.map(lambda h, a, b, c, d: h + dt / 6 * (a + 2 * b + 2 * c + d), h, k1, k2, k3, k4)
        return new, new

    return step


def sde_step(drift: Callable[[PyTree], PyTree], diffusion: Callable[[PyTree], PyTree], dt: float | Array) -> Step:
    """Returns an Euler-Maruyama step of dh = drift(h) dt + diffusion(h) dW, with diagonal noise, in the sense of Ito.

    Args:
      drift: h -> a tree like h, per unit of time.
      diffusion: h -> a tree like h, per square root of a unit of time.
      dt: Length of a step.

    Returns:
      f(h, noise): noise is like h, standard normal; fixed before the solve, it makes the path deterministic.
    """
    root = jnp.sqrt(dt)

    def step(h: PyTree, noise: PyTree) -> tuple[PyTree, PyTree]:
        moved = _moved(h, dt, drift(h))
        new = jax.tree.map(lambda a, b, z: a + (root * z * b).astype(a.dtype), moved, diffusion(h), noise)
        return new, new

    return step


def leapfrog(
    force: Callable[[PyTree], PyTree], position: PyTree, momentum: PyTree, dt: float | Array, num_steps: int = 1
) -> tuple[PyTree, PyTree]:
    """Returns position and momentum after `num_steps` of the symplectic leapfrog method, masses being one.

    Args:
      force: position -> minus the gradient of the potential energy.
      position: Any pytree.
      momentum: Like it.
      dt: Length of a step.
      num_steps: At least one; they are unrolled.
    """
    momentum = _moved(momentum, dt / 2, force(position))
    for index in range(num_steps):
        position = _moved(position, dt, momentum)
        momentum = _moved(momentum, dt if index < num_steps - 1 else dt / 2, force(position))
    return position, momentum


def langevin_step(log_density: Callable[[PyTree], Array], dt: float | Array) -> Step:
    """Returns an unadjusted Langevin step: h + dt grad log p(h) + sqrt(2 dt) noise; biased by O(dt), but smooth.

    Args:
      log_density: h -> log p(h) up to a constant, a scalar.
      dt: Length of a step.

    Returns:
      f(h, noise), noise standard normal like h.
    """
    return sde_step(jax.grad(log_density), lambda h: jax.tree.map(lambda a: jnp.full_like(a, jnp.sqrt(2.0)), h), dt)


def leapfrog_step(log_density: Callable[[PyTree], Float[Array, ""]], dt: float | Array, num_steps: int = 1) -> Step:
    """Returns a step of Hamiltonian Monte Carlo; with one leapfrog step it is the Metropolis-adjusted Langevin method.

    Accepting is a jump: the chain is a discontinuous function of its states, and the Jacobian is that of the branch
    taken. Newton's iterates may therefore flip a decision, so that its speed is that of no theory; what holds is that
    states whose residual is zero are the chain's own, and that at most T iterations reach them. A gradient treats the
    decisions as given, as that of `lax.scan` does.

    Args:
      log_density: h -> log p(h) up to a constant, a scalar.
      dt: Length of a leapfrog step.
      num_steps: Leapfrog steps of a proposal.

    Returns:
      f(h, (momentum, log_uniform)): standard normals like h, and the logarithm of one uniform variable.
    """
    force = jax.grad(log_density)

    def log_joint(position: PyTree, momentum: PyTree) -> Array:
        return log_density(position) - sum(jnp.sum(p * p) for p in jax.tree.leaves(momentum)) / 2

    def step(h: PyTree, x: tuple[PyTree, Array]) -> tuple[PyTree, PyTree]:
        momentum, log_uniform = x
        proposal, final = leapfrog(force, h, momentum, dt, num_steps)
        accept = log_uniform < log_joint(proposal, final) - log_joint(h, momentum)
        new = jax.tree.map(lambda a, b: jnp.where(accept, a, b), proposal, h)
        return new, new

    return step


def _moved(h: PyTree, dt: float | Array, rate: PyTree) -> PyTree:
    return jax.tree.map(lambda a, b: a + dt * b, h, rate)
