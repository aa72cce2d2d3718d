"""What does fine-tuning cost on one GPU: all weights or adapters, packed or not, beside transformers? And loading?

    python bench/finetune.py                                # one GPU: the 1B Llama, 4 rows of 2,048; an 8B folder
    python bench/finetune.py --cases 1x2048 --only full     # one row of 2,048; rows whose name has one of these words
    python bench/finetune.py --cases load --load-gb 16 --folder /big/disk
    python bench/finetune.py --peer-python PYTHON --jobs 4  # transformers' interpreter; ours compiled side by side
    python bench/finetune.py --override remat=names --override loss_chunk=2048
    python bench/finetune.py --tiny                         # any machine: checks that the script runs

A step is the whole one of `jaxpar.lm.Trainer`: loss, gradient, clip, AdamW; bfloat16 where layers
multiply, float32 master weights, random numbers for weights and tokens. LoRA is of rank 16 on all products of the
layers; its base is kept as the row's name says, float32 if it says nothing. "names" makes again in its backward pass
what lies between products that are kept (model.execution.remat=names
model.execution.loss_chunk=2048), the others nothing. "packed" has
documents of 64 to 1,024 tokens a row, which do not see each other, and is timed in turns with the same batch unpacked
("of unpacked" is its tokens/s by that one's). The peer is `torch.compile` of transformers' LlamaForCausalLM with SDPA
and fused AdamW: once under bfloat16 autocast with float32 weights, as ours, and once with weights, gradients and
moments all in bfloat16.

Every row is a process of its own and is printed as soon as it is measured. "step" is what the compiled program asks
for (arguments, results that are not arguments, temporaries), of torch the most that was allocated while it was timed;
"held" is the most that the process held on the device, beginning included. "of full" compares with "jaxpar full":
speed, and memory of the step.

"load" reads a Llama folder of random numbers, of 8B's layers and as many as make `--load-gb`, to the device, once in
the file's bfloat16 and once as float32, as `init=hf:folder` does. "disk" reads the same files without looking at them,
by eight threads, and "of disk" is by its rate; the system is asked to drop its copy of the files first. "host" is the
most memory that the process had beside files it maps, over what it had before.
"""

import argparse
import concurrent.futures
import pathlib
import shutil
import sys
import tempfile

HERE = pathlib.Path(__file__).resolve().parent
sys.path[:0] = [str(HERE.parent), str(HERE)]

import harness  # noqa: E402

LLAMA_1B = dict(
    vocab_size=128256, max_seq_len=8192, num_layers=16, embed_dim=2048, num_heads=32, num_kv_heads=8, mlp_dim=8192,
    rope_theta=500000.0, tied=True, dtype="bfloat16",
)  # fmt: skip
TINY = LLAMA_1B | dict(
    vocab_size=256, num_layers=2, embed_dim=64, num_heads=4, num_kv_heads=2, mlp_dim=128
)
HOW = dict(low_logits=True, loss_chunk=8192, scan_layers=False)
"""How ours computes."""
NAMES = dict(remat="names", loss_chunk=2048)
"""How it does in less memory, as `preset=finetune`."""

OURS = {
    "jaxpar full": {},
    "jaxpar full packed": {},
    "jaxpar lora": {"base": "full"},
    "jaxpar lora bfloat16": {"base": "bfloat16"},
    "jaxpar lora bfloat16 names": {"base": "bfloat16"},
    "jaxpar lora int8 names": {"base": "int8"},
    "jaxpar lora nf4 names": {"base": "nf4"},
}
PEERS = ("transformers full float32", "transformers full bfloat16")
LOADS = ("disk", "jaxpar load bfloat16", "jaxpar load float32")
CASES = {"4x2048": (4, 2048), "1x2048": (1, 2048), "load": ()}
LOAD_8B = dict(
    vocab_size=128256, embed_dim=4096, num_heads=32, num_kv_heads=8, mlp_dim=14336, max_seq_len=8192
)
LOAD_TINY = dict(
    vocab_size=4096, embed_dim=256, num_heads=4, num_kv_heads=2, mlp_dim=512, max_seq_len=64
)


