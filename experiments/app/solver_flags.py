"""The method of a recurrence, for the configuration of a run to name."""

import operator
import pathlib
from collections.abc import Sequence

from jaxpar.nn.cells import Cell, SequenceCell, name_taken

from . import runner

__all__ = ["method_to_keep"]


def method_to_keep(
    folder: pathlib.Path,
    schema: type,
    field: str,
    cells: Sequence[SequenceCell],
    batch: int,
    length: int,
) -> str:
    """Returns the method by which recurrences are solved that no flag names.

    It is that of the configuration in `folder`, if there is one: a run that is resumed on another
    machine continues by the same method. Otherwise it is what the platform and the shapes give.

    Args:
      folder: Folder of the run.
      schema: Type of its configuration.
      field: Path of the method in the configuration.
      cells: Cells that the method is for.
      batch: Sequences at a time.
      length: Steps of a sequence.

    Returns:
      A name of `jaxpar.nn.cells.solvers.METHODS`; "auto" where cells have closed forms or differ.
    """
    if (folder / "config.yaml").is_file():
        saved = operator.attrgetter(field)(runner.load(folder, schema))
        if saved not in ("", "auto"):
            return saved
    names = {
        name_taken(cell, batch, length) if isinstance(cell, Cell) else "auto" for cell in cells
    }
    if len(names) != 1:
        return "auto"
    return names.pop()
