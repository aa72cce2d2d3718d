"""Attention against loops, and what each implementation refuses."""

import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from fast import jit
from test_block import slow_attention
from tolerance import EXACT_MATHS, assert_close

from jaxpar.mesh import MeshSpec, make_mesh, rules_from, use_mesh
from jaxpar.nn.attention import (
    AttentionExecution,
    Dropout,
    Visibility,
    Visible,
    attend,
    attention,
    finish,
    merge,
)
from jaxpar.nn.position import Alibi
from jaxpar.types import UsageError

B, T, H, K = 2, 7, 8, 4


def qkv(kv_heads=H, dtype=np.float32, length=T, width=K):
    rng = np.random.default_rng(0)
    return tuple(
        rng.standard_normal((B, length, heads, width)).astype(dtype)
        for heads in (H, kv_heads, kv_heads)
    )


SEGMENTS = np.array([[0, 0, 0, 1, 1, 2, 2], [5, 5, 5, 5, 5, 5, 4]])


@pytest.mark.parametrize("segments", [None, SEGMENTS], ids=["whole", "packed"])
@pytest.mark.parametrize("kv_heads", [8, 4, 2, 1])
def test_attention_equals_loop(kv_heads, segments):
    q, k, v = qkv(kv_heads)
    assert_close(
        attention(q, k, v, segments=segments),
        slow_attention(q, k, v, segments),
        EXACT_MATHS["float32"],
    )


def test_attention_in_float64_is_float64(x64):
    q, k, v = qkv(2, np.float64)
    got = attention(q, k, v)
    assert got.dtype == np.float64
    assert_close(got, slow_attention(q, k, v), EXACT_MATHS["float64"])


def test_softmax_is_taken_in_float32():
    """Scores of thousands differ by ones: bfloat16 would round them away."""
    q, k, v = qkv(dtype=jnp.bfloat16)
    q = q * 64
    want = slow_attention(*(np.asarray(x, np.float64) for x in (q, k, v)))
    assert_close(
        attention(q, k, v), want, 1.5 * 2.0**-8
    )  # weights and result are rounded, scores are not


def test_extreme_scores_stay_finite():
    q, k, v = qkv()
    out, grads = jax.value_and_grad(lambda q: attention(1e4 * q, 1e4 * k, v).sum())(q)
    assert np.isfinite(out) and np.isfinite(grads).all()


@pytest.mark.parametrize("kv_heads", [8, 4])
def test_sharded_attention_equals_one_device(kv_heads):
    q, k, v = qkv(kv_heads)
    dropout = Dropout(rate=0.3, key=jax.random.key(0))
    want = attention(q, k, v, dropout=dropout)
    with use_mesh(make_mesh(MeshSpec(2, 1, 4), jax.devices())):
        got = jit(lambda q, k, v: attention(q, k, v, dropout=dropout))(q, k, v)
    assert_close(got, want, EXACT_MATHS["float32"])


@pytest.mark.parametrize("kv_heads", [1, 2])
def test_unsplit_kv_heads_equal_one_device_or_are_refused(kv_heads):
    """Fewer key heads than tensor shares: kv_heads=none is the rule to take, and must not pair heads wrongly."""
    q, k, v = qkv(kv_heads)
    with use_mesh(make_mesh(MeshSpec(2, 1, 4), jax.devices()), rules_from({"kv_heads": "none"})):
        try:
            got = jit(attention)(q, k, v)
        except UsageError:
            return
    assert_close(got, slow_attention(q, k, v), EXACT_MATHS["float32"])


# ---------------------------------------------------------------- rules, slopes, and sums in parts


