"""An mlp whose units spike: it keeps their potentials from token to token, so that it is a mixer."""

import dataclasses
import math
from collections.abc import Iterator

import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name
from jax.typing import DTypeLike
from jaxtyping import Array, Float

from jaxpar.fields import AtLeast, Between, check_fields, field
from jaxpar.nn.auxiliary import NOTHING, Aux
from jaxpar.nn.leaf import Leaf
from jaxpar.nn.linear import contract
from jaxpar.nn.mixer import ActivationSizes, Context
from jaxpar.nn.mixers.spikes import integrate_and_fire
from jaxpar.nn.norm import wide_dtype
from jaxpar.transfers import Transfer
from jaxpar.types import PyTree

__all__ = ["SpikingMlp"]


@dataclasses.dataclass(frozen=True)
class SpikingMlp:
    """The channel mixer of a spiking LMUFormer (arXiv:2402.04882, section 3): y[t] = w_down s[t].

    s are spikes of F leaky integrate-and-fire units, which see w_up x[t] + b_up as currents; they run step by step.
    Without spikes that mixer, two convolutions of one tap, is `jaxpar.nn.mlp.Mlp`. Layers of a network have an `Lmu`
    and it in turn: `Stack(2 * n, D, (Lmu(..., spiking=True), SpikingMlp(F)), mlp=None)`.

    Attributes:
      size: F.
      beta: What a step leaves of a unit's potential.
    """

    size: int = field(legal=AtLeast(1))
    beta: float = field(0.9, Between(0, 1))

    __post_init__ = check_fields

    causal, score_size, num_inputs = True, 0, 1

    def leaves(self, embed_dim: int, std: float, out_std: float) -> dict[str, PyTree]:
        """Declares w_up [D, F], of the spread that keeps variances, b_up [F] and w_down [F, D], under "mixer"."""
        del std
        leaves = {
            "w_up": Leaf((embed_dim, self.size), ("embed", "mlp"), 1 / math.sqrt(embed_dim)),
            "b_up": Leaf((self.size,), ("mlp",), "zeros"),
            "w_down": Leaf((self.size, embed_dim), ("mlp", "embed"), out_std),
        }
        return {"mixer": leaves}

    def init_cache(
        self, batch: int, slots: int, width: int, dtype: DTypeLike
    ) -> Float[Array, "B F"]:
        """Returns potentials of zero, in float32 at least; they have no slots."""
        del slots, width
        return jnp.zeros((batch, self.size), jnp.promote_types(dtype, jnp.float32))

    def cache_axes(self) -> tuple[str, str]:
        """Returns the logical axes of the potentials."""
        return ("batch", "mlp")

    def apply(
        self,
        params: dict,
        x: Float[Array, "B T D"],
        cache: Float[Array, "B F"] | None,
        context: Context,
    ) -> tuple[Float[Array, "B T D"], Float[Array, "B F"] | None, Aux]:
        """Returns outputs, the potentials after the last token that counts, and nothing to tell.

        Raises:
          UsageError: If the context says which tokens each may see, or a mesh splits the sequence.
        """
        context.refuse("a spiking mlp", "visible")
        context.refuse_split("a spiking mlp")
        params, apart = params["mixer"], context.rules.apart
        up = contract(
            "btd,df->btf", x, params["w_up"], ("embed", "mlp"), bias=params["b_up"], apart=apart
        )
        up = checkpoint_name(up, "mlp").astype(wide_dtype(x))
        fired, potentials = integrate_and_fire(up, cache, context.starts, beta=self.beta)
        y = contract(
            "btf,fd->btd", fired.astype(x.dtype), params["w_down"], ("mlp", "embed"), apart=apart
        )
        after = (
            None
            if cache is None
            else context.last(jnp.concatenate([cache[:, None], potentials], 1))
        )
        return y, after, NOTHING

    def transfers(self, sizes: ActivationSizes) -> Iterator[Transfer]:
        """Declares nothing: a sequence that is split is refused."""
        del sizes
        return iter(())
