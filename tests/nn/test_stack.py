"""The stack and the contract of its mixers: parts equal the whole, in value and gradient, whatever the cache holds."""

import dataclasses
import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from compiled import copies
from fast import jit
from tolerance import EXACT_MATHS, assert_close

from jaxpar.mesh import MeshSpec, make_mesh, rules_from, shard, use_mesh
from jaxpar.nn import ParaGRU
from jaxpar.nn.attention import Attention, LinearCache, Visible
from jaxpar.nn.cells.aaren import Aaren
from jaxpar.nn.linear import Lora
from jaxpar.nn.mixer import ActivationSizes, TokenInfo
from jaxpar.nn.mixers import (
    BlockRecurrent,
    GatedDelta,
    GatedLinear,
    Hgrn,
    Lmu,
    Mamba2,
    MatrixState,
    MLstm,
    Recurrent,
    Rwkv6,
    Tcnca,
)
from jaxpar.nn.mlp import Mlp
from jaxpar.nn.position import Alibi, Rope
from jaxpar.nn.stack import Stack
from jaxpar.nn.weights.narrow import quantise
from jaxpar.types import UsageError

B, T, D = 3, 9, 8
MIXERS = {
    "attention": Attention(4, 2, 4, positions=Rope()),
    "window": Attention(4, 4, 2, positions=Rope(), visible=Visible(window=4)),
    "slopes": Attention(4, 2, 2, positions=Alibi(), visible=Visible(window=3)),
    "para_gru": Recurrent(ParaGRU(8)),
    "aaren": Recurrent(Aaren(8, 2)),
    "gla": MatrixState(GatedLinear(2, 2, 4), 4),
    "simple_gla": MatrixState(GatedLinear(2, 2, 4, gate="heads"), 4),
    "retention": MatrixState(GatedLinear(2, 2, 4, gate="fixed", positions=Rope()), 4),
    "mlstm": MatrixState(MLstm(2, 2, 4), 4),
    "mlstm_sig": MatrixState(MLstm(2, 2, 4, gate="sigmoid"), 4),
    "mamba2": MatrixState(Mamba2(2, 3, 4), 4),
    "gated_delta": MatrixState(GatedDelta(2, 2, 4), 4),
    "rwkv6": MatrixState(Rwkv6(2, 2, 4, rank=3), 4),
    "hgrn": Hgrn(8),
    "lmu": Lmu(8, 2, memory=3, theta=5.0),
    "spiking_lmu": Lmu(8, 2, memory=3, theta=5.0, spiking=True),
    "block_recurrent": BlockRecurrent(2, 4, window=3, num_states=2),
    "tcnca": Tcnca(2, 4, chunk=3, dilations=(1, 2), taps=2, positions=Rope()),
}
# Layers only ever share what the stack hands them, which these show: attention's cache and a state.
TWO_LAYERS = {"attention", "window", "slopes", "para_gru"}
# 20 s, in the long run: what lmu has beside potentials, and what gated_delta, rwkv6 and mlstm have together.
LATER = {"spiking_lmu", "gla", "simple_gla", "retention", "mlstm_sig", "mamba2"}
# 30 s together: their own files have gradients and documents against plain equations in CI.
GRADIENTS_LATER = LATER | {"lmu", "mlstm", "block_recurrent", "tcnca"}

# Mixers that pass over a cache that is known to be empty; to the others it is one as any.
FRESH = {"attention", "window", "slopes", "block_recurrent", "lmu", "tcnca"}


def marked(names, later):
    return [pytest.param(name, marks=pytest.mark.slow) if name in later else name for name in names]


each_mixer = pytest.mark.parametrize("name", marked(MIXERS, LATER))
TOLERANCE = EXACT_MATHS["float64"]
STARTS = np.array(
    [[0, 0, 0, 1, 0, 0, 0, 0, 0], [1, 0, 0, 0, 0, 0, 1, 1, 0], [0, 0, 0, 0, 0, 0, 0, 0, 0]], bool
)


