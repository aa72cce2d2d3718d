"""Ratio of the memory that an estimate counts for a pipeline to what XLA for CPUs allocates.

    python bench/pipeline_memory.py    # eight simulated devices, a quarter of an hour on two cores

Each number is the bytes of a device by `experiments.estimate`, over the bytes of the compiled step:
arguments, temporaries and results, less results in the memory of donated arguments.
"""

import argparse
import dataclasses
import json
import pathlib
import sys

HERE = pathlib.Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parent))

BASE = (
    "preset=tiny mesh.data=1 microbatches=8 data.batch_size=16 data.seq_len=128 model.num_layers=8 "
    "model.embed_dim=64 model.attention.num_heads=4 model.mlp.dim=256 model.vocab_size=512"
)
CASES = {
    "activations": "",
    "recomputed": "model.execution.remat=full",
    "weights": "model.execution.remat=full model.embed_dim=256 model.mlp.dim=1024 data.seq_len=32",
    "vocabulary": "model.execution.remat=full model.vocab_size=8192",
    "bfloat16": "model.dtype=bfloat16",
    "fsdp=2": "mesh.fsdp=2",
    "tensor=2": "mesh.tensor=2",
    "vocabulary, fsdp=2": "model.execution.remat=full model.vocab_size=8192 mesh.fsdp=2",
}
SCHEDULES = ("1f1b", "interleaved", "zb_v", "hanayo", "bitpipe")
STAGES = (2, 4)


def measure(flags: list[str]) -> dict:
    """Returns the bytes of a device, estimated and compiled, by flags of `experiments.estimate`."""
    import jax

    from experiments import estimate as experiment
    from experiments.app.estimate.pipelines import estimate_pipeline
    from jaxpar.aot import compile_job

    config = experiment.compose(*flags)
    sizes = dataclasses.asdict(config.mesh)
    num_devices = sizes["stage"] * sizes["fsdp"] * sizes["tensor"]
    job = experiment.pipeline_job(config, jax.devices()[:num_devices])
    (row,) = estimate_pipeline(config, job, None)
    # Optimising code takes time and changes no allocation.
    quick = {"xla_backend_optimization_level": 0, "xla_llvm_disable_expensive_passes": True}
    compiled = compile_job(dataclasses.replace(job, options=quick), "full")
    return {"estimated": row["device"], "compiled": compiled.peak}


def main() -> None:
    """Measures every case, prints a table and writes JSON."""
    as_written = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=as_written)
    parser.add_argument("--schedules", default=",".join(SCHEDULES))
    parser.add_argument("--cases", default=";".join(CASES), help="names, with ; between them")
    results = HERE / "results" / "pipeline_memory.json"
    parser.add_argument("--out", type=pathlib.Path, default=results)
    given = parser.parse_args()

    from jaxpar.mesh import simulate_devices

    simulate_devices(8)
    names = given.schedules.split(",")
    rows = []
    print("| case, stages | " + " | ".join(names) + " |")
    print("|---|" + "---|" * len(names))
    for case in given.cases.split(";"):
        for num_stages in STAGES:
            ratios = []
            for name in names:
                flags = f"{BASE} {CASES[case]} mesh.stage={num_stages} pipeline={name}".split()
                found = measure(flags)
                rows.append({"case": case, "stages": num_stages, "schedule": name, **found})
                ratios.append(found["estimated"] / found["compiled"])
            cells = " | ".join(f"{ratio:.2f}" for ratio in ratios)
            print(f"| {case}, {num_stages} | {cells} |", flush=True)
    every = [row["estimated"] / row["compiled"] for row in rows]
    print(f"smallest {min(every):.2f}, largest {max(every):.2f}")
    given.out.parent.mkdir(exist_ok=True)
    given.out.write_text(json.dumps(rows, indent=1) + "\n")


if __name__ == "__main__":
    main()
