import jax
import jax.numpy as jnp
import numpy as np
import pytest
from models import maze1d, random_model, tiger

import envs
from jaxpar.env import step
from jaxpar.pomdp import TabularPomdp, check_model, from_environment, tabular_update
from jaxpar.pomdp.check import check_tabular
from jaxpar.types import UsageError

EYE, HALF = np.eye(2)[None], np.full((1, 2, 2), 0.5)
ZERO = np.zeros((1, 2))


@pytest.mark.parametrize(
    "arrays, message",
    [
        ((np.eye(2), HALF, ZERO), r"transition is \[2, 2\] but must be \[A, S, S\]"),
        ((EYE, HALF[:, :1], ZERO), "observation is"),
        ((EYE, HALF, np.zeros((1, 3))), r"reward is \[1, 3\] but must be \[A, S\] = \[1, 2\]"),
        ((EYE * 0.9, HALF, ZERO), "transition of action '0' and state '0' sums to 0.9, not to one"),
        (
            (EYE, HALF + [[[0, 0], [0.6, -0.6]]], ZERO),
            "observation of action '0' and state '1' has a negative entry",
        ),
        ((EYE, HALF, ZERO * np.nan), r"the reward at \[0, 0\] of \[1, 2\] is nan"),
        ((EYE, HALF, ZERO, [0.5, 0.6]), "start sums to 1.1"),
        ((EYE, HALF, ZERO, [1.0]), r"start is \[1\] but must be \[S\] = \[2\]"),
        ((EYE, HALF, ZERO, None, -0.1), r"discount must be a number in \[0, 1\], not -0.1"),
        ((EYE, HALF, ZERO, None, 1.1), r"discount must be a number in \[0, 1\], not 1.1"),
    ],
)
def test_malformed_arrays_are_named(arrays, message):
    with pytest.raises(UsageError, match=message):
        TabularPomdp.of(*arrays)


def test_names_must_fit():
    with pytest.raises(UsageError, match="states must be 2 different names"):
        TabularPomdp.of(EYE, HALF, ZERO, states=("a", "a"))
    with pytest.raises(UsageError, match="CartPole-v1 has no part tabular"):
        from_environment(envs.make("CartPole-v1")[0])


def test_precision_follows_the_switch(x64):
    assert tiger().observation.dtype == jnp.float64 and float(tiger().observation[0, 0, 0]) == 0.85


def test_bayes_equals_enumeration():
    model = random_model(0, 4, 2, 3)
    belief = jnp.asarray(np.random.default_rng(1).dirichlet(np.ones(4)), jnp.float32)
    for action in range(2):
        total = 0.0
        for obs in range(3):
            joint = [
                sum(float(belief[s]) * float(model.transition[action, s, t]) for s in range(4))
                * float(model.observation[action, t, obs])
                for t in range(4)
            ]
            got, evidence = tabular_update(model, belief, action, obs)
            np.testing.assert_allclose(got, np.asarray(joint) / sum(joint), rtol=1e-5)
            np.testing.assert_allclose(evidence, sum(joint), rtol=1e-5)
            total += float(evidence)
        assert total == pytest.approx(1, abs=1e-6)


def test_impossible_observations_are_reported():
    model = maze1d()
    with pytest.raises(UsageError, match="observation '1' after action '0' has probability zero"):
        tabular_update(model, model.start.at[:].set(jnp.asarray([1.0, 0, 0, 0])), 0, 1)
    with pytest.raises(UsageError, match="observation 2 is out of range: there are 2"):
        tabular_update(model, model.start, 0, 2)
    with pytest.raises(UsageError, match="action 7 is out of range"):
        tabular_update(model, model.start, 7, 0)
    belief, evidence = jax.jit(tabular_update)(model, jnp.asarray([1.0, 0, 0, 0]), 0, 1)
    assert evidence == 0 and belief[0] == 1, "under a trace: evidence 0, and the prediction"


def test_a_tabular_model_is_an_environment():
    report = check_model(maze1d(), num_samples=2000)
    assert {"likelihood", "tabular"} <= set(report.checks)


def test_states_that_nothing_leaves_at_no_reward_end_an_episode():
    model = TabularPomdp.of(np.asarray([[[0.0, 1], [0, 1]]]), HALF, np.asarray([[1.0, 0]]), [1, 0])
    assert model.terminal.tolist() == [False, True]
    made = step(jax.random.key(0), model.environment, jnp.asarray(0), jnp.asarray(0), model)
    assert made.terminated and made.reward == 1
    assert not TabularPomdp.of(EYE, HALF, np.ones((1, 2))).terminal.any()
    assert "absorbing" in check_model(model).checks


def test_models_of_one_size_share_an_environment_and_batch():
    models = [random_model(seed) for seed in range(3)]
    assert len({model.environment for model in models}) == 1
    batch = jax.tree.map(lambda *x: jnp.stack(x), *models)
    beliefs, _ = jax.vmap(lambda m: tabular_update(m, m.start, 0, 1))(batch)
    for model, belief in zip(models, beliefs, strict=True):
        np.testing.assert_allclose(belief, tabular_update(model, model.start, 0, 1)[0], rtol=1e-5)


class Liar:
    """Tiger, but for one promise."""

    def __init__(self, env, **parts):
        self.env, self.parts = env, parts

    def __getattr__(self, name):
        return self.__dict__["parts"].get(name) or getattr(self.__dict__["env"], name)


def test_broken_models_are_refused():
    env, params = envs.make("Tiger")
    cases = {
        "an observation, number": {"tabular": lambda p: env.tabular(p.replace(accuracy=0.8))},
        "the reward of action 'listen' in state 'tiger-left' is -1, but -2": {
            "tabular": lambda p: env.tabular(p.replace(listen=-2.0))
        },
        "the reward of action 'listen' in state 'tiger-left' is nan, but -1": {
            "reward": lambda state, action, next_state, p: jnp.float32(jnp.nan)
        },
        "a first state": {"init": lambda key, p: jax.tree.map(jnp.zeros_like, env.init(key, p))},
        "a next state": {"transition": lambda key, state, action, p: state},
        "is terminal, but in": {"terminal": lambda state, p: state.tiger == 1},
        "sums to 1.5": {"tabular": lambda p: env.tabular(p) | {"start": np.asarray([1.0, 0.5])}},
    }
    for message, parts in cases.items():
        with pytest.raises(UsageError, match=message):
            check_tabular(jax.random.key(0), Liar(env, **parts), params)
