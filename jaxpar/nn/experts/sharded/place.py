"""Which device holds which experts: of consecutive layers, those that tokens take one after the other lie together.

A placement changes no output: it is an order of the experts, in their weights and in the router's columns alike.
"""

import dataclasses
import itertools
import math
from collections.abc import Iterator

import jax
import jax.numpy as jnp
import numpy as np
import scipy  # its parts are loaded when they are first used: together they take a seventh of the library's start
from jaxtyping import Array, Float, Int

from jaxpar.nn.auxiliary import Aux
from jaxpar.nn.experts import Experts, route
from jaxpar.nn.leaf import Leaf
from jaxpar.nn.mixer import ActivationSizes, Context
from jaxpar.nn.norm import wide_dtype
from jaxpar.nn.stack import Stack
from jaxpar.transfers import Transfer
from jaxpar.types import PyTree, UsageError

__all__ = [
    "chosen_experts",
    "count_crossings",
    "count_transitions",
    "place_experts",
    "reorder_experts",
]

MOST_PLACEMENTS = 3000
"""Of a layer, which are all compared; the square of it is a table of 72 MB."""


def chosen_experts(
    stack: Stack, params: PyTree, x: Float[Array, "B T D"], **options
) -> Int[Array, "L B T k"]:
    """Returns the experts that each token takes in each layer, best first.

    Args:
      stack: Whose mlp is `Experts`.
      params: Its parameters.
      x: Residual stream.
      **options: Keyword arguments of `Stack.apply`, such as `info`.

    Raises:
      UsageError: If the stack's mlp is another.
    """
    recorder = _Recorder(_experts_of(stack), [])
    dataclasses.replace(stack, mlp=recorder, scan_layers=False, remat="none").apply(
        params, x, **options
    )
    return jnp.stack(recorder.chosen)


@dataclasses.dataclass(frozen=True)
class _Recorder:
    """Experts that remember what tokens chose, layer after layer of one trace."""

    experts: Experts
    chosen: list[Array] = dataclasses.field(compare=False)

    @property
    def num_inputs(self) -> int:
        return self.experts.num_inputs

    def leaves(self, embed_dim: int, std: float, out_std: float) -> dict[str, Leaf]:
        return self.experts.leaves(embed_dim, std, out_std)

    def transfers(self, sizes: ActivationSizes) -> Iterator[Transfer]:
        return self.experts.transfers(sizes)

    def apply(self, params: dict, x: Array, context: Context) -> tuple[Array, Aux]:
        router, how = params["w_router"].astype(x.dtype), self.experts
        logits = jnp.einsum(
            "btd,de->bte", x, router, precision="highest", preferred_element_type=wide_dtype(x)
        )  # as the experts do
        routing = route(
            logits, how.experts_per_token, scores=how.scores, bias=params.get("b_router")
        )
        self.chosen.append(routing.expert)
        return self.experts.apply(params, x, context)


def count_transitions(
    expert: Int[np.ndarray, "L *N k"], num_experts: int
) -> Int[np.ndarray, "M E E"]:
    """Counts of how many tokens an expert of a layer and one of the next are both chosen, for the M = L - 1 pairs."""
    chosen = np.asarray(expert)
    flat = chosen.reshape(len(chosen), -1, chosen.shape[-1])
    pairs = flat[:-1, :, :, None] * num_experts + flat[1:, :, None, :]
    counts = [np.bincount(pair.reshape(-1), minlength=num_experts**2) for pair in pairs]
    return np.array(counts, int).reshape(-1, num_experts, num_experts)


def count_crossings(counts: Int[np.ndarray, "M E E"], placement: Int[np.ndarray, "L E"]) -> int:
    """Counts the transitions between experts that lie on different devices."""
    placement = np.asarray(placement)
    is_apart = placement[:-1, :, None] != placement[1:, None, :]
    return int(np.sum(np.asarray(counts) * is_apart))


def place_experts(
    counts: Int[np.ndarray, "M E E"], shares: int, *, starts: int = 32, seed: int = 0
) -> Int[np.ndarray, "L E"]:
    """Places the experts of each layer on N devices, equally many on each, so that few transitions cross (ExFlow).

    Where a layer has at most 3,000 placements (8 experts on up to 4 devices, 12 on 2) the best of all is found: layers
    form a chain, along which the best of what came before is kept for each placement. Of more experts, each layer in
    turn is placed as is best for its neighbours, exactly, as an assignment, until nothing improves; the best of several
    starts is taken, which need not be the best of all. Crossings are counted between consecutive layers and nothing
    else: loads, links of several speeds and where a token lies before the first layer do not count. The source is
    Exploiting Inter-Layer Expert Affinity (arXiv:2401.08383), whose integer program has the same objective.

    Args:
      counts: As from `count_transitions`.
      shares: N.
      starts: Of the search, the first from experts in their order.
      seed: Of the other starts.

    Returns:
      The device of each expert of each layer.

    Raises:
      UsageError: If the experts do not divide over the devices.
    """
    num_experts = counts.shape[1]
    if num_experts % shares:
        raise UsageError(
            f"{num_experts} experts do not divide over {shares} devices; legal are divisors of {num_experts}."
        )
    each = num_experts // shares
    if math.factorial(num_experts) // math.factorial(each) ** shares <= MOST_PLACEMENTS:
        return _best_chain(counts, shares)
    rng, first = np.random.default_rng(seed), np.repeat(np.arange(shares), each)
    found = []
    for start in range(starts):
        placement = np.array(
            [rng.permutation(first) if start else first for _ in range(len(counts) + 1)]
        )
        found.append(_descend(counts, placement, shares))
    return min(found, key=lambda placement: count_crossings(counts, placement))


