"""The reader of collectives, on lines as XLA writes them."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from fast import jit

from jaxpar.aot import hlo
from jaxpar.mesh import MeshSpec, make_mesh

PAIRS = [(0, 1), (2, 3), (4, 5), (6, 7)]
STRIDED = [(0, 4), (1, 5), (2, 6), (3, 7)]


@pytest.mark.parametrize(
    ("text", "groups"),
    [
        ("{{0,1},{2,3},{4,5},{6,7}}, use_global_device_ids=true", PAIRS),
        ("{}, to_apply=%add", [tuple(range(8))]),
        ("{{0,1,2,3,4,5,6,7}}, x", [tuple(range(8))]),
        ("[4,2]<=[8], x", PAIRS),
        ("[4,2]<=[2,4]T(1,0), dimensions={1}", STRIDED),
        ("[2,4]<=[2,2,2]T(1,0,2), x", [(0, 1, 4, 5), (2, 3, 6, 7)]),
        ("mesh['a'=4,'b'=2] {'b'}, x", PAIRS),
        ("mesh['a'=2,'b'=4] {'a'}, x", STRIDED),
        ("mesh['a'=2,'b'=4] {'a','b'}, x", [tuple(range(8))]),
        (
            "mesh['a'=2,'b'=2,'c'=2], device_ids=([2,2,2]T(2,1,0)) {'c'}, x",
            [(0, 4), (2, 6), (1, 5), (3, 7)],
        ),
        ("mesh['a'=8] {'a':(1)2}, x", STRIDED),
        ("mesh['a'=8] {'a':(4)2}, x", PAIRS),
        (
            "mesh['a'=2,'b'=4], device_ids=(7,6,5,4,3,2,1,0) {'a'}, x",
            [(7, 3), (6, 2), (5, 1), (4, 0)],
        ),
    ],
)
def test_replica_groups(text, groups):
    assert hlo.replica_groups(text, 8) == groups


def test_axes_of_groups():
    mesh = make_mesh(MeshSpec(data=2, fsdp=2, tensor=2), jax.devices())
    places = np.arange(8).reshape(2, 2, 2)
    assert hlo.axes_of(places.reshape(-1, 2).tolist(), mesh) == ("tensor",)
    assert hlo.axes_of(places.reshape(-1, 4).tolist(), mesh) == ("fsdp", "tensor")
    assert hlo.axes_of(places.transpose(1, 2, 0).reshape(-1, 2).tolist(), mesh) == ("data",)
    assert hlo.axes_of([(i,) for i in range(8)], mesh) == ()
    assert hlo.axes_of([(0, 3), (1, 2), (4, 7), (5, 6)], mesh) is None
    assert hlo.axes_of([(0, 1, 2), (3, 4, 5), (6, 7)], mesh) is None


MODULE = """
%all-reduce-scatter.2 (input.2: f32[256,256]) -> f32[256,128] {
  %all-reduce.57 = f32[64,32]{1,0:T(8,128)} all-reduce(%input.2), channel_id=1, replica_groups={{0,4},{1,5},{2,6},{3,7}}
}

%start (p: f32[4]) -> (f32[4], f32[8]) {
  %all-gather.2 = f32[8]{0} all-gather(%p), replica_groups=[4,2]<=[2,2,2]T(0,2,1), dimensions={0}
  ROOT %custom-call.1 = (f32[4]{0}, f32[8]{0}) custom-call(%all-gather.2), custom_call_target="AsyncCollectiveStart"
}

%async_collective_fusion.1 (p: f32[4]) -> f32[8] {
  %all-gather.3 = f32[8]{0} all-gather(%p), replica_groups=[4,2]<=[2,2,2]T(0,2,1), dimensions={0}
}

%done (p: f32[4]) -> f32[8] {
  %all-gather.4 = f32[8]{0} all-gather(%p), replica_groups=[4,2]<=[2,2,2]T(0,2,1), dimensions={0}
  ROOT %custom-call.2 = f32[8]{0} custom-call(%p, %all-gather.4), custom_call_target="AsyncCollectiveDone"
}

