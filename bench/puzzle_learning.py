"""What PPO and A2C learn on the puzzles in a stated time: a JSON line a puzzle, three seeds side by side.

    python bench/puzzle_learning.py                                # a GPU: 11 puzzles of at most 450 s each
    python bench/puzzle_learning.py --only TSP-20,FT06 --seconds 120
    python bench/puzzle_learning.py --small --seconds 20           # two CPU cores: small puzzles, small networks

Seconds are of learning alone; "compile_s" and "judge_s" (evaluation and oracles) come on top. The rate of learning
falls to 0 over the updates that fit into the time, which is told by the first ones. Judged are likeliest actions
("greedy") on `--episodes` levels that were never trained on, and the best of `--tries` drawn episodes of each level
("best_of"). "value" is what the bar is about: a ratio to the optimum, a share that is solved, or a score; of the
greedy play, but of the best of drawn ones for the job shop, a single problem, and the cube, where search is allowed.

Optima are exact: of tours by Held and Karp over all subsets, of routes by the best split of subsets, of sacks by
branch and bound.
"""

import argparse
import dataclasses
import json
import pathlib
import sys
import time
from collections.abc import Callable
from typing import Any

HERE = pathlib.Path(__file__).resolve().parent
sys.path[:0] = [str(HERE.parent), str(HERE)]

import jax  # noqa: E402
import jax.numpy as jnp  # noqa: E402
import numpy as np  # noqa: E402

from jaxpar.rl import Seeds  # noqa: E402
from jaxpar.rollout import (  # noqa: E402
    NoReset,
    Pool,
    RolloutOptions,
    first_episodes,
    init,
    random_policy,
    rollout,
)


def shortest_tours(places: np.ndarray) -> np.ndarray:
    """Lengths `[L]` of the shortest tours through `[L, N, 2]`: dynamic programming over subsets, O(2^N N^2) each."""
    found = []
    for place in np.asarray(places, np.float64):
        way = np.sqrt(((place[:, None] - place[None]) ** 2).sum(-1))
        n = len(place) - 1  # all but place 0, where tours begin
        best = np.full((2**n, n), np.inf, np.float32)
        best[1 << np.arange(n), np.arange(n)] = way[0, 1:]
        sets = np.arange(2**n)
        count = (
            np.array([bin(x).count("1") for x in range(2**n)], np.int8) if n <= 10 else _bits(sets)
        )
        for size in range(2, n + 1):
            these = sets[count == size]
            for last in range(n):
                here = these[(these >> last) & 1 == 1]
                best[here, last] = (
                    best[here ^ (1 << last)] + way[1:, 1 + last].astype(np.float32)
                ).min(1)
        found.append((best[-1] + way[1:, 0]).min() if n > 1 else 2 * way[0, 1])
    return np.array(found)


def shortest_routes(places: np.ndarray, demands: np.ndarray, capacities: np.ndarray) -> np.ndarray:
    """Lengths `[L]` of the shortest sets of routes from place 0 of `[L, N, 2]`, each within the capacity.

    The shortest route of every subset by Held and Karp, then the best split of subsets into routes: O(3^N) each.
    """
    found = []
    for place, demand, capacity in zip(
        np.asarray(places, np.float64), demands, capacities, strict=True
    ):
        way = np.sqrt(((place[:, None] - place[None]) ** 2).sum(-1))
        n = len(place) - 1
        best, sets = np.full((2**n, n), np.inf), np.arange(2**n)
        best[1 << np.arange(n), np.arange(n)] = way[0, 1:]
        for subset in range(1, 2**n):
            for last in (i for i in range(n) if subset >> i & 1 and subset != 1 << i):
                best[subset, last] = (best[subset ^ (1 << last)] + way[1:, 1 + last]).min()
        load = ((sets[:, None] >> np.arange(n)) & 1) @ demand[1:]
        route = np.where(load <= capacity, (best + way[1:, 0]).min(1), np.inf)
        split = np.zeros(2**n)
        for subset in range(1, 2**n):
            first, rest, part = subset & -subset, subset & (subset - 1), subset & (subset - 1)
            ways = []
            while True:  # all routes that have the first customer
                ways.append(route[part | first] + split[rest ^ part])
                if not part:
                    break
                part = (part - 1) & rest
            split[subset] = min(ways)
        found.append(split[-1])
    return np.array(found)


def _bits(sets: np.ndarray) -> np.ndarray:
    return sum((sets >> i) & 1 for i in range(int(sets[-1]).bit_length())).astype(np.int8)


