"""AdamW and Muon on the leaves of a language model, against slow references."""

import functools
import math

import jax
import numpy as np
import optax
import pytest
from fast import jit, noisy_params
from lm_configs import lm_config
from tolerance import assert_close

from jaxpar.lm import OptimizerConfig, Trainer
from jaxpar.lm.params import decay_mask
from jaxpar.optim import learning_rate

MODEL = lm_config(
    vocab_size=8, num_layers=2, embed_dim=8, num_heads=4, num_kv_heads=2, head_dim=4, mlp_dim=12, norm="layer",
    bias=True, dtype="float32", init_std=0.3,
)  # fmt: skip
MATRICES = ("wq", "wk", "wv", "wo", "w_gate", "w_up", "w_down")


def noise_like(tree, seed=0):
    rng = np.random.default_rng(seed)
    return jax.tree.map(lambda x: rng.standard_normal(x.shape).astype(x.dtype), tree)


def optimizer_of(config, num_steps):
    return Trainer(MODEL, config, num_steps).make_optimizer()


@pytest.mark.parametrize("name", ["adamw", "muon"])
def test_adamw_equals_a_twin_in_double_precision(name, x64):
    """Clipping, moments, their corrections, schedule and decay; with Muon, of what it leaves to Adam (Nesterov's)."""
    config = OptimizerConfig(
        name, learning_rate=0.01, warmup_steps=3, weight_decay=0.3, clip_norm=2.0
    )
    params = noisy_params(MODEL, np.float64)
    optimizer, rate = optimizer_of(config, 12), learning_rate(config, 12)
    state, update, b1, b2 = optimizer.init(params), jit(optimizer.update), config.b1, config.b2

    def at(tree, path):
        return np.asarray(functools.reduce(lambda tree, key: tree[key], path, tree))

    paths = [("embedding",), ("head",), ("final_norm", "scale"), ("layers", "bq")]
    paths += [("layers", "wq")] if name == "adamw" else []
    decays = [path[-1] in ("embedding", "head", "wq") for path in paths]
    means, squares = ([np.zeros(at(params, path).shape) for path in paths] for _ in range(2))
    weights = [at(params, path).copy() for path in paths]
    for step in range(12):
        grads = noise_like(params, step)
        norm = math.sqrt(sum((g**2).sum() for g in jax.tree.leaves(grads)))
        params, state, _ = update(grads, state, params)
        for i, path in enumerate(paths):
            g = at(grads, path) * min(1, config.clip_norm / norm)
            means[i] = b1 * means[i] + (1 - b1) * g
            squares[i] = b2 * squares[i] + (1 - b2) * g**2
            mean = means[i] / (1 - b1 ** (step + 1))
            if name == "muon":
                mean = b1 * means[i] / (1 - b1 ** (step + 2)) + (1 - b1) * g / (
                    1 - b1 ** (step + 1)
                )
            moved = mean / (np.sqrt(squares[i] / (1 - b2 ** (step + 1))) + config.eps)
            weights[i] -= float(rate(step)) * (moved + config.weight_decay * decays[i] * weights[i])
            assert_close(at(params, path), weights[i], 1e-13)


# ---------------------------------------------------------------- what decays


@pytest.mark.parametrize("name", ["adamw", "muon"])
def test_decay_touches_matrices_only(name):
    """With no gradient all that moves is what decays, by rate * decay * itself."""
    params = noisy_params(MODEL)
    config = OptimizerConfig(name, warmup_steps=0, schedule="constant", weight_decay=0.5)
    optimizer = optimizer_of(config, 10).transformation()
    zeros = jax.tree.map(np.zeros_like, params)
    updates, _ = jit(optimizer.update)(zeros, optimizer.init(params), params)
    want = jax.tree.map(lambda p, weight: -1e-3 * 0.5 * p * weight, params, decay_mask(MODEL))
    jax.tree.map(lambda got, want: np.testing.assert_allclose(got, want, rtol=1e-5), updates, want)


def test_weights_are_the_matrices():
    mask = decay_mask(MODEL)
    assert (
        mask["embedding"]
        and mask["head"]
        and not mask["final_norm"]["scale"]
        and not mask["final_norm"]["bias"]
    )
    assert {name for name, weight in mask["layers"].items() if weight is True} == set(MATRICES)