def plain(q, k, v, seen, slopes):
    """Softmax by its definition, in one array expression; 0 where nothing is seen."""
    k, v = (jnp.repeat(x, q.shape[2] // x.shape[2], 2) for x in (k, v))
    distance = jnp.abs(jnp.arange(q.shape[1])[:, None] - jnp.arange(k.shape[1])[None])
    scores = (
        jnp.einsum("bthk,bshk->bhts", q, k) / np.sqrt(q.shape[-1])
        - slopes[None, :, None, None] * distance[None, None]
    )
    weights = jnp.where(seen[:, None], jnp.exp(scores), 0)
    total = weights.sum(-1, keepdims=True)
    return jnp.einsum("bhts,bshk->bthk", weights / jnp.where(total > 0, total, 1), v)


def value_and_gradients(f, *args):
    return jit(
        jax.value_and_grad(lambda *args: (f(*args) @ jnp.cos(jnp.arange(K))).sum(), (0, 1, 2))
    )(*args)


def rule_of(kind):
    ahead = np.arange(T)[:, None] - np.arange(T)[None]
    return {
        "causal": ahead >= 0,
        "window": (ahead >= 0) & (ahead < 3),
        "both ways": ahead == ahead,
    }[kind]


VISIBLE = {"causal": Visible(), "window": Visible(window=3), "both ways": Visible(causal=False)}


@pytest.mark.parametrize("sloped", [False, True])
@pytest.mark.parametrize("kind", VISIBLE)
def test_rules_and_slopes_equal_the_definition_in_value_and_gradient(kind, sloped, x64):
    q, k, v = (jnp.asarray(x) for x in qkv(4, np.float64))
    slopes = Alibi().slopes(H).astype(jnp.float64) if sloped else None
    among = np.random.default_rng(2).uniform(size=(B, T, T)) < 0.8
    seen = (SEGMENTS[:, :, None] == SEGMENTS[:, None, :]) & rule_of(kind)[None] & among

    visibility = Visibility(rule=VISIBLE[kind], among=jnp.asarray(among), slopes=slopes)
    run = functools.partial(attention, segments=SEGMENTS, visibility=visibility)
    got = value_and_gradients(run, q, k, v)
    want = value_and_gradients(
        functools.partial(plain, seen=seen, slopes=jnp.zeros(H) if slopes is None else slopes),
        q,
        k,
        v,
    )
    assert_close(got, want, EXACT_MATHS["float64"])


def test_slopes_halve_from_head_to_head():
    np.testing.assert_allclose(Alibi().slopes(8), [2.0**-i for i in range(1, 9)])
    np.testing.assert_allclose(Alibi().slopes(4), [2.0 ** (-2 * i) for i in range(1, 5)])


@pytest.mark.parametrize("cuts", [(3,), (1, 2, 3, 4, 5, 6), (0, 5, 5, 7)])
def test_sums_in_any_parts_and_order_are_the_whole(cuts, x64):
    """Parts of any sizes, empty ones and such of which some queries see nothing."""
    q, k, v = (jnp.asarray(x) for x in qkv(2, np.float64))
    seen = jnp.asarray(rule_of("window"))[None]

    def in_parts(q, k, v, order):
        ends = list(zip((0, *cuts), (*cuts, T), strict=True))
        states = [attend(q, k[:, a:b], v[:, a:b], seen[:, :, a:b]) for a, b in ends if b > a]
        states.append(attend(q, k[:, :1], v[:, :1], jnp.zeros((1, T, 1), bool)))
        return finish(functools.reduce(merge, states[::order]))

    window = Visibility(rule=Visible(window=3))
    want = value_and_gradients(functools.partial(attention, visibility=window), q, k, v)
    for order in (1, -1):
        assert_close(
            value_and_gradients(functools.partial(in_parts, order=order), q, k, v),
            want,
            EXACT_MATHS["float64"],
        )


def test_what_sees_nothing_is_zero_and_so_is_its_gradient():
    q, k, v = (jnp.asarray(x) for x in qkv())
    run = jax.value_and_grad(lambda q: finish(attend(q, k, v, jnp.zeros((1, T, T), bool))).sum())
    value, grad = run(q)
    assert value == 0 and not np.asarray(grad).any()


# ---------------------------------------------------------------- dropout of the weights


def test_dropout_of_weights_is_unbiased_and_by_row_and_head():
    """Values that are one-hot in the place read the weights off the output."""
    q, k, _ = qkv(width=T)
    v = np.broadcast_to(np.eye(T, dtype=np.float32)[None, :, None], (B, T, H, T))
    plain = np.asarray(attention(q, k, v))
    without_key = np.asarray(attention(q, k, v, dropout=Dropout(rate=0.25)))
    assert (without_key == plain).all(), "no key, no dropout"
    dropped = jit(lambda key: attention(q, k, v, dropout=Dropout(rate=0.25, key=key)))
    draws = np.stack([dropped(jax.random.key(i)) for i in range(200)])
    np.testing.assert_allclose(
        draws[draws != 0], np.broadcast_to(plain / 0.75, draws.shape)[draws != 0], rtol=1e-5
    )
    share = (draws == 0)[:, plain != 0]
    assert abs(share.mean() - 0.25) < 5 * np.sqrt(0.25 * 0.75 / share.size)
    pattern = (draws[0] != 0).transpose(0, 2, 1, 3).reshape(B * H, -1)
    assert len(np.unique(pattern, axis=0)) == B * H, "each row and head has a pattern of its own"


def test_nothing_is_read_of_unseen_values():
    q, k, v = qkv()
    seen = np.tril(np.ones((1, T, T), bool))
    poisoned = v.copy()
    poisoned[:, -1] = 1e30
    plain, other = (finish(attend(q, k, values, seen))[:, :-1] for values in (v, poisoned))
    np.testing.assert_array_equal(plain, other)


# ---------------------------------------------------------------- choice and refusals


@pytest.mark.parametrize(
    ("impl", "changes", "sentence"),
    [
        ("cudnn", dict(), "attention=cudnn needs dtype bfloat16 or float16, not float32"),
        (
            "cudnn",
            dict(dtype=jnp.bfloat16),
            "attention=cudnn needs head_dim a multiple of 8 up to 256, not 4",
        ),
        (
            "splash",
            dict(dtype=jnp.float16),
            "attention=splash needs dtype bfloat16 or float32, not float16",
        ),
        ("splash", dict(), "attention=splash needs a length that is a multiple of 128, not 7"),
        ("splash", dict(length=128), "attention=splash needs head_dim a multiple of 64, not 4"),
    ],
)
def test_a_kernel_asked_for_by_name_refuses(impl, changes, sentence):
    q, k, v = (jnp.asarray(x) for x in qkv(**changes))
    with pytest.raises(UsageError, match=sentence):
        attention(q, k, v, execution=AttentionExecution(impl=impl))


@pytest.mark.parametrize(
    ("impl", "changes"), [("cudnn", dict(dtype=jnp.bfloat16, width=8)), ("splash", dict())]
)
def test_a_kernel_asked_for_by_name_refuses_dropout(impl, changes):
    q, k, v = (jnp.asarray(x) for x in qkv(**dict(length=128, width=64) | changes))
    dropout = Dropout(rate=0.1, key=jax.random.key(0))
    with pytest.raises(UsageError, match="needs dropout 0"):
        attention(q, k, v, dropout=dropout, execution=AttentionExecution(impl=impl))


def test_auto_is_dense_on_cpu():
    q, k, v = (jnp.asarray(x) for x in qkv(length=128, width=64, dtype=jnp.bfloat16))
    dense = attention(q, k, v, execution=AttentionExecution(impl="xla"))
    np.testing.assert_array_equal(attention(q, k, v), dense)


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        (dict(visibility=Visibility(rule=Visible(window=3))), "no window, slopes, cap or mask"),
        (dict(visibility=Visibility(slopes=jnp.ones(H))), "no window, slopes, cap or mask"),
        (dict(visibility=Visibility(cap=2.0)), "no window, slopes, cap or mask"),
        (dict(visibility=Visibility(among=jnp.ones((B, 128, 128), bool))), "no window, slopes"),
    ],
)
def test_a_kernel_asked_for_by_name_refuses_what_no_kernel_takes(options, sentence):
    q, k, v = (jnp.asarray(x) for x in qkv(length=128, width=64))
    with pytest.raises(UsageError, match=f"attention=splash needs {sentence}"):
        attention(q, k, v, execution=AttentionExecution(impl="splash"), **options)


