"""Attention of a mixer whose sequence devices share: by which move, in which order, and what crosses between them."""

import dataclasses
import math
from collections.abc import Iterator

from jaxtyping import Array, Float

from jaxpar.fields import OneOf, check_fields, field
from jaxpar.mesh import mesh_axes, num_shares
from jaxpar.nn.attention import Attention, WholeSequence
from jaxpar.nn.attention.context.moves import MOVES, Move, Send, Sizes, move_for
from jaxpar.nn.attention.context.token_orders import ORDERS, Order
from jaxpar.nn.attention.context.walk import context_attention, is_by_table
from jaxpar.nn.mixer import ActivationSizes, Context
from jaxpar.nn.position import Alibi
from jaxpar.stage import in_stage
from jaxpar.transfers import Transfer
from jaxpar.types import UsageError

__all__ = ["CONTEXT_MOVES", "CONTEXT_ORDERS", "SplitSequence", "choose_move"]

CONTEXT_MOVES, CONTEXT_ORDERS = ("auto", *MOVES), ("auto", *ORDERS)
WHOLE = WholeSequence()

# Arrays that a send is made of, beside those of places and documents; forward, backward.
ARRAYS = {
    "keys": (2, 2),
    "sums": (2, 2),
    "queries": (1, 4),
    "parts": (3, 1),
    "heads": (3, 3),
    "outputs": (1, 1),
    "places": (0, 0),
}


def choose_move(sizes: Sizes, shares: int) -> Move:
    """Returns the move whose busiest link carries fewest bytes, both passes of it together.

    A device has a link up and one down, which share evenly what it sends in collectives of all. "gather" is not among
    them, since it alone holds all keys; "swap" is where the key heads of a device divide over the devices. Of equal
    ones the first in `MOVES` is taken. In a stage of a pipeline, where rings are not safe, it is "swap", else "gather".

    Args:
      sizes: Of a device's share.
      shares: N.
    """

    def busiest(move: Move) -> float:
        passes = [move.bytes(sizes, backward) for backward in (False, True)]
        up, down, every = (sum(sent[link] for sent in passes) for link in ("up", "down", "all"))
        return max(up, down) + every / 2

    legal = [
        name
        for name in MOVES
        if name != "gather" and (name != "swap" or sizes.groups % shares == 0)
    ]
    if in_stage():
        legal = ["swap"] if "swap" in legal else ["gather"]
    return min((_move(name, sizes, shares) for name in legal), key=busiest)


def _move(name: str, sizes: Sizes, shares: int) -> Move:
    """The table that `context_attention` walks."""
    return move_for(name, shares, math.gcd(sizes.groups, shares) if name == "swap_ring" else 1)


