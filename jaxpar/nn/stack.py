"""Layers one after the other: scanned or unrolled, with what the backward pass keeps, and with the caches of all."""

import dataclasses
import functools
import itertools
import math
import operator
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike
from jaxtyping import Array, Bool, Float, Int

from jaxpar._older_fields import newer_arguments
from jaxpar.fields import AtLeast, Between, OneOf, Positive, check_fields, field
from jaxpar.mesh import constrain, gather, in_role, is_axes
from jaxpar.nn.auxiliary import Aux, Max, both, over_all, over_layers, with_scalar_losses
from jaxpar.nn.block import Kind, Ladder, ResidualBlock, Stream
from jaxpar.nn.carried import PseudoTokens, StackCache, began, moved_on
from jaxpar.nn.leaf import Leaf, init_leaves
from jaxpar.nn.linear import InBlocks, converts_weights, on_weight
from jaxpar.nn.mixer import (
    DECODING,
    TRAINING,
    Context,
    FeedForward,
    Mixer,
    PreparesDecoding,
    TokenInfo,
)
from jaxpar.nn.norm import Norm
from jaxpar.nn.weights.ternary import Ternary, ternary
from jaxpar.nn.weights.ternary import for_decoding as smallest
from jaxpar.types import PRNGKey, PyTree, UsageError, largest

__all__ = ["REMATS", "RESIDUALS", "WEIGHTS", "PseudoTokens", "Stack", "StackCache"]

SAVED_NAMES = ("qkv", "attention", "mlp", "residual")
REMATS = ("none", "dots", "names", "full", "offload", "blockwise")
RESIDUALS = ("standard", "ladder")
WEIGHTS = ("full", "ternary")

OLDER = {name: f"info.{name}" for name in TokenInfo._fields}
"""Arguments of `Stack.apply` and `Stack.context` that are fields of another argument today."""


