"""Mixtures: shares counted over rounds, each source as if it were alone, rows of hosts, kills."""

import json
import os
import signal
import warnings
from collections import Counter
from fractions import Fraction

import numpy as np
import pytest

from jaxpar.lm.text.corpus import DataConfig, Tokens
from jaxpar.lm.text.data import Windows
from jaxpar.lm.text.mixture import (
    Mixture,
    counts_of_round,
    open_corpora,
    parse_mixture,
    training_batches,
)
from jaxpar.types import UsageError


def windows(k, size, counted=False):
    """A source whose tokens are 1000 k and up."""
    data = np.arange(1000 * k, 1000 * k + size)
    counts = (np.arange(size) % 2).astype(np.uint8) if counted else None
    return Windows(Tokens(data, np.array([0]), np.array([size]), counts), 4, 1, 5)


def test_flags():
    (a, b) = parse_mixture("0.7*web+x.jsonl+0.3*code/")
    assert a == (Fraction(7, 10), False, "web+x.jsonl") and b.path == "code/"
    assert counts_of_round([a, b], [50, 60]) == [7, 3]
    assert counts_of_round(parse_mixture("4*a+2*b"), [1, 1]) == [2, 1]
    assert counts_of_round(parse_mixture("1.5e*a+2e*b"), [8, 5]) == [12, 10]
    for bad in ("a", "1*", "0*a+1*b", "1*a+1e*b", "-1*a", "nan*a", "1*a+nan*b", "1*a+-2*b"):
        with pytest.raises(UsageError, match="legal are shares"):
            parse_mixture(bad)
    with pytest.raises(UsageError, match=r"1.5 epochs of a are 10.5 windows"):
        counts_of_round(parse_mixture("1.5e*a+1e*b"), [7, 5])


@pytest.mark.parametrize("counts", [(7, 3), (1, 5, 2)])
def test_shares_are_exact_in_every_round_and_sources_are_read_as_if_alone(counts):
    sources = tuple(windows(k, 100) for k in range(len(counts)))
    mixture = Mixture(sources, counts, 1, 3)
    size, seen = sum(counts), [[] for _ in counts]
    for start in range(40):
        found = [mixture.places(start * size + i) for i in range(size)]
        assert Counter(int(k[0]) for k, _ in found) == dict(enumerate(counts))
        for k, sample in found:
            seen[int(k[0])].append(int(sample[0]))
    for samples, count in zip(seen, counts, strict=True):
        assert sorted(samples) == list(range(40 * count))
    assert [int(mixture.places(i)[0][0]) for i in range(size)] != sorted(
        int(mixture.places(i)[0][0]) for i in range(size)
    )


def test_an_epoch_of_the_mixture_is_its_epochs_of_each_source():
    sources = (windows(0, 61), windows(1, 41))
    counts = counts_of_round(parse_mixture("1e*a+2e*b"), [each.num_windows for each in sources])
    mixture = Mixture(sources, tuple(counts), sum(counts), 0)
    for step in range(3):
        drawn = mixture(step)["tokens"]
        for k, source in enumerate(sources):
            mine = drawn[drawn[:, 0] // 1000 == k]
            epochs = range((k + 1) * step, (k + 1) * (step + 1))
            alone = [
                source(source.num_windows * e + i)["tokens"][0]
                for e in epochs
                for i in range(source.num_windows)
            ]
            assert sorted(map(tuple, mine)) == sorted(map(tuple, alone))


def test_rows_are_those_of_the_whole_batch_and_weights_are_filled_up():
    mixture = Mixture((windows(0, 61, counted=True), windows(1, 41)), (1, 1), 6, 0)
    whole, half = mixture(4), mixture(4, slice(2, 5))
    for name in whole:
        assert (whole[name][2:5] == half[name]).all()
    other = whole["tokens"][:, 0] >= 1000
    assert (whole["weights"][other] == 1).all() and (whole["weights"][~other].sum(1) == 2).all()
    assert other.sum() == 3 and whole["tokens"].dtype == np.int32


def test_a_run_opens_a_mixture_by_one_flag(tmp_path):
    for name in "ab":
        (tmp_path / name).write_text(f"{name}\n" * 3000)
    config = DataConfig(
        f"mix:3*{tmp_path}/a+1*{tmp_path}/b", seq_len=8, batch_size=8, split="tail:0.2"
    )
    corpora = open_corpora(config, tmp_path / "cache")
    alone = open_corpora(
        DataConfig(f"{tmp_path}/a", seq_len=8, split="tail:0.2"), tmp_path / "cache"
    )
    assert corpora.hash != alone.hash == corpora.first.hash
    for step in range(3):
        drawn = training_batches(corpora, config, 0)(step)["tokens"]
        assert ((drawn == ord("b")).any(1)).sum() == 2 and ((drawn == ord("a")).any(1)).sum() == 6
    assert isinstance(training_batches(alone, config, 0), Windows)


def drawn_until_killed(config, folder):
    """Runs in a child: opens the mixture, keeps the batches of three steps, and is killed before the fourth."""
    batches = training_batches(open_corpora(config, folder / "cache"), config, 7)
    for step in range(3):
        np.savez(folder / f"{step}.npz", **batches(step))
    os.kill(os.getpid(), signal.SIGKILL)


def test_after_a_kill_the_batches_are_the_same(tmp_path):
    for name in "ab":
        lines = [{"prompt": f"{name}{i}", "completion": f"{i}" * (1 + i % 5)} for i in range(200)]
        (tmp_path / f"{name}.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    mixture = f"mix:3*{tmp_path}/a.jsonl+1*{tmp_path}/b.jsonl"
    config = DataConfig(mixture, seq_len=8, batch_size=8, split="tail:0.2", pack=True)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # JAX warns of forks; the child does not use it
        child = os.fork()
    if not child:
        try:
            drawn_until_killed(config, tmp_path)
        finally:
            os._exit(1)
    assert os.waitpid(child, 0)[1] == signal.SIGKILL
    again = training_batches(open_corpora(config, tmp_path / "cache"), config, 7)
    whole = training_batches(open_corpora(config, tmp_path / "other"), config, 7)
    for step in range(6):
        drawn, kept = again(step), np.load(tmp_path / f"{step}.npz") if step < 3 else whole(step)
        assert set(drawn) == set(kept) >= {"tokens", "targets", "weights", "segments"}
        for name in drawn:
            np.testing.assert_array_equal(drawn[name], kept[name])
    assert any((again(0)["tokens"] != again(step)["tokens"]).any() for step in range(1, 3))
