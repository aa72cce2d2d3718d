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
# # One task learned, evolved and planned (PPO, NEAT, POMDP search)
#
# **The question.** A model of the world is usually written once for the planner, once for the learner and once for
# whoever evolves. Here it is one object, and three methods run on it: do they agree on how good one can be? And what
# does it cost a learner to treat an episode that was merely cut as one that ended?
#
# A baby cries, mostly when it is hungry. Feeding costs something, hunger more. How well one can do at best is known
# exactly. A recurrent agent learns by PPO, whole rollouts at once; a population of networks evolves by NEAT; a tree
# search plans with the model itself. Then pendulums swing up, by right and by wrong targets. The last cell asserts the
# answers.
#
# Two minutes on two quiet CPU cores.

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

from jaxpar import envs
from jaxpar.loop import run
from jaxpar.neat import Episodes, Neat, NeatConfig, apply, init_carry, io_sizes
from jaxpar.neat import act
from jaxpar.pomdp import ParticleBelief, Vopp, from_environment, solve_exact
from jaxpar.pomdp import simulate_many
from jaxpar.processes import keep_programs
from jaxpar.rl import LastActionReward, Network, Ppo, PpoRates, train
from jaxpar.rollout import NoReset, RolloutOptions, init, rollout

keep_programs()  # what this notebook compiles is loaded the next time

FAST = bool(os.environ.get("FAST"))

# %% [markdown]
# ## What is the best?
#
# The baby's whole model is two states, two actions and two observations, so value iteration over beliefs solves it.

# %%
baby, numbers = envs.make("CryingBaby")
DISCOUNT, STEPS = float(numbers.discount), 80  # what comes after 80 steps weighs 0.0002
best = float(solve_exact(from_environment(baby, numbers)).value)
print(f"nobody returns more than {best:.3f} on average")

# %% [markdown]
# ## Learn on it
#
# A baby that is not hungry cries, too, one time in ten, so what was heard and done before matters: the agent needs a
# memory. `LastActionReward` adds its last action and reward. A GRU is trained on a whole rollout of 32 steps of 64
# babies at once.

# %%
told = LastActionReward(baby)
UPDATES = 20 if FAST else 200
ppo = Ppo(
    told,
    Network(encoder=(32,), hidden=(32,), memory="gru", memory_size=32),
    PpoRates(learning_rate=3e-3, anneal=float(UPDATES), discount=DISCOUNT, entropy_coef=0.02, reward_scale=0.1),
    num_envs=64,
    num_steps=32,
)
began = time.perf_counter()
learner, infos = jax.jit(lambda key: train(ppo, key, numbers, UPDATES))(jax.random.key(0))
print(f"{UPDATES * 64 * 32:,} steps in {time.perf_counter() - began:.0f} s with compiling")


def mean_return(policy, weights, carry, num_episodes=2000):
    """Discounted returns of that many episodes."""
    env_state = init(jax.random.key(5), told, numbers, num_episodes, carry)
    options = RolloutOptions(reset=NoReset())
    steps = rollout(jax.random.key(6), env_state, told, numbers, policy, weights, STEPS, options)[1]
    return np.asarray(DISCOUNT ** np.arange(STEPS) @ steps.reward)


agent = ppo.agent(greedy=True)
learned = mean_return(agent, learner.weights, agent.first_carry())

# %% [markdown]
# ## Evolve on it
#
# Two hundred recurrent networks, 32 episodes each a generation, and the same environment.

# %%
GENERATIONS = 5 if FAST else 60
problem = Episodes(told, goal=float("inf"), episodes=32, max_steps=30)
neat = Neat(NeatConfig(*io_sizes(told, numbers, True), 200, 24, 60, 16, "fast", "recurrent"), problem)
population = jax.jit(lambda: neat.init(jax.random.key(3), None))()
each = jax.tree.map(lambda x: jnp.broadcast_to(jnp.asarray(x), (GENERATIONS,)), numbers)
population, history = jax.jit(lambda state: run(neat, jax.random.key(4), state, each, GENERATIONS))(population)


@dataclasses.dataclass(frozen=True)
class Evolved:
    """The champion as a policy."""

    def __call__(self, key, network, obs, carry):
        x = [jnp.reshape(leaf, (1, 1)).astype(float) for leaf in jax.tree.leaves(obs)]
        y, carry = apply(network, carry, jnp.concatenate([*x, jnp.ones((1, 1))], 1))
        return act(baby.action_space(numbers), y[0]), carry


champion = neat.express(population.champion)
evolved = mean_return(Evolved(), champion, init_carry(champion))

