"""Networks of a whole population: expressed once from genomes, applied often.

All nodes of a level depend on earlier levels alone, so computing *all* nodes from all others, as often as the deepest
network has levels, gives every feed-forward network at once; a recurrent one makes `sub_steps` such sweeps a call. The
matrix form costs w^2 a sweep and network for w node slots, the edge form C gathers and a scatter.
"""

from collections.abc import Callable
from typing import Protocol

import flax.struct
import jax
import jax.numpy as jnp
from jax.typing import DTypeLike

from jaxpar.neat._kernels import feedforward_kernel, use_kernels
from jaxpar.neat.config import NeatConfig
from jaxpar.neat.functions import activate, aggregate, is_bounded
from jaxpar.neat.genome import Genomes
from jaxpar.neat.graph import sweeps
from jaxpar.types import Array, PyTree, UsageError

__all__ = [
    "Networks",
    "Players",
    "apply",
    "evaluate_rows",
    "express",
    "form_of",
    "init_carry",
    "with_networks",
]

_SEGMENTS = {"sum": 0.0, "mean": 0.0, "product": 1.0, "max": -jnp.inf, "min": jnp.inf}
_KERNEL_ROWS = 64
"""Inputs of a network up to which one program a network computes them on a GPU; more go through products."""
_EDGE_PRICE = 16
"""What a gather and a scatter of one connection cost, in entries of a matrix."""


@flax.struct.dataclass
class Networks:
    """G networks of w node slots.

    Attributes:
        index: int32 `[G]`, the genome's number in the whole population.
        matrix: float32 `[G, w, w]`, weight from slot (last axis) to slot; None in the edge form.
        mask: bool `[G, w, w]`, where there is an edge; None where zeros in `matrix` say the same.
        source: int32 `[G, C]`; None in the matrix form, as are the next two.
        target: int32 `[G, C]`; w for what is no edge.
        weight: float32 `[G, C]`.
        bias: float32 `[G, w]`.
        response: float32 `[G, w]`.
        time_constant: float32 `[G, w]`.
        activation: int32 `[G, w]`.
        aggregation: int32 `[G, w]`.
        sweeps: int32 `[]`, of the deepest feed-forward network.
        config: static.

    Numbers are of the genomes' own dtype, float64 where those are.
    """

    index: Array
    matrix: Array | None
    mask: Array | None
    source: Array | None
    target: Array | None
    weight: Array | None
    bias: Array
    response: Array
    time_constant: Array
    activation: Array
    aggregation: Array
    sweeps: Array
    config: NeatConfig = flax.struct.field(pytree_node=False)

    @property
    def width(self) -> int:
        """Node slots, w."""
        return self.bias.shape[1]

    @property
    def io_sizes(self) -> tuple[int, int]:
        """Numbers of inputs and of outputs."""
        return self.config.num_inputs, self.config.num_outputs

    @property
    def dtype(self) -> DTypeLike:
        """Type of all numbers."""
        return self.bias.dtype

    def init_carry(self, *batch: int) -> PyTree:
        """Returns `init_carry` of these networks."""
        return init_carry(self, *batch)

    def apply(self, carry: PyTree, x: Array) -> tuple[Array, PyTree]:
        """Returns `apply` of these networks."""
        return apply(self, carry, x)


class Players(Protocol):
    """G networks that can be called step by step: `Networks`, or those that CPPNs give.

    A pytree whose arrays have a leading axis G, unless they are scalars.
    """

    @property
    def index(self) -> Array:
        """Numbers of the genomes in the whole population, int32 `[G]`."""
        ...

    @property
    def io_sizes(self) -> tuple[int, int]:
        """Numbers of inputs and of outputs."""
        ...

    @property
    def dtype(self) -> DTypeLike:
        """Type of all numbers."""
        ...

    def init_carry(self, *batch: int) -> PyTree:
        """Returns the memory before the first call."""
        ...

    def apply(self, carry: PyTree, x: Array) -> tuple[Array, PyTree]:
        """Returns outputs `[G, O]` or `[G, B, O]` for `[G, I]` or `[G, B, I]`, and the memory."""
        ...


def form_of(config: NeatConfig, width: int) -> str:
    """The form that costs less at this width: "matrix" or "edges"."""
    if (
        set(config.aggregations) <= set(_SEGMENTS)
        and _EDGE_PRICE * config.max_conns < width * width
    ):
        return "edges"
    return "matrix"


def express(
    config: NeatConfig,
    genomes: Genomes,
    *,
    width: int | None = None,
    form: str | None = None,
    index: Array | None = None,
) -> Networks:
    """Builds the networks of genomes.

    Args:
        config: static.
        genomes: G of them.
        width: node slots to compute, N by default; it must hold every live slot.
        form: "matrix" or "edges"; None takes the cheaper.
        index: int32 `[G]`, numbers of the genomes, 0, 1, ... by default.

    Raises:
        UsageError: an unknown form, or "edges" with an aggregation that it lacks.
    """
    return _expressed(config, genomes, None, width, form, index)


