# ---
# jupyter:
#   jupytext:
#     formats: py:percent,ipynb
#     text_representation:
#       extension: .py
#       format_name: percent
#   kernelspec:
#     display_name: Python 3
#     language: python
#     name: python3
# ---

# %% [markdown]
# [Open in Colab](https://colab.research.google.com): File > Upload notebook, from <https://example.org/jaxpar> · shown below: small size, `FAST=1`

# %% [markdown]
# # Layouts of a mesh: verified, changed half-way, estimated
#
# **The question.** One transformer lies on eight devices in six ways. Do all six compute what one device computes, and
# send between devices only what they declare? Can a run change from one to another half-way? And what would each of
# them need on 64 chips that nobody here has?
#
# We draw the six layouts, verify them, move a training run through several of them by checkpoints, and estimate the 8B
# Llama for a TPU v5p slice. The last cell asserts the answers.
#
# About two minutes on two CPU cores; about one with `FAST=1` in the environment. Every device is simulated, even where
# there is an accelerator.

# %% [markdown]
# ## Set-up
#
# Works as it stands in a checkout, from `pip install`, and in Colab, where it installs what is missing: from an archive
# (`jaxpar*.zip`, `.whl` or `.tar.gz`) that you put beside the notebook, else from `REPOSITORY`. A JAX that fits stays,
# and with it the accelerator; for another one write `[notebooks,cuda]` or `[notebooks,tpu]`.

# %%
import subprocess
import sys
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path

REPOSITORY = "https://example.org/jaxpar"

here = Path.cwd()
places = (here, *here.parents, here / "jaxpar")  # a clone that broke off lacks its last files
checkout = next((place for place in places if (place / "tests" / "test_notebooks.py").is_file()), None)
archive = next((file.as_uri() for kind in ("zip", "whl", "tar.gz") for file in here.glob(f"jaxpar*.{kind}")), None)
pip = [sys.executable, "-m", "pip", "install", "--quiet"]
if find_spec("pip") and subprocess.run([*pip, "--no-index", "jaxpar[notebooks]"], capture_output=True).returncode:
    source = f"{checkout}[notebooks]" if checkout else f"jaxpar[notebooks] @ {archive or f'git+{REPOSITORY}'}"
    failed = subprocess.run([*pip, *["--editable"] * bool(checkout), source]).returncode
    assert not failed, "pip could not install it: put an archive of jaxpar beside the notebook, or correct REPOSITORY."
for name in {"jax", "jaxlib", "numpy"} & set(sys.modules):  # imported before pip changed them?
    assert sys.modules[name].__version__ == version(name), "choose Runtime > Restart session, then run from the top."
sys.path[:] = [str(checkout), *sys.path] if checkout else filter(None, sys.path)  # no folder that is no checkout

# %%
import dataclasses
import json
import os
import tempfile

import jax
import matplotlib.pyplot as plt
import numpy as np
from IPython.display import Image, Markdown
from jax.sharding import NamedSharding
from jaxpar.commands.verify import as_json
from matplotlib.patches import Circle, Rectangle

from jaxpar import aot
from jaxpar.commands.app.estimate import report
from jaxpar.commands import estimate
from jaxpar.io import Checkpoints, plot_layouts, plot_memory
from jaxpar.lm import AttentionConfig, LMConfig, MlpConfig, OptimizerConfig, Trainer, axes, init, loss
from jaxpar.lm import declared_transfers
from jaxpar.loop import Fit, Hooks, fit
from jaxpar.mesh import MeshSpec, in_role, make_mesh, partition, place_rows, rules_from, simulate_devices, use_mesh
from jaxpar.processes import keep_programs
from jaxpar.types import UsageError
from jaxpar.verify import TOLERANCE, Layout, Model, VerifyOptions, verify

keep_programs()  # what this notebook compiles is loaded the next time

jax.config.update("jax_platforms", "cpu")
simulate_devices(64)  # eight to compute on; all of them to stand for a pod's

