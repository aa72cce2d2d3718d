"""What policies leave out, against plain forms of the same rules, token after token."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tiny
from fast import jit
from flat_decoding import generate

from jaxpar.decode import BlockTopK, CopyDraft, HeavyHitters, Sampling, SinksAndWindow
from jaxpar.decode import forest as tables
from jaxpar.decode.blocks import BlockCache
from jaxpar.lm import Decoder
from jaxpar.lm.model import embed, logits
from jaxpar.nn.attention import PositionRule, finish
from jaxpar.nn.mixer import Context, TokenInfo
from jaxpar.nn.position import Rope
from jaxpar.types import UsageError

B, G, H, K, SIZE, BLOCKS, PROMPT = 2, 2, 4, 8, 4, 6, 9
RULE = PositionRule(positions=Rope(10000.0))
CONFIG = tiny.exact(tiny.LLAMA)
KEY = jax.random.key(3)
drawn = jit(generate, static_argnums=(3, 4), static_argnames=("policy", "num_samples", "block"))
rotate = jit(RULE.rotate)


def turned(x, positions):
    """Rotated in a program of one length: more places than any row has."""
    count = len(x)
    x, positions = np.resize(x, (BLOCKS * SIZE, *x.shape[1:])), np.resize(positions, BLOCKS * SIZE)
    return np.asarray(rotate(x[None], positions[None])[0])[:count]


class Layer:
    """One layer that reads a prompt, then token after token: with a policy, and its queries, keys and values apart."""

    def __init__(self, policy, readers=1, forked=False):
        self.rng, self.policy, self.readers = np.random.default_rng(0), policy, readers
        length = (
            2 * SIZE if forked else PROMPT
        )  # whole blocks, so that they are the same places either way
        self.k, self.v = self.draw(B, length, G, K), self.draw(B, length, G, K)
        self.cache, self.forest, self.view = jit(self._begun, static_argnums=2)(
            self.k, self.v, forked
        )
        self.step = jit(self._step)

    def draw(self, *shape):
        return self.rng.standard_normal(shape)

    def _begun(self, k, v, forked):
        length = k.shape[1]
        forest, root = tables.spawn(tables.empty(B, 1 + forked, BLOCKS, SIZE))
        forest, _ = tables.reserve(
            forest, root, jnp.full((B, 1), length if forked else BLOCKS * SIZE, jnp.int32)
        )
        forest, view, slots = tables.write(
            forest, tables.lineage_view(forest, root), jnp.full((B, 1), length), length
        )  # fmt: skip
        positions = jnp.broadcast_to(jnp.arange(length), (B, length))
        cache = BlockCache.empty(B, G, BLOCKS, SIZE, K, "float64").with_policy(
            self.policy, self.readers
        )
        cache = cache.fill(RULE.rotate(k, positions), v, Context(positions)).store(slots)
        if forked:
            forest, child = tables.fork(forest, root[:, 0], 1)
            forest, _ = tables.reserve(
                forest, child, jnp.full((B, 1), BLOCKS * SIZE - length, jnp.int32)
            )
            view = tables.lineage_view(forest, child)
        return cache, forest, view

    def _step(self, cache, forest, view, q, k, v):
        state, cache = cache.for_pass(forest, view).attend(
            q, k, v, RULE, Context(view.position.reshape(-1, 1))
        )
        forest, view, slots = tables.write(forest, view, jnp.ones((B, 1), jnp.int32), 1)
        return finish(state), cache.store(slots), forest, view

    def __call__(self):
        """Moves on by a token; returns its queries [B, H, K], and what came of them."""
        q, k, v = self.draw(B, 1, H, K), self.draw(B, 1, G, K), self.draw(B, 1, G, K)
        out, self.cache, self.forest, self.view = self.step(
            self.cache, self.forest, self.view, q, k, v
        )
        self.k, self.v = np.concatenate([self.k, k], 1), np.concatenate([self.v, v], 1)
        return q[:, 0], np.asarray(out)[:, 0]

    def scores(self, row, q):
        """Scores [H, S] of a query at the end of the row, itself the last."""
        places = np.arange(self.k.shape[1])
        q, k = turned(q[None], places[-1:])[0], turned(self.k[row], places)
        return np.stack([k[:, head * G // H] @ q[head] for head in range(H)]) / np.sqrt(K)

    def mixed(self, row, scores, seen):
        """Attention [H, K] to what is seen, [H, S]."""
        weights = np.exp(np.where(seen, scores, -np.inf))
        weights /= weights.sum(-1, keepdims=True)
        return np.stack([weights[head] @ self.v[row, :, head * G // H] for head in range(H)])


@pytest.mark.parametrize("forked", [False, True], ids=["root", "child"])
def test_blocks_are_chosen_by_their_mean_keys(forked, x64):
    layer, chosen = Layer(BlockTopK(3), forked=forked), set()
    for _ in range(9 if forked else 12):
        q, out = layer()
        places = np.arange(layer.k.shape[1])
        last = places[-1] - 1  # what is being drawn is in no block yet
        for row in range(B):
            seen = np.zeros((H, len(places)), bool)
            keys, query = turned(layer.k[row], places), turned(q[row][None], places[-1:])[0]
            for group in range(G):
                mine = query[group * H // G : (group + 1) * H // G].sum(0)
                rank = {n: mine @ keys[n * SIZE : min((n + 1) * SIZE, last + 1), group].mean(0)
                        for n in range(last // SIZE + 1)}  # fmt: skip
                rank[0] = rank[last // SIZE] = np.inf
                best = sorted(rank, key=rank.get, reverse=True)[:3]
                chosen.add(tuple(sorted(best)))
                seen[group * H // G : (group + 1) * H // G] = np.isin(places // SIZE, best) & (
                    places <= last
                )
            seen[:, -1] = True
            np.testing.assert_allclose(
                out[row], layer.mixed(row, layer.scores(row, q[row]), seen), atol=1e-12
            )
    assert len(chosen) > 3


def test_chosen_blocks_are_in_order_and_sums_in_float32():
    half = jnp.ones((1, 1, 6, 2, 4), jnp.bfloat16)
    for policy in (BlockTopK(3), HeavyHitters()):
        assert (
            jax.tree.leaves(jax.eval_shape(lambda policy=policy: policy.init(half, 1)))[0].dtype
            == jnp.float32
        )
    memory = jnp.array([0.0, -9, 5, 7, 6, 0])[None, None, :, None] * jnp.ones(4)[None, None, None]
    places = jnp.arange(12).reshape(1, 1, 6, 2)
    chosen = (
        BlockTopK(4).select(memory, jnp.ones((1, 1, 1, 1, 4)), places, jnp.array([[12]]))[0].blocks
    )
    assert chosen.tolist() == [[[0, 3, 4, 5]]]  # the first, the best two and the last


@pytest.mark.parametrize("noise", [False, True])
def test_heavy_hitters_are_kept_and_what_is_dropped_stays_dropped(noise, x64):
    policy = HeavyHitters(3, 2, observe=3, noise=noise, tau=0.5, last_tau=3.0, horizon=16, seed=5)
    layer = Layer(policy)
    worth, dropped = np.zeros((B, BLOCKS * SIZE)), np.zeros((B, BLOCKS * SIZE), bool)
    for count in range(12):
        q, out = layer()
        position = layer.k.shape[1] - 1
        noises = 0.0
        if noise:
            key = jax.random.fold_in(jax.random.key(5), position)
            noises = np.asarray(jax.random.gumbel(key, (G, BLOCKS, H // G, SIZE)))
            noises = np.moveaxis(noises, 1, 2).reshape(H, -1)[:, :position]
        tau = 0.5 + 2.5 * min(position / 16, 1)
        for row in range(B):
            places = np.arange(position)
            open_ = ~dropped[row, :position]
            if count >= 3:
                rank = np.where(
                    open_, np.where(position - places < 2, np.inf, worth[row, :position]), -np.inf
                )
                kept = np.isin(places, np.argsort(-rank, kind="stable")[:5]) & open_
                dropped[row, :position] |= ~kept
                open_ = kept
            scores = layer.scores(row, q[row])
            seen = np.append(open_, True)[None].repeat(H, 0)
            np.testing.assert_allclose(out[row], layer.mixed(row, scores, seen), atol=1e-12)
            weights = np.where(open_, np.exp((scores[:, :-1] + noises) / tau), 0)
            worth[row, :position] += (weights / weights.sum(-1, keepdims=True)).sum(0)
    assert dropped[:, :position].sum() == B * (position - 5)
    np.testing.assert_allclose(
        np.asarray(layer.cache.memory[0]).reshape(B, -1), worth, rtol=1e-6, atol=1e-9
    )


def test_sinks_and_window_equal_the_whole_model_under_their_mask(x64):
    prompt, new = tiny.tokens(length=7), 8
    policy, places = SinksAndWindow(2, 4), np.arange(7 + new)
    params = tiny.params_of(CONFIG)
    out = drawn(KEY, params, prompt, Decoder(CONFIG), Sampling(new, 0.0), policy=policy, block=4)
    distance = places[:, None] - places
    seen = (distance >= 0) & (
        (places[:, None] < 7) | (distance < 4) | (places < 2)
    )  # prompts are read whole

    @jit
    def scores(params, tokens):
        x = embed(params, tokens, jnp.broadcast_to(places, tokens.shape), CONFIG)
        info = TokenInfo(visible=jnp.broadcast_to(seen, (len(tokens), *seen.shape)))
        return logits(params, CONFIG.stack().apply(params, x, info)[0], CONFIG)

    want = np.asarray(scores(params, out.tokens)).argmax(-1)
    np.testing.assert_array_equal(out.tokens[:, 7:], want[:, 6:-1])
    plain = drawn(KEY, params, prompt, Decoder(CONFIG), Sampling(new, 0.0), block=4)
    assert (out.tokens != plain.tokens).any(), "nothing that matters was left out"


@pytest.mark.parametrize(
    "policy", [BlockTopK(16), HeavyHitters(48, 12), SinksAndWindow(1, 60)], ids=str
)
def test_a_budget_of_all_changes_nothing(policy, x64):
    prompt, params = tiny.tokens(length=7), tiny.params_of(CONFIG)
    run = functools.partial(drawn, KEY, params, prompt, Decoder(CONFIG), Sampling(8), block=4)
    jax.tree.map(np.testing.assert_array_equal, run(policy=policy), run(policy=None))


def test_what_a_policy_cannot_serve_is_refused(x64):
    prompt = np.zeros((1, 3), np.int32)
    params = tiny.params_of(CONFIG)
    run = functools.partial(generate, KEY, params, prompt, Decoder(CONFIG), Sampling(3))
    with pytest.raises(
        UsageError, match="a policy sees a window of drafts otherwise than token after token"
    ):
        jax.eval_shape(lambda: run(policy=SinksAndWindow(), draft=CopyDraft()))
    with pytest.raises(UsageError, match="BlockTopK is for one reader a row, not 2"):
        jax.eval_shape(lambda: run(policy=BlockTopK(), num_samples=2))
