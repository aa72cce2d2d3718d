"""What policies that were learned return: whole episodes of likeliest actions, or of a search that they lead."""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxpar.env import capabilities, is_adapter
from jaxpar.rl import ActorCritic, Against, GuidedSearch, guide_of, returns_by_trial
from jaxpar.rollout import EvaluateOptions, NoReset, RolloutOptions, evaluate, init, rollout
from jaxpar.types import PyTree, UsageError

from ..runner import say
from .environment import changes
from .policies import Revealing, on_one_device, player

__all__ = [
    "comparison_lines",
    "compared",
    "evaluation_against_itself",
    "evaluation_by_search",
    "evaluation_by_trial",
    "evaluation_returns",
    "evaluation_while_learning",
    "in_play",
]


def in_play(learner: Any, params: PyTree) -> PyTree:
    """The parameters of the learner's own environment: those of a match against chance, where it plays itself."""
    played = learner.env
    return (
        dataclasses.replace(played.default_params, env=params)
        if isinstance(played, Against)
        else params
    )


def evaluation_by_search(config: Any, learner: Any, params: PyTree, state: PyTree) -> np.ndarray:
    """Returns the mean return of each seed, `[S]`, over the episodes of `evaluation_returns`, by searches.

    Raises:
      UsageError: There is no policy and value to lead a search, or no state to search from.
    """
    agent, name = learner.agent(greedy=True), f"search={config.search}"
    if not isinstance(agent, ActorCritic):
        raise UsageError(
            f"{name} needs a policy and a value: algorithm=ppo, a2c or alpha_zero, not {config.algorithm}."
        )
    if is_adapter(learner.env) or isinstance(learner.env, Against) or agent.num_agents:
        raise UsageError(
            f"{name} needs an environment of one agent whose step can be asked, which {config.env} is not."
        )
    if config.memory != "none":
        raise UsageError(
            f"{name} needs a policy without a memory, and this one has memory={config.memory}."
        )
    if not hasattr(agent.action_space, "n") or agent.action_space.shape:
        raise UsageError(
            f"{name} chooses among Discrete actions; {config.env} takes {agent.action_space}."
        )
    usual = {field.name: field.default for field in dataclasses.fields(GuidedSearch)}
    search = GuidedSearch(**changes("search", "a guided search", usual, config.search))
    env, discount = Revealing(learner.env), float(learner.rates.discount)

    def play(key, weights, params):
        def most_visited(key, weights, obs, carry):
            searched = search(key, learner.env, obs[1], params, guide_of(agent, weights), discount)
            return jnp.argmax(searched.visits), carry

        return evaluate(
            key, env, params, most_visited, weights, config.eval_episodes, config.eval_steps
        )

    with on_one_device():
        key = jax.random.fold_in(jax.random.key(config.seed), 2**32 - 3)
        args = jax.device_get((state.weights, params))
        played = jax.jit(
            lambda key, all_weights, params: jax.lax.map(
                lambda w: play(key, w, params), all_weights
            )
        )
        played = jax.device_get(played(key, *args))
    _tell_cut(config, played.finished)
    return np.asarray(played.returns, np.float64).mean(1)


def evaluation_against_itself(
    config: Any, learner: Any, params: PyTree, state: PyTree
) -> np.ndarray:
    """Returns the mean return of each seed, `[S]`, against rivals who act by the same weights."""
    sizes, agent = (config.eval_episodes, config.eval_steps), learner.agent(greedy=True)

    def play(key, weights, match):
        return _whole_episodes(
            key, learner.env, match.replace(rival=weights), agent, weights, *sizes
        )[0]

    with on_one_device():
        key = jax.random.fold_in(jax.random.key(config.seed), 2**32 - 3)
        of_all = jax.jit(
            lambda key, weights, match: jax.lax.map(lambda one: play(key, one, match), weights)
        )
        return np.asarray(of_all(key, *jax.device_get((state.weights, params))))


def evaluation_while_learning(
    config: Any, learner: Any, params: PyTree, state: PyTree
) -> dict[str, float]:
    """Returns what whole episodes of likeliest actions return now, the mean over seeds and each one's, as metrics."""
    returns = _of_each_seed(_whole_episodes, config, learner, params, state)[0]
    each = {f"eval/seed_{i:02}": float(x) for i, x in enumerate(returns)}
    return {"eval/return_mean": float(returns.mean())} | each


def evaluation_returns(config: Any, learner: Any, params: PyTree, state: PyTree) -> np.ndarray:
    """Returns the mean return of each seed's agent, `[S]`, over whole episodes of likeliest actions."""
    returns, finished = _of_each_seed(_whole_episodes, config, learner, params, state)
    _tell_cut(config, finished)
    return returns


