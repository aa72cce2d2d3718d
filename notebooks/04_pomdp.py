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
# # Planning under uncertainty (POMDPs: particle beliefs, tree search)
#
# **The question.** A partly observable problem is planned over beliefs, and both halves are loops: a filter moves
# particles one by one, a planner runs simulations one by one down a tree. Here each is one parallel program. Do the
# particles say what Bayes' rule says? Does the tree find what exact value iteration finds? And can a thousand problems
# be planned in one call?
#
# We watch a belief sharpen where it is light, read a small tree, and plan for a thousand beliefs about a tiger at once.
# Each has an exact answer to compare with, and the last cell asserts that they agree.
#
# About a minute on two CPU cores.

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

from jaxpar import envs
from jaxpar.env import reset, step
from jaxpar.pomdp import ParticleBelief, Vopp, from_environment, solve_exact
from jaxpar.pomdp import outline
from jaxpar.processes import keep_programs

keep_programs()  # what this notebook compiles is loaded the next time

FAST = bool(os.environ.get("FAST"))

# %% [markdown]
# ## A belief that one can watch
#
# LightDark: one stands somewhere on a line of integers, wants to stop at 0, and sees where one is with noise as large
# as the distance from 10, where the light is. So one walks to the light first. Here we walk there by a fixed plan, and
# afterwards to where 0 must be.
#
# The belief is 4,000 particles: moved by the environment's own dynamics, weighted by its likelihood, and drawn anew
# when too few of them carry the weight. The line has 121 places, so Bayes' rule itself is a sum that we can write down.

# %%
line, numbers = envs.make("LightDark")
filter_ = ParticleBelief(4000)
STEPS = 10
RIGHT, BACK, FAR = 3, 1, 4  # +1, -1, +10: one step of 10, then single steps around the light


def exact_update(chances, action, obs):
    """Bayes' rule on all 121 places."""
    moved = np.zeros_like(chances)
    for i, chance in enumerate(chances):
        moved[np.clip(i + (-10, -1, 0, 1, 10)[action], 0, 120)] += chance
    noise = np.abs(np.arange(-60, 61) - 10) + 1e-4
    logs = -0.5 * ((float(obs) - np.arange(-60, 61)) / noise) ** 2 - np.log(noise)
    posterior = moved * np.exp(logs - logs[moved > 0].max())
    return posterior / posterior.sum()


@jax.jit
def advance(key, state, belief, action):
    go, learn = jax.random.split(key)
    after = step(go, line, state, action, numbers)
    belief, evidence = filter_.update(learn, belief, action, after.obs, line, numbers)
    return after.state, belief, after.obs, evidence


_, state = reset(jax.random.key(8), line, numbers)
belief = filter_.init(jax.random.key(1), line, numbers)
chances = np.where(np.abs(np.arange(-60, 61)) <= 30, 1 / 61, 0.0)
watched, wanted, places, errors = [], [], [], []
for t in range(STEPS + 1):
    weights = np.zeros(121)
    np.add.at(weights, np.asarray(belief.states.place) + 60, np.exp(belief.log_weights))
    watched.append(weights)
    wanted.append(chances)
    places.append(int(state.place))
    errors.append(0.5 * np.abs(weights - chances).sum())
    believed = np.sum(weights * np.arange(-60, 61))
    action = FAR if believed < 5 else RIGHT if believed < 10 else BACK
    state, belief, obs, evidence = advance(jax.random.fold_in(jax.random.key(2), t), state, belief, action)
    chances = exact_update(chances, action, obs)

figure, axes = plt.subplots(1, 2, figsize=(11, 3.6), sharey=True, layout="constrained")
for axis, rows, name in zip(axes, (watched, wanted), ("4,000 particles", "Bayes' rule"), strict=True):
    axis.imshow(
        np.sqrt(np.array(rows).T), origin="lower", aspect="auto", cmap="Blues", extent=(-0.5, STEPS + 0.5, -60.5, 60.5)
    )
    axis.plot(range(STEPS + 1), places, "o-", color="tab:red", ms=4, lw=1, label="where one is")
    axis.axhline(10, color="tab:orange", lw=1, label="light")
    axis.set(title=name, xlabel="step", ylim=(-45, 45))
axes[0].set_ylabel("place")
axes[0].legend(fontsize=8)
plt.show()
print(f"the two differ by at most {np.max(errors):.3f} of the probability (total variation)")

# %% [markdown]
# The first look, from the dark, says little; in the light one look says all.
#
# ## A tree that one can read
#
# The tiger is behind one of two doors. Listening costs 1 and is right with 0.85; the wrong door costs 100, the other
# earns 10. With few steps to go the best plan can be computed exactly: that is the yardstick.
#
# `Vopp` runs all its simulations of a batch down the tree together. A node is a belief, an edge an action. Each
# batch, every preference Psi moves by what its action is worth beyond what the belief is worth, so the best action's
# tends to the best value, and the others' fall for ever. Nothing is a maximum over samples, so noise averages out.
# The k-th batch goes k steps deep, here at most 4. `eta` says how much preferences count against chance: about ten
# over the range of rewards, which is 110 here. A larger one decides early, on few samples.

# %%
tiger, prices = envs.make("Tiger")
HORIZON = 4
model = from_environment(tiger, prices)
exact = solve_exact(model, HORIZON)


