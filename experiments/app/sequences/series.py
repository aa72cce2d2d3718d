"""Sequences to train on: digits read pixel by pixel or generated, series from files, and the synthetic tests of memory.

Every task gives batches {"inputs" float32 [B, T, D], "targets" [B, T], "weights" float32 [B, T]} as a pure function of
a step; only places of weight over 0 are judged.
"""

import csv
import dataclasses
import pathlib
from collections.abc import Callable
from typing import NamedTuple

import numpy as np

from jaxpar._encodings import decoded
from jaxpar.fields import AtLeast, Between, check_fields, field
from jaxpar.types import UsageError

from . import memory_tasks
from .curves import digits_1d

__all__ = ["SeriesConfig", "Task", "handwritten", "held_out_batches", "open_task", "read_series"]

Batch = dict[str, np.ndarray]


@dataclasses.dataclass(frozen=True)
class SeriesConfig:
    """What is learned, and from what.

    Attributes:
      task: "digits", "digits_1d", "file", or a synthetic one: "copy", "selective_copy", "adding", and what tells
        mixers apart: "recall", "mqar", "delayed_copy", "s5".
      path: Of the file task: a .ts (aeon), .arff, .csv, .tsv or .npz file.
      validation_path: Its validation series; by default a share of those in `path`.
      validation: That share; of the digits too, of one dimension or two.
      length: Of the synthetic tasks: T of adding and s5; of copying and recall the silent steps, of delayed_copy the
        delay, of mqar the places among which each key is asked for.
      symbols: Of the copy tasks: how many are to be remembered; of recall and mqar the pairs of a key and a value; of
        s5 how many of the 120 permutations come, first a swap and a cycle, of which all others are made.
      batch_size: B, rows of a step.
    """

    task: str = "digits"
    path: str = ""
    validation_path: str = ""
    validation: float = field(0.2, Between(0, 1, "()"))
    length: int = field(100, AtLeast(1))
    symbols: int = field(10, AtLeast(1))
    batch_size: int = field(64, AtLeast(1))

    def __post_init__(self):
        """Refuses what is no task."""
        check_fields(self, "data.")
        if self.task not in TASKS:
            raise UsageError(f"data.task={self.task!r} is unknown; legal are {', '.join(TASKS)}.")
        if self.task == "file" and not self.path:
            raise UsageError(
                "data.task=file needs data.path= to name a .ts, .arff, .csv, .tsv or .npz file."
            )
        if self.task != "file" and (self.path or self.validation_path):
            raise UsageError(
                f"data.path is read by data.task=file alone, not by data.task={self.task}."
            )


class Task(NamedTuple):
    """A task: its sizes, and its batches.

    Attributes:
      inputs: D.
      outputs: Classes, or 1 for a number.
      classes: Whether targets are classes.
      length: T.
      train: Step -> batch.
      validation: Batches that stay the same.
      text: One line about it.
    """

    inputs: int
    outputs: int
    classes: bool
    length: int
    train: Callable[[int], Batch]
    validation: list[Batch]
    text: str


def open_task(config: SeriesConfig, seed: int) -> Task:
    """Returns the task of a configuration; batch s of a run is drawn with (seed, s).

    Raises:
      UsageError: If a file is absent or none of the formats, or its series differ in length.
    """
    return TASKS[config.task](config, seed)


def _drawn(
    make: Callable, config: SeriesConfig, seed: int
) -> tuple[Callable[[int], Batch], list[Batch]]:
    """Returns batches of a synthetic task, new ones at every step, and 8 apart from all of them."""

    def batch(kind: int, step: int) -> Batch:
        return make(np.random.default_rng([seed, kind, step]), config)

    return lambda step: batch(0, step), [batch(1, step) for step in range(8)]


