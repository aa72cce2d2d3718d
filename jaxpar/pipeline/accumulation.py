"""How the gradient of a batch is made of its parts: a model as stages, and schedules over microbatches.

A schedule takes a model as `Stages` and a batch, and returns loss, gradient and what was told. Accumulating one part
after the other is one of them; a pipeline, which needs the stages apart, is another.

Example:
    import jax
    import jax.numpy as jnp

    from jaxpar.lm import LMConfig, init
    from jaxpar.lm.stages import stages
    from jaxpar.pipeline.accumulation import InTurn, parts_of

    def last_first(stages, params, batch, key, count):  # a schedule of your own: the parts backwards, in a Python loop
        total = stages.total(batch)
        grad = jax.grad(lambda p, part: stages.whole(p, part, None, total, 1 / count)[0])
        parts = parts_of(batch, count)
        grads = [grad(params, jax.tree.map(lambda x: x[m], parts)) for m in reversed(range(count))]
        return jax.tree.map(lambda *g: sum(g), *grads)

    config = LMConfig(vocab_size=8, num_layers=1, embed_dim=8, dtype="float32")
    params, tokens = init(jax.random.key(0), config), jnp.arange(12).reshape(4, 3) % 8
    batch = {"tokens": tokens, "targets": tokens}
    (_, _), want = InTurn()(stages(config), params, batch, None, 2)
    got = last_first(stages(config), params, batch, None, 2)
    assert jax.tree.all(jax.tree.map(lambda a, b: jnp.allclose(a, b, atol=1e-6), got, want))
"""

import dataclasses
from collections.abc import Callable
from typing import Any, NamedTuple, Protocol

import jax
import jax.numpy as jnp

from jaxpar.mesh import constrain
from jaxpar.nn.auxiliary import Aux, both, over_all, over_parts
from jaxpar.types import Array, PRNGKey, PyTree, UsageError

__all__ = ["Accumulation", "Head", "InTurn", "Stages", "key_of_part", "layer_by_layer", "parts_of"]


class Stages(NamedTuple):
    """A model in the pieces that a schedule places; `data` is one microbatch, which every piece reads for itself.

    So only the residual stream goes from piece to piece, and positions, documents and targets are read where they are
    needed, by the number of the microbatch.

    Layers go by turns: a turn is one layer, or of a hybrid one layer of each of its mixers.

    Attributes:
      total: batch -> what the sums over its tokens are divided by, of the whole batch.
      hold: params -> params as a step holds them, those of N turns stacked under "layers", [N, ...]; made once.
      release: (params, gradient of what `hold` returned) -> gradient of params; in float32 at least if that is.
      first: (params, data, key) -> x, what enters the first layer: one or more arrays [B, T, D].
      layer: (a turn's params, its number, x, data, key) -> (x, what it told).
      last: (params, x, data, total) -> (loss, what was told).
      whole: (params, data, key, total, share) -> (loss, what was told): all of them, as fast as one device can.
      remat: function of a turn -> the same, which keeps for its backward pass what the model says.
      products: () -> of a turn's params, which arrays `jaxpar.nn.linear.contract` multiplies and nothing else reads.
      num_turns: N.
      head: The last product and its loss in pieces, where the rows of the vocabulary may be split over stages; or None.
      axes: () -> logical axes of a turn's params, where a schedule may gather them by itself; or None.
      fixed: params -> of each array of the layers that `hold` returns, in the order of their
        leaves, whether it has no gradient; None where all have one.
    """

    total: Callable[[PyTree], Array]
    hold: Callable[[PyTree], PyTree]
    release: Callable[[PyTree, PyTree], PyTree]
    first: Callable[..., PyTree]
    layer: Callable[..., tuple[PyTree, Aux]]
    last: Callable[..., tuple[Array, Aux]]
    whole: Callable[..., tuple[Array, Aux]]
    remat: Callable[[Callable], Callable]
    products: Callable[[], PyTree]
    num_turns: int
    head: "Head | None" = None
    axes: Callable[[], PyTree] | None = None
    fixed: Callable[[PyTree], tuple[bool, ...]] | None = None


