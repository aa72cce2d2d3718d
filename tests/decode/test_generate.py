"""Every way to generate gives the tokens of asking the whole model for one token after the other."""

import dataclasses
import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tiny
from fast import jit
from flat_decoding import generate
from lm_configs import lm_config, with_fields

from jaxpar import decode
from jaxpar.decode import (
    Accepted,
    CopyDraft,
    JacobiDraft,
    LookaheadDraft,
    ModelDraft,
    NoDraft,
    Sampling,
    Tree,
    gumbel,
    process,
    stop_sequences,
)
from jaxpar.decode.automaton import automaton_of
from jaxpar.experimental.pseudo_tokens import Heads, HiddenTransfer, PromptTokens
from jaxpar.lm import Decoder
from jaxpar.types import UsageError

VOCAB, NEW, BLOCK = tiny.VOCAB, 9, 4
ROPE = dataclasses.replace(tiny.exact(tiny.LLAMA), num_layers=1)
MODELS = {
    "rope": ROPE,
    "deep": dataclasses.replace(ROPE, num_layers=3),
    "learned": with_fields(ROPE, positions="learned", max_seq_len=5 + NEW, tied=True),
    "recurrent": dataclasses.replace(tiny.exact(tiny.RECURRENT), num_layers=1),
}
SMALLER = dataclasses.replace(ROPE, embed_dim=8)
CANDIDATES = Tree((-1, 0, 0, 0, 1, 1, 2))
DRAFTS = {
    "none": NoDraft(),
    "copy": CopyDraft(3, 2),
    "prompt": CopyDraft(2, 2, "prompt"),
    "jacobi": JacobiDraft(3),
    "model": ModelDraft(Decoder(SMALLER), 2, BLOCK),
    "lookahead": LookaheadDraft(2, 3, 2, 8),
    "prompts": PromptTokens(2, CANDIDATES),
    "hidden": HiddenTransfer(0, 2, CANDIDATES),
    "heads": Heads(2, CANDIDATES),
}
PROMPT, LENGTHS = np.random.default_rng(3).integers(0, VOCAB, (4, 5)), np.array([5, 1, 3, 4])
KEY = jax.random.key(7)
# What changes nothing, for tests of each of these to share a program.
NOTHING = {
    "seeds": np.zeros(4, int),
    "bias": np.zeros(VOCAB),
    "stop_tokens": (-1,),
    "sequences": stop_sequences([[VOCAB] * 3] * 4),
}
drawn = jit(
    generate,
    static_argnums=(3, 4),
    static_argnames=("draft", "num_samples", "rule", "block", "chunk"),
)
params_of = functools.cache(tiny.params_of)  # none of the tests changes them


def noise(*place):
    return gumbel(KEY, *place, VOCAB)


@functools.partial(jit, static_argnums=1)
def chosen(logits, sampling, *place):
    scores = process(logits, sampling)
    return (scores + noise(*place) if sampling.temperature else scores).argmax()


@functools.cache
def plain_row(config, sampling, row, seed, sample):
    text = list(PROMPT[row, : LENGTHS[row]])
    for _ in range(sampling.max_new_tokens):
        padded = np.pad(text, (0, PROMPT.shape[1] + NEW - len(text)))[None]
        logits = np.asarray(tiny.logits(params_of(config), padded, config))[0, len(text) - 1]
        text.append(int(chosen(logits, sampling, *np.array([seed, len(text), sample], np.int32))))
    return tuple(text)


def plain(config, sampling, seed=0, sample=0, rows=range(4)):
    """The slow oracle: no cache, no batch, each token from a pass over all before it, and the documented noise."""
    texts = [plain_row(config, sampling, row, seed, sample) for row in rows]
    return [[int(token) for token in text] for text in texts]


