"""The backward pass in two stages: equal to that in one, weights of several microbatches in one product."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from lm_configs import lm_config
from tolerance import EXACT_MATHS, assert_close

from jaxpar.lm import apply, init
from jaxpar.lm.mixers import MIXERS
from jaxpar.lm.stages import stages
from jaxpar.nn.linear import contract
from jaxpar.pipeline.two_stage import find_products, two_stage
from jaxpar.types import UsageError

UP, DOWN = ("btd,df->btf", ("embed", "mlp")), ("btf,fd->btd", ("mlp", "embed"))


def drawn(*shape, seed=0):
    return jnp.asarray(np.random.default_rng((seed, *shape)).normal(size=shape))


PARAMS = {"up": (4, 6), "down": (6, 4), "scale": (4,), "twice": (4, 4), "looped": (4, 4)}
PRODUCTS = {name: name != "scale" for name in PARAMS}


def layer(params, x):
    """Every way in which a layer may read a weight."""
    h = jnp.tanh(contract(UP[0], x, params["up"], UP[1]))
    y = contract(DOWN[0], h, params["down"], DOWN[1]) * params["scale"][None, None]
    square = ("btd,de->bte", params["twice"], ("embed", None))
    y = contract(square[0], contract(square[0], y, *square[1:]), *square[1:])

    def turn(y, _):
        return y + jnp.sin(contract(square[0], y, params["looped"], square[2])), None

    return jax.lax.scan(turn, y, length=2)[0]


def params_of():
    return {name: 0.5 * drawn(*shape) for name, shape in PARAMS.items()}


@pytest.mark.parametrize("fn", [layer, jax.checkpoint(layer)], ids=["kept", "recomputed"])
def test_gradients_are_those_of_one_stage(fn, x64):
    params, x, g = params_of(), drawn(2, 3, 4), drawn(2, 3, 4, seed=1)
    split = two_stage(layer, params, x, products=PRODUCTS)
    assert [bool(product) for product in split.products] == [
        True,
        False,
        False,
        False,
        True,
    ]  # in order of names
    split = split if fn is layer else type(split)(fn, split.products)
    y, kept = split.forward(params, x)
    dx, factors = split.backward_input(kept, g)
    want, pull = jax.vjp(layer, params, x)
    assert_close(
        (y, (split.backward_weights(params, factors), dx)), (want, pull(g)), EXACT_MATHS["float64"]
    )


def test_several_microbatches_are_one_product_a_weight(x64):
    params = params_of()
    inputs, gs = ([drawn(2, 3, 4, seed=s + n) for n in range(3)] for s in (0, 10))
    split = two_stage(layer, params, inputs[0], products=PRODUCTS)
    factors = [
        split.backward_input(split.forward(params, x)[1], g)[1]
        for x, g in zip(inputs, gs, strict=True)
    ]
    want = [
        jax.vjp(lambda params, x=x: layer(params, x), params)[1](g)[0]
        for x, g in zip(inputs, gs, strict=True)
    ]
    total = jax.tree.map(lambda *each: sum(each), *want)
    assert_close(split.backward_weights(params, factors), total, EXACT_MATHS["float64"])
    program = jax.make_jaxpr(split.backward_weights)(params, factors)
    assert (
        str(program).count("dot_general[") == 2
    )  # up and down, whatever the number of microbatches


def test_a_function_without_products_is_refused():
    with pytest.raises(
        UsageError, match=r"none of `products` is read by jaxpar\.nn\.linear\.contract, once"
    ):
        two_stage(
            lambda params, x: x * params["w"],
            {"w": jnp.ones(3)},
            jnp.ones(3),
            products={"w": False},
        )


def unread(config):
    """Parameters of a layer whose gradients cannot be put off."""
    model = stages(config)
    held = jax.eval_shape(lambda key: model.hold(init(key, config)), jax.random.key(0))
    turn = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape[1:], x.dtype), held["layers"])
    tokens = jnp.zeros((2, 4), int)
    data = {"tokens": tokens, "targets": tokens}
    x = jax.eval_shape(model.first, held, data, None)
    layer = lambda params, x: model.layer(params, jnp.int32(0), x, data, None)[0]  # noqa: E731
    found = find_products(layer, turn, x, products=model.products())
    names = [path[-1].key for path, _ in jax.tree_util.tree_leaves_with_path(turn)]
    shapes = jax.tree.leaves(turn)
    return {
        n
        for n, leaf, product in zip(names, shapes, found, strict=True)
        if not product and leaf.ndim > 1
    }


STATES = {"swk", "swv", "swq", "swq_tokens", "wz"}  # read in a loop over windows
NOT_PUT_OFF = {"block_recurrent": STATES, "block_recurrent_lstm": STATES, "gla": {"w_gate_out"}}
NOT_PUT_OFF |= {
    "rwkv6": {"w_decay_out"},
    "lmu": {"w_m"},
    "spiking_lmu": {"w_m"},
}  # small: between ranks or states


@pytest.mark.parametrize("mixer", sorted(MIXERS))
def test_layers_put_off_every_product_with_the_residual_stream(mixer):
    config = lm_config(
        vocab_size=8, num_layers=1, embed_dim=16, num_heads=2, mlp_dim=8, mixer=mixer
    )
    found = {name for name in unread(config) if name.startswith(("w", "sw"))}
    assert found == NOT_PUT_OFF.get(mixer, set())


@pytest.mark.parametrize("mixer", sorted(MIXERS))
def test_all_mixers_take_ternary_weights(mixer):
    config = lm_config(
        vocab_size=8,
        num_layers=1,
        embed_dim=16,
        num_heads=2,
        mlp_dim=8,
        mixer=mixer,
        weights="ternary",
    )
    x = jax.eval_shape(
        lambda key: apply(init(key, config), jnp.zeros((1, 4), int), config), jax.random.key(0)
    )
    assert x.shape == (1, 4, 8)
