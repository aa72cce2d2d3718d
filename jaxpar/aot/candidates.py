"""Which of many candidates is best: the analytic models prune them, the compiler judges the best few."""

import dataclasses
import math
from collections.abc import Callable, Iterable, Iterator
from typing import Any, TypeVar

from jaxpar.aot.estimate import Estimate, estimate, has_margin, margin_of
from jaxpar.aot.job import Job
from jaxpar.aot.memory_estimate import analyse
from jaxpar.aot.roofline import roofline
from jaxpar.aot.topology import Chip
from jaxpar.types import UsageError

__all__ = ["Finding", "factorisations", "rank_candidates"]

T = TypeVar("T")

DOUBT = 1.15
"""A candidate is compiled unless the analytic model has it over what may be used by this factor."""


@dataclasses.dataclass(frozen=True)
class Finding:
    """What became of one candidate.

    Attributes:
      candidate: As it was given.
      peak: Bytes of a device by the analytic model; None if it is not legal.
      step_s: Seconds by the analytic model, collectives estimated; None if it is not legal.
      verdict: "best", "fits", "does not fit", "over" (by the analytic model, not compiled), "slower" (not compiled) or
        "not legal".
      estimate: Of the step, if it was compiled.
      reason: Why it is not legal.
    """

    candidate: Any
    peak: float | None
    step_s: float | None
    verdict: str
    estimate: Estimate | None = None
    reason: str = ""


def factorisations(count: int, parts: int) -> Iterator[tuple[int, ...]]:
    """Yields every way to write `count` as an ordered product of `parts` sizes."""
    if parts == 1:
        yield (count,)
        return
    for size in range(1, count + 1):
        if count % size == 0:
            yield from ((size, *rest) for rest in factorisations(count // size, parts - 1))


def rank_candidates(
    candidates: Iterable[T],
    build: Callable[[T], Job],
    chip: Chip,
    *,
    effort: str = "low",
    compiled: int = 3,
    tell: Callable[[str], None] = lambda text: None,
) -> list[Finding]:
    """Returns every candidate with what became of it, the best first.

    All are judged by the analytic models (a trace each), and the fastest of those that may fit are compiled until
    `compiled` of them do fit. Compiled ones rank by their predicted step with their real collectives.

    Args:
      candidates: Any values.
      build: Candidate -> job; raises `UsageError` where there is none.
      chip: Whose memory and peaks count.
      effort: As in `jaxpar.aot.estimate.EFFORTS`; "none" ranks by the models alone.
      compiled: How many that fit to end with; at most three times as many are compiled.
      tell: Called with a line of progress before each compile.

    Raises:
      UsageError: If no candidate is legal, or the effort is unknown.
    """
    margin = margin_of(effort)
    findings, jobs = [], {}
    for number, candidate in enumerate(candidates):
        try:
            job = build(candidate)
            memory, traffic = analyse(job)
        except UsageError as error:
            findings.append(Finding(candidate, None, None, "not legal", reason=str(error)))
            continue
        time = roofline(traffic, traffic.crossings, chip, job.mesh, job.model_flops).step_s
        verdict = "over"
        if has_margin(memory.peak, DOUBT * chip.hbm_bytes, margin):
            verdict = "slower"
        findings.append(Finding(candidate, memory.peak, time, verdict))
        jobs[number] = job
    if not jobs:
        raise UsageError(
            "no candidate is legal: " + (findings[0].reason if findings else "none was given.")
        )
    order = [
        n
        for n in sorted(jobs, key=lambda n: findings[n].step_s or 0.0)
        if findings[n].verdict == "slower"
    ]
    fitting = 0
    for number in order[: 3 * compiled]:
        if fitting == compiled:
            break
        tell(f"estimating {findings[number].candidate}")
        found = estimate(jobs[number], effort=effort, chip=chip)
        fitting += bool(found.fits)
        findings[number] = dataclasses.replace(
            findings[number], estimate=found, verdict="fits" if found.fits else "does not fit"
        )
    ranked = sorted(findings, key=_rank)
    if ranked[0].verdict == "fits":
        ranked[0] = dataclasses.replace(ranked[0], verdict="best")
    return ranked


def _rank(finding: Finding) -> tuple[int, float]:
    place = ("fits", "slower", "over", "does not fit", "not legal").index(finding.verdict)
    predicted = (
        finding.estimate.roofline.step_s
        if finding.estimate and finding.estimate.roofline
        else finding.step_s
    )
    return place, math.inf if predicted is None else predicted
