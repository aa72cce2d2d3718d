"""Is a layout of a model of one's own right? `jaxpar.verify`, with the axes that the two rules give."""

import functools
import itertools
from collections.abc import Callable, Mapping, Sequence

import jax
import jax.numpy as jnp
import numpy as np

from jaxpar._older_fields import newer_arguments
from jaxpar.aot.verify import Layout, LayoutReport, Model, VerifyOptions, verify
from jaxpar.aot.verify.run import OLDER_OPTIONS
from jaxpar.mesh import make_mesh, rules_from, use_mesh
from jaxpar.own.layout import lay_out
from jaxpar.own.model import Axes, OwnModel
from jaxpar.transfers import Transfer, allowed_by_axes
from jaxpar.types import PyTree, UsageError

__all__ = ["verify_own"]


def verify_own(
    model: OwnModel,
    batch: Callable[[int], PyTree],
    layouts: Sequence[Layout],
    *,
    given: Mapping[str, Axes] | None = None,
    allow: Sequence[str] = (),
    seed: int = 0,
    options: VerifyOptions | None = None,
    **older: object,
) -> list[LayoutReport]:
    """Compares layouts with one device: loss, every gradient leaf, optimizer steps; judges what they send.

    They may send what `allowed_transfers` says. Each layout has the axes that the two rules give on its
    own mesh. Neighbours that differ along data alone are compared with one program of one device.
    Collections stay at their first value. Floats of the batch and of the parameters are cast to each
    dtype, and every step has the same key.

    Args:
      model: What is verified. Adam's eps should be over the rounding of the gradients, as in `jaxpar.verify.Model`.
      batch: Step number -> pytree of host arrays, rows in front.
      layouts: Of data, fsdp and tensor.
      given: As in `lay_out`.
      allow: Transfers that are not judged, by kind and mesh axis, such as "gather over tensor".
      seed: Number that parameters and keys are made from.
      options: Dtypes, in which the model must compute, steps, topology and report; None means the
        defaults.
      **older: Fields of `options`, which were arguments; accepted until the first release.

    Returns:
      A row a layout and dtype, and one for the topology.

    Raises:
      TypeError: If a keyword is unknown.
      UsageError: If there is no layout; as `lay_out` and `jaxpar.verify.verify`.
    """
    groups = {"options": options or VerifyOptions()}
    how: VerifyOptions = newer_arguments("verify_own", OLDER_OPTIONS, groups, older)["options"]
    if not layouts:
        raise UsageError(
            "there is no layout to verify; legal are such as Layout(MeshSpec(data=2, tensor=4))."
        )
    sample = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), batch(0))
    batch_axes = jax.tree.map(lambda x: ("batch", *(None,) * (len(x.shape) - 1)), sample)
    state = jax.device_get(jax.jit(model.init)(jax.random.key(seed)))

    def in_dtype(laid: OwnModel, dtype: str) -> Model:
        params, collections = jax.tree.map(
            lambda x: _cast(x, dtype), (state.params, state.collections)
        )

        def loss(params, batch):
            batch = jax.tree.map(lambda x: _cast(x, dtype), batch)
            return laid.valued(params, collections, batch, jax.random.key(seed))[0]

        return Model(params, laid.param_axes(params), loss, laid.rule())

    rows: list[LayoutReport] = []
    for _, same in itertools.groupby(
        layouts, lambda layout: (layout.mesh.fsdp, layout.mesh.tensor)
    ):
        group = list(same)
        mesh = make_mesh(group[0].mesh, jax.devices()[: group[0].num_devices])
        with use_mesh(mesh, rules_from(layout=group[0].name)):
            laid = lay_out(model, sample, given).model
        axes = laid.param_axes(state.params)
        declared = functools.partial(allowed_transfers, state.params, axes, batch_axes)
        rows += verify(
            functools.partial(in_dtype, laid),
            batch,
            batch_axes,
            group,
            declared=declared,
            allow=allow,
            options=how,
        )
    return rows


def allowed_transfers(
    params: PyTree, axes: PyTree, batch_axes: PyTree, layout: Layout
) -> list[Transfer]:
    """Returns what a layout may send between devices, on the ambient mesh.

    That is what `jaxpar.verify.allowed_by_axes` says: each parameter gathered at most twice,
    activations never. GSPMD also puts the gradient of a look-up, and of what is split along two axes at
    once, where it likes and sends it on. That makes exchanges over any axis, of at most two float64 of
    each parameter. Were activations exchanged, they would be more.
    """
    size = 2 * 8 * sum(leaf.size for leaf in jax.tree.leaves(params))
    sizes = layout.mesh.sizes(layout.num_devices)
    over = [axis for axis in ("data", "fsdp", "inner", "tensor") if sizes[axis] > 1]
    moves = [Transfer("exchange", (axis,), 10**12, size, "gradients") for axis in over]
    wide = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, np.float64), params)
    return [*allowed_by_axes(wide, axes, batch_axes), *moves]


def _cast(x: PyTree, dtype: str) -> PyTree:
    """Casts floats of numbers of 32 bits; others, as half precision, are part of what a model is."""
    return x.astype(dtype) if x.dtype in (np.float32, jnp.float64) else x
