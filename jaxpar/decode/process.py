"""From a model's logits to what may be drawn: bias, penalties, a mask, temperature, top-k, top-p, min-p, in this order.

The order is that of Hugging Face. Where logits are equal, and in bf16 they often are, the lower token goes first: the
tokens that are left are the first of the ranking by (logit descending, token ascending).
"""

import dataclasses
import math
from collections.abc import Callable

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from jaxpar.decode.penalties import Counts, penalise
from jaxpar.fields import AtLeast, Between, Finite, Positive, check_fields, field
from jaxpar.mesh import platform
from jaxpar.types import UsageError

__all__ = ["Sampling", "is_stuck", "process", "token_log_probs"]


@dataclasses.dataclass(frozen=True)
class Sampling:
    """How the next token is drawn; static under jit.

    Attributes:
      max_new_tokens: Most tokens to add.
      temperature: Logits are divided by it; 0 takes the likeliest token (of equals the lowest) after bias, penalties
        and mask.
      top_k: Only the k likeliest tokens may be drawn; 0 means all.
      top_p: Only the smallest set of likeliest tokens whose probability reaches p may be drawn (nucleus sampling,
        arXiv:1904.09751); the probabilities are those after temperature and top-k.
      min_p: Only tokens may be drawn that have at least this share of the likeliest one's probability
        (arXiv:2407.01082); 0 means all.
      repetition_penalty: Divides positive and multiplies negative logits of tokens that stand in the row, the prompt
        included (CTRL, arXiv:1909.05858); 1 is none, over 1 makes them rarer.
      presence_penalty: Taken from the logits of tokens that were generated, the prompt left out (OpenAI).
      frequency_penalty: Taken from them once for each time (OpenAI).
      stop_token: A row ends when it draws this token; -1 is none. A Hugging Face folder's own ends are `generate`'s
        `stop_tokens`.
    """

    max_new_tokens: int = field(100, AtLeast(1))
    temperature: float = field(1.0, AtLeast(1e-30, also=(0,)))  # under that quotients overflow
    top_k: int = field(0, AtLeast(0))
    top_p: float = field(1.0, Between(0, 1, "(]"))
    min_p: float = field(0.0, Between(0, 1))
    repetition_penalty: float = field(1.0, Positive())
    presence_penalty: float = field(0.0, Finite())
    frequency_penalty: float = field(0.0, Finite())
    stop_token: int = field(-1, AtLeast(-1))

    def __post_init__(self):
        """Refuses impossible numbers."""
        check_fields(self, "sampling.")

    @property
    def needs_counts(self) -> bool:
        """Whether `process` must be told which tokens each row has."""
        return (self.repetition_penalty, self.presence_penalty, self.frequency_penalty) != (1, 0, 0)


def process(
    logits: Float[Array, "*batch V"],
    sampling: Sampling,
    *,
    counts: Counts | None = None,
    bias: Float[Array, "*#batch V"] | None = None,
    allowed: Bool[Array, "*#batch V"] | None = None,
) -> Float[Array, "*batch V"]:
    """Returns the logits of the law that the next token is drawn from; -inf for what may not be drawn.

    Bias, then penalties, then the mask; then, unless `temperature` is 0, where the largest of these is taken and all
    else is left as it is: temperature, top-k, top-p, min-p. The likeliest token always stays.

    Top-k and top-p cost some 25 passes over the logits each and sort nothing; the others come with what stands around
    them. Sums are rounded: where a mass is as near to p as that, a token more or less may be left.

    Args:
      logits: Of a model; in bf16 they are widened first.
      sampling: Static.
      counts: What stands in each row, for penalties.
      bias: Added to the logits; finite or -inf.
      allowed: What may be drawn, as by an automaton. A row that allows nothing comes back as -inf throughout, without
        NaN: a user's mistake that jit cannot raise; `is_stuck` tells it.

    Returns:
      Logits in float32 at least.

    Raises:
      UsageError: If `sampling` has penalties and there are no counts.
    """
    x = logits.astype(jnp.promote_types(logits.dtype, jnp.float32))
    if bias is not None:
        x = x + jnp.broadcast_to(bias, x.shape).astype(x.dtype)
    if sampling.needs_counts:
        if counts is None:
            raise UsageError(
                "penalties of repetition, presence or frequency need the counts of each row's tokens."
            )
        x = penalise(
            x,
            counts,
            sampling.repetition_penalty,
            sampling.presence_penalty,
            sampling.frequency_penalty,
        )
    if allowed is not None:
        x = jnp.where(jnp.broadcast_to(allowed, x.shape), x, -jnp.inf)
    if sampling.temperature == 0:
        return x
    if sampling.temperature != 1:
        x = x / sampling.temperature
    if 0 < sampling.top_k < x.shape[-1]:
        x = _first(x, jnp.ones_like(x), float(sampling.top_k))
    if sampling.top_p < 1:
        weights = jnp.exp(x - _largest(x))
        # A product that is zero would be reached by no token at all.
        target = jnp.maximum(
            sampling.top_p * weights.sum(-1, keepdims=True), jnp.finfo(x.dtype).tiny
        )
        x = _first(x, weights, target)
    if sampling.min_p > 0:
        x = jnp.where(x - _largest(x) < math.log(sampling.min_p), -jnp.inf, x)
    return x


