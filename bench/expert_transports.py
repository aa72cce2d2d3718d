"""What does expert parallelism gain on several devices of one host, and what is left of it where the router is skewed?

    python bench/expert_transports.py                              # all devices that there are; 2 GPUs: six minutes
    python bench/expert_transports.py --cases E8 --transports spill --slots 4
    JAX_PLATFORMS=cpu python bench/expert_transports.py --tiny     # two simulated devices: checks that it runs

The SwiGLU experts of `bench/experts.py`'s shapes, forward and all gradients, from given choices: no router. N tokens
are those of all devices together. "one device" holds all experts and all tokens: "of P x" is its time over P times the
row's. `--skew` of the tokens, anywhere in the batch, choose k experts of the first device. "of even" is a row's time
over that of the same transport at a skew of 0; "load" the largest number of choices of a device over the mean, as the
transport computes them; "sent" what a device sends where choices are even, by `jaxpar.nn.experts.sharded.bytes_sent`.
Torch's rows are `torch._grouped_mm` with all-to-alls of what is chosen, in processes of its own, "of P x" its own row
of one device's. Programs of a case are compiled, then timed in turns; medians, and the least in brackets. What fails
says why.
"""

import argparse
import concurrent.futures
import dataclasses
import functools
import math
import os
import pathlib
import statistics
import sys
import time

HERE = pathlib.Path(__file__).resolve().parent
sys.path[:0] = [str(HERE.parent), str(HERE)]
if "--tiny" in sys.argv:
    os.environ["XLA_FLAGS"] = (
        os.environ.get("XLA_FLAGS", "") + " --xla_force_host_platform_device_count=2"
    )
os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")

import harness  # noqa: E402
import jax  # noqa: E402
import jax.numpy as jnp  # noqa: E402
import numpy as np  # noqa: E402
from expert_cases import SHAPES, TINY, routes  # noqa: E402

from jaxpar.mesh import MeshSpec, make_mesh, shard, use_mesh  # noqa: E402
from jaxpar.nn.experts import Experts, Routed  # noqa: E402
from jaxpar.nn.experts.sharded import Spill, bytes_sent, least_loaded, transport_for  # noqa: E402
from jaxpar.nn.mixer import ActivationSizes, Context  # noqa: E402

