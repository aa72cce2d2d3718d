"""What keeps tests short: compiling is most of their time, and their programs run once, on next to nothing."""

import functools

import jax
import jax.numpy as jnp
import numpy as np

from jaxpar.lm.params import abstract

# LLVM alone works less; sharding, fusion, buffers and aliases are decided before it.
OPTIONS = {"xla_backend_optimization_level": 0, "xla_llvm_disable_expensive_passes": True}
# For the few programs that run for long: LLVM's work is then worth its time.
OPTIMISED = {"xla_backend_optimization_level": 3, "xla_llvm_disable_expensive_passes": False}

jit = functools.partial(jax.jit, compiler_options=OPTIONS)


def to_jax(array):
    """Makes a NumPy array one of JAX's, without the program that `asarray` compiles for each shape."""
    if jax.sharding.get_mesh().empty:
        return jax.device_put(array)
    return jnp.asarray(array)  # the same on all devices of the mesh


def noisy_params(config, dtype=np.float32, std=0.3):
    """Parameters of a language model, none of them zero or one, drawn by NumPy: nothing to compile."""
    rng = np.random.default_rng(0)

    def draw(path, leaf):
        weight = (path[-1].key == "scale") + std * rng.standard_normal(leaf.shape)
        return to_jax(np.asarray(weight, dtype))

    return jax.tree_util.tree_map_with_path(draw, abstract(config))
