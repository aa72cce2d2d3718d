"""A language model over a split sequence: by every move, in every order, equal to one device."""

import functools
import itertools
import math
import re

import jax
import numpy as np
import pytest
from fast import jit, noisy_params
from lm_configs import lm_config, with_fields

from jaxpar.aot.verify.collectives import found_transfers
from jaxpar.lm import OptimizerConfig, Trainer, apply, axes, loss
from jaxpar.lm.transfers import context_bytes, declared_transfers
from jaxpar.mesh import MeshSpec, make_mesh, named_shardings, shard, use_mesh
from jaxpar.nn import TokenInfo
from jaxpar.nn.attention.context import MOVES, Order, Sizes, choose_move, in_order, move_for, padded
from jaxpar.nn.attention.context.token_orders import ORDERS
from jaxpar.transfers import SMALL, sum_by_axis
from jaxpar.types import UsageError

ROWS, LENGTH, VOCAB = 4, 32, 32
MODEL = lm_config(
    vocab_size=VOCAB, num_layers=2, embed_dim=16, num_heads=8, num_kv_heads=4, head_dim=2, mlp_dim=16, dtype="float32",
    loss_chunk=12, init_std=0.2,
)  # fmt: skip
FACTORS = [
    (1, 8, 1),
    (2, 4, 1),
    (1, 4, 2),
    (2, 2, 2),
    (4, 2, 1),
    (1, 2, 4),
]  # (data, context, tensor)
KINDS = ["rows", "packed", "restarting"]
# Every move, and each order, factorisation and kind of rows of a model, at least once.
# tests/context/test_context.py has more pairs of them for attention itself.
PAIRS = [
    ("gather", "striped", (1, 4, 2), "packed"),
    ("ring", "contiguous", (2, 2, 2), "rows"),
    # Without a table, a token's index decides what it sees, and its position rotates it alone.
    ("two_way", "striped", (1, 8, 1), "restarting"),
    ("token_ring", "zigzag", (2, 2, 2), "packed"),
    ("swap", "contiguous", (1, 8, 1), "restarting"),
    ("swap_ring", "zigzag", (2, 4, 1), "rows"),
]
FULL = [
    (*case, KINDS[(n + n // 6) % 3])
    for n, case in enumerate(itertools.product(MOVES, ORDERS, FACTORS))
]
LONG = 208  # a size that nothing else has: one of four devices holds 52 tokens


def model_of(move, order="auto", dtype="float32", **changes):
    heads = {"num_kv_heads": 8} if move == "swap" else {}  # which exchanges whole key heads
    return with_fields(MODEL, context=move, context_order=order, dtype=dtype, **heads | changes)


def batch_of(kind="rows", length=LENGTH):
    """Returns rows of tokens; packed ones have borders of documents anywhere on several devices.

    In rows that restart, positions begin again with each document, and documents see each other.
    """
    rng = np.random.default_rng(length)
    tokens = rng.integers(0, VOCAB, (ROWS, length + 1), dtype=np.int32)
    batch = {"tokens": tokens[:, :-1], "targets": tokens[:, 1:]}
    batch["weights"] = rng.choice([0.0, 0.5, 1.0], (ROWS, length)).astype(np.float32)
    borders = rng.random((ROWS, length)) < 0.12
    borders[:, 0] = True
    places = np.broadcast_to(np.arange(length), borders.shape)
    first = np.maximum.accumulate(np.where(borders, places, 0), 1)
    if kind == "packed":
        batch["segments"] = borders.cumsum(1, dtype=np.int32)
    if kind != "rows":
        batch["positions"] = (places - first).astype(np.int32)
    return batch


@functools.cache
def params_of(heads, dtype):
    return noisy_params(with_fields(MODEL, num_kv_heads=heads), dtype)


def split(batch, model):
    """The batch as its devices hold it."""
    batch = in_order(
        batch, model.order(batch["tokens"].shape[1]), jax.sharding.get_mesh().shape["context"]
    )
    return shard(batch, {name: ("batch", "seq_layer") for name in batch})


def gradients(model):
    return jax.value_and_grad(lambda params, batch: loss(params, batch, model))


@functools.cache
def program_alone(heads, dtype):
    return jit(gradients(with_fields(MODEL, num_kv_heads=heads, dtype=dtype)))


@functools.cache
def alone(heads, kind, dtype, length=LENGTH):
    """Returns the gradients of one device, by one program for rows of every kind."""
    shape = ROWS, length
    whole = {
        "segments": np.zeros(shape, np.int32),
        "positions": np.tile(np.arange(length, dtype=np.int32), (ROWS, 1)),
    }
    return jax.device_get(
        program_alone(heads, dtype)(params_of(heads, dtype), whole | batch_of(kind, length))
    )


def assert_equals_one_device(move, order, sizes, kind, dtype, tolerance, length=LENGTH):
    """Returns the compiled program, and its parameters as they lie on the devices."""
    model, (data, context, tensor) = model_of(move, order, dtype), sizes
    with use_mesh(make_mesh(MeshSpec(data=data, context=context, tensor=tensor))):
        args = (
            shard(params_of(model.attention.num_kv_heads, dtype), axes(model)),
            split(batch_of(kind, length), model),
        )
        program = jit(gradients(model)).lower(*args).compile()
        got = jax.device_get(program(*args))
    assert_alike(got, alone(model.attention.num_kv_heads, kind, dtype, length), tolerance)
    return program, args[0]


def assert_alike(got, want, tolerance):
    """Compares each leaf relative to its largest entry: only the order of sums differs."""
    jax.tree.map(
        lambda x, y: np.testing.assert_allclose(x, y, rtol=0, atol=tolerance * np.abs(y).max()),
        got,
        want,
    )


def name_of(value):
    return "x".join(map(str, value)) if isinstance(value, tuple) else value


@pytest.mark.parametrize(("move", "order", "sizes", "kind"), PAIRS, ids=name_of)
def test_loss_and_gradients_equal_one_device(move, order, sizes, kind, x64):
    assert_equals_one_device(move, order, sizes, kind, "float64", 1e-10)


@pytest.mark.parametrize(
    "kind", ["packed", pytest.param("rows", marks=pytest.mark.slow)]
)  # 4 s each
def test_an_odd_length_is_padded_and_equals_one_device_without(kind, x64):
    model, length = model_of("ring", "zigzag", "float64"), LENGTH - 3
    batch = batch_of(kind, length)
    with use_mesh(make_mesh(MeshSpec(data=2, context=4))):
        args = shard(params_of(4, "float64"), axes(model)), split(padded(batch, LENGTH), model)
        got = jax.device_get(jit(gradients(model))(*args))
    assert_alike(got, alone(4, kind, "float64", length), 1e-10)
    del batch["weights"]
    assert padded(batch, LENGTH)["weights"].sum() == ROWS * length
    with pytest.raises(
        UsageError, match="rows of 29 tokens cannot be padded to 28; the smallest length is 29"
    ):
        padded(batch, length - 1)


def shapes_of(text):
    return {tuple(map(int, shape.split(","))) for shape in re.findall(r"\w+\[([\d,]+)\]", text)}


def assert_no_whole_sequence(text):
    sizes = {size for shape in shapes_of(text) for size in shape}
    assert {52, 104} & sizes and not sizes & {LONG, 2 * LONG, 4 * LONG}


def whole_shapes(text):
    """What has all tokens of a row or of several, or four devices' pieces of 52."""
    of_all = {LONG, 2 * LONG, 4 * LONG}
    return {
        shape
        for shape in shapes_of(text)
        if of_all & set(shape) or (shape[0], *shape[2:3]) == (4, 52)
    }


# As packed rows, with training steps that are compiled below, and as attention alone.
BY_TABLE = [
    "ring",
    *(pytest.param(move, marks=pytest.mark.slow) for move in ("two_way", "token_ring")),
]  # 2 s each


@pytest.mark.parametrize("move", BY_TABLE)
def test_float32_equals_one_device_and_no_buffer_has_a_whole_sequence(move):
    program, params = assert_equals_one_device(
        move, "zigzag", (2, 4, 1), "rows", "float32", 1e-5, LONG
    )
    assert_no_whole_sequence(program.as_text())
    # Tokens in another order than the promised one make a loss that no trainer takes.
    with use_mesh(make_mesh(MeshSpec(data=2, context=4))):
        value, grads = program(params, split(batch_of("rows", LONG), model_of(move, "striped")))
    assert np.isnan(value) and all(
        np.isnan(x).any() for x in jax.tree.leaves(jax.device_get(grads["layers"]))
    )


@pytest.mark.slow  # 4 minutes
@pytest.mark.parametrize(("dtype", "tolerance"), [("float32", 1e-5), ("float64", 1e-10)])
@pytest.mark.parametrize(("move", "order", "sizes", "kind"), FULL, ids=name_of)
def test_every_combination_equals_one_device(move, order, sizes, kind, dtype, tolerance):
    with jax.enable_x64(dtype == "float64"):
        assert_equals_one_device(move, order, sizes, kind, dtype, tolerance)


@pytest.mark.parametrize(
    "changes",
    [
        {"remat": "full", "context": "two_way"},
        # Evaluation drops nothing.
        {
            "remat": "names",
            "positions": "learned",
            "dropout": 0.3,
            "context": "ring",
            "context_order": "striped",
        },
        {"dropout": 0.3},  # which gathers the sequence
        # 5 s each. Blockwise layers over a split sequence are in tests/nn/test_blockwise.py, too.
        pytest.param(
            {"remat": "full", "scan_layers": False, "context": "two_way"}, marks=pytest.mark.slow
        ),
        pytest.param({"remat": "blockwise", "context": "token_ring"}, marks=pytest.mark.slow),
    ],
    ids=lambda changes: "-".join(map(str, changes.values())),
)
def test_whatever_else_a_model_is_it_equals_one_device(changes, x64):
    model, batch = with_fields(MODEL, dtype="float64", **changes), batch_of()
    key = jax.random.key(1) if model.dropout and model.execution.context == "auto" else None
    both = jax.value_and_grad(lambda params, batch: loss(params, batch, model, dropout_key=key))
    params = noisy_params(model, np.float64)
    is_plain = key is None and model.positions == MODEL.positions
    want = alone(4, "rows", "float64") if is_plain else jax.device_get(jit(both)(params, batch))
    with use_mesh(make_mesh(MeshSpec(data=2, context=4))):
        got = jax.device_get(jit(both)(shard(params, axes(model)), split(batch, model)))
    assert_alike(got, want, 1e-10)


def trained_model(move, remat):
    return model_of(
        move, "zigzag", remat=remat, **({"num_kv_heads": 2} if move == "swap_ring" else {})
    )


def declared_of(move, remat):
    with use_mesh(make_mesh(MeshSpec(data=2, context=4))):
        return declared_transfers(trained_model(move, remat), ROWS, LONG)


def large(declared):
    """Returns the transfers without small arrays, which are not judged."""
    return [transfer for transfer in declared if transfer.bytes > SMALL * transfer.arrays]


def assert_declared(found, declared, move, remat):
    """Asserts that a program sends what its table says."""
    found = sum_by_axis(found)
    wanted = sum_by_axis(large(declared))
    if jax.__version_info__ < (0, 11) and remat == "full":
        # XLA's CPU compiler merges some of what is recomputed there with what was computed first.
        once = sum_by_axis(large(declared_of(move, "none")))
        assert found.keys() == wanted.keys()
        assert all(found[kind] in (wanted[kind], once[kind]) for kind in wanted)
    else:
        assert found == wanted


@functools.cache
def training_step(move, remat):
    """Returns a compiled step, its mesh, its declared transfers and attention's by direction."""
    model = trained_model(move, remat)
    trainer = Trainer(model, OptimizerConfig(warmup_steps=1), 10)
    mesh = make_mesh(MeshSpec(data=2, context=4))
    with use_mesh(mesh):
        state = jax.eval_shape(trainer.init, jax.random.key(0))
        batch = jax.eval_shape(lambda: in_order(batch_of("packed", LONG), model.order(LONG), 4))
        shardings = named_shardings(
            (state, batch), (trainer.axes(), {name: ("batch", "seq_layer") for name in batch})
        )
        step = jit(
            trainer.step, in_shardings=(None, *shardings), out_shardings=(shardings[0], None)
        )
        text = step.lower(jax.random.key(0), state, batch).compile().as_text()
        return text, mesh, declared_transfers(model, ROWS, LONG), context_bytes(model, ROWS, LONG)


@pytest.mark.parametrize("move", ["ring", "two_way", "token_ring"])
def test_no_buffer_of_a_training_step_on_packed_rows_has_a_whole_sequence(move):
    assert_no_whole_sequence(training_step(move, "none")[0])


def test_a_training_step_by_gather_has_keys_alone_of_a_whole_sequence():
    """Keys, values and the sums of their gradients, a piece a device, and numbers of documents."""
    shapes = whole_shapes(training_step("gather", "full")[0])
    assert move_for("gather", 4).holds == ("keys", "sums") and shapes == {
        (4, 2, 52, 4, 2),
        (4, 2, 52),
    }


def test_a_training_step_by_swap_has_a_share_of_the_heads_of_a_whole_sequence():
    """A device's heads of both layers, and scores; all heads of one layer would be twice as much."""
    shapes = whole_shapes(training_step("swap", "none")[0])
    most = max(math.prod(size for size in shape if size != LONG) for shape in shapes)
    layers, rows, heads, width = (
        MODEL.num_layers,
        ROWS // 2,
        MODEL.attention.num_heads,
        MODEL.attention.head_dim,
    )
    assert move_for("swap", 4).holds == ("heads", "outputs")
    assert most == layers * rows * heads // 4 * width < rows * heads * width


# Recomputing sends again what any table sends forward: all kinds of sends are those of these moves.
STEPS = [("ring", "none"), ("two_way", "none"), ("token_ring", "none"), ("swap", "none")]
STEPS += [("gather", "full"), ("swap_ring", "full")]
REST = [case for case in itertools.product(MOVES, ["none", "full"]) if case not in STEPS]


@pytest.mark.parametrize(
    ("move", "remat"), STEPS + [pytest.param(*case, marks=pytest.mark.slow) for case in REST]
)  # slow: 15 s
def test_a_training_step_sends_what_its_table_says(move, remat):
    text, mesh, declared, by_link = training_step(move, remat)
    assert_declared(found_transfers(text, mesh), declared, move, remat)
    shares, again, layers = 4, 2 if remat == "full" else 1, MODEL.num_layers
    table = move_for(move, shares, 2 if move == "swap_ring" else 1)
    groups = 2 if move == "swap_ring" else model_of(move).attention.num_kv_heads
    sizes = Sizes(
        ROWS // 2, LONG // shares, 8, groups, 2, 4, places=1
    )  # of a promised order documents alone
    forward, backward = (table.bytes(sizes, is_back) for is_back in (False, True))
    assert by_link == {link: layers * (again * forward[link] + backward[link]) for link in forward}
    # The table counts what a device lacks; a program's arrays are whole.
    whole = {"up": 1, "down": 1, "all": table.members / (table.members - 1)}
    sent = sum(
        layers * (again * forward[link] + backward[link]) * times for link, times in whole.items()
    )
    assert sum(t.bytes for t in declared if "of attention" in t.why) == pytest.approx(sent)


def test_the_move_that_loads_a_link_least_is_taken():
    def taken(heads, groups, shares):
        return choose_move(Sizes(1, 64, heads, groups, 128, 2), shares).name

    assert taken(32, 8, 4) == "swap"  # (N-1)/N as much as all it exchanges
    assert taken(32, 8, 16) == "swap_ring"  # too few key heads to exchange with all
    assert (
        taken(5, 5, 4) == "token_ring"
    )  # as many keys as queries: these and their results go different ways
    assert taken(32, 1, 2) == "two_way"


def test_an_order_is_even_where_it_can_be():
    with use_mesh(make_mesh(MeshSpec(data=2, context=4))):
        assert MODEL.order(32).name == "zigzag" and MODEL.order(36).name == "contiguous"
        assert with_fields(MODEL, context_order="striped").order(32).name == "striped"
        for changes in ({"dropout": 0.1}, {"mixer": "min_gru"}, {"attention": "cudnn"}):
            assert with_fields(MODEL, **changes).order(32).name == "contiguous"


def test_a_batch_is_permuted_whole_and_carries_positions():
    whole = batch_of()
    batch = in_order(whole, Order("zigzag"), 4)
    assert all(type(x) is np.ndarray and x.shape == (ROWS, LENGTH) for x in batch.values())
    places = batch.pop("places")
    np.testing.assert_array_equal(places[0, :8], [0, 1, 2, 3, 28, 29, 30, 31])
    for name, x in batch.items():
        np.testing.assert_array_equal(x, np.take_along_axis(whole[name], places, 1))
    assert in_order(whole, Order("zigzag"), 1) == whole


def apply_to(batch, model, order=None, **options):
    with use_mesh(make_mesh(MeshSpec(data=2, context=4))):
        batch = split(batch, order or model)
        jax.eval_shape(lambda params: loss(params, batch, model, **options), noisy_params(model))


def test_positions_alone_tell_any_order(x64):
    """Without a promised order: a batch as it is, and one in an order unknown to the model."""
    model, batch = model_of("ring", "zigzag", "float64"), batch_of("packed")
    with use_mesh(make_mesh(MeshSpec(data=2, context=4))):
        params, both = shard(params_of(4, "float64"), axes(model)), jit(gradients(model))
        other = in_order(batch, Order("striped"), 4)
        del other["places"]
        for given in (batch, other):
            got = both(params, shard(given, {name: ("batch", "seq_layer") for name in given}))
            assert_alike(jax.device_get(got), alone(4, "packed", "float64"), 1e-10)


def masked(model):
    tokens = batch_of()["tokens"]
    with use_mesh(make_mesh(MeshSpec(data=2, context=4))):
        info = TokenInfo(visible=np.ones((ROWS, LENGTH, LENGTH), bool))
        jax.eval_shape(lambda params: apply(params, tokens, model, info), noisy_params(model))


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (
            lambda: with_fields(MODEL, context="tree"),
            "legal are auto, gather, ring, two_way, token_ring, swap, swap_ring",
        ),
        (
            lambda: with_fields(MODEL, context_order="spiral"),
            "legal are auto, contiguous, zigzag, striped",
        ),
        (
            lambda: with_fields(MODEL, mixer="gru", context_order="zigzag"),
            "take .*context_order=contiguous",
        ),
        (
            lambda: with_fields(MODEL, mixer="gru", context="ring"),
            "mixer.kind=gru reads tokens in turn",
        ),
        (
            lambda: apply_to(batch_of(), with_fields(MODEL, context="swap", num_kv_heads=2)),
            "2 key heads",
        ),
        (
            lambda: apply_to(batch_of(length=36), model_of("ring", "zigzag")),
            "zigzag order of 36 tokens over context=4 needs a multiple of 8; the nearest are 32 and",
        ),
        (
            lambda: apply_to(
                batch_of(), model_of("ring", dropout=0.1), dropout_key=jax.random.key(0)
            ),
            "attention with dropout=0.1 on its weights needs whole rows, .* context=ring in a contiguous order",
        ),
        (
            lambda: apply_to(batch_of(), model_of("auto", "zigzag", attention="splash")),
            "the kernel attention=splash needs whole rows, .* in a zigzag order; take context=gather",
        ),
        (
            lambda: apply_to(batch_of(), model_of("ring", "zigzag"), model_of("ring", "striped")),
            "order=zigzag of 32 tokens over context=4 has 1 where row 0 has position 4, at index 1; put",
        ),
        (lambda: masked(MODEL), "attention with a mask of its own needs whole rows"),
    ],
)
def test_what_cannot_be_is_told(call, words):
    with pytest.raises(UsageError, match=words):
        call()


def test_masks_of_ones_own_gather_rows_in_turn():
    masked(model_of("auto", "contiguous"))
    masked(model_of("gather", "contiguous"))
