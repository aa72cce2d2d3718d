"""What one trainer trains: parts and joins, adapters of all weights, and both in pipelines."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tiny
from fast import jit
from lm_configs import with_fields
from tolerance import LAYOUT, assert_close

from jaxpar.lm import (
    AdapterConfig,
    AdapterTrainer,
    ObjectiveConfig,
    OptimizerConfig,
    Trainer,
    TuningConfig,
    from_hf,
    load_model,
    loss,
    merge_adapters,
    num_adapted,
    num_params,
    preference_loss,
    to_hf,
    with_adapters,
)
from jaxpar.lm.adapters import begin_adapters
from jaxpar.lm.objectives import objective_stages
from jaxpar.lm.tuning import trained_stages
from jaxpar.mesh import MeshSpec, make_mesh, rules_from, shard, use_mesh
from jaxpar.nn.linear import Lora
from jaxpar.pipeline import Pipelined, one_f_one_b, with_gathers, with_vocabulary, zb_h1, zb_v
from jaxpar.types import UsageError

MODEL = tiny.LLAMA
WIDE = tiny.exact(MODEL)
EXPERTS = with_fields(MODEL, num_experts=4, experts_per_token=2)
OPTIMIZER = OptimizerConfig(warmup_steps=1, learning_rate=1e-2, eps=1e-6)
BATCH = tiny.batch_of(batch=4)
PAIRS = {
    **BATCH,
    "weights": np.ones(BATCH["tokens"].shape, np.float32),
    "rejected_tokens": np.roll(BATCH["tokens"], 1, 0),
    "rejected_targets": np.roll(BATCH["targets"], 1, 0),
    "rejected_weights": np.ones(BATCH["tokens"].shape, np.float32),
}
SAVING = AdapterConfig(
    "lora",
    target=("wq", "embedding"),
    rank=2,
    modules_to_save=("head", "*norm*"),
)
OF_EXPERTS = AdapterConfig("lora", target=("wq", "experts"), rank=2)


def noisy(tree, seed=1):
    rng = np.random.default_rng(seed)
    return jax.tree.map(
        lambda x: x + jnp.asarray(0.2 * rng.standard_normal(x.shape), x.dtype), tree
    )


def named(tree):
    flat = jax.tree_util.tree_leaves_with_path(tree)
    return {
        jax.tree_util.keystr(path, simple=True, separator="."): np.asarray(x) for path, x in flat
    }


def test_parts_of_a_model_are_joined_to_what_they_were():
    params = tiny.params_of(MODEL)
    key = jax.random.key(0)
    full = Trainer(MODEL).parts
    tuned = Trainer(MODEL, tuning=TuningConfig(("embedding", "layers.w*"))).parts
    adapted = Trainer(MODEL, adapter=SAVING).parts
    sizes = []
    for parts in (full, tuned, adapted):
        trained, kept = parts.split(params, key)
        joined = merge_adapters(parts.join(trained, kept, None))
        jax.tree.map(np.testing.assert_array_equal, joined, params)
        sizes.append(sum(x.size for x in jax.tree.leaves(trained)))
    assert sizes[0] == num_params(MODEL)
    assert set(named(tuned.split(params, None)[0])) == {
        "final_norm.scale",
        "head",
        "layers.attn_norm.scale",
        "layers.mlp_norm.scale",
    }
    # 2 layers of wq [16, 4, 4], an embedding [16, 16], a head [16, 16], 5 norms of 16.
    assert sizes[2] == num_adapted(MODEL, SAVING) == 2 * 2 * 32 + 2 * 32 + 256 + 5 * 16
    with pytest.raises(UsageError, match="key=None: adapters are drawn from it"):
        adapted.split(params, None)


def test_a_pattern_of_one_mixer_adapts_its_layers_alone():
    """Leaves of the turn's second mixer: every other layer."""
    model = with_fields(
        dataclasses.replace(MODEL, num_layers=4), num_kv_heads=4, mixers=("gla", "attention")
    )
    adapter = AdapterConfig("lora", target=("1.wq", "0.w_d*"), rank=2, modules_to_save=("1.wv",))
    parts = Trainer(model, adapter=adapter).parts
    params = tiny.params_of(model)
    trained, kept = parts.split(params, jax.random.key(0))
    shapes = {name: x.shape for name, x in named(trained).items()}
    assert shapes == {
        "layers.0.w_down.down": (2, 24, 2),
        "layers.0.w_down.up": (2, 2, 16),
        "layers.1.wq.down": (2, 16, 2),
        "layers.1.wq.up": (2, 2, 4, 4),
        "layers.1.wv": (2, 16, 4, 4),
    }
    assert "layers.1.wv" not in named(kept)
    joined = named(merge_adapters(parts.join(noisy(trained), kept, None)))
    changed = {name for name, x in named(params).items() if (joined[name] != x).any()}
    assert changed == {"layers.0.w_down", "layers.1.wq", "layers.1.wv"}


