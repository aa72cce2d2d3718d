"""What a ladder costs in loss: a small model of bytes beside the standard one."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from compiled import ROOT
from fast import OPTIMISED
from lm_configs import lm_config

from jaxpar.lm import OptimizerConfig, Trainer, loss

STEPS, ROWS, T = 1000, 8, 64
SMALL = dict(num_layers=4, embed_dim=64, num_heads=4, mlp_dim=128, dtype="float32")


@functools.cache
def corpus():
    """Bytes of the pages: the last tenth is held out."""
    text = b"".join(path.read_bytes() for path in sorted((ROOT / "docs").glob("*.md")))
    line = jnp.asarray(np.frombuffer(text, np.uint8))
    return line[: len(line) * 9 // 10], line[len(line) * 9 // 10 :]


def windows(line, starts):
    rows = line[starts[:, None] + jnp.arange(T + 1)[None]].astype(jnp.int32)
    return {"tokens": rows[:, :-1], "targets": rows[:, 1:]}


def trained(residual, seed, ladder_from=0):
    """Loss of held-out bytes after `STEPS` steps, in nats."""
    train, held_out = corpus()
    config = lm_config(**SMALL, residual=residual, ladder_from=ladder_from)
    optimizer = OptimizerConfig(learning_rate=3e-3, warmup_steps=50)
    trainer = Trainer(config, optimizer, num_steps=STEPS)

    @functools.partial(jax.jit, compiler_options=OPTIMISED)
    def run(key, train, held_out):
        def step(state, index):
            own = jax.random.fold_in(key, index)
            batch = windows(train, jax.random.randint(own, (ROWS,), 0, train.size - T - 1))
            return trainer.step(own, state, batch)[0], None

        state, _ = jax.lax.scan(
            step, trainer.init(jax.random.fold_in(key, STEPS)), jnp.arange(STEPS)
        )
        return loss(
            state.params, windows(held_out, jnp.arange(0, held_out.size - T - 1, T)), config
        )

    return float(run(jax.random.key(seed), train, held_out))


@pytest.mark.slow
def test_what_a_ladder_of_four_layers_loses(optimised):
    """The means of three seeds are in docs/benchmarks.md. Nine runs of 1,000 steps, 10 minutes on busy cores."""
    standard = np.mean([trained("standard", seed) for seed in range(3)])
    whole, half = (
        np.mean([trained("ladder", seed, ladder_from) for seed in range(3)])
        for ladder_from in (0, 2)
    )
    assert standard < 2.2 and standard < whole < 1.07 * standard, (standard, whole)
    assert half < 1.015 * standard, (standard, half)
