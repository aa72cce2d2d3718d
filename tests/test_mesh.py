"""Meshes, the rule table, and the sentence for every mistake with them."""

import os
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from jaxpar.mesh import (
    AXES,
    LAYOUTS,
    RULES,
    MeshSpec,
    axes_like,
    constrain,
    gather,
    in_role,
    local,
    make_mesh,
    mesh_axes,
    named_shardings,
    partition,
    place_rows,
    platform,
    rules_from,
    scatter,
    shard,
    use_mesh,
)
from jaxpar.types import UsageError


def mesh_of(*sizes):
    return make_mesh(MeshSpec(*sizes), jax.devices()[: int(np.prod(sizes))])


# ---------------------------------------------------------------- sizes


def test_all_axes_always_exist():
    mesh = mesh_of(2, 2, 2)
    assert mesh.axis_names == AXES and mesh.size == 8
    assert dict(mesh.shape) == dict(stage=1, data=2, fsdp=2, inner=1, expert=1, context=1, tensor=2)
    assert dict(make_mesh().shape)["data"] == 8


@pytest.mark.parametrize(
    ("spec", "devices", "sentence"),
    [
        (
            MeshSpec(data=3),
            8,
            "mesh data=3 needs 3 devices but 8 are here; the nearest legal choice is data=8.",
        ),
        (
            MeshSpec(fsdp=2, tensor=3),
            8,
            "mesh fsdp=2 tensor=3 needs 6 devices but 8 are here; the nearest legal choice is tensor=4.",
        ),
        (
            MeshSpec(data=3, fsdp=3),
            8,
            "mesh data=3 fsdp=3 needs 9 devices but 8 are here; the nearest legal choice is data=8 and nothing else.",
        ),
        (
            MeshSpec(),
            8,
            "mesh data=1 needs 1 devices but 8 are here; the nearest legal choice is data=8.",
        ),
        (
            MeshSpec(-1, -1),
            8,
            "mesh data=-1 fsdp=-1 leaves data and fsdp open; only one axis may be -1.",
        ),
        (
            MeshSpec(data=2, fsdp=4, inner=3),
            8,
            "mesh inner=3 does not divide fsdp=4; legal are 1, 2, 4.",
        ),
        (
            MeshSpec(data=-1, tensor=3),
            8,
            "mesh data=-1 tensor=3 needs 3 devices but 8 are here; the nearest legal",
        ),
    ],
    ids=str,
)
def test_sizes_that_do_not_fit(spec, devices, sentence):
    with pytest.raises(UsageError) as error:
        spec.sizes(devices)
    assert str(error.value).startswith(sentence) and str(error.value).count(".") == 1


@given(st.integers(1, 64), st.lists(st.sampled_from([-1, 1, 2, 3, 4, 8]), min_size=3, max_size=3))
def test_sizes_multiply_to_the_devices_or_the_choice_told_does(devices, asked):
    spec = MeshSpec(*asked)
    try:
        sizes = spec.sizes(devices)
    except UsageError as error:
        if "nearest" not in str(error) or "nothing else" in str(error):
            return
        name, size = str(error).rstrip(".").split("choice is ")[1].split("=")
        sizes = MeshSpec(**(vars(spec) | {name: int(size)})).sizes(devices)  # must be legal itself
    assert np.prod(list(sizes.values())) == devices


@pytest.mark.parametrize("devices", [8, 12])
def test_the_choice_told_is_the_nearest(devices):
    """With the rest open, tensor=5 is nearest to a divisor, not to all devices."""
    with pytest.raises(UsageError) as error:
        MeshSpec(data=-1, tensor=5).sizes(devices)
    told = int(str(error.value).rstrip(".").split("tensor=")[-1])
    divisors = [n for n in range(1, devices + 1) if devices % n == 0]
    assert abs(told - 5) == min(abs(n - 5) for n in divisors)


# ---------------------------------------------------------------- rules


def test_rules_from_changes():
    rules = rules_from({"embed": "none", "batch": "data+expert", "mlp": ""})
    assert rules["embed"] == rules["mlp"] == () and rules["batch"] == ("data", "expert")
    assert rules["embed_weight"] == rules["embed_grad"] == ()
    assert rules["heads"] == RULES["heads"] and RULES["embed"] == ("inner", "fsdp")
    assert rules_from({"embed": "none", "embed_grad": "fsdp"})["embed_grad"] == ("fsdp",)


