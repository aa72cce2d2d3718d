"""Layers of space and time equal the same layers over all tokens under a mask, on any mesh, and send what they say."""

import dataclasses
import functools
import json
import math
import re
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from compiled import needs_libtpu, on_a_tpu
from fast import jit
from tolerance import assert_close

from jaxpar.aot import hlo
from jaxpar.mesh import RULES, MeshSpec, make_mesh, partition, rules_from, shard, use_mesh
from jaxpar.nn import FramePredictor, SpaceTimeStack
from jaxpar.nn.attention import Attention, Visible
from jaxpar.nn.attention.context import Sizes, move_for
from jaxpar.nn.block import ResidualBlock
from jaxpar.nn.mixer import TokenInfo
from jaxpar.nn.mlp import Mlp
from jaxpar.nn.position import Rope
from jaxpar.nn.stack import Stack
from jaxpar.types import UsageError

CAUSAL, BOTH_WAYS = Visible(), Visible(causal=False)
TOLERANCE = {"float32": 1e-5, "float64": 1e-10}  # of 2 pairs: rounding, in other orders of sums


def space_time(
    dtype="float64", heads=2, size=4, layers=2, positions=None, visible=CAUSAL, **changes
):
    mlp = Mlp(2 * heads * size, "gelu", bias=True)
    stack = Stack(
        layers, heads * size, Attention(heads, heads, size, visible=BOTH_WAYS), mlp, dtype=dtype
    )
    time = Attention(heads, heads, size, bias=True, positions=positions, visible=visible)
    return SpaceTimeStack(dataclasses.replace(stack, **changes), time)


def params_of(model, rng, dtype):
    """Parameters drawn by NumPy: nothing to compile."""
    shapes = jax.eval_shape(model.init, jax.random.key(0))
    return jax.tree.map(lambda x: (0.5 * rng.standard_normal(x.shape)).astype(dtype), shapes)


def drawn(model, frames, places, rows=2):
    """Parameters, tokens and a gradient of the result."""
    rng, dtype = np.random.default_rng(0), model.stack.dtype
    params = params_of(model, rng, dtype)
    x, g = (
        rng.standard_normal((rows, frames, places, model.stack.embed_dim)).astype(dtype)
        for _ in range(2)
    )
    return params, x, g


def with_gradients(f, *args):
    def both(params, x, g):
        out, pull = jax.vjp(f, params, x)
        return out, *pull(g)

    return jit(both)(*args)


def flat(model, params, x):
    """The same layers over tokens [B, T S, D], of which each sees its frame, or its place until then."""
    shape, token = x.shape, np.arange(x.shape[1] * x.shape[2])
    frame, place = token // shape[2], token % shape[2]
    seen = {
        "space": frame[:, None] == frame,
        "time": (place[:, None] == place) & (frame[:, None] >= frame),
    }
    x = x.reshape(shape[0], -1, shape[-1])
    for number in range(model.stack.num_layers):
        for name, stack in model.stacks().items():
            mixer = dataclasses.replace(stack.mixer, visible=BOTH_WAYS)
            visible = jnp.broadcast_to(seen[name], (shape[0], *seen[name].shape))
            positions = jnp.broadcast_to(jnp.asarray(frame, jnp.int32), x.shape[:2])
            context = stack.context(x, TokenInfo(positions=positions, visible=visible))
            layer = jax.tree.map(lambda w, n=number: w[n], params[name])
            block = ResidualBlock(mixer=mixer, mlp=stack.mlp, norm=stack.norm)
            x, _, _ = block.apply(layer, x, context)
    return model.stack.norm.apply(params["final_norm"], x).reshape(shape)


@functools.cache
def over_all_tokens():
    model = space_time(positions=Rope())
    return with_gradients(lambda params, x: flat(model, params, x), *drawn(model, 3, 5))


@pytest.mark.parametrize("scan_layers, remat", [(True, "none"), (False, "full")])
def test_layers_equal_those_over_all_tokens_under_a_mask(scan_layers, remat, x64):
    model = space_time(positions=Rope(), scan_layers=scan_layers, remat=remat)
    got = with_gradients(lambda params, x: model.apply(params, x)[0], *drawn(model, 3, 5))
    assert_close(got, over_all_tokens(), 1e-12)


@functools.cache
def alone(dtype, frames, places, rows, visible):
    model = space_time(dtype, visible=visible)
    return with_gradients(
        lambda params, x: model.apply(params, x)[0], *drawn(model, frames, places, rows)
    )


