"""Is this checkout as fast as an older one? Every pillar, both checkouts interleaved in one run.

    git worktree add ../older d3543d0
    python bench/older.py ../older                       # a GPU or TPU: GPT-2 124M, and Llama 3.2 1B's shape
    python bench/older.py ../older --tiny                # any machine, in minutes
    python bench/older.py ../older --what loops          # a recurrence, NEAT, a planner, PPO, life

Programs use names that both checkouts have; language models are made by `lm_models`, which knows
the names of either. Each side is a process of its own, which compiles first and then answers a
round at a time.

Printed are medians, the ratio old / new (over 1: this checkout is faster) with the smallest and the
geometric mean, the seconds of the first call with its compilation, each process's peak of memory
(the device's, or the host's where that is the device), and for decoding the time in which the card
reads all weights once (`--bandwidth`, bytes a second), the limit of a step of one row. Ends with 1
if a case is under 0.95 or the mean under 0.98.
"""

import argparse
import functools
import json
import math
import pathlib
import resource
import statistics
import sys
import time

from harness import Worker

HERE = pathlib.Path(__file__).resolve().parent
ROUND_S = 0.3
"""Seconds of a round of one program, in which short ones are called many times."""
MOST_CALLS = 100
LEAST = 0.95
LEAST_MEAN = 0.98
"""Ratios under which this checkout counts as slower: of a case, and of all."""


def loops(tiny: bool) -> dict:
    """Returns a program of every pillar but the language model: name -> (runs it once, what it counts, 0)."""
    import jax
    import jax.numpy as jnp

    import envs
    from jaxpar.life import Laws, World
    from jaxpar.neat import Neat, NeatConfig, Table, xor
    from jaxpar.pomdp import ParticleBelief, Vopp
    from jaxpar.rl import Network, Ppo, train
    from jaxpar.solve import Newton, parallel_scan

    try:
        from jaxpar.life.laws import FIRST_LAWS
    except ImportError:  # the older checkout's only ones
        FIRST_LAWS = Laws()

    key = jax.random.key(0)
    length, width = (1024, 16) if tiny else (10_000, 64)
    weights = jax.random.normal(key, (2, width, width)) / width**0.5
    series = jax.random.normal(key, (length, width))

    def loss(weights, series):
        def step(h, x):
            h = jnp.tanh(h @ weights[0] + x @ weights[1])
            return h, h

        return jnp.mean(parallel_scan(step, jnp.zeros((width,)), series, method=Newton())[1] ** 2)

    gradient = jax.jit(jax.grad(loss))

    generations = 20
    neat = Neat(NeatConfig(3, 1, 1000 if tiny else 10_000, 50, 100, 20), Table())

    def evolve(key):
        state = neat.init(key, xor())
        keys = jax.random.split(key, generations)
        return jax.lax.scan(
            lambda state, key: (neat.step(key, state, xor())[0], None), state, keys
        )[0]

    evolve = jax.jit(evolve)

    env, params = envs.make("RockSample-7-8")
    planner = Vopp(iterations=4, num_simulations=256 if tiny else 8192)
    belief = ParticleBelief(256).init(key, env, params)
    plan = jax.jit(lambda key: planner.plan(key, env, params, belief))

    cart_pole, updates = envs.make("CartPole-v1")[0], 20
    ppo = Ppo(cart_pole, Network(), Ppo(cart_pole).rates, 16 if tiny else 2048, 128)
    learn = jax.jit(lambda key: train(ppo, key, None, updates))

    steps = 10 if tiny else 200
    world = World(num_agents=32 if tiny else 512, laws=FIRST_LAWS)

    def live(key):
        keys = jax.random.split(key, steps)
        state = world.init(key)
        return jax.lax.scan(lambda state, key: (world.step(key, state)[0], None), state, keys)[0]

    live = jax.jit(live)

    return {
        "recurrence, gradient": (functools.partial(gradient, weights, series), 1, 0),
        "NEAT, a generation": (functools.partial(evolve, key), generations, 0),
        "Vopp, a plan": (functools.partial(plan, key), 1, 0),
        "PPO, an update": (functools.partial(learn, key), updates, 0),
        "Life, a step": (functools.partial(live, key), steps, 0),
    }


