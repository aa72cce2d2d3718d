"""The backward pass in two stages: gradients of inputs at once, those of weights later, many microbatches at a time.

Each product with a weight hands out its two factors, its input and the gradient of its result, as the gradient of a
slot (`jaxpar.nn.linear.Deferred`). The weight's gradient is one product of them, whenever it is wanted: nothing is
computed twice, also under remat (2BP, arXiv:2405.18047; zero-bubble pipelines, arXiv:2401.10241).

Example:
    import jax
    import jax.numpy as jnp

    from jaxpar.nn.linear import contract
    from jaxpar.pipeline.two_stage import two_stage

    def layer(params, x):
        h = jnp.tanh(contract("btd,df->btf", x, params["up"], ("embed", "mlp")))
        return contract("btf,fd->btd", h, params["down"], ("mlp", "embed")) * params["scale"]

    params = {"up": jnp.ones((2, 3)), "down": jnp.ones((3, 2)), "scale": jnp.ones(2)}
    x = jnp.arange(4.0).reshape(1, 2, 2)
    split = two_stage(layer, params, x, products={"up": True, "down": True, "scale": False})

    y, kept = split.forward(params, x)
    dx, factors = split.backward_input(kept, jnp.ones_like(y))
    gradient = split.backward_weights(params, factors)  # at any time
    want = jax.grad(lambda params, x: layer(params, x).sum(), argnums=(0, 1))(params, x)
    assert jax.tree.all(jax.tree.map(jnp.allclose, (gradient, dx), want))
"""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import flax.struct
import jax
import jax.numpy as jnp
from jax.extend.core import get_opaque_trace_state
from jax.lax import PrecisionLike

from jaxpar.nn.linear import Deferred, contract, deferred_gradient
from jaxpar.types import Array, PyTree, UsageError

__all__ = [
    "Factors",
    "Product",
    "TwoStage",
    "find_products",
    "put_together",
    "take_apart",
    "two_stage",
]


class Product(NamedTuple):
    """How a weight is multiplied, once.

    Attributes:
      equation: Of input and weight.
      axes: Logical axes of the weight.
      precision: As of `jax.numpy.einsum`.
      x: Shape and dtype of the input.
      y: Shape and dtype of the result.
    """

    equation: str
    axes: tuple[str | None, ...]
    precision: PrecisionLike
    x: jax.ShapeDtypeStruct
    y: jax.ShapeDtypeStruct

    def slot(self) -> tuple[Array, Array]:
        """Returns zeros like both factors, of which nothing is read."""
        return jnp.zeros(self.x.shape, self.x.dtype), jnp.zeros(self.y.shape, self.y.dtype)

    def gradient(self, weight: Array, factors: tuple[Array, Array]) -> Array:
        """Returns the weight's gradient, in its dtype."""
        return deferred_gradient(self.equation, factors, weight, self.axes, self.precision)


class Factors(NamedTuple):
    """What the first stage of a backward pass leaves to the second.

    Attributes:
      pairs: Of each weight whose gradient is put off, the input of its product and the gradient of its result.
      rest: Gradients of all other parameters, which are there already.
    """

    pairs: list[tuple[Array, Array]]
    rest: list[Array]


def find_products(
    fn: Callable, params: PyTree, *args: PyTree, products: PyTree
) -> list[Product | None]:
    """Returns of each array of `params` how it is multiplied, or None where its gradient cannot be put off.

    It can where `jaxpar.nn.linear.contract` reads it once, and not inside a loop, in which the factors would be summed.

    Args:
      fn: (params, args...) -> anything; traced without computing anything, once or twice.
      params: Parameters, or their shapes.
      *args: Of `fn`.
      products: Like `params`, or like its upper part: which arrays `contract` alone reads.
    """
    leaves, tree = jax.tree.flatten(params)
    wanted = jax.tree.leaves(
        jax.tree.map(
            lambda one, part: jax.tree.map(lambda leaf: one and leaf is part, part),
            products,
            params,
        )
    )
    while True:
        seen: list[_Seen] = [_Seen() for _ in leaves]

        def read(leaves, args, seen=seen, wanted=wanted):
            state = get_opaque_trace_state(convention="flax")
            given = [
                _Recorder(leaf, _Note(here, state, leaf)) if one else leaf
                for leaf, here, one in zip(leaves, seen, wanted, strict=True)
            ]
            return fn(tree.unflatten(given), *args)

        jax.eval_shape(read, leaves, args)
        found = [
            here.product if one and here.count == 1 else None
            for here, one in zip(seen, wanted, strict=True)
        ]
        if [product is not None for product in found] == wanted:
            return found
        wanted = [product is not None for product in found]


