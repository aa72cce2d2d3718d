"""The tokens of one verification pass as a static tree, the best such tree, and the best share of a batch's drafts.

A window of T tokens runs through the model in one pass: node 0 is the last token that is certain, every other node is a
guess of the token after its parent. Its shape is static, so that masks and paths are constants of the program.
"""

import dataclasses
import functools
import operator
from collections.abc import Callable

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int

from jaxpar.types import UsageError

__all__ = ["Tree", "allocate", "best_tree", "chain", "expected_tokens"]


@dataclasses.dataclass(frozen=True)
class Tree:
    """The shape of a window: hashable, and so a static argument.

    Attributes:
      parents: Of each of the T nodes the node before it; -1 for node 0, the root, and a smaller number than its own for
        every other. Children of a node are in the order of their numbers: the first is the likeliest guess.
    """

    parents: tuple[int, ...]

    def __post_init__(self):
        try:
            parents = tuple(operator.index(parent) for parent in self.parents)
        except TypeError:
            raise UsageError(f"parents={self.parents!r} of a tree must be whole numbers.") from None
        if not parents or parents[0] != -1:
            raise UsageError(f"parents={parents} of a tree must begin with -1, the root's.")
        wrong = [node for node, parent in enumerate(parents) if node and not 0 <= parent < node]
        if wrong:
            raise UsageError(
                f"parents={parents}: node {wrong[0]} needs a parent from 0 to {wrong[0] - 1}."
            )
        object.__setattr__(
            self, "parents", parents
        )  # NumPy's integers would hash alike and print otherwise

    @property
    def size(self) -> int:
        """T: the root and the drafts."""
        return len(self.parents)

    @functools.cached_property
    def depth(self) -> Int[np.ndarray, " T"]:
        """Edges from the root to each node."""
        return _constant(self.ancestors.sum(1) - 1)

    @property
    def max_depth(self) -> int:
        """Most drafts that one pass can accept."""
        return int(self.depth.max())

    @functools.cached_property
    def ancestors(self) -> Bool[np.ndarray, "T T"]:
        """Row i says what node i sees of the window: itself and its ancestors."""
        seen = np.eye(self.size, dtype=bool)
        for node, parent in enumerate(self.parents[1:], 1):
            seen[node] |= seen[parent]
        return _constant(seen)

    @functools.cached_property
    def children(self) -> Int[np.ndarray, "T C"]:
        """Each node's children in order, -1 beyond; C is the most that a node has."""
        lists = [
            [i for i, parent in enumerate(self.parents) if parent == node]
            for node in range(self.size)
        ]
        most = max(len(each) for each in lists)
        table = [each + [-1] * (most - len(each)) for each in lists]
        return _constant(np.array(table).reshape(self.size, most))

    @functools.cached_property
    def rank(self) -> Int[np.ndarray, " T"]:
        """Each node's place among its siblings, from 0."""
        return _constant(
            np.array(
                [self.parents[:node].count(parent) for node, parent in enumerate(self.parents)]
            )
        )

    @functools.cached_property
    def elders(self) -> Bool[np.ndarray, "T T"]:
        """Row i says which nodes are siblings of node i that come before it."""
        parents = np.array(self.parents)
        return _constant(np.tril(parents[:, None] == parents[None], -1))

    @functools.cached_property
    def paths(self) -> Int[np.ndarray, "T E"]:
        """Nodes from the root to each node, itself the last, -1 beyond; E = max_depth + 1."""
        table = np.full((self.size, self.max_depth + 1), -1)
        for node, seen in enumerate(self.ancestors):
            table[node, : self.depth[node] + 1] = np.flatnonzero(seen)
        return _constant(table)


def _constant(array: np.ndarray) -> np.ndarray:
    """Read-only, for every holder of the tree has the same bytes; integers of 32 bits, in any precision of the rest."""
    array = array if array.dtype == bool else array.astype(np.int32)
    array.flags.writeable = False
    return array


def chain(length: int) -> Tree:
    """Returns the tree of `length` drafts one after the other; 0 is the window of plain decoding."""
    if length < 0:
        raise UsageError(f"length={length} of a chain must be at least 0.")
    return Tree(tuple(range(-1, length)))


def expected_tokens(tree: Tree, accept_rates: Float[np.ndarray, "depth rank"]) -> float:
    """Returns the mean number of tokens a pass: 1 + the sum over drafts of the product of the rates on their paths.

    Candidates of one node exclude each other, so a node is reached with the product of the rates along its path,
    whatever its siblings. Rates as in `best_tree`; nodes beyond the table are never accepted.
    """
    rates = _checked(accept_rates)
    reached = np.ones(tree.size)
    for node, parent in enumerate(tree.parents[1:], 1):
        depth, rank = tree.depth[node] - 1, tree.rank[node]
        reached[node] = reached[parent] * (
            rates[depth, rank] if depth < len(rates) and rank < len(rates.T) else 0
        )
    return float(reached.sum())