def language_models(tiny: bool) -> dict:
    """Returns training and decoding: name -> (runs it once, what it counts, the bytes of weights that it reads)."""
    import jax
    import jax.numpy as jnp
    from lm_models import gpt2_of, llama_of

    from jaxpar.lm import (
        OptimizerConfig,
        Sampling,
        Trainer,
        generate,
        init,
        num_params,
    )

    small = dict(num_layers=4, embed_dim=256, vocab_size=512, dtype="float32")
    heads = dict(num_heads=8, num_kv_heads=4, head_dim=32, mlp_dim=768)
    trained = gpt2_of(dropout=0.0, scan_layers=False, loss_chunk=16384)
    decoded = llama_of()
    rows, length, prompt, new = 32, 1024, 2048, 65
    if tiny:
        trained = gpt2_of(**small, num_heads=8, mlp_dim=1024, dropout=0.0)
        decoded, rows, length, new = llama_of(**small, **heads), 4, 256, 17

    trainer = Trainer(trained, OptimizerConfig(), 100)
    state = jax.jit(trainer.init)(jax.random.key(0))
    tokens = jax.random.randint(
        jax.random.key(1), (rows, length + 1), 0, trained.vocab_size, jnp.int32
    )
    batch = {"tokens": tokens[:, :-1], "targets": tokens[:, 1:]}
    step = jax.jit(trainer.step, donate_argnums=1)
    held = [state]

    def train():
        held[0], info = step(jax.random.key(2), held[0], batch)
        return info["loss"]

    params = jax.jit(init, static_argnums=(1, 2))(jax.random.key(0), decoded, decoded.dtype)
    asked = jax.random.randint(jax.random.key(1), (1, prompt), 0, decoded.vocab_size, jnp.int32)
    go_on = jax.jit(generate, static_argnums=(3, 4))

    def draw(count: int):
        return go_on(jax.random.key(2), params, asked, decoded, Sampling(count, temperature=0.0))

    weights = num_params(decoded) * jnp.dtype(decoded.dtype).itemsize
    return {
        "train, a step": (train, 1, 0),
        "prompt and a token": (functools.partial(draw, 1), 1, 0),
        "decoding, a token": (functools.partial(draw, new), new - 1, weights),
    }


def serve(what: str, tiny: bool) -> None:
    """Answers every line of standard input with the seconds of one round of each program."""
    import jax

    import jaxpar

    made = {"lm": language_models, "loops": loops}[what](tiny)
    compiled_s = {}
    calls = {}
    for name, (run, _, _) in made.items():
        begin = time.perf_counter()
        jax.block_until_ready(run())
        compiled_s[name] = time.perf_counter() - begin
        begin = time.perf_counter()
        jax.block_until_ready(run())
        took_s = time.perf_counter() - begin
        # One call of a millisecond differs from the next by more than what is looked for.
        calls[name] = min(MOST_CALLS, math.ceil(ROUND_S / took_s))
    for _ in sys.stdin:
        seconds = {}
        for name, (run, _, _) in made.items():
            begin = time.perf_counter()
            for _ in range(calls[name]):
                jax.block_until_ready(run())
            seconds[name] = (time.perf_counter() - begin) / calls[name]
        device = f"{jax.devices()[0].device_kind}, jax {jax.__version__}"
        answer = {
            "seconds": seconds,
            "device": device,
            "from": str(pathlib.Path(jaxpar.__file__).parents[1]),
        }
        answer["compiled_s"] = compiled_s
        answer["peak_bytes"] = peak_bytes()
        answer["per"] = {name: (count, size) for name, (_, count, size) in made.items()}
        print(json.dumps(answer), flush=True)


