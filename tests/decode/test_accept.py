"""What one pass keeps: the plain loop's tokens where noise is shared, the target's law where it is not."""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from exact_law import START, emitted, judged, law_error, program, random_chain, target_law, windows

from jaxpar.decode import NoiseIndex, Tree, Verdict, chain, coupled, gumbel, rejection, verdict
from jaxpar.decode.accept import _walk, expected_length
from jaxpar.types import UsageError

KEY = jax.random.key(11)
BUSHY = Tree((-1, 0, 0, 0, 1, 1, 4))
MODES = ["with_replacement", "without_replacement", "top"]
keep = jax.jit(coupled, static_argnums=2)
draw = jax.jit(gumbel, static_argnums=4)
reject = jax.jit(rejection, static_argnums=4, static_argnames="drawn")


def requests(batch, start=5):
    """Seeds, positions and lineage of a batch of rows that differ."""
    seeds = np.arange(batch, dtype=np.int32)
    return NoiseIndex(seeds=seeds, positions=seeds % 3 + start, lineage=seeds % 2)


# ---------------------------------------------------------------- coupled


def plain_path(best, tokens, tree):
    """The longest way from the root along drafts that are what the node before them wants; the first one of equals."""
    ways = [[0]]
    for node in range(1, tree.size):
        way = next((way for way in ways if way[-1] == tree.parents[node]), None)
        if way and tokens[node] == best[way[-1]]:
            ways.append([*way, node])
    return max(ways, key=len)  # the first of equals


@pytest.mark.parametrize(
    "tree", [chain(0), chain(4), BUSHY, Tree((-1, 0, 0, 0, 2, 2, 5, 5))], ids=str
)
def test_coupled_is_walking_by_hand(tree):
    rng = np.random.default_rng(0)
    scores = rng.integers(0, 4, (200, tree.size, 3)).astype(np.float32)  # many ties
    tokens = rng.integers(-1, 4, (200, tree.size))  # none, and outside; siblings of one token
    wanted = scores.argmax(-1)[:, [0, *tree.parents[1:]]]
    tokens = np.where(rng.uniform(size=tokens.shape) < 0.5, wanted, tokens)
    got = jax.device_get(keep(scores, tokens, tree))
    assert {each.dtype for each in got} == {jnp.dtype(jnp.int32)}
    counts = set()
    for row, (score, token) in enumerate(zip(scores, tokens, strict=True)):
        best = [
            int(np.flatnonzero(values == values.max())[0]) for values in score
        ]  # the lowest of equals
        path = plain_path(best, token, tree)
        new = [*token[path[1:]], best[path[-1]]]
        counts.add(len(new))
        rest = tree.size - len(new)
        assert got.count[row] == len(new)
        assert (
            got.path[row].tolist() == path + [-1] * rest
            and got.tokens[row].tolist() == new + [0] * rest
        )
    assert counts == set(range(1, tree.max_depth + 2))


def test_any_draft_decodes_to_the_tokens_of_the_plain_loop():
    logits, start, length = np.log(random_chain(1, 4).astype(np.float32)), 2, 12
    batch = requests(6, start)
    longest = np.arange(start, start + 24, dtype=np.int32)
    seeds = np.broadcast_to(batch.seeds[:, None], (6, 24))
    lineage = np.broadcast_to(batch.lineage[:, None], (6, 24))
    noise = np.asarray(draw(KEY, seeds, np.broadcast_to(longest, (6, 24)), lineage, 4))

    def plain(row):
        tokens = list(START)
        for place in range(length):
            at = int(batch.positions[row]) - start + place
            tokens.append(int((logits[tokens[-2], tokens[-1]] + noise[row, at]).argmax()))
        return tokens[2:]

    want, rng = [plain(row) for row in range(6)], np.random.default_rng(2)
    for tree in (chain(0), chain(3), BUSHY):
        have, passes = [[*START] for _ in range(6)], 0
        while min(map(len, have)) < length + 2:
            tokens = rng.integers(0, 4, (6, tree.size))
            tokens[:, 0] = [row[-1] for row in have]
            before = tokens[:, [0, *tree.parents[1:]]]
            before[:, 0] = [row[-2] for row in have]
            at = np.array([len(row) - 2 for row in have]) + np.asarray(batch.positions) - start
            places = at[:, None] + tree.depth[None]
            scores = logits[before, tokens] + noise[np.arange(6)[:, None], places]
            new = [np.asarray(each) for each in keep(scores, tokens, tree)]
            for row in range(6):  # rows go on at their own pace, as far as the noise reaches
                room = length + 2 - len(have[row])
                have[row] += new[0][row, : new[1][row]].tolist()[:room]
            passes += 1
        assert [row[2:] for row in have] == want
        assert passes == length if tree.size == 1 else passes < length + 1


