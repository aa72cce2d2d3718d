"""Estimates a training or decoding step for machines that you may not have: memory, collectives, predicted speed.

    python -m experiments.estimate preset=llama_8b topology=v5p:4x4x4 mesh.fsdp=16 mesh.tensor=4
    python -m experiments.estimate preset=llama_1b topology=v5e:4x4 search=true
    python -m experiments.estimate hf=config.json topology=h100:8 data.seq_len=4096 data.batch_size=64
    python -m experiments.estimate preset=llama_8b topology=h100:8 decode=true
    python -m experiments.estimate preset=gpt2_124m show=true             # compiled for this machine's own devices

TPU slices are compiled for by libtpu, without a TPU; GPUs that are not here are estimated by the analytic model alone.
Exit code 1 says that it does not fit.
"""

import dataclasses
import importlib.util
import itertools
import os
import pathlib
import sys
from typing import Any

import jax
import jax.numpy as jnp

from jaxpar import aot
from jaxpar.fields import OneOf, field, replace_nested
from jaxpar.lm import (
    AdapterConfig,
    LMConfig,
    ObjectiveConfig,
    OptimizerConfig,
    TuningConfig,
    cache_axes,
    config_from_hf,
    context_bytes,
    empty_cache,
    expert_bytes,
    extend,
    flops_per_token,
    loss,
    with_adapters,
)
from jaxpar.lm import params as declared
from jaxpar.lm.text import DataConfig
from jaxpar.loop import XLA_OPTIONS
from jaxpar.mesh import MeshSpec, make_mesh, platform, rules_from, simulate_devices, use_mesh
from jaxpar.pipeline import PIPELINES
from jaxpar.types import UsageError

from .app import runner, silence
from .app.estimate import report as report
from .app.estimate.moves import moves
from .app.estimate.pipelines import MARGIN, estimate_pipeline, schedules, table_of
from .app.lm.pipeline_flags import PipelineConfig
from .app.mesh_flags import check_split, parse_layout, refuse_idle, shares
from .app.runner import say
from .lm import TrainConfig, make_trainer

REMATS, ACCUMULATES, MOST_TENSOR = (
    ("none", "names", "full", "blockwise"),
    (1, 4),
    8,
)  # what a search tries
SEARCHED = ("data", "fsdp", "tensor", "expert")
"""The axes of the meshes that a search tries; the last where the model has experts that it divides."""
UNSAID = (MeshSpec(data=-1), MeshSpec(data=1, fsdp=-1))
"""The meshes of who gives none: the default, and that of presets of large models."""


@dataclasses.dataclass(frozen=True)
class Config(PipelineConfig):
    """What is estimated, and how.

    Attributes:
      model: The transformer.
      data: Only seq_len and batch_size matter; batch_size is that of all devices together.
      optimizer: Update rule, for its state.
      train: Only accumulate matters.
      adapter: What is trained beside a frozen model, in its place.
      objective: What training makes smaller; that of preferences has other batches, and no estimate.
      tuning: What of the model is frozen, and whether an average is kept; gradients are counted as if nothing was.
      pipeline: As of any run; "search" ranks all schedules, and those found for the memory that is left.
      topology: Chips to estimate for, such as v5p:4x4x4 or h100:8; empty for this machine's devices. With it, the mesh
        is fsdp=all unless it is given.
      hf: A Hugging Face config.json to take the model from; how to compute (remat and the like) stays the flags', in
        bfloat16.
      strict: Whether that file may hold no unknown key; false names such keys in a warning.
      decode: Estimates one token of sampling for batch_size rows with a cache of seq_len instead of a training step,
        with parameters in model.dtype.
      search: Tries meshes (data, fsdp, tensor, of a mixture expert), remat and train.accumulate, and ranks them.
      show: Prints how each parameter lies, and why.
      source: A layout of the same devices, such as fsdp64 or fsdp16.tensor4/zero2; prints what bringing parameters and
        optimizer from it into this one sends.
      effort: low or full, of the compiler; none for the analytic model alone. By default low for a topology, full for
        this machine.
      json: Where to write the report besides the run folder.
    """

    model: LMConfig = LMConfig()
    data: DataConfig = DataConfig()
    optimizer: OptimizerConfig = OptimizerConfig()
    train: TrainConfig = TrainConfig()
    adapter: AdapterConfig = AdapterConfig()
    objective: ObjectiveConfig = ObjectiveConfig()
    tuning: TuningConfig = TuningConfig()
    pipeline: str = field("none", OneOf(("none", *PIPELINES, "search")))
    topology: str = ""
    hf: str = ""
    strict: bool = True
    decode: bool = False
    search: bool = False
    show: bool = False
    source: str = ""
    effort: str = ""
    json: str = ""