def steps_of(name: str, args: argparse.Namespace) -> list[dict]:
    """Returns the rows of a training case, the peers first, so that ours can be told by them."""
    rows, length = (2, 64) if args.tiny else CASES[name]
    given = {key: literal(value) for key, value in (each.split("=", 1) for each in args.override)}
    common = {"rows": rows, "length": length, "spend_s": args.spend_s, "jobs": args.jobs}
    shape = TINY if args.tiny else LLAMA_1B
    found = [
        common | {"do": "step", "row": row, "side": "torch", "model": shape}
        for row in PEERS
        if not args.no_peer
    ]
    for row, adapter in OURS.items():
        adapter = adapter | {"kind": "lora", "rank": 16, "alpha": 32.0} if adapter else {}
        model = shape | HOW | (NAMES if "names" in row else {}) | given
        said = {"do": "step", "row": row, "side": "jaxpar", "adapter": adapter, "model": model}
        found.append(common | said)
    return found


def loads_of(args: argparse.Namespace, folder: pathlib.Path) -> list[dict]:
    """Returns the rows of loading."""
    shape = LOAD_TINY if args.tiny else LOAD_8B
    common = {
        "do": "load",
        "side": "jaxpar",
        "model": shape,
        "bytes": 1e9 * args.load_gb,
        "folder": str(folder),
    }
    return [common | {"row": row} for row in LOADS]


def literal(text: str) -> int | float | bool | str:
    """Returns what a flag's value is: a truth, a number, or a name."""
    if text in ("true", "false"):
        return text == "true"
    for kind in (int, float):
        try:
            return kind(text)
        except ValueError:
            pass
    return text


COLUMNS = {
    "row": lambda r: r["row"],
    "ms (least)": lambda r: f"{r['ms']:.2f} ({r['least_ms']:.2f})",
    "tokens/s": lambda r: f"{r['tokens_per_s']:,.0f}",
    "of peer": lambda r: f"{r['of_peer']:.2f}x",
    "of full": lambda r: f"{r['of_full']:.2f}x",
    "of unpacked": lambda r: f"{r['of_unpacked']:.3f}x",
    "step GiB": lambda r: f"{r['step_bytes'] / 2**30:.2f}",
    "of full's": lambda r: f"{r['bytes_of_full']:.2f}",
    "held GiB": lambda r: f"{r['held_bytes'] / 2**30:.2f}",
    "compile s": lambda r: f"{r['compile_s']:.1f}",
    "note": lambda r: r.get("note", ""),
}
LOAD_COLUMNS = {
    "row": lambda r: r["row"],
    "GB": lambda r: f"{r['read_bytes'] / 1e9:.2f}",
    "s": lambda r: f"{r['s']:.2f}",
    "GB/s": lambda r: f"{r['read_bytes'] / r['s'] / 1e9:.2f}",
    "of disk": lambda r: f"{100 * r['of_disk']:.0f} %",
    "host GiB": lambda r: f"{r['host_bytes'] / 2**30:.2f}",
    "largest tensor GiB": lambda r: f"{r['largest_bytes'] / 2**30:.2f}",
    "note": lambda r: r.get("note", ""),
}


def judge(row: dict, seen: list[dict]) -> dict:
    """Adds to a row its ratios to those measured before it."""
    timed = {each["row"]: each for each in seen if "ms" in each}
    if "ms" not in row:
        return row
    row["tokens_per_s"] = 1e3 * row["rows"] * row["length"] / row["ms"]
    peers = [each["ms"] for name, each in timed.items() if name in PEERS]
    if row["side"] == "jaxpar" and peers:
        row["of_peer"] = min(peers) / row["ms"]
    if (full := timed.get("jaxpar full")) and "lora" in row["row"]:
        row |= {
            "of_full": full["ms"] / row["ms"],
            "bytes_of_full": row["step_bytes"] / full["step_bytes"],
        }
    return row


def wanted(rows: list[dict], only: str | None) -> list[dict]:
    """Returns the rows whose name has one of the words; the disk's rate is always asked for."""
    words = only.split(",") if only else [""]
    return [
        row for row in rows if row["row"] == "disk" or any(word in row["row"] for word in words)
    ]