# ---------------------------------------------------------------- rejection: its law, exactly


@pytest.mark.parametrize("drawn", MODES)
@pytest.mark.parametrize("tree", [chain(3), BUSHY], ids=str)
def test_the_law_of_what_is_emitted_is_the_targets(tree, drawn, x64):
    for seed in range(3):
        target, draft = random_chain(seed, 3, 1 + seed), random_chain(seed + 10, 3)
        assert law_error(tree, target, draft, drawn) < 1e-12


def test_a_larger_vocabulary_and_masked_tokens(x64):
    target, draft = random_chain(5, 4), random_chain(6, 4)
    target[..., 2], draft[:, 1, 0] = 0, 0  # what the target never says, and the draft sometimes not
    target, draft = (each / each.sum(-1, keepdims=True) for each in (target, draft))
    for drawn in MODES:
        assert law_error(Tree((-1, 0, 0, 1)), target, draft, drawn) < 1e-12


def naive(p, q, tokens, tree, drawn):
    """Tests each sibling against the original p: not exact, and what `verdict` must not be."""
    law = q if drawn != "top" else jnp.eye(p.shape[-1])[tokens]
    parents = np.array([0, *tree.parents[1:]])
    offered = law[parents, tokens] if drawn != "top" else jnp.ones(tree.size)
    accept = jnp.minimum(p[parents, tokens] / offered, 1).at[0].set(1)
    left = jnp.maximum(p - q, 0)
    inner = (tree.children >= 0).any(1, keepdims=True)
    return Verdict(accept, jnp.where(inner, left / left.sum(-1, keepdims=True), p))


@pytest.mark.parametrize("drawn", ["with_replacement", "without_replacement"])
def test_the_naive_rule_is_refused(drawn, x64):
    target, draft = random_chain(0, 3), random_chain(10, 3)
    assert (
        law_error(chain(3), target, draft, drawn, naive) < 1e-12
    )  # on a chain it is the exact one
    assert law_error(BUSHY, target, draft, drawn, naive) > 1e-3


def test_every_way_of_drawing_needs_its_own_rule(x64):
    target, draft = random_chain(0, 3), random_chain(10, 3)
    for drawn, other in itertools.product(MODES, MODES):
        found = windows(BUSHY, target, draft, drawn)
        law, _ = emitted(found, BUSHY, *judged(found, BUSHY, other), target)
        error = abs(law - target_law(target, 4)).max()
        # The rule of fixed drafts is exact given the drafts, whatever drew them; it only accepts less. Of independent
        # drafts those that are not repeated are drawn without replacement, and repeated ones are then no drafts.
        is_exact = other in (drawn, "top") or (drawn, other) == (
            "with_replacement",
            "without_replacement",
        )
        assert error < 1e-12 if is_exact else error > 1e-3, (drawn, other)


@pytest.mark.parametrize("drawn", MODES)
def test_drafts_may_be_left_out_by_place_but_not_by_what_was_drawn(drawn, x64):
    target, draft = random_chain(3, 3), random_chain(13, 3)
    error = law_error(BUSHY, target, draft, drawn, leave_out=lambda node, q, token: node in (3, 5))
    assert error < 1e-12
    error = law_error(BUSHY, target, draft, drawn, leave_out=lambda node, q, token: node == 1)
    assert (
        error > 1e-3 if drawn == "without_replacement" else error < 1e-12
    )  # node 2 is then not drawn from q
    assert (
        law_error(BUSHY, target, draft, drawn, leave_out=lambda node, q, token: q.max() < 0.5)
        < 1e-12
    )
    error = law_error(BUSHY, target, draft, drawn, leave_out=lambda node, q, token: q[token] < 0.4)
    assert error < 1e-12 if drawn == "top" else error > 1e-3


