"""Linear attention's kernels in machine code of sm_90, compiled without a GPU: wgmma, and hardly anything spilled."""

import jax
import jax.numpy as jnp
import pytest
import triton_interpreter
from hopper import assert_side_by_side, compiled_facts, recorded

from jaxpar.nn.mixers import linear_kernels as kernels
from jaxpar.nn.mixers.linear_attention import linear_attention
from jaxpar.nn.mixers.options import Packing, Readout, RecurrenceExecution

pytestmark = triton_interpreter.NEEDED
SHAPES = {
    "B4": (4, 2048, 16, 128, 128),
    "B8": (8, 4096, 4, 128, 256),
    "B1": (1, 8192, 96, 128, 128),
}


def calls_of(batch, length, heads, depth, width, kind, monkeypatch):
    """The distinct kernels of outputs and gradients."""
    made = recorded(kernels, monkeypatch)
    given = lambda *shape, dtype="bfloat16": jax.ShapeDtypeStruct(shape, dtype)  # noqa: E731
    q, v = given(batch, length, heads, depth), given(batch, length, heads, width)
    decays = {"none": None, "heads": (batch, length, heads), "rows": q.shape, "bonus": q.shape}[
        kind.split(",")[0]
    ]
    decay = None if decays is None else given(*decays, dtype="float32")
    bonus = given(heads, depth, dtype="float32") if kind == "bonus" else None
    starts = given(batch, length, dtype="bool") if kind in ("bonus", "heads, floor") else None

    def run(q, k, v, decay, bonus, starts):
        floor = jnp.ones(v.shape[:3]) if kind.endswith("floor") else None

        def call(q, k, v, decay, bonus):
            return linear_attention(
                q,
                k,
                v,
                decay,
                packing=Packing(starts=starts),
                readout=Readout(bonus=bonus, floor=floor),
                execution=RecurrenceExecution(impl="kernel"),
            )

        out, pull = jax.vjp(call, q, k, v, decay, bonus)
        return pull(out)

    jax.eval_shape(run, q, q, v, decay, bonus, starts)
    return made


@pytest.mark.slow  # 30 to 120 s for each on one core: Triton's compiler, and ptxas
@pytest.mark.parametrize(
    ("shape", "kind"),
    [(shape, kind) for shape in SHAPES for kind in ("heads", "rows")]
    + [("B8", kind) for kind in ("none", "bonus", "heads, floor", "rows, floor")],
)
def test_the_machine_code_multiplies_by_tensor_cores_and_hardly_spills(shape, kind, monkeypatch):
    calls = calls_of(*SHAPES[shape], kind, monkeypatch)
    by_rows = "rows" in kind or kind == "bonus"
    again = ["carry"] * (not by_rows)  # of rows it is the forward pass's once more
    assert [call["name"] for call in calls] == [
        "carry",
        "outputs",
        *again,
        "carry",
        "value_gradients",
        "key_gradients",
    ]
    for call, fact in compiled_facts(calls):
        if by_rows:  # 32 tokens, or 16 rows of a state, are too few for wgmma
            assert fact["hmma"] > 0
        else:
            assert (
                all(".f32.bf16.bf16" in each for each in fact["wgmma"])
                and fact["hgmma"] > 0 == fact["hmma"]
            )
        # Four warps that spill a little were faster on an H200 and an H100 than eight that do not, without a bonus.
        most = (
            {"key_gradients": 384 if kind == "bonus" else 192, "value_gradients": 32}
            if by_rows
            else {}
        )
        assert fact["spilled"] <= most.get(call["name"], 0) and fact["registers"] <= 255
        assert (
            max(fact["copies"], default=16) == 16
        )  # bytes a thread; none where a loop is of one tile
        programs = 8 // call["num_warps"]  # side by side on a multiprocessor: eight warps at least
        assert_side_by_side(call, fact, programs)
