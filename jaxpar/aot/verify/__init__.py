"""Proof of layouts: each equals one device in value, gradient and steps, and does what the table says.

    rows = verify(model, batch, batch_axes, every_layout(8))

Works on any model that is a loss of parameters with logical axes (`Model`).

| file | in -> out | called by |
| --- | --- | --- |
| `layouts` | number of devices -> meshes with named changes of the table | `run`, users |
| `collectives` | HLO text, what is declared -> collectives found, and breaches | `judge` |
| `program` | state, step, batches -> compiled program; what some steps gave | `run` |
| `compare` | two trees -> error of each leaf | `run`, tests |
| `judge` | compiled program, limits -> report | `run` |
| `run` | model or cases, layouts -> reports | users, `own`, `experiments.verify` |
"""

from jaxpar._renamed import renamed
from jaxpar.aot.verify.compare import FLOOR, TOLERANCE
from jaxpar.aot.verify.judge import LayoutReport, Limits, bytes_on_device, judge
from jaxpar.aot.verify.layouts import Layout, every_layout
from jaxpar.aot.verify.program import Outcome, Program, compile_program, on_mesh, run_program
from jaxpar.aot.verify.run import (
    ROOM_FOR_FLOPS,
    Case,
    Model,
    VerifyOptions,
    bytes_of_batch,
    verify,
    verify_cases,
)
from jaxpar.transfers import SMALL, Transfer, allowed_by_axes

__all__ = [
    "FLOOR",
    "ROOM_FOR_FLOPS",
    "SMALL",
    "TOLERANCE",
    "Case",
    "Layout",
    "LayoutReport",
    "Limits",
    "Model",
    "Outcome",
    "Program",
    "Transfer",
    "VerifyOptions",
    "allowed_by_axes",
    "bytes_of_batch",
    "bytes_on_device",
    "compile_program",
    "every_layout",
    "judge",
    "on_mesh",
    "run_program",
    "verify",
    "verify_cases",
]


def __getattr__(name: str) -> object:
    return renamed(__name__, name)
