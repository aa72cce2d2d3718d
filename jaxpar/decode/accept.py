"""Which of a window's drafts are kept, and the token after them: the same tokens, or the same law, as one at a time.

Both rules take the T nodes of a `Tree` with what the target said at each node, walk from the root as far as drafts are
accepted, and add one token of the target's own. `coupled` takes scores with shared noise in them: tokens are those of
the plain loop, one by one. `rejection` needs no shared noise: tokens differ, their law does not.
"""

from typing import Any, Literal, NamedTuple, get_args

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Float, Int

from jaxpar._older_fields import newer_arguments
from jaxpar.decode.noise import NoiseIndex, gumbel, token_keys
from jaxpar.decode.trees import Tree
from jaxpar.fields import OneOf, check_value
from jaxpar.types import PRNGKey, UsageError

__all__ = ["Accepted", "Drawn", "Verdict", "coupled", "expected_length", "rejection", "verdict"]

Drawn = Literal["with_replacement", "without_replacement", "top"]
"""How the children of a node were drawn from the draft's law: independently of each other; one after the other from
those that were not drawn yet; or not at random, such as the k likeliest."""

OLDER = {name: f"index.{name}" for name in NoiseIndex._fields}
"""Arguments of `rejection` that are fields of another argument today."""


class Accepted(NamedTuple):
    """What one pass added to each row.

    Attributes:
      tokens: int32 [B, T], the new tokens in order: accepted drafts, then the bonus token; zeros beyond `count`.
      count: int32 [B], new tokens, from 1 to max_depth + 1.
      path: int32 [B, T], nodes of the window that are kept, in order: 0, the root, then the accepted ones; -1 beyond.
        It has `count` nodes: the bonus token is the next window's root.
    """

    tokens: Int[Array, "B T"]
    count: Int[Array, " B"]  # pyright: ignore[reportIncompatibleMethodOverride] (nobody counts in this tuple)
    path: Int[Array, "B T"]


class Verdict(NamedTuple):
    """What chance has left to decide in one row.

    Attributes:
      accept: [T], probability of each draft's acceptance, given that its parent was accepted and the siblings before it
        were not; 1 for the root.
      bonus: [T, V], law of the next token where the walk ends at a node.
    """

    accept: Float[Array, " T"]
    bonus: Float[Array, "T V"]


def coupled(scores: Float[Array, "B T V"], tokens: Int[Array, "B T"], tree: Tree) -> Accepted:
    """Keeps the drafts that the plain loop would have drawn: each the argmax of the scores at its parent.

    Without noise that is greedy decoding; with the noise of `gumbel` at position + depth in the scores it is sampling,
    and tokens are those that decoding one by one draws from the same noise. Drafts drawn with the same noise are
    accepted with at least (1 - TV) / (1 + TV), TV being the total variation between the two laws (Daliri, Musco and
    Suresh 2024). Equal scores go to the lower token. Where siblings hold the same token, the one with the longer
    accepted path counts. O(B T (V + T)).

    Args:
      scores: Processed logits plus noise at each node: what decides on the token after it.
      tokens: The window; the root's is not read, and one outside of the vocabulary, such as -1, is never accepted.
      tree: The window's shape; static.
    """
    _check(scores, tokens, tree)
    best = scores.argmax(-1).astype(jnp.int32)
    matches = tokens == best[:, _parents(tree)]
    last = _last(matches, tree)
    return _kept(tokens, jnp.take_along_axis(best, last[:, None], 1)[:, 0], last, tree)


