"""Do the policies of `jaxpar.decode` keep what matters: heavy hitters, the best blocks for a budget, a batch's drafts?

    python bench/decode_policies.py                           # two CPU cores, some minutes
    python bench/decode_policies.py --size full               # larger models, one GPU, under 4 minutes: not run yet
    python bench/decode_policies.py --cases heavy --tiny      # that it runs

heavy: a small model is trained on records of a key and one of eight values that are its own; keys come again with
their values. It reads some, is asked for a few of them while it sees all, reads as many new ones as its window forgets,
and is asked again. So the question comes before and after: worth that is added up over earlier questions can know which
records matter; asked for others ("never asked"), it cannot, and that is measured beside it. All policies but the first
have a quarter of the tokens that lie in the cache at the second question. Chance is 1/8.

cost: models of three sizes choose numbers of a given sum, with running totals; a verifier finds a right answer of N.
A budget in eFLOPs (`decoding_cost`, with bytes at the price of `--flops-per-byte`) buys (size, blocks) its N. Coverage
of N is predicted from a few samples of other problems (a beta-binomial law), and the best of the 12 that is predicted
is looked up in the ranking that is measured.

share: target and draft of bytes. Greedy texts of the target are verified 16 rows at a time: `allocate` shares a pass's
budget by the draft's confidences, beside the same number of drafts for every row. Accepted drafts a verified one; the
token that a pass finds itself is not counted. All rows of a group draft the most places, which uniform drafts need not.

Prints as it goes, writes JSON.
"""

import argparse
import functools
import json
import pathlib
import sys
import time

HERE = pathlib.Path(__file__).resolve().parent
sys.path[:0] = [str(HERE.parent), str(HERE)]

import decode_pair  # noqa: E402
import jax  # noqa: E402
import jax.numpy as jnp  # noqa: E402
import numpy as np  # noqa: E402
from lm_models import generate, lm_config  # noqa: E402
from scipy.special import betaln  # noqa: E402

from jaxpar.decode import (  # noqa: E402
    BlockTopK,
    HeavyHitters,
    ModelSizes,
    SinksAndWindow,
    allocate,
    chain,
    decoding_cost,
)
from jaxpar.decode.reader import ReadingOptions, begin, keep, look  # noqa: E402
from jaxpar.lm import Decoder, LMConfig, Sampling, num_params  # noqa: E402

KEYS, VALUES = 32, 8  # of records; value v of key k is the symbol KEYS + VALUES k + v


def shape(layers: int, embed: int, heads: int = 4) -> dict:
    """Fields of a model."""
    return dict(num_layers=layers, embed_dim=embed, num_heads=heads, mlp_dim=3 * embed)


SIZES = {
    "cpu": {
        "heavy": dict(model=shape(2, 64, 2), steps=400, rows=16, pairs=16, asked=4, times=1, new=14, texts=256),
        "cost": dict(models=[shape(2, 32), shape(2, 56), shape(2, 96)], steps=[500] * 3, rows=32, few=8, calibrate=64,
                     problems=128),
        "share": dict(models=[shape(2, 96), shape(1, 32)], steps=[300, 300], length=96, rows=8, prompt=64, new=64,
                      groups=4, most=8, each=[1, 2, 3, 4]),
    },
    "full": {
        "heavy": dict(model=shape(4, 128, 4), steps=1000, rows=64, pairs=16, asked=4, times=1, new=14, texts=512),
        "cost": dict(models=[shape(2, 192, 8), shape(3, 320, 8), shape(4, 560, 8)], steps=[800] * 3, rows=128, few=8,
                     calibrate=256, problems=512),
        "share": dict(models=[shape(4, 512, 8), shape(2, 128)], steps=[800, 800], length=256, rows=32, prompt=64,
                      new=96, groups=6, most=8, each=[1, 2, 3, 4]),
    },
    "tiny": {
        "heavy": dict(model=shape(1, 16), steps=2, rows=2, pairs=6, asked=2, times=1, new=5, texts=2),
        "cost": dict(models=[shape(1, 8), shape(1, 16), shape(2, 16)], steps=[2] * 3, rows=2, few=2, calibrate=2,
                     problems=2),
        "share": dict(models=[shape(1, 16), shape(1, 8)], steps=[2] * 2, length=16, rows=2, prompt=8, new=6, groups=1,
                      most=3, each=[1]),
    },
}  # fmt: skip


# ---------------------------------------------------------------- heavy hitters


