"""PPO beside PureJaxRL's: whole runs, many agents at once, memories trained on long rollouts; learners side by side.

Runs of both sides alternate in this one process; seconds are medians, compiling apart. PureJaxRL is given as the path
of its `purejaxrl` folder and run as it is, through gymnax's wrapper for the old step; what it imports and PPO does not
need (Brax, Navix) is replaced by empty modules, and Distrax, where it is not installed, by a categorical distribution.

    python bench/rl.py --purejaxrl PATH                                      # CartPole, 16 seeds one after another
    python bench/rl.py --purejaxrl PATH --agents 256,2048 --updates 100      # many at once
    python bench/rl.py --purejaxrl PATH --env Breakout-MinAtar --steps 1000000 --num-envs 64 --minibatches 8 \
        --activation relu --rate 5e-3 --anneal 1220 --seeds 3
    python bench/rl.py --case memory --num-steps 1024,4096                   # seconds an update, by memory
    python bench/rl.py --case learners --flags "preset=minatar train.steps=10_000_000" --flags "preset=minatar_pqn"
    python bench/rl.py --case vtrace --num-steps 128,4096 --num-envs 1024    # beside a step after another
"""

import argparse
import pathlib
import statistics
import sys
import time
import types
from typing import Any

sys.path.insert(0, str(pathlib.Path(__file__).parents[1]))

import jax
import jax.numpy as jnp
import numpy as np
from harness import HERE, Table

import envs
from experiments.rl import compose, evaluation_returns, make_learner, num_updates
from jaxpar.rl import Network, Ppo, PpoRates, train, vtrace
from jaxpar.solve import Newton, Sequential

MEMORIES: dict[str, tuple[str, Any]] = {
    "gru, scan": ("gru", Sequential()),
    "gru": ("gru", None),
    "para_gru, scan": ("para_gru", Sequential()),
    "para_gru": ("para_gru", Newton()),
    "min_gru": ("min_gru", None),
    "s5": ("s5", None),
    "aaren": ("aaren", None),
    "attention": ("attention", None),
    "transformer": ("transformer", None),
}


def ours(args: argparse.Namespace, updates: int) -> Any:
    """Returns the whole run of a key, giving the mean return of each update."""
    env, _ = envs.make(args.env)
    rates = PpoRates(learning_rate=args.rate, anneal=float(args.anneal or updates))
    ppo = Ppo(env, Network(activation=args.activation), rates, args.num_envs, args.num_steps[0],
              minibatches=args.minibatches, prng=args.prng)  # fmt: skip
    return lambda key: train(ppo, key, None, updates)[1]["return_mean"]


def theirs(args: argparse.Namespace, updates: int) -> Any:
    """Returns PureJaxRL's, likewise: the mean return of episodes that ended in each update."""
    import gymnax
    from gymnax.wrappers import LegacyStepAPIWrapper

    for name in ("brax", "brax.envs", "brax.envs.wrappers", "brax.envs.wrappers.training", "navix"):
        sys.modules.setdefault(name, types.ModuleType(name))
    training: Any = sys.modules["brax.envs.wrappers.training"]
    training.EpisodeWrapper = training.AutoResetWrapper = object
    sys.modules["brax"].envs = sys.modules["brax.envs"]  # type: ignore[attr-defined]
    sys.modules["navix"].Environment = object  # type: ignore[attr-defined]
    try:
        import distrax  # noqa: F401
    except ImportError:
        sys.modules["distrax"] = types.SimpleNamespace(Categorical=_Categorical)  # type: ignore[assignment]
    plain = gymnax.make
    gymnax.make = lambda name: (lambda env, params: (LegacyStepAPIWrapper(env), params))(
        *plain(name)
    )
    sys.path.insert(0, str(args.purejaxrl))
    import ppo

    config = {
        "LR": args.rate, "NUM_ENVS": args.num_envs, "NUM_STEPS": args.num_steps[0],
        "TOTAL_TIMESTEPS": updates * args.num_envs * args.num_steps[0], "UPDATE_EPOCHS": 4,
        "NUM_MINIBATCHES": args.minibatches, "GAMMA": 0.99, "GAE_LAMBDA": 0.95, "CLIP_EPS": 0.2, "ENT_COEF": 0.01,
        "VF_COEF": 0.5, "MAX_GRAD_NORM": 0.5, "ACTIVATION": args.activation, "ENV_NAME": args.env,
        "ANNEAL_LR": not args.anneal, "DEBUG": False,
    }  # fmt: skip
    if args.anneal:  # over more updates than are made: their schedule falls over NUM_UPDATES
        print("note: PureJaxRL's rate is kept here, since it can fall over the run only")
    learn = ppo.make_train(config)
    gymnax.make = plain

    def run(key):
        info = learn(jax.random.key_data(key))["metrics"]
        ended, returns = info["returned_episode"], info["returned_episode_returns"]
        count = ended.sum((1, 2))
        return jnp.where(
            count > 0, jnp.where(ended, returns, 0).sum((1, 2)) / jnp.maximum(count, 1), jnp.nan
        )

    return run


