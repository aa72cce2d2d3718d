"""The branch of a block that looks at each token alone."""

import dataclasses
import functools
import math
from collections.abc import Iterator

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name
from jaxtyping import Array, Float

from jaxpar.fields import AtLeast, OneOf, check_fields, field
from jaxpar.mesh import gather, in_role, local, mesh_axes, unsplit
from jaxpar.nn.auxiliary import NOTHING, Aux
from jaxpar.nn.leaf import Leaf
from jaxpar.nn.linear import Transposed, contract, transposed_is_faster
from jaxpar.nn.mixer import ActivationSizes, Context
from jaxpar.nn.norm import wide_dtype
from jaxpar.transfers import Transfer

__all__ = ["ACTIVATIONS", "Mlp", "mlp_by_blocks"]

BLOCK = 8192
"""Most tokens of a device whose activations [tokens, F] exist at the same time, where they are taken by blocks."""


def _elementwise(forward, same_for_gradient):
    """Returns `forward`, of which the backward pass keeps only the arguments.

    The gradient is that of the same function written in another way: of a literal copy XLA would keep
    intermediates of the forward pass, each as large as the arguments; and a barrier against that, as
    `jax.checkpoint` sets, would keep the gradient out of the epilogue of the product before it.
    """
    function = jax.custom_vjp(forward)

    def backward(args, g):
        wide = [x.astype(wide_dtype(x)) for x in args]
        grads = jax.vjp(same_for_gradient, *wide)[1](g.astype(wide[0].dtype))
        return tuple(grad.astype(x.dtype) for grad, x in zip(grads, args, strict=True))

    function.defvjp(lambda *args: (forward(*args), args), backward)
    return function


ACTIVATIONS = {
    "swiglu": _elementwise(
        lambda gate, up: jax.nn.silu(gate) * up,
        lambda gate, up: 0.5 * gate * (1 + jnp.tanh(gate / 2)) * up,
    ),
    "geglu": _elementwise(
        lambda gate, up: jax.nn.gelu(gate, approximate=True) * up,
        lambda gate, up: (
            gate * jax.nn.sigmoid(math.sqrt(8 / math.pi) * (gate + 0.044715 * gate**3)) * up
        ),
    ),
    "gelu": _elementwise(
        lambda x: jax.nn.gelu(x, approximate=True),
        lambda x: x * jax.nn.sigmoid(math.sqrt(8 / math.pi) * (x + 0.044715 * x**3)),
    ),
    "gelu_exact": _elementwise(
        lambda x: jax.nn.gelu(x, approximate=False),
        lambda x: 0.5 * x * (1 + jax.lax.erf(x / math.sqrt(2))),
    ),
}


@dataclasses.dataclass(frozen=True)
class Mlp:
    """down(activation(up(x))), or down(silu(gate(x)) * up(x)), or with gelu in place of silu.

    Attributes:
      size: F.
      activation: "swiglu" and "geglu" (gated, the latter by the tanh form), "gelu" (tanh form, GPT-2's) or
        "gelu_exact" (erf form).
      bias: Whether its products have biases.
    """

    size: int = field(legal=AtLeast(1))
    activation: str = field("swiglu", OneOf(ACTIVATIONS))
    bias: bool = False

    __post_init__ = check_fields

    @property
    def parts(self) -> tuple[str, ...]:
        """Names of the products into it."""
        return ("gate", "up") if self.activation in ("swiglu", "geglu") else ("up",)

    def leaves(self, embed_dim: int, std: float, out_std: float) -> dict[str, Leaf]:
        """Declares w_up, w_gate [D, F], w_down [F, D] and their biases."""
        out = {
            f"w_{part}": Leaf((embed_dim, self.size), ("embed", "mlp"), std) for part in self.parts
        }
        out["w_down"] = Leaf((self.size, embed_dim), ("mlp", "embed"), out_std)
        if self.bias:
            out |= {f"b_{part}": Leaf((self.size,), ("mlp",), "zeros") for part in self.parts}
            out["b_down"] = Leaf((embed_dim,), (None,), "zeros")
        return out

    @property
    def num_inputs(self) -> int:
        """Products with weights that read its input: as many sums over devices for the gradient of that."""
        return len(self.parts)

    def apply(
        self, params: dict, x: Float[Array, "B T D"], context: Context
    ) -> tuple[Float[Array, "B T D"], Aux]:
        """Returns `products`, of blocks of tokens where the context says so, and nothing to tell."""
        rules = context.rules
        if rules.blockwise:
            return mlp_by_blocks(self, params, x, rules.inside), NOTHING
        return self.products(params, x, apart=rules.apart), NOTHING

    def transfers(self, sizes: ActivationSizes) -> Iterator[Transfer]:
        """Declares nothing beyond products with weights."""
        del sizes
        return iter(())

    def products(
        self, params: dict, x: Float[Array, "B T D"], *, apart: bool = False
    ) -> Float[Array, "B T D"]:
        """Computes [B, T, D] -> [B, T, F] -> [B, T, D]; `apart` is that of `contract`."""

        def product(equation, x, part, axes):
            return contract(
                equation, x, params[f"w_{part}"], axes, bias=params.get(f"b_{part}"), apart=apart
            )

        if "w_inside" in params:
            joined = product("btd,dpf->btpf", x, "inside", ("embed", None, "mlp"))
            inside = [joined[:, :, part] for part in range(len(self.parts))]
            return product(
                "btf,fd->btd", ACTIVATIONS[self.activation](*inside), "down", ("mlp", "embed")
            )
        up = checkpoint_name(product("btd,df->btf", x, "up", ("embed", "mlp")), "mlp")
        inside = [up]
        if "gate" in self.parts:
            inside = [
                checkpoint_name(product("btd,df->btf", x, "gate", ("embed", "mlp")), "mlp"),
                up,
            ]
        return product(
            "btf,fd->btd", ACTIVATIONS[self.activation](*inside), "down", ("mlp", "embed")
        )

    def for_decoding(self, params: dict) -> dict:
        """Returns the parameters with "w_inside" [parts, F, D] in place of w_gate and w_up, where that is faster."""
        names = [f"w_{part}" for part in self.parts]
        split = any(mesh_axes(name) for name in ("embed_weight", "mlp"))
        if split or not transposed_is_faster(*(params[name] for name in (*names, "w_down"))):
            return params
        inside = {
            f"{kind}_inside": [f"{kind}_{part}" for part in self.parts]
            for kind in "wb"[: 1 + self.bias]
        }
        out = {name: x for name, x in params.items() if name not in sum(inside.values(), [])}
        if self.bias:
            out["b_inside"] = jnp.stack([params[name] for name in inside["b_inside"]])
        joined = jnp.stack([params[name] for name in names], 1)
        return out | {
            "w_inside": Transposed.of(joined, 1),
            "w_down": Transposed.of(params["w_down"], 1),
        }


