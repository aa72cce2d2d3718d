"""The language model as first, layer and last: what schedules of accumulation and pipelines are made of."""

import jax
import jax.numpy as jnp

from jaxpar.lm.config import LMConfig
from jaxpar.lm.loss import last, losses
from jaxpar.lm.model import embed_for_training, head
from jaxpar.mesh import gather
from jaxpar.nn.block import Stream
from jaxpar.nn.schedule import Stages
from jaxpar.types import PRNGKey, PyTree

__all__ = ["stages"]


def stages(config: LMConfig) -> Stages:
    """Returns the model in pieces; data are batches as `jaxpar.lm.losses` takes them.

    A microbatch's key is used for dropout alone: without dropout it may be None.
    """
    stack = config.stack()

    def context(x: Stream, data: dict, key: PRNGKey | None):
        context = stack.context(stack.end(x), _positions(data), data.get("segments"))
        return context._replace(places=data.get("places"), key=_dropped(key, config))

    def first(params: PyTree, data: dict, key: PRNGKey | None):
        x = embed_for_training(params, data["tokens"], _positions(data), config, _dropped(key, config))
        return stack.begin(x)

    def layer(params: PyTree, index: int, x: Stream, data: dict, key: PRNGKey | None):
        x, _, aux = stack.layer(params, index, x, context(x, data, key))
        return x, aux

    def end(params: PyTree, stream: Stream, data: dict, total: jax.Array):
        x = stack.end(stream)
        rules = stack.context(x).rules
        x = gather(stack.norm.apply(params["final_norm"], x), rules.outside, rules.inside)
        return last(x, head(params), data, config, total)

    def whole(params: PyTree, data: dict, key: PRNGKey | None, total: jax.Array, share: float):
        return losses(params, data, config, normaliser=total, share=share, dropout_key=_dropped(key, config))

    hold = stack.hold if stack.period == 1 else stack.unstacked
    return Stages(_total, hold, first, layer, end, whole, config.num_layers)


def _positions(data: dict) -> jax.Array:
    shape = data["tokens"].shape
    return data.get("positions", data.get("places", jnp.broadcast_to(jnp.arange(shape[1]), shape)))


def _total(batch: dict) -> jax.Array:
    """Tokens of the batch, or the sum of their weights."""
    weights = batch.get("weights")
    return jnp.float32(batch["targets"].size) if weights is None else weights.sum()


def _dropped(key: PRNGKey | None, config: LMConfig) -> PRNGKey | None:
    return key if config.dropout else None
