"""`verify` passes what is right and names what is wrong, on a model of its own."""

import functools
import math
import types

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from jaxpar.aot.verify import program
from jaxpar.aot.verify.collectives import SLACK, breaches_of, found_transfers
from jaxpar.aot.verify.compare import count_differences, dead_leaves, leaf_errors, of_live
from jaxpar.aot.verify.program import Compiled, Outcome
from jaxpar.aot.verify.run import _compare_outcomes
from jaxpar.mesh import (
    MeshSpec,
    constrain,
    gather,
    in_role,
    local,
    make_mesh,
    mesh_axes,
    rules_from,
    use_mesh,
)
from jaxpar.transfers import SMALL, Transfer, allowed_by_axes, sum_by_axis
from jaxpar.types import UsageError
from jaxpar.verify import (
    TOLERANCE,
    Case,
    Layout,
    LayoutReport,
    Limits,
    Model,
    VerifyOptions,
    bytes_on_device,
    every_layout,
    judge,
    verify,
    verify_cases,
)

AXES = {"up": ("embed", "mlp"), "down": ("mlp", "embed"), "shift": (None,)}
BATCH_AXES = {"x": ("batch", None), "y": ("batch", None), "mark": ("batch",)}
LAYOUTS = [Layout(MeshSpec(data=2, fsdp=2, tensor=2)), Layout(MeshSpec(fsdp=8), "zero2")]
DATA8 = Layout(MeshSpec(data=8))
ADAM = optax.adamw(1e-3, eps=1e-6)


def batch(step):
    """Returns rows; `mark` is 1 in the second batch alone."""
    draw = np.random.default_rng(step)
    rows = {name: draw.standard_normal((16, 8)).astype(np.float32) for name in "xy"}
    return rows | {"mark": np.full(16, step == 1, np.float32)}


def right(params, batch):
    """Computes two layers in the sharded way; the gradient of `shift` is rounding alone."""
    held = {}
    for name in ("up", "down"):
        axes = AXES[name]
        held[name] = gather(params[name], axes, in_role(axes, "use"), in_role(axes, "grad"))
    dtype = params["up"].dtype
    inside = constrain(batch["x"].astype(dtype) @ held["up"], "batch", "mlp")
    out = jnp.tanh(inside) @ held["down"]
    logits = constrain(out, "batch", None) + 0.01 * params["shift"].sum()
    wanted = jax.nn.softmax(batch["y"].astype(dtype))
    return -jnp.mean(jnp.sum(wanted * jax.nn.log_softmax(logits), -1))


def forgotten_sum(params, batch):
    """Averages over tensor, where each device has a part of a sum: the gradient is too small."""

    def inside(x, up, down):
        out = jnp.tanh(x @ up) @ down
        if mesh_axes("mlp"):
            return jax.lax.pmean(out, mesh_axes("mlp"))
        return out

    axes = [("batch", None), (None, "mlp"), ("mlp", None)]
    on_device = local(inside, axes, ("batch", None), check=False)
    out = on_device(batch["x"].astype(params["up"].dtype), params["up"], params["down"])
    return jnp.mean((out - batch["y"].astype(out.dtype)) ** 2) + 0 * params["shift"].sum()


def gathered_batch(params, batch):
    """Computes right values, but of all rows on every device."""

    def whole(x):
        return constrain(x, *(None,) * x.ndim)

    dtype = params["up"].dtype
    inside = whole(whole(batch["x"]).astype(dtype) @ params["up"])
    logits = whole(jnp.tanh(inside) @ params["down"]) + 0.01 * params["shift"].sum()
    wanted = jax.nn.softmax(whole(batch["y"]).astype(dtype))
    return -jnp.mean(jnp.sum(wanted * jax.nn.log_softmax(logits), -1))


def wrong_in_the_second_batch(params, batch):
    """Doubles the loss of marked rows where there are several devices."""
    loss = right(params, batch)
    if not mesh_axes("batch"):
        return loss
    return loss * (1 + batch["mark"].mean().astype(loss.dtype))


def model_of(loss, optimizer=ADAM):
    def model(dtype):
        draw = np.random.default_rng(0)
        params = {
            "up": draw.standard_normal((8, 16)).astype(dtype),
            "down": draw.standard_normal((16, 8)).astype(dtype),
            "shift": np.ones(8, dtype),
        }
        return Model(params, AXES, loss, optimizer)

    return model


