"""A stream whose branches read it before the last sum: the recursion, its caches, and what waits for what."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tiny
from fast import jit
from lm_configs import with_fields
from tolerance import EXACT_MATHS, assert_close

from jaxpar.aot.hlo import dependencies
from jaxpar.decode import Sampling
from jaxpar.lm import from_hf, generate, init, loss, to_hf
from jaxpar.lm.params import axes as axes_of
from jaxpar.lm.stages import stages
from jaxpar.mesh import MeshSpec, make_mesh, shard, use_mesh
from jaxpar.nn.auxiliary import NOTHING
from jaxpar.nn.block import Ladder, ResidualBlock
from jaxpar.nn.mixer import Context, TokenInfo
from jaxpar.nn.stack import PseudoTokens
from jaxpar.pipeline.accumulation import layer_by_layer
from jaxpar.types import UsageError

B, T, L = 2, 6, 3
TOLERANCE = EXACT_MATHS["float64"]
SMALL = with_fields(tiny.exact(tiny.LLAMA), num_layers=L, residual="ladder")


def config_of(ladder_from=0, **changes):
    return with_fields(SMALL, ladder_from=ladder_from, **changes)


def recursion(config, params, x):
    """The plain form: all x_i in a list; sub-block i reads x_{i-2} from sub-block 2 n on, and x_{i-1} before."""
    stack = config.stack()
    context = stack.context(x)
    states = [x, x]  # x_{-1}, x_0
    for index in range(config.num_layers):
        layer = jax.tree.map(lambda leaf, index=index: leaf[index], params["layers"])
        for branch in ("attn", "mlp"):
            source = states[-2] if index >= config.residual.ladder_from else states[-1]
            h = stack.norm.apply(layer[f"{branch}_norm"], source)
            y = (
                stack.mixer.apply(layer, h, None, context)[0]
                if branch == "attn"
                else stack.mlp.products(layer, h)
            )
            states.append(states[-1] + y)
    return stack.norm.apply(params["final_norm"], states[-1])


def weighted(run, params, x):
    y = run(params, x)
    return (y * jnp.cos(jnp.arange(y.size)).reshape(y.shape)).sum(), y


@functools.cache
def by_recursion(ladder_from):
    config = config_of(ladder_from)
    x = jnp.asarray(np.random.default_rng(2).standard_normal((B, T, 16)))
    run = functools.partial(weighted, functools.partial(recursion, config))
    return x, jit(jax.grad(run, (0, 1), has_aux=True))(tiny.params_of(config), x)


@pytest.mark.parametrize(
    ("ladder_from", "remat", "scan_layers"),
    [
        (0, "none", True),
        (1, "full", False),
        (2, "none", True),
        (1, "names", True),
        (1, "blockwise", True),
    ]
    + [pytest.param(0, "none", False, marks=pytest.mark.slow)]
    + [
        pytest.param(1, remat, True, marks=pytest.mark.slow)
        for remat in ("none", "dots", "offload")
    ],  # 2 s each
)
def test_the_stack_is_the_recursion(ladder_from, remat, scan_layers, x64):
    config = config_of(ladder_from, remat=remat, scan_layers=scan_layers)
    x, want = by_recursion(ladder_from)
    run = functools.partial(weighted, lambda p, x: config.stack().apply(p, x)[0])
    got = jit(jax.grad(run, (0, 1), has_aux=True))(tiny.params_of(config), x)
    assert_close(got, want, TOLERANCE)


def test_the_first_two_branches_read_the_embedding_and_each_one_after_waits_one_less():
    """By hand, with branches that add fixed multiples of what they read."""

    class Times:
        def __init__(self, factor):
            self.factor = factor

        def apply(self, params, x, *cache_and_context):
            y = self.factor * x
            return (y, None, NOTHING) if len(cache_and_context) == 2 else (y, NOTHING)

    class Same:
        def apply(self, params, x):
            return x

    layer, x = {"attn_norm": None, "mlp_norm": None}, jnp.ones((1, 1, 1))
    stream, states = Ladder(x, jnp.zeros_like(x)), []
    for _ in range(2):
        block = ResidualBlock(mixer=Times(2), mlp=Times(3), norm=Same())
        stream, _, _ = block.apply(layer, stream, Context(jnp.zeros((1, 1), int)))
        states.append(float(stream.whole[0, 0, 0]))
    # x: 1, 1 | + 2 * 1 = 3 | + 3 * 1 = 6 | + 2 * 3 = 12 | + 3 * 6 = 30
    assert states == [6, 30] and float(stream.x[0, 0, 0]) == 12


def test_it_is_another_model_than_the_standard_one(x64):
    params = tiny.params_of(config_of())
    models = [*(config_of(n) for n in range(L)), config_of(residual="standard")]
    outs = [tiny.logits(params, tiny.tokens(), model) for model in models]
    assert all(np.abs(a - b).max() > 1e-2 for i, a in enumerate(outs) for b in outs[:i])


def test_dropout_and_ranges_are_those_of_any_stream(x64):
    """Scanned and unrolled drop the same; the largest magnitude is that of the whole stream."""
    params, x = tiny.params_of(config_of(1)), by_recursion(1)[0]

    def run(scan_layers):
        stack = config_of(1, dropout=0.3, ranges=True, scan_layers=scan_layers).stack()
        y, _, aux = jit(lambda p: stack.apply(p, x, key=jax.random.key(4)))(params)
        return y, aux.metrics["residual_max"].value

    assert_close(run(True), run(False), TOLERANCE)


@pytest.mark.parametrize("ladder_from", [pytest.param(0, marks=pytest.mark.slow), 1])  # 2 s
def test_stages_one_after_the_other_are_the_model(ladder_from, x64):
    config = config_of(ladder_from)
    params, model = tiny.params_of(config), stages(config)
    data = tiny.batch_of()
    args = params, data, None, model.total(data), 1.0
    got, want = (
        jit(jax.value_and_grad(f, has_aux=True))(*args)
        for f in (layer_by_layer(model), model.whole)
    )
    assert_close(got, want, TOLERANCE)


def test_a_layer_of_any_number_is_one_program(x64):
    """What a schedule calls with a traced number: layers before and after the ladder begins."""
    config = config_of(1)
    stack, params, x = config.stack(), tiny.params_of(config), by_recursion(1)[0]

    def each(params, x):
        context = stack.context(x)

        def one(stream, indexed):
            return stack.layer(indexed[1], indexed[0], stream, context)[0], None

        return stack.end(jax.lax.scan(one, stack.begin(x), (jnp.arange(L), params["layers"]))[0])

    got = stack.norm.apply(params["final_norm"], jit(each)(params, x))
    assert_close(got, by_recursion(1)[1][1], TOLERANCE)


# ---------------------------------------------------------------- caches


@pytest.mark.parametrize(
    ("ladder_from", "scan_layers"),
    [(0, True), (2, False), pytest.param(2, True, marks=pytest.mark.slow)],  # 2 s
)
def test_tokens_from_a_cache_are_those_of_the_whole(ladder_from, scan_layers, x64):
    """A prompt read at once, then one and two tokens."""
    config = config_of(ladder_from, scan_layers=scan_layers)
    stack, params = config.stack(), tiny.params_of(config)
    x, (_, want) = by_recursion(ladder_from)

    def in_parts(params, x):
        held, cache, out = stack.unstacked(params), stack.init_cache(B, T), []
        y, cache, _ = stack.apply(params, x[:, :3], cache=cache, fresh=True)
        out.append(y)
        for first, last in ((3, 4), (4, 6)):
            y, cache, _ = stack.apply(held, x[:, first:last], cache=cache)
            out.append(y)
        return jnp.concatenate(out, 1)

    assert_close(jit(in_parts)(params, x), want, TOLERANCE)


def test_generation_is_recomputation():
    config = config_of(1, dtype="float32")
    params, prompt = tiny.params_of(config), tiny.tokens(length=3)
    sampling = Sampling(temperature=0.0, max_new_tokens=5)
    got = jit(generate, static_argnums=(3, 4))(jax.random.key(0), params, prompt, config, sampling)
    line = prompt
    for _ in range(5):
        padded = jnp.pad(line, ((0, 0), (0, 8 - line.shape[1])))
        logits = tiny.logits(params, padded, config)[:, line.shape[1] - 1]
        line = jnp.concatenate([line, logits.argmax(-1)[:, None]], 1)
    np.testing.assert_array_equal(got.tokens[:, -5:], line[:, 3:])


def test_pseudo_tokens_enter_a_ladder_with_nothing_pending(x64):
    """States that are the tokens' own, at layer 1: what the recursion gives for the stream at that place."""
    config = config_of(0)
    stack, params, x = config.stack(), tiny.params_of(config), by_recursion(0)[0]
    visible = jnp.broadcast_to(jnp.tril(jnp.ones((T + 1, T + 1), bool)), (B, T + 1, T + 1))
    positions = jnp.broadcast_to(jnp.arange(T + 1), (B, T + 1))
    pseudo = PseudoTokens(1, 1, lambda states: 2 * states[:, -1:])
    info = TokenInfo(positions=positions, visible=visible)
    got = jit(lambda p, x: stack.apply(p, x, info, pseudo=pseudo)[0])(params, x)

    def plain(params, x):
        layers = [jax.tree.map(lambda leaf, i=i: leaf[i], params["layers"]) for i in range(L)]
        stream = stack.layer(layers[0], 0, stack.begin(x), stack.context(x))[0]
        new = 2 * stack.end(stream)[:, -1:]
        stream = Ladder(
            jnp.concatenate([stream.x, new], 1), jnp.pad(stream.pending, ((0, 0), (0, 1), (0, 0)))
        )
        for i in (1, 2):
            stream = stack.layer(layers[i], i, stream, stack.context(stream.x))[0]
        return stack.norm.apply(params["final_norm"], stack.end(stream))

    assert_close(got, jit(plain)(params, x), TOLERANCE)


