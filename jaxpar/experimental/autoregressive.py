"""Autoregressive models of discrete data, sampled by fixed-point sweeps over all elements at once.

A sample with its noise fixed is the root of x = update(x), where element i of the update reads the elements before i
only: `jaxpar.solve.causal_fixed_point` finds it in fewer network evaluations than the one an element that ancestral
sampling makes, and finds the same integers (Song et al. 2021, arXiv:2002.03629).
"""

import dataclasses
import math
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax, nn
from jaxtyping import Array, Float, Int

from jaxpar.fields import AtLeast, Each, check_fields, field
from jaxpar.solve.causal import CausalStats, Order, causal_fixed_point
from jaxpar.solve.fixed_point import Jacobi
from jaxpar.types import PRNGKey, PyTree, UsageError

__all__ = ["Made", "PixelCnn"]


@dataclasses.dataclass(frozen=True)
class Made:
    """Masked autoencoder for distributions over binary vectors (Germain et al. 2015, arXiv:1502.03509).

    p(x) = prod_i Bernoulli(x_i; sigmoid(logits(x)_i)), where logit i sees x_1 .. x_{i-1}: unit k of a hidden layer has
    a degree d(k), cycling through 1 .. num_dims - 1, and reads only units of a degree of at most its own.

    Attributes:
      num_dims: Elements D of a vector, at least 2.
      hidden: Widths of the hidden layers.
    """

    num_dims: int = field(legal=AtLeast(2))
    hidden: tuple[int, ...] = field((64,), Each(AtLeast(1)))

    def __post_init__(self):
        check_fields(self)
        if not self.hidden:
            raise UsageError("hidden=() leaves Made no hidden layer; give one width or more.")

    def init(self, key: PRNGKey) -> PyTree:
        """Draws the weights (He et al.'s scale on the unmasked inputs); consumes `key`."""
        layers = []
        masks = self._masks()
        for layer_key, mask in zip(jax.random.split(key, len(masks)), masks, strict=True):
            scale = np.sqrt(2 / np.maximum(mask.sum(0), 1)).astype(np.float32)
            w = jax.random.normal(layer_key, mask.shape) * scale[None, :]
            layers.append({"w": w, "b": jnp.zeros(mask.shape[1])})
        return layers

    def logits(self, params: PyTree, x: Int[Array, " D"]) -> Float[Array, " D"]:
        """Returns log p(x_i = 1 | x_<i) / p(x_i = 0 | x_<i) for every i; x holds 0 and 1."""
        dtype = params[0]["w"].dtype
        h = 2 * x.astype(dtype) - 1
        for layer, mask in zip(params, self._masks(), strict=True):
            h = (nn.relu(h) if layer is not params[0] else h) @ (
                layer["w"] * jnp.asarray(mask, dtype)
            ) + layer["b"]
        return h

    def log_prob(self, params: PyTree, x: Int[Array, " D"]) -> Float[Array, ""]:
        """Returns log p(x) in nats of one vector."""
        logits = self.logits(params, x)
        return nn.log_sigmoid(jnp.where(x == 1, logits, -logits)).sum()

    def sample(
        self,
        key: PRNGKey,
        params: PyTree,
        num: int,
        *,
        method: Order = Jacobi(),  # noqa: B008 (frozen)
        with_stats: bool = False,
    ) -> Int[Array, "num D"] | tuple[Int[Array, "num D"], CausalStats]:
        """Draws `num` vectors, the same ones for the same key whatever the method; consumes `key`.

        Args:
          key: Fixes the noise of every element: x_i = 1 where logit_i plus a logistic variable is positive.
          params: From `init`.
          num: How many.
          method: `Jacobi()`, `GaussSeidel(block=...)` or `Sequential()`.
          with_stats: Whether `CausalStats`, one a vector, are returned, too.
        """
        noise = jax.random.logistic(key, (num, self.num_dims))

        def update(noise, x):
            return (self.logits(params, x) + noise > 0).astype(jnp.int32)

        return _sample(update, noise, self.num_dims, method, with_stats)

    def _masks(self) -> list[np.ndarray]:
        """Returns the masks [in, out] of the layers; output i, counted from 1, has degree i - 1: less than input i."""
        degrees = [np.arange(1, self.num_dims + 1)]
        degrees += [np.arange(width) % (self.num_dims - 1) + 1 for width in self.hidden]
        degrees.append(np.arange(self.num_dims))
        return [
            before[:, None] <= after[None, :]
            for before, after in zip(degrees, degrees[1:], strict=False)
        ]


