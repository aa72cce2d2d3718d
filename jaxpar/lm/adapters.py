"""Adapters: a small tree beside the parameters, which alone is trained; the base is frozen, and may be rounded.

Example:
    import jax, jax.numpy as jnp

    from jaxpar.lm import AdapterConfig, AdapterTrainer, LMConfig, init, merge_adapters

    model = LMConfig(vocab_size=8, num_layers=1, embed_dim=8, dtype="float32")
    trainer = AdapterTrainer(model, AdapterConfig("lora", target=("wq", "w_*"), rank=2, base="int8"))
    state = trainer.begin(jax.random.key(1), init(jax.random.key(0), model))
    batch = dict.fromkeys(("tokens", "targets"), jnp.arange(8).reshape(2, 4))
    state, info = jax.jit(trainer.step)(jax.random.key(2), state, batch)
    whole = merge_adapters(state.params)  # arrays again, as `init` makes them
"""

import dataclasses
import fnmatch
import math
import zlib
from collections.abc import Callable

import jax
import jax.numpy as jnp
from flax import struct

from jaxpar.fields import AtLeast, Between, OneOf, Positive, check_fields, field
from jaxpar.lm import params as declared
from jaxpar.lm.config import LMConfig
from jaxpar.lm.objectives import ObjectiveConfig, objective_report, objective_stages
from jaxpar.lm.train import LATER_LEAVES, Health, check_teacher, update, with_teacher
from jaxpar.lm.tuning import TuningConfig, average_of, depth_scales, next_average
from jaxpar.mesh import axes_like
from jaxpar.nn.leaf import Leaf
from jaxpar.nn.linear import Frozen, Lora, Weight, whole_weight
from jaxpar.nn.weights.narrow import Nf4, Quantised, nf4, quantise
from jaxpar.optim import Optimizer, OptimizerConfig, make_optimizer
from jaxpar.pipeline.accumulation import InTurn
from jaxpar.types import Array, Info, PRNGKey, PyTree, UsageError

__all__ = [
    "AdaptedState",
    "AdapterConfig",
    "AdapterTrainer",
    "adapter_axes",
    "fuse_adapters",
    "merge_adapters",
    "num_adapted",
    "with_adapters",
]

KINDS = ("none", "lora")
BASES = ("full", "bfloat16", "int8", "nf4")


@dataclasses.dataclass(frozen=True)
class AdapterConfig:
    """What is trained beside a frozen model.

    Attributes:
      kind: "none" trains the parameters themselves; "lora" a low-rank change of some weights (arXiv:2106.09685).
      target: Patterns of the weights that get a change, as of a shell: of names such as wq, wk, wv, wo, w_gate, w_up
        and w_down, or of "0.wq" where layers have several mixers in turn. "*" is every product of the layers.
      rank: r, of the change.
      alpha: The change is scaled by alpha / r.
      dropout: Rate on what the change sees of its input, while training.
      rslora: Whether it is scaled by alpha / sqrt(r) instead (arXiv:2312.03732).
      dora: Whether each output's magnitude is trained apart from its direction (arXiv:2402.09353).
      base: What the frozen weights are kept in: "full" as they came, float32 at least; "bfloat16"; "int8", a scale an
        output; "nf4", four bits and a scale for 64 numbers. With the latter two embedding and head are bfloat16.
      merge: Whether an export holds the model with its adapters merged, instead of the adapters alone.
    """

    kind: str = field("none", OneOf(KINDS), identity="changed")
    target: tuple[str, ...] = field(("*",), None, identity="changed")
    rank: int = field(8, AtLeast(0), identity="changed")
    alpha: float = field(16.0, Positive(), identity="changed")
    dropout: float = field(0.0, Between(0, 1, "[)"), identity="changed")
    rslora: bool = field(False, None, identity="changed")
    dora: bool = field(False, None, identity="changed")
    base: str = field("full", OneOf(BASES), identity="changed")
    merge: bool = field(False, None, identity=False)

    def __post_init__(self):
        """Refuses numbers that no adapter has."""
        check_fields(self, "adapter.")
        object.__setattr__(self, "target", tuple(self.target))  # flags are lists

    @property
    def scale(self) -> float:
        """What the change is multiplied by."""
        return self.alpha / max(self.rank, 1) ** (0.5 if self.rslora else 1.0)


