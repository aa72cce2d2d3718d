"""What may be drawn as a deterministic automaton over tokens: a table, so that masks are made inside jit.

A table has a row for each state and a column for each token, states * V integers: what it is for are vocabularies of
bytes, and patterns of some hundred states over larger ones. `regex_automaton` lets outlines-core (Apache-2.0, a wheel
of 2 MB without dependencies) turn a regular expression into transitions over a vocabulary's bytes, and so a JSON
schema, by its `outlines_core.json_schema.build_regex_from_schema`. Grammars that are no regular language have no table:
their masks come from the host, one step at a time (llguidance has them), as `allowed` of `jaxpar.decode.process`.
"""

import importlib
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Int

from jaxpar.types import UsageError

__all__ = ["Automaton", "automaton_of", "regex_automaton"]

END = "\U0010ffff"  # no character, by Unicode for good
NEVER = np.iinfo(np.int32).max
MAX_ENTRIES = 2**28
"""A gibibyte."""


class Automaton(NamedTuple):
    """A table of transitions; state 0 is the first. From every state an end can be reached.

    Attributes:
      table: The state after each token; -1 where the token may not be drawn.
      distance: Fewest tokens from each state to one in which the text may end; 0 is such a state.
      closing: States in which a text may end though the table has no stop token that says so; None
        where it has one.
    """

    table: Int[Array, "states V"]
    distance: Int[Array, " states"]
    closing: Bool[Array, " states"] | None = None

    def step(self, state: Int[Array, "..."], token: Int[Array, "..."]) -> Int[Array, "..."]:
        """Returns the state after one more token of each row; -1, out of which nothing leads, where it was illegal."""
        return jnp.where(state < 0, -1, self.table[jnp.maximum(state, 0), token])

    def allowed(
        self, state: Int[Array, "..."], left: Int[Array, "..."] | None = None
    ) -> Bool[Array, "... V"]:
        """Returns which tokens may be drawn, as `jaxpar.decode.process` takes it.

        Args:
          state: Of each row.
          left: How many tokens may still be drawn; then only those are allowed after which the text can end in time,
            so that what was cut by `max_new_tokens` is whole all the same. At the start at least `distance[0]`.
        """
        after = jnp.where((state < 0)[..., None], -1, self.table[jnp.maximum(state, 0)])
        if left is None:
            return after >= 0
        return (after >= 0) & (
            self.distance[jnp.maximum(after, 0)] < jnp.broadcast_to(left, state.shape)[..., None]
        )

    def may_end(self, state: Int[Array, "..."]) -> Bool[Array, "..."]:
        """Returns where the text is whole as it stands."""
        return (state >= 0) & (self.distance[jnp.maximum(state, 0)] == 0)

    def may_close(self, state: Int[Array, "..."]) -> Bool[Array, "..."]:
        """Returns where a stop token from outside of the table, or nothing, may end the text."""
        if self.closing is None:
            return jnp.zeros(state.shape, bool)
        return (state >= 0) & self.closing[jnp.maximum(state, 0)]

    def is_done(self, state: Int[Array, "..."]) -> Bool[Array, "..."]:
        """Returns where no token can follow: such a row has ended, with a stop token or without."""
        return ~self.allowed(state).any(-1)