def written(rng: np.random.Generator, order: np.ndarray) -> np.ndarray:
    """Returns rows of records (key, value), [B, 2 R]: record i is that of the key number `order[b, i]` of row b."""
    rows = np.arange(len(order))[:, None]
    keys = rng.permuted(np.tile(np.arange(KEYS), (len(order), 1)), axis=1)[rows, order]
    values = rng.integers(VALUES, size=(len(order), KEYS))[rows, order]
    return (
        np.stack([keys, KEYS + VALUES * keys + values], 2).reshape(len(order), -1).astype(np.int32)
    )


def drawn_order(rng: np.random.Generator, rows: int, records: int) -> np.ndarray:
    """Returns which key each record of a training text has: a new one, or one of those before, evenly."""
    share, order = rng.uniform(0.3, 0.9, rows), np.zeros((rows, records), int)
    known = np.ones(rows, int)
    for i in range(1, records):
        fresh = (rng.random(rows) < share) & (known < KEYS)
        order[:, i] = np.where(fresh, known, rng.integers(known))
        known += fresh
    return order


def asked_order(
    rng: np.random.Generator, rows: int, pairs: int, asked: int, times: int, new: int, again: bool
):
    """Returns the keys of a text: pairs, questions, new pairs, and the questions again, or for pairs never asked."""
    each = rng.permuted(np.tile(np.arange(pairs), (rows, 1)), axis=1)
    hot = each[:, :asked]
    last = hot if again else each[:, asked : 2 * asked]
    fresh = np.tile(np.arange(pairs, pairs + new), (rows, 1))
    first = np.tile(np.arange(pairs), (rows, 1))
    return np.concatenate(
        [first, *[rng.permuted(hot, axis=1) for _ in range(times)], fresh, last], 1
    )


def records_batch(rng: np.random.Generator, rows: int, records: int) -> dict:
    """Returns a training batch: the values of keys that came before count."""
    order = drawn_order(rng, rows, records)
    text = written(rng, order)
    before = np.tril(order[:, :, None] == order[:, None], -1).any(2)
    weights = (before[..., None] & np.array([False, True])).reshape(rows, -1)[:, 1:]
    return {"tokens": text[:, :-1], "targets": text[:, 1:], "weights": weights.astype(np.float32)}


@functools.partial(jax.jit, static_argnames=("config", "prompt", "policy", "block"))
def expected(params, tokens, config: LMConfig, prompt: int, policy, block: int):
    """Returns the likeliest token of each place after the prompt, [B, S - prompt], each read token after token."""
    model, rows, room = Decoder(config), len(tokens), tokens.shape[1] - prompt
    lengths, held = jnp.full((rows,), prompt, jnp.int32), model.held(params)
    options = ReadingOptions(room=room, block=block, policy=policy)
    logits, reading = begin(model, params, tokens[:, :prompt], lengths, options)
    path, one = jnp.zeros((rows, 1), jnp.int32), jnp.ones((rows,), jnp.int32)

    def step(carry, token):
        logits, reading = carry
        after, reading = look(model, held, reading, token[:, None], chain(0))
        reading = keep(model, held, reading, token[:, None], path, one)
        return (after[:, 0], reading), logits.argmax(-1)

    return jax.lax.scan(step, (logits, reading), tokens[:, prompt:].T)[1].T


def heavy(case: dict, say) -> dict:
    """Measures answers under each policy."""
    pairs, asked, times, new = (case[name] for name in ("pairs", "asked", "times", "new"))
    records, block = pairs + asked * (times + 1) + new, 8
    config = lm_config(vocab_size=KEYS * (1 + VALUES), dtype="float32", **case["model"])
    rng = np.random.default_rng(0)
    params, said = decode_pair.train_on(
        config, lambda: records_batch(rng, case["rows"], records), steps=case["steps"]
    )
    say("model", said)
    budget = (records - asked) // 2  # of two tokens each a quarter
    window = budget // 4
    known = dict(heavy=budget - window, window=window, observe=2 * asked * times)
    policies = {
        "all": None,
        "Keyformer": HeavyHitters(**known),
        "H2O": HeavyHitters(**known, noise=False, last_tau=1.0),
        "window": SinksAndWindow(0, budget),
        "sinks and window": SinksAndWindow(4, budget - 4),
    }
    table: dict = {"budget": budget, "of": 2 * (records - asked), "heavy": known, "train": said}
    for name, again in (("asked before", True), ("never asked", False)):
        rng = np.random.default_rng(1)
        text = written(rng, asked_order(rng, case["texts"], pairs, asked, times, new, again))
        for kind, policy in policies.items():
            best = np.asarray(expected(params, text, config, 2 * pairs, policy, block))
            right = (best == text[:, 2 * pairs :]).reshape(len(text), -1, 2)[:, -asked:, 1]
            table.setdefault(kind, {})[name] = float(right.mean())
    for kind in policies:
        say(kind, table[kind])
    return table


