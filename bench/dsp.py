"""What does it cost to split a video's tokens over several GPUs? A pair of layers, one along space and one along time.

    python bench/dsp.py                               # the first two GPUs of this host
    python bench/dsp.py --devices 8 --only "split anew,ring"
    JAX_PLATFORMS=cpu python bench/dsp.py --tiny      # any machine, two simulated devices: checks that the script runs

"split anew" is `jaxpar.nn.SpaceTimeStack`: tokens are split over time while a layer looks along space and over space
while one looks along time, with an all-to-all between them. The others keep them split over space,
and the layer along space gets the rest by `jaxpar.nn.attention.context.context_attention`.
Parameters, blocks and kernels are the same, and "error" is the largest difference from the result of
"split anew", by its largest entry. "sent" is what a device sends of tokens, counted in the compiled
program.
"""

import argparse
import concurrent.futures
import dataclasses
import json
import math
import pathlib
import sys
import threading
import time
from collections.abc import Callable
from typing import Any, NamedTuple

HERE = pathlib.Path(__file__).resolve().parent
sys.path[:0] = [str(HERE.parent), str(HERE)]

import harness  # noqa: E402

CASES = {"video": dict(frames=32, places=4096, width=1152, heads=16, mlp=4608, dtype="bfloat16")}
TINY = dict(frames=4, places=16, width=32, heads=4, mlp=32, dtype="float32")
ANEW = "split anew"
ROWS = (ANEW, "ring", "two_way", "swap", "gather")


def forms(case: dict, move: str):
    """Returns the model and its function (params, x [1, T, S, D]) -> the same, split anew or with space fixed."""
    import jax

    from jaxpar.mesh import constrain
    from jaxpar.nn import SpaceTimeStack
    from jaxpar.nn.attention import Attention, Visible
    from jaxpar.nn.attention.context import context_attention
    from jaxpar.nn.mixer import Rules
    from jaxpar.nn.mlp import Mlp
    from jaxpar.nn.stack import Stack

    @dataclasses.dataclass(frozen=True)
    class Fixed(Attention):
        """Attention to tokens that stay split."""

        def mix(self, q, k, v, cache, context):
            visible, places = self.visible, context.positions
            return context_attention(
                q, k, v, places, visible=visible, move=move, order="contiguous"
            ), cache

    kind = Attention if move == ANEW else Fixed
    heads = case["heads"]
    head_dim = case["width"] // heads
    space = kind(
        num_heads=heads, num_kv_heads=heads, head_dim=head_dim, visible=Visible(causal=False)
    )
    time = Attention(num_heads=heads, num_kv_heads=heads, head_dim=head_dim)
    stack = Stack(
        num_layers=1,
        embed_dim=case["width"],
        mixer=space,
        mlp=Mlp(case["mlp"], activation="gelu"),
        dtype=case["dtype"],
        scan_layers=False,
    )
    model = SpaceTimeStack(stack=stack, time=time)
    rules = Rules(("space", None, None), ("space", None, None), True)

    def fixed(params, x):
        layers = jax.tree.map(lambda w: w[0], {name: params[name] for name in model.stacks()})
        x = constrain(x, None, None, "space", None)[0].astype(stack.dtype)
        x, _, _ = stack.layer(
            layers["space"], 0, x, stack.context(x)
        )  # rows are frames, split by "seq"
        time, x = model.stacks()["time"], x.swapaxes(0, 1)
        x, _, _ = time.layer(layers["time"], 0, x, time.context(x)._replace(rules=rules))
        return stack.norm.apply(params["final_norm"], x.swapaxes(0, 1)[None])

    return model, (lambda params, x: model.apply(params, x)[0]) if move == ANEW else fixed


def drawn(case: dict, model, move: str):
    """Returns parameters, whole on every device, and tokens and a gradient of the result as they lie between pairs."""
    import jax

    from jaxpar.mesh import named_shardings

    split = (None, "time", None, None) if move == ANEW else (None, None, "space", None)
    shape = (1, case["frames"], case["places"], case["width"])
    key = jax.random.key(0)

    def make():
        params = model.init(key)
        return params, *(
            jax.random.normal(jax.random.fold_in(key, n), shape, case["dtype"]) for n in (1, 2)
        )

    shapes = jax.eval_shape(make)
    axes = (jax.tree.map(lambda x: (None,) * x.ndim, shapes[0]), split, split)
    return jax.jit(make, out_shardings=named_shardings(shapes, axes))()


def sent(text: str, mesh, tokens: int) -> float:
    """Returns the bytes that a device sends in a compiled program; of sums those of all tokens, not of weights."""
    from jaxpar.aot import hlo

    num, total = mesh.size, 0.0
    for each in hlo.collectives(text, mesh):
        if each.kind not in ("all-reduce", "reduce-scatter") or math.prod(each.shapes[0]) >= tokens:
            total += (
                each.trips * each.bytes * (1 if each.kind == "collective-permute" else 1 - 1 / num)
            )
    return total


