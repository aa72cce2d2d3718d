"""Prints which arrays cross devices in one training step: compiles it, runs nothing.

python docs/collectives.py mesh.fsdp=8 mesh.data=1 model.attention.num_heads=8 model.attention.num_kv_heads=8

Takes the flags of `python -m experiments.lm`. A layer is counted once, since the layers run in a loop.
"""

import collections
import pathlib
import sys

import jax
import numpy as np

ROOT = pathlib.Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from experiments.app import runner  # noqa: E402
from experiments.lm import Config, compose, make_trainer  # noqa: E402
from jaxpar.aot import hlo  # noqa: E402
from jaxpar.loop import compile_step  # noqa: E402
from jaxpar.mesh import named_shardings  # noqa: E402


def compiled_step(config: Config) -> jax.stages.Compiled:
    """Returns the compiled step on the ambient mesh, from shapes alone."""
    trainer = make_trainer(config)
    state = jax.eval_shape(trainer.init, jax.random.key(0))
    rows = jax.ShapeDtypeStruct((config.data.batch_size, config.data.seq_len), np.int32)
    given, axes = (
        (state, {"tokens": rows, "targets": rows}),
        (trainer.axes(), {"tokens": (), "targets": ()}),
    )
    axes[1].update(tokens=("batch", None), targets=("batch", None))
    placed = jax.tree.map(
        lambda x, sharding: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding),
        given,
        named_shardings(given, axes),
    )
    return compile_step(trainer, *placed, axes=trainer.axes())


def main() -> None:
    """Prints one row for each kind of collective and each set of mesh axes; scalars are left out."""
    config = compose(*sys.argv[1:])
    with runner.open_devices(config) as mesh:
        program = compiled_step(config)
    shapes = collections.defaultdict(list)
    for collective in hlo.collectives(program.as_text(), mesh):
        where = "+".join(collective.axes or ("?",))
        shapes[collective.kind, where] += [shape for shape in collective.shapes if shape]
    for (kind, where), arrays in sorted(shapes.items()):
        if arrays:
            print(
                f"{kind:14} over {where:10} {len(arrays):3} arrays, the largest {max(arrays, key=np.prod)}"
            )
    print(
        f"temporary memory {program.memory_analysis().temp_size_in_bytes / 2**20:.1f} MiB a device"
    )


if __name__ == "__main__":
    main()
