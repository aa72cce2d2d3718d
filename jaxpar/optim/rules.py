"""From a configuration to an optimizer: each name's rule."""

from collections.abc import Callable

import jax
import optax
from optax.contrib import MuonDimensionNumbers

from jaxpar.optim.config import OptimizerConfig
from jaxpar.optim.masks import matrices, muon_dimensions
from jaxpar.optim.muon import scale_by_whole_muon
from jaxpar.optim.schedules import learning_rate
from jaxpar.optim.update import Optimizer
from jaxpar.types import PyTree, UsageError

__all__ = ["make_optimizer"]


def make_optimizer(
    config: OptimizerConfig,
    num_steps: int | None = None,
    *,
    axes: PyTree = None,
    decays: PyTree = matrices,
    scales: Callable[[PyTree], PyTree] | None = None,
) -> Optimizer:
    """Returns the optimizer of a configuration: `init(params)`, `update(grads, state, params)`.

    Args:
      config: Its rule and numbers.
      num_steps: Length of the run, for the schedule; None where every update is given its rate.
      axes: Logical axes of each parameter, which Muon needs to find stacks of matrices.
      decays: What decays: bools in the structure of the parameters, or a function of the parameters that returns them.
        Where these are bools, Muon takes no other leaf.
      scales: What the steps of each parameter are multiplied by, as `Optimizer.scales`.

    Raises:
      UsageError: Where Muon is asked for and no axes name a stack of matrices.
    """
    b1, b2, eps = config.b1, config.b2, config.eps
    if config.name == "adamw":
        rule = optax.scale_by_adam(b1, b2, eps)
    elif config.name == "radam":
        rule = optax.scale_by_radam(b1, b2, eps)
    elif config.name == "rmsprop":
        rule = optax.scale_by_rms(b2, eps)
    else:
        rule = _muon(config, axes, decays)
    schedule = None if num_steps is None else learning_rate(config, num_steps)
    # Muon's decay comes last, apart: what optax's Muon hands to Adam it would decay whole, norms and biases too.
    last = config.name == "muon"
    return Optimizer(rule, schedule, config.clip_norm, config.weight_decay, decays, decay_last=last, scales=scales,
                     elementwise=not last)  # fmt: skip


def _muon(config: OptimizerConfig, axes: PyTree, decays: PyTree) -> optax.GradientTransformation:
    """Returns Muon on stacks of matrices, Adam on all else.

    Muon's updates are rescaled to AdamW's root mean square of 0.2 (arXiv:2502.16982, eq. 4), so that one learning rate
    serves both. Its Newton-Schulz products are taken in the gradients' dtype.
    """

    def is_axes(x):
        return isinstance(x, tuple)

    weights = jax.tree.map(lambda _: True, axes, is_leaf=is_axes) if callable(decays) else decays
    sides = muon_dimensions(axes, weights) if axes is not None else None
    if not jax.tree.leaves(sides):
        raise UsageError(
            "optimizer.name='muon' finds no stack of matrices, whose logical axes begin with 'layers' and have an "
            "'embed' among two or more others; legal are adamw, radam, rmsprop."
        )
    labels = jax.tree.map(
        lambda numbers: "adam" if numbers is None else "muon",
        sides,
        is_leaf=lambda x: x is None or isinstance(x, MuonDimensionNumbers),
    )
    whole = scale_by_whole_muon(axes, sides, config.b1, config.eps)
    adam = optax.scale_by_adam(config.b1, config.b2, config.eps, nesterov=True)
    return optax.partition({"muon": whole, "adam": adam}, labels)
