"""What `impl="auto"` takes on each platform, and on what evidence; the platform is the one compiled for."""

from typing import NamedTuple

__all__ = ["IMPL_RULES", "Rule", "choose_impl"]


class Rule(NamedTuple):
    """One row: the first whose conditions hold decides.

    Attributes:
      platform: "cpu", "cuda", "tpu", or "other".
      impl: "kernel" holds only where the platform's kernel is installed and takes the arrays (`takes` of `_kernels`).
      min_steps: Least length of time, on one device.
      why: Evidence.
      kinds: Of `affine_scan` for which it holds; none are all.
    """

    platform: str
    impl: str
    min_steps: int
    why: str
    kinds: tuple[str, ...] = ()


IMPL_RULES = (
    Rule(
        "cpu", "sequential", 0,
        "timed, two cores, float32, all shapes tried: (4096, 1024) 5 ms against 50 associative and 55 chunked, its "
        "gradient 0.12 s against 0.67 and 0.91; (65536, 1) 0.2 ms against 0.6 and 0.8; compiled in 0.3 s against 5; "
        "(64, 8, 64, 64) by rows 2.0 ms against 5.1 and 4.4, by matrices 7.7 against 22 and 25, gradients alike; "
        "(1000000, 4) 4.8 ms against 26 associative and 18 chunked, its gradient 11.5 against 87 and 43",
    ),
    Rule(
        "cuda", "sequential", 0,
        "not timed: a step is K^2 V products, of which chunks do twice as many and K^3 beside, a tree twice as many "
        "and 2 K^3; at 32 heads of 128 x 256 that is 0.27 GFLOP in float32, reckoned to take as long as its launch",
        ("matrix",),
    ),
    Rule("cuda", "kernel", 32, "timed on an H100: `bench/scan.py`"),
    Rule(
        "cuda", "chunked", 0,
        "timed on an H100, diagonal, float32: (65536, 1024) 0.86 ms against 0.97 associative, (4096, 12288) 0.65 "
        "against 0.79; blocks and dense ones are taken to be alike, and so are rows, not timed: b is read twice and h "
        "written once, where a loop reads and writes once but launches every step",
    ),
    Rule("tpu", "sequential", 0, "not timed: as on cuda", ("matrix",)),
    Rule(
        "tpu", "kernel", 128,
        "bytes of the program compiled for a v5e, not timed: (8, 4096, 1536) float32 0.60 GB and no temporary "
        "memory, against 3.87 and 0.49 chunked, 6.94 and 0.71 associative",
    ),
    Rule("tpu", "chunked", 0, "bytes of the program compiled for a v5e, not timed: as above"),
    Rule("other", "sequential", 0, "least products", ("matrix",)),
    Rule("other", "chunked", 0, "least passes over memory that plain XLA needs"),
)  # fmt: skip
"""The table, in the order in which it is read."""


def choose_impl(platform: str, *, num_steps: int, kernel: bool, kind: str = "diag") -> str:
    """Returns the `impl` of the first rule that holds.

    Args:
      platform: As in `Rule`.
      num_steps: Length of time, on one device.
      kernel: Whether the platform has a kernel for these arrays.
      kind: Of `affine_scan`.
    """
    rows = (
        rule
        for rule in IMPL_RULES
        if rule.platform == platform
        and num_steps >= rule.min_steps
        and kind in (rule.kinds or (kind,))
    )
    return next(rule.impl for rule in rows if kernel or rule.impl != "kernel")