# ---------------------------------------------------------------- devices


@functools.cache
def on_one_device():
    config = config_of(1, dtype="float32", num_heads=8, num_kv_heads=8)
    params = tiny.params_of(config)
    run = jax.value_and_grad(lambda p: loss(p, tiny.batch_of(), config))
    return config, params, run, jit(run)(params)


@pytest.mark.parametrize(
    "tensor", [8, *(pytest.param(tensor, marks=pytest.mark.slow) for tensor in (2, 4))]
)  # 3 s
def test_tensor_parallelism_changes_nothing(tensor):
    config, params, run, want = on_one_device()
    with use_mesh(make_mesh(MeshSpec(data=1, tensor=tensor), jax.devices()[:tensor])):
        got = jax.device_get(jit(run)(shard(params, axes_of(config))))
    assert_close(got, want, 1e-5)


def sums_and_products(residual):
    """Of the forward pass on two devices: each branch's all-reduce, and the dots of each, in turn, by name."""
    config = config_of(residual=residual, dtype="float32", scan_layers=False, num_heads=2)
    stack = config.stack()
    with use_mesh(make_mesh(MeshSpec(data=1, tensor=2), jax.devices()[:2])):
        params = shard(tiny.params_of(config), axes_of(config))
        x = jnp.ones((B, T, 16), jnp.float32)
        text = jax.jit(lambda p, x: stack.apply(p, x)[0]).lower(params, x)
        text = text.compile(
            compiler_options={"xla_disable_hlo_passes": "cpu-all-reduce-combiner"}
        ).as_text()
    graph = dependencies(text)
    sums = [name for name, node in graph.items() if "all-reduce" in node.ops]
    dots = {
        name
        for name, node in graph.items()
        if node.ops & {"dot", "custom-call"} and name not in sums
    }

    def place(
        name,
    ):  # in the recursion; of the first two, which wait for none, attention has more products
        waits = graph[name].waits
        return len(waits & all_sums), -len(waits & dots)

    all_sums = frozenset(sums)
    sums = sorted(sums, key=place)
    products, before = [], set()
    for name in sums:
        own = (graph[name].waits & dots) - before
        products.append(own)
        before |= own
    return graph, sums, products


