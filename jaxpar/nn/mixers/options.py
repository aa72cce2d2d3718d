"""Options that linear attention and its like share: how rows are packed, how states are read, how all is computed."""

import dataclasses
from typing import NamedTuple

import flax.struct
import jax.numpy as jnp
from jax.typing import DTypeLike
from jaxtyping import Array, Bool, Float, Int

from jaxpar.fields import AtLeast, OneOf, check_fields, field

__all__ = ["RecurrenceExecution", "Packing", "Readout"]

IMPLS = ("auto", "kernel", "chunked", "sequential")

OLDER = {
    "starts": "packing.starts",
    "valid": "packing.valid",
    "impl": "execution.impl",
    "chunk": "execution.chunk",
    "axis_name": "execution.axis_name",
}
"""Fields of `Packing` and `RecurrenceExecution` that were arguments, by their names as these."""


class Packing(NamedTuple):
    """Documents and tokens that count in rows of T tokens; by default one document a row, of T tokens.

    Attributes:
      starts: Tokens with which another document begins: the state before them is forgotten, and so
        are NaN and infinity. By chunks and by the kernel these also make NaN of whole rows of their
        document.
      valid: Number of tokens of each row that count, from the first on. Outputs of the others are 0.
    """

    starts: Bool[Array, "B T"] | None = None
    valid: Int[Array, " B"] | None = None


@flax.struct.dataclass
class Readout:
    """Reading of a state by queries, o[t] = q[t] S[t]; a pytree with two static fields.

    Attributes:
      bonus: Weight u of a token's own product, with which the state is read before it is written:
        o[t] = q[t] (S[t-1] + diag(u) k[t] v[t]^T) (RWKV-6).
      floor: Least size of what outputs are divided by, which is the last column's size where that
        is larger; outputs have V columns. It has no gradient.
      normaliser: Whether v gets a last column of ones; outputs and states have V + 1 columns. With a
        floor it always does. Static.
      dtype: Dtype of the outputs; by default v's. Static.
    """

    bonus: Float[Array, "H K"] | None = None
    floor: Float[Array, "B T H"] | None = None
    normaliser: bool = flax.struct.field(pytree_node=False, default=False)
    dtype: DTypeLike | None = flax.struct.field(pytree_node=False, default=None)

    @property
    def has_ones(self) -> bool:
        """Whether v gets a last column of ones."""
        return self.normaliser or self.floor is not None

    def dtype_for(self, v: Array) -> jnp.dtype:
        """Returns the dtype of outputs for values v."""
        return jnp.dtype(v.dtype if self.dtype is None else self.dtype)


@dataclasses.dataclass(frozen=True)
class RecurrenceExecution:
    """Form in which a recurrence is computed, which changes its results by rounding alone; static under jit.

    Attributes:
      impl: "chunked"; "sequential", step after step; "kernel" (of linear attention alone), chunks
        of its own in Triton, or of C where that is below 64, for K and V that are multiples of 16 up
        to 512, without `axis_name`; "auto": a step of one token, of more the kernel where there is
        one, else chunks.
      chunk: C, the tokens of a chunk, rounded up to a power of two.
      axis_name: Mesh axis over which time is split, inside `jax.shard_map`: one decay, or matrix,
        and one state a device cross it.
    """

    impl: str = field("auto", OneOf(IMPLS))
    chunk: int = field(64, AtLeast(1))
    axis_name: str | None = None

    __post_init__ = check_fields
