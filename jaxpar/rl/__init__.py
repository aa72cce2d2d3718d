"""Learning in environments: whole runs as one program, memories trained over whole rollouts at once.

| file | in -> out | called by |
| --- | --- | --- |
| `features`, `distributions` | observations `[*L, ...]` -> `[*L, F]`; heads -> actions and log densities | `agent` |
| `board` | boards `[N, H, W, C]` -> `[N, H - 2, W - 2, K]`, by one matrix product | `network` |
| `memory`, `network` | features `[T, B, F]`, starts `[T, B]` -> heads `[T, B, width]`, in one pass | `agent` |
| `items` | items `[T, B, N, F]` -> a logit for each action of the items it names, and a value | `agent` |
| `agent` | observations `[T, B, ...]` -> policy and value; one environment's action | learners, `jaxpar.rollout` |
| `last_action_reward` | an environment -> one whose observations include the last action and reward | users |
| `returns` | rewards, values, ends `[T, B]` -> advantages and targets, by one scan each | `collect`, learners |
| `collect`, `learner` | `EnvState` -> a batch `[T, B]` -> minibatches -> updates | learners |
| `actor_critic` | a batch and weights -> terms of a loss | `ppo`, `a2c` |
| `value_decomposition`, `action_values` | observations `[T, B, ...]` -> values of actions | `pqn`, `dqn` |
| `buffer`, `replay` | rows `[M, ...]` -> a ring of them -> random rows -> updates | `dqn`, `td3`, `sac` |
| `guided_search` | a state, a policy and value -> visits `[A]` and a value | `alpha_zero` |
| `twin_critics` | observations `[M, ...]` -> actions in a box `[M, n]` -> what two critics say | `td3`, `sac` |
| `ppo`, `a2c`, `pqn`, `dqn`, `td3`, `sac`, `alpha_zero` | environment's parameters -> an update | `jaxpar.loop` |
| `train`, `population` | a learner -> its whole run, many seeds', or a population's | users, experiments |
"""

from jaxpar._renamed import renamed
from jaxpar.rl.a2c import A2c, A2cRates
from jaxpar.rl.action_values import ActionValues
from jaxpar.rl.agent import ActorCritic
from jaxpar.rl.alpha_zero import AlphaZero, AlphaZeroRates
from jaxpar.rl.dqn import Dqn, DqnRates
from jaxpar.rl.guided_search import GuidedSearch, guide_of
from jaxpar.rl.items import Items
from jaxpar.rl.last_action_reward import LastActionReward, returns_by_trial
from jaxpar.rl.learner import RENAMED
from jaxpar.rl.memory import Memory, StackMemory, memory_of
from jaxpar.rl.network import Network
from jaxpar.rl.population import Pbt
from jaxpar.rl.ppo import Ppo, PpoRates
from jaxpar.rl.pqn import Pqn, PqnRates
from jaxpar.rl.returns import RatioLimits, advantages, lambda_returns, n_step_returns, vtrace
from jaxpar.rl.sac import Sac, SacRates
from jaxpar.rl.self_play import Against, SelfPlay
from jaxpar.rl.td3 import Td3, Td3Rates
from jaxpar.rl.train import Seeds, train

__all__ = [
    "RENAMED",
    "A2c",
    "A2cRates",
    "ActionValues",
    "ActorCritic",
    "Against",
    "AlphaZero",
    "AlphaZeroRates",
    "Dqn",
    "DqnRates",
    "GuidedSearch",
    "Items",
    "LastActionReward",
    "Memory",
    "Network",
    "Pbt",
    "Ppo",
    "PpoRates",
    "Pqn",
    "PqnRates",
    "RatioLimits",
    "Sac",
    "SacRates",
    "Seeds",
    "SelfPlay",
    "StackMemory",
    "Td3",
    "Td3Rates",
    "advantages",
    "guide_of",
    "lambda_returns",
    "memory_of",
    "n_step_returns",
    "returns_by_trial",
    "train",
    "vtrace",
]


def __getattr__(name: str) -> object:
    return renamed(__name__, name)