def test_equal_laws_leave_the_target_and_no_nan():
    p = np.broadcast_to(np.float32([0.0625, 0.125, 0.3125, 0.5]), (2, 3, 4))
    q, tokens = p.copy(), np.array([[0, 1, 2], [0, 3, 3]])
    q[1, :, 3] += 2**-20  # p <= q everywhere, as after rounding: no positive part is left
    accept, bonus = (
        np.asarray(each) for each in program(chain(2), "with_replacement", verdict)(p, q, tokens)
    )
    assert (accept[0] == 1).all() and (accept[1, 1:] < 1).all()
    np.testing.assert_array_equal(bonus, p)


def test_what_the_draft_rules_out_is_no_draft():
    p, q = (
        np.full((1, 3, 4), 0.25, np.float32),
        np.float32([[[0.5, 0.5, 0, 0], [0, 0, 1, 0], [0.25] * 4]]),
    )
    accept, bonus = program(chain(2), "with_replacement", verdict)(p, q, np.array([[0, 2, 2]]))
    np.testing.assert_array_equal(accept, [[1, 0, 0.25]])
    np.testing.assert_allclose(
        bonus[0], [[0.25] * 4, [1 / 3, 1 / 3, 0, 1 / 3], [0.25] * 4], rtol=1e-6
    )


# ---------------------------------------------------------------- rejection: its draws


@pytest.mark.parametrize("tree", [chain(4), BUSHY, Tree((-1, 0, 0, 0, 2, 2, 5, 5))], ids=str)
def test_uniform_numbers_decide_child_by_child(tree):
    rng = np.random.default_rng(4)
    accept, uniforms = rng.uniform(size=(300, tree.size)), rng.uniform(size=(300, tree.size))
    accept[:, 0] = 1
    accept[0], uniforms[0] = 0.5, 0.5  # not under it
    got, seen = np.asarray(jax.jit(_walk, static_argnums=2)(accept, uniforms, tree)), set()
    for row in range(300):
        node = child = 0
        while child is not None:
            node = child
            children = [i for i, parent in enumerate(tree.parents) if parent == node]
            child = next((i for i in children if uniforms[row, i] < accept[row, i]), None)
        assert got[row] == node
        seen.add(node)
    assert seen == set(range(tree.size)) and got[0] == 0


