"""Parts of `bench/pipeline.py` that no accelerator runs: tables, a large head, compile times, programs for TPUs.

Each part is asked in a process of its own (`python bench/pipeline.py --what tables,vocabulary,compile,aot`).
"""

import statistics
import time
from collections.abc import Callable
from typing import NamedTuple

import harness

RATE = 400e12  # FLOP/s a device, at which times of the large head are stated; ratios do not depend on it
SHAPE = dict(embed_dim=2048, num_heads=32, num_kv_heads=8, mlp_dim=8192)
LLAMA_8B = dict(
    vocab_size=128256,
    num_layers=32,
    embed_dim=4096,
    num_heads=32,
    num_kv_heads=8,
    mlp_dim=14336,
    rope_theta=500000.0,
)


class Part(NamedTuple):
    """Rows of a part: what is asked, how it is answered and what is shown; `fresh` asks each in a new process."""

    title: str
    requests: Callable[[bool], list[dict]]
    rows: Callable[[dict], list[dict]]
    columns: dict[str, Callable[[dict], str]]
    fresh: bool = False


def ms(name: str) -> Callable[[dict], str]:
    """Returns a column of milliseconds."""
    return lambda row: f"{row[name]:.1f}"


def number(name: str, form: str = ",") -> Callable[[dict], str]:
    """Returns a column of a number."""
    return lambda row: format(row[name], form)


def gib(name: str) -> Callable[[dict], str]:
    """Returns a column of GiB."""
    return lambda row: f"{row[name] / 2**30:.3f}"


# ---------------------------------------------------------------- tables


