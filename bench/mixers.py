"""What does a mixer cost in a model? One training step and one decode step of each, at equal size, beside attention.

    python bench/mixers.py                                        # any machine: bytes, 2 layers of 64, 4 x 256 tokens
    python bench/mixers.py --size gpu                             # one GPU: 12 layers of 768, 8 x 4,096 tokens, bf16
    python bench/mixers.py --peer-python PYTHON_WITH_TORCH        # torch's attention and LSTM in the same blocks
    python bench/mixers.py --tiny --mixers gla,min_gru            # checks that the script runs

All are timed in turns, in rounds, so that they meet the same load; a row has the median and the least. A training step
is that of `jaxpar.lm.Trainer`: loss, gradient, clip, AdamW. A decode step is one more token of a row that has seen T,
weights as in training; the cache is what it carries. JSON goes to bench/results/mixers.json.
"""

import argparse
import functools
import json
import os
import pathlib
import statistics
import subprocess
import sys
import time

import jax
import jax.numpy as jnp

HERE = pathlib.Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parent))

from lm_models import lm_config  # noqa: E402

from jaxpar.lm import LMConfig, OptimizerConfig, Trainer, num_params  # noqa: E402
from jaxpar.lm.mixers import with_mixer  # noqa: E402
from jaxpar.lm.sample import empty_cache, extend  # noqa: E402
from jaxpar.loop import compile_step  # noqa: E402
from jaxpar.types import UsageError  # noqa: E402

ALL = (
    "attention gla simple_gla retention mlstm mlstm_sig mamba2 gated_delta rwkv6 min_gru para_gru hgrn matmul_free lmu "
    "block_recurrent tcnca"
)
SIZES = {
    "cpu": dict(
        num_layers=2, embed_dim=64, num_heads=4, mlp_dim=192, length=256, rows=4, dtype="float32"
    ),
    "gpu": dict(
        num_layers=12,
        embed_dim=768,
        num_heads=6,
        mlp_dim=2048,
        length=4096,
        rows=8,
        dtype="bfloat16",
    ),
    "tiny": dict(
        num_layers=1, embed_dim=16, num_heads=2, mlp_dim=16, length=16, rows=2, dtype="float32"
    ),
}


def model_of(mixer: str, size: dict) -> LMConfig:
    """Returns the model of a mixer, of attention's number of parameters; matmul_free is hgrn of ternary weights."""
    sizes = {name: value for name, value in size.items() if name not in ("length", "rows")}
    weights, of = ("ternary", "hgrn") if mixer == "matmul_free" else ("full", mixer)
    return with_mixer(lm_config(vocab_size=256, weights=weights, **sizes), of)


def prepared(mixer: str, size: dict) -> dict:
    """Compiles both steps; returns functions that run each once and wait, and what is known without a clock."""
    config, key = model_of(mixer, size), jax.random.key(0)
    trainer = Trainer(config, OptimizerConfig(learning_rate=1e-4), num_steps=10_000)
    tokens = jax.random.randint(key, (size["rows"], size["length"] + 1), 0, 256, jnp.int32)
    batch = {"tokens": tokens[:, :-1], "targets": tokens[:, 1:]}
    held = {"state": jax.jit(lambda key: trainer.init(key))(key)}
    begin = time.perf_counter()
    train = compile_step(trainer, held["state"], batch)
    compile_s = time.perf_counter() - begin
    params = config.stack().unstacked(jax.tree.map(jnp.copy, held["state"].params))
    whole = empty_cache(config, 1, size["length"])
    # Attention's slots are all read, whatever they hold, and a further token takes the place of the first.
    held["cache"] = jax.tree.map(
        jnp.copy, whole.replace(seen=jnp.full_like(whole.seen, size["length"]))
    )
    one = tokens[:1, :1]
    decode = jax.jit(functools.partial(extend, config=config), donate_argnums=2)

    def train_once() -> None:
        held["state"], info = train(key, jnp.int32(0), held["state"], batch)
        jax.block_until_ready(info)

    def decode_once() -> None:
        out, held["cache"] = decode(params, one, held["cache"])
        jax.block_until_ready(out)

    bytes_ = sum(leaf.nbytes for leaf in jax.tree.leaves(held["cache"].layers))
    known = {"params": num_params(config), "cache_bytes": bytes_, "compile_s": compile_s}
    return {"train": train_once, "decode": decode_once, "known": known}


