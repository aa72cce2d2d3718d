"""Matrix states by chunks equal the steps, in value and gradient, whatever gates, documents and devices there are."""

import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from fast import jit
from jax.sharding import PartitionSpec as P
from tolerance import EXACT_MATHS, assert_close

from jaxpar.mesh import MeshSpec, make_mesh
from jaxpar.nn.mixers.delta_rule import delta_rule
from jaxpar.nn.mixers.exponential_gates import exponential_attention
from jaxpar.nn.mixers.linear_attention import linear_attention
from jaxpar.nn.mixers.options import Packing, Readout, RecurrenceExecution
from jaxpar.types import UsageError

B, T, G, H, K, V = 2, 37, 2, 4, 8, 4
VALID = np.array([37, 29])
# Sums of some dozen numbers of one size, in another order.
TOLERANCE = {"float64": 5 * EXACT_MATHS["float64"], "float32": 1e-5}


def draw(rng, *shape):
    return jnp.asarray(rng.standard_normal(shape))


def gates(rng, *shape):
    """Log decays of all strengths: next to 0, none, and 50."""
    weak, strong = -np.exp(rng.uniform(-8, 0, shape)), np.where(rng.random(shape) < 0.3, -50.0, 0.0)
    return jnp.asarray(np.where(rng.random(shape) < 0.5, weak, strong))


def unit(x):
    return x / jnp.linalg.norm(x, axis=-1, keepdims=True)


def inputs_of(name, length=T):
    rng = np.random.default_rng(3)
    heads = H if name in ("delta", "exponential") else G
    q, k, v = (
        draw(rng, B, length, heads, K),
        draw(rng, B, length, heads, K),
        draw(rng, B, length, H, V),
    )
    state = draw(rng, B, H, K, V)
    if name == "delta":
        beta = jnp.asarray(rng.uniform(0, 2, (B, length, H)))
        return (q, unit(k), v, beta, gates(rng, B, length, H)), state
    if name == "exponential":
        scale = jnp.asarray(rng.integers(-3, 3, (B, H)).astype(float))
        state = draw(rng, B, H, K, V + 1), scale
        size = np.where(
            rng.random((B, length, H)) < 0.1, rng.choice([-80.0, 80.0], (B, length, H)), 1
        )
        return (q / 3, k, v, gates(rng, B, length, H), draw(rng, B, length, H) * size), state
    if name == "rows, bonus":
        return (q, k, v, gates(rng, B, length, H, K), draw(rng, H, K)), state
    if name == "heads":
        return (q, k, v, gates(rng, B, length, H)), state
    return (q, k, v), state


def run(name, arrays, state, *, starts=None, valid=None, **form):
    options = {
        "packing": Packing(starts=starts, valid=valid),
        "execution": RecurrenceExecution(**form),
    }
    if name == "delta":
        return delta_rule(*arrays, state=state, **options)
    if name == "exponential":
        return exponential_attention(*arrays, state=state, **options)
    bonus = arrays[4] if name == "rows, bonus" else None
    return linear_attention(*arrays[:4], state=state, readout=Readout(bonus=bonus), **options)


CASES = ("none", "heads", "rows, bonus", "delta", "exponential")
each_case = pytest.mark.parametrize("name", CASES)


def some(*names):
    """These cases in CI, the others in the long run."""
    return pytest.mark.parametrize(
        "name", [x if x in names else pytest.param(x, marks=pytest.mark.slow) for x in CASES]
    )


STARTS = np.random.default_rng(5).random((B, T)) < 0.1
STARTS[1, 31] = True  # behind the tokens that count, where it must forget nothing


def weigh(out, state, valid):
    counts = (np.arange(out.shape[1]) < valid[:, None])[..., None, None]
    out = jnp.where(counts, out, 0)
    parts = [out, *jax.tree.leaves(state)]
    return sum((x * jnp.cos(jnp.arange(x.size)).reshape(x.shape)).sum() for x in parts), (
        out,
        state,
    )


