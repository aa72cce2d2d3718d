"""Models, and batches with some tokens of weight 0."""

import jax
import numpy as np
import tiny
from fast import jit
from lm_configs import with_fields

from jaxpar.nn.auxiliary import scalars
from jaxpar.pipeline.accumulation import InTurn

NEAR = 1e-12  # float64; sums in another order
V = tiny.VOCAB
ROWS = 8
T = 6
DENSE = with_fields(tiny.exact(tiny.LLAMA), z_loss=0.1, ranges=True)
EXPERTS = with_fields(
    DENSE, num_experts=4, experts_per_token=2, balance_loss=0.5, router_z_loss=0.1, router_bias=0.3
)
MODELS = {
    "dense": DENSE,
    "experts": EXPERTS,
    "sigmoid, concatenated": with_fields(
        EXPERTS, router_scores="sigmoid", balance_layers="concatenated", shared_experts=1
    ),
    "capacity": with_fields(EXPERTS, capacity=0.7),
    "capacity in groups": with_fields(EXPERTS, capacity=0.7, capacity_group=3),
}
in_turn = jit(InTurn(), static_argnums=(0, 4))


def batch_of(rows=ROWS, length=T):
    """Prompts of weight 0, answers, padding behind them, and every fourth row padding alone."""
    batch = tiny.batch_of(batch=rows, length=length)
    weights = np.random.default_rng(2).uniform(0.5, 2.0, (rows, length))
    weights[:, :2] = 0
    weights[::2, length - 2 :] = 0
    weights[3::4] = 0
    return batch | {"weights": weights}


def outcome(run, *args):
    """The loss, all metrics and auxiliary losses, and every gradient leaf."""
    (value, aux), gradient = run(*args)
    return jax.device_get((value, scalars(aux), gradient))
