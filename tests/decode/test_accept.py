"""What one pass keeps: the plain loop's tokens where noise is shared, the target's law where it is not."""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from exact_law import START, emitted, judged, law_error, random_chain, target_law, windows

from jaxpar.decode import Tree, Verdict, chain, coupled, expected_length, gumbel, rejection, verdict
from jaxpar.decode.accept import _walk
from jaxpar.types import UsageError

KEY = jax.random.key(11)
BUSHY = Tree((-1, 0, 0, 1, 1, 2, 3))
MODES = ["with_replacement", "without_replacement", "top"]
keep = jax.jit(coupled, static_argnums=2)
reject = jax.jit(rejection, static_argnums=4, static_argnames="drawn")


def requests(batch, start=5):
    """Seeds, positions and lineage of a batch of rows that differ."""
    seeds = jnp.arange(batch, dtype=jnp.int32)
    return {"seeds": seeds, "positions": seeds % 3 + start, "lineage": seeds % 2}


# ---------------------------------------------------------------- coupled


def plain_path(best, tokens, tree):
    """The longest way from the root along drafts that are what the node before them wants; the first one of equals."""
    ways = [[0]]
    for node in range(1, tree.size):
        way = next((way for way in ways if way[-1] == tree.parents[node]), None)
        if way and tokens[node] == best[way[-1]]:
            ways.append([*way, node])
    return max(ways, key=len)  # the first of equals


@pytest.mark.parametrize("tree", [chain(0), chain(4), BUSHY, Tree((-1, 0, 0, 0, 2, 2, 5, 5))], ids=str)
def test_coupled_is_walking_by_hand(tree):
    rng = np.random.default_rng(0)
    scores = rng.integers(0, 4, (200, tree.size, 3)).astype(np.float32)  # many ties
    tokens = rng.integers(-1, 4, (200, tree.size))  # none, and outside; siblings of one token
    wanted = scores.argmax(-1)[:, [0, *tree.parents[1:]]]
    tokens = np.where(rng.uniform(size=tokens.shape) < 0.5, wanted, tokens)
    got = keep(jnp.asarray(scores), jnp.asarray(tokens), tree)
    assert {each.dtype for each in got} == {jnp.dtype(jnp.int32)}
    counts = set()
    for row, (score, token) in enumerate(zip(scores, tokens, strict=True)):
        best = [int(np.flatnonzero(values == values.max())[0]) for values in score]  # the lowest of equals
        path = plain_path(best, token, tree)
        new = [*token[path[1:]], best[path[-1]]]
        counts.add(len(new))
        rest = tree.size - len(new)
        assert got.count[row] == len(new)
        assert got.path[row].tolist() == path + [-1] * rest and got.tokens[row].tolist() == new + [0] * rest
    assert counts == set(range(1, tree.max_depth + 2))


def test_any_draft_decodes_to_the_tokens_of_the_plain_loop():
    logits, start, length = jnp.log(random_chain(1, 4).astype(np.float32)), 2, 12
    batch = requests(6, start)
    longest = jnp.arange(start, start + 24, dtype=jnp.int32)
    wide = [jnp.broadcast_to(batch[name][:, None], (6, 24)) for name in ("seeds", "lineage")]
    noise = gumbel(KEY, wide[0], jnp.broadcast_to(longest[None], (6, 24)), wide[1], 4)

    def plain(row):
        tokens = list(START)
        for place in range(length):
            at = int(batch["positions"][row]) - start + place
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
            at = np.array([len(row) - 2 for row in have]) + np.asarray(batch["positions"]) - start
            places = at[:, None] + tree.depth[None]
            scores = logits[before, tokens] + noise[np.arange(6)[:, None], places]
            new = keep(scores, jnp.asarray(tokens), tree)
            for row in range(6):  # rows go on at their own pace, as far as the noise reaches
                room = length + 2 - len(have[row])
                have[row] += new.tokens[row, : new.count[row]].tolist()[:room]
            passes += 1
        assert [row[2:] for row in have] == want
        assert passes == length if tree.size == 1 else passes < length + 1


# ---------------------------------------------------------------- rejection: its law, exactly


@pytest.mark.parametrize("drawn", MODES)
@pytest.mark.parametrize("tree", [chain(3), BUSHY, Tree((-1, 0, 0, 0, 2))], ids=str)
def test_the_law_of_what_is_emitted_is_the_targets(tree, drawn, x64):
    for seed in range(3):
        target, draft = random_chain(seed, 3, 1 + seed), random_chain(seed + 10, 3)
        assert law_error(tree, target, draft, drawn) < 1e-12


