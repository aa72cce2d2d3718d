"""The torch peers of `bench/experts.py`: `torch._grouped_mm` on sorted rows, and scattermoe where it is importable.

A worker: `make` compiles a row, `round` times it once, `drop` frees it.
"""

import pathlib
import statistics
import sys
import time

HERE = pathlib.Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parent))

import harness  # noqa: E402
import torch  # noqa: E402
import torch.nn.functional as F  # noqa: E402
from expert_cases import choices  # noqa: E402

CUDA = torch.cuda.is_available()
DEVICE = "cuda" if CUDA else "cpu"
FLOATS = {"float32": torch.float32, "bfloat16": torch.bfloat16}


def wait() -> float:
    """Returns the time at which the device has done all that it was asked."""
    if CUDA:
        torch.cuda.synchronize()
    return time.perf_counter()


def drawn(request: dict, *shape: int, scale: float = 1.0):
    """Draws an array that a gradient is asked for."""
    return (
        (torch.randn(*shape, device=DEVICE) * scale).to(FLOATS[request["dtype"]]).requires_grad_()
    )


def product(request: dict):
    """Returns a grouped product's function, its arguments, and what it should be."""
    order, sizes = (torch.from_numpy(x).to(DEVICE) for x in choices(request))
    ends = sizes.cumsum(0).to(torch.int32)
    tokens, k, depth, width, experts = (
        request[name] for name in ("tokens", "k", "depth", "width", "experts")
    )
    if request["row"] == "torch dense":
        return (
            torch.matmul,
            [drawn(request, tokens * k, depth), drawn(request, depth, width, scale=depth**-0.5)],
            None,
        )
    x = drawn(request, tokens if "scattermoe" in request["row"] else tokens * k, depth)
    w = drawn(request, experts, depth, width, scale=depth**-0.5)
    if "scattermoe" in request["row"]:
        from scattermoe.parallel_experts import parallel_linear

        expert = torch.repeat_interleave(torch.arange(experts, device=DEVICE), sizes)
        args = k, expert, order.long(), ends.long()

        def scattered(x, w):  # reads tokens, and leaves rows in the order of experts
            return parallel_linear(x, w, *args, grouped_in=False, grouped_out=True)

        rows = x.detach()[order.long() // k]
        return scattered, [x, w], by_loop(rows, w.detach(), sizes)
    return (
        (lambda x, w: torch._grouped_mm(x, w, offs=ends)),
        [x, w],
        by_loop(x.detach(), w.detach(), sizes),
    )


def by_loop(x, w, sizes):
    """The product expert by expert."""
    return torch.cat([rows @ w[e] for e, rows in enumerate(x.split(sizes.tolist()))])


def layer(request: dict):
    """Returns the layer's function, its arguments, and nothing to compare it with."""
    tokens, k, depth, width, experts = (
        request[name] for name in ("tokens", "k", "depth", "width", "experts")
    )
    x, router = drawn(request, tokens, depth), drawn(request, depth, experts, scale=0.02)

    def routed(x, router):
        weight, expert = (x @ router).float().softmax(-1).topk(k, -1)
        return (weight / weight.sum(-1, keepdim=True)).to(x.dtype), expert

    if "scattermoe" in request["row"]:
        from scattermoe.mlp import GLUMLP

        mlp = GLUMLP(depth, width, experts, k, activation=F.silu).to(
            DEVICE, FLOATS[request["dtype"]]
        )
        return (
            (lambda x, router, *_: mlp(x, *routed(x, router))),
            [x, router, *mlp.parameters()],
            None,
        )
    up = drawn(request, experts, depth, 2 * width, scale=0.02)
    down = drawn(request, experts, width, depth, scale=0.02)

    def run(x, router, up, down):
        weight, expert = routed(x, router)
        order = expert.flatten().argsort(stable=True)
        token = order // k
        ends = torch.bincount(expert.flatten(), minlength=experts).cumsum(0).to(torch.int32)
        gate, value = torch._grouped_mm(x[token], up, offs=ends).chunk(2, -1)
        out = (
            torch._grouped_mm(F.silu(gate) * value, down, offs=ends) * weight.flatten()[order, None]
        )
        return torch.zeros_like(x).index_add(0, token, out)

    return torch.compile(run) if "compiled" in request["row"] else run, [x, router, up, down], None


class Call:
    """A row that calls one function."""

    def __init__(self, request: dict):
        """Calls it until it is compiled, and compares a product with a loop over experts."""
        torch.manual_seed(0)
        self.both = request["direction"] == "fwd+bwd"
        self.function, self.args, want = (product if request["kind"] == "product" else layer)(
            request
        )
        self.g, begin = None, wait()
        if CUDA:
            torch.cuda.reset_peak_memory_stats()
        for _ in range(3):
            y = self.call()
            start = wait()
            self.call()
            once = wait() - start
        self.plan = harness.plan_timing(once, request["spend_s"])
        self.made = {"compile_s": wait() - begin}
        if CUDA:
            self.made["peak_bytes"] = torch.cuda.max_memory_allocated()
        if want is not None:
            self.made["error"] = (
                (y.detach().float() - want.float()).norm() / want.float().norm()
            ).item()

    def call(self):
        """Computes the result, and all gradients."""
        if not self.both:
            with torch.no_grad():
                return self.function(*self.args)
        for each in self.args:
            each.grad = None
        y = self.function(*self.args)
        self.g = torch.randn_like(y) if self.g is None else self.g
        y.backward(self.g)
        return y

    def round(self) -> dict:
        """Median of several queued calls."""
        calls, timings = self.plan
        self.call()
        taken = []
        for _ in range(timings):
            begin = wait()
            for _ in range(calls):
                self.call()
            taken.append((wait() - begin) / calls)
        return {"ms": 1e3 * statistics.median(taken)}


def rates(request: dict) -> dict:
    """Returns the FLOP/s of a square product."""
    size = request["size"]
    x = torch.randn(size, size, device=DEVICE).to(FLOATS[request["dtype"]])

    def seconds(calls: int) -> float:
        begin = wait()
        for _ in range(calls):
            x @ x
        return (wait() - begin) / calls

    name = torch.cuda.get_device_name() if CUDA else "cpu"
    ms = harness.medians(seconds, request["spend_s"])["ms"]
    return {"device": name, "version": f"torch {torch.__version__}", "flops": 2e3 * size**3 / ms}


class Rows:
    """The rows that are held; what is asked is `do`: rates, make, round or drop."""

    def __init__(self):
        """Holds nothing yet."""
        self.held: dict = {}

    def __call__(self, request: dict) -> dict:
        """Answers one request."""
        if request["do"] == "rates":
            return rates(request)
        if request["do"] == "make":
            row = self.held[request["name"]] = Call(request)
            return row.made
        if request["do"] == "drop":
            self.held.clear()
            torch.compiler.reset()
            if CUDA:
                torch.cuda.empty_cache()
            return {}
        return self.held[request["name"]].round()


if __name__ == "__main__":
    harness.serve(Rows())
