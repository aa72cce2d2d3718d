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
# [Open in Colab](https://colab.research.google.com): File > Upload notebook, from <https://example.org/jaxpar> · shown below: full size

# %% [markdown]
# # A tour: six loops turned parallel
#
# **The question.** The rows of a batch, the steps of a recurrence, the simulations of a planner, the members of a
# population, the copies of an environment, the tokens of a layer with memory: each is usually a loop. Here each loop is
# written down, timed, and run beside one parallel program of this library. Does the program give what the loop gives?
#
# Seconds are those of the machine that ran this, without compiling. The last cell asserts that all six agree.
#
# Under ten minutes on two CPU cores; about one with `FAST=1` in the environment.

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
from typing import NamedTuple

import jax
import jax.numpy as jnp
import matplotlib.pyplot as plt
import numpy as np

from jaxpar import envs, lm
from jaxpar.env import grid_of, reset, step
from jaxpar.loop import run
from jaxpar.mesh import MeshSpec, make_mesh, shard, simulate_devices, use_mesh
from jaxpar.neat import Neat, NeatConfig, Rates, Table, apply, with_networks, xor
from jaxpar.nn.mixers import linear_attention
from jaxpar.pomdp import ParticleBelief, Pomcp, from_environment, solve_exact
from jaxpar.processes import keep_programs
from jaxpar.rollout import init, random_policy, rollout
from jaxpar.solve import Newton, parallel_scan

keep_programs()  # what this notebook compiles is loaded the next time

FAST = bool(os.environ.get("FAST"))
jax.config.update("jax_platforms", "cpu")
simulate_devices(8)  # for the first part; the others use one


class Row(NamedTuple):
    """Seconds of the loop and of the parallel program, how far apart they are, and how far they may be."""

    loop_s: float
    parallel_s: float
    apart: float
    may_be: float


table = {}


def timed(call, *inputs):
    """What a call returns, and its seconds when nothing has to be compiled any more."""
    jax.block_until_ready(call(*inputs))
    began = time.perf_counter()
    result = jax.block_until_ready(call(*inputs))
    return result, time.perf_counter() - began


def apart(ours, theirs):
    """The largest difference of two trees of arrays, over the largest of their numbers."""
    pairs = zip(jax.tree.leaves(jax.device_get(ours)), jax.tree.leaves(jax.device_get(theirs)), strict=True)
    return float(np.max([np.abs(a - b).max() / max(np.abs(b).max(), 1e-6) for a, b in pairs]))  # NaN if one is


def add(name, loop_s, parallel_s, difference, may_be):
    """Writes a row of the table, and says it."""
    table[name] = Row(loop_s, parallel_s, difference, may_be)
    print(f"loop {loop_s:.3g} s, parallel {parallel_s:.3g} s, apart by {difference:.1e}")


# %% [markdown]
# ## 1. The chips of a model
#
# Loss and gradient of a small Llama on a batch of text. The loop takes one row after another on one device and adds up.
# The program is cut over eight devices three ways at once: its batch over `data`, its parameters over `fsdp`, its heads
# over `tensor`. No line of the model knows. The eight devices are simulated on the same cores, so what they gain is not
# time here but room: each holds a part of the parameters.

# %%
sentence = np.frombuffer(b"all work and no play makes jack a dull boy. " * 12, np.uint8).astype(np.int32)
words = {"tokens": sentence.reshape(8, -1)[:, :-1], "targets": sentence.reshape(8, -1)[:, 1:]}
model = lm.LMConfig(
    num_layers=4,
    embed_dim=128,
    attention=lm.AttentionConfig(num_heads=4, num_kv_heads=2),
    mlp=lm.MlpConfig(dim=256),
    dtype="float32",
)
params = jax.device_get(lm.init(jax.random.key(0), model))
value_and_gradient = jax.jit(jax.value_and_grad(lm.loss), static_argnums=2)


def row_by_row():
    """Loss and gradient of a batch, one row after another."""
    rows = [jax.tree.map(lambda x, i=i: x[i : i + 1], words) for i in range(len(words["tokens"]))]
    each = [value_and_gradient(params, row, model) for row in rows]
    return jax.tree.map(lambda *parts: sum(parts) / len(parts), *each)


with use_mesh(make_mesh(MeshSpec(), jax.devices()[:1])):
    by_loop, loop_s = timed(row_by_row)
with use_mesh(make_mesh(MeshSpec(data=2, fsdp=2, tensor=2))):
    placed = shard(params, lm.axes(model))
    rows = shard(words, {name: ("batch", "seq") for name in words})
    at_once, parallel_s = timed(value_and_gradient, placed, rows, model)
