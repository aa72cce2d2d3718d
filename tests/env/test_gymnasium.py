import gymnasium
import jax
import numpy as np
import pytest
from gymnasium.utils.env_checker import check_env
from gymnasium.vector import AutoresetMode, SyncVectorEnv
from worlds import Corridor, Params, Team

import envs
from jaxpar.env import (
    Box,
    Discrete,
    Fields,
    MultiDiscrete,
    adapt,
    to_gymnasium,
    to_gymnasium_vector,
)
from jaxpar.env.gymnasium import gymnasium_space
from jaxpar.types import UsageError

from test_adapt import OldGymnax  # isort: skip

# Gymnasium warns of bounds that its own environments have.
ACCEPTED = (
    "recommend using a symmetric and normalized",
    "is probably too low",
    "is probably too high",
)
MODES = [AutoresetMode.NEXT_STEP, AutoresetMode.SAME_STEP]


@pytest.mark.filterwarnings(*(f"ignore:.*{part}" for part in ACCEPTED))
@pytest.mark.parametrize("name", ["CartPole-v1", "Pendulum-v1", "Corridor"])
def test_check_env_passes(name):
    env = Corridor() if name == "Corridor" else envs.make(name)[0]
    gymnasium.register(
        "jaxpar/Checked-v0", lambda render_mode=None: to_gymnasium(env, render_mode=render_mode)
    )
    try:
        check_env(gymnasium.make("jaxpar/Checked-v0", disable_env_checker=True).unwrapped)
    finally:
        del gymnasium.registry["jaxpar/Checked-v0"]


def equal(ours, theirs):
    """The same trees, dtypes and masks; floats to rounding, for one program runs alone and one in a batch."""
    assert type(ours) is type(theirs)
    if isinstance(ours, dict):
        assert set(ours) == set(theirs)
        for name in ours:
            equal(ours[name], theirs[name])
    elif isinstance(ours, tuple):
        for one, other in zip(ours, theirs, strict=True):
            equal(one, other)
    elif ours is not None and np.asarray(ours).dtype == object:
        for one, other in zip(ours, theirs, strict=True):
            equal(one, other)
    elif ours is not None:
        assert np.asarray(ours).dtype == np.asarray(theirs).dtype and np.shape(ours) == np.shape(
            theirs
        )
        np.testing.assert_allclose(ours, theirs, rtol=1e-5, atol=1e-5)


CASES = {
    "corridor": lambda: (Corridor(), Params(max_steps=7)),
    "cart-pole": lambda: envs.make("CartPole-v1"),
    "five values, with info": lambda: (adapt(OldGymnax()), OldGymnax.default_params),
}


@pytest.mark.parametrize("mode", MODES, ids=lambda mode: mode.name)
@pytest.mark.parametrize("case", CASES)
def test_many_equal_gymnasium_s_vector_of_single_ones(case, mode):
    env, params = CASES[case]()
    ours = to_gymnasium_vector(env, params, 3, autoreset_mode=mode)
    theirs = SyncVectorEnv([lambda: to_gymnasium(env, params)] * 3, autoreset_mode=mode)
    assert ours.metadata["autoreset_mode"] == theirs.metadata["autoreset_mode"] == mode
    assert ours.metadata == theirs.metadata
    assert (
        ours.observation_space == theirs.observation_space
        and ours.action_space == theirs.action_space
    )
    equal(ours.reset(seed=4), theirs.reset(seed=4))
    ours.action_space.seed(0)
    ends = np.zeros(2, int)
    for _ in range(60):
        actions = ours.action_space.sample()
        made = ours.step(actions)
        equal(made, theirs.step(actions))
        ends += made[2].sum(), made[3].sum()
    assert ends[0] > 0 and (ends[1] > 0 or case == "cart-pole")
    equal(ours.reset(), theirs.reset())
    equal(ours.reset(seed=[7, None, 9]), theirs.reset(seed=[7, None, 9]))


