"""What float arithmetic can give: a bound for every entry of every step, from the numbers that enter that entry.

A large entry, row or start says nothing of its neighbours: each entry is judged by `rtol |h| +
atol` of its own value. Where large numbers cancel, no arithmetic gives that much; there the bound
is a few eps of the terms of f(h[t-1], x[t]), which the derivative of f makes visible.
"""

import jax
import jax.numpy as jnp
import numpy as np

from jaxpar.scan.varying import varying_as
from jaxpar.solve.problem import Problem
from jaxpar.solve.structure import Jacobian, Leaves
from jaxpar.types import Array

SAMPLES = 63
"""Steps that the typical size of an entry is taken from."""

GROUP = 7
"""Consecutive samples of one inner median: a median of medians costs an eighth."""

RESIDUAL_SHARE = 0.25
"""Share of the allowed error that a residual may be, of methods that do not solve with the true Jacobian."""

PROBES = 4
"""Random derivatives that estimate the size of what enters an entry."""


def wide(leaf: Array) -> jnp.dtype:
    """Returns the type in which a leaf is judged: float32 at least."""
    return jnp.promote_types(leaf.dtype, jnp.float32)


def allowed(problem: Problem, h: Leaves) -> Leaves:
    """Returns rtol |h| + atol of every entry, and the problem's own floor, [T, ...]."""
    out = []
    for number, leaf in enumerate(h):
        rtol, atol = problem.tolerance(number, leaf.dtype)
        size = jnp.abs(leaf.astype(wide(leaf)))
        if atol is None:
            out.append(rtol * (size + typical_size(problem, size) / 10))
        else:
            out.append(rtol * size + atol)
    if problem.floor is None:
        return tuple(out)
    return tuple(map(jnp.add, out, problem.floor))


