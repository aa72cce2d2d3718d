"""Flags of a pipeline over the stages of the mesh, and the schedule that they ask for."""

import dataclasses
from typing import Any

from jaxpar.fields import AtLeast, OneOf, field
from jaxpar.lm import LMConfig
from jaxpar.lm.stages import stages
from jaxpar.pipeline import (
    PIPELINES,
    Accumulation,
    InTurn,
    Pipelined,
    Schedule,
    named_schedule,
    with_gathers,
    with_offload,
    with_vocabulary,
)
from jaxpar.types import UsageError

from .. import runner
from ..mesh_flags import shares


@dataclasses.dataclass(frozen=True)
class PipelineConfig(runner.RunConfig):
    """How microbatches pass through stages.

    Attributes:
      pipeline: Schedule over the stages of mesh.stage, of `jaxpar.pipeline.PIPELINES`; "none" without stages.
      microbatches: Parts of a batch that pass through a pipeline; 0 for two a stage.
      chunks: Groups of layers on each stage, where the schedule leaves it open.
      split_head: Whether all stages share the product with the head; rules.vocab=stage+tensor has them hold it so.
      gather_chunks: Whether weights that lie over mesh.fsdp are gathered once for consecutive microbatches of a chunk,
        and not in each task.
      offload: Whether what forward passes keep waits on the host, wherever there is a tick in between.
    """

    pipeline: str = field("none", OneOf(("none", *PIPELINES)))
    microbatches: int = field(0, AtLeast(0))
    chunks: int = field(2, AtLeast(1))
    split_head: bool = False
    gather_chunks: bool = False
    offload: bool = False

    def __post_init__(self):
        """Has each stage of a pipeline hold its own layers; refuses what makes no gradient of a batch, by its name."""
        if self.pipeline == "pipedream":
            raise UsageError(
                "pipeline=pipedream changes weights after each microbatch and has no one gradient of a batch; "
                "jaxpar.pipeline.PipeDream runs it."
            )
        super().__post_init__()
        if self.pipeline != "none" and "stages" not in self.layout.split("+"):
            object.__setattr__(self, "layout", f"{self.layout}+stages")


def make_schedule(config: Any, model: LMConfig, accumulate: int) -> tuple[Accumulation, int, str]:
    """Returns how the gradient of a batch is made of its parts, how many there are, and the flag that says so.

    Args:
      config: A `PipelineConfig`.
      model: The transformer.
      accumulate: Parts without a pipeline.

    Raises:
      UsageError: If flags, mesh and model do not fit each other.
    """
    num_stages = shares("stage")
    if config.pipeline == "none":
        if num_stages > 1:
            raise UsageError(
                f"mesh.stage={num_stages} needs pipeline=; legal are {', '.join(PIPELINES)}."
            )
        if config.offload:
            legal = ", ".join(PIPELINES)
            raise UsageError(
                f"offload=true needs pipeline=, legal are {legal}; or take model.execution.remat=offload."
            )
        if config.gather_chunks:
            raise UsageError(
                "gather_chunks=true needs pipeline=; without, layout=zero2 gathers weights once a step."
            )
        return InTurn(), accumulate, "train.accumulate"
    if accumulate > 1:
        raise UsageError(
            f"a pipeline takes its parts from microbatches=, not from train.accumulate={accumulate}."
        )
    parts = config.microbatches or 2 * num_stages
    made = Pipelined(
        with_sides(config, named_schedule(config.pipeline, num_stages, parts, config.chunks))
    )
    made.check(stages(model), parts)
    return made, parts, "microbatches"


def with_sides(config: PipelineConfig, schedule: Schedule) -> Schedule:
    """Returns the schedule with what the flags have run beside its tasks.

    Raises:
      UsageError: If nothing can be offloaded, or the schedule has no place for a split head.
    """
    schedule = with_vocabulary(schedule) if config.split_head else schedule
    schedule = with_gathers(schedule) if config.gather_chunks else schedule
    if config.offload:
        schedule = with_offload(schedule, lockstep=True)
        if not any(side.kind == "offload" for side in schedule.sides):
            raise UsageError(
                f"offload=true finds nothing in {schedule}, whose backward tasks come in the tick after their F; take "
                "another schedule, or model.execution.remat=offload."
            )
    return schedule