def stack_of(name, **changes):
    options = dict(mlp=Mlp(12), dtype="float64", init_std=0.3)
    return Stack(2 if name in TWO_LAYERS else 1, D, MIXERS[name], **options | changes)


@functools.cache
def params_of(name):
    with jax.enable_x64(True):
        leaves = jax.eval_shape(lambda: stack_of(name).init(jax.random.key(0), jnp.float64))
        rng = np.random.default_rng(0)
        return jax.tree.map(lambda leaf: jnp.asarray(0.3 * rng.standard_normal(leaf.shape)), leaves)


def inputs():
    return np.random.default_rng(1).standard_normal((B, T, D))


@functools.cache
def program_of(name):
    return jit(lambda params, x: stack_of(name).apply(params, x)[0])


def alone(name, line):
    """Outputs of one row without a cache, padded so that one program serves all lengths: what comes later is unseen."""
    length = line.shape[1]
    padded = np.pad(line, ((0, 0), (0, 2 * T - length), (0, 0)))
    return np.asarray(program_of(name)(params_of(name), padded))[:, :length]


def in_parts(stack, params, x, sizes, starts=None, slots=T):
    """Outputs of one part after the other, each from the cache of those before; equal parts in a loop."""
    cache, out, place = stack.init_cache(x.shape[0], slots), [], 0
    if len(sizes) > 1 and len(set(sizes)) == 1:

        def step(cache, part):
            y, cache, _ = stack.apply(params, part[0], TokenInfo(starts=part[1]), cache=cache)
            return cache, y

        def split(x):
            return jnp.moveaxis(x.reshape(len(x), len(sizes), sizes[0], *x.shape[2:]), 1, 0)

        cache, out = jax.lax.scan(step, cache, jax.tree.map(split, (x, starts)))
        return jnp.moveaxis(out, 0, 1).reshape(x.shape), cache
    for size in sizes:
        here = None if starts is None else starts[:, place : place + size]
        part = x[:, place : place + size]
        y, cache, _ = stack.apply(params, part, TokenInfo(starts=here), cache=cache)
        out.append(y)
        place += size
    return jnp.concatenate(out, 1), cache


def value_and_gradients(run, name, x):
    def weighted(params, x):
        y = run(params, x)
        return (y * jnp.cos(jnp.arange(y.size)).reshape(y.shape)).sum(), y

    return jit(jax.value_and_grad(weighted, (0, 1), has_aux=True))(params_of(name), x)


@functools.cache
def whole_of(name):
    """Value and gradients of whole rows."""
    return value_and_gradients(
        lambda p, x: stack_of(name).apply(p, x, TokenInfo(starts=STARTS))[0], name, inputs()
    )


@pytest.mark.parametrize(
    ("name", "sizes"),
    [
        *(
            pytest.param(name, (4, 5), marks=[pytest.mark.slow] * (name in GRADIENTS_LATER))
            for name in MIXERS
        ),
        ("slopes", (1,) * T),
        ("para_gru", (1,) * T),
    ],
)
def test_parts_equal_the_whole_in_value_and_gradient(name, sizes, x64):
    stack = stack_of(name)
    parts = value_and_gradients(
        lambda p, x: in_parts(stack, p, x, sizes, STARTS)[0], name, inputs()
    )
    assert_close(parts, whole_of(name), TOLERANCE)


@pytest.mark.parametrize("name", marked(MIXERS, GRADIENTS_LATER))
def test_documents_of_a_row_see_nothing_of_each_other(name, x64):
    stack, x = stack_of(name), inputs()
    got = jit(lambda p, x: stack.apply(p, x, TokenInfo(starts=STARTS))[0])(params_of(name), x)
    lines = np.concatenate([alone(name, x[1:2, a:b]) for a, b in ((0, 6), (6, 7), (7, 9))], 1)
    assert_close(np.asarray(got)[1:2], lines, TOLERANCE)
    segments = np.cumsum(STARTS, 1)
    by_number = jit(lambda p, x: stack.apply(p, x, TokenInfo(segments=segments))[0])(
        params_of(name), x
    )
    np.testing.assert_array_equal(by_number, got)


