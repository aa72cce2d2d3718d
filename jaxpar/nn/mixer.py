"""The contract of what mixes the tokens of a block: attention, recurrences, and whatever else.

A mixer is a frozen configuration. It returns the outputs and the state after the last token that counts, never the
states of all, so that training, reading a prompt and drawing token after token are one function.

Example:
    import dataclasses

    import jax
    import jax.numpy as jnp

    from jaxpar.nn.auxiliary import NOTHING
    from jaxpar.nn.leaf import Leaf
    from jaxpar.nn.linear import contract
    from jaxpar.nn.mlp import Mlp
    from jaxpar.nn.stack import Stack

    @dataclasses.dataclass(frozen=True)
    class LastTwo:  # each token gets the mean of itself and of the one before it, which is all the cache holds
        causal, score_size, num_inputs = True, 0, 1

        def leaves(self, embed_dim, std, out_std):
            return {"w_mix": Leaf((embed_dim, embed_dim), ("embed", "mlp"), out_std)}

        def init_cache(self, batch, slots, width, dtype):
            return jnp.zeros((batch, width), dtype)

        def cache_axes(self):
            return ("batch", None)

        def apply(self, params, x, cache, context):
            before = jnp.zeros_like(x[:, 0]) if cache is None else cache
            line = jnp.concatenate([before[:, None], x], 1)
            y = contract("btd,de->bte", (line[:, :-1] + x) / 2, params["w_mix"], ("embed", "mlp"))
            return y, cache if cache is None else context.last(line), NOTHING

        def transfers(self, sizes):
            return []

    stack = Stack(num_layers=2, embed_dim=8, mixer=LastTwo(), mlp=Mlp(16))
    params = stack.init(jax.random.key(0))
    x = jax.random.normal(jax.random.key(1), (1, 5, 8))
    whole, _, _ = stack.apply(params, x)
    first, cache, _ = stack.apply(params, x[:, :3], cache=stack.init_cache(1, 8))
    second, _, _ = stack.apply(params, x[:, 3:], cache=cache)
    assert jnp.allclose(whole, jnp.concatenate([first, second], 1), atol=1e-5)
"""

from collections.abc import Iterator
from typing import NamedTuple, Protocol, runtime_checkable

import jax.numpy as jnp
from jax.typing import DTypeLike
from jaxtyping import Array, Bool, Float, Int

from jaxpar.mesh import mesh_axes
from jaxpar.nn.auxiliary import Aux
from jaxpar.transfers import Transfer
from jaxpar.types import PRNGKey, PyTree, UsageError

__all__ = [
    "DECODING",
    "TRAINING",
    "ActivationSizes",
    "Context",
    "FeedForward",
    "Mixer",
    "PreparesDecoding",
    "Rules",
    "TokenInfo",
]


class Rules(NamedTuple):
    """How activations lie on the mesh, by logical axes of [B, T, D].

    Attributes:
      outside: In the residual stream.
      inside: In the branches.
      apart: Whether neither a loop nor remat lies between forward and backward pass: see `jaxpar.nn.linear.contract`.
      blockwise: Whether branches shall take blocks of tokens, and make no array [T, T] nor [T, F] of all.
    """

    outside: tuple[str | None, ...]
    inside: tuple[str | None, ...]
    apart: bool = False
    blockwise: bool = False


TRAINING = Rules(("batch", "seq", None), ("batch", "seq_layer", None))
DECODING = Rules(("batch", None, None), ("batch", None, None))
"""While a cache is kept, T is a token or a prompt, which no mesh axis splits."""


class TokenInfo(NamedTuple):
    """Data of T tokens besides their features, as callers of a stack give them.

    Attributes:
      positions: Position of each token in its document; None to count from the document's start.
      segments: Document numbers, where documents share a row; None for one a row. With a cache
        give `starts`: numbers are of whole rows.
      starts: Whether a document begins at each token; None for where `segments` change.
      places: Index of each token in its row, where `jaxpar.nn.attention.context.in_order` put
        tokens in another order; then positions are given as well.
      valid: Number of tokens of each row that count, from the first on, 0 to T; None for all.
      visible: Which of the T tokens each sees, besides what the mixer's rule allows; None for all.
      weights: Weight of each token in auxiliary losses and metrics; None for equal weights.
    """

    positions: Int[Array, "B T"] | None = None
    segments: Int[Array, "B T"] | None = None
    starts: Bool[Array, "B T"] | None = None
    places: Int[Array, "B T"] | None = None
    valid: Int[Array, " B"] | None = None
    visible: Bool[Array, "B T T"] | None = None
    weights: Float[Array, "B T"] | None = None


