"""Recurrences whose entries, rows or steps differ by many orders of magnitude, and what is asked of their solutions.

All forget but those that are named for not doing so: none is chaotic. A problem is `step(h, x) -> h`, a start and
inputs, drawn in float64 with numpy; a run rounds start and inputs to its type, and the float64 loop runs on those. The
same goes for matrices and growth factors: in bfloat16 a turn by 0.1 is another turn, whoever solves it.
"""

import functools
import itertools
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


def problems(dtype: str, length: int = LENGTH, seed: int = 0) -> dict[str, Problem]:
    """Returns all problems by name; in float16, which ends at 65504, what is large is smaller."""
    is_short = dtype == "float16"
    large, step, growth = (1e3, 50.0, 1.015) if is_short else (1e6, 1000.0, 1.03)
    starts = (1e2, 1e3, 1e4) if is_short else (1e3, 1e5, 1e6, 1e7)
    growth, fading = float(rounded(growth, dtype)), float(rounded(0.99, dtype))
    rng = np.random.default_rng(seed)
    normal = lambda *shape: rng.standard_normal((length, *shape))  # noqa: E731
    w = rng.normal(size=(8, 8)) / np.sqrt(8) * 0.8
    rows = np.where(np.arange(8) == 0, large, 1.0)[None, :, None]
    turn = np.array([[np.cos(0.5), -np.sin(0.5)], [np.sin(0.5), np.cos(0.5)]])
    slow_turn = np.array([[np.cos(0.1), -np.sin(0.1)], [np.sin(0.1), np.cos(0.1)]])

    def times(a, h):
        return jnp.matmul(h, jnp.asarray(rounded(a, dtype), h.dtype), precision="highest")

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
        return jnp.stack(
            [h[0] + step, 0.5 * h[1] + jnp.tanh(h[0] - x[0]) + 0.5 * jnp.tanh(h[1] + x[1])]
        )

    def network(h, x):
        return 0.5 * h + 0.5 * jnp.tanh(times(w, h) + x)

    two = np.zeros(2)
    return {
        "order one: network": Problem(
            lambda h, x: jnp.tanh(times(w, h) + x), np.zeros(8), normal(8)
        ),
        "order one: gated": Problem(gated, np.zeros(6), normal(6)),
        "order one: slow": Problem(
            lambda h, x: fading * h + 0.01 * jnp.tanh(h + x), np.zeros(4), normal(4)
        ),
        "large entry": Problem(beside(lambda h, x: h + step), two, normal()),
        "large leaf": Problem(
            lambda h, x: (h[0] + step, bistable(h[1], x)), (np.zeros(()), np.zeros(())), normal()
        ),
        "large entry that cancels": Problem(
            cancelling, two, np.stack([step * np.arange(length) + normal(), normal()], 1)
        ),
        **{
            f"large start {size:g}": Problem(settling, np.full(3, size), normal(3))
            for size in starts
        },
        "large start, network": Problem(network, np.full(8, large / 10), normal(8)),
        "large start, gated": Problem(gated, np.full(6, large / 100), normal(6)),
        "large start of an entry": Problem(
            beside(lambda h, x: 0.9 * h), np.array([large, 0]), normal()
        ),
        "large entry that fades": Problem(
            beside(lambda h, x: fading * h), np.array([large, 0]), normal()
        ),
        "large row, elementwise": Problem(
            lambda h, x: bistable(h, x) + x, np.zeros((8, 4)), normal(8, 4) * rows
        ),
        "large row, saturated": Problem(bistable, np.zeros((8, 4)), normal(8, 4) * rows),
        "large row, dense": Problem(
            lambda h, x: 0.5 * h + 0.3 * jnp.tanh(times(w, h)) + x,
            np.zeros((8, 8)),
            normal(8, 8) * rows,
        ),
        "counter": Problem(counted, two, normal()),
        "counter from far": Problem(counted, np.array([large, 0]), normal()),
        "growing mode": Problem(beside(lambda h, x: growth * h + x), two, normal()),
        "growing mode, turned": Problem(
            lambda h, x: (
                times(turn @ np.diag([growth, 0.5]) @ turn.T, h) + 0.1 * x + 0.1 * jnp.tanh(h)
            ),
            two,
            normal(2),
        ),
        "small states": Problem(
            lambda h, x: 0.5 * h + 1e-4 * jnp.tanh(h * 1e4 + x), np.zeros(3), normal(3)
        ),
        "large states": Problem(
            lambda h, x: 0.5 * h + 1e4 * jnp.tanh(h / 1e4 + x), np.zeros(3), normal(3)
        ),
        "oscillator": Problem(
            lambda h, x: times(slow_turn, h) + 0 * x, np.array([1.0, 0]), normal(2)
        ),
        "random walk": Problem(lambda h, x: h + x, np.zeros(4), normal(4)),
    }


def rounded(values, dtype: str):
    """Returns numbers in float64, rounded to a type."""
    return np.asarray(values).astype(jnp.dtype(dtype)).astype(np.float64)


def scan_step(problem: Problem):
    """Returns f(h, x) -> (h, h) as `lax.scan` takes it."""

    def f(h, x):
        h = problem.step(h, x)
        return h, h

    return f


def cast(tree, dtype: str):
    """Returns the arrays in a type."""
    return jax.tree.map(lambda leaf: jnp.asarray(leaf).astype(dtype), tree)


