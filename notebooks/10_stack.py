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
# # One stack of layers: attention and recurrences, in parallel and step by step
#
# **The question.** A transformer is a stack of layers in which something mixes the tokens: attention, or a recurrence.
# Training wants all tokens at once; a language model that writes and a policy that acts want one after the other, from
# a cache. Are the two the same? Is a stack no more than the plain loop over its layers that a textbook shows? And can
# whoever needs one take it as it is: a policy's memory, a classifier of images, an adapter on weights that stay?
#
# Two mixers are compared with a plain loop and with themselves token by token; then a classifier of handwritten digits
# is trained, and adapted to digits that lie on their side. The last cell asserts the answers.
#
# Under a minute on two quiet CPU cores.

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
import operator
import os
import time

import jax
import jax.numpy as jnp
import matplotlib.pyplot as plt
import numpy as np
import optax
from jaxpar.commands.digits import DataConfig, open_digits

from jaxpar.nn import ImageClassifier, MinGRU, SequenceTrainer
from jaxpar.nn.attention import Attention, Visible
from jaxpar.nn import Aux, Max, both
from jaxpar.nn import Lora
from jaxpar.nn.mixers import Recurrent
from jaxpar.nn import Mlp
from jaxpar.nn import Norm
from jaxpar.nn import Alibi, Rope
from jaxpar.nn import Stack, TokenInfo
from jaxpar.processes import keep_programs
from jaxpar.rl import StackMemory

keep_programs()  # what this notebook compiles is loaded the next time

FAST = bool(os.environ.get("FAST"))
B, T, D, L = 4, 24 if FAST else 48, 32, 2
TOLERANCE = 2e-5  # float32, relative to the largest number
began = time.perf_counter()

# %% [markdown]
# ## One contract
#
# A mixer says which parameters it has, what it keeps of the past, and how it is applied: `apply(params, x, cache,
# context) -> (y, cache, aux)`, for one token or for all of them. The stack knows nothing else of it.

# %%
MIXERS = {
    "attention": Attention(4, 2, 8, positions=Rope()),
    "attention in a window": Attention(4, 2, 8, positions=Rope(), visible=Visible(window=8)),
    "recurrence (MinGRU)": Recurrent(MinGRU(D)),
}
STACKS = {name: Stack(L, D, mixer, Mlp(48), init_std=0.3) for name, mixer in MIXERS.items()}
x = jax.random.normal(jax.random.key(0), (B, T, D))


def kept(stack, tokens):
    """Bytes that a row keeps of so many tokens, in all layers."""
    cache = jax.eval_shape(lambda: stack.init_cache(1, tokens))
    return sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(cache.layers))


params, whole = {}, {}
for name, stack in STACKS.items():
    params[name] = stack.init(jax.random.key(1))
    whole[name] = jax.jit(stack.apply)(params[name], x)[0]  # all tokens at once
    count = sum(leaf.size for leaf in jax.tree.leaves(params[name]))
    print(f"{name:22} {count:6,} parameters, {whole[name].shape} -> keeps {kept(stack, 4096):9,} bytes of 4096 tokens")

# %% [markdown]
# ## Token by token
#
# The loop that decodes carries the cache and gives the stack a token at a time. How far is each output from that of all
# tokens at once? For scale: how far is it if nothing is kept, so that each token sees itself alone?


# %%
def one_at_a_time(stack, params, x):
    """Outputs from a cache, as a loop over tokens."""
    params = stack.unstacked(params)

    def step(cache, token):
        y, cache, _ = stack.apply(params, token[:, None], cache=cache)
        return cache, y[:, 0]

    cache, ys = jax.lax.scan(step, stack.init_cache(B, T), jnp.swapaxes(x, 0, 1))
    return jnp.swapaxes(ys, 0, 1)


def apart(got, want):
    """The largest difference at each place, relative to the largest number."""
    return np.abs(np.asarray(got - want)).max((0, 2)) / np.abs(np.asarray(want)).max()


cached, forgetful = {}, {}
for name, stack in STACKS.items():
    cached[name] = apart(jax.jit(one_at_a_time, static_argnums=0)(stack, params[name], x), whole[name])
    info = TokenInfo(positions=jnp.tile(jnp.arange(T), B)[:, None])
    alone = jax.jit(stack.apply)(params[name], x.reshape(B * T, 1, D), info)[0]
    forgetful[name] = apart(alone.reshape(B, T, D), whole[name])
    print(
        f"{name:22} token by token: {cached[name].max():.0e} off at most; without a cache: {forgetful[name].max():.0e}"
    )

