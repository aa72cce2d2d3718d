"""Routes digits through a trellis of blocks: each level sends a digit to one block, by what that says of its class.

    python -m experiments.papers.information_gain_trellis                # two CPU cores, two minutes
    python -m experiments.papers.information_gain_trellis weight=0       # routes that nothing teaches
    python -m experiments.papers.information_gain_trellis blocks=[2,2,2]
    python -m experiments.papers.information_gain_trellis seeds=[0] steps=100
    python -m experiments.papers.information_gain_trellis width=12 seeds=[0]

Conditional Information Gain Trellis (Bicici, Meral and Akarun 2024): level l has K_l blocks, convolutions of 3 x 3, and
a router that reads the features x of the level before, means of 2 x 2 places as the head does. The loss of the classes
trains blocks and the head; the routers learn from

    - weight * sum_l (H(route_l) - H(route_l | class)),

of means over the batch, with routes p_l(x) = softmax(x W_l). A digit takes the block of the largest p alone: its cost
is that of a path. The plain form computes all blocks and masks all but one; both are the same numbers.
"""

import dataclasses
import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jaxtyping import Array, Float, Int

from jaxpar.fields import AtLeast, Between, Each, field
from jaxpar.nn.experts import grouped_matmul
from jaxpar.nn.experts.dispatch import combine, rows_of, sort_choices
from jaxpar.nn.experts.losses import information_gain, load

from ..app import small_commands
from ..app.sequences.series import handwritten

CLASSES = 10


def init(seed: int, pixels: int, width: int, blocks: tuple[int, ...]) -> dict:
    """Draws root [9, C], each level's router [P / 4 C, K] and blocks [K, 9 C, C], and the head; float32."""
    rng = np.random.default_rng(seed)

    def draw(*shape: int) -> jax.Array:
        return jnp.asarray(rng.standard_normal(shape) / np.sqrt(shape[-2]), jnp.float32)

    seen = pixels // 4 * width
    levels = [{"router": draw(seen, k), "block": draw(k, 9 * width, width)} for k in blocks]
    return {"root": draw(9, width), "levels": levels, "head": draw(seen, CLASSES)}


def patches(h: Float[Array, "N S S C"]) -> Float[Array, "N S*S 9*C"]:
    """The 3 x 3 places around each, zeros beyond the edge: a convolution is a product with these."""
    num, side, _, width = h.shape
    padded = jnp.pad(h, ((0, 0), (1, 1), (1, 1), (0, 0)))
    shifted = [padded[:, i : i + side, j : j + side] for i in range(3) for j in range(3)]
    return jnp.concatenate(shifted, -1).reshape(num, side * side, 9 * width)


