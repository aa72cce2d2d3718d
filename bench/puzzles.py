"""Steps of puzzles a second beside Jumanji's, in turn in one process; and how fast answers to Countdown are judged.

    python bench/puzzles.py --jumanji FOLDER                       # CPU; of the package and what it imports
    python bench/puzzles.py --num-envs 65536 --steps 64            # a GPU
    python bench/puzzles.py --puzzles answers,Countdown-4          # without a peer

Random legal actions, and resets of their own: ours by `jaxpar.rollout.rollout`, where `same` resets in every step as
Jumanji's `VmapAutoResetWrapper` does, `batch` and `pool` as is usual here. Sizes are the same on both sides; levels are
drawn by each side's own generator. Every observation, reward and flag is summed as it comes, or XLA would drop what
makes it. "ratio" is to the first side of a row's puzzle, in the same round; Jumanji's Sokoban plays its two toy levels
(its other generators fetch levels from afar), its Rubik's cube has no mask and 18 turns, as our `-half`;
its Minesweeper tells numbers, as our `-Cells`, and `-Numbers` draws them. Where ours has
no peer the first side is `same`. "answers" are texts of four numbers, M a second on one core.
"""

import json
import os
import pathlib
import sys
import time
from collections.abc import Callable

HERE = pathlib.Path(__file__).resolve().parent
sys.path[:0] = [str(HERE.parent), str(HERE)]

import jax  # noqa: E402
import jax.numpy as jnp  # noqa: E402
from env import checksum, make_parser, measured, our_side  # noqa: E402
from harness import Table  # noqa: E402

ANSWERS = "answers"
OURS = {"same": "batch-same", "batch": "batch", "pool": "batch-pool"}


def of_2048(jumanji):
    """The board of 4 x 4."""
    return jumanji.environments.Game2048(board_size=4)


def of_knapsack(jumanji):
    """50 items, and a budget of a quarter of their weight."""
    from jumanji.environments.packing.knapsack.generator import RandomGenerator

    return jumanji.environments.Knapsack(RandomGenerator(num_items=50, total_budget=12.5))


def of_tsp(jumanji):
    """20 cities."""
    from jumanji.environments.routing.tsp.generator import UniformGenerator

    return jumanji.environments.TSP(UniformGenerator(num_cities=20))


def of_cvrp(jumanji):
    """20 customers."""
    from jumanji.environments.routing.cvrp.generator import UniformGenerator

    return jumanji.environments.CVRP(UniformGenerator(num_nodes=20, max_capacity=30, max_demand=10))


def of_cube(jumanji):
    """The cube of 3, scrambled by 100 turns."""
    return jumanji.make("RubiksCube-v0")


def of_tiles(jumanji):
    """15 tiles."""
    from jumanji.environments.logic.sliding_tile_puzzle.generator import RandomWalkGenerator

    return jumanji.environments.SlidingTilePuzzle(
        RandomWalkGenerator(grid_size=4, num_random_moves=100)
    )


def of_sokoban(jumanji):
    """Two levels of 10 x 10."""
    from jumanji.environments.routing.sokoban.generator import ToyGenerator

    return jumanji.environments.Sokoban(ToyGenerator())


def of_connector(jumanji):
    """Four agents on 8 x 8."""
    from jumanji.environments.routing.connector.generator import RandomWalkGenerator

    return jumanji.environments.Connector(RandomWalkGenerator(grid_size=8, num_agents=4))


def of_mines(jumanji):
    """Ten mines on 10 x 10."""
    return jumanji.make("Minesweeper-v0")


def of_boxes(jumanji):
    """20 items or fewer, 40 spaces; the container is the same, in millimetres."""
    return jumanji.make("BinPack-v2")


PEERS: dict[str, Callable | None] = {
    "2048": of_2048,
    "Knapsack-50": of_knapsack,
    "TSP-20": of_tsp,
    "CVRP-20": of_cvrp,
    "RubiksCube-3-half": of_cube,
    "SlidingTile-4x4": of_tiles,
    "Sokoban-10x10": of_sokoban,
    "Connector-8x8-4p": of_connector,
    "MineSweeper-6x6-Cells": of_mines,
    "MineSweeper-6x6-Numbers": of_mines,
    "BinPack": of_boxes,
    "JobShop-6x6": None,  # Jumanji's steps are ticks of a clock, of all machines
    "Countdown-4": None,
}
SIZES = dict.fromkeys(
    ("MineSweeper-6x6-Cells", "MineSweeper-6x6-Numbers"), {"size": 10, "num_mines": 10}
)
"""Fields that are not those of the name."""


def legal_action(env) -> Callable:
    """Returns (key, observation) -> a random action of Jumanji's, legal where its observation says what is."""
    spec = env.action_spec

    def draw(key, observation):
        mask = getattr(observation, "action_mask", None)
        if mask is None:
            many = jnp.asarray(getattr(spec, "num_values", 2))
            return jax.random.randint(key, many.shape, 0, many).astype(spec.dtype)
        if mask.ndim == 2 and spec.shape == (2,):  # of a board: row and column
            chosen = jax.random.categorical(key, jnp.where(mask, 0.0, -jnp.inf).reshape(-1))
            return jnp.stack(jnp.divmod(chosen, mask.shape[1])).astype(spec.dtype)
        return jax.random.categorical(key, jnp.where(mask, 0.0, -jnp.inf)).astype(spec.dtype)

    return draw