add("chips of a model", loop_s, parallel_s, apart(at_once, by_loop), 1e-4)

shares = {}
for leaf in jax.tree.leaves(placed):
    for piece in leaf.addressable_shards:
        shares[piece.device.id] = shares.get(piece.device.id, 0) + piece.data.size
whole = sum(leaf.size for leaf in jax.tree.leaves(params))
figure, axis = plt.subplots(figsize=(7, 2.4), layout="constrained")
axis.bar(["the loop's\none device", *(f"device {i}" for i in range(8))], [whole, *(shares[i] for i in range(8))])
axis.set(ylabel="parameters held", title="the same gradient, from a part of the parameters on each device")
axis.tick_params(axis="x", labelsize=7)
plt.show()

# %% [markdown]
# ## 2. The steps of a recurrence
#
# h[t] = tanh(A h[t-1] + x[t]). Every step needs the one before. `parallel_scan` takes the arguments of `jax.lax.scan`,
# and solves all steps as one system of equations by Newton's method: a handful of iterations, each of them parallel
# over time. The gradient is exact. The loop here is Python's, a compiled step at a time; `lax.scan` is timed as well,
# which on a CPU with few cores is hard to beat: what `parallel_scan` is for are machines that do much at once.

# %%
STATES, LENGTH = 8, 1000 if FAST else 8000
keys = jax.random.split(jax.random.key(1), 2)
weights = 0.9 * jax.random.normal(keys[0], (STATES, STATES)) / np.sqrt(STATES)
xs = jax.random.normal(keys[1], (LENGTH, STATES))
start = jnp.zeros(STATES)


def cell(h, x):
    """One step, as `jax.lax.scan` takes it."""
    h = jnp.tanh(weights @ h + x)
    return h, h


one_step, steps_in = jax.jit(cell), list(np.asarray(xs))


def step_by_step():
    """All states, one after another."""
    h, states = start, []
    for x in steps_in:
        h, out = one_step(h, x)
        states.append(out)
    return jnp.stack(states)


by_loop, loop_s = timed(step_by_step)
solve = jax.jit(lambda xs: parallel_scan(cell, start, xs, method=Newton(), with_stats=True)[1:])
(states, stats), parallel_s = timed(solve, xs)
_, scan_s = timed(jax.jit(lambda xs: jax.lax.scan(cell, start, xs)[1]), xs)
add("steps of a recurrence", loop_s, parallel_s, apart(states, by_loop), 1e-4)
print(f"Newton's method took {int(stats.iterations)} iterations for {LENGTH} steps; lax.scan {scan_s:.3g} s")

figure, axis = plt.subplots(figsize=(9, 2.4), layout="constrained")
axis.plot(np.asarray(by_loop)[:120, :3], color="0.75", lw=5)
axis.plot(np.asarray(states)[:120, :3], lw=1)
axis.set(xlabel="step", ylabel="state", title="three states: the loop (wide, grey), all steps at once (thin)")
plt.show()

# %% [markdown]
# ## 3. The simulations of a planner
#
# A tiger is behind one of two doors; listening costs 1 and is right with 0.85. A tree search runs simulations one by
# one, each of which sees what those before have found. `Pomcp` runs batches of them together. Both estimate the same
# number, what the belief is worth with four steps to go, which value iteration knows exactly; so they need not agree
# to the bit, but each with that, within a fifth.

