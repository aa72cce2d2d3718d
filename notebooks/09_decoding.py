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
# # Speculative decoding: several tokens from one pass
#
# **The question.** A language model is asked for one token at a time, and each time the machine reads all weights. If
# somebody guesses the next tokens, one pass can look at all guesses together and keep those that are right. Who can
# guess: a copyist, the model's own older choices, a smaller model? How many tokens does a pass give then? And is the
# text, drawn at random at that, the very same?
#
# We train a small model and a smaller one on Python's own source code, draw texts with each kind of guess, and look at
# what every pass kept. Then three samples share a prompt. The last cell asserts the answers.
#
# Three minutes on two quiet CPU cores. (There a pass over nine tokens costs more than one over a single token; what is
# gained in time is an accelerator's, see `docs/benchmarks.md`. Passes are the same everywhere.)

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
import argparse
import collections
import dataclasses
import inspect
import os
import textwrap
import time
import unittest.mock

import jax
import jax.numpy as jnp
import matplotlib.pyplot as plt
import numpy as np

from jaxpar.decode import CopyDraft, Decoding, JacobiDraft, LookaheadDraft, ModelDraft, NoDraft, Sampling
from jaxpar.lm import AttentionConfig, Decoder, LMConfig, MlpConfig, OptimizerConfig, Trainer, generate
from jaxpar.loop import Fit, fit
from jaxpar.processes import keep_programs

keep_programs()  # what this notebook compiles is loaded the next time

FAST = bool(os.environ.get("FAST"))
STEPS, NEW, ROWS = (30, 24, 2) if FAST else (300, 120, 8)

# %% [markdown]
# ## Two models
#
# Bytes of three modules of the standard library; the last tenth is held out, and prompts come from there. Float32, so
# that rounding does not decide between tokens.

