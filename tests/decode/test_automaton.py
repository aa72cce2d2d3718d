"""Automata over tokens: what they let through matches by Python's own `re`, and what matches is let through."""

import itertools
import json
import math
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from fast import jit
from hypothesis import example, given, settings
from hypothesis import strategies as st

from jaxpar.decode import Automaton, Sampling, is_stuck, process, regex_automaton
from jaxpar.decode.automaton import automaton_of
from jaxpar.lm.text.tokenizer import Bytes, train_bpe
from jaxpar.types import UsageError

BYTES = Bytes().token_bytes()
# a+b, then any number of c; from 5 nothing leads to an end.
BY_HAND = {7: {0: 3}, 3: {0: 3, 1: 4, 2: 5}, 4: {2: 4}, 5: {0: 5}}
STEPS = 12


# Pairs of 1 and any number of 0 between them; it may end where it begins, and comes back there.
BACK = {0: {0: 0, 1: 1}, 1: {1: 0, 2: 9}}


def slow_walk(tokens, transitions, start, ends):
    """The state after some tokens; None where they are illegal, or no end can follow."""
    state = start
    for token in tokens:
        state = transitions.get(state, {}).get(token)
    follow = {state}
    for _ in transitions:
        follow |= {after for name in follow for after in transitions.get(name, {}).values()}
    return state if follow & ends else None


@settings(max_examples=100, deadline=None)
@given(
    st.sampled_from([(BY_HAND, 7, {4}), (BACK, 0, {0})]), st.lists(st.integers(0, 2), max_size=6)
)
def test_a_table_walks_as_dictionaries_do(machine, tokens):
    automaton = automaton_of(*machine, 3)
    state = jnp.zeros((1,), jnp.int32)
    for token in tokens:
        state = automaton.step(state, jnp.array([token]))
    want = slow_walk(tokens, *machine)
    assert (int(state[0]) >= 0) == (want is not None)
    assert bool(automaton.may_end(state)[0]) == (want in machine[2])
    legal = [slow_walk([*tokens, token], *machine) is not None for token in range(3)]
    assert automaton.allowed(state)[0].tolist() == legal


def test_tables_do_not_depend_on_names():
    other = {11: {0: 90}, 90: {2: 60, 1: 1, 0: 90}, 1: {2: 1}, 60: {0: 60}}
    one, two = automaton_of(BY_HAND, 7, {4}, 3), automaton_of(other, 11, {1}, 3)
    jax.tree.map(np.testing.assert_array_equal, one, two)
    assert one.distance.tolist()[:3] == [2, 1, 0] and one.table.tolist()[1] == [1, 2, -1]


def test_a_stop_token_is_let_through_at_ends_and_ends_all():
    automaton = automaton_of(BY_HAND, 7, {4}, 4, stop_token=3)
    state, seen = jnp.zeros((1,), jnp.int32), []
    for token in (0, 1, 2, 3):
        seen.append((automaton.allowed(state)[0, 3].item(), automaton.is_done(state)[0].item()))
        state = automaton.step(state, jnp.array([token]))
    assert seen == [(False, False), (False, False), (True, False), (True, False)]
    assert automaton.is_done(state)[0] and automaton.may_end(state)[0]
    instead = automaton_of(BY_HAND, 7, {4}, 3, stop_token=2)  # of what it was in the dictionaries
    assert np.asarray(instead.table)[:3].tolist() == [[1, -1, -1], [1, 2, -1], [-1, -1, 4]]


def generate(key, automaton, starts, steps, sampling, left_is_known=True):
    """Rows of tokens from random logits, each until nothing may follow, in one loop under jit."""
    vocab = automaton.table.shape[1]

    def step(carry, number):
        state, ended = carry
        logits = 4 * jax.random.normal(jax.random.fold_in(key, number), (starts, vocab))
        left = steps - number if left_is_known else None
        law = process(logits, sampling, allowed=automaton.allowed(state, left))
        ended = ended | is_stuck(law)
        token = jnp.where(
            ended, -1, jax.random.categorical(jax.random.fold_in(key, steps + number), law)
        )
        state = jnp.where(ended, state, automaton.step(state, jnp.maximum(token, 0)))
        return (state, ended), (token, ended)

    first = jnp.zeros((starts,), jnp.int32), jnp.zeros((starts,), bool)
    (state, _), (tokens, ended) = jax.lax.scan(step, first, jnp.arange(steps))
    return tokens.T, automaton.may_end(state), ended.T


def texts(tokens, vocabulary):
    return [
        b"".join(vocabulary[token] for token in row if token >= 0) for row in np.asarray(tokens)
    ]


PATTERNS = {
    r"-?(0|[1-9][0-9]{0,3})(\.[0-9]+)?": 0.5,
    r"(é|日本|😀)+x": 1.0,
    r"(ab|a)*c{2,4}|x.*": 1.0,
    r"[^a]{2}[0-9](bc)?": 1.0,
}


@pytest.mark.parametrize("pattern", PATTERNS)
def test_all_that_is_generated_matches(pattern):
    automaton = regex_automaton(pattern, BYTES)
    run = jit(generate, static_argnums=(2, 3, 4, 5))
    made = set()
    for sampling in (Sampling(temperature=PATTERNS[pattern]), Sampling(top_k=3, top_p=0.9)):
        tokens, may_end, _ = run(jax.random.key(1), automaton, 40, STEPS, sampling, True)
        for text in texts(tokens, BYTES):
            assert re.fullmatch(pattern, text.decode()), text
            made.add(text)
        assert may_end.all()
    assert len(made) > 12, "what says little tests little"