class Context(NamedTuple):
    """What all mixers may ask about the T tokens that they get.

    Attributes:
      positions: Place of each token in its document.
      segments: Document numbers, where documents share a row; None for one a row.
      starts: Where another document begins than that of the token before; None for nowhere.
      valid: How many of the tokens count, from the first on, 0 to T; None for all. Outputs of the others mean nothing.
      visible: Which of the T tokens each may see, besides what the mixer's own rule allows; None for all.
      seen: With a cache: how many tokens it has been given before.
      first: With a cache: of each token, how many the cache had been given when its document began.
      fresh: With a cache: whether it is known to be empty.
      key: Of dropout; None while not training.
      places: Place of each token in its row, of tokens that were put in the order in which attention's `attend` wants
        them; None of others, which lie in turn or are told apart by their positions.
      rules: How activations lie.
      weights: Weight of each token in the loss; None for equal weights. Magnitudes weight auxiliary
        losses and metrics of tokens. No output depends on them, unless a capacity has to drop
        tokens: weight 0 goes first.
    """

    positions: Int[Array, "B T"]
    segments: Int[Array, "B T"] | None = None
    starts: Bool[Array, "B T"] | None = None
    valid: Int[Array, " B"] | None = None
    visible: Bool[Array, "B T T"] | None = None
    seen: Int[Array, " B"] | None = None
    first: Int[Array, "B T"] | None = None
    fresh: bool = False
    key: PRNGKey | None = None
    rules: Rules = TRAINING
    places: Int[Array, "B T"] | None = None
    weights: Float[Array, "B T"] | None = None

    def until(self, length: int) -> "Context":
        """Returns the context of the first `length` tokens, where others enter at a later layer."""
        if length == self.positions.shape[1]:
            return self
        visible = None if self.visible is None else self.visible[:, :length, :length]
        weights = self.weights
        if weights is not None:
            weights = weights[:, :length]
        return self._replace(positions=self.positions[:, :length], visible=visible, weights=weights)

    def last(self, states: Float[Array, "B S ..."]) -> Float[Array, "B ..."]:
        """Returns, of the state before the first token and those after each, the one after the last that counts."""
        if self.valid is None:
            return states[:, -1]
        return states[jnp.arange(states.shape[0]), self.valid]

    def refuse(self, who: str, *names: str) -> None:
        """Raises `UsageError` for fields that are given and that mixer `who` cannot honour."""
        for name in names:
            if getattr(self, name) is not None:
                raise UsageError(
                    f"{who} cannot honour {name}; leave it out, or take mixer=attention."
                )

    def refuse_split(self, who: str) -> None:
        """Raises `UsageError` where the ambient mesh splits the sequence inside layers, which `who` reads in turn."""
        if axes := mesh_axes("seq_layer"):
            raise UsageError(
                f"{who} runs along the whole sequence, which the mesh splits over {'*'.join(axes)}; "
                "give mesh.context=1, or model.mixer.kind=attention."
            )


class ActivationSizes(NamedTuple):
    """What a mixer may ask to tell what crosses devices in a training step of all layers.

    Attributes:
      tokens: Of one device, its rows of the whole sequence.
      layers: L.
      width: Bytes of a number.
      again: How often activations of the forward pass are made: 1, or 2 where they are recomputed.
      embed_dim: D.
      rows: Of one device.
    """

    tokens: float
    layers: int
    width: int
    again: int
    embed_dim: int
    rows: float


class Mixer(Protocol):
    """What mixes the tokens of a block; frozen and hashable."""

    @property
    def causal(self) -> bool:
        """Whether a token sees none after it."""
        ...

    @property
    def score_size(self) -> int:
        """Multiplications a token and token seen, beyond products with weights: H K of attention, 0 of a recurrence."""
        ...

    @property
    def num_inputs(self) -> int:
        """Products with weights that read the block's input."""
        ...

    def leaves(self, embed_dim: int, std: float, out_std: float) -> dict[str, PyTree]:
        """Declares the parameters of one layer: those that leave the branch start with `out_std`."""
        ...

    def init_cache(self, batch: int, slots: int, width: int, dtype: DTypeLike) -> PyTree:
        """Returns the cache [B, ...] of one layer before the first token, of room for `slots` tokens of `width`."""
        ...

    def cache_axes(self) -> PyTree:
        """Returns the logical axes of the cache's leaves."""
        ...

    def apply(
        self, params: dict, x: Float[Array, "B T D"], cache: PyTree | None, context: Context
    ) -> tuple[Float[Array, "B T D"], PyTree | None, Aux]:
        """Returns outputs, the cache after the last token that counts (None without one), and what it tells."""
        ...

    def transfers(self, sizes: ActivationSizes) -> Iterator[Transfer]:
        """Declares what a training step moves between devices on the ambient mesh, beyond products with weights."""
        ...


@runtime_checkable
class PreparesDecoding(Protocol):
    """A branch of a block, a mixer or an mlp, that can lay its weights out for decoding few rows."""

    def for_decoding(self, params: dict) -> dict:
        """Returns the held parameters of one layer, those products joined that read the same input."""
        ...


class FeedForward(Protocol):
    """What looks at each token of a block alone, after its mixer; frozen and hashable: an mlp, a mixture of experts."""

    @property
    def num_inputs(self) -> int:
        """Sums over devices that share F, each of the size of its input, for the gradient of that."""
        ...

    def leaves(self, embed_dim: int, std: float, out_std: float) -> dict[str, PyTree]:
        """Declares the parameters of one layer: those that leave the branch start with `out_std`."""
        ...

    def apply(
        self, params: dict, x: Float[Array, "B T D"], context: Context
    ) -> tuple[Float[Array, "B T D"], Aux]:
        """Returns outputs, and what it tells; the context's key is its own."""
        ...

    def transfers(self, sizes: ActivationSizes) -> Iterator[Transfer]:
        """Declares what a training step moves between devices on the ambient mesh, beyond products with weights."""
        ...
