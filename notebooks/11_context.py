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
# # One sequence on several devices (context parallelism)
#
# **The question.** A sequence is too long for one device, so N devices have a share of its tokens each. Attention looks
# from each token at all before it: whose keys must a device see, when do they come by, and by which way? There are six
# answers: collect all keys (`gather`), pass them round (`ring`), half of them each way (`two_way`), pass the queries
# round and leave the keys (`token_ring`), exchange heads for tokens (`swap`), or both (`swap_ring`). Are they all the
# same attention, in value and in gradient? What does each send, and over which links? And why must the tokens lie in
# an odd order, if no device is to wait for another?
#
# We draw what each device holds at every step, count bytes by the table of a move, and count them again in the compiled
# program. The last cell asserts the answers.
#
# A minute on two quiet CPU cores, of which eight devices are simulated: times say nothing here, bytes do.

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
import math
import os
import time

import jax
import jax.numpy as jnp
import matplotlib.pyplot as plt
import numpy as np

from jaxpar.aot import hlo
from jaxpar.mesh import MeshSpec, make_mesh, simulate_devices, use_mesh
from jaxpar.nn.attention.context import MOVES, Order, Sizes, context_attention, move_for
from jaxpar.processes import keep_programs

keep_programs()  # what this notebook compiles is loaded the next time

FAST = bool(os.environ.get("FAST"))
jax.config.update("jax_platforms", "cpu")
simulate_devices(8)
N = 8
B, T, H, K = 1, (8 if FAST else 16) * N, 8, 8
G = 2  # key heads, fewer than devices, so that heads alone cannot be exchanged
TOLERANCE = 1e-5  # float32: sums are taken in another order
COLOURS = plt.get_cmap("turbo")(np.linspace(0.15, 0.95, N))
began = time.perf_counter()


def table_of(move, groups=G):
    """A move for N devices: `swap_ring` exchanges as many heads as there are."""
    return move_for(move, N, math.gcd(groups, N) if move == "swap_ring" else 1)


print(table_of("ring"))

# %% [markdown]
# ## Who holds what
#
# A move is a table of steps, and this is one printed. Drawn by walking it: a row is a device, a column a step of the
# forward pass, a number and its colour the device whose keys are there (or whose queries, which go round instead).
# Above a step is what was sent for it, by how many devices on; `all` is a collective. Below it is what goes home after
# it. Every device meets all keys, in the one or the other way.


# %%
def walked(move):
    """Of each attending step: what was sent, and of each device the owners of what it holds, by what it is."""
    here = np.arange(N)
    m = move.within
    group = here // m * m  # the first device of each one's group
    travels = {"two_way": ("low", "high"), "token_ring": ("queries",)}.get(move.name, ("keys",))
    held, columns = dict.fromkeys(travels, group if m > 1 else here), []
    for step in move.forward:
        sent = []
        for what, shift in step.sends:
            if shift is None:
                sent.append(f"{what} all")
            else:
                held = held | {what: np.roll(held[what], shift)}
                sent.append(f"{what} {shift:+d}")
        after = ["outputs all" if shift is None else f"{what} {shift:+d}" for what, shift in step.returns]
        if step.attends:
            columns.append((sent, held, after))
        else:
            columns[-1][2].extend(sent)  # a last step only sends
    return columns


def draw(axis, move):
    """A table of devices and steps."""
    columns, m = walked(move), move.within
    for number, (sent, held, after) in enumerate(columns):
        for device in range(N):
            if move.name == "gather":
                owners = [list(range(N))]
            else:
                owners = [[int(rows[device]) + i for i in range(m)] for rows in held.values()]
            cells = [owner for row in owners for owner in row]
            for i, owner in enumerate(cells):
                left, width = number + 0.04 + 0.92 * i / len(cells), 0.92 / len(cells)
                colour = (*COLOURS[owner][:3], 0.45)
                axis.add_patch(plt.Rectangle((left, device + 0.05), width, 0.9, color=colour, lw=0))
                if len(cells) <= 2:
                    axis.text(left + width / 2, device + 0.5, owner, ha="center", va="center", fontsize=8)
            if len(cells) > 2:
                axis.text(
                    number + 0.5, device + 0.5, f"{cells[0]} to {cells[-1]}", ha="center", va="center", fontsize=8
                )
        words = "\n".join(sent) or "its own"
        axis.text(number + 0.5, -0.15, words, ha="center", va="bottom", fontsize=6.5)
        axis.text(number + 0.5, N + 0.1, "\n".join(after), ha="center", va="top", fontsize=6.5)
    whose = "the queries of" if move.name == "token_ring" else "the keys of"
    heads = f", for a share of 1/{m} of the heads" if m > 1 else ""
    axis.set_title(f"{move.name}: {whose}{heads}", fontsize=10, pad=26, loc="left")
    axis.set(xlim=(0, max(N, len(columns)) if len(columns) > 1 else 1), ylim=(N + 0.6, 0), xticks=[])
    axis.set_yticks(np.arange(N) + 0.5, [f"device {i}" for i in range(N)], fontsize=7)
    axis.tick_params(length=0)
    for side in axis.spines.values():
        side.set_visible(False)


