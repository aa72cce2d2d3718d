"""Routes digits through a trellis of blocks: each level sends a digit to one block, by what that says of its class.

    python -m experiments.information_gain_trellis                # two CPU cores, half a minute
    python -m experiments.information_gain_trellis --blocks 2 4 --weight 0

Conditional Information Gain Trellis (Bicici, Meral and Akarun 2024): level l has K_l blocks, and a router that reads
the features x of the level before. The loss of the classes trains blocks and the head; the routers learn from

    - weight * sum_l (H(route_l) - H(route_l | class)),

of means over the batch, with routes p_l(x) = softmax(x W_l). A digit takes the block of the largest p alone: its cost
is that of a path. The plain form computes all blocks and masks all but one; both are the same numbers.
"""

import argparse
import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jaxtyping import Array, Float, Int

from jaxpar.nn.experts import grouped_matmul
from jaxpar.nn.experts.dispatch import combine, rows_of, sort_choices
from jaxpar.nn.experts.losses import information_gain, load

from ._series import handwritten

CLASSES = 10


def init(seed: int, features: int, width: int, blocks: tuple[int, ...]) -> dict:
    """Draws the root, each level's router [D, K] and blocks [K, D, D], and the head; float32."""
    rng = np.random.default_rng(seed)

    def draw(*shape: int) -> jax.Array:
        return jnp.asarray(rng.standard_normal(shape) / np.sqrt(shape[-2]), jnp.float32)

    levels = [{"router": draw(width, k), "block": draw(k, width, width)} for k in blocks]
    return {"root": draw(features, width), "levels": levels, "head": draw(width, CLASSES)}


def by_rows(x: Float[Array, "N D"], route: Int[Array, " N"], weights: Float[Array, "K D F"]) -> Float[Array, "N F"]:
    """Multiplies each row by the block of its route: rows sorted by block, so that each computes its own alone."""
    plan = sort_choices(route[:, None], len(weights))
    return combine(grouped_matmul(rows_of(x, plan), weights, plan.sizes), jnp.ones((len(x), 1), x.dtype), plan)


def by_mask(x: Float[Array, "N D"], route: Int[Array, " N"], weights: Float[Array, "K D F"]) -> Float[Array, "N F"]:
    """The same by all blocks, of which one is kept."""
    kept = jax.nn.one_hot(route, len(weights), dtype=x.dtype)
    return jnp.einsum("nk,nkf->nf", kept, jnp.einsum("nd,kdf->nkf", x, weights))


def forward(params: dict, x: Float[Array, "N P"], choose=by_rows) -> tuple[Float[Array, "N 10"], list[jax.Array]]:
    """Returns logits, and each level's routes [N, K] as shares; `choose` is `by_rows` or `by_mask`."""
    h, routes = jax.nn.relu(x @ params["root"]), []
    for level in params["levels"]:
        logits = h @ level["router"]
        routes.append(jax.nn.softmax(logits))
        # A residual: blocks refine what all paths share.
        h = h + jax.nn.relu(choose(h, jnp.argmax(logits, -1), level["block"]))
    return h @ params["head"], routes


def loss(params: dict, x: jax.Array, y: Int[Array, " N"], weight: float, choose=by_rows) -> jax.Array:
    """Computes the mean cross-entropy less `weight` times the information gain of all levels, in nats."""
    logits, routes = forward(params, x, choose)
    gains = sum((information_gain(route, y, CLASSES) for route in routes), jnp.zeros((), x.dtype))
    return optax.softmax_cross_entropy_with_integer_labels(logits, y).mean() - weight * gains


def train(params: dict, x: np.ndarray, y: np.ndarray, *, steps: int, weight: float, seed: int) -> dict:
    """Makes `steps` of Adam on batches of 128 digits."""
    optimizer, rng = optax.adam(2e-3), np.random.default_rng(seed)
    state = optimizer.init(params)

    @functools.partial(jax.jit, donate_argnums=(0, 1))
    def step(params, state, x, y):
        grads = jax.grad(loss)(params, x, y, weight)
        updates, state = optimizer.update(grads, state)
        return optax.apply_updates(params, updates), state

    for _ in range(steps):
        rows = rng.integers(0, len(x), 128)
        params, state = step(params, state, x[rows], y[rows])
    return params


def judge(params: dict, x: np.ndarray, y: np.ndarray) -> tuple[float, list[float], list[float]]:
    """Returns accuracy, and of each level the information gain in nats and the largest block's load over the mean."""
    logits, routes = forward(params, jnp.asarray(x))
    gains = [float(information_gain(route, jnp.asarray(y), CLASSES)) for route in routes]
    hard = [route.argmax(-1)[:, None] for route in routes]
    loads = [
        float(route.shape[1] * load(taken, route.shape[1]).max()) for taken, route in zip(hard, routes, strict=True)
    ]
    return float((logits.argmax(-1) == y).mean()), gains, loads


def main() -> None:
    """Prints a row for the trellis and one for a single path, which costs the same a digit."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--blocks", type=int, nargs="+", default=[2, 4], help="of each level")
    parser.add_argument("--width", type=int, default=16)
    parser.add_argument("--weight", type=float, default=0.5, help="of the information gain")
    parser.add_argument("--steps", type=int, default=1500)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    options = parser.parse_args()
    if min(options.blocks) < 1 or options.weight < 0:
        parser.error("legal are --blocks of at least 1 and a --weight of at least 0.")
    x, y = handwritten("the trellis")
    x, y = x.reshape(len(x), -1).astype(np.float32), y.astype(np.int32)
    print("| seed | blocks | held-out accuracy | information gain of a level | largest load |\n|---|---|---|---|---|")
    for seed in options.seeds:
        order = np.random.default_rng(seed).permutation(len(x))
        held, rest = np.split(order, [len(x) // 3])
        for blocks in (tuple(options.blocks), (1,) * len(options.blocks)):
            params = init(seed, x.shape[1], options.width, blocks)
            params = train(params, x[rest], y[rest], steps=options.steps, weight=options.weight, seed=seed)
            accuracy, gains, loads = judge(params, x[held], y[held])
            words = [", ".join(f"{value:.2f}" for value in values) for values in (gains, loads)]
            print(f"| {seed} | {' x '.join(map(str, blocks))} | {accuracy:.3f} | {words[0]} | {words[1]} |", flush=True)


if __name__ == "__main__":
    main()
