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
# # Networks that grow (NEAT)
#
# **The question.** NEAT evolves networks whose structure differs from one to the next: nodes and connections appear,
# mate and die. That is usually a loop over graphs of objects. Here a population is one set of arrays and a generation
# one program. Does each of these networks still compute what its graph says? Does the search solve what it should? And
# what does one get for it: can a whole study, of many searches, be one call?
#
# We evolve exclusive or and look at its species and its champion, walk every network node by node, run many searches as
# one, and balance a pole in slots that are refilled. The last cell asserts what we saw.
#
# A minute or two on two CPU cores.

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
import time

import jax
import jax.numpy as jnp
import matplotlib.pyplot as plt
import numpy as np
from IPython.display import Image

from jaxpar import envs
from jaxpar.loop import run, run_until
from jaxpar.neat import (
    Episodes,
    Neat,
    NeatConfig,
    PlayOptions,
    Rates,
    Table,
    apply,
    check_genomes,
    draw_network,
    express,
    expressions,
    io_sizes,
    play,
    to_json,
    with_networks,
    xor,
)
from jaxpar.processes import keep_programs

keep_programs()  # what this notebook compiles is loaded the next time

FAST = bool(os.environ.get("FAST"))

# %% [markdown]
# ## Exclusive or
#
# Four rows, two inputs and a constant, one output; no network without a hidden node can do it. A genome has room for 16
# nodes and 32 connections, each with a mask. `Neat.step` judges a generation and makes the next, so `run` is a whole
# search in one `lax.scan`, and its infos are the history. And a search is a pure function of its key, so several of
# them are one `vmap`. A fitness of 16 is perfect; networks without hidden nodes get 9. It counts as solved when every
# output, rounded, is right; here the searches go on to the end, and we look at the one that was quickest.

# %%
SEARCHES, GENERATIONS = (4, 300) if FAST else (8, 300)
rates = Rates(threshold=0.5, add_node=0.03)
config = NeatConfig(
    num_inputs=3, num_outputs=1, population=150, max_nodes=16, max_conns=32, max_species=12, rates=rates, widths=(16,)
)
neat = Neat(config, Table(tolerance=0.5))
rows = jax.tree.map(lambda x: jnp.broadcast_to(x, (GENERATIONS, *x.shape)), xor())


def evolved(key):
    begin, go = jax.random.split(key)
    return run(neat, go, neat.init(begin, None), rows, GENERATIONS)


keys = jax.random.split(jax.random.key(0), SEARCHES)
began = time.perf_counter()
compiled = jax.jit(jax.vmap(evolved)).lower(keys).compile()
built = time.perf_counter()
states, histories = jax.device_get(compiled(keys))
ended = time.perf_counter()
print(f"compiled in {built - began:.1f} s; {SEARCHES} searches of {GENERATIONS} generations in {ended - built:.1f} s")
print(f"{states.solved.sum()} of {SEARCHES} solved, after {np.sort(states.solved_after[states.solved])} networks")
chosen = int(np.argmin(np.where(states.solved, states.solved_after, np.inf)))
state, history = jax.tree.map(lambda x: x[chosen], (states, histories))

# %%
sizes = np.array([history[name] for name in sorted(history) if name.startswith("size_")])
figure, axes = plt.subplots(1, 2, figsize=(11, 3.4), layout="constrained")
axes[0].plot(histories["fitness_max"].T, color="tab:grey", lw=0.8, alpha=0.8)
axes[0].plot(history["fitness_max"], label="best of each generation (grey: the other searches)")
axes[0].plot(history["fitness_mean"], label="mean")
axes[0].axvline(int(state.solved_after) / 150 - 1, color="tab:green", lw=1, label="solved")
axes[0].axhline(9, color="black", lw=0.8, ls=":", label="without hidden nodes")
axes[0].set(xlabel="generation", ylabel="fitness", ylim=(0, 16.5), xlim=(0, GENERATIONS - 1))
axes[0].legend(fontsize=8, loc="lower right")
axes[1].stackplot(range(GENERATIONS), sizes, edgecolor="white", linewidth=0.2)
axes[1].set(xlabel="generation", ylabel="members by species", ylim=(0, 150), xlim=(0, GENERATIONS - 1))
plt.show()

