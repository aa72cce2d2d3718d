"""The peers of `bench/scan.py` and `bench/recurrence.py` in torch: accelerated-scan, fla, pararnn-torch and cuDNN.

A worker: reads a line of JSON for every row and answers with one. Each peer is imported by the first row that needs
it, so one that is not installed fails its own rows only. Peers get their own memory layout, contiguous, and what they
want precomputed (log decays, pre-activations) outside the timed region. Timed with CUDA events over several queued
calls; calls shorter than 5 ms also by replaying a CUDA graph, and the faster of the two counts (said in the note).
"""

import functools
import math
import os
import pathlib
import sys
import time

HERE = pathlib.Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parent))
os.environ.setdefault(
    "TORCH_CUDA_ARCH_LIST", "9.0"
)  # what accelerated-scan's warp kernel is built for
os.environ["JAX_PLATFORMS"] = "cpu"  # JAX computes references here, and leaves the card alone

import harness  # noqa: E402
import problems  # noqa: E402
import torch  # noqa: E402
from torch_rows import CUDA, DEVICE, FLOATS, device_facts, free  # noqa: E402


def elapsed_s(call, calls: int) -> float:
    """Seconds a call, over several that are queued."""
    if not CUDA:
        begin = time.perf_counter()
        for i in range(calls):
            call(i)
        return (time.perf_counter() - begin) / calls
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    begin.record()
    for i in range(calls):
        call(i)
    end.record()
    torch.cuda.synchronize()
    return begin.elapsed_time(end) / 1e3 / calls


def median(call, spend_s: float) -> dict:
    """Median time of a call that takes the number of the call."""
    return harness.medians(lambda calls: elapsed_s(call, calls), spend_s)


def timed(function, inputs: list[tuple], spend_s: float) -> dict:
    """Times a function on inputs in turns, launched one by one and, if short, replayed from a graph."""
    start = time.perf_counter()
    function(*inputs[0])
    if CUDA:
        torch.cuda.synchronize()
    first = time.perf_counter() - start
    result = median(lambda i: function(*inputs[i % len(inputs)]), spend_s)
    result["compile_s"] = max(0.0, first - result["ms"] / 1e3)
    if CUDA and result["ms"] < 5:
        try:
            replayed = graphed(function, inputs, spend_s)
        except Exception as error:  # not every peer can be captured; then it is launched
            return result | {"note": f"no graph: {type(error).__name__}"}
        if replayed["ms"] < result["ms"]:
            return result | replayed | {"note": "graph"}
    return result


def graphed(function, inputs: list[tuple], spend_s: float) -> dict:
    """Times the replay of one graph that calls the function on every input."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(2):
            function(*inputs[0])
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for args in inputs:
            function(*args)
    result = median(lambda _: graph.replay(), spend_s)
    return result | {"ms": result["ms"] / len(inputs)}


def copy_rate(request: dict) -> dict:
    """Returns the bytes/s, read plus written, of a copy of 1 GiB."""
    x = torch.ones(2**20 if request["tiny"] else 2**28, device=DEVICE)
    y = torch.empty_like(x)
    ms = median(lambda _: y.copy_(x), request["spend_s"])["ms"]
    return {"rate": 8 * x.numel() / ms * 1e3} | device_facts()


# -- affine scans ------------------------------------------------------------------------------------------------------


def accelerated_scan(kind: str):
    """`accelerated_scan.scalar` (Triton) or `.warp` (CUDA, built by nvcc at the first call); arrays (B, C, T)."""
    import importlib

    scan = importlib.import_module(
        f"accelerated_scan.{'scalar' if kind == 'triton' else 'warp'}"
    ).scan
    return (
        scan,
        lambda a, b, g: (x.transpose(1, 2).contiguous() for x in (a, b, g)),
        lambda x: x.transpose(1, 2),
    )


def transposed_scan(kind: str):
    """The same from arrays (B, T, C), and back to them: what its layout costs a model that has this one."""
    scan, arrange, restore = accelerated_scan(kind)
    return (
        (lambda a, b: restore(scan(*list(arrange(a, b, b))[:2])).contiguous()),
        lambda *x: x,
        lambda x: x,
    )


def hgrn(kind: str):
    """`fla.ops.hgrn`: arrays (B, T, D), decays as their logarithm (its gradient is by the logarithm)."""
    import fla.ops.hgrn as ops

    function = ops.chunk_hgrn if kind == "chunk" else ops.fused_recurrent_hgrn
    return (
        lambda g, x: function(x, g)[0],
        lambda a, b, g: (a.float().log().to(a.dtype), b, g),
        lambda x: x,
    )


def block_scan(_: str):
    """pararnn-torch's 2x2 scan: (B, T, 2, 2, D) and (B, T, 2, D); forward only."""
    from pararnn.solvers.scan import scan_block2

    def arrange(a, b, g):
        return (
            a.permute(0, 1, 3, 4, 2).contiguous(),
            b.transpose(2, 3).contiguous(),
            g.transpose(2, 3).contiguous(),
        )

    return (
        functools.partial(scan_block2, backend="triton" if CUDA else "eager"),
        arrange,
        lambda x: x.transpose(2, 3),
    )


