"""Where a text ends because it says so: by tokens inside jit, by strings on the host.

A stop string can be cut into tokens in many ways, so that strings are looked for in decoded bytes; a program under jit
sees tokens alone. Of several stops the one counts that is complete first, and of those the longest, so that nothing
depends on how a text came in pieces.
"""

import codecs
from collections.abc import Sequence
from typing import NamedTuple, TypeVar

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Int

from jaxpar.types import UsageError

__all__ = ["StopSequences", "StopStream", "cut_at_stop", "ends_with", "stop_sequences"]

Text = TypeVar("Text", str, bytes)


class StopSequences(NamedTuple):
    """Sequences of tokens that end a row.

    Attributes:
      tokens: Right-aligned; what is left of a sequence holds -1.
      lengths: Tokens of each, at least 1.
    """

    tokens: Int[Array, "n L"]
    lengths: Int[Array, " n"]


def stop_sequences(sequences: Sequence[Sequence[int]]) -> StopSequences:
    """Lays sequences of tokens side by side; none at all is legal.

    Raises:
      UsageError: If one is empty, or holds a negative number.
    """
    rows = [np.asarray(sequence, np.int32) for sequence in sequences]
    if any(row.ndim != 1 or not row.size or row.min() < 0 for row in rows):
        raise UsageError("each stop sequence must be one token or more, and no token is under 0.")
    longest = max((row.size for row in rows), default=1)
    tokens = np.full((len(rows), longest), -1, np.int32)
    for i, row in enumerate(rows):
        tokens[i, longest - row.size :] = row
    return StopSequences(jnp.asarray(tokens), jnp.asarray([row.size for row in rows], jnp.int32))


def ends_with(
    tokens: Int[Array, "B S"],
    lengths: Int[Array, " B"],
    stops: StopSequences,
    starts: Int[Array, " B"] | None = None,
) -> Bool[Array, " B"]:
    """Returns which rows end with one of the sequences. O(B n L), whatever S.

    Args:
      tokens: Left-aligned.
      lengths: Tokens of each row that count.
      stops: From `stop_sequences`.
      starts: Where what was generated begins in each row: the whole sequence must lie there. By default 0.
    """
    longest = stops.tokens.shape[1]
    places = lengths[:, None] - longest + jnp.arange(longest)[None, :]
    last = jnp.take_along_axis(tokens, jnp.clip(places, 0, tokens.shape[1] - 1), axis=1)
    same = (last[:, None, :] == stops.tokens[None]) | (stops.tokens[None] < 0)
    room = lengths if starts is None else lengths - starts
    return (same.all(-1) & (stops.lengths[None, :] <= room[:, None])).any(-1)


def cut_at_stop(text: Text, stops: Sequence[Text]) -> tuple[Text, bool]:
    """Returns what stands before the first stop string, and whether there is one.

    Args:
      text: What was generated, as text or as bytes.
      stops: Of the same type.

    Raises:
      UsageError: If a stop string is empty.
    """
    found = _first(text, _checked(stops))
    return (text, False) if found is None else (text[: found[0]], True)


class StopStream:
    """Text as its tokens come, up to the first stop string: what may be shown is returned, what may not is held back.

    Held back are the bytes of a character that is not complete, and those that may yet turn out to begin a stop
    string: at most one byte less than the longest. Bytes that are no UTF-8 become U+FFFD. The pieces together are
    what `cut_at_stop` leaves of the whole, however it was cut.

    Example:
        stream = StopStream(["END"])
        for token in tokens:
            print(stream.feed(token_bytes[token]), end="")
            if stream.stopped:
                break
        print(stream.close(), end="")

    Attributes:
      stopped: Whether a stop string was met; nothing is taken in after it.
    """

    def __init__(self, stops: Sequence[str | bytes] = ()):
        self._stops = _checked([stop.encode() if isinstance(stop, str) else stop for stop in stops])
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._held = b""
        self.stopped = False

    def feed(self, piece: bytes) -> str:
        """Takes the bytes of one token or more; returns text that nothing to come can change."""
        if self.stopped:
            return ""
        self._held += piece
        if (found := _first(self._held, self._stops)) is not None:
            self.stopped = True
            return self._decoder.decode(self._emit(found[0]), final=True)
        return self._decoder.decode(self._emit(len(self._held) - self._open()))

    def close(self) -> str:
        """Returns what was held back, where no stop string came of it."""
        return "" if self.stopped else self._decoder.decode(self._emit(len(self._held)), final=True)

    def _emit(self, count: int) -> bytes:
        out, self._held = self._held[:count], self._held[count:]
        return out

    def _open(self) -> int:
        """How many of the last bytes may be the beginning of a stop string."""
        most = max((len(stop) - 1 for stop in self._stops), default=0)
        counts = range(min(most, len(self._held)), 0, -1)
        return next(
            (n for n in counts if any(stop.startswith(self._held[-n:]) for stop in self._stops)), 0
        )


def _checked(stops: Sequence[Text]) -> Sequence[Text]:
    if not all(stops):
        raise UsageError("a stop string must have a character or more, and one is empty.")
    return stops


def _first(text: Text, stops: Sequence[Text]) -> tuple[int, int] | None:
    """Where the stop string that is complete first begins and ends; the longest of several."""
    places = [(start + len(stop), start) for stop in stops if (start := text.find(stop)) >= 0]
    if not places:
        return None
    end, start = min(places)
    return start, end
