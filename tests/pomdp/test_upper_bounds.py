"""`upper_bound(state, params)` of models: above what seeing every state earns and above the exact value, and used."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from fast import jit

from envs.pomdp.rocksample import RockSample, RockSampleState
from envs.pomdp.tag import SEEN, Tag, TagState
from envs.pomdp.tiger import Tiger, TigerState
from jaxpar.pomdp import Despot, ParticleBelief, from_environment, qmdp, solve_exact


def rocks(env):
    """The states of `env.tabular`, in its order: cells, rocks' bits, and having left."""
    kinds = 2**env.num_rocks
    index = np.arange(env.size**2 * kinds)
    places = np.stack([index // kinds % env.size, index // kinds // env.size], axis=1)
    places = np.concatenate([places, [[env.size, env.size // 2]]])
    good = np.concatenate(
        [(index % kinds)[:, None] >> np.arange(env.num_rocks) & 1, np.zeros((1, env.num_rocks))]
    )
    return RockSampleState(jnp.asarray(places, jnp.int32), jnp.asarray(good, bool))


def chases(env):
    index = jnp.arange(SEEN**2 + 1, dtype=jnp.int32)
    return TagState(index // SEEN % SEEN, index % SEEN, index == SEEN**2)


CASES = {
    "tiger": (Tiger(), lambda env: TigerState(jnp.arange(2))),
    "rocks": (RockSample(3, 3), rocks),
    "tag": (Tag(), chases),
}


@pytest.mark.parametrize("case", CASES)
def test_is_above_what_seeing_everything_earns(case):
    """Equal to it for Tiger; for the others somewhere, so that it is no looser than it must be."""
    env, states = CASES[case]
    params = env.default_params
    model = from_environment(env, params)
    seeing = np.asarray(jit(qmdp)(model)).max(0)
    got = np.asarray(jit(jax.vmap(lambda state: env.upper_bound(state, params)))(states(env)))
    assert (got >= seeing - 2e-3 * np.abs(seeing).max()).all() and np.isclose(
        got, seeing, rtol=2e-3
    ).any()
    assert (got - seeing).mean() < {"tiger": 0.01, "rocks": 3.0, "tag": 8.0}[case]


@pytest.mark.parametrize("case", ["tiger", "rocks"])
def test_is_above_the_exact_value_and_despot_takes_it(case):
    env, states = (Tiger(), CASES["tiger"][1]) if case == "tiger" else (RockSample(2, 2), rocks)
    params = env.default_params
    model = from_environment(env, params)
    exact = solve_exact(model, tol=1e-2)
    bound = jit(jax.vmap(lambda state: env.upper_bound(state, params)))(states(env))
    assert float(jnp.dot(model.start, bound)) >= float(exact.value)
    belief = ParticleBelief(64).init(jax.random.key(0), env, params)
    planner = Despot(32, 3, max_depth=4, default=0 if case == "tiger" else 1)
    action, info = jit(lambda key: planner.plan(key, env, params, belief))(jax.random.key(0))
    assert (
        float(info.upper) >= float(info.value) and int(info.inconsistent) == int(info.invalid) == 0
    )
    assert int(action) == 0 if case == "tiger" else bool(info.legal[action])