def row_of(loss, layout=DATA8, dtype="float32", optimizer=ADAM, **allowed):
    """Returns the report of one layout in one dtype."""
    model = model_of(loss, optimizer)
    options = VerifyOptions(dtypes=[dtype])
    (row,) = verify(model, batch, BATCH_AXES, [layout], options=options, **allowed)
    return row


def counts_devices():
    """Returns an optimizer with a state that counts the axes of the mesh along with its steps."""

    def update(grads, count, params=None):
        del params
        return jax.tree.map(lambda g: -0.1 * g, grads), count + 1 + len(mesh_axes("batch"))

    return optax.GradientTransformation(lambda params: jnp.zeros((), jnp.int32), update)


def stateless():
    """Returns an optimizer with an empty tuple as its state."""

    def update(grads, state, params=None):
        del params
        return jax.tree.map(lambda g: -0.1 * g, grads), state

    return optax.GradientTransformation(lambda params: (), update)


def assert_holds(row):
    assert not row.breaches and not row.refused, row
    assert 0 < row.gradient <= TOLERANCE[row.dtype]
    assert 0 < row.steps <= TOLERANCE[row.dtype]
    # Adam makes steps of the rounding that is the gradient of `shift`.
    assert "shift" not in row.worst_step
    assert any(sentence.startswith("steps of shift, ") for sentence in row.unjudged)
    assert 0 < row.flops <= 1 and row.held > 0


def test_a_right_model_holds_in_both_dtypes():
    rows = verify(model_of(right), batch, BATCH_AXES, LAYOUTS)
    names = ("data2.fsdp2.tensor2 zero3", "fsdp8 zero2")
    expected = [(name, dtype) for name in names for dtype in TOLERANCE]
    assert [(str(row.layout), row.dtype) for row in rows] == expected
    for row in rows:
        assert_holds(row)
    assert rows[0].transfers["sum", "tensor"][0] >= 1
    assert ("gather", "fsdp") in rows[2].transfers


def test_a_wrong_gradient_is_named():
    row = row_of(forgotten_sum, LAYOUTS[0])
    assert row.gradient > 0.1 and row.worst in AXES
    assert any(text.startswith(f"the gradient of {row.worst} is off by") for text in row.breaches)
    for step in (1, 2, 3):
        assert any(f"the loss of step {step} is off by" in breach for breach in row.breaches)


def test_steps_are_compared_on_batches_of_their_own():
    """With the first batch in every step, nothing would be wrong."""
    row = row_of(wrong_in_the_second_batch)
    wrong = [breach for breach in row.breaches if breach.startswith("the loss of step")]
    assert wrong[0].startswith("the loss of step 2 is off by 1.0e+00"), row.breaches
    assert row.gradient <= TOLERANCE["float32"]
    assert any("after 3 steps is off by" in breach for breach in row.breaches)


def test_integers_of_a_state_are_compared():
    row = row_of(right, optimizer=counts_devices())
    assert row.breaches == ["optimizer after 3 steps differs in 1 entries"]


@pytest.mark.parametrize("optimizer", [optax.sgd(0.1), stateless()], ids=["sgd", "empty"])
def test_an_optimizer_needs_no_state(optimizer):
    row = row_of(right, LAYOUTS[1], optimizer=optimizer)
    assert not row.breaches and not row.refused and 0 < row.steps


def test_an_undeclared_collective_is_named():
    row = row_of(gathered_batch)
    assert row.gradient <= 1e-5
    expected = "are gathered over data, where at most 0 of 0 are declared"
    assert any(expected in breach for breach in row.breaches), row
    assert any(breach.startswith("a device's products take") for breach in row.breaches), row
    assert row.flops > 4


def test_more_than_is_declared_is_a_breach():
    few = [Transfer("sum", ("data",), 1, 64, "a guess")]
    row = row_of(right, declared=lambda _: few)
    expected = "are summed over data, where at most 1 of 64 are declared"
    assert any(expected in breach for breach in row.breaches), row


def test_what_allow_names_is_not_judged():
    row = row_of(gathered_batch, allow=["gather over data"])
    assert not any("gathered" in breach for breach in row.breaches)
    assert "gather over data, as allow= says" in row.unjudged
    assert any("products take" in breach for breach in row.breaches)


@pytest.mark.parametrize("name", ["gather", "gather over ", "all-gather over data", "data", ""])
def test_allow_refuses_what_names_no_transfer(name):
    legal = "gather over AXIS, sum over AXIS, exchange over AXIS"
    with pytest.raises(UsageError) as raised:
        verify(model_of(right), batch, BATCH_AXES, [DATA8], allow=[name])
    assert str(raised.value) == f"allow={name!r} names no transfer; expected {legal}."


