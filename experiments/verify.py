"""Verifies layouts of a language model: each equals one device, and moves between devices what the rule table says.

    python -m experiments.verify                          # tiny, every pair of axes of eight devices, 10 minutes
    python -m experiments.verify 'layouts=[all]'          # every mesh, 20 minutes
    python -m experiments.verify layouts=[data2.fsdp4,tensor2.fsdp4/zero2+sequence] topology=none
    python -m experiments.verify layouts=[stage2.fsdp2.tensor2/zb_v,stage4.data2/zero2+interleaved]
    python -m experiments.verify layouts=[data8] topology=none dtypes=[float32]     # one row, a minute
    python -m experiments.verify preset=gpt2_124m model.num_layers=2 optimizer.name=muon dtypes=[float32]

Loss, every gradient leaf and three optimizer steps, in float32 and float64; collectives here and, compiled by libtpu
for a slice of the same size, on TPUs. Exit code 1 if anything does not hold. For other models: `jaxpar.verify`.
"""

import collections
import dataclasses
import itertools
import json
import math
import os
import pathlib
import sys

import jax
from rich.console import Console
from rich.table import Table

from jaxpar.aot import topology
from jaxpar.fields import AtLeast, Between, field
from jaxpar.io import plot_layouts
from jaxpar.lm import (
    AttentionConfig,
    LMConfig,
    LossesConfig,
    MlpConfig,
    OptimizerConfig,
    axes,
)
from jaxpar.lm.stages import stages
from jaxpar.lm.text import DataConfig
from jaxpar.mesh import MeshSpec, make_mesh, rules_from, use_mesh
from jaxpar.pipeline import PIPELINES
from jaxpar.types import UsageError
from jaxpar.verify import (
    TOLERANCE,
    Layout,
    LayoutReport,
    VerifyOptions,
    every_layout,
    verify_cases,
)

from .app import runner, silence
from .app.lm.judged_trainings import STEPS, cases_of, expert_model, schedule_of
from .app.mesh_flags import LM_AXES, parse_layout, refuse_idle, staged
from .app.run_folder import run_folder
from .app.runner import say

DTYPES = (*TOLERANCE, "bfloat16")
"""Dtypes in which values are compared, and one in which collectives alone are judged."""


@dataclasses.dataclass(frozen=True)
class Config(runner.RunConfig):
    """The verification of layouts.

    Attributes:
      model: The transformer; its dtype is set to each of `dtypes`.
      num_experts: Experts of a second model, which layouts that split experts train; 0 leaves those layouts out. Where
        the model has some, it is theirs.
      data: Its batch_size and seq_len; tokens are drawn at random.
      optimizer: Three steps are made with it.
      layouts: [pairs], every mesh of at most two axes; [all], every mesh; or a list such as
        [data2.fsdp4,fsdp4.tensor2/zero2+sequence,stage2.data4/zb_v]; stages without a schedule take 1f1b.
      accumulate: Microbatches of a batch, where there are no stages.
      ema: Decay of the running average of the parameters; 0 keeps none.
      dropout_off: Whether layouts that split a sequence are judged without dropout, with which they would gather whole
        rows.
      microbatches: Parts of a batch that pass through stages.
      chunks: Groups of layers on each stage, where a schedule leaves it open.
      gather_chunks: Whether stages gather the weights of a chunk once for consecutive microbatches.
      dtypes: Of float32 and float64.
      float32_every: Step between layouts that are compared in float32 as well; 1 for all. The program is the same as in
        float64.
      jobs: Layouts that are compiled at a time; 0 is two on a CPU, and up to eight on accelerators.
      topology: Slice to compile for: "auto" takes one v5e chip for each device, if libtpu is installed.
      train: Taken from presets and ignored, as are sampling.
    """

    name: str = "verify"
    model: LMConfig = LMConfig(
        vocab_size=128,
        num_layers=4,
        embed_dim=32,
        dropout=0.1,
        attention=AttentionConfig(num_heads=4, num_kv_heads=2),
        mlp=MlpConfig(dim=64),
        losses=LossesConfig(z_loss=1e-3),
    )
    num_experts: int = field(4, AtLeast(0))
    data: DataConfig = DataConfig(batch_size=16, seq_len=16)
    optimizer: OptimizerConfig = OptimizerConfig(eps=1e-6)
    layouts: list[str] = dataclasses.field(default_factory=lambda: ["pairs"])
    accumulate: int = field(2, AtLeast(1))
    ema: float = field(0.9, Between(0, 1, "[)"))
    dropout_off: bool = True
    microbatches: int = field(4, AtLeast(1))
    chunks: int = field(2, AtLeast(1))
    gather_chunks: bool = False
    dtypes: list[str] = dataclasses.field(default_factory=lambda: list(DTYPES))
    float32_every: int = field(6, AtLeast(1))
    jobs: int = field(0, AtLeast(0))
    topology: str = "auto"
    train: dict[str, str] = dataclasses.field(default_factory=dict)

    def __post_init__(self):
        """Refuses dtypes that have no tolerance, and flags that would change nothing."""
        super().__post_init__()
        for dtype in self.dtypes:
            if dtype not in DTYPES:
                raise UsageError(
                    f"dtypes={dtype} is not judged; expected any of {', '.join(DTYPES)}."
                )
        for name, legal in (
            ("layouts", "pairs, all, or layouts such as data2.fsdp4"),
            ("dtypes", ", ".join(DTYPES)),
        ):
            if not getattr(self, name):
                raise UsageError(f"{name}=[] leaves nothing to verify; legal are {legal}.")
        if self.mesh != MeshSpec(data=-1) or self.layout != "zero3":
            raise UsageError(
                "mesh and layout are not read here; name them together, such as layouts=[fsdp8/zero2]."
            )


