"""Environments: the protocol, its spaces, its proof, its pictures, and the ways in and out.

| file | in -> out | called by |
| --- | --- | --- |
| `protocols.py` | what an environment is: its parts, a planner's on top, an adapter's | everybody |
| `capabilities.py` | an environment -> its optional abilities as fields | everybody |
| `kernel.py` | parts -> `reset`, `step` (six values, no reset inside) | everybody |
| `spaces.py` | shapes and bounds -> draws, membership, masks | environments, learners |
| `draws.py` | how many of how many -> numbers that are all different | environments |
| `picture.py` | coordinates, tiles -> uint8 `[H, W, 3]`; frames -> GIF | renderers, experiments |
| `check.py` | an environment -> a report, or what it breaks | tests, authors of environments |
| `adapt.py`, `_suites.py`, `_convert.py` | another suite's environment -> `reset`, `step` | rollouts, `envs.make` |
| `facade.py` | ours -> gymnax's class; dictionaries over agents | tools of gymnax and JaxMARL |
| `gymnasium.py` | ours -> `gymnasium.Env`, `VectorEnv` | learners outside JAX |

The last two import gymnax and Gymnasium, which takes a second, and are loaded when first asked for.
"""

import importlib
from typing import TYPE_CHECKING

from jaxpar._renamed import renamed
from jaxpar.env.adapt import adapt
from jaxpar.env.capabilities import Capabilities, capabilities, is_adapter, own_discount
from jaxpar.env.check import check_action, check_environment
from jaxpar.env.draws import distinct
from jaxpar.env.kernel import reset, step
from jaxpar.env.picture import Animation, captioned, gif, grid_of
from jaxpar.env.protocols import Adapter, Environment, PartiallyObserved, Transition
from jaxpar.env.spaces import (
    Box,
    Discrete,
    Fields,
    MultiDiscrete,
    Space,
    legal_sample,
    mask_shape,
)

if TYPE_CHECKING:
    from jaxpar.env.facade import agents_view, to_gymnax
    from jaxpar.env.gymnasium import to_gymnasium, to_gymnasium_vector

__all__ = [
    "Adapter",
    "Animation",
    "Box",
    "Capabilities",
    "Discrete",
    "Environment",
    "Fields",
    "MultiDiscrete",
    "PartiallyObserved",
    "Space",
    "Transition",
    "adapt",
    "agents_view",
    "capabilities",
    "captioned",
    "check_action",
    "check_environment",
    "distinct",
    "gif",
    "grid_of",
    "is_adapter",
    "legal_sample",
    "mask_shape",
    "own_discount",
    "reset",
    "step",
    "to_gymnasium",
    "to_gymnasium_vector",
    "to_gymnax",
]

_LATER = {
    "agents_view": "facade",
    "to_gymnax": "facade",
    "to_gymnasium": "gymnasium",
    "to_gymnasium_vector": "gymnasium",
}


def __getattr__(name: str) -> object:
    if name in _LATER:
        # By name, since the point is not to import the file before.
        return getattr(importlib.import_module(f"jaxpar.env.{_LATER[name]}"), name)
    return renamed(__name__, name)
