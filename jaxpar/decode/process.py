"""From a model's logits to what may be drawn: bias, penalties, a mask, temperature, top-k, top-p, min-p, in this order.

The order is that of Hugging Face. Where logits are equal, and in bf16 they often are, the lower token goes first: the
tokens that are left are the first of the ranking by (logit descending, token ascending), however a sort is made.
"""

import dataclasses
import math

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from jaxpar.decode.penalties import Counts, penalise
from jaxpar.fields import AtLeast, Between, Finite, Positive, check_fields, field
from jaxpar.types import UsageError

__all__ = ["Sampling", "is_stuck", "process", "token_log_probs"]

PREFIX = 1024
"""Likeliest tokens among which top-p is looked for first; with fewer than twice as many symbols all are sorted."""


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

    Top-p costs a sort of all V only where the 1,024 likeliest tokens of some row fall short of p; under `vmap` always.

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
            raise UsageError("penalties of repetition, presence or frequency need the counts of each row's tokens.")
        x = penalise(x, counts, sampling.repetition_penalty, sampling.presence_penalty, sampling.frequency_penalty)
    if allowed is not None:
        x = jnp.where(jnp.broadcast_to(allowed, x.shape), x, -jnp.inf)
    if sampling.temperature == 0:
        return x
    if sampling.temperature != 1:
        x = x / sampling.temperature
    x = _truncated(x, sampling.top_k, sampling.top_p)
    if sampling.min_p > 0:
        x = jnp.where(x - _largest(x) < math.log(sampling.min_p), -jnp.inf, x)
    return x


def is_stuck(processed: Float[Array, "*batch V"]) -> Bool[Array, "*batch"]:
    """Returns where no token can be drawn: a mask left none, or the logits held NaN or +inf."""
    return ~jnp.isfinite(processed.max(-1))


def token_log_probs(logits: Float[Array, "*batch V"], tokens: Int[Array, "*batch"]) -> Float[Array, "*batch"]:
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


def _truncated(x: jax.Array, top_k: int, top_p: float, prefix: int = PREFIX) -> jax.Array:
    """The first tokens of the ranking: at most `top_k`, and no more than it takes to reach `top_p` of their mass."""
    vocab, k = x.shape[-1], top_k or x.shape[-1]
    if k >= vocab and top_p >= 1:
        return x
    x = jnp.where(x == 0, 0, x)  # -0.0 and 0.0 are equal, but not to every sort
    if k < vocab:
        values, ids = jax.lax.top_k(x, k)
        last = jnp.full((*x.shape[:-1], 1), k - 1) if top_p >= 1 else _last(values, top_p * _mass(values), prefix)
        return _up_to(x, values, ids, last)
    target = top_p * _mass(x)

    def of_all():
        values, ids = _ranking(x)
        return _up_to(x, values, ids, _last(values, target, prefix))

    if vocab < 2 * prefix:
        return of_all()
    values, ids = jax.lax.top_k(x, prefix)
    reached = (_running_mass(values, prefix)[..., -1:] >= target).all()
    return jax.lax.cond(reached, lambda: _up_to(x, values, ids, _last(values, target, prefix)), of_all)


def _ranking(x: jax.Array) -> tuple[jax.Array, jax.Array]:
    """All logits and tokens by (logit descending, token ascending), as `top_k` has them."""
    ids = jax.lax.broadcasted_iota(jnp.int32, x.shape, x.ndim - 1)
    values, ids = jax.lax.sort((-x, ids), num_keys=1, is_stable=True)
    return -values, ids


def _mass(x: jax.Array) -> jax.Array:
    return jnp.exp(x - _largest(x)).sum(-1, keepdims=True)


def _running_mass(ranked: jax.Array, block: int) -> jax.Array:
    """Mass of each token and of those before it, times a constant.

    Summed in blocks, so that the first block's sums are the same bits whether or not more blocks follow.
    """
    length = ranked.shape[-1]
    mass = jnp.exp(ranked - _largest(ranked[..., :1]))
    mass = jnp.pad(mass, [(0, 0)] * (mass.ndim - 1) + [(0, -length % block)])
    within = jnp.cumsum(mass.reshape(*mass.shape[:-1], -1, block), -1)
    # Not the sum with this block less this block, which rounding makes smaller than the sum before it.
    before = jnp.cumsum(within[..., :-1, -1:], -2)
    before = jnp.pad(before, [(0, 0)] * (mass.ndim - 1) + [(1, 0), (0, 0)])
    return (before + within).reshape(mass.shape)[..., :length]


def _last(ranked: jax.Array, target: jax.Array, block: int) -> jax.Array:
    """The rank of the token with which the mass reaches `target`; the last where rounding never does."""
    return jnp.minimum((_running_mass(ranked, block) < target).sum(-1, keepdims=True), ranked.shape[-1] - 1)


def _up_to(x: jax.Array, values: jax.Array, ids: jax.Array, last: jax.Array) -> jax.Array:
    """Leaves what is ranked no later than `last`; a NaN is less than nothing, so that it stays where all can see it."""
    value, token = (jnp.take_along_axis(ranked, last, -1) for ranked in (values, ids))
    later = (x < value) | ((x == value) & (jax.lax.broadcasted_iota(jnp.int32, x.shape, x.ndim - 1) > token))
    return jnp.where(later, -jnp.inf, x)