# %%
tiger, prices = envs.make("Tiger")
HORIZON, SIMULATIONS, TOGETHER = 4, 8192 if FAST else 65536, 256
unsure = ParticleBelief(512).init(jax.random.key(0), tiger, prices)
exact = float(solve_exact(from_environment(tiger, prices), HORIZON).value)
plans = {}
for name, batch in {"one by one": 1, f"{TOGETHER} together": TOGETHER}.items():
    planner = Pomcp(batch, SIMULATIONS // batch, HORIZON, leaf="zero", exploration=50.0, backup="best", max_nodes=2048)
    plan = jax.jit(lambda key, planner=planner: planner.plan(key, tiger, prices, unsure))
    plans[name] = timed(plan, jax.random.key(2))
((one, alone), loop_s), ((other, together), parallel_s) = plans.values()
error = np.max([abs(float(info.value) - exact) for info in (alone, together)])
add("simulations of a planner", loop_s, parallel_s, error / exact, 0.2)
print(f"exact value {exact:.3f}; one by one {float(alone.value):.3f}, together {float(together.value):.3f}")

figure, axis = plt.subplots(figsize=(6, 2.4), layout="constrained")
places = np.arange(3)
for shift, (name, ((_, info), _)) in zip((-0.2, 0.2), plans.items(), strict=True):
    axis.bar(places + shift, np.asarray(info.visits) / SIMULATIONS, 0.38, label=name)
axis.set(xticks=places, xticklabels=["listen", "open left", "open right"], ylabel="share of the simulations")
axis.legend(fontsize=8)
plt.show()

# %% [markdown]
# ## 4. The members of a population
#
# NEAT evolves networks of different structure. The loop walks each of them, node by node, as its graph says. The
# program holds the population as one set of arrays with masks, and computes all nodes of all networks together.

# %%
GENERATIONS = 20 if FAST else 100
config = NeatConfig(
    num_inputs=3, num_outputs=1, population=150, max_nodes=16, max_conns=32, max_species=12,
    rates=Rates(threshold=0.5, add_node=0.1), widths=(16,),
)  # fmt: skip
neat = Neat(config, Table())
truths = jax.tree.map(lambda x: jnp.broadcast_to(x, (GENERATIONS, *x.shape)), xor())
state, _ = jax.jit(lambda: run(neat, jax.random.key(4), neat.init(jax.random.key(3), None), truths, GENERATIONS))()
questions = np.asarray(xor()["inputs"])
genomes = jax.device_get(state.genomes)


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


def member_by_member():
    """The outputs of all networks for all questions, one after another."""
    return np.array([[walk(genomes.rows(member), x) for x in questions] for member in range(150)])


@jax.jit
def all_members(genomes):
    asked = jnp.broadcast_to(questions[None], (150, *questions.shape))
    return with_networks(config, genomes, lambda networks: apply(networks, (), asked)[0])


by_loop, loop_s = timed(member_by_member)
together, parallel_s = timed(all_members, state.genomes)
add("members of a population", loop_s, parallel_s, apart(together, by_loop), 1e-4)
nodes, links = genomes.node_on.sum(1), (genomes.on & genomes.enabled).sum(1)
figure, axis = plt.subplots(figsize=(6, 2.6), layout="constrained")
axis.scatter(nodes, links, c=state.member, cmap="tab20", s=14, alpha=0.7)
sizes = len(set(zip(nodes.tolist(), links.tolist(), strict=True)))
axis.set(xlabel="nodes", ylabel="connections", title=f"150 networks of {sizes} sizes; a colour is a species")
plt.show()

# %% [markdown]
# ## 5. A thousand environments
#
# A maze with a locked door and its key. The loop steps one environment after another; `rollout` steps a thousand in one
# program, in which random numbers depend on the environment and the step. So the loop can draw the same, and must see
# the same, to the bit. It is run for a few of the thousand, and timed for each step.

# %%
door, limit = envs.make("DoorKey-8x8")
limit = limit.replace(max_steps=30)
COUNT, ASKED, MOVES = 1024, 2 if FAST else 8, 40 if FAST else 100
seed = jax.random.key(7)
one_reset, one_move = jax.jit(reset, static_argnums=1), jax.jit(step, static_argnums=1)
one_action = jax.jit(lambda key, state: random_policy(door)(key, limit, None, (), door.action_mask(state, limit))[0])


def move_by_move():
    """Observations, actions and ends of the first few environments, one step of one at a time."""
    columns = []
    first_key = jax.random.split(jax.random.fold_in(seed, 2**32 - 1), 1)[0]
    for index in range(ASKED):
        obs, state = one_reset(jax.random.fold_in(first_key, index), door, limit)
        rows = []
        for s in range(MOVES):
            act_key, step_key, reset_key = jax.random.split(jax.random.fold_in(seed, s), 3)
            action = one_action(jax.random.fold_in(act_key, index), state)
            made = one_move(jax.random.fold_in(step_key, index), door, state, action, limit)
            rows.append((obs, action, made.terminated | made.truncated))
            obs, state = made.obs, made.state
            if made.terminated or made.truncated:
                obs, state = one_reset(jax.random.fold_in(reset_key, index), door, limit)
        columns.append([np.stack(column) for column in zip(*rows, strict=True)])
    return [np.stack(column, axis=1) for column in zip(*columns, strict=True)]


@jax.jit
def thousand():
    """The same of all of them, and where they end."""
    env_state = init(seed, door, limit, COUNT)
    last, steps = rollout(seed, env_state, door, limit, random_policy(door), limit, MOVES)
    return last, [steps.obs, steps.action, steps.ended]


by_loop, loop_s = timed(move_by_move)
(last, columns), parallel_s = timed(thousand)
equal = all(np.array_equal(ours, np.asarray(all_)[:, :ASKED]) for ours, all_ in zip(by_loop, columns, strict=True))
add("copies of an environment", loop_s / ASKED * COUNT, parallel_s, 0.0 if equal else 1.0, 0.0)
print(f"the loop was run for {ASKED} of {COUNT} environments: {MOVES * ASKED / loop_s:,.0f} steps a second, ", end="")
print(f"{MOVES * COUNT / parallel_s:,.0f} together")

pictures = jax.jit(jax.vmap(door.render, (0, None)))(jax.tree.map(lambda x: x[:32], last.state), limit)
plt.figure(figsize=(9, 2.4), layout="constrained")
plt.imshow(grid_of(pictures, columns=16))
plt.title(f"32 of them after {MOVES} steps", fontsize=10)
plt.axis("off")
plt.show()

# %% [markdown]
# ## 6. The tokens of a layer with memory
#
# Gated linear attention keeps a matrix: at each token it decays, takes in the product of key and value, and is read by
# the query. The loop is how such a model writes, a token at a time. To train it, `linear_attention` computes chunks of
# 64 tokens by matrix products, and the matrices between chunks by a parallel scan.

# %%
TOKENS, HEADS, WIDTH = 512 if FAST else 4096, 4, 32
keys = jax.random.split(jax.random.key(9), 4)
q, k, v = (jax.random.normal(key, (1, TOKENS, HEADS, WIDTH)) / WIDTH**0.5 for key in keys[:3])
log_decay = -0.1 * jax.random.uniform(keys[3], (1, TOKENS, HEADS))
one_token = jax.jit(lambda state, *now: linear_attention(*now, state=state))
tokens = [tuple(np.asarray(x[:, t : t + 1]) for x in (q, k, v, log_decay)) for t in range(TOKENS)]


def token_by_token():
    """The outputs, one after another."""
    state, outs = jnp.zeros((1, HEADS, WIDTH, WIDTH)), []
    for now in tokens:
        out, state = one_token(state, *now)
        outs.append(out)
    return jnp.concatenate(outs, axis=1)


by_loop, loop_s = timed(token_by_token)
(outs, _), parallel_s = timed(jax.jit(linear_attention), q, k, v, log_decay)
add("tokens of a layer", loop_s, parallel_s, apart(outs, by_loop), 1e-4)

kept = np.cumsum(np.asarray(log_decay)[0, :96, 0])
kept = np.tril(np.exp(np.minimum(kept[:, None] - kept[None], 0.0)))
figure, axis = plt.subplots(figsize=(4.2, 3), layout="constrained")
image = axis.imshow(kept, cmap="viridis", vmin=0, vmax=1)
axis.set(xlabel="token j", ylabel="token i", title="what is left of token j at token i")
figure.colorbar(image, ax=axis)
plt.show()

# %% [markdown]
# ## All six
#
# How many times as fast as its loop each program was on this machine; a bar on the left of 1 took longer. None of it is
# a promise: a loop in Python pays for each call, and eight simulated devices share the cores of one.

# %%
names = list(table)
gains = [table[name].loop_s / table[name].parallel_s for name in names]
figure, axis = plt.subplots(figsize=(8, 2.8), layout="constrained")
bars = axis.barh(names, gains, color=["tab:orange" if gain < 1 else "tab:blue" for gain in gains])
axis.bar_label(bars, fmt="%.3g", padding=3, fontsize=8)
axis.axvline(1, color="black", lw=0.8)
axis.set(xscale="log", xlabel="seconds of the loop / seconds of the parallel program")
axis.margins(x=0.15)
axis.invert_yaxis()
plt.show()
print(f"{'':26}{'loop, s':>10}{'parallel, s':>13}{'apart by':>11}{'may be':>9}")
for name, row in table.items():
    print(f"{name:26}{row.loop_s:10.3g}{row.parallel_s:13.3g}{row.apart:11.1e}{row.may_be:9.0e}")

# %% [markdown]
# ## The claim

# %%
assert len(table) == 6
for name, row in table.items():
    assert row.apart <= row.may_be, f"{name}: apart by {row.apart}, which is more than {row.may_be}"
assert int(one) == int(other) == 0, "one by one and together, the planner listens"
assert stats.converged and max(shares.values()) < whole / 2
assert all(row.parallel_s < row.loop_s for row in list(table.values())[1:]), "all but the simulated devices are faster"
print("Six loops, six parallel programs, the same results.")