# %% [markdown]
# Each band on the right is a slot of species; a slot that empties is used again. Below is the champion, as a picture
# and as a formula; `to_json` writes it in neat-python's format, for whoever wants to run it elsewhere.

# %%
champion = jax.device_get(state.champion)
draw_network(config, champion, here / "champion.png", title=f"fitness {float(state.best):.3f}")
for name, text in expressions(config, champion).items():
    print(f"{name} = {text}")
print(f"as a file of neat-python's: {len(to_json(config, champion)):,} characters")
Image(filename=here / "champion.png")

# %% [markdown]
# ## Is it the graph that it says?
#
# All nodes of all networks are computed at once, as often as the deepest network has levels. What a graph says is
# easier: walk it from the outputs, node by node. This interpreter is slow and knows nothing of arrays.


# %%
def walk(genome, x):
    """The outputs of one network: a recursion over its graph."""
    known = dict(enumerate(x))

    def value(node):
        if node not in known:
            into = np.flatnonzero(genome.on & genome.enabled & (genome.target == node))
            total = sum(float(genome.weight[c]) * value(int(genome.source[c])) for c in into)
            z = 5 * (float(genome.bias[node]) + float(genome.response[node]) * total)
            known[node] = 1 / (1 + np.exp(-np.clip(z, -60, 60)))
        return known[node]

    return [value(node) for node in range(config.num_inputs, config.num_io)]


genomes = jax.device_get(state.genomes)
check_genomes(config, genomes)  # unique identities and edges, no cycle, in all of them
table = np.asarray(xor()["inputs"])
batched = jax.jit(lambda g: with_networks(config, g, lambda nets: apply(
    nets, (), jnp.broadcast_to(table[None], (150, *table.shape)))[0]))  # fmt: skip
together = np.asarray(batched(genomes))
began = time.perf_counter()
one_by_one = np.array([[walk(genomes.rows(p), x) for x in table] for p in range(150)])
slow = time.perf_counter() - began
began = time.perf_counter()
jax.block_until_ready(batched(genomes))
quick = time.perf_counter() - began
difference = np.abs(together - one_by_one).max()
shapes = len({(int(n), int(c)) for n, c in zip(genomes.node_on.sum(1), genomes.enabled.sum(1), strict=True)})
print(f"150 networks of {shapes} different sizes: they differ by at most {difference:.1e}")
print(f"walked in {slow * 1e3:.0f} ms, together in {quick * 1e3:.2f} ms")

# %% [markdown]
# ## A study as one program
#
# One run of NEAT says little, and its many rates depend on each other. Rates are numbers in the state, so a sweep is
# one more `vmap`. Here it is the threshold, the distance within which two genomes are of one species: with a large one
# there is one species, in which what has just grown competes with what has been tuned for long.

# %%
SEEDS, THRESHOLDS = (4, (0.5, 4.0)) if FAST else (12, (0.5, 1.0, 2.0, 4.0))
LIMIT = 200


def searched(key, threshold):
    begin, go = jax.random.split(key)
    first = neat.init(begin, None)
    last, _ = run_until(neat, go, first.replace(rates=first.rates.replace(threshold=threshold)), xor(), LIMIT)
    return last.solved, last.solved_after


study = jax.jit(jax.vmap(jax.vmap(searched, (0, None)), (None, 0)))
solved, evaluations = jax.device_get(study(jax.random.split(jax.random.key(1), SEEDS), jnp.asarray(THRESHOLDS)))
plt.figure(figsize=(7, 3.2), layout="constrained")
for column, done in enumerate(solved):
    spread = np.linspace(-0.2, 0.2, SEEDS)[done]
    plt.plot(column + spread, evaluations[column][done], "o", ms=4, alpha=0.7)