def run(config, sampling, prompt=PROMPT, draft=NoDraft(), **options):
    params = params_of(SMALLER) if isinstance(draft, ModelDraft) else None
    if isinstance(draft, PromptTokens | HiddenTransfer | Heads):
        rng = np.random.default_rng(1)
        params = {
            name: rng.standard_normal(leaf.shape) / 2
            for name, leaf in draft.leaves(config.embed_dim, 0.3).items()
        }
    given = {
        "prompt_lengths": LENGTHS,
        "seeds": np.zeros(len(prompt), int),
        "block": BLOCK,
        "draft": draft,
        "draft_params": params,
    } | options
    return drawn(KEY, params_of(config), prompt, Decoder(config), sampling, **given)


def texts_of(out):
    return [
        row[:length].tolist()
        for row, length in zip(np.asarray(out.tokens), np.asarray(out.lengths), strict=True)
    ]


each_draft_and_temperature = pytest.mark.parametrize(
    ("name", "temperature"),
    [  # that the likeliest token is chosen does not depend on who guessed: seen with a chain, a tree and none
        pytest.param(
            *each,
            marks=[pytest.mark.slow]
            if not each[1] and each[0] not in ("none", "model", "prompts")
            else [],
        )
        for each in itertools.product(DRAFTS, (0.0, 0.7))
    ],
)


@each_draft_and_temperature
def test_any_draft_gives_the_tokens_of_the_slow_oracle(name, temperature, x64):
    sampling = Sampling(NEW, temperature)
    out = run(ROPE, sampling, draft=DRAFTS[name])
    want = plain(ROPE, sampling)
    assert texts_of(out) == want
    assert len({token for text in want for token in text[5:]}) > 3, (
        "a model that repeats itself tests nothing"
    )


@pytest.mark.parametrize(
    ("name", "draft"),
    [
        *(
            (name, "copy") for name in ("deep", "learned", "recurrent")
        ),  # a window of one token is one of several
        *(
            pytest.param(name, "none", marks=pytest.mark.slow)
            for name in ("deep", "learned", "recurrent")
        ),
    ],
)
def test_any_mixer_gives_the_tokens_of_the_slow_oracle(name, draft, x64):
    sampling = Sampling(NEW, 0.7)
    assert texts_of(run(MODELS[name], sampling, draft=DRAFTS[draft])) == plain(
        MODELS[name], sampling
    )


