"""Drafts that a model makes in its own pass: guesses read off pseudo tokens behind each candidate.

A window is a tree of candidates, and behind each of them k pseudo tokens. What the model says at pseudo token j of the
last candidate that is kept is a guess of the token j + 1 places after it, one after the token that the pass itself
finds, so each pass verifies the last one's guesses and makes the next one's. The drafts differ in where pseudo tokens
enter the model and what is learned of them (`jaxpar.lm.DraftTrainer`); the model itself stays as it is, and so do its
tokens.

| draft | enters | a pseudo token's state there | learned |
|---|---|---|---|
| `PromptTokens` | before the first layer | e_j | k D |
| `HiddenTransfer` | before layer l | h + h W_j of the candidate's state h there | k D^2 |
| `Heads` | after the last norm | h + silu(h W_j) | k D^2 |
"""

import dataclasses
import functools
from typing import Protocol

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from jaxpar.decode.accept import Accepted
from jaxpar.decode.draft import Decide, Proposal
from jaxpar.decode.trees import Tree, chain
from jaxpar.fields import AtLeast, check_fields, field
from jaxpar.nn.leaf import Leaf
from jaxpar.nn.linear import contract
from jaxpar.nn.stack import PseudoTokens
from jaxpar.types import PyTree, UsageError

__all__ = ["Heads", "HiddenTransfer", "PromptTokens", "TrainedDraft", "pseudo_tokens"]

MAPS = (None, "embed", None)


class TrainedDraft(Protocol):
    """A draft whose guesses come from pseudo tokens: a `Draft` besides."""

    @property
    def length(self) -> int:
        """Pseudo tokens behind a candidate, k."""
        ...

    @property
    def candidates(self) -> Tree | None:
        """Tree of the candidates; None for a chain of `length`."""
        ...

    @property
    def layer(self) -> int | None:
        """The first layer that pseudo tokens pass; None for none."""
        ...

    def leaves(self, embed_dim: int, std: float) -> dict[str, Leaf]:
        """Declares what is learned, of a model of width D whose embeddings start with `std`."""
        ...

    def states(self, params: PyTree, x: Float[Array, "B N D"]) -> Float[Array, "B N k D"]:
        """Returns with which states the pseudo tokens behind tokens of states `x` enter."""
        ...


def pseudo_tokens(
    draft: TrainedDraft, params: PyTree, count: int, behind: Float[Array, " N"] | None = None
) -> PseudoTokens:
    """Returns a draft's pseudo tokens behind `count` tokens, k behind each: by default all, else those at `behind`."""

    def states(x):
        made = draft.states(params, x if behind is None else x[:, behind])
        return made.reshape(len(x), -1, x.shape[-1])

    return PseudoTokens(draft.layer, count * draft.length, states)


# ---------------------------------------------------------------- what the three have in common, as drafts


def _check(draft) -> None:
    check_fields(draft)
    if (deepest := _candidates(draft).max_depth) > draft.length:
        raise UsageError(
            f"candidates {deepest} deep; legal are up to length={draft.length}, the places guessed."
        )


def _candidates(draft: TrainedDraft) -> Tree:
    return chain(draft.length) if draft.candidates is None else draft.candidates


@functools.cache
def _window(candidates: Tree, length: int) -> Tree:
    """The candidates, then behind each in turn a chain of pseudo tokens."""
    parents = list(candidates.parents)
    for node in range(candidates.size):
        first = len(parents)
        parents += [node, *range(first, first + length - 1)]
    return Tree(tuple(parents))


def _tree(draft: TrainedDraft) -> Tree:
    """The window: candidates and pseudo tokens."""
    return _window(_candidates(draft), draft.length)


def _init(draft: TrainedDraft, params: PyTree, prompt: Array, lengths: Array, room: int) -> Array:
    """Returns no guesses: of each of k places, as many as a candidate has children."""
    return jnp.full(
        (len(prompt), draft.length, _candidates(draft).children.shape[1]), -1, jnp.int32
    )


