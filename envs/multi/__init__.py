"""Several agents, who act at once.

| file | environments |
| --- | --- |
| `particles.py` | spread, tag, speaker and listener on a plane |
| `foraging.py` | food that only enough agents together can lift |
| `combat.py` | two teams of melee, ranged and healing units |
| `discs.py` | the physics and the picture of `particles.py` |
"""