@dataclasses.dataclass(frozen=True)
class PixelCnn:
    """A small PixelCNN++ for gray images (Salimans et al. 2017, arXiv:1701.05517), at one resolution.

    Pixels come row by row. Two stacks of shifted convolutions see the rows above (`down`) and those and the pixels to
    the left (`right`); `right` ends in a mixture of logistic distributions, discretized to the levels, of each pixel.
    The paper's strided layers and its dropout are left out.

    Attributes:
      height: Rows of an image.
      width: Columns of an image.
      levels: Gray levels; pixels are integers in [0, levels).
      channels: Features of a stack.
      num_blocks: Gated residual blocks of each stack.
      mixtures: Logistic distributions of a pixel.
    """

    height: int = field(legal=AtLeast(1))
    width: int = field(legal=AtLeast(1))
    levels: int = field(256, AtLeast(2))
    channels: int = field(32, AtLeast(1))
    num_blocks: int = field(3, AtLeast(1))
    mixtures: int = field(5, AtLeast(1))

    __post_init__ = check_fields

    def init(self, key: PRNGKey) -> PyTree:
        """Draws the weights (variance 1 / inputs); consumes `key`."""
        c = self.channels
        first = {"above": (2, 3, 2, c), "row_above": (1, 3, 2, c), "left": (2, 1, 2, c)}
        down = {"one": (2, 3, 2 * c, c), "two": (2, 3, 2 * c, 2 * c)}
        right = {
            "one": (2, 2, 2 * c, c),
            "two": (2, 2, 2 * c, 2 * c),
            "from_down": (1, 1, 2 * c, c),
        }
        shapes = {
            "first": first,
            "blocks": [{"down": down, "right": right} for _ in range(self.num_blocks)],
            "last": (1, 1, c, 3 * self.mixtures),
        }
        leaves, tree = jax.tree.flatten(shapes, is_leaf=lambda x: isinstance(x, tuple))
        keys = jax.random.split(key, len(leaves))
        weights = [
            {
                "w": jax.random.normal(k, shape) / math.sqrt(math.prod(shape[:3])),
                "b": jnp.zeros((1, 1, shape[3])),
            }
            for k, shape in zip(keys, leaves, strict=True)
        ]
        return jax.tree.unflatten(tree, weights)

    def mixture(
        self, params: PyTree, image: Int[Array, "height width"]
    ) -> Float[Array, "height width 3 mixtures"]:
        """Returns log weights (not normalised), means and log scales of each pixel; gray is in [-1, 1]."""
        gray = image.astype(params["last"]["w"].dtype) * (2 / (self.levels - 1)) - 1
        x = jnp.stack([gray, jnp.ones_like(gray)], -1)  # the ones tell the border from mid-gray
        first = params["first"]
        down = _shift_down(_conv(x, first["above"], left=1))
        right = _shift_down(_conv(x, first["row_above"], left=1)) + _shift_right(
            _conv(x, first["left"], left=0)
        )
        for block in params["blocks"]:
            down = _gated(down, block["down"], left=1)
            right = _gated(right, block["right"], left=1, skip=down)
        out = _conv(nn.elu(right), params["last"], left=0)
        return out.reshape(self.height, self.width, 3, self.mixtures)

    def log_prob(self, params: PyTree, image: Int[Array, "height width"]) -> Float[Array, ""]:
        """Returns log p(image) in nats; the outer levels hold the tails of the logistic distributions."""
        log_weight, mean, log_scale = jnp.moveaxis(self.mixture(params, image), 2, 0)
        step = 2 / (self.levels - 1)
        gray = (image.astype(mean.dtype) * step - 1)[:, :, None]
        low, high = ((gray + side * step / 2 - mean) * jnp.exp(-log_scale) for side in (-1, 1))
        # log(sigmoid(high) - sigmoid(low)) without cancellation.
        inside = high + jnp.log(-jnp.expm1(low - high)) - nn.softplus(high) - nn.softplus(low)
        level = image[:, :, None]
        log_mass = jnp.where(level == 0, nn.log_sigmoid(high), inside)
        log_mass = jnp.where(level == self.levels - 1, nn.log_sigmoid(-low), log_mass)
        return nn.logsumexp(nn.log_softmax(log_weight) + log_mass, -1).sum()

    def sample(
        self,
        key: PRNGKey,
        params: PyTree,
        num: int,
        *,
        method: Order = Jacobi(),  # noqa: B008 (frozen)
        with_stats: bool = False,
    ) -> Int[Array, "num height width"] | tuple[Int[Array, "num height width"], CausalStats]:
        """Draws `num` images, the same ones for the same key whatever the method; consumes `key`.

        Args:
          key: Fixes the noise of every pixel: Gumbel variables pick the component, a logistic one the gray.
          params: From `init`.
          num: How many.
          method: `Jacobi()`, `GaussSeidel(block=...)` (blocks of pixels, row by row) or `Sequential()`.
          with_stats: Whether `CausalStats`, one an image, are returned, too.
        """
        pick_key, gray_key = jax.random.split(key)
        shape = (num, self.height, self.width)
        noise = (
            jax.random.gumbel(pick_key, (*shape, self.mixtures)),
            jax.random.logistic(gray_key, shape),
        )

        def update(noise, pixels):
            gumbel, logistic = noise
            image = pixels.reshape(self.height, self.width)
            log_weight, mean, log_scale = jnp.moveaxis(self.mixture(params, image), 2, 0)
            pick = nn.one_hot(jnp.argmax(log_weight + gumbel, -1), self.mixtures, dtype=mean.dtype)
            gray = (pick * mean).sum(-1) + jnp.exp((pick * log_scale).sum(-1)) * logistic
            level = jnp.round((gray + 1) * ((self.levels - 1) / 2))
            return jnp.clip(level, 0, self.levels - 1).astype(jnp.int32).reshape(-1)

        out = _sample(update, noise, self.height * self.width, method, with_stats)
        return jax.tree.map(lambda x: x.reshape(shape) if x.ndim == 2 else x, out)