def means(h: Float[Array, "N S S C"]) -> Float[Array, "N S*S*C/4"]:
    """Features of 2 x 2 places each, which router and head read."""
    num, side, _, width = h.shape
    return h.reshape(num, side // 2, 2, side // 2, 2, width).mean((2, 4)).reshape(num, -1)


def by_rows(
    x: Float[Array, "N M D"], route: Int[Array, " N"], weights: Float[Array, "K D F"]
) -> Float[Array, "N M F"]:
    """Multiplies a digit's rows by the block of its route: sorted by block, so that each computes its own alone."""
    plan = sort_choices(jnp.repeat(route, x.shape[1])[:, None], len(weights))
    rows = grouped_matmul(rows_of(x.reshape(-1, x.shape[2]), plan), weights, plan.sizes)
    return combine(rows, jnp.ones((len(rows), 1), x.dtype), plan).reshape(*x.shape[:2], -1)


def by_mask(
    x: Float[Array, "N M D"], route: Int[Array, " N"], weights: Float[Array, "K D F"]
) -> Float[Array, "N M F"]:
    """The same by all blocks, of which one is kept."""
    kept = jax.nn.one_hot(route, len(weights), dtype=x.dtype)
    return jnp.einsum("nk,nkmf->nmf", kept, jnp.einsum("nmd,kdf->nkmf", x, weights))


def forward(
    params: dict, x: Float[Array, "N P"], choose=by_rows
) -> tuple[Float[Array, "N 10"], list[jax.Array]]:
    """Returns logits, and each level's routes [N, K] as shares; `choose` is `by_rows` or `by_mask`."""
    num, side, routes = len(x), math.isqrt(x.shape[1]), []
    h = jax.nn.relu(patches(x.reshape(num, side, side, 1)) @ params["root"]).reshape(
        num, side, side, -1
    )
    for level in params["levels"]:
        logits = means(h) @ level["router"]
        routes.append(jax.nn.softmax(logits))
        # A residual: blocks refine what all paths share.
        h = h + jax.nn.relu(choose(patches(h), jnp.argmax(logits, -1), level["block"])).reshape(
            h.shape
        )
    return means(h) @ params["head"], routes


def multiplications(params: dict, pixels: int) -> tuple[int, int]:
    """Counts those of one digit along its path, and of all blocks."""
    always = (
        pixels * params["root"].size
        + params["head"].size
        + sum(x["router"].size for x in params["levels"])
    )
    each = [(pixels * level["block"][0].size, len(level["block"])) for level in params["levels"]]
    return always + sum(one for one, _ in each), always + sum(one * k for one, k in each)


def loss(
    params: dict, x: jax.Array, y: Int[Array, " N"], weight: float, choose=by_rows
) -> jax.Array:
    """Computes the mean cross-entropy less `weight` times the information gain of all levels, in nats."""
    logits, routes = forward(params, x, choose)
    gains = sum((information_gain(route, y, CLASSES) for route in routes), jnp.zeros((), x.dtype))
    return optax.softmax_cross_entropy_with_integer_labels(logits, y).mean() - weight * gains


def train(
    params: dict, x: np.ndarray, y: np.ndarray, *, steps: int, weight: float, seed: int
) -> dict:
    """Makes `steps` of Adam on batches of 128 digits."""
    optimizer, rng = optax.adam(2e-3), np.random.default_rng(seed)
    state = optimizer.init(params)

    @functools.partial(jax.jit, donate_argnums=(0, 1))
    def step(params, state, x, y):
        updates, state = optimizer.update(jax.grad(loss)(params, x, y, weight), state)
        return optax.apply_updates(params, updates), state

    for _ in range(steps):
        rows = rng.integers(0, len(x), 128)
        params, state = step(params, state, x[rows], y[rows])
    return params


def judge(params: dict, x: np.ndarray, y: np.ndarray) -> tuple[float, list[float], list[float]]:
    """Returns accuracy, and of each level the information gain in nats and the largest block's load over the mean."""
    logits, routes = jax.jit(forward)(params, jnp.asarray(x))
    gains = [float(information_gain(route, jnp.asarray(y), CLASSES)) for route in routes]
    loads = [float(r.shape[1] * load(r.argmax(-1)[:, None], r.shape[1]).max()) for r in routes]
    return float((logits.argmax(-1) == y).mean()), gains, loads


@dataclasses.dataclass(frozen=True)
class Config(small_commands.SmallConfig):
    """What it trains.

    Attributes:
      blocks: Of each level.
      width: Channels.
      weight: Of the information gain in the loss.
      steps: Updates of each network.
      seeds: A trellis and a single path of each.
    """

    blocks: list[int] = field(legal=Each(AtLeast(1)), default_factory=lambda: [2, 4])
    width: int = field(6, AtLeast(1))
    weight: float = field(0.5, AtLeast(0))
    steps: int = field(600, AtLeast(1))
    seeds: list[int] = field(legal=Each(Between(0, 2**32 - 1)), default_factory=lambda: [0, 1, 2])


def execute(config: Config) -> None:
    """Prints a row for the trellis and one for a single path, which costs the same a digit."""
    x, y = handwritten("the trellis")
    x, y = x.reshape(len(x), -1).astype(np.float32), y.astype(np.int32)
    path, every = multiplications(
        init(0, x.shape[1], config.width, tuple(config.blocks)), x.shape[1]
    )
    print(f"A digit's path takes {path:,} multiplications, all blocks {every:,}.\n")
    print(
        "| seed | blocks | held-out accuracy | information gain of a level | largest load |\n|---|---|---|---|---|"
    )
    for seed in config.seeds:
        held, rest = np.split(np.random.default_rng(seed).permutation(len(x)), [len(x) // 3])
        for blocks in (tuple(config.blocks), (1,) * len(config.blocks)):
            params = init(seed, x.shape[1], config.width, blocks)
            params = train(
                params, x[rest], y[rest], steps=config.steps, weight=config.weight, seed=seed
            )
            accuracy, gains, loads = judge(params, x[held], y[held])
            words = [", ".join(f"{value:.2f}" for value in values) for values in (gains, loads)]
            print(
                f"| {seed} | {' x '.join(map(str, blocks))} | {accuracy:.3f} | {words[0]} | {words[1]} |",
                flush=True,
            )


if __name__ == "__main__":
    small_commands.launch("information_gain_trellis", Config, execute)
