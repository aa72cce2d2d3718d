"""Our grid worlds and particles beside XLand-MiniGrid, Navix and JaxMARL: steps a second of the same world in each.

Each peer runs its own loop, with its own auto-reset, under `vmap` in a `scan`; ours is `rollout` with its
default (exact) resets, by either family of keys. As in `bench/env.py`, all sides of a case run in this one process in
turn, and every observation, reward and flag is summed. Random policies. A case whose peer is not installed has no row
of it. The worlds agree in size, objects, actions and time limit as far as both have them; what differs is said in
`docs/environments.md`.

    python bench/worlds.py --num-envs 1024                                        # CPU
    python bench/worlds.py --num-envs 2048,32768,262144 --steps 64                # GPU
"""

import importlib.util
import json
import os
import pathlib
import sys
import time
from unittest import mock

sys.path.insert(0, str(pathlib.Path(__file__).parents[1]))

import jax
from env import checksum, make_parser, measured, our_side
from harness import SPEED_COLUMNS, Table

import envs

CASES = (
    ("DoorKey-8x8", "xminigrid", "MiniGrid-DoorKey-8x8"),
    ("DoorKey-8x8", "navix", "Navix-DoorKey-8x8-v0"),
    ("Empty-16x16", "xminigrid", "MiniGrid-Empty-16x16"),
    ("Empty-16x16", "navix", "Navix-Empty-16x16-v0"),
    ("FourRooms", "xminigrid", "MiniGrid-FourRooms"),
    ("FourRooms", "navix", "Navix-FourRooms-v0"),
    ("XLand-R1-9x9", "xminigrid", "XLand-MiniGrid-R1-9x9"),
    ("XLand-R4-13x13", "xminigrid", "XLand-MiniGrid-R4-13x13"),
    ("Spread-3", "jaxmarl", "MPE_simple_spread_v3"),
    ("Tag-3v1", "jaxmarl", "MPE_simple_tag_v3"),
    ("SpeakerListener", "jaxmarl", "MPE_simple_speaker_listener_v4"),
)


def xminigrid_loop(name):
    """Returns `reset(key)`, `step(key, timestep, action)` and `sample(key)` of XLand-MiniGrid with its auto-reset."""
    import xminigrid
    from xminigrid.wrappers import GymAutoResetWrapper

    env, params = xminigrid.make(name)
    env = GymAutoResetWrapper(env)

    def step(key, timestep, action):
        timestep = env.step(params, timestep, action)
        return (
            timestep,
            (timestep.observation, timestep.reward, timestep.discount, timestep.step_type),
            timestep.last(),
        )

    actions = env.num_actions(params)
    return (
        lambda key: env.reset(params, key),
        step,
        lambda key: jax.random.randint(key, (), 0, actions),
    )


def navix_loop(name):
    """Returns the same of Navix, which resets in the step after the end."""
    learners = ("distrax", "rlax", "tyro", "wandb")  # what only its learners need may be missing
    absent = [name for name in learners if importlib.util.find_spec(name) is None]
    stand_ins = {name: mock.MagicMock() for name in absent + ["wandb.util"] * ("wandb" in absent)}
    with mock.patch.dict(sys.modules, stand_ins):
        import navix

    env = navix.make(name)

    def step(key, timestep, action):
        timestep = env.step(timestep, action)
        return (
            timestep,
            (timestep.observation, timestep.reward, timestep.step_type),
            timestep.step_type > 0,
        )

    actions = len(env.action_set)
    return env.reset, step, lambda key: jax.random.randint(key, (), 0, actions)


def jaxmarl_loop(name):
    """Returns the same of JaxMARL, which resets in the step of the end."""
    import jaxmarl

    env = jaxmarl.make(name)

    def step(key, state, action):
        obs, state, reward, done, _ = env.step(key, state, action)
        return state, (obs, reward, done), done["__all__"]

    def sample(key):
        keys = jax.random.split(key, env.num_agents)
        return {
            agent: env.action_space(agent).sample(keys[i]) for i, agent in enumerate(env.agents)
        }

    return lambda key: env.reset(key)[1], step, sample


LOOPS = {"xminigrid": xminigrid_loop, "navix": navix_loop, "jaxmarl": jaxmarl_loop}


def peer_side(suite, name, num_envs, num_steps):
    """Returns the peer's loop, `(key, carry) -> (carry, sum, ends)`, and its first carry."""
    reset, step, sample = LOOPS[suite](name)

    def go(key, carry):
        def body(carry, key):
            act_key, step_key = jax.random.split(key)
            actions = jax.vmap(sample)(jax.random.split(act_key, num_envs))
            carry, out, ends = jax.vmap(step)(jax.random.split(step_key, num_envs), carry, actions)
            return carry, (checksum(out).sum(), ends.sum())

        carry, (total, ends) = jax.lax.scan(body, carry, jax.random.split(key, num_steps))
        return carry, total.sum(), ends.sum()

    return go, jax.jit(jax.vmap(reset))(jax.random.split(jax.random.key(1), num_envs))


def programs(ours, suite, theirs, num_envs, num_steps, warm):
    """Returns what runs of each side, the peer first, with the seconds of compilation."""
    env, params = envs.make(ours)
    sides = {suite: peer_side(suite, theirs, num_envs, num_steps)}
    for side in ("env", "batch"):
        sides[side] = our_side(env, params, num_envs, num_steps, side, warm)
    found = {}
    for side, (go, carry) in sides.items():
        began = time.perf_counter()
        compiled = jax.jit(go).lower(jax.random.key(0), carry).compile()
        found[side] = {"go": compiled, "carry": carry, "compile_s": time.perf_counter() - began}
    return found


def main() -> None:
    """Measures every case at every number of environments."""
    parser = make_parser(__doc__, "worlds.json", steps=32)
    parser.add_argument("--only", default="", help="part of a name of ours or of a suite")
    parser.add_argument(
        "--warm", type=int, default=0, help="steps that our sides make before, for long episodes"
    )
    args = parser.parse_args()
    columns = {
        "ours": lambda row: row["ours"],
        "theirs": lambda row: row["theirs"],
        "environments": lambda row: str(row["environments"]),
        "side": lambda row: row["side"],
        **SPEED_COLUMNS,
    }
    table, began, device = Table(columns, args.out), time.monotonic(), jax.devices()[0].device_kind
    table.head(
        f"{device}, jax {jax.__version__}, {args.rounds} rounds, load {os.getloadavg()[0]:.1f} before"
    )
    for ours, suite, theirs in CASES:
        for num_envs in map(int, args.num_envs.split(",")):
            if args.only not in ours + suite or time.monotonic() - began > args.budget_s:
                continue
            case = {
                "ours": ours,
                "theirs": theirs,
                "environments": num_envs,
                "steps": args.steps,
                "device": device,
            }
            with table.keep_failure(case):  # a peer may be missing
                sides = programs(ours, suite, theirs, num_envs, args.steps, args.warm)
                for row in measured(sides, args.rounds, num_envs, args.steps):
                    table.add(case | row)
    print(json.dumps({"out": str(args.out), "rows": len(table.rows)}))


if __name__ == "__main__":
    main()
