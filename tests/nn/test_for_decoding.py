"""Weights as decoding reads them: the same function, one product in place of several, weights transposed."""

import itertools

import jax
import jax.numpy as jnp
import pytest
from fast import jit
from tolerance import EXACT_MATHS, assert_close

from jaxpar.mesh import MeshSpec, make_mesh, use_mesh
from jaxpar.nn.attention import Attention
from jaxpar.nn.linear import Lora, Transposed
from jaxpar.nn.mlp import Mlp
from jaxpar.nn.position import Rope
from jaxpar.nn.stack import Stack

GATED = Stack(2, 8, Attention(4, 2, 4, positions=Rope(1e4)), Mlp(12), dtype="float64")
BIASED = Stack(2, 8, Attention(2, 2, 4, bias=True), Mlp(12, "gelu", True), dtype="float64")


def transposed_everywhere(monkeypatch):
    for room in ("attention.mixer", "mlp"):
        monkeypatch.setattr(f"jaxpar.nn.{room}.transposed_is_faster", lambda *weights: True)


def drawn(stack):
    """Parameters without a zero, and two rows of three tokens."""
    params = stack.init(jax.random.key(0), jnp.float64)
    leaves, tree = jax.tree.flatten(params)
    leaves = [
        x + jax.random.normal(jax.random.key(i), x.shape, x.dtype) for i, x in enumerate(leaves)
    ]
    return stack.unstacked(tree.unflatten(leaves)), jax.random.normal(
        jax.random.key(99), (2, 3, 8), jnp.float64
    )


def in_steps(stack):
    """The outputs of a prompt of two tokens and of one more."""

    def run(params, x):
        cache = stack.init_cache(len(x), 4)
        first, cache, _ = stack.apply(params, x[:, :2], cache=cache, fresh=True)
        second, _, _ = stack.apply(params, x[:, 2:], cache=cache)
        return jnp.concatenate([first, second], 1)

    return jit(run)


PAIRS = {("gated", False, 1), ("gated", True, 2), ("biased", False, 2), ("biased", True, 1)}


@pytest.mark.parametrize(
    ("stack", "transposed", "rows"),
    [
        pytest.param({"gated": GATED, "biased": BIASED}[each[0]], *each[1:], id=f"{each[0]}-{each[1]}-{each[2]}",
                     marks=[] if each in PAIRS else pytest.mark.slow)
        for each in itertools.product(("gated", "biased"), (False, True), (1, 2))
    ],
)  # fmt: skip
def test_it_is_the_same_function(stack, transposed, rows, x64, monkeypatch):
    params, x = drawn(stack)
    want = in_steps(stack)(params, x[:rows])
    if transposed:
        transposed_everywhere(monkeypatch)
        monkeypatch.setattr(
            "jaxpar.nn.linear.platform", lambda: "gpu"
        )  # one row is then summed along memory
    laid = stack.for_decoding(params)
    names = {f"{kind}{name}" for kind in "wb" for name in "qkv"} | (
        {"w_gate", "w_up", "b_up"} if transposed else set()
    )
    for layer in laid["layers"]:
        assert not names & set(layer) and "wqkv" in layer and ("w_inside" in layer) == transposed
        assert (
            isinstance(layer["w_down"], Transposed)
            == isinstance(layer["wo"], Transposed)
            == transposed
        )
    assert_close(in_steps(stack)(laid, x[:rows]), want, EXACT_MATHS["float64"])


def test_weights_of_another_kind_and_split_ones_stay(x64, monkeypatch):
    params, _ = drawn(GATED)
    transposed_everywhere(monkeypatch)
    monkeypatch.setattr(
        "jaxpar.nn.mlp.transposed_is_faster",
        lambda *weights: all(isinstance(w, jax.Array) for w in weights),
    )
    layer = dict(params["layers"][0])
    layer["wk"] = Lora.of(jax.random.key(0), layer["wk"], 1, 2)
    layer["w_down"] = Lora.of(jax.random.key(0), layer["w_down"], 1, 2)
    changed = GATED.for_decoding(params | {"layers": (layer, layer)})
    assert changed["layers"] == (layer, layer)
    for spec in (MeshSpec(tensor=2, data=4), MeshSpec(fsdp=8)):
        with use_mesh(make_mesh(spec)):
            assert GATED.for_decoding(params)["layers"] == params["layers"]
    with use_mesh(make_mesh(MeshSpec(data=8))):
        assert "wqkv" in GATED.for_decoding(params)["layers"][0]
