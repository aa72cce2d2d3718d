"""PipeDream as one program equals its recursion of delayed gradients, written out; its ring holds what its table says."""

import functools
import math
import re

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from fast import jit
from pipeline_toy import LENGTH, ROWS, batch_of, params_of, stages
from tolerance import assert_close

from jaxpar.mesh import MeshSpec, make_mesh, use_mesh
from jaxpar.nn.schedule import key_of_part, layer_by_layer
from jaxpar.parallel.pipeline import Op, PipeDream, pipedream, simulate_schedule
from jaxpar.parallel.pipeline.asynchronous import _packed
from jaxpar.types import UsageError

EXACT = 1e-10  # float64, after two runs of thirteen updates
ROUNDED = 1e-6  # float32
M = 13
ENDS = ("table", 0), ("head", -1)  # the stage of each


@functools.cache
def model(num_turns):
    """The toy, which draws with its key, and holds the sine of its parameters: gradients then tell each version."""
    toy = stages(num_turns)

    def hold(params):
        return jax.tree.map(lambda x: 0.5 * jnp.sin(x), params)

    def layer(params, index, x, data, key):
        x, told = toy.layer(params, index, x, data, None)
        return x * (1 + 0.1 * jax.random.normal(jax.random.fold_in(key, index), x.shape, x.dtype)), told

    noisy = toy._replace(hold=hold, release=lambda params, g: jax.vjp(hold, params)[1](g)[0], layer=layer)
    return noisy._replace(whole=layer_by_layer(noisy))


@functools.cache
def plain(num_turns):
    """(parameters, a microbatch, its key) -> its loss and gradient, by the model in one piece."""
    toy = model(num_turns)
    return jit(jax.value_and_grad(lambda params, data, key: toy.whole(params, data, key, toy.total(data), 1.0)[0]))


def part(params, stage, num_stages):
    """What a stage has of anything like the parameters."""
    size = len(params["layers"]["up"]) // num_stages
    mine = {name: params[name] for name, owner in ENDS if owner % num_stages == stage}
    return mine | {"layers": jax.tree.map(lambda x: x[stage * size : (stage + 1) * size], params["layers"])}


def whole(parts):
    layers = jax.tree.map(lambda *x: np.concatenate(x), *(each["layers"] for each in parts))
    return {"layers": layers} | {name: parts[owner][name] for name, owner in ENDS}


def recursion(rule, params, microbatches, key, num_stages, states=None):
    """PipeDream with a list of all versions of each stage: returns parameters, states and losses."""
    gradient = plain(len(params["layers"]["up"]))
    params, microbatches = jax.device_get((params, microbatches))
    versions = [[part(params, stage, num_stages)] for stage in range(num_stages)]
    states, losses = states or [rule.init(each[0]) for each in versions], []

    @jit
    def update(grads, state, own):
        step, state = rule.update(grads, state, own)
        return optax.apply_updates(own, step), state

    for j in range(M):
        used = whole([versions[s][max(0, j - (num_stages - 1 - s))] for s in range(num_stages)])
        data = jax.tree.map(lambda x, j=j: x[j], microbatches)
        loss, grads = jax.device_get(gradient(used, data, key_of_part(key, j, M)))
        for s in range(num_stages):
            own, states[s] = jax.device_get(update(part(grads, s, num_stages), states[s], versions[s][-1]))
            versions[s].append(own)
        losses.append(loss)
    return whole([each[-1] for each in versions]), states, np.stack(losses)


def program(rule, num_turns, num_stages, dtype, sizes):
    """A mesh, the program, and its arguments."""
    count = num_stages * math.prod(sizes.values())
    mesh = make_mesh(MeshSpec(stage=num_stages, **sizes), jax.devices()[:count])
    microbatches = jax.tree.map(lambda x: x.reshape(M, ROWS, LENGTH), batch_of(M, dtype))
    train = PipeDream(rule)
    params = params_of(num_turns, dtype)
    with use_mesh(mesh):
        state = train.init(model(num_turns), params)
    return mesh, jit(lambda *args: train(model(num_turns), *args)), (params, state, microbatches, jax.random.key(5))


MOMENTUM = optax.sgd(0.002, momentum=0.9)
ADAM = optax.chain(optax.clip_by_global_norm(0.5), optax.adam(0.02))
CASES = {
    "SGD": (optax.sgd(0.002), 8, 4, "float32", {}, ROUNDED),
    "momentum over tensor": (MOMENTUM, 8, 4, "float64", {"tensor": 2}, EXACT),
    "Adam of each stage's norm": (ADAM, 4, 4, "float64", {}, EXACT),
    "two stages": (ADAM, 4, 2, "float64", {"fsdp": 2, "data": 2}, EXACT),
}


@pytest.mark.parametrize("name", CASES)
def test_it_is_the_recursion_of_delayed_gradients(name, x64):
    rule, num_turns, num_stages, dtype, sizes, tolerance = CASES[name]
    mesh, train, (params, state, microbatches, key) = program(rule, num_turns, num_stages, dtype, sizes)
    want, states = params, None
    for seed in range(2):  # the second from the state that the first left
        key = jax.random.key(seed)
        with use_mesh(mesh):
            params, state, losses = train(params, state, microbatches, key)
        import time; t=time.time()
        want, states, known = recursion(rule, want, microbatches, key, num_stages, states)
        print("twin", time.time()-t)
        from tolerance import errors
        print(max(errors(jax.device_get((params, losses)), jax.device_get((want, known))).values()))
        assert_close(jax.device_get((params, losses)), jax.device_get((want, known)), tolerance)
        assert losses.dtype == dtype; print(losses)


def test_of_one_stage_it_is_online_descent(x64):
    mesh, train, (params, state, microbatches, key) = program(optax.sgd(0.002), 4, 1, "float64", {"data": 2})
    with use_mesh(mesh):
        got, _, losses = train(params, state, microbatches, key)
    for j in range(M):
        loss, grads = plain(4)(params, jax.tree.map(lambda x, j=j: x[j], microbatches), key_of_part(key, j, M))
        params = jax.tree.map(lambda w, g: w - 0.002 * g, params, grads)
        assert_close(losses[j], loss, EXACT)
    assert_close(jax.device_get(got), jax.device_get(params), EXACT)
