"""Our side of `bench/data.py`, and what all sides share; a worker of `harness`."""

import json
import os
import pathlib
import time
from collections.abc import Callable, Iterator

import harness
import numpy as np
from finetune_rows import Watch

BLOCK = 16 * 10**6  # bytes of text that are drawn; larger files repeat them under other numbers


def seconds_of() -> tuple[float, float]:
    """Returns the time, and the processor's seconds of this process and of those that it waited for."""
    return time.perf_counter(), sum(os.times()[:4])


def timed(work: Callable[[], dict]) -> dict:
    """Does some work and adds its seconds, and the most memory beside mapped files over that before."""
    with Watch() as watch:
        start = seconds_of()
        found = work()
        end = seconds_of()
    return found | {
        "s": end[0] - start[0],
        "cpu_s": end[1] - start[1],
        "host_bytes": watch.most - watch.before,
    }


def read_batches(batch: Callable[[int], np.ndarray], spend_s: float, again_at: int) -> dict:
    """Reads batches for so many processor seconds; and of a run that goes on at a step, how long its first takes."""
    start = time.perf_counter()
    batch(again_at)
    found, number, begin = {"resumed_s": time.perf_counter() - start, "tokens": 0}, 0, seconds_of()
    while seconds_of()[1] - begin[1] < spend_s:
        for _ in range(8):
            found["tokens"] += batch(number).size
            number += 1
    end = seconds_of()
    return found | {"s": end[0] - begin[0], "cpu_s": end[1] - begin[1]}


def texts_of(path: str) -> Iterator[str]:
    """Yields the texts of a file of JSONL."""
    with open(path, "rb") as file:
        for line in file:
            yield json.loads(line)["text"]


def make(request: dict) -> dict:
    """Writes a file of JSONL: documents of about 2 kB of words drawn by Zipf's law; and a BPE of their symbols."""
    from jaxpar.lm.text.tokenizer import train_bpe

    rng, folder = np.random.default_rng(0), pathlib.Path(request["folder"])
    letters = np.array(list("etaoinshrdlucmfwypvbgkq"))
    words = np.array(["".join(rng.choice(letters, rng.integers(2, 10))) for _ in range(20_000)])
    documents, size = [], 0
    while size < min(BLOCK, request["bytes"]):
        count = int(rng.lognormal(5.5, 0.6))
        documents.append(" ".join(words[np.minimum(rng.zipf(1.2, count), len(words)) - 1]))
        size += len(documents[-1])
    with open(request["path"], "w") as file:
        number = 0
        while file.tell() < request["bytes"]:
            file.writelines(
                f'{{"id": {number + i}, "text": "{text}"}}\n' for i, text in enumerate(documents)
            )
            number += len(documents)
    if not (folder / "tokenizer.json").exists():
        train_bpe(iter(documents[:2000]), 8192).save(folder / "tokenizer.json")
    return {"bytes": os.path.getsize(request["path"])}


def answer(request: dict) -> dict:
    """Does what a row asks for."""
    from jaxpar.lm.text import batches_of
    from jaxpar.lm.text.corpus import DataConfig, open_corpus
    from jaxpar.lm.text.data import Windows
    from jaxpar.lm.text.tokenizer import load_tokenizer

    if request["do"] == "make":
        return make(request)
    path, folder = request["path"], pathlib.Path(request["folder"])
    tokenizer = load_tokenizer(folder) if request["tokenizer"] == "bpe" else None
    if request["row"] == "tokenizer alone":
        assert tokenizer
        texts = list(texts_of(path))
        return timed(lambda: {"tokens": sum(len(tokenizer.encode(text)) for text in texts)})
    length, rows = request["length"], request["rows"]
    config = DataConfig(path=path, split="hash:0.01", seq_len=length, batch_size=rows)

    def opened():
        return open_corpus(config, folder / "cache", tokenizer)

    if request["do"] == "tokenise":
        return timed(
            lambda: {"tokens": sum(len(part) for part in (opened().train, opened().validation))}
        )
    start = time.perf_counter()
    corpus = opened()
    again_s = time.perf_counter() - start
    _, _, layout = request["row"].partition("layout=")
    if layout:
        windows = batches_of(corpus.train, layout, config, 0)
    else:
        windows = Windows(corpus.train, length, rows, 0, pack="packed" in request["row"])
    if (
        request["row"] == "windows alone"
    ):  # what a loop over the same memory map takes, without an order
        data, rng = corpus.train.data, np.random.default_rng(0)
        starts = rng.integers(0, len(data) - length - 1, (1024, rows))

        def batch(step):
            return np.stack([data[i : i + length + 1] for i in starts[step % 1024]]).astype(
                np.int32
            )

        return read_batches(batch, request["spend_s"], request["at"])
    return {"again_s": again_s} | read_batches(
        lambda step: windows(step)["tokens"], request["spend_s"], request["at"]
    )


if __name__ == "__main__":
    harness.serve(answer)
