"""The outline of a tree: the same visits and values as its arrays and the report."""

import jax
import numpy as np
import pytest
from fast import jit

import envs
from jaxpar.pomdp import ParticleBelief, Pomcp, Vopp
from jaxpar.pomdp.planners.outline import outline
from jaxpar.pomdp.planners.tree import HashedChildren
from jaxpar.types import UsageError

PLANNERS = [
    Vopp(32, 6, leaf="zero"),
    Vopp(32, 6, leaf="zero", children=HashedChildren()),
    Pomcp(8, 10, rollout_depth=3),
]


@pytest.mark.parametrize("planner", PLANNERS)
def test_branches_add_up(planner):
    env, params = envs.make("Tiger")
    belief = ParticleBelief(16).init(jax.random.key(0), env, params)
    search = jit(lambda key: planner.search(key, env, params, belief))(jax.random.key(1))
    _, info = planner.decide(search)
    root = outline(
        search, planner, env, params, depth=3, width=9, actions=("listen", "left", "right")
    )
    assert {b.name for b in root.below} == {"listen", "left", "right"}
    for branch in root.below:
        at = ("listen", "left", "right").index(branch.name)
        assert branch.visits == info.visits[at]
        np.testing.assert_allclose(branch.value, info.values[at], rtol=1e-6)

    def check(belief, left):
        if left and belief.below:
            assert sum(action.visits for action in belief.below) <= belief.visits
            assert belief.value == max(action.value for action in belief.below)
        for action in belief.below:
            assert sum(seen.visits for seen in action.below) == action.visits  # Tiger never ends
            assert {seen.name for seen in action.below} <= {"o0", "o1"}
            for seen in action.below:
                check(seen, left - 1)

    check(root, 3)
    short = outline(search, planner, env, params, depth=1, width=1)
    assert len(short.below) == len(short.below[0].below) == 1 and not short.below[0].below[0].below
    with pytest.raises(UsageError, match="depth=-1 must be at least 0"):
        outline(search, planner, env, params, depth=-1)
    assert short.below[0].visits == max(info.visits)
    assert str(short).count("\n") == 2 and str(short).splitlines()[1].startswith("  listen")
