"""Worlds of tiles.

| file | environments |
| --- | --- |
| `rooms.py` | MiniGrid's rooms |
| `xland.py` | tasks as integer arrays: rules and a goal |
| `survival.py` | an island to live on, whose reset is costly |
| `rulesets.py` | rulesets for `xland.py`, drawn in bulk and kept in files |
| `terrain.py` | the island of `survival.py` |
| `scene.py` | the kernel of `rooms.py` and `xland.py`: a map, an agent, its view |
| `tiles.py` | what lies on a cell: its byte, its properties, its picture |
"""