def is_product(leaf: object) -> bool:
    """Whether a leaf is a weight of the layers that `contract` alone reads."""
    return isinstance(leaf, Leaf) and leaf.axes[0] == "layers" and leaf.is_product


def num_contracted(leaf: Leaf) -> int:
    """Returns how many axes of a layer's weight are contracted: "embed", or all but it; `leaf` is of stacked layers."""
    return 1 if leaf.axes[1] == "embed" else len(leaf.axes) - 2


def targets(model: LMConfig, patterns: tuple[str, ...]) -> dict[str, Leaf]:
    """Returns the weights that patterns mean, by names such as "layers.wq".

    Raises:
      UsageError: A pattern means none.
    """
    flat = jax.tree_util.tree_leaves_with_path(
        declared.leaves(model), is_leaf=lambda leaf: isinstance(leaf, Leaf)
    )
    named = {jax.tree_util.keystr(path, simple=True, separator="."): leaf for path, leaf in flat}
    names = {name.removeprefix("layers."): name for name, leaf in named.items() if is_product(leaf)}
    found: dict[str, Leaf] = {}
    for pattern in patterns:
        hits = [
            full
            for name, full in names.items()
            if fnmatch.fnmatchcase(name, pattern)
            or fnmatch.fnmatchcase(name.rpartition(".")[2], pattern)
        ]
        if not hits:
            why = (
                "is no product of the layers"
                if pattern in named
                else "matches no product of the layers"
            )
            tied = (
                ", and tied to the head" if pattern == "embedding" and model.embedding.tied else ""
            )
            raise UsageError(
                f"adapter.target={pattern} {why}{tied}; legal are patterns of {', '.join(names)}."
            )
        found |= {full: named[full] for full in hits}
    return {full: leaf for full, leaf in named.items() if full in found}


def _map(fn: Callable, model: LMConfig, *trees: PyTree) -> PyTree:
    """Maps `fn(name, leaf, ...)` over the parameters' declarations and trees of their structure."""

    def one(path, leaf, *rest):
        return fn(jax.tree_util.keystr(path, simple=True, separator="."), leaf, *rest)

    is_leaf = lambda leaf: isinstance(leaf, Leaf)  # noqa: E731
    return jax.tree_util.tree_map_with_path(one, declared.leaves(model), *trees, is_leaf=is_leaf)


def frozen(params: PyTree, model: LMConfig, base: str) -> PyTree:
    """Returns the parameters as a base keeps them: products of layers as `Frozen`, `Quantised` or `Nf4`."""

    def one(name: str, leaf: Leaf, w: Array) -> Array | Weight:
        if isinstance(leaf.init, str):
            return w
        if is_product(leaf) and base == "int8":
            return jax.vmap(lambda w: quantise(w, num_contracted(leaf)))(w)
        if is_product(leaf) and base == "nf4":
            return nf4(w)
        w = w if base == "full" else w.astype(jnp.bfloat16)
        return Frozen(w) if is_product(leaf) else w

    return _map(one, model, params)


def _frozen_axes(model: LMConfig, base: str) -> PyTree:
    def one(name: str, leaf: Leaf) -> PyTree:
        if not is_product(leaf):
            return leaf.axes
        if base == "int8":
            return Quantised(leaf.axes, ("layers", *leaf.axes[1 + num_contracted(leaf) :]))  # type: ignore[arg-type]
        return Nf4(leaf.axes, leaf.axes) if base == "nf4" else Frozen(leaf.axes)  # type: ignore[arg-type]

    return _map(one, model)


def unflattened(flat: dict[str, PyTree]) -> dict:
    """Returns a tree of dicts from one of dotted names."""
    out: dict = {}
    for name, value in flat.items():
        *parents, last = name.split(".")
        at = out
        for parent in parents:
            at = at.setdefault(parent, {})
        at[last] = value
    return out


def _at(tree: PyTree, name: str) -> PyTree:
    """Returns the part of a tree of dicts that a dotted name means; None where there is none."""
    for part in name.split("."):
        tree = None if tree is None else tree.get(part)
    return tree


