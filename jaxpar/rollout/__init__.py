"""Many copies of an environment under one policy: what happens where an episode ends is an argument, not a base class.

| file | in -> out | called by |
| --- | --- | --- |
| `prng.py` | key, steps, B environments -> keys, one an environment and use | `env_state`, `resets`, `trajectory` |
| `env_state.py` | key, environment, B -> `EnvState` at the first observations | users, `trajectory` |
| `costs.py` | program -> operations | `resets` |
| `flags.py` | flags -> the place of a set one, by rank or drawn | `resets`, `policies` |
| `resets.py` | finished `[B]` -> states and observations, those of the finished from new episodes | `trajectory` |
| `policies.py` | what a policy is; key, legal actions -> a random one | users, `trajectory` |
| `trajectory.py` | `EnvState` of B, policy, T -> `EnvState`, `Trajectory [T, B]` | learners, `statistics` |
| `statistics.py` | `Trajectory [T, B]` -> returns and lengths; faulty actions and rewards | experiments |
"""

from jaxpar._renamed import renamed
from jaxpar.rollout.env_state import EnvState, init, per_env, where
from jaxpar.rollout.policies import MaskedPolicy, Policy, RandomPolicy, random_policy
from jaxpar.rollout.prng import check_prng
from jaxpar.rollout.resets import Chunked, GivenLevel, NextStep, NoReset, Pool, Reset, SameStep
from jaxpar.rollout.statistics import (
    EpisodeResults,
    EvaluateOptions,
    check_trajectory,
    episode_stats,
    evaluate,
    first_episodes,
)
from jaxpar.rollout.trajectory import RolloutOptions, Trajectory, rollout

__all__ = [
    "Chunked",
    "EnvState",
    "EpisodeResults",
    "EvaluateOptions",
    "GivenLevel",
    "MaskedPolicy",
    "NextStep",
    "NoReset",
    "Policy",
    "Pool",
    "RandomPolicy",
    "Reset",
    "RolloutOptions",
    "SameStep",
    "Trajectory",
    "check_prng",
    "check_trajectory",
    "episode_stats",
    "evaluate",
    "first_episodes",
    "init",
    "per_env",
    "random_policy",
    "rollout",
    "where",
]


def __getattr__(name: str) -> object:
    return renamed(__name__, name)