@pytest.mark.parametrize(
    "data, context, tensor, frames, places, dtype",
    [
        (1, 8, 1, 8, 16, "float32"),
        pytest.param(2, 4, 1, 6, 9, "float64", marks=pytest.mark.slow),
        (1, 4, 2, 3, 2, "float64"),
        pytest.param(1, 8, 1, 8, 16, "float64", marks=pytest.mark.slow),  # 3 s each; as others
        pytest.param(1, 4, 2, 3, 2, "float32", marks=pytest.mark.slow),
        pytest.param(
            8, 1, 1, 6, 9, "float64", marks=pytest.mark.slow
        ),  # where nothing is split anew
    ],
)
def test_every_mesh_gives_the_same(data, context, tensor, frames, places, dtype):
    with jax.enable_x64(dtype == "float64"):
        visible = CAUSAL if frames == 8 else BOTH_WAYS  # else none sees what fills up
        rows = 8 if frames == 6 else 2
        model = space_time(dtype, visible=visible)
        with use_mesh(make_mesh(MeshSpec(data=data, context=context, tensor=tensor))):
            args = drawn(model, frames, places, rows)
            got = with_gradients(lambda params, x: model.apply(params, x)[0], *args)
        want = alone(dtype, frames, places, rows, visible)
        assert_close(got, want, TOLERANCE[dtype], masked=("bk",))  # a key's bias changes nothing


def test_an_axis_that_no_device_splits_is_whole_everywhere(x64):
    model = space_time(visible=BOTH_WAYS)
    args = drawn(model, 3, 2)
    with use_mesh(make_mesh(MeshSpec(context=2, data=2), jax.devices()[:4]), RULES | {"time": ()}):
        got = with_gradients(lambda params, x: model.apply(params, x)[0], *args)
    assert_close(got, alone("float64", 3, 2, 2, BOTH_WAYS), 1e-10)


# ---------------------------------------------------------------- what is sent


def compiled(model, backward, spec, shape, devices=None, jit=jit, layout="zero3", f=None):
    """The collectives of the program; the tokens come split over time, as the layers leave them."""
    mesh, replicated = make_mesh(spec, devices), jax.sharding.PartitionSpec()
    f = f or (lambda params, x: model.apply(params, x)[0])

    def both(params, x, g):
        out, pull = jax.vjp(f, params, x)
        return out, *pull(g)

    params = jax.eval_shape(model.init, jax.random.key(0))
    with use_mesh(mesh, rules_from(layout=layout)):

        def put(x, spec=replicated):
            return jax.ShapeDtypeStruct(
                x.shape, x.dtype, sharding=jax.sharding.NamedSharding(mesh, spec)
            )

        params = jax.tree.map(put, params)
        axes = ("batch", None if shape[1] % spec.context else "time")
        x = put(
            jax.ShapeDtypeStruct(shape, np.float32), partition((*axes, *(None,) * (len(shape) - 2)))
        )
        args = (params, x, x) if backward else (params, x)
        text = jit(both if backward else f).lower(*args).compile().as_text()
    return hlo.collectives(text, mesh)


def counts(found):
    """Executions by kind and axes; of what is no weight's gradient, whose sums alone are all-reduces."""
    return {
        (each.kind, each.axes): each.count
        for each in hlo.crossings(found)
        if each.kind != "all-reduce"
    }


def is_of_weights(found, model):
    """Whether all sums have shapes of parameters, of one layer or of all."""
    shapes = {leaf.shape for leaf in jax.tree.leaves(jax.eval_shape(model.init, jax.random.key(0)))}
    sizes = {math.prod(shape) for shape in shapes} | {math.prod(shape[1:]) for shape in shapes}
    sums = [shape for each in found if each.kind == "all-reduce" for shape in each.shapes]
    return all(math.prod(shape) in sizes for shape in sums)


@pytest.mark.parametrize("data, context, layers, scan_layers", [(1, 8, 3, True), (2, 4, 2, False)])
def test_a_pair_of_layers_exchanges_twice_forward_and_twice_backward(
    data, context, layers, scan_layers
):
    model, spec = (
        space_time("float32", layers=layers, scan_layers=scan_layers),
        MeshSpec(data=data, context=context),
    )
    forward, both = (compiled(model, backward, spec, (2, 8, 16, 8)) for backward in (False, True))
    assert counts(forward) == {("all-to-all", "context"): 2 * layers}
    assert len(hlo.crossings(forward)) == 1  # nothing is summed, either
    assert counts(both) == {("all-to-all", "context"): 4 * layers}
    assert is_of_weights(both, model)
    share = 2 * 8 * 16 * 8 * 4 // 8  # bytes of one device's tokens
    assert sum(each.bytes for each in hlo.crossings(forward)) == 2 * layers * share