@pytest.mark.parametrize("name", ["rope", "recurrent"])
def test_a_perfect_draft_takes_one_pass_for_a_window(name, x64):
    draft = ModelDraft(Decoder(MODELS[name]), 3, BLOCK)
    out = run(MODELS[name], Sampling(NEW, 0.7), draft=draft, draft_params=params_of(MODELS[name]))
    assert texts_of(out) == plain(MODELS[name], Sampling(NEW, 0.7))
    assert out.passes.tolist() == [-(-(NEW - 1) // 4)] * 4
    assert run(MODELS[name], Sampling(NEW, 0.7)).passes.tolist() == [NEW - 1] * 4


@pytest.mark.parametrize("count", [1, 2, 3])
def test_a_lookahead_window_stands_where_its_guesses_belong(count):
    """With a model that draws a token's own position, each guess in the window must be the position it stands at."""
    draft, root = LookaheadDraft(4, 4, 1, 8), 20
    state = draft.init(None, jnp.zeros((1, 3), jnp.int32), jnp.array([3]), 9)
    for _ in range(4):
        tokens = draft.propose(None, state, jnp.full((1, 40), root), jnp.array([root + 1]), None)[
            0
        ].tokens
        chosen = root + 1 + jnp.asarray(draft.tree.depth)[None]
        accepted = Accepted(chosen, jnp.array([count]), chosen)
        state, root = (
            draft.update(
                state, jnp.pad(tokens, ((0, 0), (1, 0))), jax.nn.one_hot(chosen, 64), accepted
            ),
            root + count,
        )
    want = root + 1 + np.arange(4)[None] + np.arange(3)[:, None]
    for level in range(
        3
    ):  # the newest iterate has moved once, the oldest as often as there are levels
        columns = 4 - (3 - level) * (count - 1)
        np.testing.assert_array_equal(
            state[0][0, level, : max(columns, 0)], want[level, : max(columns, 0)]
        )
    if count == 1:  # then no column was ever made up
        np.testing.assert_array_equal(np.diff(state[1][0, -4:], axis=1), 1)


@pytest.mark.parametrize(
    "name", ["rope", "recurrent"]
)  # a state is copied for each sample, a prompt's blocks are not
def test_samples_share_their_prompt_and_differ(name, x64):
    sampling = Sampling(NEW, 1.0)
    got = texts_of(run(MODELS[name], sampling, num_samples=3))
    each = [plain(MODELS[name], sampling, sample=number) for number in range(3)]
    assert got == [each[number][row] for row in range(4) for number in range(3)]
    assert len({tuple(text) for text in got}) == 12


def test_a_row_has_its_own_seed_and_no_place(x64):
    sampling, seeds, order = (
        Sampling(NEW, 0.7, top_k=5),
        np.array([3, 3, 5, 0]),
        np.array([2, 0, 3, 1]),
    )
    out = run(ROPE, sampling, **NOTHING | {"seeds": seeds})
    want = [plain(ROPE, sampling, seed=seed, rows=[row])[0] for row, seed in enumerate(seeds)]
    assert texts_of(out) == want
    others = {"seeds": seeds[order], "prompt_lengths": LENGTHS[order]}
    moved = run(ROPE, sampling, PROMPT[order], **NOTHING | others)
    assert texts_of(moved) == [want[row] for row in order]


@pytest.mark.parametrize("draft", ["none", "jacobi"])
def test_a_stop_token_ends_a_row_also_within_a_window(draft, x64):
    sampling = Sampling(NEW, 0.7, top_k=5)
    free = plain(ROPE, sampling)
    stop = free[3][8]
    out = run(ROPE, sampling, draft=DRAFTS[draft], **NOTHING | {"stop_tokens": (stop,)})
    want = []
    for text, length in zip(free, LENGTHS, strict=True):
        ends = [place for place in range(length, len(text)) if text[place] == stop]
        want.append(text[: ends[0] + 1] if ends else text)
    assert (
        texts_of(out) == want
        and len({len(text) - length for text, length in zip(want, LENGTHS, strict=True)}) > 1
    )
    if draft == "jacobi":  # a look at the ends every third pass changes nothing
        ended = dataclasses.replace(sampling, stop_token=stop)
        late = run(ROPE, ended, draft=DRAFTS[draft], chunk=3)
        jax.tree.map(np.testing.assert_array_equal, late, out)
    assert (
        np.asarray(out.tokens)[np.arange(5 + NEW) >= np.asarray(out.lengths)[:, None]] == 0
    ).all()


@pytest.mark.parametrize("draft", ["none", "jacobi"])
def test_log_probabilities_are_the_models_own(draft, x64):
    out = run(ROPE, Sampling(NEW, 0.7, top_k=5), draft=DRAFTS[draft], **NOTHING)
    for row, (text, length) in enumerate(zip(texts_of(out), LENGTHS, strict=True)):
        padded = np.pad(text, (0, 5 + NEW - len(text)))[None]
        law = jax.nn.log_softmax(tiny.logits(params_of(ROPE), padded, ROPE)[0])
        want = [law[place - 1, text[place]] for place in range(length, len(text))]
        np.testing.assert_allclose(
            out.log_probs[row, : len(want)], want, rtol=2e-6
        )  # they are float32


@pytest.mark.parametrize("draft", [pytest.param("none", marks=pytest.mark.slow), "lookahead"])
def test_penalties_count_what_is_in_the_window_too(draft, x64):
    sampling = Sampling(NEW, 0.7, repetition_penalty=1.5, frequency_penalty=0.3)
    texts = texts_of(run(ROPE, sampling, draft=DRAFTS[draft]))
    for row, (text, length) in enumerate(zip(texts, LENGTHS, strict=True)):
        for place in range(length, len(text)):
            padded = np.pad(text[:place], (0, 5 + NEW - place))[None]
            logits = np.array(tiny.logits(params_of(ROPE), padded, ROPE)[0, place - 1])
            for token in set(text[:place]):
                logits[token] = logits[token] / 1.5 if logits[token] > 0 else logits[token] * 1.5
            for token in text[length:place]:
                logits[token] -= 0.3
            assert text[place] == np.argmax(
                logits / 0.7 + jit(noise)(*np.array([0, place, 0], np.int32))
            ), (row, place)


@pytest.mark.parametrize("draft", ["none", "copy"])
def test_sequences_end_a_row_also_within_a_window_and_none_begins_in_the_prompt(draft, x64):
    sampling = Sampling(NEW, 0.7, top_k=5)
    free = plain(ROPE, sampling)
    begun = free[0][4:6]  # its first token is the prompt's last
    sequences = [free[3][7:9], free[1][3:6], begun, free[2][11:]]
    options = NOTHING | {"sequences": stop_sequences(sequences)}
    out = run(ROPE, sampling, draft=DRAFTS[draft], **options)
    want = []
    for text, length in zip(free, LENGTHS, strict=True):
        new = [
            end
            for end in range(length + 1, len(text) + 1)
            if any(text[max(end - len(each), length) : end] == each for each in sequences)
        ]
        want.append(text[: new[0]] if new else text)
    assert (
        texts_of(out) == want
        and len({len(text) - length for text, length in zip(want, LENGTHS, strict=True)}) > 1
    )


def test_an_automaton_says_what_may_come_after_what(x64):
    """Pairs of an even and an odd token, then the stop token 0 or the end of the room: whole also where it is odd."""
    table = {
        0: {token: 1 for token in range(2, VOCAB, 2)},
        1: {token: 0 for token in range(1, VOCAB, 2)},
    }
    automaton, room, rows, config = automaton_of(table, 0, {0}, VOCAB, stop_token=0), 5, 24, ROPE
    perfect, params = ModelDraft(Decoder(config), 2, BLOCK), params_of(config)
    given = {"automaton": automaton, "seeds": np.arange(rows), "block": BLOCK}
    prompt, sampling = np.broadcast_to(PROMPT[:1], (rows, 5)), Sampling(room, 1.5, stop_token=0)
    plainly = drawn(KEY, params, prompt, Decoder(config), sampling, **given)
    for text, length in zip(np.asarray(plainly.tokens), np.asarray(plainly.lengths), strict=True):
        pairs = text[5:length][: -1 if text[length - 1] == 0 else None]
        assert len(pairs) % 2 == 0 and all(
            token and token % 2 == place % 2 for place, token in enumerate(pairs)
        )
    assert len(np.unique(plainly.lengths)) > 2
    out = drawn(
        KEY, params, prompt, Decoder(config), sampling, draft=perfect, draft_params=params, **given
    )
    np.testing.assert_array_equal(out.tokens, plainly.tokens)
    assert out.passes.mean() < 0.8 * plainly.passes.mean(), "few drafts were kept"
    with pytest.raises(
        UsageError, match="the shortest text that the automaton takes has 3 tokens, not 2"
    ):
        longer = automaton_of({0: {1: 1}, 1: {1: 2}, 2: {1: 3}}, 0, {3}, VOCAB)
        generate(KEY, {}, PROMPT, Decoder(config), Sampling(2), automaton=longer)


# Words of a's and b's that end with b, and their way back: "(a|b)*b" over tokens 1 and 2.
ENDS_WITH_B = {0: {1: 0, 2: 1}, 1: {1: 0, 2: 1}}


def words(room, stop=None):
    """The language by enumeration: every text that a row may have, by (a|b)*b and its room."""
    made = set()
    for length in range(1, room + 1):
        for word in itertools.product((1, 2), repeat=length):
            if word[-1] != 2:
                continue
            if stop is None:
                if 2 not in word[:-1]:  # the first end is the text's
                    made.add(word)
            elif length == room:
                made.add(word)
            else:
                made.add((*word, stop))
    return made


@pytest.mark.parametrize("name", ["none", "model"])
@pytest.mark.parametrize("stop", [None, 5])
def test_a_text_ends_in_an_accepting_state_without_a_stop_token_of_the_table(name, stop, x64):
    automaton, room, rows = automaton_of(ENDS_WITH_B, 0, {1}, VOCAB), 4, 400
    options = {"automaton": automaton, "block": BLOCK}
    if name == "model":
        perfect = ModelDraft(Decoder(ROPE), 2, BLOCK)
        options |= {"draft": perfect, "draft_params": params_of(ROPE)}
    if stop is not None:
        options |= {"stop_tokens": (stop,)}
    prompt = np.broadcast_to(PROMPT[:1], (rows, 5))
    out = drawn(KEY, params_of(ROPE), prompt, Decoder(ROPE), Sampling(room, 2.0), **options)
    ends = zip(np.asarray(out.tokens), np.asarray(out.lengths), strict=True)
    made = {tuple(text[5:length].tolist()) for text, length in ends}
    assert made == words(room, stop)


def test_a_stop_token_that_is_text_ends_a_row_only_where_the_text_may_end(x64):
    table = {0: {1: 1}, 1: {1: 2}, 2: {1: 3}, 3: {1: 4}}
    automaton = automaton_of(table, 0, {2, 4}, VOCAB)
    options = {"automaton": automaton, "block": BLOCK, "stop_tokens": (1,)}
    out = drawn(KEY, params_of(ROPE), PROMPT, Decoder(ROPE), Sampling(6, 1.0), **options)
    assert (np.asarray(out.lengths) == 5 + 3).all(), "a b, and what ends it"
    empty = automaton_of({0: {1: 0}}, 0, {0}, VOCAB)
    options = {"automaton": empty, "block": BLOCK}
    out = drawn(KEY, params_of(ROPE), PROMPT, Decoder(ROPE), Sampling(6, 1.0), **options)
    assert (np.asarray(out.lengths) == 5).all(), "the first text is the empty one"


def test_rows_have_noise_of_their_own(x64):
    """Equal prompts without seeds are independent draws, and rows have the seeds 0 to B - 1."""
    rows = 2000
    prompt = np.broadcast_to(PROMPT[:1], (rows, 5))
    sampling = Sampling(2, 1.0)
    given = (KEY, params_of(ROPE), prompt, Decoder(ROPE), sampling)
    out = np.asarray(drawn(*given, block=BLOCK).tokens)[:, 5:]
    laws = jax.nn.softmax(tiny.logits(params_of(ROPE), PROMPT[:1], ROPE), -1)
    share = np.asarray(laws)[0, 4]
    counts = np.bincount(out[:, 0], minlength=VOCAB)
    deviation = (counts - rows * share) / np.sqrt(rows * share * (1 - share) + 1e-7)
    assert np.abs(deviation).max() < 5
    agreeing = (out[:-1, 0] == out[1:, 0]).mean()  # neighbours agree by chance alone
    chance = (share**2).sum()
    assert abs(agreeing - chance) < 5 * np.sqrt(chance * (1 - chance) / rows)
    one = np.asarray(drawn(*given, block=BLOCK, seeds=np.arange(rows)).tokens)[:, 5:]
    np.testing.assert_array_equal(out, one)
    shared = np.asarray(drawn(*given, block=BLOCK, seeds=np.zeros(rows, int)).tokens)[:, 5:]
    assert (shared == out[0]).all(), "one seed is one text"


def test_a_bias_of_minus_infinity_forbids_a_token(x64):
    sampling = Sampling(NEW, 0.7, top_k=5)
    tokens = [token for text in plain(ROPE, sampling) for token in text[5:]]
    often = max(range(VOCAB), key=tokens.count)
    out = run(ROPE, sampling, **NOTHING | {"bias": np.where(np.arange(VOCAB) == often, -np.inf, 0)})
    assert all(
        often not in text[length:] for text, length in zip(texts_of(out), LENGTHS, strict=True)
    )


def test_by_rejection_the_law_is_kept(x64):
    """First two tokens of 2,500 seeds against the model's own law, within five standard errors."""
    rows, config = 2500, ROPE
    prompt = np.broadcast_to(PROMPT[:1], (rows, 5))
    params = params_of(config)
    out = drawn(
        KEY, params, prompt, Decoder(config), Sampling(3, 1.0), seeds=np.arange(rows), draft=DRAFTS["model"],
        draft_params=params_of(SMALLER), rule="rejection", block=BLOCK,
    )  # fmt: skip
    tokens = np.asarray(out.tokens)[:, 5:7]
    texts = np.array([[*PROMPT[0], token] for token in range(VOCAB)])
    laws = jax.nn.softmax(tiny.logits(params, np.pad(texts, ((0, 0), (0, 8))), config), -1)
    want = np.asarray(laws[0, 4])[:, None] * np.asarray(laws[:, 5])
    found = np.zeros((VOCAB, VOCAB))
    np.add.at(found, tuple(tokens.T), 1 / rows)
    assert np.abs((found - want) / np.sqrt(want * (1 - want) / rows + 1e-7)).max() < 5
    assert out.passes.mean() < 2, "no draft was ever kept"


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        (dict(prompt=PROMPT[:, :0]), "the prompt has no tokens; give at least one"),
        (dict(prompt=PROMPT + VOCAB), "token [23][0-9] of a prompt; legal are 0 to 15"),
        (dict(prompt=PROMPT - 100), "token -[0-9]+ of a prompt; legal are 0 to 15"),
        (
            dict(prompt_lengths=np.array([6, 1, 1, 1])),
            "prompt_lengths from 1 to 6; legal are 1 to 5",
        ),
        (
            dict(prompt_lengths=np.array([5, 0, 1, 1])),
            "prompt_lengths from 0 to 5; legal are 1 to 5",
        ),
        (dict(num_samples=0), "num_samples=0 must be at least 1"),
        (dict(rule="typical"), "rule='typical' is unknown; legal are coupled, rejection"),
        (
            dict(sampling=Sampling(NEW + 1)),
            "5 prompt and 10 new tokens are over the model's 14 positions",
        ),
        (dict(draft=DRAFTS["copy"], rule="rejection"), "draft"),
        (
            dict(draft=ModelDraft(Decoder(lm_config(vocab_size=8)))),
            "the draft's 8 symbols are not the model's 16",
        ),
    ],
)
def test_what_cannot_be_continued_is_refused(options, sentence, x64):
    given = dict(prompt=PROMPT, sampling=Sampling(NEW)) | options
    config = MODELS["learned"]
    call = functools.partial(
        generate, KEY, params_of(config), given.pop("prompt"), Decoder(config), **given
    )
    with pytest.raises(UsageError, match=sentence):
        jax.eval_shape(call)


def test_older_arguments_are_fields_today(x64):
    config = MODELS["rope"] if "rope" in MODELS else ROPE
    params = params_of(config)
    want = drawn(
        KEY, params, PROMPT, Decoder(config), Sampling(2), draft=DRAFTS["copy"], seeds=np.arange(4)
    )
    call = jit(decode.generate, static_argnums=(3, 4), static_argnames="draft")
    with pytest.warns(
        FutureWarning, match=r"generate\(draft, seeds\) is now \(decoding.draft, prompt.seeds\)"
    ):
        got = call(
            KEY,
            params,
            PROMPT,
            Decoder(config),
            Sampling(2),
            draft=DRAFTS["copy"],
            seeds=np.arange(4),
        )
    np.testing.assert_array_equal(got.tokens, want.tokens)
    with pytest.raises(TypeError, match="unexpected keyword argument 'widht'"):
        decode.generate(KEY, params, PROMPT, Decoder(config), Sampling(2), widht=3)