def test_dtypes_without_a_tolerance_are_refused():
    legal = "float32, float64, bfloat16"
    with pytest.raises(UsageError, match=f"dtypes=int8 has no tolerance; expected any of {legal}"):
        verify(model_of(right), batch, BATCH_AXES, [DATA8], options=VerifyOptions(dtypes=["int8"]))


def test_an_illegal_layout_is_a_row_that_says_why():
    layouts = [Layout(MeshSpec(data=3)), Layout(MeshSpec(data=4, tensor=2))]
    seen = []
    options = VerifyOptions(dtypes=["float32"], report=seen.append)
    rows = verify(model_of(right), batch, BATCH_AXES, layouts, options=options)
    assert rows == seen
    assert "does not divide over data=3" in rows[0].refused and not rows[0].breaches
    assert not rows[1].refused


def test_older_arguments_are_fields_of_the_options():
    """Of dtypes, steps and report each changes the rows or who gets them."""
    seen = []
    older = {"dtypes": ["float64"], "steps": 1, "topology": None, "report": seen.append}
    go = functools.partial(verify, model_of(right), batch, BATCH_AXES, [DATA8])
    with pytest.warns(FutureWarning, match=r"verify\(dtypes, steps, topology, report\)") as warned:
        got = go(**older)
    assert len(warned) == 1 and warned[0].filename == __file__
    assert seen == got
    assert go(options=VerifyOptions(dtypes=["float64"], steps=1)) == got
    with pytest.raises(TypeError, match=r"verify\(\) got an unexpected keyword argument 'jobs'"):
        go(jobs=2)


def test_older_arguments_of_cases_are_fields_of_the_options():
    def refuse(dtype):
        raise UsageError(f"dtype={dtype}: no layout; expected another.")

    case = Case(DATA8, rules_from(), program=refuse, twin=refuse, limits=refuse)
    seen = []
    with pytest.warns(FutureWarning, match=r"verify_cases\(dtypes, report\) is now") as warned:
        (row,) = verify_cases([case], dtypes=["bfloat16"], report=seen.append)
    assert len(warned) == 1 and warned[0].filename == __file__
    assert row.dtype == "bfloat16" and seen == [row]
    assert verify_cases([case], VerifyOptions(dtypes=["bfloat16"])) == [row]
    with pytest.raises(TypeError, match="unexpected keyword argument 'allow'"):
        verify_cases([case], allow=[])


def test_a_refused_layout_is_not_tried_in_another_dtype():
    def refuse(dtype):
        raise UsageError(f"dtype={dtype}: no layout; expected another.")

    case = Case(DATA8, rules_from(), program=refuse, twin=refuse, limits=refuse)
    (row,) = verify_cases([case])
    assert row.dtype == "float32" and row.refused == "dtype=float32: no layout; expected another."


def test_a_dtype_that_a_layout_skips_has_no_row():
    def refuse(dtype):
        raise UsageError(f"dtype={dtype}: no layout; expected another.")

    case = Case(DATA8, rules_from(), refuse, refuse, refuse, skips=("float32",))
    (row,) = verify_cases([case], jobs=2)
    assert row.dtype == "float64"


def test_every_layout_is_every_factorisation():
    layouts = every_layout(8)
    assert len(layouts) == len({layout.mesh for layout in layouts}) == 20  # 3 twos into 4 axes
    assert all(layout.num_devices == 8 for layout in layouts)
    assert Layout(MeshSpec(fsdp=8, inner=4)).num_devices == 8


@pytest.mark.parametrize(
    "dtype", ["complex64", "float8_e4m3fn", "bfloat16", "float16", "int8", "bool"]
)
def test_no_dtype_escapes_comparison(dtype):
    want = {"a": jnp.ones(4).astype(dtype)}
    got = {"a": jnp.asarray([1, 0, 1, 1]).astype(dtype)}
    assert leaf_errors(want, want).get("a", 0.0) == 0 and not count_differences(want, want)
    assert bool(count_differences(got, want)) != (leaf_errors(got, want).get("a", 0.0) > 0.1)


