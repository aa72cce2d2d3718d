"""Arrays move between any two layouts, to the bit, while they are still being computed."""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding, SingleDeviceSharding
from jax.sharding import PartitionSpec as P

from jaxpar.mesh import MeshSpec, make_mesh
from jaxpar.transfers import move

LAYOUTS = {  # sizes (data, fsdp, tensor), first device or order, spec
    "all": ((2, 2, 2), range(8), P("data", ("fsdp", "tensor"))),
    "all turned": ((2, 2, 2), [7, 6, 5, 4, 3, 2, 1, 0], P("tensor", "data")),
    "front": ((2, 1, 2), range(4), P("data", "tensor")),
    "back": ((4, 1, 1), range(4, 8), P(None, "data")),
    "middle": ((1, 2, 1), range(3, 5), P("fsdp")),
    "whole": ((1, 1, 2), range(6, 8), P()),
    "one": ((1, 1, 1), [5], P()),
}


def layout(name):
    sizes, devices, spec = LAYOUTS[name]
    return NamedSharding(make_mesh(MeshSpec(*sizes), [jax.devices()[i] for i in devices]), spec)


@pytest.mark.parametrize(("source", "target"), list(itertools.permutations(LAYOUTS, 2)))
def test_any_layout_to_any_other(source, target):
    values = np.arange(16 * 8).reshape(16, 8)
    x = jax.device_put(values, layout(source))
    y = move(x, layout(target))
    assert y.sharding == layout(target)
    np.testing.assert_array_equal(y, values)
    np.testing.assert_array_equal(x, values)


@pytest.mark.parametrize("target", ["front", "one"])
def test_from_the_host_and_from_a_lone_device(target):
    values = np.arange(16 * 8.0).reshape(16, 8)
    for x in (values, jnp.asarray(values), jax.device_put(values, jax.devices()[1])):
        y = move(x, layout(target))
        assert y.sharding == layout(target)
        np.testing.assert_array_equal(y, values)
    x = jax.device_put(values, jax.devices()[1])
    assert move(x, x.sharding) is x
    with pytest.raises(ValueError, match="the target must be a NamedSharding"):
        move(x, SingleDeviceSharding(jax.devices()[2]))


@pytest.mark.parametrize(
    "route", ["front-back", "front-middle", "back-one", "all-whole", "middle-all"]
)
def test_nobody_waits_for_the_content(route):
    source, target = route.split("-")
    slow = jax.jit(
        lambda x: jax.lax.fori_loop(0, 300, lambda _, c: jnp.tanh(c @ c), x),
        out_shardings=layout(source),
    )
    early = []
    for _ in range(
        6
    ):  # the first time compiles, and on a busy machine this thread may be the one that waits
        x = slow(jax.device_put(jnp.full((256, 256), 0.004), layout(source)))
        y = move(x, layout(target))
        early.append(not y.is_ready())
        np.testing.assert_array_equal(y, x)
        if any(early[1:]):
            break
    assert any(early[1:])