def their_side(env, num_envs: int, num_steps: int):
    """Returns Jumanji's loop, `(key, carry) -> (carry, sum, episodes)`, and its first carry."""
    from jumanji.wrappers import VmapAutoResetWrapper

    draw, wrapped = jax.vmap(legal_action(env)), VmapAutoResetWrapper(env)

    def go(key, carry):
        def body(carry, key):
            state, seen = carry
            state, told = wrapped.step(state, draw(jax.random.split(key, num_envs), seen))
            total = checksum(told.observation, told.reward, told.discount).sum()
            return (state, told.observation), (total, told.last().sum())

        carry, (total, ended) = jax.lax.scan(body, carry, jax.random.split(key, num_steps))
        return carry, total.sum(), ended.sum()

    state, told = wrapped.reset(jax.random.split(jax.random.key(1), num_envs))
    return go, (state, told.observation)


def programs(
    name: str, num_envs: int, num_steps: int, sides: list[str], jumanji
) -> dict[str, dict]:
    """Returns what runs of each side, its first carry, and the seconds of compiling."""
    import envs

    env, params = envs.make(name, **SIZES.get(name, {}))
    peer, found = PEERS.get(name), {}
    for side in [*(["jumanji"] if peer and jumanji else []), *sides]:
        if side == "jumanji":
            assert peer
            go, carry = their_side(peer(jumanji), num_envs, num_steps)
        else:
            go, carry = our_side(env, params, num_envs, num_steps, OURS[side], warm=0)
        began = time.perf_counter()
        compiled = jax.jit(go).lower(jax.random.key(0), carry).compile()
        found[side] = {"go": compiled, "carry": carry, "compile_s": time.perf_counter() - began}
    return found


def judged(count: int) -> list[dict]:
    """Returns rows of Countdown's two judges of text, over the same answers."""
    import numpy as np

    from envs.puzzles.answers import score_many
    from envs.puzzles.expressions import score

    rng = np.random.default_rng(0)
    numbers = rng.integers(1, 14, (count, 4))
    ops = np.array(list("+-*/"))[rng.integers(0, 4, (count, 3))]
    texts = [
        f"({a} {p} {b}) {q} ({c} {r} {d})"
        for (a, b, c, d), (p, q, r) in zip(numbers, ops, strict=True)
    ]
    rows = []
    for side, many, judge in (
        ("score_many", count, lambda n: score_many(texts[:n], numbers[:n], np.full(n, 24))),
        (
            "score",
            min(count, 20_000),
            lambda n: [score(texts[i], tuple(map(int, numbers[i])), 24) for i in range(n)],
        ),
    ):
        times = []
        for _ in range(3):
            began = time.perf_counter()
            judge(many)
            times.append(time.perf_counter() - began)
        rows.append({"side": side, "msps": many / sorted(times)[1] / 1e6})
    return rows


def main() -> None:
    """Measures every puzzle at every number of environments."""
    parser = make_parser(__doc__, "puzzles.json", rounds=7)
    parser.add_argument("--puzzles", default=",".join([*PEERS, ANSWERS]))
    parser.add_argument("--sides", default="same,batch,pool", help=f"of {','.join(OURS)}")
    parser.add_argument("--answers", type=int, default=1_000_000)
    parser.add_argument(
        "--jumanji",
        type=pathlib.Path,
        help="a folder that holds the package, if it is not installed",
    )
    parser.add_argument("--no-peer", action="store_true", help="only ours")
    args = parser.parse_args()
    if args.jumanji:
        sys.path.append(str(args.jumanji.resolve()))
    jumanji, missing = None, ""
    if not args.no_peer:
        try:
            import jumanji
        except ImportError as error:
            missing = f"; Jumanji is not here: {error}"
    columns = {
        "puzzle": lambda row: row["puzzle"],
        "environments": lambda row: f"{row['environments']:,}",
        "side": lambda row: row["side"],
        "M a second": lambda row: f"{row['msps']:.4g}",
        "ratio (quartiles)": lambda row: (
            f"{row['ratio']:.2f}x ({row['low']:.2f}-{row['high']:.2f})"
        ),
        "done %": lambda row: f"{100 * row['done']:.2f}",
        "compile s": lambda row: f"{row['compile_s']:.1f}",
        "note": lambda row: row["note"],
    }
    table, began = Table(columns, args.out), time.monotonic()
    kind, load = jax.devices()[0].device_kind, os.getloadavg()[0]
    table.head(
        f"{kind}, jax {jax.__version__}, {args.rounds} rounds, load {load:.1f} before{missing}"
    )
    for name in args.puzzles.split(","):
        for num_envs in [args.answers] if name == ANSWERS else map(int, args.num_envs.split(",")):
            case = {"puzzle": name, "environments": num_envs, "steps": args.steps, "device": kind}
            if time.monotonic() - began > args.budget_s:
                table.add(case | {"side": "", "failed": "skipped: the budget is spent"})
                continue
            with table.keep_failure(case):
                if name == ANSWERS:
                    rows = judged(num_envs)
                else:
                    sides = programs(name, num_envs, args.steps, args.sides.split(","), jumanji)
                    rows = measured(sides, args.rounds, num_envs, args.steps)
                for row in rows:
                    table.add(case | row)
    print(json.dumps({"out": str(args.out), "rows": len(table.rows)}))


if __name__ == "__main__":
    main()
