"""Who sees whom: a rule over the places of queries and keys, never over the slots that hold them."""

import dataclasses
from typing import NamedTuple

import flax.struct
import jax
from jaxtyping import Array, Bool, Float, Int

from jaxpar.fields import AtLeast, check_fields, field
from jaxpar.nn.attention.state import slopes_bias
from jaxpar.types import UsageError

__all__ = ["Visibility", "Visible", "Where"]


class Where(NamedTuple):
    """Positions and documents of tokens, which travel with them: no index says them.

    Attributes:
      positions: Positions in the row; B may be 1. Negative ones are of nothing. None where a table
        of pairs replaces them.
      segments: Numbers of documents; None where each row is one.
      first: Position at which each query's document began; None where nothing before is hidden.
    """

    positions: Int[Array, "B T"] | None = None
    segments: Int[Array, "B T"] | None = None
    first: Int[Array, "B T"] | None = None


@dataclasses.dataclass(frozen=True)
class Visible:
    """A token sees itself and what came before, all of it or the last few; or all there is.

    Attributes:
      causal: Whether what comes later is unseen.
      window: How many tokens are seen, the token itself counted; 0 for all.
    """

    causal: bool = True
    window: int = field(0, AtLeast(0))

    def __post_init__(self):
        """Refuses a window that looks both ways."""
        check_fields(self)
        if self.window and not self.causal:
            raise UsageError(
                f"window={self.window} is of causal attention; give window=0, or causal=true."
            )

    def __call__(
        self,
        queries: Int[Array, "B T"],
        keys: Int[Array, "B S"],
        first: Int[Array, "B T"] | None = None,
    ) -> Bool[Array, "B T S"]:
        """Returns which keys each query sees.

        Args:
          queries: Their places in the row; negative ones are of nothing and see nothing.
          keys: Theirs; negative ones are of nothing and unseen.
          first: Place where each query's document began; what lies before is unseen.
        """
        q, k = queries[:, :, None], keys[:, None, :]
        seen: jax.Array = k >= (0 if first is None else first[:, :, None])
        seen = seen & (k <= q if self.causal else q >= 0)
        return seen & (q - k < self.window) if self.window else seen

    def mask(self, queries: Where, keys: Where) -> Bool[Array, "B T S"]:
        """Returns the keys of its own document that the rule shows to each query.

        Args:
          queries: Positions of queries, their documents, and where these began.
          keys: Positions and documents of the keys.
        """
        assert queries.positions is not None and keys.positions is not None
        seen = self(queries.positions, keys.positions, queries.first)
        if queries.segments is None or keys.segments is None:
            return seen
        return seen & (queries.segments[:, :, None] == keys.segments[:, None, :])


@flax.struct.dataclass
class Visibility:
    """Keys that each query sees, and how their scores change.

    Attributes:
      rule: Rule over the positions of queries and keys; static.
      among: Mask of the keys that each query may see besides; None for all.
      slopes: Decrease of a score for each step of distance; None for none.
      cap: Bound of the scores, as of `jaxpar.nn.attention.state.attend`; 0 for none; static.
    """

    rule: Visible = field(Visible(), pytree_node=False)
    among: Bool[Array, "B T S"] | None = None
    slopes: Float[Array, " H"] | None = None
    cap: float = field(0.0, AtLeast(0), pytree_node=False)

    __post_init__ = check_fields

    @property
    def is_plain(self) -> bool:
        """True where a kernel can take it: no window, no mask, and scores as they are."""
        changes_scores = self.slopes is not None or self.cap != 0
        return not self.rule.window and self.among is None and not changes_scores

    def bias(self, queries: Where, keys: Where) -> Float[Array, "B H T S"] | None:
        """Returns the term that slopes add to the scores; None without slopes."""
        if self.slopes is None:
            return None
        assert queries.positions is not None and keys.positions is not None
        return slopes_bias(self.slopes, queries.positions, keys.positions)
