"""Attention over a split sequence: a table of moves is walked, forward for the output and again for the gradient.

Every device keeps the sums of its own queries, (maximum, sum, weighted values), and adds a piece of the keys at a time.
The backward pass starts from the *global* output and log-sum-exp, walks the same keys once more and keeps none of them.
"""

import functools
import itertools
import math
from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Float, Int

from jaxpar.mesh import constrain, local, mesh_axes, num_shares
from jaxpar.nn.attention import Visible, finish, merge
from jaxpar.nn.attention.context._partial import ByPlaces, ByTable, KeyPiece, QueryPiece
from jaxpar.nn.attention.context.moves import Move, Send, Step, move_for
from jaxpar.nn.attention.context.token_orders import Order
from jaxpar.nn.attention.gradient import Done
from jaxpar.nn.attention.visibility import Where
from jaxpar.scan.monoid import LogSumExp
from jaxpar.stage import refuse_in_stage
from jaxpar.types import UsageError, concrete_values

__all__ = ["context_attention"]

CAUSAL = Visible()
ZIGZAG = Order("zigzag")
QUERIES = ("batch", "seq_layer", "heads", "head_dim")
KEYS = ("batch", "seq_layer", "kv_heads", "head_dim")
TOKENS = ("batch", "seq_layer")


class _Promise(NamedTuple):
    """Where tokens are said to lie: without a rule anywhere, but that none of them is padding."""

    order: Order
    shares: int
    causal: bool

    def is_known_kept(self, positions: Array) -> bool:
        """Whether the positions are known to keep it, else they are traced; refuses those that do not."""
        values = concrete_values(positions)
        if values is None:
            return False
        known = values[0]
        places = self.order.places(known.shape[1], self.shares)[None]
        if len(wrong := np.argwhere(known != places if self.causal else known < 0)):
            row, index = wrong[0]
            legal = f"{places[0, index]}" if self.causal else "no padding"
            raise UsageError(
                f"order={self.order.name} of {known.shape[1]} tokens over context={self.shares} has {legal} where row "
                f"{row} has position {known[row, index]}, at index {index}; put arrays in it by Order.split, or give "
                f"order=None."
            )
        return True

    def kept(self, v: Array, *positions: Array, device: Array) -> Array:
        """A device's values, NaN of tokens whose positions, where there are any, break it: so is what sees them.

        Values, since NaN in keys makes a sum that is not positive, and 0 is put out where nothing is seen. Added, so
        that gradients pass as they are.
        """
        for given in positions:
            parts = self.shares * self.order.parts
            mine = jnp.asarray(
                self.order.places(parts, self.shares).reshape(self.shares, -1), given.dtype
            )[device]
            size = v.shape[1] // self.order.parts
            places = (size * mine[:, None] + jnp.arange(size, dtype=given.dtype)[None]).reshape(
                1, -1
            )
            is_kept = given == places if self.causal else given >= 0
            v = v + jnp.where(is_kept, 0, jnp.nan).astype(v.dtype)[:, :, None, None]
        return v


class _How(NamedTuple):
    """What does not change along a walk."""

    move: Move
    axis: str
    rule: ByPlaces | ByTable
    folds: bool  # whether what a group of devices holds must be put in the order of places

    @property
    def ring(self) -> int:
        """Devices, or groups of them, that keys or queries go round."""
        return self.move.shares // self.move.within

    def device(self):
        """Which of the ring this device is."""
        return lax.axis_index(self.axis) // self.move.within

    def groups(self) -> list[list[int]]:
        """The devices that exchange heads for tokens."""
        size = self.move.within
        return [list(range(first, first + size)) for first in range(0, self.move.shares, size)]

    def send(self, tree, shift: int | None):
        """Returns what the device `shift` places before this one held."""
        assert shift is not None  # of a collective of all
        refuse_in_stage(
            f"context={self.move.name}", "take context=gather, or swap where the key heads divide"
        )
        size = self.move.shares
        return lax.ppermute(tree, self.axis, [(i, (i + shift) % size) for i in range(size)])


