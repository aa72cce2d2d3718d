"""Lines of preferences to batches of pairs: by hand, every pair once an epoch, every refusal of a line."""

import json

import numpy as np
import pytest

from jaxpar.lm.text.corpus import DataConfig, open_corpus
from jaxpar.lm.text.data import Pairs, sweep_pairs
from jaxpar.nn.attention.context import padded
from jaxpar.types import UsageError

LINES = [
    {"prompt": f"{i}?", "chosen": "yes" + "!" * (i % 3), "rejected": "no" * (1 + i % 2)}
    for i in range(30)
]


def opened(tmp_path, lines=LINES, **changes):
    path = tmp_path / "pairs.jsonl"
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    changes = {"split": "hash:0.3", "seq_len": 8, "batch_size": 4, **changes}
    return open_corpus(DataConfig(path=str(path), pairs=True, **changes), tmp_path / "cache")


def texts(batch, row, prefix):
    """The prompt and the completion of a row."""
    tokens, targets, weights = (
        batch[f"{prefix}{name}"][row] for name in ("tokens", "targets", "weights")
    )
    whole = bytes([tokens[0], *targets[: int(np.flatnonzero(weights)[-1]) + 1]]).decode()
    counted = bytes(targets[weights == 1].tolist()).decode()
    assert whole.endswith(counted) and not tokens[len(whole) - 1 + 1 :].any()
    return whole.removesuffix(counted), counted


def pair(batch, row):
    (prompt, chosen), (same, rejected) = (texts(batch, row, prefix) for prefix in ("", "rejected_"))
    assert prompt == same
    return prompt, chosen, rejected


@pytest.mark.parametrize("split", ["hash:0.3", "tail:0.3"])
def test_each_pair_comes_once_an_epoch_and_lies_on_one_side(tmp_path, split):
    corpus, sides = opened(tmp_path, split=split), []
    for tokens in (corpus.train, corpus.validation):
        pairs = Pairs(tokens, 8, 4, 0)
        swept = [
            pair(batch, row)
            for batch in sweep_pairs(pairs)
            for row in range(4)
            if batch["weights"][row].any()
        ]
        drawn = [pair(pairs(step), row) for step in range(pairs.num_windows) for row in range(4)]
        sides.append(swept)
        for epoch in range(4):
            assert sorted(drawn[epoch * len(swept) : (epoch + 1) * len(swept)]) == sorted(swept)
        assert drawn[: len(swept)] != swept
        part = pairs(3, slice(1, 3))
        assert all((part[name] == x[1:3]).all() for name, x in pairs(3).items())
    assert sorted(sides[0] + sides[1]) == sorted(tuple(line.values()) for line in LINES)
    assert split == "hash:0.3" or sides[1] == [tuple(line.values()) for line in LINES[21:]]


def test_padding_over_devices_counts_nothing(tmp_path):
    batch = Pairs(opened(tmp_path).train, 8, 4, 0)(0)
    for name in ("weights", "rejected_weights"):
        batch[name][:, -1] = 1  # what lies at the edge would be repeated
    wide = padded(batch, 12)
    for name in ("weights", "rejected_weights"):
        assert (wide[name][:, :8] == batch[name]).all() and not wide[name][:, 8:].any()


GOOD = {"prompt": "a", "chosen": "b", "rejected": "c"}


@pytest.mark.parametrize(
    ("line", "sentence"),
    [
        (GOOD | {"chosen": ""}, "has chosen=''; legal are .*not empty"),
        (GOOD | {"rejected": 3}, "has rejected=3"),
        ({"prompt": "a", "completion": "b"}, "has chosen=None"),
        (GOOD | {"rejected": "b"}, "rejects what it chooses, 'b'"),
        (
            {"prompt": "", "chosen": "b", "rejected": "cc"},
            "has a completion without a token behind another",
        ),
    ],
)
def test_a_broken_line_is_named(tmp_path, line, sentence):
    with pytest.raises(UsageError, match=f"pairs.jsonl, line 2 {sentence}"):
        opened(tmp_path, [GOOD, line])


def test_a_pair_that_is_too_long_is_named(tmp_path):
    lines = [*LINES[:19], GOOD | {"chosen": "b" * 20}, *LINES[19:]]
    with pytest.raises(
        UsageError, match="pair 20 of its split has 21 tokens .* data.seq_len=8; give at least 20"
    ):
        Pairs(opened(tmp_path, lines, split="tail:0.3").train, 8, 4, 0)(0)