@dataclasses.dataclass(eq=False)
class _Seen:
    """What was seen of one weight."""

    product: Product | None = None
    count: int = 0


class _Note(NamedTuple):
    seen: _Seen
    state: Any
    weight: Array

    def __hash__(self) -> int:
        return id(self.seen)


@flax.struct.dataclass
class _Recorder:
    """A weight that writes down how it is multiplied."""

    weight: Array
    note: _Note = flax.struct.field(pytree_node=False)

    def contract(
        self, equation: str, x: Array, axes: tuple, *, precision=None, apart: bool = False
    ) -> Array:
        y = contract(equation, x, self.weight, axes, precision=precision, apart=apart)
        seen, state, weight = self.note
        is_outside = self.weight is weight and get_opaque_trace_state(convention="flax") == state
        seen.count += 1 if is_outside else 2
        seen.product = Product(
            equation=equation,
            axes=axes,
            precision=precision,
            x=jax.ShapeDtypeStruct(x.shape, x.dtype),
            y=jax.ShapeDtypeStruct(y.shape, y.dtype),
        )
        return y


def take_apart(products: Sequence[Product | None], leaves: Sequence) -> tuple[list, list]:
    """Returns what belongs to arrays whose gradients are put off, and what to the others, each in order."""
    pairs = list(zip(leaves, products, strict=True))
    late = [leaf for leaf, product in pairs if product]
    rest = [leaf for leaf, product in pairs if not product]
    return late, rest


def put_together(products: Sequence[Product | None], late: Sequence, rest: Sequence) -> list:
    """Returns one list for all arrays, of what `take_apart` parted."""
    late_ones, others = iter(late), iter(rest)
    return [next(late_ones) if product else next(others) for product in products]


@dataclasses.dataclass(frozen=True)
class TwoStage:
    """A function of parameters whose backward pass comes in two stages; see `two_stage`.

    Attributes:
      fn: (params, args...) -> y.
      products: Of each array of the parameters.
    """

    fn: Callable
    products: tuple[Product | None, ...]

    def forward(self, params: PyTree, *args: PyTree) -> tuple[PyTree, Callable]:
        """Returns y and what the backward pass reads: a pytree, as `jax.vjp` makes it."""
        leaves, tree = jax.tree.flatten(params)
        weights, rest = take_apart(self.products, leaves)
        slots = [product.slot() for product in self.products if product]

        def run(slots, rest, args):
            late = [
                Deferred(weight=weight, slot=slot)
                for weight, slot in zip(weights, slots, strict=True)
            ]
            return self.fn(tree.unflatten(put_together(self.products, late, rest)), *args)

        return jax.vjp(run, slots, rest, args)

    def backward_input(self, kept: Callable, g: PyTree) -> tuple[PyTree, Factors]:
        """Returns the gradient of the arguments, a tuple unless it is one, and what `backward_weights` takes."""
        pairs, rest, dargs = kept(g)
        return dargs[0] if len(dargs) == 1 else dargs, Factors(pairs, rest)

    def backward_weights(self, params: PyTree, factors: Factors | Sequence[Factors]) -> PyTree:
        """Returns the gradient of the parameters: of one microbatch, or the sum of several in one product a weight."""
        several = [factors] if isinstance(factors, Factors) else list(factors)
        joined = jax.tree.map(lambda *parts: jnp.concatenate(parts), *(f.pairs for f in several))
        rest = jax.tree.map(lambda *parts: sum(parts), *(f.rest for f in several))
        leaves, tree = jax.tree.flatten(params)
        weights, _ = take_apart(self.products, leaves)
        products = [each for each in self.products if each]
        triples = zip(products, weights, joined, strict=True)
        late = [product.gradient(weight, pair) for product, weight, pair in triples]
        return tree.unflatten(put_together(self.products, late, rest))


def two_stage(fn: Callable, params: PyTree, *args: PyTree, products: PyTree) -> TwoStage:
    """Returns `fn` with the backward pass in two stages.

    Args:
      fn: (params, args...) -> y. Its products with weights go through `jaxpar.nn.linear.contract`.
      params: Parameters, or their shapes.
      *args: Floating arrays, or their shapes: all are differentiated.
      products: Like `params`: which arrays `contract` alone reads. Those that it reads in a loop, or more than once,
        have their gradients in the first stage, as all others do.

    Cost: operations as of `jax.vjp`, none twice; kept between the stages are the factors, an input and a result of each
    product a microbatch.

    Raises:
      UsageError: If no array's gradient can be put off.
    """
    found = find_products(fn, params, *args, products=products)
    if all(product is None for product in found):
        raise UsageError(
            "no gradient can be put off: none of `products` is read by jaxpar.nn.linear.contract, once."
        )
    return TwoStage(fn, tuple(found))
