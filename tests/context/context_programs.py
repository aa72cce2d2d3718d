"""Programs of attention over a split sequence, and what they send beside what its table says."""

import math
import re

import jax
import numpy as np
from context_arrays import B, H, K
from fast import jit

from jaxpar.mesh import MeshSpec, make_mesh, use_mesh
from jaxpar.nn.attention.context import context_attention


def compiled(
    move, backward, length=48, groups=2, context=8, width=K, devices=None, jit=jit, order=None
):
    """The program and its mesh; inputs are split as they come."""
    mesh = make_mesh(MeshSpec(context=context, data=8 // context), devices)
    shapes = [
        jax.ShapeDtypeStruct((B, length, n, width), np.float32) for n in (H, groups, groups, H)
    ]
    places = jax.ShapeDtypeStruct((B, length), np.int32)

    def value(q, k, v, positions):
        return context_attention(q, k, v, positions, move=move, order=order)

    def gradients(q, k, v, g, positions):
        out, pull = jax.vjp(lambda *args: value(*args, positions), q, k, v)
        return out, pull(g)

    with use_mesh(mesh):
        sharding = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec("data", "context"))

        def put(shape):
            return jax.ShapeDtypeStruct(shape.shape, shape.dtype, sharding=sharding)

        args = (
            [*map(put, shapes), put(places)] if backward else [*map(put, shapes[:3]), put(places)]
        )
        program = jit(gradients if backward else value).lower(*args).compile()
    return program, mesh


def bytes_sent(found, table):
    """Of a device, 4 a number, whatever it is rounded to: 1 / members of what a collective returns was there before."""
    members = table.within if table.within > 1 else table.shares
    share = {"collective-permute": 1}
    return sum(
        each.trips
        * share.get(each.kind, 1 - 1 / members)
        * sum(4 * math.prod(shape) for shape in each.shapes)
        for each in found
    )


def sent_by_shift(found, table, text):
    """Of collectives that send to one device, by how many of 8 places further on it is; of all others by None."""
    line = (
        r"%?([\w.-]+) = .* collective-permute(?:-start)?\(.*source_target_pairs=\{\{(\d+),(\d+)\}"
    )
    shifts = {
        name: (int(to) - int(by)) % 8 for name, by, to in re.findall(line, text)
    }  # device i at place i
    every = {each: shifts.get(each.name) for each in found}
    return {
        shift: bytes_sent([x for x in every if every[x] == shift], table)
        for shift in set(every.values())
    }


def bytes_said(table, sizes, backward, order, shift=all):
    """By the table, of all sends or those of a shift in 8 places, without numbers of documents, which it counts.

    Where an order is promised no places are sent, either.
    """
    places = {"low": 1 / 2, "high": 1 / 2} | dict.fromkeys(["keys", "queries", "places"], 1)
    total = 0
    for send in table.sends(backward):
        if shift is not all and shift != (send.shift and send.shift % 8):
            continue
        none = places.get(send.what, 0) * (table.within if send.shift else 1)
        share = table.share(send, sizes, backward) - none * sizes.rows * sizes.tokens * (
            8 if order else 4
        )
        is_exchanged = send.what in ("heads", "outputs")
        others = (table.members - 1) / (table.members if is_exchanged else 1)
        total += share * (1 if send.shift else others)
    return total
