"""The torch peer of `bench/context.py`: attention of a sequence that GPUs share, by torch's own context_parallel.

Run as `torch_context.py N`: this process has the first device and the channel, and starts one process for each of the
others, which do what they are told. context_parallel deals tokens out as zigzag does; its exchange is by "allgather" or
"alltoall" (a ring), its kernel cuDNN's or FlashAttention's. Before a row is timed its result is compared with that of
one device at a small size. Rows "one" are SDPA on the first device alone.
"""

import contextlib
import pathlib
import socket
import sys

HERE = pathlib.Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parent))

import harness  # noqa: E402
import torch  # noqa: E402
import torch.distributed as dist  # noqa: E402
import torch.nn.functional as F  # noqa: E402
from torch.nn.attention import SDPBackend, sdpa_kernel  # noqa: E402
from torch_rows import (  # noqa: E402
    CUDA,
    FLOATS,
    begin_peak,
    device_facts,
    free,
    medians,
    peak_memory,
    timed,
    wait,
)  # fmt: skip

KERNELS = {"cudnn": SDPBackend.CUDNN_ATTENTION, "flash": SDPBackend.FLASH_ATTENTION}
TOLERANCE = 2e-2  # of bfloat16, over a few hundred keys


class Member:
    """One process of the group."""

    def __init__(self, rank: int, world: int, port: int):
        """Joins."""
        self.rank, self.world = rank, world
        self.device = torch.device("cuda", rank) if CUDA else torch.device("cpu")
        if CUDA:
            torch.cuda.set_device(self.device)
        backend = "cpu:gloo,cuda:nccl" if CUDA else "gloo"
        dist.init_process_group(
            backend, init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=world
        )
        self.control = dist.new_group(backend="gloo")
        self.mesh = dist.device_mesh.init_device_mesh(self.device.type, (world,))
        self.rows = harness.Rows(self.make_row, {"rates": self.rates}, free)

    def told(self, what=None):
        """Returns what the first process says."""
        box = [what]
        dist.broadcast_object_list(box, 0, group=self.control)
        return box[0]

    def answer(self, request: dict) -> dict:
        """Does what is asked, as all others do; a failure of one is a failure of all."""
        try:
            said = self.do(request)
        except Exception as error:  # any row may fail, and is a row then
            said = {"failed": f"{type(error).__name__}: {' '.join(str(error).split())[:300]}"}
        every: list = [None] * self.world
        dist.all_gather_object(every, said, group=self.control)
        failed = [each["failed"] for each in every if "failed" in each]
        return {"failed": failed[0]} if failed else said

    def do(self, request: dict) -> dict:
        """Makes, times or drops a row."""
        return self.rows(request)

    def make_row(self, request: dict) -> harness.Row:
        """Returns a new row."""
        return Attention(self, request)

    def rates(self, request: dict) -> dict:
        """Returns FLOP/s of a square product and bytes/s, read plus written, of a copy."""
        size, spend_s = request["size"], request["spend_s"]
        x = torch.ones(size, size, device=self.device, dtype=FLOATS[request["dtype"]])
        source = torch.ones(request["bytes"] // 4, device=self.device)
        target = torch.empty_like(source)
        product = medians(lambda: x @ x, spend_s)
        copy = medians(lambda: target.copy_(source), spend_s)
        said = {"flops": 2 * size**3 / product["ms"] * 1e3}
        said["bytes"] = 2 * source.nbytes / copy["ms"] * 1e3
        return device_facts() | said


class Attention(harness.Row):
    """A row of attention."""

    def __init__(self, member: Member, request: dict):
        """Compares it at a small size, calls it once, and agrees on how it is timed."""
        _, self.how, kernel = request["row"].split()
        self.member, self.request, self.kernel = member, request, KERNELS[kernel]
        self.alone, self.backward = self.how == "one", request["direction"] == "fwd+bwd"
        self.repeats, self.plan = False, (1, 1)
        if self.alone and member.rank:
            self.made: dict = {}
            return
        begin = wait()
        self.compare()
        begin_peak()
        once = 0.0
        with self.local(request["length"]) as arrays:
            for _ in range(2):
                start = wait()
                self.call(*arrays)
                once = wait() - start
        self.plan = harness.plan_timing(once, request["spend_s"])
        if not self.alone:
            self.plan = member.told(self.plan)
        note = "keys repeated for each head" if self.repeats else ""
        most = peak_memory()
        self.made = {"compile_s": wait() - begin, "note": note} | most

    def drawn(self, length: int) -> list:
        """Draws queries, keys and values, whole, the same in every process."""
        torch.manual_seed(0)
        groups = self.request["heads"] if self.repeats else self.request["groups"]
        return [
            torch.randn(1, n, length, self.request["width"], device=self.member.device).to(
                FLOATS[self.request["dtype"]]
            )
            for n in (self.request["heads"], groups, groups)
        ]

    @contextlib.contextmanager
    def local(self, length: int, *more):
        """Yields this device's share of queries, keys and values, and of more arrays of as many tokens."""
        whole = [*self.drawn(length), *more]
        with contextlib.ExitStack() as stack:
            if not self.alone:
                from torch.distributed.tensor.experimental import context_parallel
                from torch.distributed.tensor.experimental._attention import set_rotate_method

                set_rotate_method(self.how)
                stack.enter_context(
                    context_parallel(
                        self.member.mesh, buffers=whole, buffer_seq_dims=[2] * len(whole)
                    )
                )
            stack.enter_context(sdpa_kernel(self.kernel))
            arrays = [x.detach().clone() for x in whole]
            yield [x.requires_grad_(self.backward) for x in arrays[:3]] + arrays[3:]

    def call(self, q, k, v, g=None):
        """Computes outputs, and gradients of their sum weighed by `g`."""
        grouped = k.shape[1] != q.shape[1]
        out = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=grouped)
        if self.backward:
            q.grad = k.grad = v.grad = None
            out.backward(torch.ones_like(out) if g is None else g)
        return out

    def compare(self) -> None:
        """Refuses a row whose outputs at a small size are not those of one device; repeats keys where groups fail."""
        length = 256 * self.member.world
        try:
            q, k, v = self.drawn(length)
            each = q.shape[1] // k.shape[1]
            with sdpa_kernel(SDPBackend.MATH):
                wide = (
                    x.float().repeat_interleave(n, 1) for x, n in ((q, 1), (k, each), (v, each))
                )
                want = F.scaled_dot_product_attention(*wide, is_causal=True)
            with self.local(length, want) as (q, k, v, want):
                error = ((self.call(q, k, v).detach().float() - want).norm() / want.norm()).item()
        except RuntimeError:
            if self.repeats or self.request["groups"] == self.request["heads"]:
                raise
            self.repeats = True
            return self.compare()
        if not error < TOLERANCE:
            raise ValueError(f"its outputs are {error:.1e} off those of one device")
        return None

    def round(self) -> dict:
        """Times it; what is not a call is not timed."""
        if self.alone and self.member.rank:
            return {}
        with self.local(self.request["length"]) as (q, k, v):
            g = torch.randn_like(q)
            return timed(
                self.plan,
                lambda: self.call(q, k, v, g),
                None if self.alone else self.member.control,
            )


def follow(rank: int, world: int, port: int, kind: type[Member]) -> None:
    """Does what the first process does, until that ends."""
    member = kind(rank, world, port)
    while True:
        member.answer(member.told())


def main(world: int, kind: type[Member] = Member) -> None:
    """Starts the others and serves."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    context = torch.multiprocessing.get_context("spawn")
    for rank in range(1, world):
        context.Process(target=follow, args=(rank, world, port, kind), daemon=True).start()
    member = kind(0, world, port)
    harness.serve(lambda request: member.answer(member.told(request)))


if __name__ == "__main__":
    main(int(sys.argv[1]))
