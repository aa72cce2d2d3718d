"""A pipeline with every other way to split a model: ten optimizer steps equal those of one device."""

import dataclasses
import functools
import math

import jax
import numpy as np
import pytest
import tiny
from fast import jit
from lm_configs import with_fields
from tolerance import assert_close

from jaxpar.lm import OptimizerConfig, Trainer, axes, loss
from jaxpar.mesh import MeshSpec, make_mesh, rules_from, shard, use_mesh
from jaxpar.pipeline import Pipelined, named_schedule

SMALL = with_fields(
    tiny.exact(tiny.LLAMA), num_layers=4, context="gather", context_order="contiguous", remat="none"
)
STEPS, PARTS = 10, 4
EVALUATED = "data, pipeline"  # each layer is gathered from its stage

# Mesh, layout, schedule, remat. Of optimizer sharding zero3 splits weights too, zero1 the optimizer's state alone.
COMBINATIONS = {
    "fsdp, tensor, pipeline, remat": (dict(stage=2, fsdp=2, tensor=2), "zero3", "zb_h1", "full"),
    "data, pipeline": (dict(stage=2, data=4), "zero3", "1f1b", "none"),
    "data, optimizer sharding": (dict(data=2, fsdp=2), "zero1", "", "none"),
    "data, tensor, pipeline": (dict(stage=2, data=2, tensor=2), "zero3", "1f1b", "none"),
    "tensor and sequence, pipeline": (dict(stage=2, data=2, tensor=2), "sequence", "zb_v", "none"),
    "context, tensor, pipeline": (
        dict(stage=2, context=2, tensor=2),
        "zero3",
        "interleaved",
        "names",
    ),
    "optimizer sharding, pipeline": (dict(stage=2, data=2, fsdp=2), "zero1", "zb_v", "none"),
    "2-D tensor, pipeline": (dict(stage=2, fsdp=2, inner=2, tensor=2), "2d", "zb_h1", "none"),
    "2-D tensor, data, remat": (dict(data=2, fsdp=2, inner=2, tensor=2), "2d", "", "full"),
    "gradient sharding, pipeline, remat": (dict(stage=4, fsdp=2), "zero2", "zb_h2", "full"),
}


def batch_of(step):
    rng = np.random.default_rng(step)
    return {name: rng.integers(0, 16, (16, 8)) for name in ("tokens", "targets")}


def trained(trainer):
    state = trainer.init(jax.random.key(0))
    state = shard(state, trainer.axes()) if jax.sharding.get_abstract_mesh().shape else state
    step = jit(trainer.step)
    for number in range(STEPS):
        state, _ = step(jax.random.key(1), state, batch_of(number))
    return jax.device_get(state.params)


@functools.cache
def alone(remat):
    config = with_fields(SMALL, remat=remat)
    return Trainer(config, OptimizerConfig(warmup_steps=1, eps=1e-6), STEPS, accumulate=PARTS)


@pytest.mark.parametrize(
    "name",
    [
        name if i < 2 else pytest.param(name, marks=pytest.mark.slow)
        for i, name in enumerate(COMBINATIONS)
    ],  # 110 s on two busy cores, together
)
def test_ten_steps_are_those_of_one_device(name, x64):
    sizes, layout, schedule, remat = COMBINATIONS[name]
    trainer = alone(remat)
    want = trained(trainer)
    if schedule:
        layout = f"{layout}+stages"
        trainer = dataclasses.replace(
            trainer, schedule=Pipelined(named_schedule(schedule, sizes["stage"], PARTS))
        )
    count = math.prod(size for axis, size in sizes.items() if axis != "inner")  # a part of fsdp
    with use_mesh(make_mesh(MeshSpec(**sizes), jax.devices()[:count]), rules_from(layout=layout)):
        got = trained(trainer)
        run = jit(lambda params, batch: loss(params, batch, SMALL))
        evaluated = run(shard(got, axes(SMALL)), batch_of(99)) if name == EVALUATED else None
    start = jax.device_get(trainer.init(jax.random.key(0)).params)
    moved = sum(
        float(np.abs(a - b).sum())
        for a, b in zip(*map(jax.tree.leaves, (want, start)), strict=True)
    )
    assert moved > 1
    assert_close(got, want, 1e-10)
    if evaluated is not None:
        value = tiny.loss_of(want, batch_of(99), SMALL)
        assert_close(jax.device_get(evaluated), jax.device_get(value), 1e-10)
