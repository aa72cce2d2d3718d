"""Attention of a piece of queries to a piece of keys by a kernel, as sums that other pieces can be added to.

No kernel takes positions, so that a pair of pieces is "full" (each query sees each key) or "causal" (equally long, each
query sees the keys up to its own index); what nobody sees is not computed. The log-sum-exp of such a pair and the
gradient from the log-sum-exp over all pieces are private to JAX: before their first use in a process they are traced,
and where there is the device they are compared with the dense form. If either fails, one warning tells of it and the
dense form is taken, in blocks of queries.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from jaxpar.lower.trial import relative_error, tried
from jaxpar.mesh import platform
from jaxpar.nn.attention import _cudnn, _documents, _splash
from jaxpar.nn.attention.gradient import Done, attend_gradient
from jaxpar.nn.attention.kernels import in_blocks
from jaxpar.nn.attention.packed import packing_is_right
from jaxpar.nn.attention.state import merge
from jaxpar.nn.attention.visibility import Visibility, Visible, Where
from jaxpar.scan.monoid import LogSumExp

__all__ = ["attend_pair", "attend_pair_gradient"]

Documents = tuple[Int[Array, "B T"], Int[Array, "B S"]]
FORWARD = {"cudnn": _cudnn.forward, "splash": _splash.forward_with_sum}
BACKWARD = {"cudnn": _cudnn.backward, "splash": _splash.backward}


def attend_pair(
    q: Float[Array, "B T H K"],
    k: Float[Array, "B S G K"],
    v: Float[Array, "B S G K"],
    causal: bool,
    impl: str = "auto",
    segments: Documents | None = None,
) -> LogSumExp:
    """Computes the sums of these queries over these keys.

    Args:
      q: Queries.
      k: Keys; G divides H.
      v: Values.
      causal: Whether query i sees keys 0 to i; then T = S. Else it sees all.
      impl: "cudnn", "splash", "xla" (dense, in blocks of queries), or "auto": the platform's kernel where it can.
      segments: Numbers of documents, of queries and of keys: those of another one are not seen. By "cudnn" the keys of
        a pair that is not causal lie before the queries; of numbers that rise the two have one document in common.

    Returns:
      (log-sum-exp [B, T, H], ones, outputs [B, T, H, K]) of a kernel, the dense form's sums of "xla"; in float32 at
      least. A kernel's outputs were rounded to the dtype of the queries.

    Cost: 4 B H T S K operations, by a kernel half of them if causal; memory O(B H T K).
    """
    impl = _resolve(impl, q, k, segments is not None)
    if impl == "xla":
        queries, keys = _where(q, k, segments)
        return in_blocks(q, k, v, queries, keys, Visibility(rule=Visible(causal)))
    if segments is None:
        out, log_sum = FORWARD[impl](q, k, v, causal)
    else:
        out, log_sum = _documents.forward(q, k, v, causal, segments)
    return LogSumExp(log_sum, jnp.ones_like(log_sum), out.astype(jnp.float32))


def attend_pair_gradient(
    q: Float[Array, "B T H K"],
    k: Float[Array, "B S G K"],
    v: Float[Array, "B S G K"],
    done: Done,
    causal: bool,
    impl: str = "auto",
    segments: Documents | None = None,
) -> tuple[Float[Array, "B T H K"], Float[Array, "B S G K"], Float[Array, "B S G K"]]:
    """Computes what these keys add to the gradients by q, k and v, in float32 at least.

    Args:
      q: Queries.
      k: Keys; G divides H.
      v: Values.
      done: Outputs and log-sum-exp over *all* the keys that the queries see, here or elsewhere,
        and the gradient of these outputs.
      causal: As in `attend_pair`.
      impl: As there.
      segments: As there.

    Cost: 10 B H T S K operations, by a kernel half of them if causal; memory O(B H T K).
    """
    impl = _resolve(impl, q, k, segments is not None)
    if impl == "xla":
        known = done.output_gradient()
        queries, keys = _where(q, k, segments)
        return attend_gradient(q, k, v, queries, keys, known, Visible(causal))
    if segments is not None:
        return _documents.backward(q, k, v, done, causal, segments)
    wide = jnp.promote_types(q.dtype, jnp.float32)
    dq, dk, dv = (grad.astype(wide) for grad in BACKWARD[impl](q, k, v, done, causal))
    return dq, dk, dv


def _where(q: Array, k: Array, segments: Documents | None) -> tuple[Where, Where]:
    """Positions of queries and of keys in their pieces, and their documents."""
    own, other = (None, None) if segments is None else segments
    queries = Where(positions=jnp.arange(q.shape[1])[None], segments=own)
    keys = Where(positions=jnp.arange(k.shape[1])[None], segments=other)
    return queries, keys


def _resolve(impl: str, q: Array, k: Array, has_documents: bool) -> str:
    """The platform's kernel if it takes these shapes and is right, else "xla"; of documents cuDNN alone."""
    if impl != "auto":
        return impl
    name = {"gpu": "cudnn", "tpu": "splash"}.get(platform(), "xla")
    width = q.shape[3]
    fits = {
        "cudnn": q.dtype in (jnp.bfloat16, jnp.float16) and width % 8 == 0 and width <= 256,
        "splash": q.dtype in (jnp.bfloat16, jnp.float32)
        and width % 64 == 0
        and q.shape[1] % 128 == 0
        and k.shape[1] % 128 == 0,
    }
    if not fits.get(name) or not _is_right(name):
        return "xla"
    knows = not has_documents or (name == "cudnn" and packing_is_right() and _documents.is_right())
    return name if knows else "xla"


@functools.cache
def _is_right(name: str) -> bool:
    """Whether a kernel can be traced here and, where its device is, agrees with the dense form."""
    kind = "tpu" if name == "splash" else "gpu"
    what = f"{name}'s attention with a log-sum-exp"
    return tried(what, "the dense form", functools.partial(_errors, name), kind)


def _errors(name: str) -> list[Array]:
    """Relative errors of sums and gradients of 256 queries, their keys in two pieces, against the dense form."""
    draw = np.random.default_rng(0).standard_normal
    q, k, v, g = (jnp.asarray(draw((1, 256, heads, 64)), jnp.bfloat16) for heads in (4, 2, 2, 4))
    half = q.shape[1] // 2

    def both(impl):
        def pair(rows, columns, causal):
            return attend_pair(q[:, rows], k[:, columns], v[:, columns], causal, impl)

        def gradient(rows, columns, causal):
            arrays = q[:, rows], k[:, columns], v[:, columns]
            done = Done(out=out[:, rows], log_sum=log_sum[:, rows], gradient=g[:, rows])
            return attend_pair_gradient(*arrays, done, causal, impl)

        low, high = slice(0, half), slice(half, None)
        first, second = pair(low, low, True), merge(pair(high, low, False), pair(high, high, True))
        state = jax.tree.map(lambda *x: jnp.concatenate(x, 1), first, second)
        out, log_sum = state.mean.astype(q.dtype), state.log_sum
        grads = [gradient(low, low, True), gradient(high, low, False), gradient(high, high, True)]
        return [out, log_sum, *jax.tree.leaves(grads)]

    return [relative_error(a, b) for a, b in zip(both(name), both("xla"), strict=True)]