%unused (p: f32[4]) -> f32[4] {
  ROOT %all-reduce.11 = f32[4]{0} all-reduce(%p), replica_groups=[4,2]<=[8], to_apply=%add
}

ENTRY %main.3_spmd (param: f32[4,4]) -> f32[4,4] {
  %psum.1 = f32[2,24]{1,0} all-reduce(%x), channel_id=1, replica_groups=[4,2]<=[8], to_apply=%add
  %all-reduce.9 = (f32[], f32[32,8]{1,0}, /*index=5*/bf16[7]{0}) all-reduce(%a, %b, %c), replica_groups=[2,4]<=[8], x
  %all-gather-start.1 = (f32[4]{0}, f32[8]{0}) all-gather-start(%y), replica_groups=[4,2]<=[2,2,2]T(0,2,1), d={0}
  %all-gather-done.1 = f32[8]{0} all-gather-done(%all-gather-start.1)
  %fusion.1 = f32[8]{0} fusion(%all-gather.3, %all-reduce.9), kind=kLoop, calls=%fused
  %fusion.2 = f32[256,128]{0} fusion(%fusion.1), kind=kCustom, calls=%all-reduce-scatter.2
  %fusion.3 = (f32[4]{0}, f32[8]{0}) fusion(%y), kind=kCustom, calls=%start
  %fusion.4 = f32[8]{0} fusion(%fusion.3), kind=kCustom, calls=%async_collective_fusion.1
  %fusion.5 = f32[8]{0} fusion(%fusion.4), kind=kCustom, calls=%done
  %collective-permute.1 = f32[4]{0} collective-permute(%z), source_target_pairs={{0,1},{1,0}}
  %permute-start.1 = (f32[4]{0}, f32[4]{0}, u32[]) collective-permute-start(%z), source_target_pairs={{0,6},{6,0}}
  %reduce-scatter.1 = bf16[4,6]{0} reduce-scatter(%z), replica_groups=[2,4]<=[8], dimensions={1}, to_apply=%add
  %rs-start.1 = ((f32[8]{0}), f32[4]{0}) reduce-scatter-start(%z), replica_groups=[4,2]<=[8], dimensions={0}
  %rs-done.1 = f32[4]{0} reduce-scatter-done(%rs-start.1)
  ROOT %all-to-all.1 = (f32[2]{0}, f32[2]{0}) all-to-all(%u, %v), replica_groups={{0,1},{2,3},{4,5},{6,7}}
  %all-reduce.10 = f32[] all-reduce(%w), replica_groups={{0},{1},{2},{3},{4},{5},{6},{7}}, to_apply=%add
}
"""


def test_collectives_of_a_module():
    mesh = make_mesh(MeshSpec(data=2, fsdp=2, tensor=2), jax.devices())
    assert [(*c, c.bytes) for c in hlo.collectives(MODULE, mesh)] == [
        ("reduce-scatter", ("data",), ((64, 32),), ("f32",), 1, "all-reduce.57", 8192),
        ("all-gather", ("fsdp",), ((8,),), ("f32",), 1, "all-gather.2", 32),
        ("all-reduce", ("tensor",), ((2, 24),), ("f32",), 1, "psum.1", 192),
        (
            "all-reduce",
            ("fsdp", "tensor"),
            ((), (32, 8), (7,)),
            ("f32", "f32", "bf16"),
            1,
            "all-reduce.9",
            1042,
        ),
        ("all-gather", ("fsdp",), ((8,),), ("f32",), 1, "all-gather-start.1", 32),
        ("collective-permute", ("tensor",), ((4,),), ("f32",), 1, "collective-permute.1", 16),
        ("collective-permute", ("data", "fsdp"), ((4,),), ("f32",), 1, "permute-start.1", 16),
        ("reduce-scatter", ("fsdp", "tensor"), ((4, 24),), ("bf16",), 1, "reduce-scatter.1", 192),
        ("reduce-scatter", ("tensor",), ((8,),), ("f32",), 1, "rs-start.1", 32),
        ("all-to-all", ("tensor",), ((2,), (2,)), ("f32", "f32"), 1, "all-to-all.1", 16),
    ]


def nested_loops(x):
    """A sum over devices in 5 x 3 loops, a maximum in a loop of unknown length, and a mean outside."""

    def inner(c, _):
        return jax.lax.psum(c, "fsdp") * 0.1, None

    def outer(c, _):
        return jax.lax.scan(inner, c, None, length=5)[0], None

    x = jax.lax.scan(outer, x, None, length=3)[0]
    x = jax.lax.while_loop(lambda x: x.sum() < 10, lambda x: jax.lax.pmax(x + 1, "data"), x)
    return jax.lax.psum(x, ("data", "fsdp"))


@pytest.mark.parametrize("note", [True, False], ids=["noted", "from-the-condition"])
def test_loops_multiply(note):
    mesh = make_mesh(MeshSpec(data=2, fsdp=4), jax.devices())
    spec = jax.P()
    step = jit(
        jax.shard_map(nested_loops, mesh=mesh, in_specs=spec, out_specs=spec, check_vma=False)
    )
    text = step.lower(jnp.ones(8)).compile().as_text()
    assert "known_trip_count" in text
    if not note:  # as XLA for TPU writes it
        text = text.replace("known_trip_count", "nothing")
    assert sorted(hlo.trip_counts(text).values(), key=str) == [3, 5, None]
    found = {(c.kind, c.axes): (c.trips, c.bytes) for c in hlo.collectives(text, mesh)}
    assert found == {
        ("all-reduce", ("fsdp",)): (15, 32),
        ("all-reduce", ("data",)): (1, 32),
        ("all-reduce", ("data", "fsdp")): (1, 32),
    }


@pytest.mark.parametrize("short", [False, True])
def test_a_loop_that_does_not_begin_at_zero(short):
    text = """
