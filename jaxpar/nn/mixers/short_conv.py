"""A token and the few before it: depthwise causal convolutions of a few taps, which stream and respect documents."""

import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from jaxpar.scan.sharded import from_earlier
from jaxpar.scan.varying import varying_as
from jaxpar.types import UsageError

__all__ = ["short_conv"]


def short_conv(
    x: Float[Array, "B T *N"],
    weight: Float[Array, "W *N"],
    before: Float[Array, "B W1 *N"] | None = None,
    *,
    starts: Bool[Array, "B T"] | None = None,
    valid: Int[Array, " B"] | None = None,
    axis_name: str | None = None,
) -> tuple[Float[Array, "B T *N"], Float[Array, "B W1 *N"]]:
    """Returns y[t] = sum over d of weight[W - 1 - d] x[t - d], of the same document, and the last W - 1 inputs.

    Inputs of documents that have ended are 0 in what is returned, so that they reach no later call.

    Args:
      x: Inputs, of any axes behind time.
      weight: Of W taps, that of the token itself last.
      before: The W - 1 inputs before the first, as returned; zeros by default.
      starts: Where another document begins.
      valid: How many tokens of each row count; what is returned ends with the last of these.
      axis_name: Mesh axis over which time is split, inside `jax.shard_map`; W - 1 inputs a device cross it.

    Raises:
      UsageError: If devices hold fewer than W - 1 tokens each.
    """
    batch, length, reach = x.shape[0], x.shape[1], len(weight) - 1
    tail = (1,) * (x.ndim - 2)
    before = (
        jnp.zeros((batch, reach, *x.shape[2:]), x.dtype)
        if before is None
        else before.astype(x.dtype)
    )
    if axis_name is not None:
        if length < reach:
            raise UsageError(
                f"a convolution of {reach + 1} taps needs {reach} tokens a device, but there are {length}."
            )
        last = x[:, length - reach :]
        if starts is not None:
            last = jnp.where(
                _lives(starts)[:, length - reach :].reshape(batch, reach, *tail), last, 0
            )
        before = from_earlier(last, axis_name, False)
    weight = varying_as(weight, x)  # so that devices sum its gradient once, and not tap by tap
    line: Array = jnp.concatenate([jnp.asarray(before), x], 1)
    whole = lambda w: w.reshape(1, 1, *w.shape).astype(x.dtype)  # noqa: E731
    out = x * whole(weight[reach])
    document = None if starts is None else jnp.cumsum(jnp.pad(starts, ((0, 0), (reach, 0))), 1)
    for back in range(1, reach + 1):
        tap = line[:, reach - back : reach - back + length] * whole(weight[reach - back])
        if document is not None:
            same = document[:, reach:] == document[:, reach - back : reach - back + length]
            tap = jnp.where(same.reshape(batch, length, *tail), tap, 0)
        out = out + tap
    return out, _last(line, reach, starts, valid)


def _lives(starts: Bool[Array, "B T"]) -> Bool[Array, "B T"]:
    """Whether a token is of the document that the last one is of."""
    document = jnp.cumsum(starts, 1)
    return document == document[:, -1:]


def _last(line: Array, reach: int, starts: Array | None, valid: Array | None) -> Array:
    """Returns the inputs that the next token's taps see: the last `reach` that count, 0 where a document ended."""
    batch, length = line.shape[0], line.shape[1] - reach
    count = jnp.full((batch,), length) if valid is None else valid
    places = count[:, None] + jnp.arange(reach)[None]
    kept = jnp.take_along_axis(line, places.reshape(batch, reach, *(1,) * (line.ndim - 2)), 1)
    if starts is None:
        return kept
    document = jnp.cumsum(jnp.pad(starts, ((0, 0), (reach, 0))), 1)
    current = jnp.take_along_axis(document, (count + reach - 1)[:, None], 1) if line.shape[1] else 0
    same = jnp.take_along_axis(document, places, 1) == current
    return jnp.where(same.reshape(batch, reach, *(1,) * (line.ndim - 2)), kept, 0)