# %% [markdown]
# ## A mesh and a table
#
# A mesh arranges devices along named axes: `data`, `fsdp`, `inner`, `tensor` and a few more, most of size 1. A rule
# table maps the logical axes of arrays ("batch", "embed", "mlp") to mesh axes, in up to three roles of a weight: at
# rest ("embed"), as a step holds it from its forward to its backward pass ("embed_weight"), and as its gradient is
# summed ("embed_grad"). A layout is a mesh and a table; model code names logical axes and knows neither.
#
# The model is a small Llama over bytes. This cell alone knows of sizes and of `FAST`.

# %%
FAST = os.environ.get("FAST") == "1"
ROWS, LENGTH = 24, 64  # B and T; 24 rows divide over eight devices and over three

model = LMConfig(
    num_layers=2,
    embed_dim=128,
    attention=AttentionConfig(num_heads=4, num_kv_heads=2),
    mlp=MlpConfig(dim=256),
    dtype="float32",
)
optimizer = OptimizerConfig(learning_rate=3e-3, warmup_steps=2, eps=1e-6)
layouts = [
    Layout(MeshSpec(data=8)),
    Layout(MeshSpec(fsdp=8)),
    Layout(MeshSpec(fsdp=8), "zero2"),
    Layout(MeshSpec(data=2, fsdp=4, inner=2), "nested"),
    Layout(MeshSpec(fsdp=4, tensor=2), "sequence"),
    Layout(MeshSpec(data=2, fsdp=2, tensor=2)),
]
in_float64 = [] if FAST else layouts[-2:]  # those that are verified in float64 as well
journey = [layouts[0], layouts[4], Layout(MeshSpec(data=3)), Layout(MeshSpec())]  # of the run that moves
journey, STEPS = (journey[1:3], 5) if FAST else (journey, 7)  # steps in each

# %% [markdown]
# ## Six layouts, drawn
#
# Each panel is an array, each rectangle a block of it, each number a device that holds the block. A coloured block has
# one holder. A grey one is replicated, with a disc for each device that holds a copy. Below each panel stands the
# share that one device holds. All of it is read from JAX's own map of devices to indices.


# %%
def holders(axes, shape):
    """Returns {((top, bottom), (left, right)): devices} of an array with these logical axes on the ambient mesh."""
    sharding, out = NamedSharding(jax.sharding.get_mesh(), partition(axes, shape)), {}
    for device, index in sharding.devices_indices_map(shape).items():
        bounds = tuple(part.indices(size)[:2] for part, size in zip(index, shape, strict=True))
        out.setdefault(bounds, []).append(device.id)
    return out