@pytest.mark.parametrize("drawn", MODES)
def test_the_law_of_sampled_tokens_is_the_targets(drawn):
    num, size = 30_000, 3
    target, draft = (
        random_chain(20, size, 1.5).astype(np.float32),
        random_chain(21, size).astype(np.float32),
    )
    rows = np.arange(num, dtype=np.int32)
    request = NoiseIndex(seeds=rows % 100, positions=rows // 100 + 4, lineage=rows % 7)
    tree = Tree((-1, 0, 0, 1, 2))

    def noise(place, child):  # of the same key as `rejection`'s: a draft may have used it
        key = KEY if child == 0 else jax.random.fold_in(KEY, 1000 + child)
        return np.asarray(
            draw(key, request.seeds, request.positions + place, request.lineage, size)
        )

    def drafts(law):  # two of each row's law, then
        ranked = np.argsort(-law, axis=-1)
        if drawn == "top":
            return ranked[:, 0], ranked[:, 1]
        one = (np.log(law) + noise(0, 0)).argmax(-1)
        left = (
            np.where(np.arange(size) == one[:, None], 0, law)
            if drawn == "without_replacement"
            else law
        )
        with np.errstate(divide="ignore"):
            return one, (np.log(left) + noise(0, 1)).argmax(-1)

    tokens = np.zeros((num, 5), np.int32)
    tokens[:, 0] = START[1]
    tokens[:, 1], tokens[:, 2] = drafts(np.broadcast_to(draft[START], (num, size)))
    for node, parent in ((3, 1), (4, 2)):
        law = draft[START[1], tokens[:, parent]]
        tokens[:, node] = (
            law.argmax(-1) if drawn == "top" else (np.log(law) + noise(1, node - 3)).argmax(-1)
        )
    before = np.stack(
        [np.full(num, START[0]), *(tokens[:, parent] for parent in tree.parents[1:])], axis=1
    )
    p, q = (np.log(chain[before, tokens]) for chain in (target, draft))
    got = reject(KEY, p, None if drawn == "top" else q, tokens, tree, request, drawn=drawn)

    new, count = np.asarray(got.tokens), np.asarray(got.count)
    pairs = np.bincount(new[count > 1, 0] * size + new[count > 1, 1], minlength=size**2)
    law = target_law(target, 2)
    for first in range(
        size
    ):  # the second token, where there is one, has the target's law given the first
        given, of = pairs.reshape(size, size)[first], law[first] / law[first].sum()
        assert (
            abs(given - given.sum() * of) < 4.5 * np.sqrt(given.sum() * of * (1 - of)) + 1
        ).all()
    ones, of = np.bincount(new[:, 0], minlength=size), law.sum(1)
    assert (abs(ones - num * of) < 4.5 * np.sqrt(num * of * (1 - of))).all()
    assert set(count) == {1, 2, 3}
    accept, _ = program(tree, drawn, verdict)(np.exp(p), np.exp(q), tokens)
    stay = np.asarray((1 - accept[:, 1]) * (1 - accept[:, 2]))
    assert abs((count == 1).sum() - stay.sum()) < 4.5 * np.sqrt((stay * (1 - stay)).sum())


def some_windows(batch, tree, dtype=np.float32):
    rng = np.random.default_rng(7)
    p, q = (rng.normal(size=(batch, tree.size, 5)).astype(dtype) for _ in range(2))
    return p, q, rng.integers(0, 5, (batch, tree.size)).astype(np.int32)


def test_what_a_row_draws_is_no_matter_of_its_company():
    p, q, tokens = some_windows(64, BUSHY)
    request, order = requests(64), np.random.default_rng(0).permutation(64)
    want = reject(KEY, p, q, tokens, BUSHY, request)
    assert len(np.unique(want.tokens, axis=0)) > 10
    for rows in (order, np.full(64, 3)):  # moved, and in the company of nothing but its like
        moved = jax.tree.map(lambda each, rows=rows: each[rows], request)
        got = reject(KEY, p[rows], q[rows], tokens[rows], BUSHY, moved)
        for new, old in zip(got, want, strict=True):
            np.testing.assert_array_equal(new, np.asarray(old)[rows])


def test_the_bonus_token_of_a_leaf_is_that_of_a_window_of_one_at_its_place():
    p, q, tokens = some_windows(64, BUSHY)
    request = requests(64)
    got = jax.device_get(reject(KEY, p, q, tokens, BUSHY, request))
    rows, ends = np.arange(64), np.take_along_axis(got.path, got.count[:, None] - 1, 1)[:, 0]
    alone = request._replace(positions=request.positions + BUSHY.depth[ends])
    new = reject(
        KEY, p[rows, ends][:, None], None, tokens[:, :1], chain(0), alone, drawn="top"
    ).tokens[:, 0]
    noise = draw(jax.random.split(KEY)[1], alone.seeds, alone.positions, alone.lineage, 5)
    np.testing.assert_array_equal((jax.nn.log_softmax(p[rows, ends]) + noise).argmax(-1), new)
    leaf = (BUSHY.children[ends] < 0).all(1)
    assert set(got.count[leaf]) == {2, 3, 4}
    np.testing.assert_array_equal(got.tokens[rows, got.count - 1][leaf], new[leaf])


def test_one_more_axis_by_vmap():
    p, q, tokens = some_windows(64, BUSHY)
    request = requests(64)
    want = reject(KEY, p, q, tokens, BUSHY, request)
    folded = jax.tree.map(
        lambda each: each.reshape(2, 32, *each.shape[1:]), (p, q, tokens, request)
    )
    got = jax.jit(
        jax.vmap(lambda p, q, tokens, request: rejection(KEY, p, q, tokens, BUSHY, request))
    )(*folded)
    jax.tree.map(
        lambda got, want: np.testing.assert_array_equal(got.reshape(want.shape), want), got, want
    )


def test_seed_position_and_lineage_each_change_walk_and_bonus_token():
    p, q, tokens = (np.repeat(each, 64, axis=0) for each in some_windows(1, BUSHY))
    zeros = np.zeros(64, np.int32)
    fixed = NoiseIndex(seeds=zeros, positions=zeros, lineage=zeros)
    assert len(np.unique(reject(KEY, p, q, tokens, BUSHY, fixed).tokens, axis=0)) == 1
    ends, new = [], []
    for name in NoiseIndex._fields:
        request = fixed._replace(**{name: np.arange(64, dtype=np.int32)})
        ends.append(np.asarray(reject(KEY, p, q, tokens, BUSHY, request).path).max(1))
        alone = reject(KEY, p[:, :1], None, tokens[:, :1], chain(0), request, drawn="top")
        new.append(np.asarray(alone.tokens)[:, 0])
    for draws in (ends, new):
        assert all(len(np.unique(each)) >= 2 for each in draws)
        assert not any(
            np.array_equal(one, other) for one, other in itertools.combinations(draws, 2)
        )


@pytest.mark.parametrize("drawn", MODES)
def test_masked_tokens_are_never_emitted(drawn):
    p, q, tokens = some_windows(64, BUSHY)
    p[:, :, 2] = p[:, 1:, 4] = q[:, :, 0] = q[
        :, 3:
    ] = -np.inf  # the last: nodes whose children nobody drew
    tokens[tokens == 0], tokens[::2] = 1, 2
    weights = (np.exp(each) for each in (p, q))
    laws = (each / np.maximum(each.sum(-1, keepdims=True), 1e-30) for each in weights)
    accept, bonus = (np.asarray(each) for each in program(BUSHY, drawn, verdict)(*laws, tokens))
    assert np.isfinite(accept).all() and np.isfinite(bonus).all()
    assert (accept[::2, 1:] == 0).all() and (bonus[..., 2] == 0).all()
    np.testing.assert_allclose(bonus.sum(-1), 1, rtol=1e-5)
    got = reject(KEY, p, q, tokens, BUSHY, requests(64), drawn=drawn)
    new = [row[:count] for row, count in zip(got.tokens.tolist(), got.count.tolist(), strict=True)]
    assert all(2 not in row and 4 not in row[1:] for row in new)


def test_laws_are_of_single_precision_at_least(x64):
    p, _, tokens = some_windows(4096, chain(0), jnp.bfloat16)
    tokens_of = {}
    for dtype in (jnp.bfloat16, jnp.float32, jnp.float64):
        got = reject(KEY, p.astype(dtype), None, tokens, chain(0), requests(4096), drawn="top")
        assert {each.dtype for each in got} == {jnp.dtype(jnp.int32)}
        assert (got.count == 1).all() and (got.path == 0).all() and got.tokens.shape == (4096, 1)
        tokens_of[dtype] = np.asarray(got.tokens)
    np.testing.assert_array_equal(tokens_of[jnp.bfloat16], tokens_of[jnp.float32])
    assert (tokens_of[jnp.float64] != tokens_of[jnp.float32]).sum() <= 1  # the noise is the same


# ---------------------------------------------------------------- lengths, and users' mistakes


@pytest.mark.parametrize("rate", [0.0, 0.3, 0.999, 1.0])
def test_the_expected_length_is_that_of_independent_acceptance(rate, x64):
    k = 3
    patterns = np.array(list(itertools.product([0, 1], repeat=k)))
    scores = np.broadcast_to(np.array([0.0, 1.0]), (len(patterns), k + 1, 2))
    tokens = np.pad(patterns, ((0, 0), (1, 0)))  # draft 1 is what is wanted
    chance = np.prod(np.where(patterns, rate, 1 - rate), axis=1)
    mean = (chance * np.asarray(keep(scores, tokens, chain(k)).count)).sum()
    assert expected_length(rate, k) == pytest.approx(mean, rel=1e-13)


def test_the_expected_length_of_rejection(x64):
    # Every place has the same two laws, so that drafts are accepted independently, with 1 - TV.
    target, draft = (
        np.broadcast_to(np.array(law), (3, 3, 3)) for law in ([0.5, 0.3, 0.2], [0.2, 0.7, 0.1])
    )
    found = windows(chain(3), target, draft, "with_replacement")
    _, mean = emitted(found, chain(3), *judged(found, chain(3), "with_replacement"), target)
    assert expected_length(0.6, 3) == pytest.approx(mean, rel=1e-13)


def test_the_expected_length_near_one_in_single_precision():
    rates = jnp.array([1 - 2**-24, 1 - 2**-20, 0.99, 0.0, 1.0], jnp.float32)
    exact = [sum(float(rate) ** power for power in range(9)) for rate in rates]
    np.testing.assert_allclose(
        jax.jit(expected_length, static_argnums=1)(rates, 8), exact, rtol=1e-6
    )
    assert jnp.isfinite(jax.vmap(jax.grad(lambda rate: expected_length(rate, 8)))(rates)).all()


def test_what_does_not_fit_is_refused():
    p, q, tokens = some_windows(2, chain(2))
    with pytest.raises(
        UsageError, match=r"a tree of 2 nodes needs scores \[B, 2, V\] and tokens \[B, 2\], not"
    ):
        coupled(p, tokens, chain(1))
    with pytest.raises(UsageError, match="needs scores"):
        rejection(KEY, p[:1], q, tokens, chain(2), requests(2))
    with pytest.raises(
        UsageError,
        match=r"draft_logits must have the shape \[2, 3, 5\] unless drawn='top', not None",
    ):
        rejection(KEY, p, None, tokens, chain(2), requests(2))
    with pytest.raises(UsageError, match=r"not \[2, 3, 4\]"):
        rejection(KEY, p, q[..., :4], tokens, chain(2), requests(2))
    with pytest.raises(UsageError, match="drawn='typical' is unknown; legal are with_replacement"):
        rejection(KEY, p, q, tokens, chain(2), requests(2), drawn="typical")  # type: ignore[arg-type]


# ---------------------------------------------------------------- older arguments


def test_older_arguments_of_rejection_are_fields_of_the_index():
    p, q, tokens = some_windows(8, BUSHY)
    index = requests(8)
    want = reject(KEY, p, q, tokens, BUSHY, index)
    sentence = r"rejection\(seeds, positions, lineage\) is now \(index.seeds, index.positions, "
    with pytest.warns(FutureWarning, match=sentence) as record:
        got = rejection(
            KEY,
            jnp.asarray(p),
            jnp.asarray(q),
            jnp.asarray(tokens),
            BUSHY,
            seeds=index.seeds,
            positions=index.positions,
            lineage=index.lineage,
        )
    assert len(record) == 1 and record[0].filename == __file__
    jax.tree.map(np.testing.assert_array_equal, got, want)


def test_rejection_takes_a_whole_index_and_no_other_keyword():
    p, q, tokens = some_windows(2, chain(2))
    with pytest.raises(TypeError, match="'seeds', 'positions', and 'lineage'"):
        rejection(KEY, p, q, tokens, chain(2))
    with (
        pytest.warns(FutureWarning, match=r"rejection\(seeds\)"),
        pytest.raises(TypeError, match="'positions' and 'lineage'"),
    ):
        rejection(KEY, p, q, tokens, chain(2), seeds=requests(2).seeds)
    with pytest.raises(TypeError, match=r"rejection\(\) got an unexpected .* 'seed'"):
        rejection(KEY, p, q, tokens, chain(2), requests(2), seed=requests(2).seeds)
