"""New tokens' attention to a cache that devices share, in shares of any sizes, and who keeps how much of it."""

import functools
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from jaxpar.mesh import local, mesh_axes
from jaxpar.nn.attention import attend, finish, merge_parts
from jaxpar.nn.attention.context.shares_kernel import attend_shares, reads_shares
from jaxpar.scan.monoid import LogSumExp
from jaxpar.types import UsageError

__all__ = ["attend_split_cache", "blocks_in_turn", "merge_shares", "spread_blocks"]


def attend_split_cache(
    q: Float[Array, "B T H K"],
    keys: Float[Array, "B S G K"],
    values: Float[Array, "B S G K"],
    lengths: Int[Array, "B N"],
) -> Float[Array, "B T H K"]:
    """Computes attention to a cache whose slots are split over the mesh axis of "seq_layer", in N shares.

    Share n has slots n S/N on, of which the first lengths[b, n] are filled: any numbers from 0 to S/N, so that a
    request may lie on one device or be spread unevenly (DistAttention, arXiv:2401.02669). The order of tokens does not
    matter: keys are rotated to their positions.

    Args:
      q: Queries of the newest tokens, which see all that is filled; the same on all devices of the axis.
      keys: Split over S.
      values: Likewise.
      lengths: How many slots of each share are filled; a share a device, or several.

    Returns:
      Outputs; 0 where nothing is filled.

    Cost: two all-reduces of B T H (K + 2) numbers. Each device reads its share; a GPU with Triton what of it is filled,
    by a kernel that takes heads of 2^n numbers. The plain form copies the values, its gradient the keys too; it is that
    of the kernel's outputs. Reverse mode only.

    Raises:
      UsageError: If S does not divide into the shares that lengths tell of, or these over the devices.
    """
    shared = mesh_axes("seq_layer")
    shares = lengths.shape[1]
    if len(shared) > 1:
        raise UsageError(
            f"a cache split over {' and '.join(shared)}; give seq_layer one mesh axis."
        )
    if keys.shape[1] % shares:
        raise UsageError(
            f"{keys.shape[1]} slots do not divide over the {shares} shares that lengths tell of."
        )

    whole, split = (
        ("batch", None, "heads", "head_dim"),
        ("batch", "seq_layer", "kv_heads", "head_dim"),
    )
    names = [whole, split, split, ("batch", "seq_layer")]
    return local(functools.partial(_attend, shared), names, whole, check=False)(
        q, keys, values, lengths
    )


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _attend(shared: tuple[str, ...], q: Array, keys: Array, values: Array, lengths: Array) -> Array:
    """On one device, by the kernel where there is one; differentiated as the plain form."""
    if q.dtype == keys.dtype == values.dtype and reads_shares(q):
        return finish(merge_parts(attend_shares(q, keys, values, lengths), shared or None)).astype(
            q.dtype
        )
    return _plain(shared, q, keys, values, _filled(keys, lengths))


def _forward(shared: tuple[str, ...], *arrays: Array):
    return _attend(shared, *arrays), arrays


def _backward(shared: tuple[str, ...], kept: tuple[Array, ...], g: Array):
    q, keys, values, lengths = kept
    filled = _filled(keys, lengths)
    clean = jnp.where(filled[..., None, None], keys, 0)  # a gradient of 0 times what is not filled
    _, pull = jax.vjp(lambda q, k, v: _plain(shared, q, k, v, filled), q, clean, values)
    return *pull(g), None


_attend.defvjp(_forward, _backward)