def test_a_larger_vocabulary_and_masked_tokens(x64):
    target, draft = random_chain(5, 4), random_chain(6, 4)
    target[..., 2], draft[:, 1, 0] = 0, 0  # what the target never says, and the draft sometimes not
    target, draft = (each / each.sum(-1, keepdims=True) for each in (target, draft))
    for drawn in MODES:
        assert law_error(chain(2), target, draft, drawn) < 1e-12
        assert law_error(Tree((-1, 0, 0, 0, 1)), target, draft, drawn) < 1e-12


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
    assert law_error(chain(3), target, draft, drawn, naive) < 1e-12  # on a chain it is the exact one
    assert law_error(BUSHY, target, draft, drawn, naive) > 1e-3


def test_every_way_of_drawing_needs_its_own_rule(x64):
    target, draft = random_chain(0, 3), random_chain(10, 3)
    for drawn, other in itertools.permutations(MODES, 2):
        judge = lambda p, q, tokens, tree, _, other=other: verdict(p, q, tokens, tree, other)  # noqa: E731
        error = law_error(BUSHY, target, draft, drawn, judge)
        # The rule of fixed drafts is exact given the drafts, whatever drew them; it only accepts less.
        assert error < 1e-12 if other == "top" else error > 1e-3, (drawn, other)


@pytest.mark.parametrize("drawn", MODES)
def test_drafts_may_be_left_out_by_place_but_not_by_what_was_drawn(drawn, x64):
    target, draft = random_chain(3, 3), random_chain(13, 3)
    error = law_error(BUSHY, target, draft, drawn, leave_out=lambda node, q, token: node in (2, 5))
    assert error < 1e-12
    error = law_error(BUSHY, target, draft, drawn, leave_out=lambda node, q, token: node == 1)
    assert error > 1e-3 if drawn == "without_replacement" else error < 1e-12  # node 2 is then not drawn from q
    assert law_error(BUSHY, target, draft, drawn, leave_out=lambda node, q, token: q.max() < 0.5) < 1e-12
    error = law_error(BUSHY, target, draft, drawn, leave_out=lambda node, q, token: q[token] < 0.4)
    assert error < 1e-12 if drawn == "top" else error > 1e-3


def test_equal_laws_leave_the_target_and_no_nan():
    p = jax.nn.softmax(jnp.array([[0.3, 1.7, -0.4, 5.0]] * 3))
    accept, bonus = verdict(p, p, jnp.array([0, 1, 2]), chain(2), "with_replacement")
    np.testing.assert_array_equal(accept, [1, 1, 1])
    np.testing.assert_array_equal(bonus, p)
    nudged = p.at[:, 3].add(1e-7)  # p <= q everywhere, as after rounding: no positive part is left
    accept, bonus = verdict(p, nudged, jnp.array([0, 3, 3]), chain(2), "with_replacement")
    assert (accept[1:] < 1).all()
    np.testing.assert_array_equal(bonus, p)


# ---------------------------------------------------------------- rejection: its draws


