"""Trains a mixture whose experts belong to volunteers: some do not answer, and all answer with weights that are old.

    python -m experiments.papers.volunteer_experts                  # two CPU cores, three minutes
    python -m experiments.papers.volunteer_experts failures=[0.5] delays=[0] seeds=[0]
    python -m experiments.papers.volunteer_experts delays=[256] failures=[0]
    python -m experiments.papers.volunteer_experts dimensions=3 k=8 seeds=[0]
    python -m experiments.papers.volunteer_experts steps=200 seeds=[0]

Learning@home (Ryabinin and Gusev 2020, arXiv:2002.04013). Experts lie on a grid of d dimensions with G places each.
A digit's logit of the expert at (g_1, .., g_d) is a_1[g_1] + .. + a_d[g_d], of d G numbers that its router makes; the k
best of the G^d sums are found by a beam of k, without the sums. An expert that fails is left out, and those that answer
count in its place. One that is late by t steps computes with the weights of t steps ago, and its gradients are added to
those of now. Without failures and delays all of it is the ordinary mixture.
"""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jaxtyping import Array, Bool, Float, Int

from jaxpar.fields import AtLeast, Between, Each, field
from jaxpar.nn.experts.route import heard
from jaxpar.nn.experts.transport import mixture
from jaxpar.types import UsageError

from ..app import small_commands
from ..app.sequences.series import handwritten

CLASSES, WIDTH = 10, 32


def best_of_grid(
    logits: Float[Array, "N d G"], k: int
) -> tuple[Int[Array, "N k"], Float[Array, "N k"]]:
    """Returns the k experts of the largest sums of logits, best first, and their weights, whose sum is 1.

    An expert's number is that of its place, the last dimension fastest. The best of all have the best for a beginning,
    so a beam of k loses none. Cost: O(d k G log k) a digit, of G^d experts.
    """
    size = logits.shape[-1]
    score, number = logits[:, 0], jnp.broadcast_to(jnp.arange(size), logits[:, 0].shape)
    for dimension in range(logits.shape[1]):
        if dimension:
            score = (score[..., None] + logits[:, dimension, None]).reshape(len(score), -1)
            number = (number[..., None] * size + jnp.arange(size)[None, None]).reshape(
                len(number), -1
            )
        score, best = jax.lax.top_k(score, min(k, score.shape[-1]))
        number = jnp.take_along_axis(number, best, -1)
    return number, jax.nn.softmax(score)


def init(seed: int, features: int, dimensions: int, places: int) -> dict:
    """Draws the root, the router [D, d, G], experts [G^d, D, D] twice, and the head; float32."""
    rng, experts = np.random.default_rng(seed), places**dimensions

    def draw(*shape: int, of: int) -> jax.Array:
        return jnp.asarray(rng.standard_normal(shape) / np.sqrt(of), jnp.float32)

    held = {name: draw(experts, WIDTH, WIDTH, of=WIDTH) for name in ("w_up", "w_down")}
    router = draw(WIDTH, dimensions, places, of=WIDTH)
    return {"root": draw(features, WIDTH, of=features), "router": router, "experts": held,
            "head": draw(WIDTH, CLASSES, of=WIDTH)}  # fmt: skip


def logits(
    params: dict, x: Float[Array, "N P"], answers: Bool[Array, "N E"], k: int
) -> Float[Array, "N 10"]:
    """Computes each digit by those of its k experts that answer, beside what goes past them."""
    h = jax.nn.relu(x @ params["root"])
    chosen = best_of_grid(jnp.einsum("nd,dig->nig", h, params["router"]), k)
    return (h + mixture("gelu", h, *heard(*chosen, answers), params["experts"])) @ params["head"]


def loss(
    params: dict, x: Array, y: Int[Array, " N"], answers: Bool[Array, "N E"], k: int
) -> jax.Array:
    """Computes the mean cross-entropy in nats."""
    return optax.softmax_cross_entropy_with_integer_labels(logits(params, x, answers, k), y).mean()