SCANS = {
    "accelerated-scan": accelerated_scan,
    "accelerated-scan transposed": transposed_scan,
    "fla hgrn": hgrn,
    "pararnn": block_scan,
}


@functools.lru_cache(1)
def affine_case(kind: str, shape: tuple, dtype: str):
    """Arrays of one case, as `bench/scan.py` draws them, and the float64 solution of a few lanes."""
    torch.manual_seed(0)
    lowest, full = math.log(1e-3), (*shape, 2) if kind == "block" else shape
    decay = torch.exp(-torch.exp(torch.rand(shape, device=DEVICE) * -lowest + lowest))
    b, g = (torch.randn(full, device=DEVICE).to(FLOATS[dtype]) for _ in range(2))
    if kind == "block":
        angle = torch.randn(shape, device=DEVICE)
        turn = torch.stack([angle.cos(), -angle.sin(), angle.sin(), angle.cos()], -1)
        decay = (decay[..., None] * turn).reshape(*full, 2)
    a = decay.to(FLOATS[dtype])
    return (a, b, g), problems.affine_reference(*(lanes(x) for x in (a, b, g)))


def lanes(array):
    """A few lanes of [B, T, C, ...] with time first, as numpy."""
    picked = array[:2, :, :: max(1, array.shape[2] // 4)][:, :, :4].detach().float()
    return picked.movedim(1, 0).cpu().numpy()


def affine_row(request: dict) -> dict:
    """Times an affine scan."""
    (a, b, g), expected = affine_case(request["kind"], tuple(request["shape"]), request["dtype"])
    name, _, kind = request["row"].rpartition(" ")
    scan, arrange, restore = SCANS[name](kind)
    x, y, cotangent = arrange(a, b, g)
    backward = request["direction"] == "fwd+bwd"
    if backward and name == "pararnn":
        return {"failed": "forward only"}
    x, y = (value.detach().requires_grad_(backward) for value in (x, y))

    def both(x, y):
        return torch.autograd.grad(scan(x, y), (x, y), cotangent)

    start = time.perf_counter()  # the first call compiles and tunes
    out = both(x, y) if backward else (scan(x, y),)
    out = [restore(value) for value in out]
    if CUDA:
        torch.cuda.synchronize()
    compile_s = time.perf_counter() - start
    if backward and name == "fla hgrn":
        out[0] = out[0] / a  # by the decay, as the reference is
    error = harness.error_of(
        [lanes(value) for value in out], expected[1:] if backward else expected[:1]
    )
    del out
    result = timed(both if backward else scan, [(x, y)], request["spend_s"])
    return result | {"compile_s": compile_s, "error": error}


# -- nonlinear recurrences ---------------------------------------------------------------------------------------------


@functools.lru_cache(1)
def cell_case(cell: str, length: int, batch: int, n: int, scale: str):
    """Weights, inputs and a cotangent in numpy."""
    w, xs = problems.weights(cell, n, scale), problems.inputs(cell, length, batch, n)
    return w, xs, problems.inputs("tanh", length, batch, n, seed=2)


@functools.lru_cache(1)
def expected_of(cell: str, length: int, batch: int, n: int, scale: str):
    """Returns ys and gradients by the inputs of a part of the case, in float64: what `problems.part` picks."""
    w, xs, g = problems.part(cell, *cell_case(cell, length, batch, n, scale))
    ys, _, dxs = problems.reference(cell, w, xs, g)
    return ys, dxs


class Given(torch.nn.Module):
    """Stands for pararnn's input product where pre-activations are given."""

    def forward(self, x):
        """Returns what it gets."""
        return x


def pararnn_cell(cell: str, w: dict, dtype):
    """A cell of pararnn-torch with our weights, unclipped, and without its input product."""
    import pararnn
    import pararnn.solvers.vjp as vjp

    n = len(next(iter(w.values())))
    module = (pararnn.ParaGRU if cell == "para_gru" else pararnn.ParaLSTM)(
        1, n, max_recurrent_norm=None
    )
    names = {"z": "a_z", "r": "a_r", "n": "a_n"} if cell == "para_gru" else {
        "f": "a_f", "z": "a_z", "o": "a_o", "pf": "c_f", "po": "c_o",
    }  # fmt: skip
    with torch.no_grad():
        for ours, theirs in names.items():
            getattr(module, theirs).copy_(torch.from_numpy(w[ours]))
    module.W_x = Given()
    vjp._linear_vjp = lambda given, x, gradient: (gradient, None, None)
    return module.to(DEVICE, dtype)


def pararnn_row(request: dict) -> dict:
    """Times ParaGRU or ParaLSTM of pararnn-torch; arrays [B, T, 3 n]."""
    from pararnn.solvers import NewtonConfig, newton_apply, sequential_apply

    cell, (length, batch, n) = request["cell"], (request[k] for k in ("length", "batch", "n"))
    w, xs, g = cell_case(cell, length, batch, n, request["scale"])
    dtype, row = FLOATS[request["dtype"]], request["row"].split()
    module = pararnn_cell(cell, w, dtype)
    slot = (lambda states: states) if cell == "para_gru" else (lambda states: states[:, :, 1])
    steps = min(length, 256)
    if row[1] == "loop":  # one call of the step after the other
        xs, g = tuple(x[:steps] for x in xs), g[:steps]
        solve = functools.partial(sequential_apply, module)
    else:
        config = NewtonConfig(
            max_iters=int(row[2].removeprefix("K=")),
            scan_backend=row[1],
            residual_atol=None,
            residual_fail=None,
        )
        solve = functools.partial(newton_apply, module, config=config)
    import numpy as np

    x = torch.from_numpy(np.concatenate(xs, -1)).to(DEVICE, dtype).transpose(0, 1).contiguous()
    cotangent = torch.from_numpy(g).to(DEVICE, dtype).transpose(0, 1).contiguous()
    parameters = tuple(module.parameters())
    backward = request["direction"] == "fwd+bwd"
    inputs = [
        (x.clone().requires_grad_(backward),) for _ in range(harness.copies_beyond_cache(x.nbytes))
    ]

    def forward(x):
        with torch.no_grad():
            return slot(solve(x))

    def both(x):
        return torch.autograd.grad(slot(solve(x)), (x, *parameters), cotangent)

    result = timed(both if backward else forward, inputs, request["spend_s"])
    if row[1] == "loop":
        scaled = result["ms"] * length / steps
        return result | {"ms": scaled, "note": f"{steps} steps measured, scaled"}
    ys, dxs = expected_of(cell, length, batch, n, request["scale"])
    if backward:
        gates = both(*inputs[0])[0].detach().transpose(0, 1).float().cpu().chunk(3, -1)
        error = harness.error_of([gate[..., :4].numpy() for gate in gates], dxs)
    else:
        error = harness.error_of(
            [forward(*inputs[0]).transpose(0, 1)[..., :4].float().cpu().numpy()], [ys]
        )
    return result | {"error": error, "iterations": config.max_iters}


def cudnn_row(request: dict) -> dict:
    """Times torch's own cells, which are cuDNN's on a GPU; sequences longer than its limit in pieces."""
    cell, (length, batch, n) = request["cell"], (request[k] for k in ("length", "batch", "n"))
    w, xs, g = cell_case(cell, length, batch, n, request["scale"])
    dtype, backward = FLOATS[request["dtype"]], request["direction"] == "fwd+bwd"
    torch.backends.cudnn.allow_tf32 = torch.backends.cuda.matmul.allow_tf32 = (
        "tf32" in request["row"]
    )
    module = {"gru": torch.nn.GRU, "lstm": torch.nn.LSTM, "tanh": torch.nn.RNN}[cell](
        n, n, bias=False
    )
    with torch.no_grad():
        module.weight_ih_l0.copy_(torch.from_numpy(w["w"].T))
        module.weight_hh_l0.copy_(torch.from_numpy(w["u"].T))
    module = module.to(DEVICE, dtype)
    x = torch.from_numpy(xs).to(DEVICE, dtype)
    cotangent = torch.from_numpy(g).to(DEVICE, dtype)
    inputs = [
        (x.clone().requires_grad_(backward),) for _ in range(harness.copies_beyond_cache(x.nbytes))
    ]
    pieces, parameters = range(0, length, 32768), tuple(module.parameters())

    def run(x, module=module):
        state, out = None, []
        for start in pieces:
            ys, state = module(x[start : start + 32768], state)
            out.append(ys)
        return torch.cat(out) if len(out) > 1 else out[0]

    def forward(x):
        with torch.no_grad():
            return run(x)

    def both(x):
        return torch.autograd.grad(run(x), (x, *parameters), cotangent)

    result = timed(both if backward else forward, inputs, request["spend_s"])
    exact = x[:, :1].double().requires_grad_()  # a float64 run of its own kind
    ys = run(exact, torch.nn.Module.double(module))
    (dx,) = torch.autograd.grad(ys, exact, cotangent[:, :1].double())
    module.to(dtype)
    if backward:
        pair = both(*inputs[0])[0][:, :1], dx
    else:
        pair = forward(*inputs[0])[:, :1], ys
    error = harness.error_of(*([value.detach().double().cpu().numpy()] for value in pair))
    note = result.get("note", "") + (f" {len(pieces)} pieces" if len(pieces) > 1 else "")
    return result | {"error": error, "note": note.strip()}


def answer(request: dict) -> dict:
    """Answers one row."""
    if request["row"] == "copy":
        return copy_rate(request)
    if request["row"] == "prepare":
        return {}  # nothing to compile ahead
    try:
        if "kind" in request:
            return affine_row(request)
        return (pararnn_row if request["row"].startswith("pararnn") else cudnn_row)(request)
    finally:
        free()


if __name__ == "__main__":
    harness.serve(answer)