def test_an_axis_merged_of_several_is_split_by_the_rules_of_each():
    with use_mesh(make_mesh(MeshSpec(data=2, context=4))):
        assert mesh_axes("batch+time") == ("data", "context") and mesh_axes("time+batch") == (
            "context",
            "data",
        )
        assert partition(("batch+time", None), (8, 3)) == jax.sharding.PartitionSpec(
            ("data", "context"), None
        )
        with pytest.raises(UsageError, match="unknown logical axis 'tme'"):
            mesh_axes("batch+tme")
        with pytest.raises(
            UsageError, match="uses mesh axis 'context' twice, for 'time' and 'batch.space'"
        ):
            partition(("time", "batch+space"))


def test_an_axis_can_be_named_without_those_of_another():
    with use_mesh(make_mesh(MeshSpec(data=2, expert=2, context=2))):
        assert mesh_axes("batch") == ("data", "expert") and mesh_axes("batch-experts") == ("data",)
        assert (
            mesh_axes("batch+time-experts") == ("data", "context")
            and mesh_axes("batch-experts+batch") == ()
        )
        with pytest.raises(UsageError, match="unknown logical axis 'expert'"):
            mesh_axes("batch-expert")


def test_layouts_are_changes_of_the_table():
    assert rules_from() == RULES
    both = rules_from({"heads": "none"}, "zero2+sequence")
    assert (
        both["embed_weight"] == () and both["seq"] == ("context", "tensor") and both["heads"] == ()
    )
    whole, inner, nowhere = ("inner", "fsdp"), ("inner",), ()
    held = {  # parameters at rest, weights while a step holds them, and what gradients are summed into
        "zero3": (whole, whole, whole),
        "zero2": (whole, nowhere, whole),
        "zero1": (whole, nowhere, nowhere),
        "hybrid": (inner, inner, inner),
        "nested": ((*whole, "data"), inner, whole),
        "stages": (whole, whole, whole),
        "sequence": (whole, whole, whole),
        "2d": (whole, whole, whole),
    }
    assert held.keys() == LAYOUTS.keys()
    for name, changes in LAYOUTS.items():
        assert (
            tuple(rules_from(layout=name)[f"embed{role}"] for role in ("", "_weight", "_grad"))
            == held[name]
        )
        assert changes.keys() <= RULES.keys()
        rules = rules_from(layout=name)
        # A share over more axes is a slice of the share over fewer, so that no layout shuffles.
        assert rules["embed"][: len(rules["embed_grad"])] == rules["embed_grad"]
        assert rules["embed"][: len(rules["embed_weight"])] == rules["embed_weight"]
    with pytest.raises(
        UsageError, match="layout 'zero4' is unknown; legal are zero3, zero2, zero1"
    ):
        rules_from(layout="zero4")


def test_the_inner_axis_is_a_part_of_fsdp():
    sizes = MeshSpec(data=2, fsdp=-1, inner=2).sizes(16)
    assert sizes["fsdp"] == 4 and sizes["inner"] == 2 and np.prod(list(sizes.values())) == 16
    mesh = make_mesh(MeshSpec(fsdp=8, inner=4), jax.devices())
    with use_mesh(mesh, rules_from(layout="hybrid")):
        assert partition(("embed",)) == jax.P("inner") and partition(("batch",)) == jax.P(
            ("fsdp", "inner")
        )
        assert in_role(("layers", "embed", "heads"), "grad") == ("layers", "embed_grad", "heads")
        assert in_role(("vocab", "embed"), "use") == ("vocab", None)


def test_gather_and_scatter_lay_value_and_gradient_out_apart():
    split, whole = ("embed",), (None,)
    assert gather(jnp.ones(8), split, whole).sharding.is_fully_replicated  # no mesh: the identity
    with use_mesh(mesh_of(1, 8, 1)):
        x = shard(jnp.arange(8.0), split)
        for move, first, second in ((gather, split, whole), (scatter, whole, split)):
            layouts = [
                jax.NamedSharding(jax.sharding.get_mesh(), partition(axes))
                for axes in (first, second)
            ]
            y = jax.jit(lambda x, move=move, a=first, b=second: move(x, a, b))(x)
            (grad,) = jax.jit(
                lambda x, g, move=move, a=first, b=second: jax.vjp(lambda x: move(x, a, b), x)[1](g)
            )(x, y)
            assert grad.sharding.is_equivalent_to(layouts[0], 1) and y.sharding.is_equivalent_to(
                layouts[1], 1
            )
            np.testing.assert_array_equal(grad, np.arange(8.0))


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        (
            {"width": "data"},
            "rule for unknown axis 'width'; logical axes are batch, seq, seq_layer, time, space",
        ),
        (
            {"batch": "data+dp"},
            "rule batch=data+dp names unknown mesh axis 'dp'; legal are stage, data, fsdp",
        ),
    ],
)
def test_rules_that_do_not_exist(changes, sentence):
    with pytest.raises(UsageError, match=sentence.replace("+", r"\+")):
        rules_from(changes)