def _adding(config: SeriesConfig, seed: int) -> Task:
    """Adding problem (Hochreiter and Schmidhuber 1997): the sum of the two numbers that a second channel marks."""

    def make(rng: np.random.Generator, c: SeriesConfig) -> Batch:
        rows = np.arange(c.batch_size)
        values, marks = rng.random((c.batch_size, c.length)), np.zeros((c.batch_size, c.length))
        half = max(1, c.length // 2)
        marks[rows, rng.integers(0, half, c.batch_size)] = 1
        marks[rows, rng.integers(min(half, c.length - 1), c.length, c.batch_size)] = 1
        total = (values * marks).sum(1, keepdims=True)
        return _at_end(
            np.stack([values, marks], -1), np.broadcast_to(total, values.shape).astype(np.float32)
        )

    text = "adding problem: squared error 0.167 is that of the constant answer 1"
    train, validation = _drawn(make, config, seed)
    return Task(
        inputs=2,
        outputs=1,
        classes=False,
        length=config.length,
        train=train,
        validation=validation,
        text=text,
    )


ALPHABET = 8  # symbols that may be asked for; two more are blank and "now"


def _copy(config: SeriesConfig, seed: int) -> Task:
    """Copy memory (Arjovsky et al. 2016, arXiv:1511.06464): symbols, a silence, and then the same symbols."""

    def make(rng: np.random.Generator, c: SeriesConfig) -> Batch:
        symbols = rng.integers(0, ALPHABET, (c.batch_size, c.symbols))
        silence = np.full((c.batch_size, c.length), ALPHABET)
        return _recall(np.concatenate([symbols, silence], 1), symbols)

    return _copying(make, config, seed, 2 * config.symbols + config.length, "copy memory")


def _selective_copy(config: SeriesConfig, seed: int) -> Task:
    """Selective copy (Gu and Dao 2023, arXiv:2312.00752): symbols strewn over the silence, to be told in order."""

    def make(rng: np.random.Generator, c: SeriesConfig) -> Batch:
        symbols = rng.integers(0, ALPHABET, (c.batch_size, c.symbols))
        shown = np.full((c.batch_size, c.symbols + c.length), ALPHABET)
        places = np.sort(
            rng.permuted(np.tile(np.arange(shown.shape[1]), (c.batch_size, 1)), axis=1)[
                :, : c.symbols
            ]
        )
        np.put_along_axis(shown, places, symbols, 1)
        return _recall(shown, symbols)

    return _copying(make, config, seed, 2 * config.symbols + config.length, "selective copy")


def _copying(make: Callable, config: SeriesConfig, seed: int, length: int, name: str) -> Task:
    text = f"{name}: {config.symbols} of {ALPHABET} symbols over {config.length} steps; guessing is 1/{ALPHABET} right"
    train, validation = _drawn(make, config, seed)
    return Task(
        inputs=ALPHABET + 2,
        outputs=ALPHABET,
        classes=True,
        length=length,
        train=train,
        validation=validation,
        text=text,
    )


def _recall(shown: np.ndarray, symbols: np.ndarray) -> Batch:
    """Appends as many requests as there are symbols, at which they are the targets."""
    asked = np.full(symbols.shape, ALPHABET + 1)
    silent = np.zeros(shown.shape, np.int32)
    inputs = np.eye(ALPHABET + 2, dtype=np.float32)[np.concatenate([shown, asked], 1)]
    targets = np.concatenate([silent, symbols], 1).astype(np.int32)
    weights = np.concatenate([silent, np.ones(symbols.shape)], 1).astype(np.float32)
    return {"inputs": inputs, "targets": targets, "weights": weights}


def _recalling(
    name: str, draw: Callable, length: Callable[[SeriesConfig], int]
) -> Callable[[SeriesConfig, int], Task]:
    """Returns a task of `_memory` of keys and values."""

    def open_(config: SeriesConfig, seed: int) -> Task:
        if name == "mqar" and config.symbols > min(memory_tasks.KEYS, config.length):
            most = min(memory_tasks.KEYS, config.length)
            raise UsageError(
                f"data.symbols={config.symbols} of data.task=mqar is over the {memory_tasks.KEYS} "
                f"keys or over data.length={config.length}, the positions where they are asked for; "
                f"take {most}."
            )

        def make(rng: np.random.Generator, c: SeriesConfig) -> Batch:
            return _one_hot(memory_tasks.BLANK + 1, *draw(rng, c.batch_size, c.symbols, c.length))

        text = f"{name}: {config.symbols} symbols, length {config.length}; guessing is 1/{memory_tasks.KEYS} right"
        train, validation = _drawn(make, config, seed)
        return Task(
            inputs=memory_tasks.BLANK + 1,
            outputs=memory_tasks.KEYS,
            classes=True,
            length=length(config),
            train=train,
            validation=validation,
            text=text,
        )

    return open_


def _s5(config: SeriesConfig, seed: int) -> Task:
    """The word problem of the symmetric group of five: which permutation all up to here make together."""
    count = len(memory_tasks.permutations(5))

    def make(rng: np.random.Generator, c: SeriesConfig) -> Batch:
        return _one_hot(
            count, *memory_tasks.compose_permutations(rng, c.batch_size, c.length, 5, c.symbols)
        )

    kinds = min(config.symbols, count)
    text = f"s5: {config.length} of {kinds} permutations of five things, composed; guessing is 1/{count} right"
    train, validation = _drawn(make, config, seed)
    return Task(
        inputs=count,
        outputs=count,
        classes=True,
        length=config.length,
        train=train,
        validation=validation,
        text=text,
    )


def _one_hot(count: int, shown: np.ndarray, right: np.ndarray, judged: np.ndarray) -> Batch:
    return {
        "inputs": np.eye(count, dtype=np.float32)[shown],
        "targets": right.astype(np.int32),
        "weights": judged.astype(np.float32),
    }


def _digits(config: SeriesConfig, seed: int) -> Task:
    """scikit-learn's 1,797 handwritten digits of 8 x 8 pixels, read pixel by pixel."""
    images, labels = handwritten("data.task=digits")
    series = images.reshape(len(images), -1, 1)
    return _from_arrays(series, labels, None, config, seed, "digits pixel by pixel")


def _digits_1d(config: SeriesConfig, seed: int) -> Task:
    """5,000 generated digits of one dimension, from (seed, 3)."""
    curves, labels = digits_1d(np.random.default_rng([seed, 3]), 5000)
    return _from_arrays(
        curves[..., None], labels, None, config, seed, "generated digits of one dimension"
    )


def handwritten(asked: str) -> tuple[np.ndarray, np.ndarray]:
    """Returns the digits, pixels in [-1, 1] [N, 8, 8] and labels [N]; `asked` is what needs them.

    Raises:
      UsageError: If scikit-learn, in whose wheel they are, is absent.
    """
    try:
        from sklearn.datasets import load_digits
    except ImportError as error:
        raise UsageError(
            f'{asked} needs scikit-learn: pip install "jaxpar[experiments]"'
        ) from error
    images, labels = load_digits(return_X_y=True)
    return images.reshape(-1, 8, 8) / 8.0 - 1.0, labels


def _file(config: SeriesConfig, seed: int) -> Task:
    series, labels = read_series(config.path)
    held_out = read_series(config.validation_path) if config.validation_path else None
    if held_out is not None and held_out[0].shape[1:] != series.shape[1:]:
        raise UsageError(
            f"{config.validation_path} has series of shape {held_out[0].shape[1:]}, but {config.path} of "
            f"{series.shape[1:]}."
        )
    mean, std = series.mean((0, 1)), series.std((0, 1)) + 1e-8
    if held_out is not None:
        held_out = (held_out[0] - mean) / std, held_out[1]
    return _from_arrays(
        (series - mean) / std, labels, held_out, config, seed, pathlib.Path(config.path).name
    )


def _from_arrays(
    series: np.ndarray,
    labels: np.ndarray,
    held_out: tuple | None,
    config: SeriesConfig,
    seed: int,
    name: str,
) -> Task:
    """Returns the classification of series [N, T, D]; the held-out ones are the same in every run of a seed."""
    if held_out is None:
        order = np.random.default_rng([seed, 2]).permutation(len(series))
        count = max(1, round(config.validation * len(series)))
        held_out = series[order[:count]], labels[order[:count]]
        series, labels = series[order[count:]], labels[order[count:]]
    classes = np.unique(np.concatenate([labels, held_out[1]]))
    targets, held_targets = np.searchsorted(classes, labels), np.searchsorted(classes, held_out[1])
    if not len(series):
        raise UsageError(
            f"{name} leaves no series to train on; lower data.validation={config.validation}."
        )

    def train(step: int) -> Batch:
        rows = np.random.default_rng([seed, 0, step]).integers(0, len(series), config.batch_size)
        return _labelled(series[rows], targets[rows])

    validation = held_out_batches(
        lambda rows: _labelled(held_out[0][rows], held_targets[rows]),
        len(held_targets),
        config.batch_size,
    )
    text = f"{name}: {len(series)} series to train on, {len(held_targets)} held out, {len(classes)} classes"
    return Task(
        inputs=series.shape[2],
        outputs=len(classes),
        classes=True,
        length=series.shape[1],
        train=train,
        validation=validation,
        text=text,
    )


def held_out_batches(make: Callable[[np.ndarray], Batch], count: int, size: int) -> list[Batch]:
    """Returns all rows in whole batches, so that one program serves all; of the last, those that repeat weigh nothing.

    Args:
      make: Row numbers -> their batch.
      count: Of the rows.
      size: Of a batch.
    """
    places, batches = np.arange(-(-count // size) * size), []
    for rows in np.split(places, len(places) // size):
        batch = make(rows % count)
        batch["weights"] = batch["weights"] * (rows < count).reshape(
            -1, *(1,) * (batch["weights"].ndim - 1)
        )
        batches.append(batch)
    return batches


def _labelled(series: np.ndarray, targets: np.ndarray) -> Batch:
    return _at_end(series, np.broadcast_to(targets[:, None], series.shape[:2]).astype(np.int32))


def _at_end(inputs: np.ndarray, targets: np.ndarray) -> Batch:
    """Judges the last step alone."""
    weights = np.zeros(targets.shape, np.float32)
    weights[:, -1] = 1
    return {"inputs": inputs.astype(np.float32), "targets": targets, "weights": weights}


TASKS = {
    "digits": _digits,
    "digits_1d": _digits_1d,
    "file": _file,
    "copy": _copy,
    "selective_copy": _selective_copy,
    "adding": _adding,
    "recall": _recalling(
        "recall", memory_tasks.associative_recall, lambda c: 2 * c.symbols + c.length + 1
    ),
    "mqar": _recalling("mqar", memory_tasks.mqar, lambda c: 2 * c.symbols + c.length),
    "delayed_copy": _recalling(
        "delayed_copy", memory_tasks.delayed_copy, lambda c: c.symbols + c.length
    ),
    "s5": _s5,
}


def read_series(path: str) -> tuple[np.ndarray, np.ndarray]:
    """Reads labelled series of equal length: float [N, T, D] and labels [N], as text or numbers.

    .npz holds arrays x ([N, T] or [N, T, D]) and y; .csv and .tsv have the label first, then the values (UCR's text
    format); .arff has the label last; .ts is aeon's and sktime's: channels between colons, the label last.

    Raises:
      UsageError: If the file is absent or none of these, a value is missing, or lengths differ.
    """
    file = pathlib.Path(path)
    if not file.is_file():
        raise UsageError(f"data.path={path} is no file.")
    readers = {
        ".npz": _read_npz,
        ".csv": _read_table,
        ".tsv": _read_table,
        ".arff": _read_arff,
        ".ts": _read_ts,
    }
    if file.suffix not in readers:
        raise UsageError(
            f"{path} ends in {file.suffix or 'nothing'}; legal are {', '.join(readers)}."
        )
    try:
        series, labels = readers[file.suffix](file)
    except (ValueError, KeyError, IndexError, UnicodeDecodeError) as error:
        if isinstance(error, UsageError):
            raise
        raise UsageError(
            f"{path} is not a whole {file.suffix} file of labelled series: {error}."
        ) from error
    if series.ndim != 3 or not series.size or len(series) != len(labels):
        raise UsageError(
            f"{path} has series of shape {series.shape} and {len(labels)} labels; they do not fit."
        )
    if not np.isfinite(series).all():
        raise UsageError(f"{path} has missing or infinite values; fill them in first.")
    return series, labels


def _read_npz(file: pathlib.Path) -> tuple[np.ndarray, np.ndarray]:
    with np.load(file) as arrays:
        series, labels = np.asarray(arrays["x"], np.float64), arrays["y"]
    return series[..., None] if series.ndim == 2 else series, labels


def _read_table(file: pathlib.Path) -> tuple[np.ndarray, np.ndarray]:
    with file.open(newline="", encoding="utf-8-sig") as lines:
        rows = [
            row
            for row in csv.reader(lines, delimiter="\t" if file.suffix == ".tsv" else ",")
            if row
        ]
    if rows and not _is_number(rows[0][1]):  # a line of column names
        rows = rows[1:]
    return _stacked([[row[1:]] for row in rows], file), np.array([row[0].strip() for row in rows])


def _read_arff(file: pathlib.Path) -> tuple[np.ndarray, np.ndarray]:
    text = decoded(file.read_bytes(), file)
    if "relational" in text.lower():
        raise UsageError(f"{file} is a multivariate .arff file; give the same data as .ts.")
    rows = [line.rpartition(",") for line in _data_lines(text)]
    return _stacked([[values.split(",")] for values, _, _ in rows], file), np.array(
        [label.strip() for *_, label in rows]
    )


def _read_ts(file: pathlib.Path) -> tuple[np.ndarray, np.ndarray]:
    text = decoded(file.read_bytes(), file)
    if "@timestamps true" in text.lower():
        raise UsageError(
            f"{file} has time stamps; give series that are sampled evenly, without them."
        )
    rows = [line.rpartition(":") for line in _data_lines(text)]
    series = [[channel.split(",") for channel in values.split(":")] for values, _, _ in rows]
    return _stacked(series, file), np.array([label.strip() for *_, label in rows])


def _data_lines(text: str) -> list[str]:
    lines = [line.strip() for line in text.splitlines()]
    if "@data" not in (marks := [line.lower() for line in lines]):
        raise ValueError("it has no @data line")
    return [
        line
        for line in lines[marks.index("@data") + 1 :]
        if line and not line.startswith(("#", "%"))
    ]


def _stacked(rows: list[list[list[str]]], file: pathlib.Path) -> np.ndarray:
    """Returns [N, T, D] of rows of channels of numbers; "?" is missing."""
    lengths = {len(channel) for row in rows for channel in row}
    if len(lengths) > 1:
        raise UsageError(
            f"{file} has series of {min(lengths)} to {max(lengths)} steps; cut or fill them to one length."
        )
    numbers = [
        [[np.nan if x.strip() == "?" else float(x) for x in channel] for channel in row]
        for row in rows
    ]
    return np.array(numbers, np.float64).swapaxes(1, 2)


def _is_number(text: str) -> bool:
    try:
        float(text)
    except ValueError:
        return text.strip() == "?"
    return True
