"""Adapters: a small tree of changes, which alone is trained; the base is frozen, and may be rounded.

Example:
    import jax, jax.numpy as jnp

    from jaxpar.lm import AdapterConfig, LMConfig, Trainer, init, merge_adapters

    model = LMConfig(vocab_size=8, num_layers=1, embed_dim=8, dtype="float32")
    adapter = AdapterConfig("lora", target=("wq", "w_*"), rank=2, base="int8")
    trainer = Trainer(model, adapter=adapter)
    state = trainer.begin(init(jax.random.key(0), model), jax.random.key(1))
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
from jax.typing import DTypeLike

from jaxpar._renamed import renamed
from jaxpar.fields import AtLeast, Between, OneOf, Positive, check_fields, field
from jaxpar.lm import params as declared
from jaxpar.lm.config import LMConfig
from jaxpar.lm.tuning import Trained, laid_over, named_parameters, selected, without
from jaxpar.nn.leaf import Leaf
from jaxpar.nn.linear import Frozen, Lora, Weight, whole_weight
from jaxpar.nn.weights.narrow import Nf4, Quantised, nf4, quantise
from jaxpar.types import Array, PRNGKey, PyTree, UsageError

__all__ = [
    "AdapterConfig",
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
    """Adapters of a frozen model.

    Attributes:
      kind: "none" trains the parameters themselves; "lora" a low-rank change of some weights (arXiv:2106.09685).
      target: Patterns of the weights that get a change, as of a shell: of names such as wq, wk, wv, wo, w_gate, w_up
        and w_down, or of "0.wq" where layers have several mixers in turn. "*" is every product of
        the layers. By these words alone: "embedding", "head" and "experts", whose changes are added
        to them once a step.
      rank: r, of the change.
      alpha: The change is scaled by alpha / r.
      dropout: Rate on what the change sees of its input, while training.
      rslora: Whether it is scaled by alpha / sqrt(r) instead (arXiv:2312.03732).
      dora: Whether each output's magnitude is trained apart from its direction (arXiv:2402.09353).
      base: What the frozen weights are kept in: "full" as they came, float32 at least; "bfloat16"; "int8", a scale an
        output; "nf4", four bits and a scale for 64 numbers. With the latter two embedding and head are bfloat16.
      modules_to_save: Patterns, as of tuning.freeze, of parameters that are trained themselves
        with the changes, such as embedding, head or *norm*.
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
    modules_to_save: tuple[str, ...] = field((), None, identity="changed")
    merge: bool = field(False, None, identity=False)

    def __post_init__(self):
        """Refuses numbers that no adapter has."""
        check_fields(self, "adapter.")
        object.__setattr__(self, "target", tuple(self.target))  # flags are lists
        object.__setattr__(self, "modules_to_save", tuple(self.modules_to_save))

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


def added_targets(model: LMConfig) -> dict[str, tuple[str, ...]]:
    """Returns names of the weights that changes are added to, by the words that mean them.

    Nothing else is known of how a model reads these: an embedding by rows, experts in groups.
    """
    named = _named(model)
    experts = (name for name, leaf in named.items() if leaf.axes[:2] == ("layers", "experts"))
    found = {"experts": tuple(name for name in experts if len(named[name].shape) == 4)}
    if not model.embedding.tied:
        found |= {"embedding": ("embedding",), "head": ("head",)}
    return {word: names for word, names in found.items() if names}


def _named(model: LMConfig) -> dict[str, Leaf]:
    """Returns the declarations of all parameters by dotted names, in the order of the tree."""
    flat = jax.tree_util.tree_leaves_with_path(
        declared.leaves(model), is_leaf=lambda leaf: isinstance(leaf, Leaf)
    )
    return {jax.tree_util.keystr(path, simple=True, separator="."): leaf for path, leaf in flat}


def targets(model: LMConfig, patterns: tuple[str, ...]) -> dict[str, Leaf]:
    """Returns the weights that patterns mean, by names such as "layers.wq".

    Raises:
      UsageError: A pattern means none.
    """
    named = _named(model)
    added = added_targets(model)
    names = {name.removeprefix("layers."): name for name, leaf in named.items() if is_product(leaf)}
    found: set[str] = set()
    for pattern in patterns:
        hits = [
            full
            for name, full in names.items()
            if fnmatch.fnmatchcase(name, pattern)
            or fnmatch.fnmatchcase(name.rpartition(".")[2], pattern)
        ]
        hits += added.get(pattern, ())
        if not hits:
            why = (
                "is no product of the layers"
                if pattern in named
                else "matches no product of the layers"
            )
            tied = (
                ", and tied to the head" if pattern == "embedding" and model.embedding.tied else ""
            )
            more = ""
            if added:
                more = f", and {', '.join(added)}"
            raise UsageError(
                f"adapter.target={pattern} {why}{tied}; "
                f"legal are patterns of {', '.join(names)}{more}."
            )
        found.update(hits)
    return {full: leaf for full, leaf in named.items() if full in found}


