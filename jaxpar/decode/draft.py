"""Guesses of the tokens to come, which one pass of the model then looks at together.

A draft changes how many passes there are, never a token: what is kept is what the plain loop would have drawn.

Example:
    import dataclasses

    import jax
    import jax.numpy as jnp

    from jaxpar.decode import Decoding, Proposal, Sampling, chain, generate
    from jaxpar.lm import Decoder, LMConfig, init

    @dataclasses.dataclass(frozen=True)
    class Again:  # whatever stands in the text comes twice
        @property
        def tree(self):
            return chain(1)

        def init(self, params, prompt, lengths, room):
            return ()

        def propose(self, params, state, text, lengths, decide):
            return Proposal(jnp.take_along_axis(text, lengths[:, None] - 1, 1)), state

        def update(self, state, tokens, scores, accepted):
            return state

    config = LMConfig(vocab_size=8, num_layers=1, embed_dim=8)
    model, params, prompt = Decoder(config), init(jax.random.key(0), config), jnp.array([[1, 2, 3]])
    plain = generate(jax.random.key(1), params, prompt, model, Sampling(9))
    drafted = generate(jax.random.key(1), params, prompt, model, Sampling(9), Decoding(draft=Again()))
    assert (plain.tokens == drafted.tokens).all() and drafted.passes[0] <= plain.passes[0]
"""

import dataclasses
from collections.abc import Callable
from typing import Literal, NamedTuple, Protocol

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from jaxpar.decode.accept import Accepted
from jaxpar.decode.blocks import BlockCache
from jaxpar.decode.model import TokenModel
from jaxpar.decode.reader import BLOCK, Reading, ReadingOptions, begin, keep, look
from jaxpar.decode.trees import Tree, chain
from jaxpar.fields import AtLeast, OneOf, check_fields, field
from jaxpar.nn.stack import PseudoTokens
from jaxpar.types import PyTree

__all__ = [
    "CopyDraft",
    "Decide",
    "Draft",
    "JacobiDraft",
    "LookaheadDraft",
    "ModelDraft",
    "NoDraft",
    "Proposal",
]

Decide = Callable[
    [Float[Array, "B V"], Int[Array, " B"]], tuple[Int[Array, " B"], Float[Array, "B V"]]
]
"""(logits of a draft, position of the token that is drawn) -> (the token, drawn with the noise that the model's own
will be drawn with, and the processed logits of the law that it was drawn from)."""


class Proposal(NamedTuple):
    """What a draft guesses.

    Attributes:
      tokens: Of the nodes 1 .. T-1 of the draft's tree; -1 for no guess.
      logits: Processed, of the law that each node's children were drawn from; for acceptance by rejection alone.
      pseudo: What the last nodes of the tree are, where the draft has nodes that are no guesses.
    """

    tokens: Int[Array, "B T-1"]
    logits: Float[Array, "B T V"] | None = None
    pseudo: PseudoTokens | None = None


class Draft(Protocol):
    """Something that guesses; frozen and hashable. Its state is a pytree with rows first."""

    @property
    def tree(self) -> Tree:
        """The window's shape."""
        ...

    def init(
        self, params: PyTree, prompt: Int[Array, "B P"], lengths: Int[Array, " B"], room: int
    ) -> PyTree:
        """Returns the state before the first of at most `room` new tokens."""
        ...

    def propose(
        self,
        params: PyTree,
        state: PyTree,
        text: Int[Array, "B S"],
        lengths: Int[Array, " B"],
        decide: Decide,
    ) -> tuple[Proposal, PyTree]:
        """Returns guesses of what follows each text."""
        ...

    def update(
        self,
        state: PyTree,
        tokens: Int[Array, "B T"],
        scores: Float[Array, "B T V"],
        accepted: Accepted,
    ) -> PyTree:
        """Learns by which scores the model chose after each node of the window, and what of it was kept."""
        ...