def compose(*flags: str) -> Config:
    """Returns the configuration that these flags give on the command line."""
    return runner.compose("verify", Config, list(flags))


@silence.broken()
def execute(config: Config, folder: pathlib.Path) -> None:
    """Verifies, prints the table, writes layouts.json and plots/layouts.png."""
    with runner.open_devices(config):
        layouts = chosen_layouts(config, jax.device_count())
    if config.gather_chunks and not any(layout.schedule for layout in layouts):
        raise UsageError(
            "gather_chunks=true needs stages; name a layout of some, as layouts=[stage2.fsdp4/zb_v]."
        )
    for layout in layouts:
        if layout.num_devices <= jax.device_count():  # others are told below
            mesh = make_mesh(layout.mesh, jax.devices()[: layout.num_devices])
            with use_mesh(mesh, rules_from(config.rules, layout.name)):
                model = config.model
                if layout.mesh.expert > 1:
                    model = expert_model(config)
                refuse_idle(
                    "a language model", (axes(model), LM_AXES)
                )  # under `staged`, layers lie along stage
    if jax.process_count() > 1:
        raise UsageError(
            "verify compares with one device of this process; start it with one process."
        )
    devices = slice_of(config.topology, layouts)
    say(f"{len(layouts)} layouts of {jax.device_count()} {jax.devices()[0].device_kind} devices")
    say(
        ""
        if devices is None
        else f"collectives also as compiled for {len(devices)} {devices[0].device_kind}"
    )
    rows = verify_lm(config, layouts, devices)
    if all(row.refused for row in rows):
        raise UsageError(f"no layout is legal here; {rows[0].layout!s}: {rows[0].refused}")
    with run_folder(folder, config.resume) as folder:
        (folder / "layouts.json").write_text(
            json.dumps([as_json(row) for row in rows], indent=1) + "\n"
        )
        plot_layouts(folder / "layouts.json", folder / "plots" / "layouts.png", TOLERANCE)
    Console(width=None if sys.stdout.isatty() else 160).print(table_of(rows))
    for row in rows:
        for breach in row.breaches:
            say(f"{row.layout} in {row.dtype}: {breach}")
    for row in rows:
        if row.refused:
            say(f"{row.layout} is not legal here: {row.refused}")
    unjudged = collections.Counter(sentence for row in rows for sentence in row.unjudged)
    for sentence, count in unjudged.items():
        say(f"not judged in {count} rows: {sentence}")
    say(f"table      {runner.short(folder / 'layouts.json')}")
    say(f"plot       {runner.short(folder / 'plots' / 'layouts.png')}")
    bad = sum(bool(row.breaches) for row in rows)
    judged = sum(not row.refused for row in rows)
    say(f"{judged - bad} of {judged} rows hold" + (f", {bad} DO NOT" if bad else ""))
    if bad:
        sys.exit(1)


def chosen_layouts(config: Config, num_devices: int) -> list[Layout]:
    """Returns the layouts that the flag names."""
    if config.layouts in (["all"], ["pairs"]):
        plain = every_layout(num_devices)
        more = [Layout(row.mesh, name) for row in plain for name in variants(row.mesh)]
        more += nested(num_devices)
        found = plain + more + with_experts(config, num_devices) + piped(config, num_devices)
        return found if config.layouts == ["all"] else [row for row in found if is_pair(row)]
    return [staged(parse_layout(text)) for text in config.layouts]


def is_pair(layout: Layout) -> bool:
    """True if a mesh has at most two axes over 1, not counting `inner`: pairs show how two axes interact."""
    sizes = dataclasses.asdict(layout.mesh)
    return sum(size > 1 for name, size in sizes.items() if name != "inner") <= 2


def variants(mesh: MeshSpec) -> list[str]:
    """Returns the other layouts that make a difference on a mesh."""
    over_data = ["zero2", "zero1"] if mesh.fsdp > 1 and mesh.context == 1 else []
    return over_data + (["sequence"] if mesh.tensor > 1 and mesh.context == 1 else [])


def nested(num_devices: int) -> list[Layout]:
    """Returns the layouts over two and three levels of links."""
    if num_devices % 8:
        return []
    eighth = num_devices // 8
    return [
        Layout(MeshSpec(fsdp=8 * eighth, inner=4), "hybrid"),
        Layout(MeshSpec(data=2, fsdp=4 * eighth, inner=2), "nested"),
        Layout(MeshSpec(fsdp=4 * eighth, inner=2, tensor=2), "hybrid+sequence"),
    ]