@pytest.mark.parametrize("residual", ["ladder", "standard"])
def test_a_branch_waits_for_the_sum_before_the_last(residual):
    """So that devices add up one branch's parts while they compute the next; the standard stream waits for each."""
    graph, sums, products = sums_and_products(residual)
    assert len(sums) == 2 * L and all(products)
    waits = [
        any(one in graph[dot].waits for dot in later)
        for one, later in zip(sums, products[1:], strict=False)
    ]
    assert waits == [residual == "standard"] * (2 * L - 1)
    two = [
        all(one in graph[dot].waits for dot in later)
        for one, later in zip(sums, products[2:], strict=False)
    ]
    assert all(two) or residual == "standard"


# ---------------------------------------------------------------- other formats and mistakes


def test_a_layer_of_a_ladder_takes_no_plain_stream():
    stack, x = config_of(dtype="float32").stack(), jnp.ones((1, 2, 16))
    with pytest.raises(
        UsageError, match="layers of residual=ladder take the stream that Stack.begin returns"
    ):
        stack.layer({}, 0, x, stack.context(x))


def test_a_llama_folder_becomes_a_ladder_from_a_layer_on(tmp_path):
    """Its parameters are the standard model's; the folder of a ladder would be read as another model, so is refused."""
    config = config_of(residual="standard", dtype="float32")
    params = init(jax.random.key(0), config)
    to_hf(params, config, tmp_path / "llama")
    model, loaded = from_hf(tmp_path / "llama", dtype="float32")
    ladder = with_fields(model, residual="ladder", ladder_from=2)
    jax.tree.map(np.testing.assert_array_equal, loaded, params)
    got = tiny.logits(loaded, tiny.tokens(), ladder)
    x = params["embedding"][tiny.tokens()]
    want = recursion(config_of(2, dtype="float32"), params, x) @ params["head"].T
    assert_close(got, want, 1e-5)
    with pytest.raises(UsageError, match="LlamaForCausalLM needs model.residual.kind=standard"):
        to_hf(params, ladder, tmp_path / "ladder")
