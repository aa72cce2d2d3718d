"""Batches of a corpus as a pure function of (seed, step).

`corpus.py` gives streams of tokens; here a keyed bijection decides which window of the stream is sample
number i of a run. A resumed run needs no saved iterator, and hosts draw their rows of one global batch.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from jaxpar.fields import AtLeast, Finite, check_fields, field
from jaxpar.lm.text.corpus import Corpus, DataConfig, Tokens, open_corpus
from jaxpar.types import UsageError

__all__ = [
    "Corpus",
    "DataConfig",
    "Pairs",
    "Windows",
    "open_corpus",
    "permuted",
    "sweep",
    "sweep_pairs",
]

_ROUNDS = 8


def _mix(*words) -> np.ndarray:
    """Hashes integers, broadcast together, to uint64: one splitmix64 step (Steele et al. 2014) a word."""
    state = np.zeros(1, np.uint64)  # an array, since only arrays wrap around without a warning
    for word in words:
        state = state + np.asarray(word).astype(np.uint64) + np.uint64(0x9E3779B97F4A7C15)
        state = (state ^ (state >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        state = (state ^ (state >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
        state = state ^ (state >> np.uint64(31))
    return state


def permuted(slots: np.ndarray, size: int, seed: int, epochs: np.ndarray) -> np.ndarray:
    """Maps slots of `0..size-1` one to one onto `0..size-1`, by a permutation keyed by seed and epoch.

    A Feistel network on the digits of a slot in mixed radix (Black and Rogaway 2002, "generalised
    Feistel"): each round adds a hash of one digit to the other. The digits span a little more than
    `size`, so values outside walk on along their cycle until they are inside. `slots` and the result are
    int64 `[b]`, `epochs` `[b]` or a scalar; time and memory do not depend on `size`.
    """
    high = np.uint64(np.ceil(np.sqrt(size)))
    low = np.uint64(-(-size // int(high)))
    epochs = np.broadcast_to(epochs, slots.shape)
    out = slots.astype(np.uint64)
    outside = np.ones(slots.shape, bool)
    while outside.any():
        left, right = np.divmod(out[outside], low)
        for turn in range(0, _ROUNDS, 2):
            left = (left + _mix(seed % 2**64, epochs[outside], turn, right)) % high
            right = (right + _mix(seed % 2**64, epochs[outside], turn + 1, left)) % low
        out[outside] = left * low + right
        outside = out >= size
    return out.astype(np.int64)


def sample_numbers(step: int, rows: slice | np.ndarray, batch_size: int) -> np.ndarray:
    """Returns the numbers of the samples in rows of a step, int64 `[b]`."""
    return int(step) * batch_size + np.arange(batch_size, dtype=np.int64)[rows]


def shifts_of(seed: int, epochs: np.ndarray, size: int) -> np.ndarray:
    """Returns a shift in `0..size-1` for each epoch, keyed by the seed: int64 `[b]`."""
    return (_mix(seed % 2**64, epochs, _ROUNDS) % np.uint64(size)).astype(np.int64)


@dataclass(frozen=True, eq=False)
class Windows:
    """Shuffled windows of `seq_len` tokens of a stream, `batch_size` a step over all hosts.

    Sample `i = step * batch_size + row` is window `permuted(i % W)` of epoch `i // W`. An epoch has each of
    its W windows once; they lie end to end from a shift below `seq_len` that differs from epoch to epoch,
    so that borders move and up to two windows' worth at the ends of the stream sit out. Another `seed`
    over the validation stream gives random evaluation draws.
    """

    tokens: Tokens
    seq_len: int = field(legal=AtLeast(1))
    batch_size: int = field(legal=AtLeast(1))
    seed: int = field(legal=Finite())
    pack: bool = False

    def __post_init__(self):
        check_fields(self)
        if len(self.tokens) <= self.seq_len:
            have, need = len(self.tokens), self.seq_len + 1
            raise UsageError(
                f"the stream has {have} tokens but one window needs {need}; lower seq_len or add text"
            )

    @property
    def num_windows(self) -> int:
        """W, windows of an epoch: as many as are whole under every shift, and at least one."""
        return max(1, (len(self.tokens) - 1) // self.seq_len - 1)

    def starts(self, step: int, rows: slice | np.ndarray = slice(None)) -> np.ndarray:
        """Where the given rows of the global batch begin in the stream: int64 `[b]`."""
        return self._starts(sample_numbers(step, rows, self.batch_size))

    def _starts(self, samples: np.ndarray) -> np.ndarray:
        epochs, slots = np.divmod(samples, self.num_windows)
        shifts = min(self.seq_len, len(self.tokens) - self.num_windows * self.seq_len)
        shift = shifts_of(self.seed, epochs, shifts)
        return permuted(slots, self.num_windows, self.seed, epochs) * self.seq_len + shift

    def __call__(self, step: int, rows: slice | np.ndarray = slice(None)) -> dict[str, np.ndarray]:
        """Draws the given rows of the global batch of a step, as `draw` returns them."""
        return self.draw(sample_numbers(step, rows, self.batch_size))

    def draw(self, samples: np.ndarray) -> dict[str, np.ndarray]:
        """Draws samples by their numbers, int64 `[b]`.

        Returns:
            `tokens` and `targets` (the tokens one later), int32 `[b, T]`. With `pack` also `segments`
            (1, 2, ... for the documents of a window) and `positions` (from 0 in each), int32 `[b, T]`. With
            `pack`, or where not all tokens count, `weights`, float32 `[b, T]`: 0 where the target does not count or,
            with `pack`, belongs to the next document, else 1.
        """
        starts = self._starts(samples)
        block = self.tokens.read(starts, self.seq_len + 1)
        batch = {"tokens": block[:, :-1].copy(), "targets": block[:, 1:].copy()}
        if self.tokens.counts is not None:
            batch["weights"] = self.tokens.read_counts(starts + 1, self.seq_len)
        if self.pack:
            index = self.tokens.document_index(starts, self.seq_len + 1)
            first = np.maximum(self.tokens.begins[index[:, :-1]] - starts[:, None], 0)
            batch["segments"] = (index[:, :-1] - index[:, :1] + 1).astype(np.int32)
            batch["positions"] = (np.arange(self.seq_len) - first).astype(np.int32)
            same = (index[:, 1:] == index[:, :-1]).astype(np.float32)
            batch["weights"] = same * batch.get("weights", np.float32(1))
        return batch


class Pairs(NamedTuple):
    """Shuffled pairs of preferences, `batch_size` a step over all hosts; each comes once an epoch.

    Sample `i = step * batch_size + row` is pair `permuted(i % N)` of epoch `i // N`.

    Attributes:
        tokens: documents 2 i and 2 i + 1 are what line i chose and rejected.
        seq_len: tokens of a row; each holds one document, and nothing counts behind it.
        batch_size: pairs of a step.
        seed: of the order.
    """

    tokens: Tokens
    seq_len: int
    batch_size: int
    seed: int

    @property
    def num_windows(self) -> int:
        """N, pairs of an epoch."""
        return len(self.tokens.lengths) // 2

    def __call__(self, step: int, rows: slice | np.ndarray = slice(None)) -> dict[str, np.ndarray]:
        """Draws the given rows of the global batch of a step, as `read` returns them."""
        samples = sample_numbers(step, rows, self.batch_size)
        epochs, slots = np.divmod(samples, self.num_windows)
        return self.read(permuted(slots, self.num_windows, self.seed, epochs))

    def read(self, numbers: np.ndarray) -> dict[str, np.ndarray]:
        """Reads pairs by their numbers.

        Returns:
            "tokens", "targets" int32 and "weights" float32, all `[b, T]`, of what was chosen, and the same behind
            ``rejected_``. Weights are 1 where a target is the completion's. Of numbers from N on they are 0.

        Raises:
            UsageError: a document is over `seq_len` + 1.
        """
        if (most := int(self.tokens.lengths.max())) > self.seq_len + 1:
            number = int(self.tokens.lengths.argmax()) // 2 + 1
            raise UsageError(f"a completion of pair {number} of its split has {most} tokens with its prompt, and "
                             f"data.seq_len={self.seq_len}; give at least {most - 1}, or shorten it.")  # fmt: skip
        out = {}
        for which, prefix in enumerate(("", "rejected_")):
            made = [
                np.zeros((len(numbers), self.seq_len), dtype)
                for dtype in (np.int32, np.int32, np.float32)
            ]
            for row, number in enumerate(np.minimum(numbers, self.num_windows - 1).tolist()):
                start, n = (
                    int(self.tokens.begins[2 * number + which]),
                    int(self.tokens.lengths[2 * number + which]),
                )
                ids, counts = self.tokens.read(start, n), self.tokens.read_counts(start, n)
                for x, values in zip(
                    made, (ids[:-1], ids[1:], counts[1:] * (numbers[row] == number)), strict=True
                ):
                    x[row, : n - 1] = values
            out |= dict(
                zip((f"{prefix}tokens", f"{prefix}targets", f"{prefix}weights"), made, strict=True)
            )
        return out


def sweep_pairs(pairs: Pairs) -> Iterator[dict[str, np.ndarray]]:
    """Reads every pair once, in order, for evaluation; the last batch is filled up, with what counts nothing."""
    for start in range(0, pairs.num_windows, pairs.batch_size):
        yield pairs.read(np.arange(start, start + pairs.batch_size))


def sweep(tokens: Tokens, seq_len: int, batch_size: int) -> Iterator[dict[str, np.ndarray]]:
    """Reads a stream once, in order, for evaluation: every token but the first is a target exactly once.

    Yields:
        `tokens`, `targets` int32 and `weights` float32, all `[batch_size, seq_len]`; the last batch is
        filled up with zeros of weight 0.
    """
    shape, size = (batch_size, seq_len), batch_size * seq_len
    for start in range(0, len(tokens) - 1, size):
        count = min(size, len(tokens) - 1 - start)
        flat = np.pad(tokens.read(start, count + 1), (0, size - count))
        inside = np.arange(size) < count
        weights = np.pad(tokens.read_counts(start + 1, count), (0, size - count))
        yield {
            "tokens": np.where(inside, flat[:-1], 0).reshape(shape),
            "targets": flat[1:].reshape(shape),
            "weights": weights.reshape(shape),
        }