def fullest_sacks(weights: np.ndarray, values: np.ndarray, capacities: np.ndarray) -> np.ndarray:
    """Greatest values `[L]` that sacks carry of items `[L, N]`: branch and bound by Dantzig's bound."""
    return np.array(
        [_fullest(w, v, c) for w, v, c in zip(weights, values, capacities, strict=True)]
    )


def _fullest(weight: np.ndarray, value: np.ndarray, capacity: float) -> float:
    order = np.argsort(-value / weight)
    w, v = weight[order].astype(float).tolist(), value[order].astype(float).tolist()
    best, stack = 0.0, [(0, float(capacity) + 1e-6, 0.0)]
    while stack:
        at, room, got = stack.pop()
        best = max(best, got)
        bound, left = got, room
        for i in range(at, len(w)):
            if w[i] > left:
                bound += v[i] * left / w[i]
                break
            left, bound = left - w[i], bound + v[i]
        if at == len(w) or bound <= best + 1e-9:
            continue
        stack.append((at + 1, room, got))
        if w[at] <= room:
            stack.append((at + 1, room - w[at], got + v[at]))
    return best


def tour_ratio(returns: np.ndarray, state: Any, chance: np.ndarray) -> dict:
    """Mean length by mean shortest length, of the first levels; less is better."""
    best = shortest_tours(np.asarray(state.place))
    return {
        "value": float(-returns[..., : len(best)].mean() / best.mean()),
        "optimum": float(best.mean()),
    }


def route_ratio(returns: np.ndarray, state: Any, chance: np.ndarray) -> dict:
    """Mean length by mean shortest length; less is better."""
    best = shortest_routes(
        np.asarray(state.place), np.asarray(state.demand), np.asarray(state.capacity)
    )
    return {"value": float(-returns[..., : len(best)].mean() / best.mean()), "optimum": float(best.mean()),
            "random": float(-chance[: len(best)].mean() / best.mean())}  # fmt: skip


def sack_ratio(returns: np.ndarray, state: Any, chance: np.ndarray) -> dict:
    """Mean value by mean greatest value."""
    level = state.level
    best = fullest_sacks(
        np.asarray(level.weight), np.asarray(level.value), np.asarray(level.capacity)
    )
    return {
        "value": float(returns[..., : len(best)].mean() / best.mean()),
        "optimum": float(best.mean()),
    }


def solved(returns: np.ndarray, state: Any, chance: np.ndarray) -> dict:
    """The share of levels with the full return of 1."""
    return {"value": float((returns > 0.999).mean()), "random": float((chance > 0.999).mean())}


def times_random(returns: np.ndarray, state: Any, chance: np.ndarray) -> dict:
    """The mean return, in mean returns of random legal play."""
    return {"value": float(returns.mean() / chance.mean()), "mean": float(returns.mean()),
            "most": float(returns.max()), "random": float(chance.mean())}  # fmt: skip


def makespan(returns: np.ndarray, state: Any, chance: np.ndarray) -> dict:
    """The shortest schedule of each seed's, its mean."""
    each = -returns.max(-1)
    return {"value": float(each.mean()), "each": each.tolist(), "random": float(-chance.mean())}


@dataclasses.dataclass(frozen=True)
class Case:
    """What is learned, how it is judged, and the bar.

    Attributes:
        flags: of `experiments.rl`, on top of its preset.
        judge: returns `[S, L]`, the first states of levels, and returns of random play -> "value".
        bar: of the value; NaN is none.
        steps: most of an episode that is judged.
        small: flags where a small puzzle stands for it.
        search: whether the best of drawn episodes is what counts.
        levels: for whose optimum there is time.
        test: the environment that is judged, if it is another than the one that is learned in.
        pool: whether episodes start from a pool of states drawn in each update, since levels take long to draw.
    """

    flags: tuple[str, ...]
    judge: Callable[[np.ndarray, Any, np.ndarray], dict]
    bar: float
    steps: int
    small: tuple[str, ...] = ()
    search: bool = False
    levels: int = 100_000
    test: str = ""
    pool: bool = False


