"""Mixers whose state is a matrix a head: products with weights around a recurrence, on any mesh, streamed as well.

Heads are split as attention's are, rows too, and so is the sequence: what crosses devices then is one state each.
"""

import dataclasses
import math
from collections.abc import Iterator
from typing import NamedTuple, Protocol

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name
from jax.typing import DTypeLike
from jaxtyping import Array, Float

from jaxpar.fields import AtLeast, check_fields, field
from jaxpar.mesh import in_role, is_axes, local, mesh_axes, num_shares
from jaxpar.nn.auxiliary import NOTHING, Aux
from jaxpar.nn.leaf import Leaf
from jaxpar.nn.linear import contract
from jaxpar.nn.mixer import ActivationSizes, Context
from jaxpar.nn.mixers.options import Packing, RecurrenceExecution
from jaxpar.transfers import Transfer
from jaxpar.types import PyTree, UsageError

__all__ = ["MatrixState"]

HEADS, OUT = ("embed", "heads", "head_dim"), ("heads", "head_dim", "embed")
Names = tuple[str | None, ...]


class Time(NamedTuple):
    """Time as a recurrence goes through it on one device.

    Attributes:
      packing: Where documents begin, and how many tokens of each row count.
      execution: The tokens of a chunk, and the mesh axis over which time is split.
    """

    packing: Packing
    execution: RecurrenceExecution

    @property
    def line(self) -> dict:
        """The arguments of `short_conv`."""
        return {**self.packing._asdict(), "axis_name": self.execution.axis_name}


class Layer(Protocol):
    """One of the papers' layers; frozen and hashable. `MatrixState` makes a mixer of it."""

    @property
    def num_heads(self) -> int:
        """H."""
        ...

    @property
    def num_inputs(self) -> int:
        """Products that read the block's input."""
        ...

    @property
    def num_shared(self) -> int:
        """Numbers a token that are the same for all heads inside `mix`."""
        ...

    @property
    def own(self) -> tuple[str, ...]:
        """Parameters that `mix` reads, which are multiplied by no `contract`."""
        ...

    def leaves(self, embed_dim: int, std: float) -> dict[str, Leaf]:
        """Declares the parameters, but w_out [H, V, D]."""
        ...

    @property
    def value_dim(self) -> int:
        """V."""
        ...

    def initial(self, batch: int, embed_dim: int, dtype: DTypeLike) -> dict[str, Array]:
        """Returns the state before the first token, in `dtype`."""
        ...

    def state_axes(self) -> dict[str, Names]:
        """Returns the logical axes of the state."""
        ...

    def inputs(
        self, params: dict, x: Float[Array, "B T D"], state: dict | None, context: Context
    ) -> tuple[dict[str, tuple[Array, Names]], dict[str, Array]]:
        """Returns arrays [B, T, ...] with the logical axes of what follows time, and what of the state is new."""
        ...

    def mix(
        self, params: dict, inputs: dict[str, Array], state: dict[str, Array], time: Time
    ) -> tuple[Float[Array, "B T H V"], dict[str, Array]]:
        """Runs the recurrence on one device's own rows, heads and tokens; the outputs are normalised and gated."""
        ...