names = [f"{t}\n{s.sum()} of {SEEDS} solved" for t, s in zip(THRESHOLDS, solved, strict=True)]
plt.xticks(range(len(THRESHOLDS)), names)
plt.xlim(-0.5, len(THRESHOLDS) - 0.5)
plt.xlabel("threshold")
plt.ylabel("networks until solved")
plt.ylim(0, 155 * LIMIT)
plt.show()

# %% [markdown]
# ## A pole to balance
#
# In an environment networks live for different lengths of time. Were there a slot, a copy of the environment, for each
# episode, it would idle as soon as its network has dropped the pole, and all would wait for the best. So those that
# still run move together into half as many slots, again and again. Better still are fewer slots than episodes: one that
# finishes takes the next. Random numbers depend on the episode and its step, not on the slot, and so do the scores.

# %%
cart, numbers = envs.make("CartPole-v1")
GOAL, STEPS, MEMBERS = (150, 200, 64) if FAST else (475, 500, 128)
driver = NeatConfig(
    *io_sizes(cart, numbers, constant=True), population=MEMBERS, max_nodes=12, max_conns=24, widths=(12,)
)
balance = Neat(driver, Episodes(cart, goal=GOAL, episodes=3, num_envs=32, max_steps=STEPS))
begin = balance.init(jax.random.key(2), None)
found, generations = jax.jit(lambda state: run_until(balance, jax.random.key(3), state, numbers, 30))(begin)
print(f"solved: {bool(found.solved)}, in {int(generations)} generations of {MEMBERS} networks")


@jax.jit(static_argnums=(1, 2))
def played(genomes, num_envs, compacts):
    networks = express(driver, genomes)
    options = PlayOptions(compacts=compacts)
    return play(jax.random.key(4), networks, cart, numbers, 6, num_envs, STEPS, options)


def useful(num_envs, compacts):
    """The share of the slots' steps in which a pole was being balanced, and the scores."""
    result = played(begin.genomes, num_envs, compacts)
    return float(result.lengths.sum() / result.env_steps), np.asarray(result.returns)


waiting, scores = useful(6 * MEMBERS, False)
packed, same = useful(6 * MEMBERS, True)
refilled, too = useful(8, True)
print("of the steps of the first generation's slots are useful:")
print(f"{waiting:.0%} with one for each episode, {packed:.0%} if the last move together, {refilled:.0%} refilled")

# %%
fresh = jax.jit(lambda g: play(jax.random.key(6), express(driver, g), cart, numbers, 50, 50, STEPS))(found.champion)
lengths = np.asarray(fresh.lengths[0])
figure, axes = plt.subplots(1, 2, figsize=(10, 3), layout="constrained")
names = ["a slot for\neach episode", "the last ones\nmove together", "8 slots,\nrefilled"]
axes[0].bar(names, [waiting, packed, refilled], color=["tab:grey", "tab:cyan", "tab:blue"])
axes[0].set(ylim=(0, 1), ylabel="useful steps")
axes[1].hist(np.asarray(scores).ravel(), bins=25, range=(0, STEPS), label="first generation", alpha=0.7)
axes[1].hist(lengths, bins=25, range=(0, STEPS), label="champion, 50 new starts", alpha=0.7)
axes[1].set(xlabel="steps that the pole stands", ylabel="episodes", yscale="log")
axes[1].legend(fontsize=8)
plt.show()
print(f"from 50 new starts the champion holds the pole for {lengths.mean():.0f} of {STEPS} steps on average")

# %% [markdown]
# ## The claim

# %%
assert difference < 1e-5, "all networks together compute what each graph says"
equal = np.concatenate([states.solved, solved[THRESHOLDS.index(0.5)]])  # all searches with these rates
assert equal.mean() > 0.6, "exclusive or is solved by most searches"
assert found.solved and lengths.mean() > 0.7 * GOAL, "so is the pole, from starts that it never saw"
assert np.array_equal(scores, same) and np.array_equal(scores, too), "scores do not depend on the slots"
assert refilled > packed > 0.5 > waiting, "slots that move together or are refilled idle less"
