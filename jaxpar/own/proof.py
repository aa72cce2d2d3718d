"""Is a layout of a model of one's own right? `jaxpar.verify`, with the axes that the two rules give."""

import math
from collections.abc import Callable, Mapping, Sequence

import jax
import jax.numpy as jnp
import numpy as np

from jaxpar.mesh import MeshSpec, make_mesh, use_mesh
from jaxpar.own.layout import lay_out
from jaxpar.own.model import Axes, OwnModel
from jaxpar.types import PyTree, UsageError
from jaxpar.verify import Layout, LayoutReport, Model, verify

__all__ = ["verify_own"]


def verify_own(
    model: OwnModel,
    batch: Callable[[int], PyTree],
    layouts: Sequence[Layout],
    *,
    given: Mapping[str, Axes] | None = None,
    dtypes: Sequence[str] = ("float32", "float64"),
    steps: int = 3,
    seed: int = 0,
    report: Callable[[LayoutReport], None] | None = None,
) -> list[LayoutReport]:
    """Compares layouts with one device: loss, every gradient leaf, `steps` optimizer steps, and collectives.

    The axes are those of the largest sizes of fsdp and of tensor among the layouts. Collections stay at their first
    value, floats of the batch and of the parameters are cast to each dtype, and every step has the same key.

    Args:
      model: What is verified. Adam's eps should be over the rounding of the gradients, as in `jaxpar.verify.Model`.
      batch: Step number -> pytree of host arrays, rows in front.
      layouts: Of data, fsdp and tensor.
      given: As in `lay_out`.
      dtypes: Of "float32" and "float64"; the model must compute in the dtype of its parameters.
      steps: Optimizer steps.
      seed: Of parameters and keys.
      report: Called with each row as it is made.

    Returns:
      A row a layout and dtype.
    """
    if not layouts:
        raise UsageError("there is no layout to verify; legal are such as Layout(MeshSpec(data=2, tensor=4)).")
    sizes = {name: math.lcm(*(getattr(layout.mesh, name) for layout in layouts)) for name in ("fsdp", "tensor")}
    sample = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), batch(0))
    spec = MeshSpec(**sizes) if math.prod(sizes.values()) <= jax.device_count() else layouts[0].mesh
    with use_mesh(make_mesh(spec, jax.devices()[: math.prod((spec.data, spec.fsdp, spec.tensor))])):
        laid = lay_out(model, sample, given).model
    state = jax.device_get(jax.jit(model.init)(jax.random.key(seed)))

    def in_dtype(dtype: str) -> Model:
        params, collections = jax.tree.map(lambda x: _cast(x, dtype), (state.params, state.collections))

        def loss(params, batch):
            batch = jax.tree.map(lambda x: _cast(x, dtype), batch)
            return laid.valued(params, collections, batch, jax.random.key(seed))[0]

        return Model(params, laid.param_axes(params), loss, laid.rule())

    axes = jax.tree.map(lambda x: ("batch", *(None,) * (x.ndim - 1)), sample)
    return verify(in_dtype, batch, axes, layouts, dtypes=dtypes, steps=steps, report=report)


def _cast(x: PyTree, dtype: str) -> PyTree:
    """Casts floats of numbers of 32 bits; others, as half precision, are part of what a model is."""
    return x.astype(dtype) if x.dtype in (np.float32, jnp.float64) else x
