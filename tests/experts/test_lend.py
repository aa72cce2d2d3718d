"""Tokens that are lent with copies of weights give the dense mixture, and each device computes what the plan says."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from mixtures import CASES, MESHES, assert_dense, outcome_on

from jaxpar.mesh import make_mesh, rules_from, use_mesh
from jaxpar.nn.experts.dispatch import sort_choices
from jaxpar.nn.experts.sharded import Gather, Spill, bytes_sent, gather, least_loaded, lend
from jaxpar.nn.experts.sharded.all_to_all import room_for
from jaxpar.nn.experts.sharded.lend import spare_slots, where_computed
from jaxpar.nn.mixer import ActivationSizes
from jaxpar.types import UsageError

ALL, ONE = "sigmoid, all losses, bias", "one, not normalised"
EVEN = Spill(slots=2, alpha=1.0, min_chunk=1, tolerated=1.0, room=None)
"""As even as it can be: whatever is over the mean is lent."""


@pytest.mark.parametrize(
    "mesh, transport, name, skew",
    [
        ("expert4.data2", EVEN, ONE, 3.0),
        ("expert2.fsdp2.tensor2", dataclasses.replace(EVEN, room=2.0), "capacity", 0.0),
        *(
            pytest.param(mesh, transport, name, skew, marks=pytest.mark.slow)  # 5 s each
            for mesh in MESHES
            for transport in (
                EVEN,
                Spill(slots=1, min_chunk=2, tolerated=1.0),
                dataclasses.replace(EVEN, room=0.3),
            )
            for name, skew in ((ALL, 0.0), (ONE, 3.0), ("capacity", 0.0))
            if "capacity" not in name or "context" not in mesh
        ),
    ],
)
def test_it_is_the_dense_mixture(mesh, transport, name, skew, x64, monkeypatch):
    """Value and every expert's gradients, so those of copies too; plain expert parallelism is held to the same."""
    lent, plan = [], lend.least_loaded

    def noted(counts, *args, **kwargs):
        out = plan(counts, *args, **kwargs)
        jax.debug.callback(lambda *pair: lent.append(pair), counts, out)
        return out

    def never(layer, tokens, *args, **kwargs):
        return jnp.nan * tokens.x

    monkeypatch.setattr(lend, "least_loaded", noted)
    if transport.room == 2.0:  # enough for what is lent
        monkeypatch.setattr(gather, "gather_tokens", never)
    got = outcome_on(MESHES[mesh], transport, name, skew)
    assert_dense(got, name, skew)
    plain, even = (max(load(*pair).max() for pair in lent) for load in (before, after))
    assert lent and even <= plain
    if mesh == "expert4.data2" and transport is EVEN and skew:  # 12 of 16 choices are of one expert
        assert plain == 12 and even == 4
    if name == "capacity" and transport == dataclasses.replace(EVEN, room=2.0):
        assert even < plain


def before(counts, lent):
    return np.asarray(counts).reshape(lent.shape[1], -1).sum(1)


def after(counts, lent):
    return np.asarray(lent).sum(0)


def slow_deal(counts, lent):
    """Expert by expert, round by round: each device that has one left gives it to the first that is not full."""
    shares, num_experts = counts.shape
    out = [[[] for _ in range(num_experts)] for _ in range(shares)]
    for expert in range(num_experts):
        left = lent[expert].tolist()
        for rank in range(counts[:, expert].max()):
            for source in range(shares):
                if rank < counts[source, expert]:
                    device = next(d for d in range(shares) if left[d])
                    left[device] -= 1
                    out[source][expert].append(device)
    return out


@functools.partial(jax.jit, static_argnames="slots")
def dealt(expert, slots):
    """What all devices do with their choices, [N, n, k]."""
    shares, num_experts = len(expert), 8
    plans = jax.vmap(lambda e: sort_choices(e, num_experts))(expert)
    lent = least_loaded(
        plans.sizes.sum(0), shares, alpha=1.0, min_chunk=1, tolerated=1.0, slots=slots
    )
    deal = jax.vmap(where_computed, (0, 0, None, None, 0))
    return (
        plans.sizes,
        lent,
        deal(expert, plans.place, plans.sizes, lent, jnp.arange(shares)),
        spare_slots(lent, slots),
    )