def tables(request: dict) -> list[dict]:
    """Bubbles of every generator, and of torch's where `request["torch"]` has its tasks."""
    from jaxpar.pipeline import (
        PIPELINES,
        Op,
        Schedule,
        Task,
        check_schedule,
        loop,
        named_schedule,
        search_schedule,
        simulate_schedule,
        vee,
        with_gathers,
    )

    p, m = request["devices"], request["microbatches"]
    found = []
    for name in PIPELINES:
        schedule = named_schedule(name, p, m)
        found.append((name, schedule, ""))
    for name, rows in request["torch"].items():
        if isinstance(rows, str):
            found.append((f"torch {name}", None, rows))
            continue
        chunks = 1 + max(chunk for row in rows for _, chunk, _ in row)
        placement = vee(p) if name in ("zb_v", "dualpipe_v") else loop(p, chunks // p)
        tasks = tuple(tuple(Task(Op[op], chunk, j) for op, chunk, j in row) for row in rows)
        found.append((f"torch {name}", Schedule(f"torch {name}", placement, m, tasks), ""))
    out = []
    ours = {name: schedule for name, schedule, _ in found if schedule}
    for name, schedule, failed in found:
        row: dict = {"row": name}
        if schedule is None:
            out.append(row | {"failed": failed})
            continue
        wrong = check_schedule(schedule)
        if wrong:
            out.append(row | {"failed": wrong[0]})
            continue
        events, locked = simulate_schedule(schedule), simulate_schedule(schedule, lockstep=True)
        row |= {
            "bubble": events.idle_fraction,
            "makespan": events.makespan,
            "span": max(events.span),
        }
        row |= {
            "peak": max(events.held),
            "chunks": len(schedule.chunks_of(0)),
            "ticks": locked.ticks,
        }
        row |= {"gathers": max(simulate_schedule(with_gathers(schedule)).gathers), "searched": None}
        if schedule.copies == 1:  # of which a search makes schedules
            best = search_schedule(schedule.placement, m, cap=row["peak"])
            row["searched"] = simulate_schedule(best).makespan
        peer = ours.get(name.removeprefix("torch "))
        if name.startswith("torch ") and peer:
            row["note"] = (
                "the same rows as ours" if peer.rows == schedule.rows else "other rows than ours"
            )
        out.append(row)
    return out


TABLES = {
    "schedule": lambda r: r["row"],
    "P, m": lambda r: f"{r['devices']}, {r['microbatches']}",
    "chunks a device": number("chunks"),
    "bubble": number("bubble", ".4f"),
    "makespan": number("makespan", ".0f"),
    "longest span": number("span", ".0f"),
    "most kept": number("peak"),
    "makespan searched for as much": lambda r: (
        "" if r["searched"] is None else f"{r['searched']:.0f}"
    ),
    "gathers of a chunk": number("gathers"),
    "ticks": number("ticks"),
    "note": lambda r: r.get("note", ""),
}


# ---------------------------------------------------------------- vocabulary


def vocabulary(request: dict) -> list[dict]:
    """Time with a head on the last stage and with its rows split over all, by operations at a rate."""
    from pipeline_costs import ChunkCosts

    from jaxpar.pipeline import named_schedule, simulate_schedule, with_vocabulary

    p, m, size = request["devices"], request["microbatches"], request["vocab_size"]
    width, layers, tokens, length = (
        SHAPE["embed_dim"],
        request["num_layers"],
        request["tokens"],
        request["length"],
    )
    head_dim, groups = width // SHAPE["num_heads"], SHAPE["num_kv_heads"]
    weights = 2 * width * width + 2 * width * groups * head_dim + 3 * width * SHAPE["mlp_dim"]
    products = 2 * weights * tokens  # of one layer
    pairs = 2 * tokens * length * width  # of causal attention: two products, half of the pairs
    head = 2 * size * width * tokens
    out = []
    for name in request["schedules"]:
        schedule = named_schedule(name, p, m)
        each = layers / schedule.depth
        times = [
            1e3 * each * flops / RATE
            for flops in (products + pairs, products + 2.5 * pairs, products)
        ]
        costs = {
            "F": times[0],
            "B": times[1],
            "W": times[2],
            "BW": times[1] + times[2],
            "last": schedule.depth - 1,
        }
        whole = ChunkCosts(**costs, head=1e3 * 3 * head / RATE)
        share = ChunkCosts(**costs, S=1e3 * 2 * head / p / RATE, T=1e3 * head / p / RATE)
        split = with_vocabulary(schedule, share)
        row = {
            "row": name,
            "F_ms": times[0],
            "head_ms": whole.head,
            "bytes_whole": 4 * size * width,
        }
        for form, lockstep in (("events", False), ("lockstep", True)):
            before = simulate_schedule(schedule, whole, lockstep=lockstep).makespan
            after = simulate_schedule(split, share, lockstep=lockstep).makespan
            row |= {
                f"{form}_whole": before,
                f"{form}_split": after,
                f"{form}_ratio": after / before,
            }
        out.append(row | head_bytes(size, p))
    return out


def head_bytes(size: int, stages: int) -> dict:
    """Returns float32 bytes of head and embedding on the first and the last stage, as they lie at rest."""
    import jax
    from lm_models import lm_config

    from jaxpar.lm import axes, init
    from jaxpar.mesh import MeshSpec, make_mesh, named_shardings, rules_from, use_mesh

    config = lm_config(**SHAPE, vocab_size=size, num_layers=stages)
    shape = jax.eval_shape(lambda key: init(key, config), jax.random.key(0))
    mesh, found = make_mesh(MeshSpec(stage=stages), jax.devices()[:stages]), {}
    plain = rules_from(layout="stages")
    for name, rules in (("whole", plain), ("split", plain | {"vocab": ("stage", "tensor")})):
        with use_mesh(mesh, rules):
            layout = named_shardings(shape, axes(config))
        held = {device: 0 for device in mesh.devices.flat}
        for leaf in ("head", "embedding"):
            for device, index in layout[leaf].devices_indices_map(shape[leaf].shape).items():
                rows = len(range(*index[0].indices(shape[leaf].shape[0])))
                held[device] += 4 * rows * shape[leaf].shape[1]
        found |= {f"{name}_most": max(held.values()), f"{name}_least": min(held.values())}
    return found


VOCABULARY = {
    "schedule": lambda r: r["row"],
    "m": number("microbatches"),
    "F of a chunk, ms": ms("F_ms"),
    "head, ms": ms("head_ms"),
    "unsplit, ms": ms("events_whole"),
    "split, ms": ms("events_split"),
    "of unsplit (bar: 0.8)": number("events_ratio", ".3f"),
    "in lock-step": number("lockstep_ratio", ".3f"),
    "GiB of both ends a stage, unsplit": gib("whole_most"),
    "split, most": gib("split_most"),
    "split, least": gib("split_least"),
    "note": lambda r: r.get("note", ""),
}


# ---------------------------------------------------------------- compile times


def program_of(config, schedule, mesh, rules, rows: int, length: int):
    """Returns loss and gradient by a schedule, and abstract arguments that lie as they do at rest."""
    import jax
    import jax.numpy as jnp

    from jaxpar.lm import axes, init
    from jaxpar.lm.stages import stages
    from jaxpar.mesh import named_shardings, use_mesh
    from jaxpar.pipeline import Pipelined

    def run(params, batch):
        (loss, _), gradient = Pipelined(schedule)(
            stages(config), params, batch, None, schedule.microbatches
        )
        return loss, gradient

    shape = jax.eval_shape(lambda key: init(key, config), jax.random.key(0))
    with use_mesh(mesh, rules):
        layout = named_shardings(shape, axes(config))
        ids = jax.ShapeDtypeStruct((rows, length), jnp.int32)
        batch = {"tokens": ids, "targets": ids}
        args = shape, batch
        layouts = layout, named_shardings(batch, dict.fromkeys(batch, ("batch", None)))
    args = jax.tree.map(
        lambda x, at: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=at), args, layouts
    )
    return jax.jit(run, out_shardings=(None, layout)), args