@dataclasses.dataclass(frozen=True)
class NoDraft:
    """The plain loop: a window of one token."""

    tree = chain(0)

    def init(self, params: PyTree, prompt: Array, lengths: Array, room: int) -> tuple[()]:
        """Returns nothing."""
        return ()

    def propose(self, params: PyTree, state: PyTree, text: Array, lengths: Array, decide: Decide):
        """Guesses nothing."""
        return Proposal(jnp.zeros((len(text), 0), jnp.int32)), state

    def update(self, state: PyTree, tokens: Array, scores: Array, accepted: Accepted) -> PyTree:
        """Learns nothing."""
        return state


@dataclasses.dataclass(frozen=True)
class CopyDraft:
    """What followed the last time that the text ended as it does now: prompt lookup, or aggressive decoding.

    The continuation of the longest match of at most `match` tokens is copied, of equal ones that of the latest; where
    it runs into the text's end it goes round. With source "prompt" only the prompt is copied from, which suits edits of
    a text that the prompt holds (Ge et al. 2022, arXiv:2205.10350): there a gap lets the copy go on behind a token that
    was replaced. O(B S match) a pass.

    Attributes:
      length: Tokens that are copied.
      match: Most tokens that are compared.
      source: Where to look.
      gaps: Of the tokens compared, how many may differ; the match is as long as those that do not.
    """

    length: int = field(8, AtLeast(1))
    match: int = field(4, AtLeast(1))
    source: Literal["text", "prompt"] = field("text", OneOf(("text", "prompt")))
    gaps: int = field(0, AtLeast(0))

    __post_init__ = check_fields

    @property
    def tree(self) -> Tree:
        """A chain."""
        return chain(self.length)

    def init(self, params: PyTree, prompt: Array, lengths: Array, room: int) -> Array:
        """Returns the lengths of the prompts."""
        return lengths

    def propose(self, params: PyTree, state: Array, text: Array, lengths: Array, decide: Decide):
        """Copies."""
        end = jnp.where(self.source == "prompt", jnp.minimum(state, lengths), lengths)
        tokens = jax.vmap(self._one)(text, lengths, end)
        return Proposal(tokens), state

    def _one(self, text: Array, length: Array, end: Array) -> Array:
        size = text.shape[0]
        after = jnp.arange(size, dtype=jnp.int32)  # a match is of the tokens before this place

        def longer(j, carry):
            left, run = carry  # gaps that are left, negative where the match has ended
            back = jnp.where(after - 1 - j >= 0, text[jnp.maximum(after - 1 - j, 0)], -1)
            same = (back == text[jnp.maximum(length - 1 - j, 0)]) & (length - 1 - j >= 0)
            left = left - ~same
            return left, run + (same & (left >= 0))

        start = jnp.where((after >= 1) & (after < end), self.gaps, -1), jnp.zeros_like(after)
        _, run = jax.lax.fori_loop(0, self.match, longer, start)
        best = size - 1 - jnp.argmax(run[::-1])  # of equal runs the latest
        period = jnp.maximum(end - best, 1)
        copied = text[jnp.minimum(best + jnp.arange(self.length) % period, size - 1)]
        return jnp.where(run[best] > 0, copied, -1).astype(jnp.int32)

    def update(self, state: Array, tokens: Array, scores: Array, accepted: Accepted) -> Array:
        """Keeps the prompts' lengths."""
        return state


