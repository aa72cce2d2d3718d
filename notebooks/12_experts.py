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
# # Mixtures of experts: each token by a few of many MLPs
#
# **The question.** An mlp computes every token with all of its weights. A mixture of experts has eight smaller ones,
# and a router sends each token to two of them: as many products a token as an mlp of twice an expert's width, and four
# times its weights. Is what comes out really what the formula says, when rows are sorted by expert and multiplied
# group by group? Does a router, left alone, use all experts? And are weights that a token never meets of any use?
#
# We route one batch, compare the sorted form with the dense one in value and gradient, train with and without the loss
# that balances loads, and then train a mixture beside the mlp that costs the same. The last cell asserts the answers.
#
# Half a minute on two quiet CPU cores.

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
import optax

from jaxpar.nn.experts import Experts, route
from jaxpar.nn.experts import sort_choices
from jaxpar.nn.experts import dense_mixture
from jaxpar.nn.experts import load
from jaxpar.nn import init_leaves
from jaxpar.nn import Context
from jaxpar.nn import Mlp
from jaxpar.processes import keep_programs

keep_programs()  # what this notebook compiles is loaded the next time

FAST = bool(os.environ.get("FAST"))
jax.config.update("jax_platforms", "cpu")
E, K, D, F, TASKS = 8, 2, 16, 8, 8  # experts, of them a token, width, width of an expert, kinds of tokens
ROWS, LENGTH, STEPS = 8, 32, 300 if FAST else 1000
TOLERANCE = 1e-5  # float32: sums are taken in another order
print(Experts(F, E, K))

# %% [markdown]
# ## Tokens of eight kinds
#
# A token lies near one of eight points, and what is to be made of it is a map of its own there. Nobody tells the kind.

# %%
rng = np.random.default_rng(0)
POINTS = jnp.asarray(rng.standard_normal((TASKS, D)), jnp.float32)
MAPS = jnp.asarray(rng.standard_normal((TASKS, D, D)) / np.sqrt(D), jnp.float32)


def batch(key):
    """Tokens [B, T, D], what to make of them, and their kinds."""
    one, two = jax.random.split(key)
    kind = jax.random.randint(one, (ROWS, LENGTH), 0, TASKS)
    off = 0.5 * jax.random.normal(two, (ROWS, LENGTH, D))
    return POINTS[kind] + off, jnp.tanh(2 * jnp.einsum("btd,btde->bte", off, MAPS[kind])), kind


def apply(layer, params, x):
    """Outputs of a layer alone, and what it tells."""
    return layer.apply(params, x, Context(jnp.zeros(x.shape[:2], jnp.int32)))


def drawn(layer, seed=0):
    """Parameters of a layer alone."""
    return init_leaves(jax.random.key(seed), layer.leaves(D, D**-0.5, F**-0.5))


# %% [markdown]
# ## One batch, routed
#
# Left, the weight of each expert for the first tokens: two are not zero, and they sum to 1. Right, the choices in the
# order in which they are multiplied: those of one expert lie together, whatever the number of each.

# %%
layer = Experts(F, E, K)
params, (x, y, kind) = drawn(layer), batch(jax.random.key(1))
chosen = route(x @ params["w_router"], K)
plan = sort_choices(chosen.expert.reshape(-1, K), E)
weights = np.zeros((ROWS * LENGTH, E))
np.put_along_axis(weights, np.asarray(chosen.expert).reshape(-1, K), np.asarray(chosen.weight).reshape(-1, K), 1)

