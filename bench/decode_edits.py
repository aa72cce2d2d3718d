"""How many passes does a text take that is an edit of its prompt, and how long do they take?

    python bench/decode_edits.py                 # minutes on two cores
    python bench/decode_edits.py --tiny

Aggressive decoding (Ge et al. 2022, arXiv:2205.10350): the draft is what follows in the prompt after the last match of
the end of the output. The prompt is a piece of the Python standard library, and the output the same with some bytes
replaced by others at places drawn at random: what is to come out is dictated, by putting its bytes' scores in the place
of those that a model of random weights computed, so the work is a model's and the number of edits is known. Passes are
counted, beside the least that a copy of this length can take: one for each edit and for what follows the last one, and
one for each `length` + 1 bytes between two edits. Times are of whole calls, in turns with plain decoding, medians.
"""

import argparse
import dataclasses
import functools
import json
import pathlib
import statistics
import sys
import time

HERE = pathlib.Path(__file__).resolve().parent
sys.path[:0] = [str(HERE.parent), str(HERE)]

import jax  # noqa: E402
import jax.numpy as jnp  # noqa: E402
import numpy as np  # noqa: E402
from decode_pair import prompts_of  # noqa: E402
from lm_models import lm_config  # noqa: E402

from jaxpar.decode import CopyDraft, Decoding, NoDraft, Sampling, generate  # noqa: E402
from jaxpar.lm import Decoder, init  # noqa: E402

LENGTHS, MATCHES = (8, 16, 32), ((4, 0), (16, 2), (32, 4))


@dataclasses.dataclass(frozen=True)
class Dictated(Decoder):
    """A decoder that computes, and says what `params["text"]` [B, S] holds at each place."""

    def held(self, params):
        """Holds the model's, and the text as it is."""
        return params | {"model": super().held(params["model"])}

    def _said(self, params, logits, positions):
        text = params["text"]
        line = jnp.take_along_axis(text, jnp.minimum(positions + 1, text.shape[1] - 1), 1)
        return jax.nn.one_hot(line, self.vocab_size) + 0 * logits  # what was computed is asked for

    def prefill(self, params, tokens, lengths, cache):
        """Reads prompts."""
        logits, cache = super().prefill(params["model"], tokens, lengths, cache)
        return self._said(params, logits[:, None], lengths[:, None] - 1)[:, 0], cache

    def extend(self, params, tokens, cache, *, positions, **options):
        """Reads more tokens."""
        logits, cache = super().extend(
            params["model"], tokens, cache, positions=positions, **options
        )
        return self._said(params, logits, positions), cache


def edited(rng: np.random.Generator, text: np.ndarray, count: int) -> np.ndarray:
    """Returns the text with so many bytes, at different places, replaced by others."""
    out = text.copy()
    places = rng.choice(len(text), count, replace=False)
    out[places] = (out[places] + rng.integers(1, 256, count)) % 256
    return out


def least_passes(source: np.ndarray, text: np.ndarray, length: int) -> int:
    """Returns how many passes a copy takes that is aligned again after each edit; the first byte is the prompt's."""
    passes, done = 0, 1
    while done < len(text):
        same = 0
        while (
            same < length
            and done + same < len(text) - 1
            and text[done + same] == source[done + same]
        ):
            same += 1
        passes, done = passes + 1, done + same + 1
    return passes


def measure(args: argparse.Namespace) -> list[dict]:
    """Measures plain decoding and each copy."""
    size, rows = (32, 2) if args.tiny else (256, 4)
    shape = dict(num_layers=8, embed_dim=512, num_heads=8, mlp_dim=1536)
    shape = dict(num_layers=2, embed_dim=32, num_heads=4, mlp_dim=64) if args.tiny else shape
    config = lm_config(vocab_size=256, dtype="float32", **shape)
    rng, params = np.random.default_rng(0), init(jax.random.key(0), config)
    sources = np.array(prompts_of(rows, size))
    texts = np.stack([edited(rng, source, round(0.05 * size)) for source in sources])
    given = {"model": params, "text": jnp.asarray(np.concatenate([sources, texts], 1))}
    drafts = {"plain": NoDraft()}
    lengths, matches = (LENGTHS[:1], MATCHES[-1:]) if args.tiny else (LENGTHS, MATCHES)
    drafts |= {
        f"copy {n}, match {m}, gaps {gaps}": CopyDraft(n, m, "prompt", gaps)
        for n in lengths
        for m, gaps in matches
    }
    programs = {}
    for name, draft in drafts.items():
        run = functools.partial(
            generate, model=Dictated(config), sampling=Sampling(size, temperature=0.0),
            decoding=Decoding(draft=draft),
        )  # fmt: skip
        inputs = jax.random.key(0), given, jnp.asarray(sources[:1])
        programs[name] = (
            jax.jit(lambda key, given, prompt, run=run: run(key, given, prompt))
            .lower(inputs[0], given | {"text": given["text"][:1]}, inputs[2])
            .compile()
        )

    def each(name):
        for row in range(rows):
            at = slice(row, row + 1)
            one = given | {"text": given["text"][at]}
            yield (
                row,
                jax.block_until_ready(
                    programs[name](jax.random.key(0), one, jnp.asarray(sources[at]))
                ),
            )

    out = {}
    for name, draft in drafts.items():
        passes = []
        for row, got in each(name):
            assert (np.asarray(got.tokens)[0, -size:] == texts[row]).all(), (
                "the text is not what was dictated"
            )
            passes.append(int(got.passes.sum()))
        length = getattr(draft, "length", 0)
        least = [least_passes(*pair, length) for pair in zip(sources, texts, strict=True)]
        out[name] = {
            "row": name,
            "passes": sum(passes) / rows,
            "least": sum(least) / rows,
            "ms": [],
        }
    for _ in range(2 if args.tiny else args.rounds):
        for name in drafts:
            begin = time.perf_counter()
            for _ in each(name):
                pass
            out[name]["ms"].append(1e3 * (time.perf_counter() - begin) / rows)
    return list(out.values())


def main() -> None:
    """Parses flags, measures and prints."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--tiny", action="store_true")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--out", type=pathlib.Path, default=HERE / "results" / "decode_edits.json")
    args = parser.parse_args()
    rows = measure(args)
    plain = rows[0]
    print(
        "| row | passes | least | of plain's passes | ms a text | of plain's time |\n|---|---|---|---|---|---|"
    )
    for row in rows:
        row["ms"] = statistics.median(row["ms"])
        fewer, faster = plain["passes"] / row["passes"], plain["ms"] / row["ms"]
        said = [
            row["row"],
            f"{row['passes']:.1f}",
            f"{row['least']:.1f}",
            f"{fewer:.2f}x",
            f"{row['ms']:.1f}",
        ]
        print(f"| {' | '.join(said)} | {faster:.2f}x |")
    args.out.parent.mkdir(parents=True, exist_ok=True)
    args.out.write_text(json.dumps(rows))


if __name__ == "__main__":
    main()
