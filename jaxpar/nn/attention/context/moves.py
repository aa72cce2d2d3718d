"""What travels between the devices that share a sequence: tables that are printed, counted, and walked hop by hop."""

from typing import NamedTuple

from jaxpar.types import UsageError

__all__ = ["MOVES", "Move", "Send", "Sizes", "move_for"]

MOVES = ("gather", "ring", "two_way", "token_ring", "swap", "swap_ring")


class Send(NamedTuple):
    """One collective of every device.

    Attributes:
      what: "keys" (keys, values and where they are), its halves "low" and "high"; "sums" of their gradients;
        "queries" (in the backward pass with the output, its gradient and its log-sum-exp); "parts", the
        partial states or gradients of queries on their way home; "heads" (queries, keys and values, or their gradients)
        and "outputs", exchanged for tokens; "places" of tokens alone.
      shift: To the device this many further on; None for a collective of all, or of a group ("keys", "places":
        gathered, "sums": summed and scattered, "heads", "outputs": all-to-all).
    """

    what: str
    shift: int | None


class Step(NamedTuple):
    """What is sent before a device attends to what it then holds, and what goes home after it.

    `attends` is False of a last step that only sends.
    """

    sends: tuple[Send, ...] = ()
    returns: tuple[Send, ...] = ()
    attends: bool = True


class Sizes(NamedTuple):
    """Of one device's share: rows B, tokens t, heads H, key heads G, head size K, bytes a number.

    `places` counts what tells of a token where it lies, 4 bytes each: its place, and the number of its document.
    """

    rows: int
    tokens: int
    heads: int
    groups: int
    width: int
    bytes: int
    places: int = 2


class Move(NamedTuple):
    """A schedule of N devices.

    Attributes:
      name: One of `MOVES`.
      shares: N.
      forward: Steps of the forward pass.
      backward: Steps of the backward pass.
      within: Devices of a group, one after the other, that exchange heads for tokens: of "swap" all, of "swap_ring"
        some, of every other move each device alone.
    """

    name: str
    shares: int
    forward: tuple[Step, ...]
    backward: tuple[Step, ...]
    within: int = 1

    def sends(self, backward: bool = False) -> list[Send]:
        """Returns all that is sent in a pass, in order."""
        steps = self.backward if backward else self.forward
        return [send for step in steps for send in (*step.sends, *step.returns)]

    def bytes(self, sizes: Sizes, backward: bool = False) -> dict[str, float]:
        """Returns the bytes that a device sends in a pass over its links: "up", "down" and by collectives of "all".

        A shift of s is counted on the link that it leaves by; sums travel in float32 at least.
        """
        out = {"up": 0.0, "down": 0.0, "all": 0.0}
        for send in self.sends(backward):
            size = self.share(send, sizes, backward)
            if send.shift is None:
                is_exchanged = send.what in (
                    "heads",
                    "outputs",
                )  # a share stays, the others go to one device each
                out["all"] += size * (self.members - 1) / (self.members if is_exchanged else 1)
            else:
                out["up" if send.shift > 0 else "down"] += size
        return out

    @property
    def holds(self) -> tuple[str, ...]:
        """What a device has of all tokens at the same time, named as what is sent; of every other move nothing.

        Keys, values and the sums of their gradients in all their heads, or queries, keys, values and outputs in its
        share of the heads.
        """
        return {"gather": ("keys", "sums"), "swap": ("heads", "outputs")}.get(self.name, ())

    @property
    def members(self) -> int:
        """Devices of a collective of all, or of a group."""
        return self.shares if self.within == 1 else self.within

    def share(self, send: Send, sizes: Sizes, backward: bool = False) -> float:
        """Returns the bytes of what one device has of a send; what hops from group to group was exchanged before."""
        if send.shift is not None:
            m = self.within
            sizes = sizes._replace(
                tokens=sizes.tokens * m, heads=sizes.heads // m, groups=sizes.groups // m
            )
        return _bytes(send.what, sizes, backward)

    def __str__(self) -> str:
        """Returns a line a step: what is sent, by how many devices on, and what goes home."""
        lines = [
            f"{self.name} over {self.shares} devices, {' and '.join(self.holds) or 'none'} of all tokens on one"
        ]
        for name, steps in (("forward", self.forward), ("backward", self.backward)):
            for number, step in enumerate(steps):
                words = [
                    f"{what} {'to all' if shift is None else f'{shift:+d}'}"
                    for what, shift in step.sends
                ]
                words += ["attend"] * step.attends
                words += [
                    f"{what} {'to all' if shift is None else f'{shift:+d}'}"
                    for what, shift in step.returns
                ]
                lines.append(f"  {name} {number}: {', '.join(words)}")
        return "\n".join(lines)


