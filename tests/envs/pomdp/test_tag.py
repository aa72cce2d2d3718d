"""Tag against its arrays, entry by entry."""

import jax
import jax.numpy as jnp
import numpy as np

import envs
from envs.pomdp.tag import MOVES, SEEN, Tag, TagState
from jaxpar.env import check_environment
from jaxpar.pomdp import qmdp
from jaxpar.pomdp.model import make_model, rollout_values
from jaxpar.pomdp.tabular import from_environment

ENV, PARAMS = Tag(), Tag().default_params
COUNT = SEEN * SEEN + 1


def states():
    robot, opponent = (jnp.asarray(x, jnp.int32) for x in divmod(np.arange(COUNT - 1), SEEN))
    return TagState(robot, opponent, jnp.zeros(COUNT - 1, bool))


def test_equals_its_arrays_entry_by_entry():
    model, all_states = ENV.tabular(PARAMS), states()
    assert from_environment(ENV, PARAMS).terminal.tolist() == [False] * (COUNT - 1) + [True]
    flight = np.asarray(jax.vmap(lambda s: ENV.flight(s.robot, s.opponent, PARAMS))(all_states))
    np.testing.assert_allclose(flight.sum(1), 1, atol=1e-6)
    for action in range(5):
        kernel = np.zeros((COUNT, COUNT))
        for s in range(COUNT - 1):
            robot, opponent = divmod(s, SEEN)
            to = robot if action == 4 else MOVES[robot, action]
            for way in range(5):
                kernel[s, to * SEEN + (opponent if way == 4 else MOVES[opponent, way])] += flight[
                    s, way
                ]
            if action == 4 and robot == opponent:
                kernel[s] = np.eye(COUNT)[-1]
        kernel[-1, -1] = 1
        np.testing.assert_allclose(kernel, model["transition"][action], atol=1e-6)
        reward = jax.vmap(lambda s: ENV.reward(s, action, s, PARAMS))(all_states)  # noqa: B023
        np.testing.assert_array_equal(reward, model["reward"][action, :-1])
        chances = jax.vmap(
            lambda s: jnp.exp(
                jax.vmap(lambda o: ENV.log_likelihood(o, s, action, s, PARAMS))(  # noqa: B023
                    jnp.arange(SEEN + 1)
                )
            )
        )(all_states)
        np.testing.assert_array_equal(chances, model["observation"][action, :-1])


def test_draws_follow_the_arrays():
    model = ENV.tabular(PARAMS)
    for s in (0, 5 * SEEN + 6, 12 * SEEN + 12, 28 * SEEN + 3):
        state = jax.tree.map(lambda x: x[s], states())  # noqa: B023
        keys = jax.random.split(jax.random.key(s), 4000)
        got = jax.vmap(lambda key: ENV.transition(key, state, jnp.asarray(1), PARAMS))(keys)  # noqa: B023
        share = np.bincount(np.asarray(got.robot * SEEN + got.opponent), minlength=COUNT) / 4000
        np.testing.assert_allclose(share, model["transition"][1, s], atol=0.04)


def test_keeps_the_promises_of_environments():
    assert "absorbing" in check_environment(*envs.make("Tag"), num_envs=64).checks


def test_a_leaf_does_not_know_where_the_opponent_hides():
    hidden = ~np.eye(SEEN, dtype=bool)
    seeing = np.asarray(qmdp(from_environment(ENV, PARAMS)).max(0))[:-1].reshape(SEEN, SEEN)
    leaf, bound = (
        np.asarray(jax.vmap(lambda s: value(s, PARAMS))(states())).reshape(SEEN, SEEN)  # noqa: B023
        for value in (ENV.heuristic, ENV.upper_bound)
    )
    np.testing.assert_array_equal(np.diag(leaf), 10)
    assert leaf[hidden].mean() < seeing[hidden].mean() - 2, (
        "less than with eyes that see everything"
    )
    assert (bound >= seeing - 1e-4).all()


def test_rollouts_tag_whom_they_see_and_walk_into_no_wall():
    everyone = states()
    seen, keys = (
        np.asarray(everyone.robot == everyone.opponent),
        jax.random.split(jax.random.key(0), (20, COUNT - 1)),
    )
    act = jax.vmap(
        jax.vmap(lambda key, state: ENV.rollout_action(key, state, PARAMS)), in_axes=(0, None)
    )
    actions, robots = np.asarray(act(keys, everyone)), np.asarray(everyone.robot)
    np.testing.assert_array_equal(actions == 4, np.broadcast_to(seen, actions.shape))
    assert (MOVES[robots, np.minimum(actions, 3)] != robots)[:, ~seen].all()
    assert all(
        set(actions[:, robots == r].ravel()) == {*np.flatnonzero(MOVES[r] != r), 4}
        for r in range(SEEN)
    )
    live = jnp.ones(COUNT - 1, bool)
    model = make_model(ENV, PARAMS, 0.95)
    one = rollout_values(jax.random.key(1), model, everyone, live, 1)
    np.testing.assert_array_equal(one, np.where(seen, 10, -1))


def test_the_picture():
    image = ENV.render(TagState(jnp.asarray(0), jnp.asarray(28), jnp.asarray(False)), PARAMS)
    assert image.shape == (80, 160, 3) and tuple(image[72, 8].tolist()) == (58, 110, 190)
