"""A mixture of experts in the place of an mlp: each token is computed by the few that its router chooses.

y = sum over the chosen e of weight_e down_e(activation(up_e(x))). A device routes the tokens that it has; how they then
reach experts of other devices is the transport's affair.
"""

import dataclasses
import functools
from collections.abc import Iterator

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from jaxpar.fields import AtLeast, Between, OneOf, Positive, check_fields, field
from jaxpar.mesh import constrain, gather, in_role, local, mesh_axes
from jaxpar.nn.auxiliary import Aux, Bilinear, Max, Mean, Metric, Min
from jaxpar.nn.experts.dispatch import capacity_of, capacity_rank, within_capacity
from jaxpar.nn.experts.losses import (
    balance_loss,
    bias_loss,
    information_gain,
    load,
    mean_shares,
    router_z_loss,
)
from jaxpar.nn.experts.route import (
    SCORES,
    Routing,
    check_router,
    heard,
    noisy,
    route,
    weights_by_expert,
)
from jaxpar.nn.experts.transport import SUM, Routed, Transport
from jaxpar.nn.leaf import Leaf
from jaxpar.nn.linear import Weight
from jaxpar.nn.mixer import ActivationSizes, Context
from jaxpar.nn.mlp import ACTIVATIONS, Mlp
from jaxpar.nn.norm import wide_dtype
from jaxpar.transfers import Transfer
from jaxpar.types import UsageError

__all__ = ["BALANCE_LAYERS", "Experts", "dense_mixture"]

BALANCE_LAYERS = ("summed", "concatenated")
"""How the balance loss treats the layers of a stack."""


