"""A network over sequences whose layers are a stack: any mixer where `jaxpar.nn.cells.network` has recurrent cells."""

import dataclasses
import math
from typing import NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax.typing import DTypeLike
from jaxtyping import Array, Float

from jaxpar.fields import AtLeast, check_fields, field
from jaxpar.nn.auxiliary import scalars
from jaxpar.nn.cells.conv_embedding import ConvEmbedding, ConvState
from jaxpar.nn.cells.network import weighted_cross_entropy
from jaxpar.nn.leaf import Leaf, init_leaves, leaf_axes
from jaxpar.nn.linear import contract
from jaxpar.nn.mixer import TokenInfo
from jaxpar.nn.stack import Stack, StackCache
from jaxpar.types import Info, PRNGKey, PyTree, UsageError

__all__ = ["NetworkCache", "StackNetwork"]


class NetworkCache(NamedTuple):
    """What a network keeps of the steps that it has seen.

    Attributes:
      stack: Of its layers.
      lines: Of its convolutions; None without them.
    """

    stack: StackCache
    lines: ConvState | None = None


@dataclasses.dataclass(frozen=True)
class StackNetwork:
    """Maps sequences [B, T, inputs] to outputs [B, T, outputs], each of which has seen its past alone.

    A linear map to D features, or convolutions, a stack, and a linear map. Static, hashable;
    `jaxpar.nn.cells.network.SequenceTrainer` trains it.

    Attributes:
      stack: Layers, whose mixer is causal.
      inputs: Features of an input.
      outputs: Features of an output: classes, or 1 for a number.
      classes: Whether targets are classes (cross entropy) or numbers (squared error).
      embedding: Convolutions in place of the first linear map (LMUFormer: of a stack of `Lmu` and `Mlp`).
    """

    stack: Stack
    inputs: int = field(legal=AtLeast(1))
    outputs: int = field(legal=AtLeast(1))
    classes: bool = True
    embedding: ConvEmbedding | None = None

    def __post_init__(self):
        """Refuses a mixer that sees what is still to come, and convolutions to another width than the stack's."""
        check_fields(self)
        if self.embedding is not None and self.embedding.size != self.stack.embed_dim:
            raise UsageError(
                f"embedding.size={self.embedding.size} must be the stack's {self.stack.embed_dim}."
            )
        if not all(mixer.causal for mixer in self.stack.mixers):
            raise UsageError(
                "a network over sequences sees the past alone; give its stack a mixer that is causal."
            )

    def leaves(self) -> dict[str, PyTree]:
        """Declares the stack's parameters, w_in [inputs, D] or "embedding", head [D, outputs] and biases."""
        width = self.stack.embed_dim
        enter = {
            "w_in": Leaf((self.inputs, width), (None, "embed"), 1 / math.sqrt(self.inputs)),
            "b_in": Leaf(
                (width,), (None,), 1.0
            ),  # so that a single number's place on the line survives the norm
        }
        return {
            **(
                enter
                if self.embedding is None
                else {"embedding": self.embedding.leaves(self.inputs)}
            ),
            **self.stack.leaves(),
            "head": Leaf((width, self.outputs), ("embed", None), 1 / math.sqrt(width)),
            "b_head": Leaf((self.outputs,), (None,), "zeros"),
        }

    def init(self, key: PRNGKey, dtype: DTypeLike = jnp.float32) -> PyTree:
        """Draws the parameters. Consumes `key`."""
        return init_leaves(key, self.leaves(), dtype)

    def axes(self) -> PyTree:
        """Returns the logical axes of every parameter."""
        return leaf_axes(self.leaves())

    def apply(
        self, params: PyTree, xs: Float[Array, "B T D"], cache: NetworkCache | None = None
    ) -> tuple[Float[Array, "B T C"], NetworkCache, Info]:
        """Computes the outputs; with the cache of an earlier call, of what follows there.

        Returns:
          Outputs, the cache after the last step, to go on from, and what the layers told. Without a cache one is made
          that has room for these steps alone, where its size depends on them.
        """
        fresh = cache is None
        before, lines = (
            NetworkCache(self.stack.init_cache(*xs.shape[:2])) if cache is None else cache
        )
        x, lines = self._enter(params, xs, lines)
        x, after, aux = self.stack.apply(params, x, cache=before, fresh=fresh)
        assert after is not None
        return self._leave(params, x), NetworkCache(after, lines), scalars(aux)

    def _enter(
        self, params: PyTree, xs: jax.Array, state: ConvState | None = None
    ) -> tuple[jax.Array, ConvState | None]:
        xs = xs.astype(self.stack.dtype)
        if self.embedding is not None:
            return self.embedding.apply(params["embedding"], xs, state)
        return contract(
            "bti,id->btd", xs, params["w_in"], (None, "embed"), bias=params["b_in"]
        ), None

    def _leave(self, params: PyTree, x: jax.Array) -> jax.Array:
        x = x.astype(jnp.promote_types(x.dtype, jnp.float32))
        return contract("btd,dc->btc", x, params["head"], ("embed", None), bias=params["b_head"])

    def loss(
        self, params: PyTree, batch: dict[str, jax.Array], key: PRNGKey | None = None
    ) -> tuple[jax.Array, Info]:
        """Computes the loss of a batch and the layers' own losses; with it accuracy (of classes) and what layers told.

        Args:
          params: As from `init`.
          batch: "inputs" [B, T, D], "targets" [B, T] (int classes, or numbers) and "weights" [B, T], what each counts.
          key: Switches dropout on; consumed.
        """
        entered = self._enter(params, batch["inputs"])[0]
        info = TokenInfo(weights=batch["weights"])
        x, _, aux = self.stack.apply(params, entered, info, key=key)
        out, own, info = self._leave(params, x), sum(aux.losses.values()), scalars(aux)
        if self.classes:
            loss, accuracy = weighted_cross_entropy(out, batch["targets"], batch["weights"])
            return loss + own, info | {"accuracy": accuracy}
        weights = batch["weights"] / batch["weights"].sum()
        return (weights * optax.squared_error(out[..., 0], batch["targets"])).sum() + own, info
