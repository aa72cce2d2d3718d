"""A classifier of images: a stack over their patches, each of which sees all others."""

import dataclasses
import math

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike
from jaxtyping import Array, Float

from jaxpar.fields import AtLeast, Each, check_fields, field
from jaxpar.nn.auxiliary import Aux, scalars
from jaxpar.nn.leaf import Leaf, init_leaves
from jaxpar.nn.linear import contract
from jaxpar.nn.network import weighted_cross_entropy
from jaxpar.nn.stack import Stack
from jaxpar.types import Info, PRNGKey, PyTree, UsageError

__all__ = ["ImageClassifier"]


@dataclasses.dataclass(frozen=True)
class ImageClassifier:
    """Patches -> linear map + learned positions -> stack -> mean over patches -> linear map (arXiv:2010.11929).

    Of images [H, W, C], N = H W / P^2 patches of P x P pixels are the tokens, row by row. Static, hashable.

    Attributes:
      stack: What mixes the patches; not causal: give its attention `Visible(causal=False)`.
      patch: P, which divides H and W.
      shape: H, W, C.
      classes: How many.
    """

    stack: Stack
    patch: int = field(legal=AtLeast(1))
    shape: tuple[int, int, int] = field(legal=Each(AtLeast(1)))
    classes: int = field(legal=AtLeast(2))

    def __post_init__(self):
        """Refuses patches that do not fit, and a mixer to which the first patch is blind."""
        check_fields(self)
        if len(self.shape) != 3:
            raise UsageError(f"shape={self.shape} of images must be height, width and channels.")
        height, width, _ = self.shape
        if height % self.patch or width % self.patch:
            legal = [p for p in range(1, min(height, width) + 1) if height % p == 0 and width % p == 0]
            raise UsageError(
                f"patch={self.patch} does not divide images of {height} x {width} pixels; legal are "
                f"{', '.join(map(str, legal))}."
            )
        if self.stack.mixer.causal:
            raise UsageError(
                "the patches of an image see each other, but this stack's mixer is causal; give it attention with "
                "visible=Visible(causal=False)."
            )

    @property
    def num_patches(self) -> int:
        """N."""
        return (self.shape[0] // self.patch) * (self.shape[1] // self.patch)

    def leaves(self) -> dict[str, PyTree]:
        """Declares the stack's parameters, w_in [P P C, D], positions [N, D], head [D, classes] and two biases."""
        into, width = self.patch**2 * self.shape[2], self.stack.embed_dim
        return {
            "w_in": Leaf((into, width), (None, "embed"), 1 / math.sqrt(into)),
            "b_in": Leaf((width,), (None,), "zeros"),
            "positions": Leaf((self.num_patches, width), (None, "embed"), 1.0),  # as loud as what the patches say
            **self.stack.leaves(),
            "head": Leaf((width, self.classes), ("embed", None), 1 / math.sqrt(width)),
            "b_head": Leaf((self.classes,), (None,), "zeros"),
        }

    def init(self, key: PRNGKey, dtype: DTypeLike = jnp.float32) -> PyTree:
        """Draws the parameters. Consumes `key`."""
        return init_leaves(key, self.leaves(), dtype)

    def axes(self) -> PyTree:
        """Returns the logical axes of every parameter."""
        return jax.tree.map(lambda leaf: leaf.axes, self.leaves(), is_leaf=lambda x: isinstance(x, Leaf))

    def patches(self, images: Float[Array, "B H W C"]) -> Float[Array, "B N PPC"]:
        """Cuts images into patches: both row by row, channels innermost."""
        height, width, channels = self.shape
        if images.shape[1:] != (height, width, channels):
            raise UsageError(f"images of shape {images.shape[1:]} are none of shape {self.shape}.")
        p = self.patch
        x = images.reshape(-1, height // p, p, width // p, p, channels)
        return jnp.swapaxes(x, 2, 3).reshape(len(images), self.num_patches, p * p * channels)

    def apply(
        self, params: PyTree, images: Float[Array, "B H W C"], key: PRNGKey | None = None
    ) -> tuple[Float[Array, "B classes"], Aux]:
        """Computes the logits, in float32 at least, and what the layers told; `key` switches dropout on, consumed."""
        x = self.patches(images).astype(self.stack.dtype)
        x = contract("bnp,pd->bnd", x, params["w_in"], (None, "embed"), bias=params["b_in"])
        x = x + params["positions"].astype(x.dtype)[None]
        x, _, aux = self.stack.apply(params, x, key=key)
        x = x.astype(jnp.promote_types(x.dtype, jnp.float32)).mean(1)
        return contract("bd,dc->bc", x, params["head"], ("embed", None), bias=params["b_head"]), aux

    def loss(self, params: PyTree, batch: dict[str, jax.Array], key: PRNGKey | None = None) -> tuple[jax.Array, Info]:
        """Computes the mean cross entropy and the layers' own losses; with it accuracy and what the layers told.

        Args:
          params: As from `init`.
          batch: "inputs" [B, H, W, C], "targets" int [B] and "weights" [B], what each image counts.
          key: Switches dropout on; consumed.
        """
        out, aux = self.apply(params, batch["inputs"], key)
        loss, accuracy = weighted_cross_entropy(out, batch["targets"], batch["weights"])
        return loss + sum(aux.losses.values()), scalars(aux) | {"accuracy": accuracy}
