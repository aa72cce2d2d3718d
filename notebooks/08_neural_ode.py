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
# # A neural differential equation at irregular times (neural ODE)
#
# **The question.** A pendulum is pushed about and seen at times that no clock keeps: now a hundredth of a second apart,
# now half a second. A network is to learn its law of motion from those sightings: it is integrated from one to the
# next, thousands of steps in a row, and the gradient comes back the same way. `jax.lax.scan` takes these steps one
# after the other. Newton's method takes them all at once: is what is learned the same, value by value and gradient by
# gradient?
#
# We train the network twice from the same start, with the loop and with the parallel solve, in double precision, watch
# both, and let what was learned swing in a world that it has not seen. The last cell asserts the answers.
#
# Two minutes on two quiet CPU cores. (There the loop is the faster of the two; what a solve in parallel is for is an
# accelerator, see `docs/benchmarks.md`.)

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
import optax

from jaxpar.processes import keep_programs
from jaxpar.solve import Newton, lyapunov, parallel_scan
from jaxpar.solve import intervals, ode_step

keep_programs()  # what this notebook compiles is loaded the next time

FAST = bool(os.environ.get("FAST"))
jax.config.update("jax_enable_x64", True)
STEPS, UPDATES = (512, 40) if FAST else (4096, 200)

# %% [markdown]
# ## What is seen
#
# A damped pendulum under a torque u, held from one sighting to the next. The gaps between sightings are lognormal: the
# longest are a hundred times the shortest. `intervals(ts, u)` makes them the inputs of a scan, `ode_step(field)` the
# step; the truth is integrated on a grid eight times as fine.

# %%
GRAVITY, FRICTION = 1.0, 0.4


def pendulum(t, h, u):
    """The law to be learned: h is angle and angular velocity."""
    angle, velocity = h
    return jnp.stack([velocity, u - GRAVITY * jnp.sin(angle) - FRICTION * velocity])


def world(seed, steps):
    """Returns times [T + 1], torques [T] and the states [T, 2] seen at all times but the first, from rest."""
    rng = np.random.default_rng(seed)
    gaps = np.clip(rng.lognormal(np.log(0.06), 0.9, steps), 0.005, 0.5)
    ts = np.concatenate([[0.0], np.cumsum(gaps)])
    torque = np.zeros(steps)
    for step in range(1, steps):  # an Ornstein-Uhlenbeck process, sampled where it is looked at
        kept = np.exp(-gaps[step] / 2)
        torque[step] = kept * torque[step - 1] + 0.35 * np.sqrt(1 - kept**2) * rng.normal()
    fine = np.interp(np.arange(8 * steps + 1) / 8, np.arange(steps + 1), ts)
    states = jax.lax.scan(ode_step(pendulum), jnp.zeros(2), intervals(fine, jnp.repeat(torque, 8)))[1][7::8]
    return ts, jnp.asarray(torque), states


ts, torque, seen = world(0, STEPS)
gaps = np.diff(ts)
print(f"{STEPS} sightings in {ts[-1]:.0f} s, {gaps.min():.3f} to {gaps.max():.2f} s apart")
print(f"angles from {seen[:, 0].min():+.2f} to {seen[:, 0].max():+.2f} rad")

# %% [markdown]
# ## What is to learn
#
# That the angle changes by the velocity is given; the acceleration is a spring and a brake, both too weak or too
# strong, plus a network of sin, cos, velocity and torque, which begins as next to nothing. The loss is the mean square
# error over the whole rollout from the first state: nothing is corrected on the way.

# %%
keys = jax.random.split(jax.random.key(0))
begun = {
    "inner": jax.random.normal(keys[0], (16, 4)) / 2,
    "shift": jnp.zeros(16),
    "outer": 0.01 * jax.random.normal(keys[1], (16,)),
}


def learned_field(params):
    """The law as far as it is known: field(t, h, u)."""

    def field(t, h, u):
        angle, velocity = h
        features = jnp.stack([jnp.sin(angle), jnp.cos(angle), velocity, u])
        force = params["outer"] @ jnp.tanh(params["inner"] @ features + params["shift"])
        return jnp.stack([velocity, force - 0.5 * angle - velocity])

    return field


def loop(step, init, xs, guess):
    """The sequential twin."""
    return jax.lax.scan(step, init, xs)[1], (jnp.int32(0), jnp.array(True))


def newton(step, init, xs, guess):
    """All steps at once, beginning from what the last update found."""
    _, states, stats = parallel_scan(step, init, xs, guess=guess, with_stats=True, method=Newton())
    return states, (stats.iterations, stats.converged)


def loss(params, ts, solver, guess):
    """The error of a rollout, and the rollout."""
    states, stats = solver(ode_step(learned_field(params)), jnp.zeros(2), intervals(ts, torque), guess)
    return jnp.mean((states - seen) ** 2), (states, stats)


# %% [markdown]
# ## Values and gradients, before anything is learned
#
# By the parameters, and by the times themselves.

# %%
SOLVERS = {"loop": loop, "Newton": newton}