def planner(batches):
    return Vopp(512, batches, HORIZON, eta=0.1, leaf="zero", max_nodes=4096)


unsure = ParticleBelief(512).init(jax.random.key(0), tiger, prices)
values = []
BATCHES = (4, 8, 16, 32, 64)
for batches in BATCHES:
    chosen = planner(batches)
    search = jax.jit(lambda key, chosen=chosen: chosen.search(key, tiger, prices, unsure))(jax.random.key(3))
    values.append(float(chosen.decide(search)[1].value))
doors, heard = ("listen", "open left", "open right"), ("hear left", "hear right")
print(outline(search, chosen, tiger, prices, depth=2, width=3, actions=doors, observations=heard))

plt.figure(figsize=(6, 3), layout="constrained")
plt.semilogx(np.array(BATCHES) * 512, values, "o-", label="Vopp's value of the root")
plt.axhline(float(exact.value), color="tab:orange", label=f"exact value of {HORIZON} steps, {float(exact.value):.3f}")
plt.xlabel("simulations")
plt.ylabel("value")
plt.legend(fontsize=8)
plt.show()
best, info = chosen.decide(search)
print(
    f"it does: {doors[int(best)]}; root values {np.round(np.asarray(info.values), 2)}, exact {float(exact.value):.3f}"
)

# %% [markdown]
# Read it as: of the simulations most listened; after *hear left* they listened again or opened the right door.
#
# ## A thousand problems at once
#
# `plan` is a pure function of key and belief: fixed work, fixed memory, no host in between. So a `vmap` over beliefs
# plans a thousand problems in one program, with a thousand trees. Here a belief is one number, how likely the tiger is
# on the left, from 0 to 1; exact alpha vectors say what is best for each.

# %%
COUNT = 200 if FAST else 1000
odds = (jnp.arange(COUNT) + 0.5) / COUNT
many = Vopp(256, 24, HORIZON, eta=0.1, leaf="zero", max_nodes=1024)


def plan_for(key, chance):
    """A plan for a belief of two states, whose weights are the chances."""
    sure = ParticleBelief(2).init(key, tiger, prices)
    states = sure.states.replace(tiger=jnp.array([0, 1], jnp.int32))
    return many.plan(
        key, tiger, prices, sure.replace(states=states, log_weights=jnp.log(jnp.stack([chance, 1 - chance])))
    )


keys = jax.random.split(jax.random.key(4), COUNT)
at_once, one = jax.jit(jax.vmap(plan_for)), jax.jit(plan_for)
jax.block_until_ready((at_once(keys, odds), one(keys[0], odds[0])))
began = time.perf_counter()
jax.block_until_ready(one(keys[0], odds[0]))
single = time.perf_counter() - began
began = time.perf_counter()
actions, infos = jax.block_until_ready(at_once(keys, odds))
together = time.perf_counter() - began

beliefs = np.stack([odds, 1 - odds], axis=1)
best_values = np.asarray(exact.values(jnp.asarray(beliefs, exact.alphas.dtype)))
best_actions = np.array([int(exact.action(jnp.asarray(b, exact.alphas.dtype))) for b in beliefs])
figure, axis = plt.subplots(figsize=(8, 3.4), layout="constrained")
axis.plot(odds, infos.value, ".", ms=3, label="planned, each by itself")
axis.plot(odds, best_values, color="tab:orange", label="exact")
axis.set(xlabel="how likely the tiger is on the left", ylabel="value of the belief")
axis.legend(fontsize=8)
right = axis.twinx()
right.plot(odds, actions, ".", ms=2, color="tab:green")
right.set_ylabel("planned action", color="tab:green")
right.set_yticks(range(3), doors)
plt.show()
agree = float(np.mean(np.asarray(actions) == best_actions))
times = COUNT * single / together
print(f"{COUNT} plans in {together:.2f} s, one alone in {single * 1e3:.1f} ms: {times:.1f} times as many a second")
print(f"{agree:.1%} take the best action; {int(infos.overflow.sum())} simulated steps found no room in a tree")

# %% [markdown]
# Where they differ, two actions are worth nearly the same. What an action costs is what counts, so we look it up: the
# exact value of each chosen action, by Bayes' rule and the exact values of one step less.

# %%
later = solve_exact(model, HORIZON - 1)
transition, observation, reward = (np.asarray(x) for x in (model.transition, model.observation, model.expected_reward))


def worth(belief, action):
    """The exact Q of an action at a belief, with `HORIZON` steps to go."""
    joint = (belief @ transition[action])[:, None] * observation[action]  # next states x observations
    return belief @ reward[action] + prices.discount * (joint.T @ np.asarray(later.alphas).T).max(1).sum()


regret = best_values - [worth(belief, int(action)) for belief, action in zip(beliefs, actions, strict=True)]
print(f"regret: mean {regret.mean():.4f}, largest {regret.max():.3f}")

# %% [markdown]
# ## The claim

# %%
assert np.max(errors) < 0.08, "the particles say what Bayes' rule says"
assert abs(values[-1] - float(exact.value)) < 0.15, "the tree's value is that of exact value iteration"
assert int(best) == int(exact.action(model.start.astype(exact.alphas.dtype))), "and so is its action"
assert agree > 0.95 and regret.mean() < 0.05, "a thousand plans at once are as good as exact ones"
