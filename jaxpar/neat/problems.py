"""Problems without time: networks against a table of inputs and targets."""

import dataclasses

import jax.numpy as jnp
import numpy as np

from jaxpar.fields import AtLeast, OneOf, check_fields, field
from jaxpar.neat.evolution import Score
from jaxpar.neat.hyper import CppnDecoder
from jaxpar.neat.network import Networks, evaluate_rows
from jaxpar.types import Array, PRNGKey, UsageError

__all__ = ["SubstrateTable", "Table", "multiplexer", "xor"]

MEASURES = ("paper", "squared")


@dataclasses.dataclass(frozen=True)
class Table:
    """Fits `inputs["targets"]`, float32 `[B, O]`, to `inputs["inputs"]`, float32 `[B, I]`.

    Attributes:
        measure: "paper": the squared difference of the number of outputs, B O, and the sum of absolute errors (2002,
            section 4.1); "squared": minus the mean squared error.
        tolerance: it is solved when no error is as large. 0.5 means that every rounded output is right.
        decoder: the `Substrate` or `Quadtree` on which networks, as CPPNs, give those that are scored; None scores
            networks themselves.
    """

    measure: str = field("paper", OneOf(MEASURES))
    tolerance: float = field(0.5, AtLeast(0))
    decoder: CppnDecoder | None = None

    __post_init__ = check_fields

    def __call__(self, key: PRNGKey, networks: Networks, inputs: dict[str, Array]) -> Score:
        """Scores G networks; `key` is not needed. Networks with memory are reset for every row."""
        rows, targets = inputs["inputs"], inputs["targets"]
        if self.decoder is None:
            y = evaluate_rows(networks, rows)
        else:
            x = jnp.broadcast_to(rows[None], (len(networks.bias), *rows.shape))
            y = self.decoder.apply_decoded(self.decoder.decode(networks), x)
        if targets.shape != y.shape[1:]:
            raise UsageError(f"targets have the shape {targets.shape}; legal is {y.shape[1:]}, a row of outputs a row "
                             "of inputs.")  # fmt: skip
        error = jnp.abs(y - targets[None])
        if self.measure == "paper":
            fitness = jnp.maximum(targets.size - jnp.sum(error, (1, 2)), 0) ** 2
        else:
            fitness = -jnp.mean(error**2, (1, 2))
        return Score(fitness, jnp.all(error < self.tolerance, (1, 2)))


@dataclasses.dataclass(frozen=True)
class SubstrateTable:
    """A table fitted by the substrates of CPPNs; scores as `Table` does.

    Attributes:
        substrate: its first layer has the table's inputs, its last the targets; or a `Quadtree` with such ends.
        tolerance: it is solved when no error is as large.
    """

    substrate: CppnDecoder
    tolerance: float = field(0.5, AtLeast(0))

    __post_init__ = check_fields

    def __call__(self, key: PRNGKey, networks: Networks, inputs: dict[str, Array]) -> Score:
        """Scores G networks; `key` is not needed."""
        return Table(tolerance=self.tolerance, decoder=self.substrate)(key, networks, inputs)


def xor() -> dict[str, Array]:
    """The four rows of exclusive or, with a constant third input, as in the paper."""
    rows = jnp.asarray([[0, 0, 1], [0, 1, 1], [1, 0, 1], [1, 1, 1]], float)
    return {"inputs": rows, "targets": jnp.asarray([[0], [1], [1], [0]], float)}


def multiplexer(address_bits: int) -> dict[str, Array]:
    """All rows of a multiplexer: a address bits choose one of 2^a data bits; and a constant input."""
    if address_bits < 1:
        raise UsageError(f"address_bits={address_bits} must be at least 1.")
    width = address_bits + 2**address_bits
    rows = (np.arange(2**width)[:, None] >> np.arange(width)[::-1]) & 1
    address = rows[:, :address_bits] @ (2 ** np.arange(address_bits)[::-1])
    targets = rows[np.arange(len(rows)), address_bits + address]
    rows = np.concatenate([rows, np.ones((len(rows), 1))], 1)
    return {"inputs": jnp.asarray(rows, float), "targets": jnp.asarray(targets[:, None], float)}
