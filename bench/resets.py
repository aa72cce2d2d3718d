"""What a costly reset costs: steps a second of a drawn island by reset policy, where 0.1 to 10 % of the steps end one.

Ends are drawn, each environment ending in each step with the chance of the row, in place of the environment's own: so
every policy sees the same rate, spread over the environments. All policies of a row run in this one process in turn,
round after round, as in `bench/env.py`; ratios are to `SameStep`, which resets all environments at every step, and
every observation, reward and flag is summed. "no ends" is `Chunked()` where nothing ends: the upper bound.

    python bench/resets.py                                              # CPU, some minutes
    python bench/resets.py --env Survival --num-envs 4096 --steps 64
    python bench/resets.py --env Craftax-Classic-Symbolic-v1             # where Craftax is installed
"""

import argparse
import dataclasses
import json
import os
import pathlib
import sys
import time
from typing import Any

sys.path.insert(0, str(pathlib.Path(__file__).parents[1]))

import flax.struct
import jax
import jax.numpy as jnp
from env import checksum, made, measured
from harness import HERE, Table

from jaxpar.env import reset, step
from jaxpar.rollout import Chunked, Pool, RolloutOptions, SameStep, init, random_policy, rollout


@flax.struct.dataclass
class Params:
    """The environment's parameters, and the chance that a step ends an episode."""

    env: Any
    rate: Any


@dataclasses.dataclass(frozen=True)
class EndsByChance:
    """An environment whose episodes end by chance, and by nothing else."""

    env: Any

    def action_space(self, params):
        """The environment's."""
        return self.env.action_space(params.env)

    def reset(self, key, params):
        """The environment's."""
        return reset(key, self.env, params.env)

    def step(self, key, state, action, params):
        """The environment's, with another end."""
        step_key, end_key = jax.random.split(key)
        made = step(step_key, self.env, state, action, params.env)
        ends = jax.random.bernoulli(end_key, params.rate)
        return made._replace(terminated=ends, truncated=jnp.zeros_like(ends))


def program(name: str, num_envs: int, num_steps: int, policy: Any) -> dict:
    """Returns what runs, `(key, (environments, params)) -> ...`, its environments and the seconds of compilation."""
    inner, params, _ = made(name)
    env = EndsByChance(inner)

    def keep(row):
        return checksum(row.obs, row.reward, row.terminated, row.truncated).sum()[
            None
        ], row.ended.sum()[None]

    def go(key, carry):
        env_state, params = carry
        env_state, (total, ended) = rollout(
            key,
            env_state,
            env,
            params,
            random_policy(env),
            params,
            num_steps,
            RolloutOptions(reset=policy, keep=keep),
        )
        return (env_state, params), total.sum(), ended.sum()

    params = Params(params, jnp.float32(0))
    env_state = init(jax.random.key(1), env, params, num_envs)
    began = time.perf_counter()
    compiled = jax.jit(go).lower(jax.random.key(0), (env_state, params)).compile()
    return {"go": compiled, "carry": (env_state, params), "compile_s": time.perf_counter() - began}


def at_rate(side: dict, rate: float) -> dict:
    """Returns the program with the chance of an end set."""
    env_state, params = side["carry"]
    return side | {"carry": (env_state, params.replace(rate=jnp.float32(rate)))}


def main() -> None:
    """Measures every policy at every rate."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--env", default="Survival-32x32")
    parser.add_argument("--rates", default="0.001,0.003,0.01,0.03,0.1")
    parser.add_argument("--num-envs", type=int, default=256)
    parser.add_argument(
        "--steps", type=int, default=32, help="steps of a program; a pool is drawn once in each"
    )
    parser.add_argument("--pool", type=int, default=32, help="states in the pool")
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument(
        "--budget-s", type=float, default=1200, help="no row starts after these seconds"
    )
    parser.add_argument("--out", type=pathlib.Path, default=HERE / "results" / "resets.json")
    args = parser.parse_args()
    columns = {
        "ends %": lambda row: f"{100 * row['rate']:.2g}",
        "policy": lambda row: row["side"],
        "thousand steps/s": lambda row: f"{1000 * row['msps']:.4g}",
        "ratio (quartiles)": lambda row: (
            f"{row['ratio']:.1f}x ({row['low']:.1f}-{row['high']:.1f})"
        ),
        "seen %": lambda row: f"{100 * row['done']:.2f}",
        "compile s": lambda row: f"{row['compile_s']:.1f}",
    }
    table, began = Table(columns, args.out), time.monotonic()
    device, load = jax.devices()[0].device_kind, os.getloadavg()[0]
    shape = f"{args.num_envs} environments, {args.steps} steps a program"
    table.head(
        f"{args.env}, {shape}, {device}, jax {jax.__version__}, {args.rounds} rounds, load {load:.1f} before"
    )
    policies = {
        "SameStep()": SameStep(),
        "Chunked()": Chunked(),
        f"Pool({args.pool})": Pool(args.pool),
    }
    sides = {
        name: program(args.env, args.num_envs, args.steps, policy)
        for name, policy in policies.items()
    }
    for rate in map(float, args.rates.split(",")):
        case = {
            "env": args.env,
            "environments": args.num_envs,
            "steps": args.steps,
            "rate": rate,
            "device": device,
        }
        if time.monotonic() - began > args.budget_s:
            table.add(case | {"side": "", "failed": "skipped: the budget is spent"})
            continue
        ending = {name: at_rate(side, rate) for name, side in sides.items()}
        ending["no ends"] = at_rate(sides["Chunked()"], 0)
        for row in measured(ending, args.rounds, args.num_envs, args.steps):
            table.add(case | row)
    print(
        json.dumps(
            {"out": str(args.out), "rows": len(table.rows), "load after": os.getloadavg()[0]}
        )
    )


if __name__ == "__main__":
    main()
