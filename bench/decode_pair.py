"""A target and its draft for `bench/decode.py`: byte models trained for minutes on Python's own standard library."""

import json
import pathlib
import sysconfig
import time


def texts() -> tuple[bytes, list[bytes]]:
    """Returns the source files of the standard library but its tests, joined, and every 20th apart: held out."""
    root = pathlib.Path(sysconfig.get_paths()["stdlib"])
    paths = sorted(
        path
        for path in root.rglob("*.py")
        if not {"site-packages", "test", "tests"} & set(path.parts)
    )
    files = [path.read_bytes() for path in paths]
    return b"\n".join(text for i, text in enumerate(files) if i % 20), files[::20]


def prompts_of(count: int, length: int) -> list[list[int]]:
    """Returns prompts from the held-out files, spread over their length."""
    files = [text for text in texts()[1] if len(text) > 4 * length]
    starts = [(files[i % len(files)], (0.1 + 0.8 * ((i * 0.618) % 1))) for i in range(count)]
    return [
        list(text[(at := int(share * (len(text) - length))) : at + length])
        for text, share in starts
    ]


def train(config, data: bytes, seconds: float, length: int, rows: int, steps: int = 0) -> tuple:
    """Trains on windows of a text as `train_on` does."""
    import numpy as np

    text = np.frombuffer(data, np.uint8)
    draws = np.random.default_rng(0)

    def batch():
        starts = draws.integers(len(text) - length - 1, size=rows)
        window = text[starts[:, None] + np.arange(length + 1)].astype(np.int32)
        return {"tokens": window[:, :-1], "targets": window[:, 1:]}

    return train_on(config, batch, seconds, steps)


def train_on(config, batch, seconds: float = 0.0, steps: int = 0) -> tuple:
    """Trains on what `batch()` draws, for so many steps or about so many seconds, compiling apart.

    Returns the parameters and what was seen.
    """
    import jax

    from jaxpar.lm import OptimizerConfig, Trainer

    def made(steps: int):
        trainer = Trainer(
            config, OptimizerConfig(name="muon", learning_rate=1e-2, warmup_steps=10), steps
        )
        state = jax.jit(trainer.init)(jax.random.key(0))
        return state, jax.jit(trainer.step, donate_argnums=1).lower(
            jax.random.key(1), state, batch()
        ).compile()

    if not steps:
        state, step = made(
            1000
        )  # how long a step takes is found first, since the schedule needs their number
        times = []
        for _ in range(6):
            begin = time.perf_counter()
            state, info = step(jax.random.key(1), state, batch())
            jax.block_until_ready(info)
            times.append(time.perf_counter() - begin)
        steps = max(12, int(seconds / sorted(times)[2]))
    state, step = made(steps)
    losses, begin = [], time.perf_counter()
    for _ in range(steps):
        state, info = step(jax.random.key(1), state, batch())
        losses.append(float(info["loss"]))
        if seconds and time.perf_counter() - begin > 1.5 * seconds + 1:
            break  # somebody else took the machine
    said = {"steps": len(losses), "of": steps, "loss": sum(losses[-20:]) / len(losses[-20:])}
    tokens = len(losses) * batch()["tokens"].size
    return state.params, said | {"tokens": tokens, "seconds": time.perf_counter() - begin}


def grown(folder: pathlib.Path, units: int) -> pathlib.Path:
    """Returns the folder of the same function with more weights: random MLP units that nothing after them reads.

    What a pass costs is that of a model which would take hours to train, and what it says that of the small one.
    """
    import jax
    import jax.numpy as jnp
    from lm_models import with_sizes

    from jaxpar.lm import from_hf, to_hf

    into = folder.with_name(f"{folder.name}-{units}")
    if into.exists():
        return into
    config, params = from_hf(folder, dtype="float32")
    layers, more = dict(params["layers"]), units - config.mlp.dim
    for name, key in zip(("w_gate", "w_up"), jax.random.split(jax.random.key(0)), strict=True):
        noise = 0.02 * jax.random.normal(key, (*layers[name].shape[:2], more))
        layers[name] = jnp.concatenate([layers[name], noise], 2)
    layers["w_down"] = jnp.pad(layers["w_down"], ((0, 0), (0, more), (0, 0)))
    to_hf(params | {"layers": layers}, with_sizes(config, mlp_dim=units), into)
    return into


def make(request: dict) -> dict:
    """Trains what its folder lacks; returns the folders of both, and what training said."""
    from lm_models import lm_config

    from jaxpar.lm import to_hf

    said, folders = {}, {}
    for name in ("target", "draft"):
        folder = pathlib.Path(
            request.get(f"{name}_folder") or pathlib.Path(request["folder"]) / name
        )
        folders[name] = str(folder)
        notes = folder.with_suffix(".json")
        if not folder.exists():
            shape = lm_config(vocab_size=256, dtype="float32", **request[name])
            params, said[name] = train(
                shape,
                texts()[0],
                request["train_s"][name],
                request["length"],
                request["train_rows"],
            )
            to_hf(params, shape, folder)
            notes.write_text(json.dumps(said[name]))
        elif notes.exists():
            said[name] = json.loads(notes.read_text())
    if units := request.get("grow"):
        folders["target"] = str(grown(pathlib.Path(folders["target"]), units))
    prompts = prompts_of(request["count"], request["prompt"])
    return {"said": said, "folders": folders, "prompts": prompts}
