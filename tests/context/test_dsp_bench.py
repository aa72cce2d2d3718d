"""The benchmark of a video's layers: its forms are one model, and send what they say."""

import math

import jax
import pytest
from bench_modules import bench_modules
from fast import jit
from tolerance import LAYOUT, assert_close

from jaxpar.mesh import MeshSpec, make_mesh, use_mesh

SHARES = 4


@pytest.fixture
def bench():
    """The benchmark's module, forgotten afterwards."""
    with bench_modules("dsp") as modules:
        yield modules["dsp"]


def test_forms_are_one_model_and_send_what_they_say(bench):
    results, sent, tokens = {}, {}, 0
    with use_mesh(mesh := make_mesh(MeshSpec(context=SHARES), jax.devices()[:SHARES])):
        for move in (bench.ANEW, "ring", "swap"):
            model, forward = bench.forms(bench.TINY, move)
            args = bench.drawn(bench.TINY, model, move)

            def both(params, x, g, forward=forward):
                out, pull = jax.vjp(forward, params, x)
                return out, *pull(g)

            compiled = jit(both).lower(*args).compile()
            results[move], tokens = compiled(*args), args[1].size
            sent[move] = bench.sent(compiled.as_text(), mesh, tokens) / (
                tokens * 4
            )  # of all tokens' bytes
    for move in ("ring", "swap"):
        assert_close(results[move], results[bench.ANEW], LAYOUT["float32"])
    others = 1 - 1 / SHARES
    assert math.isclose(sent[bench.ANEW], 4 / SHARES * others)
    assert math.isclose(sent["swap"], 8 / SHARES * others)
    # Keys and values forward and again, and sums of their gradients with one hop more.
    assert math.isclose(sent["ring"], (2 * 2 * (SHARES - 1) + 2 * SHARES) / SHARES)