def results(name, dtype, *, starts=STARTS, valid=VALID, **options):
    arrays, state = jax.tree.map(lambda x: x.astype(dtype), inputs_of(name))

    def loss(arrays, state):
        return weigh(*run(name, arrays, state, starts=starts, valid=valid, **options), valid)

    return jit(jax.value_and_grad(loss, (0, 1), has_aux=True))(arrays, state)


@functools.cache
def steps(name, dtype, documents):
    with jax.enable_x64(True):
        return results(name, dtype, starts=STARTS if documents else None, impl="sequential")


def plain_exponentials(arrays, state, starts):
    """The mLSTM's equations as they stand, which double precision can hold: no maximum, and n apart."""
    (q, k, v, log_forget, log_input), (matrix, largest) = arrays, state
    whole = matrix * jnp.exp(jnp.round(largest))[..., None, None]

    def step(carry, now):
        (c, n), (q, k, v, f, i, start) = carry, now
        f = jnp.where(start[:, None], 0, jnp.exp(f))
        c = f[..., None, None] * c + jnp.exp(i)[..., None, None] * k[..., None] * v[..., None, :]
        n = f[..., None] * n + jnp.exp(i)[..., None] * k
        below = jnp.maximum(jnp.abs((q * n).sum(-1)), 1)
        return (c, n), jnp.einsum("bhk,bhkv->bhv", q, c) / below[..., None]

    line = jax.tree.map(
        lambda x: jnp.swapaxes(x, 0, 1), (q, k, v, log_forget, log_input, jnp.asarray(starts))
    )
    return jnp.swapaxes(jax.lax.scan(step, (whole[..., :-1], whole[..., -1]), line)[1], 0, 1)


def test_exponential_gates_are_their_equations(x64):
    arrays, (matrix, largest) = inputs_of("exponential")

    def loss(arrays, matrix, plain):
        if plain:
            out = plain_exponentials(arrays, (matrix, largest), STARTS)
        else:
            out = run("exponential", arrays, (matrix, largest), starts=STARTS, chunk=16)[0]
        return weigh(out, (), np.array([T, T]))

    gradient = jit(jax.value_and_grad(loss, (0, 1), has_aux=True), static_argnums=2)
    assert_close(gradient(arrays, matrix, False), gradient(arrays, matrix, True), 1e-10)


@pytest.mark.parametrize("impl", ["chunked", "sequential"])
def test_a_small_gate_behind_a_large_one_of_another_document(impl):
    """In single precision neither overflows, nor does the one before spoil the one behind."""
    (q, k, v, f, i), _ = jax.tree.map(lambda x: x.astype(jnp.float32), inputs_of("exponential", 12))
    i = i.at[:, :6].set(80.0).at[:, 6:].set(-80.0)
    starts = np.zeros((B, 12), bool)
    starts[:, 6] = True

    def loss(arrays):
        return weigh(
            *run("exponential", arrays, None, starts=starts, chunk=16, impl=impl),
            np.array([12, 12]),
        )

    (_, (out, _)), grads = jit(jax.value_and_grad(loss, has_aux=True))((q, k, v, f, i))
    alone = run(
        "exponential", (q[:, 6:], k[:, 6:], v[:, 6:], f[:, 6:], i[:, 6:]), None, impl="sequential"
    )[0]
    assert_close(out[:, 6:], alone, TOLERANCE["float32"])
    assert all(np.isfinite(x).all() for x in jax.tree.leaves(grads))


@pytest.mark.parametrize("impl", ["chunked", "sequential"])
def test_an_output_of_nothing_is_zero_behind_gates_of_any_size(impl):
    """exp(-m) is zero in single precision from 104 on: of a query of zeros, and of tokens that do not count."""
    (q, k, v, f, i), _ = jax.tree.map(lambda x: x.astype(jnp.float32), inputs_of("exponential", 12))
    q = q.at[:, 3].set(0)
    i = i.at[:, 2:].set(150.0)
    valid = jnp.full(B, 8)

    def loss(arrays):
        out = run("exponential", arrays, None, valid=valid, chunk=16, impl=impl)[0]
        return (out**2).sum(), out

    (_, out), grads = jit(jax.value_and_grad(loss, has_aux=True))((q, k, v, f, i))
    assert not np.any(out[:, 3]) and not np.any(out[:, 8:])
    assert np.all(np.isfinite(out)) and np.any(out[:, 4:8])
    assert all(np.isfinite(x).all() for x in jax.tree.leaves(grads))


