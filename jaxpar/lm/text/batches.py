"""Weights of tokens, and ids outside of the vocabulary: rejected on the host, left out in `jit`.

A target counts if its weight is not 0, it is in [0, V), and so is the token that it follows.
Everything that divides by the weights, or weights something by them, takes `valid_batch` and
`normaliser_of` from here, so that all forms of a step agree on what counts.

Example:
    import numpy as np

    from jaxpar.lm import LMConfig
    from jaxpar.lm.text.batches import check_batch, normaliser_of, report_of, valid_batch

    config = LMConfig(vocab_size=8)
    batch = {"tokens": np.array([[1, 2, 9]]), "targets": np.array([[2, -100, 3]])}
    valid = valid_batch(batch, config)
    assert valid["weights"].tolist() == [[1, 0, 0]] and normaliser_of(batch, config) == 1
    report = report_of(batch, config)
    assert report.invalid_tokens == 1 and report.invalid_targets == 1 and not report.empty

    labels = {"tokens": np.array([[1, 2]]), "targets": np.array([[2, -100]])}
    assert check_batch(labels, 8)["weights"].tolist() == [[1, 0]]
"""

import functools
from collections.abc import Iterator, Mapping
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int

from jaxpar.lm.config import LMConfig
from jaxpar.nn.mixer import TokenInfo
from jaxpar.types import UsageError

__all__ = ["check_batch", "valid_batch"]

IGNORED = -100
"""Target that `check_batch` turns into weight 0, as the losses of transformers do."""

PREFIXES = ("", "rejected_")
"""Beginnings of the names of arrays; the second is for pairs of preferences."""


class BatchReport(NamedTuple):
    """Counts over all tokens of a batch, of the same value under every layout.

    Attributes:
      empty: Whether no token counts.
      invalid_tokens: Number of tokens outside of [0, V).
      invalid_targets: Number of targets outside of [0, V) with a weight other than 0.
    """

    empty: Bool[Array, ""]
    invalid_tokens: Int[Array, ""]
    invalid_targets: Int[Array, ""]


def valid_ids(ids: Int[Array, "B T"], vocab_size: int) -> Int[Array, "B T"]:
    """Returns the ids, with 0 for each one outside of [0, V)."""
    return jnp.where(_is_symbol(ids, vocab_size), ids, 0)


def valid_batch(batch: Mapping[str, jax.Array], config: LMConfig) -> dict[str, jax.Array]:
    """Returns a batch with ids that are all symbols, and with weight 0 where they were not.

    A token outside of [0, V) is read as symbol 0, and its own target weighs 0. Later targets of its
    row still count, though they may depend on that symbol: `report_of` counts the token, so that
    this is not silent. Applied twice it does what it does once.

    Args:
      batch: "tokens" and "targets" int [B, T], and maybe "weights" float [B, T].
      config: The model; static.
    """
    tokens = batch["tokens"]
    targets = batch["targets"]
    size = config.vocab_size
    is_valid = _is_symbol(tokens, size) & _is_symbol(targets, size)

    weights = batch.get("weights")
    if weights is None:
        weights = is_valid.astype(jnp.promote_types(config.dtype, jnp.float32))
    else:
        weights = jnp.where(is_valid, weights, 0)

    valid = {
        "tokens": valid_ids(tokens, size),
        "targets": valid_ids(targets, size),
        "weights": weights,
    }
    return dict(batch) | valid


def token_info(batch: Mapping[str, jax.Array]) -> TokenInfo:
    """Returns the data of a batch's tokens besides their ids and targets."""
    return TokenInfo(
        positions=batch.get("positions"),
        segments=batch.get("segments"),
        places=batch.get("places"),
        weights=batch.get("weights"),
    )


def normaliser_of(batch: Mapping[str, jax.Array], config: LMConfig) -> Float[Array, ""]:
    """Returns the sum of the weights of valid targets, or 1 where none of them counts."""
    weights = valid_batch(batch, config)["weights"]
    return jnp.where(jnp.any(weights != 0), weights.sum(), 1)


