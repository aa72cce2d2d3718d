"""A model of a few products, whose layers tell something, and what a schedule's gradient of it should be."""

import functools
import math
import re

import jax
import jax.numpy as jnp
import numpy as np
from fast import jit
from tolerance import EXACT_MATHS, assert_close

from jaxpar.mesh import MeshSpec, constrain, make_mesh, shard, use_mesh
from jaxpar.nn.auxiliary import NOTHING, Aux, Max, Mean
from jaxpar.nn.linear import contract
from jaxpar.pipeline import Pipelined, pack_schedule
from jaxpar.pipeline.accumulation import InTurn, Stages, layer_by_layer

AXES = {"up": ("embed", "mlp"), "down": ("mlp", "embed"), "scale": (None,)}
WIDTH, HIDDEN, TOKENS, LENGTH, ROWS = 16, 8, 6, 3, 4  # rows of a microbatch


def first(params, data, key):
    del key
    return constrain(params["table"][data["tokens"]], "batch", None, None)


def layer(params, index, x, data, key):
    """Two products, a scale, something of the data and of the layer's number, and something told."""
    del key
    h = contract("btd,df->btf", x + 0.1 * data["tokens"][..., None], params["up"], ("embed", "mlp"))
    y = contract("btf,fd->btd", jnp.tanh(h) * (1 + index), params["down"], ("mlp", "embed"))
    told = Aux(
        {"small": 0.1 * jnp.square(y).mean()},
        {"largest": Max(jnp.abs(y).max()), "mean": Mean.of(y)},
    )
    return params["scale"][None, None] * x + y, told


def last(params, x, data, total):
    error = jnp.square(x @ params["head"] - data["targets"][..., None]).sum() / total
    return error, Aux({}, {"worst": Max(error)})


def stages(num_turns, keep=lambda body: body):
    """The model; `keep` is its remat."""
    pieces = Stages(
        total=lambda batch: jnp.asarray(batch["tokens"].size, batch["targets"].dtype),
        hold=lambda params: params,
        release=lambda params, gradient: gradient,
        first=first,
        layer=layer,
        last=last,
        whole=lambda *args: NOTHING,  # pyright: ignore[reportArgumentType]
        remat=keep,
        products=lambda: {"up": True, "down": True, "scale": False},
        num_turns=num_turns,
        axes=lambda: AXES,
    )
    return pieces._replace(whole=layer_by_layer(pieces))


def params_of(num_turns, dtype):
    rng = np.random.default_rng(1)
    shapes = {"up": (WIDTH, HIDDEN), "down": (HIDDEN, WIDTH), "scale": (WIDTH,)}
    layers = {name: 0.3 * rng.normal(size=(num_turns, *shape)) for name, shape in shapes.items()}
    ends = {"table": rng.normal(size=(TOKENS, WIDTH)), "head": rng.normal(size=(WIDTH, 2))}
    return jax.tree.map(lambda x: jnp.asarray(x, dtype), {"layers": layers, **ends})


def batch_of(microbatches, dtype):
    rng, shape = np.random.default_rng(2), (ROWS * microbatches, LENGTH)
    return {
        "tokens": jnp.asarray(rng.integers(0, TOKENS, shape)),
        "targets": jnp.asarray(rng.normal(size=shape), dtype),
    }


@functools.cache
def in_turn(num_turns, microbatches, dtype):
    """((loss, what was told), gradient) of the microbatches one after the other, without a mesh."""
    run = jit(InTurn(), static_argnums=(0, 4))
    args = params_of(num_turns, dtype), batch_of(microbatches, dtype)
    return jax.device_get(run(stages(num_turns), *args, None, microbatches))


def program(schedule, num_turns, dtype, sizes, *, latency=1, keep=lambda body: body):
    """The compiled program of a schedule on a mesh, and its arguments."""
    m, mesh = schedule.microbatches, MeshSpec(**{"stage": schedule.devices, **sizes})
    count = schedule.devices * math.prod(size for axis, size in sizes.items() if axis != "inner")
    args = params_of(num_turns, dtype), batch_of(m, dtype)
    with use_mesh(make_mesh(mesh, jax.devices()[:count])):
        if "fsdp" in sizes:  # as a run has them at rest
            at_rest = {name: (None, *axes) for name, axes in AXES.items()}
            args = {**args[0], "layers": shard(args[0]["layers"], at_rest)}, args[1]
        run = jit(
            lambda params, batch: Pipelined(schedule, latency)(
                stages(num_turns, keep), params, batch, None, m
            )
        )
        return run.lower(*args).compile(), args


def body_of(text):
    """The computation of a compiled module that sends to the next stage and to the one before."""
    blocks = re.split(r"\n(?=%|ENTRY)", text)
    (body,) = [b for b in blocks if "collective-permute" in b and not b.startswith("ENTRY")]
    return body


def carried(schedule, num_turns):
    """Shapes that the loop over ticks carries."""
    table, m = pack_schedule(schedule), schedule.microbatches
    args = params_of(num_turns, "float64"), batch_of(m, "float64")
    with use_mesh(make_mesh(MeshSpec(stage=schedule.devices), jax.devices()[: schedule.devices])):
        run = lambda params, batch: Pipelined(schedule)(stages(num_turns), params, batch, None, m)  # noqa: E731
        jaxpr = jax.make_jaxpr(run)(*args)
    (inner,) = [eqn.params["jaxpr"] for eqn in jaxpr.eqns if eqn.primitive.name == "shard_map"]
    (loop,) = [
        eqn
        for eqn in inner.eqns
        if eqn.primitive.name == "scan" and eqn.params["length"] == len(table.rows)
    ]
    return [x.aval for x in loop.outvars], loop.params["jaxpr"].jaxpr


def assert_equals_in_turn(schedule, num_turns, dtype, tolerance=None, sizes=None, **options):
    """Loss, what was told and every gradient."""
    run, args = program(schedule, num_turns, dtype, sizes or {}, **options)
    want = in_turn(num_turns, schedule.microbatches, dtype)
    assert_close(jax.device_get(run(*args)), want, tolerance or EXACT_MATHS[dtype])
    return run