# %%
figure, (left, right) = plt.subplots(1, 2, figsize=(11, 3.2), layout="constrained")
for name, colour in zip(STACKS, ("tab:blue", "tab:green", "tab:orange"), strict=True):
    left.semilogy(np.maximum(cached[name], 1e-9), color=colour, label=name)
    left.semilogy(np.maximum(forgetful[name], 1e-9), color=colour, ls=":")
    tokens = 2 ** np.arange(0, 15)
    right.loglog(tokens, [kept(STACKS[name], int(n)) for n in tokens], color=colour, label=name)
left.axhline(np.finfo(np.float32).eps, color="gray", lw=0.8)
left.text(T - 1, 0.3 * np.finfo(np.float32).eps, "unit of float32", ha="right", fontsize=8, color="gray")
left.set(xlabel="place", ylabel="difference from all at once", title="from a cache (lines), from nothing (dots)")
right.set(xlabel="tokens seen", ylabel="bytes a row", title="what is kept")
right.legend(fontsize=8)
plt.show()

# %% [markdown]
# ## A plain loop over layers
#
# The same network as a textbook writes it, layer after layer, without anything of `jaxpar`: softmax over a square of
# scores, and a recurrence that takes one step after the other. Its values and the gradients of all its weights are
# compared with the stack's.


# %%
def normed(x, scale):
    return x / jnp.sqrt((x * x).mean(-1, keepdims=True) + 1e-5) * scale


def turned(x):
    """Rotary positions: a pair of numbers is a complex one, turned by its frequency times the place."""
    half = x.shape[-1] // 2
    angle = jnp.arange(T)[:, None, None] * 10_000.0 ** (-jnp.arange(half) / half)
    pair = jax.lax.complex(x[..., :half], x[..., half:]) * jnp.exp(1j * angle)
    return jnp.concatenate([pair.real, pair.imag], -1)


def attends(layer, x, window):
    """Softmax by its definition: 4 heads, of which two read the same keys and values."""
    q = turned(jnp.einsum("btd,dhk->bthk", x, layer["wq"]))
    k = turned(jnp.einsum("btd,dgk->btgk", x, layer["wk"])).repeat(2, 2)
    v = jnp.einsum("btd,dgk->btgk", x, layer["wv"]).repeat(2, 2)
    ago = jnp.arange(T)[:, None] - jnp.arange(T)
    scores = jnp.where((ago >= 0) & (ago < window), jnp.einsum("bthk,bshk->bhts", q, k) / 8**0.5, -jnp.inf)
    shares = jnp.exp(scores) / jnp.exp(scores).sum(-1, keepdims=True)
    return jnp.einsum("bhts,bshk,hkd->btd", shares, v, layer["wo"])


def recurs(layer, x):
    """h = (1 - z) h + z (what is new), a token at a time."""
    w = layer["mixer"]

    def step(h, token):
        z = jax.nn.sigmoid(token @ w["wz"] + w["bz"])
        h = (1 - z) * h + z * (token @ w["wh"] + w["bh"])
        return h, h @ w["w_out"]

    return jax.lax.scan(step, jnp.zeros((B, D)), x.swapaxes(0, 1))[1].swapaxes(0, 1)


def plain(params, x, name):
    for i in range(L):
        layer = jax.tree.map(operator.itemgetter(i), params["layers"])
        inside = normed(x, layer["attn_norm"]["scale"])
        x = x + (
            recurs(layer, inside) if "recurrence" in name else attends(layer, inside, 8 if "window" in name else T)
        )
        inside = normed(x, layer["mlp_norm"]["scale"])
        x = x + (jax.nn.silu(inside @ layer["w_gate"]) * (inside @ layer["w_up"])) @ layer["w_down"]
    return normed(x, params["final_norm"]["scale"])


def value_and_gradient(run):
    """Outputs, and gradients by weights and inputs of a sum that weighs each output differently."""

    def weighed(params, x):
        y = run(params, x)
        return (y * jnp.cos(jnp.arange(y.size)).reshape(y.shape)).sum(), y

    return jax.jit(jax.value_and_grad(weighed, (0, 1), has_aux=True))


def worst(got, want):
    """The largest relative difference of all arrays, each relative to its largest number."""
    pairs = zip(jax.tree.leaves(jax.device_get(got)), jax.tree.leaves(jax.device_get(want)), strict=True)
    return np.max([np.abs(a - b).max() / np.abs(b).max() for a, b in pairs])