def _needed(config: NeatConfig, genomes: Genomes) -> Array:
    """How many sweeps a call takes: int32 `[]`."""
    if config.kind != "feedforward":
        return jnp.int32(1)
    live = genomes.on & genomes.enabled
    return sweeps(genomes.source, genomes.target, live, config.max_nodes, config.num_inputs)


def _expressed(
    config: NeatConfig,
    genomes: Genomes,
    needed: Array | None,
    width: int | None,
    form: str | None,
    index: Array | None,
) -> Networks:
    assert config.activations is not None
    width, form = width or config.max_nodes, form or form_of(config, width or config.max_nodes)
    if form not in ("matrix", "edges") or (
        form == "edges" and not set(config.aggregations) <= set(_SEGMENTS)
    ):
        raise UsageError(f"form={form!r} does not serve {config.aggregations}; legal are matrix, and edges "
                         f"with {', '.join(_SEGMENTS)}.")  # fmt: skip
    live = genomes.on & genomes.enabled
    count = len(live)
    matrix = mask = source = target = weight = None
    if form == "matrix":
        place = jnp.where(live, genomes.target * width + genomes.source, width * width)
        row = jnp.arange(count)[:, None]

        def square(values, dtype):
            flat = jnp.zeros((count, width * width), dtype)
            return (
                flat.at[row, place]
                .set(values, mode="drop", unique_indices=True)
                .reshape(count, width, width)
            )

        matrix = square(genomes.weight, genomes.weight.dtype)
        if set(config.aggregations) != {"sum"} or not is_bounded(config.activations):
            mask = square(live, bool)
    else:
        source, target = genomes.source, jnp.where(live, genomes.target, width)
        weight = jnp.where(live, genomes.weight, 0)
    nodes = {name: getattr(genomes, name)[:, :width]
             for name in ("bias", "response", "time_constant", "activation", "aggregation")}  # fmt: skip
    index = jnp.arange(count, dtype=jnp.int32) if index is None else index
    needed = _needed(config, genomes) if needed is None else needed
    return Networks(
        index, matrix, mask, source, target, weight, **nodes, sweeps=needed, config=config
    )


def with_networks(
    config: NeatConfig,
    genomes: Genomes,
    use: Callable[[Networks], PyTree],
    *,
    index: Array | None = None,
    over: tuple[str, ...] = (),
) -> PyTree:
    """Calls `use(networks)` at the smallest of `config.node_widths` that holds all live nodes, chosen while running.

    Costs one compilation of `use` a width. `over` are mesh axes whose devices must choose alike.
    """
    if len(config.node_widths) == 1:
        return use(express(config, genomes, index=index))
    last = jnp.max(jnp.where(genomes.node_on, jnp.arange(1, config.max_nodes + 1)[None], 0))
    if over:
        last = jax.lax.pmax(last, over)
    index = jnp.arange(len(genomes.on), dtype=jnp.int32) if index is None else index
    choice = sum((last > width).astype(jnp.int32) for width in config.node_widths[:-1])
    branches = [
        lambda g, n, i, w=width: use(_expressed(config, g, n, w, None, i))
        for width in config.node_widths
    ]
    return jax.lax.switch(choice, branches, genomes, _needed(config, genomes), index)


def init_carry(networks: Networks, *batch: int) -> PyTree:
    """The carry of networks before their first call: `()` or zeros, float32 `[G, *batch, w]`."""
    if networks.config.kind == "feedforward":
        return ()
    return jnp.zeros((len(networks.bias), *batch, networks.width), networks.bias.dtype)


