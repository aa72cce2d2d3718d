"""JAX's side of `bench/finetune.py`: a training step, or loading a folder; a worker of `harness`."""

import concurrent.futures
import json
import math
import os
import pathlib
import statistics
import threading
import time

import harness
import numpy as np

SHARD = 2**30  # bytes of a file, unless a tensor is larger
BLOCK = 2**23  # bytes that the disk's rate is read in


def documents(rows: int, length: int) -> dict:
    """Returns segments, positions and weights of rows packed with documents of 1/32 to 1/2 of a row each."""
    rng = np.random.default_rng(0)
    segments, positions = np.ones((2, rows, length), np.int32)
    weights = np.ones((rows, length), np.float32)
    for row in range(rows):
        begin, number = 0, 1
        while begin < length:
            end = min(length, begin + int(rng.integers(max(2, length // 32), max(3, length // 2))))
            segments[row, begin:end], positions[row, begin:end] = number, np.arange(end - begin)
            weights[row, end - 1] = 0  # its target is of the next document
            begin, number = end, number + 1
    return {"segments": segments, "positions": positions, "weights": weights}


class Step:
    """A training step that is compiled: of the parameters themselves, or of adapters."""

    def __init__(self, request: dict):
        """Compiles, from shapes alone."""
        import jax
        from lm_models import lm_config

        from jaxpar.lm import AdapterConfig, OptimizerConfig, Trainer
        from jaxpar.loop import compile_step

        model, self.adapter = lm_config(**request["model"]), request["adapter"]
        optimizer = OptimizerConfig(learning_rate=1e-5)
        adapter = AdapterConfig(**(self.adapter or {}))
        self.trainer = Trainer(model, optimizer, num_steps=10_000, adapter=adapter)
        self.spend_s, self.size = request["spend_s"], (request["rows"], request["length"])
        rng = np.random.default_rng(1)
        tokens = rng.integers(0, model.vocab_size, (self.size[0], self.size[1] + 1), np.int32)
        batches = {"plain": {"tokens": tokens[:, :-1], "targets": tokens[:, 1:]}}
        if "packed" in request["row"]:
            batches["packed"] = batches["plain"] | documents(*self.size)
        self.batches = {
            name: jax.tree.map(jax.numpy.asarray, batch) for name, batch in batches.items()
        }
        self.shapes, begin = (
            jax.eval_shape(self.trainer.init, jax.random.key(0)),
            time.perf_counter(),
        )
        self.programs = {
            name: compile_step(self.trainer, self.shapes, batch)
            for name, batch in self.batches.items()
        }
        self.compile_s = time.perf_counter() - begin

    def times(self) -> dict:
        """Times the batches in turns; of several, the row is the last."""
        import jax

        key, state, count = jax.random.key(1), jax.jit(self.trainer.init)(jax.random.key(0)), 0

        def seconds(name: str, calls: int) -> float:
            nonlocal state, count
            begin, info = time.perf_counter(), {}
            for _ in range(calls):
                state, info = self.programs[name](
                    key, jax.numpy.int32(count), state, self.batches[name]
                )
                count += 1
            if not bool(jax.numpy.isfinite(info["loss"]).all()):  # waits, too
                raise ValueError("the loss is not finite")
            return (time.perf_counter() - begin) / calls

        once = max(min(seconds(name, 1) for _ in range(2)) for name in self.programs)
        rounds, calls = 7, max(1, min(20, round(self.spend_s / (7 * once * len(self.programs)))))
        taken = {name: [] for name in self.programs}
        for _ in range(rounds):
            for name in self.programs:
                taken[name].append(1e3 * seconds(name, calls))
        names = list(taken)
        row = {
            "ms": statistics.median(taken[names[-1]]),
            "least_ms": min(taken[names[-1]]),
            "rounds": taken,
        }
        if len(names) > 1:
            row["of_unpacked"] = statistics.median(taken["plain"]) / row["ms"]
        return row | self.memory(names[-1])

    def memory(self, name: str) -> dict:
        """Returns the bytes of a step, and the most that were held."""
        import jax

        stats = self.programs[name].memory_analysis()
        assert stats
        kept = stats.output_size_in_bytes - stats.alias_size_in_bytes
        held = (jax.devices()[0].memory_stats() or {}).get("peak_bytes_in_use")
        return {
            "step_bytes": stats.argument_size_in_bytes + stats.temp_size_in_bytes + max(0, kept),
            "argument_bytes": stats.argument_size_in_bytes,
            "temp_bytes": stats.temp_size_in_bytes,
        } | ({"held_bytes": held} if held else {})


def layers_of(model: dict, size: float) -> int:
    """Returns how many layers make a folder of so many bytes in bfloat16."""
    width, share = model["embed_dim"], model["num_kv_heads"] / model["num_heads"]
    layer = 2 * width * (2 * width + 2 * width * share + 3 * model["mlp_dim"])
    return max(1, round((size - 4 * model["vocab_size"] * width) / layer))


def tensors_of(model: dict, layers: int) -> dict[str, tuple[int, ...]]:
    """Returns the shapes of a Llama folder's tensors."""
    width, mlp = model["embed_dim"], model["mlp_dim"]
    kv = width * model["num_kv_heads"] // model["num_heads"]
    one = {
        "input_layernorm": (width,), "post_attention_layernorm": (width,), "self_attn.q_proj": (width, width),
        "self_attn.k_proj": (kv, width), "self_attn.v_proj": (kv, width), "self_attn.o_proj": (width, width),
        "mlp.gate_proj": (mlp, width), "mlp.up_proj": (mlp, width), "mlp.down_proj": (width, mlp),
    }  # fmt: skip
    ends = {
        "model.embed_tokens": (model["vocab_size"], width),
        "lm_head": (model["vocab_size"], width),
    }
    every = {
        f"model.layers.{layer}.{name}": shape
        for layer in range(layers)
        for name, shape in one.items()
    }
    return {
        f"{name}.weight": shape for name, shape in (ends | every | {"model.norm": (width,)}).items()
    }


def write(request: dict) -> dict:
    """Makes the folder: its numbers are random bits of bfloat16 between 2^-7 and 2^-5, either sign."""
    folder, model = pathlib.Path(request["folder"]), request["model"]
    layers = layers_of(model, request["bytes"])
    config = {
        "architectures": ["LlamaForCausalLM"], "model_type": "llama", "vocab_size": model["vocab_size"],
        "hidden_size": model["embed_dim"], "num_hidden_layers": layers, "intermediate_size": model["mlp_dim"],
        "num_attention_heads": model["num_heads"], "num_key_value_heads": model["num_kv_heads"], "rms_norm_eps": 1e-5,
        "max_position_embeddings": model["max_seq_len"], "rope_theta": 500000.0, "tie_word_embeddings": False,
        "hidden_act": "silu", "torch_dtype": "bfloat16",
    }  # fmt: skip
    (folder / "config.json").write_text(json.dumps(config))
    files: list[dict] = [{}]
    for name, shape in tensors_of(model, layers).items():
        if (
            files[-1]
            and sum(2 * math.prod(each) for each in files[-1].values()) + 2 * math.prod(shape)
            > SHARD
        ):
            files.append({})
        files[-1][name] = shape
    names = [
        f"model-{number + 1:05}-of-{len(files):05}.safetensors" for number in range(len(files))
    ]
    where = {tensor: name for name, tensors in zip(names, files, strict=True) for tensor in tensors}
    (folder / "model.safetensors.index.json").write_text(
        json.dumps({"metadata": {}, "weight_map": where})
    )
    begin = time.perf_counter()
    with concurrent.futures.ThreadPoolExecutor(8) as pool:
        list(
            pool.map(
                lambda number: write_file(folder / names[number], files[number], number),
                range(len(files)),
            )
        )
    return {"write_s": time.perf_counter() - begin}


def write_file(path: pathlib.Path, tensors: dict[str, tuple[int, ...]], seed: int) -> None:
    """Writes a safetensors file by its format, from a block of random numbers that is repeated, and has it on disk."""
    bits = np.random.default_rng(seed).integers(0, 2**16, 2**22 + 1, np.uint16)
    block = ((bits & 0x80FF) | 0x3C00).tobytes()
    header, end = {}, 0
    for name, shape in tensors.items():
        begin, end = end, end + 2 * math.prod(shape)
        header[name] = {"dtype": "BF16", "shape": shape, "data_offsets": [begin, end]}
    head = json.dumps(header).encode()
    head += b" " * (-len(head) % 8)
    with path.open("wb") as file:
        file.write(len(head).to_bytes(8, "little") + head)
        while end:
            file.write(memoryview(block)[: min(end, len(block))])
            end -= min(end, len(block))
        file.flush()
        os.fsync(file.fileno())


def forget(paths: list[pathlib.Path]) -> None:
    """Asks the system to drop its copy of files, which are on disk."""
    for path in paths:
        with path.open("rb") as file:
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def read_through(path: pathlib.Path) -> None:
    """Reads a file and does nothing with it."""
    block = bytearray(BLOCK)
    with path.open("rb", buffering=0) as file:
        while file.readinto(block):
            pass


def own_bytes() -> int:
    """Returns the memory of this process beside files it maps; all of it where the system does not tell them apart."""
    text = pathlib.Path("/proc/self/status").read_text()
    lines = dict(line.split(":", 1) for line in text.splitlines() if ":" in line)
    names = ("RssAnon", "RssShmem") if "RssAnon" in lines else ("VmRSS",)
    return sum(int(lines[name].split()[0]) * 1024 for name in names if name in lines)


class Watch:
    """The most memory of this process while inside, over that before."""

    def __enter__(self) -> "Watch":
        """Begins to look, a hundred times a second."""
        self.before = self.most = own_bytes()
        self.end = threading.Event()
        self.thread = threading.Thread(target=self.look, daemon=True)
        self.thread.start()
        return self

    def look(self) -> None:
        """Looks until the end."""
        while not self.end.wait(0.01):
            self.most = max(self.most, own_bytes())

    def __exit__(self, *_: object) -> None:
        """Looks a last time."""
        self.end.set()
        self.thread.join()
        self.most = max(self.most, own_bytes())


def load(request: dict) -> dict:
    """Reads the folder: through, or to the device."""
    folder = pathlib.Path(request["folder"])
    files = sorted(folder.glob("*.safetensors"))
    forget(files)
    said = {"read_bytes": sum(path.stat().st_size for path in files)}
    if request["row"] == "disk":
        begin = time.perf_counter()
        with concurrent.futures.ThreadPoolExecutor(8) as pool:
            list(pool.map(read_through, files))
        return said | {"s": time.perf_counter() - begin}
    import jax

    from jaxpar.lm import from_hf

    model = request["model"]
    jax.block_until_ready(
        jax.numpy.zeros(8) + 1
    )  # the device is awake, and its driver's memory taken
    with Watch() as watch:
        begin = time.perf_counter()
        params = from_hf(folder, param_dtype=request["row"].split()[-1])[1]
        jax.block_until_ready(params)
        seconds = time.perf_counter() - begin
    largest = max(2 * math.prod(shape) for shape in tensors_of(model, 1).values())
    on_host = jax.default_backend() == "cpu"
    note = {"note": "the parameters are in the host's memory too"} if on_host else {}
    return (
        said
        | note
        | {"s": seconds, "host_bytes": watch.most - watch.before, "largest_bytes": largest}
    )


def answer(request: dict) -> dict:
    """Does what is asked: write, load, compile or step."""
    if request["do"] in ("write", "load"):
        return (write if request["do"] == "write" else load)(request)
    import jax

    step = Step(request)
    if request["do"] == "compile":
        return {}
    said = {"compile_s": step.compile_s} if request["jobs"] == 1 else {}
    return (
        said
        | step.times()
        | {"device": jax.devices()[0].device_kind, "version": f"jax {jax.__version__}"}
    )


if __name__ == "__main__":
    harness.serve(answer)
