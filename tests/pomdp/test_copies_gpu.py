"""What the compiler for a GPU makes of a plan; on other devices there is nothing to see."""

import math
import re

import jax
import pytest
from pomdp_worlds import Known, Tiger

from jaxpar.pomdp import Pft, Pomcp, Pomcpow, Vopp
from jaxpar.pomdp.model import make_model
from jaxpar.pomdp.planners.tree import DenseChildren, HashedChildren


def copied(text: str) -> int:
    """How many elements the largest array has that a compiled program copies, outside of fusions."""
    largest, inside = 0, False
    for line in text.splitlines():
        if line.startswith("%"):
            inside = line.startswith(("%fused", "%wrapped"))
        found = re.search(r"= \w+\[([\d,]*)\]\S* copy\(", line)
        if found and not inside:
            largest = max(largest, math.prod(int(size) for size in found[1].split(",") if size))
    return largest


def largest_copy_and_table(planner, **options) -> tuple[int, int]:
    """Of a plan on Tiger, compiled with `options` of jit."""
    env, params, belief = Tiger(), Tiger().default_params, Known(0.5)
    plan = jax.jit(lambda key: planner.plan(key, env, params, belief), **options)
    text = plan.lower(jax.eval_shape(lambda: jax.random.key(0))).compile().as_text()
    model = make_model(env, params)
    begun = planner.tree_search().init_search(jax.random.key(0), model, belief)
    return copied(text), begun.tree.edges.size


@pytest.mark.gpu
@pytest.mark.parametrize("children", [DenseChildren(2), HashedChildren()], ids=["dense", "hashed"])
@pytest.mark.parametrize("kind", [Vopp, Pomcp, Pft, Pomcpow])
def test_no_level_copies_a_table(kind, children):
    """Reads before writes: a read of a table that is fused past its write costs two copies of it a level."""
    copy, table = largest_copy_and_table(
        kind(64, 8, max_depth=5, max_nodes=2000, children=children)
    )
    assert copy < table


def test_copies_are_found_where_they_are():
    fused, body = (
        "%fused_a (x) {\n  %c = s32[99]{0} copy(%x)\n}",
        "%body (y) {\n  %d = s32[5,7]{1,0} copy(%y)\n}",
    )
    assert copied(f"{fused}\n\n{body}") == 35
    assert copied(fused) == 0 and copied(body.replace("copy", "negate")) == 0
