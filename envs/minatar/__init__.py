"""MinAtar's games in pure parts (Young and Tian 2019), with gymnax's draws: equal to its step by step from equal keys.

| file | game |
| --- | --- |
| `console.py` | `MinAtar`, the environment that plays one |
| `breakout.py` | a ball, a paddle, three rows of bricks |
| `asterix.py` | gold to collect, enemies to avoid |
| `freeway.py` | a road to cross |
| `space_invaders.py` | aliens to shoot |
"""
