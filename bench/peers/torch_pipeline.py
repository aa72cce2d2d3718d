"""The torch peer of `bench/pipeline.py`: the same model by torch.distributed.pipelining, one process a GPU, eager.

Run as `torch_pipeline.py N`; processes and channel are those of `torch_context.py`. Weights, activations and sums of
gradients have the row's dtype. Before a row is timed, its gradients at a tiny size are compared with those of the whole
model in one process. `torch.compile` is off: the schedules' backward passes walk the graph of autograd.
"""

import inspect
import statistics
import sys

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.pipelining import PipelineStage, schedules
from torch_context import Member, main
from torch_fsdp import Block
from torch_rows import CUDA, FLOATS, begin_peak, device_facts, free, wait

# Name of a row -> class, stages of a process, whether they lie there and back.
KINDS = {
    "gpipe": ("ScheduleGPipe", 1, False),
    "1f1b": ("Schedule1F1B", 1, False),
    "interleaved": ("ScheduleInterleaved1F1B", 2, False),
    "breadth_first": ("ScheduleLoopedBFS", 2, False),
    "blockwise": ("ScheduleInterleavedZeroBubble", 2, False),
    "zb_v": ("ScheduleZBVZeroBubble", 2, True),
    "dualpipe_v": ("ScheduleDualPipeV", 2, True),
}
TINY = dict(num_layers=4, embed_dim=32, num_heads=4, num_kv_heads=2, mlp_dim=64, vocab_size=64)
TOLERANCE = 1e-3  # of the largest entry, in float32
OPS = {"FORWARD": "F", "FULL_BACKWARD": "BW", "BACKWARD_INPUT": "B", "BACKWARD_WEIGHT": "W"}


class Part(nn.Module):
    """Some layers of the model, with the embedding before them or norm and head after them."""

    def __init__(self, model: dict, length: int, layers: range):
        """Draws weights, each layer's by its number."""
        super().__init__()
        width, heads, vocab = model["embed_dim"], model["num_heads"], model["vocab_size"]
        self.embedding = self.norm = self.head = None
        if layers.start == 0:
            torch.manual_seed(10_000)
            self.embedding = nn.Embedding(vocab, width)
            nn.init.normal_(self.embedding.weight, std=0.02)
        blocks = []
        for layer in layers:
            torch.manual_seed(layer)
            blocks.append(Block(width, heads, model["num_kv_heads"], model["mlp_dim"]))
        self.blocks = nn.ModuleList(blocks)
        if layers.stop == model["num_layers"]:
            torch.manual_seed(20_000)
            self.norm, self.head = nn.RMSNorm(width, eps=1e-5), nn.Linear(width, vocab, bias=False)
        half = width // heads // 2
        angles = torch.outer(torch.arange(length), 500000.0 ** (-torch.arange(half) / half))
        self.angles = angles.cos(), angles.sin()

    def forward(self, x):
        """Tokens [B, T] or activations [B, T, D] -> activations, or logits [B, T, V]."""
        cos, sin = self.angles
        x = x if self.embedding is None else self.embedding(x)
        for block in self.blocks:
            x = block(x, cos, sin)
        return x if self.head is None else self.head(self.norm(x))

    def to_device(self, device, dtype):
        """Returns it on the device in a dtype; angles stay float32."""
        self.angles = tuple(x.to(device) for x in self.angles)
        return self.to(device, dtype)


def cross_entropy(logits, targets):
    """Mean over the tokens of a microbatch, in float32."""
    return F.cross_entropy(logits.float().flatten(0, 1), targets.flatten())


class Run:
    """A schedule over stages, and the batch that it takes."""

    def __init__(
        self, member: Member, model: dict, length: int, rows: int, m: int, kind: str, dtype
    ):
        """Builds this process's stages."""
        name, each, vee = KINDS[kind]
        world, rank = member.world, member.rank
        self.count, self.member = world * each, member
        numbers = [rank, 2 * world - 1 - rank] if vee else [rank + world * i for i in range(each)]
        size = model["num_layers"] // self.count
        with torch.device("cpu"):
            parts = [Part(model, length, range(n * size, (n + 1) * size)) for n in numbers]
        self.parts = [part.to_device(member.device, dtype) for part in parts]
        stages = [
            PipelineStage(part, n, self.count, member.device)
            for part, n in zip(self.parts, numbers, strict=True)
        ]
        make = getattr(schedules, name)
        self.schedule = make(stages[0] if each == 1 else stages, m, loss_fn=cross_entropy)
        generator = torch.Generator().manual_seed(1)
        shape = 2, rows * m, length
        self.tokens, self.targets = torch.randint(
            0, model["vocab_size"], shape, generator=generator
        ).to(member.device)
        self.has_first, self.has_last = 0 in numbers, self.count - 1 in numbers
        self.numbers, self.size = numbers, size

    def step(self) -> list:
        """Makes all gradients anew; returns the losses of the microbatches where they are known."""
        for part in self.parts:
            part.zero_grad(set_to_none=True)
        losses: list = []
        options = {"target": self.targets, "losses": losses} if self.has_last else {}
        if "return_outputs" in inspect.signature(self.schedule.step).parameters:
            options["return_outputs"] = False
        self.schedule.step(*([self.tokens] if self.has_first else []), **options)
        return losses


