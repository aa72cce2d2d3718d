"""PipeDream as one program equals its recursion of delayed gradients; its ring holds what its table says."""

import functools
import math
import re
import textwrap

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from fast import jit, noisy_params
from lm_configs import lm_config
from pipeline_toy import LENGTH, ROWS, batch_of, params_of, stages
from tolerance import assert_close

from experiments import lm
from jaxpar.lm import axes
from jaxpar.lm.stages import stages as lm_stages
from jaxpar.mesh import MeshSpec, make_mesh, rules_from, shard, use_mesh
from jaxpar.pipeline import Op, Pipelined, asynchronous, pipedream, simulate_schedule
from jaxpar.pipeline.accumulation import key_of_part, layer_by_layer
from jaxpar.pipeline.asynchronous import PipeDream, _packed
from jaxpar.types import UsageError

EXACT = 1e-12  # float64, after two runs of 25 updates
ROUNDED = 1e-6  # float32
M = 25  # twice that many updates
ENDS = {"table": 0, "head": -1}  # the stage of each


@functools.cache
def model(num_turns):
    """The toy, which draws with its key, and holds the sine of its parameters: gradients then tell each version."""
    toy = stages(num_turns)

    def hold(params):
        return jax.tree.map(lambda x: 0.5 * jnp.sin(x), params)

    def layer(params, index, x, data, key):
        x, told = toy.layer(params, index, x, data, None)
        return x * jax.random.uniform(
            jax.random.fold_in(key, index), x.shape, x.dtype, 0.8, 1.2
        ), told

    noisy = toy._replace(
        hold=hold, release=lambda params, g: jax.vjp(hold, params)[1](g)[0], layer=layer
    )
    return noisy._replace(whole=layer_by_layer(noisy))


@functools.cache
def plain(model):
    """(parameters, a microbatch, its key) -> its loss and gradient, by the model in one piece."""
    return jit(
        jax.value_and_grad(
            lambda params, data, key: model.whole(params, data, key, model.total(data), 1.0)[0]
        )
    )


@functools.cache
def updated(rule):
    """(gradient, state, parameters) -> parameters, state."""

    def update(grads, state, params):
        step, state = rule.update(grads, state, params)
        return optax.apply_updates(params, step), state

    return jit(update)


def recursion(model, ends, rule, params, microbatches, key, num_stages, states=None):
    """PipeDream with a list of all versions of each stage; returns parameters, states and losses.

    `ends` are names of parameters outside of the layers, and the stage that has them.
    """
    params, microbatches = jax.device_get((params, microbatches))
    m, size = len(jax.tree.leaves(microbatches)[0]), model.num_turns // num_stages

    def part(tree, stage):
        own = {name: tree[name] for name, owner in ends.items() if owner % num_stages == stage}
        return own | {
            "layers": jax.tree.map(lambda x: x[stage * size : (stage + 1) * size], tree["layers"])
        }

    def whole(parts):
        layers = jax.tree.map(lambda *x: np.concatenate(x), *(each["layers"] for each in parts))
        return {name: parts[owner][name] for name, owner in ends.items()} | {"layers": layers}

    versions = [[part(params, stage)] for stage in range(num_stages)]
    states, losses = states or [rule.init(each[0]) for each in versions], []
    for j in range(m):
        used = whole([versions[s][max(0, j - (num_stages - 1 - s))] for s in range(num_stages)])
        data = jax.tree.map(lambda x, j=j: x[j], microbatches)
        loss, grads = jax.device_get(plain(model)(used, data, key_of_part(key, j, m)))
        for s in range(num_stages):
            own, states[s] = jax.device_get(
                updated(rule)(part(grads, s), states[s], versions[s][-1])
            )
            versions[s].append(own)
        losses.append(loss)
    return whole([each[-1] for each in versions]), states, np.stack(losses)


def program(rule, num_turns, num_stages, dtype, sizes):
    """A mesh, the program, and its arguments."""
    mesh = make_mesh(
        MeshSpec(stage=num_stages, **sizes), jax.devices()[: num_stages * math.prod(sizes.values())]
    )
    microbatches = jax.tree.map(lambda x: x.reshape(M, ROWS, LENGTH), batch_of(M, dtype))
    train, params = PipeDream(rule), params_of(num_turns, dtype)
    with use_mesh(mesh):
        state = train.init(model(num_turns), params)
    return mesh, jit(lambda *args: train(model(num_turns), *args)), (params, state, microbatches)