@pytest.mark.parametrize(
    ("name", "fresh"),
    [
        pytest.param(
            name,
            fresh,
            id=f"{'prompt' if fresh else 'later'}-{name}",
            marks=[pytest.mark.slow] * (name in LATER or (fresh and name not in FRESH)),
        )
        for name in MIXERS
        for fresh in (True, False)
    ],
)
def test_only_what_is_valid_enters_the_cache(name, fresh, x64):
    """Rows of 5, 0 and 2 tokens, then three more of each: what the tokens of each row alone give."""
    stack, params, x, valid = stack_of(name), params_of(name), inputs(), np.array([5, 0, 2])
    before = 0 if fresh else 2

    def run(params, x):
        cache = stack.init_cache(B, 12)
        if before:
            _, cache, _ = stack.apply(params, x[:, :before], cache=cache)
        _, cache, _ = stack.apply(
            params, x[:, before : before + 5], TokenInfo(valid=valid), cache=cache, fresh=fresh
        )
        return stack.apply(params, x[:, 6:], cache=cache)[0], cache

    got, cache = jit(run)(params, x)
    np.testing.assert_array_equal(cache.seen, before + valid)
    for row, count in enumerate(valid):
        line = np.concatenate([x[row : row + 1, : before + count], x[row : row + 1, 6:]], 1)
        assert_close(
            np.asarray(got)[row : row + 1], alone(name, line)[:, before + count :], TOLERANCE
        )


@pytest.mark.parametrize("name", ["window", "slopes"])
def test_a_window_needs_no_more_slots_than_it_sees(name, x64):
    """A row three times as long as its slots, in parts longer and shorter than the window."""
    stack, x = stack_of(name), np.concatenate([inputs()] * 2, 1)
    cache = stack.init_cache(B, 100)
    assert cache.layers[0].room == MIXERS[name].visible.window
    got = jit(lambda p, x: in_parts(stack, p, x, (1, 1, 7, 2, 1, 1, 5), slots=100)[0])(
        params_of(name), x
    )
    assert_close(got, program_of(name)(params_of(name), x), TOLERANCE)


def test_every_slot_is_written_once():
    """Of more tokens than there is room for, the last are kept: which of two writes would win is a device's affair."""
    cache = LinearCache.empty(4, 1, 3, 2, jnp.float32)
    slots = np.asarray(cache.slots(7, jnp.array([0, 1, 5, 2]), jnp.array([7, 5, 2, 0])))
    np.testing.assert_array_equal(
        slots, [[3, 3, 3, 3, 1, 2, 0], [3, 3, 0, 1, 2, 3, 3], [2, 0, 3, 3, 3, 3, 3], [3] * 7]
    )


@each_mixer
def test_a_loop_can_carry_the_cache(name, x64):
    stack, x = stack_of(name), inputs()
    first = jax.eval_shape(lambda: stack.init_cache(B, T))
    second = jax.eval_shape(
        lambda p, cache: stack.apply(p, x, TokenInfo(starts=STARTS), cache=cache)[1],
        params_of(name),
        first,
    )
    assert jax.tree.map(lambda x: (x.shape, x.dtype), second) == jax.tree.map(
        lambda x: (x.shape, x.dtype), first
    )


@functools.cache
def after_six():
    """Attention's cache of 16 slots after six tokens of each row."""
    program = jit(lambda p, x: in_parts(stack_of("attention"), p, x, (6,), slots=16)[1])
    return program(params_of("attention"), inputs())