def rejection(
    key: PRNGKey,
    logits: Float[Array, "B T V"],
    draft_logits: Float[Array, "B T V"] | None,
    tokens: Int[Array, "B T"],
    tree: Tree,
    index: NoiseIndex | None = None,
    *,
    drawn: Drawn = "with_replacement",
    **older: Any,  # values of fields that were arguments, by `OLDER`
) -> Accepted:
    """Keeps drafts at random such that the law of the tokens is the target's (Leviathan et al. 2023, algorithm 1).

    On a chain draft x of law q is accepted with min(1, p(x) / q(x)), else a token comes from norm(max(p - q, 0)). On a
    tree the siblings are tried in order, each against what the rejections before it have left of p (recursive
    residuals): testing each against p itself is not exact. See `verdict`. The mean count of a chain whose drafts are
    accepted independently is `expected_length`.

    The law is exact where tokens were drawn as `drawn` says, and *which* nodes hold a draft does not depend on the
    token drawn there: leaving out a draft for its own low probability is not exact (`allocate` says more). Of siblings
    drawn without replacement the last ones may be left out, not the first. "top" is exact for any drafts, however they
    were found or chosen, for it takes them as given; it accepts less of those that were drawn at random.

    Cost: O(B V) for each node that has children, times the most that one has. Memory: two arrays like the logits, in
    float32 at least.

    Args:
      key: Consumed, with each row's `index` as in `gumbel`; the draws are independent of the `gumbel` noise of the
        same key. What a row draws does not depend on where it is in the batch.
      logits: The target's at each node, processed as for sampling; -inf masks a token.
      draft_logits: Of the law that the children of each node were drawn from, likewise; leaves' are not read. None
        where `drawn` is "top", which does not read it.
      tokens: The window; the root's is not read, and a token outside of the vocabulary, such as -1, or one that the
        draft's law rules out, is no draft.
      tree: The window's shape; static.
      index: Seed, lineage and position [B] of each row; the token after the root has this
        position.
      drawn: How the children of a node were drawn; static.
      **older: Fields of `index`, by their names, which works until the first release.

    Raises:
      UsageError: If shapes do not fit the tree, `drawn` is unknown, or draft logits are missing.
      TypeError: If there is no index, or a keyword is unknown.
    """
    groups = {"index": NoiseIndex if index is None else index}
    index = newer_arguments("rejection", OLDER, groups, older)["index"]
    assert index is not None  # a group that was given, or made
    _check(logits, tokens, tree)
    check_value("drawn", drawn, OneOf(get_args(Drawn)), str)
    if drawn != "top" and (draft_logits is None or draft_logits.shape != logits.shape):
        shape = None if draft_logits is None else list(draft_logits.shape)
        raise UsageError(
            f"draft_logits must have the shape {list(logits.shape)} unless drawn='top', not {shape}."
        )
    p, q = (
        _softmax(logits),
        None if drawn == "top" or draft_logits is None else _softmax(draft_logits),
    )
    accept = jax.vmap(lambda p, q, tokens: verdict(p, q, tokens, tree, drawn).accept)(p, q, tokens)
    test_key, bonus_key = jax.random.split(key)

    # One key a position: of the nodes at one depth only the children of one are ever tried, told apart by their rank.
    positions = index.positions
    depth = jnp.asarray(tree.depth[_parents(tree)], positions.dtype)
    tested = positions[:, None] + depth[None]
    seeds = jnp.broadcast_to(index.seeds[:, None], tested.shape)
    lineage = jnp.broadcast_to(index.lineage[:, None], tested.shape)
    keys = token_keys(test_key, seeds, tested, lineage)
    draw = jax.vmap(
        lambda each, rank: jax.random.uniform(jax.random.fold_in(each, rank), (), jnp.float32)
    )
    last = _walk(accept, jax.vmap(draw, (0, None))(keys, jnp.asarray(tree.rank)), tree)

    def left(
        p, q, tokens, node
    ):  # computed once more, which costs less than to keep it of every node
        return _tried(p[node], None if q is None else q[node], _drafts(tokens, node, tree), drawn)[
            1
        ]

    end = positions + jnp.asarray(tree.depth, positions.dtype)[last]
    noise = gumbel(bonus_key, index.seeds, end, index.lineage, logits.shape[-1])
    scores = jnp.log(jax.vmap(left)(p, q, tokens, last)) + noise
    return _kept(tokens, scores.argmax(-1).astype(jnp.int32), last, tree)


def verdict(
    p: Float[Array, "T V"],
    q: Float[Array, "T V"] | None,
    tokens: Int[Array, " T"],
    tree: Tree,
    drawn: Drawn,
) -> Verdict:
    """Returns what `rejection` draws from: a pure function, so that its law can be enumerated.

    At one node with target p_1 = p and draft q_1 = q, child x_i is accepted with min(1, p_i(x_i) / q_i(x_i)); if it is
    not, p_{i+1} = norm(max(p_i - q_i, 0)). Drawn with replacement, q_{i+1} = q_i; without, it is q_i with x_i taken
    out, normalised; children not drawn at random are point masses, so that x_i is accepted with p_i(x_i) and else taken
    out of p_i. What is left after the last child is the law of the bonus token. Where p_i - q_i is nowhere positive,
    which only rounding brings about, p_{i+1} = p_i. All nodes are computed at once, the children of each in order.

    Args:
      p: The target's law at each node.
      q: The law from which the draft drew the node's children; not read, and may be None, for "top".
      tokens: The window, as for `rejection`.
      tree: Its shape.
      drawn: How children were drawn.
    """
    inner = np.flatnonzero(
        (tree.children >= 0).any(1)
    )  # most nodes of a bushy tree are leaves, and nothing to try
    laws = p[inner], None if q is None else q[inner]
    chances, left = jax.vmap(lambda p, q, tokens: _tried(p, q, tokens, drawn))(
        *laws, _drafts(tokens, inner, tree)
    )
    row = np.searchsorted(inner, tree.parents[1:])
    accept = jnp.concatenate([jnp.ones_like(chances, shape=1), chances[row, tree.rank[1:]]])
    return Verdict(accept, p.at[inner].set(left))