%body (t: (s32[], f32[4])) -> (s32[], f32[4]) {
  %all-reduce.1 = f32[4]{0} all-reduce(%y), replica_groups={}, to_apply=%add
}

%condition (t: (s32[], f32[4])) -> pred[] {
  %constant.1 = s32[] constant(9)
  %i = s32[] get-tuple-element(%t), index=0
  ROOT %lt = pred[] compare(%i, %constant.1), direction=LE, metadata={}
}

ENTRY %main (x: f32[4]) -> f32[4] {
  %constant.2 = s32[] constant(3)
  %copy.1 = s32[]{:T(128)} copy(%constant.2)
  %tuple.1 = (s32[]{:T(128)}, f32[4]{0}) tuple(%copy.1, %x)
  ROOT %while.1 = (s32[]{:T(128)}, f32[4]{0}) while(%tuple.1), condition=%condition, body=%body
}
"""
    if short:  # as newer versions write an entry of a tuple
        text = text.replace("compare(%i,", "compare(%t#0,")
    mesh = make_mesh(MeshSpec(data=8), jax.devices())
    assert hlo.trip_counts(text) == {"while.1": 7}
    assert [c.trips for c in hlo.collectives(text, mesh)] == [7]


PRODUCT = 2 * 8 * 4 * 6


def products_of(fn, *shapes, shardings=None):
    """Returns the operations of products that a compiled function has on one device."""
    arguments = [jax.ShapeDtypeStruct(shape, jnp.float32) for shape in shapes]
    options = {}
    if shardings is not None:
        options["in_shardings"] = shardings
    return hlo.matmul_flops(jit(fn, **options).lower(*arguments).compile().as_text())


UNUSED = """
ENTRY %main (p: f32[8], q: f32[8]) -> f32[8] {
  %p = f32[8]{0} parameter(0)
  %q = f32[8]{0} parameter(1)
  %all-reduce.1 = f32[8]{0} all-reduce(%p), replica_groups={{0,1},{2,3},{4,5},{6,7}}, to_apply=%add
  %all-reduce.2 = f32[8]{0} all-reduce(%q), replica_groups={{0,1},{2,3},{4,5},{6,7}}, to_apply=%add
  %negate.1 = f32[8]{0} negate(%all-reduce.2)
  %tuple.1 = (f32[8]{0}, f32[8]{0}) tuple(%all-reduce.1, %negate.1)
  ROOT %copy.1 = f32[8]{0} OF_TUPLE
}
"""


@pytest.mark.parametrize("index, name", [(0, "all-reduce.1"), (1, "all-reduce.2")])
@pytest.mark.parametrize(
    "form", ["copy(%tuple.1#{})", "get-tuple-element(%tuple.1), index={}"], ids=["short", "long"]
)
def test_collectives_of_which_nothing_is_read_are_dropped(form, index, name):
    mesh = make_mesh(MeshSpec(data=4, tensor=2), jax.devices())
    text = hlo.drop_unused(UNUSED.replace("OF_TUPLE", form.format(index)))
    found = hlo.collectives(text, mesh)
    assert [one.name for one in found] == [name]


EFFECT = """
%inner (t: f32[8]) -> f32[8] {
  %t = f32[8]{0} parameter(0)
  ROOT %all-reduce.2 = f32[8]{0} all-reduce(%t), replica_groups={{0,1},{2,3},{4,5},{6,7}}, to_apply=%add
}