def test_tokens_can_be_taken_back(x64):
    stack, params, x = stack_of("attention"), params_of("attention"), inputs()
    cache = after_six().replace(seen=jnp.array([6, 2, 4], jnp.int32))
    got = np.asarray(
        jit(lambda p, x, cache: stack.apply(p, x, cache=cache)[0])(params, x[:, 6:], cache)
    )
    for row, kept in enumerate((6, 2, 4)):
        line = np.concatenate([x[row : row + 1, :kept], x[row : row + 1, 6:]], 1)
        assert_close(got[row : row + 1], alone("attention", line)[:, kept:], TOLERANCE)


@pytest.mark.parametrize("cached", [False, True])
def test_tokens_may_see_some_of_each_other(cached, x64):
    """A tree of tokens: two branches after one root, each seeing itself and the root."""
    stack, params, x = stack_of("attention"), params_of("attention"), inputs()[:, :5]
    tree = np.array([[1, 0, 0], [1, 1, 0], [1, 0, 1]], bool)
    places = np.array([[2, 3, 3]] * B)
    if cached:
        _, cache = jit(lambda p, x: in_parts(stack, p, x, (2,)))(params, x)
        visible = np.broadcast_to(tree, (B, 3, 3))
        info = TokenInfo(positions=places, visible=visible)
        step = jit(lambda p, x, cache: stack.apply(p, x, info, cache=cache)[0])
        got = step(params, x[:, 2:], cache)
    else:
        visible = np.broadcast_to(
            np.block([[np.ones((2, 2)), np.zeros((2, 3))], [np.ones((3, 2)), tree]]) > 0, (B, 5, 5)
        )
        positions = np.concatenate([np.array([[0, 1]] * B), places], 1)
        info = TokenInfo(positions=positions, visible=visible)
        got = jit(lambda p, x: stack.apply(p, x, info)[0])(params, x)[:, 2:]
    one, two = (alone("attention", x[:, [0, 1, 2, last]]) for last in (3, 4))
    assert_close(got, np.stack([one[:, 2], one[:, 3], two[:, 3]], 1), TOLERANCE)


def test_scanned_and_unrolled_layers_tell_the_same(x64):
    x = inputs()
    scanned, unrolled = (
        jit(stack_of("para_gru", scan_layers=scan).apply)(params_of("para_gru"), x)
        for scan in (True, False)
    )
    assert_close(unrolled[0], scanned[0], TOLERANCE)
    assert (
        set(scanned[2].metrics)
        == {"iterations", "residual", "converged"}
        == set(unrolled[2].metrics)
    )
    assert scanned[2].metrics["converged"].value == 1


# ---------------------------------------------------------------- other weights


def test_layers_take_other_weights_in_an_arrays_place(x64):
    stack, params, x = stack_of("attention"), params_of("attention"), inputs()
    wq, w_up = params["layers"]["wq"], params["layers"]["w_up"]
    adapted = jax.vmap(lambda key, w: Lora.of(key, w, 1, 2))(
        jax.random.split(jax.random.key(0), 2), wq
    )
    adapted = adapted.replace(up=adapted.up + 0.1)
    small = jax.vmap(lambda w: quantise(w, 1))(w_up)
    got = params | {"layers": params["layers"] | {"wq": adapted, "w_up": small}}
    merged = wq + jnp.einsum("ldr,lrhk->ldhk", adapted.down, adapted.up)
    want = params | {
        "layers": params["layers"] | {"wq": merged, "w_up": small.values * small.scales[:, None]}
    }
    for scan in (True, False):
        apply = jit(stack_of("attention", scan_layers=scan).apply)
        assert_close(apply(got, x)[0], apply(want, x)[0], TOLERANCE)
    parts = jit(lambda p, x: in_parts(stack, stack.unstacked(p), x, (5, 4))[0])(got, x)
    assert_close(parts, program_of("attention")(want, x), TOLERANCE)


# ---------------------------------------------------------------- where the cache lies


def step_of(stack):
    return lambda params, x, cache: stack.apply(params, x, cache=cache)[:2]


@functools.cache
def on_one_device():
    return jit(step_of(stack_of("attention")))(
        params_of("attention"), inputs()[:, 6:7], after_six()
    )


