"""What a step sees of a long cache: the ends of it, the blocks that matter to it, or the tokens that mattered so far.

A policy changes what is computed, and so the tokens: with a budget of the whole cache it changes nothing. Positions are
kept, whatever is dropped, so that rotary distances stay true. Where a policy decides by what was asked before, a window
of drafts would be decided differently from token after token: policies are for plain decoding.
"""

import dataclasses
from typing import NamedTuple, Protocol

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from jaxpar.fields import AtLeast, Finite, Positive, check_fields, field
from jaxpar.types import PyTree, UsageError

__all__ = ["BlockTopK", "HeavyHitters", "CachePolicy", "Selection", "SinksAndWindow"]


class Selection(NamedTuple):
    """What a step reads of one layer.

    Attributes:
      kept: Which slots each reader sees, of those that it would; None for all.
      blocks: Which blocks each key head reads, in ascending order; None for all. The others are not read at all.
    """

    kept: Bool[Array, "B R N b"] | None = None
    blocks: Int[Array, "B G k"] | None = None


class CachePolicy(Protocol):
    """Frozen and hashable; what it remembers of one layer is a pytree with rows first."""

    def init(self, keys: Float[Array, "B G N b K"], readers: int) -> PyTree:
        """Returns what it remembers of an empty layer."""
        ...

    def select(
        self,
        memory: PyTree,
        q: Float[Array, "N|1 B R H K"],
        places: Int[Array, "B R N b"],
        positions: Int[Array, "B R"],
    ) -> tuple[Selection, PyTree]:
        """Decides what is read, given queries in the coordinates of each block, and the position of each slot's token.

        `places` are negative where a reader sees nothing anyway, `positions` those of the queries.
        """
        ...

    def attended(
        self, memory: PyTree, scores: Float[Array, "B G N R H/G b"], positions: Int[Array, "B R"]
    ) -> PyTree:
        """Learns the scores of what was read, -inf of what was not."""
        ...

    def stored(
        self, memory: PyTree, k: Float[Array, "B T G K"], blocks: Int[Array, "B T"]
    ) -> PyTree:
        """Learns which keys were written to which blocks; N for none."""
        ...


@dataclasses.dataclass(frozen=True)
class SinksAndWindow:
    """The first tokens and the last ones (Xiao et al. 2024, arXiv:2309.17453, but with positions as they are).

    Attributes:
      sinks: First tokens that stay.
      window: Last ones, the token itself counted.
    """

    sinks: int = field(4, AtLeast(0))
    window: int = field(1024, AtLeast(1))

    __post_init__ = check_fields

    def init(self, keys: Array, readers: int) -> PyTree:
        """Remembers nothing."""
        return ()

    def select(
        self, memory: PyTree, q: Array, places: Array, positions: Array
    ) -> tuple[Selection, PyTree]:
        """Keeps both ends."""
        return Selection(
            (places < self.sinks) | (positions[..., None, None] - places < self.window)
        ), memory

    def attended(self, memory: PyTree, scores: Array, positions: Array) -> PyTree:
        """Learns nothing."""
        return memory

    def stored(self, memory: PyTree, k: Array, blocks: Array) -> PyTree:
        """Learns nothing."""
        return memory


@dataclasses.dataclass(frozen=True)
class BlockTopK:
    """The blocks whose mean key a query likes best, and the last ones: the others are not read.

    Sadhukhan et al. 2025 (Kinetics, arXiv:2506.05333) find block top-k attention to be where the memory of long
    generation is best spent. Each key head reads `blocks` blocks, by the sum over its queries of q . mean(k); the first
    block and the one that is being filled always count among them. One reader a row.

    Attributes:
      blocks: How many each key head reads; of as many as there are, nothing changes.
    """

    blocks: int = field(16, AtLeast(2))

    __post_init__ = check_fields

    def init(self, keys: Array, readers: int) -> PyTree:
        """Remembers the sum of each block's keys, [B, G, N, K]: ranked blocks are full, so as their mean does."""
        if readers != 1:
            raise UsageError(
                f"BlockTopK is for one reader a row, not {readers}; give num_samples=1."
            )
        wide = jnp.promote_types(keys.dtype, jnp.float32)
        return jnp.zeros((*keys.shape[:3], keys.shape[4]), wide)

    def select(
        self, memory: PyTree, q: Array, places: Array, positions: Array
    ) -> tuple[Selection, PyTree]:
        """Ranks the blocks."""
        rows, groups, num = memory.shape[:3]
        if self.blocks >= num:
            return Selection(), memory
        q = (
            q[:, :, 0].reshape(q.shape[0], rows, groups, -1, q.shape[-1]).sum(3)
        )  # [N or 1, B, G, K]
        q = jnp.broadcast_to(jnp.moveaxis(q, 0, 2), memory.shape).astype(memory.dtype)
        scores = (q * memory).sum(-1)
        top = places[:, 0].max(
            -1
        )  # the last position in each block, negative where nothing is seen
        always = (places[:, 0] == 0).any(-1) | (top == top.max(-1, keepdims=True))
        scores = jnp.where(
            always[:, None], jnp.inf, jnp.where((top >= 0)[:, None], scores, -jnp.inf)
        )
        chosen = jax.lax.top_k(scores, self.blocks)[1]
        return Selection(
            blocks=jnp.sort(chosen, axis=-1)
        ), memory  # in order, so that sums round as without a policy

    def attended(self, memory: PyTree, scores: Array, positions: Array) -> PyTree:
        """Learns nothing."""
        return memory

    def stored(self, memory: PyTree, k: Array, blocks: Array) -> PyTree:
        """Adds new keys to their blocks' sums."""
        return memory.at[jnp.arange(len(k))[:, None], :, blocks].add(
            k.astype(memory.dtype), mode="drop"
        )


