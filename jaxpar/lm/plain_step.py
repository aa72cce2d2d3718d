"""The step of a trainer as plainly as it can be written: the sequential twin of `jaxpar.lm.Trainer.step`."""

import functools

import jax
import jax.numpy as jnp
import optax

from jaxpar.lm.loss import losses
from jaxpar.lm.params import decay_mask
from jaxpar.lm.train import Trainer
from jaxpar.optim import learning_rate
from jaxpar.types import Array, PRNGKey, PyTree, UsageError

__all__ = ["plain_state", "plain_step"]


def plain_optimizer(trainer: Trainer) -> optax.GradientTransformation:
    """Returns the trainer's optimizer as a chain of optax alone, for AdamW; the trainer's own for other rules."""
    config = trainer.optimizer
    if config.name != "adamw":
        return trainer.make_optimizer().transformation()
    adamw = optax.adamw(
        learning_rate(config, trainer.num_steps),
        b1=config.b1,
        b2=config.b2,
        eps=config.eps,
        weight_decay=config.weight_decay,
        mask=decay_mask(trainer.model),
    )
    if not config.clip_norm:
        return adamw
    return optax.chain(optax.clip_by_global_norm(config.clip_norm), adamw)


def plain_state(trainer: Trainer, params: PyTree) -> dict[str, PyTree]:
    """Returns what `plain_step` starts from: parameters, the optimizer's state and the average, if one is kept."""
    average = {}
    if trainer.tuning.ema:
        average = params
    return {
        "params": params,
        "optimizer": plain_optimizer(trainer).init(params),
        "average": average,
    }


def plain_step(
    trainer: Trainer, key: PRNGKey, state: dict[str, PyTree], batch: dict[str, Array]
) -> tuple[Array, PyTree, dict[str, PyTree]]:
    """Makes one optimizer step: microbatches in a loop of Python, one gradient each, one update.

    It shares the model with `Trainer.step`, and neither its stages, schedules and accumulation, nor its
    keys, clipping, watching and averaging. Without a mesh it is what every layout has to equal.

    Args:
      trainer: Model, optimizer, number of microbatches and average; its schedule is not read.
      key: Consumed for dropout.
      state: As from `plain_state`.
      batch: As `jaxpar.lm.losses` takes it, rows in order.

    Returns:
      Loss, gradient of the parameters before clipping, next state.

    Raises:
      UsageError: For objectives, teachers and frozen parameters, which the twin does not have.
    """
    objective = trainer.objective.kind != "tokens" or trainer.teacher is not None
    if objective or trainer.tuning.freeze or trainer.tuning.layer_decay != 1:
        raise UsageError(
            "the plain step trains all of a model on tokens; leave out objective, teacher, freeze and layer_decay."
        )
    count = trainer.accumulate
    wide = jnp.promote_types(trainer.model.dtype, jnp.float32)
    weights = batch.get("weights", jnp.ones(batch["targets"].shape, wide))
    total = weights.sum()
    loss = jnp.zeros((), wide)
    gradient = jax.tree.map(jnp.zeros_like, state["params"])
    for number in range(count):
        # Row r of a batch belongs to microbatch r % count, whatever the mesh.
        part = jax.tree.map(lambda x, number=number: x[number::count], batch)
        part_key = None
        if _draws(trainer):
            part_key = key
            if count > 1:
                part_key = jax.random.fold_in(key, number)
        of_part = functools.partial(
            losses,
            batch=part,
            config=trainer.model,
            normaliser=total,
            share=1 / count,
            dropout_key=part_key,
        )
        (value, _), grads = jax.value_and_grad(of_part, has_aux=True)(state["params"])
        loss = loss + value
        gradient = jax.tree.map(jnp.add, gradient, grads)

    updates, moved = plain_optimizer(trainer).update(gradient, state["optimizer"], state["params"])
    params = optax.apply_updates(state["params"], updates)
    average = state["average"]
    if trainer.tuning.ema:
        decay = trainer.tuning.ema
        average = jax.tree.map(lambda old, new: decay * old + (1 - decay) * new, average, params)
    return loss, gradient, {"params": params, "optimizer": moved, "average": average}


def _draws(trainer: Trainer) -> bool:
    """Returns True if a step of the model draws numbers."""
    return bool(trainer.model.dropout or trainer.model.experts.failures)
