"""Peers of `bench/data.py`: Hugging Face datasets and grain; a worker of `harness`."""

import pathlib
import sys
import time

HERE = pathlib.Path(__file__).resolve().parent
sys.path[:0] = [str(HERE.parent)]

import harness  # noqa: E402
import numpy as np  # noqa: E402
from data_rows import read_batches, timed  # noqa: E402


def tokenised(request: dict):
    """Returns the tokens of each document, as `datasets` keeps them in its cache."""
    import datasets

    datasets.disable_progress_bars()
    folder = pathlib.Path(request["folder"])
    made = datasets.load_dataset(
        "json", data_files=request["path"], split="train", cache_dir=str(folder / "datasets")
    )
    if request["tokenizer"] == "bpe":
        from tokenizers import Tokenizer

        bpe = Tokenizer.from_file(str(folder / "tokenizer.json"))

        def ids(batch):
            return {
                "ids": [
                    each.ids for each in bpe.encode_batch(batch["text"], add_special_tokens=False)
                ]
            }
    else:

        def ids(batch):
            return {"ids": [np.frombuffer(text.encode(), np.uint8) for text in batch["text"]]}

    return made.map(ids, batched=True, remove_columns=made.column_names)


def windowed(documents, length: int):
    """Returns windows of so many tokens, as its tutorials make them: documents joined a thousand at a time."""

    def cut(batch):
        flat = np.concatenate(batch["ids"])
        count = len(flat) // (length + 1)
        return {"ids": list(flat[: count * (length + 1)].reshape(count, length + 1))}

    return documents.with_format("numpy").map(cut, batched=True).with_format("numpy")


def of_datasets(request: dict) -> dict:
    """Tokenises, or reads shuffled windows."""
    if request["do"] == "tokenise":
        return timed(
            lambda: {
                "tokens": int(sum(len(x) for x in tokenised(request).data["ids"].combine_chunks()))
            }
        )
    start = time.perf_counter()
    documents = tokenised(request)
    again_s, rows = time.perf_counter() - start, request["rows"]
    windows = windowed(documents, request["length"]).shuffle(seed=0)
    count = len(windows) // rows

    def batch(step):
        at = step % count * rows
        return windows[at : at + rows]["ids"][:, :-1]

    return {"again_s": again_s} | read_batches(batch, request["spend_s"], request["at"])


def of_grain(request: dict) -> dict:
    """Reads shuffled windows of an array that is mapped, which `jaxpar` has tokenised."""
    import grain

    found = next((pathlib.Path(request["folder"]) / "cache").rglob("tokens.npy"))
    data, length, rows = np.load(found, mmap_mode="r"), request["length"], request["rows"]

    class Windows:
        """Windows end to end."""

        def __len__(self):
            return (len(data) - 1) // length

        def __getitem__(self, number):
            return np.asarray(data[number * length : number * length + length + 1], np.int32)

    batches = grain.MapDataset.source(Windows()).shuffle(seed=0).repeat().batch(rows)
    return read_batches(lambda step: batches[step][:, :-1], request["spend_s"], request["at"])


def answer(request: dict) -> dict:
    """Does what a row asks for."""
    import datasets  # before the time is taken
    import grain

    del datasets, grain
    return of_grain(request) if request["row"].startswith("grain") else of_datasets(request)


if __name__ == "__main__":
    harness.serve(answer)
