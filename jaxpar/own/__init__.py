"""A model of one's own, of flax or of plain functions: its layout from its program, a run from three functions.

| file | in -> out | called by |
|---|---|---|
| `dimensions` | jaxpr of a loss -> which dimensions of its parameters are one | `layout` |
| `model` | three functions, an optimizer -> an `Algorithm` | users, all below |
| `layout` | model, batch, mesh -> axes of each parameter, and the table of them | `fitting`, `proof`, users |
| `modules` | a module of NNX -> model | users |
| `fitting` | model, examples -> batches, a run, predictions | users, experiments |
| `proof` | model, layouts -> each against one device | experiments, tests |
"""

from jaxpar.own.fitting import (
    LayoutOptions,
    check_finite,
    examples_in_batches,
    mean_loss,
    predictions,
    train_own,
)
from jaxpar.own.layout import OwnLayout, ParamLayout, lay_out
from jaxpar.own.model import OwnModel, OwnState
from jaxpar.own.modules import from_nnx
from jaxpar.own.proof import verify_own

__all__ = [
    "LayoutOptions",
    "OwnLayout",
    "OwnModel",
    "OwnState",
    "ParamLayout",
    "check_finite",
    "examples_in_batches",
    "from_nnx",
    "lay_out",
    "mean_loss",
    "predictions",
    "train_own",
    "verify_own",
]