def with_experts(config: Config, num_devices: int) -> list[Layout]:
    """Returns every mesh that splits experts, if a model has any."""
    if not expert_model(config).experts.num_experts:
        return []
    rows = every_layout(num_devices, ("data", "fsdp", "expert", "tensor", "context"))
    return [row for row in rows if row.mesh.expert > 1]


def piped(config: Config, num_devices: int) -> list[Layout]:
    """Returns every mesh with stages; meshes with equally many cycle through the schedules that the layers allow."""
    meshes = [
        row.mesh
        for row in every_layout(num_devices, ("stage", "data", "fsdp", "tensor", "context"))
    ]
    out = []
    for count, group in itertools.groupby(
        (mesh for mesh in meshes if mesh.stage > 1), lambda mesh: mesh.stage
    ):
        legal = [
            name
            for name in PIPELINES
            if has_layers(config, Layout(MeshSpec(stage=count), "", name))
        ]
        names = itertools.cycle(legal or ["1f1b"])  # the row then says why it is not legal
        out += [
            staged(Layout(mesh, "zero3", name)) for mesh, name in zip(group, names, strict=False)
        ]
    return out


def has_layers(config: Config, layout: Layout) -> bool:
    """True if the layers divide evenly among the chunks of the layout's schedule."""
    try:
        return stages(config.model).num_turns % schedule_of(config, layout).depth == 0
    except UsageError:
        return False


def slice_of(text: str, layouts: list[Layout]):
    """Returns compile-only devices for the layouts, all of one size, or None for no topology."""
    if text in ("", "none"):
        return None
    try:
        numbers = sorted({layout.num_devices for layout in layouts})
        side = max(n for n in range(1, math.isqrt(numbers[0]) + 1) if numbers[0] % n == 0)
        asked = topology.parse_topology(
            f"v5e:{side}x{numbers[0] // side}" if text == "auto" else text
        )
        if numbers != [asked.num_devices]:
            these = " and ".join(map(str, numbers))
            raise UsageError(
                f"topology={asked.text} has {asked.num_devices} devices and the layouts {these}."
            )
        return topology.devices(asked)
    except UsageError as error:
        if text != "auto":
            raise
        say(f"note: no topology is compiled for: {error}")
        return None


def verify_lm(config: Config, layouts: list[Layout], devices=None) -> list[LayoutReport]:
    """Verifies the layouts of the configured model, with a line for each report as it is made."""
    options = VerifyOptions(
        dtypes=[dtype for dtype in config.dtypes if dtype in TOLERANCE or devices is None],
        steps=STEPS,
        topology=devices,
        report=lambda row: say(line_of(row)),
    )
    return verify_cases(cases_of(config, layouts), options, jobs=config.jobs or default_jobs())


def default_jobs() -> int:
    """Returns how many layouts are compiled at a time: a core compiles one, and others see to the devices."""
    cores = os.cpu_count() or 1
    if jax.default_backend() == "cpu":
        return min(2, cores)
    return max(1, min(8, cores // 4))


def line_of(row: LayoutReport) -> str:
    """Returns one line a row, as progress."""
    if row.refused:
        return f"{row.layout!s:40} {row.dtype:8} not legal"
    verdict = "BREACH" if row.breaches else "holds"
    errors = (
        f"loss {row.loss:.0e}  gradient {row.gradient:.0e}  steps {row.steps:.0e}"
        if row.steps
        else "collectives"
    )
    return f"{row.layout!s:40} {row.dtype:8} {verdict:7} {errors}"


def table_of(rows: list[LayoutReport]) -> Table:
    """Returns the table for the terminal."""
    table = Table(title="each layout against one device", title_justify="left")
    for name in (
        "layout",
        "in",
        "loss",
        "gradient",
        "worst leaf",
        "3 steps",
        "worst leaf",
        "arrays a step",
        "holds",
    ):
        table.add_column(name, overflow="fold")
    for row in rows:
        if row.refused:
            continue
        kinds = "\n".join(
            f"{count} {kind} {axes}" for (kind, axes), count in sorted(row.kinds.items())
        )
        errors = ("", "", "", "", "")
        if row.worst:
            errors = (
                f"{row.loss:.0e}",
                f"{row.gradient:.0e}",
                row.worst,
                f"{row.steps:.0e}",
                row.worst_step,
            )
        table.add_row(str(row.layout), row.dtype, *errors, kinds, "NO" if row.breaches else "yes")
    return table


def as_json(row: LayoutReport) -> dict:
    """Returns a row as plain data."""
    plain = dataclasses.asdict(row) | {"layout": str(row.layout)}
    for name in ("transfers", "kinds"):
        plain[name] = {" ".join(key): value for key, value in plain[name].items()}
    return plain


if __name__ == "__main__":
    runner.launch("verify", Config, execute)