def peak_bytes() -> int:
    """Returns the most bytes that this process has held: on its device, or where that is the host, there."""
    import jax

    stats = jax.devices()[0].memory_stats()
    if stats and "peak_bytes_in_use" in stats:
        return stats["peak_bytes_in_use"]
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def times(answers: list[dict]) -> dict[str, float]:
    """Returns the median seconds of each program; a token's are those of many less those of the first."""
    rounds = []
    for answer in answers:
        seconds, per = answer["seconds"], answer["per"]
        first = seconds.get("prompt and a token", 0.0)
        rounds.append(
            {name: (seconds[name] - first * (per[name][1] > 0)) / per[name][0] for name in seconds},
        )
    return {name: statistics.median(row[name] for row in rounds) for name in rounds[0]}


def main() -> None:
    """Parses flags, measures, prints, and writes bench/results/older_WHAT.json."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("older", help="a checkout of another commit")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--tiny", action="store_true")
    parser.add_argument("--what", choices=("lm", "loops"), default="lm")
    parser.add_argument(
        "--bandwidth", type=float, default=4.8e12, help="of the card, bytes a second"
    )
    parser.add_argument("--serve", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.serve:
        sys.path.insert(0, args.older)
        return serve(args.what, args.tiny)
    flags = ["--what", args.what, *["--tiny"] * args.tiny]
    paths = {"old": str(pathlib.Path(args.older).resolve()), "new": str(HERE.parent)}
    memory = {"XLA_PYTHON_CLIENT_PREALLOCATE": "false"}
    workers = {
        side: Worker([__file__, path, "--serve", *flags], memory) for side, path in paths.items()
    }
    answers: dict[str, list[dict]] = {"old": [], "new": []}
    for number in range(args.rounds):
        for side in ("old", "new") if number % 2 else ("new", "old"):
            answer = workers[side].ask({}, 1200)
            if "failed" in answer or answer["from"] != paths[side]:
                raise SystemExit(f"{side}: {answer}")
            answers[side].append(answer)
    for worker in workers.values():
        worker.close()
    medians = {side: times(rows) for side, rows in answers.items()}
    ratios = report(answers, medians, 0.0 if args.tiny else args.bandwidth)
    folder = HERE / "results"
    folder.mkdir(exist_ok=True)
    (folder / f"older_{args.what}.json").write_text(
        json.dumps(medians | {"device": answers["new"][0]["device"]}, indent=1) + "\n"
    )
    if min(ratios) < LEAST or statistics.geometric_mean(ratios) < LEAST_MEAN:
        raise SystemExit(1)


def report(
    answers: dict[str, list[dict]], medians: dict[str, dict[str, float]], bandwidth: float
) -> list[float]:
    """Prints a line for each case; returns the ratios old / new."""
    print(answers["new"][0]["device"])
    ratios = []
    for name, new in medians["new"].items():
        size = answers["new"][0]["per"][name][1]
        limit = ""
        if size and bandwidth:
            limit = f", weights once {size / bandwidth * 1e3:.2f} ms"
        old = medians["old"][name]
        ratios.append(old / new)
        first = [answers[side][0]["compiled_s"][name] for side in ("old", "new")]
        print(
            f"{name:20} old {old * 1e3:9.2f} ms, new {new * 1e3:9.2f} ms, ratio {old / new:.3f}; "
            f"compiled in {first[0]:.1f} s, {first[1]:.1f} s{limit}"
        )
    peaks = [answers[side][-1]["peak_bytes"] / 2**20 for side in ("old", "new")]
    mean = statistics.geometric_mean(ratios)
    print(f"peak of memory       old {peaks[0]:9.0f} MiB, new {peaks[1]:9.0f} MiB")
    print(f"ratios               smallest {min(ratios):.3f}, geometric mean {mean:.3f}")
    return ratios


if __name__ == "__main__":
    main()