def _filled(keys: Array, lengths: Array) -> Array:
    """Which slots are filled, bool [B, S]."""
    place = jnp.arange(keys.shape[1] // lengths.shape[1], dtype=jnp.int32)
    return (place[None, None] < lengths[..., None]).reshape(len(lengths), -1)


def _plain(shared: tuple[str, ...], q: Array, keys: Array, values: Array, filled: Array) -> Array:
    clean = jnp.where(filled[..., None, None], values, 0)  # what is not filled may hold NaN
    state = attend(
        q, keys, clean, jnp.broadcast_to(filled[:, None], (len(q), q.shape[1], filled.shape[1]))
    )
    if shared:
        state = merge_parts(jax.tree.map(lambda x: x[None], state), shared)
    return finish(state).astype(q.dtype)


def merge_shares(states: LogSumExp) -> LogSumExp:
    """Adds up the partial states of blocks that lie split over the mesh axes of "slots", as many on each device.

    For `jaxpar.decode.Decoding(merge=merge_shares)` under such a rule; how many of its blocks a device has tokens
    in makes no difference. Where no mesh axis splits them it is `merge_parts`.

    Args:
      states: (maximum [N, B, G, T, R], sum, weighted values [N, B, G, T, R, K]), of H = G R heads.

    Returns:
      The same without N, on every device of these axes.

    Cost: two all-reduces of B T H (K + 2) numbers in all, however long the cache (arXiv:2408.04093, algorithm 3).

    Raises:
      UsageError: If N does not divide over the devices.
    """
    shared = mesh_axes("slots")
    if not shared:
        return merge_parts(states)
    axes = ("batch", "kv_heads", None, None)
    each = (axes, axes, (*axes, None))

    def add(maximum, denominator, numerator):
        parts = LogSumExp(max=maximum, denominator=denominator, numerator=numerator)
        return tuple(merge_parts(parts, shared))

    split = [("slots", *axes) for axes in each]
    maximum, denominator, numerator = local(add, split, each, check=False)(*states)
    return LogSumExp(max=maximum, denominator=denominator, numerator=numerator)


def blocks_in_turn(plan: np.ndarray, room: int) -> np.ndarray:
    """Returns numbers of blocks in the order in which requests take them: `first` of `jaxpar.decode.forest.reserve`.

    Device d holds the blocks from d `room` on. The first request gets plan[0, d] of each, then the next; what nobody
    needs comes last.

    Args:
      plan: int [requests, devices], as from `spread_blocks`.
      room: Blocks of each device.

    Returns:
      int [devices * room], each block once.

    Raises:
      UsageError: If a device has fewer blocks than the plan takes of it.
    """
    if (most := plan.sum(0).max(initial=0)) > room:
        raise UsageError(f"a plan takes {most} blocks of a device, which has {room}.")
    blocks = np.arange(plan.shape[1] * room).reshape(-1, room)
    ends = plan.cumsum(0)
    used = [blocks[d, ends[r, d] - plan[r, d] : ends[r, d]] for r, d in np.ndindex(*plan.shape)]
    rest = [blocks[d, count:] for d, count in enumerate(plan.sum(0))]
    return np.concatenate([*used, *rest])


def spread_blocks(
    needs: Sequence[int], free: Sequence[int], home: Sequence[int]
) -> np.ndarray | None:
    """Plans on which devices the blocks of each request lie: at home as far as there is room, the rest is borrowed.

    The longest requests borrow first, from the device that has most room then, as creditors and debtors do in
    DistAttention (arXiv:2401.02669, section 4).

    Args:
      needs: Blocks that each request needs.
      free: Blocks that each device has.
      home: The device that computes each request's new tokens.

    Returns:
      int [requests, devices], blocks of each request on each device; None if they do not fit.

    Raises:
      UsageError: If a number is negative or a home is no device.
    """
    if min([*needs, *free, 0]) < 0:
        raise UsageError(f"needs {list(needs)} and free blocks {list(free)} must not be negative.")
    if not all(0 <= device < len(free) for device in home) or len(home) != len(needs):
        raise UsageError(
            f"home {list(home)} must be a device from 0 to {len(free) - 1} for each of {len(needs)} requests."
        )
    left, out = np.array(free), np.zeros((len(needs), len(free)), int)

    def take(request: int, device: int, count: int):
        out[request, device] += count
        left[device] -= count

    longest = sorted(range(len(needs)), key=lambda request: -needs[request])
    for request in sorted(longest, key=lambda request: needs[request]):  # short ones stay whole
        take(request, home[request], int(min(needs[request], left[home[request]])))
    for request in longest:
        while (missing := needs[request] - out[request].sum()) > 0:
            device = int(left.argmax())
            if not left[device]:
                return None
            take(request, device, int(min(missing, left[device])))
    return out