def saved_names(model: LMConfig, adapter: AdapterConfig) -> frozenset[str]:
    """Returns the parameters that are trained themselves, with the adapters, by dotted names.

    Raises:
      UsageError: A pattern means none, or a weight that has an adapter.
    """
    saved = named_parameters(model, adapter.modules_to_save, "adapter.modules_to_save")
    both = sorted(saved & targets(model, adapter.target).keys())
    if both:
        raise UsageError(
            f"adapter.modules_to_save={','.join(adapter.modules_to_save)}: {both[0]} has an "
            "adapter too; expected weights that adapter.target leaves out."
        )
    return saved


def check_adapter(model: LMConfig, adapter: AdapterConfig) -> None:
    """Refuses adapters that a model cannot have."""
    if adapter.kind == "none" or not adapter.rank:
        raise UsageError(
            f"adapter.kind={adapter.kind} of adapter.rank={adapter.rank} has nothing to train; "
            "give a rank over 0."
        )
    if model.weights != "full":
        raise UsageError(f"model.weights={model.weights} has no adapters; legal is full.")
    if adapter.dropout and model.execution.remat == "blockwise":
        raise UsageError(
            "adapter.dropout would drop alike in all blocks of model.execution.remat=blockwise; "
            "take remat=full."
        )
    found = targets(model, adapter.target)
    added = [name for name, leaf in found.items() if not is_product(leaf)]
    for flag, value in (("dropout", adapter.dropout), ("dora", adapter.dora)):
        if added and value:
            raise UsageError(
                f"adapter.{flag}={value}: {added[0]} has a change that is added to it, which knows "
                f"neither its inputs nor its outputs; expected adapter.{flag} off, or another "
                "adapter.target."
            )
    saved_names(model, adapter)


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

    DoRA takes its magnitudes from the base as it is rounded.
    """
    dtype = jnp.promote_types(model.dtype, jnp.float32)

    def one(name: str, leaf: Leaf) -> dict[str, Array]:
        own = jax.random.fold_in(key, zlib.crc32(name.encode()))
        if not is_product(leaf):
            return _begin_added(own, leaf, adapter.rank, dtype)
        keys = jax.random.split(own, leaf.shape[0])

        def layer(key, w):
            like, num = jnp.zeros(leaf.shape[1:], dtype), num_contracted(leaf)
            made = Lora.of(key, like, num, adapter.rank, adapter.scale).replace(weight=w)  # type: ignore[attr-defined]
            out = {"down": made.down, "up": made.up}
            return out | ({"magnitude": made.norm().astype(dtype)} if adapter.dora else {})

        return jax.vmap(layer)(keys, _at(base, name))

    return unflattened(
        {name: one(name, leaf) for name, leaf in targets(model, adapter.target).items()}
    )


def _begin_added(key: PRNGKey, leaf: Leaf, rank: int, dtype: DTypeLike) -> dict[str, Array]:
    """Draws a change that is added to a matrix, or to each of a stack, and is zero at first.

    The side of a vocabulary is zero; of others the outputs', as in `Lora.of`.
    """
    *stack, rows, columns = leaf.shape
    into, outof = (*stack, rows, rank), (*stack, rank, columns)
    if leaf.axes[0] == "vocab":
        up = jax.random.normal(key, outof, dtype) / jnp.sqrt(jnp.asarray(columns, dtype))
        return {"added_down": jnp.zeros(into, dtype), "added_up": up}
    down = jax.random.normal(key, into, dtype) / jnp.sqrt(jnp.asarray(rows, dtype))
    return {"added_down": down, "added_up": jnp.zeros(outof, dtype)}


def adapter_axes(model: LMConfig, adapters: PyTree) -> PyTree:
    """Returns the logical axes of a tree of adapters: as their weights, and none for the rank."""

    def one(leaf: Leaf, arrays: PyTree) -> dict[str, tuple] | tuple:
        if not isinstance(arrays, dict):
            return leaf.axes
        if not is_product(leaf):
            *stack, rows, columns = leaf.axes
            return {"added_down": (*stack, rows, None), "added_up": (*stack, None, columns)}
        first = 1 + num_contracted(leaf)
        into, out = leaf.axes[1:first], leaf.axes[first:]
        axes = {
            "down": ("layers", *into, None),
            "up": ("layers", None, *out),
            "magnitude": ("layers", *out),
        }
        return {name: axes[name] for name in arrays}

    named = {name: (leaf, _at(adapters, name)) for name, leaf in _named(model).items()}
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
    """Returns the parameters of the adapted model, with adapted weights as `Lora`.

    Args:
      base: As from `frozen`, or plain parameters.
      adapters: As from `begin_adapters`; arrays in it take the place of the base's, or are beside
        it.
      scale: Of the changes.
      rate: Of dropout.
      key: Switches it on; consumed.
      name: Of the part that `base` is, by which its key is known.
    """
    if not isinstance(adapters, dict):
        return adapters
    if "added_down" in adapters:
        return _added(base, adapters, scale)
    if "down" not in adapters:
        return base | {
            part: with_adapters(base.get(part, {}), inner, scale, rate, key, f"{name}.{part}")
            for part, inner in adapters.items()
        }
    if isinstance(base, dict):
        raise UsageError(
            f"adapters{name}: there is no such weight among the parameters; expected the adapters "
            "of this model."
        )
    keys = None
    if key is not None and rate:
        keys = jax.random.split(
            jax.random.fold_in(key, zlib.crc32(name.encode())), adapters["down"].shape[0]
        )
    return Lora(base, **adapters, key=keys, scale=scale, rate=rate)


def _added(weight: Array, adapter: dict[str, Array], scale: float) -> Array:
    """Returns the sum of a weight, or of a stack of them, and its change; float32 at least."""
    change = jnp.matmul(adapter["added_down"], adapter["added_up"], precision="highest")
    return weight.astype(jnp.promote_types(weight.dtype, change.dtype)) + scale * change


def trained_adapters(model: LMConfig, adapter: AdapterConfig) -> Trained:
    """Returns that adapters are trained, and the parameters that are saved with them.

    Each adapted weight of each layer drops with a key of its own.
    """
    saved = saved_names(model, adapter)

    def split(params: PyTree, key: PRNGKey | None):
        if key is None:
            raise UsageError("key=None: adapters are drawn from it; expected a key.")
        base = frozen(params, model, adapter.base)
        adapters = begin_adapters(key, base, model, adapter)
        return laid_over(adapters, selected(params, saved)), without(base, saved)

    def join(trained: PyTree, kept: PyTree, key: PRNGKey | None):
        return with_adapters(kept, trained, adapter.scale, adapter.dropout, _dropping(key, adapter))

    def layer(params: PyTree, index: int | Array, key: PRNGKey | None):
        own = _dropping(key, adapter)
        if own is None:
            return params
        turns = model.num_layers // model.stack().period

        def one(path, w: PyTree) -> PyTree:
            if not isinstance(w, Lora):
                return w
            name = ".".join((".layers", *(part.key for part in path)))
            keys = jax.random.split(jax.random.fold_in(own, zlib.crc32(name.encode())), turns)
            return w.replace(key=keys[index])  # type: ignore[attr-defined]

        is_leaf = lambda w: isinstance(w, Weight)  # noqa: E731
        return jax.tree_util.tree_map_with_path(one, params, is_leaf=is_leaf)

    return Trained(split=split, join=join, layer=layer)


def _dropping(key: PRNGKey | None, adapter: AdapterConfig) -> PRNGKey | None:
    """Returns the key of a step's dropout of adapters; None without dropout."""
    if key is None or not adapter.dropout:
        return None
    return jax.random.fold_in(key, zlib.crc32(b"adapters"))