class Head(NamedTuple):
    """A head X W^T and the cross entropy of its softmax, as a schedule that splits the rows of W needs them.

    Attributes:
      rows: The name of W among the parameters, [V, D].
      reads: Names of the parameters that `ready` reads.
      ready: (params, x) -> X, of what leaves the last layer, [B, T, D].
      targets: (data, total) -> targets int [B, T] and what each token weighs [B, T].
      told: Of z -> what is told of it.
      z_loss: z is this times the weighted sum of squares of the log normaliser.
      smoothing: Share of a target that is spread over all V rows alike.
    """

    rows: str
    reads: tuple[str, ...]
    ready: Callable[[PyTree, PyTree], Array]
    targets: Callable[[PyTree, Array], tuple[Array, Array]]
    told: Callable[[Array], Aux]
    z_loss: float
    smoothing: float = 0.0


class Accumulation(Protocol):
    """What makes a gradient of a batch."""

    def __call__(
        self, stages: Stages, params: PyTree, batch: PyTree, key: PRNGKey | None, count: int
    ) -> tuple[tuple[Array, Aux], PyTree]:
        """Returns ((loss, what was told), gradient) of the batch, cut into `count` microbatches; consumes `key`."""
        ...


def parts_of(batch: PyTree, count: int) -> PyTree:
    """Cuts a batch of arrays [B, ...] into microbatches [M, B / M, ...], to be read by number.

    Row r goes to microbatch r % M: every device then finds its share of each at home.

    Raises:
      UsageError: If M does not divide the rows.
    """
    rows = jax.tree.leaves(batch)[0].shape[0]
    if rows % count:
        raise UsageError(
            f"train.accumulate={count} does not divide the batch of {rows} rows; "
            f"nearest is {next(n for n in range(count, 0, -1) if rows % n == 0)}."
        )

    def cut(x):
        parts = x.reshape(rows // count, count, *x.shape[1:]).swapaxes(0, 1)
        # A sequence stays split as it is: named None, it would be gathered.
        return constrain(parts, None, "batch", name="a part of the batch", is_rest_open=True)

    return jax.tree.map(cut, batch)


def key_of_part(key: PRNGKey | None, index: int | Array, count: int) -> PRNGKey | None:
    """Returns the key of microbatch `index` of `count`: the batch's own where there is one alone, and None of None."""
    return key if key is None or count == 1 else jax.random.fold_in(key, index)


@dataclasses.dataclass(frozen=True)
class InTurn:
    """One microbatch after the other, each of its gradients added to the sum: equal to the whole batch at once."""

    def __call__(
        self, stages: Stages, params: PyTree, batch: PyTree, key: PRNGKey | None, count: int
    ) -> tuple[tuple[Array, Aux], PyTree]:
        """Returns ((loss, what was told), gradient); microbatch m draws with the key folded with m."""
        total = stages.total(batch)
        gradient = jax.value_and_grad(stages.whole, has_aux=True)
        if count == 1:
            return gradient(params, batch, key, total, 1.0)
        parts = parts_of(batch, count)

        def add(sums, index_and_part):
            index, part = index_and_part
            (value, aux), grads = gradient(
                params, part, key_of_part(key, index, count), total, 1 / count
            )
            return jax.tree.map(jnp.add, sums, (value, grads)), aux

        first = jax.tree.leaves(params)[0]
        zero = (jnp.zeros((), first.dtype), jax.tree.map(jnp.zeros_like, params))
        (value, grads), told = jax.lax.scan(add, zero, (jnp.arange(count), parts))
        return (value, over_parts(told)), grads


def layer_by_layer(stages: Stages) -> Callable[..., tuple[Array, Aux]]:
    """Returns what `stages.whole` computes, as first, each layer in turn, and last: its plain form."""

    def loss(params: PyTree, data: PyTree, key: PRNGKey | None, total: Array, share: float = 1.0):
        params = stages.hold(params)
        x, told = stages.first(params, data, key), []
        for index in range(stages.num_turns):
            layer = jax.tree.map(lambda leaf, index=index: leaf[index], params["layers"])
            x, aux = stages.layer(layer, index, x, data, key)
            told.append(aux)
        aux = over_all(told)
        value, rest = stages.last(params, x, data, total)
        extra: Any = sum(aux.losses.values())
        return value + share * extra, both(aux, rest)

    return loss