@pytest.mark.parametrize("rules", ["context", "data+context"])
def test_slots_can_be_split_over_devices(rules, x64):
    """Softmax over slots that lie on several devices: two small sums of a step, and no gather of the cache."""
    stack, params, x = stack_of("attention"), params_of("attention"), inputs()
    cache, want = after_six(), on_one_device()
    changes = {"slots": rules, "batch": "none"}
    with use_mesh(make_mesh(MeshSpec(data=2, context=4)), rules_from(changes)):
        args = shard(
            (params, cache), (jax.tree.map(lambda x: (None,) * x.ndim, params), stack.cache_axes())
        )
        program = jit(step_of(stack)).lower(args[0], x[:, 6:7], args[1]).compile()
        got = program(args[0], x[:, 6:7], args[1])
        keys = got[1].layers[0].keys
        assert keys.sharding.shard_shape(keys.shape)[2] == 16 // (4 if rules == "context" else 8)
    assert_close(jax.device_get(got), jax.device_get(want), TOLERANCE)
    gathered = re.findall(r"= f64\[([\d,]*)\][^=]* all-gather", program.as_text())
    assert not [shape for shape in gathered if "16" in shape.split(",")], gathered


def test_a_step_writes_the_cache_in_place_and_copies_none_of_it():
    """The donated cache is the result's memory; what else a step needs is far smaller than one layer's keys."""
    stack = Stack(3, 16, Attention(4, 2, 8, positions=Rope()), Mlp(16), dtype="float32")
    params = stack.unstacked(stack.init(jax.random.key(0)))
    cache, x = jax.eval_shape(lambda: stack.init_cache(2, 4096)), jnp.ones((2, 1, 16))
    program = jax.jit(step_of(stack), donate_argnums=2).lower(params, x, cache).compile()
    layer = 2 * 2 * 4096 * 8 * 4
    memory = program.memory_analysis()
    assert memory.alias_size_in_bytes >= 6 * layer
    assert memory.temp_size_in_bytes < layer, memory.temp_size_in_bytes
    for whole in ((2, 2, 4096, 8), (3, 2, 2, 4096, 8)):
        assert not copies(program.as_text(), whole)


def test_decoding_in_a_loop_copies_no_cache():
    stack = Stack(3, 16, Attention(4, 2, 8, positions=Rope()), Mlp(16), dtype="float32")
    params = stack.unstacked(stack.init(jax.random.key(0)))

    def loop(params, x, cache):
        def step(_, carry):
            x, cache = carry
            x, cache, _ = stack.apply(params, x, cache=cache)
            return x, cache

        return jax.lax.fori_loop(0, 5, step, (x, cache))

    cache = jax.eval_shape(lambda: stack.init_cache(2, 4096))
    program = jax.jit(loop, donate_argnums=2).lower(params, jnp.ones((2, 1, 16)), cache).compile()
    assert program.memory_analysis().temp_size_in_bytes < 2 * 2 * 4096 * 8 * 4
    assert not copies(program.as_text(), (2, 2, 4096, 8))


def test_a_split_sequence_is_gathered_for_attention_alone():
    """By hand: 8 tokens of 4 numbers a head and 4 bytes a number, heads over two devices; a layer's forward twice."""
    sizes = ActivationSizes(tokens=8, layers=2, width=4, again=2, embed_dim=8, rows=1)
    with use_mesh(make_mesh(MeshSpec(data=2, context=2, tensor=2))):
        told = [tuple(each)[:4] for each in MIXERS["attention"].transfers(sizes)]
        assert not list(MIXERS["para_gru"].transfers(sizes))
    queries, keys = 8 * 4 * 4 * 4 // 2, 8 * 4 * 4 * 2 // 2
    want = [(4, queries), (4, keys), (4, keys), (2, queries)]
    assert told == [("gather", ("context",), arrays, arrays * size) for arrays, size in want]
    with use_mesh(make_mesh(MeshSpec(data=8))):
        assert not list(MIXERS["attention"].transfers(sizes))