def base_axes(model: LMConfig, adapter: AdapterConfig) -> PyTree:
    """Returns the logical axes of the parameters that are kept with adapters."""
    return without(_frozen_axes(model, adapter.base), saved_names(model, adapter))


def adapter_decays(model: LMConfig) -> Callable[[PyTree], PyTree]:
    """Returns a function of adapters to what decays: all but magnitudes and saved norms."""
    flat = jax.tree_util.tree_leaves_with_path(declared.decay_mask(model))
    mask = {jax.tree_util.keystr(path): decays for path, decays in flat}

    def one(path, _) -> bool:
        return mask.get(jax.tree_util.keystr(path), path[-1].key != "magnitude")

    return lambda adapters: jax.tree_util.tree_map_with_path(one, adapters)


def merge_adapters(params: PyTree) -> PyTree:
    """Returns parameters without weights of other kinds: adapters are merged, rounded weights widened to float32."""

    def one(w: PyTree) -> Array:
        return jax.vmap(whole_weight)(w) if isinstance(w, Weight) else w

    return jax.tree.map(one, params, is_leaf=lambda w: isinstance(w, Weight))


def num_adapted(model: LMConfig, adapter: AdapterConfig) -> int:
    """Returns how many numbers are trained."""
    total = 0
    for leaf in targets(model, adapter.target).values():
        if not is_product(leaf):
            *stack, rows, columns = leaf.shape
            total += math.prod(stack) * adapter.rank * (rows + columns)
            continue
        first = 1 + num_contracted(leaf)
        into = math.prod(leaf.shape[1:first])
        out = math.prod(leaf.shape[first:])
        total += leaf.shape[0] * (adapter.rank * (into + out) + adapter.dora * out)
    named = _named(model)
    saved = sum(math.prod(named[name].shape) for name in saved_names(model, adapter))
    return total + saved


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


def __getattr__(name: str) -> object:
    return renamed(__name__, name)
