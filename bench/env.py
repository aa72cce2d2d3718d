"""Steps of environments a second: gymnax's own loop, our rollout of the same environment, Gymnasium's NumPy vectors.

All sides of a case run in this one process in turn, round after round; a row shows the median of its rounds and the
median and quartiles of the ratio to the first side's in the same round, so what else the machine does falls on all.
Every observation, reward and flag is summed as it comes, or XLA would drop what makes it.

| side | what it is |
| --- | --- |
| bare | gymnax's `reset` and `step` under `vmap` in a `scan`, keys split for each environment; resets at every step |
| env, batch | `jaxpar.rollout.rollout` of the same environment, without its own resets, by either `prng` |
| env-same, batch-same | the same with `SameStep()` |
| batch-loop, batch-pool | the same with `Chunked(environments / 32)`, which always loops, and with `Pool(256)` |
| env-unroll1, batch-unroll1 | the same with one step in an iteration of the compiled loop, or any other number |
| none | no reset at all: what the others strive for |
| numpy | Gymnasium's vector environment in NumPy, where it has one |

`--envs` takes gymnax's names, those of `envs`, and Craftax's where it is installed; `bare` is for gymnax's alone:
others are compared with the first side named. Random policies. Done rates are shown, for they decide what resets cost.

    python bench/env.py --envs CartPole-v1 --num-envs 64,1024,4096,16384          # CPU
    python bench/env.py --envs CartPole-v1,Breakout-MinAtar --num-envs 2048,65536,1048576 --steps 100
"""

import argparse
import json
import os
import pathlib
import statistics
import sys
import time
from typing import Any

sys.path.insert(0, str(pathlib.Path(__file__).parents[1]))

import jax
import jax.numpy as jnp
from harness import HERE, SPEED_COLUMNS, Table

from jaxpar.env import adapt
from jaxpar.rollout import (
    Chunked,
    NoReset,
    Pool,
    RolloutOptions,
    SameStep,
    init,
    random_policy,
    rollout,
)

SIDES = (
    "bare", "env-same", "env", "batch-same", "batch", "batch-unroll1", "batch-loop", "batch-pool", "none", "numpy",
)  # fmt: skip


def made(name: str) -> tuple[Any, Any, Any]:
    """Returns the environment for our rollout, its parameters, and gymnax's own object or None."""
    if name.startswith("Craftax"):
        from craftax.craftax_env import make_craftax_env_from_name

        env = make_craftax_env_from_name(name, auto_reset=False)
        return adapt(env), env.default_params, None
    import gymnax

    if name in gymnax.registered_envs:
        env, params = gymnax.make(name)
        return adapt(env, params), params, env
    import envs

    env, params = envs.make(name)
    return env, params, None


def checksum(*trees: Any) -> jax.Array:
    """Returns the sum of everything, one number for each environment."""
    leaves = jax.tree.leaves(trees)
    return sum(leaf.astype(jnp.float32).reshape(len(leaf), -1).sum(1) for leaf in leaves)  # type: ignore[return-value]


def bare_side(env, params, num_envs, num_steps):
    """Returns gymnax's loop, `(key, carry) -> (carry, sum, episodes)`, and its first carry."""
    act, step = jax.vmap(env.action_space(params).sample), jax.vmap(env.step, (0, 0, 0, None))

    def go(key, carry):
        def body(carry, key):
            act_key, step_key = jax.random.split(key)
            action = act(jax.random.split(act_key, num_envs))
            seen = carry[0]
            *carry, reward, terminated, truncated, _ = step(
                jax.random.split(step_key, num_envs), carry[1], action, params
            )
            return tuple(carry), (
                checksum(seen, reward, terminated, truncated).sum(),
                (terminated | truncated).sum(),
            )

        carry, (total, ended) = jax.lax.scan(body, carry, jax.random.split(key, num_steps))
        return carry, total.sum(), ended.sum()

    first = jax.vmap(env.reset, (0, None))(jax.random.split(jax.random.key(1), num_envs), params)
    # Some environments begin with other types than they go on with: a scan carries those of a step.
    action = act(jax.random.split(jax.random.key(2), num_envs))
    return go, step(jax.random.split(jax.random.key(3), num_envs), first[1], action, params)[:2]