class _Categorical:
    """What PureJaxRL's PPO calls of Distrax."""

    def __init__(self, logits):
        self.log_p = jax.nn.log_softmax(logits)

    def sample(self, seed):
        return jax.random.categorical(seed, self.log_p)

    def log_prob(self, action):
        return jnp.take_along_axis(self.log_p, action[..., None], -1)[..., 0]

    def entropy(self):
        return -jnp.sum(jnp.exp(self.log_p) * self.log_p, -1)


def runs(args: argparse.Namespace, table: Table) -> None:
    """Whole runs of both sides, by turns."""
    for agents in args.agents:
        updates = args.updates or -(-args.steps // (args.num_envs * args.num_steps[0]))
        sides = {"jaxpar": ours(args, updates)} | (
            {"PureJaxRL": theirs(args, updates)} if args.purejaxrl else {}
        )
        programs, taken, found = {}, {side: [] for side in sides}, {side: [] for side in sides}
        keys = jax.random.split(jax.random.key(0), (args.seeds, agents))
        for side, run in sides.items():
            began = time.perf_counter()
            many = jax.vmap(run) if agents > 1 else lambda keys, run=run: run(keys[0])[None]
            compiled = jax.jit(many).lower(keys[0]).compile()
            programs[side] = compiled, time.perf_counter() - began
        for seed in range(args.seeds):
            for side, (program, _) in programs.items():
                began = time.perf_counter()
                found[side].append(np.asarray(program(keys[seed])))
                taken[side].append(time.perf_counter() - began)
        for side, (_, compile_s) in programs.items():
            returns = np.concatenate(found[side])
            tail = np.nanmean(returns[:, -max(1, updates // 50) :], 1)
            over = [
                np.argmax(r >= args.goal) + 1 if (r >= args.goal).any() else np.inf for r in returns
            ]
            seconds = statistics.median(taken[side])
            steps = updates * args.num_envs * args.num_steps[0]
            table.add({
                "env": args.env, "agents": agents, "side": side, "compile_s": compile_s, "seconds": seconds,
                "steps_per_s": agents * steps / seconds, "final": float(tail.mean()),
                "error": float(tail.std(ddof=1) / np.sqrt(len(tail))) if len(tail) > 1 else float("nan"),
                "runs": len(tail), "reached": int(np.isfinite(over).sum()),
                "steps_to_goal": float(np.median(over)) * args.num_envs * args.num_steps[0],
            })  # fmt: skip


def memories(args: argparse.Namespace, table: Table) -> None:
    """Seconds of one update by memory and rollout, all of one width; the ratio is to the first of them."""
    env, _ = envs.make(args.env if args.env != "CartPole-v1" else "RepeatPrevious-Easy")
    for num_steps in args.num_steps:
        programs = {}
        for name in args.memories or MEMORIES:
            memory, method = MEMORIES[name]
            network = Network(
                (args.width,), (args.width,), memory=memory, memory_size=args.width, method=method
            )
            ppo = Ppo(
                env,
                network,
                num_envs=args.num_envs,
                num_steps=num_steps,
                minibatches=args.minibatches,
            )
            state = jax.jit(ppo.init)(jax.random.key(0), None)
            began = time.perf_counter()
            step = jax.jit(lambda key, state, ppo=ppo: ppo.step(key, state, None)).lower(
                jax.random.key(0), state
            )
            programs[name] = step.compile(), state, time.perf_counter() - began, []
        for turn in range(args.rounds + 1):
            for step, state, _, taken in programs.values():
                began = time.perf_counter()
                jax.block_until_ready(step(jax.random.key(turn), state))
                taken.append(time.perf_counter() - began)
        slow = statistics.median(programs[next(iter(programs))][3][1:])
        for name, (_, _, compile_s, taken) in programs.items():
            seconds = statistics.median(taken[1:])
            table.add({"memory": name, "num_steps": num_steps, "seconds": seconds, "ratio": slow / seconds,
                         "compile_s": compile_s})  # fmt: skip


def stepwise_vtrace(log_ratio, reward, value, next_value, done, discount, lambda_):
    """V-trace a step after another, by `lax.scan`."""
    ratio = jnp.exp(log_ratio)
    rho, error = jnp.minimum(1.0, ratio), reward + discount * next_value - value

    def step(after, row):
        ratio, rho, error, done = row
        after = jnp.where(done, 0, discount * lambda_ * after)
        excess = rho * error + jnp.minimum(1.0, ratio) * after
        return excess, (excess, rho * (error + after))

    _, (excess, advantage) = jax.lax.scan(
        step, jnp.zeros_like(value[0]), (ratio, rho, error, done), reverse=True
    )
    return value + excess, advantage


def corrections(args: argparse.Namespace, table: Table) -> None:
    """Seconds of V-trace as one scan and a step after another, by turns, and how far they are apart."""
    for num_steps in args.num_steps:
        rng = np.random.default_rng(0)
        shape = num_steps, args.num_envs
        rows = [jnp.asarray(rng.standard_normal(shape), jnp.float32) for _ in range(4)]
        rows = 0.1 * rows[0], *rows[1:], jnp.asarray(rng.random(shape) < 0.005)
        sides, found, taken = {"jaxpar": vtrace, "lax.scan": stepwise_vtrace}, {}, {}
        programs = {
            side: jax.jit(lambda *rows, f=f: f(*rows, 0.99, 0.95)) for side, f in sides.items()
        }
        for side, program in programs.items():
            found[side], taken[side] = jax.block_until_ready(program(*rows)), []
        for _ in range(args.rounds):
            for side, program in programs.items():
                began = time.perf_counter()
                for _ in range(20):  # enqueued together: one wait for the device
                    made = program(*rows)
                jax.block_until_ready(made)
                taken[side].append((time.perf_counter() - began) / 20)
        pairs = zip(*jax.device_get(list(found.values())), strict=True)
        apart = float(np.max([np.abs(a - b).max() for a, b in pairs]))
        slow = statistics.median(taken["lax.scan"])
        for side, seconds in ((side, statistics.median(each)) for side, each in taken.items()):
            table.add({"num_steps": num_steps, "num_envs": args.num_envs, "side": side, "seconds": seconds,
                       "ratio": slow / seconds, "apart": apart})  # fmt: skip


def learners(args: argparse.Namespace, table: Table) -> None:
    """Whole runs by flags of `experiments.rl`, all compiled first; a row's seeds run side by side as one program."""
    programs = []
    for flags in args.flags:
        config = compose(*flags.split())
        learner, params = make_learner(config)
        updates = num_updates(config, learner)
        keys = jax.random.split(jax.random.key(config.seed), config.num_seeds)

        def run(key, learner=learner, params=params, updates=updates):
            state, infos = train(learner, key, params, updates)
            return state, infos["return_mean"], infos["converged"]

        began = time.perf_counter()
        program = jax.jit(jax.vmap(run)).lower(keys).compile()
        programs.append(
            (flags, config, learner, params, keys, program, time.perf_counter() - began)
        )
    for flags, config, learner, params, keys, program, compile_s in programs:
        began = time.perf_counter()
        state, curves, converged = jax.block_until_ready(program(keys))
        seconds = time.perf_counter() - began
        table.add({
            "flags": flags, "seeds": len(keys), "compile_s": compile_s, "seconds": seconds,
            "steps": curves.shape[1] * learner.num_envs * learner.num_steps, "converged": bool(converged.all()),
            "explored": np.nanmean(curves[:, -max(1, curves.shape[1] // 50) :], 1).tolist(),
            "evaluated": evaluation_returns(config, learner, params, state).tolist(),
        })  # fmt: skip


def mean_and_error(values: list[float]) -> str:
    """Returns "mean ± standard error: each"."""
    error = np.std(values, ddof=1) / np.sqrt(len(values)) if len(values) > 1 else np.nan
    return f"{np.mean(values):.4g} ± {error:.2g}: " + ", ".join(f"{x:.4g}" for x in values)


def main() -> None:
    """Measures one case and writes it down."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    numbers = lambda text: [int(x) for x in text.split(",")]  # noqa: E731
    parser.add_argument("--case", choices=("runs", "memory", "learners", "vtrace"), default="runs")
    parser.add_argument(
        "--flags", action="append", default=[], help="of experiments.rl, a row each"
    )
    parser.add_argument("--purejaxrl", type=pathlib.Path, help="its folder `purejaxrl`")
    parser.add_argument("--env", default="CartPole-v1")
    parser.add_argument("--steps", type=int, default=500_000)
    parser.add_argument("--updates", type=int, default=0, help="instead of steps")
    parser.add_argument("--num-envs", type=int, default=4)
    parser.add_argument("--num-steps", type=numbers, default=[128])
    parser.add_argument("--minibatches", type=int, default=4)
    parser.add_argument("--activation", default="tanh")
    parser.add_argument("--rate", type=float, default=2.5e-4)
    parser.add_argument(
        "--anneal", type=int, default=0, help="updates over which the rate falls; 0: the run's"
    )
    parser.add_argument("--prng", default="env")
    parser.add_argument("--agents", type=numbers, default=[1])
    parser.add_argument("--seeds", type=int, default=16)
    parser.add_argument("--goal", type=float, default=475.0)
    parser.add_argument("--width", type=int, default=128)
    parser.add_argument(
        "--memories", type=lambda text: text.split(";"), default=[], help="of the table, by ;"
    )
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--out", type=pathlib.Path, default=HERE / "results" / "rl.json")
    args = parser.parse_args()
    if args.case == "runs":
        table = Table({
            "env": lambda row: row["env"], "agents": lambda row: f"{row['agents']:,}", "side": lambda row: row["side"],
            "compile s": lambda row: f"{row['compile_s']:.1f}", "run s": lambda row: f"{row['seconds']:.2f}",
            "steps/s": lambda row: f"{row['steps_per_s']:,.0f}",
            "final return": lambda row: f"{row['final']:.4g} ± {row['error']:.2g}",
            f"steps to {args.goal:g}": lambda row: f"{row['steps_to_goal']:,.0f} ({row['reached']}/{row['runs']})",
        }, args.out)  # fmt: skip
        table.head(f"{jax.devices()[0].device_kind}, rounds in turn")
        runs(args, table)
    elif args.case == "learners":
        table = Table({
            "flags": lambda row: f"`{row['flags']}`", "seeds": lambda row: str(row["seeds"]),
            "steps of each": lambda row: f"{row['steps']:,}", "compile s": lambda row: f"{row['compile_s']:.1f}",
            "run s": lambda row: f"{row['seconds']:.2f}",
            "return, exploring": lambda row: mean_and_error(row["explored"]),
            "by likeliest actions": lambda row: mean_and_error(row["evaluated"]),
            "converged": lambda row: str(row["converged"]),
        }, args.out)  # fmt: skip
        table.head(f"{jax.devices()[0].device_kind}: whole runs by flags, seeds side by side")
        learners(args, table)
    elif args.case == "vtrace":
        table = Table({
            "num_steps": lambda row: f"{row['num_steps']:,}", "lanes": lambda row: f"{row['num_envs']:,}",
            "side": lambda row: row["side"], "us": lambda row: f"{1e6 * row['seconds']:.1f}",
            "ratio": lambda row: f"{row['ratio']:.2f}x", "largest difference": lambda row: f"{row['apart']:.1e}",
        }, args.out)  # fmt: skip
        table.head(f"{jax.devices()[0].device_kind}: V-trace, float32")
        corrections(args, table)
    else:
        table = Table({
            "num_steps": lambda row: f"{row['num_steps']:,}", "memory": lambda row: row["memory"],
            "s an update": lambda row: f"{row['seconds']:.3f}", "ratio": lambda row: f"{row['ratio']:.2f}x",
            "compile s": lambda row: f"{row['compile_s']:.1f}",
        }, args.out)  # fmt: skip
        table.head(
            f"{jax.devices()[0].device_kind}: updates of PPO, {args.num_envs} environments, width {args.width}"
        )
        memories(args, table)


if __name__ == "__main__":
    main()
