"""Many copies of an environment, walked by one policy: where an episode ends is an argument, not a base class.

| file | in -> out | called by |
| --- | --- | --- |
| `draws.py` | key, steps, lanes B -> keys, one a lane and use | `lanes`, `resets`, `unroll` |
| `lanes.py` | key, environment, B -> `Lanes` at their first observations | users, `unroll` |
| `costs.py` | program -> operations | `resets` |
| `resets.py` | finished `[B]` -> states and observations with the finished begun anew | `unroll` |
| `policies.py` | key, legal actions -> a random one | users |
| `unroll.py` | `Lanes` B, policy, T -> `Lanes`, `Steps [T, B]` | learners, planners, `statistics` |
| `statistics.py` | `Steps [T, B]` -> returns and lengths by `where`; faults with lane and step | experiments |
"""

from jaxpar.rollout.lanes import Lanes, begin
from jaxpar.rollout.policies import RandomPolicy, random_policy
from jaxpar.rollout.resets import Chunked, GivenLevel, NextStep, NoReset, Pool, Reset, SameStep
from jaxpar.rollout.statistics import Episodes, check_steps, evaluate, first_episodes, summary
from jaxpar.rollout.unroll import Policy, Steps, unroll

__all__ = [
    "Chunked",
    "Episodes",
    "GivenLevel",
    "Lanes",
    "NextStep",
    "NoReset",
    "Policy",
    "Pool",
    "RandomPolicy",
    "Reset",
    "SameStep",
    "Steps",
    "begin",
    "check_steps",
    "evaluate",
    "first_episodes",
    "random_policy",
    "summary",
    "unroll",
]
