"""What `bench/decode.py` measures: models, shapes and rows of each case, for a GPU, for two CPU cores, and tiny."""

LLAMA = dict(
    kind="llama", vocab_size=128256, num_layers=16, embed_dim=2048, num_heads=32, num_kv_heads=8, mlp_dim=8192,
    dtype="bfloat16",
)  # fmt: skip
GPT2 = dict(
    kind="gpt2", vocab_size=50257, num_layers=12, embed_dim=768, num_heads=12, num_kv_heads=12, mlp_dim=3072,
    dtype="bfloat16",
)  # fmt: skip
PROBE = dict(
    kind="llama", vocab_size=512, num_layers=6, embed_dim=512, num_heads=8, num_kv_heads=4, mlp_dim=1536,
    dtype="float32",
)  # fmt: skip
# As large as weights must be for the likeliest token to be one of many at all.
SMALL = dict(
    kind="llama", vocab_size=256, num_layers=4, embed_dim=128, num_heads=4, num_kv_heads=4, mlp_dim=384,
    dtype="float32", init_std=0.1,
)  # fmt: skip
TINY = SMALL | dict(num_layers=2, embed_dim=32, mlp_dim=64)
TINY_GPT2 = dict(
    kind="gpt2",
    vocab_size=256,
    num_layers=2,
    embed_dim=32,
    num_heads=4,
    num_kv_heads=4,
    mlp_dim=128,
    dtype="float32",
)

OURS, OLDER = {"jaxpar": ["jaxpar"]}, {"older": ["older jaxpar"]}
TORCH = {
    "torch": ["torch compiled groups", "torch compiled sdpa", "torch compiled groups autotuned"]
}
TORCH_CPU = {"torch": ["torch compiled groups"]}
STATIC = {"transformers": ["transformers static"]}
GENERATE = {
    "transformers": ["transformers dynamic", "transformers static", "transformers compiled"]
}
READERS = {
    "jaxpar": ["jaxpar shared", "jaxpar rows"],
    "torch": ["torch compiled groups", "torch compiled sdpa"],
}
READERS_CPU = READERS | TORCH_CPU
ATTEND = {
    "jaxpar": [f"jaxpar block {size}" for size in (64, 256, 1024)],
    "torch": ["torch SDPA", "torch groups", "torch flex"],
}
PROMPT = {"jaxpar": ["jaxpar prefill"], "torch": ["torch attention and products"]}


def steps(
    model: dict, rows: int | list, prompt: int, new: int, sides: dict, about: str, **more
) -> dict:
    """A case that draws tokens."""
    shape = dict(kind="steps", model=model, rows=rows, prompt=prompt, new=new, sides=sides)
    text = f"{about}, {model['num_layers']} layers of {model['embed_dim']}, {prompt} tokens and {new} new, "
    return shape | {"about": text + model["dtype"]} | more


def attend(shape: tuple, dtype: str, sides: dict) -> dict:
    """A case that attends with one token."""
    about = f"attention of one token, (B, H, G, S, K) = {shape}, {dtype}"
    return dict(kind="attend", shape=shape, dtype=dtype, sides=sides, about=about)


def prompts(model: dict, length: int) -> dict:
    """A case that reads a prompt."""
    about = f"a prompt of {length} tokens, {model['num_layers']} layers of {model['embed_dim']}, {model['dtype']}"
    return dict(kind="prompt", model=model, rows=1, prompt=length, sides=PROMPT, about=about)


def drafts(
    names: list[str], rows: int | list, new: int, about: str, temperature=0.0, **more
) -> dict:
    """A case of the pair."""
    sides = {"jaxpar": [f"jaxpar {name}" for name in names]}
    case = dict(
        kind="drafts",
        rows=rows,
        new=new,
        temperature=temperature,
        sides=sides,
        about=f"{about}, {new} new",
    )
    return case | more


ALL = ["plain", "copy 8", "model 4", "lookahead", "jacobi 8"]
MORE = ["copy 4", "copy 8", "model 2", "model 4", "model 6", "lookahead", "jacobi 4", "jacobi 8"]
SAME = "tokens that differ from plain decoding one row at a time"
ASSISTED = {
    "jaxpar": ["jaxpar plain", "jaxpar copy 4", "jaxpar copy 8", "jaxpar model 4"],
    "transformers": ["transformers dynamic", "transformers lookup", "transformers assistant"],
}


def speculation(
    new: int, rows: list[int], many: int, few: int, kinds: list[str], more: list[str]
) -> dict:
    """Returns the S cases of one size: batches `rows`, how many prompts where all or few are continued, and drafts."""
    clock = "wall clock, prompts included"
    return {
        "S1.greedy": drafts(kinds, min(8, many), new, SAME, checked=True, rounds=0, count=many),
        "S1.drawn": drafts(kinds, min(8, many), new, SAME, 0.8, checked=True, rounds=0, count=many),
        "S2.greedy": drafts(more, many, new, "tokens a pass of the target", rounds=0, count=many),
        "S2.drawn": drafts(more, many, new, "tokens a pass of the target", 0.8, rounds=0, count=many),
        "S3": drafts(kinds, rows, new, clock, count=max(rows)),
        "S4": dict(
            kind="coupling", rows=min(8, many), new=new, temperature=0.8, sides={"jaxpar": ["jaxpar coupled"]},
            about="drafts kept by the shared noise", rounds=0, count=many,
        ),
        "S5": dict(
            kind="drafts", rows=1, new=new, temperature=0.0, sides=ASSISTED, about=f"speed-up, {new} new", length=4,
            count=few, shown=True,
        ),
    }  # fmt: skip


