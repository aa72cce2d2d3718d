"""A model of one's own that is a module of flax's NNX: its state as variables, its random streams from keys."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax
from flax import nnx

from jaxpar.optim import Optimizer
from jaxpar.own.model import OwnModel
from jaxpar.types import PRNGKey, PyTree

__all__ = ["from_nnx"]


def from_nnx(
    make: Callable[[nnx.Rngs], nnx.Module],
    loss: Callable[[nnx.Module, PyTree], Any],  # a scalar, or (scalar, metrics)
    predict: Callable[[nnx.Module, PyTree], PyTree],
    optimizer: optax.GradientTransformation | Optimizer,
    collate: Callable[[list], PyTree],
) -> OwnModel:
    """Returns the model of a module's three functions, which take the module itself.

    Its `nnx.Param`s are trained; every other variable, such as batch statistics, is kept as the collection "state" as
    `loss` leaves it. Random streams are made anew from the key of each step, so a run resumes bit
    for bit. Held-out examples are judged by `loss` of the module in `eval()`, so without dropout
    and with kept statistics.

    Args:
      make: Random streams -> the module, as it is while training.
      loss: (module, batch) -> scalar, or (scalar, {name: scalar}).
      predict: (module, batch) -> pytree of arrays, rows in front; the module is in `eval()`.
      optimizer: As `OwnModel`'s.
      collate: As `OwnModel`'s.
    """
    graph, _, streams, _ = nnx.split(
        nnx.eval_shape(lambda: make(nnx.Rngs(0))), nnx.Param, nnx.RngState, ...
    )

    def init_variables(key: PRNGKey) -> PyTree:
        _, params, _, rest = nnx.split(make(nnx.Rngs(key)), nnx.Param, nnx.RngState, ...)
        rest = nnx.to_pure_dict(rest)
        return {"params": nnx.to_pure_dict(params)} | ({"state": rest} if rest else {})

    def merged(variables: PyTree, key: PRNGKey) -> nnx.Module:
        return nnx.merge(
            graph, variables["params"], _from_key(streams, key), variables.get("state", {})
        )

    def own_loss(variables: PyTree, batch: PyTree, key: PRNGKey) -> tuple:
        module = merged(variables, key)
        result = loss(module, batch)
        total, metrics = result if isinstance(result, tuple) and len(result) == 2 else (result, {})
        _, _, _, rest = nnx.split(module, nnx.Param, nnx.RngState, ...)
        return total, metrics | ({"state": nnx.to_pure_dict(rest)} if "state" in variables else {})

    def own_predict(variables: PyTree, batch: PyTree) -> PyTree:
        module = merged(variables, jax.random.key(0))
        module.eval()
        return predict(module, batch)

    def own_validation_loss(variables: PyTree, batch: PyTree) -> object:
        module = merged(variables, jax.random.key(0))
        module.eval()
        return loss(module, batch)

    return OwnModel(
        init_variables=init_variables,
        loss=own_loss,
        predict=own_predict,
        optimizer=optimizer,
        collate=collate,
        validation_loss=own_validation_loss,
    )


def _from_key(streams: PyTree, key: PRNGKey) -> PyTree:
    """Returns the state of random streams: the i-th starts from `fold_in(key, i)`, and all counts are 0."""
    leaves, structure = jax.tree.flatten(streams)
    is_key = [jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key) for leaf in leaves]
    made = [
        jax.random.fold_in(key, i) if keyed else jnp.zeros(leaf.shape, leaf.dtype)
        for i, (leaf, keyed) in enumerate(zip(leaves, is_key, strict=True))
    ]
    return jax.tree.unflatten(structure, made)
