"""Beam search equals the plain search that asks the whole model for every beam."""

import functools
import itertools

import jax
import numpy as np
import pytest
from fast import jit, noisy_params
from lm_configs import lm_config

from jaxpar.decode import Beams, beam, beam_search
from jaxpar.decode.reader import BLOCK
from jaxpar.lm import Decoder, apply
from jaxpar.types import UsageError

VOCAB, NEW, STOPS = 8, 5, (3, 6)
SMALL = dict(
    vocab_size=VOCAB, num_layers=1, embed_dim=16, mlp_dim=16, init_std=0.3, dtype="float64"
)
MODELS = {
    "attention": lm_config(**SMALL, num_heads=2),
    "recurrent": lm_config(**SMALL, mixer="min_lstm"),
    "learned": lm_config(**SMALL, num_heads=2, positions="learned", max_seq_len=4 + NEW),
}
# Of smaller weights no beam's order changes where another beam's state replaces its own.
STDS = {"attention": 0.6, "recurrent": 1.0, "learned": 0.6}
PROMPT, LENGTHS = np.random.default_rng(1).integers(0, VOCAB, (3, 4)), np.array([4, 1, 3])
search = jit(beam_search, static_argnums=(2, 3), static_argnames=("block",))


@functools.cache
def whole(name):
    return jit(lambda params, tokens: jax.nn.log_softmax(apply(params, tokens, MODELS[name])))


def after(name, params, text):
    padded = np.pad(text, (0, 4 + NEW - len(text)))[None]
    return np.asarray(whole(name)(params, padded))[0, len(text) - 1]


def plain(name, params, prompt, width, penalty, stops):
    """The same search with lists: (score, log-probability, text), the best first."""
    alive, ended = [(0.0, list(prompt))], []
    for count in range(1, NEW + 1):
        nexts = [
            (log_prob + law, text + [token])
            for log_prob, text in alive
            for token, law in enumerate(after(name, params, text))
        ]
        nexts = sorted(nexts, key=lambda each: -each[0])[: (1 + len(stops)) * width]
        ended += [
            (log_prob / count**penalty, log_prob, text)
            for log_prob, text in nexts
            if text[-1] in stops
        ]
        alive = [each for each in nexts if each[1][-1] not in stops][:width]
    ended += [(log_prob / NEW**penalty, log_prob, text) for log_prob, text in alive]
    return sorted(ended, key=lambda each: -each[0])[:width]


@pytest.mark.parametrize(
    ("name", "penalty"),
    [
        *itertools.product(["attention"], [-1.0, 0.0, 1.0, 2.0]),
        ("recurrent", 0.0),
        ("learned", 2.0),
        *(pytest.param("recurrent", penalty, marks=pytest.mark.slow) for penalty in (1.0, 2.0)),
        *(pytest.param("learned", penalty, marks=pytest.mark.slow) for penalty in (0.0, 1.0)),
    ],
)
def test_beams_equal_the_plain_search(name, penalty, x64):
    params = noisy_params(MODELS[name], np.float64, std=STDS[name])
    beams = Beams(3, NEW, penalty)
    out = search(
        params,
        PROMPT,
        Decoder(MODELS[name]),
        beams,
        prompt_lengths=LENGTHS,
        stop_tokens=STOPS,
        block=2,
    )
    ends = set()
    for row, length in enumerate(LENGTHS):
        want = plain(name, params, PROMPT[row, :length], 3, penalty, STOPS)
        got = [
            np.asarray(out.tokens)[row, beam, : out.lengths[row, beam]].tolist()
            for beam in range(3)
        ]
        assert got == [[int(token) for token in text] for _, _, text in want]
        np.testing.assert_allclose(
            out.log_probs[row], [each[1] for each in want], rtol=1e-6
        )  # they are float32
        np.testing.assert_allclose(out.scores[row], [each[0] for each in want], rtol=1e-6)
        ends |= {len(text) - length for _, _, text in want}
    assert len(ends) > 1, "continuations of one length test no ends"


@pytest.mark.parametrize("stops", [(0, 1, 2, 3, 5), (0, 2, 3, 5, 6, 7)])
def test_as_many_beams_go_on_where_all_could_stop_by_each_stop_token(stops, x64):
    params = noisy_params(MODELS["attention"], np.float64, std=0.6)
    options = dict(prompt_lengths=LENGTHS, stop_tokens=(*stops, stops[0]), block=2)
    out = search(params, PROMPT, Decoder(MODELS["attention"]), Beams(2, NEW, 3.0), **options)
    for row, length in enumerate(LENGTHS):
        want = plain("attention", params, PROMPT[row, :length], 2, 3.0, stops)
        np.testing.assert_allclose(out.scores[row], [each[0] for each in want], rtol=1e-6)
        got = np.asarray(out.tokens)[row, 0, : out.lengths[row, 0]].tolist()
        assert got == [int(token) for token in want[0][2]]


