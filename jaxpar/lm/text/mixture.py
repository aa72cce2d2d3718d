"""Batches of several corpora, whose shares are exact over a round and a pure function of (seed, step)."""

import dataclasses
import hashlib
import math
import re
from collections.abc import Callable, Sequence
from fractions import Fraction
from pathlib import Path
from typing import NamedTuple

import numpy as np

from jaxpar.lm.text.data import Corpus, DataConfig, Pairs, open_corpus, permuted
from jaxpar.lm.text.row_layouts import RowBatches, batches_of
from jaxpar.lm.text.tokenizer import Tokenizer
from jaxpar.types import UsageError

__all__ = ["Corpora", "open_corpora", "open_with_layout", "training_batches"]

_SOURCE = re.compile(r"([0-9]+(?:\.[0-9]+)?)(e?)\*(.+)")


class Source(NamedTuple):
    """A corpus of a mixture: its share, or the epochs of it in a round."""

    amount: Fraction
    is_epochs: bool
    path: str


def parse_mixture(text: str) -> list[Source]:
    """Reads `7*web.jsonl+3*code/` (shares) or `1e*web.jsonl+2e*code/` (epochs).

    Raises:
      UsageError: If it is neither, shares stand beside epochs, or an amount is not positive.
    """
    parts = re.split(r"\+(?=[0-9]+(?:\.[0-9]+)?e?\*)", text)
    found = [match for part in parts if (match := _SOURCE.fullmatch(part))]
    sources = [Source(Fraction(match[1]), bool(match[2]), match[3]) for match in found]
    whole = len(sources) == len(parts) and all(source.amount > 0 for source in sources)
    whole = whole and not any(
        re.search(r"\+[^+*/]*\*", source.path) for source in sources
    )  # an amount that is none
    if not whole or len({source.is_epochs for source in sources}) != 1:
        raise UsageError(
            f"mixture {text!r}; legal are shares 7*a.jsonl+3*b.jsonl, or epochs 1e*a.jsonl+2e*b.jsonl."
        )
    return sources


