"""What does expert parallelism gain on several devices of one host, and what is left of it where the router is skewed?

    python bench/expert_transports.py                              # all devices that there are; 2 GPUs: six minutes
    python bench/expert_transports.py --cases E8 --transports spill --slots 4
    JAX_PLATFORMS=cpu python bench/expert_transports.py --tiny     # two simulated devices: checks that it runs

The SwiGLU experts of `bench/experts.py`'s shapes, forward and all gradients, from given choices: no router. N tokens
are those of all devices together. "one device" holds all experts and all tokens: "of P x" is its time over P times the
row's. `--skew` of the tokens, anywhere in the batch, choose k experts of the first device. "of even" is a row's time
over that of the same transport at a skew of 0; "load" the largest number of choices of a device over the mean, as the
transport computes them; "sent" what a device sends where choices are even, by `jaxpar.parallel.experts.bytes_sent`.
Programs of a case are compiled, then timed in turns; medians, and the least in brackets. What fails says why.
"""

import argparse
import dataclasses
import functools
import os
import pathlib
import statistics
import sys
import time

HERE = pathlib.Path(__file__).resolve().parent
sys.path[:0] = [str(HERE.parent), str(HERE)]
if "--tiny" in sys.argv:
    os.environ["XLA_FLAGS"] = os.environ.get("XLA_FLAGS", "") + " --xla_force_host_platform_device_count=2"
os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")

import harness  # noqa: E402
import jax  # noqa: E402
import jax.numpy as jnp  # noqa: E402
import numpy as np  # noqa: E402
from expert_cases import SHAPES, TINY  # noqa: E402

from jaxpar.mesh import MeshSpec, make_mesh, shard, use_mesh  # noqa: E402
from jaxpar.nn.experts import Experts  # noqa: E402
from jaxpar.nn.mixer import ActivationSizes, Context  # noqa: E402
from jaxpar.parallel.experts import Spill, bytes_sent, least_loaded, transport_for  # noqa: E402

ONE = "one device"


def choices(shape: dict, skew: float) -> np.ndarray:
    """Returns what each token chooses, [N, k]: k of E at random, or for a share of tokens the first k."""
    rng = np.random.default_rng(0)
    scores = rng.random((shape["tokens"], shape["experts"]), np.float32)
    scores[rng.random(shape["tokens"]) < skew, : shape["k"]] += 1
    return np.argpartition(-scores, shape["k"] - 1, axis=1)[:, : shape["k"]].astype(np.int32)


class Row:
    """A compiled step on a mesh, and its arguments."""

    def __init__(self, shape: dict, name: str, skew: float, spill: Spill, num_rows: int):
        """Compiles, and calls it once; `num_rows` rows of the batch."""
        devices = jax.devices()[:1] if name == ONE else jax.devices()
        transport = spill if name == "spill" else transport_for("sum" if name == ONE else name)
        layer = Experts(shape["width"], shape["experts"], shape["k"], transport=transport)
        self.shape, self.name, self.skew, self.ms, depth = shape, name, skew, [], shape["depth"]
        length, dtype = shape["tokens"] // num_rows, shape["dtype"]
        context = Context(jnp.zeros((num_rows, length), jnp.int32))
        self.mesh = make_mesh(MeshSpec(expert=len(devices)), devices)
        with use_mesh(self.mesh):
            keys = jax.random.split(jax.random.key(0), 6)
            leaves = {n: leaf for n, leaf in layer.leaves(depth, 1.0, 1.0).items() if n != "w_router"}
            weights = {
                n: jax.random.normal(key, leaf.shape, dtype) * leaf.shape[1] ** -0.5
                for key, (n, leaf) in zip(keys, leaves.items(), strict=False)
            }
            weights = shard(weights, {n: leaf.axes for n, leaf in leaves.items()})
            expert = choices(shape, skew).reshape(num_rows, length, -1)
            x, g = (jax.random.normal(key, (num_rows, length, depth), dtype) for key in keys[4:])
            given = x, np.full(expert.shape, 1 / shape["k"], np.float32), g, expert
            x, weight, g, chosen = (shard(each, ("batch", "seq", None)) for each in given)

            def step(x, weight, weights, g, expert):
                out, pull = jax.vjp(
                    lambda *args: transport(layer, args[0], expert, *args[1:], context), x, weight, weights
                )
                return out, *pull(g)

            begin = time.perf_counter()
            self.args = x, weight, weights, g, chosen
            self.program = jax.jit(step).lower(*self.args).compile()
            self.compile_s = time.perf_counter() - begin
            out = self.program(*self.args)
            if not all(bool(jnp.isfinite(each).all()) for each in jax.tree.leaves(out)):
                raise ValueError("the results are not finite")
            rows = num_rows / len(devices)
            sizes = ActivationSizes(rows * length, 1, x.dtype.itemsize, 1, depth, rows)
            self.sent = bytes_sent(transport, layer, sizes)
        counts = np.bincount(expert.reshape(-1), minlength=shape["experts"])
        load = counts.reshape(len(devices), -1).sum(1)
        if name == "spill":
            limits = {key: value for key, value in dataclasses.asdict(spill).items() if key != "room"}
            load = np.asarray(jax.jit(functools.partial(least_loaded, shares=len(devices), **limits))(counts)).sum(0)
        self.load = load.max() / load.mean()

    def round(self, spend_s: float) -> None:
        """Times it once more."""
        with use_mesh(self.mesh):
            self.ms.append(harness.time_jax(self.program, [self.args], spend_s)["ms"])