figure, axes = plt.subplots(3, 2, figsize=(13, 11), layout="constrained")
for axis, name in zip(axes.flat, ("ring", "two_way", "token_ring", "swap_ring", "gather", "swap"), strict=True):
    draw(axis, table_of(name))
plt.show()

# %% [markdown]
# `two_way` holds half of two devices' keys at a time. In `swap` and `swap_ring` a device holds the keys of a whole
# group for some of the heads: of all tokens at once, or a group at a time.
#
# ## Bytes over the links
#
# A device of a ring has a link up and a link down; a collective of all takes what links there are. Of a sequence of
# 65,536 tokens, 32 heads of 128 in bfloat16 over eight devices, forward and backward, with as many key heads as heads,
# with a quarter and with one. The fewer key heads, the less there is to pass on, unless it is queries that travel.
# Hatched is the forward pass. `swap` needs a key head a device.

# %%
REAL = Sizes(rows=1, tokens=65536 // 8, heads=32, groups=32, width=128, bytes=2)
LINKS = {"up": "tab:blue", "down": "tab:orange", "all": "tab:gray"}


def gigabytes(name, groups):
    """By link: (forward, backward); None where the move cannot be made."""
    if name == "swap" and groups % 8:
        return None
    move = move_for(name, 8, math.gcd(groups, 8) if name == "swap_ring" else 1)
    passes = [move.bytes(REAL._replace(groups=groups), backward) for backward in (False, True)]
    return {link: [each[link] / 1e9 for each in passes] for link in LINKS}


figure, axes = plt.subplots(1, 3, figsize=(13, 3.6), sharey=True, layout="constrained")
for axis, groups in zip(axes, (32, 8, 1), strict=True):
    for place, name in enumerate(MOVES):
        sizes = gigabytes(name, groups)
        if sizes is None:
            axis.text(place, 0.1, "not\npossible", ha="center", fontsize=7)
            continue
        used = {link: both for link, both in sizes.items() if sum(both)}
        for i, (link, (forward, backward)) in enumerate(used.items()):
            at, width = place - 0.4 + 0.8 * (i + 0.5) / len(used), 0.8 / len(used) - 0.04
            axis.bar(at, forward, width, color=LINKS[link], hatch="///", edgecolor="white", lw=0)
            bar = axis.bar(at, backward, width, bottom=forward, color=LINKS[link])
            axis.bar_label(bar, [f"{forward + backward:.2f}"], fontsize=6.5)
    axis.set_title(f"{groups} key head{'s' * (groups > 1)} of 32", fontsize=10)
    axis.set_xticks(range(len(MOVES)), MOVES, rotation=30, fontsize=8)
axes[0].set_ylabel("GB that a device sends")
axes[0].legend(
    [plt.Rectangle((0, 0), 1, 1, color=colour) for colour in LINKS.values()],
    ["link up", "link down", "collectives of all or a group"], fontsize=8, loc="upper right",
)  # fmt: skip
plt.show()

# %% [markdown]
# ## The same work for all
#
# A token sees those before it. If devices hold contiguous shares, the last one sees everything and the first nearly
# nothing, and in each step all wait for the one with most to do. In zigzag order a device holds a part from the front
# and its mirror from the back. Below, of every step of a ring: what share of the pairs of its queries and the keys that
# came by a device has to compute. The time of a step is that of the largest number in its column.


# %%
def work(name):
    """Pairs that are seen, by device and step, of all of a share's: [N, N]."""
    held = Order(name).places(T, N).reshape(N, -1)
    return np.array([[(held[d][:, None] >= held[(d - step) % N]).mean() for step in range(N)] for d in range(N)])


shares = {name: work(name) for name in ("contiguous", "zigzag", "striped")}
figure, axes = plt.subplots(1, 3, figsize=(13, 4), layout="constrained")
for axis, (name, table) in zip(axes, shares.items(), strict=True):
    image = axis.imshow(table, vmin=0, vmax=1, cmap="Blues")
    for (device, step), share in np.ndenumerate(table):
        axis.text(step, device, f"{share:.2f}", ha="center", va="center", fontsize=7, color="k" if share < 0.6 else "w")
    axis.set_title(f"{name}: {table.max(0).sum():.2f} steps of waiting and work", fontsize=10)
    axis.set(xlabel="step", ylabel="device", xticks=range(N), yticks=range(N))
figure.colorbar(image, ax=axes, label="share of the pairs", shrink=0.8)
plt.show()
waits = {name: float(table.max(0).sum()) for name, table in shares.items()}
print(
    {name: f"{wait:.2f}" for name, wait in waits.items()}, f"; evenly shared it would be {(N + 1 / (T // N)) / 2:.2f}"
)

# %% [markdown]
# ## The same attention
#
# Every move on the devices, tokens in zigzag order, beside softmax over all scores on one device: outputs, and
# gradients by queries, keys and values. `swap` gets a key head for each device.


# %%
def dense(q, k, v):
    """All scores at once."""
    k, v = (jnp.repeat(x, H // x.shape[2], axis=2) for x in (k, v))
    scores = jnp.einsum("bthk,bshk->bhts", q, k) / math.sqrt(K)
    scores = jnp.where(jnp.tril(jnp.ones((T, T), bool)), scores, -jnp.inf)
    return jnp.einsum("bhts,bshk->bthk", jax.nn.softmax(scores), v)


def both(attend):
    """Outputs and gradients."""

    def run(q, k, v, g):
        out, pull = jax.vjp(attend, q, k, v)
        return out, *pull(g)

    return run


def sent(text, mesh, members):
    """Bytes that a device sends in a compiled program: of a collective, all but the share that stays."""
    total = 0.0
    for each in hlo.collectives(text, mesh):
        share = 1 if each.kind == "collective-permute" else 1 - 1 / members
        total += each.trips * each.bytes * share
    return total


order, off, counted, told = Order("zigzag"), {}, {}, {}
mesh = make_mesh(MeshSpec(context=N), jax.devices()[:N])
places = order.split(jnp.arange(T, dtype=jnp.int32)[None], N)
for name in MOVES:
    groups = N if name == "swap" else G
    draws = np.random.default_rng(0).standard_normal
    arrays = [jnp.asarray(draws((B, T, heads, K)), jnp.float32) for heads in (H, groups, groups, H)]
    want = jax.jit(both(dense))(*arrays)
    with use_mesh(mesh):
        lie = jax.NamedSharding(mesh, jax.P(None, "context"))
        args = [jax.device_put(order.split(x, N), lie) for x in arrays]
        attend = both(lambda q, k, v, name=name: context_attention(q, k, v, places, move=name, order="zigzag"))
        program = jax.jit(attend).lower(*args).compile()
        got = [order.join(x, N) for x in program(*args)]
    pairs = zip(jax.device_get(got), jax.device_get(want), strict=True)
    off[name] = [np.abs(a - b).max() / np.abs(b).max() for a, b in pairs]
    move = table_of(name)
    counted[name] = sent(program.as_text(), mesh, move.within if move.within > 1 else N)
    sizes = Sizes(B, T // N, H, groups, K, 4)
    nothing = sizes._replace(heads=0, groups=0)  # places, which a promised order does not send
    told[name] = sum(sum(move.bytes(sizes, b).values()) - sum(move.bytes(nothing, b).values()) for b in (False, True))
    print(
        f"{name:10} value {off[name][0]:.0e} off, gradients {max(off[name][1:]):.0e}; "
        f"told {told[name]:8,.0f} bytes a device, compiled {counted[name]:8,.0f}"
    )

# %% [markdown]
# ## The claim
#
# However keys, queries or heads travel, it is the same attention, in value and in gradient; a move's table says to the
# byte what its compiled program sends; and in zigzag order no device waits for another.

# %%
assert all(error < TOLERANCE for errors in off.values() for error in errors)
assert all(math.isclose(counted[name], told[name]) for name in MOVES)
assert np.ptp(shares["zigzag"], axis=0).max() < 1e-12 and waits["contiguous"] > 1.7 * waits["zigzag"]
print(f"{len(MOVES)} moves, worst {max(map(max, off.values())):.0e} off; {time.perf_counter() - began:.0f} s")