# ---------------------------------------------------------------- options by their older names

AMONG = np.random.default_rng(2).uniform(size=(B, T, T)) < 0.8
SLOPES = np.linspace(0.1, 0.8, H, dtype=np.float32)
OLDER = {
    "visible": (
        dict(visible=Visible(window=3)),
        Visibility(rule=Visible(window=3)),
        AttentionExecution(),
    ),
    "among": (dict(among=AMONG), Visibility(among=AMONG), AttentionExecution()),
    "slopes": (dict(slopes=SLOPES), Visibility(slopes=SLOPES), AttentionExecution()),
    "cap": (dict(cap=0.5), Visibility(cap=0.5), AttentionExecution()),
    "impl, blockwise": (
        dict(impl="xla", blockwise=True),
        Visibility(),
        AttentionExecution(impl="xla", blockwise=True),
    ),
    "prompt, inside": (
        dict(prompt=True, inside=("batch", None, None)),
        Visibility(),
        AttentionExecution(prompt=True, inside=("batch", None, None)),
    ),
}


def program_of(run, *arrays):
    """The traced program as text, without the addresses of functions."""
    return re.sub("0x[0-9a-f]+", "", str(jax.make_jaxpr(run)(*arrays)))


@pytest.mark.parametrize("names", OLDER)
def test_options_by_their_older_names_give_the_same_program(names):
    q, k, v = qkv()
    older, visibility, execution = OLDER[names]

    def today(q, k, v):
        return attention(q, k, v, visibility=visibility, execution=execution)

    with pytest.warns(FutureWarning, match=rf"attention\({names}\) is now") as warned:
        program = program_of(functools.partial(attention, **older), q, k, v)
    assert len(warned) == 1
    assert program == program_of(today, q, k, v)
    assert program != program_of(attention, q, k, v), "the options change it"


def test_dropout_by_its_older_names_drops_the_same_weights():
    q, k, v = qkv()
    key = jax.random.key(3)
    with pytest.warns(FutureWarning, match="dropout.rate, dropout.key") as warned:
        got = attention(q, k, v, dropout_rate=0.3, dropout_key=key)
    assert len(warned) == 1
    want = attention(q, k, v, dropout=Dropout(rate=0.3, key=key))
    np.testing.assert_array_equal(got, want)
    assert (np.asarray(got) != np.asarray(attention(q, k, v))).any()


def test_an_option_that_never_was_is_refused():
    with pytest.raises(TypeError, match="unexpected keyword argument 'windows'"):
        attention(*qkv(), windows=3)
