"""The kernels of grouped products in machine code of sm_90, compiled without a GPU: wgmma, and nothing spilled."""

import jax
import pytest
import triton_interpreter
from hopper import assert_side_by_side, compiled_facts, recorded

from jaxpar.nn.experts import by_index, grouped_matmul

pytestmark = triton_interpreter.NEEDED
SHAPES = {
    "E8": (16384, 2048, 8192, 8, 2),
    "E64": (16384, 2048, 1024, 64, 8),
    "E128": (32768, 1024, 512, 128, 8),
}


def calls_of(tokens, depth, width, experts, k, monkeypatch):
    """The distinct kernels of a product that reads tokens, one that adds up their choices, and their gradients."""
    made = recorded(by_index, monkeypatch)

    def run(x, up, down, sizes, order, g):
        def layer(x, up, down):
            rows = grouped_matmul(x, up, sizes, read=order, impl="kernel")
            return grouped_matmul(rows, down, sizes, write=order, summed=k, impl="kernel")

        y, pull = jax.vjp(layer, x, up, down)
        return y, pull(g)

    given = lambda *shape, dtype="bfloat16": jax.ShapeDtypeStruct(shape, dtype)  # noqa: E731
    x = given(tokens, depth)
    up, down = given(experts, depth, width), given(experts, width, depth)
    jax.eval_shape(
        run, x, up, down, given(experts, dtype="int32"), given(tokens * k, dtype="int32"), x
    )
    return made


@pytest.mark.slow  # 20 to 100 s for each shape on one core: Triton's compiler, and ptxas
@pytest.mark.parametrize("shape", SHAPES)
def test_the_machine_code_multiplies_by_wgmma_and_spills_nothing(shape, monkeypatch):
    calls = calls_of(*SHAPES[shape], monkeypatch)
    assert [call["name"] for call in calls].count("weight_gradient") == 2 and len(calls) == 6
    for call, fact in compiled_facts(calls):
        high, wide, step = (call["constants"][name] for name in ("HIGH", "WIDE", "STEP"))
        assert (
            fact["wgmma"] == [f"m64n{wide}k16.f32.bf16.bf16"] and fact["hgmma"] > 0 == fact["hmma"]
        )
        assert fact["spilled"] == 0 and fact["registers"] <= 255
        assert max(fact["copies"]) == 16  # bytes a thread, of rows; indices are 4
        assert (
            fact["shared"] >= 3 * 2 * (high + wide) * step
        )  # three steps are under way, also behind indices
        programs = 1 if wide == 256 else 2  # side by side on a multiprocessor
        assert_side_by_side(call, fact, programs)
