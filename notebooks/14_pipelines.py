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
# # Pipeline parallelism: one model by every schedule
#
# **The question.** Four devices hold a quarter of the layers each, and a batch passes through them in microbatches,
# forward and back. In which order should a device do its tasks, so that it waits little and keeps little? Ten
# published answers are tables here. Is what they train the same model? Where does the waiting go when the backward
# pass is cut in two? And what does a pipeline send, however it is scheduled?
#
# We draw the tables, count what they cost, run each as one program, and compare every gradient with the model without
# a pipeline. The last cell asserts the answers.
#
# A minute or two on two quiet CPU cores, of which four devices are simulated: times say nothing here, tables do.

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
import os
import re
import tempfile
import time

import jax
import jax.numpy as jnp
import matplotlib.pyplot as plt
import numpy as np

from jaxpar.lm import AttentionConfig, LMConfig, MlpConfig, axes, init
from jaxpar.lm.stages import stages
from jaxpar.mesh import MeshSpec, make_mesh, shard, simulate_devices, use_mesh
from jaxpar.pipeline import (
    Pipelined,
    TaskCosts,
    draw_schedule,
    named_schedule,
    pack_schedule,
    schedule_text,
    simulate_schedule,
)
from jaxpar.pipeline import InTurn
from jaxpar.processes import keep_programs

keep_programs()  # what this notebook compiles is loaded the next time

FAST = bool(os.environ.get("FAST"))
jax.config.update("jax_platforms", "cpu")
simulate_devices(8)
P, M = 4, 8
NAMES = ("gpipe", "1f1b", "interleaved", "breadth_first", "hanayo", "zb_h1", "zb_h2", "zb_v")
NAMES = NAMES[1::4] if FAST else NAMES
TOLERANCE = 1e-5  # float32: gradients of microbatches are added in another order
began = time.perf_counter()

# %% [markdown]
# ## A schedule is a table
#
# F is the forward pass of a chunk of layers, D the backward pass, a dot waits. `zb_h1` cuts D in two: B, the gradient
# of the input, for which the device before waits, and W, that of the weights, for which nobody does. So W goes where
# there were dots.

# %%
for name in ("1f1b", "zb_h1"):
    print(f"{name}\n{schedule_text(named_schedule(name, P, M))}\n")

# %% [markdown]
# ## What each costs
#
# F = B = W = 1 for the layers of a device. Schedules with two chunks a device have tasks of half the time, and keep
# half as much of a microbatch in each. Left, how long a step takes, of which the dark part is work; right, how many
# microbatches of all its layers the fullest device keeps.


# %%
def costs_of(schedule):
    """Of a chunk, of which there are one or two a device."""
    share = P / len(schedule.placement)
    return TaskCosts(F=share, B=share, W=share)


schedules = {name: named_schedule(name, P, M) for name in NAMES}
timings = {name: simulate_schedule(schedule, costs_of(schedule)) for name, schedule in schedules.items()}
kept = {name: max(timings[name].held) * P / len(schedule.placement) for name, schedule in schedules.items()}

figure, (left, right) = plt.subplots(1, 2, figsize=(12, 3.2), layout="constrained", sharey=True)
left.barh(NAMES, [timing.makespan for timing in timings.values()], color="lightgray")
left.barh(NAMES, [np.mean(timing.work) for timing in timings.values()], color="tab:blue")
for row, timing in enumerate(timings.values()):
    left.text(timing.makespan + 0.2, row, f"{timing.idle_fraction:.1%} idle", va="center", fontsize=8)
left.set(xlabel="time of a step", xlim=(0, 40))
left.invert_yaxis()
right.barh(NAMES, list(kept.values()), color="tab:orange")
right.set(xlabel="microbatches kept")
plt.show()

# %%
with tempfile.TemporaryDirectory() as folder:
    for name in dict.fromkeys((*NAMES, "zb_v")):
        out = Path(folder) / f"{name}.png"
        draw_schedule(named_schedule(name, P, M), out, costs_of(named_schedule(name, P, M)))
        figure, axis = plt.subplots(figsize=(12, 3.4), layout="constrained")
        axis.imshow(plt.imread(out))
        axis.axis("off")
        plt.show()

# %% [markdown]
# ## One program runs any of them
#
# The table as integers: what each device does in a tick, which slots it reads and writes, and where it puts what
# comes. The program is a loop over ticks, in each a task, and two messages in every tick, to the next device and
# to the one before. Within a stage two devices split heads, mlp and vocabulary, as they do without a pipeline.

# %%
CONFIG = LMConfig(
    vocab_size=64,
    num_layers=8,
    embed_dim=32,
    attention=AttentionConfig(num_heads=4),
    mlp=MlpConfig(dim=64),
    dtype="float32",
)
params, pieces = init(jax.random.key(0), CONFIG), stages(CONFIG)
tokens = jnp.asarray(np.random.default_rng(0).integers(0, 64, (2 * M, 17)))
batch = {"tokens": tokens[:, :-1], "targets": tokens[:, 1:]}
(want, _), gradient = jax.jit(lambda params, batch: InTurn()(pieces, params, batch, None, M))(params, batch)

off, messages, ticks = {}, {}, {}
with use_mesh(make_mesh(MeshSpec(stage=P, tensor=2))):
    placed = shard(params, axes(CONFIG))
    for name, schedule in schedules.items():
        run = jax.jit(lambda params, batch, s=schedule: Pipelined(s)(pieces, params, batch, None, M))
        program = run.lower(placed, batch).compile()
        (got, _), grads = program(placed, batch)
        pairs = zip(*map(jax.tree.leaves, jax.device_get((grads, gradient))), strict=True)
        errors = [np.abs(a - b).max() / np.abs(b).max() for a, b in pairs]
        off[name] = np.max([abs(float(got - want)), *errors])
        blocks = re.split(r"\n(?=%|ENTRY)", program.as_text())
        (body,) = [block for block in blocks if "collective-permute" in block and not block.startswith("ENTRY")]
        messages[name] = len(re.findall(r" collective-permute(?:-start)?\(", body))
        ticks[name] = len(pack_schedule(schedule).rows)
        print(
            f"{name:14} {ticks[name]:3} ticks, {messages[name]} messages a tick, loss and gradients {off[name]:.0e} off"
        )

# %% [markdown]
# ## The claim
#
# Every schedule trains the model that it is a schedule of; the program of each sends two messages a tick, whatever it
# does; and cutting the backward pass in two takes the waiting to a third of that of `1f1b`, in the same memory.

# %%
assert all(error < TOLERANCE for error in off.values()) and set(messages.values()) == {2}
plain, cut = (simulate_schedule(named_schedule(name, P, M)) for name in ("1f1b", "zb_h1"))
assert sum(cut.idle) <= sum(plain.idle) / 3 + 1e-9 and max(cut.held) == max(plain.held)
print(f"{len(off)} schedules, worst {max(off.values()):.0e} off; {time.perf_counter() - began:.0f} s")