off = {}
for name, stack in STACKS.items():
    (_, y), grads = value_and_gradient(lambda p, x, stack=stack: stack.apply(p, x)[0])(params[name], x)
    (_, want), want_grads = value_and_gradient(lambda p, x, name=name: plain(p, x, name))(params[name], x)
    off[name] = {"value": worst(y, want), "gradient": worst(grads, want_grads)}
    print(f"{name:22} value {off[name]['value']:.0e} off, the worst of all gradients {off[name]['gradient']:.0e}")

# %% [markdown]
# ## A policy's memory
#
# An agent in an endless world sees one observation after the other, and episodes end whenever they do. Its memory is
# such a stack, whose cache is what it carries. What was acted on step by step is what is learned from, a whole rollout
# at once.

# %%
memory = StackMemory(
    Stack(1, D, Attention(4, 2, 8, positions=Alibi(), visible=Visible(window=8)), Mlp(48), init_std=0.3)
)
weights = memory.init(jax.random.key(2), 5)
seen = jax.random.normal(jax.random.key(3), (T, B, 5))
starts = jax.random.bernoulli(jax.random.key(4), 0.15, (T, B))
learned, carry, _ = jax.jit(memory.apply)(weights, seen, starts, memory.initial(B))


def act(carry, step):
    """One step of all agents."""
    y, carry, _ = memory.apply(weights, *(leaf[None] for leaf in step), carry)
    return carry, y[0]


_, acted = jax.jit(lambda: jax.lax.scan(act, memory.initial(B), (seen, starts)))()
memory_off = worst(acted, learned)
print(f"{int(starts.sum())} episodes end on the way; acted and learned from: {memory_off:.0e} apart")

# %% [markdown]
# ## A classifier of images, and a loss of its layers
#
# Patches of 2 x 2 pixels are the tokens, and each sees all others. A mixer may be wrapped by another: this one tells
# how loud its outputs are, and asks for quiet. What it tells goes by `Aux` through block and stack into whatever loss
# there is; the classifier and its trainer know nothing of it.


# %%
@dataclasses.dataclass(frozen=True)
class Quiet:
    """Another mixer, whose outputs are to be small."""

    mixer: Attention
    weight: float

    causal = property(lambda self: self.mixer.causal)
    score_size = property(lambda self: self.mixer.score_size)
    num_inputs = property(lambda self: self.mixer.num_inputs)

    def __getattr__(self, name):
        return getattr(self.mixer, name)  # leaves, init_cache, cache_axes, transfers

    def apply(self, params, x, cache, context):
        y, cache, aux = self.mixer.apply(params, x, cache, context)
        told = Aux({"quiet": self.weight * jnp.square(y).mean()}, {"loudest": Max(jnp.abs(y).max())})
        return y, cache, both(aux, told)


STEPS, WIDTH = 20 if FAST else 300, 48
task = open_digits(DataConfig(shift=0), seed=0)
valid = {name: np.concatenate([batch[name] for batch in task.validation]) for name in task.validation[0]}


