"""The Legendre memory unit as a mixer: a linear memory that never learns, and what is learned to write and read it."""

import dataclasses
import math
from collections.abc import Iterator

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name
from jax.typing import DTypeLike
from jaxtyping import Array, Float

from jaxpar.fields import AtLeast, Between, OneOf, Positive, check_fields, field
from jaxpar.mesh import local
from jaxpar.nn.auxiliary import NOTHING, Aux
from jaxpar.nn.leaf import Leaf
from jaxpar.nn.linear import contract
from jaxpar.nn.mixer import ActivationSizes, Context
from jaxpar.nn.mixers.legendre import FORMS, memory
from jaxpar.nn.mixers.spikes import integrate_and_fire
from jaxpar.nn.norm import wide_dtype
from jaxpar.transfers import Transfer
from jaxpar.types import PyTree, UsageError

__all__ = ["Lmu", "equal_units"]

INTO = ("embed", "heads", "head_dim")


def equal_units(embed_dim: int, heads: int, memory: int, num_params: int) -> int:
    """Returns the units, a multiple of `heads`, with which an `Lmu` has nearly `num_params` parameters."""
    each = 2 * embed_dim + memory + 1
    return heads * max(1, round((num_params - embed_dim * heads) / each / heads))


@dataclasses.dataclass(frozen=True)
class Lmu:
    """A Legendre memory unit (LMUFormer, arXiv:2402.04882, section 3) in H channels.

    With c a channel and P units to each,

        u[t, c] = w_u[c] . x[t],  m[t, c] = A m[t-1, c] + B u[t, c],  h[t, c] = act(w_x[c] x[t] + w_m[c] m[t, c] + b[c])

    and y[t] = w_out h[t]. The paper's unit has one channel, whose memory all units read: `channels=1`. More of them are
    the heads of attention, each with a memory and units of its own, which tensor parallelism splits. A and B are
    constants (`legendre.legendre`). Spiking, u and h are spikes of leaky integrate-and-fire units, which see what is
    inside the two brackets as currents; they run step by step, the memory between them does not.

    Attributes:
      units: H P, a multiple of H.
      channels: H.
      memory: d, numbers of a channel's memory.
      theta: Steps that it holds.
      form: Of the memory, in training and of prompts: one of `legendre.FORMS`; "fft" falls back to chunks where
        documents begin or a memory is carried on.
      spiking: Whether units spike; else the activation is GELU (tanh form), and u is linear.
      beta: What a step leaves of a spiking unit's potential.
    """

    units: int = field(legal=AtLeast(1))
    channels: int = field(1, AtLeast(1))
    memory: int = field(32, AtLeast(1))
    theta: float = field(128.0, Positive())
    form: str = field("auto", OneOf(FORMS))
    spiking: bool = False
    beta: float = field(0.9, Between(0, 1))

    causal, score_size, num_inputs = True, 0, 2

    def __post_init__(self):
        """Refuses units that channels cannot share."""
        check_fields(self)
        if self.units % self.channels:
            raise UsageError(f"units={self.units} must be a multiple of channels={self.channels}.")

    def leaves(self, embed_dim: int, std: float, out_std: float) -> dict[str, PyTree]:
        """Declares w_u [D, H], w_x [D, H, P], w_m [H, d, P], b [H, P] and w_out [H, P, D], under "mixer".

        What enters has the spread that keeps variances, in place of `std`.
        """
        del std
        each, into = self.units // self.channels, 1 / math.sqrt(embed_dim)
        leaves = {
            "w_u": Leaf((embed_dim, self.channels), INTO[:2], into),
            "w_x": Leaf((embed_dim, self.channels, each), INTO, into),
            "w_m": Leaf(
                (self.channels, self.memory, each),
                ("heads", None, "head_dim"),
                1 / math.sqrt(self.memory),
            ),
            "b": Leaf((self.channels, each), INTO[1:], "zeros"),
            "w_out": Leaf(
                (self.channels, each, embed_dim), ("heads", "head_dim", "embed"), out_std
            ),
        }
        return {"mixer": leaves}

    def init_cache(self, batch: int, slots: int, width: int, dtype: DTypeLike) -> PyTree:
        """Returns the empty memory [B, H, d], of spiking units with potentials [B, H], [B, H, P]; wide."""
        del slots, width
        shape = (batch, self.channels)
        zeros = [
            jnp.zeros((*shape, *more), jnp.promote_types(dtype, jnp.float32))
            for more in self._shapes()
        ]
        return tuple(zeros) if self.spiking else zeros[0]

    def cache_axes(self) -> PyTree:
        """Returns the logical axes of the state."""
        axes = tuple(("batch", "heads", *(None,) * len(more)) for more in self._shapes())
        return axes if self.spiking else axes[0]

    def _shapes(self) -> tuple[tuple[int, ...], ...]:
        return ((self.memory,), (), (self.units // self.channels,))

    def apply(
        self, params: dict, x: Float[Array, "B T D"], cache: PyTree | None, context: Context
    ) -> tuple[Float[Array, "B T D"], PyTree | None, Aux]:
        """Returns outputs, the state after the last token that counts, and nothing to tell.

        Raises:
          UsageError: If the context says which tokens each may see, or a mesh splits the sequence.
        """
        context.refuse("a Legendre memory", "visible")
        context.refuse_split("a Legendre memory")
        params, apart, starts = params["mixer"], context.rules.apart, context.starts
        m, v_u, v_h = cache if self.spiking and cache is not None else (cache, None, None)
        wide = wide_dtype(x)
        u = contract("btd,dh->bth", x, params["w_u"], INTO[:2], apart=apart)
        u = checkpoint_name(u, "qkv").astype(wide)
        if self.spiking:
            u, potentials = integrate_and_fire(u, v_u, starts, beta=self.beta)
            v_u = _after(v_u, potentials, context)
        states = self._memory(u, m, context)
        m = _after(m, states, context)
        into = contract("btd,dhp->bthp", x, params["w_x"], INTO, bias=params["b"], apart=apart)
        into = checkpoint_name(into, "qkv").astype(wide)
        h = into + contract(
            "bthm,hmp->bthp", states, params["w_m"], ("heads", None, "head_dim"), apart=apart
        )
        if self.spiking:
            h, potentials = integrate_and_fire(h, v_h, starts, beta=self.beta)
            v_h = _after(v_h, potentials, context)
        else:
            h = jax.nn.gelu(h)
        h = checkpoint_name(h.astype(x.dtype), "attention")
        y = contract(
            "bthp,hpd->btd", h, params["w_out"], ("heads", "head_dim", "embed"), apart=apart
        )
        return y, (m, v_u, v_h) if self.spiking and cache is not None else m, NOTHING

    def _memory(
        self, u: Float[Array, "B T H"], before: Array | None, context: Context
    ) -> Float[Array, "B T H d"]:
        """Runs each device's own rows and channels: the transforms and products with constants cross none."""
        before = None if context.fresh else before
        form = (
            "chunks"
            if self.form == "fft" and (before is not None or context.starts is not None)
            else self.form
        )
        given = {"u": u, "before": before, "starts": context.starts}
        axes = {
            "u": ("batch", None, "heads"),
            "before": ("batch", "heads", None),
            "starts": ("batch", None),
        }
        given = {name: array for name, array in given.items() if array is not None}

        def block(*arrays):
            return memory(
                **dict(zip(given, arrays, strict=True)),
                size=self.memory,
                theta=self.theta,
                form=form,
            )

        return local(block, [axes[name] for name in given], ("batch", None, "heads", None))(
            *given.values()
        )

    def transfers(self, sizes: ActivationSizes) -> Iterator[Transfer]:
        """Declares nothing: a sequence that is split is refused."""
        del sizes
        return iter(())


def _after(before: Array | None, states: Float[Array, "B T ..."], context: Context) -> Array | None:
    """Returns the state after the last token that counts; None without a cache."""
    if before is None or context.valid is None:
        return None if before is None else states[:, -1]
    return context.last(jnp.concatenate([before[:, None], states], 1))
