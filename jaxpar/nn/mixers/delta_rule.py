"""The gated delta rule: a matrix state in which each key overwrites what was stored under it; by chunks or by steps."""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from jaxpar._older_fields import newer_arguments
from jaxpar.nn.mixers.fence import finite, finite_log, mark, marks_of
from jaxpar.nn.mixers.linear_attention import (
    dot,
    gates_of,
    in_chunks,
    only_valid,
    out_of_chunks,
    refuse_split,
    states_before,
)
from jaxpar.nn.mixers.options import OLDER, Packing, RecurrenceExecution
from jaxpar.scan import affine_scan
from jaxpar.types import UsageError

__all__ = ["delta_rule"]


class _Inputs(NamedTuple):
    """Arrays that the delta rule reads, and that have a gradient.

    Attributes:
      q: Queries.
      k: Keys.
      v: Values.
      beta: Sizes of steps.
      log_decay: Logarithms of what is kept of a head's state.
      state: State before the first token, of float32 at least.
    """

    q: Float[Array, "B T H K"]
    k: Float[Array, "B T H K"]
    v: Float[Array, "B T H V"]
    beta: Float[Array, "B T H"]
    log_decay: Float[Array, "B T H"]
    state: Float[Array, "B H K V"]


def delta_rule(
    q: Float[Array, "B T H K"],
    k: Float[Array, "B T H K"],
    v: Float[Array, "B T H V"],
    beta: Float[Array, "B T H"],
    log_decay: Float[Array, "B T H"] | None = None,
    *,
    state: Float[Array, "B H K V"] | None = None,
    packing: Packing = Packing(),
    execution: RecurrenceExecution = RecurrenceExecution(),
    **older: object,
) -> tuple[Float[Array, "B T H V"], Float[Array, "B H K V"]]:
    """Returns o[t] = q[t] S[t] of a state S that each key and value corrects, and the state after the last token.

        S[t] = a[t] (I - beta[t] k[t] k[t]^T) S[t-1] + beta[t] k[t] v[t]^T,   a = exp(log_decay)

    That is a step of size beta towards S^T k = v. In a chunk that begins with state S it is linear attention to values
    u = u0 - w S, where u0 and w solve triangular systems of the keys' products (Yang et al. 2024, arXiv:2412.06464,
    equations 8 to 10); between chunks S follows an affine recurrence with matrices [K, K].

    Cost, for chunks of C: 2 T H (C (C / 3 + K + V) + 3 K V + K^2) operations forward, and K^3 H T / C where the
    recurrence is computed as a tree; memory of T H (C + K + V) numbers, and T / C states and matrices.

    Args:
      q: Queries, scaled as they shall be.
      k: Keys; of length 1, or beta k^2 <= 2, or the state may grow.
      v: Values, in whose dtype products are made; sums, states and the systems are float32 at least.
      beta: Sizes of steps, 0 to 1, or to 2 for states that may change sign.
      log_decay: Logarithms of what is kept of a head's state; not positive. None keeps all.
      state: State before the first token; zeros by default.
      packing: Documents in the rows, and their tokens that count.
      execution: Form of the computation, chunks or steps; a matrix and a state a device cross the mesh axis.
      **older: Values of fields that were arguments, until the first release.

    Raises:
      UsageError: For shapes that do not fit, or `impl="kernel"`.
    """
    groups = {"packing": packing, "execution": execution}
    packing, execution = newer_arguments("delta_rule", OLDER, groups, older).values()
    _check(q, k, v, beta, log_decay, state)
    impl = execution.impl
    if impl == "kernel":
        raise UsageError(
            "impl='kernel' is unknown to the delta rule; legal are auto, chunked, sequential."
        )
    wide = jnp.promote_types(jnp.result_type(q, k, v), jnp.float32)
    shape = (*v.shape[:1], *v.shape[2:3], k.shape[-1], v.shape[-1])
    state = jnp.zeros(shape, wide) if state is None else state.astype(wide)
    if v.size == 0:  # no token, or no row: there is no chunk to read a last state from
        return jnp.zeros_like(v), state
    log_decay = jnp.zeros(v.shape[:3], wide) if log_decay is None else log_decay.astype(wide)
    arrays = (q, k, v, beta.astype(wide), log_decay)
    (q, k, v, beta, log_decay), starts = only_valid(arrays, packing)
    inputs = _Inputs(q=q, k=k, v=v, beta=beta, log_decay=log_decay, state=state)
    is_step = v.shape[1] == 1 and execution.axis_name is None
    if impl == "sequential" or (impl == "auto" and is_step):
        refuse_split(execution)
        return _steps(inputs, starts)
    # Keeps its arguments alone, whatever encloses it keeps.
    run = jax.checkpoint(_documents, static_argnums=2)
    return run(inputs, starts, execution)


def _steps(inputs: _Inputs, starts: Array | None) -> tuple[Array, Array]:
    """One token after the other: what the chunks must equal."""
    q, k, v, beta, log_decay, state = inputs

    def step(state, now):
        q, k, v, beta, log_decay, start = now
        q, k, v = (x.astype(state.dtype) for x in (q, k, v))
        state = state if start is None else jnp.where(start[:, None, None, None], 0, state)
        kept = jnp.exp(log_decay)[..., None, None] * state
        error = v - jnp.einsum("bhk,bhkv->bhv", k, kept, precision="highest")
        state = kept + k[..., None] * (beta[..., None] * error)[..., None, :]
        return state, jnp.einsum("bhk,bhkv->bhv", q, state, precision="highest")

    dtype = v.dtype
    line = jax.tree.map(lambda x: jnp.swapaxes(x, 0, 1), (q, k, v, beta, log_decay, starts))
    if v.shape[1] == 1:
        state, out = step(state, jax.tree.map(lambda x: x[0], line))
        return out[:, None].astype(dtype), state
    state, outs = jax.lax.scan(step, state, line)
    return jnp.swapaxes(outs, 0, 1).astype(dtype), state