def stale(past: dict, delay: Int[Array, " E"]) -> dict:
    """Returns each expert's weights of so many steps ago, of the leaves [steps, E, ..] with the newest first."""
    return jax.tree.map(lambda w: w[delay, jnp.arange(len(delay))], past)


def train(
    params: dict,
    x: np.ndarray,
    y: np.ndarray,
    *,
    steps: int,
    k: int,
    failures: float,
    most: int,
    seed: int,
) -> dict:
    """Makes `steps` of Adam on batches of 128 digits, asked for by 16 trainers; experts are up to `most` steps late."""
    optimizer, rng, experts = (
        optax.adam(2e-3),
        np.random.default_rng(seed),
        len(params["experts"]["w_up"]),
    )
    past = jax.tree.map(lambda w: jnp.repeat(w[None], most + 1, 0), params["experts"])

    @functools.partial(jax.jit, donate_argnums=(0, 1, 2))
    def step(params, past, state, x, y, answers, delay):
        grads = jax.grad(loss)(params | {"experts": stale(past, delay)}, x, y, answers, k)
        updates, state = optimizer.update(grads, state)
        params = optax.apply_updates(params, updates)
        past = jax.tree.map(
            lambda old, new: jnp.concatenate([new[None], old[:-1]]), past, params["experts"]
        )
        return params, past, state

    params, state = jax.tree.map(jnp.array, params), optimizer.init(params)
    for _ in range(steps):
        rows, delay = rng.integers(0, len(x), 128), rng.integers(0, most + 1, experts)
        answers = np.repeat(rng.random((16, experts)) >= failures, 8, axis=0)
        params, past, state = step(params, past, state, x[rows], y[rows], answers, delay)
    return params


@dataclasses.dataclass(frozen=True)
class Config(small_commands.SmallConfig):
    """What it trains.

    Attributes:
      dimensions: d of the grid.
      places: G of each dimension.
      k: Experts a digit, at most places^dimensions.
      failures: Shares of experts that do not answer, a row each.
      delays: The longest, in steps; a row each.
      steps: Updates of each mixture.
      seeds: A mixture of each in every row.
    """

    dimensions: int = field(2, AtLeast(1))
    places: int = field(4, AtLeast(1))
    k: int = field(4, AtLeast(1))
    failures: list[float] = field(
        legal=Each(Between(0, 1)), default_factory=lambda: [0.0, 0.1, 0.5]
    )
    delays: list[int] = field(legal=Each(AtLeast(0)), default_factory=lambda: [0, 16, 64])
    steps: int = field(1000, AtLeast(1))
    seeds: list[int] = field(legal=Each(Between(0, 2**32 - 1)), default_factory=lambda: [0, 1, 2])

    def __post_init__(self):
        """Refuses more experts a digit than there are."""
        super().__post_init__()
        if self.k > self.places**self.dimensions:
            raise UsageError(
                f"k={self.k} is more than the {self.places**self.dimensions} experts that there are."
            )


def execute(config: Config) -> None:
    """Prints held-out accuracy for each share of failures and longest delay."""
    experts = config.places**config.dimensions
    x, y = handwritten("volunteers' experts")
    x, y = x.reshape(len(x), -1).astype(np.float32), y.astype(np.int32)
    print("| failures | longest delay | held-out accuracy of each seed |\n|---|---|---|")
    for failures, most in ((f, d) for f in config.failures for d in config.delays):
        found = []
        for seed in config.seeds:
            held, rest = np.split(np.random.default_rng(seed).permutation(len(x)), [len(x) // 3])
            params = init(seed, x.shape[1], config.dimensions, config.places)
            how = dict(steps=config.steps, k=config.k, failures=failures, most=most, seed=seed)
            params = train(params, x[rest], y[rest], **how)
            everyone = np.ones((len(held), experts), bool)
            found.append((logits(params, x[held], everyone, config.k).argmax(-1) == y[held]).mean())
        print(
            f"| {failures} | {most} | {', '.join(f'{value:.3f}' for value in found)} |", flush=True
        )


if __name__ == "__main__":
    small_commands.launch("volunteer_experts", Config, execute)