@dataclasses.dataclass(frozen=True)
class Stack:
    """Pre-norm layers of a mixer and maybe an mlp, and a last norm; static and hashable.

    Attributes:
      num_layers: L.
      embed_dim: D, width of the residual stream.
      mixer: What mixes the tokens of a block, a `jaxpar.nn.mixer.Mixer`; or p of them, where p divides L: layer l then
        has mixer l mod p (a hybrid).
      mlp: What looks at each token alone, a `jaxpar.nn.mixer.FeedForward`; None for layers of a mixer alone.
      norm: Of each branch's input, and of the result; with post_norms also of what a branch adds.
      dropout: Rate on all branches, while training.
      init_std: Standard deviation of weights at the start; of B branches, those out of one use it / sqrt(B).
      dtype: Of activations, and of weights where they are multiplied.
      remat: What the backward pass recomputes: "none" saves every matmul input, "dots" saves matmul outputs, "names"
        saves five named activations a layer, "offload" keeps those in host memory, "full" saves layer inputs, and
        "blockwise" too, and computes a layer by blocks of tokens, so that it needs no memory [T, T] nor [T, F].
      scan_layers: Whether layers run in one `lax.scan` (compiles once) or unrolled (no stacking copies: faster on GPU,
        slower to compile).
      residual: "standard", or "ladder": a branch reads the stream without what the branch before adds, so that devices
        may add that up meanwhile (arXiv:2501.06589). Another model of the same parameters.
      ladder_from: The first layer whose branches read so.
      ranges: Whether layers report "residual_max", the largest magnitude of the residual stream of
        tokens that count, at one read of it each.
      weights: "full", or "ternary": every weight between the residual stream and a branch is rounded to -1, 0 and 1
        where it is multiplied (`jaxpar.nn.weights.ternary`). The parameters are the same: what is
        trained is not rounded.
    """

    num_layers: int = field(legal=AtLeast(1))
    embed_dim: int = field(legal=AtLeast(1))
    mixer: Mixer | tuple[Mixer, ...] = field()
    mlp: FeedForward | None = field()
    norm: Norm = Norm()
    dropout: float = field(0.0, Between(0, 1, "[)"))
    init_std: float = field(0.02, Positive())
    dtype: str = field("float32", OneOf(("bfloat16", "float16", "float32", "float64")))
    remat: str = field("none", OneOf(REMATS))
    scan_layers: bool = True
    ranges: bool = False
    residual: str = field("standard", OneOf(RESIDUALS))
    ladder_from: int = field(0, AtLeast(0))
    weights: str = field("full", OneOf(WEIGHTS))
    post_norms: bool = False

    def __post_init__(self):
        """Takes equal mixers as one; refuses a ladder that begins after the last layer, or that there is none of."""
        check_fields(self)
        if len(set(self.mixers)) == 1:
            object.__setattr__(self, "mixer", self.mixers[0])
        if not self.mixers or self.num_layers % self.period:
            turn = f"the {len(self.mixers)} mixers in turn"
            raise UsageError(f"num_layers={self.num_layers} is not a multiple of {turn}.")
        if self.ladder_from and self.residual != "ladder":
            raise UsageError(
                f"ladder_from={self.ladder_from} needs residual=ladder, not {self.residual}."
            )
        if self.ladder_from >= self.num_layers:
            raise UsageError(
                f"ladder_from={self.ladder_from} must be under num_layers={self.num_layers}."
            )
        if self.weights == "ternary":
            leaves = jax.tree.leaves(
                [self._layer_leaves(mixer) for mixer in self.mixers], is_leaf=_is_leaf
            )
            if any("experts" in leaf.axes for leaf in leaves):
                raise UsageError("experts have no ternary weights; take weights=full, or an mlp.")

    @property
    def mixers(self) -> tuple[Mixer, ...]:
        """Those that layers have in turn."""
        return self.mixer if isinstance(self.mixer, tuple) else (self.mixer,)

    @property
    def period(self) -> int:
        """p, after how many layers the mixers repeat."""
        return len(self.mixers)

    @property
    def num_branches(self) -> int:
        """Of all layers: two each, or one without an mlp."""
        return self.num_layers * (1 if self.mlp is None else 2)

    def _layer_leaves(self, mixer: Mixer) -> dict[str, PyTree]:
        """Declares one layer's parameters."""
        out_std = self.init_std / math.sqrt(self.num_branches)
        ends = ("norm", "post_norm") if self.post_norms else ("norm",)
        out: dict[str, PyTree] = {f"attn_{end}": self.norm.leaves(self.embed_dim) for end in ends}
        if self.mlp is not None:
            out |= {f"mlp_{end}": self.norm.leaves(self.embed_dim) for end in ends}
            out |= self.mlp.leaves(self.embed_dim, self.init_std, out_std)
        return out | mixer.leaves(self.embed_dim, self.init_std, out_std)

    def leaves(self) -> dict[str, PyTree]:
        """Declares "layers", each leaf [L, ...], and "final_norm".

        Of p mixers "layers" has one such tree for each, "0" to p - 1, each leaf [L / p, ...].
        """

        def stacked(leaf: Leaf) -> Leaf:
            shape, axes = (self.num_layers // self.period, *leaf.shape), ("layers", *leaf.axes)
            return leaf._replace(shape=shape, axes=axes)

        layers = [
            jax.tree.map(stacked, self._layer_leaves(mixer), is_leaf=_is_leaf)
            for mixer in self.mixers
        ]
        return {"layers": self._together(layers), "final_norm": self.norm.leaves(self.embed_dim)}

    def _together(self, places: Sequence[PyTree]) -> PyTree:
        """One tree of those of each mixer's layers: of one mixer, its own."""
        return (
            places[0]
            if self.period == 1
            else {str(place): tree for place, tree in enumerate(places)}
        )

    def _apart(self, layers: PyTree) -> list[PyTree]:
        """The trees of each mixer's layers."""
        return (
            [layers] if self.period == 1 else [layers[str(place)] for place in range(self.period)]
        )

    def _each(self, places: Sequence[PyTree]) -> tuple[PyTree, ...]:
        """Each layer's own, in order, from those of each mixer's layers."""
        num = self.num_layers // self.period
        return tuple(
            layer
            for turn in zip(*(_unstack(tree, num) for tree in places), strict=True)
            for layer in turn
        )

    def init(self, key: PRNGKey, dtype: DTypeLike = jnp.float32) -> PyTree:
        """Draws the parameters. Consumes `key`."""
        return init_leaves(key, self.leaves(), dtype)

    def hold(self, params: PyTree) -> PyTree:
        """Returns the parameters with the layers' weights as a step holds them: in `dtype`, split by "embed_weight".

        Casting at once halves the bytes of every gather and gradient of a layer. Norms and biases stay as they are.
        Gradients of the weights arrive split by "embed_grad". What is held already is left alone.
        """
        if isinstance(params["layers"], tuple):
            return params

        def lower(path, leaf: Leaf, x: PyTree):
            if isinstance(leaf.init, str):
                return x
            held, summed = in_role(leaf.axes, "weight"), in_role(leaf.axes, "grad")
            name = jax.tree_util.keystr(path)

            def one(w: jax.Array) -> PyTree:
                # Rounded as it is stored: in `dtype`, shares on either side of a half could change places.
                small = jax.vmap(ternary)(w) if self._is_ternary(leaf) else None
                w = w if small is None else small.values
                w = gather(w.astype(self.dtype), leaf.axes, held, summed, name)
                return w if small is None else Ternary(w, small.scale)

            return on_weight(one, x)

        layers = jax.tree_util.tree_map_with_path(
            lower, self.leaves()["layers"], params["layers"], is_leaf=_is_leaf
        )
        return params | {"layers": layers}

    def _is_ternary(self, leaf: Leaf) -> bool:
        """Whether a weight, or the stack of those of all layers, is rounded: if it reads or writes the stream."""
        return self.weights == "ternary" and leaf.is_product

    def unstacked(self, params: PyTree) -> PyTree:
        """Returns held parameters with each layer's apart, for decoding: a step then copies no weight.

        Made once before a loop over tokens; jit it with the parameters donated where two copies have no room.
        """
        params = self.hold(params)
        if isinstance(params["layers"], tuple):
            return params
        return params | {"layers": self._each(self._apart(params["layers"]))}

    def for_decoding(self, params: PyTree) -> PyTree:
        """Returns unstacked parameters as decoding few rows reads them fastest.

        Products of one input are one, and ternary weights have two bits a number, where no mesh splits them.
        On CPUs, which multiply 16-bit weights in float32, these are multiplied a block at a time,
        each taken from the stack, so that memory holds them once.
        """
        params = self.hold(params)
        if self._has_blocks and not isinstance(params["layers"], tuple):
            trees = self._apart(params["layers"])
            layers = []
            for index in range(self.num_layers):
                turn, place = divmod(index, self.period)
                layers.append(self._in_blocks(trees[place], place, turn))
            return params | {"layers": tuple(layers)}
        params = self.unstacked(params)

        def small(leaf: Leaf, w: PyTree):
            return smallest(w, leaf.axes) if isinstance(w, Ternary) else w

        layers = []
        for index, layer in enumerate(params["layers"]):
            mixer = self.mixers[index % self.period]
            if self.weights == "ternary":
                layer = jax.tree.map(small, self._layer_leaves(mixer), layer, is_leaf=_is_leaf)
            for branch in (mixer, self.mlp):
                layer = (
                    branch.for_decoding(layer) if isinstance(branch, PreparesDecoding) else layer
                )
            layers.append(layer)
        return params | {"layers": tuple(layers)}

    @property
    def _has_blocks(self) -> bool:
        """Whether decoding and prefill multiply weights a block at a time."""
        return self.weights == "full" and converts_weights(self.dtype)

    def _in_blocks(self, tree: PyTree, place: int, turn: int | Array) -> PyTree:
        """Returns a layer whose products read the stacks of its mixer's layers, `tree`."""

        def one(leaf: Leaf, w: PyTree) -> PyTree:
            if isinstance(w, jax.Array) and leaf.is_product and "experts" not in leaf.axes:
                return InBlocks(stack=w, layer=turn)
            return jax.tree.map(operator.itemgetter(turn), w)

        declared = self._layer_leaves(self.mixers[place])
        return jax.tree.map(one, declared, tree, is_leaf=_is_leaf)

    def unstacked_axes(self, axes: PyTree) -> PyTree:
        """Returns the logical axes of unstacked parameters, from those of the parameters."""

        def one(leaf: Leaf, names: tuple):
            return Ternary(names[1:], ()) if self._is_ternary(leaf) else names[1:]  # type: ignore[arg-type]

        pairs = zip(self.mixers, self._apart(axes["layers"]), strict=True)
        turn = tuple(
            jax.tree.map(one, self._layer_leaves(mixer), tree, is_leaf=_is_leaf)
            for mixer, tree in pairs
        )
        return axes | {"layers": turn * (self.num_layers // self.period)}

    def init_cache(self, batch: int, slots: int) -> StackCache:
        """Returns the empty cache of `batch` rows, of room for `slots` tokens where its size depends on them."""
        mixers = self.mixers * (self.num_layers // self.period)
        layers = tuple(
            mixer.init_cache(batch, slots, self.embed_dim, jnp.dtype(self.dtype))
            for mixer in mixers
        )
        zero = jnp.zeros((batch,), jnp.int32)
        return self._split(StackCache(layers, zero, zero))

    def cache_axes(self) -> StackCache:
        """Returns the logical axes of the cache."""
        turn = tuple(mixer.cache_axes() for mixer in self.mixers)
        return StackCache(turn * (self.num_layers // self.period), ("batch",), ("batch",))  # type: ignore[arg-type]

    def _split(self, cache: StackCache) -> StackCache:
        def split(axes, x):
            return constrain(x, *axes, name="cache")

        return jax.tree.map(split, self.cache_axes(), cache, is_leaf=is_axes)

    def apply(
        self,
        params: PyTree,
        x: Float[Array, "B T D"],
        info: TokenInfo = TokenInfo(),
        *,
        cache: StackCache | None = None,
        fresh: bool = False,
        key: PRNGKey | None = None,
        pseudo: PseudoTokens | None = None,
        **older: Any,  # values of fields that were arguments, by `OLDER`
    ) -> tuple[Float[Array, "B T D"], StackCache | None, Aux]:
        """Computes the residual stream after all layers and the last norm, in `dtype`.

        Args:
          params: As from `init`, or from `hold` or `unstacked`.
          x: Residual stream.
          info: Data of the tokens besides `x`: their positions and documents, which of them count,
            and which others each sees. The cache returned is after the tokens that count.
          cache: As from `init_cache` or an earlier call.
          fresh: Whether the cache is known to be empty: attention is then as in training, over the T tokens alone.
          key: Switches dropout on; consumed.
          pseudo: M more tokens, which enter at a later layer: x are then the T - M before them, positions and visible
            those of all T. Layers run unrolled. Not with documents that share a row, nor with a linear cache, which
            would keep them.
          **older: Fields of `info`, by their names, which works until the first release.

        Returns:
          Outputs, the cache (a `StackCache`; None without one), and what the layers told.

        Raises:
          UsageError: If pseudo tokens enter at a layer that is not there.
          TypeError: If a keyword is unknown.
        """
        info = newer_arguments("Stack.apply", OLDER, {"info": info}, older)["info"]
        if pseudo is not None and pseudo.layer not in (None, *range(self.num_layers)):
            raise UsageError(
                f"pseudo tokens enter at layer {pseudo.layer}; legal are 0 to {self.num_layers - 1}."
            )
        params = self.hold(params)
        context = self.context(x, info, cache=cache, fresh=fresh, key=key)
        rules = context.rules
        x = constrain(x.astype(self.dtype), *rules.outside)
        # A cache that holds something would be copied by a loop, from its inputs to its outputs.
        is_stacked = not isinstance(params["layers"], tuple)
        can_scan = is_stacked and pseudo is None and (cache is None or context.fresh)
        if self.scan_layers and can_scan:
            run = self._scanned
        else:
            run = functools.partial(self._unrolled, pseudo=pseudo)
        stream, layers, aux = run(params["layers"], self.begin(x), context, cache)
        aux = with_scalar_losses(aux)
        x = gather(
            self.norm.apply(params["final_norm"], self.end(stream)), rules.outside, rules.inside
        )
        if pseudo is not None and pseudo.layer is None:
            x = pseudo.after(x)
        if cache is None:
            return x, None, aux
        return x, moved_on(cache, layers, context), aux

    def context(
        self,
        x: Float[Array, "B T D"],
        info: TokenInfo = TokenInfo(),
        *,
        cache: StackCache | None = None,
        fresh: bool = False,
        key: PRNGKey | None = None,
        **older: Any,  # values of fields that were arguments, by `OLDER`
    ) -> Context:
        """Returns what the mixers may ask, from the arguments of `apply`.

        Of segments and starts, the one that is not given follows from the other.

        Raises:
          UsageError: If segments are given with a cache that is not fresh.
          TypeError: If a keyword is unknown.
        """
        info = newer_arguments("Stack.context", OLDER, {"info": info}, older)["info"]
        segments = info.segments
        starts = info.starts
        batch, length = x.shape[:2]
        places = jnp.broadcast_to(jnp.arange(length, dtype=jnp.int32), (batch, length))
        before = jnp.zeros((batch,), jnp.int32)
        if starts is None and segments is not None:
            starts = jnp.pad(segments[:, 1:] != segments[:, :-1], ((0, 0), (1, 0)))
        if cache is not None and not fresh:
            places, before = cache.seen[:, None] + places, cache.first
            if segments is not None:
                raise UsageError(
                    "segments number the documents of whole rows; with a cache give starts."
                )
        elif segments is None and starts is not None:
            segments = jnp.cumsum(starts, 1, dtype=jnp.int32)
        first = began(places, starts, before)
        positions = places - first if info.positions is None else info.positions
        seen, rules = (None, TRAINING) if cache is None else (cache.seen, DECODING)
        rules = rules._replace(
            apart=not self.scan_layers and self.remat == "none",
            blockwise=cache is None and self.remat == "blockwise",
        )
        return Context(
            positions=positions,
            segments=segments,
            starts=starts,
            valid=info.valid,
            visible=info.visible,
            seen=seen,
            first=first,
            fresh=fresh,
            key=key,
            rules=rules,
            places=info.places,
            weights=info.weights,
        )

    def begin(self, x: Float[Array, "B T D"]) -> Stream:
        """Returns the residual stream as layers carry it."""
        return Ladder(x, jnp.zeros_like(x)) if self.residual == "ladder" else x

    def end(self, x: Stream) -> Float[Array, "B T D"]:
        """Returns the residual stream whole, after the last layer."""
        return x.whole if isinstance(x, Ladder) else x

    def layer(
        self,
        layer: PyTree,
        index: int | Int[Array, ""],
        x: Kind,
        context: Context,
        cache: PyTree | None = None,
        ahead: bool | Bool[Array, ""] | None = None,
        mixer: Mixer | None = None,
    ) -> tuple[Kind, PyTree | None, Aux]:
        """Applies layer `index`, given its own held parameters: outputs, its cache, and what it told.

        The context's key is that of the whole stack. `ahead` says of a traced `index` whether the layer is one of a
        ladder; by default the program tells it, and every branch waits for the one before. `mixer` is the layer's,
        where a traced `index` does not say which of several.

        Raises:
          UsageError: If `x` is not as `begin` makes it, or nothing says which mixer the layer has.
        """
        if mixer is None and self.period > 1 and not isinstance(index, int):
            raise UsageError(
                "layers of several mixers in turn take a number that is known, or their mixer."
            )
        mixer = mixer or self.mixers[index % self.period if self.period > 1 else 0]  # type: ignore[call-overload]
        if isinstance(x, Ladder) != (self.residual == "ladder"):
            raise UsageError(
                f"layers of residual={self.residual} take the stream that Stack.begin returns."
            )
        key = None if context.key is None else jax.random.fold_in(context.key, index)
        context = context._replace(key=key)
        ahead = index >= self.ladder_from if ahead is None else ahead
        block = ResidualBlock(mixer=mixer, mlp=self.mlp, norm=self.norm, dropout=self.dropout)
        x, cache, aux = block.apply(layer, x, context, cache, ahead=ahead)
        if self.ranges:
            size = jnp.abs(jax.lax.stop_gradient(self.end(x)))
            if context.weights is not None:
                size = jnp.where(context.weights[..., None] != 0, size, 0)
            aux = both(aux, Aux({}, {"residual_max": Max(largest(size))}))
        return x, cache, aux

    def _layer_of(
        self, number: int, context: Context, cache: StackCache | None
    ) -> Callable[[PyTree, int | Int[Array, ""], Kind], tuple[Kind, PyTree | None, Aux]]:
        """Returns layer `number` as a function of its parameters, its index and the stream."""
        return self.remat_of(
            functools.partial(
                self.layer,
                context=context,
                cache=None if cache is None else cache.layers[number],
                ahead=number >= self.ladder_from,
                mixer=self.mixers[number % self.period],
            )
        )

    def _unrolled(self, layers, x, context, cache, pseudo):
        """Applies one layer after the other."""
        each = layers if isinstance(layers, tuple) else self._each(self._apart(layers))
        caches = []
        told = []
        for index, layer in enumerate(each):
            if pseudo is not None and pseudo.layer == index:
                x = pseudo.after(x)
            inside = context.until(jax.tree.leaves(x)[0].shape[1])
            x, new, aux = self._layer_of(index, inside, cache)(layer, index, x)
            caches.append(new)
            told.append(aux)
        return x, tuple(caches), over_all(told)

    def _scanned(self, layers, x, context, cache):
        """Applies layers in a loop whose turn is one layer of each mixer.

        Layers whose functions differ have loops of their own: those before a ladder begins, the turn in which it does,
        and those after.
        """
        places = self._apart(layers)
        in_blocks = cache is not None and self._has_blocks
        num, outs = self.num_layers // self.period, []
        middle = self.ladder_from // self.period, -(-self.ladder_from // self.period)
        for first, last in itertools.pairwise((0, *middle, num)):
            if first == last:
                continue
            numbers = range(first * self.period, (first + 1) * self.period)
            functions = [self._layer_of(number, context, cache) for number in numbers]

            def turn(x, given, functions=functions):
                trees, number = given
                if in_blocks:
                    trees = [self._in_blocks(tree, at, number) for at, tree in enumerate(places)]
                out = []
                for place, (function, tree) in enumerate(zip(functions, trees, strict=True)):
                    index = number if self.period == 1 else number * self.period + place
                    x, new, aux = function(tree, index, x)
                    out.append((new, aux))
                return x, tuple(out)

            some = (
                places
                if last - first == num
                else jax.tree.map(operator.itemgetter(slice(first, last)), places)
            )
            if in_blocks:  # read where they are
                some = None
            x, out = jax.lax.scan(turn, x, (some, jnp.arange(first, last)))
            outs.append(out)
        out = outs[0] if len(outs) == 1 else jax.tree.map(lambda *x: jnp.concatenate(x), *outs)
        caches, told = zip(*out, strict=True)
        return x, self._each(caches), functools.reduce(both, map(over_layers, told))

    def remat_of(self, body):
        """Returns a layer, or several as one, that keeps for its backward pass what `remat` says."""
        policies = jax.checkpoint_policies
        policy = {
            "dots": policies.save_only_these_names("product"),
            "names": policies.save_only_these_names(*SAVED_NAMES),
            "full": policies.nothing_saveable,
            "blockwise": policies.nothing_saveable,
            "offload": policies.save_and_offload_only_these_names(
                names_which_can_be_saved=[],
                names_which_can_be_offloaded=list(SAVED_NAMES),
                offload_src="device",
                offload_dst="pinned_host",
            ),
        }
        if self.remat == "none":
            return body
        # Inside a scan the loop itself keeps XLA from merging the recomputation with the forward pass.
        return jax.checkpoint(body, policy=policy[self.remat], prevent_cse=not self.scan_layers)


def _is_leaf(value: object) -> bool:
    return isinstance(value, Leaf)


def _unstack(layers: PyTree, num_layers: int) -> tuple[PyTree, ...]:
    """Splits stacked layers by `lax.split`, whose transpose is a concatenation that XLA fuses into the optimizer."""
    flat, treedef = jax.tree.flatten(layers)
    parts = [jax.lax.split(leaf, [1] * num_layers, axis=0) for leaf in flat]
    return tuple(
        treedef.unflatten([jnp.squeeze(part[i], 0) for part in parts]) for i in range(num_layers)
    )