def _bytes(what: str, sizes: Sizes, backward: bool) -> float:
    """Bytes of one device's share of what is sent, with what tells where tokens lie."""
    tokens = sizes.rows * sizes.tokens
    query, key = sizes.heads * sizes.width, sizes.groups * sizes.width
    wide, places = max(4, sizes.bytes), 4 * sizes.places  # of a sum; of a token
    known = {
        "keys": tokens * (2 * key * sizes.bytes + places),
        "sums": tokens * 2 * key * wide,
        "queries": tokens
        * (
            (3 if backward else 1) * query * sizes.bytes
            + (sizes.heads * wide if backward else 0)
            + places
        ),
        "parts": tokens * (query + (0 if backward else 2 * sizes.heads)) * wide,
        "heads": tokens * (query + 2 * key) * sizes.bytes,
        "outputs": tokens * query * sizes.bytes,
        "places": tokens * places,
    }
    if what.endswith(("low", "high")):
        return known["sums" if what.startswith("sums") else "keys"] / 2
    return known[what]


def move_for(name: str, shares: int, within: int = 1) -> Move:
    """Returns the table of a move for N devices.

    Sources: gather and its reduce-scatter as in Llama 3 (arXiv:2407.21783, section 3.3.2); ring: arXiv:2105.13120 and
    arXiv:2310.01889; token_ring: arXiv:2412.20501; swap: arXiv:2309.14509; swap_ring: arXiv:2405.07719. two_way sends
    each half of the keys one way round, so that both directions of every link are used.

    Args:
      name: One of `MOVES`.
      shares: N.
      within: Devices of a group of "swap_ring", which exchange heads for tokens; rings go from group to group.

    Raises:
      UsageError: If the name is unknown, or N devices do not fall into such groups.
    """
    if name not in MOVES:
        raise UsageError(f"context={name!r} is unknown; legal are {', '.join(MOVES)}.")
    if within < 1 or shares % within or (within > 1 and name != "swap_ring"):
        raise UsageError(
            f"context={name} over {shares} has no groups of {within}; swap_ring has, of a divisor of {shares}."
        )
    hop = Step((Send("keys", within),))
    back = Step((Send("keys", within), Send("sums", within)))
    home = Step((Send("sums", within),), attends=False)
    halves = (Send("low", 1), Send("high", -1))
    sums = (Send("sums low", 1), Send("sums high", -1))
    enter = Step((Send("heads", None), Send("places", None)))
    outputs = Send("outputs", None)
    leave = Step((Send("heads", None),), attends=False)
    hops = shares // within - 1
    tables = {
        "gather": (
            (Step((Send("keys", None),)),),
            (Step((Send("keys", None),), (Send("sums", None),)),),
        ),
        "ring": ((Step(), *(hop,) * hops), (Step(), *(back,) * hops, home)),
        "two_way": (
            (Step(), *(Step(halves),) * hops),
            (Step(), *(Step((*halves, *sums)),) * hops, Step(sums, attends=False)),
        ),
        "token_ring": 2
        * (
            (
                Step(),
                *(
                    Step((Send("queries", 1),), (Send("parts", -turn),))
                    for turn in range(1, shares)
                ),
            ),
        ),
        "swap": ((enter, Step((outputs,), attends=False)), (Step((outputs,)), leave)),
        "swap_ring": (
            (enter, *(hop,) * hops, Step((outputs,), attends=False)),
            (Step((outputs,)), *(back,) * hops, *(home,) * (hops > 0), leave),
        ),
    }
    forward, backward = tables[name]
    if name == "swap":
        within = shares
    return Move(name=name, shares=shares, forward=forward, backward=backward, within=within)