figure, (left, right) = plt.subplots(1, 2, figsize=(11, 3), layout="constrained")
image = left.imshow(weights[:40].T, aspect="auto", cmap="magma")
left.set(xlabel="token", ylabel="expert", title="weights of the router")
figure.colorbar(image, ax=left)
of_row = np.asarray(chosen.expert).reshape(-1)[np.asarray(plan.order)]
right.scatter(np.arange(len(of_row)), np.asarray(plan.order) // K, c=of_row, cmap="tab10", s=5)
right.set(xlabel="row of the grouped product", ylabel="token", title="choices sorted by expert (colours)")
plt.show()

# %% [markdown]
# ## The sorted form is the dense mixture
#
# `dense_mixture` computes all experts on all tokens and weights them, by 0 where they were not chosen. It costs E / k
# times as much and is what the sorted form must equal, in value and in each gradient.


# %%
def sorted_form(params, x):
    return jnp.sum(jnp.sin(apply(layer, params, x)[0]))


def dense_form(params, x):
    return jnp.sum(jnp.sin(dense_mixture(params, x, route(x @ params["w_router"], K))))


got, want = (jax.jit(jax.value_and_grad(form, (0, 1)))(params, x) for form in (sorted_form, dense_form))
apart = jax.tree.map(lambda a, b: np.abs(a - b).max() / np.abs(b).max(), *jax.device_get((got, want)))
for name, error in {"value": apart[0], "x": apart[1][1], **apart[1][0]}.items():
    print(f"{name:9} {error:.1e}")

# %% [markdown]
# ## With and without balance, and beside an mlp
#
# All learn the eight maps from the same batches, by the square of the error. The mlp has 2 F units: as many products a
# token as the two experts that it takes.


# %%
def learn(layer, seed=0):
    """Returns the errors of all steps, and the parameters."""
    optimizer = optax.adam(optax.cosine_decay_schedule(1e-2, STEPS))

    def loss(params, x, y):
        out, aux = apply(layer, params, x)
        error = jnp.mean((out - y) ** 2)
        return error + sum(aux.losses.values()), error

    def step(carry, key):
        params, state = carry
        x, y, _ = batch(key)
        grads, error = jax.grad(loss, has_aux=True)(params, x, y)
        updates, state = optimizer.update(grads, state)
        return (optax.apply_updates(params, updates), state), error

    params = drawn(layer, seed)
    keys = jax.random.split(jax.random.key(seed + 7), STEPS)
    (params, _), errors = jax.jit(lambda carry: jax.lax.scan(step, carry, keys))((params, optimizer.init(params)))
    return np.asarray(errors), params


def loads(params):
    """The load of each expert over the mean one, on a fresh batch, and how often each kind takes each expert."""
    x, _, kind = batch(jax.random.key(99))
    chosen = route(x @ params["w_router"], K).expert
    by_kind = np.zeros((TASKS, E))
    np.add.at(by_kind, (np.asarray(kind)[..., None], np.asarray(chosen)), 1)
    return E * np.asarray(load(chosen, E)), by_kind / by_kind.sum(1, keepdims=True)


LAYERS = {
    "mlp of equal cost": Mlp(2 * F),
    "experts, no balance": Experts(F, E, K, balance_loss=0.0),
    "experts, balanced": Experts(F, E, K, balance_loss=0.02),
}
learned = {name: learn(layer) for name, layer in LAYERS.items()}
final = {name: float(errors[-50:].mean()) for name, (errors, _) in learned.items()}
shares = {name: loads(learned[name][1]) for name in list(LAYERS)[1:]}

figure, axes = plt.subplots(1, 3, figsize=(13, 3.4), layout="constrained")
for name, (errors, _) in learned.items():
    smooth = np.convolve(errors, np.full(25, 1 / 25), "valid")
    axes[0].plot(np.arange(len(smooth)) + 25, smooth, label=name)
axes[0].set(xlabel="step", ylabel="mean square error", yscale="log")
axes[0].legend(frameon=False, fontsize=8)
for place, (name, (each, _)) in enumerate(shares.items()):
    axes[1].bar(np.arange(E) + 0.4 * place, np.sort(each)[::-1], 0.38, label=name, color=f"C{place + 1}")
axes[1].axhline(1, color="black", lw=0.8, ls="--")
axes[1].set(xlabel="experts by load", ylabel="load over the mean")
axes[1].legend(frameon=False, fontsize=8)
image = axes[2].imshow(shares["experts, balanced"][1], aspect="auto", cmap="viridis", vmin=0)
axes[2].set(xlabel="expert", ylabel="kind of token", title="who takes whom, balanced")
figure.colorbar(image, ax=axes[2], label="share of a kind's choices")
plt.show()
for name, error in final.items():
    print(f"{name:20} error {error:.4f}" + (f", largest load {shares[name][0].max():.2f}" if name in shares else ""))

# %% [markdown]
# The router was told no kinds and yet sends each kind to experts of its own: that is where the four times as many
# weights go. Kinds are equally frequent here, and so it uses all experts even when left alone; the loss for balance
# costs next to nothing. In text they are not, and a router left alone may starve some. In a language model the same is
# `python -m experiments.lm preset=moe_tiny`, whose run draws the loads of all layers.

# %%
assert np.max(jax.tree.leaves(apart)) < TOLERANCE
assert final["experts, balanced"] < 0.9 * final["mlp of equal cost"]
assert shares["experts, balanced"][0].max() < max(1.6, shares["experts, no balance"][0].max())
print("the sorted form is the dense mixture; balanced experts beat the mlp of equal cost")
