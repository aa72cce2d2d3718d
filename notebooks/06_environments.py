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
# # A thousand environments at once (rollouts)
#
# **The question.** An environment is usually an object that one steps in a Python loop. Here it is a few pure
# functions, and a thousand of them run in one compiled program. Is that program still the loop, to the bit? What
# happens at the end of an episode, where most suites lose the last observation? And does it matter that only the
# environments that finished are begun anew?
#
# We write a moon lander in 40 lines and have it checked, look at what stands where when an episode ends, walk through a
# thousand drawn mazes, and land on some hundred moons. The last cell asserts the answers.
#
# Under a minute on two CPU cores.

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
import math
import os
import time
from typing import Any

import flax.struct
import jax
import jax.numpy as jnp
import matplotlib.pyplot as plt
import numpy as np

from jaxpar import envs
from jaxpar.env import Animation, Box, Discrete, check_environment, grid_of, picture, reset, step
from jaxpar.processes import keep_programs
from jaxpar.rollout import (
    Chunked,
    NextStep,
    NoReset,
    RolloutOptions,
    SameStep,
    episode_stats,
    evaluate,
    init,
    random_policy,
    rollout,
)

keep_programs()  # what this notebook compiles is loaded the next time

FAST = bool(os.environ.get("FAST"))
SIDE = 16 if FAST else 24  # moons a side of the last picture

# %% [markdown]
# ## An environment in 40 lines
#
# A lander falls towards a moon and may fire its engine. It is five functions, `init`, `transition`, `observe`,
# `reward`, `terminal`, and what else it has: here a limit of time and a picture. It holds no key and never resets
# itself; its numbers are all in `Params`, so that gravity is as good an input as the action is.


# %%
@flax.struct.dataclass
class State:
    height: jax.Array  # metres above the ground
    speed: jax.Array  # metres a second, downwards
    time: jax.Array  # steps


@flax.struct.dataclass
class Params:
    gravity: Any = 1.6
    thrust: Any = 3.0
    soft: Any = 1.0  # the greatest speed of a soft landing
    max_steps: Any = 60


@dataclasses.dataclass(frozen=True)
class Lander:
    name = "Lander"
    default_params = Params()

    def observation_space(self, params):
        return Box(-math.inf, math.inf, (2,))

    def action_space(self, params):
        return Discrete(2)  # 1 fires

    def init(self, key, params):
        return State(jax.random.uniform(key, (), minval=5.0, maxval=10.0), jnp.float32(0), jnp.int32(0))

    def transition(self, key, state, action, params):
        speed = state.speed + 0.1 * (params.gravity - params.thrust * action)
        return State(state.height - 0.1 * speed, speed, state.time + 1)

    def observe(self, key, state, action, params):
        return jnp.stack([state.height, state.speed])

    def reward(self, state, action, next_state, params):
        landed = self.terminal(next_state, params)
        return jnp.where(landed, jnp.where(next_state.speed < params.soft, 1.0, -1.0), 0.0)

    def terminal(self, state, params):
        return state.height <= 0

    def truncated(self, state, params):
        return state.time >= params.max_steps

    def render(self, state, params):
        at = picture.to_pixels(jnp.stack([0.0, jnp.maximum(state.height, 0)]), (-3, -1), (3, 12), 78, 36)
        image = picture.rectangle(picture.canvas(78, 36, (20, 20, 40)), (0, 72), (36, 78), picture.GRAY)
        return picture.to_uint8(picture.disc(image, at, 3.0, picture.ORANGE))


lander, moon = Lander(), Params()
print(check_environment(lander))

# %% [markdown]
# ## The end of an episode
#
# `rollout` runs a policy in many environments. A policy is written for one: key, parameters, observation, memory
# in, action and memory out. This one fires at random, just often enough to hover: some environments crash, and some are
# still in the air when their time is up. The first is a **termination**: nothing comes after it. The second is a
# **truncation**: the process would have gone on, so what it is worth from there, the value of the last observation,
# belongs to the return.
#
# What becomes of a finished environment is an argument. Keys are the same, so each row below shows the same first
# flights.


# %%
def hover(key, params, obs, carry):
    return jax.random.bernoulli(key, moon.gravity / moon.thrust).astype(jnp.int32), carry


def worth(params, obs, carry):
    return obs[0] / 10  # any function of the last observation; a learner would bring its own


