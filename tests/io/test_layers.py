"""A state saved with stacked layers comes back a layer at a time, and the other way round, on any mesh."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from jaxpar.io import Checkpoints, RunMismatchError
from jaxpar.io.layers import LeafSource, match_layers
from jaxpar.io.reading import _older_name

L = 3


def grid(shape, *axes):
    return NamedSharding(
        Mesh(np.array(jax.devices()[: np.prod(shape)]).reshape(shape), ("a", "b")),
        PartitionSpec(*axes),
    )


def stacked():
    """Parameters and the two moments of an optimizer, with leaves stacked over layers."""
    rng = np.random.default_rng(0)

    def params(dtype):
        draw = lambda *shape: jnp.asarray(rng.standard_normal(shape), dtype)  # noqa: E731
        return {
            "embedding": draw(8, 4),
            "layers": {"norm": {"scale": draw(L, 4)}, "wq": draw(L, 4, 8)},
        }

    moments = ({"mu": params(jnp.bfloat16), "nu": params(jnp.float32)}, jnp.int32(7))
    return {"params": params(jnp.float32), "opt_state": moments}


def per_layer(state):
    """The same by plain indexing."""

    def cut(params):
        layers = [jax.tree.map(lambda x, i=i: x[i], params["layers"]) for i in range(L)]
        return {"embedding": params["embedding"], "layers": layers}

    moments, count = state["opt_state"]
    return {
        "params": cut(state["params"]),
        "opt_state": ({k: cut(v) for k, v in moments.items()}, count),
    }


def abstract(state, shape):
    """Splits the last dimension of matrices over b, the one before over a."""

    def leaf(path, x):
        in_layer = "layers" in jax.tree_util.keystr(path)
        stack = in_layer and any(n == L for n in x.shape[:1])
        axes = ("a", "b") if x.ndim - stack == 2 else (None,) * (x.ndim - stack)
        return jax.ShapeDtypeStruct(
            x.shape, x.dtype, sharding=grid(shape, *([None] * stack), *axes)
        )

    return jax.tree_util.tree_map_with_path(leaf, state)


def assert_same(got, want):
    assert jax.tree.structure(got) == jax.tree.structure(want)
    for (path, a), b in zip(
        jax.tree_util.tree_leaves_with_path(got), jax.tree.leaves(want), strict=True
    ):
        assert a.dtype == b.dtype
        np.testing.assert_array_equal(a, b, err_msg=jax.tree_util.keystr(path))


@pytest.fixture
def checkpoints(tmp_path):
    opened = Checkpoints(tmp_path)
    yield opened
    opened.close()


@pytest.mark.parametrize(
    "saved_as, wanted_as", [("stacked", "per layer"), ("per layer", "stacked")]
)
def test_saved_in_one_form_and_restored_in_the_other(checkpoints, saved_as, wanted_as):
    forms = {"stacked": stacked(), "per layer": per_layer(stacked())}
    wanted = forms[wanted_as]
    checkpoints.save(1, forms[saved_as], {}, {})
    for shape in ((1, 1), (2, 4), (4, 1)):
        asked = abstract(wanted, shape)
        restored = checkpoints.restore(1, asked)
        assert_same(restored, wanted)
        for got, want in zip(jax.tree.leaves(restored), jax.tree.leaves(asked), strict=True):
            assert got.sharding.is_equivalent_to(want.sharding, got.ndim)
    step, _ = checkpoints.restore_newest(abstract(wanted, (1, 2)), {})
    assert step == 1


def test_layers_that_are_split_over_a_mesh_axis(checkpoints):
    keys = {str(i): jax.random.key(i) for i in range(4)}
    state = {str(i): jnp.arange(6.0) + i for i in range(4)}
    checkpoints.save(1, {"w": state, "key": keys}, {}, {})
    wanted = {
        "w": jax.ShapeDtypeStruct((4, 6), jnp.float32, sharding=grid((4, 2), "a", "b")),
        "key": jax.ShapeDtypeStruct((4,), keys["0"].dtype, sharding=grid((4, 2), "a")),
    }
    restored = checkpoints.restore(1, wanted)
    assert restored["w"].sharding.spec == PartitionSpec("a", "b")
    np.testing.assert_array_equal(restored["w"], np.arange(6.0) + np.arange(4)[:, None])
    words = [jax.random.key_data(key) for key in keys.values()]
    np.testing.assert_array_equal(jax.random.key_data(restored["key"]), words)


def layout(**leaves):
    return {path: ("float32", shape) for path, shape in leaves.items()}


@pytest.mark.parametrize(
    "saved, wanted",
    [
        ({"w/0": (4,), "w/1": (4,)}, {"w": (3, 4)}),  # a layer too few
        ({"w/0": (4,), "w/1": (5,)}, {"w": (2, 4)}),  # of other shapes
        ({"w": (3, 4)}, {"w/0": (4,), "w/1": (4,)}),  # one would be lost
        ({"w": (3, 4)}, {"w/1": (4,), "w/2": (4,), "w/3": (4,)}),  # counted from one
        ({"w/a": (4,), "w/b": (4,)}, {"w": (2, 4)}),  # no numbers
        (
            {"w/0/v": (4,), "w/1/v": (4,), "w/v/0": (4,), "w/v/1": (4,)},
            {"w/v": (2, 4)},
        ),  # two readings
        ({"w": ()}, {"w/0": ()}),
        ({}, {"w": (0, 4)}),
    ],
)
def test_what_is_no_stack_is_not_taken_for_one(saved, wanted):
    assert match_layers(layout(**saved), layout(**wanted)) == {}


def test_numbers_elsewhere_in_a_path_stay_what_they_are():
    saved, wanted = {"0/1/w": (2, 4), "0/b": (3,)}, {"0/1/w/0": (4,), "0/1/w/1": (4,), "0/b": (3,)}
    sources = match_layers(layout(**saved), layout(**wanted))
    cuts = {f"0/1/w/{i}": LeafSource(("0/1/w",), i) for i in range(2)}
    assert sources == cuts | {"0/b": LeafSource(("0/b",))}
    back = match_layers(layout(**wanted), layout(**saved))
    assert back == {"0/1/w": LeafSource(("0/1/w/0", "0/1/w/1")), "0/b": LeafSource(("0/b",))}


def test_a_layer_too_many_is_named(checkpoints):
    checkpoints.save(1, {"w": jnp.ones((3, 4)), "b": jnp.ones(2)}, {}, {})
    leaf = jax.ShapeDtypeStruct((4,), jnp.float32, sharding=grid((1, 1)))
    with pytest.raises(RunMismatchError, match=r"w/0 is absent there and float32\[4\] here"):
        checkpoints.restore(
            1,
            {"w": [leaf] * 2, "b": jax.ShapeDtypeStruct((2,), jnp.float32, sharding=grid((1, 1)))},
        )


def test_older_names_stand_for_whole_parts_of_a_path():
    renamed = {"innovation": "mark", "rates/tau": "rates/target"}
    assert _older_name("genomes/innovation", renamed) == "genomes/mark"
    assert _older_name("innovations/innovation/tau", renamed) == "innovations/mark/tau"
    assert (
        _older_name("rates/tau", renamed) == "rates/target"
        and _older_name("rates/taus", renamed) == "rates/taus"
    )