ADAM = optax.chain(optax.clip_by_global_norm(0.5), optax.adam(0.02))
CASES = {
    "SGD where finite": (optax.apply_if_finite(optax.sgd(0.002), 3), 4, 4, "float32", {}, ROUNDED),
    "momentum over tensor": (optax.sgd(0.002, momentum=0.9), 4, 4, "float64", {"tensor": 2}, EXACT),
    "Adam with a stage's norm": (ADAM, 4, 2, "float64", {"fsdp": 2}, EXACT),
}


@pytest.mark.parametrize("name", CASES)
def test_it_is_the_recursion_of_delayed_gradients(name, x64):
    rule, num_turns, num_stages, dtype, sizes, tolerance = CASES[name]
    mesh, train, (params, state, microbatches) = program(rule, num_turns, num_stages, dtype, sizes)
    want, states = params, None
    for seed in range(2):  # the second from the state that the first left
        lost = []
        if (
            seed and name == "SGD where finite"
        ):  # nothing of it reaches another microbatch, by the slots of any stage
            lost, targets = [4], microbatches["targets"].at[4].set(jnp.nan)
            microbatches = microbatches | {"targets": targets}
        key = jax.random.key(seed)
        with use_mesh(mesh):
            params, state, losses = jax.device_get(train(params, state, microbatches, key))
        want, states, known = recursion(
            model(num_turns), ENDS, rule, want, microbatches, key, num_stages, states
        )
        assert np.flatnonzero(~np.isfinite(losses)).tolist() == lost and losses.dtype == dtype
        assert_close((params, np.delete(losses, lost)), (want, np.delete(known, lost)), tolerance)


def test_of_one_stage_it_is_online_descent(x64):
    mesh, train, (params, state, microbatches) = program(
        optax.sgd(0.002), 4, 1, "float64", {"data": 2}
    )
    key = jax.random.key(0)
    with use_mesh(mesh):
        got, _, losses = train(params, state, microbatches, key)
    for j in range(M):
        loss, grads = plain(model(4))(
            params, jax.tree.map(lambda x, j=j: x[j], microbatches), key_of_part(key, j, M)
        )
        params = jax.tree.map(lambda w, g: w - 0.002 * g, params, grads)
        assert_close(losses[j], loss, EXACT)
    assert_close(jax.device_get(got), jax.device_get(params), EXACT)


@pytest.mark.parametrize("num_stages, m", [(1, 3), (3, 2), (4, 13)])
def test_a_stage_holds_the_versions_that_its_table_says(num_stages, m):
    schedule = pipedream(num_stages, m)
    table, slots = _packed(num_stages, m)
    told, op, j = schedule.weight_versions(), table.column("op"), table.column("microbatch")
    for stage in range(num_stages):
        holds, newest = dict.fromkeys(range(num_stages - stage), 0), 0  # slot -> version
        for tick in np.flatnonzero(op[:, stage] != Op.IDLE):
            read, before, write = slots[tick, stage]
            assert holds[read] == told[stage][stage, j[tick, stage]]
            if op[tick, stage] == Op.BW:
                assert holds[before] == newest
                newest += 1
                holds[write] = newest
            else:
                assert holds[read] == newest and before == write == -1
        assert newest == holds[m % (num_stages - stage)] == m
    used = tuple(len(set(slots[:, stage].ravel()) - {-1}) for stage in range(num_stages))
    assert (
        used == simulate_schedule(schedule).weights or m < num_stages
    )  # a slot of each in every ring


def test_the_ring_has_a_slot_a_version_and_what_the_last_stage_reads_one(x64):
    mesh, _, (params, state, microbatches) = program(optax.sgd(0.002), 8, 4, "float64", {})
    with use_mesh(mesh):
        jaxpr = jax.make_jaxpr(lambda *args: PipeDream(optax.sgd(0.002))(model(8), *args))(
            params, state, microbatches, jax.random.key(0)
        )
    (inner,) = [eqn.params["jaxpr"] for eqn in jaxpr.eqns if eqn.primitive.name == "shard_map"]
    (loop,) = [
        eqn
        for eqn in inner.eqns
        if eqn.primitive.name == "scan" and eqn.params["length"] == 2 * (M + 3)
    ]
    carried = [x.aval.shape for x in loop.outvars]
    most = max(simulate_schedule(pipedream(4, M)).weights)
    for own in jax.tree.leaves(params["layers"]):
        assert carried.count((most, 2, *own.shape[1:])) == 1
    assert (
        carried.count((most, *params["table"].shape))
        == carried.count((1, *params["head"].shape))
        == 1
    )


# ---------------------------------------------------------------- language models


SMALL = dict(
    vocab_size=16, num_layers=2, embed_dim=8, num_heads=2, mlp_dim=8, dtype="float32", tied=False
)
EVERYTHING = dict(
    norm="layer",
    positions="learned",
    bias=True,
    dropout=0.3,
    max_seq_len=6,
    remat="names",
    z_loss=0.1,
)