def begin_adapters(key: PRNGKey, base: PyTree, model: LMConfig, adapter: AdapterConfig) -> PyTree:
    """Draws adapters that change nothing yet: {"layers": {"wq": {"down", "up"[, "magnitude"]}}}. Consumes `key`.

    Of DoRA the magnitudes are those of the base as it is rounded.
    """
    dtype = jnp.promote_types(model.dtype, jnp.float32)

    def one(name: str, leaf: Leaf) -> dict[str, Array]:
        keys = jax.random.split(jax.random.fold_in(key, zlib.crc32(name.encode())), leaf.shape[0])

        def layer(key, w):
            like, num = jnp.zeros(leaf.shape[1:], dtype), num_contracted(leaf)
            made = Lora.of(key, like, num, adapter.rank, adapter.scale).replace(weight=w)  # type: ignore[attr-defined]
            out = {"down": made.down, "up": made.up}
            return out | ({"magnitude": made.norm().astype(dtype)} if adapter.dora else {})

        return jax.vmap(layer)(keys, _at(base, name))

    return unflattened(
        {name: one(name, leaf) for name, leaf in targets(model, adapter.target).items()}
    )


def adapter_axes(model: LMConfig, adapters: PyTree) -> PyTree:
    """Returns the logical axes of a tree of adapters: those of their weights, and none of the rank."""

    def one(leaf: Leaf, arrays: PyTree) -> dict[str, tuple]:
        first = 1 + num_contracted(leaf)
        into, out = leaf.axes[1:first], leaf.axes[first:]
        axes = {
            "down": ("layers", *into, None),
            "up": ("layers", None, *out),
            "magnitude": ("layers", *out),
        }
        return {name: axes[name] for name in arrays}

    named = {name: (leaf, _at(adapters, name)) for name, leaf in targets(model, ("*",)).items()}
    return unflattened(
        {name: one(leaf, arrays) for name, (leaf, arrays) in named.items() if arrays is not None}
    )


def with_adapters(
    base: PyTree,
    adapters: PyTree,
    scale: float,
    rate: float = 0.0,
    key: PRNGKey | None = None,
    name: str = "",
) -> PyTree:
    """Returns the parameters of the adapted model, whose adapted weights are `Lora`.

    Args:
      base: As from `frozen`, or plain parameters.
      adapters: As from `begin_adapters`.
      scale: Of the changes.
      rate: Of dropout.
      key: Switches it on; consumed.
      name: Of the part that `base` is, by which its key is known.
    """
    if "down" not in adapters:
        return base | {
            part: with_adapters(base[part], inner, scale, rate, key, f"{name}.{part}")
            for part, inner in adapters.items()
        }
    keys = None
    if key is not None and rate:
        keys = jax.random.split(
            jax.random.fold_in(key, zlib.crc32(name.encode())), adapters["down"].shape[0]
        )
    return Lora(base, **adapters, key=keys, scale=scale, rate=rate)


def merge_adapters(params: PyTree) -> PyTree:
    """Returns parameters without weights of other kinds: adapters are merged, rounded weights widened to float32."""

    def one(w: PyTree) -> Array:
        return jax.vmap(whole_weight)(w) if isinstance(w, Weight) else w

    return jax.tree.map(one, params, is_leaf=lambda w: isinstance(w, Weight))


def num_adapted(model: LMConfig, adapter: AdapterConfig) -> int:
    """Returns how many numbers are trained."""
    total = 0
    for leaf in targets(model, adapter.target).values():
        first = 1 + num_contracted(leaf)
        into = math.prod(leaf.shape[1:first])
        out = math.prod(leaf.shape[first:])
        total += leaf.shape[0] * (adapter.rank * (into + out) + adapter.dora * out)
    return total


