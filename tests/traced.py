"""Readers of traced programs: jaxprs, and the jaxprs inside of them."""

import jax


def inner_jaxprs(eqn):
    """Yields the jaxprs that an equation holds, without their constants."""

    def is_jaxpr(value):
        return hasattr(value, "eqns") or hasattr(value, "jaxpr")

    for value in jax.tree.leaves(list(eqn.params.values()), is_leaf=is_jaxpr):
        inner = getattr(value, "jaxpr", value)
        if hasattr(inner, "eqns"):
            yield inner


def equations(jaxpr):
    """Yields every equation of a jaxpr and of all jaxprs inside it."""
    for eqn in jaxpr.eqns:
        yield eqn
        for inner in inner_jaxprs(eqn):
            yield from equations(inner)


def count_products(jaxpr):
    """Counts the dot products of a jaxpr and of all jaxprs inside it."""
    return sum(eqn.primitive.name == "dot_general" for eqn in equations(jaxpr))