@each_case
@pytest.mark.parametrize(
    "chunk", [pytest.param(1, marks=pytest.mark.slow), 16, pytest.param(T, marks=pytest.mark.slow)]
)
def test_chunks_equal_steps_in_value_and_gradient(name, chunk, x64):
    assert_close(
        results(name, "float64", chunk=chunk), steps(name, "float64", True), TOLERANCE["float64"]
    )


@some("rows, bonus", "exponential")
def test_a_document_may_begin_at_every_place(name, x64):
    """Row t of T has a border before token t alone, within chunks and between them; and each row ends elsewhere."""
    length = 11
    arrays, state = inputs_of(name, length)

    def repeated(x):
        return jnp.repeat(x[:1], length, 0)

    whole = arrays[4:] if name == "rows, bonus" else ()  # of no row
    rows, state = jax.tree.map(repeated, (arrays[: len(arrays) - len(whole)], state))
    starts, valid = np.eye(length, dtype=bool), 1 + np.random.default_rng(0).permutation(length)

    def gradient(impl):
        def loss(arrays, state):
            return weigh(
                *run(name, arrays, state, starts=starts, valid=valid, chunk=4, impl=impl), valid
            )

        return jit(jax.value_and_grad(loss, (0, 1), has_aux=True))((*rows, *whole), state)

    assert_close(gradient("chunked"), gradient("sequential"), TOLERANCE["float64"])


@some("rows, bonus", "exponential")
def test_one_chunk_of_one_document_in_single_precision(name, x64):
    got = results(name, "float32", starts=None, chunk=64)
    want = steps(name, "float64", False)
    # Normalised by a small sum: the rounding of its terms is a larger part of it.
    assert_close(got, want, 1e-4 if name == "exponential" else TOLERANCE["float32"])


@some("delta", "exponential")
def test_over_eight_devices_it_is_what_it_is_on_one(name, x64):
    arrays, state = inputs_of(name, 48)
    starts = np.random.default_rng(6).random((B, 48)) < 0.05
    bonus = arrays[4:] if name == "rows, bonus" else ()
    arrays = arrays[:4] if bonus else arrays
    split, whole = (P(None, "context"),) * len(arrays), (P(),) * len(bonus)

    def sharded(*args):
        *rows, state, starts = args
        out, after = run(name, tuple(rows), state, starts=starts, axis_name="context", chunk=4)
        return out, jax.tree.map(lambda x: x[None], after)

    mesh = make_mesh(MeshSpec(context=8))
    over = jax.shard_map(
        sharded, mesh=mesh, in_specs=(*split, *whole, jax.tree.map(lambda _: P(), state), P(None, "context")),
        out_specs=(P(None, "context"), jax.tree.map(lambda _: P("context"), state)),
    )  # fmt: skip

    def loss(arrays, state, split):
        if split:
            out, after = over(*arrays, *bonus, state, starts)
            after = jax.tree.map(lambda x: x[-1], after)
        else:
            out, after = run(name, (*arrays, *bonus), state, starts=starts, chunk=4)
        return weigh(out, after, np.array([48, 48]))

    gradient = jit(jax.value_and_grad(loss, (0, 1), has_aux=True), static_argnums=2)
    assert_close(
        gradient(arrays, state, True), gradient(arrays, state, False), TOLERANCE["float64"]
    )


@some("delta", "exponential", "rows, bonus")
def test_a_token_at_a_time_is_the_whole(name, x64):
    arrays, state = inputs_of(name, 5)
    want, last = jit(functools.partial(run, name, chunk=4))(arrays, state)
    step = jit(functools.partial(run, name))
    whole = [i for i, x in enumerate(arrays) if x.shape[:2] == (B, 5)]
    outs = []
    for t in range(5):
        now = tuple(x[:, t : t + 1] if i in whole else x for i, x in enumerate(arrays))
        out, state = step(now, state)
        outs.append(out)
    assert_close((jnp.concatenate(outs, 1), state), (want, last), TOLERANCE["float64"])


