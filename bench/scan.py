"""How close to the memory's rate does an affine scan h[t] = a[t] h[t-1] + b[t] come, beside every other scan there is?

    python bench/scan.py                                   # all cases of one GPU
    python bench/scan.py --cases A1,A3 --budget-s 200 --only jaxpar,associative
    python bench/scan.py --shards --cases A5,B4            # time split over all devices of this host
    JAX_PLATFORMS=cpu python bench/scan.py --tiny          # any machine: checks that the script runs

Rows are medians of 20 timings (fewer of slow ones) after warm-up, compile time apart. JAX is timed by the clock over
several queued calls, torch by CUDA events over as many, and replayed from a CUDA graph where that is faster. Each side
gets its own memory layout; "transposed" has ours, (B, T, C), and is turned to its own and back. Rates are of the least
bytes, whatever a method really moves: forward reads a and b and writes h; forward + backward also reads a, h and the
cotangent and writes da and db. The limit is a copy measured by the same process. Errors are of a few lanes against a
float64 loop, relative to the largest entry. Every working set is larger than the cache. Peers that are not installed
fail their rows. Prints as it goes, writes JSON.
"""

import argparse
import functools
import math
import pathlib
import sys
import time

HERE = pathlib.Path(__file__).resolve().parent
sys.path[:0] = [str(HERE.parent), str(HERE)]

import harness  # noqa: E402

CASES = {
    "A1": dict(kind="diag", shape=(8, 4096, 1536), dtype="float32"),
    "A2": dict(kind="diag", shape=(8, 65536, 1536), dtype="float32"),
    "A3": dict(kind="diag", shape=(16, 16384, 128), dtype="float32"),
    "A4": dict(kind="diag", shape=(1, 131072, 512), dtype="float32"),
    "A5": dict(kind="diag", shape=(1, 1048576, 64), dtype="float32"),
    "A6": dict(kind="diag", shape=(4, 8192, 2560), dtype="bfloat16"),
    "A7": dict(kind="block", shape=(8, 4096, 256), dtype="float32"),
    "A8": dict(kind="diag", shape=(8, 4096, 2048), dtype="float32"),  # HGRN in MatMul-free's model
}
SHARDED = {"A5": CASES["A5"], "B4": dict(kind="para_gru", shape=(1, 1048576, 256), dtype="float32")}
OURS = ("auto", "kernel", "chunked", "associative")
PASSES = {
    ("diag", "fwd"): 3,
    ("diag", "fwd+bwd"): 8,
    ("block", "fwd"): 8,
    ("block", "fwd+bwd"): 22,
}  # arrays moved


def rows_of(name: str, case: dict) -> list[tuple[str, str]]:
    """Returns (side, row) of a case, peers first, so that a row of ours can be compared at once."""
    length, rows = case["shape"][1], []
    if case["kind"] == "block":
        rows += [("torch", "pararnn scan_block2")]
    else:
        rows += [("torch", "fla hgrn chunk"), ("torch", "accelerated-scan triton")]
        rows += [("torch", "accelerated-scan transposed triton")]
        rows += [("torch", "fla hgrn recurrent")] if length <= 16384 else []
        rows += [("torch", "accelerated-scan warp")] if name in ("A1", "A2", "A3") else []
    rows += [("jax", "lax.associative_scan")]
    rows += [
        ("jax", f"lax.scan unroll={k}")
        for k in ((1, 8, 32) if name == "A1" else (32,))
        if length <= 16384
    ]
    rows += [("jax", f"jaxpar {impl}") for impl in OURS + (("sequential",) if name == "A1" else ())]
    return rows + ([("jax", "jaxpar lanes")] if case["kind"] == "block" else [])


def tiny(case: dict) -> dict:
    """Returns the case at a size for any machine."""
    return case | {"shape": (2, 256, 8)}