def words(m, rows=4):
    rng = np.random.default_rng(0)
    return {name: jnp.asarray(rng.integers(0, 16, (m, rows, 6))) for name in ("tokens", "targets")}


def train_shapes(config, num_stages, rule):
    """The shapes of what is trained, and the program, which is traced and not compiled."""
    params, language = noisy_params(config), lm_stages(config)
    with use_mesh(make_mesh(MeshSpec(stage=num_stages), jax.devices()[:num_stages])):
        state = jax.eval_shape(lambda params: PipeDream(rule).init(language, params), params)
        args = params, state, words(3)
        return args, jax.eval_shape(lambda *args: PipeDream(rule)(language, *args), *args)


def test_a_language_model_keeps_its_shapes():
    (params, state, _), (got, moved, losses) = train_shapes(
        lm_config(**SMALL | dict(dtype="bfloat16")), 2, ADAM
    )
    shapes = lambda tree: jax.tree.map(lambda x: (x.shape, x.dtype), tree)  # noqa: E731
    assert shapes(got) == shapes(params) and shapes(moved) == shapes(state)
    assert losses.shape == (3,) and {x.shape[0] for x in jax.tree.leaves(state)} == {2}


@pytest.mark.parametrize(
    "changes, sentence",
    [
        (
            dict(tied=True),
            "embedding is read before the layers and after them, by stages that update apart",
        ),
        (
            dict(num_layers=3),
            "3 layers do not divide over 2 stages; the nearest legal numbers are 2 or 4",
        ),
    ],
)
def test_what_does_not_fit_is_refused(changes, sentence):
    with pytest.raises(UsageError, match=re.escape(sentence)):
        train_shapes(lm_config(**SMALL | changes), 2, ADAM)


def test_a_state_of_other_stages_is_refused():
    with use_mesh(make_mesh(MeshSpec(stage=2), jax.devices()[:2])):
        state = {"count": jnp.zeros(4)}
        with pytest.raises(
            UsageError,
            match=re.escape("the state is [2, ...] of as many stages; here m is [3], and"),
        ):
            PipeDream(ADAM)(
                lm_stages(lm_config(**SMALL)), noisy_params(lm_config(**SMALL)), state, words(3)
            )


def test_a_pipeline_of_gradients_and_a_run_name_what_trains_without_a_flush():
    with (
        use_mesh(make_mesh(MeshSpec(stage=2), jax.devices()[:2])),
        pytest.raises(UsageError, match="PipeDream runs it"),
    ):
        Pipelined(pipedream(2, 4)).check(model(2), 4)
    with pytest.raises(UsageError, match="jaxpar.pipeline.PipeDream runs it"):
        lm.compose("pipeline=pipedream")


@pytest.mark.slow  # 20 s
@pytest.mark.parametrize(
    "config, dtype, tolerance",
    [
        (SMALL | EVERYTHING | dict(num_layers=4, dtype="float64"), np.float64, EXACT),
        (SMALL, np.float32, 1e-5),  # Adam divides by roots of squares
        (SMALL | dict(num_experts=4, experts_per_token=2, balance_loss=0.1), np.float32, 1e-5),
    ],
    ids=["everything", "float32", "experts"],
)
def test_a_language_model_is_trained_by_the_recursion(config, dtype, tolerance, request):
    if dtype == np.float64:
        request.getfixturevalue("x64")
    config, rule, batch, key = lm_config(**config), optax.adam(0.01), words(6), jax.random.key(3)
    params, language = noisy_params(config, dtype), lm_stages(config)
    with use_mesh(make_mesh(MeshSpec(stage=2, data=2, tensor=2)), rules_from(layout="stages")):
        placed = shard(params, axes(config))
        state = PipeDream(rule).init(language, placed, axes(config))
        got, moved, losses = jit(lambda *args: PipeDream(rule)(language, *args))(
            placed, state, batch, key
        )
    for one in (state, moved):
        assert one[0].mu["layers"]["wo"].sharding.spec[:3] == ("stage", None, "tensor")
    ends = {
        name: 0 if name in ("embedding", "positions") else -1 for name in params if name != "layers"
    }
    want, _, known = recursion(language, ends, rule, params, batch, key, 2)
    # A bias of keys changes no attention: its gradient is rounding, which Adam makes a step of.
    assert_close(jax.device_get((got, losses)), (want, known), tolerance, masked=("bk",))


@pytest.mark.slow  # 5 s
def test_the_example_runs():
    code = textwrap.dedent(asynchronous.__doc__.split("Example:\n")[1])
    assert code.rstrip().splitlines()[-1].startswith("assert ")
    exec(code, {"__name__": "example"})