def fuse_adapters(
    base: PyTree, adapters: list[PyTree], scale: float, shares: Array, top_p: float = 1.0
) -> PyTree:
    """Returns a model with the weighted sum of several adapters, of those that matter for a sentence (DLP-LoRA).

    Of N changes s A_n B_n it has sum_n p_n s A_n B_n, as one change of N times the rank, so that a product with all of
    them is two, whatever N (arXiv:2410.01497, section 3.3). p are the shares of the fewest whose sum is at least
    `top_p`, over their sum; all others are 0, and change nothing.

    Args:
      base: The frozen parameters.
      adapters: N of them, of LoRA on the same weights.
      scale: Of their changes.
      shares: Float [N], what a small classifier says of a sentence: its softmax over the adapters.
      top_p: In (0, 1].

    Raises:
      UsageError: The adapters are not of one structure, or have magnitudes; or top_p is out of its range.
    """
    if not 0 < top_p <= 1:
        raise UsageError(f"top_p={top_p} is none; legal are numbers over 0, up to 1.")
    flats, defs = zip(*(jax.tree.flatten(tree) for tree in adapters), strict=True)
    if len(set(defs)) > 1 or len(adapters) != shares.shape[0]:
        raise UsageError(f"{len(adapters)} adapters of {len(set(defs))} structures have {shares.shape[0]} shares; "
                         "legal are one structure, and a share each.")  # fmt: skip
    names = {path[-1].key for path, _ in jax.tree_util.tree_leaves_with_path(adapters[0])}
    if names != {"down", "up"}:
        raise UsageError("adapters with magnitudes cannot be fused; give those of dora=false.")
    order = jnp.argsort(-shares)
    sorted_shares = shares[order]
    before = jnp.cumsum(sorted_shares) - sorted_shares
    kept = (
        jnp.zeros_like(shares)
        .at[order]
        .set(jnp.where(before < top_p * shares.sum(), sorted_shares, 0))
    )
    weights = kept / kept.sum()

    def one(path, *parts: Array) -> Array:
        if path[-1].key == "down":
            return jnp.concatenate(parts, -1)
        return jnp.concatenate([weights[n] * part for n, part in enumerate(parts)], 1)

    return with_adapters(base, jax.tree_util.tree_map_with_path(one, *adapters), scale)


@struct.dataclass
class AdaptedState:
    """All that a run of adapters carries from step to step.

    Attributes:
      base: Frozen parameters.
      adapters: What is trained, float32 at least.
      opt_state: Of the optimizer, for the adapters alone.
      step: int32 [], steps made, skipped ones included.
      health: Skipped steps and spikes.
      average: Running average of the adapters; None where `TuningConfig.ema` is 0.
      scale: Of the changes.
    """

    base: PyTree
    adapters: PyTree
    opt_state: PyTree
    step: Array
    health: Health
    average: PyTree = None
    scale: float = struct.field(pytree_node=False, default=1.0)

    @property
    def params(self) -> PyTree:
        """The adapted model's, as `jaxpar.lm.apply` takes them; `merge_adapters` makes arrays of them."""
        return with_adapters(self.base, self.adapters, self.scale)

    @property
    def start(self) -> PyTree:
        """The parameters that preferences are compared with: the base."""
        return self.base

    @property
    def averaged(self) -> PyTree:
        """The same, of the running average where there is one."""
        return with_adapters(
            self.base, self.adapters if self.average is None else self.average, self.scale
        )


