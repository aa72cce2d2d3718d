"""Linear attention whose input gates are exponentials: normalised, and stabilised by a running maximum."""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from jaxpar._older_fields import newer_arguments
from jaxpar.nn.mixers.linear_attention import linear_attention, only_valid
from jaxpar.nn.mixers.options import OLDER, Packing, Readout, RecurrenceExecution
from jaxpar.scan import Monoid, scan_monoid
from jaxpar.scan.sharded import from_earlier, is_first

__all__ = ["exponential_attention"]


def exponential_attention(
    q: Float[Array, "B T H K"],
    k: Float[Array, "B T H K"],
    v: Float[Array, "B T H V"],
    log_forget: Float[Array, "B T H"],
    log_input: Float[Array, "B T H"],
    *,
    state: tuple[Float[Array, "B H K V1"], Float[Array, "B H"]] | None = None,
    packing: Packing = Packing(),
    execution: RecurrenceExecution = RecurrenceExecution(),
    **older: object,
) -> tuple[Float[Array, "B T H V"], tuple[Float[Array, "B H K V1"], Float[Array, "B H"]]]:
    """Returns the mLSTM's h[t] and its state after the last token (Beck et al. 2024, arXiv:2405.04517, section 2.3).

        C[t] = f[t] C[t-1] + i[t] k[t] v[t]^T,   n[t] = f[t] n[t-1] + i[t] k[t],
        h[t] = q[t] C[t] / max(abs(q[t] n[t]), 1),   f = exp(log_forget), i = exp(log_input)

    n is a column of C whose value is always 1, so that both are one `linear_attention`. Input gates of any size are
    taken: the state is kept divided by exp(m), m being the largest log of a weight in it, rounded to a whole number, so
    that m[t-1] - m[t] is exact however large they are. No derivative passes through m, on which h does not depend.

    Args:
      q: Queries, scaled as they shall be.
      k: Keys.
      v: Values.
      log_forget: Logarithms of forget gates, not positive.
      log_input: Logarithms of input gates.
      state: (C and n divided by exp(round(m)), as [K, V + 1]; m), as returned; empty by default.
      packing: Documents in the rows, and their tokens that count.
      execution: Form of the computation, as of `linear_attention`.
      **older: Values of fields that were arguments, until the first release.
    """
    groups = {"packing": packing, "execution": execution}
    packing, execution = newer_arguments("exponential_attention", OLDER, groups, older).values()
    wide = jnp.promote_types(jnp.result_type(q, k, v), jnp.float32)
    log_forget, log_input = log_forget.astype(wide), log_input.astype(wide)
    batch, heads = v.shape[0], v.shape[2]
    if state is None:
        matrix, first = (
            jnp.zeros((batch, heads, k.shape[-1], v.shape[-1] + 1), wide),
            jnp.full((batch, heads), -jnp.inf),
        )
    else:
        matrix, first = state
    first = first.astype(wide)
    if v.size == 0:  # no token, or no row: there is no largest weight to read
        return jnp.zeros_like(v), (matrix.astype(wide), first)
    largest, before = _running_maximum(log_forget, log_input, first, packing, execution.axis_name)
    scale, before = jnp.round(largest), jnp.round(before)
    # Of an empty state nothing is kept, whatever its decay.
    decay = jnp.where(
        jnp.isneginf(before), 0, log_forget + (jnp.where(jnp.isneginf(before), 0, before) - scale)
    )
    if packing.starts is not None:
        decay = jnp.where(packing.starts[..., None], 0, decay)
    weight = jnp.exp(log_input - scale)
    # Above zero where exp(-scale) is none: an output of nothing, 0 / floor, is 0 then.
    floor = jnp.maximum(jnp.exp(-scale), jnp.finfo(wide).tiny)
    weighted = k.astype(wide) * weight[..., None]
    out, matrix = linear_attention(
        q.astype(v.dtype),
        weighted.astype(v.dtype),
        v,
        decay,
        state=matrix,
        packing=packing,
        readout=Readout(floor=floor),
        execution=execution,
    )
    if packing.valid is None:
        last = largest[:, -1]
    else:
        counts = (packing.valid > 0)[:, None]
        last = jnp.where(counts, _at(largest, packing.valid), first)
    return out, (matrix, last)


def _running_maximum(log_forget, log_input, first, packing: Packing, axis_name: str | None):
    """Returns m[t] = max(log_forget[t] + m[t-1], log_input[t]), and m[t-1]; constants."""
    log_forget, log_input, first = jax.lax.stop_gradient((log_forget, log_input, first))
    (log_forget,), starts = only_valid((log_forget,), packing)
    if starts is not None:
        log_forget = jnp.where(starts[..., None], -jnp.inf, log_forget)
    entered = _combine((first, first), (log_forget[:, 0], log_input[:, 0]))[1]
    if axis_name is not None:
        entered = jnp.where(is_first(axis_name, False), entered, log_input[:, 0])
    log_input = jnp.concatenate([entered[:, None], log_input[:, 1:]], 1)
    largest = scan_monoid(MAX_PLUS, (log_forget, log_input), axis=1, axis_name=axis_name)[1]
    if axis_name is not None:
        first = jnp.where(
            is_first(axis_name, False), first, from_earlier(largest[:, -1], axis_name, False)
        )
    return largest, jnp.concatenate([first[:, None], largest[:, :-1]], 1)


def _at(largest: Float[Array, "B T H"], valid: Int[Array, " B"]) -> Float[Array, "B H"]:
    """Returns m at the last token that counts."""
    return jnp.take_along_axis(largest, jnp.maximum(valid - 1, 0)[:, None, None], 1)[:, 0]


def _combine(earlier, later):
    decay, top = earlier
    more, other = later
    # A start is -inf, and -inf + NaN is NaN: what is forgotten is selected, not added.
    forgets = more == -jnp.inf
    sums = jnp.where(forgets, more, decay + more)
    return sums, jnp.where(forgets, other, jnp.maximum(top + more, other))


MAX_PLUS = Monoid(
    _combine, lambda element: (jnp.zeros_like(element[0]), jnp.full_like(element[1], -jnp.inf))
)
"""Sums and maxima: m[t] = max(a[t] + m[t-1], b[t])."""