def test_remat_exchanges_again_what_it_recomputes():
    model, spec = space_time("float32", layers=3, remat="full"), MeshSpec(context=8)
    found = counts(compiled(model, True, spec, (2, 8, 16, 8)))
    assert found == {
        ("all-to-all", "context"): 15
    }  # 6, 6 and the first of each pair, whose layer is made again


def test_sizes_that_do_not_divide_exchange_as_often():
    model, spec = space_time("float32"), MeshSpec(context=4, data=2)
    found = counts(compiled(model, True, spec, (2, 6, 9, 8)))
    assert (
        found.pop(("all-gather", "context")) == 2
    )  # of the result and of its gradient, at the ends
    assert found == {("all-to-all", "context"): 8}


def sent(found, share):
    """Bytes that a device sends; of an all-reduce only the half that a reduce-scatter would."""
    return sum(each.trips * each.bytes * share for each in found)


def bytes_of_three(ours, num, shape, model, devices=None, jit=jit):
    """What a device sends for the tokens of L pairs, forward and backward: ours, Megatron's by sequence, Ulysses'."""
    rows, frames, places, width = shape
    ours = sent([each for each in ours if each.kind != "all-reduce"], 1 - 1 / num)
    # Tensor parallelism gathers and scatters the tokens of each branch whatever its attention looks at: the same layers
    # over all tokens, twice L of them.
    layers = dataclasses.replace(model.stack, num_layers=2 * model.stack.num_layers)
    megatron = compiled(
        layers, True, MeshSpec(tensor=num), (rows, frames * places, width), devices, jit, "sequence",
        lambda params, x: layers.apply(params, x)[0],
    )  # fmt: skip
    of_tokens = [each for each in megatron if math.prod(each.shapes[0]) == math.prod(shape)]
    megatron = sent(of_tokens, 1 - 1 / num)
    # Heads for tokens in the layers along the split axis, of space; those along time have all of their places' tokens.
    attention = model.stack.mixer
    sizes = Sizes(
        rows * frames,
        places // num,
        attention.num_heads,
        attention.num_heads,
        attention.head_dim,
        4,
    )
    swap = move_for("swap", num)
    ulysses = model.stack.num_layers * sum(
        sum(swap.bytes(sizes, backward).values()) for backward in (False, True)
    )
    return ours, megatron, ulysses


def test_fewer_bytes_than_tensor_parallelism_and_heads_for_tokens():
    num, shape = 8, (2, 8, 16, 32)
    model = space_time("float32", heads=8)
    found = compiled(model, True, MeshSpec(context=num), shape)
    ours, megatron, ulysses = bytes_of_three(found, num, shape, model)
    tokens = math.prod(shape) * 4
    assert math.isclose(ours, 2 * 4 * tokens / num * (1 - 1 / num))  # L 2 pairs, 4 exchanges each
    assert ours <= megatron / 4 and ours <= ulysses / 2
    assert megatron >= 2 * 16 * tokens * (
        1 - 1 / num
    )  # 8 gathers and scatters a pair, in each pass


def for_a_tpu(*more):
    from jaxpar.aot import devices, parse_topology

    slice_of_sixteen, shape = devices(parse_topology("v5e:4x4")), (2, 16, 32, 128)
    model, found = space_time("float32", heads=16, size=8), {}
    for mesh, passes in ("1x16", "both"), ("2x8", "forward"), *(each.split() for each in more):
        data, context = map(int, mesh.split("x"))
        spec = MeshSpec(data=data, context=context)
        every = found[f"{mesh} {passes}"] = compiled(
            model, passes == "both", spec, shape, slice_of_sixteen, jax.jit
        )
        assert is_of_weights(every, model), every
    told = {
        name: [[*key, count] for key, count in counts(every).items()]
        for name, every in found.items()
    }
    return told, bytes_of_three(found["1x16 both"], 16, shape, model, slice_of_sixteen, jax.jit)


@needs_libtpu
@pytest.mark.parametrize(
    "more", [(), pytest.param(("1x16 forward", "2x8 both"), marks=pytest.mark.slow)]
)  # 30 s
def test_a_tpu_exchanges_as_often_and_sends_as_little(more):
    found, (ours, megatron, ulysses) = on_a_tpu(__file__, *more)
    times = {"forward": 4, "both": 8}
    names = {"1x16 both", "2x8 forward", *more}
    assert found == {name: [["all-to-all", "context", times[name.split()[1]]]] for name in names}
    assert ours <= megatron / 4 and ours <= ulysses / 2


# ---------------------------------------------------------------- the predictor, and mistakes


def predictor(frames=4, **changes):
    return FramePredictor(space_time("float32", **changes), 2, (frames, 4, 6))


