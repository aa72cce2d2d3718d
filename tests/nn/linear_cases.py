"""Inputs of linear attention's kernels: every kind of decay, documents, rows that end early; and their outcome."""

import jax
import jax.numpy as jnp
import numpy as np

from jaxpar.nn.mixers.linear_attention import linear_attention
from jaxpar.nn.mixers.options import Packing, Readout, RecurrenceExecution

KINDS = ("none", "heads", "rows", "bonus", "heads, normaliser", "rows, normaliser", "heads, floor")


def gates(rng, *shape):
    """Log decays of all strengths: next to 0, none, and 50."""
    weak, strong = -np.exp(rng.uniform(-8, 0, shape)), np.where(rng.random(shape) < 0.3, -50.0, 0.0)
    return np.where(rng.random(shape) < 0.5, weak, strong)


def inputs_of(kind, batch, length, groups, heads, depth, width, dtype="float32"):
    """Arrays (q, k, v, log_decay, bonus, state), and what the gradient of outputs and state is."""
    rng = np.random.default_rng(3)
    normal = lambda *shape: jnp.asarray(rng.standard_normal(shape), "float32")  # noqa: E731
    groups = heads if kind == "bonus" or "rows" in kind else groups
    q, k = (normal(batch, length, groups, depth) / depth**0.25 for _ in range(2))
    v, columns = normal(batch, length, heads, width), width + kind.endswith(("normaliser", "floor"))
    decay = (
        None
        if kind == "none"
        else gates(rng, batch, length, heads, *(() if "heads" in kind else (depth,)))
    )
    bonus = normal(heads, depth) if kind == "bonus" else None
    state, g = (
        normal(batch, heads, depth, columns),
        normal(batch, length, heads, width + kind.endswith("normaliser")),
    )
    narrow = [x.astype(dtype) for x in (q, k, v)]
    decay = None if decay is None else jnp.asarray(decay, "float32")
    return (*narrow, decay, bonus, state), (g, normal(*state.shape))


def outcome(impl, kind, starts, valid, **form):
    """Outputs of tokens that count, the last state, and all gradients."""

    def run(arrays, cotangents):
        def call(q, k, v, decay, bonus, state):
            floor = None
            if kind.endswith("floor"):  # some of them larger than what is divided by, some smaller
                logs = np.random.default_rng(7).standard_normal(v.shape[:3])
                floor = jnp.exp(jnp.asarray(logs, "float32"))
            readout = Readout(
                bonus=bonus, floor=floor, normaliser=kind.endswith("normaliser"), dtype="float32"
            )
            return linear_attention(
                q,
                k,
                v,
                decay,
                state=state,
                packing=Packing(starts=starts, valid=valid),
                readout=readout,
                execution=RecurrenceExecution(impl=impl, **form),
            )

        (out, last), pull = jax.vjp(call, *arrays)
        counts = 1.0
        if valid is not None:
            counts = (jnp.arange(out.shape[1])[None] < valid[:, None])[..., None, None].astype(
                out.dtype
            )
        return out * counts, last, pull((cotangents[0] * counts, cotangents[1]))

    return run
