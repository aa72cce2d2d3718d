"""Rules of an evolution: the modes "fast" and "canonical" are two values of one dataclass."""

import dataclasses
from collections.abc import Callable

import jax
import jax.numpy as jnp

from jaxpar.types import Array

__all__ = [
    "CANONICAL_RULES",
    "FAST_RULES",
    "MODES",
    "ModeRules",
    "first_founded_species",
    "nearest_species",
    "normal",
    "symmetric_uniform",
]


def normal(uniform: Array) -> Array:
    """Standard normal numbers from uniform ones, by the inverse distribution; within 5.2."""
    return jnp.sqrt(2.0) * jax.scipy.special.erfinv(2 * jnp.maximum(uniform, 1e-7) - 1)


def symmetric_uniform(uniform: Array) -> Array:
    """Uniform numbers in [-1, 1) from uniform ones in [0, 1)."""
    return 2 * uniform - 1


def nearest_species(far: Array, near: Array, order: Array) -> Array:
    """Slot of the nearest species, int32 `[G]`.

    Args:
        far: float32 `[G, S]`, distances, infinite to free slots.
        near: bool `[G, S]`, whether they are below the threshold.
        order: int32 `[S]`, numbers of the species in the order of foundation.
    """
    del near, order
    return jnp.argmin(far, 1)


def first_founded_species(far: Array, near: Array, order: Array) -> Array:
    """Slot of the species that was founded first of those near enough, int32 `[G]`.

    Arguments are those of `nearest_species`.
    """
    del far
    return jnp.argmin(jnp.where(near, order[None], jnp.iinfo(jnp.int32).max), 1)


@dataclasses.dataclass(frozen=True)
class ModeRules:
    """Rules in which the modes of NEAT differ, apart from their rates; hashable.

    Attributes:
        step: maps uniform numbers in [0, 1) to steps of size 1 of a weight.
        choose_species: picks the slot of a genome's species among those that are near enough;
            arguments and result are those of `nearest_species`.
        counts_excess: whether the distance weighs excess genes by `rates.excess`; they count as
            disjoint ones otherwise.
        spares_best: whether the two best species are never stale.
        crosses_equals: whether children of equally fit parents have each disjoint or excess gene
            of either with the chance 1/2; they have all of the first parent's and none of the
            second's otherwise.
        constant_input: whether the last input is a constant, of which no connection is split.
        splits_early: whether small genomes split one of their oldest connections.
        activations: functions of a configuration that names none.
        evolved: attributes of nodes that evolve in a configuration that names none.
    """

    step: Callable[[Array], Array]
    choose_species: Callable[[Array, Array, Array], Array]
    counts_excess: bool
    spares_best: bool
    crosses_equals: bool
    constant_input: bool
    splits_early: bool
    activations: tuple[str, ...]
    evolved: tuple[str, ...]

    @property
    def numbers_per_conn(self) -> int:
        """Uniform numbers that a generation draws for each connection slot of a genome."""
        # Two for the weight's step, two for a gene of both parents.
        count = 4

        if self.crosses_equals:
            # One for each gene that only one of the parents has.
            count += 2

        return count


FAST_RULES = ModeRules(
    step=normal,
    choose_species=nearest_species,
    counts_excess=False,
    spares_best=True,
    crosses_equals=False,
    constant_input=False,
    splits_early=False,
    activations=("sigmoid",),
    evolved=("bias",),
)
"""Rules of the mode "fast"."""

CANONICAL_RULES = ModeRules(
    step=symmetric_uniform,
    choose_species=first_founded_species,
    counts_excess=True,
    spares_best=False,
    crosses_equals=True,
    constant_input=True,
    splits_early=True,
    activations=("steep_sigmoid",),
    evolved=(),
)
"""Rules of Stanley and Miikkulainen 2002; where the text is silent, their program's."""

MODES = {"fast": FAST_RULES, "canonical": CANONICAL_RULES}
"""Rules by the names of the modes."""