@dataclasses.dataclass(frozen=True)
class JacobiDraft:
    """What the model chose at each place of the window before, moved up: the fixed-point iteration of decoding.

    Santilli et al. 2023 (arXiv:2305.10427), algorithm 1: all tokens of a window are guessed, and each pass replaces
    every guess by what follows from the guesses before it.

    Attributes:
      length: Guesses.
    """

    length: int = field(8, AtLeast(1))

    __post_init__ = check_fields

    @property
    def tree(self) -> Tree:
        """A chain."""
        return chain(self.length)

    def init(self, params: PyTree, prompt: Array, lengths: Array, room: int) -> Array:
        """Guesses the last token again."""
        last = jnp.take_along_axis(prompt, lengths[:, None] - 1, 1)
        return jnp.broadcast_to(last, (len(prompt), self.length)).astype(jnp.int32)

    def propose(self, params: PyTree, state: Array, text: Array, lengths: Array, decide: Decide):
        """Returns the guesses."""
        return Proposal(state), state

    def update(self, state: Array, tokens: Array, scores: Array, accepted: Accepted) -> Array:
        """Moves what was chosen up by what was kept; the last choice fills the rest."""
        chosen = scores.argmax(-1).astype(jnp.int32)
        place = accepted.count[:, None] + jnp.arange(self.length)[None]
        return jnp.take_along_axis(chosen, jnp.minimum(place, chosen.shape[1] - 1), 1)


@dataclasses.dataclass(frozen=True)
class ModelDraft:
    """A smaller model of the same vocabulary, asked token by token (Leviathan et al. 2023, arXiv:2211.17192).

    Attributes:
      model: The smaller one; `generate` gets its parameters as `draft_params`.
      length: Tokens it guesses.
      block: Slots of a block of its cache.
    """

    model: TokenModel
    length: int = field(4, AtLeast(1))
    block: int = field(BLOCK, AtLeast(1))

    __post_init__ = check_fields

    @property
    def tree(self) -> Tree:
        """A chain."""
        return chain(self.length)

    def init(self, params: PyTree, prompt: Array, lengths: Array, room: int) -> Reading:
        """Reads the prompts."""
        # Guesses are written before they are taken back.
        options = ReadingOptions(room=room + self.length, block=self.block)
        return begin(self.model, params, prompt, lengths, options)[1]

    def propose(self, params: PyTree, state: Reading, text: Array, lengths: Array, decide: Decide):
        """Reads what was kept since, then guesses token after token; what it read of its guesses is taken back."""
        params = self.model.held(params)
        window, position = chain(self.length), state.view.position[:, 0]
        place = position[:, None] + jnp.arange(window.size)[None]
        missing = jnp.take_along_axis(text, jnp.minimum(place, text.shape[1] - 1), 1)
        logits, state = look(self.model, params, state, missing, window)
        count = lengths - position
        state = keep(self.model, params, state, missing, place - position[:, None], count)
        logits = jnp.take_along_axis(logits, (count - 1)[:, None, None], 1)[:, 0]
        one, zero = chain(0), jnp.zeros((len(text), 1), jnp.int32)
        tokens, laws, guess = [], [], state
        for number in range(self.length):
            token, law = decide(logits, lengths + number)
            tokens.append(token)
            laws.append(law)
            if number + 1 < self.length:
                logits, guess = look(self.model, params, guess, token[:, None], one)
                guess = keep(
                    self.model, params, guess, token[:, None], zero, jnp.ones_like(lengths)
                )
                logits = logits[:, 0]
        layers = tuple(
            wrote if isinstance(wrote, BlockCache) else before
            for wrote, before in zip(guess.layers, state.layers, strict=True)
        )
        laws.append(laws[-1])  # a leaf has no children
        return Proposal(jnp.stack(tokens, 1), jnp.stack(laws, 1)), dataclasses.replace(
            state, layers=layers
        )

    def update(self, state: Reading, tokens: Array, scores: Array, accepted: Accepted) -> Reading:
        """Learns nothing: what was kept is read by the next call."""
        return state