def _tell_cut(config: Any, finished: np.ndarray) -> None:
    if (cut := 1 - float(finished.mean())) > 0:
        say(f"note       {cut:.1%} of the episodes went on after eval_steps={config.eval_steps}, and count as far as "
            "they came")  # fmt: skip


def evaluation_by_trial(
    config: Any, learner: Any, params: PyTree, state: PyTree
) -> np.ndarray | None:
    """Returns what each seed's agent earns in each trial of an episode, `[S, K]`, in those same episodes.

    None where nothing is recalled, or the environment counts no trials.
    """
    if not config.last_action_reward or capabilities(learner.env).trial is None:
        return None
    rewards, trials = _of_each_seed(_rows_of_trials, config, learner, params, state)
    of_one = functools.partial(returns_by_trial, num_trials=trials.max() + 1)
    return np.asarray(jnp.mean(jax.vmap(of_one)(rewards, trials), -1))


def compared(config: Any, learner: Any, params: PyTree) -> tuple[np.ndarray, np.ndarray | None]:
    """Returns what episodes of random legal play earn, and of scripted play, None where the environment has none."""
    env = learner.env.env if config.last_action_reward else learner.env
    params, found = jax.device_get(params), []
    with on_one_device():
        key = jax.random.fold_in(jax.random.key(config.seed), 2**32 - 4)
        for name in ("random", "scripted"):
            try:
                shown, policy = player(name, env)
            except UsageError:
                found.append(None)
                continue
            played = evaluate(
                key, shown, params, policy, params, config.eval_episodes, config.eval_steps
            )
            returns = np.asarray(played.returns, np.float64)
            found.append(returns.reshape(len(returns), -1).mean(1))
    return found[0], found[1]


def comparison_lines(
    returns: np.ndarray, chance: np.ndarray, scripted: np.ndarray | None
) -> list[str]:
    """Returns lines: how far what each seed learned is above chance, and how far on the way to scripted play."""

    def spread(x):
        return x.mean(), x.std(ddof=1) / np.sqrt(len(x)) if len(x) > 1 else float("nan")

    def over(part, whole):  # all alike, or a scripted team that returns 0, is no reason to stop
        with np.errstate(divide="ignore", invalid="ignore"):
            return np.float64(part) / np.float64(whole)

    (mean, error), (least, blur) = spread(returns), spread(chance)
    above = over(mean - least, np.hypot(error, blur))
    lines = [
        f"random     {least:.5g} ± {blur:.2g} (standard error over episodes); what was learned is {above:.1f} standard "
        "errors above"
    ]
    if scripted is not None:
        most, blur = spread(scripted)
        lines.append(
            f"scripted   {most:.5g} ± {blur:.2g} (likewise); learned / scripted {over(mean, most):.3g}, "
            f"(learned - random) / (scripted - random) {over(mean - least, most - least):.3f}"
        )
    return lines


def _whole_episodes(key, env, params, agent, weights, episodes, steps):
    options = EvaluateOptions(carry=agent.first_carry())
    played = evaluate(key, env, params, agent, weights, episodes, steps, options)
    return jnp.mean(played.returns), jnp.mean(played.finished)


def _rows_of_trials(key, env, params, agent, weights, episodes, steps):
    env_state = init(key, env, params, episodes, agent.first_carry())
    options = RolloutOptions(
        reset=NoReset(),
        keep=lambda row: (row.reward, jnp.where(row.valid, row.info["trial"], 0)),
    )
    return rollout(key, env_state, env, params, agent, weights, steps, options)[1]


@functools.partial(jax.jit, static_argnames=("play", "env", "agent", "episodes", "steps"))
def _played(play: Callable, key, env, params, agent, weights, episodes: int, steps: int) -> PyTree:
    return jax.lax.map(lambda one: play(key, env, params, agent, one, episodes, steps), weights)


def _of_each_seed(
    play: Callable, config: Any, learner: Any, params: PyTree, state: PyTree
) -> PyTree:
    """What `play` gives by the likeliest actions of each seed's agent, stacked; on one device."""
    with on_one_device():
        key, agent = (
            jax.random.fold_in(jax.random.key(config.seed), 2**32 - 3),
            learner.agent(greedy=True),
        )
        args = key, learner.env, jax.device_get(params), agent, jax.device_get(state.weights)
        return jax.device_get(_played(play, *args, config.eval_episodes, config.eval_steps))
