"""Values that are known on the host, those that are not, and maxima that see NaN."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec

from jaxpar.mesh import MeshSpec, make_mesh, use_mesh
from jaxpar.types import concrete_values, largest


def test_trees_keep_their_structure():
    given = {"a": jnp.arange(3), "b": [2.5, None]}
    tree, flag, nothing = concrete_values(given, True, None)
    assert jax.tree.structure(tree) == jax.tree.structure(given)
    assert all(isinstance(leaf, np.ndarray) for leaf in jax.tree.leaves((tree, flag)))
    assert tree["a"].tolist() == [0, 1, 2]
    assert tree["b"][0] == 2.5
    assert flag
    assert nothing is None
    assert concrete_values() == ()


def test_numpy_arrays_are_not_copied():
    array = np.arange(3)
    assert concrete_values(array)[0] is array


def test_a_captured_array_is_known_and_what_comes_of_it_is_not():
    array = jnp.arange(3.0)

    @jax.jit
    def program():
        assert bool((np.diff(concrete_values(array)[0]) > 0).all())
        assert concrete_values(array + 1) is None
        return array

    program()


@pytest.mark.parametrize("transform", [jax.jit, jax.vmap, jax.grad, jax.linearize])
def test_a_tracer_is_unknown_among_others(transform):
    def program(x):
        assert concrete_values(np.ones(2), {"x": x}) is None
        return x.sum()

    values = jnp.ones(3)
    if transform is jax.linearize:
        transform(program, values)
    else:
        transform(program)(values)


def test_a_shape_has_no_value():
    assert concrete_values(jax.ShapeDtypeStruct((2,), jnp.float32)) is None


@pytest.mark.parametrize("shape", [(), (2, 3)])
def test_a_typed_key_is_known_by_its_words(shape):
    keys = jax.random.split(jax.random.key(7), shape)
    want = np.asarray(jax.random.key_data(keys))

    @jax.jit
    def program():
        words = concrete_values(keys)[0]
        assert words.dtype == np.uint32
        np.testing.assert_array_equal(words, want)
        assert concrete_values(jax.random.fold_in(jax.random.key(0), 1)) is None
        return 0

    program()
    np.testing.assert_array_equal(concrete_values(keys)[0], want)


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float8_e4m3fn, jnp.int4, bool, jnp.complex64])
def test_types_stay_as_they_are(dtype):
    array = jnp.asarray([0, 1], dtype)
    values = concrete_values(array)[0]
    assert values.dtype == array.dtype
    assert (values == np.asarray([0, 1], values.dtype)).tolist() == [True, True]


def test_a_split_array_is_whole_where_all_of_it_is_here(monkeypatch):
    with use_mesh(make_mesh(MeshSpec(data=8))) as mesh:
        split = jax.device_put(jnp.arange(16), NamedSharding(mesh, PartitionSpec("data")))
        everywhere = jax.device_put(jnp.arange(16), NamedSharding(mesh, PartitionSpec()))
    assert concrete_values(split)[0].tolist() == list(range(16))
    assert concrete_values(everywhere)[0].tolist() == list(range(16))

    # As with several processes: each holds a part of the one, and all of the other.
    monkeypatch.setattr(type(split), "is_fully_addressable", property(lambda array: False))
    assert concrete_values(split) is None
    assert concrete_values(everywhere) is not None


@pytest.mark.parametrize("axis", [None, 0, -1])
@pytest.mark.parametrize("shape", [(10_000,), (1000, 64), (8, 1000)])
def test_the_largest_is_infinite_where_an_entry_is_nan(shape, axis):
    """XLA for CPUs leaves NaN out of `jnp.max` of these."""
    x = np.random.default_rng(0).standard_normal(shape).astype(np.float32)
    x[tuple(size // 2 for size in shape)] = np.nan
    for sign in (1, -1):
        want = np.max(sign * x, axis)
        got = jax.jit(lambda x, sign=sign: largest(sign * x, axis))(x)
        np.testing.assert_array_equal(got, np.where(np.isnan(want), np.inf, want))


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float32, jnp.int32])
def test_the_largest_of_numbers_is_their_maximum(dtype):
    x = jnp.arange(-3, 9).astype(dtype).reshape(3, 4)
    got = largest(x, 1)
    assert got.dtype == dtype
    assert got.tolist() == [0, 4, 8]
    assert largest(x) == 8


def test_the_largest_stays_infinite_over_devices():
    """`lax.pmax` leaves NaN out, too."""
    x = np.array([1, 2, np.nan, 4], np.float32)
    mesh = make_mesh(MeshSpec(data=2), jax.devices()[:2])
    spec = PartitionSpec("data")
    both = jax.shard_map(
        lambda x: jax.lax.pmax(largest(x), "data"),
        mesh=mesh,
        in_specs=spec,
        out_specs=PartitionSpec(),
    )
    assert jax.jit(both)(jax.device_put(x, NamedSharding(mesh, spec))) == np.inf
