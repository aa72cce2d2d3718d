"""One optimizer for whatever is trained: `OptimizerConfig -> init(params), update(grads, state, params)`.

| file | in -> out | called by |
|---|---|---|
| `config` | flags -> OptimizerConfig | users, experiments |
| `schedules` | OptimizerConfig, length -> (step [] -> rate []); rate, length, step [] -> rate [] | `rules`, `rl` |
| `masks` | params -> bool a leaf; logical axes -> Muon's dimension numbers a leaf | `rules`, `update`, `lm` |
| `muon` | gradients of stacks of matrices [L, ...] -> orthogonalised updates, on any mesh | `rules` |
| `rules` | OptimizerConfig, length, axes, mask -> Optimizer | `nn.network`, `lm`, `rl` |
| `update` | grads, state, params -> params, state, info; the old ones where the new are not finite | all of these |

A rule that is not here is one of optax's `scale_by_*`; schedule, clip, decay and guard come with the seam.

Example:
    import jax, jax.numpy as jnp, optax
    from jaxpar.optim import Optimizer, OptimizerConfig, learning_rate

    config = OptimizerConfig(learning_rate=0.1, schedule="linear", final_ratio=0.0, warmup_steps=0)
    lion = Optimizer(optax.scale_by_lion(), learning_rate(config, 100), clip_norm=1.0)
    params = {"w": jnp.array([2.0, -1.0])}
    state, update, skipped = lion.init(params), jax.jit(lion.update), 0
    for step in range(100):
        grads = {"w": 2 * params["w"] if step != 7 else jnp.full(2, jnp.nan)}
        params, state, info = update(grads, state, params)
        skipped += int(info["skipped"])
    assert jnp.all(jnp.abs(params["w"]) < 0.1) and skipped == 1
"""

from jaxpar._renamed import renamed
from jaxpar.optim.config import OptimizerConfig
from jaxpar.optim.masks import muon_dimensions
from jaxpar.optim.rules import make_optimizer
from jaxpar.optim.schedules import annealed, learning_rate
from jaxpar.optim.update import Optimizer

__all__ = [
    "Optimizer",
    "OptimizerConfig",
    "annealed",
    "learning_rate",
    "make_optimizer",
    "muon_dimensions",
]


def __getattr__(name: str) -> object:
    return renamed(__name__, name)
