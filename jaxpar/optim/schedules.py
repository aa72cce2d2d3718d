"""Learning rates: of a configuration by the number of the step, or of traced numbers that are swept."""

import jax.numpy as jnp
import optax

from jaxpar.optim.config import OptimizerConfig
from jaxpar.types import Array

__all__ = ["annealed", "in_widest_float", "learning_rate"]


def learning_rate(config: OptimizerConfig, num_steps: int) -> optax.Schedule:
    """Returns `step -> learning rate` for a run of `num_steps` steps; float64 [] where that is enabled."""
    peak, end = config.learning_rate, config.learning_rate * config.final_ratio
    steps = max(1, (config.decay_steps or num_steps) - config.warmup_steps)
    if config.schedule == "constant":
        after = optax.constant_schedule(peak)
    elif config.schedule == "cosine":
        after = optax.cosine_decay_schedule(peak, steps, config.final_ratio)
    elif config.schedule == "linear":
        after = optax.linear_schedule(peak, end, steps)
    else:
        fall = max(1, steps // 5)
        after = optax.linear_schedule(peak, end, fall, transition_begin=steps - fall)
    if config.warmup_steps:
        start = (
            peak / config.warmup_steps
            if config.warmup_start is None
            else peak * config.warmup_start
        )
        rise = optax.linear_schedule(start, peak, config.warmup_steps)
        after = optax.join_schedules([rise, after], [config.warmup_steps])
    return in_widest_float(after)


def annealed(rate: Array, num_steps: Array, step: Array) -> Array:
    """Returns the rate at a step, falling in a line to 0 over `num_steps`, or always `rate` if that is 0.

    All three are scalars that may be traced, and so swept by `vmap`.
    """
    left = jnp.maximum(1 - step / jnp.maximum(num_steps, 1), 0)
    return rate * jnp.where(num_steps > 0, left, 1.0)


def in_widest_float(schedule: optax.Schedule) -> optax.Schedule:
    """Returns the schedule computed in float64 where that is enabled: optax's take a count of int32 to float32."""
    return lambda step: schedule(jnp.asarray(step, float))
