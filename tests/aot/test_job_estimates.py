"""Estimates of a step that is no language model's, on the devices at hand; and refusals for want of memory."""

import dataclasses
import importlib

import jax
import jax.numpy as jnp
import pytest
from fast import OPTIONS

from experiments.app.estimate.report import verdict
from jaxpar.aot import CHIPS, Job, estimate, factorisations, rank_candidates
from jaxpar.aot.candidates import DOUBT
from jaxpar.aot.estimate import EFFORTS, MARGINS
from jaxpar.mesh import MeshSpec, constrain, make_mesh
from jaxpar.types import UsageError

D, F, ROWS, LAYERS = 64, 256, 32, 3
PARAMS = {name: jax.ShapeDtypeStruct(shape, jnp.float32) for name, shape in
          (("up", (LAYERS, D, F)), ("down", (LAYERS, F, D)))}  # fmt: skip
AXES = {"up": ("layers", "embed", "mlp"), "down": ("layers", "mlp", "embed")}


def predict(params, x):
    def layer(x, p):
        h = jnp.tanh(x @ constrain(p["up"], None, "mlp"))
        return constrain(x + h @ constrain(p["down"], "mlp", None), "batch", None), None

    return jax.lax.scan(layer, x, params)[0]


def step(params, x):
    """Gradient descent on a stack of perceptrons."""
    grads = jax.grad(lambda p: jnp.square(predict(p, x)).mean())(params)
    return (jax.tree.map(lambda p, g: p - 0.1 * g, params, grads),)


def job_of(data=1, fsdp=2, tensor=4, rows=ROWS):
    mesh = make_mesh(
        MeshSpec(data=data, fsdp=fsdp, tensor=tensor), jax.devices()[: data * fsdp * tensor]
    )
    x = jax.ShapeDtypeStruct((rows, D), jnp.float32)
    group = lambda path: "parameters" if path.startswith("0.") else "other"  # noqa: E731
    return Job(
        step,
        (PARAMS, x),
        (AXES, ("batch", None)),
        mesh,
        out_axes=(AXES,),
        donate=(0,),
        options=OPTIONS,
        group=group,
    )