CASES = {
    "D1": {
        "full": steps(LLAMA, 1, 64, 512, OURS | TORCH | STATIC, "one row"),
        "tiny": steps(TINY, 1, 8, 5, OURS | TORCH | STATIC, "one row"),
    },
    "D2.1k": {
        "full": steps(LLAMA, 64, 896, 128, OURS | TORCH | STATIC, "64 rows"),
        "tiny": steps(TINY, 3, 8, 5, OURS | TORCH_CPU | STATIC, "three rows"),
    },
    "D2.2k": {"full": steps(LLAMA, 64, 1920, 128, OURS | TORCH | STATIC, "64 rows")},
    "D3": {
        "full": steps(GPT2, 1, 64, 512, OURS | {"transformers": ["transformers dynamic", "transformers static"]},
                      "GPT-2"),
        "tiny": steps(TINY_GPT2, 1, 8, 5, OURS | {"transformers": ["transformers dynamic"]}, "GPT-2"),
    },
    "D4.short": {
        "full": steps(LLAMA, 64, 824, 160, OURS | OLDER, "beside an older checkout"),
        "cpu": steps(SMALL, 1, 64, 128, OURS | OLDER, "beside an older checkout"),
        "tiny": steps(TINY, 1, 8, 5, OURS | OLDER, "beside an older checkout"),
    },
    "D4.long": {
        "full": steps(LLAMA, 1, 1920, 128, OURS | OLDER, "beside an older checkout"),
        "cpu": steps(PROBE, 4, 1919, 129, OURS | OLDER, "beside an older checkout"),
    },
    "D6": {
        "full": steps(LLAMA, 1, 8192, 128, READERS, "64 readers of one prefix", readers=64),
        "cpu": steps(SMALL | {"num_kv_heads": 2}, 1, 2048, 33, READERS_CPU, "64 readers of one prefix",
                     readers=64, rounds=3),
        "tiny": steps(TINY, 1, 8, 5, READERS_CPU, "3 readers of one prefix", readers=3),
    },
    "D7": {
        "full": attend((1, 32, 8, 131072, 128), "bfloat16", ATTEND),
        "cpu": attend((1, 32, 8, 16384, 128), "float32", ATTEND | {"torch": ["torch SDPA", "torch groups"]}),
        "tiny": attend((1, 4, 2, 128, 8), "float32", {"jaxpar": ["jaxpar block 64"], "torch": ["torch SDPA"]}),
    },
    "D10": {
        "full": steps(SMALL, [1, 16], 64, 128, OURS | GENERATE, "beside transformers", exported=True),
        "cpu": steps(SMALL, [1, 16], 64, 128, OURS | GENERATE | TORCH_CPU, "beside transformers", exported=True),
        "tiny": steps(TINY, 2, 8, 5, OURS | {"transformers": ["transformers dynamic", "transformers static"]},
                      "beside transformers", exported=True),
    },
    "D11": {
        "full": prompts(LLAMA, 32768),
        "cpu": prompts(PROBE, 4096),
        "tiny": prompts(TINY, 64),
    },
}  # fmt: skip

PAIRS = {
    "full": dict(
        target=dict(num_layers=8, embed_dim=512, num_heads=8, mlp_dim=1536),
        draft=dict(num_layers=3, embed_dim=192, num_heads=4, mlp_dim=512),
        train_s=dict(target=150, draft=40), length=512, train_rows=32, count=512, prompt=128,
    ),
    "cpu": dict(
        target=dict(num_layers=4, embed_dim=256, num_heads=4, mlp_dim=768),
        draft=dict(num_layers=2, embed_dim=96, num_heads=4, mlp_dim=256),
        train_s=dict(target=270, draft=80), length=128, train_rows=8, count=32, prompt=128,
    ),
    "tiny": dict(
        target=dict(num_layers=2, embed_dim=32, num_heads=4, mlp_dim=64),
        draft=dict(num_layers=1, embed_dim=16, num_heads=2, mlp_dim=32),
        train_s=dict(target=0.1, draft=0.1), length=16, train_rows=2, count=4, prompt=16,
    ),
}  # fmt: skip
"""The byte models that are trained where no folders are given, and the prompts held out."""

for _size, _made in (
    ("full", speculation(256, [1, 4, 16, 64], 512, 16, ALL, MORE)),
    ("cpu", speculation(128, [1, 4, 16], 32, 8, ALL, MORE)),
    ("tiny", speculation(6, [2], 2, 2, ["plain", "copy 2", "model 2"], ["lookahead", "jacobi 2"])),
):
    for _name, _case in _made.items():
        CASES.setdefault(_name, {})[_size] = _case


def least_bytes(case: dict, parameters: int) -> float:
    """Returns the bytes that a step must read: all weights once, and of a cache what is seen, once a prompt."""
    if case["kind"] == "attend":
        batch, _, groups, slots, size = case["shape"]
        return 2 * batch * groups * slots * size * WIDTHS[case["dtype"]]
    if case["kind"] != "steps" or not isinstance(case["rows"], int):
        return 0
    model, readers = case["model"], case.get("readers", 1)
    width = WIDTHS[model["dtype"]]
    token = (
        2
        * model["num_layers"]
        * model["num_kv_heads"]
        * (model["embed_dim"] // model["num_heads"])
        * width
    )
    return parameters * width + case["rows"] * (case["prompt"] + readers * case["new"] / 2) * token


WIDTHS = {"float32": 4, "bfloat16": 2}
