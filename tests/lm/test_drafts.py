"""Drafts made in the model's own pass: their laws by plain passes, their training, and what it is worth."""

import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from fast import jit, noisy_params
from flat_decoding import generate
from lm_configs import lm_config
from tolerance import EXACT_MATHS, assert_close

from jaxpar.decode import Sampling, Tree, chain, gumbel, process
from jaxpar.experimental import trained_drafts as distil
from jaxpar.experimental.pseudo_tokens import Heads, HiddenTransfer, PromptTokens
from jaxpar.experimental.trained_drafts import DraftTrainer, accept_rates, distillation, guesses
from jaxpar.lm import Decoder, OptimizerConfig, Trainer
from jaxpar.lm.model import embed, logits
from jaxpar.loop import Fit, Hooks, fit, run
from jaxpar.types import UsageError

VOCAB, NEW = 8, 12
SMALL = dict(vocab_size=VOCAB, num_layers=2, embed_dim=8, mlp_dim=8, num_heads=2, init_std=0.3)
ROPE = lm_config(**SMALL, dtype="float64")
LEARNED = lm_config(**SMALL, dtype="float64", positions="learned", max_seq_len=24)
BUSHY = Tree((-1, 0, 0, 0, 1, 1, 2))
DRAFTS = {
    "prompts": PromptTokens(2, BUSHY),
    "hidden": HiddenTransfer(1, 2, BUSHY),
    "heads": Heads(2, BUSHY),
}
CONFIGS = {"prompts": LEARNED, "hidden": ROPE, "heads": ROPE}
KEY = jax.random.key(5)


def draft_params(draft, config, dtype=np.float64):
    rng = np.random.default_rng(1)
    return {
        name: jnp.asarray(rng.standard_normal(leaf.shape) / 2, dtype)
        for name, leaf in draft.leaves(config.embed_dim, 0.3).items()
    }


def plain_logits(params, own, text, config, name):
    """One text and the pseudo tokens behind its last token, one after the other: logits of all, [1, n + k, V]."""
    stack, count = config.stack(), text.shape[1]
    held, places = stack.unstacked(params), jnp.arange(count + 2)[None]
    x = embed(params, text, places[:, :count], config)

    def entering(x):
        last = x[:, -1:]
        if name == "prompts":
            learned = params["positions"][count : count + 2] if config.positions == "learned" else 0
            return (own["prompts"] + learned)[None]
        mapped = jnp.concatenate([last @ own["maps"][0], last @ own["maps"][1]], 1)
        return last + (mapped if name == "hidden" else mapped / (1 + jnp.exp(-mapped)))

    for layer in range(config.num_layers):
        if layer == {"prompts": 0, "hidden": 1}.get(name):
            x = jnp.concatenate([x, entering(x)], 1)
        x = stack.layer(held["layers"][layer], layer, x, stack.context(x))[0]
    x = stack.norm.apply(held["final_norm"], x)
    return logits(params, jnp.concatenate([x, entering(x)], 1) if name == "heads" else x, config)


