"""Inside a pipeline's stage: what is refused there, and that it is nowhere else."""

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import PartitionSpec as P

from jaxpar.mesh import MeshSpec, local, make_mesh, mesh_axes, use_mesh
from jaxpar.solve import Newton, parallel_scan
from jaxpar.stage import by_stage, in_stage, refuse_in_stage
from jaxpar.types import UsageError


def mesh_of(**sizes):
    return use_mesh(make_mesh(MeshSpec(**sizes), jax.devices()[:4]))


def test_only_stages_are_told_apart_and_all_else_is_split_as_outside():
    seen = []

    def stage(x):
        seen.append(in_stage())
        total = local(
            lambda x: jax.lax.psum(x.sum(0), mesh_axes("batch")), [("batch", None)], (None,)
        )(x)
        return total + jax.lax.axis_index("stage").astype(x.dtype)

    with mesh_of(stage=2, data=2):
        out = jax.jit(by_stage(stage, P("stage"), P("stage")))(jnp.arange(8.0).reshape(4, 2))
    assert out.tolist() == [2.0, 4.0, 11.0, 13.0] and seen[0] and not in_stage()
    refuse_in_stage("anything", "nothing")


def test_messages_between_devices_of_a_stage_are_refused():
    def along(x):
        def solve(x):
            return parallel_scan(
                lambda h, x: (jnp.tanh(h) + x,) * 2, x[0], x, axis_name="context", method=Newton()
            )[0]

        return local(solve, [("seq", None)], (None,))(x)

    with (
        mesh_of(stage=2, context=2),
        pytest.raises(UsageError, match=r"a solver over a split sequence sends .* take"),
    ):
        jax.eval_shape(by_stage(along, P("stage"), P("stage")), jnp.ones((8, 2)))