@pytest.mark.parametrize("name", ["rows, bonus", "delta"])
def test_no_state_a_token_is_made(name):
    """Nor in the backward pass: the largest array is a few times what is given."""
    length = 512
    arrays, state = jax.tree.map(lambda x: x.astype(jnp.float32), inputs_of(name, length))

    def loss(arrays, state):
        return weigh(*run(name, arrays, state, chunk=32), np.array([length] * B))[0]

    text = str(jax.make_jaxpr(jax.grad(loss, (0, 1)))(arrays, state))
    sizes = [np.prod([int(n) for n in x.split(",")]) for x in re.findall(r"f32\[([\d,]+)\]", text)]
    assert max(sizes) <= B * length * H * 64 and B * length * H * K * V <= B * length * H * 64


@some("heads", "exponential")
def test_empty_states_of_half_precision(name):
    arrays, _ = jax.tree.map(lambda x: x.astype(jnp.bfloat16), inputs_of(name))
    apply = jit(functools.partial(run, name, state=None, chunk=16))
    (out, state), (want, _) = (
        apply(arrays),
        apply(jax.tree.map(lambda x: x.astype(jnp.float32), arrays)),
    )
    assert out.dtype == jnp.bfloat16 and all(x.dtype == jnp.float32 for x in jax.tree.leaves(state))
    error = np.linalg.norm(np.float32(out) - want) / np.linalg.norm(want)
    assert error < 2e-2


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda q, v, a: linear_attention(q, q, v, a[:, :-1]), "log_decay of shape"),
        (lambda q, v, a: linear_attention(q, q, v[:, :, :3], a[:, :, :3]), "no multiple"),
        (
            lambda q, v, a: linear_attention(q, q, v, a, packing=Packing(valid=VALID[:1])),
            r"valid of shape \(1,\)",
        ),
        (
            lambda q, v, a: linear_attention(q, q, v, a, packing=Packing(STARTS[:1])),
            "starts of shape",
        ),
        (lambda q, v, a: RecurrenceExecution(impl="fast"), "impl='fast' is unknown"),
        (lambda q, v, a: RecurrenceExecution(chunk=0), "chunk=0 must be at least 1"),
        (lambda q, v, a: delta_rule(q, q, v, a), "v of shape"),
        (
            lambda q, v, a: delta_rule(v, v, v, a, execution=RecurrenceExecution(impl="kernel")),
            "impl='kernel' is unknown",
        ),
        (lambda q, v, a: delta_rule(v, v, v, a[:, :, :1]), "beta of shape"),
    ],
)
def test_mistakes_are_told(call, message):
    q, _, v, a = inputs_of("heads")[0]
    with pytest.raises(UsageError, match=message):
        call(q, v, a)


@pytest.mark.slow  # two minutes
@pytest.mark.parametrize("chunk", [64, 128, 256, 512])
@pytest.mark.parametrize("name", ["rows, bonus", "delta", "exponential"])
def test_long_chunks_keep_single_precision(name, chunk, x64):
    """Sums of gates of 50 over a whole chunk do not spoil those next to 0."""
    length = 600

    def gradient(dtype, **options):
        rounded = jax.tree.map(
            lambda x: x.astype("float32"), inputs_of(name, length)
        )  # gates of 50 by 2e-6: for both
        arrays, state = jax.tree.map(lambda x: x.astype(dtype), rounded)

        def loss(arrays, state):
            return weigh(*run(name, arrays, state, **options), np.array([length] * B))

        return jit(jax.value_and_grad(loss, (0, 1), has_aux=True))(arrays, state)

    assert_close(gradient("float32", chunk=chunk), gradient("float64", impl="sequential"), 1e-4)


@some("heads", "exponential")
def test_what_lies_behind_the_tokens_that_count_changes_no_state(name, x64):
    """A document that begins there neither: the state is that of the row without them."""
    arrays, state = inputs_of(name)
    got = run(name, arrays, state, starts=STARTS, valid=VALID, impl="sequential")[1]
    short = tuple(x[:, : VALID[1]] for x in arrays)
    want = run(name, short, state, starts=STARTS[:, : VALID[1]], impl="sequential")[1]
    assert_close(
        jax.tree.map(lambda x: x[1], got), jax.tree.map(lambda x: x[1], want), TOLERANCE["float64"]
    )


