"""Who sees whom: a rule over the places of queries and keys, never over the slots that hold them."""

import dataclasses

import jax
from jaxtyping import Array, Bool, Int

from jaxpar.fields import AtLeast, check_fields, field
from jaxpar.types import UsageError

__all__ = ["Visible"]


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