def automaton_of(
    transitions: Mapping[int, Mapping[int, int]],
    start: int,
    ends: set[int],
    vocab_size: int,
    stop_token: int | None = None,
) -> Automaton:
    """Makes a table of transitions by name; states from which no end can be reached are never entered.

    Args:
      transitions: state -> token -> state, states by any names.
      start: The first state.
      ends: States in which the text may end.
      vocab_size: V.
      stop_token: May be drawn at every end, and nothing after it. By default `generate` lets its own
        stop tokens through there. If it has none either, the first end is the text's, such as "a" of
        "a+": nothing could choose a later one.

    Raises:
      UsageError: If no end can be reached, or the table would be over a gibibyte.
    """
    names = _reached(transitions, start)
    states = len(names) + (stop_token is not None)
    if states * vocab_size > MAX_ENTRIES:
        raise UsageError(
            f"a table of {states} states and {vocab_size} tokens is over {MAX_ENTRIES} entries."
        )
    table = np.full((states, vocab_size), -1, np.int32)
    for name, state in names.items():
        for token, after in transitions.get(name, {}).items():
            table[state, token] = names[after]
    last = [names[end] for end in ends if end in names]
    if stop_token is not None:
        table[:, stop_token] = -1
        table[last, stop_token] = len(names)
        last.append(len(names))
    distance = _distances(table, last)
    if distance[0] == NEVER:
        raise UsageError("no text of this vocabulary ends in a state in which it may.")
    table = np.where((table >= 0) & (distance[table] < NEVER), table, -1)
    closing = None
    if stop_token is None:
        closing = jnp.asarray(distance == 0)
    return Automaton(table=jnp.asarray(table), distance=jnp.asarray(distance), closing=closing)


def regex_automaton(
    pattern: str, vocabulary: Sequence[bytes | None], stop_token: int | None = None
) -> Automaton:
    """Returns the automaton of the texts that match a whole regular expression, in UTF-8.

    Args:
      pattern: In the syntax of Rust's regex crate: no looking around, no back references; what Unicode calls a digit
        or a letter is of its version, and `[0-9]` of none. The noncharacter U+10FFFF matches nothing.
      vocabulary: The bytes of each token; None for special ones, which are then never drawn
        but for the stop token.
      stop_token: As in `automaton_of`.

    Raises:
      UsageError: If outlines-core is not installed, or makes nothing of the pattern with this vocabulary.
    """
    try:
        outlines = importlib.import_module("outlines_core")
    except ImportError:
        raise UsageError(
            "regular expressions need outlines-core: pip install 'jaxpar[regex]'."
        ) from None
    # outlines-core 0.2.14 forgets what may follow a state in which a text may end, but for another such state: of
    # "a(bc)?" it lets "a" alone through. So texts end here by a character of their own, and nothing follows that.
    stop, end = len(vocabulary), len(vocabulary) + 1
    tokens: dict[bytes, list[int]] = {END.encode(): [end]}
    for token, text in enumerate(vocabulary):
        if text:
            tokens.setdefault(text, []).append(token)
    try:
        index = outlines.Index(f"(?:{pattern}){END}", outlines.Vocabulary(stop, tokens))
    except ValueError as error:
        raise UsageError(f"outlines-core makes no automaton of {pattern!r}: {error}.") from None
    found, over = index.get_transitions(), index.get_final_states()
    ends = {state for state, row in found.items() if row.get(end) in over}
    transitions = {
        s: {token: after for token, after in row.items() if token < stop}
        for s, row in found.items()
    }
    return automaton_of(transitions, index.get_initial_state(), ends, len(vocabulary), stop_token)


def _reached(transitions: Mapping[int, Mapping[int, int]], start: int) -> dict[int, int]:
    """Numbers the states by when they are first met, tokens in order: the same table whatever they are called."""
    names, queue = {start: 0}, [start]
    for name in queue:
        for _, after in sorted(transitions.get(name, {}).items()):
            if after not in names:
                names[after] = len(names)
                queue.append(after)
    return names


def _distances(table: np.ndarray, ends: list[int]) -> np.ndarray:
    """Fewest tokens from each state to an end: from the ends back, all states at one distance before the next."""
    before = [[] for _ in table]
    for state, row in enumerate(table):
        for after in np.unique(row[row >= 0]):
            before[after].append(state)
    distance = np.full(len(table), NEVER, np.int32)
    distance[ends], queue = 0, list(ends)
    for after in queue:
        for state in before[after]:
            if distance[state] == NEVER:
                distance[state] = distance[after] + 1
                queue.append(state)
    return distance
