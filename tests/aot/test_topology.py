"""Chips by name, and compile-only devices in a process of its own."""

import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace

import jax
import pytest

from jaxpar.aot import CHIPS, chip_of, devices, parse_topology
from jaxpar.aot.topology import hbm_bytes
from jaxpar.types import UsageError

ROOT = Path(__file__).parents[2]
SIZES = {
    "v4:2x2x1": 4,
    "v5e:1x1": 1,
    "v5e:16x16": 256,
    "v5p:4x4x4": 64,
    "v5p:3x3x3": 27,
    "v6e:2x4": 8,
}
SIZES |= {"tpu7x:2x2x1": 8, "v5p:16x16x24": 6144}


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        (
            "v5q:2x2",
            "topology='v5q:2x2' is unknown; legal are .*v4:2x2x2, v5e:4x4, v5p:4x4x4, v6e:4x4, tpu7x:2x2x1",
        ),
        ("v5p", "topology='v5p' is unknown"),
        ("v5e:4x4x4", "v5e takes 2 sizes joined by x, such as v5e:4x4"),
        ("v5p:4x4", "v5p takes 3 sizes"),
        ("h100:2x2", "h100 takes a number of GPUs, such as h100:8"),
        ("h100:0", "h100 takes a number of GPUs"),
    ],
)
def test_wrong_names_say_what_is_legal(text, sentence):
    with pytest.raises(UsageError, match=sentence):
        parse_topology(text)


def test_names_are_read():
    topology = parse_topology("TPU7x:2x2x1")
    assert (topology.text, topology.num_devices, topology.offline) == ("tpu7x:2x2x1", 8, False)
    assert parse_topology("h200:16").offline and parse_topology("h200:16").num_devices == 16
    with pytest.raises(UsageError, match="estimated analytically"):
        devices(parse_topology("h200:16"))


@pytest.mark.parametrize(
    ("kind", "name"),
    [
        ("TPU v5", "v5p"),
        ("TPU v5 lite", "v5e"),
        ("TPU v4", "v4"),
        ("NVIDIA H100 80GB HBM3", "h100"),
        ("cpu", None),
    ],
)
def test_chip_of_a_device(kind, name):
    chip = chip_of(SimpleNamespace(device_kind=kind))
    assert chip is (CHIPS[name] if name else None)


def test_a_device_that_knows_its_memory_is_asked():
    known = SimpleNamespace(device_kind="NVIDIA H100", memory_stats=lambda: {"bytes_limit": 7})
    assert hbm_bytes(known) == 7
    assert hbm_bytes(jax.devices()[0]) is None


def test_peaks_are_of_one_magnitude():
    """A slipped factor of a thousand, or a chip's numbers for half a chip, would show here."""
    for chip in CHIPS.values():
        assert 100 < chip.flops / chip.hbm_bandwidth < 600, chip  # operations a byte at the ridge
        assert 10 < chip.hbm_bytes / chip.hbm_bandwidth * 1e3 < 60, (
            chip
        )  # milliseconds to read all of the memory
        assert 1000 < chip.flops / chip.link_bandwidth < 12000, chip


@pytest.mark.skipif(find_spec("libtpu") is None, reason="libtpu is not installed")
def test_compile_only_devices_come_in_silence():
    script = (
        "from jaxpar.aot import chip_of, devices, parse_topology\n"
        f"for name in {list(SIZES)}:\n"
        "    found = devices(parse_topology(name))\n"
        "    print(name, len(found), chip_of(found[0]).name)\n"
    )
    env = {k: v for k, v in os.environ.items() if not k.startswith(("XLA", "TPU_", "ALLOW_"))}
    env |= {"PYTHONPATH": str(ROOT), "JAX_PLATFORMS": "cpu"}
    done = subprocess.run(
        [sys.executable, "-c", script], env=env, capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0 and done.stderr == "", done.stderr
    assert done.stdout.split("\n")[:-1] == [
        f"{name} {count} {name.split(':')[0]}" for name, count in SIZES.items()
    ]


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        (
            "INVALID_ARGUMENT: Invalid hosts: {x = 5000, y = 3, z = 1, w = nullopt}\n=== Source Location Trace ===",
            "topology=v5e:5000x3 is no slice that libtpu knows; legal is a shape such as v5e:4x4.",
        ),
        (
            "ABORTED: The TPU is already in use by process with pid 7.\nlearning/45eac/tfrc/runtime/libtpu_init.cc:370",
            "libtpu does not start for topology=v5e:5000x3 (aborted); another process may hold it, "
            "or it does not fit this jaxlib.",
        ),
        (
            "",
            "libtpu does not start for topology=v5e:5000x3 (it does not say why); another process may hold it, "
            "or it does not fit this jaxlib.",
        ),
    ],
    ids=["shape", "held", "silent"],
)
def test_what_libtpu_says_is_said_in_our_words(text, sentence, monkeypatch, capfd):
    from jax.experimental import topologies

    def refuse(*args, **kwargs):
        os.write(2, b"E0000 common_lib.cc:906] INVALID_ARGUMENT\n")
        raise jax.errors.JaxRuntimeError(text)

    monkeypatch.setattr(topologies, "get_topology_desc", refuse)
    monkeypatch.setattr("importlib.util.find_spec", lambda name: True)
    monkeypatch.setenv("TPU_SKIP_MDS_QUERY", "1")
    monkeypatch.setenv("ALLOW_MULTIPLE_LIBTPU_LOAD", "1")
    with pytest.raises(UsageError) as caught:
        devices(parse_topology("v5e:5000x3"))
    assert str(caught.value) == sentence and capfd.readouterr() == ("", "")


MESHES = """
import jax
from jaxpar.aot import devices, factorisations, parse_topology
from jaxpar.mesh import AXES, MeshSpec, make_mesh

for name in ("v5p:4x4x4", "v6e:4x4", "v5p:3x3x3", "tpu7x:2x2x2"):
    found, split = devices(parse_topology(name)), []
    for data, fsdp, tensor in factorisations(len(found), 3):
        mesh = make_mesh(MeshSpec(data=data, fsdp=fsdp, tensor=tensor), found)
        assert set(mesh.devices.flat) == set(found) and set(mesh.axis_types) == {jax.sharding.AxisType.Auto}
        assert dict(mesh.shape) == dict.fromkeys(AXES, 1) | {"data": data, "fsdp": fsdp, "tensor": tensor}
        try:
            assert (mesh.devices == jax.make_mesh(mesh.devices.shape, AXES, devices=found).devices).all()
        except NotImplementedError:
            split.append((data, fsdp, tensor))
            # What shares the fastest axis lies in a box of the torus: coordinates are a product of their ranges.
            for group in mesh.devices.reshape(-1, tensor):
                sides = [len(set(side)) for side in zip(*(device.coords for device in group))]
                cores = len({device.core_on_chip for device in group})
                assert sides[0] * sides[1] * sides[2] * cores == tensor, (name, data, fsdp, tensor)
    print(name, len(split), (1, 8, 8) in split)
"""


@pytest.mark.skipif(find_spec("libtpu") is None, reason="libtpu is not installed")
def test_every_factorisation_of_a_slice_is_a_mesh():
    """As `jax.make_mesh` arranges it where axes of the torus multiply to the mesh's, else with axes of it split."""
    env = os.environ | {"PYTHONPATH": str(ROOT), "JAX_PLATFORMS": "cpu"}
    done = subprocess.run(
        [sys.executable, "-c", MESHES], env=env, capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stderr[-2000:]
    assert "v5p:4x4x4" in done.stdout and " True" in done.stdout.splitlines()[0], done.stdout
