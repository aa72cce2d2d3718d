"""Helpers of commands that act in environments.

| file | in -> out | called by |
| --- | --- | --- |
| `environment.py` | name and flags -> environment and parameters | `env.py`, `rl.py`, `pomdp.py` |
| `policies.py` | name of a policy, environment -> rollouts, films | `env.py`, `rl.py` |
| `returns.py` | learned policy -> returns of whole episodes | `rl.py` |
| `champions.py` `neat_brains.py` | evolved networks -> episodes, brains of a world | `neat.py`, `life.py` |
| `world_film.py` | frames of a world -> film, lineages over time | `life.py` |
| `rock_beliefs.py` | maps of rocks -> beliefs, rock by rock | `pomdp.py` |
| `solved_policies.py` | files of models -> arrays, solved policies | `pomdp.py` |
| `regrets.py` `pomdp_film.py` | decisions -> exact losses; episode -> film | `pomdp.py` |
"""
