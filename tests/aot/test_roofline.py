"""The prediction against what was measured, and its collectives against formulas."""

import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import pytest

from jaxpar.aot import CHIPS
from jaxpar.aot.hlo import Crossing
from jaxpar.aot.roofline import LINK_SHARE, roofline
from jaxpar.aot.traffic import Traffic, traffic_of
from jaxpar.lm import OptimizerConfig, Trainer, flops_per_token
from jaxpar.mesh import MeshSpec, make_mesh

ROOT = Path(__file__).parents[2]
MEASURED = {
    "gpt2": 510_621,
    "gpt2-b64": 520_679,
    "0.9b": 88_993,
}  # tokens/s of an H100, docs/benchmarks.md


@pytest.mark.parametrize("case", MEASURED)
def test_prediction_is_near_the_h100(case, monkeypatch):
    monkeypatch.syspath_prepend(str(ROOT / "bench"))
    import lm_throughput

    shape = lm_throughput.CASES[case]
    model = lm_throughput.model_config(
        shape, {"attention": "splash"}
    )  # does cuDNN's work, and can be traced here
    trainer = Trainer(model, OptimizerConfig(), num_steps=100)
    key = jax.eval_shape(lambda: jax.random.key(0))
    rows = jax.ShapeDtypeStruct((shape["batch_size"], shape["seq_len"]), jnp.int32)
    batch = {"tokens": rows, "targets": rows}
    jaxpr = jax.make_jaxpr(trainer.step)(key, jax.eval_shape(trainer.init, key), batch)
    tokens = rows.size
    needed = tokens * flops_per_token(model, shape["seq_len"])
    mesh = make_mesh(MeshSpec(data=1), jax.devices()[:1])
    line = roofline(traffic_of(jaxpr.jaxpr), (), CHIPS["h100"], mesh, needed)
    assert tokens / line.step_s == pytest.approx(MEASURED[case], rel=0.10)
    assert line.mfu == pytest.approx(needed / line.step_s / 989.4e12)
    assert sys.modules.pop("lm_throughput")


@pytest.mark.parametrize(
    ("kind", "moved"),
    [
        ("all-gather", 3 / 4),
        ("reduce-scatter", 3 / 4),
        ("all-reduce", 6 / 4),
        ("all-to-all", 3 / 4),
        ("collective-permute", 1),
    ],
)
@pytest.mark.parametrize(("chip", "links"), [("h100", 1), ("v5e", 2)])
def test_links(kind, moved, chip, links):
    mesh = make_mesh(MeshSpec(fsdp=4, tensor=2), jax.devices())
    traffic = Traffic({(0.0, 1.0): 1}, 0.0, ())
    line = roofline(traffic, [Crossing(kind, "fsdp", 10, 10**9)], CHIPS[chip], mesh)
    assert line.links_s == {
        "fsdp": pytest.approx(moved * 1e9 / (LINK_SHARE * links * CHIPS[chip].link_bandwidth))
    }
    assert line.step_s == sum(line.links_s.values()) and line.bound == "links"