# ---------------------------------------------------------------- older arguments


def test_older_arguments_of_apply_are_fields_of_info(x64):
    stack = stack_of("attention")
    params = params_of("attention")
    x = inputs()
    weights = np.linspace(0, 1, B * T).reshape(B, T)
    valid = np.array([5, 0, 2])
    visible = np.broadcast_to(np.tri(T, dtype=bool) & (np.arange(T) != 1), (B, T, T))
    positions = np.broadcast_to(np.arange(T) + 2, (B, T))
    named = {
        "positions": positions,
        "starts": STARTS,
        "valid": valid,
        "visible": visible,
        "weights": weights,
    }

    def newer(params, x):
        return stack.apply(params, x, TokenInfo(**named), cache=stack.init_cache(B, T), fresh=True)

    def older(params, x):
        return stack.apply(params, x, **named, cache=stack.init_cache(B, T), fresh=True)

    want = jit(newer)(params, x)
    sentence = (
        r"Stack.apply\(positions, starts, valid, visible, weights\) is now \(info.positions, "
    )
    with pytest.warns(FutureWarning, match=sentence) as record:
        got = jit(older)(params, x)
    assert len(record) == 1 and record[0].filename == __file__
    jax.tree.map(np.testing.assert_array_equal, got, want)
    with pytest.raises(TypeError, match=r"Stack.apply\(\) got an unexpected .* 'ends'"):
        stack.apply(params, x, ends=STARTS)


def test_older_arguments_of_context_are_fields_of_info(x64):
    stack = stack_of("attention")
    x = jnp.ones((B, T, D))
    weights = np.ones((B, T))
    info = TokenInfo(starts=STARTS, weights=weights, places=np.zeros((B, T), np.int32))
    cache = stack.init_cache(B, T)
    want = stack.context(x, info, cache=cache, key=jax.random.key(0))
    assert want.places is info.places and want.weights is info.weights
    with pytest.warns(FutureWarning, match=r"Stack.context\(starts, weights\)") as record:
        part = TokenInfo(places=info.places)
        got = stack.context(
            x, part, cache=cache, key=jax.random.key(0), starts=STARTS, weights=weights
        )
    assert len(record) == 1 and record[0].filename == __file__
    got = got._replace(key=jax.random.key_data(got.key))
    want = want._replace(key=jax.random.key_data(want.key))
    jax.tree.map(np.testing.assert_array_equal, got, want)
    with pytest.raises(TypeError, match=r"Stack.context\(\) got an unexpected .* 'ends'"):
        stack.context(x, ends=STARTS)


# ---------------------------------------------------------------- mistakes


def test_what_cannot_be_is_refused():
    x = jnp.ones((1, 3, D))
    recurrent = dataclasses.replace(stack_of("para_gru"), dtype="float32")
    with pytest.raises(UsageError, match="a recurrent mixer cannot honour visible"):
        info = TokenInfo(visible=jnp.ones((1, 3, 3), bool))
        recurrent.apply(recurrent.init(jax.random.key(0)), x, info)
    both_ways = Stack(1, D, Attention(2, 2, 4, visible=Visible(causal=False)), Mlp(8))
    with pytest.raises(UsageError, match="not causal has no cache"):
        both_ways.init_cache(1, 4)
    attends = dataclasses.replace(stack_of("attention"), dtype="float32")
    with pytest.raises(UsageError, match="with a cache give starts"):
        attends.apply(
            None or attends.init(jax.random.key(0)),
            x,
            TokenInfo(segments=jnp.zeros((1, 3), int)),
            cache=attends.init_cache(1, 4),
        )
    with pytest.raises(UsageError, match="window=3 is of causal attention"):
        Visible(causal=False, window=3)
    with pytest.raises(
        UsageError, match="num_heads=6 is not a multiple of num_kv_heads=4; legal are 1, 2, 3, 6"
    ):
        Attention(6, 4, 2)
