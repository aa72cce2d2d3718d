"""Planners of jaxpar beside pomdp-py's POMCP (CPU) and the VOPP that its authors published (torch, a GPU).

RockSample(7, 8), depth 30, the same number of simulations a plan, beside pomdp-py, which is installed apart:

    pip install --no-deps --target peers pomdp-py && python bench/pomdp.py --peers peers
    python bench/pomdp.py --peers peers --episodes 20 --simulations 4096      # returns, too

Multi-agent RockSample(20, 20) and Navigation, the same problem, maps and number of simulations, or the same clock:

    python bench/pomdp.py --cases mars,navigation --vopp path/to/VOPP
    python bench/pomdp.py --cases mars --vopp path/to/VOPP --budget 0.1 --episodes 20

All sides of a case plan in turn in this process, round after round, from the start belief; a row shows the median of
its rounds, and the median and quartiles of the ratio to the first side's simulations a second in the same round.
Compilation is counted apart. Episodes are paired: the same maps and first states for all.
"""

import argparse
import itertools
import json
import os
import pathlib
import statistics
import sys
import time
from collections.abc import Callable
from typing import Any

os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")  # torch wants its share of the GPU
sys.path.insert(0, str(pathlib.Path(__file__).parents[1]))

import jax
import numpy as np
from harness import HERE, Table

import envs
from experiments.app.env.pomdp_film import moves
from experiments.app.env.rock_beliefs import Flips, RockBelief
from jaxpar.pomdp import ParticleBelief, Pomcp, Vopp

CASES = {
    "rocksample": {"env": "RockSample-7-8", "depth": 30, "eta": 0.5, "alpha": 1.0, "num_steps": 40},
    "mars": {"env": "MARS-20-20", "depth": 90, "eta": 2.0, "alpha": 0.5, "num_steps": 90},
    "navigation": {"env": "Navigation-13", "depth": 60, "eta": 2.0, "alpha": 1.0, "num_steps": 60},
}


class Ours:
    """A planner of ours with its own number of batches, or by the clock."""

    def __init__(self, env: Any, params: Any, planner: Any, belief: Any, budget_s: float):
        self.env, self.params, self.planner, self.belief, self.budget_s = (
            env,
            params,
            planner,
            belief,
            budget_s,
        )
        start = belief.init(jax.random.key(0), env, params)
        began = time.perf_counter()
        self.start, self.program = start, None
        if budget_s:
            planner.plan_until(
                jax.random.key(0), env, params, start, 1.5, itertools.count().__next__
            )  # a batch
        else:
            made = jax.jit(lambda key, belief: planner.plan(key, env, params, belief))
            self.program = made.lower(jax.random.key(0), start).compile()
        self.compile_s = time.perf_counter() - began

    def _planned(self, key: Any, belief: Any) -> tuple[Any, Any]:
        if self.program:
            return jax.block_until_ready(self.program(key, belief))
        until = time.monotonic() + self.budget_s
        return jax.block_until_ready(
            self.planner.plan_until(key, self.env, self.params, belief, until)
        )

    def plan(self, seed: int) -> tuple[int, int | None]:
        """One plan from the start belief."""
        _, info = self._planned(jax.random.key(seed), self.start)
        self.overflow = int(info.overflow)
        return int(info.iterations) * self.planner.num_simulations, int(info.steps)

    def episode(self, start: Any, seed: int, num_steps: int) -> float:
        """The discounted return of one episode from `start`."""
        plan = lambda key, belief: (*self._planned(key, belief), None, 0.0)  # noqa: E731
        episode = moves(
            jax.random.key(seed), self.env, self.params, self.belief, num_steps, plan, start=start
        )
        return sum(move.reward * float(self.params.discount) ** t for t, move in enumerate(episode))