@pytest.mark.parametrize("name", DRAFTS)
def test_laws_and_gradient_of_training_are_those_of_a_plain_loop(name, x64):
    config = CONFIGS[name]
    draft, params = DRAFTS[name], noisy_params(config, np.float64)
    own, tokens = draft_params(draft, config), np.random.default_rng(0).integers(0, VOCAB, (2, 7))
    anchors = [4, 0]

    def trained(own):
        laws = guesses(params, own, tokens, jnp.array(anchors), config, draft)
        return (distillation(*laws) * jnp.array([1, 0.5])).mean(), laws

    def plain_row(own, row):
        whole, total, laws = plain_logits(params, own, row[None], config, name)[0], 0.0, []
        for anchor in anchors:
            guessed = plain_logits(params, own, row[None, : anchor + 1], config, name)[0, -2:]
            for place in range(2):
                law = jax.nn.softmax(whole[anchor + 1 + place])
                apart = (law * (jnp.log(law) - jax.nn.log_softmax(guessed[place]))).sum()
                total += 0.5**place * apart / (2 * 2 * 2)
                laws.append((whole[anchor + 1 + place], guessed[place]))
        return total, laws

    def plain(own):
        totals, laws = jax.lax.map(
            lambda row: plain_row(own, row), tokens
        )  # one row after the other, compiled once
        return totals.sum(), laws

    (value, laws), gradient = jit(jax.value_and_grad(trained, has_aux=True))(own)
    (want, plain_laws), plain_gradient = jit(jax.value_and_grad(plain, has_aux=True))(own)
    for which in range(2):
        want_laws = jnp.stack([pair[which] for pair in plain_laws], 1).reshape(laws[which].shape)
        np.testing.assert_allclose(
            laws[which], want_laws, rtol=1e-6, atol=1e-6
        )  # float32 at the head's end
    assert abs(value - want) < 1e-7 * abs(want)
    assert_close(gradient, plain_gradient, EXACT_MATHS["float64"])
    assert all(np.abs(leaf).max() > 1e-4 for leaf in jax.tree.leaves(gradient))


laws_of = jit(guesses, static_argnums=(4, 5))


@functools.partial(jit, static_argnums=2)
def deciding(laws, places, sampling):
    """The numbers whose largest is drawn at each of these places."""
    scores = process(laws, sampling)
    if not sampling.temperature:
        return scores
    return scores + jax.vmap(lambda place: gumbel(KEY, jnp.int32(0), place, jnp.int32(0), VOCAB))(
        places
    )


def plain_passes(text, start, laws, sampling):
    """How many passes a row takes whose text, which drafts cannot change, is known: each is looked at by hand.

    `laws` are those guessed behind each token, [S, k, V].
    """
    end, passes, guessed = start + 1, 0, None
    while end < len(text):
        passes, reached = passes + 1, [0]
        for node, parent in enumerate(BUSHY.parents[1:], 1) if guessed else ():
            depth, rank = int(BUSHY.depth[node]), BUSHY.parents[:node].count(parent)
            if (
                parent in reached
                and end + depth <= len(text)
                and guessed[depth - 1][rank] == text[end + depth - 1]
            ):
                reached.append(node)
        kept = end + max(int(BUSHY.depth[node]) for node in reached)
        scores = deciding(laws[kept - 1], np.arange(kept + 1, kept + 3, dtype=np.int32), sampling)
        guessed = np.argsort(-np.asarray(scores), kind="stable")[:, :3].tolist()
        end = kept + 1
    return passes


@pytest.mark.parametrize(
    ("name", "temperature"), [("prompts", 0.8), ("hidden", 0.0), ("heads", 0.8)]
)
def test_a_window_guesses_what_training_saw(name, temperature, x64):
    draft, config, sampling = DRAFTS[name], CONFIGS[name], Sampling(NEW, temperature)
    params = noisy_params(config, np.float64)
    own, prompt, lengths = (
        draft_params(draft, config),
        np.array([[1, 2, 3], [4, 5, 0]]),
        np.array([3, 2]),
    )
    drawn = jit(generate, static_argnums=(3, 4), static_argnames=("draft", "block"))
    out = drawn(
        KEY,
        params,
        prompt,
        Decoder(config),
        sampling,
        prompt_lengths=lengths,
        seeds=np.zeros(2, np.int32),
        block=4,
        draft=draft,
        draft_params=own,
    )
    texts = np.pad(out.tokens, ((0, 0), (0, 3)))  # room for what is guessed behind the last token
    known, laws = jax.device_get(laws_of(params, own, texts, jnp.arange(3 + NEW), config, draft))
    for row in range(2):
        text = np.asarray(out.tokens)[row, : int(out.lengths[row])].tolist()
        scores = deciding(
            known[row, :, 0], np.arange(2, 2 + len(known[row]), dtype=np.int32), sampling
        )
        for place in range(lengths[row], len(text)):
            assert text[place] == np.asarray(scores)[place - 2].argmax()
        assert out.passes[row] == plain_passes(text, lengths[row], laws[row], sampling)
    assert out.passes.sum() < 2 * (NEW - 1), "no guess was ever right"


