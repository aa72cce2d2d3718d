"""A classifier of images and a predictor of frames: layers over patches between two linear maps."""

import dataclasses
import math

import jax
import jax.numpy as jnp
import optax
from jax.typing import DTypeLike
from jaxtyping import Array, Float

from jaxpar.fields import AtLeast, Each, OneOf, check_fields, field
from jaxpar.mesh import constrain
from jaxpar.nn.auxiliary import Aux, scalars
from jaxpar.nn.cells.network import weighted_cross_entropy
from jaxpar.nn.images.space_time import SpaceTimeStack
from jaxpar.nn.leaf import Leaf, init_leaves, leaf_axes
from jaxpar.nn.linear import contract
from jaxpar.nn.stack import Stack
from jaxpar.types import Info, PRNGKey, PyTree, UsageError

__all__ = ["FramePredictor", "ImageClassifier"]


@dataclasses.dataclass(frozen=True)
class ImageClassifier:
    """Patches -> linear map + learned positions -> stack -> mean over patches -> linear map (arXiv:2010.11929).

    Of images [H, W, C], N = H W / P^2 patches of P x P pixels are the tokens, row by row. A learned token behind them
    may be read in place of their mean; it sees all of them under a causal mixer too, such as a retention
    (arXiv:2310.19731), whose patches may then come one after the other. Static, hashable.

    Attributes:
      stack: What mixes the patches; for their mean not causal: give its attention `Visible(causal=False)`.
      patch: P, which divides H and W.
      shape: H, W, C.
      classes: How many.
      readout: What the logits are a map of: "mean", of patches, or "token", the one behind them.
    """

    stack: Stack
    patch: int = field(legal=AtLeast(1))
    shape: tuple[int, int, int] = field(legal=Each(AtLeast(1)))
    classes: int = field(legal=AtLeast(2))
    readout: str = field("mean", OneOf(("mean", "token")))

    def __post_init__(self):
        """Refuses patches that do not fit, and a mixer to which the first patch is blind."""
        check_fields(self)
        if len(self.shape) != 3:
            raise UsageError(f"shape={self.shape} of images must be height, width and channels.")
        _check_patch(self.patch, *self.shape[:2])
        if self.readout == "mean" and any(mixer.causal for mixer in self.stack.mixers):
            raise UsageError(
                "the patches of an image see each other, but this stack's mixer is causal; give it attention with "
                "visible=Visible(causal=False), or readout=token."
            )

    @property
    def num_patches(self) -> int:
        """N."""
        return (self.shape[0] // self.patch) * (self.shape[1] // self.patch)

    def leaves(self) -> dict[str, PyTree]:
        """Declares the stack's parameters, w_in [P P C, D], positions [N, D], head [D, classes] and two biases.

        And token [D], where one is read.
        """
        into, width = self.patch**2 * self.shape[2], self.stack.embed_dim
        behind = {"token": Leaf((width,), ("embed",), 1.0)} if self.readout == "token" else {}
        return behind | {
            "w_in": Leaf((into, width), (None, "embed"), 1 / math.sqrt(into)),
            "b_in": Leaf((width,), (None,), "zeros"),
            "positions": Leaf(
                (self.num_patches, width), (None, "embed"), 1.0
            ),  # as loud as what the patches say
            **self.stack.leaves(),
            "head": Leaf((width, self.classes), ("embed", None), 1 / math.sqrt(width)),
            "b_head": Leaf((self.classes,), (None,), "zeros"),
        }

    def init(self, key: PRNGKey, dtype: DTypeLike = jnp.float32) -> PyTree:
        """Draws the parameters. Consumes `key`."""
        return init_leaves(key, self.leaves(), dtype)

    def axes(self) -> PyTree:
        """Returns the logical axes of every parameter."""
        return leaf_axes(self.leaves())

    def patches(self, images: Float[Array, "B H W C"]) -> Float[Array, "B N PPC"]:
        """Cuts images into patches: both row by row, channels innermost."""
        height, width, channels = self.shape
        if images.shape[1:] != (height, width, channels):
            raise UsageError(f"images of shape {images.shape[1:]} are none of shape {self.shape}.")
        return _cut(images, self.patch)

    def apply(
        self, params: PyTree, images: Float[Array, "B H W C"], key: PRNGKey | None = None
    ) -> tuple[Float[Array, "B classes"], Aux]:
        """Computes the logits, in float32 at least, and what the layers told; `key` switches dropout on, consumed."""
        x, _, aux = self.stack.apply(params, self.tokens(params, images), key=key)
        return self.logits(params, x), aux

    def tokens(self, params: PyTree, images: Float[Array, "B H W C"]) -> Float[Array, "B N D"]:
        """Returns what the stack takes: the patches in turn, and behind them the token that is read, if one is."""
        x = self.patches(images).astype(self.stack.dtype)
        x = contract("bnp,pd->bnd", x, params["w_in"], (None, "embed"), bias=params["b_in"])
        x = x + params["positions"].astype(x.dtype)[None]
        if self.readout == "mean":
            return x
        token = params["token"].astype(x.dtype)[None, None]
        return jnp.concatenate([x, jnp.broadcast_to(token, (x.shape[0], 1, x.shape[2]))], 1)

    def logits(self, params: PyTree, x: Float[Array, "B N D"]) -> Float[Array, "B classes"]:
        """Returns the logits of what the stack made; where a token is read, of the last there is."""
        x = x.astype(jnp.promote_types(x.dtype, jnp.float32))
        x = x.mean(1) if self.readout == "mean" else x[:, -1]
        return contract("bd,dc->bc", x, params["head"], ("embed", None), bias=params["b_head"])

    def loss(
        self, params: PyTree, batch: dict[str, jax.Array], key: PRNGKey | None = None
    ) -> tuple[jax.Array, Info]:
        """Computes the mean cross entropy and the layers' own losses; with it accuracy and what the layers told.

        Args:
          params: As from `init`.
          batch: "inputs" [B, H, W, C], "targets" int [B] and "weights" [B], what each image counts.
          key: Switches dropout on; consumed.
        """
        out, aux = self.apply(params, batch["inputs"], key)
        loss, accuracy = weighted_cross_entropy(out, batch["targets"], batch["weights"])
        return loss + sum(aux.losses.values()), scalars(aux) | {"accuracy": accuracy}


@dataclasses.dataclass(frozen=True)
class FramePredictor:
    """Patches -> linear map + learned places and times -> stack -> linear map: of each frame the pixels of the next.

    Of films [T, H, W], S = H W / P^2 patches of P x P pixels a frame are the tokens [T, S]. Static, hashable.

    Attributes:
      stack: Layers of space and time; a frame sees those before it alone.
      patch: P, which divides H and W.
      shape: T, H, W.
    """

    stack: SpaceTimeStack
    patch: int = field(legal=AtLeast(1))
    shape: tuple[int, int, int] = field(legal=Each(AtLeast(1)))

    def __post_init__(self):
        """Refuses patches that do not fit, and frames that see what they are to predict."""
        check_fields(self)
        if len(self.shape) != 3:
            raise UsageError(f"shape={self.shape} of films must be frames, height and width.")
        _check_patch(self.patch, *self.shape[1:])
        if not self.stack.time.causal:
            raise UsageError(
                "a frame that sees the next one predicts nothing; give attention along time causal=True."
            )

    def leaves(self) -> dict[str, PyTree]:
        """Declares the stack's parameters, w_in [P P, D], places [S, D], times [T, D], head [D, P P] and two biases."""
        into, width = self.patch**2, self.stack.stack.embed_dim
        return {
            "w_in": Leaf((into, width), (None, "embed"), 1 / math.sqrt(into)),
            "b_in": Leaf((width,), (None,), "zeros"),
            "places": Leaf((self.shape[1] * self.shape[2] // into, width), (None, "embed"), 1.0),
            "times": Leaf((self.shape[0], width), (None, "embed"), 1.0),
            **self.stack.leaves(),
            "head": Leaf((width, into), ("embed", None), 1 / math.sqrt(width)),
            "b_head": Leaf((into,), (None,), "zeros"),
        }

    def init(self, key: PRNGKey, dtype: DTypeLike = jnp.float32) -> PyTree:
        """Draws the parameters. Consumes `key`."""
        return init_leaves(key, self.leaves(), dtype)

    def axes(self) -> PyTree:
        """Returns the logical axes of every parameter."""
        return leaf_axes(self.leaves())

    def apply(
        self, params: PyTree, films: Float[Array, "B T H W"]
    ) -> tuple[Float[Array, "B T H W"], Aux]:
        """Computes of each frame the logits of the next one's pixels, in float32 at least, and what the layers told."""
        if films.shape[1:] != self.shape:
            raise UsageError(f"films of shape {films.shape[1:]} are none of shape {self.shape}.")
        (frames, height, width), p = self.shape, self.patch
        x = _cut(films.reshape(-1, height, width, 1), p).reshape(
            -1, frames, height * width // p**2, p * p
        )
        x = constrain(x.astype(self.stack.stack.dtype), "batch", None, None, None)
        x = contract("btsp,pd->btsd", x, params["w_in"], (None, "embed"), bias=params["b_in"])
        x = (
            x
            + params["places"].astype(x.dtype)[None, None]
            + params["times"].astype(x.dtype)[None, :, None]
        )
        x, aux = self.stack.apply(params, x)
        x = x.astype(jnp.promote_types(x.dtype, jnp.float32))
        x = contract("btsd,dp->btsp", x, params["head"], ("embed", None), bias=params["b_head"])
        x = x.reshape(-1, frames, height // p, width // p, p, p)
        return jnp.swapaxes(x, 3, 4).reshape(-1, *self.shape), aux

    def loss(
        self, params: PyTree, batch: dict[str, jax.Array], key: PRNGKey | None = None
    ) -> tuple[jax.Array, Info]:
        """Computes the mean cross entropy of a pixel, in nats, and the layers' own losses; with it what layers told.

        Args:
          params: As from `init`.
          batch: "inputs" [B, T, H, W], "targets" of the same shape, the frames that follow, in [0, 1], and
            "weights" [B], what each film counts.
          key: Not needed.
        """
        del key
        out, aux = self.apply(params, batch["inputs"])
        losses = optax.sigmoid_binary_cross_entropy(out, batch["targets"]).mean((1, 2, 3))
        weights = batch["weights"] / batch["weights"].sum()
        return (weights * losses).sum() + sum(aux.losses.values()), scalars(aux)


def _check_patch(patch: int, height: int, width: int) -> None:
    if height % patch or width % patch:
        legal = [p for p in range(1, min(height, width) + 1) if height % p == 0 and width % p == 0]
        raise UsageError(
            f"patch={patch} does not divide images of {height} x {width} pixels; legal are "
            f"{', '.join(map(str, legal))}."
        )


def _cut(images: Float[Array, "B H W C"], p: int) -> Float[Array, "B N PPC"]:
    batch, height, width, channels = images.shape
    x = images.reshape(batch, height // p, p, width // p, p, channels)
    return jnp.swapaxes(x, 2, 3).reshape(batch, height * width // p**2, p * p * channels)