class Pipeline(Member):
    """One process of the group."""

    def do(self, request: dict) -> dict:
        """Makes and times a row, or tells torch's tables."""
        if request["what"] == "tables":
            return {"tables": tables(request["devices"], request["microbatches"])}
        kind, m = request["schedule"], request["microbatches"]
        if kind not in KINDS:
            raise ValueError(f"torch has no {kind}")
        self.compare(kind, m)
        free()
        begin_peak()
        start = wait()
        run = Run(
            self,
            request["model"],
            request["length"],
            request["rows"],
            m,
            kind,
            FLOATS[request["dtype"]],
        )
        taken, loss = [], 0.0
        first = 0.0
        for index in range(2 + request["timings"]):
            dist.barrier(group=self.control)
            begin = wait()
            losses = run.step()
            taken.append(wait() - begin)
            first = first or wait() - start
            if index == 0 and losses:
                loss = float(torch.stack([each.detach() for each in losses]).mean())
        every: list = [None] * self.world
        peak = torch.cuda.max_memory_allocated() if CUDA else 0
        dist.all_gather_object(every, (peak, loss), group=self.control)
        said = device_facts() | {"compile_s": first}
        said |= {"ms": 1e3 * statistics.median(taken[2:]), "least_ms": 1e3 * min(taken[2:])}
        peaks = [each[0] for each in every]
        said |= {"timings": request["timings"], "loss": max(each[1] for each in every)}
        return said | ({"peaks": peaks} if CUDA else {})

    def compare(self, kind: str, m: int) -> None:
        """Refuses a schedule whose gradients are not those of the whole model."""
        model = TINY | {"num_layers": 2 * self.world}
        run = Run(self, model, 16, 1, m, kind, torch.float32)
        run.step()
        whole = Part(model, 16, range(model["num_layers"])).to_device(self.device, torch.float32)
        loss = cross_entropy(whole(run.tokens), run.targets)
        loss.backward()
        for part, number in zip(run.parts, run.numbers, strict=True):
            own = {name: param.grad for name, param in part.named_parameters()}
            for name, param in whole.named_parameters():
                top, _, rest = name.partition(".")
                if top == "blocks":
                    layer, _, rest = rest.partition(".")
                    name = f"blocks.{int(layer) - number * run.size}.{rest}"
                if name not in own:
                    continue
                error = (own[name] - param.grad).abs().max() / param.grad.abs().max()
                if not error < TOLERANCE:
                    raise ValueError(
                        f"{kind}'s gradient of {name} is {error:.1e} off that of the whole model"
                    )


def tables(devices: int, m: int) -> dict:
    """Returns the tasks that torch's generators give each device: [op, chunk, microbatch]."""
    found = {}
    for kind, (name, each, _) in KINDS.items():
        maker = object.__new__(getattr(schedules, name))
        maker.pp_group_size, maker.n_local_stages, maker.num_stages = devices, each, devices * each
        maker._num_stages, maker._n_microbatches, maker.number_of_rounds = (
            devices * each,
            m,
            max(1, m // devices),
        )
        maker.microbatches_per_round, maker._stages = devices, [None] * each
        try:
            if each == 1:
                every = maker._get_pipeline_order()
                rows = [every[rank] for rank in range(devices)]
            else:
                rows = []
                for rank in range(devices):
                    maker.rank = rank
                    rows.append(maker._calculate_single_rank_operations(rank))
            found[kind] = [[task for action in row for task in tasks_of(action)] for row in rows]
        except Exception as error:  # private methods of other versions
            found[kind] = f"{type(error).__name__}: {' '.join(str(error).split())[:200]}"
    return found


def tasks_of(action) -> list:
    """Returns an action's tasks; of a pair that torch calls overlapped, one after the other; none of a reduction."""
    if action is None or action.computation_type.name not in {*OPS, "OVERLAP_F_B"}:
        return []
    parts = getattr(action, "sub_actions", None)
    if parts:
        return [task for part in parts for task in tasks_of(part)]
    return [[OPS[action.computation_type.name], action.stage_index, action.microbatch_index]]


if __name__ == "__main__":
    main(int(sys.argv[1]), Pipeline)