ENTRY %main (p: f32[8]) -> f32[8] {
  %p = f32[8]{0} parameter(0)
  %all-reduce.1 = f32[8]{0} all-reduce(%p), replica_groups={{0,1},{2,3},{4,5},{6,7}}, to_apply=%add
  %unread.1 = f32[8]{0} OPERATION
  ROOT %negate.1 = f32[8]{0} negate(%p)
}
"""


@pytest.mark.parametrize(
    "operation, kept",
    [
        ("negate(%all-reduce.1)", []),
        ("send(%all-reduce.1), channel_id=1", ["all-reduce.1"]),
        ("outfeed(%all-reduce.1)", ["all-reduce.1"]),
        ('custom-call(%all-reduce.1), custom_call_target="print"', ["all-reduce.1"]),
        ("call(%p), to_apply=%inner", ["all-reduce.2"]),
        ("while(%p), condition=%inner, body=%inner", ["all-reduce.2"]),
        ("conditional(%p), branch_computations={%inner}", ["all-reduce.2"]),
    ],
    ids=["pure", "send", "outfeed", "custom-call", "call", "while", "conditional"],
)
def test_what_may_have_an_effect_is_kept_unread(operation, kept):
    mesh = make_mesh(MeshSpec(data=4, tensor=2), jax.devices())
    text = hlo.drop_unused(EFFECT.replace("OPERATION", operation))
    assert [one.name for one in hlo.collectives(text, mesh)] == kept


def test_operations_of_a_product():
    assert products_of(jnp.matmul, (8, 4), (4, 6)) == PRODUCT
    assert products_of(lambda x, w: jnp.sin(x) + w.sum(), (8, 4), (4, 6)) == 0


def test_operations_of_a_batched_product():
    assert products_of(jnp.matmul, (5, 8, 4), (5, 4, 6)) == 5 * PRODUCT

    def product(x, w):
        return jnp.einsum("bti,bsi->bts", x, w)

    assert products_of(product, (5, 8, 4), (5, 6, 4)) == 5 * PRODUCT


def test_operations_of_a_gradient_are_three_products():
    def loss(x, w):
        return jnp.square(jnp.sin(x) @ w).sum()

    assert products_of(jax.grad(loss, argnums=(0, 1)), (8, 4), (4, 6)) == 3 * PRODUCT


def test_a_scan_counts_its_body_as_often_as_it_runs():
    def scanned(x, w):
        return jax.lax.scan(lambda x, w: (jnp.tanh(x @ w), None), x, w)[0]

    assert products_of(scanned, (8, 4), (7, 4, 4)) == 7 * 2 * 8 * 4 * 4


def test_a_device_counts_its_share_of_an_einsum():
    mesh = make_mesh(MeshSpec(data=4, tensor=2), jax.devices())

    def split(*axes):
        return jax.NamedSharding(mesh, jax.P(*axes))

    def product(x, w):
        return jnp.einsum("bti,io->bto", x, w)

    shapes = (4, 8, 4), (4, 6)
    whole = 4 * PRODUCT
    assert products_of(product, *shapes, shardings=(split("data"), split())) == whole / 4
    over_both = (split("data"), split(None, "tensor"))
    assert products_of(product, *shapes, shardings=over_both) == whole / 8
    assert products_of(product, *shapes, shardings=(split(), split())) == whole
