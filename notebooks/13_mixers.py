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
# # Mixers with a matrix state (linear attention, delta rule)
#
# **The question.** A head can keep a matrix in place of all earlier tokens: each token lets it decay, writes a key and
# a value, and reads it with a query. Step by step that is a recurrence; in chunks it is a few products of matrices. Are
# the two really the same, for each of the eight layers that papers have made of it, and with gates that forget all at
# once? And does it matter, where a layer must recall, what it writes and how it forgets?
#
# We run every layer both ways, look at what exponents do under strong gates, store pairs by hand, and train two layers
# on multi-query associative recall. The last cell asserts the answers.
#
# Two minutes on two quiet CPU cores, most of them for compiling.

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

import jax
import jax.numpy as jnp
import matplotlib.pyplot as plt
import numpy as np
from jaxpar.commands.app.sequences.memory_tasks import BLANK, KEYS
from jaxpar.commands.app.sequences.series import SeriesConfig, open_task

from jaxpar.loop import run
from jaxpar.nn import SequenceNetwork, SequenceTrainer
from jaxpar.nn import init_leaves
from jaxpar.nn import DECODING, Context
from jaxpar.nn.mixers import LAYERS, MatrixState, delta_rule, layer_of, linear_attention
from jaxpar.nn.mixers import gates_of
from jaxpar.processes import keep_programs

keep_programs()  # what this notebook compiles is loaded the next time

FAST = bool(os.environ.get("FAST"))
jax.config.update("jax_platforms", "cpu")
B, T, D, H = 2, 21, 16, 2  # rows, tokens, width, heads
STEPS = 30 if FAST else 300
TOLERANCE = 1e-4  # float32: sums are taken in another order, and those of mlstm are divided by one that may be small
print(", ".join(LAYERS))

# %% [markdown]
# ## Chunk = step, for every layer
#
# Whole rows in chunks of 8 tokens, which 21 is no multiple of, beside the same layer given one token at a time with the
# state that it returned.


# %%
def both_ways(name):
    """The largest difference of an output between chunks and steps, over the largest output; and the state's size."""
    mixer = MatrixState(layer_of(name, D, H), chunk=8)
    params = init_leaves(jax.random.key(0), mixer.leaves(D, D**-0.5, D**-0.5))
    x = jax.random.normal(jax.random.key(1), (B, T, D))

    def apply(x, places, state):
        context = Context(jnp.broadcast_to(places[None], x.shape[:2]), rules=DECODING)
        y, state, _ = mixer.apply(params, x, state, context)
        return y, state

    def step(state, now):
        x, place = now
        y, state = apply(x[:, None], place[None], state)
        return state, y[:, 0]

    empty = mixer.init_cache(B, 0, D, jnp.float32)
    whole, last = jax.jit(apply)(x, jnp.arange(T), empty)
    state, steps = jax.jit(lambda x: jax.lax.scan(step, empty, (jnp.swapaxes(x, 0, 1), jnp.arange(T))))(x)
    apart = np.abs(np.asarray(jnp.swapaxes(steps, 0, 1) - whole)).max() / np.abs(np.asarray(whole)).max()
    ends = zip(jax.tree.leaves(jax.device_get(last)), jax.tree.leaves(jax.device_get(state)), strict=True)
    errors = [apart] + [np.abs(a - b).max() / (np.abs(a).max() + 1e-6) for a, b in ends]
    return np.max(errors), sum(leaf.size for leaf in jax.tree.leaves(last)) // B


apart = {}
for name in LAYERS:
    apart[name], size = both_ways(name)
    print(f"{name:12} apart by {apart[name]:.1e}; a row's state has {size} numbers, whatever T is")

# %% [markdown]
# ## Sums of neighbours
#
# Between token j and a later one i of a chunk the state decays by the product of the gates between them. As a quotient
# of two running products it is wrong as soon as one gate forgets everything: after that token all is divided by 0.
# `gates_of` adds up logarithms of neighbours only, by merging blocks of 1, 2, 4, ... tokens.

# %%
log_decay = -0.05 * jnp.ones(32)
log_decay = log_decay.at[12].set(-120.0)  # one gate that forgets
exact = np.array(
    [[np.exp(np.float64(log_decay)[j + 1 : i + 1].sum()) if j <= i else 0 for j in range(32)] for i in range(32)]
)
merged = np.asarray(jnp.exp(gates_of(log_decay)[1]))
product = np.exp(np.cumsum(np.asarray(log_decay), dtype=np.float32))
with np.errstate(all="ignore"):
    quotient = np.tril(product[:, None] / product[None])
    wrong = {name: np.abs(got - exact).max() for name, got in (("merged", merged), ("quotient", quotient))}