def flights(how):
    env_state = init(jax.random.key(1), lander, moon, 64)
    options = RolloutOptions(reset=how, value=worth)
    return rollout(jax.random.key(1), env_state, lander, moon, hover, (), 90, options)[1]


ENDS = {"Chunked()": Chunked(), "NextStep()": NextStep(), "NoReset()": NoReset()}
flown = {name: flights(how) for name, how in ENDS.items()}
first = flown["NoReset()"]  # one episode an environment
ends_late = jnp.argmax(first.ended, 0) > 40
crashed = int(jnp.argmax(first.terminated.any(0) & ends_late))
cut = int(jnp.argmax(first.truncated.any(0)))

MARKS = {
    "start": {"marker": "^", "color": "tab:green"},
    "terminated": {"marker": "X", "color": "tab:red"},
    "truncated": {"marker": "s", "color": "tab:orange"},
}
figure, axes = plt.subplots(len(ENDS), 2, figsize=(10, 6), sharex=True, sharey=True, layout="constrained")
for row, (name, steps) in zip(axes, flown.items(), strict=True):
    for axis, index in zip(row, (crashed, cut), strict=True):
        at, height = np.arange(90), steps.obs[:, index, 0]
        for wait in np.flatnonzero(~steps.valid[:, index]):
            axis.axvspan(wait - 0.5, wait + 0.5, color="0.88", lw=0)
        axis.plot(at, height, ".", ms=3, color="0.3")
        for flag, look in MARKS.items():
            marked = np.flatnonzero(getattr(steps, flag)[:, index])
            axis.plot(marked, height[marked], ls="none", ms=8, label=flag, **look)
        for t in np.flatnonzero(steps.bootstrap[:, index]):
            axis.text(
                t - 3, height[t] - 1.8, f"V = {steps.bootstrap[t, index]:.2f}", color="tab:orange", ha="right", va="top"
            )
    row[0].set_ylabel(f"{name}\nheight seen")
axes[0, 0].set_title("this one crashes: terminated")
axes[0, 1].set_title("this one is cut: truncated, and bootstrapped")
axes[0, 1].legend(loc="lower right", fontsize=8)
axes[-1, 0].set_xlabel("step")
axes[-1, 1].set_xlabel("step")
plt.show()

# %% [markdown]
# A dot is what the policy saw in a step; a mark stands at the step whose action caused it. Grey steps belong to no
# episode (`valid` is false). `Chunked` begins anew within the step that ended: the next dot is a new flight, and the
# last observation of the old one is nowhere, which is why its value is taken at once. `NextStep`, Gymnasium's way,
# shows it for one grey step, in which the action is ignored. `NoReset` stays there: one episode an environment, for
# evaluation.
#
# The last moments of the crash, as pictures; the state is drawn by a pure function, so a `vmap` makes the film:

# %%
last = int(jnp.argmax(first.ended[:, crashed])) + 1
moments = first.obs[last - 11 : last + 1, crashed]
film = jax.vmap(lambda obs: lander.render(State(obs[0], obs[1], 0), moon))(moments)
plt.figure(figsize=(12, 2.4))
plt.imshow(grid_of(film, columns=12))
plt.axis("off")
plt.show()

# %% [markdown]
# ## The program is the loop
#
# Environment i of step s draws from `fold_in(split(fold_in(key, s), 3)[use], i)`, where the uses are the policy, the
# step and the reset. So an ordinary loop over environments and steps can be written beside `rollout`, and must see the
# same: to the bit where everything is integers, as in a maze with a locked door and its key.

# %%
door, limit = envs.make("DoorKey-8x8")
limit = limit.replace(max_steps=30)
root, envs_of_loop, steps_of_loop = jax.random.key(7), 3, 40 if FAST else 80
one_reset, one_step = jax.jit(reset, static_argnums=1), jax.jit(step, static_argnums=1)
one_action = jax.jit(lambda key, state: random_policy(door)(key, limit, None, (), door.action_mask(state, limit))[0])


