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
# # 2048 on four cells: learned, planned, evolved and solved
#
# **The question.** 2048 on four cells is small enough to be solved: how near do a learner, a search that the learner
# leads, and evolution come to the best play there is, and does anything come out above it?
#
# All boards are written down, 1,296 of them. So each method becomes a table of what it does on every board, and is
# judged exactly, without one random game. The last cell asserts the answers.
#
# A minute and a half on two quiet CPU cores.

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
import time

import jax
import jax.numpy as jnp
import matplotlib.pyplot as plt
import numpy as np

from envs.puzzles.tiles2048 import State, legal_slides, slide_left
from jaxpar import envs
from jaxpar.loop import run
from jaxpar.neat import Episodes, Neat, NeatConfig, apply, init_carry, io_sizes
from jaxpar.neat import act
from jaxpar.processes import keep_programs
from jaxpar.rl import GuidedSearch, Network, Ppo, PpoRates, train
from jaxpar.rl import guide_of

keep_programs()  # what this notebook compiles is loaded the next time

FAST = bool(os.environ.get("FAST"))

# %% [markdown]
# ## Solve it exactly
#
# A tile is a power of two, at most 32 here, so a board is four digits from 0 to 5. Every move of every board comes from
# the environment's own `slide_left`; then a 2 or a 4 appears in an empty cell. Tiles only grow: value iteration has
# converged after as many sweeps as the longest game has moves.

# %%
game, params = envs.make("2048-2x2")
boards = np.stack(np.meshgrid(*[np.arange(6, dtype=np.int8)] * 4, indexing="ij"), -1).reshape(-1, 2, 2)
digits = np.array([216, 36, 6, 1])


def slid(boards, action):
    """Boards after a move, and what it merged; 0 to 3 are up, right, down, left."""
    turned = np.rot90(boards, action + 1, (1, 2))  # so that the move goes to the left
    after, merged = jax.jit(slide_left)(turned)
    return np.rot90(np.asarray(after), -action - 1, (1, 2)), np.asarray(merged).sum(1)


legal = np.asarray(jax.vmap(legal_slides)(boards)).T  # [4, boards]
moved, merged = zip(*(slid(boards, action) for action in range(4)), strict=True)
following = np.clip(np.stack(moved), 0, 5).reshape(4, -1, 4) @ digits
merged = np.stack(merged).astype(float)

appears = np.zeros((len(boards), len(boards)))  # chances of what a new tile makes of a board
for number, board in enumerate(boards.reshape(-1, 4)):
    empty = np.flatnonzero(board == 0)
    for cell in empty:
        appears[number, number + digits[cell]] += 0.9 / len(empty)
        appears[number, number + 2 * digits[cell]] += 0.1 / len(empty)
start = appears[0] @ appears  # two tiles on an empty board


def values_of(choose):
    """What every board is worth, if `choose` takes one of the values `[4, boards]` of its moves."""
    values, before = np.zeros(len(boards)), None
    while before is None or np.abs(values - before).max() > 1e-12:
        before = values
        earned = np.where(legal, merged + (appears @ values)[following], -np.inf)
        values = np.where(legal.any(0), choose(earned), 0.0)
    return values, earned


best, earned = values_of(lambda earned: earned.max(0))
random, _ = values_of(lambda earned: np.where(legal, earned, 0).sum(0) / np.maximum(legal.sum(0), 1))


def judged(actions):
    """The exact mean score of a table of actions `[boards]`, from the start."""
    assert legal[actions, np.arange(len(boards))][legal.any(0)].all(), "every move is legal"
    return start @ values_of(lambda earned: earned[actions, np.arange(len(boards))])[0]


print(f"the best play scores {start @ best:.2f} on average, random play {start @ random:.2f}")

# %% [markdown]
# ## Learn it
#
# PPO, with legal moves masked. What it has learned is asked once for every board.

# %%
UPDATES = 10 if FAST else 80
ppo = Ppo(
    game,
    Network(hidden=(64, 64)),
    PpoRates(learning_rate=3e-3, anneal=float(UPDATES), discount=1.0, reward_scale=0.05, entropy_coef=0.005),
    num_envs=128,
    num_steps=32,
)
began = time.perf_counter()
learner, infos = jax.jit(lambda key: train(ppo, key, params, UPDATES))(jax.random.key(0))
curve = np.asarray(infos["return_mean"])
agent = ppo.agent(greedy=True)
states = State(jnp.asarray(boards), jnp.zeros(len(boards), jnp.int32), jnp.zeros(len(boards), bool))
masks, key = jnp.asarray(legal.T), jax.random.key(1)