def test_leaf_errors_measure_by_the_leaf_or_the_tree():
    want = {"big": np.array([3.0, 4.0]), "none": np.zeros(2), "count": np.array([1])}
    got = {"big": np.array([3.0, 4.5]), "none": np.array([0.0, 1e-3]), "count": np.array([2])}
    assert leaf_errors(got, want) == pytest.approx({"big": 0.1, "none": 1e-3 / (1e-3 * 5)})
    assert leaf_errors({"a": np.array([np.nan])}, {"a": np.ones(1)}) == {"a": np.inf}
    for shape in ((10_000,), (100, 64)):  # XLA's maximum leaves NaN out of these
        bad = jnp.ones(shape).at[7].set(jnp.nan)
        assert leaf_errors({"a": bad}, {"a": jnp.ones(shape)}) == {"a": np.inf}
        assert leaf_errors({"a": jnp.ones(shape)}, {"a": bad}) == {"a": np.inf}
    with pytest.raises(UsageError, match="two trees that differ"):
        leaf_errors({"a": np.ones(1)}, {"b": np.ones(1)})
    with pytest.raises(UsageError, match=r"a has shape \(1,\) on one side and \(2,\) on the other"):
        leaf_errors({"a": np.ones(1)}, {"a": np.ones(2)})


def test_integers_and_booleans_are_counted_where_they_differ():
    want = {"a": np.array([1, 2, 3]), "b": np.array([True]), "c": np.ones(2), "d": np.int32(4)}
    got = {"a": np.array([1, 0, 0]), "b": np.array([False]), "c": np.zeros(2), "d": np.int32(4)}
    assert count_differences(got, want) == {"a": 2, "b": 1}


def test_a_dead_leaf_takes_no_other_of_its_name_out():
    params = {"b": np.ones(1), "mlp": {"b": np.ones(1)}}
    gradient = {"b": np.array([1e-9]), "mlp": {"b": np.ones(1)}}
    dead = dead_leaves(gradient, 1e-6)
    assert dead == {"b"}
    paths = ("params/b", "mu/b", "b", "params/mlp/b", "nu/mlp/b", "mlp/b", "average/mlp/b", "count")
    live = of_live(dict.fromkeys(paths, 0.1), params, dead)
    assert list(live) == ["params/mlp/b", "nu/mlp/b", "mlp/b", "average/mlp/b", "count"]


def test_a_dead_leaf_of_a_branch_leaves_one_at_the_top():
    params = {"b": np.ones(1), "mlp": {"b": np.ones(1)}}
    live = of_live(dict.fromkeys(("mu/b", "mu/mlp/b"), 0.1), params, {"mlp/b"})
    assert list(live) == ["mu/b"]


def test_a_dead_leaf_that_is_not_finite_stays():
    """As 0 / 0 of a gradient of zero would be."""
    params = {"b": np.ones(1), "w": np.ones(1)}
    live = of_live({"params/b": np.inf, "mu/b": 0.1, "params/w": 0.2}, params, {"b"})
    assert live == {"params/b": np.inf, "params/w": 0.2}


@pytest.mark.parametrize("shape", [(10_000,), (100, 64)])
@pytest.mark.parametrize("part", ["loss", "gradient", "state"])
def test_a_nan_is_a_breach(part, shape):
    values = np.ones(shape, np.float32)
    bad = values.copy()
    bad[7] = np.nan
    right = Outcome([1.0], {"w": values, "b": np.zeros(1)}, {"params": {"w": values, "b": values}})
    wrong = {
        "loss": right._replace(losses=[math.nan]),
        "gradient": right._replace(gradient={"w": bad, "b": np.zeros(1)}),
        "state": right._replace(state={"params": {"w": values, "b": bad}}),
    }[part]
    for got, want in ((wrong, right), (right, wrong)):
        row = LayoutReport(DATA8, "float32")
        _compare_outcomes(row, got, want, steps=1)
        assert len(row.breaches) == 1
    row = LayoutReport(DATA8, "float32")
    _compare_outcomes(row, right, right, steps=1)
    assert not row.breaches


def test_a_joint_sum_counts_on_each_of_its_axes():
    transfers = [
        Transfer("sum", ("data", "fsdp"), 2, 10, ""),
        Transfer("sum", ("fsdp",), 1, 4, ""),
    ]
    assert sum_by_axis(transfers) == {("sum", "data"): (2, 10), ("sum", "fsdp"): (3, 14)}


def gathers(arrays, size, **options):
    return Transfer("gather", ("fsdp",), arrays, size, "w", **options)


