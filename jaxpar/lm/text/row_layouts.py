"""Layouts of documents: rows from a stream, from single documents, or from several a row.

| layout | a row holds | targets of an epoch |
|---|---|---|
| `Stream` | a window of the stream, wherever documents begin | all but the stream's first token |
| `DocumentRows` | one document, padded | all that count, but for first tokens of documents |
| `DocumentRows(packed=True)` | whole documents by first fit decreasing | the same |

Each is a pure function of (seed, step): a resumed run needs no saved iterator, and hosts draw their
rows of one global batch. Windows that lie whole in the stream, without its ends, are `Windows`.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple, Protocol

import numpy as np

from jaxpar.fields import AtLeast, Finite, check_fields, field
from jaxpar.lm.text.corpus import LAYOUTS, DataConfig, Tokens
from jaxpar.lm.text.data import Windows, permuted, sample_numbers, shifts_of, sweep
from jaxpar.types import UsageError

__all__ = ["batches_of", "sweep_batches"]

BUFFER = 1024
"""Documents that are packed together: what first fit decreasing looks through."""

_GROUPS = 256
_SPAN = 4096
_ORDER = 2**63  # an epoch that no run reaches: the order in which documents come into buffers


class RowBatches(Protocol):
    """Rows of batches, in another order each epoch."""

    @property
    def tokens(self) -> Tokens: ...

    @property
    def seq_len(self) -> int: ...

    @property
    def batch_size(self) -> int: ...

    @property
    def num_windows(self) -> int: ...

    def draw(self, samples: np.ndarray) -> dict[str, np.ndarray]: ...

    def __call__(
        self, step: int, rows: slice | np.ndarray = slice(None)
    ) -> dict[str, np.ndarray]: ...


@dataclass(frozen=True, eq=False)
class Stream:
    """Shuffled windows of a stream, in which every token but the first is a target once an epoch.

    The n - 1 targets of a stream lie on a circle. An epoch cuts it into W = ceil((n - 1) / T)
    windows, from a shift that differs from epoch to epoch. The last window is filled up with the
    targets behind it, at weight 0. One window goes from the stream's end to its beginning; no
    target crosses that seam.

    Attributes:
      tokens: Documents.
      seq_len: T, tokens of a row.
      batch_size: Rows of a step, over all hosts.
      seed: Seed of the order.
      pack: Whether to mark the documents within each window.
    """

    tokens: Tokens
    seq_len: int = field(legal=AtLeast(1))
    batch_size: int = field(legal=AtLeast(1))
    seed: int = field(legal=Finite())
    pack: bool = False

    def __post_init__(self):
        """Rejects a stream without a target."""
        check_fields(self)
        if len(self.tokens) < 2:
            raise UsageError(
                f"the stream has {len(self.tokens)} tokens: there is no target; expected at least "
                "2 tokens."
            )

    @property
    def num_windows(self) -> int:
        """W, windows of an epoch."""
        return -(-self._num_targets // self.seq_len)

    def __call__(self, step: int, rows: slice | np.ndarray = slice(None)) -> dict[str, np.ndarray]:
        """Draws rows of the batch of a step, as `draw` returns them."""
        return self.draw(sample_numbers(step, rows, self.batch_size))

    def draw(self, samples: np.ndarray) -> dict[str, np.ndarray]:
        """Draws samples by their numbers, int64 [b]: sample i belongs to epoch i // W.

        Returns:
          "tokens" and "targets" int32 [b, T]. With `pack` also "segments" and "positions" int32
          [b, T], from the beginning of each document. "weights" float32 [b, T] where some target
          has weight 0: it does not count, was filled up, or with `pack` belongs to the next
          document.
        """
        epochs, slots = np.divmod(samples, self.num_windows)
        shifts = shifts_of(self.seed, epochs, self._num_targets)
        return self.read(permuted(slots, self.num_windows, self.seed, epochs), shifts)

    def read(self, numbers: np.ndarray, shifts: np.ndarray | int = 0) -> dict[str, np.ndarray]:
        """Reads windows by their numbers, int64 [b], and the shift of their epoch.

        Returns:
          The arrays of `draw`. Windows from number W on have weight 0.
        """
        size = self._num_targets
        on_circle = numbers[:, None] * self.seq_len + np.arange(self.seq_len)
        indices = (on_circle + np.reshape(shifts, (-1, 1))) % size
        batch = self._read_rows(indices)

        weights = (on_circle < size).astype(np.float32)
        if self.tokens.counts is not None:
            weights *= batch.pop("counts")
        if self.pack:
            documents = np.searchsorted(self.tokens.begins, indices, "right") - 1
            of_targets = np.searchsorted(self.tokens.begins, indices + 1, "right") - 1
            weights *= documents == of_targets
            begins = np.ones(indices.shape, bool)
            begins[:, 1:] = documents[:, 1:] != documents[:, :-1]
            begins[:, 1:] |= indices[:, 1:] != indices[:, :-1] + 1  # the seam
            batch |= _marks(begins)
        if self._has_weights or (numbers >= self.num_windows).any():
            batch["weights"] = weights
        return batch

    @property
    def _num_targets(self) -> int:
        return len(self.tokens) - 1

    @property
    def _has_weights(self) -> bool:
        """True where batches have weights; all have the same arrays, as inputs of one program."""
        is_filled = self._num_targets % self.seq_len != 0
        return self.pack or is_filled or self.tokens.counts is not None

    def _read_rows(self, indices: np.ndarray) -> dict[str, np.ndarray]:
        """Reads tokens, targets and counts at indices that rise by 1 but for the seam."""
        length = self.seq_len
        batch: dict[str, np.ndarray] = {
            "tokens": np.empty(indices.shape, np.int32),
            "targets": np.empty(indices.shape, np.int32),
        }
        if self.tokens.counts is not None:
            batch["counts"] = np.empty(indices.shape, np.float32)

        def fill(rows: np.ndarray, begin: int, end: int) -> None:
            starts = indices[rows, begin]
            block = self.tokens.read(starts, end - begin + 1)
            batch["tokens"][rows, begin:end] = block[:, :-1]
            batch["targets"][rows, begin:end] = block[:, 1:]
            if "counts" in batch:
                batch["counts"][rows, begin:end] = self.tokens.read_counts(starts + 1, end - begin)

        seams = indices[:, 1:] != indices[:, :-1] + 1
        is_whole = ~seams.any(1)
        if is_whole.any():
            fill(np.flatnonzero(is_whole), 0, length)
        for row in np.flatnonzero(~is_whole).tolist():
            cuts = [0, *(np.flatnonzero(seams[row]) + 1).tolist(), length]
            for begin, end in zip(cuts[:-1], cuts[1:], strict=True):
                fill(np.array([row]), begin, end)
        return batch


class _Pieces(NamedTuple):
    """Pieces of documents in the order of their rows.

    Attributes:
      starts: First token of each in `Tokens.data`, int64 [P].
      sizes: Targets of each, int64 [P].
      firsts: First piece of each row, and P, int64 [R + 1].
      note: Sentence about documents that were split; empty where there are none.
    """

    starts: np.ndarray
    sizes: np.ndarray
    firsts: np.ndarray
    note: str


@dataclass(frozen=True, eq=False)
class DocumentRows:
    """Shuffled rows of whole documents: one a row, or packed.

    A document of L tokens has L - 1 targets. With `packed`, an order keyed by the seed brings
    documents into buffers of 1,024, and first fit decreasing (Johnson 1973) packs each buffer.
    Documents of over T targets are cut into pieces of T, which have rows of their own, and a rest.
    The same documents share a row in each epoch. Pieces without a target that counts are left out,
    so each target that counts comes once an epoch.

    Packing costs about a microsecond and 32 bytes a document, once; a batch costs what it reads.

    Attributes:
      tokens: Documents.
      seq_len: T, tokens of a row.
      batch_size: Rows of a step, over all hosts.
      seed: Seed of the order.
      packed: Whether rows hold several documents.
    """

    tokens: Tokens
    seq_len: int = field(legal=AtLeast(1))
    batch_size: int = field(legal=AtLeast(1))
    seed: int = field(legal=Finite())
    packed: bool = False

    def __post_init__(self):
        """Rejects documents that fit no row, and documents without a target that counts."""
        check_fields(self)
        longest = int(self.tokens.lengths.max(initial=0))
        if not self.packed and longest > self.seq_len + 1:
            number = int(self.tokens.lengths.argmax()) + 1
            raise UsageError(
                f"data.seq_len={self.seq_len}: document {number} of its split has {longest} "
                "tokens, and data.layout=rows has one document a row; expected at least "
                f"{longest - 1}, or data.layout=packed, which splits it."
            )
        if not len(self._pieces.starts):
            raise UsageError(
                f"none of the {len(self.tokens.lengths)} documents of a split has a target that "
                "counts; expected at least one with a token that counts behind another."
            )

    @property
    def num_windows(self) -> int:
        """R, rows of an epoch."""
        return len(self._pieces.firsts) - 1

    @property
    def note(self) -> str:
        """Sentence about documents that were split; empty where there are none."""
        return self._pieces.note

    def __call__(self, step: int, rows: slice | np.ndarray = slice(None)) -> dict[str, np.ndarray]:
        """Draws rows of the batch of a step, as `read` returns them."""
        return self.draw(sample_numbers(step, rows, self.batch_size))

    def draw(self, samples: np.ndarray) -> dict[str, np.ndarray]:
        """Draws samples by their numbers, int64 [b]: sample i belongs to epoch i // R."""
        epochs, slots = np.divmod(samples, self.num_windows)
        return self.read(permuted(slots, self.num_windows, self.seed, epochs))

    def read(self, numbers: np.ndarray) -> dict[str, np.ndarray]:
        """Reads rows by their numbers, int64 [b].

        Returns:
          "tokens" and "targets" int32, "weights" float32, [b, T]: 0 where a target does not count
          or nothing is there. With `packed` also "segments" (1, 2, ... for the documents of a row,
          and one more for what is empty) and "positions" (from 0 in each), int32 [b, T]. Rows from
          number R on have weight 0.
        """
        shape = (len(numbers), self.seq_len)
        tokens = np.zeros(shape, np.int32)
        targets = np.zeros(shape, np.int32)
        weights = np.zeros(shape, np.float32)
        begins = np.zeros(shape, bool)
        begins[:, 0] = True
        pieces = self._pieces
        data = self.tokens.data
        counts = self.tokens.counts
        for row, number in enumerate(np.minimum(numbers, self.num_windows - 1).tolist()):
            end = 0
            for piece in range(int(pieces.firsts[number]), int(pieces.firsts[number + 1])):
                start = int(pieces.starts[piece])
                size = int(pieces.sizes[piece])
                begin = end
                end += size
                tokens[row, begin:end] = data[start : start + size]
                targets[row, begin:end] = data[start + 1 : start + size + 1]
                weights[row, begin:end] = 1
                if counts is not None:
                    weights[row, begin:end] = counts[start + 1 : start + size + 1]
                begins[row, begin] = True
            if end < self.seq_len:
                begins[row, end] = True
        weights[numbers >= self.num_windows] = 0
        batch = {"tokens": tokens, "targets": targets, "weights": weights}
        if self.packed:
            batch |= _marks(begins)
        return batch

    @cached_property
    def _pieces(self) -> _Pieces:
        tokens = self.tokens
        length = self.seq_len
        targets = tokens.lengths - 1
        num_pieces = -(-targets // length)
        documents = np.repeat(np.arange(len(targets)), num_pieces)
        skips = np.arange(len(documents)) - np.repeat(
            np.cumsum(num_pieces) - num_pieces, num_pieces
        )
        skips *= length
        starts = tokens.starts[documents] + skips
        sizes = np.minimum(targets[documents] - skips, length)

        counts = np.ones(len(starts), bool)
        if tokens.counts is not None:
            counts = _any_counts(tokens.counts, starts + 1, sizes)
        note = self._note_of_splits(num_pieces, skips, counts)
        starts = starts[counts]
        sizes = sizes[counts]
        if not self.packed or not len(starts):
            return _Pieces(starts, sizes, np.arange(len(starts) + 1), note)

        order = permuted(
            np.arange(len(starts)), len(starts), self.seed, np.array(_ORDER, np.uint64)
        )
        rows, order = _packed_rows(sizes, order, length)
        firsts = np.flatnonzero(np.diff(rows, prepend=-1))
        firsts = np.append(firsts, len(rows))
        return _Pieces(starts[order], sizes[order], firsts, note)

    def _note_of_splits(self, num_pieces: np.ndarray, skips: np.ndarray, counts: np.ndarray) -> str:
        num_split = int((num_pieces > 1).sum())
        if not num_split:
            return ""
        text = (
            f"{num_split:,} of {len(num_pieces):,} documents are longer than "
            f"data.seq_len={self.seq_len} and are split"
        )
        num_prompts = int((~counts & (skips == 0) & np.repeat(num_pieces > 1, num_pieces)).sum())
        if num_prompts:
            text += f"; of {num_prompts:,} the first {self.seq_len} tokens do not count and are left out"
        return text


def _marks(begins: np.ndarray) -> dict[str, np.ndarray]:
    """Returns segments and positions, int32 [b, T], by where documents begin, bool [b, T]."""
    places = np.arange(begins.shape[1])
    first = np.maximum.accumulate(np.where(begins, places, 0), 1)
    return {
        "segments": np.cumsum(begins, 1).astype(np.int32),
        "positions": (places - first).astype(np.int32),
    }


def _any_counts(counts: np.ndarray, starts: np.ndarray, sizes: np.ndarray) -> np.ndarray:
    """Returns which spans of `counts` have one that is not 0, bool [P]; reads each once."""
    found = np.empty(len(starts), bool)
    order = np.argsort(starts, kind="stable")
    for first in range(0, len(starts), _SPAN):
        chosen = order[first : first + _SPAN]
        begin = int(starts[chosen[0]])
        ends = starts[chosen] + sizes[chosen] - begin
        bounds = np.stack([starts[chosen] - begin, ends], 1).ravel()
        block = counts[begin : begin + int(ends.max())]
        found[chosen] = np.maximum.reduceat(block, bounds[:-1])[::2] != 0
    return found


def _packed_rows(
    sizes: np.ndarray, order: np.ndarray, length: int
) -> tuple[np.ndarray, np.ndarray]:
    """Packs pieces, a buffer of them at a time.

    Args:
      sizes: Targets of each piece, 1 to `length`, int64 [P].
      order: Pieces in the order in which they come into buffers, int64 [P].
      length: Targets of a row.

    Returns:
      The row of each piece, rising, and the pieces in that order, int64 [P] each.
    """
    num = len(order)
    num_buffers = -(-num // BUFFER)
    padded = np.full(num_buffers * BUFFER, -1)
    padded[:num] = order
    buffers = padded.reshape(num_buffers, BUFFER)
    rows = []
    pieces = []
    num_rows = 0
    for first in range(0, num_buffers, _GROUPS):
        group = buffers[first : first + _GROUPS]
        in_group = np.where(group >= 0, sizes[group], 0)
        by_size = np.argsort(-in_group, 1, kind="stable")
        found = first_fit(np.take_along_axis(in_group, by_size, 1), length)
        chosen = np.take_along_axis(group, by_size, 1)
        used = found.max(1) + 1
        found += (num_rows + np.cumsum(used) - used)[:, None]
        num_rows += int(used.sum())
        is_there = chosen >= 0
        rows.append(found[is_there])
        pieces.append(chosen[is_there])
    rows = np.concatenate(rows)
    by_row = np.argsort(rows, kind="stable")
    return rows[by_row], np.concatenate(pieces)[by_row]


def first_fit(sizes: np.ndarray, length: int) -> np.ndarray:
    """Returns the first bin with room for each item, in the order given, of many buffers at a time.

    Args:
      sizes: Sizes of at most `length`, int64 [G, N]; an item of size 0 is in bin 0.
      length: Room of a bin.

    Returns:
      Bins, int64 [G, N]. Costs G N times the bins of a buffer in comparisons.
    """
    buffers = np.arange(len(sizes))
    room = np.full(sizes.shape, length, np.int32)
    bins = np.zeros(sizes.shape, np.int64)
    num_open = 0
    for item in range(sizes.shape[1]):
        size = sizes[:, item]
        if not size.any():
            break  # what follows in a decreasing order is empty as well
        chosen = (room[:, : num_open + 1] >= size[:, None]).argmax(1)
        room[buffers, chosen] -= size.astype(np.int32)
        bins[:, item] = chosen
        num_open = max(num_open, int(chosen.max()) + 1)
    return bins


def batches_of(tokens: Tokens, layout: str, config: DataConfig, seed: int) -> RowBatches:
    """Returns batches of documents in one layout.

    Args:
      tokens: Documents.
      layout: "stream", "rows" or "packed"; empty for windows that lie whole in the stream.
      config: Length, batch and `pack`.
      seed: Seed of the order.

    Raises:
      UsageError: The documents are too few or too long.
    """
    if layout and layout not in LAYOUTS:
        raise UsageError(
            f"data.layout={layout}: documents of one source have one layout; expected "
            f"{', '.join(LAYOUTS)}."
        )
    if layout in ("rows", "packed"):
        return DocumentRows(
            tokens=tokens,
            seq_len=config.seq_len,
            batch_size=config.batch_size,
            seed=seed,
            packed=layout == "packed",
        )
    kind = Windows
    if layout == "stream":
        kind = Stream
    return kind(
        tokens=tokens,
        seq_len=config.seq_len,
        batch_size=config.batch_size,
        seed=seed,
        pack=config.pack,
    )


def sweep_batches(batches: RowBatches) -> Iterator[dict[str, np.ndarray]]:
    """Reads documents once, in order, for evaluation, in the layout of `batches`.

    Every target of an epoch comes once; the last batch is filled up with rows of weight 0.

    Args:
      batches: What `batches_of` returns.

    Yields:
      Batches of that layout, with weights.
    """
    if not isinstance(batches, Stream | DocumentRows):
        yield from sweep(batches.tokens, batches.seq_len, batches.batch_size)
        return
    for start in range(0, batches.num_windows, batches.batch_size):
        batch = batches.read(np.arange(start, start + batches.batch_size))
        if "weights" not in batch:
            batch["weights"] = np.ones(batch["targets"].shape, np.float32)
        yield batch
