"""What a run leaves on disk and shows on screen.

file            | in -> out                                            | called by
----------------|------------------------------------------------------|--------------------------
`checkpoint.py` | state pytree, any sharding <-> `checkpoints/<step>/` | `jaxpar.loop`, experiments
`metrics.py`    | step, name -> number -> `metrics.jsonl`, services    | `jaxpar.loop`, experiments
`progress.py`   | step, name -> number -> one line or bar              | `jaxpar.loop`
`plots.py`      | `metrics.jsonl` -> PNG                               | experiments, notebooks
"""

from jaxpar.io.checkpoint import Checkpoints, SaveError
from jaxpar.io.metrics import Writer, open_writers, read_jsonl
from jaxpar.io.plots import plot_loss, plot_memory
from jaxpar.io.progress import Progress, open_progress

__all__ = [
    "Checkpoints",
    "Progress",
    "SaveError",
    "Writer",
    "open_progress",
    "open_writers",
    "plot_loss",
    "plot_memory",
    "read_jsonl",
]
