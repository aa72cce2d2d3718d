"""Arrays to one file that other programs read."""

import contextlib
import os
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import multihost_utils
from safetensors import SafetensorError
from safetensors.numpy import save_file

from jaxpar.io.reading import flatten
from jaxpar.types import PyTree, UsageError

__all__ = ["write_arrays"]


def write_arrays(path: str | os.PathLike, tree: PyTree) -> None:
    """Writes the arrays of a pytree to one file by their logical names, such as `layers/wq`.

    The file appears under its name once it is whole. Typed keys are written as their words. NumPy's format has no
    bfloat16 and no 8-bit floats: in an `.npz` these become float32, which loses nothing. All processes of a run call
    this, process 0 writes, and all arrays are held in the memory of each host.

    Args:
      path: Ends in .npz or .safetensors; a file that is there is replaced.
      tree: Of `jax.Array` or `np.ndarray`.

    Raises:
      UsageError: The ending is another, or the file cannot be written.
    """
    path = Path(path).absolute()
    if path.suffix not in (".npz", ".safetensors"):
        raise UsageError(f"{path} must end in .npz or .safetensors")
    arrays = {name: _to_host(leaf) for name, leaf in flatten(tree).items()}
    if jax.process_index():
        return
    partial = path.with_name(f"{path.stem}.partial-{os.getpid()}{path.suffix}")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        if path.suffix == ".npz":
            native = {
                name: x if x.dtype.kind != "V" else x.astype(np.float32)
                for name, x in arrays.items()
            }
            np.savez(partial, **native)  # pyright: ignore[reportArgumentType]
        else:
            save_file(arrays, partial)
            partial.chmod(path.parent.stat().st_mode & 0o666)  # or only its owner could read it
        partial.replace(path)
    except (OSError, SafetensorError) as error:
        raise UsageError(f"{path} could not be written: {error}") from error
    finally:
        with contextlib.suppress(OSError):
            partial.unlink()


def _to_host(x: jax.Array | np.ndarray) -> np.ndarray:
    if jnp.issubdtype(x.dtype, jax.dtypes.prng_key):
        x = jax.random.key_data(x)
    if isinstance(x, jax.Array) and not x.is_fully_addressable:
        x = multihost_utils.process_allgather(x, tiled=True)
    return np.require(x, requirements="C")
