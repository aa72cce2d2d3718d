"""Recurrences whose entries, rows or steps differ by many orders of magnitude, and what is asked of their solutions.

All forget but those that are named for not doing so: none is chaotic. A problem is `step(h, x) -> h`, a start and
inputs, drawn in float64 with numpy; a run rounds start and inputs to its type, and the float64 loop runs on those.
"""

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

LENGTH = 400
TYPES = ("float64", "float32", "bfloat16", "float16")


class Problem(NamedTuple):
    """step(h, x) -> h, the start, and the inputs of all steps."""

    step: object
    start: object
    xs: object


def problems(length: int = LENGTH, seed: int = 0) -> dict[str, Problem]:
    """Returns all problems by name."""
    rng = np.random.default_rng(seed)
    normal = lambda *shape: rng.standard_normal((length, *shape))  # noqa: E731
    w = rng.normal(size=(8, 8)) / np.sqrt(8) * 0.8
    rows = np.where(np.arange(8) == 0, 1e6, 1.0)[None, :, None]
    turn = np.array([[np.cos(0.5), -np.sin(0.5)], [np.sin(0.5), np.cos(0.5)]])
    slow_turn = np.array([[np.cos(0.1), -np.sin(0.1)], [np.sin(0.1), np.cos(0.1)]])

    def times(a, h):
        return jnp.matmul(h, jnp.asarray(a, h.dtype), precision="highest")

    def settling(h, x):
        return 0.3 * h + 0.6 * jnp.tanh(h + x)

    def bistable(h, x):
        return 0.3 * h + 0.6 * jnp.tanh(2 * h + x)

    def beside(other):
        """An entry `other` and one that settles, in one leaf."""
        return lambda h, x: jnp.stack([other(h[0], x), bistable(h[1], x)])

    def gated(h, x):
        z = jax.nn.sigmoid(0.5 * h + x)
        return (1 - z) * h + z * jnp.tanh(0.8 * h + x)

    def counted(h, x):
        return jnp.stack([h[0] + 1, 0.3 * h[1] + 0.6 * jnp.tanh(h[1] + jnp.sin(0.1 * h[0]) + x)])

    def cancelling(h, x):
        return jnp.stack([h[0] + 1000, 0.5 * h[1] + jnp.tanh(h[0] - x[0]) + 0.5 * jnp.tanh(h[1] + x[1])])

    def network(h, x):
        return 0.5 * h + 0.5 * jnp.tanh(times(w, h) + x)

    two = np.zeros(2)
    return {
        "order one: network": Problem(lambda h, x: jnp.tanh(times(w, h) + x), np.zeros(8), normal(8)),
        "order one: gated": Problem(gated, np.zeros(6), normal(6)),
        "order one: slow": Problem(lambda h, x: 0.99 * h + 0.01 * jnp.tanh(h + x), np.zeros(4), normal(4)),
        "large entry": Problem(beside(lambda h, x: h + 1000), two, normal()),
        "large leaf": Problem(lambda h, x: (h[0] + 1000, bistable(h[1], x)), (np.zeros(()), np.zeros(())), normal()),
        "large entry that cancels": Problem(
            cancelling, two, np.stack([1000 * np.arange(length) + normal(), normal()], 1)
        ),
        **{f"large start {size:g}": Problem(settling, np.full(3, size), normal(3)) for size in (1e3, 1e5, 1e6, 1e7)},
        "large start, network": Problem(network, np.full(8, 1e5), normal(8)),
        "large start, gated": Problem(gated, np.full(6, 1e4), normal(6)),
        "large start of an entry": Problem(beside(lambda h, x: 0.9 * h), np.array([1e6, 0]), normal()),
        "large entry that fades": Problem(beside(lambda h, x: 0.99 * h), np.array([1e6, 0]), normal()),
        "large row, elementwise": Problem(lambda h, x: bistable(h, x) + x, np.zeros((8, 4)), normal(8, 4) * rows),
        "large row, saturated": Problem(bistable, np.zeros((8, 4)), normal(8, 4) * rows),
        "large row, dense": Problem(
            lambda h, x: 0.5 * h + 0.3 * jnp.tanh(times(w, h)) + x, np.zeros((8, 8)), normal(8, 8) * rows
        ),
        "counter": Problem(counted, two, normal()),
        "counter from 1e6": Problem(counted, np.array([1e6, 0]), normal()),
        "growing mode": Problem(beside(lambda h, x: 1.03 * h + x), two, normal()),
        "growing mode, turned": Problem(
            lambda h, x: times(turn @ np.diag([1.03, 0.5]) @ turn.T, h) + 0.1 * x + 0.1 * jnp.tanh(h), two, normal(2)
        ),
        "small states": Problem(lambda h, x: 0.5 * h + 1e-4 * jnp.tanh(h * 1e4 + x), np.zeros(3), normal(3)),
        "large states": Problem(lambda h, x: 0.5 * h + 1e4 * jnp.tanh(h * 1e-4 + x), np.zeros(3), normal(3)),
        "oscillator": Problem(lambda h, x: times(slow_turn, h) + 0 * x, np.array([1.0, 0]), normal(2)),
        "random walk": Problem(lambda h, x: h + x, np.zeros(4), normal(4)),
    }


def scan_step(problem: Problem):
    """Returns f(h, x) -> (h, h) as `lax.scan` takes it."""

    def f(h, x):
        h = problem.step(h, x)
        return h, h

    return f


def cast(tree, dtype: str):
    """Returns the arrays in a type."""
    return jax.tree.map(lambda leaf: jnp.asarray(leaf).astype(dtype), tree)


def reference(problem: Problem, dtype: str):
    """Returns the loop's states in a type, and those of the float64 loop from the same rounded numbers."""
    walk = jax.jit(functools.partial(jax.lax.scan, scan_step(problem)))
    start, xs = cast((problem.start, problem.xs), dtype)
    ours = jax.device_get(walk(start, xs)[1])
    host = jax.devices("cpu")[0]
    with jax.enable_x64(True), jax.default_device(host):
        exact = jax.device_get(walk(*cast(jax.device_get((start, xs)), "float64"))[1])
    return ours, exact


def excess(states, loop, exact, dtype: str) -> float:
    """Returns the largest |h - h64| / (10 (|h_loop - h64| + rtol |h64| + atol)) of any entry: over one is an error.

    rtol and atol are the defaults of `parallel_scan`. Entries that the loop itself leaves the type's range with are
    not judged.
    """
    rtol = float(jnp.finfo(dtype).eps) ** 0.75
    worst = 0.0
    for ours, plain, true in zip(*map(jax.tree.leaves, (states, loop, exact)), strict=True):
        ours, plain, true = (np.asarray(leaf).astype(np.float64) for leaf in (ours, plain, true))
        is_judged = np.isfinite(plain)
        with np.errstate(invalid="ignore"):
            ratio = np.abs(ours - true) / (10 * (np.abs(plain - true) + rtol * np.abs(true) + rtol / 10))
        worst = max(worst, float(np.where(np.isnan(ratio), np.inf, ratio)[is_judged].max(initial=0)))
    return worst
