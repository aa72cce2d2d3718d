"""Memories: a whole rollout at once, starts inside, equals one step after another, in value and gradient."""

import dataclasses
import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from by_hand import slopes
from fast import jit
from tolerance import EXACT_MATHS, assert_close

from jaxpar.mesh import MeshSpec, make_mesh, shard, use_mesh
from jaxpar.nn import GRU, ParaGRU
from jaxpar.nn.attention import Attention, Visible
from jaxpar.nn.mixer import TokenInfo
from jaxpar.nn.mixers import Recurrent
from jaxpar.nn.mlp import Mlp
from jaxpar.nn.position import Alibi, Rope
from jaxpar.nn.stack import Stack
from jaxpar.rl.memory import MEMORIES, STACKS, StackMemory, memory_of
from jaxpar.rl.network import Network, drawn
from jaxpar.solve import Newton
from jaxpar.types import UsageError

STEPS, NUM_ENVS, WIDTH = 6, 3, 4
STARTS = np.zeros((STEPS, NUM_ENVS), bool)
STARTS[0, 0] = STARTS[2, 1] = STARTS[3, 1] = STARTS[5, 2] = (
    True  # at the first, in a row, at the last; none else
)


def stack_of(mixer, layers=2, width=WIDTH, **options):
    return Stack(layers, width, mixer, Mlp(6, "gelu"), init_std=0.5, **options)


NEAR = Attention(2, 1, 2, positions=Alibi(), visible=Visible(window=3))
OBJECTS = {
    "a stack with slopes": stack_of(NEAR, dtype="float64"),
    "a rotary stack": stack_of(dataclasses.replace(NEAR, positions=Rope()), dtype="float64"),
    "a recurrent stack": stack_of(Recurrent(ParaGRU(4)), dtype="float64"),
}
FAST = ("gru", "para_gru", "min_gru", "aaren", "s5", "attention", *OBJECTS)


def memory_in_float64(name, method=None):
    memory = memory_of(OBJECTS.get(name, name), WIDTH, method)
    if name in STACKS:
        memory = StackMemory(dataclasses.replace(memory.stack, dtype="float64"))
    return memory


def wide(tree):
    return jax.tree.map(
        lambda x: x.astype(jnp.float64) if jnp.issubdtype(x.dtype, jnp.floating) else x, tree
    )


def types(tree):
    return jax.tree.map(lambda x: (x.shape, x.dtype), tree)


def inputs(*shape):
    return (
        np.random.default_rng(1).standard_normal(shape).astype(jax.dtypes.canonicalize_dtype(float))
    )


def params_of(memory, width=5):
    """Parameters drawn by NumPy: nothing to compile."""
    rng = np.random.default_rng(0)
    leaves = jax.eval_shape(lambda: memory.init(jax.random.key(0), width))
    return jax.tree.map(
        lambda leaf: (0.5 * rng.standard_normal(leaf.shape)).astype(
            jax.dtypes.canonicalize_dtype(float)
        ),
        leaves,
    )


def one_after_another(memory, params, xs, carry, starts):
    """Backpropagation through time: the carry is emptied by hand, and each call sees one step."""
    nothing = memory.initial(NUM_ENVS)

    def step(carry, row):
        x, start = row
        carry = jax.tree.map(
            lambda new, old: jnp.where(start.reshape(-1, *[1] * (old.ndim - 1)), new, old),
            nothing,
            carry,
        )
        y, carry, _ = memory.apply(params, x[None], np.zeros((1, NUM_ENVS), bool), carry)
        return carry, y[0]

    return jax.lax.scan(step, carry, (xs, starts))[1]