def test_every_rule_names_mesh_axes():
    assert {axis for axes in RULES.values() for axis in axes} <= set(AXES)


def test_axes_of_size_one_hold_nothing():
    with use_mesh(mesh_of(4, 1, 2)):
        assert (
            mesh_axes("batch") == ("data",)
            and mesh_axes("embed") == ()
            and mesh_axes("heads") == ("tensor",)
        )
        assert partition(("batch", None, "heads", "embed")) == jax.P("data", None, "tensor", None)
    with use_mesh(mesh_of(2, 2, 2)):
        assert partition(("batch", None)) == jax.P(("data", "fsdp"), None)
    assert mesh_axes("batch") == ()


@pytest.mark.parametrize(
    ("call", "sentence"),
    [
        (
            lambda: mesh_axes("width"),
            "unknown logical axis 'width'; the rule table knows batch, seq",
        ),
        (
            lambda: partition(("heads", "mlp"), (4, 4), "w"),
            "w with axes ('heads', 'mlp') uses mesh axis 'tensor' twice, for 'heads' and 'mlp'; change one",
        ),
        (
            lambda: partition(("batch", "embed")),
            "uses mesh axis 'fsdp' twice, for 'batch' and 'embed'",
        ),
        (
            lambda: partition(("batch", None), (6, 3), "tokens"),
            "tokens: dimension 0 (batch) of size 6 does not divide over data*fsdp=4; the nearest legal sizes are 4 or",
        ),
        (
            lambda: partition((None, "heads"), (6, 1), "wq"),
            "wq: dimension 1 (heads) of size 1 does not divide over tensor=2; the nearest legal sizes are 2.",
        ),
        (
            lambda: partition(("batch",), (6, 1), "wq"),
            "wq of shape (6, 1) has 2 dimensions but axes ('batch',).",
        ),
        (
            lambda: constrain(jnp.zeros((3, 2)), "batch", None),
            "activation: dimension 0 (batch) of size 3",
        ),
        (
            lambda: named_shardings({"a": {"b": jnp.zeros(3)}}, {"a": {"b": ("heads",)}}),
            "a.b: dimension 0 (heads)",
        ),
        (
            lambda: local(lambda x: x, [("batch",)], ("batch",))(jnp.zeros(3)),
            "argument 0: dimension 0 (batch)",
        ),
    ],
    ids=range(9),
)
def test_mistakes_with_axes_are_told(call, sentence):
    with use_mesh(mesh_of(2, 2, 2)), pytest.raises(UsageError) as error:
        call()
    assert sentence in str(error.value) and "\n" not in str(error.value)


def test_changing_the_rules_makes_a_new_program():
    """The same jitted function under another table must not reuse the program of the first."""
    traces = []

    @jax.jit
    def double(x):
        traces.append(1)
        return constrain(2 * x, "batch", "embed")

    x, mesh = jnp.ones((8, 8)), mesh_of(4, 2, 1)
    seen = []
    for changes in (
        {"batch": "data"},
        {"batch": "data", "embed": "none"},
        {"batch": "none"},
        {"batch": "data"},
    ):
        with use_mesh(mesh, rules_from(changes)):
            seen.append(double(x).sharding.spec)
    assert seen[0] == seen[3] == jax.P("data", "fsdp")
    assert seen[1] == jax.P("data") and seen[2] == jax.P(None, "fsdp") and len(traces) == 3


# ---------------------------------------------------------------- without a mesh, and placing


def test_without_a_mesh_everything_is_the_identity():
    x = jnp.arange(6.0).reshape(3, 2)
    assert constrain(x, "batch", "heads") is x and shard(x, ("batch", None)) is x
    assert local(abs, [("batch",)], ("batch",)) is abs
    np.testing.assert_array_equal(place_rows(lambda rows: np.arange(10)[rows], 10), np.arange(10))
    assert platform() == "cpu"


def test_shard_places_by_the_rules():
    x = np.arange(64.0).reshape(8, 8)
    with use_mesh(mesh_of(2, 2, 2)):
        y = shard({"w": x, "b": x[0]}, {"w": ("embed", "mlp"), "b": (None,)})
    assert y["w"].sharding.spec == jax.P("fsdp", "tensor") and y["b"].sharding.is_fully_replicated
    jax.tree.map(np.testing.assert_array_equal, y, {"w": x, "b": x[0]})


