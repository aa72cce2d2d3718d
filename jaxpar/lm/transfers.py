"""What crosses devices in one training step, by the rule table: what a compiled program is judged by."""

import dataclasses
import functools
import itertools
import math
from collections.abc import Iterator

import jax
import jax.numpy as jnp

from jaxpar.lm.config import LMConfig
from jaxpar.lm.params import Leaf, abstract, decay_mask, leaves
from jaxpar.lm.params import axes as axes_of
from jaxpar.lm.stages import stages
from jaxpar.mesh import in_role, mesh_axes, num_shares
from jaxpar.nn.attention import Attention
from jaxpar.nn.attention.context import SplitSequence
from jaxpar.nn.experts import Experts
from jaxpar.nn.experts.sharded import TRANSPORTS, bytes_sent, transport_for
from jaxpar.nn.mixer import ActivationSizes
from jaxpar.optim import muon_dimensions
from jaxpar.pipeline import Schedule, pack_schedule
from jaxpar.stage import as_in_stage
from jaxpar.transfers import SMALL, Transfer

__all__ = [
    "context_bytes",
    "declared_transfers",
    "expert_bytes",
    "pipeline_transfers",
    "step_transfers",
]


ONCE = ", once"
"""Ends the purpose of weights that a step gathers when it begins and holds."""

EACH_LAYER = "each layer, forward and backward"
"""Ends the purpose of weights that a layer gathers whenever it is computed."""


def declared_transfers(
    config: LMConfig, rows: int, length: int, optimizer: str = "adamw"
) -> list[Transfer]:
    """Returns the collectives of arrays that one step may make on the ambient mesh, and what each is for.

    Bytes are of whole arrays on a device, upper bounds where a sum over several axes can be made in steps.

    Args:
      config: The model.
      rows: B of the whole batch; one part of it, if the batch is accumulated.
      length: T.
      optimizer: Its name; "muon" alone adds exchanges.
    """
    out: list[Transfer] = []

    def add(kind: str, axes: tuple[str, ...], arrays: int, size: float, why: str) -> None:
        if axes and arrays:
            out.append(Transfer(kind, axes, arrays, int(arrays * size), why))

    _weights(config, optimizer, add)
    out += _activations(config, rows, length, add)
    return out