figure, panels = plt.subplots(1, 3, figsize=(12, 3.4), layout="constrained")
for panel, (title, values) in zip(
    panels, (("exact, in float64", exact), ("merged blocks", merged), ("quotient of products", quotient)), strict=True
):
    image = panel.imshow(np.where(np.isfinite(values), values, np.nan), vmin=0, vmax=1, cmap="viridis")
    panel.set(title=title, xlabel="token j", ylabel="token i")
figure.colorbar(image, ax=panels, label="what is left of token j at token i")
plt.show()
for name, error in wrong.items():
    print(f"{name:10} largest error {error:.1e}")

# %% [markdown]
# ## Recall: overwrite, or add up
#
# Associative recall where a key may come again with a new value, and the newest one is right. No training: keys and
# values are unit vectors, written where the value stands. The delta rule replaces what a key had stored and reads
# exactly what is right; sums hold all values of a key, and a fixed decay weighs them by age, the same for all keys.

# %%
task = open_task(SeriesConfig(task="recall", length=1, symbols=12, batch_size=256), seed=0)
batch = task.train(0)
symbols = batch["inputs"].argmax(-1)
unit = jnp.eye(2 * KEYS + 1)
is_value = (symbols >= KEYS) & (symbols < BLANK)
key_before = np.concatenate([symbols[:, :1], symbols[:, :-1]], 1)
q, k, v = (x[:, :, None] for x in (unit[symbols], unit[key_before] * is_value[..., None], unit[symbols]))
decay = jnp.full(symbols.shape, np.log1p(-(2.0**-5)))[..., None]
reads = {
    "delta rule": delta_rule(q, k, v, jnp.ones_like(decay))[0],
    "sums": linear_attention(q, k, v)[0],
    "fixed decay": linear_attention(q, k, v, decay)[0],
}
wanted = np.eye(KEYS)[batch["targets"][:, -1]]
off = {name: float(np.abs(np.asarray(out)[:, -1, 0, KEYS:BLANK] - wanted).max(1).mean()) for name, out in reads.items()}
for name, error in off.items():
    print(f"{name:12} mean error of what is read {error:.1e}")

# %% [markdown]
# ## And learned
#
# Multi-query associative recall: four keys and their values, and then each key again, at which its value is asked for.
# `gated_delta` has a convolution over four tokens, by which a value meets its key, and replaces what a key had stored;
# `retention` has neither. Both are two layers of 32 units. A layer that only knows which four values were shown is
# right in a quarter of the cases. Such tasks are learned in a jump, whose moment depends on much: with the flags below
# `gated_delta` came to 0.90 and `retention` to 0.36, without weight decay to 0.32 and 0.36, and with 8 places in place
# of 16 and 800 steps to 0.45 and 0.76. So nothing is asserted of this picture, and one run of a task is no verdict.

# %%
task = open_task(SeriesConfig(task="mqar", length=16, symbols=4, batch_size=64), seed=0)
batches = jax.tree.map(lambda *rows: jnp.asarray(np.stack(rows)), *(task.train(step) for step in range(STEPS)))
print(task.text)


def learn(name):
    """Returns the share of right answers at every step, each on questions that were not seen before."""
    network = SequenceNetwork(task.inputs, task.outputs, name, size=32, layers=2, heads=2)
    options = dict(learning_rate=1e-2, warmup_steps=20, weight_decay=0.01)
    trainer = SequenceTrainer(network, dataclasses.replace(SequenceTrainer.optimizer, **options), STEPS)
    state = jax.jit(trainer.init)(jax.random.key(0))
    _, info = jax.jit(lambda state: run(trainer, jax.random.key(1), state, batches, STEPS))(state)
    return np.asarray(info["accuracy"])


right = {name: learn(name) for name in ("gated_delta", "retention")}

figure, panel = plt.subplots(figsize=(7, 3.4), layout="constrained")
for name, values in right.items():
    smooth = np.convolve(values, np.full(15, 1 / 15), "valid")
    panel.plot(np.arange(len(smooth)) + 15, smooth, label=name)
panel.axhline(1 / task.outputs, color="black", lw=0.8, ls="--", label="guessing")
panel.set(xlabel="step", ylabel="share of right answers", ylim=(0, 1.02))
panel.legend(frameon=False)
plt.show()
for name, values in right.items():
    print(f"{name:12} {values[-15:].mean():.3f} right at the end")

# %% [markdown]
# One size, one seed and few steps: no verdict on either layer. More of the kind:
# `python -m experiments.rnn data.task=recall model.cell=gla`, where keys come again with other values;
# `data.task=s5`, where a state must be tracked; `python -m experiments.compare`, which trains mixers for equal seconds.

# %%
assert all(error < TOLERANCE for error in apart.values()) and set(apart) == set(LAYERS)
assert wrong["merged"] < 1e-6 and not wrong["quotient"] < 1e-2  # it is not even a number
assert off["delta rule"] < 1e-5 and off["sums"] > 0.1 and off["fixed decay"] > 0.1
print("chunks are steps for every layer; the delta rule recalls exactly what sums and fixed decays mix up")
