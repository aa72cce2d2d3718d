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
# # A language model trained on a mesh, sampled and resumed
#
# **The question.** A transformer is cut over eight devices three ways at once: its batch, its parameters and its
# heads. Is it still the same model? And if the run is ended half-way and started again, is it still the same run?
#
# We train a small Llama on the source code of Python's standard library, draw where its arrays lie, compare the
# sharded gradient with that of one device, sample from it, and resume it. The last cell asserts both answers.
#
# About three minutes on two CPU cores; under one with `FAST=1` in the environment. With no accelerator, eight CPU
# devices are simulated.

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
import os

# A GPU adds in another order each time unless it is told not to; the last cell compares bits.
os.environ.setdefault("XLA_FLAGS", "--xla_gpu_deterministic_ops=true")

import jax
import matplotlib.pyplot as plt
import numpy as np
from IPython.display import Image
from matplotlib.patches import Rectangle

from jaxpar.commands import lm
from jaxpar.commands.app import runner
from jaxpar.io import read_jsonl
from jaxpar.lm import axes, loss
from jaxpar.lm.text import Windows, open_corpus
from jaxpar.mesh import MeshSpec, make_mesh, place_rows, shard, use_mesh
from jaxpar.processes import keep_programs

keep_programs()  # what this notebook compiles is loaded the next time

# %% [markdown]
# ## The run
#
# `lm.compose` takes the flags of the command line, so these are the objects that
# `python -m experiments.lm train.steps=...` would make. This cell alone knows of sizes and of `FAST`.
#
# The learning rate falls until the last step of the *whole* run. A run that shall be extended later has to say now
# where that is (`optimizer.decay_steps`), or else its schedule would be made for the shorter run.

# %%
FAST = os.environ.get("FAST") == "1"
HALF, WHOLE = (20, 40) if FAST else (100, 200)
flags = [f"optimizer.decay_steps={WHOLE}", f"train.eval_every={HALF}", f"train.save_every={HALF}"]
if FAST:
    flags += ["model.num_layers=2", "model.mlp.dim=256", "data.seq_len=64"]
    flags += ["optimizer.warmup_steps=5", "train.eval_batches=2", "sampling.max_new_tokens=80"]

config = lm.compose(*flags, f"train.steps={HALF}")
longer = lm.compose(*flags, f"train.steps={WHOLE}")
config.model

# %% [markdown]
# `open_devices` finds or simulates the devices, makes the mesh and makes it ambient; `train` is what the command line
# calls under it. On eight simulated devices the mesh is data=2, fsdp=2, tensor=2.

# %%
with runner.open_devices(config) as mesh:
    folder = runner.fresh_folder(Path("runs/notebook_01"), resume=False)
    first_half = lm.train(config, folder)
dict(mesh.shape)

# %%
Image(folder / "plots" / "loss.png", width=640)

# %% [markdown]
# ## Where the arrays lie
#
# Every parameter is declared once, as (shape, logical axes, initialiser), and one table maps logical axes to mesh
# axes. Each rectangle below is a block of the array; the numbers are the devices that hold it. A block with several
# numbers is replicated: over `data` in the case of weights, over `tensor` in the case of tokens.


# %%
def draw_blocks(axis, name, array, dims):
    """Draws which devices hold which block of two dimensions of an array."""
    holders = {}
    for device, index in array.sharding.devices_indices_map(array.shape).items():
        bounds = tuple(index[dim].indices(array.shape[dim])[:2] for dim in dims)
        holders.setdefault(bounds, []).append(device.id)
    for number, (((top, bottom), (left, right)), devices) in enumerate(sorted(holders.items())):
        colour = plt.cm.Set2(number % 8)
        axis.add_patch(Rectangle((left, top), right - left, bottom - top, facecolor=colour, edgecolor="white", lw=2))
        axis.text((left + right) / 2, (top + bottom) / 2, " ".join(map(str, devices)), ha="center", va="center")
    rows, columns = (array.shape[dim] for dim in dims)
    axis.set(xlim=(0, columns), ylim=(rows, 0), xticks=[0, columns], yticks=[0, rows], title=name)


params = first_half.state.params
corpus = open_corpus(config.data, folder / "data")
windows = Windows(corpus.train, config.data.seq_len, config.data.batch_size, config.seed)
with use_mesh(mesh):
    batch = place_rows(lambda rows: windows(0, rows), config.data.batch_size)
