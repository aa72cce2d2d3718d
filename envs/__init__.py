"""Environments in families: `from jaxpar import envs`, in a checkout also `import envs`.

`envs.make("RockSample-7-8")` gives an environment and its default parameters, `envs.names()` all names. A file holds an
environment or variants of one; its docstring has the rules and their source. To add one, write a file whose `VARIANTS`
maps names to functions without arguments, and name it in `registry.MODULES`.

| family | what is there |
| --- | --- |
| `classic/` | control of carts, poles and cars with continuous states |
| `memory/` | card games and masked controls that only memory wins |
| `arcade/` | small games in pixels, each seen in full or in part |
| `minatar/` | MinAtar's games in pure parts |
| `multi/` | several agents: particles, foraging, combat |
| `grid/` | maps of tiles: MiniGrid's rooms, tasks as rules, survival |
| `pomdp/` | problems of planning under uncertainty, with likelihoods of observations |
| `puzzles/` | problems of combinatorics with exact answers, drawn or given |
"""

from .registry import make, names

__all__ = ["make", "names"]
