"""What a run leaves on disk and shows on screen.

file            | in -> out                                            | called by
----------------|------------------------------------------------------|--------------------------
`digest.py`     | array, any sharding -> 64 bits                       | the two below
`snapshot.py`   | arrays -> copies on the devices, digests             | `checkpoint.py`
`layers.py`     | stacked over layers <-> an array a layer             | `reading.py`, `checkpoint.py`
`reading.py`    | `checkpoints/<step>/` -> arrays, or why not          | `checkpoint.py`
`lock.py`       | folder -> its lock, or the sentence about its holder  | `storage.py`, experiments
`storage.py`    | folder, retention -> Orbax's manager                 | `checkpoint.py`
`checkpoint.py` | state pytree, any sharding <-> `checkpoints/<step>/` | `jaxpar.loop`, experiments
`export.py`     | pytree, any sharding -> `.npz`, `.safetensors`       | experiments
`metrics.py`    | step, name -> number -> `metrics.jsonl`, services    | `jaxpar.loop`, experiments
`progress.py`   | step, name -> number -> one line or bar              | `jaxpar.loop`
`plots.py`      | `metrics.jsonl` -> PNG                               | experiments, notebooks
`graphs.py`     | nodes and edges, `metrics.jsonl`, curves -> PNG      | `jaxpar.neat`, experiments
"""

import importlib
from typing import TYPE_CHECKING

from jaxpar.io.figure import BLUE, GRAY, VERMILION, empty_figure, tidy
from jaxpar.io.graphs import plot_graph, plot_seeds, plot_stream
from jaxpar.io.lock import LOCK, lock_folder, unlock_folder
from jaxpar.io.metrics import Writer, open_writers, read_jsonl
from jaxpar.io.plots import (
    plot_areas,
    plot_experts,
    plot_fits,
    plot_frames,
    plot_histograms,
    plot_layouts,
    plot_loss,
    plot_memory,
    plot_metrics,
)
from jaxpar.io.progress import Progress, ProgressLabels, open_progress

if TYPE_CHECKING:
    from jaxpar.io.checkpoint import (
        Checkpoints,
        CorruptCheckpointError,
        RunMismatchError,
        SaveError,
    )
    from jaxpar.io.export import write_arrays

__all__ = [
    "BLUE",
    "GRAY",
    "LOCK",
    "VERMILION",
    "Checkpoints",
    "CorruptCheckpointError",
    "Progress",
    "ProgressLabels",
    "RunMismatchError",
    "SaveError",
    "Writer",
    "empty_figure",
    "lock_folder",
    "open_progress",
    "open_writers",
    "plot_experts",
    "plot_fits",
    "plot_frames",
    "plot_graph",
    "plot_areas",
    "plot_histograms",
    "plot_layouts",
    "plot_loss",
    "plot_memory",
    "plot_metrics",
    "plot_seeds",
    "plot_stream",
    "read_jsonl",
    "tidy",
    "unlock_folder",
    "write_arrays",
]

_LATER = {
    "Checkpoints": "jaxpar.io.checkpoint",
    "CorruptCheckpointError": "jaxpar.io.checkpoint",
    "RunMismatchError": "jaxpar.io.checkpoint",
    "SaveError": "jaxpar.io.checkpoint",
    "write_arrays": "jaxpar.io.export",
}
"""Names from modules that import Orbax, which takes half a second, and not for plots and metrics."""


def __getattr__(name: str) -> object:
    if name in _LATER:
        return getattr(importlib.import_module(_LATER[name]), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