def draw(panel, axes, shape):
    """Draws the blocks of a matrix in the unit square, and says how much of it a device holds."""
    (height, width), colours, blocks = shape, plt.cm.Set2.colors, holders(axes, shape)
    for ((top, bottom), (left, right)), devices in blocks.items():
        top, bottom, left, right = top / height, bottom / height, left / width, right / width
        alone = len(devices) == 1
        face = colours[devices[0]] if alone else "0.92"
        panel.add_patch(Rectangle((left, top), right - left, bottom - top, facecolor=face, edgecolor="black", lw=0.7))
        across = min(len(devices), max(1, round((right - left) / 0.24)))  # discs in a line
        lines = -(-len(devices) // across)
        for place, device in enumerate(devices):
            x = left + (right - left) * (place % across + 0.5) / across
            y = top + (bottom - top) * (place // across + 0.5) / lines
            if not alone:
                panel.add_patch(Circle((x, y), min(0.1, 0.45 * (bottom - top) / lines), facecolor=colours[device]))
            panel.text(x, y, device, ha="center", va="center_baseline", fontsize=7)
    parts = round(1 / ((bottom - top) * (right - left)))
    panel.set(xlim=(0, 1), ylim=(1, 0), xticks=[], yticks=[], aspect="equal")
    panel.set_xlabel("whole" if parts == 1 else f"1/{parts}", fontsize=8)


stream, weight = ("batch", "seq"), ("embed", "mlp")
kinds = {
    "residual stream\n[B, T]": lambda: (stream, (ROWS, LENGTH)),
    "w_up at rest\n[D, F]": lambda: (weight, (model.embed_dim, model.mlp.dim)),
    "w_up as a step\nholds it": lambda: (in_role(weight, "weight"), (model.embed_dim, model.mlp.dim)),
    "gradient of\nw_up": lambda: (in_role(weight, "grad"), (model.embed_dim, model.mlp.dim)),
}
figure, panels = plt.subplots(len(kinds), len(layouts), figsize=(11, 7.6), layout="constrained")
for layout, column in zip(layouts, panels.T, strict=True):
    mesh, name = str(layout).split()
    column[0].set_title(f"{mesh}\n{name}", fontsize=9)
    with use_mesh(make_mesh(layout.mesh, jax.devices()[:8]), rules_from(None, layout.name)):
        for panel, (title, kind) in zip(column, kinds.items(), strict=True):
            draw(panel, *kind())
            panel.set_ylabel(title if layout is layouts[0] else "", fontsize=9)

# %% [markdown]
# Read down a column; `zero3` is the table as it stands, and the others change it. In `data8` the weight is whole
# everywhere: gradients are summed, and nothing is gathered. `zero3` gathers a layer's weight where it is used, `zero2`
# holds it whole for the length of the step. `nested` keeps the optimizer's state in eighths, the gradient in quarters
# and the weight in halves, so that the gathers of the layers stay within `inner`, the fastest links. `sequence` splits
# the residual stream over `tensor` as well.
#
# ## Verified
#
# `jaxpar.verify.verify` takes any model that is a loss of parameters with logical axes. Under each layout it makes
# three optimizer steps and compares loss, every leaf of the gradient, parameters and optimizer state with one
# device's: |difference| / max(|leaf|, 0.001 |whole tree|). It reads the collectives out of the compiled program, and
# a layout that sends more arrays or bytes over a mesh axis than `declared_transfers` allows is a breach.
#
# With libtpu, which needs no TPU, the same programs are compiled for eight v5p chips and judged too.

# %%
text = np.frombuffer(Path(os.__file__).read_bytes(), np.uint8)


def windows(step):
    """Returns the batch of a step, a pure function of its number."""
    starts = np.random.default_rng((0, step)).integers(0, len(text) - LENGTH - 1, ROWS)
    block = text[starts[:, None] + np.arange(LENGTH + 1)].astype(np.int32)
    return {"tokens": block[:, :-1], "targets": block[:, 1:]}


def model_in(dtype):
    """Returns what is verified, in one dtype."""
    config = dataclasses.replace(model, dtype=dtype)
    params = jax.device_get(init(jax.random.key(0), config, dtype))
    rule = Trainer(config, optimizer, 10).make_optimizer().transformation()
    return Model(params, axes(config), lambda p, batch: loss(p, batch, config), rule)


def declared(dtype):
    """Returns the function that says what may cross devices under the ambient mesh and table."""
    return lambda _: declared_transfers(dataclasses.replace(model, dtype=dtype), ROWS, LENGTH)


try:
    eight_v5p = aot.devices(aot.parse_topology("v5p:2x2x2"))
except UsageError as reason:
    eight_v5p = None
    print(f"nothing is compiled for TPUs: {reason}")

batch_axes = dict.fromkeys(("tokens", "targets"), ("batch", "seq_layer"))
rows = []
for dtype, chosen, topology in (("float32", layouts, eight_v5p), ("float64", in_float64, None)):
    if chosen:
        options = VerifyOptions(dtypes=(dtype,), topology=topology)
        rows += verify(model_in, windows, batch_axes, chosen, declared=declared(dtype), options=options)

# %% [markdown]
# Float64 tells rounding from mistakes: an error of 1e-7 that falls to 1e-16 was rounding. XLA for CPUs sums whole
# arrays (all-reduce); XLA for TPUs sums some of them into shares (reduce-scatter), which moves half as much.


# %%
def table(rows):
    """Returns the rows as a Markdown table."""
    lines = ["| layout | in | loss | worst gradient leaf | worst leaf after 3 steps | arrays sent a step | holds |"]
    lines += ["|---|---|---|---|---|---|---|"]
    for row in rows:
        sent = "<br>".join(f"{count} {kind} {over}" for (kind, over), count in sorted(row.kinds.items()))
        errors = ("", "", "")
        if row.worst:
            errors = (f"{row.loss:.0e}", f"{row.gradient:.0e} {row.worst}", f"{row.steps:.0e} {row.worst_step}")
        cells = [str(row.layout), row.dtype, *errors, sent, "NO" if row.breaches else "yes"]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


Markdown(table(rows))

# %% [markdown]
# Errors above, where an error of 0 lies on the bottom and the tolerances are dashed. Below, the bytes of the arrays
# that cross devices, by mesh axis; an array that is summed over two axes counts for each.

# %%
folder = Path(tempfile.mkdtemp(prefix="notebook_02_"))
(folder / "layouts.json").write_text(json.dumps([as_json(row) for row in rows if row.worst]))
plot_layouts(folder / "layouts.json", folder / "layouts.png", TOLERANCE)
Image(folder / "layouts.png", width=720)

# %% [markdown]
# ## A run that moves
#
# A checkpoint holds arrays by name and global shape and nothing of the mesh. `fit` restores the newest one onto the
# ambient mesh and goes on, so moving a run is running it elsewhere. Here it changes layout and number of devices;
# beside it the same run that stays where it began.

# %%
trainer = Trainer(model, optimizer, num_steps=STEPS * len(journey))


def run(layout, until, checkpoints=None):
    """Trains until a step, from the newest checkpoint if there is one; returns the losses of the steps made."""
    losses = []
    hooks = Hooks(checkpoints=checkpoints, check=lambda step, metrics: losses.append(metrics["train/loss"]))
    mesh = make_mesh(layout.mesh, jax.devices()[: layout.num_devices])

    def batch(step):
        return place_rows(lambda part: {name: x[part] for name, x in windows(step).items()}, ROWS)

    with use_mesh(mesh, rules_from(None, layout.name)):
        fit(trainer, jax.random.key(0), batch, Fit(until), hooks)
    return losses


checkpoints = Checkpoints(folder / "checkpoints")
moved = [run(layout, STEPS * (stage + 1), checkpoints) for stage, layout in enumerate(journey)]
saved = checkpoints.steps()
checkpoints.close()
stayed = run(journey[0], trainer.num_steps)

# %%
figure, (above, below) = plt.subplots(2, figsize=(9, 4.8), sharex=True, height_ratios=[3, 1], layout="constrained")
steps = np.arange(1, trainer.num_steps + 1)
above.plot(steps, stayed, lw=6, color="0.85", label=f"stayed on {journey[0]}")
for stage, (layout, losses) in enumerate(zip(journey, moved, strict=True)):
    part = slice(STEPS * stage, STEPS * (stage + 1))
    label = f"{layout}" if layout.num_devices > 1 else "one device"
    above.plot(steps[part], losses, "o-", ms=4, label=label)
difference = np.abs(np.concatenate(moved) / stayed - 1)
below.plot(steps, difference, "k.")
above.set(ylabel="training loss (nats a byte)")
above.legend(frameon=False, fontsize=8)
below.set(xlabel="step", ylabel="relative\ndifference")
for panel in (above, below):
    for stage in range(1, len(journey)):
        panel.axvline(STEPS * stage + 0.5, color="0.7", lw=0.8, ls=":")
    panel.spines[["top", "right"]].set_visible(False)

# %% [markdown]
# ## On paper: the 8B on 64 chips
#
# The estimate lays out a training step, traces it and runs nothing. The six layouts at the size of a TPU v5p:4x4x4
# slice, for Llama 3's 8 billion parameters on 128 rows of 8192 tokens. No compiler is asked here: the bytes of
# parameters and optimizer are exact, those of temporaries an analytic model's. That model does not see a split
# sequence, so plain tensor parallelism stands for `sequence`. The 64 simulated devices stand for the chips.

# %%
pod = {
    "data64": ["mesh.data=64", "mesh.fsdp=1"],
    "fsdp64": ["mesh.fsdp=64"],
    "fsdp64 zero2": ["mesh.fsdp=64", "layout=zero2"],
    "data4.fsdp16.inner4 nested": ["mesh.data=4", "mesh.fsdp=16", "mesh.inner=4", "layout=nested"],
    "fsdp16.tensor4": ["mesh.fsdp=16", "mesh.tensor=4"],
    "data4.fsdp4.tensor4": ["mesh.data=4", "mesh.fsdp=4", "mesh.tensor=4"],
}
llama = ["preset=llama_8b", "model.execution.kernel=splash"]  # the kernel that a TPU takes by itself
chip = aot.CHIPS["v5p"]
estimates = {}
for name, flags in pod.items():
    config = estimate.compose(*llama, *flags)
    job = estimate.make_job(config, jax.devices())
    estimates[name] = aot.estimate(job, effort="none", chip=chip)
    print(f"{name:28} {report.verdict(estimates[name])}")

bars = {name: {part: getattr(found, part) for part in report.PARTS} for name, found in estimates.items()}
plot_memory(bars, chip.hbm_bytes, folder / "memory.png")
Image(folder / "memory.png", width=720)

# %% [markdown]
# One of them in full. Its collectives are estimated from the traced program; the compiler, when asked, merges some and
# sums half as much over `tensor`. Its times are a model, not a measurement: each kernel at an achievable share of the
# chip's published peak, collectives beside them. No predicted time of a TPU has been checked against one.

# %%
config = estimate.compose(*llama, *pod["fsdp16.tensor4"])
report.print_estimate(config, estimate.make_job(config, jax.devices()), estimates["fsdp16.tensor4"], chip)

# %% [markdown]
# ## Compiled for a slice that is not here
#
# With libtpu the verdict is the compiler's: its peak of memory, and its collectives. A small model, so that it takes
# seconds; `python -m experiments.estimate preset=llama_8b topology=v5p:4x4x4 mesh.fsdp=16 mesh.tensor=4` does the same
# for the 8B in under a minute. With a sequence split over `tensor`, the sums of tensor parallelism become
# reduce-scatters and all-gathers.

# %%
small = estimate.compose(
    "preset=tiny", "topology=v5p:2x2x1", "mesh.fsdp=2", "mesh.tensor=2", "layout=sequence", "data.batch_size=64"
)
try:
    chips, effort = aot.devices(aot.parse_topology(small.topology)), "low"
except UsageError as reason:
    chips, effort = jax.devices()[:4], "none"
    print(f"the analytic estimate instead: {reason}")
small_job = estimate.make_job(small, chips)
found = aot.estimate(small_job, effort=effort, chip=chip)
report.print_estimate(small, small_job, found, chip)

# %% [markdown]
# ## The claim
#
# Every layout is the same model and sends what it declares; a run that moves is the same run; and the estimates tell
# what fits from what does not.

# %%
for row in rows:
    assert not row.refused and not row.breaches, (str(row.layout), row.dtype, row.refused, row.breaches)
assert len(rows) == len(layouts) * (1 if eight_v5p is None else 2) + len(in_float64)
assert saved == [STEPS * (len(journey) - 1), STEPS * len(journey)], saved
assert difference.max() <= 1e-5 and stayed[-1] < stayed[0] - 0.3, (difference.max(), stayed)
assert [name for name, found in estimates.items() if not found.fits] == ["data64"]
assert found.fits
if found.compiled:
    assert ("reduce-scatter", "tensor") in {(crossing.kind, crossing.axes) for crossing in found.crossings}
print(f"{len(rows)} rows hold; the run that moved differs by {difference.max():.0e}; all but data64 fit a v5p:4x4x4")
