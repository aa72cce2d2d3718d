"""What keeps tests short: compiling is most of their time, and their programs run once, on next to nothing."""

import functools

import jax
import numpy as np

from jaxpar.lm.params import abstract

# LLVM alone works less; sharding, fusion, buffers and aliases are decided before it.
OPTIONS = {"xla_backend_optimization_level": 0, "xla_llvm_disable_expensive_passes": True}
# For the few programs that run for long: LLVM's work is then worth its time.
OPTIMISED = {"xla_backend_optimization_level": 3, "xla_llvm_disable_expensive_passes": False}

jit = functools.partial(jax.jit, compiler_options=OPTIONS)


def noisy_params(config, dtype=np.float32, std=0.3):
    """Parameters of a language model, none of them zero or one, drawn by NumPy.

    They are on one device, whatever mesh is set: `asarray` would take the mesh of the first caller,
    and compile a program for each shape.
    """
    rng = np.random.default_rng(0)

    def draw(path, leaf):
        weight = (path[-1].key == "scale") + std * rng.standard_normal(leaf.shape)
        return jax.device_put(np.asarray(weight, dtype))

    return jax.tree_util.tree_map_with_path(draw, abstract(config))
