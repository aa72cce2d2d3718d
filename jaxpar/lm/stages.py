"""The language model as first, layer and last: what schedules of accumulation and pipelines are made of."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np

from jaxpar.lm.config import LMConfig
from jaxpar.lm.loss import last, losses, told_of
from jaxpar.lm.model import embed_for_training, head
from jaxpar.lm.text.batches import normaliser_of, token_info, valid_batch, valid_ids
from jaxpar.mesh import gather
from jaxpar.nn.auxiliary import over_all
from jaxpar.nn.block import Stream
from jaxpar.nn.leaf import Leaf
from jaxpar.pipeline.accumulation import Head, Stages
from jaxpar.types import PRNGKey, PyTree, UsageError

__all__ = ["stages"]


def stages(config: LMConfig, smoothing: float = 0.0) -> Stages:
    """Returns the model in pieces; data are batches as `jaxpar.lm.losses` takes them.

    A microbatch's key is used for dropout and experts that fail: without both it may be None. `smoothing` is as in
    `jaxpar.lm.losses`.
    """
    stack = config.stack()

    def context(x: Stream, data: dict, key: PRNGKey | None):
        info = token_info(valid_batch(data, config))._replace(positions=_positions(data))
        return stack.context(stack.end(x), info, key=_dropped(key, config))

    def first(params: PyTree, data: dict, key: PRNGKey | None):
        tokens = valid_ids(data["tokens"], config.vocab_size)
        x = embed_for_training(params, tokens, _positions(data), config, _dropped(key, config))
        return stack.begin(x)

    def layer(params: PyTree, index: int | jax.Array, x: Stream, data: dict, key: PRNGKey | None):
        _refuse_joint_loss(config)
        told = []
        for place, mixer in enumerate(stack.mixers):
            one, number = (
                (params, index)
                if stack.period == 1
                else (params[str(place)], index * stack.period + place)
            )
            x, _, aux = stack.layer(one, number, x, context(x, data, key), mixer=mixer)
            told.append(aux)
        return x, over_all(told)

    def ready(params: PyTree, stream: Stream):
        x = stack.end(stream)
        rules = stack.context(x).rules
        return gather(stack.norm.apply(params["final_norm"], x), rules.outside, rules.inside)

    def end(params: PyTree, stream: Stream, data: dict, total: jax.Array):
        return last(ready(params, stream), head(params), data, config, total, smoothing)

    def targets(data: dict, total: jax.Array):
        valid = valid_batch(data, config)
        return valid["targets"], valid["weights"] / total

    def whole(params: PyTree, data: dict, key: PRNGKey | None, total: jax.Array, share: float):
        options = {"share": share, "dropout_key": _dropped(key, config), "smoothing": smoothing}
        return losses(params, data, config, normaliser=total, **options)

    def release(params: PyTree, gradient: PyTree):
        wide = dataclasses.replace(stack, dtype=str(jnp.promote_types(config.dtype, jnp.float32)))
        held, pull = jax.vjp(wide.hold, params)
        return pull(jax.tree.map(_gradient_like, gradient, held))[0]

    def products():
        leaves = stack.leaves()["layers"]
        return jax.tree.map(
            lambda leaf: leaf.is_product, leaves, is_leaf=lambda leaf: isinstance(leaf, Leaf)
        )

    def turn_axes():
        leaves = stack.leaves()["layers"]
        return jax.tree.map(
            lambda leaf: leaf.axes[1:], leaves, is_leaf=lambda leaf: isinstance(leaf, Leaf)
        )

    turns = config.num_layers // stack.period
    split_head = Head(
        "embedding" if config.embedding.tied else "head",
        ("final_norm",),
        ready,
        targets,
        lambda z: told_of(z, config),
        config.losses.z_loss,
        smoothing,
    )
    total_of = functools.partial(normaliser_of, config=config)
    return Stages(
        total=total_of,
        hold=stack.hold,
        release=release,
        first=first,
        layer=layer,
        last=end,
        whole=whole,
        remat=stack.remat_of,
        products=products,
        num_turns=turns,
        head=split_head,
        axes=turn_axes,
    )


def _gradient_like(gradient: jax.Array, x: jax.Array) -> jax.Array | np.ndarray:
    """Returns a gradient as the backward pass of `x` takes it: of whole numbers there is none."""
    if jnp.issubdtype(x.dtype, jnp.inexact):
        return gradient.astype(x.dtype)
    return np.zeros(x.shape, jax.dtypes.float0)


def _positions(data: dict) -> jax.Array:
    shape = data["tokens"].shape
    return data.get("positions", data.get("places", jnp.broadcast_to(jnp.arange(shape[1]), shape)))


def _refuse_joint_loss(config: LMConfig) -> None:
    """Raises `UsageError` for a loss of all layers together: one layer alone has no gradient."""
    if (
        config.experts.num_experts
        and config.losses.balance_loss
        and config.losses.balance_layers == "concatenated"
    ):
        raise UsageError(
            "model.losses.balance_layers=concatenated: a pipeline needs the gradient of one layer before "
            "it knows the loads of the others; expected summed, or pipeline=none."
        )


def _dropped(key: PRNGKey | None, config: LMConfig) -> PRNGKey | None:
    return key if config.dropout or config.experts.failures else None