ONE = "one device"
TORCH = {"torch one": 0.0, "torch all_to_all": None}
"""Rows of torch, and at which skew alone, if at one alone."""


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
            leaves = {
                n: leaf for n, leaf in layer.leaves(depth, 1.0, 1.0).items() if n != "w_router"
            }
            weights = {
                n: jax.random.normal(key, leaf.shape, dtype) * leaf.shape[1] ** -0.5
                for key, (n, leaf) in zip(keys, leaves.items(), strict=False)
            }
            weights = shard(weights, {n: leaf.axes for n, leaf in leaves.items()})
            expert = routes(shape, skew).reshape(num_rows, length, -1)
            x, g = (jax.random.normal(key, (num_rows, length, depth), dtype) for key in keys[4:])
            given = x, np.full(expert.shape, 1 / shape["k"], np.float32), g, expert
            x, weight, g, chosen = (shard(each, ("batch", "seq", None)) for each in given)

            def step(x, weight, weights, g, expert):
                out, pull = jax.vjp(
                    lambda x, weight, weights: transport(
                        layer, Routed(x, expert, weight), weights, context
                    ),
                    x,
                    weight,
                    weights,
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
            limits = {
                key: value for key, value in dataclasses.asdict(spill).items() if key != "room"
            }
            load = np.asarray(
                jax.jit(functools.partial(least_loaded, shares=len(devices), **limits))(counts)
            ).sum(0)
        self.load = f"{load.max() / load.mean():.2f}"

    def round(self, spend_s: float) -> None:
        """Times it once more."""
        with use_mesh(self.mesh):
            self.ms.append(harness.time_jax(self.program, [self.args], spend_s)["ms"])


class Peer:
    """A row of torch, held by its own processes."""

    sent, load = math.nan, ""

    def __init__(self, bench: harness.Bench, shape: dict, name: str, skew: float):
        """Has it made, which compares it with a loop over experts."""
        self.bench, self.name, self.skew, self.ms = bench, name, skew, []
        request = shape | {
            "do": "make",
            "row": name,
            "name": f"{name} {skew}",
            "skew": skew,
            "spend_s": 0.3,
        }
        self.compile_s = self.asked(request)["compile_s"]

    def asked(self, request: dict) -> dict:
        """Returns the answer."""
        answer = self.bench.ask("torch", request)
        if "failed" in answer:
            raise RuntimeError(answer["failed"])
        return answer

    def round(self, spend_s: float) -> None:
        """Times it once more."""
        del spend_s  # said when it was made
        self.ms.append(self.asked({"do": "round", "name": f"{self.name} {self.skew}"})["ms"])


def measure(name: str, args: argparse.Namespace, end: float) -> None:
    """Makes all rows of a case, times them in turns and prints them."""
    shape = TINY if args.tiny else SHAPES[name] | {"dtype": "bfloat16"}
    spill = Spill(slots=args.slots, min_chunk=1 if args.tiny else 128)
    rows, failed, count = [], {}, len(jax.devices())
    command = [str(HERE / "peers" / "torch_expert_parallel.py"), str(count)]
    bench = harness.Bench({"torch": (command, {}, args.peer_python)}, end - time.monotonic(), 90)
    wanted = [(ONE, 0.0), *((t, s) for s in (0.0, args.skew) for t in args.transports.split(","))]
    if not args.no_peer:
        wanted += [
            (t, s) for t, only in TORCH.items() for s in (0.0, args.skew) if only in (None, s)
        ]

    def made(asked: tuple[str, float]):
        label, skew = asked
        try:
            if time.monotonic() > end:
                raise TimeoutError("skipped: the budget is spent")
            return (
                Peer(bench, shape, label, skew)
                if label in TORCH
                else Row(shape, label, skew, spill, 8)
            )
        except Exception as error:  # any row may fail, and is a row then
            return f"{type(error).__name__}: {' '.join(str(error).split())[:200]}"

    with concurrent.futures.ThreadPoolExecutor(args.jobs) as pool:
        ours = pool.map(made, [each for each in wanted if each[0] not in TORCH])
        every = [
            *map(made, [each for each in wanted if each[0] in TORCH])
        ]  # one after the other, while JAX compiles
        every = [*ours, *every]
    for asked, row in zip(wanted, every, strict=True):
        if isinstance(row, str):
            failed[asked] = row
        else:
            rows.append(row)
    for number in range(args.rounds):
        for row in rows[:: -1 if number % 2 else 1]:
            row.round(args.spend_s)
    bench.close()
    times = {(row.name, row.skew): statistics.median(row.ms) for row in rows}
    print(f"\n### {name}, {count} x {jax.devices()[0].device_kind}, jax {jax.__version__}\n")
    print(
        f"| transport | skew | ms (least) | of {count} x | of even | load | sent | compile s |\n{'|---' * 8}|"
    )
    for row in rows:
        ms = times[row.name, row.skew]
        alone = "torch one" if row.name in TORCH else ONE
        gain = (
            f"{times[alone, 0.0] / (count * ms):.2f}"
            if (alone, 0.0) in times and row.name != alone
            else ""
        )
        even = f"{ms / times[row.name, 0.0]:.2f}" if (row.name, 0.0) in times else ""
        cells = [row.name, row.skew, f"{ms:.3f} ({min(row.ms):.3f})", gain, even, row.load]
        sent = f"{row.sent / 2**20:.1f} MiB" if row.sent >= 0 else ""
        print(f"| {' | '.join(map(str, cells))} | {sent} | {row.compile_s:.1f} |", flush=True)
    for (label, skew), why in failed.items():
        print(f"| {label} | {skew} | FAILED: {why} |{' |' * 5}", flush=True)


def main() -> None:
    """Parses flags and measures."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--cases", default=",".join(SHAPES))
    parser.add_argument("--transports", default="all_to_all,spill,gather,ragged")
    parser.add_argument("--skew", type=float, default=0.9)
    parser.add_argument(
        "--slots", type=int, default=4, help="of spill: the hot experts are k of one device"
    )
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--spend-s", type=float, default=0.3)
    parser.add_argument(
        "--budget-s", type=float, default=480, help="no program is compiled after these seconds"
    )
    parser.add_argument("--jobs", type=int, default=1, help="programs compiled side by side")
    parser.add_argument("--no-peer", action="store_true", help="without torch")
    parser.add_argument(
        "--peer-python", default=sys.executable, help="the interpreter that has torch"
    )
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