def our_side(env, params, num_envs, num_steps, side, warm):
    """Returns our loop and its environments after `warm` steps, so that episodes end as often as they will."""
    prng, _, how = side.partition("-")
    reset = {"same": SameStep(), "loop": Chunked(max(1, num_envs // 32)), "pool": Pool(256)}.get(
        how
    )
    unroll = int(how.removeprefix("unroll")) if how.startswith("unroll") else None
    if side == "none":
        prng, reset = "batch", NoReset()

    def keep(row):
        return checksum(row.obs, row.reward, row.terminated, row.truncated).sum()[
            None
        ], row.ended.sum()[None]

    def go(key, env_state):
        options = RolloutOptions(reset=reset, prng=prng, keep=keep, unroll=unroll)
        env_state, (total, ended) = rollout(
            key, env_state, env, params, random_policy(env), params, num_steps, options
        )
        return env_state, total.sum(), ended.sum()

    env_state = init(jax.random.key(1), env, params, num_envs, prng=prng)
    if warm:
        options = RolloutOptions(prng=prng, keep=lambda row: row.ended)
        env_state, _ = rollout(
            jax.random.key(1), env_state, env, params, random_policy(env), params, warm, options
        )
    return go, env_state


def numpy_side(name, num_envs, num_steps):
    """Returns Gymnasium's loop; it has a NumPy vector environment for a few names only."""
    import gymnasium

    env = gymnasium.make_vec(name, num_envs, vectorization_mode="vector_entry_point")
    env.reset(seed=0)

    def go(key, carry):
        total, ended = 0.0, 0
        for _ in range(num_steps):
            obs, reward, terminated, truncated, _ = env.step(env.action_space.sample())
            total += obs.sum() + reward.sum() + terminated.sum() + truncated.sum()
            ended += int((terminated | truncated).sum())
        return None, total, ended

    return go, None


def programs(
    name: str, num_envs: int, num_steps: int, sides: list[str], warm: int
) -> dict[str, dict]:
    """Returns what runs of each side that exists here, its first carry and the seconds of compilation."""
    env, params, theirs = made(name)
    found = {}
    for side in sides:
        if side == "numpy":
            try:
                go, carry = numpy_side(name, num_envs, num_steps)
            except Exception:  # no such environment, or none in NumPy: this side has no row
                continue
            found[side] = {"go": go, "carry": carry, "compile_s": 0.0}
            continue
        if side == "bare":
            if theirs is None:
                continue
            go, carry = bare_side(theirs, params, num_envs, num_steps)
        else:
            go, carry = our_side(env, params, num_envs, num_steps, side, warm)
        began = time.perf_counter()
        compiled = jax.jit(go).lower(jax.random.key(0), carry).compile()
        found[side] = {"go": compiled, "carry": carry, "compile_s": time.perf_counter() - began}
    return found


def measured(sides: dict[str, dict], rounds: int, num_envs: int, num_steps: int) -> list[dict]:
    """Runs all sides in turn for `rounds` rounds after two of warm-up; one row a side."""
    taken = {side: [] for side in sides}
    ended = dict.fromkeys(sides, 0)
    for i in range(rounds + 2):
        for side, program in sides.items():
            began = time.perf_counter()
            program["carry"], total, ends = program["go"](jax.random.key(i), program["carry"])
            float(total)
            if i >= 2:
                taken[side].append(time.perf_counter() - began)
                ended[side] += int(ends)
    first = taken[next(iter(sides))]
    rows = []
    for side, seconds in taken.items():
        ratios = [a / b for a, b in zip(first, seconds, strict=True)]
        low, middle, high = statistics.quantiles(ratios, n=4)
        rows.append({
            "side": side, "msps": num_envs * num_steps / statistics.median(seconds) / 1e6, "ratio": middle,
            "low": low, "high": high, "done": ended[side] / (rounds * num_envs * num_steps),
            "compile_s": sides[side]["compile_s"],
        })  # fmt: skip
    return rows


def make_parser(
    doc: str | None, out: str, *, num_envs: str = "1024", steps: int = 64, rounds: int = 20
) -> argparse.ArgumentParser:
    """Returns a parser with the flags of benchmarks whose sides take turns, and their defaults."""
    parser = argparse.ArgumentParser(
        description=doc, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--num-envs", default=num_envs)
    parser.add_argument("--steps", type=int, default=steps, help="steps of a program")
    parser.add_argument("--rounds", type=int, default=rounds)
    parser.add_argument(
        "--budget-s", type=float, default=1200, help="no case starts after these seconds"
    )
    parser.add_argument("--out", type=pathlib.Path, default=HERE / "results" / out)
    return parser


def main() -> None:
    """Measures every environment at every number of environments."""
    parser = make_parser(__doc__, "env.json", num_envs="64,1024,4096,16384")
    parser.add_argument(
        "--envs", default="CartPole-v1,Pendulum-v1,MountainCar-v0,Breakout-MinAtar,Asterix-MinAtar"
    )
    parser.add_argument("--sides", default="bare,env,batch,numpy", help=f"of {','.join(SIDES)}")
    parser.add_argument(
        "--warm", type=int, default=0, help="steps that our sides make before, for long episodes"
    )
    args = parser.parse_args()
    columns = {
        "env": lambda row: row["env"],
        "environments": lambda row: str(row["environments"]),
        "side": lambda row: row["side"],
        **SPEED_COLUMNS,
    }
    table, began = Table(columns, args.out), time.monotonic()
    load = os.getloadavg()[0]
    table.head(
        f"{jax.devices()[0].device_kind}, jax {jax.__version__}, {args.rounds} rounds, load {load:.1f} before"
    )
    for name in args.envs.split(","):
        for num_envs in map(int, args.num_envs.split(",")):
            case = {
                "env": name,
                "environments": num_envs,
                "steps": args.steps,
                "device": jax.devices()[0].device_kind,
            }
            if time.monotonic() - began > args.budget_s:
                table.add(case | {"side": "", "failed": "skipped: the budget is spent"})
                continue
            with table.keep_failure(case):
                sides = programs(name, num_envs, args.steps, args.sides.split(","), args.warm)
                for row in measured(sides, args.rounds, num_envs, args.steps):
                    table.add(case | row)
    print(json.dumps({"out": str(args.out), "rows": len(table.rows)}))


if __name__ == "__main__":
    main()