DOCUMENTS = np.zeros((B, 20), bool)
DOCUMENTS[0, [6, 13]] = True
DOCUMENTS[1, 3] = True
SPOILT = np.zeros((B, 20), bool)  # tokens of documents that hold what is not finite
SPOILT[0, 6:13] = True
SPOILT[1, :3] = True


@each_case
@pytest.mark.parametrize("impl", ["chunked", "sequential"])
@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_no_document_sees_what_is_not_finite_in_another(name, impl, bad, x64):
    """In any input of a token, and in the state before a row's first document."""
    clean, state = inputs_of(name, 20)
    finite = clean
    shared = ()
    if name == "rows, bonus":
        finite = clean[:4]
        shared = clean[4:]
    spoilt = jax.tree.map(lambda x: x.at[1].set(bad), state)
    shown = ~SPOILT[..., None, None]

    def run_on(inputs, state):
        arrays = (*inputs, *shared)
        return run(name, arrays, state, starts=DOCUMENTS, chunk=16, impl=impl)

    def loss(inputs, state):
        out, last = run_on(inputs, state)
        leaves = jax.tree.leaves(last)
        return sum(jnp.sin(x).sum() for x in [jnp.where(shown, jnp.sin(out), 0), *leaves]), out

    gradient = jit(jax.value_and_grad(loss, has_aux=True))
    (_, wanted), wants = gradient(finite, state)
    for index in range(len(finite)):
        inputs = list(finite)
        inputs[index] = inputs[index].at[0, 8].set(bad)
        (value, out), gradients = gradient(tuple(inputs), spoilt)
        assert np.isfinite(value)
        pair = [np.where(shown, x, 0) for x in (out, wanted)]
        np.testing.assert_allclose(*pair, rtol=1e-9, atol=1e-12)
        reached = slice(9, 12)
        if index == 0:  # a query reaches its own token alone
            reached = slice(8, 9)
        assert not np.isfinite(out[0, reached]).any() and not np.isfinite(out[1, :3]).any()
        assert np.isfinite(out[0, 6:8]).all()
        for got, want in zip(gradients, wants, strict=True):
            of = shown.reshape(*SPOILT.shape, *(1,) * (got.ndim - 2))
            pair = [np.where(of, x, 0) for x in (got, want)]
            np.testing.assert_allclose(*pair, rtol=1e-9, atol=1e-12)


@each_case
def test_a_loss_that_is_nan_has_such_gradients(name, x64):
    """In the document, where the mask of what is not finite must not hide it."""
    inputs, state = inputs_of(name, 20)
    inputs = (*inputs[:2], inputs[2].at[0, 8].set(np.nan), *inputs[3:])

    def loss(inputs):
        return jnp.sum(jnp.sin(run(name, inputs, state, starts=DOCUMENTS)[0]))

    gradients = jit(jax.grad(loss))(inputs)
    assert all(np.isnan(x[0, 6:9]).any() for x in gradients[:3])


@each_case
@pytest.mark.parametrize("shape", [(B, 0), (0, 5)])
@pytest.mark.parametrize("impl", ["auto", "chunked", "sequential"])
def test_no_tokens_and_no_rows_change_no_state(name, shape, impl, x64):
    arrays, state = inputs_of(name, 5)
    keep = lambda x: x[: shape[0], : shape[1]]  # noqa: E731
    shared = ()
    if name == "rows, bonus":
        shared = arrays[4:]
    inputs = tuple(keep(x) for x in arrays[: len(arrays) - len(shared)])
    state = jax.tree.map(lambda x: x[: shape[0]], state)
    starts = keep(DOCUMENTS)

    def loss(inputs, state):
        out, last = run(name, (*inputs, *shared), state, starts=starts, impl=impl)
        return sum(jnp.sin(x).sum() for x in (out, *jax.tree.leaves(last))), (out, last)

    (_, (out, last)), gradients = jit(jax.value_and_grad(loss, (0, 1), has_aux=True))(inputs, state)
    assert out.shape == (*shape, H, V)
    assert_close(last, state, 0)
    assert [x.shape for x in gradients[0]] == [x.shape for x in inputs]
    assert_close(gradients[1], jax.tree.map(jnp.cos, state), EXACT_MATHS["float64"])
    fresh = run(name, (*inputs, *shared), None, impl=impl)
    assert jax.tree.map(jnp.shape, fresh) == jax.tree.map(jnp.shape, (out, last))


