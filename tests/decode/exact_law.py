"""The law of what `rejection` emits, by enumeration of all drafts and all random outcomes; nothing is sampled.

Target and draft are Markov chains of order two: [V, V, V] tables of the law of a token after two
others. The tokens that one pass emits are completed by the target to sequences of one length, whose
law must be the target's own.
"""

import functools
import itertools
from typing import NamedTuple

import jax
import numpy as np

from jaxpar.decode import verdict

START = (0, 1)  # the two tokens before the drafts; the second one is the root's


def random_chain(seed, size, sharpness=1.0):
    logits = sharpness * np.random.default_rng(seed).normal(size=(size, size, size))
    return np.exp(logits) / np.exp(logits).sum(-1, keepdims=True)


class Windows(NamedTuple):
    """All windows that a draft may propose, with the chance of each."""

    chance: np.ndarray  # [A]
    tokens: np.ndarray  # [A, T]
    p: np.ndarray  # [A, T, V]
    q: np.ndarray  # [A, T, V]


def windows(tree, target, draft, drawn, leave_out=None):
    """Draws the nodes of a tree in all ways. `leave_out(node, q, token)` says which are no drafts after all."""
    size, rows = target.shape[-1], []
    for drafts in itertools.product(range(size), repeat=tree.size - 1):
        tokens, chance = [START[1], *drafts], 1.0
        before = [START[0], *(tokens[parent] for parent in tree.parents[1:])]
        p, q = (
            np.array([chain[before[i], tokens[i]] for i in range(tree.size)])
            for chain in (target, draft)
        )
        for node, parent in enumerate(tree.parents[1:], 1):
            law, elders = q[parent].copy(), [tokens[i] for i in np.flatnonzero(tree.elders[node])]
            if drawn == "without_replacement":
                law[elders] = 0
                law = law / law.sum() if law.any() else law
            if drawn == "top":
                law = np.eye(size)[np.argsort(-law)[len(elders)]]
            chance *= law[tokens[node]]
        shown = [
            leave_out(i, q[tree.parents[i]], t) if leave_out and i else False
            for i, t in enumerate(tokens)
        ]
        rows.append(
            (
                chance,
                np.where(shown, [-1, size] * (tree.size // 2) + [-1] * (tree.size % 2), tokens),
                p,
                q,
            )
        )
    return Windows(*(np.array(column) for column in zip(*rows, strict=True)))


@functools.cache
def program(tree, drawn, judge):
    return jax.jit(jax.vmap(lambda p, q, tokens: judge(p, q, tokens, tree, drawn)))


def judged(found, tree, drawn, judge=verdict):
    """What the rule says of every window."""
    return [
        np.asarray(each) for each in program(tree, drawn, judge)(found.p, found.q, found.tokens)
    ]


def ends(accept, tree):
    """Chance that the walk ends at each node [A, T]: all on its path accepted, their elders and its children not."""
    chances = np.ones(accept.shape)
    for node in range(tree.size):
        for step in tree.paths[node, 1 : tree.depth[node] + 1]:
            chances[:, node] *= accept[:, step] * np.prod(1 - accept[:, tree.elders[step]], axis=1)
        chances[:, node] *= np.prod(
            1 - accept[:, tree.children[node][tree.children[node] >= 0]], axis=1
        )
    return chances


def emitted(found, tree, accept, bonus, target):
    """The law of sequences of max_depth + 1 tokens that begin with what was emitted, [V] * length; the mean count."""
    size, length = target.shape[-1], tree.max_depth + 1
    own, law, mean, chances = target_law(target, length), 0.0, 0.0, ends(accept, tree)
    for node, depth in enumerate(tree.depth):
        mass = np.zeros((size**depth, size))
        drafts = found.tokens[:, tree.paths[node, 1 : depth + 1]] @ size ** np.arange(depth)[::-1]
        reached = found.chance * chances[:, node]
        alive = reached > 0  # a draft that is left out is never reached
        np.add.at(mass, drafts[alive], reached[alive, None] * bonus[alive, node])
        mass = mass.reshape((size,) * (depth + 1))
        rest = tuple(range(depth + 1, length))
        prefix = np.broadcast_to(own.sum(rest, keepdims=True), own.shape)
        given = np.divide(own, prefix, where=prefix > 0, out=np.zeros(own.shape))
        law = law + mass.reshape(mass.shape + (1,) * len(rest)) * given
        mean += (depth + 1) * mass.sum()
    return law, mean


def target_law(target, length):
    size = target.shape[-1]
    law = np.ones((size,) * length)
    for sequence in itertools.product(range(size), repeat=length):
        tokens = [*START, *sequence]
        law[sequence] = np.prod([target[tuple(tokens[i : i + 3])] for i in range(length)])
    return law


def law_error(tree, target, draft, drawn, judge=verdict, leave_out=None):
    """How far the law of what is emitted lies from the target's, at most."""
    found = windows(tree, target, draft, drawn, leave_out)
    assert abs(found.chance.sum() - 1) < 1e-12
    law, _ = emitted(found, tree, *judged(found, tree, drawn, judge), target)
    assert abs(law.sum() - 1) < 1e-12 or judge is not verdict
    return abs(law - target_law(target, tree.max_depth + 1)).max()