def sides_of(case: str, args: argparse.Namespace, layout: int = 0) -> dict[str, Callable[[], Any]]:
    """Returns what makes each side of a case, on the map with that seed; the peer first."""
    facts, count = CASES[case], args.num_simulations
    fields = {} if case == "rocksample" else {"layout": layout}
    env, params = envs.make(facts["env"], **fields)
    batches = args.iterations if args.budget else max(1, args.simulations // count)
    peers, belief = {}, ParticleBelief(args.particles)
    shape = dict(iterations=batches, max_depth=facts["depth"], max_nodes=args.max_nodes)
    if case == "rocksample":
        params, belief = params.replace(illegal_reward=0.0), RockBelief()
        if args.peers:
            sys.path.append(str(args.peers))
            from peers.planners import PomdpPy

            peers["pomdp-py"] = lambda: PomdpPy(env, args.simulations, facts["depth"], 20.0, 1000)
        planners = {
            "Pomcp": Pomcp(
                args.pomcp_simulations,
                exploration=20.0,
                **shape | {"iterations": max(1, args.simulations // args.pomcp_simulations)},
            ),
            "Vopp": Vopp(count, eta=facts["eta"], depth_power=facts["alpha"], **shape),
        }
    else:
        belief = (
            RockBelief() if case == "mars" else ParticleBelief(args.particles, 0.5, Flips(0.001))
        )
        if args.vopp:
            from peers.planners import OfficialVopp

            options = facts | {"num_simulations": count, "particles": args.particles}
            simulations = 0 if args.budget else args.simulations
            peers["official VOPP"] = lambda: OfficialVopp(
                args.vopp, env, options, simulations, args.budget
            )
        planners = {"Vopp": Vopp(count, eta=facts["eta"], depth_power=facts["alpha"], **shape)}
    ours = {
        f"jaxpar {name}": lambda planner=planner: Ours(env, params, planner, belief, args.budget)
        for name, planner in planners.items()
    }
    return peers | ours


def measured(sides: dict[str, Any], rounds: int) -> list[dict]:
    """Plans with all sides in turn, for `rounds` rounds after one of warm-up; one row a side."""
    seconds, counts = {name: [] for name in sides}, {name: [] for name in sides}
    for i in range(rounds + 1):
        for name, side in sides.items():
            began = time.perf_counter()
            made = side.plan(i)
            if i:
                seconds[name].append(time.perf_counter() - began)
                counts[name].append(made)
    rates = {
        name: [made[0] / s for made, s in zip(counts[name], seconds[name], strict=True)]
        for name in sides
    }
    first, rows = next(iter(sides)), []
    for name, side in sides.items():
        ratios = [mine / theirs for mine, theirs in zip(rates[name], rates[first], strict=True)]
        low, middle, high = statistics.quantiles(ratios, n=4) if rounds > 1 else ratios * 3
        steps = [
            made[1] / s
            for made, s in zip(counts[name], seconds[name], strict=True)
            if made[1] is not None
        ]
        rows.append({
            "side": name, "simulations": statistics.median(made[0] for made in counts[name]),
            "plan_s": statistics.median(seconds[name]), "sims_per_s": statistics.median(rates[name]), "ratio": middle,
            "low": low, "high": high, "steps_per_s": statistics.median(steps) if steps else None,
            "compile_s": side.compile_s, "overflow": getattr(side, "overflow", 0),
        })  # fmt: skip
    return rows


def returns(case: str, args: argparse.Namespace) -> list[dict]:
    """Plays the same episodes with every side, each on a map of its own where maps are drawn; one row a side."""
    found: dict[str, list[float]] = {}
    sides = {}
    for i in range(args.episodes):
        if case != "rocksample" or not sides:
            sides = {name: make() for name, make in sides_of(case, args, layout=i).items()}
        env, params = envs.make(
            CASES[case]["env"], **({} if case == "rocksample" else {"layout": i})
        )
        start = env.init(jax.random.key(1000 + i), params)
        for name, side in sides.items():
            first = np.asarray(start.good).tolist() if name == "pomdp-py" else start
            found.setdefault(name, []).append(side.episode(first, i, CASES[case]["num_steps"]))
    rows, peer = [], next(iter(found.values()))
    for name, values in found.items():
        gains = np.asarray(values) - np.asarray(peer)
        errors = [
            x.std(ddof=1) / len(x) ** 0.5 if len(x) > 1 else 0.0
            for x in (np.asarray(values), gains)
        ]
        rows.append({
            "side": name, "return": float(np.mean(values)), "error": float(errors[0]), "gain": float(gains.mean()),
            "gain_error": float(errors[1]), "returns": values,
        })  # fmt: skip
    return rows


def main() -> None:
    """Measures every case."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--cases", default="rocksample", help=f"of {','.join(CASES)}")
    parser.add_argument("--peers", type=pathlib.Path, help="folder that pomdp-py is installed in")
    parser.add_argument("--vopp", type=pathlib.Path, help="checkout of the published VOPP")
    parser.add_argument("--simulations", type=int, default=4096, help="of a plan")
    parser.add_argument(
        "--num-simulations", type=int, default=256, help="in parallel, of both VOPPs"
    )
    parser.add_argument(
        "--pomcp-simulations", type=int, default=64, help="in parallel, of our Pomcp"
    )
    parser.add_argument(
        "--budget", type=float, default=0.0, help="seconds of a plan instead of simulations"
    )
    parser.add_argument(
        "--iterations", type=int, default=4096, help="most batches of a plan by the clock"
    )
    parser.add_argument("--max-nodes", type=int, default=1 << 17)
    parser.add_argument("--particles", type=int, default=10_000)
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--episodes", type=int, default=0, help="paired episodes of each side")
    parser.add_argument("--out", type=pathlib.Path, default=HERE / "results" / "pomdp.json")
    args = parser.parse_args()
    columns = {
        "case": lambda row: row["case"],
        "side": lambda row: row["side"],
        "simulations": lambda row: f"{row['simulations']:,.0f}",
        "plan s": lambda row: f"{row['plan_s']:.4g}",
        "simulations/s": lambda row: f"{row['sims_per_s']:.4g}",
        "ratio (quartiles)": lambda row: (
            f"{row['ratio']:.1f}x ({row['low']:.1f}-{row['high']:.1f})"
        ),
        "tree steps/s": lambda row: f"{row['steps_per_s']:.3g}",
        "return": lambda row: f"{row['return']:.2f} ± {row['error']:.2f}",
        "more than the first": lambda row: f"{row['gain']:+.2f} ± {row['gain_error']:.2f}",
        "compile s": lambda row: f"{row['compile_s']:.1f}",
    }
    table, device = Table(columns, args.out), jax.devices()[0].device_kind
    table.head(
        f"{device}, jax {jax.__version__}, {args.rounds} rounds, load {os.getloadavg()[0]:.1f} before"
    )
    for case in args.cases.split(","):
        if case not in CASES:
            raise SystemExit(f"--cases knows no {case}; legal are {', '.join(CASES)}")
        try:
            rows = measured(
                {name: make() for name, make in sides_of(case, args).items()}, args.rounds
            )
            rows += returns(case, args) if args.episodes else []
        except Exception as error:  # a case may fail, and is a row then
            rows = [
                {
                    "side": "",
                    "failed": f"{type(error).__name__}: {' '.join(str(error).split())[:200]}",
                }
            ]
        for row in rows:
            table.add({"case": case, "device": device} | row)
    print(json.dumps({"out": str(args.out), "rows": len(table.rows)}))


if __name__ == "__main__":
    main()
