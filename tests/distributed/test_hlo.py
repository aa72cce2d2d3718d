"""The reader of collectives, on lines as XLA writes them."""

import hlo
import jax
import numpy as np
import pytest

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
        ("mesh['a'=2,'b'=2,'c'=2], device_ids=([2,2,2]T(2,1,0)) {'c'}, x", [(0, 4), (2, 6), (1, 5), (3, 7)]),
        ("mesh['a'=8] {'a':(1)2}, x", STRIDED),
        ("mesh['a'=8] {'a':(4)2}, x", PAIRS),
        ("mesh['a'=2,'b'=4], device_ids=(7,6,5,4,3,2,1,0) {'a'}, x", [(7, 3), (6, 2), (5, 1), (4, 0)]),
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

ENTRY %main.3_spmd (param: f32[4,4]) -> f32[4,4] {
  %psum.1 = f32[2,24]{1,0} all-reduce(%x), channel_id=1, replica_groups=[4,2]<=[8], to_apply=%add
  %all-reduce.9 = (f32[], f32[32,8]{1,0}, /*index=5*/bf16[7]{0}) all-reduce(%a, %b, %c), replica_groups=[2,4]<=[8], x
  %all-gather-start.1 = (f32[4]{0}, f32[8]{0}) all-gather-start(%y), replica_groups=[4,2]<=[2,2,2]T(0,2,1), d={0}
  %all-gather-done.1 = f32[8]{0} all-gather-done(%all-gather-start.1)
  %fusion.1 = f32[8]{0} fusion(%all-gather.3, %all-reduce.9), kind=kLoop, calls=%fused
  %collective-permute.1 = f32[4]{0} collective-permute(%z), source_target_pairs={{0,1},{1,0}}
  ROOT %all-to-all.1 = (f32[2]{0}, f32[2]{0}) all-to-all(%u, %v), replica_groups={{0,1},{2,3},{4,5},{6,7}}
  %all-reduce.10 = f32[] all-reduce(%w), replica_groups={{0},{1},{2},{3},{4},{5},{6},{7}}, to_apply=%add
}
"""


def test_collectives_of_a_module():
    mesh = make_mesh(MeshSpec(data=2, fsdp=2, tensor=2), jax.devices())
    assert hlo.collectives(MODULE, mesh) == [
        ("reduce-scatter", ("data",), ((64, 32),), "all-reduce.57"),
        ("all-reduce", ("tensor",), ((2, 24),), "psum.1"),
        ("all-reduce", ("fsdp", "tensor"), ((), (32, 8), (7,)), "all-reduce.9"),
        ("all-gather", ("fsdp",), ((8,),), "all-gather-start.1"),
        ("collective-permute", None, ((4,),), "collective-permute.1"),
        ("all-to-all", ("tensor",), ((2,), (2,)), "all-to-all.1"),
    ]