class Judge:
    """What is asked of the states of a problem in a type.

    An entry is wrong if |h - h64| > 10 (|h_loop - h64| + rtol |h64| + atol), with h64 the float64 loop from the same
    rounded numbers, rtol and atol the defaults of `parallel_scan`, and h_loop `lax.scan` in the type. Programs of that
    loop round apart: rolled, unrolled, operation by operation, and two whose states are rounded a little up or down by
    chance, so that no entry passes for exact by luck; the largest of their errors counts. Where one of them would be
    wrong itself beside another, the type does not determine the states, as in chaos: then each step is judged alone,
    from the state before it, beside a step that rounds once, one that rounds after every operation and two from that
    state rounded by chance, since a program may carry it wider than it gives it. Entries that the loop leaves the
    type's range with are not judged.
    """

    def __init__(self, problem: Problem, dtype: str):
        """Runs the loops."""
        self.dtype, self.problem = dtype, problem
        self.start, self.xs = cast((problem.start, problem.xs), dtype)
        loops = [self._loop(self.start, self.xs, unroll) for unroll in (1, 8)] + [
            self._step_by_step()
        ]
        loops += [
            self._in_float64(functools.partial(self._by_chance, seed), self.start, self.xs)
            for seed in (0, 1)
        ]
        self.exact = self._in_float64(self._loop, self.start, self.xs)
        self.plain = functools.reduce(functools.partial(jax.tree.map, _farthest, self.exact), loops)
        pairs = itertools.permutations(loops, 2)
        self.is_determined = all(self._excess(one, other, self.exact) <= 1 for one, other in pairs)

    def __call__(self, states) -> float:
        """Returns the largest error of an entry in units of what is allowed: over one is wrong."""
        if self.is_determined:
            return self._excess(states, self.plain, self.exact)
        before = jax.tree.map(
            lambda a, b: np.concatenate([np.asarray(a)[None], np.asarray(b)[:-1]]),
            self.start,
            states,
        )
        exact = self._in_float64(self._step, before, self.xs)
        steps = [
            jax.device_get(step(before, self.xs))
            for step in (self._step, jax.vmap(self.problem.step))
        ]
        steps += [
            self._in_float64(functools.partial(self._step_by_chance, seed), before, self.xs)
            for seed in (0, 1)
        ]
        plain = functools.reduce(functools.partial(jax.tree.map, _farthest, exact), steps)
        return self._excess(states, plain, exact)

    def _loop(self, start, xs, unroll: int = 1):
        return jax.device_get(
            jax.jit(functools.partial(jax.lax.scan, scan_step(self.problem), unroll=unroll))(
                start, xs
            )[1]
        )

    def _by_chance(self, seed: int, start, xs):
        """The loop with each state rounded up or down, by chance and less than one unit in the last place."""

        def one(h, row):
            x, key = row
            h = jax.tree.map(
                lambda a: a.astype(self.dtype).astype(a.dtype),
                self._shaken(key, self.problem.step(h, x)),
            )
            return h, h

        keys = jax.random.split(jax.random.key(seed), LENGTH)
        return jax.jit(jax.lax.scan, static_argnums=0)(one, start, (xs, keys))[1]

    def _step_by_chance(self, seed: int, before, xs):
        """All steps from states that are off by less than half a unit in the last place."""
        return self._step(self._shaken(jax.random.key(seed), before), xs)

    def _shaken(self, key, tree):
        leaves, treedef = jax.tree.flatten(tree)
        shares = [
            jax.random.uniform(key, leaf.shape, leaf.dtype, -0.5, 0.5)
            for key, leaf in zip(jax.random.split(key, len(leaves)), leaves, strict=True)
        ]
        eps = float(jnp.finfo(self.dtype).eps)
        return treedef.unflatten(
            [leaf * (1 + eps * share) for leaf, share in zip(leaves, shares, strict=True)]
        )

    def _step_by_step(self):
        """The loop operation by operation, each of which rounds."""
        state, states = self.start, []
        for index in range(LENGTH):
            state = self.problem.step(state, jax.tree.map(lambda x, index=index: x[index], self.xs))
            states.append(jax.device_get(state))
        return jax.tree.map(lambda *leaves: np.stack(leaves), *states)

    def _step(self, before, xs):
        return jax.jit(jax.vmap(self.problem.step))(before, xs)

    def _in_float64(self, f, *args):
        args = jax.device_get(args)
        with jax.enable_x64(True), jax.default_device(jax.devices("cpu")[0]):
            return jax.device_get(f(*cast(args, "float64")))

    def _excess(self, states, plain, exact) -> float:
        rtol, worst = 1.5 * float(jnp.finfo(self.dtype).eps) ** 0.75, 0.0
        for ours, loop, true in zip(*map(jax.tree.leaves, (states, plain, exact)), strict=True):
            ours, loop, true = (np.asarray(leaf).astype(np.float64) for leaf in (ours, loop, true))
            with np.errstate(invalid="ignore"):
                ratio = np.abs(ours - true) / (
                    10 * (np.abs(loop - true) + rtol * np.abs(true) + rtol / 10)
                )
            worst = max(
                worst,
                float(np.where(np.isnan(ratio), np.inf, ratio)[np.isfinite(loop)].max(initial=0)),
            )
        return worst


def _farthest(true, one, other):
    """Returns of two results, entry by entry, the one that is farther from the true one."""
    true, one, other = (np.asarray(leaf).astype(np.float64) for leaf in (true, one, other))
    return np.where(np.abs(one - true) >= np.abs(other - true), one, other)
