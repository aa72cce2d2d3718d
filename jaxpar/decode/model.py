"""What decoding asks of a model: functions, and no more."""

from typing import Protocol

from jaxtyping import Array, Bool, Float, Int

from jaxpar.nn.stack import PseudoTokens, StackCache
from jaxpar.types import PyTree

__all__ = ["TokenModel"]


class TokenModel(Protocol):
    """A model as decoding sees it; frozen and hashable, so static under jit."""

    @property
    def vocab_size(self) -> int:
        """V."""
        ...

    @property
    def max_positions(self) -> int | None:
        """How many positions it knows; None for any number."""
        ...

    def held(self, params: PyTree) -> PyTree:
        """Returns the parameters as a loop over tokens holds them; called once before it."""
        ...

    def init_cache(self, rows: int, slots: int) -> StackCache:
        """Returns an empty cache: of attention's `LinearCache`s only shapes are read, a recurrence's state is used."""
        ...

    def prefill(
        self,
        params: PyTree,
        tokens: Int[Array, "B T"],
        lengths: Int[Array, " B"],
        cache: StackCache,
    ) -> tuple[Float[Array, "B V"], StackCache]:
        """Reads prompts into an empty cache; returns the logits after each row's last token, and the cache."""
        ...

    def extend(
        self,
        params: PyTree,
        tokens: Int[Array, "B T"],
        cache: StackCache,
        *,
        positions: Int[Array, "B T"],
        visible: Bool[Array, "B T T"] | None = None,
        valid: Int[Array, " B"] | None = None,
        pseudo: PseudoTokens | None = None,
    ) -> tuple[Float[Array, "B T V"], StackCache]:
        """Reads T more tokens of each row at these positions; returns logits at each, and the cache.

        `visible` says which of the T tokens each sees, `valid` how many count for the state of a recurrence. Where
        there are `pseudo` tokens, the last `pseudo.size` of the T are those, whatever stands there.
        """
        ...