@dataclasses.dataclass(frozen=True)
class LookaheadDraft:
    """Jacobi iteration in a window, and the n-grams that it passed through as guesses.

    Fu et al. 2024 (arXiv:2402.02057). Of `width` columns the last `ngram - 1` iterates are kept, each a place further
    than the one before. One pass finds the next iterate of every column, and looks at up to `guesses` n-grams of
    earlier passes that begin with the text's last token.

    Attributes:
      width: Columns of the window, W.
      ngram: Tokens of an n-gram, N.
      guesses: N-grams that a pass looks at.
      pool: N-grams that a row remembers; the oldest goes first.
    """

    width: int = field(5, AtLeast(1))
    ngram: int = field(4, AtLeast(2))
    guesses: int = field(4, AtLeast(1))
    pool: int = field(256, AtLeast(1))

    __post_init__ = check_fields

    @property
    def tree(self) -> Tree:
        """Guesses first, as of equal paths the first counts: chains from the root; then the window's columns."""
        parents = [-1]
        for _ in range(self.guesses):
            start = len(parents)
            parents += [0, *range(start, start + self.ngram - 2)]
        first = len(parents)
        parents += [0, *range(first, first + self.width - 1)]  # the oldest iterate, a chain
        parents += range(
            first, first + self.width * (self.ngram - 2)
        )  # each later one below the one before
        return Tree(tuple(parents))

    def init(
        self, params: PyTree, prompt: Array, lengths: Array, room: int
    ) -> tuple[Array, Array, Array]:
        """Starts the window with tokens of the prompt, and no n-grams."""
        rows, size = len(prompt), (self.ngram - 1) * self.width
        places = jnp.arange(size, dtype=jnp.int32)[None] % lengths[:, None]
        window = (
            jnp.take_along_axis(prompt, places, 1)
            .reshape(rows, self.ngram - 1, self.width)
            .astype(jnp.int32)
        )
        return (
            window,
            jnp.full((rows, self.pool, self.ngram), -1, jnp.int32),
            jnp.zeros((rows,), jnp.int32),
        )

    def propose(self, params: PyTree, state: PyTree, text: Array, lengths: Array, decide: Decide):
        """Returns the n-grams that begin with the last token, the latest first, and the window."""
        window, pool, count = state
        last = jnp.take_along_axis(text, lengths[:, None] - 1, 1)
        # How many passes ago an n-gram was put in: the pool is a ring.
        age = (count[:, None] - 1 - jnp.arange(self.pool)[None]) % self.pool
        age = jnp.where(pool[:, :, 0] == last, age, self.pool)
        found = jnp.argsort(age, axis=1)[:, : self.guesses]
        known = jnp.take_along_axis(age, found, 1) < self.pool
        grams = jnp.take_along_axis(pool, found[..., None], 1)[..., 1:]
        if short := self.guesses - grams.shape[1]:  # a pool smaller than the guesses
            grams, known = (
                jnp.pad(grams, ((0, 0), (0, short), (0, 0))),
                jnp.pad(known, ((0, 0), (0, short))),
            )
        grams = jnp.where(known[..., None], grams, -1)
        rows = len(text)
        return Proposal(
            jnp.concatenate([grams.reshape(rows, -1), window.reshape(rows, -1)], 1)
        ), state

    def update(self, state: PyTree, tokens: Array, scores: Array, accepted: Accepted) -> PyTree:
        """Puts each column's n-gram into the pool, and moves the window on by what was kept."""
        window, pool, count = state
        rows = len(tokens)
        new = (
            scores[:, -self.width :].argmax(-1).astype(jnp.int32)
        )  # after the newest iterate of each column
        grams = jnp.concatenate([jnp.swapaxes(window, 1, 2), new[..., None]], 2)
        place = (count[:, None] + jnp.arange(self.width)[None]) % self.pool
        pool = pool.at[jnp.arange(rows)[:, None], place].set(grams)
        window = jnp.concatenate([window[:, 1:], new[:, None]], 1)
        # Each iterate stands a place further than the one before, so dropping one moves the window by one already.
        shift = jnp.minimum(accepted.count - 1, self.width)[:, None, None]
        column = jnp.minimum(jnp.arange(self.width)[None, None] + shift, self.width - 1)
        window = jnp.take_along_axis(window, jnp.broadcast_to(column, window.shape), 2)
        return window, pool, count + self.width