def compared(params):
    """The largest difference of the two rollouts, and of each gradient relative to its largest entry."""
    grads, states = {}, {}
    for name, solver in SOLVERS.items():
        run = jax.jit(jax.value_and_grad(lambda *args, s=solver: loss(*args, s, jnp.zeros_like(seen)), (0, 1), True))
        (_, (states[name], _)), grads[name] = run(params, jnp.asarray(ts))
    newton_grads, loop_grads = jax.device_get((grads["Newton"], grads["loop"]))
    relative = jax.tree.map(lambda a, b: np.abs(a - b).max() / np.abs(b).max(), newton_grads, loop_grads)
    apart = np.abs(np.asarray(states["Newton"] - states["loop"]))
    return np.max(apart), np.max(jax.tree.leaves(relative))


differences = {"before": compared(begun)}
print("states differ by {:.1e}, gradients by {:.1e}".format(*differences["before"]))

# %% [markdown]
# ## Training, twice
#
# Adam, all updates in one program, once with each solver. Newton's method begins from the states of the update before:
# the more slowly the parameters move, the fewer iterations it needs.

# %%
adam = optax.chain(optax.clip_by_global_norm(1.0), optax.adam(optax.cosine_decay_schedule(0.03, UPDATES)))


def train(solver):
    """Returns the parameters after all updates; and of each the loss, the iterations, and whether they converged."""

    def update(carry, _):
        params, state, states = carry
        (value, (states, stats)), grads = jax.value_and_grad(loss, has_aux=True)(params, ts, solver, states)
        change, state = adam.update(grads, state)
        return (optax.apply_updates(params, change), state, states), (value, *stats)

    return jax.lax.scan(update, (begun, adam.init(begun), jnp.zeros_like(seen)), None, UPDATES)


trained, history = {}, {}
for name, solver in SOLVERS.items():
    clock = time.perf_counter()
    (trained[name], _, _), history[name] = jax.block_until_ready(jax.jit(lambda s=solver: train(s))())
    losses = history[name][0]
    print(f"{name:7} loss {losses[0]:.4f} -> {losses[-1]:.6f} in {time.perf_counter() - clock:.0f} s with compiling")
differences["after"] = compared(trained["Newton"])
print("states differ by {:.1e}, gradients by {:.1e}".format(*differences["after"]))

# %%
figure, axes = plt.subplots(1, 2, figsize=(10, 3), layout="constrained")
axes[0].semilogy(history["loop"][0], lw=4, color="tab:orange", alpha=0.5, label="loop")
axes[0].semilogy(history["Newton"][0], lw=1, color="tab:blue", label="Newton")
axes[0].set(xlabel="update", ylabel="mean square error of the rollout")
axes[0].legend()
axes[1].plot(history["Newton"][1], ".", ms=3)
axes[1].set(xlabel="update", ylabel="iterations of Newton's method", ylim=(0, None))
plt.show()

# %% [markdown]
# ## A world that it has not seen
#
# Other torques, other times. The exponent says why this works at all: the pendulum forgets, so that errors die out
# along the rollout, and a solve over thousands of steps is as good as one over ten.

# %%
other_ts, other_torque, other_seen = world(1, STEPS)
over = intervals(other_ts, other_torque)
rollouts = {
    name: parallel_scan(ode_step(learned_field(params)), jnp.zeros(2), over, method=Newton())[1]
    for name, params in {"before": begun, "after": trained["Newton"]}.items()
}
errors = {name: float(jnp.sqrt(jnp.mean((states - other_seen)[:, 0] ** 2))) for name, states in rollouts.items()}
exponent = float(lyapunov(ode_step(learned_field(trained["Newton"])), jnp.zeros(2), over))
print(f"root mean square error of the angle: {errors['before']:.3f} rad before, {errors['after']:.4f} after")
print(f"Lyapunov exponent {exponent:+.4f} nats a step")

# %%
shown = other_ts[1:] > other_ts[-1] - 25
figure, axis = plt.subplots(figsize=(10, 3), layout="constrained")
axis.plot(other_ts[1:][shown], rollouts["before"][shown, 0], color="tab:gray", ls="--", label="before")
axis.plot(other_ts[1:][shown], rollouts["after"][shown, 0], color="tab:blue", label="after")
axis.plot(other_ts[1:][shown], other_seen[shown, 0], ".", ms=3, color="tab:orange", label="seen")
axis.set(xlabel="time in s: the last 25", ylabel="angle in rad")
axis.legend(ncols=3, fontsize=8)
plt.show()

# %% [markdown]
# ## The claim
#
# Over thousands of steps of unequal length the parallel solve gives the loop's states and gradients, by parameters and
# by times, to rounding; it converges in every update; two trainings end in the same parameters; and the law that was
# learned foresees a pendulum that it has not seen.

# %%
assert gaps.max() / gaps.min() > 50
assert all(states < 1e-10 and gradients < 1e-8 for states, gradients in differences.values())
assert history["Newton"][2].all() and int(history["Newton"][1].max()) <= 12
apart = jax.tree.map(lambda a, b: np.max(np.abs(np.asarray(a - b))), trained["loop"], trained["Newton"])
assert np.max(jax.tree.leaves(apart)) < 1e-6
assert losses[-1] < losses[0] / 10 and errors["after"] < errors["before"] / 2
print(f"{STEPS} steps, {UPDATES} updates, parameters that differ by {np.max(jax.tree.leaves(apart)):.0e}.")