def test_a_block_of_the_cache_has_as_many_slots_as_its_option_says(monkeypatch, x64):
    blocks = []

    def recorded(model, params, prompt, lengths, options):
        blocks.append(options.block)
        return begin(model, params, prompt, lengths, options)

    begin = beam.begin
    monkeypatch.setattr(beam, "begin", recorded)
    params = noisy_params(MODELS["attention"], np.float64)
    for options in ({"block": 2}, {}):
        run = functools.partial(beam_search, model=Decoder(MODELS["attention"]), **options)
        jax.eval_shape(run, params, PROMPT)
    assert blocks == [2, BLOCK]


def every_text(params, prompt, room, stops):
    """All texts: (log-probability, new tokens), each ended by a stop token or by its room."""
    texts = []
    alive = [(0.0, [])]
    for _ in range(room):
        nexts = [
            (log_prob + float(each), [*new, token])
            for log_prob, new in alive
            for token, each in enumerate(after("attention", params, [*prompt, *new]))
        ]
        texts += [each for each in nexts if each[1][-1] in stops]
        alive = [each for each in nexts if each[1][-1] not in stops]
    return texts + alive


def test_wide_beams_find_the_best_of_all_texts(x64):
    params = noisy_params(MODELS["attention"], np.float64, std=0.6)
    texts = every_text(params, list(PROMPT[0]), 3, STOPS)
    options = dict(stop_tokens=STOPS, block=4)
    width = (VOCAB - len(STOPS)) ** 2 * VOCAB
    lengths = set()
    for penalty in (-1.0, 0.5, 6.0):
        scores = np.array([log_prob / len(new) ** penalty for log_prob, new in texts])
        beams = Beams(width, 3, penalty)
        out = search(params, PROMPT[:1], Decoder(MODELS["attention"]), beams, **options)
        np.testing.assert_allclose(out.scores[0], np.sort(scores)[::-1][:width], rtol=1e-6)
        best = texts[scores.argmax()][1]
        assert out.tokens[0, 0, 4 : out.lengths[0, 0]].tolist() == best
        lengths.add(len(best))
    assert len(lengths) > 1, "a penalty that changes nothing tests none"


def test_one_beam_is_greedy_decoding_and_many_beams_find_the_likeliest(x64):
    params = noisy_params(MODELS["attention"], np.float64, std=0.6)
    text = list(PROMPT[0])
    for _ in range(NEW):
        text.append(int(after("attention", params, text).argmax()))
    out = search(params, PROMPT[:1], Decoder(MODELS["attention"]), Beams(1, NEW), block=4)
    assert out.tokens[0, 0].tolist() == text
    wide = search(params, PROMPT[:1], Decoder(MODELS["attention"]), Beams(VOCAB**2, 3), block=4)
    texts = np.array(
        [[*PROMPT[0], a, b, c] for a in range(VOCAB) for b in range(VOCAB) for c in range(VOCAB)]
    )
    laws = np.asarray(whole("attention")(params, np.pad(texts, ((0, 0), (0, 2)))))
    total = sum(laws[np.arange(len(texts)), place - 1, texts[:, place]] for place in (4, 5, 6))
    assert wide.tokens[0, 0].tolist() == texts[total.argmax()].tolist()
    np.testing.assert_allclose(wide.log_probs[0], np.sort(total)[::-1][: VOCAB**2], rtol=1e-6)


def test_what_cannot_be_searched_is_refused():
    model = Decoder(MODELS["learned"])
    with pytest.raises(
        UsageError, match="4 prompt and 6 new tokens are over the model's 9 positions"
    ):
        beam_search({}, PROMPT, model, Beams(2, 6))
    with pytest.raises(UsageError, match="the prompt has no tokens"):
        beam_search({}, PROMPT[:, :0], model, Beams(2, 3))
    for lengths, sentence in (
        ([4, 0, 1], "prompt_lengths from 0 to 4; legal are 1 to 4"),
        ([4, 5, 1], "prompt_lengths from 1 to 5; legal are 1 to 4"),
        ([4, 1], r"prompt_lengths of shape \[2\]; legal is \[3\], one a row"),
    ):
        with pytest.raises(UsageError, match=sentence):
            beam_search({}, PROMPT, model, Beams(2, 3), prompt_lengths=np.array(lengths))
    with pytest.raises(UsageError, match="token -1 of a prompt; legal are 0 to 7"):
        beam_search({}, np.where(PROMPT == PROMPT[1, 2], -1, PROMPT), model, Beams(2, 3))
    with pytest.raises(UsageError, match="stop token 8; legal are 0 to 7"):
        beam_search({}, PROMPT, model, Beams(2, 3), stop_tokens=(1, 8))
    with pytest.raises(UsageError, match="length_penalty=16: 100 new tokens to this power"):
        Beams(2, 100, 16.0)
