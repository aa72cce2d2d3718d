import dataclasses
import functools

import fast
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from worlds import Corridor, Params, State, Team

from jaxpar.env import Box, Discrete, MultiDiscrete
from jaxpar.env.check import (
    check_absorbing,
    check_action,
    check_environment,
    check_likelihood,
    check_params,
    check_parts,
    check_types,
    check_walk,
    walk,
)
from jaxpar.env.spaces import legal_sample
from jaxpar.types import UsageError

CHECK = functools.partial(check_environment, num_envs=4, num_steps=40)


@pytest.mark.parametrize("env", [Corridor(), Team()], ids=lambda env: env.name)
def test_right_environments_pass(env):
    report = CHECK(env)
    assert (report.name, report.steps) == (env.name, 160) and report.episodes >= 4
    assert (
        ("likelihood" in report.checks)
        == ("absorbing" in report.checks)
        == isinstance(env, Corridor)
    )


def broken(**parts):
    """A `Corridor` with some parts replaced."""
    return dataclasses.dataclass(frozen=True)(type("Broken", (Corridor,), parts))()


def float_place(self, key, state, action, params):
    return State(state.place + 0.5, state.time + 1)


def lost_clock(self, key, state, action, params):
    return {"place": state.place}


def weak_clock(self, key, params):
    return State(jnp.ones((), jnp.int32), jnp.where(True, 0, 1))


def keyed(self, key, params):
    return State(jnp.ones((), jnp.int32), key)


def keep(self, key, state, action, params):
    return state


def nan_after_a_while(self, state, action, next_state, params):
    return jnp.where(next_state.time == 2, jnp.nan, 0.0)


def pays_for_ever(self, state, action, next_state, params):
    return jnp.where(self.terminal(next_state, params), 1.0, 0.0)


def flat_likelihood(self, obs, state, action, next_state, params):
    return jnp.log(1 / self.length)


def slightly_wrong_likelihood(self, obs, state, action, next_state, params):
    return jnp.log(jnp.where(obs == next_state.place, 0.68, 0.0) + 0.32 / self.length)


def short_likelihood(self, obs, state, action, next_state, params):
    return jnp.log(0.5 / self.length)


TYPES, PARTS, WALK, ABSORBING, LIKELIHOOD = (
    check_types,
    check_parts,
    check_walk,
    check_absorbing,
    check_likelihood,
)
BROKEN = {
    "state changes its dtype": (
        TYPES,
        {"transition": float_place},
        r"state.place changes its type, from int32",
    ),
    "state changes its structure": (
        TYPES,
        {"transition": lost_clock},
        "state changes its structure",
    ),
    "weak type": (TYPES, {"init": weak_clock, "transition": keep}, "state.time has a weak type"),
    "key in the state": (TYPES, {"init": keyed}, r"stores a key in state.time"),
    "reward is a vector": (
        TYPES,
        {"reward": lambda *a: jnp.zeros(2)},
        r"reward is float32 \[2\] but must be",
    ),
    "end is a vector": (
        TYPES,
        {
            "terminal": lambda *a: jnp.zeros(2, bool),
            "transition": keep,
            "reward": lambda *a: jnp.zeros(()),
        },
        r"terminated is bool \[2\] but must be bool \[\]",
    ),
    "observation changes its dtype": (
        TYPES,
        {
            "observe": lambda self, key, state, action, p: jnp.zeros(
                (), jnp.int32 if action is None else jnp.float32
            )
        },
        "observation changes its type",
    ),
    "space is too small": (
        WALK,
        {"observation_space": lambda s, p: Discrete(3)},
        "not in the observation space: ",
    ),
    "space has another dtype": (
        WALK,
        {"observation_space": lambda s, p: Box(0.0, 9.0)},
        "not in the observation space",
    ),
    "NaN reward": (
        WALK,
        {"reward": nan_after_a_while},
        r"step 1 of environment \d+: the reward is not finite",
    ),
    "NaN observation": (
        WALK,
        {"observe": lambda *a: jnp.full((), jnp.nan)},
        "step 0 of environment 0: observation is NaN",
    ),
    "no legal action": (
        WALK,
        {"action_mask": lambda self, state, p: jnp.broadcast_to(state.time < 1, (3,))},
        "step 1 of environment 0: no action is legal",
    ),
    "mask of another shape": (
        PARTS,
        {"action_mask": lambda *a: jnp.ones(4, bool)},
        r"bool \[4\] but must be bool \[3\]",
    ),
    "masked continuous actions": (
        PARTS,
        {"action_space": lambda s, p: Box(-1.0, 1.0)},
        "not discrete",
    ),
    "picture of floats": (
        PARTS,
        {"render": lambda *a: jnp.zeros((2, 2, 3))},
        r"must give uint8 \[H, W, 3\]",
    ),
    "heuristic is a vector": (
        PARTS,
        {"heuristic": lambda *a: jnp.zeros(2)},
        r"heuristic is float32 \[2\]",
    ),
    "key of an observation": (PARTS, {"obs_key": lambda *a: jnp.zeros(())}, "obs_key is float32"),
    "earns after the end": (ABSORBING, {"reward": pays_for_ever}, "terminal states absorb"),
    "flat likelihood": (
        LIKELIHOOD,
        {"log_likelihood": flat_likelihood},
        r"came \d+ times in 4096 draws",
    ),
    "slightly wrong likelihood": (
        LIKELIHOOD,
        {"log_likelihood": slightly_wrong_likelihood},
        r"came \d+ times in 4096",
    ),
    "likelihood not normalised": (LIKELIHOOD, {"log_likelihood": short_likelihood}, "sum to"),
}


