"""Freezing and rates by depth against a plain loop of AdamW in NumPy, on one device and on eight."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from lm_configs import lm_config, with_fields
from tolerance import LAYOUT, assert_close

from jaxpar.lm import (
    AdapterConfig,
    OptimizerConfig,
    Trainer,
    TuningConfig,
    loss,
)
from jaxpar.lm.tuning import depth_scales, frozen_names, laid_over, without
from jaxpar.mesh import MeshSpec, make_mesh, named_shardings, use_mesh
from jaxpar.types import UsageError

MODEL = lm_config(
    vocab_size=16,
    num_layers=2,
    embed_dim=8,
    num_heads=2,
    mlp_dim=8,
    dtype="float32",
    init_std=0.3,
    loss_chunk=16,
)
RATE, DECAY, D = 1e-2, 0.1, 0.7
OPTIMIZER = OptimizerConfig(
    learning_rate=RATE, schedule="constant", warmup_steps=0, weight_decay=DECAY, eps=1e-6
)
TUNING = TuningConfig(("embedding", "w_*", "layers.wq"), layer_decay=D, ema=0.6)
TRAINER = Trainer(MODEL, OPTIMIZER, 10, tuning=TUNING)
FROZEN = {"embedding", "layers.w_gate", "layers.w_up", "layers.w_down", "layers.wq"}


def batch_of(step):
    tokens = np.random.default_rng(step).integers(0, 16, (8, 7), dtype=np.int32)
    return {"tokens": tokens[:, :-1], "targets": tokens[:, 1:]}


def named(tree):
    flat = jax.tree_util.tree_leaves_with_path(tree)
    return {
        jax.tree_util.keystr(path, simple=True, separator="."): np.asarray(x) for path, x in flat
    }


def run(trainer, state, steps):
    step, states = jax.jit(trainer.step), []
    for number in range(steps):
        state, info = step(jax.random.key(number), state, batch_of(number))
        states.append(state)
    return states, info


def by_hand(params, config, steps):
    """AdamW of all that is not frozen, parameter by parameter and layer by layer; clipped by the norm of those."""
    grad = jax.jit(jax.grad(loss), static_argnames="config")
    first, second, states = {}, {}, []
    for number in range(steps):
        grads = {
            name: g
            for name, g in named(grad(params, batch_of(number), config=config)).items()
            if name not in FROZEN
        }
        norm = np.sqrt(sum((g**2).sum() for g in grads.values()))
        flat = named(params)
        for name, g in grads.items():
            g = g / max(1, norm)
            first[name] = 0.9 * first.get(name, 0) + 0.1 * g
            second[name] = 0.95 * second.get(name, 0) + 0.05 * g**2
            m, v = (
                first[name] / (1 - 0.9 ** (number + 1)),
                second[name] / (1 - 0.95 ** (number + 1)),
            )
            move = m / (np.sqrt(v) + 1e-6) + (0 if "norm" in name else DECAY) * flat[name]
            if name.startswith("layers."):
                for layer in range(2):
                    flat[name] = flat[name].copy()
                    flat[name][layer] -= RATE * (D if layer == 1 else D**2) * move[layer]
            else:
                flat[name] = flat[name] - RATE * move
        tree = jax.tree_util.tree_map_with_path(
            lambda path, _, flat=flat: flat[jax.tree_util.keystr(path, simple=True, separator=".")],
            params,
        )
        params = jax.tree.map(jnp.asarray, tree)
        states.append(named(params))
    return states


def test_frozen_parameters_stay_and_others_move_as_a_plain_loop_says():
    with jax.enable_x64(True):
        trainer = dataclasses.replace(TRAINER, model=dataclasses.replace(MODEL, dtype="float64"))
        state = trainer.init(jax.random.key(0))
        states, _ = run(trainer, state, 3)
        for got, want in zip(states, by_hand(state.params, trainer.model, 3), strict=True):
            got = named(got.params)
            for name, x in want.items():
                np.testing.assert_allclose(got[name], x, rtol=1e-10, atol=1e-12, err_msg=name)
    before, after = named(state.params), named(states[-1].params)
    assert all((before[name] == after[name]).all() == (name in FROZEN) for name in before)


def test_frozen_parameters_have_no_moments_and_those_of_rmsprop_none_either():
    for optimizer in (OPTIMIZER, OptimizerConfig("rmsprop"), OptimizerConfig("muon")):
        trainer = dataclasses.replace(TRAINER, optimizer=optimizer)
        state = jax.eval_shape(trainer.init, jax.random.key(0))
        paths = [
            jax.tree_util.keystr(p, simple=True, separator=".")
            for p, _ in jax.tree.leaves_with_path(state.opt_state)
        ]
        assert not [path for path in paths if any(path.endswith(name) for name in FROZEN)]
        assert [path for path in paths if path.endswith("layers.wk")]


def test_eight_devices_do_the_same_and_keep_every_bit_of_what_is_frozen():
    (*_, want), told = run(TRAINER, TRAINER.init(jax.random.key(0)), 2)
    with use_mesh(make_mesh(MeshSpec(data=2, fsdp=2, tensor=2))):
        places = named_shardings(jax.eval_shape(TRAINER.init, jax.random.key(0)), TRAINER.axes())
        state = jax.jit(TRAINER.init, out_shardings=places)(jax.random.key(0))
        before = named(state.params)
        (*_, got), info = run(TRAINER, state, 2)
    assert_close(jax.device_get(got), jax.device_get(want), LAYOUT["float32"])
    np.testing.assert_allclose(info["grad_norm"], told["grad_norm"], rtol=1e-5)
    after = named(got.params)
    assert all((before[name] == after[name]).all() for name in FROZEN)


def test_the_average_is_that_of_a_loop_and_skips_what_is_skipped():
    adapted = Trainer(MODEL, OPTIMIZER, 10, adapter=AdapterConfig("lora", ("wq",), rank=2))
    for trainer in (TRAINER, adapted):
        trainer = dataclasses.replace(trainer, tuning=dataclasses.replace(trainer.tuning, ema=0.6))
        state = trainer.init(jax.random.key(0))
        part = "adapters" if trainer.model is MODEL and hasattr(state, "adapters") else "params"
        want, step = named(getattr(state, part)), jax.jit(trainer.step)
        for number in range(4):
            batch = batch_of(number) | {
                "weights": np.full((8, 6), np.nan if number == 2 else 1, np.float32)
            }
            state, info = step(jax.random.key(number), state, batch)
            assert info["skipped"] == (number >= 2)
            if number != 2:
                want = {
                    name: 0.6 * x + 0.4 * named(getattr(state, part))[name]
                    for name, x in want.items()
                }
        for name, x in named(state.average).items():
            assert name not in FROZEN or part == "adapters"
            np.testing.assert_allclose(x, want[name], rtol=1e-5, atol=1e-7)
        if part == "params":
            got = named(state.averaged)
            assert (
                got.keys() == want.keys()
                and (got["embedding"] == named(state.params)["embedding"]).all()
            )
            np.testing.assert_array_equal(
                got["layers.wk"], np.asarray(state.average["layers"]["wk"])
            )
        else:
            np.testing.assert_array_equal(
                state.averaged["layers"]["wq"].up, state.average["layers"]["wq"]["up"]
            )


def test_rates_of_every_depth():
    scales = depth_scales(MODEL, 0.5)(jax.eval_shape(TRAINER.init, jax.random.key(0)).params)
    assert scales["embedding"] == 0.125 and scales["head"] == scales["final_norm"]["scale"] == 1
    assert scales["layers"]["wq"].tolist() == [[[[0.25]]], [[[0.5]]]]
    hybrid = with_fields(MODEL, num_layers=4, windows=(3, 0), positions="learned")
    scales = depth_scales(hybrid, 0.5)(
        jax.eval_shape(Trainer(hybrid).init, jax.random.key(0)).params
    )
    assert scales["positions"] == 1 / 32
    assert scales["layers"]["0"]["wk"].ravel().tolist() == [1 / 16, 1 / 4]
    assert scales["layers"]["1"]["wk"].ravel().tolist() == [1 / 8, 1 / 2]


def test_rates_of_adapters_are_those_of_their_layers():
    plain = Trainer(MODEL, OPTIMIZER, 10, adapter=AdapterConfig("lora", ("wq",), rank=2))
    state = plain.init(jax.random.key(0))
    moved = []
    for trainer in (plain, dataclasses.replace(plain, tuning=TuningConfig(layer_decay=D))):
        after = jax.jit(trainer.step)(jax.random.key(1), state, batch_of(0))[0]
        moved.append(np.asarray(after.adapters["layers"]["wq"]["up"]))  # which begins at zero
    np.testing.assert_allclose(
        moved[1], moved[0] * np.array([D**2, D]).reshape(2, 1, 1, 1), rtol=1e-5
    )


def test_trees_are_parted_and_joined():
    tree = {"a": 1, "b": {"c": 2, "d": 3}, "e": {"f": 4}}
    part = without(tree, {"b.c", "e.f"})
    assert part == {"a": 1, "b": {"d": 3}}
    assert laid_over(tree, {"a": 5, "b": {"d": 6}}) == {
        "a": 5,
        "b": {"c": 2, "d": 6},
        "e": {"f": 4},
    }


def test_what_cannot_be_frozen_is_refused():
    assert frozen_names(MODEL, ("*norm*",)) >= {"final_norm.scale"}
    with pytest.raises(
        UsageError,
        match="tuning.freeze=wz matches no parameter; legal are patterns of .*embedding.*wq",
    ):
        Trainer(MODEL, tuning=TuningConfig(("wq", "wz")))
    with pytest.raises(UsageError, match="tuning.freeze=[*] leaves nothing to train"):
        Trainer(MODEL, tuning=TuningConfig(("*",)))
    with pytest.raises(UsageError, match="tuning.freeze=wq beside adapters"):
        Trainer(MODEL, adapter=AdapterConfig("lora"), tuning=TuningConfig(("wq",)))