def best_tree(
    accept_rates: Float[np.ndarray, "depth rank"],
    size: int,
    cost: Callable[[int], float] | None = None,
) -> Tree:
    """Returns the tree of `size` nodes with the largest `expected_tokens` (the sparse trees of PPD, arXiv:2405.18628).

    A dynamic programme over (depth, rank, nodes left): children of rank r on of a node at depth d, n nodes in all, are
    worth W(d, r, n) = max_m rates[d, r] (1 + W(d + 1, 0, m - 1)) + W(d, r + 1, n - m). It is exact where a measured
    table does not fall with rank, too, where taking the most probable nodes one by one is not. NumPy, on the host;
    O(depth rank size^2).

    Args:
      accept_rates: Probability that the candidate of a rank (columns) at a depth (rows; the first for children of the
        root) is the token, given that its parent is; measured. Those of a row sum to at most 1.
      size: T, nodes with the root; with a cost, the most.
      cost: Time of a pass of T nodes, in any unit. Given, the size from 1 to `size` is chosen that has the most tokens
        per unit of time; the smallest one of equals.

    Raises:
      UsageError: If rates are not probabilities, a row's sum is over 1 by more than rounding, the table has fewer than
        `size` nodes, or a cost is not positive and finite.
    """
    rates = _checked(accept_rates)
    num_depths, num_ranks = rates.shape
    if size < 1:
        raise UsageError(f"size={size} of a tree must be at least 1, the root's.")
    worth = np.full((num_depths + 1, num_ranks + 1, size), -np.inf)
    worth[:, :, 0] = 0  # no node is worth nothing; more nodes than there is room for are impossible
    first = np.zeros(
        (num_depths, num_ranks, size), int
    )  # m: nodes of the first child's subtree, itself one of them
    for depth in reversed(range(num_depths)):
        for rank in reversed(range(num_ranks)):
            for left in range(1, size):
                below = worth[depth + 1, 0, :left]
                own = np.multiply(
                    rates[depth, rank], 1 + below, out=np.full(left, -np.inf), where=below > -np.inf
                )  # a rate of 0 would turn what is impossible into NaN
                total = own + worth[depth, rank + 1, left - 1 :: -1]
                first[depth, rank, left] = 1 + total.argmax()
                worth[depth, rank, left] = total.max()
    if cost is None:
        if worth[0, 0, size - 1] == -np.inf:
            raise UsageError(
                f"size={size} is over the nodes that {num_depths} depths of {num_ranks} ranks have."
            )
        return _grown(first, size)
    times = np.array([cost(nodes) for nodes in range(1, size + 1)], float)
    if not (np.isfinite(times).all() and (times > 0).all()):
        raise UsageError(
            f"cost must be positive and finite for 1 to {size} nodes, not {times.tolist()}."
        )
    return _grown(first, 1 + int(((1 + worth[0, 0]) / times).argmax()))


def _grown(first: np.ndarray, size: int) -> Tree:
    """The tree of the choices of `best_tree`, breadth first: each level is drafted at once."""
    parents, level = [-1], [(0, size - 1)]  # nodes of one depth with the number of those below each
    for choices in first:
        below = []
        for node, left in level:
            rank = 0
            while left:
                taken = int(choices[rank, left])
                below.append((len(parents), taken - 1))
                parents.append(node)
                left, rank = left - taken, rank + 1
        level = below
    return Tree(tuple(parents))


def _checked(accept_rates: np.ndarray) -> np.ndarray:
    rates = np.asarray(accept_rates, float)
    if rates.ndim != 2 or not rates.size:
        raise UsageError(
            f"accept_rates must have the shape [depth, rank], not {list(rates.shape)}."
        )
    if not ((rates >= 0) & (rates <= 1)).all():  # false for NaN
        raise UsageError("accept_rates must be probabilities, from 0 to 1.")
    if (rates.sum(1) > 1 + 1e-6).any():
        raise UsageError(
            "accept_rates of one depth must sum to at most 1: at most one candidate is the token."
        )
    return rates


def allocate(probabilities: Float[Array, "B k"], budget: int | Int[Array, ""]) -> Int[Array, " B"]:
    """Shares a batch's budget of verified tokens among its drafts (TETRIS, arXiv:2502.15197).

    Row b has its first counts[b] drafts verified. Draft j of a row is accepted with the product of its first j
    probabilities, so the counts maximise sum_b sum_{j <= counts[b]} prod_{i <= j} probabilities[b, i]. The products
    fall along a row: the `budget` largest of the table are a prefix of each row, and are the best choice. Pure; one
    sort of B k numbers.

    Where drafts were drawn at random and `rejection` decides, a draft's probability must not depend on the token drawn
    there: leaving out a token *because it was drawn* changes the law of what is kept. Rates by place, or confidences
    known before a draft is drawn, are safe; with `coupled`, or with `drawn="top"`, any are.

    Args:
      probabilities: Each draft's of being accepted if those before it are. Above 1 counts as 1 and below 0 as 0; a row
        that holds NaN or an infinity gets 0.
      budget: Most drafts in all; may be traced. Drafts that are never accepted (product 0) stay out even where some is
        left. Of equals, the lower row's go first.

    Returns:
      counts, int32.

    Raises:
      UsageError: If a budget that is known is negative.
    """
    if isinstance(budget, int) and budget < 0:
        raise UsageError(f"budget={budget} of drafts must be at least 0.")
    whole = jnp.isfinite(probabilities).all(1, keepdims=True)
    clipped = jnp.where(whole, jnp.clip(probabilities, 0, 1), 0)
    products = jnp.cumprod(clipped, axis=1)
    order = jnp.argsort(-products.reshape(-1), stable=True)
    place = jnp.zeros(order.shape, jnp.int32).at[order].set(jnp.arange(order.size, dtype=jnp.int32))
    chosen = (place.reshape(products.shape) < budget) & (products > 0)
    return chosen.sum(1, dtype=jnp.int32)