def test_every_weight_of_every_layer_drops_with_a_key_of_its_own():
    params = tiny.params_of(MODEL)
    adapter = AdapterConfig("lora", rank=2, dropout=0.5)
    parts = Trainer(MODEL, adapter=adapter).parts
    trained, kept = parts.split(params, jax.random.key(0))
    is_lora = lambda w: isinstance(w, Lora)  # noqa: E731

    def keys_of(params):
        weights = [w for w in jax.tree.leaves(params, is_leaf=is_lora) if is_lora(w)]
        return np.stack([jax.random.key_data(w.key) for w in weights])

    keys = keys_of(parts.join(trained, kept, jax.random.key(1)))
    assert keys.shape[:2] == (7, 2)
    assert len(np.unique(keys.reshape(14, -1), axis=0)) == 14
    others = keys_of(parts.join(trained, kept, jax.random.key(2)))
    assert not (keys == others).all(-1).any()
    # A schedule that makes layers one by one draws the same.
    plain = parts.join(trained, kept, None)["layers"]
    for index in range(2):
        turn = jax.tree.map(lambda x, index=index: x[index], plain)
        own = parts.layer(turn, jnp.int32(index), jax.random.key(1))
        np.testing.assert_array_equal(keys_of(own), keys[:, index])


# -------------------------------------------------- embedding, head, experts, saved parameters


@pytest.mark.parametrize(
    ("model", "adapter"),
    [
        (WIDE, dataclasses.replace(SAVING, rslora=True)),
        (tiny.exact(EXPERTS), OF_EXPERTS),
        (WIDE, AdapterConfig("lora", target=("head", "w_up"), rank=3, base="full")),
    ],
)
def test_gradients_are_those_of_the_summed_weights_by_the_chain_rule(model, adapter, x64):
    """Of W + s A B: dA = s dW B^T and dB = s A^T dW, of each expert; a saved one has dW itself."""
    trainer = Trainer(model, OPTIMIZER, adapter=adapter)
    parts = trainer.parts
    trained, kept = parts.split(tiny.params_of(model), jax.random.key(0))
    trained = noisy(trained)

    def adapted(trained):
        return loss(parts.join(trained, kept, None), BATCH, model)

    value, grads = jit(jax.value_and_grad(adapted))(trained)
    merged = merge_adapters(parts.join(trained, kept, None))
    want, whole = tiny.loss_and_gradient(merged, BATCH, model)
    np.testing.assert_allclose(value, want, rtol=1e-12)
    whole, flat, grads = named(whole), named(trained), named(grads)
    seen = set()
    for path, got in grads.items():
        name, _, part = path.rpartition(".")
        if path in whole:
            np.testing.assert_allclose(got, whole[path], rtol=1e-9, atol=1e-12)
        elif part.startswith("added"):
            a, b = flat[f"{name}.added_down"], flat[f"{name}.added_up"]
            of_weight = adapter.scale * whole[name]
            theirs = of_weight @ b.swapaxes(-1, -2)
            if part == "added_up":
                theirs = a.swapaxes(-1, -2) @ of_weight
            np.testing.assert_allclose(got, theirs, rtol=1e-9, atol=1e-12)
        seen.add(name if part.startswith(("added", "down", "up")) else path)
    words = {"wq": "layers.wq", "w_up": "layers.w_up"}
    experts = ("layers.w_gate", "layers.w_up", "layers.w_down")
    expected = {words.get(word, word) for word in adapter.target if word != "experts"}
    if "experts" in adapter.target:
        expected |= set(experts)
    if adapter.modules_to_save:
        expected |= {"head", "final_norm.scale", "layers.attn_norm.scale", "layers.mlp_norm.scale"}
    assert seen == expected


def stepped(trainer, state, batch, steps=2):
    step = jit(trainer.step)
    for number in range(steps):
        state, info = step(jax.random.key(number), state, batch)
    return jax.device_get((state, info))