def _best_chain(counts: np.ndarray, shares: int) -> np.ndarray:
    """The best placement of all, by dynamic programming over the layers."""
    num_experts = counts.shape[1]
    first = itertools.chain.from_iterable(
        itertools.repeat(d, num_experts // shares) for d in range(shares)
    )
    every = np.array(list(_arrangements(list(first))))
    where = np.float64(every[:, :, None] == np.arange(shares))  # [A, E, N]
    best, before = np.zeros(len(every)), []
    for pair in counts:  # the most that stays, by the placement of the layer reached
        stays = (
            np.einsum("aed,ef->afd", where, pair).reshape(len(every), -1)
            @ where.reshape(len(every), -1).T
        )
        total = best[:, None] + stays
        before.append(total.argmax(0))
        best = total.max(0)
    chain = [int(best.argmax())]
    for back in reversed(before):
        chain.append(int(back[chain[-1]]))
    return every[chain[::-1]]


def _arrangements(devices: list[int]) -> Iterator[list[int]]:
    """All orders of a list with repeats, each once."""
    if not devices:
        yield []
    for device in sorted(set(devices)):
        rest = devices.copy()
        rest.remove(device)
        yield from ([device, *others] for others in _arrangements(rest))


def _descend(counts: np.ndarray, placement: np.ndarray, shares: int) -> np.ndarray:
    """Places layer after layer as is best for its neighbours, until that changes nothing."""
    placement = placement.copy()
    columns = np.repeat(np.arange(shares), placement.shape[1] // shares)
    best = count_crossings(counts, placement)
    while True:
        for layer in range(len(placement)):
            gain = np.zeros((placement.shape[1], shares))
            if layer:
                gain += counts[layer - 1].T @ np.eye(shares)[placement[layer - 1]]
            if layer < len(counts):
                gain += counts[layer] @ np.eye(shares)[placement[layer + 1]]
            _, chosen = scipy.optimize.linear_sum_assignment(gain[:, columns], maximize=True)
            placement[layer] = columns[chosen]
        now = count_crossings(counts, placement)
        if now >= best:
            return placement
        best = now


def reorder_experts(stack: Stack, params: PyTree, placement: Int[np.ndarray, "L E"]) -> PyTree:
    """Returns the parameters of a model with its experts in the order of their devices: the outputs are the same.

    Experts of one device keep their order. Where two logits are equal the router takes the first of them, which may
    then be another expert. Moments of an optimizer are trees of the same form, and go the same way.

    Args:
      stack: Whose mlp is `Experts`.
      params: What has "layers", each leaf [L, ...]: of the stack, or of a language model.
      placement: Device of each expert.

    Raises:
      UsageError: If the stack's mlp is another, or the placement is not of its experts.
    """
    experts = _experts_of(stack)
    if stack.period > 1:
        raise UsageError("experts of a hybrid are not placed; give the stack one mixer.")
    if np.shape(placement) != (stack.num_layers, experts.num_experts):
        raise UsageError(
            f"a placement {np.shape(placement)} is not of {stack.num_layers} layers of {experts.num_experts} experts."
        )
    order = jnp.asarray(np.argsort(placement, axis=1, kind="stable"))
    layers = dict(params["layers"])
    for name, leaf in experts.leaves(stack.embed_dim, 1.0, 1.0).items():
        if "experts" in leaf.axes or name in ("w_router", "b_router"):
            axis = leaf.axes.index("experts") if "experts" in leaf.axes else len(leaf.axes) - 1
            layers[name] = jax.vmap(lambda w, order, axis=axis: jnp.take(w, order, axis))(
                layers[name], order
            )
    return params | {"layers": layers}


def _experts_of(stack: Stack) -> Experts:
    if not isinstance(stack.mlp, Experts):
        raise UsageError(
            f"the stack has {type(stack.mlp).__name__} where Experts would be; there is nothing to place."
        )
    return stack.mlp
