"""The torch peer of `bench/expert_transports.py`: experts that GPUs share, their rows sent by all-to-alls.

Run as `torch_expert_parallel.py N` in the processes of `torch_context.py`. Rows are sorted by expert, sent
to where their experts are in two all-to-alls (how many, then the rows), multiplied by `torch._grouped_mm`, sent back
and summed: nothing is dropped, and only what is chosen is sent, for which the host waits for the numbers of rows. Row
"one" has all experts and tokens on the first device. Outputs at a small size are compared with a loop over experts.
"""

import pathlib
import sys

HERE = pathlib.Path(__file__).resolve().parent
sys.path[:0] = [str(HERE.parent), str(HERE)]

import harness  # noqa: E402
import torch  # noqa: E402
import torch.distributed as dist  # noqa: E402
import torch.nn.functional as F  # noqa: E402
from expert_cases import routes  # noqa: E402
from torch_context import Member, main  # noqa: E402
from torch_rows import FLOATS, timed, wait  # noqa: E402


class Sent(torch.autograd.Function):
    """Rows that go to the devices in turn, so many to each; gradients go back."""

    @staticmethod
    def forward(ctx, x, out_sizes, in_sizes):
        """Sends `in_sizes` rows to each device, receives `out_sizes` from each."""
        ctx.sizes = in_sizes, out_sizes
        out = x.new_empty(sum(out_sizes), x.shape[1])
        dist.all_to_all_single(out, x.contiguous(), out_sizes, in_sizes)
        return out

    @staticmethod
    def backward(ctx, g):
        """Sends the other way."""
        return Sent.apply(g, *ctx.sizes), None, None


class Layer(harness.Row):
    """A row: SwiGLU experts and their gradients from given choices."""

    def __init__(self, member: "Expert", request: dict):
        """Compares it at a small size, calls it once, and agrees on how it is timed."""
        self.member, self.request, self.alone = member, request, request["row"].endswith("one")
        self.plan = 1, 1
        self.made: dict = {}
        if self.alone and member.rank:
            return
        begin = wait()
        self.compare()
        self.args = self.drawn(request)
        once = 0.0
        for _ in range(3):
            start = wait()
            self.call(*self.args)
            once = wait() - start
        self.plan = harness.plan_timing(once, request["spend_s"])
        if not self.alone:
            self.plan = member.told(self.plan)
        self.made = {"compile_s": wait() - begin}

    def drawn(self, shape: dict) -> tuple:
        """Draws all tokens and experts, the same in every process; returns this device's."""
        torch.manual_seed(0)
        member, dtype = self.member, FLOATS[shape["dtype"]]
        share, of = (0, 1) if self.alone else (member.rank, member.world)
        depth, width, experts = shape["depth"], shape["width"], shape["experts"]

        def mine(scale: float, *sizes: int):
            whole = (torch.randn(*sizes, device=member.device) * scale).to(dtype)
            return whole.chunk(of)[share].clone()

        x = mine(1.0, shape["tokens"], depth).requires_grad_()
        up = mine(depth**-0.5, experts, depth, 2 * width).requires_grad_()
        down = mine(width**-0.5, experts, width, depth).requires_grad_()
        g = mine(1.0, shape["tokens"], depth)
        expert = torch.from_numpy(routes(shape, shape["skew"])).to(member.device).chunk(of)[share]
        weight = torch.full(
            expert.shape, 1 / shape["k"], device=member.device, dtype=dtype, requires_grad=True
        )
        return x, weight, up, down, g, expert

    def forward(self, x, weight, up, down, expert):
        """Returns the layer's outputs of this device's tokens."""
        count = up.shape[0] * (1 if self.alone else self.member.world)
        flat = expert.flatten()
        order = flat.argsort(stable=True)
        token, sizes = order // expert.shape[1], torch.bincount(flat, minlength=count)
        if self.alone:
            rows, back = self.multiplied(x[token], up, down, sizes), None
        else:
            world = self.member.world
            theirs = torch.empty_like(sizes)
            dist.all_to_all_single(
                theirs, sizes
            )  # how many rows each device has for each expert of this one
            ins, outs = (
                sizes.view(world, -1).sum(1).tolist(),
                theirs.view(world, -1).sum(1).tolist(),
            )
            local = torch.arange(len(up), device=x.device).repeat(world).repeat_interleave(theirs)
            back = local.argsort(stable=True)
            got = Sent.apply(x[token], outs, ins)
            rows = self.multiplied(got[back], up, down, theirs.view(world, -1).sum(0))
            rows = Sent.apply(torch.empty_like(rows).index_copy(0, back, rows), ins, outs)
        return torch.zeros_like(x).index_add(0, token, rows * weight.flatten()[order, None])

    @staticmethod
    def multiplied(x, up, down, sizes):
        """Returns sorted rows through their experts."""
        ends = sizes.cumsum(0).to(torch.int32)
        gate, value = torch._grouped_mm(x, up, offs=ends).chunk(2, -1)
        return torch._grouped_mm(F.silu(gate) * value, down, offs=ends)

    def call(self, x, weight, up, down, g, expert):
        """Computes outputs and all gradients."""
        for each in (x, weight, up, down):
            each.grad = None
        out = self.forward(x, weight, up, down, expert)
        out.backward(g)
        return out

    def compare(self) -> None:
        """Refuses a row whose outputs or gradients at a small size are not those of a loop over experts."""
        small = self.request | dict(tokens=256, depth=64, width=64)
        args = self.drawn(small)
        out = self.call(*args)
        alone, self.alone = self.alone, True
        whole = self.drawn(small)
        self.alone = alone
        leaves = [each.detach().double().requires_grad_() for each in whole[:4]]
        x, weight, up, down = leaves
        want = torch.zeros_like(x)
        for number in range(len(up)):
            gate, value = (x @ up[number]).chunk(2, -1)
            share = (weight * (whole[5] == number)).sum(1, keepdim=True)
            want = want + share * ((F.silu(gate) * value) @ down[number])
        want.backward(whole[4].double())
        share, of = (0, 1) if alone else (self.member.rank, self.member.world)
        pairs = [
            (out, want),
            *zip((each.grad for each in args[:4]), (each.grad for each in leaves), strict=True),
        ]
        for got, right in pairs:
            right = right.detach().chunk(of)[share]
            error = ((got.detach().double() - right).norm() / right.norm()).item()
            if not error < 2e-2:
                raise ValueError(f"it is {error:.1e} off a loop over experts")

    def round(self) -> dict:
        """Times it; what is not a call is not timed."""
        if self.alone and self.member.rank:
            return {}
        return timed(
            self.plan, lambda: self.call(*self.args), None if self.alone else self.member.control
        )


class Expert(Member):
    """One process of the group, whose rows are layers of experts."""

    def make_row(self, request: dict) -> harness.Row:
        """Returns a new row."""
        return Layer(self, request)


if __name__ == "__main__":
    main(int(sys.argv[1]), Expert)