class Made(NamedTuple):
    """A compiled row."""

    mesh: Any  # jax's, which is not loaded yet
    program: Callable
    args: tuple
    compile_s: float


class Rows:
    """Answers rows: compiles, compares and times one; or compiles all, side by side."""

    def __init__(self):
        """Knows no result to compare with yet."""
        self.expected, self.ready, self.lock = None, {}, threading.Lock()

    def made(self, request: dict) -> Made:
        """Draws and compiles; what devices are asked for is asked by one row at a time, in the same order of all."""
        import jax

        from jaxpar.mesh import MeshSpec, make_mesh, use_mesh

        mesh = make_mesh(MeshSpec(context=request["devices"]), jax.devices()[: request["devices"]])
        with self.lock, use_mesh(mesh):
            model, forward = forms(request, request["row"])
            params, x, g = drawn(request, model, request["row"])

            def both(params, x, g):
                out, pull = jax.vjp(forward, params, x)
                return out, *pull(g)

            is_both = request["direction"] == "fwd+bwd"
            program, args = (both, (params, x, g)) if is_both else (forward, (params, x))
            begin = time.perf_counter()
            lowered = jax.jit(program).lower(*args)
        compiled = lowered.compile()
        return Made(mesh=mesh, program=compiled, args=args, compile_s=time.perf_counter() - begin)

    def __call__(self, request: dict) -> dict:
        """Returns the figures of a row."""
        from jaxpar.mesh import simulate_devices, use_mesh

        if request["row"] == "prepare":  # what fails will fail its row
            simulate_devices(request["rows"][0]["devices"])
            with concurrent.futures.ThreadPoolExecutor(request["jobs"]) as pool:
                self.ready = {
                    json.dumps(row): pool.submit(self.made, row) for row in request["rows"]
                }
            return {}
        simulate_devices(request["devices"])  # of the CPU only
        import jax
        import jax.numpy as jnp

        from jaxpar.types import largest

        ready = self.ready.pop(json.dumps(request), None)
        mesh, compiled, args, compile_s = ready.result() if ready else self.made(request)
        x = args[1]
        with use_mesh(mesh):
            out = jax.device_put(jax.tree.leaves(compiled(*args))[0], x.sharding)
            self.expected = out if request["row"] == ANEW else self.expected

            @jax.jit
            def error(out, want):
                return largest(jnp.abs(out - want)) / jnp.max(jnp.abs(want))

            row: dict = {}
            if self.expected is not None:
                row["error"] = float(error(out, jax.device_put(self.expected, x.sharding)))
            del out
            timed = harness.time_jax(compiled, [args], request["spend_s"])
        row["sent"] = sent(compiled.as_text(), mesh, x.size)
        device = f"{request['devices']} x {mesh.devices.flat[0].device_kind}, jax {jax.__version__}"
        return row | timed | {"compile_s": compile_s, "device": device}


COLUMNS = {
    "row": lambda r: r["row"],
    "pass": lambda r: r["direction"],
    "ms": lambda r: f"{r['ms']:.3f}",
    "split anew is": lambda r: f"{r['ms'] / r['anew_ms']:.2f}x",
    "sent, MB": lambda r: f"{r['sent'] / 1e6:.3f}",
    "error": lambda r: f"{r['error']:.1e}",
    "compile s": lambda r: f"{r['compile_s']:.1f}",
    "note": lambda r: r.get("device", ""),
}


def main() -> None:
    """Parses flags and measures, or serves as a worker."""
    parser = harness.arguments(__doc__, CASES, "dsp.json", 500)
    parser.add_argument("--devices", type=int, default=2)
    args = parser.parse_args()
    if args.worker:
        harness.serve(Rows())
    else:
        measure(args)


def measure(args: argparse.Namespace) -> None:
    """Measures every row of the chosen cases and prints them."""
    # NVLink multicast stays off unless asked for: it can take the GPUs of a shared host down.
    env = {"XLA_PYTHON_CLIENT_PREALLOCATE": "false", "NCCL_NVLS_ENABLE": "0"}
    bench = harness.Bench({"jax": ([__file__, "--worker", "jax"], env)}, args.budget_s, args.row_s)
    table = harness.Table(COLUMNS, args.out)
    for name in harness.chosen(args.cases, CASES):
        case = {**(TINY if args.tiny else CASES[name]), "devices": args.devices}
        table.head(
            f"{name}: T {case['frames']}, S {case['places']}, D {case['width']}, {case['heads']} heads"
        )
        anew, asked = {}, harness.plan([("jax", row) for row in ROWS], case, ["jax"], args)
        for _, request, answer in bench.answers(asked, args.jobs):
            if request["row"] == ANEW:
                anew[request["direction"]] = {"anew_ms": answer["ms"]} if "ms" in answer else {}
            table.add({"case": name} | request | answer | anew.get(request["direction"], {}))
        bench.close()


if __name__ == "__main__":
    main()
