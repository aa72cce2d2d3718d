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
# # Fine-tuning with adapters (LoRA): a model learns to shout
#
# **The question.** Somebody hands you a language model as a folder. You want it to answer in another voice, and have
# a few hundred examples of that, and no wish to train, store and ship all of its weights again. How little can be
# trained beside it? Does it learn the voice, and do its own weights stay as they were? And can the result leave as it
# came, as files that others read?
#
# We make such a folder (a small model of Python's source code), teach it by LoRA on JSONL to write what functions do in
# capitals, draw from it with its adapters beside it and with them merged, and read back what was written. The last cell
# asserts the answers.
#
# About a minute on two quiet CPU cores.

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
import ast
import inspect
import json
import os
import tempfile
import textwrap
import unittest.mock

import jax
import jax.numpy as jnp
import matplotlib.pyplot as plt
import numpy as np

from jaxpar.commands import generate, lm
from jaxpar.io import read_jsonl
from jaxpar.lm import from_hf, from_peft, loss, merge_adapters, num_adapted, num_params, with_adapters
from jaxpar.lm.text import load_tokenizer
from jaxpar.mesh import MeshSpec, make_mesh, simulate_devices, use_mesh
from jaxpar.processes import keep_programs

keep_programs()  # what this notebook compiles is loaded the next time

FAST = bool(os.environ.get("FAST"))
BASE_STEPS, STEPS, ASKED = (80, 100, 4) if FAST else (150, 150, 8)

work = Path(tempfile.mkdtemp())
simulate_devices(1)  # where there is no accelerator, as `experiments.generate` does
one = make_mesh(MeshSpec(data=1), jax.devices()[:1])


def command(*flags):
    """Runs what the command line of `experiments.lm` would, on one device."""
    config = lm.compose(f"hydra.run.dir={work}", "sampling.max_new_tokens=8", *flags)
    run = {"train": lm.train, "export": lm.export}[config.mode]
    with use_mesh(one):
        return run(config, work / config.name)


# %% [markdown]
# ## A model, as a folder
#
# Three modules of the standard library as text, 400 symbols learned from them, two layers. What is exported is a
# folder as any other: `config.json`, `model.safetensors`, `tokenizer.json`. If you have one of your own, of Llama,
# Qwen, Gemma, Mistral, Phi-3 or GPT-2, put its name in place of `base`.

# %%
(work / "python.txt").write_text("".join(map(inspect.getsource, (argparse, textwrap, unittest.mock))))
small = ("model.num_layers=2", "model.embed_dim=96", "model.mlp.dim=256", "data.seq_len=96", "train.eval_every=0")
command(
    "name=base", f"data.path={work / 'python.txt'}", "data.tokenizer=bpe:400", "data.split=tail:0.1", *small,
    f"train.steps={BASE_STEPS}", "train.save_every=0",
)  # fmt: skip
base = work / "python-model"
command("mode=export", f"run={work / 'base'}", f"out={base}", "checkpoint=newest")
model, params = from_hf(base, dtype="float32")
sorted(path.name for path in base.iterdir())

# %% [markdown]
# ## Examples, as JSONL
#
# Every function of some other modules that says what it does: the prompt is its head, the completion the first line of
# what it says, in capitals. Of a line of `prompt` and `completion` only the completion counts in the loss. Some heads
# are held out, to be asked later.

# %%
modules = "ast base64 bisect calendar cmd copy csv dis enum functools glob heapq inspect io locale logging optparse os"
modules += " pathlib pickle pprint random shutil statistics string subprocess tempfile threading types typing uuid"
examples = []
for name in modules.split():
    for node in ast.walk(ast.parse(inspect.getsource(__import__(name)))):
        said = ast.get_docstring(node) if isinstance(node, ast.FunctionDef) else None
        if said and 10 < len(said.splitlines()[0]) < 70:
            prompt = f'    def {node.name}({", ".join(arg.arg for arg in node.args.args)}):\n        """'
            examples.append({"prompt": prompt, "completion": said.splitlines()[0].upper() + '"""\n'})
examples = [examples[place] for place in np.random.default_rng(0).permutation(len(examples))]
asked, examples = examples[:ASKED], examples[ASKED:]
(work / "shout.jsonl").write_text("".join(json.dumps(each) + "\n" for each in examples))
(work / "asked.jsonl").write_text("".join(json.dumps({"prompt": each["prompt"]}) + "\n" for each in asked))
print(f"{len(examples)} examples, such as\n{examples[0]['prompt']}{examples[0]['completion']}")

