"""The token mixer of MatMul-free language models: a gated linear recurrence of units, its output normed and gated."""

import dataclasses
import math
from collections.abc import Iterator

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name
from jax.typing import DTypeLike
from jaxtyping import Array, Float

from jaxpar.fields import AtLeast, check_fields, field
from jaxpar.mesh import mesh_axes
from jaxpar.nn.auxiliary import NOTHING, Aux
from jaxpar.nn.cells.cell import Cell
from jaxpar.nn.leaf import Leaf
from jaxpar.nn.linear import contract
from jaxpar.nn.mixer import ActivationSizes, Context
from jaxpar.nn.mixers.recurrent import sharded_recurrence
from jaxpar.nn.norm import Norm
from jaxpar.transfers import Transfer

__all__ = ["Hgrn"]


def _hgrn(params, h, u):
    a, b = _affine(params, u)
    return a * h + b


def _affine(params, u):
    del params
    return jax.nn.sigmoid(u["f"]), jax.nn.silu(u["i"]) * jax.nn.sigmoid(-u["f"])


def _weights(cell: Cell) -> dict[str, Leaf]:
    return {"bf": Leaf((cell.size,), ("mlp",), "keep")}


@dataclasses.dataclass(frozen=True)
class Hgrn:
    """MatMul-free's token mixer (arXiv:2406.02528, section 3.3.1, after HGRN: arXiv:2311.04823).

        f = s(x wf + bf)    i = silu(x wi + bi) (1 - f)    h' = f h + i    y = (norm(h') silu(x wg)) w_out

    s is the logistic function. All products but those with weights are elementwise, and `Stack(weights="ternary")`
    makes those sums and differences. The state is float32 at least, and the only thing that is kept of the past. Unit n
    forgets within the 2 to 100 steps that its bias says at the start (`jaxpar.nn.leaf`); the paper's has none there.

    Attributes:
      size: n, units.
      eps: Of the norm, which has no weight: the product after it has.
    """

    size: int = field(legal=AtLeast(1))
    eps: float = field(1e-5, AtLeast(0))

    __post_init__ = check_fields

    causal, score_size, num_inputs = True, 0, 3

    @property
    def cell(self) -> Cell:
        """The recurrence alone."""
        return Cell(_hgrn, self.size, ("f", "i"), _weights, jacobian="diag", affine=_affine)

    def leaves(self, embed_dim: int, std: float, out_std: float) -> dict[str, dict[str, Leaf]]:
        """Declares wf, wi, wg [D, n], their biases but for g's, and w_out [n, D], under "mixer"."""
        del std
        into = {"wg": Leaf((embed_dim, self.size), ("embed", "mlp"), 1 / math.sqrt(embed_dim))}
        out = {"w_out": Leaf((self.size, embed_dim), ("mlp", "embed"), out_std)}
        return {"mixer": self.cell.leaves(embed_dim) | into | out}

    def init_cache(
        self, batch: int, slots: int, width: int, dtype: DTypeLike
    ) -> Float[Array, "B n"]:
        """Returns the state before the first token, zeros in float32 at least; it has no slots."""
        del slots, width
        return self.cell.initial((batch,), jnp.promote_types(dtype, jnp.float32))

    def cache_axes(self) -> tuple[str, str]:
        """Returns the logical axes of the state."""
        return ("batch", "mlp")

    def apply(
        self,
        params: dict,
        x: Float[Array, "B T D"],
        cache: Float[Array, "B n"] | None,
        context: Context,
    ) -> tuple[Float[Array, "B T D"], Float[Array, "B n"] | None, Aux]:
        """Returns outputs, the state after the last token that counts, and nothing to tell.

        Raises:
          UsageError: If the context says which tokens each may see, or a mesh splits the sequence.
        """
        context.refuse("a recurrent mixer", "visible")
        params, apart = params["mixer"], context.rules.apart
        x = jnp.swapaxes(x, 0, 1)

        def product(gate: str) -> jax.Array:
            bias = params.get(f"b{gate}")
            y = contract(
                "tbd,dn->tbn", x, params[f"w{gate}"], ("embed", "mlp"), bias=bias, apart=apart
            )
            return checkpoint_name(y, "qkv")

        lanes = {gate: product(gate) for gate in "fi"}
        starts = None if context.starts is None else context.starts.T
        h, state = sharded_recurrence(
            self.cell, params, lanes, cache, resets=starts, valid=context.valid
        )
        out = checkpoint_name(self._gated(h, product("g")), "attention")
        y = contract("tbn,nd->btd", out, params["w_out"], ("mlp", "embed"), apart=apart)
        return y, None if cache is None else state, NOTHING

    def _gated(self, h: jax.Array, g: jax.Array) -> jax.Array:
        ones = {"scale": jnp.ones((self.size,), h.dtype)}
        return Norm(eps=self.eps).apply(ones, h) * jax.nn.silu(g)

    def transfers(self, sizes: ActivationSizes) -> Iterator[Transfer]:
        """Declares the norm's sums over devices that share units, forward and backward."""
        if mesh_axes("mlp"):
            count = (
                2 + sizes.again
            ) * sizes.layers  # the norm makes its forward pass anew in the backward one
            yield Transfer(
                "sum",
                mesh_axes("mlp"),
                count,
                int(count * sizes.tokens * max(sizes.width, 4)),
                "norm of the state",
            )