def compile_times(request: dict) -> list[dict]:
    """Median seconds of tracing and of compiling for CPU devices, and instructions."""
    from jaxpar.mesh import simulate_devices

    simulate_devices(request["devices"])
    import jax
    from lm_models import lm_config

    from jaxpar.mesh import MeshSpec, make_mesh, rules_from, use_mesh
    from jaxpar.pipeline import named_schedule

    sizes = dict(
        vocab_size=256, num_layers=16, embed_dim=64, num_heads=4, mlp_dim=128, dtype="float32"
    )
    mesh, rules = (
        make_mesh(MeshSpec(stage=request["devices"]), jax.devices()),
        rules_from(layout="stages"),
    )
    made: dict[int, list] = {m: [] for m in request["several"]}
    for _ in range(request["times"]):
        for m in made:  # in turns, since other work may share the machine
            jax.clear_caches()
            schedule = named_schedule(request["schedule"], request["devices"], m)
            program, args = program_of(lm_config(**sizes), schedule, mesh, rules, 2 * m, 16)
            begin = time.perf_counter()
            with use_mesh(mesh, rules):
                lowered = program.lower(*args)
            middle = time.perf_counter()
            text = lowered.compile().as_text() or ""
            end = time.perf_counter()
            made[m].append((middle - begin, end - middle, text.count(" = ")))
    rows, first = [], None
    for m, each in made.items():
        trace, compiled, instructions = (statistics.median(one) for one in zip(*each, strict=True))
        first = first or compiled
        row = {
            "row": request["schedule"],
            "microbatches": m,
            "lower_s": trace,
            "compile_s": compiled,
        }
        rows.append(row | {"instructions": instructions, "ratio": compiled / first})
    return rows


COMPILE = {
    "schedule": lambda r: r["row"],
    "m": number("microbatches"),
    "trace and lower, s": number("lower_s", ".2f"),
    "compile, s": number("compile_s", ".2f"),
    "of m = 8 (bar: 1.1)": number("ratio", ".3f"),
    "instructions": number("instructions"),
    "note": lambda r: r.get("note", ""),
}


# ---------------------------------------------------------------- programs for TPUs