class Affine:
    """The arrays of one case on the device, and the float64 solution of a few lanes."""

    def __init__(self, kind: str, shape: tuple[int, ...], dtype: str):
        """Draws decays between time constants of 1 and 1000 steps, drives and a cotangent."""
        import jax
        import jax.numpy as jnp

        keys = jax.random.split(jax.random.key(0), 4)
        self.kind, self.shape = kind, tuple(shape)
        full = self.shape + ((2,) if kind == "block" else ())

        @jax.jit
        def draw():
            decay = jnp.exp(
                -jnp.exp(jax.random.uniform(keys[0], self.shape, minval=math.log(1e-3), maxval=0.0))
            )
            b, g = (jax.random.normal(key, full).astype(dtype) for key in keys[1:3])
            if kind == "diag":
                return decay.astype(dtype), b, g
            angle = jax.random.normal(keys[3], self.shape)
            turn = jnp.stack([jnp.cos(angle), -jnp.sin(angle), jnp.sin(angle), jnp.cos(angle)], -1)
            return (decay[..., None] * turn).reshape(*full, 2).astype(dtype), b, g

        self.a, self.b, self.g = draw()

    def lanes(self, array):
        """Returns a few lanes of [B, T, C, ...] with time first, as numpy."""
        import jax.numpy as jnp
        import numpy as np

        batch, channels = min(2, array.shape[0]), array.shape[2]
        stride = max(1, channels // 4)
        picked = array[:batch, :, : 4 * stride : stride].astype(jnp.float32)
        return np.moveaxis(np.asarray(picked), 1, 0)

    @functools.cached_property
    def expected(self) -> tuple:
        """h, da and db of the lanes in float64."""
        import problems

        return problems.affine_reference(*(self.lanes(x) for x in (self.a, self.b, self.g)))


def solver(row: str, kind: str):
    """Returns h(a, b) on arrays with time at axis 1 (axis 0 for lax.scan)."""
    import jax.numpy as jnp
    from jax import lax

    def apply(a, h):
        return (
            a * h
            if kind == "diag"
            else jnp.stack([(a[..., i, :] * h).sum(-1) for i in range(2)], -1)
        )

    if row == "lax.associative_scan":

        def combine(left, right):
            if kind == "diag":
                return left[0] * right[0], right[0] * left[1] + right[1]
            columns = [apply(right[0], left[0][..., :, j]) for j in range(2)]
            return jnp.stack(columns, -1), apply(right[0], left[1]) + right[1]

        return lambda a, b: lax.associative_scan(combine, (a, b), axis=1)[1]
    if row.startswith("lax.scan"):
        unroll = int(row.partition("=")[2])

        def step(h, ab):
            h = apply(ab[0], h) + ab[1]
            return h, h

        return lambda a, b: lax.scan(step, jnp.zeros_like(b[0]), (a, b), unroll=unroll)[1]
    from jaxpar import scan

    if row == "jaxpar lanes":
        return lambda a, b: scan.affine_lanes(a, b, axis=1)
    impl = row.removeprefix("jaxpar ")
    return lambda a, b: scan.affine_scan(a, b, kind=kind, axis=1, impl=impl)


class JaxWorker:
    """Answers rows of JAX; keeps the arrays of the case in hand."""

    def __init__(self):
        """Starts without a case."""
        self.key = None
        self.case = None
        self.programs = harness.Programs(self.program)

    def __call__(self, request: dict) -> dict:
        """Compiles, checks and times a row."""
        return harness.answer_row(self, request)

    def load(self, request: dict) -> None:
        """Draws the arrays of a case."""
        kind = request["kind"]
        shape = tuple(request["shape"])
        dtype = request["dtype"]
        key = (kind, shape, dtype)
        if key != self.key:
            # Frees before it draws.
            self.case = None
            self.key = None
            self.programs.ready = {}
            self.case = Affine(kind=kind, shape=shape, dtype=dtype)
            self.key = key

    def program(self, request: dict) -> tuple:
        """Returns the function of a row and its arguments."""
        import jax
        import jax.numpy as jnp

        case, row = self.case, request["row"]
        solve, axis = solver(row, case.kind), 0 if row.startswith("lax.scan") else 1
        args = [
            x if axis == 1 else jnp.moveaxis(x, 1, 0) for x in (case.a, case.b, case.g)
        ]  # moving copies
        if row == "jaxpar lanes":
            a, b, g = args
            args = [
                tuple((a[..., i, 0], a[..., i, 1]) for i in range(2)),
                (b[..., 0], b[..., 1]),
                (g[..., 0], g[..., 1]),
            ]

        def both(a, b, g):
            return jax.vjp(solve, a, b)[1](g)

        return (both, args) if request["direction"] == "fwd+bwd" else (solve, args[:2])

    def measure(self, request: dict) -> dict:
        """Times one row on the arrays of the case."""
        import jax.numpy as jnp

        case = self.case
        assert case
        backward, axis = (
            request["direction"] == "fwd+bwd",
            0 if request["row"].startswith("lax.scan") else 1,
        )
        compiled, args, compile_s = self.programs(request)
        out = compiled(*args) if backward else (compiled(*args),)
        expected = case.expected[1:] if backward else case.expected[:1]
        error = harness.error_of(
            [case.lanes(jnp.moveaxis(joined(x), axis, 1)) for x in out], expected
        )
        del out
        timed = harness.time_jax(compiled, [tuple(args)], request["spend_s"])
        return timed | {"compile_s": compile_s, "error": error}


def joined(lanes):
    """Returns the array [..., 2] or [..., 2, 2] of lanes that are apart; an array as it is."""
    import jax.numpy as jnp

    if not isinstance(lanes, tuple):
        return lanes
    return jnp.stack([joined(x) for x in lanes], -2 if isinstance(lanes[0], tuple) else -1)


def shard_row(request: dict) -> dict:
    """Times a case whose sequence is split over the first `devices` of this host, forward + backward."""
    from jaxpar.mesh import MeshSpec, make_mesh, simulate_devices

    simulate_devices(request["devices"])  # of the CPU only
    import jax
    import jax.numpy as jnp
    from jax.sharding import NamedSharding, PartitionSpec
    from problems import para_gru, weights

    mesh = make_mesh(
        MeshSpec(data=1, context=request["devices"]), jax.devices()[: request["devices"]]
    )
    split, (batch, length, width) = PartitionSpec("context"), request["shape"]
    if request["kind"] == "diag":
        from jaxpar.scan import affine_scan

        def local(a, b):
            return affine_scan(a, b, axis_name="context")

        arrays = 2
    else:
        from jaxpar.solve import Newton, parallel_scan

        w = jax.tree.map(lambda x: jnp.asarray(x, jnp.float32), weights("para_gru", width))

        def local(*xs):
            def step(h, x):
                h = para_gru(w, h, x)
                return h, h

            return parallel_scan(
                step, jnp.zeros((batch, width)), xs, method=Newton("diag"), axis_name="context"
            )[1]

        arrays = 3

    @functools.partial(jax.jit, out_shardings=NamedSharding(mesh, split))
    def draw(key):
        drawn = [
            jax.random.normal(k, (length, batch, width)) for k in jax.random.split(key, arrays + 1)
        ]
        return [jax.nn.sigmoid(drawn[0] + 3), *drawn[1:]] if request["kind"] == "diag" else drawn

    *args, g = draw(jax.random.key(0))
    solve = jax.shard_map(local, mesh=mesh, in_specs=(split,) * arrays, out_specs=split)
    start = time.perf_counter()
    compiled = jax.jit(lambda g, *args: jax.vjp(solve, *args)[1](g)).lower(g, *args).compile()
    compile_s = time.perf_counter() - start
    return harness.time_jax(compiled, [(g, *args)], request["spend_s"]) | {"compile_s": compile_s}


COLUMNS = {
    "row": lambda r: r["row"],
    "pass": lambda r: r["direction"],
    "ms": lambda r: f"{r['ms']:.3f}",
    "TB/s": lambda r: f"{r['bytes'] / r['ms'] / 1e9:.2f}",
    "of copy": lambda r: f"{100 * r['bytes'] / r['ms'] * 1e3 / r['rate']:.0f} %",
    "of best peer": harness.ratio_to_peer,
    "max error": lambda r: f"{r['error']:.1e}",
    "compile s": lambda r: f"{r['compile_s']:.1f}",
    "note": lambda r: r.get("note", ""),
}
SHARD_COLUMNS = {
    "case": lambda r: r["case"],
    "devices": lambda r: str(r["devices"]),
    "ms": lambda r: f"{r['ms']:.3f}",
    "efficiency": lambda r: f"{100 * r['alone_ms'] / r['devices'] / r['ms']:.0f} %",
    "compile s": lambda r: f"{r['compile_s']:.1f}",
    "note": lambda r: "",
}


def measure(args: argparse.Namespace) -> None:
    """Measures every row of the chosen cases and prints them."""
    names, torch = harness.chosen(args.cases, CASES), [str(HERE / "peers" / "torch_rnn.py")]
    sides = {"jax": ([__file__, "--worker", "jax"], {"XLA_PYTHON_CLIENT_PREALLOCATE": "false"})}
    sides |= {} if args.no_peer else {"torch": (torch, {"JAX_PLATFORMS": "cpu"})}
    bench, table = harness.Bench(sides, args.budget_s, args.row_s), harness.Table(COLUMNS, args.out)
    rates = {
        side: bench.ask(side, {"row": "copy", "tiny": args.tiny, "spend_s": args.spend_s})
        for side in sides
    }
    for side, rate in rates.items():
        print(
            f"{side}: "
            + (rate.get("failed") or "{device}, {version}, copy {rate:.3g} B/s".format(**rate))
        )
    print(f"an empty call of JAX: {rates['jax'].get('empty_ms', math.nan):.4f} ms", flush=True)
    for name in names:
        case = tiny(CASES[name]) if args.tiny else CASES[name]
        table.head(f"{name}: {case['kind']}, (B, T, C) = {case['shape']}, {case['dtype']}")
        size = math.prod(case["shape"]) * (2 if case["dtype"] == "bfloat16" else 4)
        best = {"fwd": math.inf, "fwd+bwd": math.inf}
        for side, request, answer in bench.answers(
            harness.plan(rows_of(name, case), case, sides, args), args.jobs
        ):
            if not request["row"].startswith("jaxpar"):
                best[request["direction"]] = min(
                    best[request["direction"]], answer.get("ms", math.inf)
                )
            moved = PASSES[case["kind"], request["direction"]] * size
            figures = {
                "bytes": moved,
                "rate": rates[side].get("rate"),
                "best_peer_ms": best[request["direction"]],
            }
            table.add({"case": name} | request | answer | figures)
        if size > 1e9:
            bench.close()  # the pools of two frameworks with such arrays fill a card
    bench.close()


def measure_shards(args: argparse.Namespace) -> None:
    """Measures the chosen cases on 1, 2, 4, ... devices, each in a process of its own."""
    sides = {"jax": ([__file__, "--worker", "shards"], {"XLA_PYTHON_CLIENT_PREALLOCATE": "false"})}
    bench, table = (
        harness.Bench(sides, args.budget_s, args.row_s),
        harness.Table(SHARD_COLUMNS, args.out),
    )
    table.head("Sequences split over devices, forward + backward")
    for name in harness.chosen(args.cases, SHARDED):
        case, alone = tiny(SHARDED[name]) if args.tiny else SHARDED[name], math.nan
        for devices in args.devices:
            answer = bench.ask(
                "jax", case | {"row": "shards", "devices": devices, "spend_s": args.spend_s}
            )
            alone = answer.get("ms", math.nan) if devices == 1 else alone
            table.add({"case": name, "devices": devices, "alone_ms": alone} | answer)
            bench.close("jax")


def main() -> None:
    """Parses flags and measures, or serves as a worker."""
    parser = harness.arguments(__doc__, {**CASES, **SHARDED}, "scan.json", 500)
    parser.add_argument(
        "--shards", action="store_true", help="split time over the devices of this host"
    )
    parser.add_argument(
        "--devices", type=lambda text: [int(x) for x in text.split(",")], default=[1, 2, 4]
    )
    args = parser.parse_args()
    if args.worker:
        harness.serve(shard_row if args.worker == "shards" else JaxWorker())
    elif args.shards:
        measure_shards(args)
    else:
        measure(args)


if __name__ == "__main__":
    main()
