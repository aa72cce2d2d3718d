"""What saved networks do: episodes that they were not evolved on, and a film of the champion."""

import dataclasses
import pathlib
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxpar.neat import (
    Episodes,
    Neat,
    NeatState,
    Networks,
    PlayOptions,
    Table,
    act,
    apply,
    init_carry,
    play,
)
from jaxpar.rollout import NextStep
from jaxpar.types import Array, PRNGKey, PyTree

from ..runner import say
from .policies import FILMED, PolicyRun, on_one_device, save_film


@dataclasses.dataclass(frozen=True)
class NetworkPolicy:
    """A network that acts; its params are (networks `[1]`, the environment's parameters), its carry is their memory."""

    problem: Episodes

    def __call__(
        self,
        key: PRNGKey,
        params: tuple[Networks, PyTree],
        obs: PyTree,
        carry: PyTree,
        action_mask: Array | None = None,
    ) -> tuple:
        """Returns `(action, carry)`, of the legal actions if there is a mask."""
        networks, env_params = params
        dtype, problem = networks.bias.dtype, self.problem
        rows = [leaf.reshape(-1).astype(dtype) for leaf in jax.tree.leaves(obs)]
        y, carry = apply(
            networks, carry, jnp.concatenate([*rows, jnp.ones(int(problem.constant), dtype)])[None]
        )
        space = problem.env.action_space(env_params)
        return act(space, y[0], *problem.output_range, action_mask), carry


def evaluate_table(neat: Neat, problem: Table, state: NeatState, inputs: PyTree) -> np.ndarray:
    """Tells how the champion and the population do on a table; returns the champion's fitness `[1]`."""
    with on_one_device():
        genomes, champion, inputs = jax.device_get((state.genomes, state.champion, inputs))
        score = jax.jit(lambda genomes: problem(jax.random.key(0), neat.express(genomes), inputs))
        one, all_ = jax.device_get((score(champion), score(genomes)))
    solved = [each.solved | (each.fitness >= float(state.rates.target)) for each in (one, all_)]
    say(
        f"champion   fitness {one.fitness[0]:.6g}, {'solves' if solved[0][0] else 'does not solve'} it"
    )
    _tell_population(all_.fitness, solved[1], "")
    return one.fitness


def evaluate_episodes(
    config: Any, neat: Neat, problem: Episodes, state: NeatState, params: PyTree
) -> np.ndarray:
    """Tells what fresh episodes return, and returns those of the champion, `[E]`.

    It plays `config.eval_episodes`, and each network of the population plays `problem.episodes`.
    """

    def played(
        key: PRNGKey, genomes: PyTree, params: PyTree, episodes: int, num_envs: int
    ) -> tuple[Array, Array]:
        options = PlayOptions(
            constant=problem.constant, output_range=problem.output_range, compacts=False
        )
        networks = neat.express(genomes)
        steps = problem.max_steps
        found = play(key, networks, problem.env, params, episodes, num_envs, steps, options)
        return found.returns, found.lengths

    with on_one_device():
        genomes, champion, params = jax.device_get((state.genomes, state.champion, params))
        # A key that no generation has: those are folded with its number.
        one_key, all_key = jax.random.split(
            jax.random.fold_in(jax.random.key(config.seed), 2**32 - 3)
        )
        go = jax.jit(played, static_argnums=(3, 4))
        count = config.eval_episodes
        returns, lengths = jax.device_get(go(one_key, champion, params, count, count))
        others = jax.device_get(go(all_key, genomes, params, problem.episodes, config.population))[
            0
        ]
    returns = returns[0].astype(np.float64)
    error = (
        f" ± {returns.std(ddof=1) / np.sqrt(count):.2g} (standard error of {count:,} episodes)"
        if count > 1
        else ""
    )
    say(f"champion   return {returns.mean():.5g}{error}, {returns.min():.5g} to {returns.max():.5g}, mean length "
        f"{lengths.mean():.4g}")  # fmt: skip
    means, goal = others.mean(1), min(problem.goal, float(state.rates.target))
    _tell_population(means, means >= goal, f" over {problem.episodes:,} fresh episode(s) each")
    return returns


def _tell_population(fitness: np.ndarray, solved: np.ndarray, over: str) -> None:
    # In float32 the squares of a large fitness would overflow.
    fitness = fitness.astype(np.float64)
    say(f"population {len(fitness):,} networks{over}: mean fitness {fitness.mean():.5g}, standard deviation "
        f"{fitness.std(ddof=1):.3g}, best {fitness.max():.5g}, {solved.sum():,} solve it")  # fmt: skip


def film_champion(
    config: Any,
    neat: Neat,
    problem: Episodes,
    state: NeatState,
    params: PyTree,
    plots: pathlib.Path,
) -> pathlib.Path | None:
    """Films `config.frames` steps of the champion in some environments; None, which is told, without a `render`."""
    with on_one_device():
        networks = jax.jit(neat.express)(jax.device_get(state.champion))
        carry = jax.tree.map(np.asarray, init_carry(networks))
    policy_run = PolicyRun(problem.env, params, NetworkPolicy(problem), FILMED, NextStep(), "env")
    return save_film(config.seed, policy_run, config.task, plots / "champion.gif", config.frames, fps=20,
                     weights=(networks, params), carry=carry)  # fmt: skip
