"""What a reading keeps, with a model that writes down what it is told: token and position, as key and as value."""

import dataclasses
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from fast import jit

from jaxpar.decode import SinksAndWindow, Tree, chain
from jaxpar.decode.blocks import BlockCache
from jaxpar.decode.reader import ReadingOptions, begin, keep, look
from jaxpar.nn.attention import LinearCache
from jaxpar.nn.stack import StackCache

ROWS, LENGTHS, ROOM, BLOCK, MOST = 2, (5, 3), 6, 4, 4
PROMPT = np.arange(1, 11).reshape(ROWS, 5)


@dataclasses.dataclass(frozen=True)
class Marks:
    """Attention that keeps (token, position), and a recurrence that keeps the tokens in the digits of a number.

    As values it keeps the position by what the cache is said to have seen, negative. Logits are the
    position of each token, what the cache is said to have seen, and which tokens each sees.
    """

    recurrent: bool = True

    def init_cache(self, rows, slots):
        state = (jnp.zeros(rows, jnp.int32),) if self.recurrent else ()
        return StackCache(
            (LinearCache.empty(rows, 1, slots, 2, jnp.float32), *state),
            *jnp.zeros((2, rows), jnp.int32),
        )

    def read(self, tokens, positions, cache, valid):
        def digits(state, tokens, valid):
            for place in range(tokens.shape[1]):
                state = jnp.where(place < valid, state * 32 + tokens[:, place], state)
            return state

        blocks, *states = cache.layers
        also = positions - positions[:, :1] + cache.seen[:, None]
        k, v = (
            jnp.stack([tokens, at], -1).astype(jnp.float32)[:, :, None] for at in (positions, also)
        )
        blocks = dataclasses.replace(blocks, new=(k, -v))
        return dataclasses.replace(
            cache, layers=(blocks, *(digits(state, tokens, valid) for state in states))
        )

    def prefill(self, params, tokens, lengths, cache):
        positions = jnp.broadcast_to(jnp.arange(tokens.shape[1]), tokens.shape)
        return jnp.zeros((len(tokens), 1)), self.read(tokens, positions, cache, lengths)

    def extend(self, params, tokens, cache, *, positions, visible=None, valid=None, pseudo=None):
        seen = jnp.zeros((*tokens.shape, MOST)) if visible is None else visible
        logits = jnp.concatenate(
            [
                positions[..., None],
                jnp.broadcast_to(cache.seen[:, None, None], (*tokens.shape, 1)),
                seen,
            ],
            -1,
        )
        assert all(valid is None or blocks.view is not None for blocks in cache.layers[:1])
        return logits, self.read(
            tokens, positions, cache, tokens.shape[1] if valid is None else valid
        )


def lines(reading):
    """Of each reader (token, position) of what it sees, in order; the values are the same, negative."""
    forest, view, blocks = jax.device_get((reading.forest, reading.view, reading.layers[0]))
    assert not forest.refused.any()
    np.testing.assert_array_equal(blocks.values, -blocks.keys)
    texts = []
    for row, reader in np.ndindex(view.write.shape):
        sees = (forest.place[row] >= 0) & (
            forest.place[row] < view.seen[row, reader][forest.owner[row]][:, None]
        )
        texts.append(
            sorted(
                map(tuple, blocks.keys[row, 0][sees].astype(int).tolist()), key=lambda pair: pair[1]
            )
        )
    return texts


def number(tokens):
    state = 0
    for token in tokens:
        state = (state * 32 + token) % 2**32
    return int(np.uint32(state).astype(np.int32))


def window(rng, reading, tree):
    return jnp.asarray(rng.integers(11, 32, (reading.view.write.size, tree.size)), jnp.int32)


@pytest.mark.parametrize("readers", [1, 3])
@pytest.mark.parametrize(
    "tree", [chain(0), chain(2), Tree((-1, 0, 0, 1))], ids=["token", "chain", "tree"]
)
def test_a_reading_is_its_tokens_and_where_they_stand(readers, tree):
    """Readers keep a path of each window, or its first tokens; each sees those, its prompt and no others."""
    model, rng = Marks(recurrent=tree.size == tree.max_depth + 1), np.random.default_rng(0)
    start, see, take = (
        jit(begin, static_argnums=0, static_argnames="options"),
        jit(look, static_argnums=(0, 4)),
        jit(keep, static_argnums=0),
    )
    options = ReadingOptions(room=ROOM, readers=readers, block=BLOCK)
    _, reading = start(model, {}, PROMPT, jnp.array(LENGTHS), options=options)
    needs = [5 + ROOM] if readers == 1 else [5, *[ROOM] * readers]
    assert reading.forest.num_blocks == sum(-(-need // BLOCK) for need in needs)
    texts = [list(PROMPT[row, : LENGTHS[row]]) for row in range(ROWS) for _ in range(readers)]
    for turn in itertools.count():
        assert lines(reading) == [
            [(token, place) for place, token in enumerate(text)] for text in texts
        ]
        if model.recurrent:
            assert reading.layers[1].tolist() == list(map(number, texts))
        if turn == 2:
            return
        tokens = window(rng, reading, tree)
        logits, looked = see(model, {}, reading, tokens, tree)
        sizes = np.array([len(text) for text in texts])
        np.testing.assert_array_equal(logits[..., 0], sizes[:, None] + np.array(tree.depth))
        np.testing.assert_array_equal(logits[..., 1], np.repeat(sizes[:, None], tree.size, 1))
        np.testing.assert_array_equal(
            logits[..., 2:],
            np.zeros((*tokens.shape, MOST))
            if model.recurrent
            else np.broadcast_to(tree.ancestors, (*tokens.shape, MOST)),
        )
        if tree.size > 1 and model.recurrent:  # until it is known what stays
            np.testing.assert_array_equal(looked.layers[1], reading.layers[1])
        ends = rng.integers(0, tree.size, len(texts))
        path = tree.paths[[tree.size - 1, *ends[1:]]]
        count = np.minimum((np.arange(len(texts)) + 3 - turn) % 4, (path >= 0).sum(1))
        count = (
            np.ones_like(count) if tree.size == 1 else count
        )  # a lone token has been read: it stays
        path = np.pad(path, ((0, 0), (0, tree.size - path.shape[1])), constant_values=-1)
        reading = take(model, {}, looked, tokens, path, count)
        texts = [
            [*text, *np.asarray(tokens)[each, path[each, : count[each]]].tolist()]
            for each, text in enumerate(texts)
        ]


def test_a_policy_begins_with_the_reading():
    @dataclasses.dataclass(frozen=True)
    class Remembers(SinksAndWindow):
        def init(self, keys, readers):
            return jnp.zeros((keys.shape[0], readers))

        def stored(self, memory, k, blocks):
            return memory + (blocks < 2).sum()

    options = ReadingOptions(room=ROOM, readers=3, block=BLOCK, policy=Remembers())
    (layer, _) = jax.eval_shape(
        lambda: begin(Marks(), {}, PROMPT, jnp.array(LENGTHS), options)[1]
    ).layers
    assert layer.policy == Remembers() and layer.memory.shape == (ROWS, 3)
    layer = BlockCache.empty(ROWS, 1, 2, BLOCK, 2, "float32").with_policy(Remembers(), 3)
    k = jnp.ones((ROWS, 2, 1, 2))
    assert (
        layer.fill(k, k, None).store(jnp.array([[[0, 4]], [[1, 8]]])).memory.tolist()
        == [[3] * 3] * ROWS
    )
