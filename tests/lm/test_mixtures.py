"""Language models of experts: trained on any mesh, streamed and drawn as the whole sequence says."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from fast import jit, noisy_params
from flat_decoding import lm_generate as generate
from lm_configs import lm_config, with_fields
from tolerance import EXACT_MATHS, assert_close

from experiments import verify
from experiments.app.lm.expert_loads import expert_loads
from jaxpar.io import Checkpoints
from jaxpar.lm import Sampling, Trainer, apply, flops_per_token, num_params, to_hf
from jaxpar.lm.loss import losses
from jaxpar.lm.params import abstract, axes, decay_mask
from jaxpar.lm.sample import empty_cache, extend
from jaxpar.lm.stages import stages
from jaxpar.mesh import MeshSpec, make_mesh, shard, use_mesh
from jaxpar.nn.attention.context import in_order
from jaxpar.nn.experts.sharded import chosen_experts
from jaxpar.optim import muon_dimensions
from jaxpar.pipeline.accumulation import InTurn
from jaxpar.types import UsageError

T, V = 6, 16
SMALL = lm_config(
    vocab_size=V,
    num_layers=2,
    embed_dim=16,
    num_heads=2,
    mlp_dim=8,
    num_experts=4,
    init_std=0.3,
    dtype="float32",
)


def tokens(rows=2, length=T):
    return np.random.default_rng(1).integers(0, V, (rows, length), dtype=np.int32)


def test_streaming_and_drawing_equal_the_whole_sequence():
    """With a capacity as well, of which nothing that is drawn is over."""
    config = with_fields(SMALL, capacity=1e-3)
    params = noisy_params(config)
    whole = jit(lambda p, x: apply(p, x, SMALL))(params, tokens())
    run = jit(lambda p, x, cache: extend(p, x, cache, config))
    cache, parts = empty_cache(config, 2, T), []
    for start, size in ((0, 4), (4, 1), (5, 1)):
        logits, cache = run(params, tokens()[:, start : start + size], cache)
        parts.append(logits)
    assert_close(np.concatenate(parts, 1), whole, 5 * EXACT_MATHS["float32"])
    draw = jit(generate, static_argnums=(3, 4))
    out, *_ = draw(jax.random.key(0), params, tokens()[:, :5], config, Sampling(1, temperature=0))
    np.testing.assert_array_equal(out[:, 5], np.asarray(whole[:, 4]).argmax(-1))


@pytest.mark.parametrize(
    "layout, flags",
    [
        (
            "data2.context2.tensor2",
            "model.experts.scores=sigmoid model.experts.shared=2 model.attention.qk_norm=true",
        ),
        (
            "fsdp2.tensor2.expert2",
            "model.experts.capacity=1.0 model.execution.transport=all_to_all "
            "model.losses.router_bias=1e-3 model.losses.router_z_loss=1e-3",
        ),
        pytest.param(
            "data2.fsdp2.tensor2",
            "model.losses.router_bias=1e-3 model.losses.router_z_loss=1e-3",
            marks=pytest.mark.slow,
        ),
        pytest.param(
            "data2.expert4", "model.execution.transport=all_to_all", marks=pytest.mark.slow
        ),
        pytest.param(
            "data2.expert4",
            "model.execution.transport=gather optimizer.name=muon",
            marks=pytest.mark.slow,
        ),
        pytest.param(
            "fsdp2.tensor2.expert2", "model.execution.transport=sum", marks=pytest.mark.slow
        ),
        pytest.param(
            "context2.expert4",
            "model.execution.transport=all_to_all model.execution.remat=full",
            marks=pytest.mark.slow,
        ),
        pytest.param(
            "context2.expert4", "model.execution.transport=annotated", marks=pytest.mark.slow
        ),
        pytest.param(
            "fsdp2.tensor2.expert2", "model.execution.transport=spill", marks=pytest.mark.slow
        ),
        pytest.param(
            "context2.expert4",
            "model.execution.transport=spill model.execution.remat=full",
            marks=pytest.mark.slow,
        ),
        pytest.param(
            "fsdp8", "model.experts.capacity=1.0 optimizer.name=muon", marks=pytest.mark.slow
        ),
        pytest.param(
            "data2.fsdp2.tensor2",
            "model.experts.capacity=1.0 model.execution.remat=full",
            marks=pytest.mark.slow,
        ),
        pytest.param(
            "data2.fsdp2.tensor2",
            "model.execution.scan_layers=false model.execution.remat=names",
            marks=pytest.mark.slow,
        ),  # 20 s
    ],
)
def test_on_a_mesh_it_is_what_it_is_on_one_device(layout, flags):
    """Loss, gradients and steps in double precision, and no collective between devices that is not declared; 10 s."""
    small = (
        "model.num_layers=1 model.embed_dim=32 model.mlp.dim=32 "
        "model.vocab_size=64 data.seq_len=8 data.batch_size=8"
    )
    config = verify.compose(
        *small.split(),
        "model.experts.num_experts=4",
        *flags.split(),
        "dtypes=[float64]",
        "topology=none",
    )
    for row in verify.verify_lm(config, [verify.parse_layout(layout)]):
        assert not row.refused and not row.breaches, row


def test_experts_fail_in_training_alone():
    """Where all fail only attention is left; where none does no number is drawn; evaluation asks all."""
    data = {"tokens": tokens(4)[:, :-1], "targets": tokens(4)[:, 1:]}
    found, worst = {}, with_fields(SMALL, expert_failures=1.0)
    params = noisy_params(SMALL, np.float32)
    for config in (SMALL, with_fields(SMALL, expert_failures=0.5), worst):
        run = jit(lambda key, config=config: InTurn()(stages(config), params, data, key, 2)[0][0])
        found[config.experts.failures] = float(run(jax.random.key(0)))
        assert (found[config.experts.failures] == float(run(jax.random.key(1)))) == (
            config.experts.failures != 0.5
        )
    silent = {
        **params,
        "layers": {**params["layers"], "w_down": jnp.zeros_like(params["layers"]["w_down"])},
    }
    left = float(jit(lambda: InTurn()(stages(SMALL), silent, data, None, 2)[0][0])())
    assert len(set(found.values())) == 3
    np.testing.assert_allclose(found[1.0], left, rtol=1e-5)
    np.testing.assert_array_equal(
        apply(params, data["tokens"], worst), apply(params, data["tokens"], SMALL)
    )


def test_router_losses_are_of_a_microbatch_and_averaged_over_them(x64):
    """Loads times mean scores are no sum over tokens: of the whole batch at once they are something else."""
    config = with_fields(SMALL, dtype="float64", balance_loss=0.5, router_z_loss=0.1)
    params, data = (
        noisy_params(config, np.float64),
        {"tokens": tokens(4)[:, :-1], "targets": tokens(4)[:, 1:]},
    )

    def plain(params):
        values = [
            losses(params, {name: x[part::2] for name, x in data.items()}, config)
            for part in range(2)
        ]
        told = {
            name: (values[0][1].losses[name] + values[1][1].losses[name]) / 2
            for name in values[0][1].losses
        }
        return (values[0][0] + values[1][0]) / 2, told

    (value, aux), grads = jit(InTurn(), static_argnums=(0, 4))(
        stages(config), params, data, None, 2
    )
    (want, told), right = jit(jax.value_and_grad(plain, has_aux=True))(params)
    assert_close((value, aux.losses, grads), (want, told, right), EXACT_MATHS["float64"])
    whole = jit(losses, static_argnums=2)(params, data, config)[1].losses["balance_loss"]
    assert abs(whole - aux.losses["balance_loss"]) > 1e-3


def test_a_step_tells_loads_and_drops_and_moves_the_bias():
    trainer = Trainer(
        with_fields(SMALL, capacity=0.5, router_bias=1e-3), num_steps=10, accumulate=2
    )
    state = jit(trainer.init)(jax.random.key(0))
    new, info = jit(trainer.step)(
        jax.random.key(1), state, {"tokens": tokens(4)[:, :-1], "targets": tokens(4)[:, 1:]}
    )
    assert 0 <= info["expert_load_min"] < 1 < info["expert_load"] <= 4
    assert 0 < info["dropped"] < 1 and info["bias_loss"] == 0
    assert np.isfinite(info["loss"]) and np.any(new.params["layers"]["b_router"] != 0)


@pytest.mark.parametrize(
    "mesh", [MeshSpec(data=8), MeshSpec(context=2, tensor=2, expert=2)], ids=str
)
def test_loads_for_the_picture_are_those_of_a_loop(mesh):
    params, batch = noisy_params(SMALL), {"tokens": tokens(8, 8)}
    want = np.zeros((2, 4))
    chosen_by = jit(
        lambda params: chosen_experts(SMALL.stack(), params, params["embedding"][batch["tokens"]])
    )
    for layer, chosen in enumerate(np.asarray(chosen_by(params))):
        for expert in chosen.reshape(-1):
            want[layer, expert] += 4 / chosen.size
    assert want.min() < 0.9 and want.max() > 1.1
    with use_mesh(make_mesh(mesh)):
        order = SMALL.order(8)
        rows = in_order(batch, order, mesh.context)
        placed = shard(
            {name: np.asarray(x) for name, x in rows.items()},
            dict.fromkeys(rows, ("batch", "seq_layer")),
        )
        np.testing.assert_allclose(
            expert_loads(SMALL, shard(params, axes(SMALL)), placed), want, atol=1e-6
        )


def test_a_checkpoint_of_another_number_of_experts_is_told(tmp_path):
    def state(num, make):
        shapes = jax.eval_shape(
            Trainer(with_fields(SMALL, num_experts=num)).init, jax.random.key(0)
        )
        return jax.tree.map(make, shapes)

    checkpoints = Checkpoints(tmp_path)
    checkpoints.save(1, state(4, lambda x: jnp.zeros(x.shape, x.dtype)), {}, {})
    on = jax.sharding.SingleDeviceSharding(jax.devices()[0])
    other = state(8, lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=on))
    with pytest.raises(
        UsageError,
        match=r"layers/w_\w+ is float32\[2,4,.* there and float32\[2,8,.* here; start anew",
    ):
        checkpoints.restore(1, other)
    checkpoints.close()


def test_a_token_costs_what_its_experts_cost():
    dense = with_fields(SMALL, num_experts=0)
    experts = 3 * 16 * 8 * 2
    assert num_params(SMALL) - num_params(dense) == 3 * experts + 2 * 16 * 4
    assert flops_per_token(SMALL, T) - flops_per_token(dense, T) == 6 * (experts + 2 * 16 * 4)


def test_muon_takes_each_expert_for_a_matrix():
    sides = muon_dimensions(axes(SMALL), decay_mask(SMALL))["layers"]
    assert (sides["w_up"].reduction_axis, sides["w_up"].output_axis) == ((2,), (3,))
    assert (sides["w_down"].reduction_axis, sides["w_down"].output_axis) == ((2,), (3,))
    assert (sides["wo"].reduction_axis, sides["wo"].output_axis) == ((1, 2), (3,))


@pytest.mark.parametrize(
    "wrong, message",
    [
        (
            dict(num_experts=0, transport="gather"),
            "model.execution.transport=gather is of experts; give model.experts.num_experts too",
        ),
        (
            dict(transport="fly"),
            "model.execution.transport='fly' is unknown; legal are auto, sum, gather, all_to_all",
        ),
        (
            dict(num_experts=0, shared_experts=1),
            "model.experts.shared=1 is of experts; give model.experts.num_experts too",
        ),
        (
            dict(mixer="gru", qk_norm=True, num_experts=0),
            "model.attention.qk_norm=true is of attention, not of model.mixer.kind=gru",
        ),
        (
            dict(num_experts=0, capacity=1.0),
            "model.experts.capacity=1.0 is of experts; give model.experts.num_experts too",
        ),
        (dict(experts_per_token=5), "experts_per_token=5 is over num_experts=4"),
        (dict(capacity=0.0), "model.experts.capacity=0.0 must be over 0"),
        (dict(balance_loss=float("nan")), "model.losses.balance_loss=nan must be a finite number"),
        (
            dict(router_scores="tanh"),
            "model.experts.scores='tanh' is unknown; legal are softmax, sigmoid",
        ),
        (
            dict(bias=True),
            "experts have neither model.bias=true nor model.execution.remat=blockwise",
        ),
        (dict(remat="blockwise"), "experts have neither"),
    ],
)
def test_mistakes_are_told(wrong, message):
    with pytest.raises(UsageError, match=message):
        with_fields(SMALL, **wrong)


@pytest.mark.parametrize(
    "changes, message",
    [
        (
            dict(shared_experts=1, router_scores="sigmoid"),
            "no folder can hold a model with experts.shared=1 experts.scores=sigmoid: MixtralForCausalLM "
            "needs model.experts.shared=0 and model.experts.scores=softmax",
        ),
        (dict(router_bias=0.1), "MixtralForCausalLM needs model.losses.router_bias=0.0"),
        (dict(experts_per_token=1), "MixtralForCausalLM needs model.experts.experts_per_token=2;"),
    ],
)
def test_what_no_folder_holds_is_told(tmp_path, changes, message):
    config = with_fields(SMALL, **changes)
    with pytest.raises(UsageError, match=message):
        to_hf(abstract(config), config, tmp_path / "model")