def test_resets_by_hand():
    env, params = Corridor(), Params(max_steps=3, slip=0.0)
    ours = to_gymnasium_vector(env, params, 2, autoreset_mode="Disabled")
    theirs = SyncVectorEnv([lambda: to_gymnasium(env, params)] * 2, autoreset_mode="Disabled")
    equal(ours.reset(seed=1), theirs.reset(seed=1))
    still = np.ones(2, int)
    for _ in range(3):
        made = ours.step(still)
        equal(made, theirs.step(still))
    assert made[3].all()
    with pytest.raises(UsageError, match="environment 0 has ended and resets are disabled"):
        ours.step(still)
    mask = np.asarray([True, False])
    ours.reset(options={"reset_mask": mask}), theirs.reset(options={"reset_mask": mask})
    with pytest.raises(UsageError, match="environment 1 has ended"):
        ours.step(still)
    mask = np.asarray([False, True])
    equal(ours.reset(options={"reset_mask": mask}), theirs.reset(options={"reset_mask": mask}))
    equal(ours.step(still), theirs.step(still))


def test_pictures():
    single = to_gymnasium(Corridor(), render_mode="rgb_array")
    single.reset(seed=0)
    assert single.render().shape == (1, 7, 3) and single.render().dtype == np.uint8
    many = to_gymnasium_vector(Corridor(), None, 2, render_mode="rgb_array")
    many.reset(seed=0)
    np.testing.assert_array_equal(many.render()[0], single.render())
    assert to_gymnasium(Corridor()).render() is None
    with pytest.raises(UsageError, match="no render mode 'human'; it has rgb_array"):
        to_gymnasium(Corridor(), render_mode="human")


def test_what_comes_out_may_be_overwritten():
    many = to_gymnasium_vector(*envs.make("CartPole-v1"), 2)
    for array in (many.reset(seed=0)[0], *many.step(np.zeros(2, int))[:4]):
        array[:] = 0


def test_spaces():
    key = jax.random.key(0)
    for space in (
        Discrete(4),
        Discrete(4, (2,)),
        MultiDiscrete((2, 5)),
        Box((0.0, -1.0), 2.0, (2,)),
        Box(0, 255, (2, 2, 3), np.uint8),
        Fields.of(place=Discrete(3), view=Box(0.0, 1.0, (2,))),
    ):
        theirs, drawn = gymnasium_space(space), jax.tree.map(np.asarray, space.sample(key))
        assert theirs.contains(drawn)
        assert bool(
            space.contains(
                jax.tree.map(lambda x, like: np.asarray(x, like.dtype), theirs.sample(), drawn)
            )
        )
    assert isinstance(gymnasium_space(Box(0, 1, (3,), bool)), gymnasium.spaces.MultiBinary)


def test_mistakes_are_named():
    single = to_gymnasium(Corridor())
    with pytest.raises(UsageError, match="must be reset before"):
        single.step(1)
    single.reset(seed=0)
    with pytest.raises(UsageError, match=r"takes actions of Discrete\(3\), not 3"):
        single.step(3)
    with pytest.raises(UsageError, match="no options for its reset"):
        single.reset(options={"place": 3})
    with pytest.raises(UsageError, match="at least one environment, not 0"):
        to_gymnasium_vector(Corridor(), None, 0)
    many = to_gymnasium_vector(Corridor(), None, 2)
    with pytest.raises(UsageError, match="2 environments need as many seeds, not 3"):
        many.reset(seed=[1, 2, 3])
    many.reset()
    with pytest.raises(UsageError, match="takes actions of MultiDiscrete"):
        many.step(np.zeros(3, int))
    pendulum = to_gymnasium(envs.make("Pendulum-v1")[0])
    pendulum.reset(seed=0)
    with pytest.raises(UsageError, match=r"takes actions of Box\(-2.0, 2.0"):
        pendulum.step(0.5)
    with pytest.raises(UsageError, match="Gymnasium knows no agents"):
        to_gymnasium(Team())
