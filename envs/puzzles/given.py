"""Instances that are given: what a puzzle's `generator` is where levels come from a file and not from chance.

A generator is a frozen dataclass that is called with a key and returns a level; a puzzle takes its sizes from the
shapes of that level (`level_shapes`). `Given` draws one of its instances with equal chances.

Example:
    from jaxpar.envs.puzzles.given import Given
    import jax
    import numpy as np

    generator = Given.of({"numbers": np.array([3, 5, 7])}, {"numbers": np.array([1, 2, 9])})
    assert generator == Given.of(*generator.levels()) and len({generator, Given.of(*generator.levels())}) == 1
    print(generator(jax.random.key(0))["numbers"])
"""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxpar.types import PRNGKey, PyTree, UsageError

__all__ = ["Generator", "Given", "check_generator", "level_shapes"]

Generator = Callable[[PRNGKey], PyTree]
"""`key -> level`: a frozen dataclass, hashable by value, so that the puzzle that holds it is."""


@dataclasses.dataclass(frozen=True)
class Given:
    """One or several instances of the same shapes; make it by `Given.of(level, ...)`.

    Attributes:
        leaves: of every instance its arrays as (dtype, shape, bytes), which are hashed and compared by value.
        tree: how a level is built of its arrays.
    """

    leaves: tuple[tuple[tuple[str, tuple[int, ...], bytes], ...], ...]
    tree: Any

    @classmethod
    def of(cls, *levels: PyTree) -> "Given":
        """Holds levels, pytrees of arrays or numbers that all have the same structure, shapes and dtypes.

        Raises:
            UsageError: there is none, or one differs from the first.
        """
        if not levels:
            raise UsageError("Given.of() holds no instance; it takes at least one level")
        packed = []
        for number, level in enumerate(levels):
            leaves, tree = jax.tree.flatten(jax.tree.map(np.asarray, level))
            packed.append(
                (tree, tuple((leaf.dtype.str, leaf.shape, leaf.tobytes()) for leaf in leaves))
            )
            (first_tree, first), kinds = packed[0], [leaf[:2] for leaf in packed[-1][1]]
            if (tree, kinds) != (first_tree, [leaf[:2] for leaf in first]):
                raise UsageError(
                    f"instance {number} of Given.of has arrays {kinds}, but all must be as in the first, "
                    f"{[leaf[:2] for leaf in first]}"
                )
        return cls(tuple(leaves for _, leaves in packed), packed[0][0])

    def levels(self) -> tuple[PyTree, ...]:
        """The instances as NumPy arrays."""
        return tuple(
            jax.tree.unflatten(
                self.tree, [np.frombuffer(b, dtype).reshape(shape) for dtype, shape, b in level]
            )
            for level in self.leaves
        )

    def __call__(self, key: PRNGKey) -> PyTree:
        """One instance with equal chances; consumes `key`."""
        if len(self.leaves) == 1:
            return jax.tree.map(jnp.asarray, self.levels()[0])
        which = jax.random.randint(key, (), 0, len(self.leaves))
        return jax.tree.map(lambda *leaves: jnp.asarray(np.stack(leaves))[which], *self.levels())

    def __copy__(self) -> "Given":
        return self

    def __deepcopy__(self, memo: dict[int, object]) -> "Given":
        return self  # nothing in it can change, and a tree definition cannot be copied


@functools.lru_cache(maxsize=1024)
def level_shapes(generator: Generator) -> PyTree:
    """Shapes and dtypes of a generator's levels, found once per generator by an abstract call."""
    return jax.eval_shape(generator, jax.random.key(0))


def check_generator(puzzle: str, generator: Generator, kind: type[object], legal: str) -> PyTree:
    """Refuses what does not draw levels of type `kind`, and returns their shapes.

    Args:
        puzzle: its name, for the sentence.
        generator: what was given for one.
        kind: the type of the puzzle's levels.
        legal: the names of generators that there are.

    Raises:
        UsageError: it is not callable, not hashable, or its levels are of another type.
    """
    try:
        level = level_shapes(generator)
    except UsageError:
        raise
    except Exception as error:
        raise UsageError(
            f"{puzzle} takes a generator, a frozen dataclass called with a key ({legal}), not {generator!r}: {error}"
        ) from None
    if not isinstance(level, kind):
        raise UsageError(
            f"{puzzle} takes a generator of {kind.__module__}.{kind.__name__} ({legal}), "
            f"but {type(generator).__name__} draws {type(level).__module__}.{type(level).__name__}"
        )
    return level
