"""What fits where: the memory of fine-tuning, all weights or adapters, on a card. Analytic, so on any machine.

    python bench/finetune_memory.py                                  # Llama 1B and 8B, one row of 2,048
    python bench/finetune_memory.py --models llama_8b --rows 4 --flags model.execution.loss_chunk=2048

Rows are the analytic model of `experiments.estimate` with `model.execution.remat=full`: what
parameters and optimizer hold is exact, the peak is no measurement, and tends to be too high. LoRA
is of rank 16 on all products of the layers.
"""

import argparse
import pathlib
import sys

HERE = pathlib.Path(__file__).resolve().parent
sys.path[:0] = [str(HERE.parent)]

from experiments import estimate  # noqa: E402
from jaxpar import aot  # noqa: E402

WAYS = {
    "all weights": (),
    "lora": ("adapter=lora",),
    "lora, bfloat16 base": ("adapter=lora", "adapter.base=bfloat16"),
    "lora, int8 base": ("adapter=lora", "adapter.base=int8"),
    "lora, nf4 base": ("adapter=lora", "adapter.base=nf4"),
}
CARDS = {"RTX 4090": 24 * 2**30} | {
    name: aot.CHIPS[name].hbm_bytes for name in ("v5e", "h100", "h200")
}
"""Bytes that a card has; a 4090's by its data sheet."""


def found(model: str, way: str, args: argparse.Namespace) -> aot.Estimate:
    """Estimates a step of a model on one device."""
    sizes = (
        f"data.batch_size={args.rows}",
        f"data.seq_len={args.length}",
        "train.accumulate=1",
        "adapter.rank=16",
    )
    flags = (
        f"preset={model}",
        "topology=h100:1",
        "model.execution.remat=full",
        *sizes,
        *WAYS[way],
        *args.flags,
    )
    config, devices, chip = estimate.find_devices(estimate.compose(*flags))
    return aot.estimate(estimate.make_job(config, devices), effort="none", chip=chip)


def main() -> None:
    """Parses flags and prints a row as soon as it is known."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--models", default="llama_1b,llama_8b", help="presets of experiments.lm, with commas"
    )
    parser.add_argument("--rows", type=int, default=1)
    parser.add_argument("--length", type=int, default=2048)
    parser.add_argument(
        "--flags", nargs="*", default=[], help="further flags of experiments.estimate"
    )
    args = parser.parse_args()
    sizes = " | ".join(f"{name} ({size / 2**30:.1f} GiB)" for name, size in CARDS.items())
    print(
        f"| {args.rows} x {args.length} tokens | parameters GiB | optimizer GiB | peak GiB | {sizes} |"
    )
    print("|---" * (4 + len(CARDS)) + "|")
    for model in args.models.split(","):
        for way in WAYS:
            one = found(model, way, args)
            held = (one.parameters / 2**30, one.optimizer / 2**30)
            fits = " | ".join("fits" if one.peak < size else "" for size in CARDS.values())
            print(
                f"| {model}, {way} | {held[0]:.2f} | {held[1]:.2f} | {one.peak / 2**30:.1f} | {fits} |",
                flush=True,
            )


if __name__ == "__main__":
    main()
