"""Attention within the documents of packed rows by cuDNN, which computes no pair of tokens of different ones.

cuDNN takes the lengths of up to M documents a row and keeps the log-sum-exp of each at the length of a row, B M H T
numbers; for the gradient it holds as many rows of queries' gradients, so that heads are taken a part at a time where M
is large. So M is the least of `MOST` that serves a batch, chosen by what it holds. A batch with more documents in a
row, or whose documents are no runs of rising numbers, is computed by blocks (`jaxpar.nn.attention.blockwise`).
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from jaxpar.lower.trial import relative_error, tried
from jaxpar.nn.attention import _cudnn
from jaxpar.nn.attention.blockwise import attention_by_blocks
from jaxpar.nn.attention.gradient import Done
from jaxpar.nn.attention.state import attend, finish
from jaxpar.nn.attention.visibility import Visibility, Visible

__all__ = ["attention_of_documents", "packing_is_right"]

MOST = (8, 32)
"""Documents of a row for which there is a program each; memory is set aside for the largest."""

AT_ONCE = 8
"""Documents of a row whose gradients of queries are held for all heads; of more, for a part of the heads at a time."""


def attention_of_documents(
    q: Float[Array, "B T H K"],
    k: Float[Array, "B T G K"],
    v: Float[Array, "B T G K"],
    segments: Int[Array, "B T"],
    causal: bool = True,
) -> Float[Array, "B T H K"]:
    """Computes attention of each token to its document, and of it to what came before if causal.

    Args:
      q: Queries, bfloat16 or float16.
      k: Keys; G divides H.
      v: Values.
      segments: Numbers of documents.
      causal: Whether later tokens are unseen.

    Cost: 4 H K operations a pair of tokens of one document, half of it if causal. Memory: O(B T H K), and while it is
    computed 4 M B H T bytes; its gradient as much as 4 max(8, M / G) B H T K. Reverse mode only.
    """
    if jax.__version_info__ < (
        0,
        11,
        2,
    ):  # jax 0.10 finds packed keys by the number of queries' heads
        k, v = (jnp.repeat(x, q.shape[2] // k.shape[2], axis=2) for x in (k, v))
    return _attention(causal, q, k, v, segments)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _attention(causal: bool, q: Array, k: Array, v: Array, segments: Array) -> Array:
    return _forward(causal, q, k, v, segments)[0]


def _forward(causal: bool, q: Array, k: Array, v: Array, segments: Array):
    def by_cudnn(most, q, k, v, segments):
        return _cudnn.forward(q, k, v, causal, _cudnn.documents(segments, most))

    def by_blocks(q, k, v, segments):
        out = _by_blocks(causal, q, k, v, segments)
        return out, jnp.zeros(q.shape[:3], jnp.float32)  # its backward pass makes its own

    out, log_sum = by_number(by_cudnn, by_blocks, segments, q, k, v, segments)
    return out, (q, k, v, segments, out, log_sum)


def _by_blocks(causal: bool, q: Array, k: Array, v: Array, segments: Array) -> Array:
    visibility = Visibility(rule=Visible(causal))
    return attention_by_blocks(q, k, v, segments=segments, visibility=visibility)


def _backward(causal: bool, kept: tuple, g: Array):
    q, k, v, segments, out, log_sum = kept
    done = Done(out=out, log_sum=log_sum, gradient=g)

    def by_cudnn(most, *arrays):
        return gradient_by_cudnn(causal, most, *arrays)

    def by_blocks(q, k, v, segments, done):
        _, pull = jax.vjp(functools.partial(_by_blocks, causal, segments=segments), q, k, v)
        return pull(done.gradient.astype(q.dtype))

    return *by_number(by_cudnn, by_blocks, segments, q, k, v, segments, done), None


_attention.defvjp(_forward, _backward)


def gradient_by_cudnn(
    causal: bool,
    most: int,
    q: Array,
    k: Array,
    v: Array,
    segments: Array,
    done: Done,
) -> tuple[Array, ...]:
    """Returns the gradients by q, k and v of rows with at most so many documents, some heads at a time."""
    packed = _cudnn.documents(segments, most)
    pieces = _pieces(k.shape[2], most)
    arrays = jax.tree.map(functools.partial(_in_pieces, pieces=pieces), (q, k, v, done))

    def some_heads(arrays):
        q, k, v, done = arrays
        return _cudnn.backward(q, k, v, done, causal, packed)

    grads = jax.lax.map(some_heads, arrays)
    return tuple(
        jnp.moveaxis(x, 0, 2).reshape(like.shape) for x, like in zip(grads, (q, k, v), strict=True)
    )


def _pieces(groups: int, most: int) -> int:
    """In how many parts the key heads are taken: as few as hold `AT_ONCE` documents for all heads, or each alone."""
    return next(
        n for n in range(1, groups + 1) if groups % n == 0 and (n == groups or n * AT_ONCE >= most)
    )


def _in_pieces(x: Array, pieces: int) -> Array:
    """Splits the heads of [B, T, H, ...]: [pieces, B, T, H / pieces, ...]."""
    return jnp.moveaxis(x.reshape(*x.shape[:2], pieces, -1, *x.shape[3:]), 2, 0)


def by_number(by_cudnn, by_blocks, segments: Array, *args):
    """Calls the form of the documents there are."""
    length = segments.shape[1]
    steps = segments[:, 1:] - segments[:, :-1]
    count = 1 + (steps != 0).sum(1).max()
    most = [min(number, length) for number in MOST if number < 2 * length]
    is_run = (steps >= 0).all()
    which = jnp.where(is_run, (count > jnp.array(most)).sum(), len(most))
    return jax.lax.switch(
        which, [*(functools.partial(by_cudnn, number) for number in most), by_blocks], *args
    )


@functools.cache
def packing_is_right() -> bool:
    """Whether cuDNN packs documents here: on Hopper or later, with cuDNN 9.6 or later, as it was tried once."""
    return tried("cuDNN's attention of packed documents", "a loop over blocks", _errors, "gpu")


def _errors() -> list[Array]:
    """Relative errors of outputs and gradients of two rows with four documents, against the dense form."""
    draw = np.random.default_rng(0).standard_normal
    q, k, v, g = (jnp.asarray(draw((2, 256, heads, 64)), jnp.bfloat16) for heads in (4, 2, 2, 4))
    segments = jnp.asarray(
        np.stack([np.repeat([1, 2, 3], [1, 100, 155]), np.full(256, 7)]), jnp.int32
    )
    seen = jnp.tril(jnp.ones((1, 256, 256), bool)) & (segments[:, :, None] == segments[:, None, :])

    def dense(q, k, v):
        return finish(attend(q, k, v, seen)).astype(q.dtype)

    def packed(q, k, v):
        return attention_of_documents(q, k, v, segments)

    both = []
    for run in (packed, dense):
        out, pull = jax.vjp(run, q, k, v)
        both.append((out, *pull(g)))
    return [relative_error(got, want) for got, want in zip(*both, strict=True)]