def compose(*flags: str) -> Config:
    """Returns the configuration that these flags give on the command line."""
    return runner.compose("estimate", Config, list(flags))


@silence.broken()
def execute(config: Config, folder: pathlib.Path) -> None:
    """Estimates, prints the report and writes it into the run folder."""
    if config.search and (config.mesh not in UNSAID or config.show or config.source):
        raise UsageError(
            "search=true tries every mesh; leave mesh, show and source out, or search."
        )
    if config.pipeline != "none" and (
        config.search or config.decode or config.show or config.source
    ):
        raise UsageError(
            "an estimate of a pipeline tells of its schedules alone; leave search, decode, show and source."
        )
    config = with_model(config)
    config, devices, chip = find_devices(config)
    if config.pipeline != "none":
        tell_pipeline(config, folder, devices, chip)
        return
    if config.search:
        if chip is None:
            raise UsageError(
                "search=true ranks by a chip's peaks, and this machine's are unknown; give topology=."
            )
        findings = aot.rank_candidates(
            candidates(config, len(devices)),
            lambda candidate: make_job(with_candidate(config, candidate), devices),
            chip,
            effort=config.effort,
            tell=say,
        )
        report.print_findings(findings)
        fits, mesh = findings[0].verdict == "best" or config.effort == "none", "search"
        content: dict[str, Any] = {"search": report.findings_json(findings)}
        bars = {str(f.candidate): f.estimate for f in findings if f.estimate}
    else:
        job = make_job(config, devices)
        mesh = report.mesh_text(job.mesh)
        source = parse_layout(config.source) if config.source else None
        sent = moves(job, source, rules_from(config.rules, source.name)) if source else {}
        found = aot.estimate(job, effort=config.effort, chip=chip)
        report.print_estimate(config, job, found, chip)
        with job.ambient():
            travels = (
                {}
                if config.decode
                else context_bytes(config.model, config.data.batch_size, config.data.seq_len)
            )
            experts = (
                {}
                if config.decode
                else expert_bytes(config.model, config.data.batch_size, config.data.seq_len)
            )
        report.print_context(travels, chip)
        report.print_experts(experts, config.model.execution.transport, chip)
        fits, content, bars = found.fits is not False, report.estimate_json(found), {mesh: found}
        if travels:
            content["context"] = travels
        if experts:
            content["experts"] = experts
        if source:
            content["moves"] = sent
            report.print_moves(source, sent)
    if config.show and not config.search:
        report.print_placements(aot.placements(job))
    layout = [config.layout] if config.layout != "zero3" else []
    what = "decode" if config.decode else "train"
    place = folder / report.slug(config.topology or jax.default_backend(), mesh, *layout, what)
    report.write(place, content | {"config": dataclasses.asdict(config)}, bars, config.json)
    if not fits:
        sys.exit(1)


def tell_pipeline(
    config: Config, folder: pathlib.Path, devices: list[Any], chip: aot.Chip | None
) -> None:
    """Prints and writes what stages wait and keep by each schedule; the step itself is not compiled."""
    capacity = chip.hbm_bytes if chip else None
    rows = estimate_pipeline(config, pipeline_job(config, devices), capacity)
    say(
        f"pipeline   {config.mesh.stage} stages, {rows[0]['microbatches']} microbatches; F, B and W take alike"
    )
    report.print_table(table_of(rows))
    for name, size in rows[0]["slots"].items():
        say(f"{name:10} {report.size_text(size)} on a stage, {rows[0]['schedule']}")
    say(f"{'fits':10} with {report.margin_text(MARGIN)}; nothing compiled")
    place = folder / report.slug(
        config.topology or jax.default_backend(), f"stage={config.mesh.stage}", "pipeline"
    )
    content = {"pipeline": rows, "config": dataclasses.asdict(config)}
    report.write(place, content, {}, config.json)
    if rows[0]["fits"] is False:
        sys.exit(1)


