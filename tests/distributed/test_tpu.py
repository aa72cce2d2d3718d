"""The training step compiled for TPUs that are not here: the exact set of collectives, and the splash kernel."""

import json
import sys

import jax
import jax.numpy as jnp
import pytest
from compiled import needs_libtpu, on_a_tpu
from lm_configs import lm_config

from jaxpar.aot import hlo
from jaxpar.aot.estimate import compile_lowered
from jaxpar.lm import OptimizerConfig, Trainer
from jaxpar.mesh import MeshSpec, make_mesh, named_shardings, use_mesh

ROWS, LENGTH = 8, 256
TRAINER = Trainer(
    lm_config(
        vocab_size=512, num_layers=2, embed_dim=256, num_heads=8, num_kv_heads=4, head_dim=64, mlp_dim=512,
        loss_chunk=256, attention="splash",
    ),
    OptimizerConfig(warmup_steps=1),
)  # fmt: skip

# (data, fsdp, tensor), packed documents -> kinds and axes of all collectives of arrays.
ROWS_OF_TABLE = {
    "4x1x1": ((4, 1, 1), False, {("all-reduce", ("data",))}),
    "1x2x2-segments": (
        (1, 2, 2),
        True,
        {
            ("all-gather", ("fsdp",)),
            ("reduce-scatter", ("fsdp",)),
            (
                "all-reduce",
                ("fsdp",),
            ),  # of the norms' scales, and of weights whose shares are no whole tiles
            ("all-reduce", ("tensor",)),
        },
    ),
    "1x4x1-segments": (
        (1, 4, 1),
        True,
        {("all-gather", ("fsdp",)), ("reduce-scatter", ("fsdp",)), ("all-reduce", ("fsdp",))},
    ),
}


def compile_for_tpu(name):
    """Returns the HLO text of the step for four chips of a v5e; runs in a process of its own."""
    from jax.experimental import topologies

    sizes, segments, _ = ROWS_OF_TABLE[name]
    key = jax.eval_shape(lambda: jax.random.key(0))
    state, axes = jax.eval_shape(TRAINER.init, key), TRAINER.axes()
    names = ("tokens", "targets") + (("segments", "positions") if segments else ())
    batch = {name: jax.ShapeDtypeStruct((ROWS, LENGTH), jnp.int32) for name in names}
    mesh = make_mesh(MeshSpec(*sizes), topologies.get_topology_desc("v5e:2x2", "tpu").devices)
    with use_mesh(mesh):
        args = (key, state, batch)
        shardings = named_shardings(args, ((), axes, {name: ("batch", None) for name in names}))
        step = jax.jit(
            TRAINER.step,
            donate_argnums=1,
            in_shardings=shardings,
            out_shardings=(shardings[1], None),
        )
        least_effort = {"exec_time_optimization_effort": -1.0, "memory_fitting_effort": -1.0}
        return compile_lowered(step.lower(*args), least_effort).as_text()


@needs_libtpu
@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=[] if name == "1x2x2-segments" else pytest.mark.slow)
        for name in ROWS_OF_TABLE
    ],
)
def test_tpu_program(name):
    text = on_a_tpu(__file__, name)
    sizes, _, declared = ROWS_OF_TABLE[name]
    mesh = make_mesh(MeshSpec(*sizes), jax.devices()[:4])
    found = hlo.collectives(text, mesh)
    assert {(c.kind, c.axes) for c in found if any(c.shapes)} == declared
    assert {c.kind for c in found if not any(c.shapes)} <= {"all-reduce"}  # loss and norm
    for kernel in ("fwd", "dq", "dkv"):
        assert f"splash_mha_{kernel}" in text


if __name__ == "__main__":
    print(json.dumps(compile_for_tpu(sys.argv[1])))
