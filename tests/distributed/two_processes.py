"""One of two processes, of two devices each: a step of training, a little of each pillar, the configurations' check.

Run as `two_processes.py HOST:PORT PROCESS_ID OUT PILLARS`, names with commas between them.
"""

import os
import pickle
import sys
from pathlib import Path

import jax
import numpy as np
from jax.experimental.multihost_utils import sync_global_devices
from lm_configs import lm_config
from pillars import outcome

from jaxpar.lm import OptimizerConfig, Trainer
from jaxpar.mesh import (
    MeshSpec,
    make_mesh,
    named_shardings,
    place_rows,
    simulate_devices,
    use_mesh,
)
from jaxpar.processes import check_same_on_all_processes, start_processes
from jaxpar.types import UsageError

TRAINER = Trainer(
    lm_config(
        vocab_size=32,
        num_layers=1,
        embed_dim=16,
        num_heads=4,
        mlp_dim=24,
        dtype="float32",
        dropout=0.1,
    ),
    OptimizerConfig(warmup_steps=0, eps=1e-6),
)


def rows_asked(asked):
    tokens = np.random.default_rng(0).integers(0, 32, (8, 9), dtype=np.int32)

    def rows(part):
        asked.append((part.start, part.stop))
        return {"tokens": tokens[part, :-1], "targets": tokens[part, 1:]}

    return rows


def step_of_training(devices):
    """Returns what one step on four devices gives, and the rows that this process was asked for."""
    asked = []
    with use_mesh(make_mesh(MeshSpec(data=2, fsdp=2), devices)) as mesh:
        shardings = named_shardings(jax.eval_shape(TRAINER.init, jax.random.key(0)), TRAINER.axes())
        state = jax.jit(TRAINER.init, out_shardings=shardings)(jax.random.key(0))
        everywhere = jax.sharding.NamedSharding(mesh, jax.P())
        step = jax.jit(TRAINER.step, out_shardings=(everywhere, None))
        state, info = step(jax.random.key(1), state, place_rows(rows_asked(asked), 8))
        return dict(params=jax.device_get(state.params), loss=float(info["loss"]), asked=asked)


def main(coordinator, process_id, out, pillars):
    simulate_devices(2)
    joined = start_processes(coordinator, 2, process_id, timeout_s=60)
    result = step_of_training(jax.devices()) | dict(joined=joined, processes=jax.process_count())
    result["pillars"] = {name: outcome(name, jax.devices()) for name in pillars.split(",")}
    check_same_on_all_processes("the same", "text")
    try:
        check_same_on_all_processes(f"seed={process_id}", "the configuration")
    except UsageError as error:
        result["refusal"] = str(error)
    Path(out).write_bytes(pickle.dumps(result))
    sync_global_devices("the end")
    # As commands end: gRPC's server sometimes aborts the process where jaxlib tears it down.
    sys.stdout.flush()
    os._exit(0)


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), *sys.argv[3:])