@pytest.mark.parametrize(("model", "adapter"), [(WIDE, SAVING), (tiny.exact(EXPERTS), OF_EXPERTS)])
def test_a_mesh_trains_the_same_and_keeps_the_base(model, adapter, x64):
    trainer = Trainer(model, OPTIMIZER, adapter=adapter)
    first = trainer.begin(tiny.params_of(model), jax.random.key(1))
    jax.tree.map(np.testing.assert_array_equal, merge_adapters(first.params), tiny.params_of(model))
    assert not named(first.base).keys() & {"head", "final_norm.scale"} or adapter is OF_EXPERTS
    first = first.replace(adapters=noisy(first.adapters))
    want, told = stepped(trainer, first, BATCH)
    sizes = MeshSpec(data=2, fsdp=2, tensor=2)
    if adapter is OF_EXPERTS:
        sizes = MeshSpec(fsdp=2, expert=2, tensor=2)
    with use_mesh(make_mesh(sizes)):
        got, info = stepped(trainer, shard(first, trainer.axes()), BATCH)
    assert_close(got.adapters, want.adapters, LAYOUT["float64"])
    assert_close(info, told, 1e-6)  # float32
    jax.tree.map(np.testing.assert_array_equal, want.base, jax.device_get(first.base))
    before, after = named(first.adapters), named(want.adapters)
    assert all((before[name] != after[name]).any() for name in before)
    # Norms do not decay; a change and a head do.
    mask = named(trainer.make_optimizer().decays(first.adapters))
    assert mask["layers.wq.down"]
    if adapter is SAVING:
        assert mask["head"] and mask["embedding.added_up"] and not mask["final_norm.scale"]


def test_preferences_compare_with_saved_parameters_as_they_were():
    trainer = Trainer(MODEL, OPTIMIZER, adapter=SAVING, objective=ObjectiveConfig("dpo"))
    first = trainer.begin(tiny.params_of(MODEL), jax.random.key(1))
    after, _ = stepped(trainer, first, PAIRS, 3)
    start = merge_adapters(after.start)
    jax.tree.map(np.testing.assert_array_equal, start, tiny.params_of(MODEL))
    value = jit(lambda state: preference_loss(state.params, state.start, PAIRS, MODEL, 0.1)[0])
    _, info = stepped(trainer, after, PAIRS, 1)
    np.testing.assert_allclose(info["loss"], value(after), rtol=1e-5)


@pytest.mark.parametrize("adapter", [AdapterConfig(), SAVING], ids=["full", "adapters"])
def test_parameters_in_bfloat16_train_as_float32_exactly(adapter, tmp_path):
    model = dataclasses.replace(MODEL, dtype="bfloat16")
    to_hf(tiny.params_of(MODEL), MODEL, tmp_path / "folder", dtype="bfloat16")
    narrow = load_model(tmp_path / "folder")[1]
    assert {x.dtype.name for x in jax.tree.leaves(narrow)} == {"bfloat16"}
    trainer = Trainer(model, OPTIMIZER, adapter=adapter)
    state = trainer.begin(narrow, jax.random.key(0))
    wide = from_hf(tmp_path / "folder")[1]
    jax.tree.map(np.testing.assert_array_equal, state, trainer.begin(wide, jax.random.key(0)))
    shapes = jax.eval_shape(trainer.init, jax.random.key(0))
    assert jax.tree.map(lambda x: x.dtype, state) == jax.tree.map(lambda x: x.dtype, shapes)
    floats = [x for x in jax.tree.leaves(state) if jnp.issubdtype(x.dtype, jnp.floating)]
    assert {x.dtype.name for x in floats} == {"float32"}


# -------------------------------------------------- pipelines

FOUR = dataclasses.replace(WIDE, num_layers=4)
ADAPTED = {
    "dropout, saved and added": (
        with_fields(FOUR, dropout=0.3),
        dataclasses.replace(SAVING, target=("wq", "w_up", "embedding"), rank=2),
        zb_v(2, 2),
    ),
    "int8 and magnitudes": (
        FOUR,
        AdapterConfig("lora", rank=2, dropout=0.5, dora=True, base="int8"),
        with_gathers(zb_h1(2, 2)),
    ),
    "nf4": (
        WIDE,
        AdapterConfig("lora", target=("w[qv]", "w_down"), rank=2, dropout=0.5, base="nf4"),
        one_f_one_b(2, 2),
    ),
    "a hybrid": (
        with_fields(FOUR, num_kv_heads=4, mixers=("gla", "attention")),
        AdapterConfig("lora", rank=2, dropout=0.5),
        zb_h1(2, 2),
    ),
    "experts": (
        with_fields(tiny.exact(EXPERTS), balance_loss=0.1),
        OF_EXPERTS,
        one_f_one_b(2, 2),
    ),
    "a head over all stages": (
        WIDE,
        AdapterConfig("lora", target=("wq", "head"), rank=2, base="bfloat16"),
        with_vocabulary(one_f_one_b(2, 2)),
    ),
}


# 6 s each
SLOW = {"int8 and magnitudes", "a hybrid", "experts", "a head over all stages"}
each = pytest.mark.parametrize(
    "name",
    [pytest.param(name, marks=[pytest.mark.slow] if name in SLOW else []) for name in ADAPTED],
)