def test_what_is_cut_is_whole_only_where_masks_know_how_much_is_left():
    automaton = automaton_of(BY_HAND, 7, {4}, 3)
    run = jit(generate, static_argnums=(2, 3, 4, 5))
    assert run(jax.random.key(1), automaton, 40, 5, Sampling(), True)[1].all()
    assert not run(jax.random.key(1), automaton, 40, 5, Sampling(), False)[1].all()


@pytest.mark.parametrize("pattern", PATTERNS)
def test_what_matches_is_let_through_and_nothing_else(pattern):
    automaton, rng = regex_automaton(pattern, BYTES), np.random.default_rng(0)
    table, distance = np.asarray(automaton.table), np.asarray(automaton.distance)
    inside = [
        text.encode()
        for text in ("-0.5", "12", "é日本x", "😀x", "aabacc", "cc", "bb3", "日é7bc", "x", "xé.")
    ]
    for text in inside + [
        bytes(rng.choice(list("aéx日0123.c-".encode()), size=rng.integers(1, 5)))
        for _ in range(300)
    ]:
        state = 0
        for byte in text:
            state = table[state, byte] if state >= 0 else -1
        try:
            matches = re.fullmatch(pattern, text.decode()) is not None
        except UnicodeDecodeError:
            matches = False
        assert (state >= 0 and distance[state] == 0) == matches, text


patterns = st.recursive(
    st.sampled_from(["a", "b", "ab", "[^a]", "."]),
    lambda inner: st.one_of(
        st.tuples(inner, inner).map("".join),
        st.tuples(inner, inner).map(lambda two: f"(?:{two[0]}|{two[1]})"),
        st.tuples(inner, st.sampled_from(["?", "*", "+", "{2}", "{1,3}"])).map(
            lambda two: f"(?:{two[0]}){two[1]}"
        ),
    ),
    max_leaves=6,
)


@settings(max_examples=60, deadline=None)
@given(patterns)
@example("a(?:ba)?")
def test_tokens_of_several_bytes_spell_the_language(pattern):
    """All texts of at most three tokens, each in every way that it can be cut into tokens."""
    vocabulary = [b"a", b"b", b"ab", b"ba", None, b"a"]
    automaton = regex_automaton(pattern, vocabulary)
    table, distance = np.asarray(automaton.table), np.asarray(automaton.distance)
    for length in range(4):
        for tokens in itertools.product(range(6), repeat=length):
            state = 0
            for token in tokens:
                state = table[state, token] if state >= 0 else -1
            text = "".join((vocabulary[token] or b"?").decode() for token in tokens)
            matches = 4 not in tokens and re.fullmatch(pattern, text) is not None
            assert (state >= 0 and distance[state] == 0) == matches, (pattern, tokens)


def test_json_of_a_schema_over_pairs_of_bytes():
    """Tokens of several bytes, each text with its end: what was drawn is an object of the schema."""
    schema = {
        "type": "object",
        "properties": {"a": {"enum": ["x", "yy", "é"]}, "n": {"type": "integer", "maximum": 9}},
        "required": ["a", "n"],
    }
    pattern = pytest.importorskip("outlines_core.json_schema").build_regex_from_schema(
        json.dumps(schema)
    )
    bpe = train_bpe(iter(['{"a": "yy", "n": 12}\n' * 9]), 280)
    vocabulary = [*bpe.token_bytes(), None]  # the last is the stop token
    stop = len(vocabulary) - 1
    automaton = regex_automaton(pattern, vocabulary, stop)
    tokens, may_end, ended = jit(generate, static_argnums=(2, 3, 4, 5))(
        jax.random.key(2), automaton, 16, 48, Sampling(temperature=0.7), True
    )
    assert may_end.all()
    assert max(len(vocabulary[token] or b"") for token in np.asarray(tokens).ravel()) > 1, (
        "some tokens are several bytes"
    )
    for row in np.asarray(tokens):
        drawn = row[row >= 0].tolist()
        assert stop not in drawn[:-1]
        said = json.loads(b"".join(vocabulary[token] for token in drawn if token != stop))
        assert said["a"] in schema["properties"]["a"]["enum"] and isinstance(said["n"], int)


def test_every_text_in_time_is_possible_and_no_other():
    """All texts of at most four tokens, counted: those of the language, and the masks' own."""
    automaton = automaton_of(BY_HAND, 7, {4}, 3)
    masks = jit(Automaton.allowed)

    def count(state, left):
        here = int(automaton.may_end(state)[0])
        legal = np.flatnonzero(masks(automaton, state, jnp.array([left]))[0]) if left else []
        return here + sum(
            count(automaton.step(state, jnp.array([token])), left - 1) for token in legal
        )

    language = [n for n in range(2, 5) for _ in range(n - 1)]  # a^i b c^j with i + 1 + j = n
    assert count(jnp.array([0]), 4) == len(language)
    assert not masks(automaton, jnp.array([0]), jnp.array([1])).any(), "there is no time for b"
    assert masks(automaton, jnp.array([-1]), jnp.array([9])).sum() == 0


def test_mistakes_are_told(monkeypatch):
    with pytest.raises(UsageError, match="no text of this vocabulary ends"):
        automaton_of(BY_HAND, 7, {99}, 3)
    with pytest.raises(UsageError, match="outlines-core makes no automaton of"):
        regex_automaton("(a", BYTES)
    with pytest.raises(UsageError, match="is over 268435456 entries"):
        automaton_of(BY_HAND, 7, {4}, math.ceil(2**28 / 4) + 1)
    monkeypatch.setitem(__import__("sys").modules, "outlines_core", None)
    with pytest.raises(UsageError, match=r"pip install 'jaxpar\[regex\]'"):
        regex_automaton("a", BYTES)
