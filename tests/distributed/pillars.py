"""A little of each pillar on the devices of any number of processes, as plain arrays."""

import jax
import jax.numpy as jnp
from fast import jit

import envs
from jaxpar.loop import run
from jaxpar.mesh import MeshSpec, make_mesh, named_shardings, use_mesh
from jaxpar.neat import FAST, Neat, NeatConfig, Table, xor
from jaxpar.pomdp import ParticleBelief, Vopp, simulate_many
from jaxpar.rl import Network, Ppo, Pqn

CART, CART_PARAMS = envs.make("CartPole-v1")
TIGER, TIGER_PARAMS = envs.make("Tiger")
UNROLL = dict(num_envs=8, num_steps=4, epochs=1, minibatches=2)
VOPP = Vopp(16, 2, max_depth=3, eta=1.0, leaf="zero", max_nodes=64)
RATES = FAST.replace(add_node=0.4, add_conn=0.4, threshold=1.0)
NEAT = Neat(
    NeatConfig(3, 1, population=16, max_nodes=10, max_conns=16, max_species=4, rates=RATES),
    Table(tolerance=0),
)


def learned(learner):
    """Weights after an update, and what the environments then see."""
    shardings = named_shardings(
        jax.eval_shape(learner.init, jax.random.key(0), CART_PARAMS), learner.axes()
    )
    state = jit(learner.init, out_shardings=shardings)(jax.random.key(0), CART_PARAMS)

    def step(state):
        state, _ = learner.step(jax.random.key(1), state, CART_PARAMS)
        return state.weights, state.env_state.obs

    return step, state


def evolved():
    """Genomes after three generations."""
    rows = jax.tree.map(lambda x: jnp.broadcast_to(x, (3, *x.shape)), xor())
    state = jit(NEAT.init)(jax.random.key(0), None)
    return lambda state: run(NEAT, jax.random.key(1), state, rows, 3)[0].genomes, state


def planned():
    """What was done, seen and earned in eight episodes."""

    def play(key):
        played = simulate_many(key, TIGER, TIGER_PARAMS, VOPP, ParticleBelief(16), 3, 8)
        return played.action, played.obs, played.reward

    return play, jax.random.key(0)


PILLARS = {
    "ppo": lambda: learned(Ppo(CART, Network(hidden=(8,)), **UNROLL)),
    "pqn": lambda: learned(Pqn(CART, Network(hidden=(8,)), **UNROLL)),
    "neat": evolved,
    "pomdp": planned,
}


def outcome(name, devices):
    """Returns what `PILLARS[name]` makes of four devices, on the host."""
    with use_mesh(make_mesh(MeshSpec(data=4), devices)) as mesh:
        function, start = PILLARS[name]()
        everywhere = jax.sharding.NamedSharding(mesh, jax.P())
        return jax.device_get(jit(function, out_shardings=everywhere)(start))
