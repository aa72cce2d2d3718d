"""Walks from a user's call to the leaf that does the work: how many frames of this library lie between."""

import traceback
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tiny

import envs
from envs.classic.cart_pole import CartPole
from envs.pomdp.tiger import Tiger
from jaxpar import lm, neat, pomdp, rl
from jaxpar.decode import Sampling
from jaxpar.loop import Fit, fit
from jaxpar.nn.attention import kernels
from jaxpar.rollout import init, rollout
from jaxpar.solve import Newton, parallel_scan

ROOT = Path(__file__).parents[1]
OWN = (str(ROOT / "jaxpar"), str(ROOT / "envs"))


class Reached(Exception):
    """The leaf was called."""


def leaf(*args, **kinds):
    raise Reached


def frames_of(call):
    """The frames of this library between a call and the leaf, as JAX's filtered traceback shows them."""
    with pytest.raises(Reached) as caught:
        call()
    found = traceback.extract_tb(caught.value.__traceback__)
    return [
        f"{Path(frame.filename).relative_to(ROOT)}:{frame.lineno} {frame.name}"
        for frame in found
        if frame.filename.startswith(OWN)
    ]


def train_on_a_batch():
    trainer = lm.Trainer(tiny.LLAMA, num_steps=1)
    state = trainer.init(jax.random.key(0))
    tokens = np.zeros((2, 8), np.int32)
    batch = {"tokens": tokens, "targets": tokens}
    return lambda: jax.jit(trainer.step)(jax.random.key(1), state, batch)


def continue_a_prompt():
    params = lm.init(jax.random.key(0), tiny.LLAMA)
    prompt = jnp.zeros((1, 4), jnp.int32)
    return lambda: lm.generate(jax.random.key(1), params, prompt, tiny.LLAMA, Sampling(2))


def learn_by_ppo():
    env = CartPole()
    ppo = rl.Ppo(env, num_envs=4, num_steps=4)
    state = ppo.init(jax.random.key(0), None)
    return lambda: jax.jit(ppo.step)(jax.random.key(1), state, None)


def plan_from_a_belief():
    env, params = envs.make("Tiger")
    belief = pomdp.ParticleBelief(16).init(jax.random.key(0), env, params)
    planner = pomdp.Vopp(iterations=1, num_simulations=4, max_depth=2, leaf="zero")
    return lambda: planner.plan(jax.random.key(1), env, params, belief)


def fit_a_language_model():
    trainer = lm.Trainer(tiny.LLAMA, num_steps=1)
    tokens = np.zeros((2, 8), np.int32)
    batch = {"tokens": tokens, "targets": tokens}
    return lambda: fit(trainer, jax.random.key(0), lambda step: batch, Fit(num_steps=1))


def train_many_seeds():
    ppo = rl.Ppo(CartPole(), num_envs=4, num_steps=4)
    return lambda: rl.train(ppo, jax.random.key(0), None, 1)


def roll_out():
    env = CartPole()
    policy = lambda key, params, obs, carry: (0, carry)  # noqa: E731
    params = env.default_params
    state = init(jax.random.key(0), env, params, 2)
    return lambda: rollout(jax.random.key(1), state, env, params, policy, None, 2)


def simulate_an_episode():
    env, params = envs.make("Tiger")
    planner = pomdp.Pomcp(iterations=1, num_simulations=4, max_depth=2, leaf="zero")
    belief = pomdp.ParticleBelief(16)
    return lambda: pomdp.simulate(jax.random.key(0), env, params, planner, belief, 2)


def evolve_networks():
    env = CartPole()
    algorithm = neat.Neat(
        neat.NeatConfig(num_inputs=5, num_outputs=1, population=8), neat.Episodes(env, goal=100.0)
    )
    state = algorithm.init(jax.random.key(0), env.default_params)
    return lambda: algorithm.step(jax.random.key(1), state, env.default_params)


def solve_a_recurrence():
    xs = jnp.zeros((4, 2))

    def step(h, x):
        h = jnp.tanh(h + x)
        return h, leaf()

    return lambda: parallel_scan(step, jnp.zeros(2), xs, method=Newton())


WALKS = {
    "a batch": (train_on_a_batch, kernels, "attend"),
    "a prompt": (continue_a_prompt, kernels, "attend"),
    "a PPO step": (learn_by_ppo, CartPole, "transition"),
    "a belief": (plan_from_a_belief, Tiger, "transition"),
    "fit a language model": (fit_a_language_model, kernels, "attend"),
    "train many seeds": (train_many_seeds, CartPole, "transition"),
    "roll out": (roll_out, CartPole, "transition"),
    "simulate an episode": (simulate_an_episode, Tiger, "transition"),
    "evolve networks": (evolve_networks, CartPole, "transition"),
    "solve a recurrence": (solve_a_recurrence, None, ""),
}
MOST = {"a batch": 15, "a prompt": 15, "a PPO step": 15, "a belief": 15}


@pytest.mark.parametrize("name", WALKS)
def test_a_leaf_is_few_frames_from_the_call(name, monkeypatch):
    prepare, owner, attribute = WALKS[name]
    call = prepare()
    if owner is not None:
        monkeypatch.setattr(owner, attribute, leaf)
    frames = frames_of(call)
    print(f"{name}: {len(frames)} frames", *frames, sep="\n    ")
    assert 0 < len(frames) <= MOST.get(name, 25), "\n".join(frames)
