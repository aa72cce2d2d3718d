"""Runs made before agents' ends were carried between rollouts: a lone agent's goes on, a team's is refused by name."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from fast import jit
from forks import Fork, Forks

from jaxpar.io import Checkpoints, RunMismatchError
from jaxpar.loop import Hooks, resume
from jaxpar.mesh import MeshSpec, make_mesh, use_mesh
from jaxpar.rl import RENAMED, A2c, Dqn, Network, Ppo, Pqn

SMALL = {"network": Network(hidden=(2,)), "num_envs": 8, "num_steps": 2, "minibatches": 1}


def saved(learner, folder):
    """A checkpoint as it was then, without what a state has since."""
    checkpoints = Checkpoints(folder)
    state = jit(learner.init)(jax.random.key(0), None)
    checkpoints.save(3, state.replace(agent_done=None), {}, {})
    checkpoints.wait()
    return state, Hooks(checkpoints=checkpoints)


def test_a_team_is_refused_by_name(tmp_path):
    state, hooks = saved(Ppo(Forks(), **SMALL), tmp_path)
    assert state.agent_done.shape == (8, 2) and not state.agent_done.any()
    with pytest.raises(
        RunMismatchError, match=r"this run: agent_done is absent there and bool\[8,2\] here"
    ):
        resume(Ppo(Forks(), **SMALL), hooks)
    hooks.checkpoints.close()


def test_a_lone_agent_goes_on(tmp_path):
    learner = Ppo(Fork(), **SMALL)
    state, hooks = saved(learner, tmp_path)
    step, restored = resume(learner, hooks)
    assert step == 3 and jax.tree.structure(restored) == jax.tree.structure(state)
    hooks.checkpoints.close()


def test_a_run_with_the_attention_of_then_is_refused_with_what_to_do(tmp_path):
    network = Network(hidden=(2,), memory="attention", memory_size=4)
    learner, checkpoints = Ppo(Fork(), **SMALL | {"network": network}), Checkpoints(tmp_path)
    state = jit(learner.init)(jax.random.key(0), None)
    rows = jnp.zeros((8, 64, 4))
    then = {"k": rows, "v": rows, "there": rows[..., 0]}
    weights = state.weights | {
        "actor": state.weights["actor"] | {"memory": dict.fromkeys("qkvo", jnp.zeros((4, 4)))}
    }
    env_state = state.env_state.replace(carry=then, first_carry=jax.tree.map(lambda x: x[0], then))
    opt_state = learner.optimizer.init(weights)
    checkpoints.save(
        3, state.replace(weights=weights, opt_state=opt_state, env_state=env_state), {}, {}
    )
    checkpoints.wait()
    refused = r"does not fit this run: .*memory.* is .* there and .* here; start anew with resume=false, or go on with"
    with pytest.raises(RunMismatchError, match=refused):
        resume(learner, Hooks(checkpoints=checkpoints))
    checkpoints.close()


def test_ends_are_split_over_devices_as_their_environments():
    assert (
        Ppo(Forks(), **SMALL).axes().agent_done == ("envs", None)
        and Ppo(Fork(), **SMALL).axes().agent_done is None
    )


@pytest.mark.slow
def test_a_team_learns_on_eight_devices():
    learner = Ppo(Forks(), **SMALL)
    with use_mesh(make_mesh(MeshSpec(data=8))):
        state = jit(learner.init)(jax.random.key(0), None)
        assert jit(learner.step)(jax.random.key(1), state, None)[0].agent_done.shape == (8, 2)


def of_then(tree):
    """The state as nested dicts under the names that it had before they were those of the field."""
    older = {
        new.split("/")[-1]: old.split("/")[-1]
        for new, old in RENAMED.items()
        if "action" not in new
    }
    named: dict = {}
    for path, leaf in jax.tree_util.tree_leaves_with_path(tree):
        names = jax.tree_util.keystr(path, simple=True, separator="/").split("/")
        is_row = names[:2] == ["buffer", "rows"]
        names = [
            "drawn" if is_row and name == "action" else older.get(name, name) for name in names
        ]
        node = named
        for name in names[:-1]:
            node = node.setdefault(name, {})
        node[names[-1]] = leaf
    return named


@pytest.mark.parametrize(
    "learner",
    [
        Ppo(Forks(), **SMALL),
        A2c(Fork(), network=SMALL["network"], num_envs=8, num_steps=2),
        Pqn(Forks(), decomposition="qmix", decomposition_size=2, **SMALL),
        Dqn(
            Fork(), num_envs=8, num_steps=2, capacity=32, warmup=16, gradient_steps=1, batch_size=2
        ),
    ],
    ids=["ppo", "a2c", "pqn", "dqn"],
)
def test_a_state_under_the_names_of_then_is_restored(learner, tmp_path):
    checkpoints, state = Checkpoints(tmp_path), jit(learner.init)(jax.random.key(0), None)
    checkpoints.save(3, of_then(state), {}, {})
    checkpoints.wait()
    if learner.agent().num_agents:
        assert (tmp_path / "3").exists() and "gone" in checkpoints.numpy(3)
    with pytest.raises(RunMismatchError, match=r"does not fit this run: .* is absent there"):
        resume(learner, Hooks(checkpoints=checkpoints))
    step, restored = resume(learner, Hooks(checkpoints=checkpoints, renamed=RENAMED))
    assert step == 3
    for (path, got), want in zip(
        jax.tree_util.tree_leaves_with_path(restored), jax.tree.leaves(state), strict=True
    ):
        np.testing.assert_array_equal(got, want, err_msg=jax.tree_util.keystr(path))
    checkpoints.close()


def test_a_wanted_name_of_today_is_told_where_neither_was_saved(tmp_path):
    learner, checkpoints = Ppo(Fork(), **SMALL), Checkpoints(tmp_path)
    then = of_then(jit(learner.init)(jax.random.key(0), None))
    then["rates"].pop("trace")
    checkpoints.save(3, then, {}, {})
    checkpoints.wait()
    with pytest.raises(
        RunMismatchError, match=r"rates/gae_lambda is absent there and float32\[\] here"
    ):
        resume(learner, Hooks(checkpoints=checkpoints, renamed=RENAMED))
    checkpoints.close()
