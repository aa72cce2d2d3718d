"""Batches of a language model on the devices, and its loss over a validation split."""

import functools
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxpar.lm import AdaptedState, LMConfig, loss, num_pairs, preference_loss
from jaxpar.lm.text import (
    Corpus,
    Pairs,
    batches_of,
    check_batch,
    sweep_batches,
    sweep_pairs,
    valid_batch,
)
from jaxpar.mesh import place_rows
from jaxpar.nn.attention.context import in_order, padded
from jaxpar.types import PyTree, UsageError

from ..mesh_flags import check_split, shares

Config = Any  # that of `experiments.lm`, which imports this file


def row_length(config: Config) -> int:
    """Returns the tokens of a row on the devices: `data.seq_len`, and what is padded where it does not divide.

    Where it does not divide over the N devices of a split sequence, it becomes a multiple of 2 N, for any order.
    """
    length, count = config.data.seq_len, shares("seq_layer")
    return length if length % count == 0 else -(-length // (2 * count)) * 2 * count


def check_length(config: Config) -> None:
    """Refuses sequences that neither divide over the devices that share them nor may be padded."""
    length, model = row_length(config), config.model
    if length != config.data.seq_len:
        if model.experts.num_experts:  # losses leave padding out, but experts would compute it
            check_split("data.seq_len", config.data.seq_len, "seq_layer")
        if model.positions == "learned" and length > model.max_seq_len:
            raise UsageError(
                f"data.seq_len={config.data.seq_len} is padded to {length} over mesh.context={shares('seq_layer')}, "
                f"which is over model.max_seq_len={model.max_seq_len}, that bounds learned positions."
            )
    check_split("data.seq_len", length, "seq")
    if (count := shares("seq_layer")) > 1:
        model.order(length).places(length, count)


def place(config: Config, rows: Callable[[slice], dict[str, np.ndarray]]) -> PyTree:
    """Brings a batch to the devices, its tokens in the order in which they share a sequence.

    Every batch of training and validation comes here.

    Raises:
      UsageError: A token or a target is outside of the model's vocabulary.
    """
    length, count = row_length(config), shares("seq_layer")
    order = config.model.order(length)

    def arranged(part: slice) -> dict[str, np.ndarray]:
        checked = check_batch(rows(part), config.model.vocab_size, first_row=part.start or 0)
        return in_order(padded(checked, length), order, count)

    return place_rows(arranged, config.data.batch_size, ("batch", "seq_layer"))


def judged_weights(config: Config, state: Any) -> PyTree:
    """Returns the parameters of a state: with `config.use_ema` their average.

    Raises:
      UsageError: The state has no average.
    """
    if config.use_ema and state.average is None:
        raise UsageError(
            "use_ema=true asks for an average that this run does not keep; train it with tuning.ema."
        )
    return state.averaged if config.use_ema else state.params


def select_adapters(config: Config, state: Any) -> PyTree:
    """Returns the adapters that `judged_weights` contain; None without adapters."""
    if not isinstance(state, AdaptedState):
        return None
    if config.use_ema:
        return state.average
    return state.adapters


@functools.partial(jax.jit, static_argnames="model")
def _sums(params: PyTree, batch: dict[str, jax.Array], model: LMConfig) -> jax.Array:
    """Returns the loss summed over a batch, and the sum of its weights."""
    total = valid_batch(batch, model)["weights"].sum()
    return jnp.stack([loss(params, batch, model, normaliser=jnp.float32(1)), total])


def make_evaluate(config: Config, corpus: Corpus):
    """Returns a function `state or params -> {"validation/loss": nats a token}`."""
    data = config.data
    if data.pairs:
        return _make_preference_evaluate(config, corpus)

    # Validation is that of the first source.
    layout = data.layout.split("+")[0]
    drawn = batches_of(corpus.validation, layout, data, config.seed + 1)

    def batches():
        if not config.train.eval_batches:
            for batch in sweep_batches(drawn):
                yield place(
                    config, lambda rows, batch=batch: {k: v[rows] for k, v in batch.items()}
                )
            return
        for step in range(config.train.eval_batches):
            yield place(config, functools.partial(drawn, step))

    def evaluate(state) -> Mapping[str, float]:
        params = judged_weights(config, state) if hasattr(state, "params") else state
        total = np.sum(
            [np.asarray(_sums(params, batch, config.model), np.float64) for batch in batches()],
            axis=0,
        )
        return {"validation/loss": float(total[0] / total[1])}

    return evaluate


@functools.partial(jax.jit, static_argnames=("model", "beta"))
def _preference_sums(
    params: PyTree, start: PyTree, batch: dict[str, jax.Array], model: LMConfig, beta: float
):
    value, told = preference_loss(params, start, batch, model, beta, jnp.float32(1))
    return jnp.stack([value, told.metrics["preference_accuracy"].value, num_pairs(batch, model)])


def _make_preference_evaluate(config: Config, corpus: Corpus):
    """Returns a function of a state to its loss on held-out pairs, and the share of them that it ranks right."""
    pairs = Pairs(corpus.validation, config.data.seq_len, config.data.batch_size, config.seed + 1)
    pairs.read(np.arange(0))  # what is too long is refused before the run, not at its end

    def evaluate(state) -> Mapping[str, float]:
        steps = range(config.train.eval_batches)
        params, total = judged_weights(config, state), np.zeros(3)
        for batch in map(pairs, steps) if steps else sweep_pairs(pairs):
            placed = place(config, lambda rows, batch=batch: {k: v[rows] for k, v in batch.items()})
            total += np.asarray(
                _preference_sums(params, state.start, placed, config.model, config.objective.beta)
            )
        return {
            "validation/loss": float(total[0] / total[2]),
            "validation/accuracy": float(total[1] / total[2]),
        }

    return evaluate