def counts_of_round(sources: Sequence[Source], num_windows: Sequence[int]) -> list[int]:
    """Returns how many samples of a round come of each source.

    Shares are brought to the smallest integers; epochs are times the windows of a source, which must come out whole.
    """
    if sources[0].is_epochs:
        counts = [source.amount * size for source, size in zip(sources, num_windows, strict=True)]
        for source, count in zip(sources, counts, strict=True):
            if count.denominator != 1:
                many = f"{float(source.amount)} epochs of {source.path} are {float(count)} windows"
                raise UsageError(f"{many}; legal are whole numbers of windows.")
        return [int(count) for count in counts]
    scale = math.lcm(*(source.amount.denominator for source in sources))
    counts = [int(source.amount * scale) for source in sources]
    return [count // math.gcd(*counts) for count in counts]


class Mixture(NamedTuple):
    """Rows of several sources: each round of `sum(counts)` samples has exactly `counts[k]` of source k.

    Sample i of a run is place p = permuted(i % S) of round i // S, S = sum(counts). The places of source k are
    o_k <= p < o_k + counts[k], and stand for sample counts[k] * (i // S) + p - o_k of it alone. So every source is read
    as if it were alone but for the order within a round, and each of its windows comes once an epoch of its own.

    Attributes:
      sources: Rows of each, of one length and any layout; their batch sizes are not read.
      counts: Samples of a round of each, positive.
      batch_size: Windows of a step, over all hosts.
      seed: Of the order.
    """

    sources: tuple[RowBatches, ...]
    counts: tuple[int, ...]
    batch_size: int
    seed: int

    def places(
        self, step: int, rows: slice | np.ndarray = slice(None)
    ) -> tuple[np.ndarray, np.ndarray]:
        """Returns which source each row of a step comes of, and the sample of that source: int64 [b] each."""
        samples = int(step) * self.batch_size + np.arange(self.batch_size, dtype=np.int64)[rows]
        counts = np.array(self.counts, np.int64)
        ends = np.cumsum(counts)
        rounds, slots = np.divmod(samples, ends[-1])
        slots = permuted(slots, int(ends[-1]), self.seed, rounds)
        source = np.searchsorted(ends, slots, "right")
        return source, rounds * counts[source] + slots - (ends - counts)[source]

    def __call__(self, step: int, rows: slice | np.ndarray = slice(None)) -> dict[str, np.ndarray]:
        """Draws rows of a step, with what any of the sources has.

        Where a source has no weights they are 1, and where it marks no documents a row is one.
        """
        source, samples = self.places(step, rows)
        whole: dict[str, np.ndarray] = {}
        for k in range(len(self.sources)):
            chosen = np.flatnonzero(source == k)
            # A source is drawn from even where no row is of it: all batches have the same arrays.
            drawn = self.sources[k].draw(samples[chosen])
            for name in drawn:
                if name not in whole:
                    whole[name] = _filled(name, (len(samples), drawn[name].shape[1]))
            for name in whole:
                if name in drawn:
                    whole[name][chosen] = drawn[name]
        return whole


def _filled(name: str, shape: tuple[int, int]) -> np.ndarray:
    """Returns an array of a batch as it is where a source does not have it."""
    if name == "positions":
        return np.broadcast_to(np.arange(shape[1], dtype=np.int32), shape).copy()
    dtype = np.int32
    if name == "weights":
        dtype = np.float32
    return np.ones(shape, dtype)


class Corpora(NamedTuple):
    """The corpora of a run: one, or those of a mixture, which share the tokenizer and the validation of the first."""

    sources: tuple[Source, ...]
    each: tuple[Corpus, ...]

    @property
    def first(self) -> Corpus:
        """Returns the corpus that validation and samples are of."""
        return self.each[0]

    @property
    def hash(self) -> str:
        """Returns what changes with the content of any: the corpus's own hash where there is one."""
        if not self.sources:
            return self.first.hash
        return hashlib.sha256("".join(corpus.hash for corpus in self.each).encode()).hexdigest()


def open_corpora(
    config: DataConfig,
    cache: str | Path,
    tokenizer: Tokenizer | None = None,
    say: Callable[[str], None] = lambda text: None,
) -> Corpora:
    """Opens what `config.path` names, a corpus or, behind `mix:`, several; arguments and errors are `open_corpus`'s."""
    if not config.path.startswith("mix:"):
        corpus = open_corpus(config, cache, tokenizer=tokenizer, say=say)
        return Corpora(sources=(), each=(corpus,))
    sources = tuple(parse_mixture(config.path.removeprefix("mix:")))
    found = []
    for source in sources:
        of_source = dataclasses.replace(config, path=source.path)
        found.append(open_corpus(of_source, cache, tokenizer=tokenizer, say=say))
        tokenizer = found[0].tokenizer
    return Corpora(sources=sources, each=tuple(found))


def layouts_of(layout: str, count: int) -> list[str]:
    """Returns the layout of each of `count` sources.

    Args:
      layout: One for all, or one for each, joined by +; empty for windows.
      count: Number of sources.

    Raises:
      UsageError: There are neither one nor `count`.
    """
    names = layout.split("+")
    if len(names) not in (1, count):
        raise UsageError(
            f"data.layout={layout}: there are {len(names)} layouts for {count} sources; expected "
            "one for all, or one for each, joined by +."
        )
    return names * (count // len(names))


def usual_layout(corpora: Corpora, pairs: bool = False) -> str:
    """Returns the layout of a new run that names none.

    Pairs have rows. A source in which some token behind the BOS of a document does not count, as in
    chats and completions, is packed; others are a stream. Reads the first 1,024 documents of each.

    Args:
      corpora: Sources.
      pairs: Whether they are preferences.
    """
    if pairs:
        return "rows"
    by_prompts = {True: "packed", False: "stream"}
    names = [by_prompts[_has_prompts(corpus)] for corpus in corpora.each]
    if len(set(names)) == 1:
        return names[0]
    return "+".join(names)


def _has_prompts(corpus: Corpus) -> bool:
    tokens = corpus.train
    if tokens.counts is None:
        return False
    num_bos = len(corpus.tokenizer.bos_ids)
    spans = zip(tokens.starts[:1024].tolist(), tokens.lengths[:1024].tolist(), strict=True)
    return any(not tokens.counts[start + num_bos : start + size].all() for start, size in spans)


def open_with_layout(
    config: DataConfig,
    cache: str | Path,
    tokenizer: Tokenizer | None = None,
    say: Callable[[str], None] = lambda text: None,
) -> tuple[Corpora, DataConfig]:
    """Opens the corpora of a run that begins today, and returns the configuration with its layout.

    Arguments and errors are `open_corpus`'s.
    """
    if config.layout:
        return open_corpora(config, cache, tokenizer, say), config
    # Any layout opens the same tokens; of these, packed needs the fewest.
    layout = "packed"
    if config.pairs:
        layout = "rows"
    corpora = open_corpora(dataclasses.replace(config, layout=layout), cache, tokenizer, say)
    usual = usual_layout(corpora, config.pairs)
    return corpora, dataclasses.replace(config, layout=usual)


def training_batches(
    corpora: Corpora, config: DataConfig, seed: int
) -> RowBatches | Mixture | Pairs:
    """Returns the training batches of a run, by step and rows.

    An empty `config.layout` gives windows as they were before there were layouts.
    """
    if config.pairs:
        # With a layout `pack` has nothing to mark: a row is one document.
        if corpora.sources or (config.pack and not config.layout):
            raise UsageError(
                "pairs are neither packed nor mixed; leave data.pack=true and mix: out."
            )
        return Pairs(
            tokens=corpora.first.train,
            seq_len=config.seq_len,
            batch_size=config.batch_size,
            seed=seed,
        )
    layouts = layouts_of(config.layout, len(corpora.each))
    rows = tuple(
        batches_of(corpus.train, layout, config, seed)
        for corpus, layout in zip(corpora.each, layouts, strict=True)
    )
    if not corpora.sources:
        return rows[0]
    counts = counts_of_round(corpora.sources, [each.num_windows for each in rows])
    return Mixture(sources=rows, counts=tuple(counts), batch_size=config.batch_size, seed=seed)
