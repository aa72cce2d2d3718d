"""One turn of layers as a pipeline runs it: forward, what is kept, and both stages of its backward pass."""

import contextlib
import dataclasses
import itertools
from collections.abc import Callable
from typing import Any

import jax
import jax.extend.core as jex
import jax.numpy as jnp
from jax.typing import DTypeLike

from jaxpar.mesh import whole_weights
from jaxpar.nn.auxiliary import Aux
from jaxpar.nn.linear import Deferred
from jaxpar.pipeline.accumulation import Stages
from jaxpar.pipeline.two_stage import Product, find_products, put_together, take_apart
from jaxpar.types import Array, PRNGKey, PyTree


@dataclasses.dataclass(frozen=True)
class Where:
    """What a turn reads beside its parameters and the residual stream: its number, its microbatch and its key."""

    index: Array
    data: PyTree
    key: PRNGKey | None


@dataclasses.dataclass(frozen=True)
class Turn:
    """How a turn is run; of shapes alone, so that all tasks of a program agree on what is kept.

    Attributes:
      stages: The model.
      products: Of each array of a turn's parameters.
      fixed: Of each array of a turn's parameters, whether it has no gradient.
      pull: The structure of the backward pass.
      known: Of each array that the backward pass reads, its place among parameters, number, data and key; or -1.
      places: Of each array that it reads, its place among those kept; or -1. Arrays read twice are kept once.
      fresh: The same among what `again` makes.
      kept: Shapes of what is kept of a turn's forward pass.
      again: (parameters, number, data, key as one list) -> what the backward pass reads that does not depend on the
        input, as a gathered weight or a mask: it is made again.
      told: Shapes of what a turn tells.
      is_whole: Whether its weights come gathered.
    """

    stages: Stages
    products: tuple[Product | None, ...]
    fixed: tuple[bool, ...]
    pull: Any
    known: tuple[int, ...]
    places: tuple[int, ...]
    fresh: tuple[int, ...]
    kept: tuple[jax.ShapeDtypeStruct, ...]
    again: Callable[..., list[Array]]
    told: Aux
    is_whole: bool = False

    def forward(self, params: PyTree, x: PyTree, where: Where) -> tuple[PyTree, list[Array], Aux]:
        """Returns the residual stream, what is kept for the backward pass, and what was told."""
        with _of_weights(self.is_whole):
            (x, _), pull, told = _differentiated(
                self.stages, self.products, self.fixed, params, x, where
            )
        leaves = jax.tree.leaves(pull)
        kept: list[Any] = [None] * len(self.kept)
        for leaf, place in zip(leaves, self.places, strict=True):
            if place >= 0:
                kept[place] = _bits(leaf)
        return x, kept, told

    def backward(
        self, params: PyTree, kept: list[Array], where: Where, g: PyTree, share: float
    ) -> tuple[PyTree, list, list[Array]]:
        """Returns the gradient of the stream before, the factors of those put off, and all other gradients.

        Arrays that are fixed have none.

        `share` is how much the losses of the turn itself count.
        """
        known = _known(params, where)
        again, leaves = self.again(*known), []
        for place, here, made in zip(self.places, self.known, self.fresh, strict=True):
            leaf = (
                known[here]
                if here >= 0
                else again[made]
                if made >= 0
                else _keys(kept[place], self.kept[place])
            )
            leaves.append(leaf)
        pull = jax.tree.unflatten(self.pull, leaves)
        extra = jnp.asarray(share, self.told_dtype)
        with _of_weights(self.is_whole):
            pairs, rest, g = pull((g, extra))
        return g, pairs, rest

    @property
    def summed(self) -> tuple[Product | None, ...]:
        """Of each array that has a gradient, how it is multiplied."""
        pairs = zip(self.products, self.fixed, strict=True)
        return tuple(product for product, is_fixed in pairs if not is_fixed)

    @property
    def told_dtype(self) -> DTypeLike:
        """Dtype of the sum of a turn's losses."""
        return jnp.result_type(jnp.float32, *(loss.dtype for loss in self.told.losses.values()))

    def gradients(self, params: PyTree, pairs: list) -> list[Array]:
        """Returns the gradients that were put off, in turn."""
        weights, _ = take_apart(self.products, jax.tree.leaves(params))
        products = [product for product in self.products if product]
        return [
            product.gradient(weight, pair)
            for product, weight, pair in zip(products, weights, pairs, strict=True)
        ]


def turn_of(
    stages: Stages,
    params: PyTree,
    x: PyTree,
    where: Where,
    is_whole: bool = False,
    fixed: tuple[bool, ...] | None = None,
) -> Turn:
    """Returns how to run a turn, from one turn's parameters, its input and what else it reads.

    All of them may be shapes. `fixed` says of each array of the parameters whether it has no
    gradient; by default all have one.
    """
    if fixed is None:
        fixed = (False,) * len(jax.tree.leaves(params))
    with _of_weights(is_whole):
        return _turn_of(stages, params, x, where, is_whole, fixed)


def _of_weights(is_whole: bool) -> contextlib.AbstractContextManager:
    """Under it layers gather weights, or take them for gathered."""
    return whole_weights() if is_whole else contextlib.nullcontext()