def test_a_frame_sees_those_before_it_alone():
    network = predictor()
    rng = np.random.default_rng(0)
    films = rng.standard_normal((2, 4, 4, 6)).astype(np.float32)
    params = params_of(network, rng, np.float32)
    changed = films.copy()
    changed[:, 2, 3, 5] += 1
    apply = jit(lambda films: network.apply(params, films)[0])
    change = np.abs(np.asarray(apply(films)) - np.asarray(apply(changed)))
    assert (change.max((0, 2, 3)) > 1e-4).tolist() == [False, False, True, True]
    assert (change[:, 2] > 1e-7).all()  # and every patch of its own


def test_a_predictors_loss_is_the_cross_entropy_of_the_next_frames_pixels(x64):
    network = FramePredictor(space_time(), 2, (3, 4, 6))
    rng = np.random.default_rng(0)
    films = (rng.random((2, 4, 4, 6)) < 0.5).astype(np.float64)
    batch = {"inputs": films[:, :-1], "targets": films[:, 1:], "weights": np.array([1.0, 3.0])}
    params = params_of(network, rng, np.float64)
    share = 1 / (1 + np.exp(-np.asarray(jit(network.apply)(params, batch["inputs"])[0])))
    each = -np.log(np.where(batch["targets"] == 1, share, 1 - share)).mean((1, 2, 3))

    def loss(params, batch):
        return network.loss(params, batch)[0]

    value, want = jit(jax.value_and_grad(loss))(params, batch)
    np.testing.assert_allclose(value, each @ [0.25, 0.75], rtol=1e-12)
    with use_mesh(make_mesh(MeshSpec(data=2, fsdp=1, context=4))):
        placed = shard(params, network.axes())
        assert_close(jit(jax.grad(loss))(placed, batch), want, 1e-10)


def test_patches_get_place_and_time_and_are_put_back_where_they_were_cut(x64):
    network, rng = (
        FramePredictor(space_time(heads=1, layers=1), 2, (2, 4, 6)),
        np.random.default_rng(0),
    )
    params = jax.tree.map(np.zeros_like, params_of(network, rng, np.float64))
    params |= {
        "w_in": np.eye(4),
        "head": np.eye(4),
        "places": rng.random((6, 4)),
        "times": rng.random((2, 4)),
    }
    params["final_norm"]["scale"] += 1
    film = rng.random((1, 2, 4, 6))
    out = np.asarray(jit(network.apply)(params, film)[0])
    for t in range(2):
        for i in range(2):
            for j in range(3):
                part = np.s_[0, t, 2 * i : 2 * i + 2, 2 * j : 2 * j + 2]
                x = film[part] + (params["places"][3 * i + j] + params["times"][t]).reshape(2, 2)
                np.testing.assert_allclose(out[part], x / np.sqrt((x * x).mean() + 1e-5), rtol=1e-4)


@pytest.mark.parametrize(
    "make, words",
    [
        (lambda: SpaceTimeStack(Stack(1, 8, Attention(2, 2, 4), Mlp(8)), Attention(2, 2, 4)), "not causal; give"),
        (lambda: space_time(dropout=0.1), "have no dropout, whose draws would change with the mesh"),
        (lambda: FramePredictor(space_time(), 4, (4, 4, 6)), "patch=4 does not divide images of 4 x 6 pixels"),
        (lambda: FramePredictor(space_time(), 2, (4, 4)), "shape=(4, 4) of films must be frames, height and width"),
        (
            lambda: FramePredictor(dataclasses.replace(space_time(), time=Attention(2, 2, 4, visible=BOTH_WAYS)), 2,
                                   (4, 4, 6)),
            "a frame that sees the next one predicts nothing",
        ),
        (lambda: predictor().apply({}, jnp.zeros((2, 3, 4, 6))), "films of shape (3, 4, 6) are none of"),
    ],
)  # fmt: skip
def test_what_does_not_fit_is_told(make, words):
    with pytest.raises(UsageError, match=re.escape(words)):
        make()


def test_layers_that_tell_of_tokens_tell_of_no_others():
    model = space_time("float32", ranges=True)
    params, x, _ = drawn(model, 4, 8)
    _, told = jit(model.apply)(params, x)
    with use_mesh(make_mesh(MeshSpec(context=4, data=2))):
        _, same = jit(model.apply)(params, x)
        np.testing.assert_allclose(
            same.metrics["residual_max"].value, told.metrics["residual_max"].value, rtol=1e-5
        )
        with pytest.raises(
            UsageError, match=re.escape("T=3, S=8 are filled up to divide over the devices")
        ):
            model.apply(params, x[:, :3])


if __name__ == "__main__":
    print(json.dumps(for_a_tpu(*sys.argv[1:])))