def step_transfers(
    config: LMConfig, rows: int, length: int, parts: int = 1, optimizer: str = "adamw"
) -> list[Transfer]:
    """Returns the same of a step with a batch that is cut into `parts` microbatches, one after the other.

    What a layer gathers whenever it is computed must be found as often as it is computed: a program
    without those gathers holds the weights whole. What is gathered once a microbatch must be found once
    at least, since compilers move it before the loop over microbatches.
    """
    # Of a loop of one turn compilers make none, and of its two gathers one.
    has_loop = config.num_layers > config.stack().period
    out = []
    for transfer in declared_transfers(config, rows // parts, length, optimizer):
        is_small = transfer.bytes <= SMALL * transfer.arrays
        is_judged = transfer.kind == "gather" and not is_small
        least = 0.0
        if is_judged and transfer.why.endswith(ONCE):
            least = 1 / parts
        elif is_judged and transfer.why.endswith(EACH_LAYER):
            least = 0.5
            if has_loop:
                least = 1.0
        times = parts
        if transfer.why.startswith("momentum"):
            times = 1
        out.append(transfer.times(times, least))
    return out


def pipeline_transfers(
    config: LMConfig, rows: int, length: int, schedule: Schedule, optimizer: str = "adamw"
) -> list[Transfer]:
    """Returns the same of a step by a pipeline, `jaxpar.pipeline.Pipelined(schedule)`.

    A compiled program has all tasks in every tick, though a stage does one, and a count of its text
    counts all. So what a chunk sends within a stage, forward and backward, is declared once a tick.

    Args:
      config: The model.
      rows: B of the whole batch, all microbatches.
      length: T.
      schedule: Of the stages of the ambient mesh.
      optimizer: Its name.
    """
    ticks, m, stage = len(pack_schedule(schedule).rows), schedule.microbatches, ("stage",)
    layers = config.num_layers // schedule.depth
    gathers = any(side.kind == "gather" for side in schedule.sides)
    with as_in_stage():
        chunk = declared_transfers(
            dataclasses.replace(config, num_layers=layers), rows // m, length
        )
    out = [t.times(ticks) for t in chunk if not (gathers and t.why.endswith(EACH_LAYER))]

    def add(kind: str, axes: tuple[str, ...], arrays: int, size: float, why: str) -> None:
        if gathers and why.endswith(
            EACH_LAYER
        ):  # in a place of its own, at most one chunk a tick, and in no task
            arrays, size, why = (
                ticks,
                size * layers,
                f"{why.removesuffix(EACH_LAYER)}a chunk a tick",
            )
        if axes and arrays:
            out.append(Transfer(kind, axes, arrays, int(arrays * size), why))

    _weights(config, optimizer, add)  # made ready once, and their gradients
    stream, of_layer, of_last = _told_of(config, rows // m, length)
    shares = num_shares(*mesh_axes("batch"), *mesh_axes("seq"))
    for leaf in stream:
        # Of two stages one permutation reaches both neighbours.
        messages = 2 * ticks
        if schedule.devices == 2:
            messages = ticks
        size = leaf.size * leaf.dtype.itemsize / shares
        add("exchange", stage, messages, size, "the stream, to both neighbours")
    for leaf in of_last:
        add(
            "sum",
            stage,
            1,
            m * leaf.size * leaf.dtype.itemsize,
            "what the loss told of each microbatch",
        )
    for leaf in of_layer:  # one of both
        size = schedule.copies * config.num_layers * m * leaf.size * leaf.dtype.itemsize
        add("gather", stage, 1, size, "what layers told of each microbatch")
        add("sum", stage, 1, size, "what layers told of each microbatch")
    _parameters_of_chunks(config, schedule, add)
    return out


def _parameters_of_chunks(config: LMConfig, schedule: Schedule, add) -> None:
    """Adds what moves layers to the stages of their chunks, and sums of the gradients of all other parameters."""
    stage = ("stage",)
    at_rest = tuple(chunk * schedule.devices // schedule.depth for chunk in range(schedule.depth))
    moves = 0
    if schedule.placement != at_rest:
        moves = len(schedule.placement) // schedule.devices
    for path, leaf in jax.tree_util.tree_leaves_with_path(
        leaves(config), is_leaf=lambda x: isinstance(x, Leaf)
    ):
        name, size = (
            jax.tree_util.keystr(path, simple=True, separator="/"),
            math.prod(leaf.shape) * _wide(config),
        )
        if path[0].key == "layers":
            for role in ("weight", "grad"):
                share = (
                    size / schedule.depth / num_shares(*_over(_of_layer(in_role(leaf.axes, role))))
                )
                add(
                    "exchange",
                    stage,
                    moves,
                    share,
                    f"{name} to its chunks' devices, or its gradient back",
                )
        else:
            add(
                "sum",
                stage,
                1,
                size / num_shares(*_over(in_role(leaf.axes, "use"))),
                f"gradient of {name}",
            )


def _told_of(config: LMConfig, rows: int, length: int) -> tuple[list[jax.ShapeDtypeStruct], ...]:
    """Shapes of the residual stream of a microbatch, of what a layer tells of it, and of what the loss tells."""
    with jax.enable_x64(config.dtype == "float64"):
        pieces, params = stages(config), abstract(config, _wide_dtype(config))
        part = dict.fromkeys(
            ("tokens", "targets", "places"), jax.ShapeDtypeStruct((rows, length), jnp.int32)
        )
        total, key = jax.eval_shape(lambda: (jnp.float32(1), jax.random.key(0)))

        def told(params, part, key, total):
            held = pieces.hold(params)
            stream = pieces.first(held, part, key)
            turn = jax.tree.map(lambda x: x[0], held["layers"])
            of_layer = pieces.layer(turn, 0, stream, part, key)[1]
            return stream, of_layer, pieces.last(held, stream, part, total)[1]

        return tuple(
            jax.tree.leaves(tree) for tree in jax.eval_shape(told, params, part, key, total)
        )


def context_bytes(config: LMConfig, rows: int, length: int) -> dict[str, float]:
    """Returns the bytes that a device sends in one step for attention over a split sequence, on the ambient mesh.

    Args:
      config: The model.
      rows: B of the whole batch, all of its parts.
      length: T.

    Returns:
      By direction as `jaxpar.nn.attention.context.Move.bytes`; empty where no sequence is split, or
      where whole rows are gathered.
    """
    mixer = config.stack().mixer
    if not isinstance(mixer, Attention) or not isinstance(mixer.attend, SplitSequence):
        return {}
    return mixer.attend.sent(mixer, _sizes(config, rows, length))


def expert_bytes(config: LMConfig, rows: int, length: int) -> dict[str, float]:
    """Returns the bytes that a device sends in one step to reach experts of others, by each transport; empty for none.

    The arguments are those of `context_bytes`; the bytes are those of `jaxpar.nn.experts.sharded.bytes_sent`.
    """
    mlp, sizes = config.stack().mlp, _sizes(config, rows, length)
    if not isinstance(mlp, Experts) or not mesh_axes("experts"):
        return {}
    return {name: bytes_sent(transport_for(name), mlp, sizes) for name in TRANSPORTS}


def _sizes(config: LMConfig, rows: int, length: int) -> ActivationSizes:
    """What a mixer is told of a step."""
    mine, again = (
        rows / num_shares(*mesh_axes("batch")),
        1 if config.execution.remat == "none" else 2,
    )
    width = jnp.dtype(config.dtype).itemsize
    return ActivationSizes(mine * length, config.num_layers, width, again, config.embed_dim, mine)


def _over(names: tuple[str | None, ...]) -> tuple[str, ...]:
    """Mesh axes that split an array with these logical axes."""
    return tuple(axis for name in names if name for axis in mesh_axes(name))


def _of_layer(names: tuple[str | None, ...]) -> tuple[str | None, ...]:
    """Axes of one layer's part of a leaf."""
    return tuple(None if name == "layers" else name for name in names)


def _minus(a: tuple[str, ...], b: tuple[str, ...]) -> tuple[str, ...]:
    return tuple(axis for axis in a if axis not in b)


def _weights(config: LMConfig, optimizer: str, add) -> None:
    """Gathers of weights and sums of gradients."""
    tree = leaves(config)
    inside = (*mesh_axes("batch"), *mesh_axes("seq_layer"))
    outside = (*mesh_axes("batch"), *mesh_axes("seq"))
    for path, leaf in jax.tree_util.tree_leaves_with_path(
        tree, is_leaf=lambda x: isinstance(x, Leaf)
    ):
        name, in_layer = (
            jax.tree_util.keystr(path, simple=True, separator="/"),
            path[0].key == "layers",
        )
        trips = leaf.shape[0] if in_layer else 1
        is_weight, leaf = not isinstance(leaf.init, str), leaf._replace(axes=_of_layer(leaf.axes))
        width = jnp.dtype(config.dtype).itemsize if in_layer and is_weight else _wide(config)
        whole = math.prod(leaf.shape) * width / trips
        multiplied = _over(in_role(leaf.axes, "product" if leaf.is_product and in_layer else "use"))
        used = whole / num_shares(*multiplied)
        if is_weight and in_layer:
            held, rest = _over(in_role(leaf.axes, "weight")), _over(leaf.axes)
            add("gather", _minus(rest, held), 1, trips * whole / num_shares(*held), f"{name}{ONCE}")
            gathered = _minus(held, multiplied)
            # Experts gather theirs anew for their backward pass, within a layer that is recomputed as well.
            times = 3 if "experts" in leaf.axes and config.execution.remat != "none" else 2
            # A router's is kept for its backward pass, or gathered for it again.
            when = EACH_LAYER
            if leaf.raw and "experts" not in leaf.axes:
                when = f"{EACH_LAYER} at least"
            add("gather", gathered, times * trips, used, f"{name}, {when}")
            if config.weights == "ternary":
                add("sum", _over(leaf.axes), 1, trips * _wide(config), f"mean magnitude of {name}")
        elif is_weight:
            gathered = _minus(_over(leaf.axes), _over(in_role(leaf.axes, "use")))
            # The head is cast before it is gathered; a table is looked up as it is.
            size = used
            if name == "head":
                size = used * jnp.dtype(config.dtype).itemsize / width
            add("gather", gathered, 1, size, f"{name}, where used")
        over = inside if is_weight or "norm" not in name else outside
        over = _minus(over, mesh_axes("experts")) if "experts" in leaf.axes else over
        add("sum", over, trips, used, f"gradient of {name}")
    if config.embedding.tied:
        shape = (
            (config.vocab_size / num_shares(*mesh_axes("vocab"))) * config.embed_dim * _wide(config)
        )
        size = shape * jnp.dtype(config.dtype).itemsize / _wide(config)
        add("gather", mesh_axes("embed"), 1, size, "the embedding, as the head")
        add("sum", inside, 1, shape, "gradient of the embedding, as the head")
    if optimizer == "muon":
        _exchanges(config, add)


def _columns(config: LMConfig, tokens: float, times: int, add) -> None:
    """What products of two dimensions send: results of their parts are summed, those in shares gathered."""
    over, width = mesh_axes("embed_product"), jnp.dtype(config.dtype).itemsize
    for path, leaf in jax.tree_util.tree_leaves_with_path(
        leaves(config)["layers"], is_leaf=lambda x: isinstance(x, Leaf)
    ):
        if not leaf.is_product:
            continue
        name, inside = (
            jax.tree_util.keystr(path, simple=True, separator="/"),
            [x for x in leaf.axes[1:] if x != "embed"],
        )
        branch = math.prod(leaf.shape[1:]) / config.embed_dim / num_shares(*_over(tuple(inside)))
        add(
            "sum",
            over,
            leaf.shape[0] * (times + 1),
            tokens * branch * width,
            f"parts of a product with {name}",
        )
        add(
            "gather",
            over,
            leaf.shape[0] * (times + 1),
            tokens * config.embed_dim * width,
            f"the stream, by {name}",
        )


def _exchanges(config: LMConfig, add) -> None:
    """Muon's matrices, made whole on one device each, and their updates back: one exchange a split dimension each."""
    sides = muon_dimensions(axes_of(config), decay_mask(config))["layers"]
    flat = jax.tree_util.tree_leaves_with_path(
        leaves(config)["layers"], is_leaf=lambda x: isinstance(x, Leaf)
    )
    for path, leaf in flat:
        name, side = path[-1].key, functools.reduce(lambda tree, step: tree[step.key], path, sides)
        if side is None:
            continue
        over = [mesh_axes(axis) for axis in leaf.axes[1:] if axis and mesh_axes(axis)]
        mine = leaf.shape[0] // num_shares(*_over(leaf.axes[:1]))  # of a stage's own
        share = (
            -(-mine // math.prod(num_shares(*axes) for axes in over))
            * math.prod(leaf.shape[1:])
            * _wide(config)
        )
        for axes in over:
            # Compilers write an exchange as one array for each of its devices.
            add(
                "exchange",
                axes,
                2 * num_shares(*axes),
                share / num_shares(*axes),
                f"momentum and update of {name}",
            )


def _wide_dtype(config: LMConfig) -> jnp.dtype:
    return jnp.promote_types(config.dtype, jnp.float32)


def _wide(config: LMConfig) -> int:
    return _wide_dtype(config).itemsize


def _activations(config: LMConfig, rows: int, length: int, add) -> Iterator[Transfer]:
    """Sums over tensor parallelism's parts, and gathers of a split sequence; returns what the branches declare."""
    layers, narrow, wide = config.num_layers, jnp.dtype(config.dtype).itemsize, _wide(config)
    tensor, vocab, inside = mesh_axes("heads"), mesh_axes("vocab"), mesh_axes("seq_layer")
    apart = _minus(mesh_axes("seq"), inside)  # split in the residual stream only
    tokens, times = (sizes := _sizes(config, rows, length)).tokens, sizes.again
    stream = tokens / num_shares(*inside) * config.embed_dim * narrow
    again = (
        2 if config.execution.remat in ("names", "offload", "full", "blockwise") else 1
    )  # the first half of a layer, anew
    stack = config.stack()
    turns, branches = layers // stack.period, stack.num_branches
    projections = turns * sum(mixer.num_inputs for mixer in stack.mixers)
    sums = layers  # a layer's last one is of what no gradient needs, and so is not made anew
    if stack.mlp is not None:
        projections, sums = projections + layers * stack.mlp.num_inputs, layers * (1 + again)
    out = stream
    if config.weights == "ternary":  # sums of integers, which only wide numbers hold
        out = stream / narrow * wide
        count = layers * 2 * (2 * (1 + times) + 1)
        add(
            "sum",
            tensor,
            count,
            tokens / num_shares(*inside) * wide,
            "scales out of the mixer and of the mlp",
        )
    add("sum", tensor, sums, out, "out of the mixer and of the mlp")
    add("sum", tensor, projections, stream, "into the projections, backward")
    add("gather", apart, branches * times + 1, stream, "into a branch and into the loss")
    add("gather", apart, branches, stream, "out of a branch, backward")
    add(
        "sum",
        vocab,
        1,
        tokens / num_shares(*inside) * config.embed_dim * wide,
        "rows of the embedding",
    )
    add(
        "gather",
        apart,
        1,
        tokens / num_shares(*inside) * config.embed_dim * wide,
        "into the embedding, backward",
    )
    _columns(config, tokens / num_shares(*inside), times, add)
    chunk = tokens / num_shares(*inside)
    parts = math.ceil(chunk / config.execution.loss_chunk)
    add(
        "sum",
        vocab,
        2 * parts,
        1.5 * math.ceil(chunk / parts) * wide,
        "maximum and sum of the loss",
    )
    add("sum", vocab, 1, stream, "features of the loss, backward")
    mixing = (mixer.transfers(sizes._replace(layers=turns)) for mixer in stack.mixers)
    return itertools.chain(*mixing, stack.mlp.transfers(sizes) if stack.mlp else ())