# %%
modules = (argparse, textwrap, unittest.mock)
text = np.frombuffer("".join(map(inspect.getsource, modules)).encode(), np.uint8).astype(np.int32)
told, held_out = np.split(text, [len(text) * 9 // 10])
model = LMConfig(
    num_layers=2,
    embed_dim=128,
    attention=AttentionConfig(num_heads=4),
    mlp=MlpConfig(dim=256),
    dtype="float32",
)
small = LMConfig(
    num_layers=1,
    embed_dim=48,
    attention=AttentionConfig(num_heads=2),
    mlp=MlpConfig(dim=96),
    dtype="float32",
)


def batch(step):
    """Windows of 96 bytes."""
    starts = np.random.default_rng(step).integers(0, len(told) - 97, 16)
    rows = told[starts[:, None] + np.arange(97)]
    return {"tokens": rows[:, :-1], "targets": rows[:, 1:]}


params = {}
for name, config in {"model": model, "small": small}.items():
    began = time.perf_counter()
    trainer = Trainer(config, OptimizerConfig(learning_rate=4e-3, warmup_steps=20), num_steps=STEPS)
    result = fit(trainer, jax.random.key(0), batch, Fit(num_steps=STEPS))
    params[name] = result.state.params
    print(f"{name}: loss {result.metrics['train/loss']:.3f} nats a byte, {time.perf_counter() - began:.0f} s")

# %% [markdown]
# ## Five ways to guess, and none
#
# `passes` counts how often the model ran for a row after it had read the prompt. The token that is drawn at a place is
# the argmax of scores and of noise that belongs to the place, known beforehand; a guess is kept where it is that token.
#
# A draft is any frozen object with four members (`jaxpar.decode.draft` has an example). So one can look over another's
# shoulder: this one passes all on, and writes down how many tokens each pass gave, the guesses that were kept and the
# model's own after them.

# %%
kept = collections.defaultdict(list)


@dataclasses.dataclass(frozen=True)
class Watched:
    """Another draft, watched."""

    name: str
    draft: object

    tree = property(lambda self: self.draft.tree)

    def init(self, params, prompt, lengths, room):
        """Is the other's."""
        return self.draft.init(params, prompt, lengths, room)

    def propose(self, params, state, text, lengths, decide):
        """Is the other's."""
        return self.draft.propose(params, state, text, lengths, decide)

    def update(self, state, tokens, chosen, accepted):
        """Is the other's, once it has written down what was kept."""
        jax.debug.callback(lambda count: kept[self.name].append(np.asarray(count)), accepted.count, ordered=True)
        return self.draft.update(state, tokens, chosen, accepted)


starts = np.random.default_rng(7).integers(0, len(held_out) - 64, ROWS)
prompts = jnp.asarray(held_out[starts[:, None] + np.arange(64)])
DRAFTS = {
    "none": NoDraft(),
    "Jacobi": JacobiDraft(8),
    "Lookahead": LookaheadDraft(),
    "copy": CopyDraft(8),
    "model": ModelDraft(Decoder(small), 4),
}
TEMPERATURES = {"greedy": 0.0, "temperature 0.8": 0.8}
draw = jax.jit(generate, static_argnums=(3, 4), static_argnames="decoding")


def texts_of(draft, temperature, **options):
    """Draws the prompts' texts; a smaller model gets its parameters, others heed none."""
    sampling = Sampling(NEW, temperature=temperature)
    decoding = Decoding(draft=draft, **options)
    given = {"decoding": decoding, "draft_params": params["small"]}
    return draw(jax.random.key(1), params["model"], prompts, model, sampling, **given)


found = {}
for how, temperature in TEMPERATURES.items():
    for name, draft in DRAFTS.items():
        found[how, name] = texts_of(Watched(f"{how}, {name}", draft), temperature)
jax.effects_barrier()
same = {key: bool((out.tokens == found[key[0], "none"].tokens).all()) for key, out in found.items()}
gain = {key: (NEW - 1) / float(out.passes.mean()) for key, out in found.items()}
print(f"{'tokens a pass':16}" + "".join(f"{name:>11}" for name in DRAFTS))
for how in TEMPERATURES:
    print(f"{how:16}" + "".join(f"{gain[how, name]:11.2f}" for name in DRAFTS))
print("whoever guesses, the same texts:", all(same.values()))

# %%
figure, axis = plt.subplots(figsize=(8, 3), layout="constrained")
for number, (how, colour) in enumerate(zip(TEMPERATURES, ("tab:blue", "tab:orange"), strict=True)):
    places = np.arange(len(DRAFTS)) + 0.4 * number - 0.2
    bars = axis.bar(places, [gain[how, name] for name in DRAFTS], 0.38, color=colour, label=how)
    axis.bar_label(bars, fmt="%.2f", fontsize=8)
axis.axhline(1, color="gray", lw=0.8, ls=":")
axis.margins(y=0.12)
axis.set(
    xticks=range(len(DRAFTS)), xticklabels=list(DRAFTS), ylabel="tokens a pass", title="the same texts, found faster"
)
axis.legend(fontsize=8)
plt.show()

# %% [markdown]
# ## What each pass kept
#
# Averages hide how it comes about: the copyist is useless for most passes, and now and then has a whole line right.

# %%
drawn = {name: np.concatenate(kept[f"temperature 0.8, {name}"]) for name in DRAFTS if name != "none"}
figure, axes = plt.subplots(1, 4, figsize=(11, 2.6), sharey=True, layout="constrained")
for axis, (name, counts) in zip(axes, drawn.items(), strict=True):
    counts = counts[counts > 0]  # rows that have ended keep nothing
    axis.hist(counts, bins=np.arange(0.5, 10.5), weights=np.full(len(counts), 1 / len(counts)), rwidth=0.85)
    axis.set(xticks=range(1, 10), xlabel="tokens from one pass", title=f"{name}: {counts.mean():.2f} on average")
axes[0].set_ylabel("share of the passes")
plt.show()

# %% [markdown]
# One text, with a box around what one pass of the copyist gave: indents and names that stood there before come whole,
# new words letter by letter.

# %%
row = int(np.argmin(found["temperature 0.8", "copy"].passes))
counts = [
    1,
    *(int(count[row]) for count in kept["temperature 0.8, copy"] if count[row]),
]  # the first comes with the prompt
new = bytes(np.asarray(found["temperature 0.8", "copy"].tokens)[row, 64:].tolist()).decode("latin-1")
figure, axis = plt.subplots(figsize=(10, 1.3), layout="constrained")
column = line = place = 0
for number, count in enumerate(counts):
    for letter in new[place : place + count]:
        colour = ("#dceaf7", "#fdead7")[number % 2] if count > 1 else "white"
        axis.add_patch(plt.Rectangle((column, -line), 1, 0.9, facecolor=colour, edgecolor="none"))
        shown = {"\n": "⏎", " ": "·"}.get(letter, letter)
        axis.text(column + 0.5, 0.45 - line, shown, ha="center", va="center", family="monospace", fontsize=9)
        column, line = (0, line + 1) if column == 59 else (column + 1, line)
    place += count
axis.set(xlim=(0, 60), ylim=(-((len(new) - 1) // 60) - 0.2, 1))
axis.axis("off")
axis.set_title(f"{len(new)} bytes in {len(counts) - 1} passes; a colour is one pass that gave several", fontsize=10)
plt.show()

# %% [markdown]
# ## Three samples of a prompt
#
# They share the prompt: it is read once, stored once, and read once in each pass for all three. Sample 2 is the same
# whether three are drawn or five, with guesses or without; and two rows of one prompt and one seed are one text.

# %%
three = {name: texts_of(DRAFTS[name], 0.8, num_samples=3).tokens.reshape(ROWS, 3, -1) for name in ("none", "copy")}
five = texts_of(NoDraft(), 0.8, num_samples=5).tokens.reshape(ROWS, 5, -1)
shared = bool((three["none"] == three["copy"]).all() and (three["none"] == five[:, :3]).all())
begins = bytes(np.asarray(prompts)[0].tolist()).decode("latin-1")
print(f"... {begins[-30:]!r} and then")
for number, sample in enumerate(np.asarray(three["none"])[0]):
    print(f"  sample {number}: {bytes(sample[64:].tolist()).decode('latin-1')[:70]!r}")
twice = draw(jax.random.key(1), params["model"], prompts[jnp.array([1, 0, 1])], model, Sampling(NEW, temperature=0.8))
moved = bool((twice.tokens[0] == twice.tokens[2]).all())
stayed = bool((twice.tokens[1] == found["temperature 0.8", "none"].tokens[0]).all())
print(f"drafts and more samples change no sample: {shared}; a row's place changes no row: {moved and stayed}")

# %% [markdown]
# ## The other rule
#
# Rejection sampling keeps the law of the texts and not the texts. It may accept a little more of a model's guesses: the
# share 1 - d, with d the total variation between the two laws, where shared noise is sure of (1 - d) / (1 + d).

# %%
rejected = texts_of(DRAFTS["model"], 0.8, rule="rejection")
by_rejection = (NEW - 1) / float(rejected.passes.mean())
print(f"tokens a pass: {gain['temperature 0.8', 'model']:.2f} coupled, {by_rejection:.2f} by rejection")
print("the same texts:", bool((rejected.tokens == found["temperature 0.8", "none"].tokens).all()))

# %% [markdown]
# ## The claim
#
# Whoever guesses, greedy or drawn at random, alone or in company, the tokens are those of one token at a time; and
# there are fewer passes.

# %%
assert all(same.values()) and shared and moved and stayed
assert all(int(out.passes.max()) <= NEW - 1 for out in found.values())
if not FAST:
    assert gain["greedy", "copy"] > 1.5 and gain["temperature 0.8", "model"] > 1.5
print(
    f"{len(found)} ways, {ROWS} texts of {NEW} tokens each, all the same; up to {max(gain.values()):.1f} tokens a pass."
)