NARROW = ("items.width=32", "items.heads=2", "num_envs=128")
CASES = {
    "TSP-20": Case(("preset=puzzle_tsp",), tour_ratio, 1.06, 20, (*NARROW, "env=TSP-10"), levels=64),
    "TSP-20-A2C": Case(  # one gradient step a rollout, so rollouts are short
        ("preset=puzzle_tsp_a2c",), tour_ratio, 1.06, 20, (*NARROW[:2], "env=TSP-10", "num_envs=64", "num_steps=9"),
        levels=64,
    ),
    "Knapsack-50": Case(("preset=puzzle_knapsack",), sack_ratio, 0.97, 50, (*NARROW, "env=Knapsack-20"), levels=256),
    "2048": Case(("preset=puzzle_2048",), times_random, 10.0, 4000, ("env=2048-3x3", "num_envs=128", "hidden=[128]")),
    "Countdown-4": Case(("preset=puzzle_countdown",), solved, 0.9, 4, (*NARROW, "env=Countdown-3", "num_envs=256")),
    "FT06": Case(("preset=puzzle_ft06",), makespan, 60.0, 40, NARROW, search=True),
    "Sokoban-8x8": Case(
        ("preset=puzzle_sokoban",), solved, 0.7, 120, ("env=Sokoban-6x6", "num_envs=128", "conv=[16]", "hidden=[128]"),
        pool=True,
    ),
    "RubiksCube-3": Case(
        ("preset=puzzle_cube",), solved, 0.9, 20, ("num_envs=256", "hidden=[128]"), search=True, test="RubiksCube-3"
    ),
    # Small enough for two cores as they are, and without a bar.
    "CVRP-10": Case(("preset=puzzle_cvrp",), route_ratio, float("nan"), 22, levels=64),
    "SlidingTile-3x3": Case(("preset=puzzle_tiles",), solved, float("nan"), 100),
    "MineSweeper-6x6": Case(("preset=puzzle_mines",), solved, float("nan"), 36),
}  # fmt: skip
LESS_IS_BETTER = (tour_ratio, route_ratio, makespan)


def make(case: Case, small: bool):
    """Returns the learner, its parameters, and the configuration it is of."""
    from experiments.rl import compose, make_learner

    config = compose(*case.flags, *(case.small if small else ()), "anneal=false")
    learner, params = make_learner(config)
    if case.pool:
        learner = dataclasses.replace(learner, reset=Pool(4096 if not small else 256))
    return learner, params, config


def learn(learner, params, seeds: int, seconds: float, key) -> tuple[Any, dict]:
    """Learns for about so many seconds; returns the weights `[S, ...]` and what it took."""
    many = Seeds(learner, seeds, params)

    def updates(state, key, count):
        def one(carry):
            place, state, _ = carry
            state, info = many.step(jax.random.fold_in(key, state.updates[0]), state, params)
            return (
                place + 1,
                state,
                {name: info[name] for name in ("return_mean", "entropy", "grad_norm", "skipped")},
            )

        start = {
            name: jnp.float32(0) for name in ("return_mean", "entropy", "grad_norm", "skipped")
        }
        return jax.lax.while_loop(
            lambda carry: carry[0] < count, one, (jnp.int32(0), state, start)
        )[1:]

    began = time.monotonic()
    state = jax.jit(many.init)(jax.random.fold_in(key, 2**32 - 1), params)
    go = jax.jit(updates, donate_argnums=0).lower(state, key, jnp.int32(1)).compile()
    compile_s = time.monotonic() - began
    print(f"compiled in {compile_s:.0f} s", file=sys.stderr, flush=True)
    began, made, chunk, curve = time.monotonic(), 0, 1, []
    known = began
    while (left := seconds - (time.monotonic() - began)) > 0:
        if made >= 4:  # then it is known how long an update takes
            each = (time.monotonic() - known) / (made - 1)
            total = made + int(left / each)
            chunk = max(1, min(int(max(seconds / 40, 1) / each), total - made))
            if total == made:
                break
            state = state.replace(
                rates=state.rates.replace(anneal=jnp.full(seeds, total, jnp.float32))
            )
        state, info = go(state, key, jnp.int32(chunk))
        info = {name: float(x) for name, x in info.items()}  # waits
        if made == 0:
            known = time.monotonic()  # after the first one, which is slower
        made += chunk
        curve.append(round(info["return_mean"], 4))
        if len(curve) % 10 == 4:
            print(
                f"{time.monotonic() - began:.0f} s: update {made}, return {curve[-1]}",
                file=sys.stderr,
                flush=True,
            )
        if not np.isfinite(info["grad_norm"]) or info["skipped"]:
            raise FloatingPointError(f"the gradient is not finite after update {made}")
    took = time.monotonic() - began
    steps = made * learner.num_envs * learner.num_steps
    told = {"updates": made, "steps_a_seed": steps, "train_s": round(took, 1), "compile_s": round(compile_s, 1),
            "steps_per_s": round(steps * seeds / took), "entropy": info["entropy"], "curve": curve[-40:]}  # fmt: skip
    return state.weights, told


