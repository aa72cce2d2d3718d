"""Matrix states compiled for TPUs that are not here: what crosses devices, and no memory of a state a token."""

import json
import sys

import jax
import jax.numpy as jnp
import pytest
from compiled import needs_libtpu, on_a_tpu

from jaxpar.mesh import MeshSpec, local, make_mesh, use_mesh
from jaxpar.nn.mixers import RecurrenceExecution, delta_rule, linear_attention

B, T, H, K = 2, 4096, 4, 64
SHARED = RecurrenceExecution(axis_name="context")
SPLIT = ("batch", "seq_layer", None, None)


def compile_for_tpu(name):
    """Returns kinds of collectives and temporary bytes of a gradient for four chips; runs in a process of its own."""
    from jax.experimental import topologies

    def run(q, k, v, gate):
        if name == "delta":
            return delta_rule(q, k, v, jax.nn.sigmoid(gate[..., 0]), execution=SHARED)[0]
        return linear_attention(q, k, v, -jnp.exp(gate), execution=SHARED)[0]

    def loss(*args):
        return jnp.square(local(run, (SPLIT,) * 4, SPLIT)(*args).astype(jnp.float32)).sum()

    with use_mesh(
        make_mesh(MeshSpec(context=4), topologies.get_topology_desc("v5e:2x2", "tpu").devices)
    ):
        args = [
            jax.ShapeDtypeStruct((B, T, H, K), dtype) for dtype in ("bfloat16",) * 3 + ("float32",)
        ]
        program = jax.jit(jax.grad(loss, (0, 1, 2, 3))).lower(*args).compile()
    text = program.as_text()
    kinds = ("all-gather", "all-reduce", "all-to-all", "collective-permute", "reduce-scatter")
    found = [kind for kind in kinds if f" {kind}(" in text or f" {kind}-start(" in text]
    return found, program.memory_analysis().temp_size_in_bytes


@pytest.mark.slow  # 2 minutes
@needs_libtpu
@pytest.mark.parametrize("name", ["rows", "delta"])
def test_states_alone_cross_devices(name):
    kinds, temporary = on_a_tpu(__file__, name)
    assert set(kinds) <= {"all-gather", "collective-permute", "all-reduce", "reduce-scatter"}
    assert temporary < B * (T // 4) * H * K * K * 4 / 2, "half of one device's states of all tokens"


if __name__ == "__main__":
    print(json.dumps(compile_for_tpu(sys.argv[1])))
