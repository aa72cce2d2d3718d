"""Steps of simulated systems, for `parallel_scan` as for `lax.scan`: differential equations and Markov chains.

Each builder returns f(state, x) -> (state, state), so that the ys are the trajectory. States are
any pytree of floats.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from jaxpar.types import PyTree, Scalar, UsageError, concrete_values

__all__ = [
    "Interval",
    "intervals",
    "langevin_step",
    "leapfrog",
    "leapfrog_step",
    "ode_step",
    "sde_step",
]

Step = Callable[[PyTree, Any], tuple[PyTree, PyTree]]


class Interval(NamedTuple):
    """What one step of `ode_step` goes over; all of a grid as the xs of a scan.

    Attributes:
      start: Time at its start.
      length: Time until its end, negative if time runs backwards.
      x: Inputs, the same throughout it.
    """

    start: Array
    length: Array
    x: PyTree


def intervals(ts: Float[Array, "T+1"], xs: PyTree = None) -> Interval:
    """Returns the T intervals between T + 1 times, equally far apart or not, as the xs of a scan of `ode_step`.

    The lengths of a NumPy array are taken in its own precision: late times close to each other are
    not lost in float32. The derivative by `ts` of what a scan makes of them is that by the times.

    Args:
      ts: Times in order, in the units of time of the field; the first is that of the scan's init.
      xs: What the field gets in each interval, a pytree of arrays [T, ...].

    Raises:
      UsageError: For times that are not an array [T + 1], or, where values are known, not finite or
        not in order; and for xs of another length.
    """
    if np.ndim(ts) != 1 or not len(ts):
        raise UsageError(
            f"ts has shape {np.shape(ts)}, but must be an array [T + 1] of the times at T steps' ends."
        )
    lengths = np.diff(ts) if isinstance(ts, np.ndarray) else jnp.diff(jnp.asarray(ts))
    known = concrete_values(ts)
    if known is not None:
        times = np.asarray(known[0], np.float64)
        steps = np.diff(times[np.isfinite(times)])
        is_sorted = (steps >= 0).all() or (steps <= 0).all()
        if not (np.isfinite(times).all() and is_sorted):
            raise UsageError(
                "ts must be finite times in order; sort them, and the inputs with them."
            )
    for path, leaf in jax.tree_util.tree_flatten_with_path(xs)[0]:
        if jnp.shape(leaf)[:1] != (len(ts) - 1,):
            name = jax.tree_util.keystr(path) or "(the whole of xs)"
            raise UsageError(
                f"xs leaf {name} has shape {jnp.shape(leaf)}; {len(ts)} times leave {len(ts) - 1} steps."
            )
    return Interval(jnp.asarray(ts[:-1]), jnp.asarray(lengths), xs)


def ode_step(field: Callable[[Array, PyTree, PyTree], PyTree]) -> Step:
    """Returns a step of the classical Runge-Kutta method of order four for dh/dt = field(t, h, x).

    Over a grid of one's own times, which may lie as far apart as one likes:

        _, states = parallel_scan(ode_step(field), h0, intervals(ts, xs))

    where `states[k]` is h at `ts[k + 1]`. With `jax.lax.scan` it is the sequential twin. The error
    of a step is of the order of its length to the fifth: put times between those of data that lie
    too far apart.

    Args:
      field: (t, h, x) -> dh/dt of h's structure; x is what `intervals` was given for the step, None
        if nothing.

    Returns:
      f(h, interval) -> (h at its end, the same).
    """

    def step(h: PyTree, interval: Interval) -> tuple[PyTree, PyTree]:
        t, dt, x = interval
        middle = t + dt / 2
        k1 = field(t, h, x)
        k2 = field(middle, _moved(h, dt / 2, k1), x)
        k3 = field(middle, _moved(h, dt / 2, k2), x)
        k4 = field(t + dt, _moved(h, dt, k3), x)
        new = _moved(
            h, dt / 6, jax.tree.map(lambda a, b, c, d: a + 2 * b + 2 * c + d, k1, k2, k3, k4)
        )
        return new, new

    return step


def sde_step(
    drift: Callable[[PyTree], PyTree], diffusion: Callable[[PyTree], PyTree], dt: Scalar
) -> Step:
    """Returns an Euler-Maruyama step of dh = drift(h) dt + diffusion(h) dW, with diagonal noise, in the sense of Ito.

    Args:
      drift: h -> a tree like h, per unit of time.
      diffusion: h -> a tree like h, per square root of a unit of time.
      dt: Length of a step.

    Returns:
      f(h, noise): noise is like h, standard normal; fixed before the solve, it makes the path
      deterministic.
    """
    root = jnp.sqrt(dt)

    def step(h: PyTree, noise: PyTree) -> tuple[PyTree, PyTree]:
        moved = _moved(h, dt, drift(h))
        new = jax.tree.map(
            lambda a, b, z: a + (root * z * b).astype(a.dtype), moved, diffusion(h), noise
        )
        return new, new

    return step


def leapfrog(
    force: Callable[[PyTree], PyTree],
    position: PyTree,
    momentum: PyTree,
    dt: Scalar,
    num_steps: int = 1,
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


def langevin_step(log_density: Callable[[PyTree], Array], dt: Scalar) -> Step:
    """Returns an unadjusted Langevin step: h + dt grad log p(h) + sqrt(2 dt) noise; biased by O(dt), but smooth.

    Args:
      log_density: h -> log p(h) up to a constant, a scalar.
      dt: Length of a step.

    Returns:
      f(h, noise), noise standard normal like h.
    """
    return sde_step(
        jax.grad(log_density),
        lambda h: jax.tree.map(lambda a: jnp.full_like(a, jnp.sqrt(2.0)), h),
        dt,
    )


def leapfrog_step(
    log_density: Callable[[PyTree], Float[Array, ""]], dt: Scalar, num_steps: int = 1
) -> Step:
    """Returns a step of Hamiltonian Monte Carlo; with one leapfrog step it is the Metropolis-adjusted Langevin method.

    Accepting is a jump: the chain is a discontinuous function of its states, and the Jacobian is
    that of the branch taken. Newton's iterates may therefore flip a decision, so that its speed is
    that of no theory; what holds is that states whose residual is zero are the chain's own, and
    that at most T iterations reach them. A gradient treats the decisions as given, as that of
    `lax.scan` does.

    Args:
      log_density: h -> log p(h) up to a constant, a scalar.
      dt: Length of a leapfrog step.
      num_steps: Leapfrog steps of a proposal.

    Returns:
      f(h, (momentum, log_uniform)): standard normals like h, and the logarithm of one uniform
      variable.
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


def _moved(h: PyTree, dt: Scalar, rate: PyTree) -> PyTree:
    """Returns h + dt rate, in the types of h."""
    return jax.tree.map(lambda a, b: (a + dt * b).astype(jnp.result_type(a)), h, rate)
