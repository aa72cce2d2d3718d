"""A single controller over several meshes.

| file | in -> out | called by |
|---|---|---|
| `transfer` | an array on one mesh -> the same on another | users, `dataflow` |
| `dataflow` | a function, values and futures, a mesh -> a future | users |
"""

from jaxpar.parallel.controller.dataflow import Client, Event, Future, NodeError, plot_trace, start_pathways
from jaxpar.parallel.controller.transfer import move

__all__ = ["Client", "Event", "Future", "NodeError", "move", "plot_trace", "start_pathways"]