def looped(index):
    """Observations, actions and ends of one environment, one step at a time."""
    first_key = jax.random.split(jax.random.fold_in(root, 2**32 - 1), 1)[0]
    obs, state = one_reset(jax.random.fold_in(first_key, index), door, limit)
    rows = []
    for s in range(steps_of_loop):
        act_key, step_key, reset_key = jax.random.split(jax.random.fold_in(root, s), 3)
        action = one_action(jax.random.fold_in(act_key, index), state)
        made = one_step(jax.random.fold_in(step_key, index), door, state, action, limit)
        rows.append((obs, action, made.terminated, made.truncated))
        obs, state = made.obs, made.state
        if made.terminated or made.truncated:
            obs, state = one_reset(jax.random.fold_in(reset_key, index), door, limit)
    return [np.stack(column) for column in zip(*rows, strict=True)]


env_state = init(root, door, limit, envs_of_loop)
_, steps = rollout(root, env_state, door, limit, random_policy(door), limit, steps_of_loop)
columns = [steps.obs, steps.action, steps.terminated, steps.truncated]
loop_is_equal = all(
    np.array_equal(loop, np.asarray(column)[:, index])
    for index in range(envs_of_loop)
    for loop, column in zip(looped(index), columns, strict=True)
)
print(
    f"{envs_of_loop} environments of {steps_of_loop} steps, {int(steps.ended.sum())} ends: "
    f"equal to the loop: {loop_is_equal}"
)

# %% [markdown]
# ## A thousand worlds
#
# A level is drawn by a function of a key, so a thousand of them are a `vmap`, and so are their pictures.

# %%
WORLDS = 1024
env_state = init(jax.random.key(0), door, limit, WORLDS)
worlds = jax.jit(jax.vmap(door.render, (0, None)))(env_state.state, limit)
figure, axes = plt.subplots(1, 2, figsize=(13, 6.5), layout="constrained")
for axis, shown in zip(axes, (worlds, worlds[:16]), strict=True):
    axis.imshow(grid_of(shown))
    axis.axis("off")
axes[0].set_title(f"all {WORLDS}")
axes[1].set_title("the first 16 of them")
plt.show()
different = len(np.unique(np.asarray(worlds).reshape(WORLDS, -1), axis=0))
print(f"{different} different levels among {WORLDS}")

# %% [markdown]
# Is that what chance gives? The wall stands in one of four columns, each as likely; the agent and the key share the
# room on its left, 6 cells a column; the agent looks in 4 directions, and the door is in one of 5 rows. Independent
# draws among n levels find n (1 - (1 - 1/n)^draws) different ones.

# %%
levels = [(rooms := 6 * columns) * (rooms - 1) * 4 * 5 for columns in (1, 2, 3, 4)]
expected = sum(n * (1 - (1 - 1 / (4 * n)) ** WORLDS) for n in levels)
print(f"{sum(levels)} levels exist; {expected:.0f} different ones are expected")

# %% [markdown]
# They walk at random, and whoever has not found the way out is cut after 30 steps. `SameStep` draws a new level for
# every environment in every step and throws nearly all away; `Chunked` draws them for the environments that finished, a
# few at a time. Each environment has its own key in either case, so the results are the same bits, whatever the size of
# the chunk.

# %%
rolled_out = {}
for name, how in {"SameStep()": SameStep(), "Chunked()": Chunked(), "Chunked(7)": Chunked(7)}.items():
    options = RolloutOptions(reset=how)
    _, rolled_out[name] = rollout(jax.random.key(3), env_state, door, limit, random_policy(door), limit, 64, options)
    began = time.perf_counter()
    jax.block_until_ready(rollout(jax.random.key(4), env_state, door, limit, random_policy(door), limit, 64, options))
    rate = WORLDS * 64 / (time.perf_counter() - began)
    print(f"{name:10} {rate / 1e6:5.2f} M steps/s, {int(rolled_out[name].ended.sum())} episodes")


def same_bits(a, b):
    return all(np.array_equal(x, y) for x, y in zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True))


reset_is_exact = {name: same_bits(rolled_out["SameStep()"], steps) for name, steps in rolled_out.items()}
found = {name: float(value) for name, value in episode_stats(rolled_out["Chunked()"]).items()}
print(f"{found['truncated']:.1%} of the episodes were cut; the same bits as SameStep(): {reset_is_exact}")

# %% [markdown]
# Twelve of them, moving (the state is not among what `rollout` keeps, so we step them here):