def is_stuck(processed: Float[Array, "*batch V"]) -> Bool[Array, "*batch"]:
    """Returns where no token can be drawn: a mask left none, or the logits held NaN or +inf."""
    return ~jnp.isfinite(processed.max(-1))


def token_log_probs(
    logits: Float[Array, "*batch V"], tokens: Int[Array, "*batch"]
) -> Float[Array, "*batch"]:
    """Returns the log-probability of one token a row, in float32 at least: log softmax(logits)[token].

    Of processed logits it is what the token was drawn with (at temperature 0 that of a draw at temperature 1), of a
    model's own the model's. A token that may not be drawn has -inf. Costs one pass over the logits.
    """
    x = logits.astype(jnp.promote_types(logits.dtype, jnp.float32))
    picked = jnp.take_along_axis(x, tokens[..., None], axis=-1)[..., 0]
    # Where all are -inf the difference would be NaN.
    return jnp.where(picked == -jnp.inf, -jnp.inf, picked - jax.nn.logsumexp(x, axis=-1))


def _largest(x: jax.Array) -> jax.Array:
    """The largest logit of a row, 0 where nothing is allowed: what is taken from all without making a NaN."""
    largest = x.max(-1, keepdims=True)
    return jnp.where(largest == -jnp.inf, 0, largest)


def _first(x: jax.Array, weights: jax.Array, target: jax.Array | float) -> jax.Array:
    """Leaves the first tokens of the ranking whose weights reach `target`; all where they never do.

    The last logit of them is found by its bits, from the highest on, and the last token among its equals by its own:
    16 passes over the row, and half a pass for each bit of V. A sort takes several times as long for more rows than a
    few, and so does `lax.top_k`, which sorts on a GPU; nothing waits for what the values are.
    """
    order = _order(x)
    bits = jnp.iinfo(order.dtype).bits

    def mass(chosen: jax.Array) -> jax.Array:
        return jnp.where(chosen, weights, 0).sum(-1, keepdims=True)

    last = _largest_number(lambda number: mass(order >= number) >= target, bits, order)
    equal = order == last
    each = jnp.where(equal, weights, 0).max(-1, keepdims=True)
    rest = jnp.maximum(
        target - mass(order > last), each
    )  # another sum, and rounded otherwise: one token at least
    need = jnp.ceil(rest / each)
    places = jax.lax.broadcasted_iota(order.dtype, x.shape, x.ndim - 1)[
        ..., ::-1
    ]  # the lower token is the first

    def count(chosen: jax.Array) -> jax.Array:
        return chosen.sum(-1, keepdims=True).astype(need.dtype)

    bits = (x.shape[-1] - 1).bit_length()
    lowest = _largest_number(
        lambda number: count(equal & (places >= number)) >= need, bits + bits % 2, order
    )
    return jnp.where((order > last) | (equal & (places >= lowest)), x, -jnp.inf)


def _order(x: jax.Array) -> jax.Array:
    """Unsigned integers in the order of the logits, equal where these are; NaN, which must be seen, is the largest."""
    kind = jnp.dtype(f"int{8 * x.dtype.itemsize}")
    bits = jax.lax.bitcast_convert_type(
        jnp.where(x == 0, 0, x), kind
    )  # -0.0 and 0.0 have other bits
    lowest, highest = jnp.iinfo(kind).min, jnp.iinfo(kind).max
    # Of negative numbers larger bits are lower ones.
    bits = jnp.where(jnp.isnan(x), highest, jnp.where(bits < 0, bits ^ highest, bits))
    return jax.lax.bitcast_convert_type(bits ^ lowest, jnp.dtype(f"u{kind}"))


def _largest_number(
    holds: Callable[[jax.Array], jax.Array], bits: int, like: jax.Array
) -> jax.Array:
    """The largest number of that many bits for which `holds`; it does for 0, and for all that are less than another.

    Two bits at a time: three numbers are tried in one pass over a row.
    """

    def digit(i: jax.Array, number: jax.Array) -> jax.Array:
        shift = (bits - 2 - 2 * i).astype(number.dtype)
        tried = (holds(number | (jnp.asarray(d, number.dtype) << shift)) for d in (1, 2, 3))
        return number | (sum(each.astype(number.dtype) for each in tried) << shift)

    # On a GPU the passes are short, and a loop around them costs as much as they do.
    unroll = platform() == "gpu"
    return jax.lax.fori_loop(0, bits // 2, digit, jnp.zeros_like(like[..., :1]), unroll=unroll)
