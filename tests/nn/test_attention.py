"""Attention against loops, and what each implementation refuses."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from fast import jit
from test_block import slow_attention
from tolerance import EXACT_MATHS, assert_close

from jaxpar.mesh import MeshSpec, make_mesh, rules_from, use_mesh
from jaxpar.nn.attention import attend, attention, finish
from jaxpar.types import UsageError

B, T, H, K = 2, 7, 8, 4


def qkv(kv_heads=H, dtype=np.float32, length=T, width=K):
    rng = np.random.default_rng(0)
    return tuple(rng.standard_normal((B, length, heads, width)).astype(dtype) for heads in (H, kv_heads, kv_heads))


SEGMENTS = np.array([[0, 0, 0, 1, 1, 2, 2], [5, 5, 5, 5, 5, 5, 4]])


@pytest.mark.parametrize("segments", [None, SEGMENTS], ids=["whole", "packed"])
@pytest.mark.parametrize("kv_heads", [8, 4, 2, 1])
def test_attention_equals_loop(kv_heads, segments):
    q, k, v = qkv(kv_heads)
    assert_close(attention(q, k, v, segments=segments), slow_attention(q, k, v, segments), EXACT_MATHS["float32"])


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
    assert_close(attention(q, k, v), want, 1.5 * 2.0**-8)  # weights and result are rounded, scores are not


def test_extreme_scores_stay_finite():
    q, k, v = qkv()
    out, grads = jax.value_and_grad(lambda q: attention(1e4 * q, 1e4 * k, v).sum())(q)
    assert np.isfinite(out) and np.isfinite(grads).all()


@pytest.mark.parametrize("kv_heads", [8, 4])
def test_sharded_attention_equals_one_device(kv_heads):
    q, k, v = qkv(kv_heads)
    want = attention(q, k, v, dropout_rate=0.3, dropout_key=jax.random.key(0))
    with use_mesh(make_mesh(MeshSpec(2, 1, 4), jax.devices())):
        got = jit(lambda q, k, v: attention(q, k, v, dropout_rate=0.3, dropout_key=jax.random.key(0)))(q, k, v)
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


# ---------------------------------------------------------------- dropout of the weights


def test_dropout_of_weights_is_unbiased_and_by_row_and_head():
    """Values that are one-hot in the place read the weights off the output."""
    q, k, _ = qkv(width=T)
    v = np.broadcast_to(np.eye(T, dtype=np.float32)[None, :, None], (B, T, H, T))
    plain = np.asarray(attention(q, k, v))
    assert (np.asarray(attention(q, k, v, dropout_rate=0.25)) == plain).all(), "no key, no dropout"
    dropped = jit(lambda key: attention(q, k, v, dropout_rate=0.25, dropout_key=key))
    draws = np.stack([dropped(jax.random.key(i)) for i in range(200)])
    np.testing.assert_allclose(draws[draws != 0], np.broadcast_to(plain / 0.75, draws.shape)[draws != 0], rtol=1e-5)
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
        ("cudnn", dict(dtype=jnp.bfloat16), "attention=cudnn needs head_dim a multiple of 8 up to 256, not 4"),
        ("splash", dict(dtype=jnp.float16), "attention=splash needs dtype bfloat16 or float32, not float16"),
        ("splash", dict(), "attention=splash needs a length that is a multiple of 128, not 7"),
        ("splash", dict(length=128), "attention=splash needs head_dim a multiple of 64, not 4"),
    ],
)
def test_a_kernel_asked_for_by_name_refuses(impl, changes, sentence):
    q, k, v = (jnp.asarray(x) for x in qkv(**changes))
    with pytest.raises(UsageError, match=sentence):
        attention(q, k, v, impl=impl)


@pytest.mark.parametrize(("impl", "changes"), [("cudnn", dict(dtype=jnp.bfloat16, width=8)), ("splash", dict())])
def test_a_kernel_asked_for_by_name_refuses_dropout(impl, changes):
    q, k, v = (jnp.asarray(x) for x in qkv(**dict(length=128, width=64) | changes))
    with pytest.raises(UsageError, match="needs dropout 0"):
        attention(q, k, v, impl=impl, dropout_rate=0.1, dropout_key=jax.random.key(0))


def test_auto_is_dense_on_cpu():
    q, k, v = (jnp.asarray(x) for x in qkv(length=128, width=64, dtype=jnp.bfloat16))
    np.testing.assert_array_equal(attention(q, k, v), attention(q, k, v, impl="xla"))