def expected_length(rate: Float[Array, "*rows"] | float, k: int) -> Float[Array, "*rows"]:
    """Returns the mean count of a pass over a chain of k drafts, (1 - a^(k+1)) / (1 - a), and k + 1 at a = 1.

    That is equation 1 of Leviathan et al. (2023), for drafts that are accepted independently with the probability a =
    `rate`; acceptance of real text is not independent. It is summed as 1 + a + ... + a^k, which loses no digits near 1.
    """
    return jnp.polyval(jnp.ones(k + 1), jnp.asarray(rate, jnp.result_type(float)))


def _check(scores: Array, tokens: Array, tree: Tree) -> None:
    size = tree.size
    if tokens.shape[1:] != (size,) or scores.shape[:2] != tokens.shape:
        shapes = f"{list(scores.shape)} and {list(tokens.shape)}"
        raise UsageError(
            f"a tree of {size} nodes needs scores [B, {size}, V] and tokens [B, {size}], not {shapes}."
        )


def _parents(tree: Tree) -> Int[np.ndarray, " T"]:
    """Of each node; the root stands for its own, which it lacks."""
    return np.array([0, *tree.parents[1:]])


def _drafts(
    tokens: Int[Array, " T"], nodes: Array | np.ndarray, tree: Tree
) -> Int[Array, "*nodes C"]:
    """Tokens of the children of some nodes, -1 where there is none."""
    children = jnp.asarray(tree.children)[nodes]
    return jnp.where(children >= 0, tokens[children], -1)


def _tried(
    p: Float[Array, " V"], q: Float[Array, " V"] | None, tokens: Int[Array, " C"], drawn: Drawn
) -> tuple[Float[Array, " C"], Float[Array, " V"]]:
    """Of one node the chance of each child [C], if those before it were refused, and the law left after all [V]."""
    size = p.shape[-1]

    def test(laws, token):
        p, q = laws
        hit, at = jnp.arange(size) == token, jnp.clip(token, 0, size - 1)
        law = hit.astype(p.dtype) if q is None or drawn == "top" else q
        is_draft = (token == at) & (law[at] > 0)
        chance = jnp.where(is_draft, jnp.minimum(p[at] / jnp.where(is_draft, law[at], 1), 1), 0)
        left = jnp.where(is_draft, _normalised(jnp.maximum(p - law, 0), p), p)
        if q is not None and drawn == "without_replacement":
            q = _normalised(jnp.where(hit, 0, q), q)
        return (left, q), chance

    (left, _), chances = lax.scan(test, (p, q), tokens)
    return chances, left


def _walk(
    accept: Float[Array, "B T"], uniforms: Float[Array, "B T"], tree: Tree
) -> Int[Array, " B"]:
    """The node where each row's walk ends, a draft passing where its uniform number is under its probability."""
    passes = uniforms < accept
    tried = ~(passes[:, None, :] & tree.elders[None]).any(-1)  # no sibling before it was accepted
    return _last(passes & tried, tree)


def _last(passes: Array, tree: Tree) -> Int[Array, " B"]:
    """The deepest node all of whose path passes, [B, T] -> [B], the first of several; the root always passes."""
    passes = passes.at[:, 0].set(True)
    reached = ~(~passes[:, None, :] & tree.ancestors[None]).any(-1)
    return jnp.where(reached, tree.depth[None], -1).argmax(-1)


def _kept(tokens: Array, bonus: Array, last: Array, tree: Tree) -> Accepted:
    """The path to the node where each row's walk ended, with its tokens and the bonus token after them."""
    paths = np.pad(tree.paths, ((0, 0), (0, tree.size - tree.paths.shape[1])), constant_values=-1)
    path, count = jnp.asarray(paths, jnp.int32)[last], jnp.asarray(tree.depth + 1, jnp.int32)[last]
    drafts = jnp.take_along_axis(
        tokens, jnp.maximum(jnp.roll(path, -1, axis=1), 0), 1
    )  # those after the root
    place, end = jnp.arange(tree.size)[None], count[:, None] - 1
    new = jnp.where(place < end, drafts, jnp.where(place == end, bonus[:, None], 0))
    return Accepted(new.astype(jnp.int32), count, path)


def _softmax(logits: Array) -> Array:
    """In float32 at least; NaN where all is masked: what has such a law is no draft."""
    return jax.nn.softmax(logits.astype(jnp.promote_types(logits.dtype, jnp.float32)), axis=-1)


def _normalised(weights: Array, otherwise: Array) -> Array:
    """Weights with the sum 1; where they sum to 0, the other law."""
    total = weights.sum(-1, keepdims=True)
    return jnp.where(total > 0, weights / jnp.where(total > 0, total, 1), otherwise)
