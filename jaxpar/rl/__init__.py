"""Learning in environments: whole runs as one program, memories trained over whole unrolls at once.

| file | in -> out | called by |
| --- | --- | --- |
| `features`, `distributions` | observations `[*L, ...]` -> `[*L, F]`; heads -> draws and their densities | `agent` |
| `board` | boards `[N, H, W, C]` -> `[N, H - 2, W - 2, K]`, by one matrix product | `network` |
| `memory`, `network` | features `[T, B, F]`, starts `[T, B]` -> heads `[T, B, width]`, in one pass | `agent` |
| `agent` | observations `[T, B, ...]` -> policy and value; one lane's action | learners, `jaxpar.rollout` |
| `recall` | an environment -> one that tells the last action and reward (RL^2) | users |
| `returns` | rewards, values, ends `[T, B]` -> advantages and targets, by one scan each | `collect`, learners |
| `collect`, `learner` | lanes -> a batch `[T, B]` -> minibatches -> updates | learners |
| `mixers`, `action_values` | observations `[T, B, ...]` -> values of actions, of agents and teams | `pqn`, `dqn` |
| `saliency` | observations `[T, B, ...]` -> what the value of a step owes to each of them | users |
| `buffer` | rows `[M, ...]` -> a ring of them -> random rows | `dqn` |
| `ppo`, `a2c`, `pqn`, `dqn` | environment's parameters -> an update | `jaxpar.loop` |
| `train` | a learner -> its whole run, or many seeds' | users, experiments |
"""

from jaxpar.rl.a2c import A2c, A2cRates
from jaxpar.rl.action_values import ActionValues
from jaxpar.rl.agent import ActorCritic
from jaxpar.rl.dqn import Dqn, DqnRates
from jaxpar.rl.memory import Memory, Recurrent, StackMemory
from jaxpar.rl.network import Network
from jaxpar.rl.ppo import Ppo, PpoRates
from jaxpar.rl.pqn import Pqn, PqnRates
from jaxpar.rl.recall import Recalling, returns_by_trial
from jaxpar.rl.returns import advantages, lambda_returns, n_step_returns, next_values
from jaxpar.rl.saliency import saliency
from jaxpar.rl.train import Seeds, train

__all__ = [
    "A2c",
    "A2cRates",
    "ActionValues",
    "ActorCritic",
    "Dqn",
    "DqnRates",
    "Memory",
    "Network",
    "Ppo",
    "PpoRates",
    "Pqn",
    "PqnRates",
    "Recalling",
    "Recurrent",
    "Seeds",
    "StackMemory",
    "advantages",
    "lambda_returns",
    "n_step_returns",
    "next_values",
    "returns_by_trial",
    "saliency",
    "train",
]