def ahead(request: dict) -> list[dict]:
    """Compiles a language model's step for a slice that is not here; bytes are of one chip."""
    from lm_models import lm_config

    from jaxpar.aot import devices, parse_topology
    from jaxpar.lm.params import num_params
    from jaxpar.lm.stages import stages
    from jaxpar.mesh import MeshSpec, make_mesh, mesh_axes, num_shares, rules_from, use_mesh
    from jaxpar.pipeline import Pipelined, named_schedule

    topology = parse_topology(request["topology"])
    mesh = make_mesh(MeshSpec(**request["mesh"]), devices(topology))
    rules, m = rules_from(layout="stages"), request["microbatches"]
    config = lm_config(**request["model"], remat=request["remat"])
    schedule = named_schedule(request["schedule"], request["mesh"]["stage"], m)
    program, args = program_of(config, schedule, mesh, rules, request["rows"], request["length"])
    with use_mesh(mesh, rules):
        kept = Pipelined(schedule).slots(stages(config), *args, None, m)
        split = num_shares(*mesh_axes("batch"))
    begin = time.perf_counter()
    with use_mesh(mesh, rules):
        lowered = program.lower(*args)
    middle = time.perf_counter()
    stats = lowered.compile().memory_analysis()
    row = {
        "row": request["schedule"],
        "lower_s": middle - begin,
        "compile_s": time.perf_counter() - middle,
    }
    row |= {"chips": topology.num_devices, "parameters": num_params(config)}
    row |= {"arguments": stats.argument_size_in_bytes, "results": stats.output_size_in_bytes}
    row["slots"] = sum(x.size * x.dtype.itemsize for part in kept.values() for x in part) // split
    return [row | {"temporary": stats.temp_size_in_bytes, "peak": stats.peak_memory_in_bytes}]


AOT = {
    "topology": lambda r: r["topology"],
    "chips": number("chips"),
    "mesh": lambda r: " ".join(f"{name}={size}" for name, size in r["mesh"].items()),
    "schedule": lambda r: r["row"],
    "m": number("microbatches"),
    "rows x T": lambda r: f"{r['rows']} x {r['length']}",
    "weights": number("parameters"),
    "trace and lower, s": number("lower_s", ".1f"),
    "compile, s (bar: 60)": number("compile_s", ".1f"),
    "GiB of arguments": gib("arguments"),
    "of results": gib("results"),
    "slots, split as the batch alone": gib("slots"),
    "temporary": gib("temporary"),
    "peak": gib("peak"),
    "note": lambda r: r.get("note", ""),
}


def aot_requests(tiny: bool) -> list[dict]:
    """Slices of 64 and of 1,024 chips."""
    small = dict(
        vocab_size=1024, num_layers=16, embed_dim=1024, num_heads=8, num_kv_heads=8, mlp_dim=1024
    )
    model = small if tiny else LLAMA_8B
    length = 256 if tiny else 4096
    common = {"model": model, "length": length, "remat": "full", "microbatches": 32}
    meshes = {"v5p:4x4x4": dict(stage=8, fsdp=8), "v5p:8x8x16": dict(stage=8, fsdp=32, tensor=4)}
    return [
        common | {"topology": name, "mesh": mesh, "schedule": schedule, "rows": 32 * mesh["fsdp"]}
        for name, mesh in meshes.items()
        for schedule in ("1f1b", "zb_v")
    ]


def large_head(tiny: bool) -> list[dict]:
    """Requests of `vocabulary`."""
    del tiny
    names = ["gpipe", "1f1b", "interleaved", "zb_h1", "zb_v"]
    common = dict(
        devices=4, vocab_size=2**18, num_layers=16, length=2048, tokens=4096, schedules=names
    )
    return [common | {"microbatches": m} for m in (8, 16)]


PARTS = {
    "tables": Part(
        "tables: bubbles at F = B = W = 1",
        lambda tiny: [{"devices": 4, "microbatches": 8, "torch": True}],
        tables,
        TABLES,
    ),
    "vocabulary": Part(
        f"vocabulary: 262,144 rows of 2,048, 16 layers on 4 stages, 2 x 2,048 tokens, at {RATE / 1e12:.0f} TFLOP/s",
        large_head,
        vocabulary,
        VOCABULARY,
    ),
    "compile": Part(
        "compile: 16 layers on 8 simulated CPU devices",
        lambda tiny: [
            {"devices": 8, "several": [8, 32], "schedule": name, "times": 1 if tiny else 3}
            for name in (("1f1b",) if tiny else ("1f1b", "zb_h1", "zb_v"))
        ],
        compile_times,
        COMPILE,
        fresh=True,
    ),
    "aot": Part(
        "aot: a language model for slices of TPU v5p, by libtpu",
        aot_requests,
        ahead,
        AOT,
        fresh=True,
    ),
}


def answer(request: dict) -> dict:
    """Answers one request with rows."""
    from jaxpar.mesh import simulate_devices

    if request["what"] == "vocabulary":
        simulate_devices(request["devices"])
    return {"rows": PARTS[request["what"]].rows(request)}


if __name__ == "__main__":
    harness.serve(answer)
