"""Prompts as arrays, and the checks of them that drawing and searching share."""

import numpy as np
from jaxtyping import Array, Int

from jaxpar.types import UsageError, concrete_values


def check_prompt(
    prompt: Int[Array | np.ndarray, "B T"],
    lengths: Int[Array | np.ndarray, " B"] | None,
    vocab_size: int,
) -> None:
    """Rejects lengths that no prompt has and tokens that are no symbols, where values are known.

    Args:
      prompt: Tokens, left-aligned; what lies beyond a row's length is not looked at.
      lengths: Tokens of each row; None for T.
      vocab_size: V.

    Raises:
      UsageError: A length or a token is out of range, or lengths are not one a row.
    """
    length = prompt.shape[1]
    if lengths is None:
        lengths = np.full(len(prompt), length)
    if np.shape(lengths) != (len(prompt),):
        found = list(np.shape(lengths))
        raise UsageError(f"prompt_lengths of shape {found}; legal is [{len(prompt)}], one a row.")
    if (known := concrete_values(lengths)) is None:
        return
    counts = np.asarray(known[0])
    if counts.size and not (1 <= counts.min() and counts.max() <= length):
        found = f"{counts.min()} to {counts.max()}"
        raise UsageError(f"prompt_lengths from {found}; legal are 1 to {length}.")

    if (known := concrete_values(prompt)) is None:
        return
    is_token = np.broadcast_to(np.arange(length) < counts[:, None], prompt.shape)
    tokens = known[0][is_token]
    if tokens.size and not (0 <= tokens.min() and tokens.max() < vocab_size):
        worst = tokens.max()
        if tokens.min() < 0:
            worst = tokens.min()
        raise UsageError(f"token {worst} of a prompt; legal are 0 to {vocab_size - 1}.")
