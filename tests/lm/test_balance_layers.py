"""The balance loss of all layers together is transformers', also of folders that name it."""

import json

import jax
import numpy as np
import pytest
import twin_folders
from fast import jit, noisy_params
from lm_configs import lm_config, with_fields

from jaxpar.lm import config_from_hf, from_hf, to_hf
from jaxpar.lm.loss import losses

SIZES = twin_folders.SIZES | dict(num_layers=3, num_experts=4, init_std=0.5)
CONFIGS = {
    "mixtral": lm_config(**SIZES),
    "qwen3_moe": lm_config(**SIZES, experts_per_token=3, qk_norm=True),
}
ROWS = 2
LENGTH = 7


def load_balancing_loss(gate_logits, num_experts, k, mask):
    """A twin in NumPy of `load_balancing_loss_func` of transformers' Mixtral.

    Args:
      gate_logits: A list over layers of [B * T, E].
      num_experts: E.
      k: Experts of a token.
      mask: Its attention mask [B, T], 1 where a token counts.
    """
    every = np.concatenate(gate_logits, 0)
    scores = np.exp(every - every.max(-1, keepdims=True))
    scores = scores / scores.sum(-1, keepdims=True)
    chosen = np.argsort(-scores, -1, kind="stable")[:, :k]
    hot = np.eye(num_experts)[chosen]  # [L B T, k, E]
    counted = np.tile(mask.reshape(-1), len(gate_logits))
    tokens_per_expert = (hot * counted[:, None, None]).sum(0) / counted.sum()  # [k, E]
    prob_per_expert = (scores * counted[:, None]).sum(0) / counted.sum()
    return num_experts * (tokens_per_expert * prob_per_expert[None]).sum()


def logits_of_gates(folder, tokens, monkeypatch):
    """Returns the logits of the twin's routers, layer by layer, [B * T, E]."""
    found = []
    plain = twin_folders.mixture

    def recorded(x, logits, *rest):
        found.append(logits)
        return plain(x, logits, *rest)

    monkeypatch.setattr(twin_folders, "mixture", recorded)
    twin_folders.twin_logits(folder, tokens)
    layers = len(found) // len(tokens)
    return [np.concatenate(found[layer::layers]) for layer in range(layers)]


@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("name", CONFIGS)
def test_it_is_the_loss_of_transformers(name, weighted, tmp_path, monkeypatch, x64):
    config = CONFIGS[name]
    to_hf(noisy_params(config, np.float32), config, tmp_path / "model")
    path = tmp_path / "model" / "config.json"
    values = json.loads(path.read_text())
    values |= {"output_router_logits": True, "router_aux_loss_coef": 0.25}
    path.write_text(json.dumps(values))
    read, params = from_hf(tmp_path / "model", dtype="float64", param_dtype=np.float64)
    assert (read.losses.balance_loss, read.losses.balance_layers) == (0.25, "concatenated")

    tokens = np.random.default_rng(0).integers(0, 16, (ROWS, LENGTH))
    batch = {"tokens": tokens, "targets": tokens}
    mask = np.ones((ROWS, LENGTH))
    if weighted:
        mask = (np.arange(LENGTH) < [[4], [7]]).astype(float)
        batch["weights"] = mask
    gates = logits_of_gates(tmp_path / "model", tokens, monkeypatch)
    assert len(gates) == config.num_layers
    want = 0.25 * load_balancing_loss(gates, 4, config.experts.experts_per_token, mask)

    plain = with_fields(read, balance_loss=0.0)
    run = jit(losses, static_argnums=2)
    value, aux = run(params, batch, read)
    np.testing.assert_allclose(aux.losses["balance_loss"], want, rtol=1e-9)
    np.testing.assert_allclose(value - run(params, batch, plain)[0], want, rtol=1e-9)
    summed = run(params, batch, with_fields(read, balance_layers="summed"))[1]
    assert abs(summed.losses["balance_loss"] - want) > 1e-3


def test_layers_in_a_loop_and_unrolled_have_one_loss_and_gradient(x64):
    config = with_fields(CONFIGS["mixtral"], dtype="float64", balance_layers="concatenated")
    params = noisy_params(config, np.float64)
    tokens = np.random.default_rng(0).integers(0, 16, (ROWS, LENGTH))
    run = jit(jax.value_and_grad(losses, has_aux=True), static_argnums=2)
    batch = {"tokens": tokens, "targets": tokens}
    want = run(params, batch, config)
    got = run(params, batch, with_fields(config, scan_layers=False, remat="full"))
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("name", CONFIGS)
def test_folders_keep_it(name, tmp_path):
    config = with_fields(CONFIGS[name], balance_loss=0.02, balance_layers="concatenated")
    to_hf(noisy_params(config), config, tmp_path / "model")
    values = json.loads((tmp_path / "model" / "config.json").read_text())
    assert values["output_router_logits"] is True and values["router_aux_loss_coef"] == 0.02
    read = config_from_hf(tmp_path / "model", dtype="float32")
    assert (read.losses.balance_loss, read.losses.balance_layers) == (0.02, "concatenated")


@pytest.mark.parametrize(
    ("keys", "want"),
    [
        ({}, (0.01, "summed")),
        ({"router_aux_loss_coef": 0.5}, (0.01, "summed")),
        ({"output_router_logits": False, "router_aux_loss_coef": 0.5}, (0.01, "summed")),
        ({"output_router_logits": True}, (0.001, "concatenated")),
        ({"output_router_logits": True, "router_aux_loss_coef": 0}, (0.0, "concatenated")),
    ],
)
def test_the_coefficient_counts_where_transformers_trains_with_it(keys, want, tmp_path):
    config = CONFIGS["qwen3_moe"]
    to_hf(noisy_params(config), config, tmp_path / "model")
    path = tmp_path / "model" / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | keys))
    read = config_from_hf(tmp_path / "model", dtype="float32")
    assert (read.losses.balance_loss, read.losses.balance_layers) == want


@pytest.mark.slow
@pytest.mark.parametrize("name", CONFIGS)
def test_transformers_has_the_same_loss(name, tmp_path):
    torch = pytest.importorskip("torch")
    transformers = pytest.importorskip("transformers")
    config = with_fields(CONFIGS[name], balance_loss=0.25, balance_layers="concatenated")
    params = noisy_params(config, np.float32)
    to_hf(params, config, tmp_path / "model")
    model = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "model").eval()
    tokens = np.random.default_rng(0).integers(0, 16, (ROWS, LENGTH))
    labels = torch.from_numpy(tokens)
    want = float(model(labels, labels=labels).loss)
    targets = np.concatenate([tokens[:, 1:], np.full((ROWS, 1), -100)], 1)  # as it shifts them
    batch = {"tokens": tokens, "targets": targets, "weights": (targets >= 0) * 1.0}
    value, aux = losses(params, batch, config)
    balance = float(model(labels, labels=labels).aux_loss) * 0.25
    plain = float(value - aux.losses["balance_loss"])
    np.testing.assert_allclose(plain + balance, want, rtol=1e-4)
    whole = losses(params, {"tokens": tokens, "targets": tokens}, config)[1].losses["balance_loss"]
    # It counts all tokens, as no attention mask is given.
    np.testing.assert_allclose(whole, balance, rtol=1e-4)