@pytest.mark.parametrize(
    "name",
    [  # slopes are in the formula below, and in a test of their own
        pytest.param(m, marks=() if m in FAST and m != "a stack with slopes" else pytest.mark.slow)
        for m in (*MEMORIES, *OBJECTS)
    ],
)
def test_a_whole_unroll_equals_its_steps(name, x64):
    """And what it remembers then serves the next rollout as well."""
    method = Newton() if name in ("gru", "para_gru") else None
    memory, stepwise = memory_in_float64(name, method), memory_in_float64(name)
    params, xs = params_of(memory), inputs(STEPS + 2, NUM_ENVS, 5)

    @jit
    def begun(params, xs):
        """What environments remember from before; the third uses it to the end."""
        return stepwise.apply(
            params, xs * 0.5, np.zeros((1, NUM_ENVS), bool), wide(memory.initial(NUM_ENVS))
        )[1]

    carry = begun(params, xs[:1])
    leaves, tree = jax.tree.flatten(carry)
    floats = [jnp.issubdtype(x.dtype, jnp.floating) for x in leaves]
    later = np.zeros((2, NUM_ENVS), bool)

    def loss(run, params, xs, given):
        given = iter(given)
        carry = tree.unflatten(
            [next(given) if own else x for x, own in zip(leaves, floats, strict=True)]
        )
        ys = run(params, xs, carry)
        return jnp.sum(ys * jnp.cos(jnp.arange(ys.size).reshape(ys.shape))), ys

    def whole(params, xs, carry):
        ys, last, converged = memory.apply(params, xs[:STEPS], STARTS, carry)
        assert types(last) == types(wide(memory.initial(NUM_ENVS))) and converged.dtype == bool
        return jnp.concatenate([ys, memory.apply(params, xs[STEPS:], later, last)[0]])

    def steps(params, xs, carry):
        return one_after_another(stepwise, params, xs, carry, np.concatenate([STARTS, later]))

    given = [x for x, own in zip(leaves, floats, strict=True) if own]
    grads = [jit(jax.grad(functools.partial(loss, run), (0, 1, 2), has_aux=True))(params, xs, given)
             for run in (whole, steps)]  # fmt: skip
    # float64; Newton stops at a residual of about 1e-12, and angles of rotary positions are float32
    assert_close(*grads, 1e-6 if name in ("a rotary stack", "transformer") else 1e-10)


@pytest.mark.parametrize("name", ["a stack with slopes", "a rotary stack"])
def test_counters_stay_small_in_an_endless_episode(name, x64):
    memory, steps = memory_in_float64(name), 40
    params, xs = params_of(memory), inputs(steps, 1, 5)
    never, apply = np.zeros((steps, 1), bool), jit(memory.apply)
    first = jit(memory.initial, static_argnums=0)(1)
    want, last, _ = apply(params, xs, never, first)
    assert 3 <= last.seen[0] < 6 and last.first[0] == 0
    got, carry = [], first
    for part in np.split(xs, 20):
        y, carry, _ = apply(params, part, never[:2], carry)
        seen, start = np.asarray(carry.seen)[0], np.asarray(carry.first)[0]
        assert seen < 6 and 0 <= start <= seen
        got.append(y)
    assert_close(np.concatenate(got), want, 1e-6 if "rotary" in name else EXACT_MATHS["float64"])


# ---------------------------------------------------------------- the formula of attention in a window


def attention_by_hand(params, x, episode, window):
    """y[t] = sum_j softmax_j(k[j] q[t] / sqrt(K) - m (t - j)) v[j] O over j in t's window and episode."""
    heads, width = params["wq"].shape[1:]
    groups, out = params["wk"].shape[1], []
    for t in range(len(x)):
        y = 0
        for h in range(heads):
            g = h * groups // heads
            q, total, mixed = x[t] @ params["wq"][:, h], 0, 0
            for j in range(max(0, t - window + 1), t + 1):
                if episode[j] == episode[t]:
                    score = (x[j] @ params["wk"][:, g]) @ q / np.sqrt(width) - 2.0 ** (
                        -8 * (h + 1) / heads
                    ) * (t - j)
                    total, mixed = (
                        total + np.exp(score),
                        mixed + np.exp(score) * (x[j] @ params["wv"][:, g]),
                    )
            y = y + (mixed / total) @ params["wo"][h]
        out.append(y)
    return np.stack(out)


EPISODES = np.array([[0, 0, 0, 0, 1, 0, 0], [0, 1, 1, 0, 0, 0, 0]], bool)
WEIGHTS = np.cos(np.arange(2 * 7 * 3)).reshape(2, 7, 3)


@functools.cache
def formula(heads, groups):
    """The mixer, what it is given, and the value and gradient of its formula."""
    rng, window = np.random.default_rng(0), 3
    mixer = Attention(heads, groups, 2, positions=Alibi(), visible=Visible(window=window))
    given = {
        name: rng.standard_normal(leaf.shape) for name, leaf in mixer.leaves(3, 1.0, 1.0).items()
    }
    given["x"] = rng.standard_normal((2, 7, 3))

    def by_hand(given):
        ys = [
            attention_by_hand(given, x, np.cumsum(new), window)
            for x, new in zip(given["x"], EPISODES, strict=True)
        ]
        return (np.stack(ys) * WEIGHTS).sum()

    return mixer, given, {"value": by_hand(given)} | slopes(by_hand, given)


