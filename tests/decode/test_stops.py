"""Stops: rows of tokens against Python's lists, streams in random pieces against the whole text."""

import numpy as np
import pytest
from fast import jit
from hypothesis import example, given, settings
from hypothesis import strategies as st

from jaxpar.decode import StopStream, cut_at_stop, ends_with, stop_sequences
from jaxpar.types import UsageError

B, S = 3, 7
judge = jit(ends_with)
few = st.integers(0, 2)  # of three tokens nearly every row ends with something


@settings(max_examples=150, deadline=None)
@given(
    st.lists(st.lists(few, min_size=S, max_size=S), min_size=B, max_size=B),
    st.lists(st.integers(0, S), min_size=B, max_size=B),
    st.lists(st.integers(0, S), min_size=B, max_size=B),
    st.lists(st.lists(few, min_size=1, max_size=4), min_size=2, max_size=2),
    st.lists(few, min_size=4, max_size=4),
)
def test_rows_end_as_lists_do(tokens, lengths, starts, stops, longest):
    starts = [min(start, length) for start, length in zip(starts, lengths, strict=True)]
    stops = [*stops, longest]  # one of four, so that one program serves all examples
    rows = [row[:length] for row, length in zip(tokens, lengths, strict=True)]
    args = np.int32(tokens), np.int32(lengths), stop_sequences(stops)
    want = [any(row[-len(stop) :] == stop for stop in stops) for row in rows]
    assert judge(*args).tolist() == want
    rows = [row[start:] for row, start in zip(rows, starts, strict=True)]
    want = [any(row[-len(stop) :] == stop for stop in stops) for row in rows]
    assert judge(*args, np.int32(starts)).tolist() == want


def test_no_sequences_end_nothing_and_long_ones_fit_no_row():
    tokens, lengths = np.zeros((2, 2), np.int32), np.array([0, 2])
    assert ends_with(tokens, lengths, stop_sequences([])).tolist() == [False, False]
    assert ends_with(tokens, lengths, stop_sequences([[0, 0, 0]])).tolist() == [False, False]
    assert ends_with(tokens, lengths, stop_sequences([[0]])).tolist() == [False, True]


def slow_cut(text, stops):
    """One character more at a time, until a stop string stands at the end."""
    for end in range(1, len(text) + 1):
        hit = [stop for stop in stops if text[:end].endswith(stop)]
        if hit:
            return text[: end - max(map(len, hit))], True
    return text, False


@settings(max_examples=300, deadline=None)
@given(st.text("abé", max_size=12), st.lists(st.text("abé", min_size=1, max_size=4), max_size=3))
@example("xabcd", ["abcd", "c"])
@example("ab", ["b", "ab"])
def test_a_text_is_cut_before_the_stop_that_is_complete_first(text, stops):
    assert cut_at_stop(text, stops) == slow_cut(text, stops)
    assert (
        cut_at_stop(text.encode(), [stop.encode() for stop in stops])[1] == slow_cut(text, stops)[1]
    )


pieces = st.lists(
    st.one_of(st.text("ab é日😀", max_size=3).map(str.encode), st.binary(max_size=2)), max_size=8
)


@settings(max_examples=400, deadline=None)
@given(pieces, st.lists(st.text("ab é日", min_size=1, max_size=4), max_size=3), st.data())
@example([b"\xf0\x9f\x98", b"\x80"], [], None)
@example([b"a\xe6\x97b"], ["b"], None)
def test_streams_say_what_the_whole_says(pieces, stops, data):
    whole = b"".join(pieces)
    cuts = (
        [] if data is None else sorted(data.draw(st.lists(st.integers(0, len(whole)), max_size=6)))
    )
    other = [whole[a:b] for a, b in zip([0, *cuts], [*cuts, len(whole)], strict=True)]
    left, stopped = cut_at_stop(whole, [stop.encode() for stop in stops])
    for chunks in (pieces, other, [bytes([byte]) for byte in whole]):
        stream, said = StopStream(stops), []
        for chunk in chunks:
            said.append(stream.feed(chunk))
            shown = "".join(said)
            assert left.decode("utf-8", "replace").startswith(shown), (
                "what is shown is never taken back"
            )
        said.append(stream.close())
        assert ("".join(said), stream.stopped) == (left.decode("utf-8", "replace"), stopped)
        assert stream.feed(b"more") == ("" if stopped else "more")


def test_no_more_is_held_back_than_must_be():
    stream = StopStream(["\n\nQ:", "END"])
    assert [stream.feed(bytes([byte])) for byte in b"a E\n\n\nQ"] == [
        "a",
        " ",
        "",
        "E",
        "",
        "\n",
        "",
    ]
    assert stream.close() == "\n\nQ" and not stream.stopped
    free = StopStream()
    assert (
        free.feed("né".encode()[:2]) == "n"
        and free.feed("é".encode()[1:]) == "é"
        and free.close() == ""
    )
    assert StopStream([b"\xff"]).feed(b"ab\xffc") == "ab"


def test_mistakes_are_told():
    for stops in ([[]], [[1], [-1]], [[[1]]]):
        with pytest.raises(UsageError, match="each stop sequence must be one token or more"):
            stop_sequences(stops)
    for made in (lambda: cut_at_stop("a", [""]), lambda: StopStream(["a", ""])):
        with pytest.raises(UsageError, match="a stop string must have a character or more"):
            made()
