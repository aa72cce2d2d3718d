"""What a language model's experts are used for: their loads on a batch, and the picture of a run."""

import pathlib

import jax
import numpy as np

from jaxpar.io import plot_experts
from jaxpar.lm import LMConfig
from jaxpar.lm.stages import stages
from jaxpar.nn import TokenInfo
from jaxpar.nn.experts import load
from jaxpar.nn.experts.sharded import chosen_experts
from jaxpar.types import PyTree


def expert_loads(model: LMConfig, params: PyTree, batch: dict[str, jax.Array]) -> np.ndarray:
    """Returns the load [L, E] of each expert on a batch, as `jaxpar.lm.loss` takes it, over the mean load."""
    stack = model.stack()

    @jax.jit
    def loads(params, batch):
        x = stack.end(stages(model).first(params, batch, None))
        info = TokenInfo(
            positions=batch.get("positions", batch.get("places")),
            segments=batch.get("segments"),
            places=batch.get("places"),
        )
        chosen = chosen_experts(stack, params, x, info=info)
        weights = batch.get("weights")

        def load_of(expert: jax.Array) -> jax.Array:
            return load(expert, model.experts.num_experts, weights=weights)

        return model.experts.num_experts * jax.vmap(load_of)(chosen)

    return np.asarray(loads(params, batch))


def draw(
    model: LMConfig, params: PyTree, batch: dict, metrics: pathlib.Path, out: pathlib.Path
) -> None:
    """Draws how evenly experts are used, now and while they were trained; all processes call it, and 0 writes."""
    loads = expert_loads(model, params, batch)
    if jax.process_index() == 0:
        plot_experts(metrics, loads, out)