# ---------------------------------------------------------------- what a budget buys

NUMBERS, CHOSEN, COLON, EQUALS = 8, 4, 10, 11
GIVEN, NEW = (
    NUMBERS + 4,
    3 * CHOSEN,
)  # tokens of a problem `tt:nnnnnnnn=`, and of an answer: four times `ntt`
BLOCK, BLOCKS, BUDGETS = 4, (2, 3, 4, None), (1, 2, 4)


def problems(rng: np.random.Generator, count: int) -> tuple[np.ndarray, np.ndarray]:
    """Returns problems [n, GIVEN] and an answer to each, [n, NEW]: numbers and the totals up to each."""
    numbers = rng.integers(1, 10, (count, NUMBERS))
    chosen = rng.permuted(numbers, axis=1)[:, :CHOSEN]
    totals = chosen.cumsum(1)
    answers = np.stack([chosen, totals // 10, totals % 10], 2).reshape(count, -1)
    total, colon, equals = totals[:, -1:], np.full((count, 1), COLON), np.full((count, 1), EQUALS)
    given = np.concatenate([total // 10, total % 10, colon, numbers, equals], 1)
    return given.astype(np.int32), answers.astype(np.int32)


def verified(given: np.ndarray, answers: np.ndarray) -> np.ndarray:
    """Returns which answers are right: numbers that are there, none more often, right totals, the last as asked for."""
    parts = answers.reshape(len(answers), CHOSEN, 3)
    chosen, totals = parts[..., 0], 10 * parts[..., 1] + parts[..., 2]
    symbols = np.arange(EQUALS + 1)
    there = (given[:, 3 : 3 + NUMBERS, None] == symbols).sum(1)
    taken = (chosen[..., None] == symbols).sum(1)
    digits = (parts < 10).all((1, 2)) & (taken <= there).all(1)
    return (
        digits
        & (totals == chosen.cumsum(1)).all(1)
        & (totals[:, -1] == 10 * given[:, 0] + given[:, 1])
    )


def sums_batch(rng: np.random.Generator, rows: int) -> dict:
    """Returns a training batch: the answers count."""
    given, answers = problems(rng, rows)
    text = np.concatenate([given, answers], 1)
    weights = np.tile(np.arange(1, text.shape[1]) >= GIVEN, (rows, 1))
    return {"tokens": text[:, :-1], "targets": text[:, 1:], "weights": weights.astype(np.float32)}


def solved(
    params, config: LMConfig, given: np.ndarray, samples: int, blocks: int | None, rows: int
) -> np.ndarray:
    """Returns which of so many drawn answers to each problem are right, bool [n, samples]."""
    policy = None if blocks is None else BlockTopK(blocks)
    draw = jax.jit(generate, static_argnums=(3, 4), static_argnames=("policy", "block"))
    prompts, seeds = np.repeat(given, samples, 0), np.tile(np.arange(samples), len(given))
    found = []
    for start in range(0, len(prompts), rows):
        part = np.arange(start, start + rows) % len(
            prompts
        )  # whole batches, so that one program serves
        seed = seeds[part] + 1000 * (part // samples)  # of its own for each problem
        out = draw(
            jax.random.key(1),
            params,
            prompts[part],
            config,
            Sampling(NEW),
            seeds=seed,
            policy=policy,
            block=BLOCK,
        )
        found.append(verified(prompts[part], np.asarray(out.tokens)[:, GIVEN:]))
    return np.concatenate(found)[: len(prompts)].reshape(len(given), samples)


def price(
    config: LMConfig, blocks: int | None, samples: int, shared: bool, flops_per_byte: float
) -> float:
    """Returns the eFLOPs of so many answers to a problem."""
    budget = None if blocks is None else blocks * BLOCK
    heads = config.attention.num_heads
    sizes = ModelSizes(
        num_params=num_params(config),
        num_layers=config.num_layers,
        num_heads=heads,
        num_kv_heads=heads,
        head_dim=config.embed_dim // heads,
    )
    cost = decoding_cost(
        sizes, GIVEN, NEW, samples=samples, shared=shared, budget=budget, block=BLOCK
    )
    return cost.equivalent_flops(flops_per_byte)


def affordable(budget: float, prices) -> int:
    """Returns the most answers whose price is within the budget; a price is a line in their number."""
    one, two = prices(1), prices(2)
    return max(0, 1 + int((budget - one) / (two - one) + 1e-9)) if budget >= one else 0


def coverage(right: np.ndarray, samples: int, counts: np.ndarray) -> np.ndarray:
    """Predicts the share of problems with a right answer among `counts` ones, from `samples` answers to others.

    The chance of each problem is taken to be of a beta law, the likeliest one on a grid: right answers of a problem
    are then beta-binomial, and all of n answers wrong has the probability B(a, b + n) / B(a, b).
    """
    mean, size = np.meshgrid(
        1 / (1 + np.exp(-np.linspace(-8, 8, 401))), np.geomspace(0.05, 500, 120)
    )
    a, b = (mean * size)[..., None], ((1 - mean) * size)[..., None]
    values, times = np.unique(right, return_counts=True)
    likely = ((betaln(a + values, b + samples - values) - betaln(a, b)) * times).sum(-1)
    best = np.unravel_index(likely.argmax(), likely.shape)
    a, b = a[best].item(), b[best].item()
    return 1 - np.exp(betaln(a, b + counts) - betaln(a, b))


def cost(case: dict, say, flops_per_byte: float) -> dict:
    """Looks the predicted best (size, N, blocks) up in the measured ranking of 12, at three budgets."""
    made, table = [], {}
    others, _ = problems(np.random.default_rng(1), case["calibrate"])
    tested, _ = problems(np.random.default_rng(2), case["problems"])
    configs = [lm_config(vocab_size=EQUALS + 1, dtype="float32", **size) for size in case["models"]]
    unit = price(configs[-1], None, 1, False, flops_per_byte)
    for config, steps in zip(configs, case["steps"], strict=True):
        rng = np.random.default_rng(0)
        params, said = decode_pair.train_on(
            config, lambda rng=rng: sums_batch(rng, case["rows"]), steps=steps
        )
        say(f"{num_params(config)} parameters", said)
        for blocks in BLOCKS:
            prices = {kind: functools.partial(price, config, blocks, shared=kind == "shared",
                                              flops_per_byte=flops_per_byte) for kind in ("shared", "own")}  # fmt: skip
            counts = {(kind, each): affordable(each * unit, lambda n, of=of: of(samples=n))
                      for kind, of in prices.items() for each in BUDGETS}  # fmt: skip
            rows = min(512, case["calibrate"] * case["few"])
            few = solved(params, config, others, case["few"], blocks, rows)
            right = solved(params, config, tested, max(1, *counts.values()), blocks, rows)
            one = dict(parameters=num_params(config), blocks=blocks, rate=float(few.mean()))
            say("", one | {"measured": float(right.mean())})
            for key, count in counts.items():
                guess = float(coverage(few.sum(1), case["few"], np.array(count)))
                got = float(right[:, :count].any(1).mean())
                table.setdefault(key, []).append(
                    one | {"samples": count, "predicted": guess, "measured": got}
                )
    for (kind, each), rows in table.items():
        chosen = max(rows, key=lambda row: row["predicted"])
        place = 1 + sum(row["measured"] > chosen["measured"] for row in rows)
        best = max(rows, key=lambda row: row["measured"])
        made.append(
            dict(prompt=kind, budget=each, place=place, chosen=chosen, best=best, rows=rows)
        )
        say(f"{kind} prompts, budget {each}", {"place": place, "chosen": chosen, "best": best})
    return {"unit_eflops": unit, "budgets": made}


# ---------------------------------------------------------------- a batch's drafts


def guessed(
    params, config: LMConfig, texts: np.ndarray, start: int, most: int, rows: int = 512
) -> tuple:
    """Returns whether the draft's guesses are the text's, and its confidence in each, [B, S - start, most].

    Guesses at place i follow the first `start` + i tokens; what lies beyond the text's end is wrong.
    """
    count, length = texts.shape
    places = length - start
    draw = jax.jit(generate, static_argnums=(3, 4))
    tokens, sure = [], []
    for first in range(0, count * places, rows):
        part = np.arange(first, first + rows) % (count * places)
        lengths = start + part % places
        out = draw(
            jax.random.key(0),
            params,
            texts[part // places],
            config,
            Sampling(most, 0.0),
            prompt_lengths=lengths,
        )
        tokens.append(
            np.take_along_axis(np.asarray(out.tokens), lengths[:, None] + np.arange(most), 1)
        )
        sure.append(np.exp(np.asarray(out.log_probs)))
    tokens, sure = (
        np.concatenate(x)[: count * places].reshape(count, places, most) for x in (tokens, sure)
    )
    want = np.lib.stride_tricks.sliding_window_view(
        np.pad(texts, ((0, 0), (0, most)), constant_values=-1), most, 1
    )
    return tokens == want[:, start:length], sure


def passes(right: np.ndarray, sure: np.ndarray, counts_of) -> tuple[int, int, int]:
    """Returns accepted and verified drafts, and passes, until the first row has ended.

    Args:
      right: Whether each guess is the text's, [B, S, k].
      sure: Confidence in it.
      counts_of: Confidences [B, k] -> how many drafts of each row are verified.
    """
    rows, at = np.arange(len(right)), np.zeros(len(right), int)
    accepted = verified = number = 0
    while at.max() < right.shape[1]:
        counts = np.asarray(counts_of(sure[rows, at]))
        kept = np.minimum(np.cumprod(right[rows, at], axis=1).sum(1), counts)
        accepted, verified, number = accepted + kept.sum(), verified + counts.sum(), number + 1
        at = at + kept + 1  # the pass finds one token itself
    return int(accepted), int(verified), number


def share(case: dict, say) -> dict:
    """Measures accepted drafts a verified one, shared by confidence and evenly."""
    configs = [lm_config(vocab_size=256, dtype="float32", **size) for size in case["models"]]
    data, made, table = decode_pair.texts()[0], [], {}
    for config, steps in zip(configs, case["steps"], strict=True):
        made.append(decode_pair.train(config, data, 0.0, case["length"], case["rows"], steps))
        say(f"{num_params(config)} parameters", made[-1][1])
    prompts = np.array(decode_pair.prompts_of(16 * case["groups"], case["prompt"]), np.int32)
    draw = jax.jit(generate, static_argnums=(3, 4))
    texts = np.asarray(
        draw(jax.random.key(0), made[0][0], prompts, configs[0], Sampling(case["new"], 0.0)).tokens
    )
    right, sure = guessed(made[1][0], configs[1], texts, case["prompt"], case["most"])
    say(
        "draft",
        {
            "first guess right": float(right[:, :, 0].mean()),
            "confidence": float(sure[:, :, 0].mean()),
        },
    )
    for each in case["each"]:
        ways = {
            "even": lambda sure, each=each: np.full(len(sure), each),
            "shared": jax.jit(lambda sure, each=each: allocate(sure, each * len(sure))),
        }
        parts = {}
        for way, counts_of in ways.items():
            groups = zip(
                np.split(right, case["groups"]), np.split(sure, case["groups"]), strict=True
            )
            parts[way] = np.array([passes(*group, counts_of) for group in groups])
        rates = {way: part[:, 0] / part[:, 1] for way, part in parts.items()}
        sums = {way: part.sum(0) for way, part in parts.items()}
        rate = {way: total[0] / total[1] for way, total in sums.items()}
        tokens = {way: float(total[0] / total[2] / 16 + 1) for way, total in sums.items()}
        with np.errstate(
            divide="ignore", invalid="ignore"
        ):  # an untrained draft may have none accepted
            gain, of_groups = rate["shared"] / rate["even"], rates["shared"] / rates["even"]
        table[each] = dict(
            accepted=rate,
            tokens_a_pass=tokens,
            gain=gain,
            groups=[of_groups.min(), of_groups.max()],
        )
        say(f"{each} a row", table[each])
    return {"train": [said for _, said in made], "each": table}


def main() -> None:
    """Measures the cases that are asked for."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--cases", default="heavy,share,cost")
    parser.add_argument("--size", choices=tuple(SIZES), default="cpu")
    parser.add_argument("--tiny", action="store_true", help="only that it runs")
    parser.add_argument(
        "--flops-per-byte", type=float, default=562.5, help="price of a byte; by default Kinetics'"
    )
    parser.add_argument("--out", type=pathlib.Path)
    args = parser.parse_args()
    size = "tiny" if args.tiny else args.size
    kinds = {
        "heavy": heavy,
        "share": share,
        "cost": functools.partial(cost, flops_per_byte=args.flops_per_byte),
    }
    table: dict = {"device": jax.devices()[0].device_kind, "jax": jax.__version__, "size": size}
    for name in args.cases.split(","):
        began = time.perf_counter()

        def say(what, about, name=name):
            print(name, what, json.dumps(about, default=float), flush=True)

        table[name] = kinds[name](SIZES[size][name], say)
        table[name]["seconds"] = time.perf_counter() - began
        if args.out:
            args.out.write_text(json.dumps(table, indent=2, default=float) + "\n")


if __name__ == "__main__":
    main()
