"""The torch peers of `bench/experts.py`: `torch._grouped_mm` on sorted rows, and scattermoe where it is importable.

A worker: `make` compiles a row, `round` times it once, `drop` frees it.
"""

import pathlib
import sys

HERE = pathlib.Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parent))

import harness  # noqa: E402
import torch  # noqa: E402
import torch.nn.functional as F  # noqa: E402
from expert_cases import choices  # noqa: E402
from torch_rows import DEVICE, FLOATS, Call, device_facts, forget, medians  # noqa: E402


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


def compile_row(request: dict) -> Call:
    """Returns a row that is compiled; a product is compared with a loop over experts."""
    torch.manual_seed(0)
    function, args, want = (product if request["kind"] == "product" else layer)(request)
    row = Call(function, args, request["direction"])
    y = row.compile(request["spend_s"])
    if want is not None:
        row.made["error"] = (
            (y.detach().float() - want.float()).norm() / want.float().norm()
        ).item()
    return row


def rates(request: dict) -> dict:
    """Returns the FLOP/s of a square product."""
    size = request["size"]
    x = torch.randn(size, size, device=DEVICE).to(FLOATS[request["dtype"]])
    ms = medians(lambda: x @ x, request["spend_s"])["ms"]
    return device_facts() | {"flops": 2e3 * size**3 / ms}


if __name__ == "__main__":
    harness.serve(harness.Rows(compile_row, {"rates": rates}, forget))
