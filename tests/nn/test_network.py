"""Networks over sequences whose layers have a matrix state: streamed step by step they give what the whole gives."""

import jax
import jax.numpy as jnp
import pytest
from fast import jit
from tolerance import EXACT_MATHS, assert_close

from jaxpar.nn import SequenceNetwork
from jaxpar.solve import Newton
from jaxpar.types import UsageError


@pytest.mark.parametrize("name", ["retention", "gated_delta"])
def test_a_matrix_state_streams(name, x64):
    """Retention rotates by positions, which go on from call to call; gated_delta has convolutions."""
    network = SequenceNetwork(3, 2, name, size=8, layers=1, heads=2)
    params = network.init(jax.random.key(0), jnp.float64)
    x = jax.random.normal(jax.random.key(1), (2, 6, 3), jnp.float64)
    run = jit(lambda params, x, states: network.apply(params, x, states)[:2])
    whole, last = run(params, x, None)
    first, states = run(params, x[:, :3], None)
    parts = [first]
    for t in range(3, 6):
        out, states = run(params, x[:, t : t + 1], states)
        parts.append(out)
    assert_close(jnp.concatenate(parts, 1), whole, EXACT_MATHS["float64"])
    assert_close(states, last, EXACT_MATHS["float64"])
    assert float(jnp.abs(whole).max()) > 0.1


def test_what_no_layer_can_be_is_refused():
    with pytest.raises(UsageError, match="size=12 must be a multiple of 4 heads, 8, for cell=gla"):
        SequenceNetwork(3, 2, "gla", size=12, heads=2)
    with pytest.raises(UsageError, match="cell=gla has a closed form, which no method solves"):
        SequenceNetwork(3, 2, "gla", size=8, method=Newton())
