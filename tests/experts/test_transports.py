"""However tokens reach experts that devices share, the mixture is the dense one, and nothing undeclared is sent."""

import dataclasses
import functools
import json
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from compiled import needs_libtpu, on_a_tpu
from fast import jit
from mixtures import (
    CASES,
    MESHES,
    B,
    D,
    E,
    F,
    T,
    assert_dense,
    axes_of,
    normal,
    outcome_on,
    params_of,
)

from jaxpar.aot import hlo
from jaxpar.mesh import MeshSpec, make_mesh, named_shardings, rules_from, use_mesh
from jaxpar.nn.experts import Experts
from jaxpar.nn.experts.sharded import (
    TRANSPORTS,
    AllToAll,
    Annotated,
    Gather,
    LeastSent,
    Ragged,
    bytes_sent,
    gather,
)
from jaxpar.nn.experts.sharded import transport_for as named
from jaxpar.nn.experts.sharded.all_to_all import room_for
from jaxpar.nn.mixer import ActivationSizes, Context
from jaxpar.types import UsageError

ALL = "sigmoid, all losses, bias"
SKEW = 3.0
NAMES = [name for name in TRANSPORTS if name not in ("auto", "ragged")]


@pytest.mark.parametrize(
    "transport, mesh, name",
    [
        (named("sum"), "expert4.data2", ALL),
        (Gather(), "expert2.context2.tensor2", ALL),
        (AllToAll(), "expert2.fsdp2.tensor2", "capacity"),
        (Annotated(), "expert2.fsdp2.tensor2", "capacity"),
        (Annotated(), "expert2.context2.tensor2", "all"),
        *(
            pytest.param(transport, mesh, name, marks=pytest.mark.slow)  # 5 s each
            for transport in (*map(named, NAMES), AllToAll(None), AllToAll(0.7))
            for mesh in MESHES
            for name in CASES
            if "capacity" not in name or "context" not in mesh
        ),
    ],
)
def test_it_is_the_dense_mixture(transport, mesh, name, x64):
    assert_dense(outcome_on(MESHES[mesh], transport, name), name)


def test_it_is_the_dense_mixture_in_float32():
    assert_dense(
        outcome_on(MESHES["expert4.data2"], AllToAll(None), "softmax", dtype="float32"),
        "softmax",
        dtype="float32",
    )


@pytest.mark.parametrize(
    "transport",
    [AllToAll(1.0), *(pytest.param(t, marks=pytest.mark.slow) for t in map(named, NAMES))],
)
def test_all_tokens_on_one_expert(transport, x64):
    """More than there is room for; and who gets nothing has a gradient of exactly 0."""
    name = "one, not normalised"
    got = outcome_on(MESHES["expert4.data2"], transport, name, skew=SKEW)
    assert_dense(got, name, SKEW)
    # Of zeros all experts are tied, and the first one is taken.
    assert got[0][1][2]["expert_load"] == E * (T - 1) / T
    for leaf in ("w_up", "w_gate", "w_down"):
        idle = got[1][0][leaf][: E - 1]
        assert not np.any(idle) and np.any(got[1][0][leaf][E - 1])


