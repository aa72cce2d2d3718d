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
# # A world that evolves (artificial life)
#
# **The question.** Agents eat, act and have children in a world whose step is one program for all of them. Is the
# energy that they live on kept to the unit? Does eating well really make a lineage win, or only luck? And can robots
# that hear their two nearest neighbours compute?
#
# We let a world live, add up its book, hold a hundred worlds of eaters and idlers, and compare a ring of robots with
# rule 110. The last cell asserts the answers.
#
# A minute or two on two quiet CPU cores.

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

import jax
import jax.numpy as jnp
import matplotlib.pyplot as plt
import numpy as np

from jaxpar.env import Animation
from jaxpar.life import Jitter, Laws, Lstm, Reflex, World, automaton_ring, draw_world, ring_bits
from jaxpar.loop import run
from jaxpar.processes import keep_programs

keep_programs()  # what this notebook compiles is loaded the next time

FAST = bool(os.environ.get("FAST"))

# %% [markdown]
# ## A world
#
# 64 slots for agents with an LSTM each, 16 robots, 32 x 32 cells. Energy is a whole number, in 1/1024, so a sum of it
# has no order. What a step says of it in floats is for plots; `ledger` has the exact numbers.

# %%
STEPS, FRAMES = (100, 5) if FAST else (1500, 60)
AGENTS, SIZE, HIDDEN = (16, 8, 4) if FAST else (64, 32, 16)
world = World(
    Lstm(HIDDEN, 8, 2, Jitter(0.02)), AGENTS, num_robots=16, size=SIZE, window=5, max_births=8, newcomers=8
)  # fmt: skip
state = jax.jit(world.init)(jax.random.key(0))


@jax.jit
def lived(state):
    last, info = run(world, jax.random.key(1), state, None, STEPS)

    def frame(state, step):
        return world.step(jax.random.fold_in(jax.random.key(2), step), state)[0], draw_world(state, 256 // SIZE)

    return last, info, jax.lax.scan(frame, last, jnp.arange(FRAMES))[1]


last, info, film = jax.device_get(lived(state))
figure, axes = plt.subplots(1, 3, figsize=(12, 3.2), layout="constrained")
for name in ("regrowth", "heat", "eaten"):
    axes[0].plot(info[name], label=name)
axes[1].plot(info["alive"], label="alive")
axes[1].plot(info["lineages"], label="lineages")
axes[2].plot(info["diversity"], label="spread of identities")
for axis in axes:
    axis.set(xlabel="step")
    axis.legend(fontsize=8)
plt.show()
Animation(film, fps=15)

# %%
book = last.ledger
held = sum(int(np.sum(x, dtype=np.int64)) for x in (last.agents.energy, last.robots.energy, last.terrain.energy))
print(f"energy held: {held / 1024:,.3f}; the book says {book.total.exact() / 1024:,.3f}")
print(f"steps at which the book does not balance: {int((info['imbalance'] != 0).sum())} of {STEPS:,}")

# %% [markdown]
# ## Who inherits the world
#
# Ten agents, five that eat and five that do not; all want children, and death strikes at random, whoever it is. So
# only who is a parent decides. Then the same with parents drawn from all the living, as if they were read from the
# wrong list.

# %%
WORLDS, LIFE = (10, 150) if FAST else (100, 400)
eater, idler = (jnp.zeros(44).at[jnp.asarray(does)].set(1.0) for does in ([3, 4], [4]))
LAWS = Laws(start=1, child=0.5, fee=0, upkeep=0, aging=0, drift=0)
SIZES = dict(num_agents=10, num_start=10, num_robots=2, size=4, lattice=1, window=1, seen_agents=1, seen_robots=1)


class Shuffled(World):
    """A world whose children are anybody's."""

    def children(self, key, agents, births, prices):
        anyone = jax.random.categorical(key, jnp.where(agents.alive, 0.0, -jnp.inf), shape=births.parent.shape)
        return super().children(key, agents, births._replace(parent=anyone), prices)


def winners(kind):
    small = kind(Reflex(), **SIZES, max_births=10, newcomers=0, ticks=1, laws=LAWS)

    def one(key):
        state = small.init(key)
        state = state._replace(agents=state.agents._replace(genome=jnp.stack([eater, idler] * 5)))

        def body(carry, step):
            state, winner = carry
            now = jax.random.fold_in(key, step)
            state, _ = small.step(now, state)
            alive = state.agents.alive & (jax.random.uniform(jax.random.fold_in(now, 1), (10,)) > 0.05)
            energy = jnp.where(alive, state.agents.energy, 0)
            state = state._replace(agents=state.agents._replace(alive=alive, energy=energy))
            eats = state.agents.genome[:, 3] > 0
            left = jnp.any(alive & eats), jnp.any(alive & ~eats)
            alone = jnp.where(left[0] == left[1], -1, jnp.where(left[0], 1, 0))
            return (state, jnp.where(winner < 0, alone, winner)), None

        return jax.lax.scan(body, (state, jnp.int32(-1)), jnp.arange(LIFE))[0][1]

    return np.asarray(jax.jit(jax.vmap(one))(jax.random.split(jax.random.key(3), WORLDS)))


right, shuffled = winners(World), winners(Shuffled)
for name, ended in (("its own parents", right), ("anybody's", shuffled)):
    print(
        f"children of {name}: eaters alone in {(ended == 1).sum()} of {WORLDS} worlds, idlers in {(ended == 0).sum()}"
    )

# %% [markdown]
# ## Robots that compute
#
# 32 robots around a torus, each of which hears its two neighbours and looks up a table of eight bits: rule 110, which
# can compute anything.

# %%
bits = np.zeros(32, int)
bits[-1] = 1
ring, robots = automaton_ring(110, bits, ticks=1)
step, rows, want = jax.jit(ring.step), [bits], [bits]
for number in range(31):
    robots, _ = step(jax.random.key(number), robots)
    rows.append(np.asarray(ring_bits(robots)))
    left, right_of = np.roll(want[-1], 1), np.roll(want[-1], -1)
    want.append((110 >> (4 * left + 2 * want[-1] + right_of)) & 1)
plt.imshow(rows, cmap="Greys")
plt.gca().set(xlabel="robot", ylabel="generation")
plt.show()

# %%
assert not info["imbalance"].any() and held == book.total.exact()
assert (right == 1).mean() >= (0.7 if FAST else 0.95) > (shuffled == 1).mean()
np.testing.assert_array_equal(rows, want)
