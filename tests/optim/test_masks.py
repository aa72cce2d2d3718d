"""What decays, and which dimensions are Muon's matrix, from plain pytrees."""

import jax
import numpy as np
import pytest

from jaxpar.optim import OptimizerConfig, make_optimizer, muon_dimensions
from jaxpar.optim.masks import matrices
from jaxpar.types import UsageError

AXES = {
    "embedding": ("vocab", "embed"),  # no stack
    "table": ("vocab", "embed", "mlp"),  # nor this
    "layers": {
        "into": ("layers", "embed", "heads", "head_dim"),
        "out": ("layers", "heads", "head_dim", "embed"),
        "flat": ("layers", "mlp", "embed"),
        "inner": ("layers", None, "heads", "head_dim", "head_dim"),  # units to units
        "norm": ("layers", "embed"),  # one vector a layer
        "bias": ("layers", "embed", None),  # no weight, whatever its shape
    },
    "stack": ("layers", "embed", None),
}
WEIGHTS = jax.tree.map(lambda _: True, AXES, is_leaf=lambda x: isinstance(x, tuple))
WEIGHTS["layers"]["bias"] = False


def test_dimensions_of_muon_follow_the_logical_axes():
    got = muon_dimensions(AXES, WEIGHTS)
    assert {name for name, numbers in got["layers"].items() if numbers} == {"into", "out", "flat"}
    assert got["embedding"] is None and got["table"] is None
    sides = {
        name: tuple(numbers)
        for name, numbers in [*got["layers"].items(), ("stack", got["stack"])]
        if numbers
    }
    assert sides == {
        "into": ((1,), (2, 3)),  # contracted with the input, the rest comes out
        "out": ((1, 2), (3,)),
        "flat": ((1,), (2,)),
        "stack": ((1,), (2,)),
    }


def test_dimensions_are_those_that_multiply():
    """A leaf of each shape as the matrix from its inputs to its outputs equals the product over its own axes."""
    rng = np.random.default_rng(0)
    weight, x = rng.standard_normal((2, 3, 4, 5)), rng.standard_normal((3, 4))
    (rows, columns) = muon_dimensions({"out": AXES["layers"]["out"]}, {"out": True})["out"]
    matrix = weight[1].reshape(
        np.prod([weight.shape[i] for i in rows]), np.prod([weight.shape[i] for i in columns])
    )
    np.testing.assert_allclose(x.ravel() @ matrix, np.einsum("hd,hde->e", x, weight[1]))


def test_matrices_have_two_dimensions_or_more():
    params = {"w": np.ones((2, 3)), "stack": np.ones((2, 1, 1)), "b": np.ones(3), "s": np.ones(())}
    assert matrices(params) == {"w": True, "stack": True, "b": False, "s": False}


@pytest.mark.parametrize("axes", [None, {"w": ("vocab", "embed")}, {"w": ("layers", "embed")}])
def test_muon_without_a_stack_of_matrices_is_refused(axes):
    with pytest.raises(
        UsageError, match="optimizer.name='muon' finds no stack of matrices.*legal are adamw"
    ):
        make_optimizer(OptimizerConfig("muon"), 10, axes=axes)