# %% [markdown]
# ## Plan on it
#
# Nothing is learned here: 2,048 simulations of the model before every step, from a belief of 200 particles.

# %%
EPISODES = 32 if FAST else 256
planner = Vopp(num_simulations=128, iterations=2 if FAST else 16, leaf="zero", discount=DISCOUNT)
played = jax.jit(lambda key: simulate_many(key, baby, numbers, planner, ParticleBelief(200), 60, EPISODES, batch=32))(
    jax.random.key(7)
)
planned = np.asarray(played.discounted_return)

# %%
methods = {"learned (PPO, GRU)": learned, "evolved (NEAT)": evolved, "planned (VOPP)": planned}
means = {name: x.mean() for name, x in methods.items()}
errors = {name: x.std() / np.sqrt(len(x)) for name, x in methods.items()}
figure, axis = plt.subplots(figsize=(6.5, 2.6), layout="constrained")
axis.errorbar(means.values(), means.keys(), xerr=[2 * e for e in errors.values()], fmt="o", capsize=4)
axis.axvline(best, color="tab:green", label="the best there is")
axis.axvline(-17.14, color="tab:gray", ls="--", label="feed whenever it cries")
axis.set(xlabel="discounted return (two standard errors)")
axis.legend(fontsize=8)
axis.invert_yaxis()
plt.show()
print("discounted return: mean over episodes ± its standard error")
for name in methods:
    print(f"{name:20} {means[name]:.2f} ± {errors[name]:.2f}")

# %% [markdown]
# The learner waits for a second cry where that pays; evolution found a rule about as good as the best one without a
# memory. Both never saw the model, and the planner never saw the world.
#
# ## What a cut episode is worth
#
# A pendulum's episode never ends by itself; it is cut after 200 steps. `Careless` reports the cut as an end, which is
# what a single `done` flag amounts to: the learner then believes that nothing can be earned or lost after it. All else
# is equal.

# %%
pendulum, physics = envs.make("Pendulum-v1")


class Careless(type(pendulum)):
    """The pendulum, its time limit reported as an end."""

    def terminal(self, state, params):
        """At the limit."""
        return super().truncated(state, params)

    def truncated(self, state, params):
        """Never."""
        return jnp.zeros((), bool)


SEEDS, SWINGS = (2, 10) if FAST else (8, 120)
rates = PpoRates(learning_rate=1e-3, discount=0.99, entropy_coef=0.0, reward_scale=0.1)


def curves(world):
    learner = Ppo(world, rates=rates, num_envs=16, num_steps=128, epochs=10, minibatches=16)
    keys = jax.random.split(jax.random.key(8), SEEDS)
    return jax.jit(jax.vmap(lambda key: train(learner, key, physics, SWINGS)[1]["return_mean"]))(keys)


right, wrong = curves(pendulum), curves(Careless())
figure, axis = plt.subplots(figsize=(7, 3.2), layout="constrained")
for returns, name in ((right, "bootstraps where it was cut"), (wrong, "takes the cut for an end")):
    steps = 16 * 128 * np.arange(1, SWINGS + 1)
    mean, error = np.mean(returns, 0), np.std(returns, 0) / np.sqrt(SEEDS)
    axis.plot(steps, mean, label=name)
    axis.fill_between(steps, mean - 2 * error, mean + 2 * error, alpha=0.25)
axis.set(xlabel="environment steps (bands: two standard errors)", ylabel="return of an episode")
axis.legend(fontsize=8)
plt.show()
whole = {name: np.nanmean(returns, 1) for name, returns in (("right", right), ("wrong", wrong))}  # of each seed
print(f"mean return over the whole run: {whole['right'].mean():.0f} with the right targets, "
      f"{whole['wrong'].mean():.0f} with the wrong ones")  # fmt: skip

# %% [markdown]
# No value of what is seen can know when the cut comes, so wrong targets are noise, and learning takes longer. In the
# end the policy is about the same here: what is best to do does not depend on the cut.

# %%
if not FAST:
    assert all(mean - 3 * errors[name] <= best for name, mean in means.items()), "nobody is better than the best"
    assert means["learned (PPO, GRU)"] > best - 0.7, "a memory learned over whole rollouts comes near the best"
    assert means["evolved (NEAT)"] > best - 1.5 and means["planned (VOPP)"] > best - 1.5
    gap = whole["right"] - whole["wrong"]  # the same keys
    assert gap.mean() > 2 * gap.std() / np.sqrt(SEEDS), "a cut that counts as an end makes learning slower"
assert np.isfinite([*means.values()]).all()