@dataclasses.dataclass(frozen=True)
class MatrixState:
    """A layer whose state is a matrix a head, as a mixer.

    Attributes:
      layer: Which.
      chunk: Tokens of a chunk, in which pairs are multiplied; a power of two. It changes no result but by rounding.
    """

    layer: Layer
    chunk: int = field(64, AtLeast(1))

    causal, score_size = True, 0
    __post_init__ = check_fields

    @property
    def num_inputs(self) -> int:
        """Of the layer."""
        return self.layer.num_inputs

    def leaves(self, embed_dim: int, std: float, out_std: float) -> dict[str, dict[str, Leaf]]:
        """Declares the layer's parameters and w_out [H, V, D], under "mixer"."""
        shape = (self.layer.num_heads, self.layer.value_dim, embed_dim)
        return {"mixer": self.layer.leaves(embed_dim, std) | {"w_out": Leaf(shape, OUT, out_std)}}

    def init_cache(self, batch: int, slots: int, width: int, dtype: DTypeLike) -> dict[str, Array]:
        """Returns the state before the first token, in float32 at least; it has no slots."""
        del slots
        return self.layer.initial(batch, width, jnp.promote_types(dtype, jnp.float32))

    def cache_axes(self) -> dict[str, Names]:
        """Returns the logical axes of the state."""
        return self.layer.state_axes()

    def apply(
        self, params: dict, x: Float[Array, "B T D"], cache: PyTree | None, context: Context
    ) -> tuple[Float[Array, "B T D"], PyTree | None, Aux]:
        """Returns outputs, the state after the last token that counts, and nothing to tell.

        Raises:
          UsageError: If the context says which tokens each may see, or if two mesh axes split the sequence.
        """
        context.refuse("a mixer with a matrix state", "visible")
        params, layer = params["mixer"], self.layer
        axis_name = _sequence_axis(context)
        inputs, renewed = layer.inputs(params, x, cache, context)
        state = (
            layer.initial(len(x), x.shape[-1], jnp.promote_types(x.dtype, jnp.float32))
            if cache is None
            else cache
        )
        arrays = {name: checkpoint_name(lane, "qkv") for name, (lane, _) in inputs.items()}
        own, declared = {name: params[name] for name in layer.own}, layer.leaves(x.shape[-1], 1.0)
        time = context.rules.inside[1]
        axes = (
            {name: ("batch", time, *names) for name, (_, names) in inputs.items()},
            {name: in_role(declared[name].axes, "use") for name in own},
            layer.state_axes(),
            None if context.starts is None else ("batch", time),
            None if context.valid is None else ("batch",),
        )
        packing = Packing(starts=context.starts, valid=context.valid)
        execution = RecurrenceExecution(chunk=self.chunk, axis_name=axis_name)
        flat, tree = jax.tree.flatten((arrays, own, state, packing))

        def block(*flat):
            arrays, own, state, packing = tree.unflatten(flat)
            time = Time(packing=packing, execution=execution)
            out, state = layer.mix(own, arrays, state, time)
            return out if cache is None else (out, state)

        into = ("batch", time, "heads", None)
        split = local(
            block,
            jax.tree.leaves(axes, is_leaf=is_axes),
            into if cache is None else (into, axes[2]),
        )
        out, state = (split(*flat), None) if cache is None else split(*flat)
        out = checkpoint_name(out.astype(x.dtype), "attention")
        y = contract("bthv,hvd->btd", out, params["w_out"], OUT, apart=context.rules.apart)
        return y, None if state is None else state | renewed, NOTHING

    def transfers(self, sizes: ActivationSizes) -> Iterator[Transfer]:
        """Declares the states and tokens that devices of a sequence send, and sums over devices that share heads."""
        yield from self._sums(sizes)
        axes = mesh_axes("seq_layer")
        if not axes:
            return
        state = jax.eval_shape(lambda: self.layer.initial(1, sizes.embed_dim, jnp.float32))
        rows, shares = sizes.rows, num_shares(*axes)
        size = 4 * rows * sum(leaf.size for leaf in jax.tree.leaves(state))
        # Of both passes, and the forward one once more in the backward pass.
        passes = sizes.layers * (sizes.again + 2)
        yield Transfer(
            "gather", axes, 3 * passes, int(3 * passes * shares * size), "states of all devices"
        )
        yield Transfer(
            "exchange",
            axes,
            6 * passes,
            int(6 * passes * size),
            "the state and the tokens before a device's",
        )

    def _sums(self, sizes: ActivationSizes) -> Iterator[Transfer]:
        """Of numbers a token that all heads read, and gradients of parameters that are of no head."""
        heads = mesh_axes("heads")
        if not heads:
            return
        if shared := self.layer.num_shared:
            passes = sizes.layers * (sizes.again + 2)
            yield Transfer(
                "sum",
                heads,
                3 * passes,
                int(passes * sizes.tokens * shared * 4),
                "what all heads read",
            )
        declared = self.layer.leaves(sizes.embed_dim, 1.0)
        whole = [declared[name] for name in self.layer.own if "heads" not in declared[name].axes]
        size = 4 * sizes.layers * sum(math.prod(leaf.shape) for leaf in whole)
        axes = (*mesh_axes("batch"), *mesh_axes("seq_layer"), *heads)
        yield Transfer(
            "sum", axes, sizes.layers * len(whole), size, "gradients of what all heads share"
        )


def _sequence_axis(context: Context) -> str | None:
    """Returns the mesh axis that splits the sequence."""
    axes = mesh_axes("seq_layer") if context.rules.inside[1] == "seq_layer" else ()
    if len(axes) > 1:
        raise UsageError(
            f"a mixer with a matrix state takes a sequence split over one mesh axis, not {'*'.join(axes)}."
        )
    return axes[0] if axes else None


def project(
    params: dict, x: Array, context: Context, *names: str, numbers: tuple[str, ...] = ()
) -> list[Array]:
    """Returns the products of x with weights [D, H, K] of these names, then of `numbers`, weights [D, H]."""
    products = []
    for name in (*names, *numbers):
        letters, axes = ("bth", HEADS[:2]) if name in numbers else ("bthk", HEADS)
        equation = f"btd,d{letters[2:]}->{letters}"
        products.append(contract(equation, x, params[name], axes, apart=context.rules.apart))
    return products


def head_norm(
    x: Float[Array, "B T H V"],
    scale: Float[Array, "H V"],
    *,
    centred: bool = False,
    eps: float = 1e-5,
) -> Float[Array, "B T H V"]:
    """Normalises each head's outputs, by their mean square or, `centred`, by their variance; of each its own scale."""
    x = x - x.mean(-1, keepdims=True) if centred else x
    return (
        x
        * jax.lax.rsqrt(jnp.square(x).mean(-1, keepdims=True) + eps)
        * scale.astype(x.dtype)[None, None]
    )