@pytest.mark.parametrize(("columns", "floored"), [(V + 1, False), (V, True)])
def test_no_tokens_have_the_columns_that_some_have(columns, floored):
    (q, k, v), _ = inputs_of("none", 0)
    floor = None
    if floored:
        floor = jnp.ones(v.shape[:3])
    out, state = linear_attention(q, k, v, readout=Readout(normaliser=True, floor=floor))
    assert out.shape == (B, 0, H, columns) and state.shape == (B, H, K, V + 1)


OLDER = {
    "heads": "starts, valid, impl, chunk, dtype, normaliser",
    "rows, bonus": "bonus, floor, starts",
    "delta": "starts, valid, impl, chunk",
    "exponential": "valid, starts, chunk, impl",
}
NEWER = {
    "bonus": "readout.bonus",
    "floor": "readout.floor",
    "normaliser": "readout.normaliser",
    "dtype": "readout.dtype",
    "starts": "packing.starts",
    "valid": "packing.valid",
    "impl": "execution.impl",
    "chunk": "execution.chunk",
}
GROUPS = {"packing": Packing, "readout": Readout, "execution": RecurrenceExecution}


@pytest.mark.parametrize("name", OLDER)
def test_older_arguments_are_fields_today(name):
    """Each of them, in the order of the call, with one sentence and the same program's results."""
    function = {"delta": delta_rule, "exponential": exponential_attention}.get(
        name, linear_attention
    )
    arrays = inputs_of(name, 20)[0]
    values = {
        "bonus": arrays[-1],
        "floor": jnp.full((B, 20, H), 0.5),
        "normaliser": True,
        "dtype": "bfloat16",
        "starts": DOCUMENTS,
        "valid": np.array([20, 17]),
        "impl": "chunked",
        "chunk": 8,
    }
    if name == "rows, bonus":
        arrays = arrays[:4]
    older = {key: values[key] for key in OLDER[name].split(", ")}
    fields = {}
    for key, value in older.items():
        group, field = NEWER[key].split(".")
        fields.setdefault(group, {})[field] = value
    newer = {group: GROUPS[group](**options) for group, options in fields.items()}
    want = function(*arrays, **newer)
    today = ", ".join(NEWER[key] for key in older)
    sentence = f"{function.__name__}({OLDER[name]}) is now ({today});"
    with pytest.warns(FutureWarning, match=re.escape(sentence)) as warned:
        got = function(*arrays, **older)
    assert len(warned) == 1 and warned[0].filename == __file__
    jax.tree.map(np.testing.assert_array_equal, got, want)
    with pytest.raises(TypeError, match="unexpected keyword argument 'chunks'"):
        function(*arrays, chunks=3)


def test_an_axis_by_its_older_name_splits_the_sequence():
    (q, k, v), _ = inputs_of("none")
    with (
        pytest.warns(FutureWarning, match="execution.axis_name"),
        pytest.raises(UsageError, match="impl='sequential' runs along the whole sequence"),
    ):
        linear_attention(q, k, v, impl="sequential", axis_name="context")


def test_a_readout_is_a_pytree_with_static_fields():
    """It crosses `jit` with arrays and flags, and its arrays have gradients."""
    arrays = inputs_of("rows, bonus")[0]
    readout = Readout(bonus=arrays[4], normaliser=True, dtype="float32")

    def total(readout):
        out = linear_attention(*arrays[:4], readout=readout)[0]
        return out.sum(), out

    (_, out), slope = jit(jax.value_and_grad(total, has_aux=True))(readout)
    assert out.shape == (B, T, H, V + 1) and out.dtype == jnp.float32
    assert slope.normaliser and slope.floor is None and slope.bonus.all()