def test_what_is_learned():
    config = lm_config(**SMALL)
    for k in (1, 3):
        sizes = [
            sum(math.prod(leaf.shape) for leaf in draft.leaves(config.embed_dim, 0.3).values())
            for draft in (PromptTokens(k), HiddenTransfer(0, k), Heads(k))
        ]
        assert sizes == [k * 8, k * 8 * 8, k * 8 * 8]
        state = jax.eval_shape(DraftTrainer(config, PromptTokens(k)).init, jax.random.key(0))
        assert sum(leaf.size for leaf in jax.tree.leaves(state.params)) == k * 8
        assert {leaf.dtype for leaf in jax.tree.leaves(state.params)} == {
            np.dtype("float32")
        } and config.dtype != "float32"
    for draft in (HiddenTransfer(0, 2), Heads(2)):
        x = jnp.ones((1, 3, 8))
        made = draft.states(DraftTrainer(config, draft).init(KEY).params, x)
        assert (made == x[:, :, None]).all() and made.shape == (1, 3, 2, 8), (
            "it does not start as the identity"
        )
    learned = DraftTrainer(config, PromptTokens(64)).init(KEY).params["prompts"]
    assert 0.8 < learned.std() / config.init_std < 1.2
    assert (
        PromptTokens(2, BUSHY).init(None, jnp.zeros((2, 3), jnp.int32), jnp.array([3, 2]), 4) == -1
    ).all()
    assert PromptTokens(2).tree == Tree((-1, 0, 1, 0, 3, 1, 5, 2, 7)) and PromptTokens(
        2
    ) == PromptTokens(2, None)
    assert Heads(2, chain(1)).tree == Tree((-1, 0, 0, 2, 1, 4))


@pytest.mark.parametrize(
    ("dtype", "wide"), [("bfloat16", "float32"), ("float32", "float32"), ("float64", "float64")]
)
def test_weights_are_wide_and_states_are_as_the_tokens(dtype, wide, x64):
    config = lm_config(**SMALL, dtype=dtype)
    for draft in (PromptTokens(2), HiddenTransfer(0, 2), Heads(2)):
        params = DraftTrainer(config, draft).init(KEY).params
        assert {leaf.dtype for leaf in params.values()} == {np.dtype(wide)}
        assert draft.states(params, jnp.ones((1, 3, 8), dtype)).dtype == np.dtype(dtype)


def test_rates_are_counted_place_by_place(x64):
    draft, params = DRAFTS["hidden"], noisy_params(ROPE, np.float64)
    own, tokens = draft_params(draft, ROPE), np.random.default_rng(2).integers(0, VOCAB, (3, 9))
    hits, reached = np.zeros((2, 3)), np.zeros(2)
    laws = np.asarray(
        laws_of(params, own, np.pad(tokens, ((0, 0), (0, 3))), jnp.arange(9), ROPE, draft)[1]
    )
    for row, law in zip(tokens, laws, strict=True):
        for anchor in range(2, 6):
            guessed = np.argsort(-law[anchor])[:, :3].tolist()
            for place, few in enumerate(guessed):
                reached[place] += 1
                if row[anchor + 2 + place] not in few:
                    break
                hits[place, few.index(row[anchor + 2 + place])] += 1
    rates = accept_rates(params, own, jnp.asarray(tokens), ROPE, draft, 3, start=3)
    np.testing.assert_allclose(rates, hits / reached[:, None], rtol=1e-12)
    assert 0 < hits[1].sum() < reached[1] < reached[0]


