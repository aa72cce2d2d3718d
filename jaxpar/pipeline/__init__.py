"""Pipelines: what each device does when, as tables that are made, checked, timed, drawn, and run by one program.

| file | in -> out | called by |
|---|---|---|
| `accumulation`, `two_stage` | stages, batch -> loss [], gradient; products with weights later | `lm`, runs |
| `ops` | tasks, where chunks lie -> `Schedule`, and what each task waits for | all |
| `orders`, `greedy`, `search`, `named` | devices, microbatches, chunks; costs, a cap -> schedules | users |
| `sides`, `partition` | a schedule -> one with gathers, offload, a split head; layers' costs -> stages | users |
| `check`, `timing`, `draw` | a schedule -> what is wrong with it; time, idle time, memory; text, picture | users |
| `pack` | a schedule -> integers [ticks, P, columns] with slots, routes; a table -> what is wrong with it | runs |
| `run` | a model as stages, a batch -> its loss and gradient, by any table on a mesh with `stage` | `Trainer`, users |
| `asynchronous` | a model as stages, a rule, microbatches -> parameters updated after each, as PipeDream does | users |
| `_work`, `_turn`, `_head`, `_chunks` | a tick, a turn of layers, a split head; where layers run | runs |
| `_held`, `_once` | what a stage holds from tick to tick; what is done in a tick or not | runs |
| `_host`, `_trips` | slots in the host's memory; when they travel | `_work`, `timing`, `pack` |
"""

from jaxpar._renamed import renamed
from jaxpar.pipeline.accumulation import Accumulation, InTurn
from jaxpar.pipeline.asynchronous import PipeDream
from jaxpar.pipeline.check import check_schedule
from jaxpar.pipeline.draw import draw_schedule, schedule_text
from jaxpar.pipeline.greedy import bitpipe, hanayo, list_schedule
from jaxpar.pipeline.named import PIPELINES, named_schedule
from jaxpar.pipeline.ops import Op, Schedule, Task, loop, vee
from jaxpar.pipeline.orders import (
    blockwise,
    breadth_first,
    gpipe,
    interleaved,
    one_f_one_b,
    pipedream,
    zb_h1,
    zb_h2,
    zb_v,
    zero_bubble,
)
from jaxpar.pipeline.pack import check_table, pack_schedule
from jaxpar.pipeline.partition import Stage, partition_layers
from jaxpar.pipeline.run import Pipelined
from jaxpar.pipeline.search import search_schedule
from jaxpar.pipeline.sides import with_gathers, with_offload, with_reductions, with_vocabulary
from jaxpar.pipeline.timing import TaskCosts, Timed, Timing, simulate_schedule

__all__ = [
    "PIPELINES",
    "Accumulation",
    "InTurn",
    "Op",
    "PipeDream",
    "Pipelined",
    "Schedule",
    "Stage",
    "Task",
    "TaskCosts",
    "Timed",
    "Timing",
    "bitpipe",
    "blockwise",
    "breadth_first",
    "check_schedule",
    "check_table",
    "draw_schedule",
    "gpipe",
    "hanayo",
    "interleaved",
    "list_schedule",
    "loop",
    "named_schedule",
    "one_f_one_b",
    "pack_schedule",
    "partition_layers",
    "pipedream",
    "schedule_text",
    "search_schedule",
    "simulate_schedule",
    "vee",
    "with_gathers",
    "with_offload",
    "with_reductions",
    "with_vocabulary",
    "zb_h1",
    "zb_h2",
    "zb_v",
    "zero_bubble",
]


def __getattr__(name: str) -> object:
    return renamed(__name__, name)