@each
def test_a_pipeline_of_adapters_makes_their_gradient(name, x64):
    """Loss and gradient of one device, in float64; nothing of the base has a gradient."""
    model, adapter, schedule = ADAPTED[name]
    alone = Trainer(model, OPTIMIZER, adapter=adapter, accumulate=2)
    first = alone.begin(tiny.params_of(model), jax.random.key(1))
    first = first.replace(adapters=noisy(first.adapters))

    def gradient(trainer):
        def made(state):
            plain = objective_stages(model, trainer.objective)
            pieces = trained_stages(plain, trainer.parts, state.base)
            return trainer.schedule(pieces, state.adapters, BATCH, jax.random.key(2), 2)

        return made

    want = jit(gradient(alone))(first)
    pipelined = dataclasses.replace(alone, schedule=Pipelined(schedule))
    # Of nf4 a mesh splits whole blocks, and these weights have one a row.
    sizes = MeshSpec(stage=2, data=2) if name == "nf4" else MeshSpec(stage=2, fsdp=2)
    with use_mesh(make_mesh(sizes, jax.devices()[:4]), rules_from(layout="stages")):
        got = jit(gradient(pipelined))(shard(first, pipelined.axes()))
    tolerance = 2e-2 if adapter.base == "bfloat16" else 1e-12
    assert_close(jax.device_get(got), jax.device_get(want), tolerance)
    assert jax.tree.structure(got[1]) == jax.tree.structure(first.adapters)


def test_a_pipeline_of_adapters_trains_as_one_device_does(x64):
    model, adapter, schedule = ADAPTED["nf4"]
    alone = Trainer(model, OPTIMIZER, adapter=adapter, accumulate=2)
    first = alone.begin(tiny.params_of(model), jax.random.key(1))
    want, told = stepped(alone, first, BATCH)
    pipelined = dataclasses.replace(alone, schedule=Pipelined(schedule))
    mesh = make_mesh(MeshSpec(stage=2), jax.devices()[:2])
    with use_mesh(mesh, rules_from(layout="stages")):
        state = shard(first, pipelined.axes())
        shares = {x.data.shape[0] for x in state.base["layers"]["wq"].values.addressable_shards}
        assert shares == {1}  # of 2 layers: each stage holds its own
        got, info = stepped(pipelined, state, BATCH)
    assert_close(got.adapters, want.adapters, 1e-10)
    np.testing.assert_allclose(info["loss"], told["loss"], rtol=1e-6)
    jax.tree.map(np.testing.assert_array_equal, got.base, jax.device_get(first.base))


# -------------------------------------------------- older names, refusals


def test_older_names_of_the_trainer_of_adapters_work_and_say_so():
    adapter = AdapterConfig("lora", rank=2)
    with pytest.warns(FutureWarning, match="AdapterTrainer.*is now Trainer.model, adapter=adapter"):
        older = AdapterTrainer(MODEL, adapter, OPTIMIZER, 10)
    today = Trainer(MODEL, OPTIMIZER, 10, adapter=adapter)
    assert older == today
    params = tiny.params_of(MODEL)
    with pytest.warns(FutureWarning, match="Trainer.begin.key, params.*is now"):
        state = older.begin(jax.random.key(1), params)
    want = today.begin(params, jax.random.key(1))
    jax.tree.map(np.testing.assert_array_equal, state, want)
    with pytest.warns(FutureWarning, match="jaxpar.lm.train.AdaptedState"):
        from jaxpar.lm.adapters import AdaptedState
    assert isinstance(state, AdaptedState)


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"dropout": 0.1}, "adapter.dropout=0.1: embedding has a change that is added to it"),
        ({"dora": True}, "adapter.dora=True: embedding has a change"),
        ({"modules_to_save": ("wq",)}, "adapter.modules_to_save=wq: layers.wq has an adapter too"),
        ({"modules_to_save": ("lm_head",)}, "adapter.modules_to_save=lm_head matches no parameter"),
        ({"target": ("experts",)}, "adapter.target=experts .*legal are .*, and embedding, head"),
    ],
)
def test_what_there_is_no_adapter_for_is_refused(changes, sentence):
    with pytest.raises(UsageError, match=sentence):
        Trainer(MODEL, adapter=dataclasses.replace(SAVING, **changes))


def test_adapters_of_other_models_are_refused():
    params = tiny.params_of(MODEL)
    adapters = begin_adapters(jax.random.key(0), params, MODEL, AdapterConfig("lora", rank=2))
    adapters["layers"]["w_other"] = adapters["layers"].pop("wq")
    with pytest.raises(UsageError, match="adapters.layers.w_other: there is no such weight"):
        with_adapters(params, adapters, 1.0)