def classifier(weight):
    mixer = Quiet(Attention(4, 4, WIDTH // 4, visible=Visible(causal=False)), weight)
    stack = Stack(2, WIDTH, mixer, Mlp(2 * WIDTH, "gelu"), Norm("layer"), init_std=WIDTH**-0.5)
    return ImageClassifier(stack, 2, (8, 8, 1), 10)


curves, trained = {}, {}
for weight in (0.0, 0.1):
    trainer = SequenceTrainer(classifier(weight), num_steps=STEPS)
    state, step, told = trainer.init(jax.random.key(5)), jax.jit(trainer.step), []
    for i in range(STEPS):
        state, info = step(jax.random.key(i), state, task.train(i))
        told.append(info)
    curves[weight] = {name: np.array([float(each[name]) for each in told]) for name in told[0]}
    trained[weight] = state.params
network, base = classifier(0.1), trained[0.1]
first = task.train(0)
logits, aux = network.apply(base, first["inputs"])
told_loss = float(network.loss(base, first)[0])
silent = classifier(0.0)
cross_entropy = float(silent.loss(base, first)[0])
by_aux = float(aux.losses["quiet"])
print(f"loss {told_loss:.5f} = {cross_entropy:.5f} of the digits + {by_aux:.5f} of {L} layers")

# %% [markdown]
# ## An adapter
#
# Digits that lie on their side were never seen. In the place of three weights of each layer the parameters get a
# `Lora`: the same weight, and a change of rank 4. Only the changes are trained; the weights stay, to the bit, so that
# upright digits can be had back by leaving the changes out.

# %%
RANK = 4


def adapted(key, params):
    """The same parameters with adapters that change nothing yet, one a layer."""
    layers = dict(params["layers"])
    for number, name in enumerate(("wq", "wv", "w_up")):
        keys = jax.random.split(jax.random.fold_in(key, number), L)
        layers[name] = jax.vmap(lambda key, w: Lora.of(key, w, 1, RANK))(keys, layers[name])
    return params | {"layers": layers}


def parts_of(params):
    """What is trained: the two thin factors of each adapter."""
    return {name: (w.down, w.up) for name, w in params["layers"].items() if isinstance(w, Lora)}


def with_parts(params, parts):
    layers = {name: params["layers"][name].replace(down=down, up=up) for name, (down, up) in parts.items()}
    return params | {"layers": params["layers"] | layers}


def on_its_side(batch):
    return batch | {"inputs": np.rot90(batch["inputs"], axes=(1, 2)).copy()}


@jax.jit
def accuracy(params, batch):
    return network.loss(params, batch)[1]["accuracy"]


start = adapted(jax.random.key(6), base)
nothing_yet = np.max(np.abs(np.asarray(network.apply(start, first["inputs"])[0] - logits)))
rule = optax.adam(optax.cosine_decay_schedule(1e-2, STEPS))


@jax.jit
def adapt(parts, opt_state, batch):
    loss, grads = jax.value_and_grad(lambda parts: network.loss(with_parts(start, parts), batch)[0])(parts)
    change, opt_state = rule.update(grads, opt_state)
    return optax.apply_updates(parts, change), opt_state, loss


parts, losses = parts_of(start), []
opt_state = rule.init(parts)
for i in range(STEPS):
    parts, opt_state, loss = adapt(parts, opt_state, on_its_side(task.train(STEPS + i)))
    losses.append(float(loss))
final = with_parts(start, parts)
untouched = all(bool((final["layers"][name].weight == base["layers"][name]).all()) for name in parts)
share = sum(leaf.size for leaf in jax.tree.leaves(parts)) / sum(leaf.size for leaf in jax.tree.leaves(base))
right_of = {
    (who, how): float(accuracy(params, batch))
    for who, params in {"weights": base, "with adapter": final}.items()
    for how, batch in {"upright": valid, "on their side": on_its_side(valid)}.items()
}
print(f"{share:.0%} as many numbers as the network has are trained; its weights stay: {untouched}")
for (who, how), rate in right_of.items():
    print(f"{who:12} digits {how:13} {rate:.1%} right")

# %%
figure, axes = plt.subplots(1, 3, figsize=(12, 3.2), layout="constrained")


def smooth(values, width=1 if FAST else 10):
    return np.convolve(values, np.ones(width) / width, "valid")


axes[0].semilogy(smooth(curves[0.1]["loss"]), label="all weights, digits upright")
axes[0].semilogy(smooth(losses), label="adapters alone, on their side")
axes[0].set(xlabel="step", ylabel="loss", title="training")
axes[0].legend(fontsize=8)
for weight, label in {0.0: "nothing asked", 0.1: "quiet by Aux"}.items():
    axes[1].plot(curves[weight]["loudest"], label=label)
axes[1].set(xlabel="step", ylim=(0, None), title="loudest output of a mixer")
axes[1].legend(fontsize=8)
for number, who in enumerate(("weights", "with adapter")):
    bars = axes[2].bar(
        np.arange(2) + 0.4 * number - 0.2, [right_of[who, how] for how in ("upright", "on their side")], 0.38, label=who
    )
    axes[2].bar_label(bars, fmt="{:.0%}", fontsize=8)
axes[2].set(
    xticks=range(2), xticklabels=["upright", "on their side"], ylim=(0, 1.3), title="held-out digits that are right"
)
axes[2].legend(fontsize=8, ncols=2, loc="upper center")
plt.show()

# %% [markdown]
# ## The claim
#
# Whoever mixes, token by token from a cache is all at once, and the stack is the plain loop over its layers, in value
# and in gradient. A memory, a classifier, a loss of layers and an adapter need no other stack.

# %%
assert all(cached[name].max() < TOLERANCE < 1e-2 < forgetful[name].max() for name in STACKS)
assert all(error < TOLERANCE for name in STACKS for error in off[name].values()) and memory_off < TOLERANCE
assert abs(told_loss - cross_entropy - by_aux) < TOLERANCE and by_aux > 0 and nothing_yet == 0 and untouched
if not FAST:
    assert right_of["weights", "upright"] > 0.9 and right_of["with adapter", "on their side"] > 0.8
    assert curves[0.1]["loudest"][-1] < curves[0.0]["loudest"][-1]
print(
    f"cached: {max(error.max() for error in cached.values()):.0e}, plain loop: "
    f"{max(max(each.values()) for each in off.values()):.0e}; {time.perf_counter() - began:.0f} s"
)