@pytest.mark.parametrize("slots", [1, 3])
def test_choices_are_dealt_as_a_loop_deals_them(slots):
    rng, num_lent = np.random.default_rng(slots), 0
    for _ in range(20):
        scores = rng.random((4, 30, 9)) ** rng.uniform(0.02, 2, 9)  # the last of nine is none
        expert = np.argsort(-scores, -1)[..., :2].astype(np.int32)
        counts, lent, device, (slot, held) = jax.device_get(dealt(expert, slots))
        want, got = slow_deal(counts, lent), np.zeros((8, 4), int)
        for source in range(4):
            seen = [0] * 8
            for e, d in zip(expert[source].ravel(), device[source].ravel(), strict=True):
                if e < 8:
                    assert d == want[source][e][seen[e]]
                    seen[e], got[e, d] = seen[e] + 1, got[e, d] + 1
        np.testing.assert_array_equal(got, lent)
        away = (lent > 0) & (np.arange(8)[:, None] // 2 != np.arange(4))
        num_lent += away.sum()
        for d in range(4):
            mine = np.flatnonzero(away[:, d])
            np.testing.assert_array_equal(held[d], [*mine, *[8] * (slots - len(mine))])
            np.testing.assert_array_equal(slot[mine, d], np.arange(len(mine)))
    assert num_lent > 20


def test_what_is_lent_comes_from_all_devices_alike():
    """So between any two there need be room for little more than even choices take."""
    expert = (
        np.where(np.arange(400) % 10 < 9, 0, 1 + np.arange(400) % 7)[None, :, None]
        .repeat(4, 0)
        .astype(np.int32)
    )
    _, lent, device, _ = jax.device_get(dealt(expert, 3))
    assert lent.sum(0).max() == 400
    pairs = np.stack([np.bincount(d.ravel(), minlength=4) for d in device])
    assert pairs.max() <= 110


def test_bytes_that_are_sent_by_hand():
    """Where choices are even no weights travel; declared are three matrices of each of two slots, and a gather."""
    sizes = ActivationSizes(tokens=64, layers=3, width=4, again=1, embed_dim=8, rows=4)
    layer = dataclasses.replace(CASES["softmax"], num_experts=8)
    with use_mesh(make_mesh(MESHES["expert4.data2"])):
        rows, counts = 4 * 64 * 8 * 4, 8 + 4 * 2 + 4 * 8
        assert bytes_sent(Spill(), layer, sizes) == 3 * (4 * rows + 4 * counts) * 3 / 4
        *_, lent = list(Spill(room=None).transfers(layer, sizes))
        assert (
            lent.bytes == 3 * (1 + 2) * 3 * (4 * 2 * 8 * layer.size * 4)
            and lent.arrays == 3 * 3 * 3 * 4
        )
        assert len(list(Spill(room=1.0).transfers(layer, sizes))) == 4 + len(
            list(Gather().transfers(layer, sizes))
        )
    # A device may compute both of a token's choices only where it has a slot.
    assert (
        room_for(None, CASES["softmax"], 64, 4, 1) == (128, False)
        and room_for(None, CASES["softmax"], 64, 4)[0] == 64
    )
    with use_mesh(make_mesh(MESHES["expert4.data2"]), rules_from({"batch": "data"})):
        assert bytes_sent(Spill(), layer, sizes) == bytes_sent(Gather(), layer, sizes)


def test_mistakes_are_told():
    for wrong, message in (
        (dict(slots=0), "slots=0 must be at least 1"),
        (dict(alpha=0.5), "alpha=0.5 must be at"),
    ):
        with pytest.raises(UsageError, match=message):
            Spill(**wrong)