def context_attention(
    q: Float[Array, "B T H K"],
    k: Float[Array, "B T G K"],
    v: Float[Array, "B T G K"],
    positions: Int[Array, "B T"],
    segments: Int[Array, "B T"] | None = None,
    *,
    visible: Visible = CAUSAL,
    move: str = "ring",
    order: str | None = None,
) -> Float[Array, "B T H K"]:
    """Computes attention of tokens that lie split over the mesh axis of "seq_layer", in any order.

    Equal to `jaxpar.nn.attention.attention` of the whole sequence, in value and gradient, up to the order of sums.

    Args:
      q: Queries, rotated to their positions.
      k: Keys, likewise; G divides H.
      v: Values.
      positions: Places in the sequence; who sees whom is decided by these, never by where a token lies. Negative ones
        are of padding: they see nothing, are seen by nobody, and give 0.
      segments: Numbers of documents: tokens of another one are not seen.
      visible: The rule.
      move: What travels: one of `jaxpar.nn.attention.context.MOVES`.
      order: The order in which the tokens lie, one of `ORDERS`, where the caller promises it and that none is padding.
        A table then says who sees whom, under a causal rule without a window in "contiguous" and "zigzag" order, and
        without a rule and documents in any; kernels are taken, cuDNN's of documents too, whose numbers must rise for
        that. Positions that contradict it are refused, or where they are traced make outputs NaN.
        None: positions decide.

    Returns:
      Outputs, split as the queries are; NaN of whatever sees a token that is not where a promised order has it.

    Cost: 4 B H T^2 K operations over all devices, with order="zigzag" (2 + 1/N) B H T^2 K, of kernels 2; memory of a
    device O(B T/N H K) but for "gather", which holds all keys, "swap", which holds H/N heads of all tokens, and
    "swap_ring", which holds a group's tokens in its share of the heads. What is sent: `print(move_for(move, N))`.

    Raises:
      UsageError: If T does not divide over the axis or as the order needs, "swap" has fewer key heads than devices, or
        positions that are known break the promised order.
    """
    shared = mesh_axes("seq_layer")
    if order is not None:
        Order(order).places(q.shape[1], num_shares(*shared))  # refuses what does not divide
    if not shared:
        return _whole(q, k, v, positions, segments, visible)
    axis, *others = shared
    if others:
        raise UsageError(
            f"attention over a sequence split over {' and '.join(shared)}; give seq_layer one mesh axis."
        )
    groups = k.shape[2] // max(1, num_shares(*mesh_axes("kv_heads")))
    shares = num_shares(axis)
    how = _how_to(move, axis, shares, groups, visible, order, segments is not None)
    of_tokens = {"positions": positions}
    if segments is not None:
        of_tokens["segments"] = segments
    promise = None
    # A table needs no positions: they are compared, and sent nowhere.
    if order is not None and isinstance(how.rule, ByTable):
        promise = _Promise(order=Order(order), shares=shares, causal=visible.causal)
        if promise.is_known_kept(positions):
            del of_tokens["positions"]
    names = KEYS
    # Each device's queries need their own copies of the keys where heads are split in another way.
    if mesh_axes("kv_heads") != mesh_axes("heads"):
        copies = q.shape[2] // k.shape[2]
        k = jnp.repeat(k, copies, axis=2)
        v = jnp.repeat(v, copies, axis=2)
        names = QUERIES
    q = constrain(q, *QUERIES)
    k = constrain(k, *names)
    v = constrain(v, *names)

    def block(q, k, v, *arrays):
        own = dict(zip(of_tokens, arrays, strict=True))
        where = Where(positions=own.get("positions"), segments=own.get("segments"))
        if promise is None:
            return _attention(how, q, k, v, where)
        device = lax.axis_index(axis)
        if where.positions is not None:
            v = promise.kept(v, where.positions, device=device)
        return _attention(how, q, k, v, Where(segments=where.segments))

    axes = [QUERIES, names, names, *[TOKENS] * len(of_tokens)]
    out = local(block, axes, QUERIES, check=False)(q, k, v, *of_tokens.values())
    return constrain(out, *QUERIES)


