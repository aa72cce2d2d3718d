"""Floating-point operations of a program, counted from its jaxpr: XLA's own count takes a loop's body once."""

import math
from collections.abc import Callable
from typing import NamedTuple

import jax
from jax.core import AbstractValue
from jax.extend.core import Jaxpr, JaxprEqn, Literal, Var

from jaxpar.lower.jaxprs import array_of, inner_jaxpr
from jaxpar.types import PyTree

__all__ = ["Flops", "count_flops", "flops_of", "matmul_flops", "shards"]


class Flops(NamedTuple):
    """A count over all devices.

    Attributes:
      total: Operations of matrix products and convolutions, a multiplication and an addition each.
      matmul_bytes: Bytes of their operands and results.
      unknown_loops: While loops whose length the program does not tell; their bodies count once.
    """

    total: float
    matmul_bytes: float
    unknown_loops: int

    def times(self, count: float) -> "Flops":
        """Returns the count of `count` executions."""
        return Flops(self.total * count, self.matmul_bytes * count, self.unknown_loops)

    def plus(self, other: "Flops") -> "Flops":
        """Returns the count of one after the other."""
        loops = self.unknown_loops + other.unknown_loops
        return Flops(self.total + other.total, self.matmul_bytes + other.matmul_bytes, loops)


def count_flops(fn: Callable, *args: PyTree) -> Flops:
    """Counts what `fn(*args)` multiplies; the arguments may be abstract. Costs one trace.

    Matrix products, convolutions and attention kernels count, elementwise work does not (6 % of a small
    transformer's, far less of a large one's). A scan counts times its length, a conditional as its dearest branch, a
    `shard_map` times its devices (work that devices repeat counts as often as it is done), a Pallas kernel by its cost
    estimate, or its grid times its body. Causal attention counts in full, the convention of PaLM's appendix B
    (arXiv:2204.02311). Recomputation counts: divide by the time for hardware utilisation, not model utilisation.
    """
    return flops_of(jax.make_jaxpr(fn)(*args).jaxpr)


def flops_of(jaxpr: Jaxpr) -> Flops:
    """Counts a jaxpr, as `count_flops` does a function."""
    total = Flops(0.0, 0.0, 0)
    for eqn in jaxpr.eqns:
        total = total.plus(_equation(eqn))
    return total


def _equation(eqn: JaxprEqn) -> Flops:
    name, params = eqn.primitive.name, eqn.params
    if (own := matmul_flops(eqn)) is not None:
        return Flops(own, float(sum(_bytes(v.aval) for v in (*eqn.invars, *eqn.outvars))), 0)
    if name == "scan":
        return flops_of(params["jaxpr"].jaxpr).times(params["length"])
    if name == "while":
        once = flops_of(params["body_jaxpr"].jaxpr).plus(flops_of(params["cond_jaxpr"].jaxpr))
        return once if not once.total else once._replace(unknown_loops=once.unknown_loops + 1)
    if name == "cond":
        return max(
            (flops_of(branch.jaxpr) for branch in params["branches"]), key=lambda count: count.total
        )
    if name == "pallas_call":
        if params.get("cost_estimate") is not None:
            return Flops(
                float(params["cost_estimate"].flops),
                float(params["cost_estimate"].bytes_accessed),
                0,
            )
        return flops_of(params["jaxpr"]).times(
            math.prod(_static(n) for n in params["grid_mapping"].grid)
        )
    inner = inner_jaxpr(eqn)
    return Flops(0.0, 0.0, 0) if inner is None else flops_of(inner).times(shards(eqn))


def shards(eqn: JaxprEqn) -> int:
    """Returns the devices that each run a `shard_map`'s body; 1 for any other equation."""
    if eqn.primitive.name != "shard_map":
        return 1
    mesh = eqn.params["mesh"]
    return math.prod(mesh.shape[axis] for axis in eqn.params.get("manual_axes", mesh.axis_names))


def matmul_flops(eqn: JaxprEqn) -> float | None:
    """Returns the operations of one product, convolution or cuDNN attention; None for any other equation."""
    name = eqn.primitive.name
    if name == "dot_general":
        (contract, _), _ = eqn.params["dimension_numbers"]
        return (
            2.0
            * _size(eqn.outvars[0])
            * math.prod(array_of(eqn.invars[0]).shape[dim] for dim in contract)
        )
    if name == "ragged_dot_general":
        (contract, _), _ = eqn.params["ragged_dot_dimension_numbers"].dot_dimension_numbers
        return (
            2.0
            * _size(eqn.outvars[0])
            * math.prod(array_of(eqn.invars[0]).shape[dim] for dim in contract)
        )
    if name == "conv_general_dilated":
        kernel, numbers = array_of(eqn.invars[1]).shape, eqn.params["dimension_numbers"]
        return 2.0 * _size(eqn.outvars[0]) * math.prod(kernel) / kernel[numbers.rhs_spec[0]]
    if name.startswith("dot_product_attention_") and name.removesuffix("_wrapper").endswith(
        ("fwd", "bwd")
    ):
        # [B, T, H, K] queries against S keys: two products, and five in the backward pass, which makes scores anew.
        query, key = (array_of(v).shape for v in eqn.invars[:2])
        return (4.0 if "fwd" in name else 10.0) * math.prod(query) * key[1]
    return None


def _size(var: Var | Literal) -> int:
    return math.prod(array_of(var).shape)


def _bytes(aval: AbstractValue) -> int:
    itemsize = getattr(getattr(aval, "dtype", None), "itemsize", 0)
    return math.prod(getattr(aval, "shape", ())) * itemsize


def _static(size: object) -> int:
    return size if isinstance(size, int) else 1