def measure(name: str, args: argparse.Namespace, end: float) -> None:
    """Makes all rows of a case, times them in turns and prints them."""
    shape = TINY if args.tiny else SHAPES[name] | {"dtype": "bfloat16"}
    spill = Spill(slots=args.slots, min_chunk=1 if args.tiny else 128)
    rows, failed = [], {}
    for label, skew in [(ONE, 0.0), *((t, s) for s in (0.0, args.skew) for t in args.transports.split(","))]:
        try:
            if time.monotonic() > end:
                raise TimeoutError("skipped: the budget is spent")
            rows.append(Row(shape, label, skew, spill, 8))
        except Exception as error:  # any row may fail, and is a row then
            failed[label, skew] = f"{type(error).__name__}: {' '.join(str(error).split())[:200]}"
    for number in range(args.rounds):
        for row in rows[:: -1 if number % 2 else 1]:
            row.round(args.spend_s)
    times = {(row.name, row.skew): statistics.median(row.ms) for row in rows}
    count = len(jax.devices())
    print(f"\n### {name}, {count} x {jax.devices()[0].device_kind}, jax {jax.__version__}\n")
    print(f"| transport | skew | ms (least) | of {count} x | of even | load | sent | compile s |\n{'|---' * 8}|")
    for row in rows:
        ms = times[row.name, row.skew]
        gain = f"{times[ONE, 0.0] / (count * ms):.2f}" if (ONE, 0.0) in times and row.name != ONE else ""
        even = f"{ms / times[row.name, 0.0]:.2f}" if (row.name, 0.0) in times else ""
        cells = [row.name, row.skew, f"{ms:.3f} ({min(row.ms):.3f})", gain, even, f"{row.load:.2f}"]
        print(f"| {' | '.join(map(str, cells))} | {row.sent / 2**20:.1f} MiB | {row.compile_s:.1f} |", flush=True)
    for (label, skew), why in failed.items():
        print(f"| {label} | {skew} | FAILED: {why} |{' |' * 5}", flush=True)


def main() -> None:
    """Parses flags and measures."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cases", default=",".join(SHAPES))
    parser.add_argument("--transports", default="all_to_all,spill,gather,ragged")
    parser.add_argument("--skew", type=float, default=0.9)
    parser.add_argument("--slots", type=int, default=4, help="of spill: the hot experts are k of one device")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--spend-s", type=float, default=0.3)
    parser.add_argument("--budget-s", type=float, default=480, help="no program is compiled after these seconds")
    parser.add_argument("--tiny", action="store_true", help="tiny shapes on two simulated devices")
    args = parser.parse_args()
    if not set(args.cases.split(",")) <= set(SHAPES):
        parser.error(f"--cases knows {', '.join(SHAPES)}")
    if len(jax.devices()) < 2:
        parser.error("it needs two devices or more; --tiny simulates them on a CPU.")
    end = time.monotonic() + args.budget_s
    for name in args.cases.split(","):
        measure(name, args, end)


if __name__ == "__main__":
    main()
