"""Attention over a split sequence: a table of moves is walked, forward for the output and again for the gradient.

Every device keeps the sums of its own queries, (maximum, sum, weighted values), and adds a piece of the keys at a time.
The backward pass starts from the *global* output and log-sum-exp, walks the same keys once more and keeps none of them.
"""

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int

from jaxpar.mesh import constrain, local, mesh_axes, num_shares
from jaxpar.nn.attention import Visible, finish, merge
from jaxpar.parallel.context._partial import Where, attend_gradient, attend_piece
from jaxpar.parallel.context.moves import Move, Send, Step, move_for
from jaxpar.scan.monoid import LogSumExp
from jaxpar.types import UsageError

__all__ = ["context_attention"]

CAUSAL = Visible()
QUERIES = ("batch", "seq_layer", "heads", "head_dim")
KEYS = ("batch", "seq_layer", "kv_heads", "head_dim")
TOKENS = ("batch", "seq_layer")


class _How(NamedTuple):
    """What does not change along a walk."""

    move: Move
    axis: str
    visible: Visible

    def send(self, tree, shift: int | None):
        """Returns what the device `shift` places before this one held."""
        assert shift is not None  # of a collective of all
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
      move: What travels: one of `jaxpar.parallel.context.MOVES`.

    Returns:
      Outputs, split as the queries are.

    Cost: 4 B H T^2 K operations over all devices; memory of a device O(B T/N H K) but for "gather", which holds all
    keys, and "swap", which holds H/N heads of all tokens. What is sent: `print(move_for(move, N))`.

    Raises:
      UsageError: If T does not divide over the axis, or "swap" has fewer key heads than devices.
    """
    shared = mesh_axes("seq_layer")
    if not shared:
        return _whole(q, k, v, positions, segments, visible)
    axis, *others = shared
    if others:
        raise UsageError(f"attention over a sequence split over {' and '.join(shared)}; give seq_layer one mesh axis.")
    how = _How(move_for(move, num_shares(axis)), axis, visible)
    groups, shares = k.shape[2] // max(1, num_shares(*mesh_axes("kv_heads"))), how.move.shares
    if move == "swap" and groups % shares:
        raise UsageError(
            f"context=swap exchanges heads for tokens: the {groups} key heads of a device do not divide over "
            f"context={shares}; take context=ring, or fewer context devices."
        )
    names = KEYS
    if mesh_axes("kv_heads") != mesh_axes("heads"):  # then each device's queries need their own copies of the keys
        k, v = (jnp.repeat(x, q.shape[2] // k.shape[2], axis=2) for x in (k, v))
        names = QUERIES
    q, k, v = constrain(q, *QUERIES), constrain(k, *names), constrain(v, *names)
    where = Where(positions, segments)
    arrays = [x for x in where if x is not None]

    def block(q, k, v, *arrays):
        return _attention(how, q, k, v, Where(*arrays))

    axes = [QUERIES, names, names, *[TOKENS] * len(arrays)]
    return constrain(local(block, axes, QUERIES, check=False)(q, k, v, *arrays), *QUERIES)


def _whole(q, k, v, positions, segments, visible: Visible) -> Array:
    """The same on one device."""
    where = Where(positions, segments)
    return finish(attend_piece(q, k, v, where, where, visible)).astype(q.dtype)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _attention(how: _How, q: Array, k: Array, v: Array, where: Where) -> Array:
    return _forward(how, q, k, v, where)[0]


def _forward(how: _How, q: Array, k: Array, v: Array, where: Where):
    if how.move.name == "swap":
        return _swapped(how, q, k, v, where)
    walks = {"gather": _gathered, "token_ring": _queries_travel}
    state = walks.get(how.move.name, _keys_travel)(how, q, k, v, where)
    out = finish(state).astype(q.dtype)
    return out, (q, k, v, where, out, state.log_sum)


def _backward(how: _How, kept: tuple, g: Array):
    # Else XLA finds what travels to be what travelled before, and keeps all of it from one pass to the other.
    q, k, v, where, out, log_sum = lax.optimization_barrier(kept)
    wide = jnp.promote_types(q.dtype, jnp.float32)
    if how.move.name == "swap":
        g = _exchanged(how, g, 2, 1)
    delta = (out.astype(wide) * g.astype(wide)).sum(-1)
    walks = {"gather": _gathered_back, "token_ring": _queries_back, "swap": _swapped_back}
    grads = walks.get(how.move.name, _keys_back)(how, q, k, v, where, log_sum, delta, g)
    grads = (grad.astype(x.dtype) for grad, x in zip(grads, (q, k, v), strict=True))
    if how.move.name == "swap":
        grads = (_exchanged(how, grad, 1, 2) for grad in grads)
    return *grads, jax.tree.map(lambda _: None, where)


_attention.defvjp(_forward, _backward)


def _pieces(how: _How, k: Array, v: Array, where: Where) -> dict[str, tuple]:
    """What travels by the table's names: all keys, or each half of them its own way."""
    if how.move.name == "two_way":
        half = k.shape[1] // 2
        low = jax.tree.map(lambda x: x[:, :half], (k, v, where))
        return {"low": low, "high": jax.tree.map(lambda x: x[:, half:], (k, v, where))}
    return {"keys": (k, v, where)}


def _alike(steps: tuple[Step, ...]) -> list[tuple[Step, int]]:
    """Equal steps in turn and how many: each run is one loop."""
    runs: list[tuple[Step, int]] = []
    for step in steps:
        if runs and runs[-1][0] == step:
            runs[-1] = step, runs[-1][1] + 1
        else:
            runs.append((step, 1))
    return runs


