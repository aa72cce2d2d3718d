"""The grid combat against plain loops over whole episodes; symmetry, accounting and play."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from journey import record
from twin_combat import CombatTwin

from envs.multi.combat import VARIANTS, Combat, scripted
from jaxpar.env.kernel import step
from jaxpar.types import UsageError

UNEVEN = Combat(
    first=("ranged", "healer"), second=("melee", "healer", "ranged", "melee"), size=6, both=True
)
CASES = [Combat(), UNEVEN, VARIANTS["Combat-5v6"]()]


def draw(key, env, state, params):
    """The script mostly, else a legal action, at times any."""
    any_key, legal_key, which_key = jax.random.split(key, 3)
    mask = env.action_mask(state, params)
    legal = jax.random.categorical(legal_key, jnp.where(mask, 0.0, -jnp.inf), axis=-1).astype(
        jnp.int32
    )
    wild = jax.random.randint(any_key, legal.shape, 0, mask.shape[1])
    which = jax.random.uniform(which_key, legal.shape)
    play = scripted(env, state, params)[: env.num_agents]
    return jnp.where(which < 0.4, play, jnp.where(which < 0.9, legal, wild))


def compare(env, num_steps, num_envs=20):
    """Walks the loops beside the record, episode after episode."""
    params = env.default_params
    obs, states, masks, actions, moved = record(env, params, num_steps, num_envs, policy=draw)
    agents, deaths = range(env.num_agents), 0
    for b in range(num_envs):
        for t in range(num_steps):
            if states.time[t, b] == 0:
                twin = CombatTwin(env.first, env.second, env.size, states.position[t, b])
            units = twin.units[: env.num_agents]
            assert [set(np.flatnonzero(row)) for row in masks[t, b]] == [
                twin.legal(unit) for unit in units
            ]
            np.testing.assert_allclose(obs[t, b], [twin.view(unit) for unit in units], atol=1e-6)
            joint = [*actions[t, b]] + ([] if env.both else twin.script(1))
            rewards = twin.step(joint)
            after = jax.tree.map(lambda x: x[t, b], moved.state)  # noqa: B023
            assert [tuple(place) for place in after.position] == [unit["at"] for unit in twin.units]
            assert after.health.tolist() == [unit["health"] for unit in twin.units]
            assert after.pause.tolist() == [unit["pause"] for unit in twin.units]
            np.testing.assert_allclose(moved.reward[t, b], [rewards[i] for i in agents], atol=1e-6)
            ended = [twin.over() or twin.units[i]["health"] == 0 for i in agents]
            assert moved.terminated[t, b].tolist() == ended
            assert (moved.truncated[t, b] == (states.time[t, b] + 1 >= params.max_steps)).all()
            np.testing.assert_allclose(
                moved.obs[t, b], [twin.view(unit) for unit in units], atol=1e-6
            )
            deaths += sum(ended) and not twin.over()
            standing = [unit["at"] for unit in twin.units if unit["health"]]
            assert len(set(standing)) == len(standing)
    assert deaths > num_steps * num_envs / 100


@pytest.mark.parametrize(
    "env", [*CASES[:2], pytest.param(CASES[2], marks=pytest.mark.slow)], ids=lambda env: env.name
)
def test_equals_loops(env):
    compare(env, 60)


@pytest.mark.slow
@pytest.mark.parametrize("env", CASES, ids=lambda env: env.name)
def test_equals_loops_over_many_steps(env):
    compare(env, 5000)


def test_teams_are_treated_alike():
    """Swapped teams play the swapped game and earn the negative rewards."""
    env = Combat(both=True)
    params = env.default_params
    _, states, _, actions, moved = record(env, params, 60, 10, policy=draw)
    swap = np.array([3, 4, 5, 0, 1, 2])

    def turn(state):
        return state.replace(
            position=state.position[..., swap, :],
            health=state.health[..., swap],
            pause=state.pause[..., swap],
        )

    def play(state, action):
        return step(jax.random.key(0), env, state, action, params)

    swapped = jax.jit(jax.vmap(jax.vmap(play)))(turn(states), actions[..., swap])
    assert all(
        jax.tree.leaves(jax.tree.map(lambda a, b: (a == b).all(), swapped.state, turn(moved.state)))
    )
    np.testing.assert_allclose(swapped.reward, moved.reward[..., swap], atol=1e-6)
    assert np.abs(moved.reward).max() > 1  # somebody won


def test_return_of_a_team_is_its_lead_and_its_outcome():
    """Rewards telescope: what a survivor earned is the lead in health at the end, and 1 for the win."""
    env = Combat()
    params = env.default_params
    _, states, _, _, moved = record(
        env, params, 60, 100, policy=lambda key, *args: scripted(*args)[:3]
    )
    full = np.array([12, 8, 8])
    survivors = wins = 0
    for b in range(100):
        ends = np.flatnonzero((moved.terminated[:, b] | moved.truncated[:, b]).all(-1))
        last = jax.tree.map(lambda x: x[ends[0], b], moved.state)  # noqa: B023
        share = (last.health[:3] / full.sum()).sum(), (last.health[3:] / full.sum()).sum()
        result = int(share[0] > 0) - int(share[1] > 0) if 0 in share else 0
        wins += result == 1
        for i in np.flatnonzero(last.health[:3] > 0):
            survivors += 1
            assert (
                abs(moved.reward[: ends[0] + 1, b, i].sum() - (share[0] - share[1] + result)) < 1e-5
            )
    assert survivors > 50 and 20 < wins < 80


def outcomes(env, policy, num_envs=300):
    """Mean over first episodes of the first team's reward and of its wins."""
    params = env.default_params
    _, states, _, _, moved = record(env, params, 60, num_envs, 7, policy)
    earned = jax.jit(jax.vmap(jax.vmap(lambda a, b: env.team_reward(a, b, params))))(
        states, moved.state
    )
    over, result = jax.vmap(jax.vmap(env.outcome))(moved.state)
    first = np.cumsum(states.time == 0, axis=0) == 1
    return (np.asarray(earned) * first).sum(0).mean(), (
        (np.asarray(result) == 1) & over & first
    ).any(0).mean()


def uniform(key, env, state, params):
    """A legal action."""
    mask = env.action_mask(state, params)
    return jax.random.categorical(key, jnp.where(mask, 0.0, -jnp.inf), axis=-1).astype(jnp.int32)


@pytest.mark.slow
def test_script_beats_chance():
    played, wins = outcomes(Combat(), lambda key, *args: scripted(*args)[:3])
    lost, none = outcomes(Combat(), uniform)
    assert abs(played) < 0.4 and 0.25 < wins < 0.75
    assert lost < -1 and none < 0.05


def test_bad_fields_are_refused():
    for fields in ({"first": ("tank",)}, {"second": ()}, {"size": 3}, {"first": ("melee",) * 17}):
        with pytest.raises(UsageError):
            Combat(**fields)


def test_pictures_show_the_living_and_their_health():
    env = Combat()
    params = env.default_params
    state = env.init(jax.random.key(0), params)
    whole = env.render(state, params)
    hurt = env.render(state.replace(health=state.health.at[0].set(0).at[4].set(1)), params)
    assert whole.shape == (128, 128, 3) and whole.dtype == jnp.uint8
    changed = {tuple(cell) for cell in np.argwhere((whole != hurt).any(-1)) // 16}
    assert changed == {tuple(np.asarray(state.position[i])) for i in (0, 4)}