def test_where_there_is_room_nothing_is_gathered(x64, monkeypatch):
    rows = B // 2 * T // 2  # of a device
    room, is_bounded = room_for(1.7, CASES["softmax"], rows, 2)
    logits = normal(B, T, D) @ params_of(CASES["softmax"])["w_router"]
    to = np.argsort(-logits, -1, kind="stable")[..., :2] // (E // 2)
    each = to.reshape(2, B // 2, 2, T // 2, 2)  # rows and columns of each device
    most = max(
        (each[i, :, j] == device).sum() for i in range(2) for j in range(2) for device in range(2)
    )
    assert is_bounded and most <= room

    def never(layer, tokens, *args, **kwargs):
        return jnp.nan * tokens.x

    monkeypatch.setattr(gather, "gather_tokens", never)
    assert_dense(
        outcome_on(MESHES["expert2.context2.tensor2"], AllToAll(1.7), "softmax"), "softmax"
    )


def test_rows_that_are_not_split_stay_where_they_are(x64):
    got = outcome_on(MESHES["expert4.data2"], AllToAll(), "all", rules={"batch": "data"})
    assert_dense(got, "all")


def plain_ragged(rows, out, starts, sent, written, got, *, axis_name):
    """What `jax.lax.ragged_all_to_all` is documented to do, by gathering everything."""
    every = [jax.lax.all_gather(a, axis_name) for a in (rows, starts, sent, written)]
    me, row = jax.lax.axis_index(axis_name), jnp.arange(len(out))
    for rows, starts, sent, written in zip(*every, strict=True):
        inside = (row >= written[me]) & (row < written[me] + sent[me])
        found = rows.at[row - written[me] + starts[me]].get(mode="clip")
        out = jnp.where(inside[:, None], found, out)
    return out


@pytest.mark.parametrize(
    "name, skew", [("softmax", SKEW), pytest.param(ALL, 0.0, marks=pytest.mark.slow)]
)
def test_ragged_parts_are_sent_where_they_belong(name, skew, x64, monkeypatch):
    """Offsets and sizes, by a plain form of the collective; that of JAX runs on no CPU."""
    monkeypatch.setattr("jaxpar.nn.experts.sharded.ragged.platform", lambda: "tpu")
    monkeypatch.setattr(jax.lax, "ragged_all_to_all", plain_ragged)
    assert_dense(outcome_on(MESHES["expert4.data2"], Ragged(), name, skew), name, skew)


# ---------------------------------------------------------------- what is sent


def counts_of(layer, mesh, shape, dtype="float32"):
    """How often a compiled forward pass and a whole one exchange arrays, by kind."""
    axes, out = axes_of(layer), []
    if shape[2] != D:
        axes = {name: leaf.axes for name, leaf in layer.leaves(shape[2], 1.0, 1.0).items()}
    leaves = layer.leaves(shape[2], 1.0, 1.0)
    with use_mesh(mesh):
        args = {name: jax.ShapeDtypeStruct(leaf.shape, dtype) for name, leaf in leaves.items()}
        args = args, jax.ShapeDtypeStruct(shape, dtype)
        shardings = named_shardings(args, (axes, ("batch", "seq", None)))

        def forward(params, x):
            return layer.apply(params, x, Context(jnp.zeros(shape[:2], jnp.int32)))[0]

        def whole(params, x):
            return jax.grad(lambda *args: jnp.sin(forward(*args)).sum(), (0, 1))(params, x)

        for fn in (forward, whole):
            text = jit(fn, in_shardings=shardings).lower(*args).compile().as_text()
            kinds = [c.kind for c in hlo.collectives(text, mesh) if any(c.shapes)]
            out.append(
                {kind: kinds.count(kind) for kind in sorted(set(kinds)) if "all-to-all" in kind}
            )
    return out


GSHARD = Experts(F, E, 2, capacity=1.0, transport=Annotated())


def test_annotations_alone_make_two_exchanges_a_pass():
    forward, whole = counts_of(GSHARD, make_mesh(MESHES["expert4.data2"]), (B, T, D))
    assert forward == {"all-to-all": 2} and whole == {"all-to-all": 4}


def for_a_tpu():
    from jax.experimental import topologies

    mesh = make_mesh(MeshSpec(expert=4), topologies.get_topology_desc("v5e:2x2", "tpu").devices)
    layer = Experts(256, 8, 2, capacity=1.0, transport=Annotated())
    other = {"ragged": dataclasses.replace(layer, capacity=None, transport=Ragged())}
    return {
        name: counts_of(each, mesh, (8, 128, 256), "bfloat16")
        for name, each in ({"annotated": layer} | other).items()
    }


@needs_libtpu
@pytest.mark.slow  # 40 s of two cores
def test_on_a_tpu_as_well():
    counts = on_a_tpu(__file__)
    assert counts["annotated"] == [{"all-to-all": 2}, {"all-to-all": 4}]
    assert counts["ragged"] == [{"ragged-all-to-all": 2}, {"ragged-all-to-all": 4}]


def test_bytes_that_are_sent_by_hand():
    """Of 64 tokens of a device, 8 numbers of 4 bytes each, among four devices."""
    sizes = ActivationSizes(tokens=64, layers=3, width=4, again=1, embed_dim=8, rows=4)
    few = Experts(F, 8, 1, capacity=1.0, normalise=False)
    many, row = dataclasses.replace(few, experts_per_token=4, capacity=2.0, normalise=True), 8 * 4
    sent = functools.partial(bytes_sent, sizes=sizes)
    with use_mesh(make_mesh(MESHES["expert4.data2"])):
        slots = 4 * 8 * 2 * row  # two choices of each of four rows for each of eight experts
        assert sent(AllToAll(), few) == sent(Annotated(), few) == 3 * 4 * slots * 3 / 4
        whole = 4 * 64
        small = whole * 1 * 4
        gathers = 2 * (whole * row + 2 * small) + whole * row
        assert sent(Gather(), few) == 3 * (gathers + 2 * whole * row + small) * 3 / 4
        assert sent(LeastSent(), few) == sent(AllToAll(), few) < sent(Gather(), few)
        # Of so many choices a token, slots take more than tokens do.
        sent = functools.partial(bytes_sent, sizes=sizes._replace(embed_dim=64))
        assert sent(LeastSent(), many) == sent(Gather(), many) < sent(AllToAll(), many)
        free, row = dataclasses.replace(many, capacity=None), 64 * 4
        assert math.isclose(sent(Ragged(), free), 3 * (4 * 64 * 4 * row + 4 * 8 * 4) * 3 / 4)
        assert room_for(2.0, free, 64, 4) == (128, False) and room_for(1.0, free, 64, 4) == (
            64,
            True,
        )
    with use_mesh(make_mesh(MESHES["expert4.data2"]), rules_from({"batch": "data"})):
        assert sent(Gather(), few) == sent(named("sum"), few) > 0
    assert sent(Gather(), few) == 0


def test_mistakes_are_told():
    with pytest.raises(
        UsageError, match="transport='fly' is unknown; legal are auto, sum, gather, all_to_all"
    ):
        named("fly")
    with pytest.raises(UsageError, match="room=0 must be over 0"):
        AllToAll(0)
    with pytest.raises(
        UsageError,
        match="ragged is made of jax.lax.ragged_all_to_all, which CPUs do not have; take all",
    ):
        outcome_on(MESHES["expert4.data2"], Ragged(), "all")
    with pytest.raises(
        UsageError, match=r"dimension 0 \(experts\) of size 4 does not divide over expert=8"
    ):
        outcome_on(MeshSpec(expert=8), Gather(), "all")


if __name__ == "__main__":
    print(json.dumps(for_a_tpu()))