@dataclasses.dataclass(frozen=True)
class SplitSequence:
    """Attention for `jaxpar.nn.attention.Attention.attend` that leaves tokens where they are, by `context_attention`.

    Tokens of which places are given, as `in_order` gives them, lie in the order that this says: half of the products
    are left out where it is "zigzag", and kernels are taken, but with impl="xla". Of others who sees whom is decided by
    their positions, which travel with the keys and must rise along each document: they may lie in any order.

    Dropout on attention weights, slopes, caps, masks and kernels by name need whole rows in turn: with move
    "auto" or "gather" and a contiguous order the sequence is gathered for them, as by `WholeSequence`; with others they
    are refused.

    Attributes:
      move: What travels, one of `MOVES`; "auto" takes `choose_move`.
      order: In which order the tokens lie, one of `ORDERS`; "auto" takes "zigzag" where attention is causal and T is a
        multiple of 2 N, else "contiguous".
    """

    move: str = field("auto", OneOf(CONTEXT_MOVES))
    order: str = field("auto", OneOf(CONTEXT_ORDERS))

    __post_init__ = check_fields

    def order_of(self, mixer: Attention, length: int) -> Order:
        """Returns the order of T tokens on the ambient mesh."""
        if self.order != "auto":
            return Order(self.order)
        is_even = length % (2 * num_shares(*mesh_axes("seq_layer"))) == 0
        return Order(
            "zigzag" if is_even and mixer.causal and not _needs_whole_rows(mixer) else "contiguous"
        )

    def move_of(self, mixer: Attention, width: int) -> Move:
        """Returns the move on the ambient mesh, for numbers of `width` bytes."""
        shares, sizes = num_shares(*mesh_axes("seq_layer")), _sizes(mixer, 1, width)
        return (
            choose_move(sizes, shares) if self.move == "auto" else _move(self.move, sizes, shares)
        )

    def __call__(
        self,
        mixer: Attention,
        q: Float[Array, "B T H K"],
        k: Float[Array, "B T G K"],
        v: Float[Array, "B T G K"],
        context: Context,
    ) -> Float[Array, "B T H K"]:
        """Returns the outputs, split as the queries are.

        Raises:
          UsageError: If what needs whole rows is asked of another move or order, or if the move cannot be made.
        """
        is_masked = "a mask of its own" if context.visible is not None else ""
        if reason := is_masked or _needs_whole_rows(mixer, drops=context.key is not None):
            order = self.order_of(mixer, q.shape[1]).name
            if order != "contiguous" or self.move not in ("auto", "gather"):
                raise UsageError(
                    f"attention with {reason} needs whole rows, whose tokens lie in turn, but a mesh splits them by "
                    f"context={self.move} in a {order} order; take context=gather and context_order=contiguous."
                )
            return WHOLE(mixer, q, k, v, context)
        is_promised = context.places is not None and mixer.impl != "xla"
        return context_attention(
            q, k, v, context.positions if context.places is None else context.places, context.segments,
            visible=mixer.visible, move=self.move_of(mixer, q.dtype.itemsize).name,
            order=self.order_of(mixer, q.shape[1]).name if is_promised else None,
        )  # fmt: skip

    def sent(self, mixer: Attention, sizes: ActivationSizes) -> dict[str, float]:
        """Returns the bytes that a device sends in a training step: `Move.bytes` of both passes of all layers.

        By direction, "up", "down" and by collectives of "all"; those of the forward pass as often as it is made. Empty
        where no mesh axis splits the sequence, and where it is gathered for what needs whole rows.
        """
        if not mesh_axes("seq_layer") or _needs_whole_rows(mixer):
            return {}
        move = self.move_of(mixer, sizes.width)
        share = self._share(mixer, sizes, move)
        forward, backward = (move.bytes(share, is_back) for is_back in (False, True))
        return {way: sizes.layers * (sizes.again * forward[way] + backward[way]) for way in forward}

    def _share(self, mixer: Attention, sizes: ActivationSizes, move: Move) -> Sizes:
        """Of one device; where the order says who sees whom, places of packed rows are not sent."""
        share = _sizes(mixer, int(sizes.tokens / move.shares), sizes.width)
        order = self.order_of(mixer, int(sizes.tokens / sizes.rows)).name
        is_told = mixer.impl != "xla" and is_by_table(mixer.visible, order, True)
        return share._replace(places=1 if is_told else share.places)

    def transfers(self, mixer: Attention, sizes: ActivationSizes) -> Iterator[Transfer]:
        """Declares every send of the move's table: those of the forward pass as often as it is made."""
        axes = mesh_axes("seq_layer")
        if not axes or _needs_whole_rows(mixer):
            yield from WHOLE.transfers(mixer, sizes)
            return
        move = self.move_of(mixer, sizes.width)
        share = self._share(mixer, sizes, move)
        for backward, again in ((False, sizes.again), (True, 1)):
            for send in move.sends(backward):
                kind, arrays, size = _collective(send, move, share, backward)
                times = sizes.layers * again
                # Of a part of an axis, `jaxpar.verify` knows no name.
                over = axes if send.shift is not None or move.members == move.shares else ("?",)
                why = f"{send.what} of attention, {'backward' if backward else 'forward'}"
                yield Transfer(kind, over, times * arrays, int(times * size), why)


def _collective(send: Send, move: Move, share: Sizes, backward: bool) -> tuple[str, int, float]:
    """The kind of a send as compiled, its arrays, and their bytes as they are whole on one device."""
    arrays = ARRAYS[
        "sums"
        if send.what.startswith("sums")
        else "keys"
        if send.what in ("low", "high")
        else send.what
    ]
    knows = send.what in ("keys", "low", "high", "queries", "places")
    count, size = arrays[backward] + knows * share.places, move.share(send, share, backward)
    if send.shift is not None:
        return "exchange", count, size
    if send.what in ("heads", "outputs"):  # compilers write it as an array for each of the devices
        return "exchange", count * move.members, size
    return "sum" if send.what == "sums" else "gather", count, size * move.members


def _sizes(mixer: Attention, tokens: int, width: int) -> Sizes:
    """Of one device's share, of which `tokens` are all of its rows'."""
    shares = num_shares(*mesh_axes("heads"))
    is_split_alike = mesh_axes("kv_heads") == mesh_axes(
        "heads"
    )  # else each query head has a copy of its keys
    groups = mixer.num_kv_heads if is_split_alike else mixer.num_heads
    return Sizes(1, tokens, mixer.num_heads // shares, groups // shares, mixer.head_dim, width)


def _needs_whole_rows(mixer: Attention, drops: bool = True) -> str:
    """What of a mixer needs whole rows, in words; empty if nothing does."""
    if mixer.dropout and drops:
        return f"dropout={mixer.dropout:g} on its weights"
    if isinstance(mixer.positions, Alibi):
        return "slopes over the distance"
    if mixer.score_cap:
        return f"score_cap={mixer.score_cap:g}"
    return "" if mixer.impl in ("auto", "xla") else f"the kernel attention={mixer.impl}"