@dataclasses.dataclass(frozen=True)
class AdapterTrainer:
    """Trains adapters of `model` with `optimizer`; static and hashable. See `jaxpar.lm.Trainer`.

    Attributes:
      model: The transformer.
      adapter: What is trained beside it.
      optimizer: The update rule, of the adapters alone; all of them decay but magnitudes.
      num_steps: Length of the run, which the learning-rate schedule needs.
      accumulate: Microbatches that a batch is cut into; equal to the whole batch at once, but for dropout.
      max_skipped: Steps in a row that changed nothing, being not finite, after which `done` is true.
      tuning: Rates by depth, and whether an average is kept; the base is frozen anyway.
      objective: What is made smaller; of preferences the reference is the base.
      teacher: A model of the same symbols whose laws the objective takes a share of; None for none.
    """

    model: LMConfig
    adapter: AdapterConfig
    optimizer: OptimizerConfig = OptimizerConfig()
    num_steps: int = field(1000, AtLeast(1))
    accumulate: int = field(1, AtLeast(1))
    max_skipped: int = field(10, AtLeast(1))
    tuning: TuningConfig = TuningConfig()
    objective: ObjectiveConfig = ObjectiveConfig()
    teacher: LMConfig | None = None

    def __post_init__(self):
        """Refuses what cannot be trained."""
        check_fields(self)
        check_teacher(self.model, self.objective, self.teacher)
        adapter, model = self.adapter, self.model
        if self.tuning.freeze:
            raise UsageError(
                f"tuning.freeze={','.join(self.tuning.freeze)} beside adapters, whose base is frozen; leave it out, or "
                "change adapter.target."
            )
        if adapter.kind == "none" or not adapter.rank:
            raise UsageError(
                f"adapter.kind={adapter.kind} of adapter.rank={adapter.rank} has nothing to train; give a rank over 0."
            )
        if model.weights != "full":
            raise UsageError(f"model.weights={model.weights} has no adapters; legal is full.")
        if adapter.dropout and model.execution.remat == "blockwise":
            raise UsageError(
                "adapter.dropout would drop alike in all blocks of model.execution.remat=blockwise; take remat=full."
            )
        if self.optimizer.name == "muon":
            raise UsageError(
                "optimizer.name=muon is not for adapters, which are thin; legal are adamw, radam, rmsprop."
            )
        targets(model, adapter.target)

    def init(self, key: PRNGKey, inputs: PyTree = None) -> AdaptedState:
        """Draws parameters and adapters, and the optimizer's first state. Consumes `key`; ignores `inputs`."""
        del inputs
        dtype = jnp.promote_types(self.model.dtype, jnp.float32)
        drawn, own = jax.random.split(key)
        return self.begin(own, declared.init(drawn, self.model, dtype))

    def begin(self, key: PRNGKey, params: PyTree) -> AdaptedState:
        """Returns the state that training begins with from given parameters, which are frozen. Consumes `key`."""
        dtype = jnp.promote_types(self.model.dtype, jnp.float32)
        count = jnp.zeros((), jnp.int32)
        health = Health.start(dtype)
        base = frozen(params, self.model, self.adapter.base)
        adapters = begin_adapters(key, base, self.model, self.adapter)
        opt_state = self.make_optimizer().init(adapters)
        average = average_of(adapters, self.tuning.ema)
        return AdaptedState(base, adapters, opt_state, count, health, average, self.adapter.scale)

    def axes(self) -> AdaptedState:
        """Returns the logical axes of every leaf of the state; moments lie as their adapters."""
        state = jax.eval_shape(lambda: self.init(jax.random.key(0)))
        own = adapter_axes(self.model, state.adapters)
        out = axes_like(state, state.adapters, own)
        return out.replace(base=_frozen_axes(self.model, self.adapter.base), adapters=own)

    def step(
        self, key: PRNGKey, state: AdaptedState, inputs: dict[str, Array]
    ) -> tuple[AdaptedState, Info]:
        """Makes one optimizer step of the adapters; returns what `jaxpar.lm.Trainer.step` does. Consumes `key`."""
        inputs, teacher = with_teacher(inputs, self.teacher)
        plain = objective_stages(self.model, self.objective, teacher=teacher, reference=state.base)
        rate = self.adapter.dropout

        def whole(adapters: PyTree, data: PyTree, key: PRNGKey | None, total: Array, share: float):
            own = (
                jax.random.fold_in(key, zlib.crc32(b"adapters"))
                if rate and key is not None
                else None
            )
            return plain.whole(
                with_adapters(state.base, adapters, state.scale, rate, own), data, key, total, share
            )

        pieces = plain._replace(whole=whole)
        loss, gradient = InTurn()(pieces, state.adapters, inputs, key, self.accumulate)
        trained, opt_state, health, info = update(
            self.make_optimizer(),
            state.adapters,
            loss,
            gradient,
            state.opt_state,
            state.health,
            objective_report(inputs, self.model, self.objective),
        )
        average = next_average(
            state.average, trained, self.tuning.ema, health.skipped_in_a_row == 0
        )
        new = {
            "adapters": trained,
            "opt_state": opt_state,
            "step": state.step + 1,
            "health": health,
            "average": average,
        }
        return state.replace(**new), info  # type: ignore[attr-defined]

    @property
    def later_leaves(self) -> tuple[str, ...]:
        """Paths of leaves that older checkpoints lack; they were 0 there."""
        return LATER_LEAVES

    def done(self, state: AdaptedState) -> Array:
        """Whether the run has broken down: `max_skipped` bad steps in a row."""
        return state.health.skipped_in_a_row >= self.max_skipped

    def make_optimizer(self) -> Optimizer:
        """Returns the optimizer, whose state is `AdaptedState.opt_state`."""
        scales = (
            depth_scales(self.model, self.tuning.layer_decay)
            if self.tuning.layer_decay != 1
            else None
        )
        return make_optimizer(self.optimizer, self.num_steps, decays=_decays, scales=scales)


def _decays(adapters: PyTree) -> PyTree:
    return jax.tree_util.tree_map_with_path(lambda path, _: path[-1].key != "magnitude", adapters)