def _turn_of(
    stages: Stages,
    params: PyTree,
    x: PyTree,
    where: Where,
    is_whole: bool,
    fixed: tuple[bool, ...],
) -> Turn:
    def layer(params, x, index, data, key):
        return stages.layer(params, index, x, data, key)

    rest = where.index, where.data, where.key
    every = find_products(layer, params, x, *rest, products=stages.products())
    products = tuple(
        None if is_fixed else product for product, is_fixed in zip(every, fixed, strict=True)
    )
    found: dict[str, Any] = {}

    def probe(params, index, data, key, x):
        here = Where(index, data, key)
        _, pull, told = _differentiated(stages, products, fixed, params, x, here)
        leaves, found["pull"] = jax.tree.flatten(pull)
        numbers = {id(leaf): number for number, leaf in enumerate(_known(params, here))}
        found["known"] = tuple(numbers.get(id(leaf), -1) for leaf in leaves)
        kept: dict[int, Array] = {}
        for leaf, number in zip(leaves, found["known"], strict=True):
            if number < 0:
                kept.setdefault(id(leaf), leaf)
        order = {name: place for place, name in enumerate(kept)}
        found["places"] = tuple(order.get(id(leaf), -1) for leaf in leaves)
        return list(kept.values()), told

    given = params, *rest, x
    program, (kept, told) = jax.make_jaxpr(probe, return_shape=True)(*given)
    depends, again = _without(program, len(jax.tree.leaves(x)), len(kept))
    numbers = [
        list(itertools.accumulate((one == is_kept for one in depends), initial=0))
        for is_kept in (True, False)
    ]
    places, fresh = (
        tuple(
            number[place] if place >= 0 and depends[place] == is_kept else -1
            for place in found["places"]
        )
        for number, is_kept in zip(numbers, (True, False), strict=True)
    )
    kept = tuple(like for like, is_kept in zip(kept, depends, strict=True) if is_kept)
    return Turn(
        stages=stages,
        products=products,
        fixed=fixed,
        pull=found["pull"],
        known=found["known"],
        places=places,
        fresh=fresh,
        kept=kept,
        again=again,
        told=told,
        is_whole=is_whole,
    )


def _without(
    program: jex.ClosedJaxpr, last: int, results: int
) -> tuple[list[bool], Callable[..., list[Array]]]:
    """Returns which of the first results depend on the last inputs, and a program of the other inputs for the others.

    Of an inner program all results depend on an input of it, or none.
    """
    jaxpr, count = program.jaxpr, len(program.jaxpr.invars) - last
    some = set(jaxpr.invars[count:])
    for step in jaxpr.eqns:
        if any(var in some for var in step.invars if not isinstance(var, jex.Literal)):
            some.update(step.outvars)
    outs = jaxpr.outvars[:results]
    depends = [not isinstance(var, jex.Literal) and var in some for var in outs]
    wanted = [var for var, is_one in zip(outs, depends, strict=True) if not is_one]
    needed, steps = {var for var in wanted if not isinstance(var, jex.Literal)}, []
    for step in reversed(jaxpr.eqns):
        if any(var in needed for var in step.outvars):
            needed.update(var for var in step.invars if not isinstance(var, jex.Literal))
            steps.append(step)
    info = jaxpr.debug_info._replace(arg_names=None, result_paths=None)
    less = jaxpr.replace(
        invars=jaxpr.invars[:count], outvars=wanted, eqns=steps[::-1], debug_info=info
    )
    return depends, jex.jaxpr_as_fun(jex.ClosedJaxpr(less, program.consts))


def _known(params: PyTree, where: Where) -> list[Array]:
    return jax.tree.leaves((params, where.index, where.data, where.key))


def _differentiated(
    stages: Stages,
    products: tuple[Product | None, ...],
    fixed: tuple[bool, ...],
    params: PyTree,
    x: PyTree,
    where: Where,
) -> tuple[tuple[PyTree, Array], Callable, Aux]:
    """The turn's ((output, its losses), backward pass, what it told).

    It is differentiated by slots, its input and the other parameters that are not fixed.
    """
    leaves, tree = jax.tree.flatten(params)

    def run(slots, rest, x, weights, kept, index, data, key):
        late = [
            Deferred(weight=weight, slot=slot) for weight, slot in zip(weights, slots, strict=True)
        ]
        free = put_together(summed, late, rest)
        free_ones, kept_ones = iter(free), iter(kept)
        every = [next(kept_ones) if is_fixed else next(free_ones) for is_fixed in fixed]
        x, told = stages.layer(tree.unflatten(every), index, x, data, key)
        return (x, sum(told.losses.values(), start=jnp.zeros((), jnp.float32))), told

    pairs = list(zip(leaves, fixed, strict=True))
    kept = [leaf for leaf, is_fixed in pairs if is_fixed]
    free = [leaf for leaf, is_fixed in pairs if not is_fixed]
    summed = [product for product, is_fixed in zip(products, fixed, strict=True) if not is_fixed]
    slots = [product.slot() for product in products if product]
    weights, rest = take_apart(summed, free)
    body = stages.remat(run)
    others = weights, kept, where.index, where.data, where.key

    def of_free(slots, rest, x):
        return body(slots, rest, x, *others)

    return jax.vjp(of_free, slots, rest, x, has_aux=True)


def _bits(x: Array) -> Array:
    """Keys as integers, which can be written into a slot."""
    return jax.random.key_data(x) if jnp.issubdtype(x.dtype, jax.dtypes.prng_key) else x


def _keys(x: Array, like: jax.ShapeDtypeStruct) -> Array:
    return jax.random.wrap_key_data(x) if jnp.issubdtype(like.dtype, jax.dtypes.prng_key) else x


def raw_shape(like: jax.ShapeDtypeStruct) -> jax.ShapeDtypeStruct:
    """Returns shape and dtype of what is written into a slot."""
    return jax.eval_shape(_bits, like)