def pipeline_job(config: Config, devices: list[Any]) -> aot.Job:
    """Returns a step whose state lies as a pipeline has it."""
    mesh, rules = make_mesh(config.mesh, devices), rules_from(config.rules, config.layout)
    with use_mesh(mesh, rules):
        first = next(iter(schedules(config)), PIPELINES[0])
        return train_job(dataclasses.replace(config, pipeline=first), mesh, rules)


def with_model(config: Config) -> Config:
    """Returns `config` with the model of `hf`, if it names one."""
    if not config.hf:
        return config
    found = config_from_hf(config.hf, strict=config.strict)
    model = dataclasses.replace(found, execution=config.model.execution)
    return dataclasses.replace(config, model=model, name="hf")


def find_devices(config: Config) -> tuple[Config, list[Any], aot.Chip | None]:
    """Returns the devices to estimate for, their chip, and the configuration with what follows from them filled in."""
    if not config.topology:
        with runner.open_devices(config) as mesh:
            devices = list(mesh.devices.flat)
        if config.mesh == MeshSpec(data=-1) and dict(mesh.shape) != MeshSpec(data=-1).sizes(
            len(devices)
        ):
            sizes = {axis: size for axis, size in mesh.shape.items() if size > 1}
            config = dataclasses.replace(config, mesh=MeshSpec(**sizes))
        return (
            dataclasses.replace(config, effort=config.effort or "full"),
            devices,
            aot.chip_of(devices[0]),
        )
    topology = aot.parse_topology(config.topology)
    runner._quieten()
    if importlib.util.find_spec("libtpu") and "JAX_PLATFORMS" not in os.environ:
        jax.config.update("jax_platforms", "cpu")  # or libtpu would look for a TPU, aloud
    if config.mesh == MeshSpec(data=-1):
        config = dataclasses.replace(config, mesh=MeshSpec(fsdp=-1))
    if not topology.offline and (config.effort != "none" or importlib.util.find_spec("libtpu")):
        return (
            dataclasses.replace(config, effort=config.effort or "low"),
            aot.devices(topology),
            topology.chip,
        )
    if topology.offline and config.effort not in ("", "none"):
        raise UsageError(
            f"effort={config.effort} needs a compiler, and there is none for {topology.text} here."
        )
    try:
        simulate_devices(topology.num_devices)
    except RuntimeError:
        raise UsageError(
            f"topology={topology.text} is estimated over {topology.num_devices} simulated devices, but this process "
            "has already begun with another number; start a new one."
        ) from None
    model = config.model
    # The kernel for TPUs can be traced anywhere, and keeps and computes what cuDNN's does.
    is_tiled = model.attention.head_dim % 64 == 0 and config.data.seq_len % 128 == 0
    takes_kernel = is_tiled and config.mesh.context == 1
    if model.execution.kernel == "auto" and takes_kernel and not model.dropout:
        model = replace_nested(model, {"execution.kernel": "splash"})
    return (
        dataclasses.replace(config, effort="none", model=model),
        jax.devices("cpu"),
        topology.chip,
    )


def make_job(config: Config, devices: list[Any]) -> aot.Job:
    """Returns the step of the configured model on these devices."""
    mesh, rules = make_mesh(config.mesh, devices), rules_from(config.rules, config.layout)
    try:
        with use_mesh(mesh, rules):
            return (
                decode_job(config, mesh, rules) if config.decode else train_job(config, mesh, rules)
            )
    except UsageError as error:
        raise UsageError(f"{error}{_other_mesh(config, len(devices))}") from error


def _other_mesh(config: Config, count: int) -> str:
    """Says which mesh fits devices of which all are along fsdp, where their number is no power of two."""
    largest = count & -count
    if config.mesh != MeshSpec(data=config.mesh.data, fsdp=-1) or count == largest:
        return ""
    rows = max(1, round(config.data.batch_size / count)) * count
    return (
        f" {config.topology or 'This machine'} has {count} devices, over which mesh.data={count // largest} "
        f"mesh.fsdp={largest} data.batch_size={rows} divides."
    )


