"""Environments: the protocol, its spaces, its proof.

| file | in -> out | called by |
| --- | --- | --- |
| `kernel.py` | parts -> `reset`, `step` (six values, no reset inside) | everybody |
| `spaces.py` | shapes and bounds -> draws, membership | environments, learners |
"""

from jaxpar.env.kernel import Environment, Transition, reset, step
from jaxpar.env.spaces import Box, Discrete, Fields, MultiDiscrete, Space

__all__ = ["Box", "Discrete", "Environment", "Fields", "MultiDiscrete", "Space", "Transition", "reset", "step"]