@pytest.mark.parametrize(
    ("found", "breach"),
    [
        (gathers(4, 4000), ""),
        (gathers(4, 4000 + SLACK), ""),
        (gathers(4, 4001 + SLACK), "where at most 4 of 4,000 are declared"),  # few but large
        (gathers(5, 4000), "where at most 4 of 4,000 are declared"),  # many but small
        (gathers(2, 2000), ""),
        (gathers(1, 4000), "where at least 2 of 2,000 are declared"),
        (gathers(4, 1999), "where at least 2 of 2,000 are declared"),
    ],
)
def test_arrays_and_bytes_are_each_a_breach(found, breach):
    declared = [gathers(4, 4000, least=0.5)]
    breaches = breaches_of([found], declared)
    if not breach:
        assert not breaches
        return
    (said,) = breaches
    arrays = f"{found.arrays} arrays of together {found.bytes:,} bytes are gathered over fsdp, "
    assert said == arrays + breach


def test_fewer_gathers_than_must_be_are_a_breach_even_of_none():
    declared = [gathers(2, 100).times(4, least=1)]
    assert declared[0].arrays == 8 and declared[0].bytes == 400
    (said,) = breaches_of([], declared)
    found = "0 arrays of together 0 bytes are gathered over fsdp"
    assert said == f"{found}, where at least 8 of 400 are declared"
    assert not breaches_of([], [gathers(8, 400)])
    assert not breaches_of([], declared, allow=["gather over fsdp"])


def test_slack_is_of_declared_transfers_alone():
    """A sum over an axis that declares none has no room, however small."""
    sums = Transfer("sum", ("tensor",), 1, SMALL + 1, "")
    (said,) = breaches_of([sums], [gathers(4, 4000)])
    assert said.endswith("are summed over tensor, where at most 0 of 0 are declared")


def test_arrays_of_no_declared_size_are_a_breach():
    declared = [gathers(4, 4000, sizes=(16, 32))]
    assert not breaches_of([gathers(2, 100, sizes=(32, 16))], declared)
    (said,) = breaches_of([gathers(2, 1000, sizes=(32, 1234))], declared)
    assert said == "an array of 1,234 entries is gathered over fsdp, which is no parameter"
    # A declaration without sizes takes arrays of any.
    assert not breaches_of([gathers(2, 1000, sizes=(1234,))], [*declared, gathers(1, 100)])


