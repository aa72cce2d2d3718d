"""Artificial life: a world that evolves, as one program a step.

| file | in -> out | called by |
| --- | --- | --- |
| `units.py`, `laws.py` | whole numbers and exact sums; laws in units -> `Prices` | all |
| `terrain.py` | angles `[6, L, L]` -> fields `[6, S, S]`; energy `[S, S]` a step later | `world.py` |
| `bodies.py` | positions `[M, 2]` -> neighbours `[M, k]`; `Actions` of M -> energies, places | `world.py` |
| `robots.py` | memories, programs `[R, 16]` -> memories, bits of the ground | `world.py` |
| `brains.py` | genomes `[N, ...]`, `Sight` of N -> outputs `[N, 44]` | `world.py`, users |
| `inhabitants.py`, `births.py` | `WorldState`, the book of energy, what is seen and told; who is born | `world.py` |
| `world.py` | key, `WorldState` -> `WorldState`, info | `jaxpar.loop`, users |
| `picture.py` | `WorldState` -> `[H, W, 3]` | experiments, users |
| `gadgets.py` | bits, rules -> worlds with robots set by hand | tests, users |
"""

from jaxpar._renamed import renamed
from jaxpar.life.bodies import ACTION_WIDTHS, NUM_ACTIONS, action_index, action_slice, join_actions
from jaxpar.life.brains import Brain, Jitter, Lstm, Reflex, Sight
from jaxpar.life.gadgets import automaton_ring, ring_bits
from jaxpar.life.inhabitants import Agents, WorldState
from jaxpar.life.laws import FIRST_LAWS, Laws, Prices
from jaxpar.life.picture import draw_world, lineage_colours
from jaxpar.life.world import World

__all__ = [
    "ACTION_WIDTHS",
    "FIRST_LAWS",
    "NUM_ACTIONS",
    "Agents",
    "Brain",
    "Jitter",
    "Laws",
    "Lstm",
    "Prices",
    "Reflex",
    "Sight",
    "World",
    "WorldState",
    "action_index",
    "action_slice",
    "automaton_ring",
    "draw_world",
    "join_actions",
    "lineage_colours",
    "ring_bits",
]


def __getattr__(name: str) -> object:
    return renamed(__name__, name)
