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
# # Nonlinear recurrences in parallel (parallel_scan, Newton's method)
#
# **The question.** A nonlinear recurrence h[t] = f(h[t-1], x[t]) looks like a loop that nothing can shorten. Newton's
# method treats all its steps as one system of equations and solves them together. When does that take four iterations,
# and when does it take as many as there are steps? And are its gradients those of the loop?
#
# We watch Newton's method converge on a network that forgets and fail on one that is chaotic, measure the number that
# tells the two apart beforehand, and compare values and gradients of every method with `jax.lax.scan` in double
# precision. The last cell asserts the answers.
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
import functools

import jax
import jax.numpy as jnp
import matplotlib.pyplot as plt
import numpy as np

from jaxpar.processes import keep_programs
from jaxpar.scan import affine_scan
from jaxpar.solve import (
    GaussSeidel,
    Jacobi,
    Newton,
    ParallelBackward,
    Quasi,
    Sequential,
    choose,
    lyapunov,
    parallel_scan,
)

keep_programs()  # what this notebook compiles is loaded the next time

jax.config.update("jax_enable_x64", True)
STATES, STEPS = 32, 256

# %% [markdown]
# ## Two networks that differ in one number
#
# The same tanh network twice: its recurrent matrix is scaled by 0.9, and by 3. The largest Lyapunov exponent is the
# mean growth of a small error, in nats a step: negative means that the network forgets where it came from.

# %%
keys = jax.random.split(jax.random.key(0), 3)
matrix = jax.random.normal(keys[0], (STATES, STATES)) / np.sqrt(STATES)
xs = 0.1 * jax.random.normal(keys[1], (STEPS, STATES))
start = jax.random.normal(keys[2], (STATES,))


def network(gain):
    """Returns f(h, x) -> (new h, output), as `jax.lax.scan` takes it."""

    def f(h, x):
        h = jnp.tanh(gain * matrix @ h + x)
        return h, h

    return f


GAINS = {"stable": 0.9, "chaotic": 3.0}
truth = {name: jax.lax.scan(network(gain), start, xs)[1] for name, gain in GAINS.items()}
exponent = {name: float(lyapunov(network(gain), start, xs)) for name, gain in GAINS.items()}
for name, value in exponent.items():
    print(f"{name:8} gain {GAINS[name]}: {value:+.3f} nats a step")

# %% [markdown]
# ## Newton's method, iteration by iteration
#
# Each row of a picture is one iteration, each column a step in time, the colour the error of the state there. Iteration
# k has the first k states right, whatever the network: that is the diagonal edge. Where the network forgets, all the
# other steps are right after a handful of iterations as well.


# %%
def errors_by_iteration(name, iterations):
    """Returns log10 of the largest error at each step after each number of iterations."""
    f, rows = network(GAINS[name]), []
    guess = jnp.zeros((STEPS, STATES))
    newton = jax.jit(lambda guess: newton_step(f, guess))
    for _ in range(iterations):
        error = np.abs(np.asarray(guess - truth[name])).max(-1)
        rows.append(np.log10(np.clip(np.nan_to_num(error, nan=1e3), 1e-16, 1e3)))
        guess = newton(guess)
    return np.stack(rows)


def newton_step(f, guess):
    """One iteration, written out: linearise all steps, solve the linear recurrence, add the update."""
    step = lambda h, x: f(h, x)[0]  # noqa: E731
    before = jnp.concatenate([start[None], guess[:-1]])
    residual = jax.vmap(step)(before, xs) - guess
    jacobian = jax.vmap(jax.jacfwd(step))(before, xs)
    return guess + affine_scan(jacobian, residual, kind="dense")


pictures = {name: errors_by_iteration(name, 24) for name in GAINS}
figure, axes = plt.subplots(1, 2, figsize=(10, 3.2), sharey=True, layout="constrained")
for axis, (name, picture) in zip(axes, pictures.items(), strict=True):
    image = axis.imshow(picture, aspect="auto", origin="lower", vmin=-16, vmax=1, cmap="viridis", interpolation="none")
    axis.set(title=f"{name}: {exponent[name]:+.2f} nats a step", xlabel="step t")
axes[0].set_ylabel("iteration")
figure.colorbar(image, ax=axes, label="log10 of the error")
plt.show()

# %% [markdown]
# ## The library's solver says which it was
#
# `parallel_scan` takes the arguments of `jax.lax.scan`. On the chaotic network no iteration is to be trusted: it says
# so in `Stats` and finishes step by step, so that the result is a true trajectory all the same: every state is f of the
# one before. (It is not the very one of another run: there, any two roundings part.) `choose` would not have tried.

# %%
solved, stats, defect = {}, {}, {}
for name, gain in GAINS.items():
    f = network(gain)
    run = jax.jit(functools.partial(parallel_scan, f, start, method=Newton(), with_stats=True))
    _, solved[name], stats[name] = run(xs)
    before = jnp.concatenate([start[None], solved[name][:-1]])
    defect[name] = np.max(np.abs(np.asarray(jax.vmap(f)(before, xs)[0] - solved[name])))
    print(f"{name:8} {stats[name]}")
    print(f"{'':8} every state is f of the one before to {defect[name]:.1e}")
    print(f"{'':8} on a GPU, for 100,000 steps: {choose(f, start, jnp.tile(xs, (391, 1)), platform='gpu').reason}")

# %% [markdown]
# ## Gradients
#
# The gradient of a loss by the weights, through every method, against the loop's. Quasi-Newton iterates with a diagonal
# in place of the Jacobian, and its gradient is exact all the same: at the solution the true Jacobian is used.


# %%
def loss(matrix, method):
    """A loss of all outputs, as a function of the recurrent matrix."""

    def f(h, x):
        h = jnp.tanh(0.9 * matrix @ h + x)
        return h, h

    return jnp.sum(jnp.sin(3 * parallel_scan(f, start, xs, method=method)[1]))


METHODS = (Newton(), Quasi(), Jacobi(), GaussSeidel(block=16), ParallelBackward())
loop = jax.jit(jax.grad(lambda m: loss(m, Sequential())))(matrix)
gradient_error = {}
for method in METHODS:
    gradient = jax.jit(jax.grad(lambda m, method=method: loss(m, method)))(matrix)
    name = type(method).__name__
    gradient_error[name] = np.max(np.abs(np.asarray(gradient - loop))) / np.max(np.abs(np.asarray(loop)))
    print(f"{name:16} relative error {gradient_error[name]:.1e}")

# %% [markdown]
# ## The claim
#
# Newton's method solves the predictable network in at most eight iterations and says of the chaotic one that it did
# not; both results are true trajectories, the predictable one the loop's to rounding; and every gradient is exact.

# %%
assert exponent["stable"] < -0.05 and exponent["chaotic"] > 0.05
assert pictures["stable"][8].max() < -12 and pictures["chaotic"][8].max() > -1
assert stats["stable"].converged and int(stats["stable"].iterations) <= 8
assert not stats["chaotic"].converged
assert all(error < 1e-12 for error in defect.values())
assert np.max(np.abs(np.asarray(solved["stable"] - truth["stable"]))) < 1e-12
assert all(error < 1e-8 for error in gradient_error.values())
print("Four to eight iterations where the network forgets, an honest no where it does not, exact gradients everywhere.")