figure, panels = plt.subplots(1, 4, figsize=(11, 2.8), layout="constrained")
draw_blocks(panels[0], "tokens [batch, seq]", batch["tokens"], (0, 1))
draw_blocks(panels[1], "embedding [vocab, embed]", params["embedding"], (0, 1))
draw_blocks(panels[2], "wq [embed, heads]", params["layers"]["wq"], (1, 2))
draw_blocks(panels[3], "w_down [mlp, embed]", params["layers"]["w_down"], (1, 2))

# %% [markdown]
# ## The same model
#
# Loss and gradient of the same parameters on the same batch: once on one device, which is the plain sequential form,
# once over (data, fsdp, tensor) = (2, 2, 2). No line of the model knows which of the two it is in. Both run on the
# CPU, where a float32 product is a float32 product; a GPU may round it to TF32.
#
# The error of a leaf is |difference| / max(|leaf|, 0.001 |whole gradient|), since a leaf whose true gradient is zero
# holds nothing but rounding.

# %%
on_host, rows = jax.device_get(params), windows(0)
model = dataclasses.replace(config.model, dtype="float32")


def loss_and_gradient(spec, num_devices):
    """Computes both on the first CPU devices, and brings them home."""
    with use_mesh(make_mesh(spec, jax.devices("cpu")[:num_devices])):
        laid_out = shard(on_host, axes(model))
        placed = place_rows(lambda part: {name: x[part] for name, x in rows.items()}, len(rows["tokens"]))
        return jax.device_get(jax.jit(jax.value_and_grad(loss), static_argnums=2)(laid_out, placed, model))


one_loss, one_grad = loss_and_gradient(MeshSpec(), 1)
cut_loss, cut_grad = loss_and_gradient(MeshSpec(data=2, fsdp=2, tensor=2), 8)
norm = np.linalg.norm
whole = norm([norm(leaf) for leaf in jax.tree.leaves(one_grad)])
errors = jax.tree.map(lambda a, b: norm(a - b) / max(norm(b), 1e-3 * whole), cut_grad, one_grad)
worst = np.max(jax.tree.leaves(errors))
print(f"loss on one device {one_loss:.7f}, on eight {cut_loss:.7f}; worst leaf of the gradient differs by {worst:.1e}")

# %% [markdown]
# ## A sample
#
# Prompt and new tokens share one key-value cache, split over rows and heads; the whole loop is one `while_loop` on
# the devices. On the command line: `python -m experiments.lm mode=sample run=FOLDER prompt="def "`.

# %%
with use_mesh(mesh):
    print(lm.draw_sample(config, params, corpus.tokenizer, "def "))

# %% [markdown]
# ## The same run
#
# Calling `train` again in the same folder goes on from its newest checkpoint. Nothing but the state was saved: the
# batch is a pure function of (seed, step), the key of a step is `fold_in(root, step)`. Beside it, the same number of
# steps without a break, in a folder of its own.

# %%
other_folder = runner.fresh_folder(Path("runs/notebook_01_unbroken"), resume=False)
with runner.open_devices(longer):
    resumed = lm.train(longer, folder)
    unbroken = lm.train(longer, other_folder)

# %%
broken_losses, unbroken_losses = (
    [row["train/loss"] for row in read_jsonl(path / "metrics.jsonl") if "train/loss" in row]
    for path in (folder, other_folder)
)
figure, panel = plt.subplots(figsize=(6, 3), layout="constrained")
panel.plot(range(1, WHOLE + 1), unbroken_losses, lw=5, alpha=0.3, label="without a break")
panel.plot(range(1, WHOLE + 1), broken_losses, lw=1, label="stopped and resumed")
panel.axvline(HALF, color="gray", ls=":")
panel.set(xlabel="step", ylabel="training loss (nats a byte)")
_ = panel.legend(frameon=False)

# %% [markdown]
# ## The claim
#
# The layout is no part of the result beyond the order of sums, and a break is no part of it at all.

# %%
assert abs(cut_loss - one_loss) <= 1e-5 * abs(one_loss) and worst <= 1e-5, "a layout changed the model"
assert broken_losses == unbroken_losses and len(broken_losses) == WHOLE, "resuming changed the run"
jax.tree.map(np.testing.assert_array_equal, *(jax.device_get(run.state.params) for run in (resumed, unbroken)))
assert unbroken_losses[-1] < unbroken_losses[0] - 0.3, "the model did not learn"
print("sharded equals one device to 1e-5; the resumed run equals the unbroken one bit for bit")