@pytest.mark.parametrize(("heads", "groups"), [(2, 2), (4, 2)])
@pytest.mark.parametrize("parts", [(7,), (3, 4), (1,) * 7], ids=str)
def test_attention_is_its_formula_in_value_and_gradient(heads, groups, parts, x64):
    mixer, given, want = formula(heads, groups)
    stack = Stack(1, 3, mixer, Mlp(6), dtype="float64")

    def ours(given):
        def part(cache, x, starts):
            context = stack.context(x, TokenInfo(starts=starts), cache=cache)
            y, layer, _ = mixer.apply(given, x, cache.layers[0], context)
            return cache.replace(
                layers=(layer,), seen=cache.seen + x.shape[1], first=context.first[:, -1]
            ), y

        cache, out = stack.init_cache(2, 7), []
        if set(parts) == {1}:  # steps, in a loop
            steps = (jnp.moveaxis(x, 1, 0)[:, :, None] for x in (given["x"], EPISODES))
            _, ys = jax.lax.scan(lambda cache, step: part(cache, *step), cache, tuple(steps))
            return (jnp.moveaxis(ys[:, :, 0], 0, 1) * WEIGHTS).sum()
        for begin, end in itertools.pairwise(np.cumsum([0, *parts])):
            cache, y = part(cache, given["x"][:, begin:end], EPISODES[:, begin:end])
            out.append(y)
        return (jnp.concatenate(out, 1) * WEIGHTS).sum()

    value, gradient = jit(jax.value_and_grad(ours))(given)
    assert_close({"value": value} | gradient, want, 1e-12)


def test_the_past_before_a_start_is_forgotten():
    memory = memory_of("min_gru", WIDTH)
    params, xs = params_of(memory), inputs(STEPS, NUM_ENVS, 5)
    slope = jit(
        jax.grad(
            lambda xs: memory.apply(params, xs, STARTS, memory.initial(NUM_ENVS))[0][3, 1].sum()
        )
    )(xs)
    slope = np.asarray(slope)
    assert np.abs(slope[3, 1]).max() > 0 and np.abs(slope[:3]).max() == 0


def test_attention_sees_its_window_and_nothing_before():
    memory = StackMemory(stack_of(NEAR, 1))
    params, starts = params_of(memory), np.zeros((6, 1), bool)
    slope = jit(
        jax.grad(lambda xs: memory.apply(params, xs, starts, memory.initial(1))[0][4, 0].sum())
    )
    seen = np.abs(slope(inputs(6, 1, 5))[:, 0]).max(1) > 0
    np.testing.assert_array_equal(seen, [False, False, True, True, True, False])


def test_a_solver_that_did_not_converge_is_told():
    xs, starts = inputs(STEPS, 2, 5), np.zeros((STEPS, 2), bool)
    few, enough = (
        StackMemory(stack_of(Recurrent(GRU(4), method)))
        for method in (Newton(max_iters=1), Newton())
    )

    def told(memory):
        return jit(lambda params: memory.apply(params, xs, starts, memory.initial(2))[2])(
            params_of(enough)
        )

    assert not told(few) and told(enough)


def test_environments_on_eight_devices_are_those_of_one(x64):
    """Learned from by GSPMD, and walked by each device alone; no width here divides over the devices."""
    memory = StackMemory(stack_of(NEAR, 1, 5, dtype="float64"))
    params, xs = params_of(memory, 3), inputs(STEPS, 8, 3)
    starts = np.random.default_rng(0).random((STEPS, 8)) < 0.3

    def learned(params, xs, starts):
        ys = memory.apply(params, xs, starts, memory.initial(8))[0]
        return jnp.sum(ys * jnp.cos(jnp.arange(ys.size).reshape(ys.shape)))

    def walked(params, xs):
        def one(x):
            return memory.apply(params, x[:, None], jnp.zeros((STEPS, 1), bool), memory.initial(1))[
                0
            ]

        return jax.vmap(one, 1, 1)(xs)

    want = jit(jax.value_and_grad(learned))(params, xs, starts), jit(walked)(params, xs)
    with use_mesh(make_mesh(MeshSpec(data=2, fsdp=4))):
        split = shard(xs, (None, "envs", None)), shard(starts, (None, "envs"))
        over = jax.sharding.PartitionSpec(None, ("data", "fsdp"))
        alone = jax.shard_map(walked, in_specs=(None, over), out_specs=over)
        got = jit(jax.value_and_grad(learned))(params, *split), jit(alone)(params, split[0])
    assert_close(jax.device_get(got), jax.device_get(want), EXACT_MATHS["float64"])