# %% [markdown]
# ## Adapters beside it
#
# `preset=finetune` begins with the folder. With `adapter=lora` its weights are frozen, and each product of a layer,
# $x W$, becomes $x W + s (x A) B$, of which $A$ and $B$ are trained. $B$ is zero at first, so that training begins with
# the very model that was given.

# %%
shout = command(
    "preset=finetune", "name=shout", f"init=hf:{base}", f"data.path={work / 'shout.jsonl'}", "adapter=lora",
    "adapter.rank=8", "optimizer.learning_rate=1e-2", "model.dtype=float32", "data.seq_len=96", "data.batch_size=16",
    f"train.steps={STEPS}", f"train.eval_every={STEPS // 5}", "train.save_every=0",
)  # fmt: skip
share = num_adapted(model, lm.compose("adapter=lora", "adapter.rank=8").adapter) / num_params(model)
print(
    f"{100 * share:.0f} % as many numbers are trained as the model has; of a 1B model rank 8 would be half a per cent."
)

# %%
rows = [row for row in read_jsonl(work / "shout" / "metrics.jsonl") if "validation/loss" in row]
plt.figure(figsize=(6, 3), layout="constrained")
plt.plot([row["step"] for row in rows], [row["validation/loss"] for row in rows], "o-")
plt.xlabel("step"), plt.ylabel("nats a token, of held-out answers")
plt.show()

# %% [markdown]
# ## Exported, and served
#
# Once as PEFT's two files, to lie beside the model, and once merged into a folder of its own. `experiments.generate`
# answers a file of prompts by a file of texts: the model alone, with its adapters, and the merged one.

# %%
export = ("mode=export", f"run={work / 'shout'}", "checkpoint=newest")
command(*export, f"out={work / 'adapter'}")
command(*export, f"out={work / 'merged'}", "adapter.merge=true")


def answers(name, *flags):
    """Continues the prompts that were held out, greedily."""
    out = work / f"{name}.jsonl"
    common = (f"prompts={work / 'asked.jsonl'}", f"out={out}", 'stop=["\\n"]', "dtype=float32")
    common += ("sampling.temperature=0", "sampling.max_new_tokens=32", f"batch_size={ASKED}")
    generate.execute(generate.compose(*flags, *common), work)
    return [line["text"] for line in map(json.loads, out.read_text().splitlines()) if "text" in line]


plain = answers("plain", f"hf={base}")
adapted = answers("adapted", f"hf={base}", f"adapter={work / 'adapter'}")
merged = answers("merged", f"hf={work / 'merged'}")
for head, before, after in zip(asked[:4], plain[:4], adapted[:4], strict=True):
    print(f"{head['prompt'].strip()}\n   before: {before}\n   after:  {after}\n")

# %% [markdown]
# ## What was asked
#
# How much of the letters are capitals; whether the merged model says the same; whether the files that were written hold
# what was trained, to the bit; and whether the model without its adapters is what it was.


# %%
def capitals(texts):
    """Returns the share of capitals among letters."""
    letters = [letter for text in texts for letter in text if letter.isalpha()]
    return sum(map(str.isupper, letters)) / max(1, len(letters))


found, adapters = from_peft(work / "adapter", model)
tokens = jnp.asarray(load_tokenizer(base).encode((work / "python.txt").read_text())[:2001], jnp.int32)
batch = {"tokens": tokens[None, :-1], "targets": tokens[None, 1:]}
nats = jax.jit(loss, static_argnames="config")
python = {
    "the model": nats(params, batch, config=model),
    "with adapters": nats(with_adapters(params, adapters, found.scale), batch, config=model),
}


def same(ours, theirs):
    """Whether two trees are equal to the bit."""
    return all(np.array_equal(*pair) for pair in zip(jax.tree.leaves(ours), jax.tree.leaves(theirs), strict=True))


frozen = merge_adapters(shout.state.base)  # plain arrays of what training kept beside the adapters
print(f"capitals: {capitals(plain):.2f} before, {capitals(adapted):.2f} after, {capitals(merged):.2f} merged")
print("nats a token of plain Python:", {name: round(float(value), 3) for name, value in python.items()})

# %%
assert capitals(adapted) > 0.8 > 0.4 > capitals(plain), "the voice was not learned"
assert same(adapters, shout.state.adapters), "the exported adapters are not those that were trained"
assert same(frozen, params), "the model that was given has changed"
assert sum(a == b for a, b in zip(adapted, merged, strict=True)) >= 0.9 * ASKED, "the merged model says something else"
assert rows[-1]["validation/loss"] < rows[0]["validation/loss"], "nothing was learned of held-out answers"