def _sample(update: Callable, noise: PyTree, num_elements: int, method: Order, with_stats: bool):
    """Solves x = update(noise, x) for each sample, from zeros."""

    def one(noise):
        start = jnp.zeros(num_elements, jnp.int32)
        return causal_fixed_point(
            lambda x: update(noise, x), start, method=method, with_stats=with_stats
        )

    return jax.vmap(one)(noise)


def _conv(x: Array, layer: PyTree, left: int) -> Array:
    """Convolves [H, W, C] with a kernel whose last row is the pixel's own; `left` of its columns lie to the left."""
    rows, columns = layer["w"].shape[:2]
    padding = ((rows - 1, 0), (left, columns - 1 - left))
    out = lax.conv_general_dilated(
        x[None], layer["w"], (1, 1), padding, dimension_numbers=("NHWC", "HWIO", "NHWC")
    )
    return out[0] + layer["b"]


def _gated(x: Array, layers: PyTree, left: int, skip: Array | None = None) -> Array:
    """Adds a gated two-convolution residual, with `skip` joining in after the first."""
    h = _conv(_both_signs(x), layers["one"], left)
    if skip is not None:
        h = h + _conv(_both_signs(skip), layers["from_down"], 0)
    value, gate = jnp.split(_conv(_both_signs(h), layers["two"], left), 2, -1)
    return x + value * nn.sigmoid(gate)


def _both_signs(x: Array) -> Array:
    return nn.elu(jnp.concatenate([x, -x], -1))


def _shift_down(x: Array) -> Array:
    return jnp.pad(x, ((1, 0), (0, 0), (0, 0)))[:-1]


def _shift_right(x: Array) -> Array:
    return jnp.pad(x, ((0, 0), (1, 0), (0, 0)))[:, :-1]
