"""Layers of a video: one looks along space, the next along time, each at tokens of which a device has all.

Tokens are [B, T, S, D], S places of T frames. A layer along space mixes the tokens of a frame, a layer along time those
of a place: a device that has some of the frames can compute the first, one that has some of the places the second.
Between them the tokens are split anew, by one all-to-all (dynamic sequence parallelism, arXiv:2403.10266).
Without a mesh the same code is the sequential form.
"""

import dataclasses
from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Int

from jaxpar.mesh import constrain, local, mesh_axes, num_shares
from jaxpar.nn.attention import Attention
from jaxpar.nn.auxiliary import Aux, both, over_layers, stacked
from jaxpar.nn.leaf import init_leaves
from jaxpar.nn.stack import Stack, _unstack
from jaxpar.types import PRNGKey, PyTree, UsageError

__all__ = ["SpaceTimeStack"]

SPLIT = {"space": ("batch", "time", None, None), "time": ("batch", None, "space", None)}
"""How the tokens lie while layers look along an axis: split along the other."""

ROWS = {"space": ("batch+time", None, None), "time": ("batch+space", None, None)}
"""The same of rows that a block takes: frames [B T, S, D], and places [B S, T, D]."""


@dataclasses.dataclass(frozen=True)
class SpaceTimeStack:
    """Pairs of pre-norm layers, of space and then of time, each with weights of its own, and a last norm; static.

    Attributes:
      stack: L pairs, what each looks like, remat and dtype; its mixer is the attention along space, not causal.
      time: The attention along time.
    """

    stack: Stack
    time: Attention

    def __post_init__(self):
        """Refuses what does not look at whole frames, and dropout."""
        space = self.stack.mixer
        if not isinstance(space, Attention) or space.causal:
            raise UsageError(
                "the layers along space are attention that is not causal; give the stack Attention(..., "
                "visible=Visible(causal=False))."
            )
        if any(rate > 0 for rate in (self.stack.dropout, space.dropout, self.time.dropout)):
            raise UsageError(
                "layers of space and time have no dropout, whose draws would change with the mesh; set 0."
            )

    def stacks(self) -> dict[str, Stack]:
        """Returns the layers that look along "space" and along "time"."""
        return {"space": self.stack, "time": dataclasses.replace(self.stack, mixer=self.time)}

    def leaves(self) -> dict[str, PyTree]:
        """Declares "space" and "time", each leaf [L, ...], and "final_norm"."""
        layers = {name: stack.leaves()["layers"] for name, stack in self.stacks().items()}
        return layers | {"final_norm": self.stack.norm.leaves(self.stack.embed_dim)}

    def init(self, key: PRNGKey, dtype: DTypeLike = jnp.float32) -> PyTree:
        """Draws the parameters. Consumes `key`."""
        return init_leaves(key, self.leaves(), dtype)

    def apply(
        self, params: PyTree, x: Float[Array, "B T S D"]
    ) -> tuple[Float[Array, "B T S D"], Aux]:
        """Computes the residual stream after all layers and the last norm, in `dtype`, and what the layers told.

        The result is split along time. T and S need not divide over the devices: the split axis is filled up with zeros
        before it is cut, and what came of them is cut off where the axis is whole again, before any layer looks along
        it; so no mask is needed.

        Cost: of L pairs 2 L all-to-alls forward and 2 L backward, in each of which a device sends (N-1)/N of its share
        of the tokens; remat makes those of the forward pass again. Nothing else of the tokens crosses `context`, but
        where N does not divide T: then the result is gathered to be cut.

        Raises:
          UsageError: If layers tell of their tokens, and of some that fill up as well.
        """
        stacks, (frames, places) = self.stacks(), x.shape[1:3]
        layers = {
            name: stack.hold({"layers": params[name]})["layers"] for name, stack in stacks.items()
        }
        x = constrain(_filled(x.astype(self.stack.dtype), "time"), *SPLIT["space"])

        def pair(x, layer, index):
            x, told = _look("space", stacks["space"], layer["space"], index, x)
            # Two layouts of one array are what an all-to-all is to GSPMD.
            x = constrain(constrain(_filled(x, "space"), *SPLIT["space"]), *SPLIT["time"])[
                :, :frames
            ]
            x, more = _look("time", stacks["time"], layer["time"], index, x)
            x = constrain(constrain(_filled(x, "time"), *SPLIT["time"]), *SPLIT["space"])[
                :, :, :places
            ]
            told = both(told, more)
            if (told.losses or told.metrics) and (
                _short("time", frames) or _short("space", places)
            ):
                raise UsageError(
                    f"layers tell {', '.join((*told.losses, *told.metrics))} of all tokens, and T={frames}, S={places} "
                    f"are filled up to divide over the devices; take sizes that do, or layers that tell nothing."
                )
            return x, told

        x, told = self._repeated(pair, x, layers)
        return self.stack.norm.apply(params["final_norm"], x)[:, :frames], told

    def _repeated(self, pair: Callable, x: Array, layers: PyTree) -> tuple[Array, Aux]:
        """All pairs, scanned or unrolled, as the stack's layers would be."""
        pair, num = self.stack.remat_of(pair), self.stack.num_layers
        if self.stack.scan_layers:
            x, told = jax.lax.scan(lambda x, each: pair(x, *each), x, (layers, jnp.arange(num)))
            return x, over_layers(told)
        told = []
        for index, layer in enumerate(_unstack(layers, num)):
            x, aux = pair(x, layer, index)
            told.append(aux)
        return x, over_layers(stacked(told))


def _short(name: str, size: int) -> int:
    """How many more would divide over the devices."""
    return -size % num_shares(*mesh_axes(name))


def _filled(x: Float[Array, "B T S D"], name: str) -> Float[Array, "B T S D"]:
    """The tokens with zeros behind them along an axis that is whole, so that it divides."""
    axis = {"time": 1, "space": 2}[name]
    short = _short(name, x.shape[axis])
    return jnp.pad(x, [(0, short if i == axis else 0) for i in range(4)]) if short else x


def _look(
    along: str, stack: Stack, layer: PyTree, index: int | Int[Array, ""], x: Float[Array, "B T S D"]
) -> tuple[Float[Array, "B T S D"], Aux]:
    """Applies a layer to the tokens as rows of what lies along an axis.

    A device's own rows are merged: of two axes that are both split no order of rows would be a slice a device. That it
    is another order than without a mesh changes nothing, since no row looks at another.
    """
    batch, split, rows = x.shape[0] // num_shares(*mesh_axes("batch")), SPLIT[along], ROWS[along]

    def merged(x):
        x = x if along == "space" else jnp.swapaxes(x, 1, 2)
        return x.reshape(-1, *x.shape[2:])

    def apart(x):
        x = x.reshape(batch, -1, *x.shape[1:])
        return x if along == "space" else jnp.swapaxes(x, 1, 2)

    x = local(merged, [split], rows)(x)
    context = stack.context(x)
    x, _, told = stack.layer(
        layer, index, x, context._replace(rules=context.rules._replace(outside=rows, inside=rows))
    )
    return local(apart, [rows], split)(x), told