def milliseconds(call, spend_s: float) -> float:
    """Returns the mean ms of calls that fill `spend_s`, one at least."""
    count, begin = 0, time.perf_counter()
    while not count or time.perf_counter() - begin < spend_s:
        call()
        count += 1
    return 1e3 * (time.perf_counter() - begin) / count


def peers(python: str, size: dict, spend_s: float) -> dict:
    """Returns the ms of torch's mixers, timed in a process of its own."""
    request = json.dumps(size | {"spend_s": spend_s})
    command = [python, str(HERE / "peers" / "torch_mixers.py"), request]
    out = subprocess.run(command, capture_output=True, text=True)
    if out.returncode:
        raise SystemExit(f"{' '.join(command)[:200]} failed:\n{out.stderr[-3000:]}")
    return json.loads(out.stdout.strip().splitlines()[-1])


def measure(args: argparse.Namespace, size: dict) -> dict:
    """Times all in turns; returns the rows."""
    rows, ready = {}, {}
    for mixer in args.mixers.split(","):
        print(f"compiling {mixer}", file=sys.stderr, flush=True)
        ready[mixer] = prepared(mixer, size)
        for name in ("train", "decode"):
            ready[mixer][name]()
        rows[mixer] = ready[mixer]["known"] | {"train": [], "decode": []}
    for number in range(args.rounds):
        print(f"round {number + 1} of {args.rounds}", file=sys.stderr, flush=True)
        for mixer, each in ready.items():
            for name in ("train", "decode"):
                rows[mixer][name].append(milliseconds(each[name], args.spend_s))
        for mixer, found in (
            peers(args.peer_python, size, args.spend_s) if args.peer_python else {}
        ).items():
            row = rows.setdefault(mixer, found["known"] | {"train": [], "decode": []})
            for name in ("train", "decode"):
                row[name].append(found[name])
    return rows


def report(rows: dict, size: dict, load: tuple[float, ...]) -> None:
    """Prints the table and writes the file."""
    tokens = size["length"] * size["rows"]
    print(
        "| mixer | parameters | a training step, ms (least) | tokens/s | a decode step, ms (least) | cache, KiB |"
    )
    print("|---|---|---|---|---|---|")
    for mixer, row in rows.items():
        train, decode = (statistics.median(row[name]) for name in ("train", "decode"))
        print(
            f"| {mixer} | {row['params']:,} | {train:.1f} ({min(row['train']):.1f}) | {1e3 * tokens / train:,.0f} | "
            f"{decode:.3f} ({min(row['decode']):.3f}) | {row['cache_bytes'] / 1024:.1f} |"
        )
    where = f"{jax.devices()[0].device_kind}, jax {jax.__version__}, {size}"
    print(f"\n{where}, load of the machine {load[0]:.1f} before and {os.getloadavg()[0]:.1f} after")
    folder = HERE / "results"
    folder.mkdir(exist_ok=True)
    (folder / "mixers.json").write_text(json.dumps({"where": where, "rows": rows}, indent=1))


def main() -> None:
    """Parses flags, measures and reports."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--size", choices=("cpu", "gpu"), default="cpu")
    parser.add_argument("--tiny", action="store_true", help="the smallest model, one round")
    parser.add_argument(
        "--mixers",
        default=",".join(ALL.split()),
        help="of model.mixer.kind=, or matmul_free, with commas",
    )
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--spend-s", type=float, default=0.5, help="for each timing")
    parser.add_argument("--peer-python", default="", help="an interpreter that has torch")
    args = parser.parse_args()
    if args.tiny:
        args.rounds, args.spend_s = 1, 0.0
    size, load = SIZES["tiny" if args.tiny else args.size], os.getloadavg()
    try:
        for mixer in args.mixers.split(","):
            model_of(mixer, size)
    except UsageError as error:
        parser.error(str(error))
    report(measure(args, size), size, load)


if __name__ == "__main__":
    main()