def judge(
    case: Case, learner, params, config, weights, key, episodes: int, tries: int, levels: int
) -> dict:
    """Plays levels by likeliest actions, by drawn ones `tries` times, and at random."""
    from experiments.app.env.environment import make_world

    env = (
        make_world(case.test, {**config.env_fields}, config.params)[0] if case.test else learner.env
    )
    agents = [
        dataclasses.replace(learner.agent(greedy=greedy), env=env) for greedy in (True, False)
    ]
    state = jax.jit(lambda key: init(key, env, params, episodes, agents[0].first_carry()))(key)

    def played(policy):
        def play(key, weights, state):
            options = RolloutOptions(reset=NoReset())
            kept = rollout(key, state, env, params, policy, weights, case.steps, options)[1]
            return first_episodes(kept).returns

        return play

    greedy = np.asarray(
        jax.jit(lambda w: jax.lax.map(lambda one: played(agents[0])(key, one, state), w))(weights)
    )
    best = greedy
    drawn = jax.jit(lambda key, w: jax.lax.map(lambda one: played(agents[1])(key, one, state), w))
    for i in range(tries):
        best = np.maximum(best, np.asarray(drawn(jax.random.fold_in(key, 1 + i), weights)))
    bare = state.replace(carry=(), first_carry=())
    chance = np.asarray(jax.jit(played(random_policy(env)))(key, params, bare))
    first = jax.tree.map(lambda x: x[: min(levels, case.levels)], jax.device_get(state.state))
    found = {
        name: case.judge(x, first, chance) for name, x in (("greedy", greedy), ("best_of", best))
    }
    each = [case.judge(x[None], first, chance)["value"] for x in (best if case.search else greedy)]
    return {
        "value": found["best_of" if case.search else "greedy"]["value"],
        "each": each,
        "tries": tries,
        **found,
    }


def main() -> None:
    """Learns and judges every case, a JSON line each."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--only", default=",".join(CASES), help=f"of {','.join(CASES)}")
    parser.add_argument("--seconds", type=float, default=420, help="of learning, a puzzle")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--episodes", type=int, default=1024, help="levels that are judged, a seed")
    parser.add_argument("--tries", type=int, default=32, help="drawn episodes of each level")
    parser.add_argument(
        "--levels", type=int, default=100_000, help="most levels that are compared to an optimum"
    )
    parser.add_argument("--small", action="store_true", help="small puzzles and networks, for CPUs")
    parser.add_argument(
        "--flags", default="", help="more flags of experiments.rl, such as 'num_envs=64 epochs=1'"
    )
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument(
        "--out", type=pathlib.Path, help="a file that the lines are also appended to"
    )
    args = parser.parse_args()
    if unknown := set(args.only.split(",")) - set(CASES):
        parser.error(f"--only {','.join(sorted(unknown))}: legal are {', '.join(CASES)}")
    for name in args.only.split(","):
        case = dataclasses.replace(CASES[name], flags=(*CASES[name].flags, *args.flags.split()))
        row: dict[str, Any] = {
            "puzzle": name,
            "bar": case.bar if case.bar == case.bar else None,
            "seeds": args.seeds,
        }
        try:
            learner, params, config = make(case, args.small)
            key = jax.random.key(args.seed)
            row |= {
                "env": config.env,
                "device": jax.devices()[0].device_kind,
                "learner": config.algorithm,
            }
            weights, told = learn(learner, params, args.seeds, args.seconds, key)
            began = time.monotonic()
            found = judge(case, learner, params, config, weights, jax.random.fold_in(key, 2**32 - 2), args.episodes,
                          args.tries, args.levels)  # fmt: skip
            held = (
                found["value"] <= case.bar
                if case.judge in LESS_IS_BETTER
                else found["value"] >= case.bar
            )
            row |= {"held": bool(held)} if row["bar"] else {}
            row |= {**found, **told, "judge_s": round(time.monotonic() - began, 1)}
        except Exception as error:  # a puzzle may fail, and is a row then
            row |= {"failed": f"{type(error).__name__}: {' '.join(str(error).split())[:400]}"}
        line = json.dumps(row)
        print(line, flush=True)
        if args.out:
            args.out.parent.mkdir(parents=True, exist_ok=True)
            with args.out.open("a") as file:
                file.write(line + "\n")


if __name__ == "__main__":
    main()