def _propose(
    draft: TrainedDraft, params: PyTree, state: Array, text: Array, lengths: Array, decide: Decide
):
    """Proposes as child r of any candidate at depth d guess r of place d."""
    tree = _candidates(draft)
    tokens = state[:, tree.depth[1:] - 1, tree.rank[1:]]
    tokens = jnp.pad(tokens, ((0, 0), (0, tree.size * draft.length)), constant_values=-1)
    return Proposal(tokens, pseudo=pseudo_tokens(draft, params, tree.size)), state


def _update(
    draft: TrainedDraft, state: Array, tokens: Array, scores: Array, accepted: Accepted
) -> Array:
    """Reads guesses off the pseudo tokens behind the last candidate that was kept, the best scores first.

    The scores hold the noise of the places that are guessed, so that the best one is what the model will draw if the
    guessed law is its own.
    """
    last = jnp.take_along_axis(accepted.path, jnp.maximum(accepted.count - 1, 0)[:, None], 1)
    node = _candidates(draft).size + last * draft.length + jnp.arange(draft.length)[None]
    return jax.lax.top_k(jnp.take_along_axis(scores, node[..., None], 1), state.shape[2])[1]


# ---------------------------------------------------------------- the three


@dataclasses.dataclass(frozen=True)
class PromptTokens:
    """Learned embeddings in the place of the tokens to come: parallel prompt decoding (Chen et al., arXiv:2405.18628).

    Attributes:
      length: Places that are guessed, k.
      candidates: The tree of guesses that a pass verifies, at most k deep: `jaxpar.decode.best_tree` of what
        `jaxpar.lm.accept_rates` measures. None is a chain of k.
    """

    length: int = field(3, AtLeast(1))
    candidates: Tree | None = None

    layer = 0
    __post_init__ = _check
    tree = property(_tree)
    init, propose, update = _init, _propose, _update

    def leaves(self, embed_dim: int, std: float) -> dict[str, Leaf]:
        """Declares k embeddings."""
        return {"prompts": Leaf((self.length, embed_dim), (None, "embed"), std)}

    def states(self, params: PyTree, x: Array) -> Array:
        """Returns the embeddings, behind whatever token."""
        return jnp.broadcast_to(
            params["prompts"].astype(x.dtype), (*x.shape[:2], *params["prompts"].shape)
        )


@dataclasses.dataclass(frozen=True)
class HiddenTransfer:
    """Linear maps of a token's state, which pass the upper layers as states of the tokens to come (arXiv:2404.12022).

    The paper lets each place enter at a layer of its own; here all enter at one.

    Attributes:
      layer: The first layer that the pseudo states pass, 0 to L - 1.
      length: As of `PromptTokens`, and so the next.
      candidates: The tree.
    """

    layer: int = field(legal=AtLeast(0))
    length: int = field(3, AtLeast(1))
    candidates: Tree | None = None

    __post_init__ = _check
    tree = property(_tree)
    init, propose, update = _init, _propose, _update

    def leaves(self, embed_dim: int, std: float) -> dict[str, Leaf]:
        """Declares k maps, which start as the identity."""
        return {"maps": Leaf((self.length, embed_dim, embed_dim), MAPS, "zeros")}

    def states(self, params: PyTree, x: Array) -> Array:
        """Returns h + h W_j."""
        return x[:, :, None] + contract("bnd,jde->bnje", x, params["maps"], MAPS)


@dataclasses.dataclass(frozen=True)
class Heads:
    """Residual blocks on a token's last state, before the model's own head: Medusa's (arXiv:2401.10774, section 2.1.1).

    Medusa gives each place a head of its own besides; here all share the model's, so that as much is learned as by
    `HiddenTransfer`.

    Attributes:
      length: As of `PromptTokens`, and so the next.
      candidates: The tree.
    """

    length: int = field(3, AtLeast(1))
    candidates: Tree | None = None

    layer = None
    __post_init__ = _check
    tree = property(_tree)
    init, propose, update = _init, _propose, _update

    def leaves(self, embed_dim: int, std: float) -> dict[str, Leaf]:
        """Declares k blocks, which start as the identity."""
        return {"maps": Leaf((self.length, embed_dim, embed_dim), MAPS, "zeros")}

    def states(self, params: PyTree, x: Array) -> Array:
        """Returns h + silu(h W_j)."""
        return x[:, :, None] + jax.nn.silu(contract("bnd,jde->bnje", x, params["maps"], MAPS))
