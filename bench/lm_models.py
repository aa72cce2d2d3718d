"""Language models of benchmarks, from sizes under names that their peers share: `num_heads`, `mlp_dim`.

A process whose path begins with an older checkout makes that one's models: before configurations
were nested, these were the names of their fields.
"""

import dataclasses
import importlib.util
import statistics
import time
from typing import Any

import jax
import jax.numpy as jnp

from jaxpar import decode, lm

__all__ = ["Training", "generate", "gpt2_of", "llama_of", "lm_config", "prefill", "with_sizes"]

HAS_DECODING = hasattr(decode, "Decoding")
IS_NESTED = importlib.util.find_spec("jaxpar.lm.flat_names") is not None


def lm_config(**sizes: Any) -> lm.LMConfig:
    """Returns the model of these sizes."""
    if not IS_NESTED:
        return lm.LMConfig(**sizes)
    from jaxpar.fields import make_nested

    return make_nested(lm.LMConfig, _paths(sizes))


def gpt2_of(**sizes: Any) -> lm.LMConfig:
    """Returns GPT-2 with these sizes."""
    return lm.gpt2(**_paths(sizes))


def llama_of(**sizes: Any) -> lm.LMConfig:
    """Returns Llama with these sizes."""
    return lm.llama(**_paths(sizes))


def with_sizes(config: lm.LMConfig, **sizes: Any) -> lm.LMConfig:
    """Returns the model with other sizes."""
    if not IS_NESTED:
        return dataclasses.replace(config, **sizes)
    from jaxpar.fields import replace_nested

    return replace_nested(config, _paths(sizes))


def generate(
    key: jax.Array,
    params: Any,
    prompt: jax.Array,
    config: lm.LMConfig,
    sampling: Any,
    *,
    draft_params: Any = None,
    **options: Any,
) -> Any:
    """Returns `jaxpar.lm.generate` of prompts; options are named as its arguments once were."""
    if not HAS_DECODING:
        return lm.generate(
            key, params, prompt, config, sampling, draft_params=draft_params, **options
        )
    from jaxpar.decode import Decoding, Prompts

    prompts = Prompts(prompt, options.pop("prompt_lengths", None), options.pop("seeds", None))
    decoding = Decoding(**options)
    return lm.generate(key, params, prompts, config, sampling, decoding, draft_params=draft_params)


def prefill(
    params: Any, tokens: jax.Array, lengths: jax.Array, config: lm.LMConfig, slots: int
) -> Any:
    """Returns logits after prompts, and their cache."""
    if not HAS_DECODING:
        from jaxpar.lm.sample import prefill as older

        return older(params, tokens, lengths, config, slots)
    return lm.Decoder(config).prefill(params, tokens, lengths, slots)


class Training:
    """An optimizer's step, compiled, and the state that it goes on from."""

    def __init__(
        self,
        trainer: lm.Trainer,
        key: jax.Array,
        state: Any,  # of the trainer, of this checkout or an older one
        batches: list[dict],
    ):
        """Compiles the step for batches that take turns."""
        from jaxpar.loop import compile_step

        start = time.perf_counter()
        self.step = compile_step(trainer, state, batches[0], axes=trainer.axes())
        self.compile_s = time.perf_counter() - start
        self.key, self.state, self.batches, self.count = key, state, batches, 0

    def group(self, calls: int) -> float:
        """Takes so many steps; returns the seconds of one."""
        begin = time.perf_counter()
        for _ in range(calls):
            batch = self.batches[self.count % len(self.batches)]
            self.state, info = self.step(self.key, jnp.int32(self.count), self.state, batch)
            self.count += 1
        self.losses = info["loss"]
        if not jnp.isfinite(self.losses).all():
            raise SystemExit("the loss is not finite")
        return (time.perf_counter() - begin) / calls

    def median_s(self, warmup: int, steps: int) -> float:
        """Returns the median seconds of a step over ten groups, after a warm-up."""
        self.group(warmup)
        return statistics.median(self.group(max(1, steps // 10)) for _ in range(10))


def _paths(sizes: dict[str, Any]) -> dict[str, Any]:
    """Returns the values by the paths of fields, where configurations are nested."""
    if not IS_NESTED:
        return sizes
    from jaxpar.lm.flat_names import FLAT_NAMES

    return {
        name if dataclasses.is_dataclass(value) else FLAT_NAMES.get(name, name): value
        for name, value in sizes.items()
    }