def test_a_place_that_no_text_reached_has_no_rate(x64):
    draft, params = DRAFTS["hidden"], noisy_params(ROPE, np.float64)
    own, tokens = draft_params(draft, ROPE), np.random.default_rng(2).integers(0, VOCAB, (3, 9))
    for place in range(2, 9):  # whatever was likeliest, the text says otherwise
        laws = laws_of(params, own, np.pad(tokens, ((0, 0), (0, 3))), jnp.arange(9), ROPE, draft)[1]
        tokens[:, place] = np.asarray(laws)[:, place - 2, 0].argmin(-1)
    rates = accept_rates(
        params, own, jnp.asarray(tokens), ROPE, draft, 3
    )  # from the first place on
    assert (rates == 0).all()


# ---------------------------------------------------------------- training


def test_a_step_weighs_its_places_and_draws_anchors_by_its_key(x64):
    draft, config = (
        DRAFTS["heads"],
        OptimizerConfig(learning_rate=1e-2, warmup_steps=0, schedule="linear"),
    )
    trainer = DraftTrainer(ROPE, draft, config, num_steps=2, num_anchors=3, decay=0.5)
    params, own = noisy_params(ROPE, np.float64), draft_params(draft, ROPE)
    tokens = np.random.default_rng(4).integers(0, VOCAB, (2, 6))
    inputs, start = {"tokens": tokens, "model": params}, trainer.init(jax.random.key(0))
    start = start.replace(params=own, skipped_in_a_row=jnp.int32(1))
    laws, guessed = laws_of(params, own, tokens, jnp.arange(4), ROPE, draft)
    laws, guessed = (np.asarray(jax.nn.log_softmax(x)) for x in (laws, guessed))
    apart = (np.exp(laws) * (laws - guessed)).sum(-1).mean(0)  # [anchors, places]
    one, left_out = jit(trainer.step), set()
    for number in range(5):
        state, info = one(jax.random.key(number), start, inputs)
        found = np.array([info["kl_1"], info["kl_2"]])
        fits = [
            out
            for out in range(4)
            if np.allclose(np.delete(apart, out, 0).mean(0), found, rtol=1e-5)
        ]
        assert len(fits) == 1, "not three of the four anchors, each once"
        left_out |= set(fits)
        np.testing.assert_allclose(info["loss"], (found[0] + 0.5 * found[1]) / 2, rtol=1e-6)
        assert state.skipped_in_a_row == 0
    assert len(left_out) > 1
    assert one(jax.random.key(0), state, inputs)[1]["learning_rate"] < 0.6 * info["learning_rate"]


WALK = np.array([0, 3, 1, 4, 2, 5])  # a text that goes round: what comes next follows from what is
MODEL = lm_config(**SMALL | {"init_std": 0.1}, dtype="float32")
FAST = OptimizerConfig(learning_rate=3e-2, warmup_steps=0, weight_decay=0.0, schedule="constant")


def walks(count, seed=0):
    """Rows of the text from anywhere on."""
    starts = np.random.default_rng(seed).integers(0, 6, (count, 4, 1))
    return WALK[(starts + np.arange(13)) % 6]


@functools.cache
def walker():
    """Parameters of a model that has learned the text."""
    rows, trainer = walks(60), Trainer(MODEL, FAST, 60)
    batches = {"tokens": rows[..., :-1], "targets": rows[..., 1:]}
    state = jit(trainer.init)(jax.random.key(0))
    state, info = jit(run, static_argnums=(0, 4))(trainer, jax.random.key(1), state, batches, 60)
    assert info["loss"][-1] < 0.1
    return state.params


PERFECT = 1 + math.ceil((NEW - 2) / 3)  # nothing is guessed before the first pass


