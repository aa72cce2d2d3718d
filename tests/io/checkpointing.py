"""States to save, and damage to what was saved."""

import os
import shutil
from typing import NamedTuple

import flax.struct
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from jaxpar.io.lock import LOCK


class Moments(NamedTuple):
    mean: dict
    count: jax.Array


class Nothing(NamedTuple):
    pass


@flax.struct.dataclass
class State:
    params: dict
    optimizer: tuple
    key: jax.Array


def over(num_devices, *axes):
    mesh = Mesh(np.array(jax.devices()[:num_devices]), ("d",))
    return NamedSharding(mesh, PartitionSpec(*axes))


def make_state(rows=24):
    def leaf(dtype):
        bits = np.random.default_rng(0).integers(0, 2**16, (rows, 4), dtype=np.uint16)
        return jax.device_put(bits.astype(np.float32).astype(dtype) / 7, over(8, "d"))

    params = {"w": leaf(jnp.bfloat16), "b": [leaf(jnp.float32), leaf(jnp.int32)]}
    optimizer = (Moments({"w": leaf(jnp.float32)}, jnp.int32(3)), Nothing())
    return State(
        params, optimizer, jax.device_put(jax.random.split(jax.random.key(1), 24), over(8, "d"))
    )


def abstract(state, num_devices=8):
    def leaf(x):
        axes = ("d",) if x.ndim else ()
        return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=over(num_devices, *axes))

    return jax.tree.map(leaf, state)


def bits(state):
    def leaf(x):
        x = jax.random.key_data(x) if jax.dtypes.issubdtype(x.dtype, jax.dtypes.prng_key) else x
        return np.asarray(x).tobytes(), x.dtype, x.shape

    return jax.tree.map(leaf, state)


def save_scalar(checkpoints, step, **metrics):
    state = {"x": jnp.full((4,), step, jnp.float32)}
    checkpoints.save(step, state, {f"validation/{name}": v for name, v in metrics.items()}, {})


def names(folder):
    """Names in a folder of checkpoints, without the lock's file."""
    return sorted(path.name for path in folder.iterdir() if path.name != LOCK)


# Orbax closes its event loop under the other leaves' reads when one of them fails.
closed_loop = pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")


HOWS = (
    "short data",
    "flipped data",
    "no layout",
    "no manifest",
    "no files",
    "empty files",
    "other metadata",
    "other arrays",
)


def damage(folder, how):
    if how == "other arrays":  # all files are as they were written, but not for this step
        shutil.rmtree(folder / "state")
        shutil.copytree(folder.parent / "2" / "state", folder / "state")
    for path in [path for path in folder.rglob("*") if path.is_file()]:
        if how == "empty files":  # what a power cut leaves
            os.truncate(path, 0)
        if how == "short data" and path.parent.name == "d":
            os.truncate(path, path.stat().st_size // 2)
        if how == "flipped data" and path.parent.name == "d":
            flip(path, path.stat().st_size // 2)
        if (
            how == "no files"
            or (how == "no layout" and path.parent.name == "layout")
            or (how == "no manifest" and path.name == "manifest.ocdbt")
        ):
            path.unlink()
        if how == "other metadata" and path.parent.name == "metadata":
            path.write_text(path.read_text().replace("3", "4"))


def flip(path, place, bit=3):
    data = bytearray(path.read_bytes())
    data[place] ^= 1 << bit
    path.write_bytes(data)


def three_saved(folder, opened):
    """Saves the steps 1, 2 and 3 with the step as score; returns what was saved."""
    checkpoints = opened(folder, keep=10)
    states = {
        step: make_state().replace(key=jax.random.split(jax.random.key(step), 24))
        for step in (1, 2, 3)
    }
    for step, state in states.items():
        checkpoints.save(step, state, {"validation/loss": step}, {"seed": 3})
    checkpoints.close()
    return states