def test_a_stack_that_cannot_act_for_ever_is_refused():
    everything = dataclasses.replace(NEAR, visible=Visible())
    with pytest.raises(
        UsageError, match=r"sees all of the past; give it a window, such as Visible\(window=64\)"
    ):
        Network(memory=stack_of(everything))
    both_ways = dataclasses.replace(NEAR, positions=None, visible=Visible(causal=False))
    with pytest.raises(
        UsageError, match="a memory sees no later step, but this stack's mixer is not causal"
    ):
        Network(memory=stack_of(both_ways))
    for dropping in (stack_of(NEAR, dropout=0.1), stack_of(dataclasses.replace(NEAR, dropout=0.1))):
        with pytest.raises(UsageError, match="a memory's stack has dropout=0, not 0.1"):
            StackMemory(dropping)
    assert (
        memory_of("transformer", 12).stack.mixer.num_heads == 1
    )  # four heads of 3 have no halves to rotate
    with pytest.raises(UsageError, match="head_dim=5 must be even for rope"):
        memory_of("transformer", 5)


def test_a_network_starts_orthogonal():
    network = Network(hidden=(16, 8), conv=(4,))
    params = jit(lambda key: network.init(key, (5, 5, 2), {"value": (1, 1.0)}))(jax.random.key(0))
    layers = params["heads"]["value"]["params"]
    for kernel, gain in ((layers["Dense_1"]["kernel"], np.sqrt(2)), (layers["out"]["kernel"], 1.0)):
        gram = np.asarray(kernel).T @ np.asarray(kernel)
        np.testing.assert_allclose(gram, gain**2 * np.eye(len(gram)), atol=1e-5)
    assert params["encoder"]["params"]["Conv_0"]["kernel"].shape == (3, 3, 2, 4)


def test_kernels_of_every_shape_are_orthonormal_times_their_gain():
    shapes = {
        "tall": (9, 3),
        "wide": (2, 9),
        "square": (64, 64),
        "more": (64, 64),
        "board": (3, 3, 2, 4),
        "bias": (7,),
    }
    gains = {
        "tall": np.sqrt(2),
        "wide": 0.01,
        "square": 1.0,
        "more": 3.0,
        "board": 0.5,
        "bias": 0.0,
    }
    first = {name: jnp.full(shape, gains[name], jnp.float32) for name, shape in shapes.items()}
    keys = jax.random.split(jax.random.key(3), 3)
    alone, seeds = jit(
        lambda keys: (drawn(keys[1], first), jax.vmap(lambda key: drawn(key, first))(keys))
    )(keys)
    assert {name: kernel.shape for name, kernel in alone.items()} == shapes and not alone[
        "bias"
    ].any()
    for name in sorted(set(shapes) - {"bias"}):
        for kernel in (alone[name], *seeds[name]):
            sides = np.asarray(kernel / gains[name]).reshape(-1, kernel.shape[-1])
            gram = sides.T @ sides if sides.shape[0] >= sides.shape[1] else sides @ sides.T
            np.testing.assert_allclose(gram, np.eye(len(gram)), atol=4e-6, err_msg=name)
        np.testing.assert_allclose(seeds[name][1], alone[name], atol=1e-6, err_msg=name)
        assert np.abs(seeds[name][0] - seeds[name][2]).max() > 0.1 * gains[name], name
    assert np.abs(alone["square"] - alone["more"] / 3).max() > 0.1


def test_a_memory_of_any_width_feeds_the_heads():
    network = Network((), (8,), memory=stack_of(NEAR, 1, 12), memory_size=64)

    @jit
    def run(key):
        params = network.init(key, (5,), {"q": (2, 1.0)})
        return network.apply(params, np.ones((4, 3, 5)), np.zeros((4, 3), bool), network.initial(3))

    out = run(jax.random.key(0))
    assert out.heads["q"].shape == (4, 3, 2)