def _documents(
    inputs: _Inputs, starts: Array | None, execution: RecurrenceExecution
) -> tuple[Array, Array]:
    """Runs chunks so that no document sees what is not finite in another one."""
    if starts is None:
        return _chunks(inputs, starts, execution)
    q, own = finite(inputs.q)
    drive = jnp.zeros_like(inputs.log_decay)
    arrays = []
    for x in (inputs.k, inputs.v, inputs.beta[..., None]):
        x, zero = finite(x)
        arrays.append(x)
        drive = drive + zero
    k, v, beta = arrays
    log_decay, zero = finite_log(inputs.log_decay)
    state, first = finite(inputs.state)
    marks = marks_of(drive + zero, own, first.sum(-1), starts, axis_name=execution.axis_name)
    inputs = _Inputs(q=q, k=k, v=v, beta=beta[..., 0], log_decay=log_decay, state=state)
    out, last = _chunks(inputs, starts, execution)
    return mark(out, marks.tokens), mark(last, marks.last)


def _chunks(
    inputs: _Inputs, starts: Array | None, execution: RecurrenceExecution
) -> tuple[Array, Array]:
    """All chunks at once; arrays [B, H, 1, N, C, ...] inside, N chunks."""
    q, k, v, beta, log_decay, state = inputs
    chunk = execution.chunk
    axis_name = execution.axis_name
    batch, length, heads, _ = v.shape
    dtype, wide = v.dtype, state.dtype
    q, k, v, beta, log_decay = (in_chunks(x, heads, chunk) for x in (q, k, v, beta, log_decay))
    gates, pairs = gates_of(log_decay)
    decays = jnp.exp(pairs)
    of_keys = dot(k, jnp.swapaxes(k, -1, -2), dtype, wide) * decays
    of_keys, enter, write, kept = gates.applied(k, k, of_keys, starts, chunk)
    scores = dot(q, jnp.swapaxes(k, -1, -2), dtype, wide) * decays
    scores, read, _, _ = gates.applied(q, k, scores, starts, chunk)
    beta = beta[..., None]
    # Row i says: u_i and, of the tokens before it, what their u have stored under its key.
    system = jnp.tril(beta * of_keys, -1)
    sides = jnp.concatenate([beta * v.astype(wide), beta * enter.astype(wide)], -1)
    stored, forgotten = jnp.split(dot(_inverse(system), sides, wide, wide), [v.shape[-1]], -1)
    write = jnp.swapaxes(write, -1, -2)
    # Between chunks at full precision: nothing refines the recurrence.
    erased = dot(write, forgotten, wide, wide)
    carried = kept[..., None, None] * _identity(erased) - erased
    drive = dot(write, stored, wide, wide)
    state = state[:, :, None]
    states = affine_scan(carried, drive, state, kind="matrix", axis=3, axis_name=axis_name)
    before = states_before(states, state, axis_name)
    new = stored - dot(forgotten, before, dtype, wide)
    out = dot(scores, new, dtype, wide) + dot(read, before, dtype, wide)
    return out_of_chunks(out, length).astype(dtype), states[:, :, 0, -1]


def _inverse(below: Float[Array, "... C C"]) -> Float[Array, "... C C"]:
    """Inverts I + `below`, which is 0 on the diagonal and above, by merging blocks of 1, 2, 4, ... rows.

    [[A, 0], [B, D]] has the inverse [[A', 0], [-D' B A', D']]: products alone, all blocks of all chunks at once.
    Solvers of triangular systems go row by row, and take 100 times as long for many small ones on CPUs.
    """
    size = below.shape[-1]
    inverse, wide = jnp.ones((*below.shape[:-2], size, 1, 1), below.dtype), below.dtype
    while (rows := inverse.shape[-1]) < size:
        pairs = size // (2 * rows)
        first, second = jnp.unstack(
            inverse.reshape(*below.shape[:-2], pairs, 2, rows, rows), axis=-3
        )
        blocks = below.reshape(*below.shape[:-2], pairs, 2, rows, pairs, 2, rows)[
            ..., 1, :, :, 0, :
        ]
        across = jnp.stack([blocks[..., i, :, i, :] for i in range(pairs)], -3)
        across = -dot(dot(second, across, wide, wide), first, wide, wide)
        top = jnp.concatenate([first, jnp.zeros_like(first)], -1)
        inverse = jnp.concatenate([top, jnp.concatenate([across, second], -1)], -2)
    return inverse[..., 0, :, :]


def _identity(like: Array) -> Array:
    """Returns an identity matrix for the last two axes."""
    return jnp.eye(like.shape[-1], dtype=like.dtype).reshape(
        (1,) * (like.ndim - 2) + like.shape[-2:]
    )


def _check(q, k, v, beta, log_decay, state) -> None:
    """Refuses arrays that do not fit each other."""
    heads, shape = q.shape[:3], (q.shape[0], q.shape[2], k.shape[-1], v.shape[-1])
    wanted = {"k": (k, q.shape), "v": (v, (*heads, v.shape[-1])), "beta": (beta, heads)}
    wanted |= {"log_decay": (log_decay, heads), "state": (state, shape)}
    for name, (x, legal) in wanted.items():
        if x is not None and x.shape != legal:
            raise UsageError(
                f"{name} of shape {x.shape} does not fit q of {q.shape} and v of {v.shape}; give {legal}."
            )