def _how_to(
    move: str,
    axis: str,
    shares: int,
    groups: int,
    visible: Visible,
    order: str | None,
    has_documents: bool,
) -> _How:
    """A move's table and rule for N devices that have `groups` key heads each."""
    table = move_for(move, shares, math.gcd(groups, shares) if move == "swap_ring" else 1)
    if move == "swap" and groups % shares:
        raise UsageError(
            f"context=swap exchanges heads for tokens: the {groups} key heads of a device do not divide over "
            f"context={shares}; take context=swap_ring, which exchanges those there are, or context=ring."
        )
    rule = _rule(visible, order, has_documents, shares // table.within)
    folds = table.within > 1 and order == "zigzag" and isinstance(rule, ByTable) and visible.causal
    return _How(move=table, axis=axis, rule=rule, folds=folds)


def is_by_table(visible: Visible, order: str | None, has_documents: bool) -> bool:
    """Whether the order says who sees whom, but for documents."""
    return not (
        order is None or visible.window or (order == "striped" if visible.causal else has_documents)
    )


def _rule(
    visible: Visible, order: str | None, has_documents: bool, ring: int
) -> ByPlaces | ByTable:
    """A table where the order is known and its pairs of parts are full, causal or empty."""
    if order is None or not is_by_table(visible, order, has_documents):
        return ByPlaces(visible)
    return ByTable(
        order if ring > 1 else "contiguous", ring, visible.causal
    )  # one group has it all, in order


def _whole(q, k, v, positions, segments, visible: Visible) -> Array:
    """The same on one device."""
    where = Where(positions=positions, segments=segments)
    queries = QueryPiece(q=q, where=where)
    keys = KeyPiece(k=k, v=v, where=where)
    return finish(ByPlaces(visible).attend(None, queries, keys, 0, 0)).astype(q.dtype)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _attention(how: _How, q: Array, k: Array, v: Array, where: Where) -> Array:
    return _forward(how, q, k, v, where)[0]


def _forward(how: _How, q: Array, k: Array, v: Array, where: Where):
    # Else XLA finds that places are the same in every layer, and sends them beside whatever else the program sends.
    q, k, v, where = lax.optimization_barrier((q, k, v, where))
    if swaps := how.move.within > 1:
        q, k, v = (_swapped(how, x) for x in (q, k, v))
        where = jax.tree.map(functools.partial(_together, how), _after(where, k))
    walks = {"gather": _gathered, "token_ring": _queries_travel}
    walk = walks.get(how.move.name, _keys_travel)
    state = walk(how, QueryPiece(q=q, where=where), KeyPiece(k=k, v=v, where=where))
    out = finish(state).astype(q.dtype)
    # What was exchanged is kept for the backward pass.
    return _swapped_back(how, out) if swaps else out, (q, k, v, where, out, state.log_sum)


def _backward(how: _How, kept: tuple, g: Array):
    # Else XLA finds what travels to be what travelled before, and keeps all of it from one pass to the other.
    q, k, v, where, out, log_sum = lax.optimization_barrier(kept)
    swaps = how.move.within > 1
    walks = {"gather": _gathered_back, "token_ring": _queries_back}
    g = _swapped(how, g) if swaps else g
    done = Done(out=out, log_sum=log_sum, gradient=g)
    walk = walks.get(how.move.name, _keys_back)
    dq, sums = walk(how, QueryPiece(q=q, where=where), KeyPiece(k=k, v=v, where=where), done)
    grads = (grad.astype(x.dtype) for grad, x in zip((dq, *sums), (q, k, v), strict=True))
    if swaps:
        grads = (_swapped_back(how, grad) for grad in grads)
    return *grads, jax.tree.map(lambda _: None, where)


_attention.defvjp(_forward, _backward)


def _swapped(how: _How, x: Array) -> Array:
    """Some heads of all tokens of a group, in place of all heads of some; zigzag parts in the order of places."""
    x = lax.all_to_all(x, how.axis, 2, 1, tiled=True, axis_index_groups=how.groups())
    return _in_parts(how, x, ZIGZAG.join) if how.folds else x


def _together(how: _How, x: Array) -> Array:
    """What a group's devices have, [B, t], in the order in which `_swapped` puts tokens."""
    x = lax.all_gather(x, how.axis, axis=1, tiled=True, axis_index_groups=how.groups())
    return _in_parts(how, x, ZIGZAG.join) if how.folds else x


def _swapped_back(how: _How, x: Array) -> Array:
    x = _in_parts(how, x, ZIGZAG.split) if how.folds else x
    return lax.all_to_all(x, how.axis, 1, 2, tiled=True, axis_index_groups=how.groups())


def _in_parts(how: _How, x: Array, move: Callable[[Array, int], Array]) -> Array:
    """Moves the parts that a group's devices hold, two each: in order they are those of a zigzag over groups."""
    parts = x.reshape(x.shape[0], 2 * how.move.within, -1, *x.shape[2:])
    return move(parts, how.move.within).reshape(x.shape)


def _pieces(how: _How, tree) -> dict:
    """What travels by the table's names: all keys, or of each part a half this way and a half the other."""
    if how.move.name != "two_way":
        return {"keys": tree}
    number = how.rule.parts

    def halves(x):
        parts = x.reshape(x.shape[0], number, -1, *x.shape[2:])
        middle = parts.shape[2] // 2
        cut = parts[:, :, :middle], parts[:, :, middle:]
        return (half.reshape(x.shape[0], number * half.shape[2], *x.shape[2:]) for half in cut)

    return {
        name: jax.tree.map(lambda x, i=i: tuple(halves(x))[i], tree)
        for i, name in enumerate(("low", "high"))
    }


def _whole_pieces(how: _How, pieces: dict):
    """What `_pieces` cut."""
    if how.move.name != "two_way":
        return pieces["keys"]

    def joined(*halves):
        number = how.rule.parts
        halves = [x.reshape(x.shape[0], number, x.shape[1] // number, *x.shape[2:]) for x in halves]
        x = jnp.concatenate(halves, 2)
        return x.reshape(x.shape[0], -1, *x.shape[3:])

    return jax.tree.map(joined, pieces["low"], pieces["high"])


def _alike(steps: tuple[Step, ...]) -> list[tuple[Step, int]]:
    """Equal steps in turn and how many: each run is one loop."""
    return [(step, len(list(run))) for step, run in itertools.groupby(steps)]


def _repeated(step, carry, count: int):
    """Runs a step some times."""
    if count == 1:
        return step(carry)
    return lax.scan(lambda carry, _: (step(carry), None), carry, None, length=count)[0]


def _sent(how: _How, held: dict, sends: tuple[Send, ...], what: str = "{}") -> dict:
    """What a device holds after the sends of a step; all start before anything of the step is computed."""
    shifts = {send.what: send.shift for send in sends}
    names = {name: what.format(name) for name in held}
    return {
        name: how.send(x, shifts[names[name]]) if names[name] in shifts else x
        for name, x in held.items()
    }


def _behind(name: str, turn: Array) -> Array:
    """How many devices before this one the keys' device lies; the high halves come from the other side."""
    return -turn if name == "high" else turn


def _keys_travel(how: _How, queries: QueryPiece, keys: KeyPiece) -> LogSumExp:
    rule, device = how.rule, how.device()
    state = rule.attend(None, queries, keys, 0, device)
    carry = _pieces(how, keys), state, jnp.int32(0)
    for step, count in _alike(how.move.forward[1:]):

        def one(carry, step=step):
            held, state, turn = carry
            held, turn = _sent(how, held, step.sends), turn + 1
            for name, piece in held.items():
                if piece.k.shape[1]:  # of a part of one token a half is empty
                    state = rule.attend(state, queries, piece, _behind(name, turn), device)
            return held, state, turn

        carry = _repeated(one, carry, count) if step.attends else carry
    return carry[1]


def _keys_back(how: _How, queries: QueryPiece, keys: KeyPiece, done: Done):
    rule, device = how.rule, how.device()
    dq, sums = rule.gradient(None, None, queries, keys, 0, device, done)
    carry = _pieces(how, keys), _pieces(how, sums), dq, jnp.int32(0)
    for step, count in _alike(how.move.backward[1:]):

        def one(carry, step=step):
            held, sums, dq, turn = carry
            sums, turn = (
                _sent(how, sums, step.sends, "sums" if "keys" in held else "sums {}"),
                turn + 1,
            )
            if step.attends:
                held = _sent(how, held, step.sends)
                for name, piece in held.items():
                    if piece.k.shape[1]:
                        behind = _behind(name, turn)
                        dq, more = rule.gradient(
                            dq, sums[name], queries, piece, behind, device, done
                        )
                        sums = sums | {name: more}
            return held, sums, dq, turn

        carry = _repeated(one, carry, count)
    return carry[2], _whole_pieces(how, carry[1])


def _queries_travel(how: _How, queries: QueryPiece, keys: KeyPiece) -> LogSumExp:
    state = None
    held = queries
    for turn, step in enumerate(how.move.forward):
        for send in step.sends:
            held = how.send(held, send.shift)
        whose = (how.device() - turn) % how.ring
        piece = how.rule.attend(None, held, keys, -turn, whose)
        for send in step.returns:
            piece = how.send(piece, send.shift)
        state = piece if state is None else merge(state, piece)
    assert state is not None  # a table's first step attends
    return state


def _queries_back(how: _How, queries: QueryPiece, keys: KeyPiece, done: Done):
    dq = None
    sums = None
    held = (queries, done)
    for turn, step in enumerate(how.move.backward):
        for send in step.sends:
            held = how.send(held, send.shift)
        whose = (how.device() - turn) % how.ring
        more, sums = how.rule.gradient(None, sums, held[0], keys, -turn, whose, held[1])
        for send in step.returns:
            more = how.send(more, send.shift)
        dq = more if dq is None else dq + more
    return dq, sums


def _collected(how: _How, keys: KeyPiece) -> KeyPiece:
    """All devices' keys, [N, B, t, ...]: a piece a device, so that no scores of all tokens exist at the same time."""
    k, v = (lax.all_gather(x, how.axis) for x in (keys.k, keys.v))
    where = jax.tree.map(lambda x: lax.all_gather(x, how.axis), _after(keys.where, k))
    return KeyPiece(k=k, v=v, where=where)


def _after(where: Where, keys: Array) -> Where:
    """The same places, which are sent when keys have come and not beside them.

    Independent collectives lock simulated devices up, which meet them in different orders. What is added is 0 of
    whatever keys, since a barrier does not keep collectives back on CPUs.
    """
    first = keys[(0,) * keys.ndim]
    none = jnp.minimum((first != first).astype(jnp.int32), 0)
    return jax.tree.map(lambda x: x + none, where)


def _gathered(how: _How, queries: QueryPiece, keys: KeyPiece) -> LogSumExp:
    device = how.device()
    every = _collected(how, keys)

    def one(state, turn):
        piece = jax.tree.map(lambda x: x[(device - turn) % how.ring], every)
        return how.rule.attend(state, queries, piece, turn, device), None

    own = how.rule.attend(None, queries, keys, 0, device)
    return lax.scan(one, own, jnp.arange(1, how.ring))[0]


def _gathered_back(how: _How, queries: QueryPiece, keys: KeyPiece, done: Done):
    device = how.device()
    every = _collected(how, keys)

    def put(all_sums, sums, place):
        return jax.tree.map(lambda x, new: x.at[place].set(new), all_sums, sums)

    def one(carry, turn):
        dq, all_sums = carry
        place = (device - turn) % how.ring
        piece = jax.tree.map(lambda x: x[place], every)
        dq, sums = how.rule.gradient(dq, None, queries, piece, turn, device, done)
        return (dq, put(all_sums, sums, place)), None

    dq, sums = how.rule.gradient(None, None, queries, keys, 0, device, done)
    all_sums = put(
        jax.tree.map(lambda x: jnp.zeros((how.ring, *x.shape), x.dtype), sums), sums, device
    )
    dq, all_sums = lax.scan(one, (dq, all_sums), jnp.arange(1, how.ring))[0]
    return dq, tuple(lax.psum_scatter(x, how.axis) for x in all_sums)