@dataclasses.dataclass(frozen=True)
class Experts:
    """E mlps without biases and a router that sends each token to k of them.

    Attributes:
      size: F, of each.
      num_experts: E.
      experts_per_token: k.
      activation: As of `jaxpar.nn.mlp.Mlp`.
      capacity: Choices that an expert takes of a row of the batch in training, as a multiple of T k / E; the others
        count nothing. None for all of them. A prompt and what follows it are never dropped.
        Tokens of weight 0 take the slots that others leave, by `dispatch.capacity_rank`.
      capacity_group: Consecutive tokens of a row in which it is counted, T of them; 0 for the row. No mesh changes it.
      scores: "softmax" or "sigmoid", of `route`.
      normalise: Whether a token's weights sum to 1.
      balance_loss: Weight of `losses.balance_loss`.
      z_loss: Weight of `losses.router_z_loss`.
      information_gain: Weight of minus `losses.information_gain`.
      bias: Weight of `losses.bias_loss`; if not 0, the choice is corrected by a learned bias of each expert.
      noise: Standard deviation of what is added to the logits while training.
      failures: Probability that an expert does not answer a row of the batch while training; the others that a token
        chose then count for it too, by `route.heard`.
      transport: How tokens reach experts that devices share.
      shared: n; if not 0, one mlp of width n F computes all tokens and is added (arXiv:2401.06066, section 3.2).
      balance_layers: "summed" adds up the balance losses of layers. "concatenated" is one balance
        loss over the tokens of all layers, times k: transformers' `load_balancing_loss_func`.
    """

    size: int = field(legal=AtLeast(1))
    num_experts: int = field(legal=AtLeast(1))
    experts_per_token: int = field(2, AtLeast(1))
    activation: str = field("swiglu", OneOf(ACTIVATIONS))
    capacity: float | None = field(None, Positive())
    scores: str = field("softmax", OneOf(SCORES))
    normalise: bool = True
    balance_loss: float = field(0.01, AtLeast(0))
    z_loss: float = field(0.0, AtLeast(0))
    information_gain: float = field(0.0, AtLeast(0))
    bias: float = field(0.0, AtLeast(0))
    noise: float = field(0.0, AtLeast(0))
    failures: float = field(0.0, Between(0, 1))
    transport: Transport = SUM
    shared: int = field(0, AtLeast(0))
    capacity_group: int = field(0, AtLeast(0))
    balance_layers: str = field("summed", OneOf(BALANCE_LAYERS))

    def __post_init__(self):
        """Refuses what is out of range, and a router that could not learn."""
        check_fields(self)
        check_router(self.num_experts, self.experts_per_token, self.normalise)

    @property
    def parts(self) -> tuple[str, ...]:
        """Names of the products into an expert."""
        return Mlp(self.size, self.activation).parts

    @property
    def num_inputs(self) -> int:
        """Sums over devices that share F in its backward pass: of the gradients of input and weights."""
        return 2 + (self._shared.num_inputs + 1 if self.shared else 0)

    @property
    def _shared(self) -> Mlp:
        return Mlp(self.shared * self.size, self.activation)

    def leaves(self, embed_dim: int, std: float, out_std: float) -> dict[str, Leaf]:
        """Declares w_router [D, E], w_up, w_gate [E, D, F] and w_down [E, F, D]; b_router [E] where it has a bias.

        Where there are shared experts, also w_shared_up, w_shared_gate [D, n F] and w_shared_down [n F, D].
        """
        out = {"w_router": Leaf((embed_dim, self.num_experts), ("embed", None), std, raw=True)}
        for name, leaf in Mlp(self.size, self.activation).leaves(embed_dim, std, out_std).items():
            out[name] = Leaf(
                (self.num_experts, *leaf.shape), ("experts", *leaf.axes), leaf.init, raw=True
            )
        if self.bias:
            out["b_router"] = Leaf((self.num_experts,), (None,), "zeros")
        if self.shared:
            shared = self._shared.leaves(embed_dim, std, out_std)
            out |= {name.replace("w_", "w_shared_"): leaf for name, leaf in shared.items()}
        return out

    def apply(
        self, params: dict, x: Float[Array, "B T D"], context: Context
    ) -> tuple[Float[Array, "B T D"], Aux]:
        """Returns the mixture, with the losses of the router over all tokens.

        It tells "expert_load" and "expert_load_min", the largest and the smallest load of an expert over the mean one,
        and with a capacity "dropped", the share of choices that were over it. Losses and metrics
        are weighted by `context.weights`, and 0 without a token that counts.

        Raises:
          UsageError: If it is to go by blocks; for a capacity where rows are split over devices, or that is counted in
            groups that do not divide a row; for weights that are no arrays.
        """
        whole, x = x.shape, self._in_groups(x, context)
        if any(isinstance(params[name], Weight) for name in self.leaves(x.shape[-1], 1.0, 1.0)):
            raise UsageError(
                "weights of experts are arrays; adapters and eight bits are for other products."
            )
        if context.rules.blockwise:
            raise UsageError(
                "a mixture of experts has no remat=blockwise; legal are the others, such as full."
            )
        logits, routing = self._route(params, x, context)
        expert, weight = self._heard(routing, context)
        kept = self._kept(expert, context)
        expert = expert if kept is None else jnp.where(kept, expert, self.num_experts)
        y = self._compute(params, x, expert, weight, context)
        if self.shared:
            names = self._shared.leaves(1, 1.0, 1.0)
            y = (
                y
                + self._shared.apply(
                    {name: params[name.replace("w_", "w_shared_")] for name in names}, x, context
                )[0]
            )
        bias = None
        if self.bias:
            bias = params["b_router"]
        weights = context.weights
        if weights is not None:
            weights = weights.reshape(x.shape[:2])
        return y.reshape(whole), self._aux(logits, bias, routing, kept, weights)

    def _in_groups(self, x: jax.Array, context: Context) -> jax.Array:
        """Tokens with the groups of a capacity as rows."""
        group, (rows, length, width) = self.capacity_group, x.shape
        if not group or self.slots(length, context) is None:
            return x
        if length % group:
            raise UsageError(
                f"capacity_group={group} does not divide rows of {length} tokens; legal are 0 and divisors of {length}."
            )
        if context.rules.inside[1] and mesh_axes(context.rules.inside[1]):
            return x  # and refused, group or not
        return constrain(x.reshape(rows * length // group, group, width), *context.rules.inside)

    def slots(self, length: int, context: Context) -> int | None:
        """Returns how many choices an expert takes of a row of `length` tokens; None for all."""
        if self.capacity is None or context.seen is not None:
            return None
        return capacity_of(self.capacity, length, self.experts_per_token, self.num_experts)

    def transfers(self, sizes: ActivationSizes) -> Iterator[Transfer]:
        """Declares the means over all tokens that the losses take, and what the transport moves."""
        axes = (*mesh_axes("batch"), *mesh_axes("seq_layer"))
        if axes:
            arrays = 8 * sizes.layers
            yield Transfer(
                kind="sum",
                axes=axes,
                arrays=arrays,
                bytes=arrays * 8 * self.num_experts,
                why="means over all tokens of the router's choices",
            )
        if self.capacity is not None and self.capacity_group:
            sizes = sizes._replace(rows=sizes.tokens / self.capacity_group)
        yield from self.transport.transfers(self, sizes)

    def _route(self, params: dict, x: jax.Array, context: Context) -> tuple[jax.Array, Routing]:
        """Logits and choices; every device makes those of its own tokens."""
        axes, k = context.rules.inside, self.experts_per_token
        of, wide = ("embed", None), wide_dtype(x)
        router = params["w_router"].astype(x.dtype)
        router = gather(
            router, in_role(of, "weight"), in_role(of, "use"), in_role(of, "grad"), "w_router"
        )
        given = {"x": (x, axes), "router": (router, in_role(of, "use"))}
        if self.bias:
            given["bias"] = (params["b_router"].astype(wide), (None,))
        if self.noise and context.key is not None:
            nothing = jnp.zeros((*x.shape[:2], self.num_experts), wide)
            given["noise"] = (
                constrain(noisy(jax.random.fold_in(context.key, 0), nothing, self.noise), *axes),
                axes,
            )

        def choose(*arrays):
            mine = dict(zip(given, arrays, strict=True))
            logits = jnp.einsum(
                "btd,de->bte",
                mine["x"],
                mine["router"],
                precision="highest",
                preferred_element_type=wide,
            )
            logits = logits + mine["noise"] if "noise" in mine else logits
            routing = route(
                logits, k, scores=self.scores, normalise=self.normalise, bias=mine.get("bias")
            )
            return logits, routing.expert, routing.weight, routing.scores

        arrays, split = zip(*given.values(), strict=True)
        logits, expert, weight, scores = local(choose, split, (axes,) * 4)(*arrays)
        return logits, Routing(expert=expert, weight=weight, scores=scores)

    def _heard(self, routing: Routing, context: Context) -> tuple[jax.Array, jax.Array]:
        """Choices and weights, without those of experts that fail: whole rows of the batch ask them, as trainers do."""
        if not self.failures or context.key is None:
            return routing.expert, routing.weight
        (rows, *_), axes = routing.expert.shape, context.rules.inside
        shape = (rows, 1, self.num_experts)
        answers = jax.random.uniform(jax.random.fold_in(context.key, 1), shape) >= self.failures
        answers = constrain(jnp.broadcast_to(answers, routing.scores.shape), *axes)
        return tuple(
            local(heard, [axes] * 3, (axes, axes))(routing.expert, routing.weight, answers)
        )

    def _kept(self, expert: jax.Array, context: Context) -> jax.Array | None:
        """Tells which choices the capacity keeps; None for all."""
        axes, most = context.rules.inside, self.slots(expert.shape[1], context)
        if most is None:
            return None
        if axes[1] and mesh_axes(axes[1]):
            raise UsageError(
                "a capacity counts the tokens of a whole row, which mesh.context splits; take mesh.context=1, or no "
                "capacity."
            )
        if context.weights is None:
            keep = functools.partial(within_capacity, num_experts=self.num_experts, capacity=most)
            return local(keep, [axes], axes)(expert)

        # Of whole rows: a group of a row does not know which tokens a later group reads.
        rank = local(capacity_rank, [axes[:2]], axes[:2])(context.weights)
        rank = constrain(rank.reshape(expert.shape[:2]), *axes[:2])

        def keep_by_rank(expert: jax.Array, rank: jax.Array) -> jax.Array:
            return within_capacity(expert, self.num_experts, most, rank)

        return local(keep_by_rank, [axes, axes[:2]], axes)(expert, rank)

    def _compute(
        self, params: dict, x: jax.Array, expert: jax.Array, weight: jax.Array, context: Context
    ):
        """The chosen experts of every token, to which the transport brings it."""
        leaves = self.leaves(x.shape[-1], 1.0, 1.0)
        names = [*(f"w_{part}" for part in self.parts), "w_down"]
        # Saved are what was moved and the products. Weights are gathered, and rows sorted, again for the backward pass.
        policy = jax.checkpoint_policies.save_only_these_names("moved", "product")

        def compute(x, expert, weight, held):
            weights = {}
            for name, w in zip(names, held, strict=True):
                of = leaves[name].axes
                rest, use, grad = (in_role(of, role) for role in ("weight", "use", "grad"))
                weights[name] = gather(w.astype(x.dtype), rest, use, grad, name)
            tokens = Routed(x=x, expert=expert, weight=weight)
            return self.transport(self, tokens, weights, context)

        run = jax.checkpoint(compute, policy=policy, prevent_cse=context.rules.apart)
        return run(x, expert, weight, [params[name] for name in names])

    def _aux(
        self,
        logits: jax.Array,
        bias: jax.Array | None,
        routing: Routing,
        kept: jax.Array | None,
        weights: jax.Array | None,
    ) -> Aux:
        losses = {}
        if self.balance_loss:
            losses["balance_loss"] = self._balance_loss(routing, weights)
        if self.z_loss:
            losses["router_z_loss"] = self.z_loss * router_z_loss(logits, weights)
        if self.information_gain:
            shares = routing.scores / routing.scores.sum(-1, keepdims=True)
            gain = information_gain(shares, weights=weights)
            losses["information_gain"] = -self.information_gain * gain
        if bias is not None:
            losses["bias_loss"] = self.bias * bias_loss(bias, routing.expert, weights)

        loads = load(routing.expert, self.num_experts, logits.dtype, weights)
        most, least = (self.num_experts * f(loads) for f in (jnp.max, jnp.min))
        metrics: dict[str, Metric] = {"expert_load": Max(most), "expert_load_min": Min(least)}
        if kept is not None:
            metrics["dropped"] = _dropped(kept, logits.dtype, weights)
        return Aux(losses, metrics)

    def _balance_loss(self, routing: Routing, weights: jax.Array | None) -> jax.Array | Bilinear:
        """Returns the layer's balance loss, or its part of the one of all layers."""
        if self.balance_layers == "summed":
            return self.balance_loss * balance_loss(routing.scores, routing.expert, weights)

        scores, k = routing.scores, self.experts_per_token
        loads = load(routing.expert, self.num_experts, scores.dtype, weights)
        scaled = self.balance_loss * self.num_experts * k * loads
        return Bilinear(scaled, mean_shares(scores, weights), jnp.ones((), scores.dtype))


def _dropped(kept: jax.Array, dtype, weights: jax.Array | None) -> Mean:
    """The share of the choices that are over the capacity, of tokens that count."""
    is_over = 1 - kept.astype(dtype)
    if weights is None:
        return Mean.of(is_over)
    weights = jnp.abs(weights).astype(dtype)
    return Mean((weights[..., None] * is_over).sum(), kept.shape[-1] * weights.sum())


def dense_mixture(
    params: dict, x: Float[Array, "*N D"], routing: Routing, activation: str = "swiglu"
) -> Float[Array, "*N D"]:
    """Computes every expert on every token, and the sum weighted by 0 where a token did not choose it: the plain form.

    Args:
      params: Of `Experts`: w_up, w_down and, where the activation is gated, w_gate.
      x: Tokens.
      routing: What they chose; a weight of 0 drops a choice.
      activation: Of the experts.

    Cost: E / k times that of the sorted form.
    """
    names = [f"w_{part}" for part in Mlp(1, activation).parts]
    inside = [jnp.einsum("...d,edf->...ef", x, params[name].astype(x.dtype)) for name in names]
    each = jnp.einsum(
        "...ef,efd->...ed", ACTIVATIONS[activation](*inside), params["w_down"].astype(x.dtype)
    )
    weights = weights_by_expert(routing)
    return jnp.einsum("...e,...ed->...d", weights, each.astype(weights.dtype)).astype(x.dtype)