@pytest.mark.parametrize("name", ["adamw", "muon"])
def test_eps_reaches_every_adam(name):
    """An eps far over the gradient makes Adam's step tiny."""
    config = OptimizerConfig(name, warmup_steps=0, eps=1e3, weight_decay=0.0)
    params = noisy_params(MODEL)
    optimizer = optimizer_of(config, 10).transformation()
    updates, _ = jit(optimizer.update)(noise_like(params, 1), optimizer.init(params), params)
    for leaf in (updates["embedding"], updates["final_norm"]["scale"], updates["layers"]["bq"]):
        assert np.abs(leaf).max() < 1e-5


def test_clipping():
    config = OptimizerConfig(warmup_steps=0, clip_norm=0.5)
    params = noisy_params(MODEL)
    grads = noise_like(params, 1)
    for norm, clip in ((0.5, 0.5), (0.0, 0.0)):
        optimizer = optimizer_of(
            OptimizerConfig(warmup_steps=0, clip_norm=clip), 10
        ).transformation()
        _, state = jit(optimizer.update)(grads, optimizer.init(params), params)
        want = norm or float(optax.tree.norm(grads))
        np.testing.assert_allclose(
            optax.tree.norm(optax.tree.get(state, "mu")), (1 - config.b1) * want, rtol=1e-5
        )


# ---------------------------------------------------------------- Muon


def slow_orthogonal(matrix):
    """Muon's five Newton-Schulz steps (Keller Jordan, 2024), of one matrix, wide side last."""
    tall = matrix.shape[0] > matrix.shape[1]
    x = (matrix.T if tall else matrix) / (np.linalg.norm(matrix) + 1e-8)
    for _ in range(5):
        gram = x @ x.T
        x = 3.4445 * x + (-4.7750 * gram + 2.0315 * gram @ gram) @ x
    return x.T if tall else x


def as_matrix(name, weight):
    """One layer's weight as the matrix from its inputs to its outputs."""
    inputs = 2 if name == "wo" else 1
    return weight.reshape(math.prod(weight.shape[:inputs]), -1)


def test_muon_equals_one_matrix_at_a_time(x64):
    rate, beta, decay = 0.01, 0.9, 0.1
    config = OptimizerConfig(
        "muon",
        learning_rate=rate,
        schedule="constant",
        warmup_steps=0,
        b1=beta,
        weight_decay=decay,
        clip_norm=0.0,
    )
    params = noisy_params(MODEL, np.float64, std=1.0)
    optimizer = optimizer_of(config, 10).transformation()
    state, update = optimizer.init(params), jit(optimizer.update)
    momentum = {name: np.zeros(params["layers"][name].shape) for name in MATRICES}
    for step in (1, 2, 3):
        grads = noise_like(params, step)
        updates, state = update(grads, state, params)
        for name in MATRICES:
            gradient, weight = grads["layers"][name], params["layers"][name]
            momentum[name] = beta * momentum[name] + (1 - beta) * gradient
            ahead = beta * momentum[name] / (1 - beta ** (step + 1)) + (1 - beta) * gradient / (
                1 - beta**step
            )
            for layer in range(MODEL.num_layers):
                matrix = as_matrix(name, ahead[layer])
                turned = slow_orthogonal(matrix) * 0.2 * math.sqrt(max(matrix.shape))
                want = -rate * (turned + decay * as_matrix(name, weight[layer]))
                assert_close(
                    as_matrix(name, np.asarray(updates["layers"][name][layer])), want, 1e-12
                )
                if name != "wk":  # square enough to be full of rank
                    values = np.linalg.svd(
                        turned / (0.2 * math.sqrt(max(matrix.shape))), compute_uv=False
                    )
                    assert 0.3 < values.min() and values.max() < 1.3


def test_muon_holds_momentum_of_every_matrix_and_nothing_else():
    state = jax.eval_shape(optimizer_of(OptimizerConfig("muon"), 10).init, noisy_params(MODEL))
    paths = [
        jax.tree_util.keystr(path, simple=True, separator="/")
        for path, _ in jax.tree.leaves_with_path(state)
    ]

    def held_by(part):
        return {
            path.split("layers/")[1]
            for path in paths
            if f"inner_states/{part}/" in path and "layers/" in path
        }

    assert held_by("muon") == set(MATRICES)
    assert not held_by("adam") & set(MATRICES) and "bq" in held_by("adam")