def test_a_plan_of_any_step():
    found = estimate(job_of(), effort="full", chip=CHIPS["v5e"])
    held = 4 * LAYERS * 2 * D * F / 8
    assert (found.parameters, found.optimizer, found.other) == (held, 0, 4 * ROWS * D / 2)
    assert found.fits and found.excess < 0 and found.compiled and found.compile_s > 0
    assert found.peak == found.parameters + found.other + found.temporaries
    assert found.flops.total == LAYERS * 2 * ROWS * D * F * (2 + 4)
    # A layer: two gathers forward; the sum over the hidden units forward and backward; sums of two gradients.
    crossing = {(row.kind, row.axes): row for row in found.crossings}
    gathered = crossing["all-gather", "fsdp"]
    assert gathered.bytes % (D * F * 4 // 4) == 0 and gathered.count >= 2 * LAYERS
    summed = crossing["all-reduce", "tensor"]
    assert summed.bytes >= 2 * LAYERS * (ROWS // 2) * D * 4
    assert all(row.axes in ("fsdp", "tensor", "fsdp+tensor") for row in found.crossings)
    assert found.roofline.mfu > 0 and found.notes == ()


def test_the_estimate_of_collectives_is_near_the_compiled_ones():
    compiled, guess = (
        estimate(job_of(), effort="full"),
        estimate(job_of(), effort="none", chip=CHIPS["h100"]),
    )
    assert not guess.compiled and guess.compile_s == 0 and "estimated" in guess.notes[0]
    for axes in ("fsdp", "tensor"):
        real, estimated = (
            sum(row.bytes for row in p.crossings if row.axes == axes) for p in (compiled, guess)
        )
        assert real / 3 < estimated < real * 3


@pytest.mark.parametrize("effort", ["full", "none"])
def test_a_step_fits_only_where_its_margin_stays_free(effort):
    peak = estimate(job_of(), effort=effort, chip=CHIPS["h100"]).peak
    margin = MARGINS[effort]
    for free, fits in ((1.01 * margin, True), (0.99 * margin, False), (0.0, False)):
        chip = dataclasses.replace(CHIPS["h100"], hbm_bytes=peak / (1 - free))
        found = estimate(job_of(), effort=effort, chip=chip)
        assert (found.fits, found.margin) == (fits, margin)
        assert found.excess <= 0  # the margin is no part of it
        said = verdict(found)
        word = "DOES NOT FIT"
        if fits:
            word = "fits"
        assert said.startswith(f"{word} with {100 * margin:.0f} % margin: ")
        assert said.endswith("to spare.")
    chip = dataclasses.replace(CHIPS["h100"], hbm_bytes=peak / 2)
    small = estimate(job_of(), effort=effort, chip=chip)
    assert not small.fits and verdict(small).endswith("too much.")


def test_each_effort_has_the_margin_of_its_own_errors():
    assert set(MARGINS) == set(EFFORTS)
    assert MARGINS["full"] < MARGINS["low"] < MARGINS["none"] < 0.25


def test_a_search_keeps_the_margin():
    """Both of what the analytic model passes over and of what the compiler judges."""
    peak = estimate(build((1, 1, 1)), effort="full", chip=CHIPS["h100"]).peak
    by_model = estimate(build((1, 1, 1)), effort="none", chip=CHIPS["h100"]).peak

    def verdict_of(capacity, effort):
        chip = dataclasses.replace(CHIPS["h100"], hbm_bytes=capacity)
        return rank_candidates([(1, 1, 1)], build, chip, effort=effort)[0].verdict

    assert verdict_of(1.01 * peak / (1 - MARGINS["full"]), "full") == "best"
    assert verdict_of(0.99 * peak / (1 - MARGINS["full"]), "full") == "does not fit"
    edge = by_model / DOUBT / (1 - MARGINS["none"])
    assert verdict_of(0.99 * edge, "none") == "over"
    assert verdict_of(1.01 * edge, "none") == "does not fit"
    with pytest.raises(UsageError, match="effort='much' is unknown"):
        rank_candidates([(1, 1, 1)], build, CHIPS["h100"], effort="much")


def test_a_device_of_unknown_memory_decides_nothing():
    found = estimate(job_of(), effort="full")
    assert (
        found.fits is None
        and found.capacity is None
        and found.excess == 0
        and found.roofline is None
    )


@pytest.mark.parametrize(
    "text",
    [
        "RESOURCE_EXHAUSTED: E1000: CompileTimeHbmOom: Ran out of memory on HBM, the total memory required for HLO "
        "temporaries (24.50G) exceeds available HBM (15.75G). HLO module: jit_g.",
        "RESOURCE_EXHAUSTED: Ran out of memory in memory space hbm. Used 24.50G of 15.75G hbm. Exceeded by 8.75G.",
    ],
)
def test_a_refusal_is_an_outcome(monkeypatch, text):
    def refuse(self, **kwargs):
        raise jax.errors.JaxRuntimeError(text)

    monkeypatch.setattr(jax.stages.Lowered, "compile", refuse)
    found = estimate(job_of())
    assert found.fits is False
    assert (found.peak, found.capacity, found.excess) == tuple(
        size * 2**30 for size in (24.5, 15.75, 8.75)
    )
    assert "refused" in found.notes[0] and found.crossings


def test_other_failures_are_not_swallowed(monkeypatch):
    def fail(self, **kwargs):
        raise jax.errors.JaxRuntimeError("INTERNAL: something else")

    monkeypatch.setattr(jax.stages.Lowered, "compile", fail)
    with pytest.raises(
        UsageError, match=r"the compiler for \w+ does not take this step \(internal\)"
    ) as caught:
        estimate(job_of())
    assert "something else" in str(caught.value.__cause__), "the whole of it is there for who looks"


def test_unknown_effort():
    with pytest.raises(UsageError, match="effort='much' is unknown; legal are low, full, none"):
        estimate(job_of(), effort="much")


# ---------------------------------------------------------------- search


def test_factorisations():
    assert sorted(factorisations(4, 2)) == [(1, 4), (2, 2), (4, 1)]
    assert len(list(factorisations(64, 3))) == 28
    assert all(a * b * c == 12 for a, b, c in factorisations(12, 3))


def build(sizes):
    return job_of(*sizes, rows=2048)


def test_search_ranks_by_the_compiler_and_keeps_the_illegal():
    small = dataclasses.replace(
        CHIPS["v5e"], hbm_bytes=4e6
    )  # all rows on each device are too much for it
    told = []
    found = rank_candidates(
        [*factorisations(8, 3), (1, 1, 3)], build, small, effort="full", compiled=2, tell=told.append
    )  # fmt: skip
    assert found[0].verdict == "best" and found[0].estimate.fits
    assert len(told) == sum(f.estimate is not None for f in found) >= 2
    verdicts = {f.candidate: f.verdict for f in found}
    assert verdicts[1, 1, 3] == "not legal" and "does not divide over tensor=3" in found[-1].reason
    assert verdicts[1, 1, 8] == "over"
    fitting = [f.estimate.roofline.step_s for f in found if f.estimate and f.estimate.fits]
    assert fitting == sorted(fitting)


def test_search_without_a_legal_candidate():
    with pytest.raises(UsageError, match="no candidate is legal: .*does not divide over tensor=3"):
        rank_candidates([(1, 1, 3)], build, CHIPS["v5e"])


def test_what_a_compiler_says_of_a_step_is_said_in_our_words(monkeypatch):
    def refuse(*args):
        raise jax.errors.JaxRuntimeError(
            "UNIMPLEMENTED: Mosaic failed to compile TPU kernel: bad\nAt location: loc(x)"
        )

    monkeypatch.setattr(importlib.import_module("jaxpar.aot.estimate"), "compile_lowered", refuse)
    mesh = make_mesh(MeshSpec(data=8))
    job = Job(lambda x: 2 * x, (jax.ShapeDtypeStruct((8,), jnp.float32),), (("batch",),), mesh)
    with pytest.raises(UsageError) as caught:
        estimate(job)
    assert str(caught.value) == (
        "the compiler for cpu does not take this step (unimplemented); effort=none estimates it without compiling."
    )
    assert not estimate(job, effort="none").compiled