@pytest.mark.parametrize(
    ("draft", "most"),
    # 16 numbers cannot make this model, which goes by the last token alone, go by the one before; two matrices can.
    [
        pytest.param(PromptTokens(2), 9, marks=pytest.mark.slow),
        (HiddenTransfer(1, 2), PERFECT),
        pytest.param(Heads(2), PERFECT, marks=pytest.mark.slow),
    ],
    ids=DRAFTS,
)
def test_a_trained_draft_guesses_a_text_that_follows_a_rule(draft, most):
    trainer, rows, losses = DraftTrainer(MODEL, draft, FAST, 40, num_anchors=4), walks(40, 1), []
    hooks = Hooks(check=lambda step, metrics: losses.append(metrics["train/loss"]))
    batch = lambda step: {"tokens": rows[step], "model": walker()}  # noqa: E731
    trained = fit(trainer, jax.random.key(2), batch, Fit(40), hooks).state
    assert np.mean(losses[-5:]) < 0.7 * np.mean(losses[:5]) and trained.step == 40
    drawn = jit(generate, static_argnums=(3, 4), static_argnames=("draft",))

    def passes(params):
        out = drawn(
            KEY,
            walker(),
            walks(1)[0, :, :5],
            Decoder(MODEL),
            Sampling(NEW, 0.0),
            draft=draft,
            draft_params=params,
        )
        assert (out.tokens[:, 1:] == WALK[(np.argsort(WALK)[out.tokens[:, :-1]] + 1) % 6]).all()
        return out.passes

    control = trainer.init(jax.random.key(3)).params
    found = passes(trained.params)
    assert found.max() <= most and found.mean() < passes(control).mean()


@pytest.mark.parametrize(
    ("make", "sentence"),
    [
        (lambda: PromptTokens(0), "length=0"),
        (lambda: HiddenTransfer(-1), "layer=-1"),
        (
            lambda: Heads(1, chain(2)),
            "candidates 2 deep; legal are up to length=1, the places guessed",
        ),
        (
            lambda: step(DraftTrainer(MODEL, Heads(2), num_anchors=5)),
            "num_anchors=5 of rows of 6 tokens; legal are 1 to 4",
        ),
        (
            lambda: step(DraftTrainer(MODEL, Heads(2), num_anchors=4), segments=0),
            "rows of one document each",
        ),
        (
            lambda: step(DraftTrainer(MODEL, HiddenTransfer(2), num_anchors=2)),
            "enter at layer 2; legal are 0 to 1",
        ),
    ],
)
def test_what_cannot_be_drafted_is_refused(make, sentence):
    with pytest.raises(UsageError, match=sentence):
        make()


def step(trainer, **more):
    def whole(key):
        inputs = {"tokens": jnp.zeros((2, 6), jnp.int32), "model": noisy_params(MODEL)} | more
        return trainer.step(key, trainer.init(key), inputs)

    return jax.eval_shape(whole, jax.random.key(0))


def test_a_step_that_is_not_finite_changes_nothing():
    trainer = DraftTrainer(MODEL, PromptTokens(1), FAST, num_anchors=2, max_skipped=2)
    broken = jax.tree.map(lambda x: x * jnp.nan, noisy_params(MODEL))
    state = first = trainer.init(jax.random.key(0))
    one = jit(trainer.step)
    for number in range(2):
        assert not trainer.done(state)
        state, info = one(
            jax.random.key(number), state, {"tokens": jnp.zeros((2, 6), jnp.int32), "model": broken}
        )
        assert info["skipped"] == 1
    assert trainer.done(state) and (state.params["prompts"] == first.params["prompts"]).all()


def test_an_infinite_loss_of_finite_gradient_changes_nothing(monkeypatch):
    monkeypatch.setattr(distil, "distillation", lambda *laws: distillation(*laws) + jnp.inf)
    trainer = DraftTrainer(MODEL, PromptTokens(1), FAST, num_anchors=2)
    first, inputs = (
        trainer.init(KEY),
        {"tokens": jnp.zeros((2, 6), jnp.int32), "model": noisy_params(MODEL)},
    )
    state, info = jit(trainer.step)(KEY, first, inputs)
    assert info["skipped"] == 1 and jnp.isfinite(info["grad_norm"]) and state.skipped_in_a_row == 1
    assert (state.params["prompts"] == first.params["prompts"]).all()