@pytest.mark.parametrize(
    "sizes", [(8, 1, 1), (1, 8, 1), (1, 1, 8), (2, 2, 2), (4, 1, 2), (1, 1, 1)], ids=str
)
def test_place_rows_is_the_same_for_any_partition(sizes):
    table = {"tokens": np.arange(48).reshape(16, 3), "weights": np.arange(16.0)}
    asked = []

    def rows(part):
        asked.append(part)
        return {name: x[part] for name, x in table.items()}

    with use_mesh(mesh_of(*sizes)):
        placed = place_rows(rows, 16)
        split = sizes[0] * sizes[1]
        assert placed["tokens"].sharding.shard_shape((16, 3)) == (16 // split, 3)
    jax.tree.map(np.testing.assert_array_equal, placed, table)
    assert asked == [slice(0, 16)]


def test_place_rows_that_do_not_divide():
    with (
        use_mesh(mesh_of(8, 1, 1)),
        pytest.raises(UsageError, match=r"batch: dimension 0 \(batch\) of size 12"),
    ):
        place_rows(lambda rows: np.arange(12)[rows], 12)


def test_axes_like_finds_the_copies_of_parameters():
    params = {"a": jnp.zeros((4, 2)), "n": {"a": jnp.zeros(3)}}
    axes = {"a": ("embed", "mlp"), "n": {"a": ("heads",)}}
    tree = {"mu": params, "factored": {"a": jnp.zeros(4)}, "count": jnp.zeros(())}
    assert axes_like(tree, params, axes) == {"mu": axes, "factored": {"a": (None,)}, "count": ()}


# ---------------------------------------------------------------- start of many processes


def test_simulated_devices():
    code = """
import os, jax, jaxpar.mesh
jaxpar.mesh.simulate_devices(3)
print(jax.device_count(), os.environ["PJRT_NPROC"])
"""
    env = dict(os.environ)
    env.pop("PJRT_NPROC")
    command = [sys.executable, "-c", code]
    done = subprocess.run(command, capture_output=True, text=True, check=True, env=env)
    devices, threads = done.stdout.split()
    assert devices == "3"
    assert int(threads) >= 12  # a device may wait in several collectives at once


def split_of(x):
    """Returns the mesh axes that split each dimension of an array that a program returned."""
    spec = x.sharding.spec
    return (*spec, *(None,) * (x.ndim - len(spec)))


@pytest.mark.parametrize(("is_open", "split"), [(False, None), (True, "context")])
def test_dimensions_that_are_not_named_are_whole_or_lie_as_they_do(is_open, split):
    mesh = make_mesh(MeshSpec(data=2, context=2), jax.devices()[:4])
    with use_mesh(mesh, rules_from()):
        x = jax.device_put(jnp.ones((4, 8, 2)), jax.NamedSharding(mesh, jax.P("data", "context")))
        axes = ("batch", None, None)
        if is_open:
            axes = ("batch",)

        @jax.jit
        def step(x):
            return constrain(x, *axes, is_rest_open=is_open)

        assert split_of(step(x)) == ("data", split, None)
        has_gather = "all-gather" in step.lower(x).compile().as_text()
    assert has_gather != is_open


def test_an_open_rest_still_checks_what_is_named():
    with use_mesh(make_mesh(MeshSpec(data=2), jax.devices()[:2])):
        with pytest.raises(UsageError, match=r"part: dimension 0 \(batch\)"):
            constrain(jnp.ones((3, 2)), "batch", name="part", is_rest_open=True)


def test_an_empty_part_of_a_state_has_no_sharding():
    """An optimizer without moments has a state of (); its axes are () too, as a count's are."""
    mesh = make_mesh(MeshSpec(fsdp=8))
    state = {"w": jnp.zeros((8, 2)), "optimizer": (), "both": ((), jnp.zeros(()))}
    axes = {"w": ("embed", None), "optimizer": (), "both": ((), ())}
    with use_mesh(mesh, rules_from()):
        shardings = named_shardings(state, axes)
        placed = shard(state, axes)
    assert shardings["optimizer"] == () and shardings["both"][0] == ()
    assert shardings["w"].spec == jax.P("fsdp") or split_of(placed["w"]) == ("fsdp", None)
    assert shardings["both"][1].spec == jax.P()
    assert placed["optimizer"] == () and placed["both"][0] == ()
