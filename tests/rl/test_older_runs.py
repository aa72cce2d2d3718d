"""Runs made before agents' ends were carried between unrolls: a lone agent's goes on, a team's is refused by name."""

import jax
import jax.numpy as jnp
import pytest
from fast import jit
from forks import Fork, Forks

from jaxpar.io import Checkpoints, OtherRun
from jaxpar.loop import Hooks, resume
from jaxpar.mesh import MeshSpec, make_mesh, use_mesh
from jaxpar.rl import Network, Ppo

SMALL = {"network": Network(hidden=(2,)), "num_lanes": 8, "num_steps": 2, "minibatches": 1}


def saved(learner, folder):
    """A checkpoint as it was then, without what a state has since."""
    checkpoints = Checkpoints(folder)
    state = jit(learner.init)(jax.random.key(0), None)
    checkpoints.save(3, state.replace(gone=None), {}, {})
    checkpoints.wait()
    return state, Hooks(checkpoints=checkpoints)


def test_a_team_is_refused_by_name(tmp_path):
    state, hooks = saved(Ppo(Forks(), **SMALL), tmp_path)
    assert state.gone.shape == (8, 2) and not state.gone.any()
    with pytest.raises(OtherRun, match=r"does not fit this run: gone is absent there and bool\[8,2\] here"):
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
    weights = state.weights | {"actor": state.weights["actor"] | {"memory": dict.fromkeys("qkvo", jnp.zeros((4, 4)))}}
    lanes = state.lanes.replace(carry=then, first_carry=jax.tree.map(lambda x: x[0], then))
    checkpoints.save(3, state.replace(weights=weights, opt_state=learner.optimizer.init(weights), lanes=lanes), {}, {})
    checkpoints.wait()
    refused = r"does not fit this run: .*memory.* is .* there and .* here; start anew with resume=false, or go on with"
    with pytest.raises(OtherRun, match=refused):
        resume(learner, Hooks(checkpoints=checkpoints))
    checkpoints.close()


def test_ends_are_split_over_devices_as_their_lanes():
    assert Ppo(Forks(), **SMALL).axes().gone == ("envs", None) and Ppo(Fork(), **SMALL).axes().gone is None


@pytest.mark.slow
def test_a_team_learns_on_eight_devices():
    learner = Ppo(Forks(), **SMALL)
    with use_mesh(make_mesh(MeshSpec(data=8))):
        state = jit(learner.init)(jax.random.key(0), None)
        assert jit(learner.step)(jax.random.key(1), state, None)[0].gone.shape == (8, 2)