def mlp_by_blocks(
    mlp: Mlp, params: dict, x: Float[Array, "B T D"], axes: tuple[str | None, ...]
) -> Float[Array, "B T D"]:
    """Computes `mlp.products` on BLOCK tokens of a device at a time, and again so for the gradient: no [T, F] exists.

    Every device takes its own tokens, with weights that are gathered once, and sums its gradients of them over its
    blocks, in float32 at least, before devices add theirs up. Weights of other kinds than arrays
    (`jaxpar.nn.linear.Weight`) stay where they are, so that a mesh gathers them for each block.

    Args:
      mlp: The branch.
      params: Its parameters, and maybe others.
      x: Its input.
      axes: How the input lies.

    Cost: that of `mlp.products`, and of the forward pass once more. Memory: O(B T D + BLOCK F).
    """
    leaves = mlp.leaves(x.shape[-1], 1.0, 1.0)
    params = {name: params[name] for name in leaves}
    last = params.pop("b_down", None)  # added once, not by each device that has a part of F
    if all(isinstance(w, jax.Array) for w in params.values()):
        y = _on_devices(mlp, params, x, axes, {name: leaves[name].axes for name in params})
    else:
        y = _block_after_block(mlp, x, params)
    return y if last is None else y + last.astype(y.dtype).reshape(1, 1, -1)


def _on_devices(mlp: Mlp, params: dict, x: jax.Array, axes: tuple, names: dict) -> jax.Array:
    """The same of arrays: each device's tokens by its share of F, whose results are added up."""
    over = tuple(axis for name in (*axes, "mlp") if name for axis in mesh_axes(name))
    shares, used, weights = mesh_axes("mlp"), [], []
    for name, of in names.items():
        held, summed = in_role(of, "weight"), in_role(of, "grad")
        used.append(in_role(of, "use"))
        weights.append(gather(params[name].astype(x.dtype), held, used[-1], summed, name))
    split = [axes, *used]

    def differs(a: jax.Array, names: tuple) -> jax.Array:
        """Tells that `a` differs between all devices: its gradient is then summed over them once, not in each block."""
        own = {axis for name in names if name for axis in mesh_axes(name)}
        rest = tuple(axis for axis in over if axis not in own)
        return jax.lax.pcast(a, rest, to="varying") if rest else a

    def mine(x, *weights):
        return _block_after_block(mlp, x, dict(zip(names, weights, strict=True)))

    def on_device(*arrays):
        y = unsplit(mine)(*map(differs, arrays, split))
        return jax.lax.psum(y, shares) if shares else y

    return local(on_device, split, axes)(x, *weights)


def _block_after_block(mlp: Mlp, x: jax.Array, params: dict) -> jax.Array:
    batch, length, width = x.shape
    total = batch * length
    count = -(-total // BLOCK)
    size = -(-total // count)
    # Wider than they are multiplied: the sum of their gradients over the blocks is of this dtype.
    params = jax.tree.map(
        lambda w: w.astype(wide_dtype(w)) if jnp.issubdtype(w.dtype, jnp.floating) else w, params
    )

    @functools.partial(jax.checkpoint, prevent_cse=False)
    def one(part, params):
        return mlp.products(params, part[None])[0]

    if count == 1:
        return one(x.reshape(total, width), params).reshape(x.shape)
    parts = jnp.pad(x.reshape(total, width), ((0, count * size - total), (0, 0))).reshape(
        count, size, width
    )
    _, y = jax.lax.scan(lambda _, part: (None, one(part, params)), None, parts)
    return y.reshape(-1, width)[:total].reshape(x.shape)