def train(name: str, bench: harness.Bench, table: harness.Table, args: argparse.Namespace) -> None:
    """Measures a training case."""
    rows, seen = wanted(steps_of(name, args), args.only), []
    table.columns = COLUMNS
    table.head(f"{name}, {'tiny' if args.tiny else '1B Llama'}")
    if args.jobs > 1:  # into the cache of compiled programs, from which the rows then take them
        with concurrent.futures.ThreadPoolExecutor(args.jobs) as pool:
            ours = [row for row in rows if row["side"] == "jaxpar"]
            bench.sides |= {f"job {at}": bench.sides["jaxpar"] for at in range(len(ours))}
            list(
                pool.map(
                    lambda at: bench.ask(f"job {at}", ours[at] | {"do": "compile"}),
                    range(len(ours)),
                )
            )
        bench.close()
    for row in rows:
        seen.append(judge(row | bench.ask(row["side"], row), seen))
        bench.close()  # the next row gets a process of its own
        table.add(seen[-1])


def load(bench: harness.Bench, table: harness.Table, args: argparse.Namespace) -> None:
    """Measures loading, from a folder that is made for it and then removed."""
    parent = pathlib.Path(args.folder) if args.folder else None
    folder = pathlib.Path(tempfile.mkdtemp(prefix="finetune-", dir=parent))
    table.columns = LOAD_COLUMNS
    table.head(f"load, {args.load_gb} GB")
    try:
        rows, disk = wanted(loads_of(args, folder), args.only), None
        made = bench.ask("jaxpar", rows[0] | {"do": "write"}, 3 * args.row_s)
        bench.close()
        for row in rows:
            row |= made if "failed" in made else bench.ask(row["side"], row)
            bench.close()
            if row["row"] == "disk":
                disk = row
            elif disk and "s" in row and "s" in disk:
                row["of_disk"] = row["read_bytes"] / row["s"] / (disk["read_bytes"] / disk["s"])
            table.add(row)
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def measure(args: argparse.Namespace) -> None:
    """Measures every row of the chosen cases."""
    with tempfile.TemporaryDirectory(prefix="finetune-programs-") as cache:
        env = {
            "PYTHONPATH": str(HERE.parent), "XLA_PYTHON_CLIENT_PREALLOCATE": "false", "HF_HUB_OFFLINE": "1",
            "JAX_COMPILATION_CACHE_DIR": args.cache or cache, "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
        }  # fmt: skip
        if args.tiny:
            env |= {"JAX_PLATFORMS": "cpu", "CUDA_VISIBLE_DEVICES": ""}
        sides: dict[str, tuple] = {"jaxpar": ([str(HERE / "finetune_rows.py")], env)}
        sides["torch"] = ([str(HERE / "peers" / "transformers_finetune.py")], env, args.peer_python)
        bench, table = harness.Bench(sides, args.budget_s, args.row_s), harness.Table({}, args.out)
        try:
            for name in harness.chosen(args.cases, CASES):
                if name == "load":
                    load(bench, table, args)
                else:
                    train(name, bench, table, args)
        finally:
            bench.close()


def main() -> None:
    """Parses flags and measures."""
    parser = harness.arguments(__doc__, CASES, "finetune.json", 900)
    parser.set_defaults(row_s=150, spend_s=3.0)
    parser.add_argument(
        "--override", action="append", default=[], help="a field of our model, as name=value"
    )
    parser.add_argument(
        "--load-gb", type=float, default=16.0, help="size of the folder that is loaded"
    )
    parser.add_argument(
        "--folder", help="where that folder is made; by default where temporary files are"
    )
    parser.add_argument(
        "--cache", help="a folder of compiled programs to keep; by default a temporary one"
    )
    parser.add_argument(
        "--peer-python", default=sys.executable, help="the interpreter that has transformers"
    )
    args = parser.parse_args()
    if args.tiny:
        args.spend_s, args.load_gb = 0.05, min(args.load_gb, 0.02)
    measure(args)


if __name__ == "__main__":
    main()
