"""One of several processes of two devices each, which trains, saves and resumes. See test_many_savers.py.

Run as `two_savers.py HOST:PORT NUM_PROCESSES PROCESS_ID FOLDER OUT`.
"""

import json
import sys
from pathlib import Path

import jax
import numpy as np
from jax.experimental import multihost_utils
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from jaxpar.io import Checkpoints, CorruptCheckpointError
from jaxpar.mesh import simulate_devices
from jaxpar.processes import start_processes

ROWS = 24


def at(step):
    """The state after so many steps, on the host."""
    matrix = np.arange(ROWS * 4, dtype=np.float32).reshape(ROWS, 4)
    return {
        "m": matrix + step * matrix.sum(),
        "v": np.arange(6.0, dtype=np.float32) - step,
        "n": np.int32(step),
    }


def abstract(mesh):
    specs = {"m": PartitionSpec("d"), "v": PartitionSpec(None), "n": PartitionSpec()}
    return {
        name: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=NamedSharding(mesh, specs[name]))
        for name, x in at(0).items()
    }


def main(coordinator, num_processes, process_id, folder, out):
    simulate_devices(2)
    start_processes(coordinator, num_processes, process_id, timeout_s=60)
    mesh = Mesh(np.array(jax.devices()), ("d",))
    total = float(at(0)["m"].sum())
    shardings = jax.tree.map(lambda x: x.sharding, abstract(mesh))

    def step(
        state,
    ):  # the sum is an all-reduce over the processes, which must not meet a save's barriers
        zero = state["m"].sum() * 0
        return {"m": state["m"] + total + zero, "v": state["v"] - 1 + zero, "n": state["n"] + 1}

    step = jax.jit(step, donate_argnums=0, out_shardings=shardings)
    checkpoints = Checkpoints(folder, keep=2)
    state = jax.device_put(at(0), shardings)
    stalls = []
    for number in range(1, 41):
        state = step(state)
        if number % 8 == 0:
            stalls.append(
                checkpoints.save(number, state, {"validation/loss": -number}, {"seed": 1})
            )
        checkpoints.poll()
    steps = checkpoints.steps()
    checkpoints.close()

    multihost_utils.sync_global_devices("saved")
    if process_id == 0:
        files = [path for path in (Path(folder) / "40/state").rglob("*") if path.parent.name == "d"]
        assert files
        for path in files:
            path.write_bytes(path.read_bytes()[:-40])
    multihost_utils.sync_global_devices("damaged")
    again = Checkpoints(folder, keep=2)
    found, restored = again.restore_newest(abstract(mesh), {"seed": 1})
    right = all(
        np.array_equal(multihost_utils.process_allgather(restored[k], tiled=True), at(found)[k])
        for k in "mvn"
    )
    again.save(40, step(restored), {}, {"seed": 1})
    after = again.steps()
    try:
        with_other = again.restore_newest(
            abstract(mesh), {"seed": 2 if process_id else 1}
        )  # only one is refused
        other = str(with_other[0])
    except ValueError as error:
        other = f"{isinstance(error, CorruptCheckpointError)} {error}"
    again.close()
    result = dict(
        steps=steps,
        stalls=stalls,
        found=found,
        right=right,
        refused=again.refused,
        after=after,
        other=other,
    )
    Path(out).write_text(json.dumps(result))


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), *sys.argv[4:])