@pytest.mark.parametrize("fault", BROKEN)
def test_broken_environments_are_named(fault):
    check, parts, sentence = BROKEN[fault]
    env, params, keys = broken(**parts), Params(), jax.random.split(jax.random.key(0))
    with pytest.raises(UsageError, match=sentence):
        if check in (TYPES, PARTS):
            return check(env, params)
        steps = (
            fast.jit(lambda key: walk(key, env, params, 4, 40))(keys[0])
            if check is WALK
            else right_steps()
        )
        check(env, steps) if check is WALK else check(keys[1], env, params, steps)


@functools.cache
def right_steps():
    return fast.jit(lambda key: walk(key, Corridor(), Params(), 4, 40))(jax.random.key(0))


def test_everything_is_checked():
    for _, parts, sentence in (BROKEN["picture of floats"], BROKEN["NaN reward"]):
        with pytest.raises(UsageError, match=sentence):
            CHECK(broken(**parts))


def test_value_semantics():
    class ByIdentity(Corridor):
        __eq__ = object.__eq__
        __hash__ = object.__hash__

    with pytest.raises(UsageError, match="not equal to it"):
        CHECK(ByIdentity())
    with pytest.raises(UsageError, match="hashed by value"):
        CHECK(Corridor(length=np.asarray([7])))
    traces = []

    @functools.partial(jax.jit, static_argnums=0)
    def begin(env, key):
        traces.append(env)
        return env.init(key, env.default_params)

    begin(Corridor(), jax.random.key(0)), begin(Corridor(), jax.random.key(1))
    assert len(traces) == 1


def test_parameters_of_another_environment():
    check_params(Corridor(), Params(slip=jnp.float32(0.5)))
    with pytest.raises(UsageError, match="Corridor-7 takes parameters like"):
        check_params(Corridor(), {"slip": 0.2})


def test_actions():
    env, team = Corridor(), Team()
    check_action(env, Params(), jnp.int32(2))
    check_action(team, Params(), jnp.zeros(3, jnp.int32))
    for action, sentence in (
        (3, "not in the action space"),
        (0.5, "not float32"),
        (jnp.zeros(2, jnp.int32), r"\[2\]"),
    ):
        with pytest.raises(UsageError, match=sentence):
            check_action(env, Params(), action)
    with pytest.raises(UsageError, match=r"not int32 \[4\]"):
        jax.eval_shape(lambda a: check_action(team, Params(), a), jnp.zeros(4, jnp.int32))


def test_masks_of_several_choices():
    mask = jnp.asarray([[True, False, False], [False, True, True]])
    draws = jax.vmap(lambda key: legal_sample(key, MultiDiscrete((2, 3)), mask))(
        jax.random.split(jax.random.key(0), 64)
    )
    assert draws.dtype == jnp.int32 and set(map(tuple, draws.tolist())) == {(0, 1), (0, 2)}