def test_small_arrays_are_not_transfers():
    """Of an array a little over `SMALL` and one at it, the first alone is found."""
    mesh = make_mesh(MeshSpec(data=8))
    with use_mesh(mesh, rules_from()):

        def sums(x):
            return constrain(constrain(x, "batch", None).sum(0), None)

        def transfers_of(width):
            x = jax.ShapeDtypeStruct((8, width), jnp.float32)
            sharding = jax.NamedSharding(mesh, jax.P("data"))
            text = jax.jit(sums, in_shardings=sharding).lower(x).compile().as_text()
            return found_transfers(text, mesh)

        assert not transfers_of(SMALL // 4)
        (one,) = transfers_of(SMALL // 4 + 1)
    assert (one.kind, one.axes, one.arrays) == ("sum", ("data",), 1)
    assert one.bytes == SMALL + 4 and one.sizes == (SMALL // 4 + 1,)


def test_what_axes_allow():
    with use_mesh(make_mesh(MeshSpec(data=2, fsdp=2, tensor=2)), rules_from()):
        allowed = allowed_by_axes(model_of(right)("float32").params, AXES, BATCH_AXES)
    by_axis = sum_by_axis(allowed)
    # Two weights of 8 x 16 entries, half of them on each share of tensor, twice each.
    assert by_axis["gather", "fsdp"] == (4, 2 * 2 * (8 * 16 // 2) * 4)
    assert ("gather", "tensor") not in by_axis and ("gather", "data") not in by_axis
    for axis in ("data", "fsdp", "tensor"):
        assert ("sum", axis) in by_axis
    (one, other) = [transfer for transfer in allowed if transfer.kind == "gather"]
    assert one.sizes == other.sizes == (64,)


def test_a_stack_may_be_gathered_a_layer_at_a_time():
    params = {"w": jax.ShapeDtypeStruct((3, 8, 16), jnp.float32)}
    with use_mesh(make_mesh(MeshSpec(fsdp=8)), rules_from()):
        allowed = allowed_by_axes(params, {"w": (None, "embed", "mlp")}, BATCH_AXES)
    (one,) = [transfer for transfer in allowed if transfer.kind == "gather"]
    assert one.arrays == 6 and one.bytes == 2 * 3 * 8 * 16 * 4
    assert one.sizes == (8 * 16, 3 * 8 * 16)


def test_bytes_on_a_device_are_those_of_its_shares():
    params = {
        "up": jax.ShapeDtypeStruct((8, 16), jnp.float32),
        "inner": {"up": jax.ShapeDtypeStruct((8, 16), jnp.float32)},
    }
    axes = {"up": ("embed", "mlp"), "inner": {"up": (None, None)}}
    wide = jax.ShapeDtypeStruct((8, 16), jnp.float64)
    state = {
        "params": params,
        "mu": params,
        "factored": {"up": jax.ShapeDtypeStruct((8,), jnp.float32)},
        "other": wide,
        "count": jax.ShapeDtypeStruct((), jnp.int32),
    }
    with use_mesh(make_mesh(MeshSpec(fsdp=4, tensor=2)), rules_from()):
        held = bytes_on_device(state, params, axes)
    split = 8 * 16 * 4 // 8
    whole = 8 * 16 * 4
    assert held == 2 * (split + whole) + 8 * 4 + 8 * 16 * 8 + 4


def judge_program(text, memory=None, **limits):
    """Returns the report of a program's text and memory under limits."""
    mesh = make_mesh(MeshSpec(data=8))
    row = LayoutReport(DATA8, "float32")
    compiled = Compiled(run=None, text=text, partitioned="", jaxpr=None, memory=memory)
    judge(row, compiled, text, mesh, Limits(transfers=(), **limits))
    return row


@pytest.fixture(scope="module")
def product():
    """Text of a program of one product of 2 * 8 * 4 * 6 operations."""
    shapes = [jax.ShapeDtypeStruct(shape, jnp.float32) for shape in ((8, 4), (4, 6))]
    return jax.jit(jnp.matmul).lower(*shapes).compile().as_text()


def test_operations_have_a_most_and_a_least(product):
    flops = 2 * 8 * 4 * 6
    assert not judge_program(product, flops=flops, least_flops=flops).breaches
    (many,) = judge_program(product, flops=flops - 1).breaches
    assert many == "a device's products take 384 operations, where at most 383 are its share"
    (few,) = judge_program(product, flops=2 * flops, least_flops=flops + 1).breaches
    assert few == "a device's products take 384 operations, where at least 385 are its share"
    assert judge_program(product, flops=2 * flops).flops == 0.5
    assert "operations of a device" in judge_program(product).unjudged


def test_memory_has_limits(product):
    memory = types.SimpleNamespace(argument_size_in_bytes=1000, temp_size_in_bytes=500)
    row = judge_program(product, memory)
    assert (row.held, row.temporaries) == (1000, 500) and not row.breaches
    none = Compiled(
        run=types.SimpleNamespace(in_avals=()), text="", partitioned="", jaxpr=None, memory=memory
    )
    mesh = make_mesh(MeshSpec(data=8))

    row = LayoutReport(DATA8, "float32")
    judge(row, none, product, mesh, Limits(transfers=(), held=999))
    assert row.breaches == [
        "a device holds 1,000 bytes of state and batch, where 999 are its share"
    ]

    row = LayoutReport(DATA8, "float32")
    judge(row, none, product, mesh, Limits(transfers=()), 499)
    assert row.breaches == [
        "a device needs 500 bytes beside state and batch, where at most 499 are estimated"
    ]

    row = LayoutReport(DATA8, "float32")
    judge(row, none, product, mesh, Limits(transfers=(), held=1000), 500)
    assert not row.breaches
    assert "memory, of which the compiler says nothing" in judge_program(product).unjudged


def test_what_is_not_judged_is_said(product):
    row = judge_program(product, unjudged=("dropout",))
    assert "dropout" in row.unjudged


@pytest.mark.parametrize("text", ["", "HloModule jit_step"], ids=["empty", "head"])
def test_a_program_without_text_holds_nowhere(text):
    (breach,) = judge_program(text, flops=100.0).breaches
    assert breach == "the compiler gave no text of the program, so that nothing was judged"


def test_a_partitioned_program_without_text_holds_nowhere(monkeypatch, tmp_path):
    """As where a compiler writes its passes into files of other names."""
    assert program._partitioned(str(tmp_path)) == ""
    monkeypatch.setattr(program, "_partitioned", lambda folder: "")
    row = row_of(right, dtype="bfloat16")
    assert any("no text of the program" in breach for breach in row.breaches)