def _repeated(step, carry, count: int):
    """Runs a step some times."""
    if count == 1:
        return step(carry)
    return lax.scan(lambda carry, _: (step(carry), None), carry, None, length=count)[0]


def _sent(how: _How, held: dict, sends: tuple[Send, ...]) -> dict:
    """What a device holds after the sends of a step; all start before anything of the step is computed."""
    return held | {what: how.send(held[what], shift) for what, shift in sends if shift is not None}


def _keys_travel(how: _How, q: Array, k: Array, v: Array, where: Where) -> LogSumExp:
    held, state = _pieces(how, k, v, where), None
    names = tuple(held)
    for step, count in _alike(how.move.forward):

        def one(carry, step=step):
            held, state = carry
            held = _sent(how, held, step.sends)
            for name in names:
                k, v, at = held[name]
                piece = attend_piece(q, k, v, where, at, how.visible)
                state = piece if state is None else merge(state, piece)
            return held, state

        held, state = _repeated(one, (held, state), count)
    assert state is not None  # a table's first step attends
    return state


def _keys_back(how: _How, q: Array, k: Array, v: Array, where: Where, log_sum: Array, delta: Array, g: Array):
    held, dq = _pieces(how, k, v, where), None
    names = {name: "sums" if name == "keys" else f"sums {name}" for name in held}
    sums: dict = dict.fromkeys(held)
    for step, count in _alike(how.move.backward):

        def one(carry, step=step):
            held, sums, dq = carry
            held = _sent(how, held, tuple(send for send in step.sends if send.what in held))
            homes = {send.what: send.shift for send in step.sends}
            for name, what in names.items():
                (k, v, at), before = held[name], sums[name]
                if before is not None and what in homes:
                    before = how.send(before, homes[what])
                if step.attends:
                    more, *grads = attend_gradient(q, k, v, where, at, how.visible, log_sum, delta, g)
                    dq = more if dq is None else dq + more
                    before = tuple(grads) if before is None else jax.tree.map(jnp.add, before, tuple(grads))
                sums = sums | {name: before}
            return held, sums, dq

        held, sums, dq = _repeated(one, (held, sums, dq), count)
    assert dq is not None
    grads = [jnp.concatenate(parts, 1) for parts in zip(*(sums[name] for name in names), strict=True)]
    return dq, *grads


def _queries_travel(how: _How, q: Array, k: Array, v: Array, where: Where) -> LogSumExp:
    state, held = None, (q, where)
    for step in how.move.forward:
        for send in step.sends:
            held = how.send(held, send.shift)
        piece = attend_piece(held[0], k, v, held[1], where, how.visible)
        for send in step.returns:
            piece = how.send(piece, send.shift)
        state = piece if state is None else merge(state, piece)
    assert state is not None
    return state


def _queries_back(how: _How, q: Array, k: Array, v: Array, where: Where, log_sum: Array, delta: Array, g: Array):
    total, held = None, (q, where, log_sum, delta, g)
    for step in how.move.backward:
        for send in step.sends:
            held = how.send(held, send.shift)
        dq, dk, dv = attend_gradient(held[0], k, v, held[1], where, how.visible, *held[2:])
        for send in step.returns:
            dq = how.send(dq, send.shift)
        total = (dq, dk, dv) if total is None else jax.tree.map(jnp.add, total, (dq, dk, dv))
    assert total is not None
    return total


def _collected(how: _How, k: Array, v: Array, where: Where):
    """All devices' keys, [N, B, t, ...]: a piece a device, so that no scores of all tokens exist at the same time."""
    return jax.tree.map(lambda x: lax.all_gather(x, how.axis), (k, v, where))


def _gathered(how: _How, q: Array, k: Array, v: Array, where: Where) -> LogSumExp:
    k, v, places = _collected(how, k, v, where)
    state = attend_piece(q, k[0], v[0], where, jax.tree.map(lambda x: x[0], places), how.visible)

    def one(state, piece):
        k, v, at = piece
        return merge(state, attend_piece(q, k, v, where, at, how.visible)), None

    return lax.scan(one, state, jax.tree.map(lambda x: x[1:], (k, v, places)))[0]


def _gathered_back(how: _How, q: Array, k: Array, v: Array, where: Where, log_sum: Array, delta: Array, g: Array):
    def one(dq, piece):
        k, v, at = piece
        more, dk, dv = attend_gradient(q, k, v, where, at, how.visible, log_sum, delta, g)
        return dq + more, (dk, dv)

    wide = jnp.promote_types(q.dtype, jnp.float32)
    dq, sums = lax.scan(one, 0 * q.astype(wide), _collected(how, k, v, where))
    dk, dv = (lax.psum_scatter(x, how.axis) for x in sums)
    return dq, dk, dv


def _exchanged(how: _How, x: Array, split: int, joined: int) -> Array:
    return lax.all_to_all(x, how.axis, split, joined, tiled=True)


def _swapped(how: _How, q: Array, k: Array, v: Array, where: Where):
    """Some heads of all tokens, in place of all heads of some; what was exchanged is kept for the backward pass."""
    q, k, v = (_exchanged(how, x, 2, 1) for x in (q, k, v))
    places = jax.tree.map(lambda x: lax.all_gather(x, how.axis, axis=1, tiled=True), where)
    state = attend_piece(q, k, v, places, places, how.visible)
    out = finish(state).astype(q.dtype)
    return _exchanged(how, out, 1, 2), (q, k, v, places, out, state.log_sum)


def _swapped_back(how: _How, q: Array, k: Array, v: Array, where: Where, log_sum: Array, delta: Array, g: Array):
    return attend_gradient(q, k, v, where, where, how.visible, log_sum, delta, g)