@dataclasses.dataclass(frozen=True)
class HeavyHitters:
    """The last tokens, and of those before them the ones that were attended to most; what is dropped stays dropped.

    A token's worth is the sum, over later tokens and all heads of the layer, of softmax((score + noise) / tau). Without
    noise and with tau = 1 it is that of H2O (Zhang et al. 2023, arXiv:2306.14048); with Gumbel noise and a tau that
    rises it is Keyformer's (Adnan et al. 2024, arXiv:2403.09054, equations 9 and 10). Prompts are read by kernels that
    tell no scores: what is worth keeping of them is learned from the first `observe` new tokens, which see all.

    Attributes:
      heavy: Tokens that are kept for their worth.
      window: Last tokens, which are kept anyway.
      observe: New tokens before anything is dropped.
      noise: Whether Gumbel noise is added, the same for equal positions.
      tau: At position 0.
      last_tau: At position `horizon` and after it.
      horizon: Positions over which tau goes from one to the other.
      seed: Of the noise.
    """

    heavy: int = field(128, AtLeast(1))
    window: int = field(128, AtLeast(1))
    observe: int = field(8, AtLeast(1))
    noise: bool = True
    tau: float = field(1.0, Positive())
    last_tau: float = field(2.0, Positive())
    horizon: int = field(1024, AtLeast(1))
    seed: int = field(0, Finite())

    __post_init__ = check_fields

    def init(self, keys: Array, readers: int) -> PyTree:
        """Remembers each token's worth, [B, R, N, b], and how many tokens were drawn."""
        shape = (keys.shape[0], readers, *keys.shape[2:4])
        worth = jnp.zeros(shape, jnp.promote_types(keys.dtype, jnp.float32))
        return worth, jnp.zeros(shape[:1], jnp.int32)

    def select(
        self, memory: PyTree, q: Array, places: Array, positions: Array
    ) -> tuple[Selection, PyTree]:
        """Keeps as many as there is room for."""
        worth, count = memory
        budget = self.heavy + self.window
        if budget >= places.shape[2] * places.shape[3]:
            return Selection(), memory
        last = positions[..., None, None] - places < self.window
        # What is dropped stays so without being marked: its worth rests where that of all that is kept has passed it.
        rank = jnp.where(places >= 0, jnp.where(last, jnp.inf, worth), -jnp.inf).reshape(
            *places.shape[:2], -1
        )
        best = jax.lax.top_k(rank, budget)[1]
        kept = jax.vmap(jax.vmap(lambda kept, best: kept.at[best].set(True)))(
            jnp.zeros(rank.shape, bool), best
        )
        return Selection(
            kept.reshape(places.shape) | (count < self.observe)[:, None, None, None]
        ), memory

    def attended(self, memory: PyTree, scores: Array, positions: Array) -> PyTree:
        """Adds what each token was worth to these queries."""
        worth, count = memory
        scores = jnp.moveaxis(scores, 3, 1)  # [B, R, G, N, H/G, b]
        if self.noise:
            key = jax.random.key(self.seed)
            draw = jax.vmap(
                lambda place: jax.random.gumbel(jax.random.fold_in(key, place), scores.shape[2:])
            )
            scores = scores + draw(positions.reshape(-1)).reshape(scores.shape).astype(scores.dtype)
        share = jnp.minimum(positions / self.horizon, 1).astype(scores.dtype)
        tau = self.tau + (self.last_tau - self.tau) * share[..., None, None, None, None]
        weights = jax.nn.softmax(scores / tau, axis=(3, 5), where=scores > -jnp.inf)
        return worth + weights.sum((2, 4)).astype(worth.dtype), count + 1

    def stored(self, memory: PyTree, k: Array, blocks: Array) -> PyTree:
        """Learns nothing."""
        return memory