# %%
@jax.jit
def filmed(state):
    def one(state, key):
        keys = jax.random.split(key, 24)
        mask = jax.vmap(lambda s: door.action_mask(s, limit))(state)
        action = jax.vmap(lambda k, m: random_policy(door)(k, limit, None, (), m)[0])(keys[:12], mask)
        made = jax.vmap(lambda k, s, a: step(k, door, s, a, limit))(keys[12:], state, action)
        return made.state, jax.vmap(lambda s: door.render(s, limit))(made.state)

    return jax.lax.scan(one, state, jax.random.split(jax.random.key(5), 30))[1]


Animation(grid_of(filmed(jax.tree.map(lambda x: x[:12], env_state.state)), columns=6), fps=6)

# %% [markdown]
# ## Every moon at once
#
# Gravity and thrust are parameters, so a `vmap` over them is a sweep of the physics: one program lands on all moons.
# The pilot falls freely and fires when the way that is left is what braking needs. Where thrust is less than gravity
# nothing can be stopped, and a landing is soft only if falling from at least 5 m at full thrust ends below 1 m/s:
# thrust > gravity - 1 / (2 x 5).


# %%
def pilot(key, params, obs, carry):
    height, speed = obs
    brake = params.thrust - params.gravity
    needed = jnp.where(brake > 0, speed**2 / (2 * jnp.maximum(brake, 1e-6)), jnp.inf)
    return ((needed + 0.2 * speed > height) & (speed > 0.3)).astype(jnp.int32), carry


gravities, thrusts = jnp.linspace(0.5, 5, SIDE), jnp.linspace(0.5, 10, SIDE)


@jax.jit
def soft_landings(gravity, thrust):
    there = Params(gravity=gravity, thrust=thrust, max_steps=400)
    landed = evaluate(jax.random.key(9), lander, there, pilot, there, 16, 400)
    return jnp.mean(landed.returns > 0), jnp.mean(landed.returns < 0)


soft, hard = jax.vmap(lambda thrust: jax.vmap(lambda gravity: soft_landings(gravity, thrust))(gravities))(thrusts)
figure, axes = plt.subplots(1, 2, figsize=(10, 4.2), sharey=True, layout="constrained")
for axis, share, title in zip(axes, (soft, hard), ("soft landings", "crashes"), strict=True):
    shown = axis.pcolormesh(gravities, thrusts, share, cmap="viridis", vmin=0, vmax=1)
    axis.plot(gravities, gravities - 0.1, color="white", ls="--", label="thrust = gravity - 1/10")
    axis.set(xlabel="gravity, m/s²", title=f"{title} on {SIDE * SIDE} moons")
axes[0].set_ylabel("thrust, m/s²")
axes[0].legend(loc="lower right")
figure.colorbar(shown, ax=axes, label="share of 16 landings")
plt.show()

# %% [markdown]
# Below the line is physics. Above it, on the right, the pilot brakes a little late. The corner on the upper left is
# dark in both pictures: an engine so strong for so light a moon throws the lander up again with every burst of 0.1 s,
# and it is cut, still hopping, after 400 steps.

# %% [markdown]
# ## The claim
#
# The compiled program is the loop over environments and steps; begun anew in chunks or all at once, the environments
# see the same bits; a truncated flight is bootstrapped and a crash is not; and no moon is landed on softly that physics
# forbids.

# %%
assert loop_is_equal and bool(steps.ended.any())
assert all(reset_is_exact.values()) and found["num_episodes"] >= 2 * WORLDS
assert abs(different - expected) < 40
for steps in flown.values():
    assert bool(jnp.all((steps.bootstrap != 0) <= (steps.truncated & ~steps.terminated)))
    assert bool(steps.truncated[:, cut].any()) and not bool(steps.truncated[: last + 1, crashed].any())
assert bool(jnp.all(flown["NextStep()"].obs[last, crashed] == first.obs[-1, crashed]))
forbidden = thrusts[:, None] < 0.97 * (gravities[None] - 0.1)
assert float(jnp.where(forbidden, soft, 0).max()) == 0
easy = (thrusts[:, None] > 1.8 * gravities[None]) & (thrusts[:, None] < 6)
assert float(jnp.where(easy, soft, 1).min()) == 1 and float(jnp.where(thrusts[:, None] > 8, hard, 0).max()) == 0
print("One program, the same bits as the loop, and only the environments that finished begin anew.")
