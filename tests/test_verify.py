"""`verify` passes what is right and names what is wrong, on a model of its own."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from jaxpar.mesh import MeshSpec, constrain, gather, in_role, local, mesh_axes, rules_from
from jaxpar.types import UsageError
from jaxpar.verify import TOLERANCE, Layout, Model, Transfer, every_layout, leaf_errors, sum_by_axis, verify

AXES = {"up": ("embed", "mlp"), "down": ("mlp", "embed"), "shift": (None,)}
BATCH_AXES = {"x": ("batch", None), "y": ("batch", None)}
LAYOUTS = [Layout(MeshSpec(data=2, fsdp=2, tensor=2)), Layout(MeshSpec(fsdp=8), "zero2")]


def batch(step):
    rng = np.random.default_rng(step)
    return {name: rng.standard_normal((8, 8)).astype(np.float32) for name in "xy"}


def right(params, batch):
    """A two-layer network in the sharded way; `shift` has a gradient that is zero but for rounding."""
    up, down = (
        gather(params[name], AXES[name], in_role(AXES[name], "use"), in_role(AXES[name], "grad"))
        for name in ("up", "down")
    )
    dtype = up.dtype
    out = jnp.tanh(constrain(batch["x"].astype(dtype) @ up, "batch", "mlp")) @ down
    logits = constrain(out, "batch", None) + 0.01 * params["shift"].sum()
    return -jnp.mean(jnp.sum(jax.nn.softmax(batch["y"].astype(dtype)) * jax.nn.log_softmax(logits), -1))


def forgotten_sum(params, batch):
    """Each part of the mlp adds the whole of its own share: the sum over tensor is missing from the gradient."""

    def inside(x, up, down):
        out = jnp.tanh(x @ up) @ down
        return jax.lax.pmean(out, mesh_axes("mlp")) if mesh_axes("mlp") else out

    axes = [("batch", None), (None, "mlp"), ("mlp", None)]
    out = local(inside, axes, ("batch", None), check=False)(
        batch["x"].astype(params["up"].dtype), params["up"], params["down"]
    )
    return jnp.mean((out - batch["y"].astype(out.dtype)) ** 2) + 0 * params["shift"].sum()


def gathered_batch(params, batch):
    """Right values, but every device computes the whole batch."""
    return right(params, {name: constrain(x, None, None) for name, x in batch.items()})


def model_of(loss):
    def model(dtype):
        rng = np.random.default_rng(0)
        params = {"up": rng.standard_normal((8, 16)), "down": rng.standard_normal((16, 8)), "shift": np.ones(8)}
        return Model({k: v.astype(dtype) for k, v in params.items()}, AXES, loss, optax.adamw(1e-3, eps=1e-6))

    return model


def test_a_right_model_holds_in_both_dtypes():
    rows = verify(model_of(right), batch, BATCH_AXES, LAYOUTS)
    assert [(str(row.layout), row.dtype) for row in rows] == [
        (name, dtype) for name in ("data2.fsdp2.tensor2 zero3", "fsdp8 zero2") for dtype in TOLERANCE
    ]
    for row in rows:
        assert not row.breaches and not row.refused, row
        assert 0 < row.gradient <= TOLERANCE[row.dtype] and 0 < row.steps <= TOLERANCE[row.dtype]
        assert "shift" not in row.worst_step  # its gradient is rounding, which Adam makes steps of
    assert rows[0].transfers["sum", "tensor"][0] >= 1 and ("gather", "fsdp") in rows[2].transfers


def test_a_wrong_gradient_is_named():
    (row,) = verify(model_of(forgotten_sum), batch, BATCH_AXES, LAYOUTS[:1], dtypes=["float32"])
    assert row.gradient > 0.1 and row.worst in AXES
    assert any(breach.startswith(f"the gradient of {row.worst} is off by") for breach in row.breaches)
    assert any("the loss is off by" in breach for breach in row.breaches)


def test_an_unexplained_collective_is_named():
    (row,) = verify(model_of(gathered_batch), batch, BATCH_AXES, [Layout(MeshSpec(data=8))], dtypes=["float32"])
    assert row.gradient <= 1e-5
    assert any("are gathered over data, where the table declares 0" in breach for breach in row.breaches), row


def test_more_than_is_declared_is_a_breach():
    few = [Transfer("sum", ("data",), 1, 64, "a guess")]
    rows = verify(
        model_of(right), batch, BATCH_AXES, [Layout(MeshSpec(data=8))], dtypes=["float32"], declared=lambda _: few
    )
    assert any("are summed over data, where the table declares 1 of 64" in breach for breach in rows[0].breaches)


def test_an_illegal_layout_is_a_row_that_says_why():
    layouts = [Layout(MeshSpec(data=4, tensor=2)), Layout(MeshSpec(data=3))]
    seen = []
    rows = verify(model_of(right), batch, BATCH_AXES, [layouts[1], layouts[0]], dtypes=["float32"], report=seen.append)
    assert rows == seen and "does not divide over data=3" in rows[0].refused and not rows[0].breaches
    assert not rows[1].refused


def test_every_layout_is_every_factorisation():
    layouts = every_layout(8)
    assert len(layouts) == len({layout.mesh for layout in layouts}) == 20  # 3 twos into 4 axes
    assert all(layout.num_devices == 8 for layout in layouts)
    assert Layout(MeshSpec(fsdp=8, inner=4)).num_devices == 8


def test_leaf_errors_measure_by_the_leaf_or_the_tree():
    want = {"big": np.array([3.0, 4.0]), "none": np.zeros(2), "count": np.array([1])}
    got = {"big": np.array([3.0, 4.5]), "none": np.array([0.0, 1e-3]), "count": np.array([2])}
    assert leaf_errors(got, want) == pytest.approx({"big": 0.1, "none": 1e-3 / (1e-3 * 5)})
    assert leaf_errors({"a": np.array([np.nan])}, {"a": np.ones(1)}) == {"a": np.inf}
    with pytest.raises(UsageError, match="two trees that differ"):
        leaf_errors({"a": np.ones(1)}, {"b": np.ones(1)})
    with pytest.raises(UsageError, match=r"a has shape \(1,\) on one side and \(2,\) on the other"):
        leaf_errors({"a": np.ones(1)}, {"a": np.ones(2)})


def test_a_tally_counts_a_joint_sum_on_each_of_its_axes():
    transfers = [Transfer("sum", ("data", "fsdp"), 2, 10, ""), Transfer("sum", ("fsdp",), 1, 4, "")]
    assert sum_by_axis(transfers) == {("sum", "data"): (2, 10), ("sum", "fsdp"): (3, 14)}


def test_what_a_table_explains():
    allowed = explained(model_of(right)("float32"), BATCH_AXES, rules_from())
    assert ("sum", "data") in allowed and ("gather", "fsdp") in allowed and ("sum", "tensor") in allowed
    assert ("gather", "data") not in allowed and not any(kind == "exchange" for kind, _ in allowed)