def likeliest(board, mask):
    return agent(key, learner.weights, board, agent.first_carry(), mask)[0]


table = {"learned (PPO)": np.asarray(jax.jit(jax.vmap(likeliest))(states.tiles, masks))}
print(f"{UPDATES * 128 * 32:,} steps in {time.perf_counter() - began:.0f} s with compiling")

# %% [markdown]
# ## Plan it
#
# A tree search looks ahead in the game itself, and asks the learned network what its leaves are worth. An edge of the
# tree keeps the first tile that was drawn, so the visits of several searches are added up.

# %%
search, TREES = GuidedSearch(8 if FAST else 64), 2 if FAST else 16
guide = guide_of(agent, learner.weights)


def looked_ahead(state):
    # The network learned rewards of a twentieth, so its values are twenty times as large in scores.
    scaled = lambda obs, mask: (guide(obs, mask)[0], 20 * guide(obs, mask)[1])  # noqa: E731
    visits = jax.vmap(lambda key: search(key, game, state, params, scaled, 1.0).visits)(jax.random.split(key, TREES))
    return jnp.argmax(visits.sum(0))


playable = legal.any(0)
asked = jax.jit(jax.vmap(looked_ahead))(jax.tree.map(lambda x: x[playable], states))
table["searched"] = np.zeros(len(boards), int)
table["searched"][playable] = np.asarray(asked)

# %% [markdown]
# ## Evolve it
#
# Networks without a memory, of four numbers and a constant. They know no masks: a move that is not legal stands for the
# next one that is, clockwise.

# %%


@dataclasses.dataclass(frozen=True)
class Clockwise(type(game)):
    """The game with every action legal."""

    def transition(self, key, state, action, params):
        turns = (action + jnp.arange(4)) % 4
        allowed = super().action_mask(state, params)[turns]
        return super().transition(key, state, turns[jnp.argmax(allowed)], params)

    def action_mask(self, state, params):
        return jnp.ones(4, bool)


GENERATIONS = 3 if FAST else 60
clockwise = Clockwise(game.generator)
problem = Episodes(clockwise, goal=float("inf"), episodes=32, max_steps=40)
neat = Neat(NeatConfig(*io_sizes(game, params, True), 150, 24, 60, 16, "fast", "feedforward"), problem)
population = jax.jit(lambda: neat.init(jax.random.key(3), None))()
each = jax.tree.map(lambda x: jnp.broadcast_to(jnp.asarray(x), (GENERATIONS,)), params)
population, history = jax.jit(lambda state: run(neat, jax.random.key(4), state, each, GENERATIONS))(population)
champion = neat.express(population.champion)


def evolved(board):
    x = jnp.append(board.reshape(-1).astype(float), 1.0)[None]
    return act(game.action_space(params), apply(champion, init_carry(champion), x)[0][0])


wanted = np.asarray(jax.jit(jax.vmap(evolved))(states.tiles))
turns = (wanted + np.arange(4)[:, None]) % 4
first = np.take_along_axis(legal, turns, 0).argmax(0)
table["evolved (NEAT)"] = turns[first, np.arange(len(boards))]

# %%
scores = {"random": start @ random} | {name: judged(actions) for name, actions in table.items()}
figure, axes = plt.subplots(1, 2, figsize=(10, 2.8), layout="constrained")
axes[0].barh(list(scores), list(scores.values()))
axes[0].axvline(start @ best, color="tab:green", label="the best there is")
axes[0].set(xlabel="exact mean score")
axes[0].legend(fontsize=8)
axes[1].plot(curve, label="PPO, while exploring")
axes[1].axhline(start @ best, color="tab:green")
axes[1].set(xlabel="update", ylabel="mean score")
plt.show()
for name, score in scores.items():
    print(f"{name:15} {score:.2f}, {score / (start @ best):.1%} of the best")
for name, actions in table.items():
    same = earned[actions, np.arange(len(boards))] == earned.max(0)
    print(f"{name:15} does the best there is on {same[playable].mean():.0%} of all boards")

# %% [markdown]
# A learner of 300,000 steps lacks two hundredths of the best score. The search adds nothing to what it knows already,
# and evolution, which sees scores alone, stays behind.

# %%
assert all(score <= start @ best + 1e-9 for score in scores.values()), "nothing is better than the best"
if not FAST:
    assert scores["learned (PPO)"] > 0.95 * (start @ best) and scores["searched"] > 0.95 * (start @ best)
    assert 2 * scores["random"] < scores["evolved (NEAT)"] < scores["learned (PPO)"]
