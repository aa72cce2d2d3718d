"""However tokens reach experts that devices share, the mixture is the dense one, and nothing undeclared is sent."""

import dataclasses

import jax
import pytest
from mixtures import CASES, NEAR, B, D, T, normal, outcome, params_of, sorted_form, wanted
from tolerance import assert_close

from jaxpar.mesh import MeshSpec, make_mesh, rules_from, shard, use_mesh
from jaxpar.parallel.experts import TRANSPORTS, transport_for
from jaxpar.types import UsageError

MESHES = {
    "expert4.data2": MeshSpec(data=2, expert=4),
    "expert2.fsdp2.tensor2": MeshSpec(fsdp=2, tensor=2, expert=2),
    "expert2.context2.tensor2": MeshSpec(context=2, tensor=2, expert=2),
}
NAMES = [name for name in TRANSPORTS if name != "auto"]


def outcome_on(mesh, transport, name, skew=0.0, dtype="float64", rules=None):
    layer = dataclasses.replace(CASES[name], transport=transport)
    axes = {name: leaf.axes for name, leaf in layer.leaves(D, 1.0, 1.0).items()}
    with use_mesh(make_mesh(MESHES[mesh]), rules_from(rules)):
        params = shard(params_of(layer, dtype, skew), axes)
        x = shard(normal(B, T, D, dtype=dtype), ("batch", "seq", None))
        return jax.device_get(outcome(sorted_form, layer, params, x))


@pytest.mark.parametrize(
    "transport, mesh, name",
    [
        ("sum", "expert4.data2", "sigmoid, all losses, bias"),
        ("sum", "expert2.fsdp2.tensor2", "capacity"),
        ("gather", "expert4.data2", "capacity"),
        ("gather", "expert2.context2.tensor2", "sigmoid, all losses, bias"),
        *(
            pytest.param(transport, mesh, name, marks=pytest.mark.slow)  # 5 s each
            for transport in NAMES
            for mesh in MESHES
            for name in CASES
            if "capacity" not in name or "context" not in mesh
        ),
    ],
)
def test_it_is_the_dense_mixture(transport, mesh, name, x64):
    assert_close(outcome_on(mesh, transport_for(transport), name), wanted(name), NEAR["float64"])


def test_rows_that_are_not_split_are_summed(x64):
    """By rule none of them travels: every transport then leaves tokens where they are."""
    got = outcome_on("expert4.data2", transport_for("gather"), "all", rules={"batch": "data"})
    assert_close(got, wanted("all"), NEAR["float64"])


def test_mistakes_are_told():
    with pytest.raises(UsageError, match="transport='fly' is unknown; legal are auto, sum, gather"):
        transport_for("fly")
    with pytest.raises(UsageError, match=r"dimension 0 \(experts\) of size 4 does not divide over expert=8"):
        outcome_on("expert8", transport_for("gather"), "all")


MESHES["expert8"] = MeshSpec(expert=8)
