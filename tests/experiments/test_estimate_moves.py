"""What `experiments.estimate source=...` counts: common axes of two meshes, and bytes by hand."""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding

from experiments.app.estimate.moves import _common_axes, _placement, moves
from experiments.app.mesh_flags import parse_layout
from jaxpar import aot
from jaxpar.experimental.placement_conversion import specs
from jaxpar.mesh import make_mesh, rules_from
from jaxpar.types import UsageError

SHAPE = (32, 64)
LAYOUTS = (
    "fsdp8",
    "tensor8",
    "data2.fsdp4",
    "fsdp4.tensor2",
    "fsdp8.inner4/hybrid",
    "data2.fsdp4.inner2/nested",
)


def job_of(layout, params, axes, devices=None):
    mesh = make_mesh(layout.mesh, devices or jax.devices())
    rules = rules_from({}, layout.name)
    args = ({"params": params, "opt_state": params}, jax.ShapeDtypeStruct((64,), jnp.float32))
    return aot.Job(
        lambda *args: args,
        args,
        ({"params": axes, "opt_state": axes}, ("batch",)),
        mesh,
        rules=rules,
    )


def matrix(layout, devices=None):
    return job_of(
        layout, {"w": jax.ShapeDtypeStruct(SHAPE, jnp.float32)}, {"w": ("embed", "mlp")}, devices
    )


def sent(source, target):
    source = parse_layout(source)
    return moves(matrix(parse_layout(target)), source, rules_from({}, source.name))


@pytest.mark.parametrize(("source", "target"), [*itertools.combinations(LAYOUTS, 2)])
def test_common_axes_lay_blocks_where_each_mesh_does(source, target):
    jobs = [matrix(parse_layout(text)) for text in (source, target)]
    sizes, parts = _common_axes(*(job.mesh.shape for job in jobs))
    assert np.prod(list(sizes.values())) == 8
    common = Mesh(np.array(jax.devices()).reshape(tuple(sizes.values())), tuple(sizes))
    for job, where in zip(jobs, parts, strict=True):
        for row, sharding in zip(
            aot.placements(job), jax.tree.leaves(job.shardings()), strict=True
        ):
            spec = specs(_placement(row.spec, where), len(row.shape), sizes)
            assert NamedSharding(common, spec).devices_indices_map(
                row.shape
            ) == sharding.devices_indices_map(row.shape)


def test_bytes_are_those_of_parameters_and_optimizer_by_hand():
    whole = 4 * 32 * 64
    # Rows in eight become rows in four and columns in two: half of a block is the neighbour's.
    assert sent("fsdp8", "fsdp4.tensor2") == {"all-to-all": 2 * whole / 8 / 2}
    # Rows in eight become rows in four, for two copies: each gets its neighbour's block.
    assert sent("fsdp8", "data2.fsdp4") == {
        "collective-permute": 2 * whole / 8,
        "all-gather": 2 * whole / 8,
    }
    assert sent("data8", "fsdp8") == sent("fsdp8", "fsdp8") == {}
    # The source's rules count: hybrid splits rows over the inner four alone.
    assert sent("fsdp8.inner4/hybrid", "data8") == {"all-gather": 2 * whole * 3 / 4}
    assert sent("fsdp8.inner4", "data8") == {"all-gather": 2 * whole * 7 / 8}


def test_every_leaf_counts_with_its_own_shape_and_dtype():
    shapes = {
        "w": (SHAPE, jnp.float32),
        "narrow": (SHAPE, jnp.bfloat16),
        "small": ((16, 8), jnp.float32),
    }
    params = {name: jax.ShapeDtypeStruct(*each) for name, each in shapes.items()}
    job = job_of(parse_layout("data8"), params, dict.fromkeys(params, ("embed", "mlp")))
    whole = 32 * 64 * 4 + 32 * 64 * 2 + 16 * 8 * 4
    assert moves(job, parse_layout("fsdp8"), rules_from({}, "zero3")) == {
        "all-gather": 2 * whole * 7 / 8
    }


def test_meshes_that_cut_devices_otherwise_are_refused():
    six = jax.devices()[:6]
    job = matrix(parse_layout("data3.fsdp2"), six)
    with pytest.raises(UsageError, match="data=2 fsdp=3 and data=3 fsdp=2 have no common axes"):
        moves(job, parse_layout("data2.fsdp3"), rules_from({}, "zero3"))
    with pytest.raises(UsageError, match="needs 8 devices but 6"):
        moves(job, parse_layout("fsdp8"), rules_from({}, "zero3"))