def typical_size(problem: Problem, size: Array) -> Array:
    """Returns about the median over time of each entry's magnitude, [1, ...], from `SAMPLES` of the T steps.

    It is the median of medians of `GROUP` samples. An entry that is zero at most steps takes its
    mean, and one that is always zero counts as 1.
    """
    length = len(size)
    steps = np.arange(length)
    if length > SAMPLES:
        # Steps in the golden ratio: an even spacing could meet a periodic state in one phase only.
        steps = np.sort((np.arange(SAMPLES) * 0.6180339887498949 % 1 * length).astype(int))
    sample = size[steps]
    if problem.valid is None:
        mean = size.mean(0, keepdims=True)
    else:
        # States of padding may be anything, and many: they do not count.
        kept = at_steps(jnp.arange(length) < problem.valid, size)
        sample = jnp.where(kept[steps], sample, jnp.inf)
        mean = jnp.where(kept, size, 0).sum(0, keepdims=True) / jnp.maximum(problem.valid, 1)
    if len(steps) > GROUP:
        count = -(-len(steps) // GROUP)
        padding = [(0, count * GROUP - len(steps)), *[(0, 0)] * (sample.ndim - 1)]
        sample = jnp.pad(sample, padding, constant_values=jnp.inf).reshape(
            count, GROUP, *sample.shape[1:]
        )
        sample = _median(sample.swapaxes(0, 1))
    middle = _median(sample)[None]
    middle = jnp.where(jnp.isfinite(middle), middle, 0)
    if problem.axis_name is not None:
        # The mean of the parts' medians: what is sent must not depend on T.
        middle = jax.lax.pmean(middle, problem.axis_name)
        mean = jax.lax.pmean(mean, problem.axis_name)
    typical = jnp.where(middle > 0, middle, mean)
    return jnp.where(typical > 0, typical, 1)


def _median(sample: Array) -> Array:
    """Returns the upper median along the first axis of what is finite; infinite where nothing is.

    By counting the smaller ones of each, since XLA's sort of a short column takes many times as
    long.
    """
    is_finite = jnp.isfinite(sample)
    sample = jnp.where(is_finite, sample, jnp.inf)
    index = np.arange(len(sample))
    is_before = np.expand_dims(index[:, None] > index, tuple(range(2, sample.ndim + 1)))
    one = sample[:, None]
    other = sample[None]
    smaller = (other < one) | ((other == one) & is_before)
    is_wanted = smaller.sum(1) == is_finite.sum(0, keepdims=True) // 2
    return jnp.where(is_wanted, sample, 0).sum(0)


def residual_bound(
    problem: Problem, h: Leaves, is_exact: bool = True, bound: Leaves | None = None
) -> Leaves:
    """Returns what a residual may be, [T, ...]; updates and certificates bound the error that it grows to.

    After an update by the true Jacobian (`is_exact`) that is what is allowed, and one rounding.
    Other methods leave a residual that grows as they converge, to a hundredfold if slowly: they get
    a quarter, and in types of 16 bits less than one rounding, so that there nothing but the loop's
    own states will do.
    """
    if bound is None:
        bound = allowed(problem, h)
    if not is_exact:
        shares = (RESIDUAL_SHARE if _eps(leaf) < 1e-4 else 0.1 for leaf in h)
        return tuple(share * a for share, a in zip(shares, bound, strict=True))
    sizes = (_eps(leaf) * jnp.abs(leaf.astype(wide(leaf))) for leaf in h)
    return tuple(a + b for a, b in zip(bound, sizes, strict=True))


def at_steps(steps: Array, leaf: Array) -> Array:
    """Returns what belongs to each step, [T], so that it broadcasts against a leaf [T, ...]."""
    return steps.reshape(-1, *(1,) * (leaf.ndim - 1))


def fractions(values: Leaves, bound: Leaves) -> Leaves:
    """Returns |value| / bound of every entry, [T, ...]; infinite where a value is NaN, and zero at zero.

    Not NaN: on CPUs XLA's largest value of a row with a NaN may be a number (jax 0.10 and 0.11,
    rows of 64).
    """
    out = []
    for value, most in zip(values, bound, strict=True):
        size = jnp.abs(value) / jnp.maximum(most, jnp.finfo(most.dtype).tiny)
        size = jnp.where(jnp.isnan(size), jnp.inf, size)
        out.append(jnp.where(value == 0, 0, size).astype(jnp.float32))
    return tuple(out)


def fraction(values: Leaves, bound: Leaves) -> Array:
    """Returns the largest |value| / bound of each step, [T]; infinite where a value is NaN, and zero at zero."""
    return step_largest(fractions(values, bound))


def step_largest(parts: Leaves) -> Array:
    """Returns the largest entry of each step, [T]."""
    return jnp.stack([part.reshape(len(part), -1).max(1, initial=0) for part in parts]).max(0)


def over_devices(problem: Problem, value: Array) -> Array:
    """Returns the largest value of all devices that hold a part."""
    if problem.axis_name is None:
        return value
    return jax.lax.pmax(value, problem.axis_name)


def leaf_largest(parts: Leaves) -> Array:
    """Returns the largest entry of each leaf, [leaves]; infinite where one is not finite."""
    sizes = [jnp.where(jnp.isfinite(part), part, jnp.inf).max(initial=0) for part in parts]
    return jnp.stack(sizes).astype(jnp.float32)


def within(values: Leaves, bound: Leaves) -> Array:
    """Returns whether each step's every entry is within its bound, [T]; no NaN is."""
    return fraction(values, bound) <= 1


def rounding_noise(problem: Problem, h: Leaves, salt: Array | int) -> Leaves:
    """Estimates the rounding of f(S h, x) in every entry, [T, ...]: eps times the numbers that enter it.

    They are the result, and the terms a[i, j] h[j] and b[i, j] x[j] of its derivative, of which
    random derivatives give the root of the sum of squares. Cost: `PROBES` Jacobian-vector products.
    Another salt draws others.
    """
    before, xs = problem.shift(h), problem.xs
    is_float = [jnp.issubdtype(leaf.dtype, jnp.floating) for leaf in xs]
    floats = tuple(leaf for leaf, yes in zip(xs, is_float, strict=True) if yes)

    def f(before: Leaves, floats: Leaves) -> Leaves:
        rest = iter(floats)
        filled = tuple(next(rest) if yes else leaf for leaf, yes in zip(xs, is_float, strict=True))
        return jax.vmap(problem.step, axis_size=problem.length)(before, filled)

    def shaken(salt: Array, leaves: Leaves) -> Leaves:
        return varying_as(
            tuple(a * spread(a, salt + place) for place, a in enumerate(leaves)), before
        )

    def probe(total: Leaves, salt: Array) -> tuple[Leaves, None]:
        moved = jax.jvp(
            f, (before, floats), (shaken(salt, before), shaken(salt + len(before), floats))
        )[1]
        return tuple(
            a + jnp.square(b.astype(a.dtype)) for a, b in zip(total, moved, strict=True)
        ), None

    zeros = varying_as(tuple(jnp.zeros(leaf.shape, wide(leaf)) for leaf in h), before)
    total, _ = jax.lax.scan(
        probe, zeros, (salt * PROBES + jnp.arange(PROBES)) * (len(before) + len(floats))
    )
    return tuple(
        _eps(leaf) * (jnp.abs(leaf.astype(squares.dtype)) + _finite(jnp.sqrt(squares / PROBES)))
        for leaf, squares in zip(h, total, strict=True)
    )


def spread(like: Array, salt: Array | int) -> Array:
    """Returns numbers of mean zero and variance one, of an array's shape and type, by a multiplicative hash.

    They only have to be unrelated to the problem, and `jax.random` compiles for longer than all the
    rest.
    """
    index = jnp.arange(like.size, dtype=jnp.uint32) + jnp.asarray(salt, jnp.uint32) * jnp.uint32(
        0x9E3779B9
    )
    for _ in range(2):
        index = (index ^ (index >> 16)) * jnp.uint32(0x45D9F3B)
    signed = (index >> 8).astype(jnp.float32) * 2.0**-23 - 1
    return (signed * 3**0.5).reshape(like.shape).astype(like.dtype)


def entering(problem: Problem, jacobian: Jacobian, h: Leaves) -> Leaves:
    """Returns eps (|h| + |A| |S h|), what `rounding_noise` estimates without the inputs, from a Jacobian at hand."""
    before = tuple(jnp.abs(leaf.astype(wide(leaf))) for leaf in problem.shift(h))
    terms = problem.structure.apply(jax.tree.map(jnp.abs, jacobian), before)
    return tuple(
        _eps(leaf) * (jnp.abs(leaf.astype(wide(leaf))) + _finite(term))
        for leaf, term in zip(h, terms, strict=True)
    )


def trusted(problem: Problem, h: Leaves) -> Leaves:
    """Returns the error up to which a state counts as found although errors grow, [T, ...].

    That is sqrt(eps) of the largest that the entry, or one that it is coupled with, has been so
    far, since rounding of earlier steps is still there where a state passes through zero: more
    would be chaos.
    """
    out, bound = [jnp.abs(leaf.astype(wide(leaf))) for leaf in h], allowed(problem, h)
    start = tuple(jnp.abs(leaf[None].astype(wide(leaf))) for leaf in problem.start)
    for group in problem.structure.groups:
        size, first = (
            group.flat(leaves).max(-1, keepdims=True, initial=0) for leaves in (tuple(out), start)
        )
        size = jnp.maximum(jax.lax.cummax(_finite(size), axis=0), _finite(first))
        group.put(out, jnp.broadcast_to(size, (*size.shape[:-1], group.n)))
    return tuple(_eps(leaf) ** 0.5 * size + b for leaf, size, b in zip(h, out, bound, strict=True))


def _eps(leaf: Array) -> float:
    return float(jnp.finfo(leaf.dtype).eps)


def _finite(size: Array) -> Array:
    """Returns zero for what is not finite: an overflow must not allow everything."""
    return jnp.where(jnp.isfinite(size), size, 0)
