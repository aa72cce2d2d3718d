"""Draws _static/saliency.png, what a memory is made of, after a short training: `python docs/saliency.py`."""

import functools
import pathlib

import jax
import jax.numpy as jnp
import matplotlib
import numpy as np

matplotlib.use("agg")

from matplotlib.figure import Figure

import envs
from jaxpar.env import reset, step
from jaxpar.experimental.saliency import saliency
from jaxpar.rl import Network, Pqn, PqnRates, train

OUT = pathlib.Path(__file__).resolve().parent / "_static" / "saliency.png"
NETWORK = Network((64,), (64,), "relu", layer_norm=True, memory="min_gru", memory_size=64)
RATES = PqnRates(
    learning_rate=2e-3, discount=0.95, q_lambda=0.9, epsilon_end=0.02, epsilon_anneal=60.0
)
UPDATES, FRAMES = 150, 6


def episode(agent, env, params, weights, key):
    """What is seen in the first steps of a greedy episode, `[FRAMES, ...]`, and whether it lasts so long."""
    obs, state = reset(key, env, params)

    def one(carry, key):
        obs, state, memory, alive = carry
        action, memory, _ = agent(key, weights, obs, memory)
        made = step(key, env, state, action, params)
        return (made.obs, made.state, memory, alive & ~(made.terminated | made.truncated)), (
            obs,
            alive,
        )

    return jax.lax.scan(
        one, (obs, state, agent.first_carry(), jnp.ones((), bool)), jax.random.split(key, FRAMES)
    )[1]


def main():
    """Trains on both views of Navigator, and draws an episode of each with the saliency of its last step's value."""
    figure = Figure(figsize=(1.5 * FRAMES, 6.6), layout="constrained")
    axes = figure.subplots(4, FRAMES)
    for row, name in ((0, "Navigator"), (2, "Navigator-Partial")):
        env, params = envs.make(name)
        learner = Pqn(
            env, NETWORK, RATES, num_envs=64, num_steps=32, epochs=2, minibatches=8, prng="batch"
        )
        state, info = jax.jit(train, static_argnums=(0, 3))(
            learner, jax.random.key(0), None, UPDATES
        )
        print(name, "returned", float(np.mean(np.asarray(info["return_mean"])[-10:])))
        agent, keys = learner.agent(greedy=True), jax.random.split(jax.random.key(1), 512)
        seen, alive = jax.jit(
            jax.vmap(functools.partial(episode, agent, env, params, state.weights))
        )(keys)
        long = int(jnp.argmax(alive[:, -1]))
        assert bool(alive[long, -1]), "no episode is long enough"
        obs, starts = seen[long][:, None], jnp.arange(FRAMES)[:, None] == 0
        carry = jax.tree.map(lambda leaf: leaf[None], agent.first_carry())
        found = np.abs(np.asarray(saliency(agent, state.weights, obs, starts, carry)[:, 0])).sum(-1)
        print(name, "norms", [f"{np.linalg.norm(x):.1e}" for x in found])
        for t in range(FRAMES):
            axes[row, t].imshow(np.asarray(obs[t, 0]), interpolation="nearest")
            axes[row + 1, t].imshow(found[t], cmap="magma", vmin=0, vmax=found.max())
            axes[row, t].set_title(f"step {t}" if row == 0 else "", fontsize=9)
        axes[row, 0].set_ylabel("all is seen" if row == 0 else "seen in part", fontsize=9)
        axes[row + 1, 0].set_ylabel("|d value / d pixel|", fontsize=9)
    for axis in axes.flat:
        axis.set(xticks=[], yticks=[])
    figure.savefig(OUT, dpi=60)


if __name__ == "__main__":
    main()
