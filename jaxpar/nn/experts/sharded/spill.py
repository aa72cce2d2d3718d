"""Least-loaded expert parallelism: devices with too many tokens lend some, and the weights these need, to others."""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Int

from jaxpar.fields import AtLeast, check_value
from jaxpar.scan.varying import varying_as
from jaxpar.types import UsageError

__all__ = ["check_spill", "home_of", "least_loaded"]


def least_loaded(
    counts: Int[Array, " E"],
    shares: int,
    *,
    alpha: float = 1.1,
    min_chunk: int = 1,
    tolerated: float = 1.3,
    slots: int | None = None,
) -> Int[Array, "E N"]:
    """Plans how many tokens of each expert every device computes (LLEP: arXiv:2601.17111). Integers alone.

    A device has room for cap = alpha * mean tokens, the mean being over devices and rounded up. Experts are taken from
    the largest on; what is over the cap of the device that holds one goes to those with most room, to each as much as
    it has room for. An expert moves in chunks of min_chunk at least, or whole; so the largest load is at most
    cap + 2 (min_chunk - 1) where there are slots enough. What finds no slot stays.

    Args:
      counts: Tokens of each expert, of all devices; the same numbers on every device give the same plan on each.
      shares: N devices; device n holds experts n E/N to (n + 1) E/N.
      alpha: Of the cap, in thousandths.
      min_chunk: Fewer tokens are not worth an expert's weights.
      tolerated: A largest load of less than this many means is left alone.
      slots: Experts of others that a device has memory for; None for any number.

    Returns:
      The plan; its rows sum to the counts.

    Cost: a sort of E numbers, and one of N for each expert that is taken: none if the load is tolerated, at most E.

    Raises:
      UsageError: If the experts do not divide over the devices, or a number is out of range.
    """
    check_spill(alpha, min_chunk, tolerated, slots)
    num_experts = counts.shape[0]
    home, device = home_of(num_experts, shares), jnp.arange(shares, dtype=jnp.int32)
    counts = counts.astype(jnp.int32)
    plan = jnp.where(home[:, None] == device[None], counts[:, None], 0)
    mean = -(-counts.sum(dtype=jnp.int32) // shares)
    cap = _times(mean, alpha)
    order = jnp.argsort(-counts, stable=True)

    def too_much(state):
        step, _, load, _ = state
        return (step < num_experts) & jnp.any(load > cap)

    def lend(state):
        step, plan, load, free = state
        expert = order[step]
        mine, count = home[expert], counts[expert]
        over = jnp.clip(load[mine] - cap, 0, count)
        over = jnp.where((over < min_chunk) & (over < count), 0, over)
        room = jnp.where((free > 0) & (device != mine), cap - load, 0)
        moved = _fill(over, room, min_chunk)
        change = moved - jnp.where(device == mine, moved.sum(dtype=jnp.int32), 0)
        return step + 1, plan.at[expert].add(change), load + change, free - (moved > 0)

    load = plan.sum(0, dtype=jnp.int32)
    free = varying_as(jnp.full(shares, num_experts if slots is None else slots, jnp.int32), counts)
    first = jnp.where(load.max() < _times(mean, tolerated), num_experts, 0)
    return jax.lax.while_loop(too_much, lend, (first, plan, load, free))[1]


def _fill(over: Array, room: Array, min_chunk: int) -> Array:
    """Deals tokens out to devices with room, most room first: to each its room, and no chunk of less than the least.

    As a loop would that takes the device with most room again and again: one that is full has none, and is not asked
    twice.
    """
    by = jnp.argsort(-room, stable=True)
    size = jnp.where(room > 0, jnp.maximum(room, min_chunk), 0)[by]
    left = over - (jnp.cumsum(size, dtype=jnp.int32) - size)  # before each device
    taken = jnp.where(
        left - size < min_chunk, left, size
    )  # a last chunk that would be too small goes with this one
    is_rest = (left < min_chunk) & (jnp.arange(len(by)) > 0)
    return jnp.zeros_like(room).at[by].set(jnp.where((size == 0) | (left <= 0) | is_rest, 0, taken))


def home_of(num_experts: int, shares: int) -> Int[Array, " E"]:
    """Returns the device that holds each expert.

    Raises:
      UsageError: If the experts do not divide over the devices.
    """
    if num_experts % shares:
        raise UsageError(
            f"{num_experts} experts do not divide over {shares} devices; legal are divisors of {num_experts}."
        )
    return jnp.arange(num_experts, dtype=jnp.int32) // (num_experts // shares)


def check_spill(alpha: float, min_chunk: int, tolerated: float, slots: int | None) -> None:
    """Raises `UsageError` for numbers that make no plan."""
    check_value("alpha", alpha, AtLeast(1))
    check_value("min_chunk", min_chunk, AtLeast(1), int)
    check_value("tolerated", tolerated, AtLeast(1))
    if slots is not None:
        check_value("slots", slots, AtLeast(0), int)


def _times(count: Array, factor: float) -> Array:
    """Returns factor * count, rounded down, of a factor in thousandths: exact, and never over 32 bits."""
    thousandths = round(1000 * factor)
    return count // 1000 * thousandths + count % 1000 * thousandths // 1000