def train_job(config: Config, mesh: Any, rules: Any) -> aot.Job:
    """Returns one optimizer step."""
    if config.objective.kind != "tokens":
        raise UsageError(
            f"objective.kind={config.objective.kind} has no estimate; legal is tokens."
        )
    check_split(
        "data.seq_len", config.data.seq_len, "seq"
    )  # a run pads its rows; a plan says what divides
    trainer, data = make_trainer(config), config.data
    key = jax.eval_shape(lambda: jax.random.key(0))
    state = jax.eval_shape(trainer.init, key)
    rows = jax.ShapeDtypeStruct((data.batch_size, data.seq_len), jnp.int32)
    axes = trainer.axes()
    names = ("tokens", "targets", *(("places",) if shares("seq_layer") > 1 else ()))

    def model_loss(params):
        part = jnp.zeros((data.batch_size // config.train.accumulate, data.seq_len), jnp.int32)
        if config.adapter.kind != "none":
            base, adapters = params
            params = with_adapters(jax.lax.stop_gradient(base), adapters, config.adapter.scale)
        return loss(params, dict.fromkeys(names, part), config.model)

    trained = state.params if config.adapter.kind == "none" else (state.base, state.adapters)
    return aot.Job(
        step=trainer.step,
        args=(key, state, dict.fromkeys(names, rows)),
        axes=((), axes, dict.fromkeys(names, ("batch", "seq_layer"))),
        mesh=mesh,
        out_axes=(axes, None),
        rules=rules,
        donate=(1,),
        loss=model_loss,
        params=trained,
        model_flops=data.batch_size * data.seq_len * flops_per_token(config.model, data.seq_len),
        options=XLA_OPTIONS.get(platform()),
    )


def decode_job(config: Config, mesh: Any, rules: Any) -> aot.Job:
    """Returns one token of sampling a row, with a full cache."""
    model, rows, length = config.model, config.data.batch_size, config.data.seq_len
    refuse_idle("sampling", (declared.axes(model), "batch"))
    check_split("data.batch_size", rows, "batch")
    params = jax.eval_shape(
        model.stack().unstacked, declared.abstract(model, jnp.dtype(model.dtype))
    )
    token = jax.ShapeDtypeStruct((rows, 1), jnp.int32)
    cache = jax.eval_shape(lambda: empty_cache(model, rows, length))

    def decode(params, tokens, cache):
        return extend(params, tokens, cache, model)

    return aot.Job(
        step=decode,
        args=(params, token, cache),
        axes=(
            model.stack().unstacked_axes(declared.axes(model)),
            ("batch", None),
            cache_axes(model),
        ),
        mesh=mesh,
        out_axes=(None, cache_axes(model)),
        rules=rules,
        donate=(2,),
        model_flops=rows * flops_per_token(model, length) / 3,  # the forward pass alone
        options=XLA_OPTIONS.get(platform()),
        group=lambda path: "parameters" if path.startswith("0.") else "other",
    )


@dataclasses.dataclass(frozen=True)
class Candidate:
    """One row of a search."""

    data: int
    fsdp: int
    tensor: int
    expert: int
    remat: str
    accumulate: int

    def __str__(self):
        sizes = " ".join(f"{n}={getattr(self, n)}" for n in SEARCHED if getattr(self, n) > 1)
        return f"{sizes or 'one device'}, remat {self.remat}, accumulate {self.accumulate}"


def candidates(config: Config, num_devices: int) -> list[Candidate]:
    """Returns what a search tries: meshes, and for training what is recomputed and in how many parts."""
    most = max(1, config.model.experts.num_experts)
    remats = REMATS
    parts = sorted({*ACCUMULATES, config.train.accumulate})
    if config.decode:
        remats = (config.model.execution.remat,)
        parts = [1]
    found = []
    for data, fsdp, tensor, expert in aot.factorisations(num_devices, len(SEARCHED)):
        if tensor > MOST_TENSOR or most % expert:
            continue
        for remat, accumulate in itertools.product(remats, parts):
            candidate = Candidate(
                data=data,
                fsdp=fsdp,
                tensor=tensor,
                expert=expert,
                remat=remat,
                accumulate=accumulate,
            )
            found.append(candidate)
    return found


def with_candidate(config: Config, candidate: Candidate) -> Config:
    """Returns the configuration of one candidate."""
    return dataclasses.replace(
        config,
        mesh=MeshSpec(**{name: getattr(candidate, name) for name in SEARCHED}),
        model=replace_nested(config.model, {"execution.remat": candidate.remat}),
        train=dataclasses.replace(config.train, accumulate=candidate.accumulate),
    )


if __name__ == "__main__":
    runner.launch("estimate", Config, execute)
