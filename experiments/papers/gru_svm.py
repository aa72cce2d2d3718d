"""A gated recurrent unit whose last state a support vector machine reads, beside the same with a softmax.

    python -m experiments.papers.gru_svm                     # two CPU cores, two minutes
    python -m experiments.papers.gru_svm seeds=1 steps=100   # twenty seconds, and less sure
    python -m experiments.papers.gru_svm size=32
    python -m experiments.papers.gru_svm length=48 steps=600 # the marked events farther apart
    python -m experiments.papers.gru_svm seeds=10

GRU-SVM (Agarap 2017, arXiv:1709.03082): s = w . h[T] + b and y of -1 or 1,

    loss = mean of max(0, 1 - y s)^2 + |w|^2 / (2 C), where the twin has the cross entropy of two logits.

The states come from `jaxpar.solve.parallel_scan`, all steps at once. Traffic is generated: of T events two are marked,
and a row is an attack if the numbers of these add up to more than 0.
"""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jaxtyping import Array, Float

from jaxpar.fields import AtLeast, field
from jaxpar.nn import GRU, recurrent
from jaxpar.nn.leaf import init_leaves
from jaxpar.solve import Newton

from ..app import small_commands

HEADS = ("svm", "softmax")


def traffic(rng: np.random.Generator, rows: int, length: int) -> tuple[np.ndarray, np.ndarray]:
    """Returns events [rows, T, 2], numbers and marks, and labels [rows], -1 or 1."""
    numbers, marks = rng.standard_normal((rows, length)), np.zeros((rows, length))
    half = length // 2
    for first, last in ((0, half), (half, length)):
        marks[np.arange(rows), rng.integers(first, last, rows)] = 1
    labels = np.where((numbers * marks).sum(1) > 0, 1, -1)
    return np.stack([numbers, marks], 2).astype(np.float32), labels


def init(seed: int, size: int, head: str) -> dict:
    """Draws the cell's parameters and the head's, w [n, 1] of a machine or [n, 2] of a softmax, and b."""
    width = 1 if head == "svm" else 2
    params = init_leaves(jax.random.key(seed), GRU(size).leaves(2))
    w = np.random.default_rng(seed).standard_normal((size, width)) / size**0.5
    return {"cell": params, "w": jnp.asarray(w, jnp.float32), "b": jnp.zeros(width)}


def states(params: dict, xs: Float[Array, "B T 2"], method=None) -> Float[Array, "B T n"]:
    """Returns the states after every event, by Newton's iteration or another `method`."""
    size = params["w"].shape[0]
    return recurrent(GRU(size), params["cell"], xs, method=method or Newton())[0]


def loss(
    params: dict, xs: Array, labels: Array, method=None, penalty: float = 100.0
) -> tuple[Array, Array]:
    """Returns the loss by the kind of head, and scores [B], over 0 for an attack; `penalty` is C."""
    out = states(params, xs, method)[:, -1] @ params["w"] + params["b"][None]
    if out.shape[1] == 1:
        hinge = jnp.square(jnp.maximum(0, 1 - labels * out[:, 0])).mean()
        return hinge + jnp.square(params["w"]).sum() / (2 * penalty), out[:, 0]
    entropy = optax.softmax_cross_entropy_with_integer_labels(out, (labels > 0).astype(int)).mean()
    return entropy, out[:, 1] - out[:, 0]


def learn(head: str, seed: int, steps: int, size: int = 16, length: int = 24, method=None) -> float:
    """Trains on new traffic at every step and returns the accuracy on 2,048 rows apart."""
    params, rule = init(seed, size, head), optax.adam(1e-2)
    moments = rule.init(params)

    @jax.jit
    def update(params, moments, xs, labels):
        (value, _), grads = jax.value_and_grad(
            functools.partial(loss, method=method), has_aux=True
        )(params, xs, labels)
        grads, moments = rule.update(grads, moments, params)
        return optax.apply_updates(params, grads), moments, value

    for step in range(steps):
        params, moments, _ = update(
            params, moments, *traffic(np.random.default_rng([seed, 0, step]), 64, length)
        )
    xs, labels = traffic(np.random.default_rng([seed, 1]), 2048, length)
    return float(((jax.jit(loss)(params, xs, labels)[1] > 0) == (labels > 0)).mean())


@dataclasses.dataclass(frozen=True)
class Config(small_commands.SmallConfig):
    """What it trains.

    Attributes:
      steps: Updates of each network, on 64 new rows each.
      seeds: Networks of each kind of head, of seeds 0, 1 and so on.
      size: Units of the cell.
      length: Events of a row.
    """

    steps: int = field(300, AtLeast(1))
    seeds: int = field(3, AtLeast(1))
    size: int = field(16, AtLeast(1))
    length: int = field(24, AtLeast(2))


def execute(config: Config) -> None:
    """Prints a line for each kind of head."""
    for head in HEADS:
        rows = [
            learn(head, seed, config.steps, config.size, config.length)
            for seed in range(config.seeds)
        ]
        print(
            f"{head:8} accuracy on new traffic " + " ".join(f"{row:.4f}" for row in rows),
            flush=True,
        )


if __name__ == "__main__":
    small_commands.launch("gru_svm", Config, execute)