def report_of(batch: Mapping[str, jax.Array], config: LMConfig) -> BatchReport:
    """Counts ids outside of the vocabulary, at the cost of one read of them."""
    is_empty = ~jnp.any(valid_batch(batch, config)["weights"] != 0)
    bad_tokens = jnp.int32(0)
    bad_targets = jnp.int32(0)
    for tokens, targets in _bad_ids(batch, config):
        bad_tokens += tokens.sum(dtype=jnp.int32)
        bad_targets += targets.sum(dtype=jnp.int32)
    return BatchReport(is_empty, bad_tokens, bad_targets)


def has_invalid(batch: Mapping[str, jax.Array], config: LMConfig) -> Bool[Array, " B"]:
    """Returns which rows have a token, or a target with a weight other than 0, outside of [0, V)."""
    found = [jnp.any(tokens | targets, -1) for tokens, targets in _bad_ids(batch, config)]
    return functools.reduce(jnp.logical_or, found)


def _bad_ids(
    batch: Mapping[str, jax.Array], config: LMConfig
) -> Iterator[tuple[Bool[Array, "B T"], Bool[Array, "B T"]]]:
    """Yields which tokens, and which targets that should count, are no symbols."""
    for prefix in PREFIXES:
        if f"{prefix}tokens" not in batch:
            continue
        targets = ~_is_symbol(batch[f"{prefix}targets"], config.vocab_size)
        if f"{prefix}weights" in batch:
            targets &= batch[f"{prefix}weights"] != 0
        yield ~_is_symbol(batch[f"{prefix}tokens"], config.vocab_size), targets


def check_batch(
    batch: Mapping[str, np.ndarray],
    vocab_size: int,
    first_row: int = 0,
) -> dict[str, np.ndarray]:
    """Rejects ids outside of the vocabulary, on the host.

    Targets of -100 get weight 0 and become 0. Other targets of weight 0 may be any number, since
    nothing reads them.

    Args:
      batch: NumPy arrays [b, T] as `jaxpar.lm.loss` takes them, or as its preferences do.
      vocab_size: V.
      first_row: Number of the first row in the whole batch, for the error.

    Returns:
      The batch; the same arrays where no target is -100.

    Raises:
      UsageError: A token, or a target with a weight other than 0, is outside of [0, V).
    """
    out = dict(batch)
    for prefix in PREFIXES:
        if f"{prefix}tokens" not in batch:
            continue
        _reject(f"{prefix}tokens", batch, vocab_size, None, first_row)
        if f"{prefix}targets" not in batch:
            continue

        # What NumPy computes is known even where a jitted closure captures a batch of JAX's.
        targets = np.asarray(batch[f"{prefix}targets"])
        weights = batch.get(f"{prefix}weights")
        is_ignored = targets == IGNORED
        if is_ignored.any():
            if weights is None:
                weights = np.ones(targets.shape, np.float32)
            out[f"{prefix}targets"] = np.where(is_ignored, 0, targets).astype(targets.dtype)
            out[f"{prefix}weights"] = np.where(is_ignored, 0, weights).astype(weights.dtype)
        _reject(f"{prefix}targets", out, vocab_size, out.get(f"{prefix}weights"), first_row)
    return out


def _reject(
    name: str,
    batch: Mapping[str, np.ndarray],
    vocab_size: int,
    weights: np.ndarray | None,
    first_row: int,
) -> None:
    """Raises `UsageError` for the first id that is no symbol and has a weight other than 0."""
    ids = np.asarray(batch[name])
    is_bad = (ids < 0) | (ids >= vocab_size)
    if weights is not None:
        is_bad &= np.asarray(weights) != 0
    if not is_bad.any():
        return

    row, position = (int(index[0]) for index in np.nonzero(is_bad))
    legal = f"0 to {vocab_size - 1}"
    if weights is not None or name.endswith("targets"):
        legal = f"{legal}, {IGNORED} for a target that shall not count, or weight 0"
    raise UsageError(
        f"{name}={int(ids[row, position])} at row {first_row + row}, position {position} of a batch: "
        f"it is no symbol of model.vocab_size={vocab_size}; expected {legal}."
    )


def _is_symbol(ids: jax.Array, vocab_size: int) -> jax.Array:
    return (ids >= 0) & (ids < vocab_size)
