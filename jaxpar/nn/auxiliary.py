"""What a layer tells besides its output: losses to be added and metrics to be shown, with the rules they are merged by.

A loss of a layer is a scalar over all devices' tokens of one microbatch, times its weight. It is summed over layers and
averaged over microbatches. A metric says itself how it is merged: `Mean`, `Sum`, `Max` or `Min`.

Example:
    import jax
    import jax.numpy as jnp

    from jaxpar.nn.auxiliary import Aux, Max, Mean, over_layers

    def routed(x):  # a layer that tells how unevenly it works, and adds a hundredth of it to the loss
        load = jnp.square(x).mean((0, 1))
        uneven = load.max() / load.mean()
        return 2 * x, Aux({"balance": 0.01 * uneven}, {"uneven": Max(uneven), "load": Mean.of(load)})

    x, told = jax.lax.scan(lambda x, _: routed(x), jnp.ones((2, 3, 4)), length=5)
    aux = over_layers(told)
    assert jnp.allclose(aux.losses["balance"], 5 * 0.01)
    assert aux.metrics["uneven"].value == 1 and aux.metrics["load"].value == (1 + 4 + 16 + 64 + 256) / 5
"""

import functools
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from jaxpar.types import Array, Info, largest

__all__ = [
    "NOTHING",
    "Aux",
    "Bilinear",
    "Max",
    "Mean",
    "Metric",
    "Min",
    "Sum",
    "both",
    "over_all",
    "over_layers",
    "over_parts",
    "scalars",
    "stacked",
    "with_scalar_losses",
]


class Mean(NamedTuple):
    """A mean, as a sum and how many it is of."""

    total: Array
    count: Array  # pyright: ignore[reportIncompatibleMethodOverride]  # a field: tuple.count is not used

    @classmethod
    def of(cls, x: Array) -> "Mean":
        """Returns the mean of all entries of an array."""
        return cls(jnp.sum(x), jnp.asarray(x.size, x.dtype))

    def merged(self) -> "Mean":
        """Merges along the first axis."""
        return Mean(self.total.sum(0), self.count.sum(0))

    @property
    def value(self) -> Array:
        """The mean; 0 of nothing."""
        return jnp.where(self.count > 0, self.total / jnp.where(self.count > 0, self.count, 1), 0)


class Sum(NamedTuple):
    """A sum, of shares of a whole: over microbatches, what each holds of it."""

    value: Array

    def merged(self) -> "Sum":
        """Merges along the first axis."""
        return Sum(self.value.sum(0))


class Max(NamedTuple):
    """A largest value; infinity where one is NaN."""

    value: Array

    def merged(self) -> "Max":
        """Merges along the first axis."""
        return Max(largest(self.value, 0))


class Min(NamedTuple):
    """A smallest value; minus infinity where one is NaN."""

    value: Array

    def merged(self) -> "Min":
        """Merges along the first axis."""
        return Min(-largest(-self.value, 0))


Metric = Mean | Sum | Max | Min


class Bilinear(NamedTuple):
    """A loss of all layers together, sum_e a_e b_e of two means over layers.

    It has no value before the last layer. `with_scalar_losses` makes a scalar of it.

    Attributes:
      a: Sum over layers [E].
      b: Sum over layers [E].
      num_layers: Number of layers, as an array.
    """

    a: Array
    b: Array
    num_layers: Array

    @property
    def value(self) -> Array:
        """The loss."""
        return jnp.sum((self.a / self.num_layers) * (self.b / self.num_layers))


class Aux(NamedTuple):
    """What a layer, a stack or a loss tells.

    Attributes:
      losses: By name, scalars to be added to the loss, or `Bilinear` until the last layer.
      metrics: By name.
    """

    losses: dict[str, Any] = {}
    metrics: dict[str, Metric] = {}


NOTHING = Aux()


def stacked(told: Sequence[Aux]) -> Aux:
    """Stacks what several told along a new first axis, as `over_layers` and `over_parts` take it."""
    return jax.tree.map(lambda *x: jnp.stack(x), *told)


def over_layers(told: Aux) -> Aux:
    """Merges what layers told, stacked along the first axis: losses are summed."""
    return Aux(jax.tree.map(lambda x: x.sum(0), told.losses), _merged(told))


def over_all(told: Sequence[Aux]) -> Aux:
    """Merges what several layers told, of which some may tell what others do not; losses are summed."""
    kinds: dict[Any, list[Aux]] = {}
    for aux in told:
        kinds.setdefault(jax.tree.structure(aux), []).append(aux)
    return functools.reduce(both, [over_layers(stacked(same)) for same in kinds.values()])


def over_parts(told: Aux) -> Aux:
    """Merges what microbatches of one size told, stacked along the first axis: losses are averaged."""
    return Aux({name: x.mean(0) for name, x in told.losses.items()}, _merged(told))


def both(a: Aux, b: Aux) -> Aux:
    """Merges what two parts of one layer told; what both name is merged as over layers."""
    names = a.losses.keys() & b.losses.keys()
    sums = {name: jax.tree.map(jnp.add, a.losses[name], b.losses[name]) for name in names}
    losses = a.losses | b.losses | sums
    pairs = {name: (a.metrics[name], x) for name, x in b.metrics.items() if name in a.metrics}
    stacked: Any = {
        name: jax.tree.map(lambda *x: jnp.stack(x), *pair).merged() for name, pair in pairs.items()
    }
    return Aux(losses, a.metrics | b.metrics | stacked)


def with_scalar_losses(aux: Aux) -> Aux:
    """Returns losses and metrics of all layers, with a scalar for each `Bilinear` loss."""
    joint = {name: loss.value for name, loss in aux.losses.items() if isinstance(loss, Bilinear)}
    return Aux(aux.losses | joint, aux.metrics)


def scalars(aux: Aux) -> Info:
    """Returns all losses and metrics as scalars by name."""
    return aux.losses | {name: metric.value for name, metric in aux.metrics.items()}


def _merged(told: Aux) -> dict[str, Metric]:
    return {name: metric.merged() for name, metric in told.metrics.items()}
