"""Attention of a piece of packed rows' queries to a piece of their keys by cuDNN, and its gradient from given sums.

Where numbers of documents rise, a piece and one that lies before it have one document in common at most: the last of
the earlier, the first of the later. What is seen is then a rectangle a row, a first run of the queries and a last run
of the keys, which cuDNN takes by two lengths, the keys turned round; where no row has one, nothing is computed. A piece
and itself are what `jaxpar.nn.attention.packed` computes. Whether numbers rise is seen in the batch, by each pair for
itself; where they do not, the pair is computed by the dense form, in blocks of queries.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Int

from jaxpar.lower.trial import relative_error, tried
from jaxpar.nn.attention import _cudnn
from jaxpar.nn.attention.gradient import Done, attend_gradient
from jaxpar.nn.attention.kernels import in_blocks
from jaxpar.nn.attention.packed import by_number, gradient_by_cudnn
from jaxpar.nn.attention.state import attend, finish
from jaxpar.nn.attention.visibility import Visibility, Visible, Where

Documents = tuple[Int[Array, "B T"], Int[Array, "B S"]]


def forward(q: Array, k: Array, v: Array, causal: bool, segments: Documents) -> tuple[Array, Array]:
    """Returns outputs [B, T, H, K], 0 of what sees nothing, and log-sum-exp [B, T, H] in float32, then -infinity.

    Of a causal pair both are the same piece; else the keys lie before the queries.
    """

    def by_blocks(q, k, v, own, other):
        visibility = Visibility(rule=Visible(causal))
        state = in_blocks(q, k, v, _where(q, own), _where(k, other), visibility)
        return finish(state).astype(q.dtype), state.log_sum

    def packed(most, q, k, v, own, _):
        return _cudnn.forward(q, _copied(q, k), _copied(q, v), causal, _cudnn.documents(own, most))

    def rectangle(q, k, v, own, other):
        _, seen, lengths = _common(own, other)
        out, log_sum = _cudnn.forward(q, jnp.flip(k, 1), jnp.flip(v, 1), False, lengths=lengths)
        return jnp.where(seen[..., None, None], out, 0), jnp.where(
            seen[..., None], log_sum, -jnp.inf
        )

    def nothing(q, *_):
        return jnp.zeros_like(q), jnp.full(q.shape[:3], -jnp.inf, jnp.float32)

    if causal:
        return by_number(packed, by_blocks, segments[0], q, k, v, *segments)
    return jax.lax.switch(
        _common(*segments)[0], [nothing, rectangle, by_blocks], q, k, v, *segments
    )


def backward(
    q: Array,
    k: Array,
    v: Array,
    done: Done,
    causal: bool,
    segments: Documents,
) -> tuple[Array, Array, Array]:
    """Returns what these keys add to the gradients by q, k and v."""

    def by_blocks(q, k, v, done, own, other):
        known = done.output_gradient()
        queries = _where(q, own)
        keys = _where(k, other)
        return attend_gradient(q, k, v, queries, keys, known, Visible(causal))

    def packed(most, q, k, v, done, own, _):
        grads = gradient_by_cudnn(causal, most, q, _copied(q, k), _copied(q, v), own, done)
        dq, dk, dv = (x.astype(jnp.float32) for x in grads)
        return dq, *(x.reshape(*k.shape[:3], -1, k.shape[3]).sum(3) for x in (dk, dv))

    def rectangle(q, k, v, done, own, other):
        _, seen, lengths = _common(own, other)
        both = jnp.flip(k, 1), jnp.flip(v, 1)
        dq, *grads = _cudnn.backward(q, *both, done, False, lengths=lengths)
        has_any = seen[:, :1]  # of a row that has none, one token each was computed
        read = jnp.flip(has_any & (_places(k) < lengths[1][:, None]), 1)
        dk, dv = (
            jnp.where(read[..., None, None], jnp.flip(x, 1), 0).astype(jnp.float32) for x in grads
        )
        return jnp.where(seen[..., None, None], dq, 0).astype(jnp.float32), dk, dv

    def nothing(q, k, v, *_):
        return tuple(jnp.zeros(x.shape, jnp.float32) for x in (q, k, v))

    operands = (q, k, v, done, *segments)
    if causal:
        return by_number(packed, by_blocks, segments[0], *operands)
    return jax.lax.switch(_common(*segments)[0], [nothing, rectangle, by_blocks], *operands)


def _common(own: Array, other: Array) -> tuple[Array, Bool[Array, "B T"], tuple[Array, Array]]:
    """What queries have in common with keys before them.

    Returns:
      0 for nothing, 1 for one document a row at most, 2 for what is not known; which queries are in it; how many
      queries and keys of each row are, 1 where none is, since cuDNN takes no 0.
    """
    rises = (own[:, 1:] >= own[:, :-1]).all() & (other[:, 1:] >= other[:, :-1]).all()
    rises = rises & (other[:, -1] <= own[:, 0]).all()
    is_common = own[:, 0] == other[:, -1]
    seen = is_common[:, None] & (own == own[:, :1])
    read = is_common[:, None] & (other == other[:, -1:])
    queries, keys = (jnp.maximum(x.sum(1, dtype=jnp.int32), 1) for x in (seen, read))
    return jnp.where(rises, is_common.any(), 2), seen, (queries, keys)


def _copied(q: Array, x: Array) -> Array:
    """Keys as cuDNN's packed form takes them: jax 0.10 finds them by the number of queries' heads."""
    again = q.shape[2] // x.shape[2] if jax.__version_info__ < (0, 11, 2) else 1
    return jnp.repeat(x, again, axis=2)


def _places(x: Array) -> Array:
    return jnp.arange(x.shape[1], dtype=jnp.int32)[None]


def _where(x: Array, segments: Array) -> Where:
    """Positions of queries or keys in their piece, and their documents."""
    return Where(positions=_places(x), segments=segments)


@functools.cache
def is_right() -> bool:
    """Whether cuDNN's sums of pieces of documents agree here with the dense form's, as was tried once."""
    return tried("cuDNN's attention of pieces of documents", "the dense form", _errors, "gpu")


def _errors() -> list[Array]:
    """Relative errors of two rows in two pieces: a document crosses the border of one of them."""
    draw = np.random.default_rng(0).standard_normal
    q, k, v, g = (jnp.asarray(draw((2, 256, heads, 64)), jnp.bfloat16) for heads in (4, 2, 2, 4))
    segments = np.stack([np.repeat([1, 2, 3], [28, 190, 38]), np.repeat([7, 8], 128)]).astype(
        np.int32
    )
    seen = jnp.asarray(np.tril(segments[:, :, None] == segments[:, None]))
    state = attend(q, k, v, seen)
    out, log_sum = finish(state).astype(q.dtype), state.log_sum
    low, high, found, wanted = slice(0, 128), slice(128, 256), [], []
    for rows, columns, causal in ((high, low, False), (high, high, True)):
        arrays, both = (
            (q[:, rows], k[:, columns], v[:, columns]),
            tuple(segments[:, x] for x in (rows, columns)),
        )
        both = jnp.asarray(both[0]), jnp.asarray(both[1])
        more, sums = forward(*arrays, causal, both)
        exact = attend(*arrays, seen[:, rows, columns])
        found += [more, jnp.exp(sums)]
        wanted += [finish(exact), jnp.exp(exact.log_sum)]
        done = Done(out=out[:, rows], log_sum=log_sum[:, rows], gradient=g[:, rows])
        found += backward(*arrays, done, causal, both)
        known = done.output_gradient()
        queries = _where(arrays[0], both[0])
        keys = _where(arrays[1], both[1])
        wanted += attend_gradient(*arrays, queries, keys, known, Visible(causal))
    return [relative_error(got, want) for got, want in zip(found, wanted, strict=True)]