@pytest.mark.parametrize("tree", [chain(4), BUSHY, Tree((-1, 0, 0, 0, 2, 2, 5, 5))], ids=str)
def test_uniform_numbers_decide_child_by_child(tree):
    rng = np.random.default_rng(4)
    accept, uniforms = rng.uniform(size=(300, tree.size)), rng.uniform(size=(300, tree.size))
    accept[:, 0] = 1
    accept[0], uniforms[0] = 0.5, 0.5  # not under it
    got, seen = _walk(jnp.asarray(accept), jnp.asarray(uniforms), tree), set()
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
    target, draft = random_chain(20, size, 1.5).astype(np.float32), random_chain(21, size).astype(np.float32)
    rows = jnp.arange(num, dtype=jnp.int32)
    request = {"seeds": rows % 100, "positions": rows // 100 + 4, "lineage": rows % 7}
    tree = Tree((-1, 0, 0, 1, 2))

    def noise(place, child):  # of the same key as `rejection`'s: a draft may have used it
        key = KEY if child == 0 else jax.random.fold_in(KEY, 1000 + child)
        return np.asarray(gumbel(key, request["seeds"], request["positions"] + place, request["lineage"], size))

    def drafts(law):  # two of each row's law, then
        ranked = np.argsort(-law, axis=-1)
        if drawn == "top":
            return ranked[:, 0], ranked[:, 1]
        one = (np.log(law) + noise(0, 0)).argmax(-1)
        left = np.where(np.arange(size) == one[:, None], 0, law) if drawn == "without_replacement" else law
        with np.errstate(divide="ignore"):
            return one, (np.log(left) + noise(0, 1)).argmax(-1)

    tokens = np.zeros((num, 5), np.int32)
    tokens[:, 0] = START[1]
    tokens[:, 1], tokens[:, 2] = drafts(np.broadcast_to(draft[START], (num, size)))
    for node, parent in ((3, 1), (4, 2)):
        law = draft[START[1], tokens[:, parent]]
        tokens[:, node] = law.argmax(-1) if drawn == "top" else (np.log(law) + noise(1, node - 3)).argmax(-1)
    before = np.stack([np.full(num, START[0]), *(tokens[:, parent] for parent in tree.parents[1:])], axis=1)
    p, q = (jnp.log(chain[before, tokens]) for chain in (target, draft))
    got = reject(KEY, p, None if drawn == "top" else q, jnp.asarray(tokens), tree, drawn=drawn, **request)

    new, count = np.asarray(got.tokens), np.asarray(got.count)
    pairs = np.bincount(new[count > 1, 0] * size + new[count > 1, 1], minlength=size**2)
    law = target_law(target, 2)
    for first in range(size):  # the second token, where there is one, has the target's law given the first
        given, of = pairs.reshape(size, size)[first], law[first] / law[first].sum()
        assert (abs(given - given.sum() * of) < 4.5 * np.sqrt(given.sum() * of * (1 - of)) + 1).all()
    ones, of = np.bincount(new[:, 0], minlength=size), law.sum(1)
    assert (abs(ones - num * of) < 4.5 * np.sqrt(num * of * (1 - of))).all()
    assert set(count) == {1, 2, 3}
    accept, _ = jax.vmap(lambda *row: verdict(*row, tree, drawn))(jnp.exp(p), jnp.exp(q), jnp.asarray(tokens))
    stay = np.asarray((1 - accept[:, 1]) * (1 - accept[:, 2]))
    assert abs((count == 1).sum() - stay.sum()) < 4.5 * np.sqrt((stay * (1 - stay)).sum())


def some_windows(batch, tree, dtype=np.float32):
    rng = np.random.default_rng(7)
    p, q = (jnp.asarray(rng.normal(size=(batch, tree.size, 5)), dtype) for _ in range(2))
    return p, q, jnp.asarray(rng.integers(0, 5, (batch, tree.size)), jnp.int32)


def test_what_a_row_draws_is_no_matter_of_its_company():
    p, q, tokens = some_windows(8, BUSHY)
    request, order = requests(8), jnp.array([5, 2, 7, 0, 1, 6, 4, 3])
    want = reject(KEY, p, q, tokens, BUSHY, **request)
    moved = {name: each[order] for name, each in request.items()}
    got = reject(KEY, p[order], q[order], tokens[order], BUSHY, **moved)
    jax.tree.map(lambda got, want: np.testing.assert_array_equal(got, want[order]), got, want)
    alone = rejection(KEY, p[3:4], q[3:4], tokens[3:4], BUSHY, **{name: each[3:4] for name, each in request.items()})
    jax.tree.map(lambda got, want: np.testing.assert_array_equal(got, want[3:4]), alone, want)


def test_seed_position_and_lineage_each_change_the_draw():
    p, q, tokens = some_windows(1, BUSHY)
    same = [jnp.repeat(each, 64, axis=0) for each in (p, q, tokens)]
    fixed = {name: jnp.zeros(64, jnp.int32) for name in ("seeds", "positions", "lineage")}
    draws = {None: reject(KEY, *same, BUSHY, **fixed)}
    assert len(np.unique(draws[None].tokens, axis=0)) == 1
    for name in fixed:
        draws[name] = reject(KEY, *same, BUSHY, **fixed | {name: jnp.arange(64, dtype=jnp.int32)})
        assert len(np.unique(draws[name].tokens, axis=0)) >= 3
    assert not np.array_equal(draws["seeds"].tokens, draws["lineage"].tokens)


@pytest.mark.parametrize("drawn", MODES)
def test_masked_tokens_are_never_emitted(drawn):
    p, q, tokens = some_windows(64, BUSHY)
    p = p.at[:, :, 2].set(-jnp.inf).at[:, 1:, 4].set(-jnp.inf)
    q = q.at[:, :, 0].set(-jnp.inf).at[:, 3:].set(-jnp.inf)  # nodes whose children nobody drew
    tokens = jnp.where(tokens == 0, 1, tokens).at[::2].set(2)
    accept, bonus = jax.vmap(lambda *row: verdict(*row, BUSHY, drawn))(jax.nn.softmax(p), jnp.nan_to_num(
        jax.nn.softmax(q)), tokens)  # fmt: skip
    assert jnp.isfinite(accept).all() and jnp.isfinite(bonus).all()
    assert (accept[::2, 1:] == 0).all() and (bonus[..., 2] == 0).all()
    np.testing.assert_allclose(bonus.sum(-1), 1, rtol=1e-5)
    got = reject(KEY, p, q, tokens, BUSHY, drawn=drawn, **requests(64))
    new = [row[:count] for row, count in zip(got.tokens.tolist(), got.count.tolist(), strict=True)]
    assert all(2 not in row and 4 not in row[1:] for row in new)


def test_half_precision_double_precision_and_the_window_of_one(x64):
    for dtype in (jnp.bfloat16, jnp.float64):
        p, q, tokens = some_windows(4, chain(0), dtype)
        got = rejection(KEY, p, q, tokens, chain(0), **requests(4))
        assert {each.dtype for each in got} == {jnp.dtype(jnp.int32)}
        assert (got.count == 1).all() and (got.path == 0).all() and got.tokens.shape == (4, 1)


# ---------------------------------------------------------------- lengths, and users' mistakes


@pytest.mark.parametrize("rate", [0.0, 0.3, 0.999, 1.0])
def test_the_expected_length_is_that_of_independent_acceptance(rate, x64):
    k = 3
    patterns = np.array(list(itertools.product([0, 1], repeat=k)))
    scores = jnp.zeros((len(patterns), k + 1, 2)).at[..., 1].set(1)
    tokens = jnp.asarray(np.pad(patterns, ((0, 0), (1, 0))))  # draft 1 is what is wanted
    chance = np.prod(np.where(patterns, rate, 1 - rate), axis=1)
    mean = (chance * np.asarray(coupled(scores, tokens, chain(k)).count)).sum()
    assert expected_length(rate, k) == pytest.approx(mean, rel=1e-13)


def test_the_expected_length_of_rejection(x64):
    # Every place has the same two laws, so that drafts are accepted independently, with 1 - TV.
    target, draft = (np.broadcast_to(np.array(law), (3, 3, 3)) for law in ([0.5, 0.3, 0.2], [0.2, 0.7, 0.1]))
    found = windows(chain(3), target, draft, "with_replacement")
    _, mean = emitted(found, chain(3), *judged(found, chain(3), "with_replacement"), target)
    assert expected_length(0.6, 3) == pytest.approx(mean, rel=1e-13)


def test_the_expected_length_near_one_in_single_precision():
    rates = jnp.array([1 - 2**-24, 1 - 2**-20, 0.99, 0.0, 1.0], jnp.float32)
    exact = [sum(float(rate) ** power for power in range(9)) for rate in rates]
    np.testing.assert_allclose(jax.jit(expected_length, static_argnums=1)(rates, 8), exact, rtol=1e-6)
    assert jnp.isfinite(jax.vmap(jax.grad(lambda rate: expected_length(rate, 8)))(rates)).all()


def test_what_does_not_fit_is_refused():
    p, q, tokens = some_windows(2, chain(2))
    with pytest.raises(UsageError, match=r"a tree of 2 nodes needs scores \[B, 2, V\] and tokens \[B, 2\], not"):
        coupled(p, tokens, chain(1))
    with pytest.raises(UsageError, match="needs scores"):
        rejection(KEY, p[:1], q, tokens, chain(2), **requests(2))
    with pytest.raises(UsageError, match=r"draft_logits must have the shape \[2, 3, 5\] unless drawn='top', not None"):
        rejection(KEY, p, None, tokens, chain(2), **requests(2))
    with pytest.raises(UsageError, match=r"not \[2, 3, 4\]"):
        rejection(KEY, p, q[..., :4], tokens, chain(2), **requests(2))
    with pytest.raises(UsageError, match="drawn='typical' is unknown; legal are with_replacement"):
        rejection(KEY, p, q, tokens, chain(2), drawn="typical", **requests(2))  # type: ignore[arg-type]