def apply(networks: Networks, carry: PyTree, x: Array) -> tuple[Array, PyTree]:
    """One call of every network.

    Nodes compute act(bias + response * agg(weight * value)); one without inputs is act(bias), or
    act(bias + response) where it multiplies. "feedforward": to the end. "recurrent": `sub_steps`
    steps, in each all nodes from the values before. "ctrnn": as many steps
    y += (1 - exp(-dt / tau)) (act(...) - y), exact while inputs are constant.

    Args:
        networks: G of them.
        carry: from `init_carry(networks)`, or `init_carry(networks, B)` where x has B.
        x: float32 `[G, I]` or `[G, B, I]`.

    Returns:
        float32 `[G, O]` or `[G, B, O]`, and the new carry.
    """
    config = networks.config
    if x.ndim not in (2, 3) or x.shape[0] != len(networks.bias) or x.shape[-1] != config.num_inputs:
        raise UsageError(f"x has shape {x.shape}; legal are ({len(networks.bias)}, {config.num_inputs}) and "
                         f"({len(networks.bias)}, B, {config.num_inputs}).")  # fmt: skip
    inputs = jnp.asarray(x if x.ndim == 3 else x[:, None], networks.bias.dtype)
    padded = jnp.pad(inputs, ((0, 0), (0, 0), (0, networks.width - config.num_inputs)))
    is_input = jnp.arange(networks.width)[None, None] < config.num_inputs

    def placed(values):
        return jnp.where(is_input, padded, values)

    if config.kind == "feedforward":

        def swept():
            values = jax.lax.fori_loop(
                0, networks.sweeps, lambda _, v: placed(_computed(networks, v)), padded
            )
            return values[..., config.num_inputs : config.num_io]

        by_kernel = use_kernels(networks) and inputs.shape[1] <= _KERNEL_ROWS
        settle = lambda: feedforward_kernel(networks, inputs)  # noqa: E731
        out = jax.lax.platform_dependent(default=swept, cuda=settle) if by_kernel else swept()
        return (out if x.ndim == 3 else out[:, 0]), ()
    values = carry if x.ndim == 3 else carry[:, None]
    if config.kind == "recurrent":

        def relax(_, values):
            return placed(_computed(networks, placed(values)))

    else:
        rate = -jnp.expm1(-config.time_step / networks.time_constant)[:, None]

        def relax(_, values):
            return placed(values + rate * (_computed(networks, placed(values)) - values))

    if config.sub_steps == 1:
        values = relax(0, values)
    else:
        values = jax.lax.fori_loop(0, config.sub_steps, relax, values)
    new = values if x.ndim == 3 else values[:, 0]
    out = values[..., config.num_inputs : config.num_io]
    return (out if x.ndim == 3 else out[:, 0]), new


def evaluate_rows(networks: Networks, rows: Array) -> Array:
    """Outputs of every network for every row, each from zero memory: float32 `[G, B, O]`.

    Args:
        networks: G of them.
        rows: float32 `[B, I]`.

    Raises:
        UsageError: networks with memory that make one step a call. In that step nodes read inputs
            and zeros, so hidden nodes change no output.
    """
    config = networks.config
    if config.kind != "feedforward" and config.sub_steps == 1:
        raise UsageError(
            f"sub_steps=1: from zero memory, one step of a {config.kind} network carries no hidden "
            "node to an output; expected at least 2 for rows without time, such as 10."
        )
    x = jnp.broadcast_to(rows[None], (len(networks.bias), *rows.shape))
    return apply(networks, init_carry(networks, len(rows)), x)[0]


def _computed(networks: Networks, values: Array) -> Array:
    """Every node from every other: float32 `[G, B, w]`."""
    per_node = [
        x[:, None]
        for x in (networks.bias, networks.response, networks.activation, networks.aggregation)
    ]
    bias, response, activation, aggregation = per_node
    total = (
        _by_edges(networks, values)
        if networks.matrix is None
        else _by_matrix(networks, values, aggregation)
    )
    return activate(networks.config.activation_functions, activation, bias + response * total)


def _by_matrix(networks: Networks, values: Array, aggregation: Array) -> Array:
    matrix, mask = networks.matrix, networks.mask
    assert matrix is not None
    if mask is None and values.shape[1] >= 8:
        return jnp.einsum("pij,pbj->pbi", matrix, values, precision=jax.lax.Precision.HIGHEST)
    terms = matrix[:, None] * values[:, :, None]
    if mask is None:
        return jnp.sum(terms, -1)
    return aggregate(networks.config.aggregations, aggregation, terms, mask[:, None])


def _by_edges(networks: Networks, values: Array) -> Array:
    source, target, weight = networks.source, networks.target, networks.weight
    assert source is not None and target is not None and weight is not None
    names, width = networks.config.aggregations, networks.width
    terms = weight[:, None] * jnp.take_along_axis(values, source[:, None], -1)
    row = jnp.arange(len(weight))[:, None]
    count = (
        jnp.zeros((len(weight), width), weight.dtype).at[row, target].add(1, mode="drop")[:, None]
    )

    def gathered(name):
        begin = jnp.full(values.shape, _SEGMENTS[name], values.dtype)
        at = begin.at[row[:, None], jnp.arange(values.shape[1])[None, :, None], target[:, None]]
        scatter = {"product": at.multiply, "max": at.max, "min": at.min}.get(name, at.add)
        out = scatter(terms, mode="drop")
        if name == "mean":
            return out / jnp.maximum(count, 1)
        return jnp.where(count > 0, out, 0) if name in ("max", "min") else out

    out = gathered(names[0])
    for index, name in enumerate(names[1:], 1):
        out = jnp.where(networks.aggregation[:, None] == index, gathered(name), out)
    return out
