"""Tree searches beside DeepMind's mctx: simulations a second, and exactly how well they decide, in turn in one process.

    python bench/tree_search.py --mctx FOLDER        # two cores; the folder has mctx
    python bench/tree_search.py                      # without a peer
    python bench/tree_search.py --mctx FOLDER --simulations 64,256 --batches 4096 --rounds 9     # a GPU

The problem is 2048 on four cells, whose 1,296 boards are solved by value iteration. Every side decides on all boards
that have a move, from the same states, with the same step, the same policy and value at every node ("none": all legal
moves alike and a value of 0; "ppo": a network of 64 x 64 that PPO trained for 80 updates), the same number of
simulations and the most visited action: that is a table of actions, whose mean score from the start is computed, not
played. "of best" is its share of the best play's, the mean over `--seeds` tables and the least and greatest.

Sides: `GuidedSearch`; mctx's `muzero_policy` without noise, which has the same rule of selection; and its
`gumbel_muzero_policy` with gumbel_scale 0. mctx knows no terminal nodes: simulations go on below them with discount 0.
Compiling is timed apart. Medians of `--rounds` in which all sides take turns, with quartiles.
"""

import argparse
import json
import pathlib
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from typing import Any

HERE = pathlib.Path(__file__).resolve().parent
sys.path[:0] = [str(HERE.parent), str(HERE)]

import jax  # noqa: E402
import jax.numpy as jnp  # noqa: E402
import numpy as np  # noqa: E402
from harness import Table  # noqa: E402

import envs  # noqa: E402
from envs.puzzles.tiles2048 import State, legal_slides, slide_left  # noqa: E402
from jaxpar.env import step  # noqa: E402
from jaxpar.rl import GuidedSearch, Network, Ppo, PpoRates, train  # noqa: E402
from jaxpar.rl.guided_search import Guide, guide_of  # noqa: E402

GAME, PARAMS = envs.make("2048-2x2")
PEER = "mctx `muzero_policy`"
DIGITS = np.array([216, 36, 6, 1])
Decide = Callable[[jax.Array, State], jax.Array]
"""`(key, states [B]) -> actions [B]`."""


class Solved:
    """All boards of four cells, and what every table of actions on them earns; powers of two are at most 32."""

    def __init__(self):
        """Writes down the moves and what new tiles make of boards."""
        self.boards = np.stack(
            np.meshgrid(*[np.arange(6, dtype=np.int8)] * 4, indexing="ij"), -1
        ).reshape(-1, 2, 2)
        self.legal = np.asarray(jax.vmap(legal_slides)(self.boards))
        slid = [self._slid(action) for action in range(4)]
        self.following = np.stack(
            [np.clip(after, 0, 5).reshape(-1, 4) @ DIGITS for after, _ in slid], 1
        )
        self.merged = np.stack([merged for _, merged in slid], 1).astype(float)
        self.appears = np.zeros((len(self.boards), len(self.boards)))
        for number, board in enumerate(self.boards.reshape(-1, 4)):
            empty = np.flatnonzero(board == 0)
            for cell in empty:
                self.appears[number, number + DIGITS[cell]] += 0.9 / len(empty)
                self.appears[number, number + 2 * DIGITS[cell]] += 0.1 / len(empty)
        self.start = self.appears[0] @ self.appears  # two tiles on an empty board
        self.playable = np.flatnonzero(self.legal.any(1))
        self.best = self.score(lambda earned: earned.max(1))
        equally = self.legal / np.maximum(self.legal.sum(1, keepdims=True), 1)
        self.chance = self.score(
            lambda earned: np.sum(equally * np.where(self.legal, earned, 0), 1)
        )

    def _slid(self, action: int) -> tuple[np.ndarray, np.ndarray]:
        after, merged = slide_left(np.rot90(self.boards, action + 1, (1, 2)))
        return np.rot90(np.asarray(after), -action - 1, (1, 2)), np.asarray(merged).sum(1)

    def score(self, choose: Callable[[np.ndarray], np.ndarray]) -> float:
        """The mean score from the start, if `choose` takes one of what the moves of every board earn, `[boards, 4]`."""
        values, before = np.zeros(len(self.boards)), None
        while before is None or np.abs(values - before).max() > 1e-12:
            before = values
            earned = np.where(
                self.legal, self.merged + (self.appears @ values)[self.following], -np.inf
            )
            values = np.where(self.legal.any(1), choose(earned), 0.0)
        return float(self.start @ values)

    def of_actions(self, actions: np.ndarray) -> float:
        """The mean score of actions on the playable boards, as a share of the best; an illegal one ends the game."""
        table = np.zeros(len(self.boards), int)
        table[self.playable] = actions
        every = np.arange(len(table))
        earned = self.score(
            lambda earned: np.where(self.legal[every, table], earned[every, table], -1.0)
        )
        return earned / self.best

    def states(self, count: int = 0) -> State:
        """The states of the playable boards, or `count` of them, again from the first where there are fewer."""
        which = np.resize(self.playable, count or len(self.playable))
        return State(
            jnp.asarray(self.boards[which]),
            jnp.zeros(len(which), jnp.int32),
            jnp.zeros(len(which), bool),
        )


def guides() -> Iterator[tuple[str, Guide]]:
    """Yields what searches are led by."""
    yield "none", lambda obs, legal: (legal / jnp.maximum(jnp.sum(legal), 1), jnp.float32(0))
    rates = PpoRates(
        learning_rate=3e-3, anneal=80.0, discount=1.0, reward_scale=0.05, entropy_coef=0.005
    )
    ppo = Ppo(GAME, Network(hidden=(64, 64)), rates, num_envs=128, num_steps=32)
    weights = jax.jit(lambda key: train(ppo, key, PARAMS, 80)[0].weights)(jax.random.key(0))
    learned = guide_of(ppo.agent(), weights)
    yield "ppo", lambda obs, legal: (learned(obs, legal)[0], learned(obs, legal)[1] / 0.05)


def ours(guide: Guide, simulations: int) -> Decide:
    """The most visited actions of this library's search."""
    search = GuidedSearch(simulations)

    def decide(key, states):
        def one(key, state):
            return jnp.argmax(search(key, GAME, state, PARAMS, guide, 1.0).visits)

        return jax.vmap(one)(jax.random.split(key, len(states.score)), states)

    return decide


def theirs(mctx: Any, guide: Guide, simulations: int, gumbel: bool) -> Decide:
    """The same of mctx, by its recipe for a model that is known."""

    def legal_at(state):
        return GAME.action_mask(state, PARAMS)

    def led(obs, legal):
        prior, value = jax.vmap(guide)(obs, legal)
        return jnp.where(
            legal, jnp.log(jnp.maximum(prior, 1e-30)), jnp.finfo(jnp.float32).min
        ), value

    def recurrent(_, key, action, states):
        keys = jax.random.split(key, len(action))
        said = jax.vmap(lambda key, state, action: step(key, GAME, state, action, PARAMS))(
            keys, states, action
        )
        logits, value = led(said.obs, jax.vmap(legal_at)(said.state))
        ends = said.terminated
        out = mctx.RecurrentFnOutput(
            reward=said.reward, discount=jnp.where(ends, 0.0, 1.0), prior_logits=logits,
            value=jnp.where(ends, 0.0, value),
        )  # fmt: skip
        return out, said.state

    def decide(key, states):
        legal = jax.vmap(legal_at)(states)
        logits, value = led(
            jax.vmap(lambda state: GAME.observe(key, state, None, PARAMS))(states), legal
        )
        root = mctx.RootFnOutput(prior_logits=logits, value=value, embedding=states)
        policy = mctx.gumbel_muzero_policy if gumbel else mctx.muzero_policy
        rule = {"gumbel_scale": 0.0} if gumbel else {"dirichlet_fraction": 0.0, "temperature": 0.0}
        return policy((), key, root, recurrent, simulations, invalid_actions=~legal, **rule).action

    return decide


def measured(sides: dict[str, Decide], states: State, rounds: int) -> dict[str, dict]:
    """Seconds to trace and compile each side, and of a decision the median of rounds in turn and the quartiles."""
    key, programs, rows = jax.random.key(0), {}, {name: {} for name in sides}
    for name, decide in sides.items():
        began = time.perf_counter()
        programs[name] = jax.jit(decide).lower(key, states).compile()
        rows[name]["compile_s"] = time.perf_counter() - began
        jax.block_until_ready(programs[name](key, states))
    took = {name: [] for name in sides}
    for number in range(rounds):
        for name, program in programs.items():
            began = time.perf_counter()
            jax.block_until_ready(program(jax.random.fold_in(key, number), states))
            took[name].append(time.perf_counter() - began)
    for name, row in rows.items():
        row["s"], row["program"] = statistics.median(took[name]), programs[name]
        row["quartiles_s"] = (
            statistics.quantiles(took[name], n=4)[::2] if rounds > 1 else [row["s"]] * 2
        )
    return rows


COLUMNS: dict[str, Callable[[dict], str]] = {
    "led by": lambda row: row["guide"],
    "batch": lambda row: f"{row['batch']:,}",
    "simulations": lambda row: str(row["simulations"]),
    "side": lambda row: row["side"],
    "thousand simulations/s": lambda row: "{:,.0f} ({:,.0f} to {:,.0f})".format(
        *(
            1e-3 * row["batch"] * row["simulations"] / s
            for s in (row["s"], *row["quartiles_s"][::-1])
        )
    ),
    "of its `muzero_policy`": lambda row: f"{row['peer_s'] / row['s']:.2f}x",
    "compile s": lambda row: f"{row['compile_s']:.1f}",
    "of best": lambda row: f"{row['of_best']:.3f} ({row['least']:.3f} to {row['most']:.3f})",
}


def main() -> None:
    """Measures every guide, number of simulations and batch."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--mctx", help="a folder with the package mctx")
    parser.add_argument("--simulations", default="16,64")
    parser.add_argument(
        "--batches", default="64", help="beside all playable boards, on which is judged"
    )
    parser.add_argument("--guides", default="none,ppo")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument(
        "--out", type=pathlib.Path, default=pathlib.Path("runs/bench/tree_search.json")
    )
    args = parser.parse_args()
    mctx: Any = None
    if args.mctx:
        sys.path.append(args.mctx)
        import mctx  # pyright: ignore[reportMissingImports]
    solved, table = Solved(), Table(COLUMNS, args.out)
    sizes = [0, *(int(x) for x in args.batches.split(",") if x)]
    print(json.dumps({"device": jax.devices()[0].device_kind, "jax": jax.__version__, "boards": len(solved.playable),
                      "best": solved.best, "chance": solved.chance}))  # fmt: skip
    table.head("2048 on four cells")
    for led_by, guide in guides():
        if led_by not in args.guides.split(","):
            continue
        for simulations in (int(x) for x in args.simulations.split(",")):
            sides = {"jaxpar `GuidedSearch`": ours(guide, simulations)}
            if mctx:
                sides[PEER] = theirs(mctx, guide, simulations, False)
                sides["mctx `gumbel_muzero_policy`"] = theirs(mctx, guide, simulations, True)
            for size in sizes:
                states = solved.states(size)
                rows = measured(sides, states, args.rounds)
                peer = {"peer_s": rows[PEER]["s"]} if PEER in rows else {}
                for side, row in rows.items():
                    program = row.pop("program")
                    row |= {
                        "side": side,
                        "guide": led_by,
                        "simulations": simulations,
                        "batch": len(states.score),
                    }
                    if size == 0:
                        tables = [
                            np.asarray(program(jax.random.key(1000 + i), states))
                            for i in range(args.seeds)
                        ]
                        scores = [solved.of_actions(actions) for actions in tables]
                        row |= {
                            "of_best": float(np.mean(scores)),
                            "least": min(scores),
                            "most": max(scores),
                        }
                    table.add(row | peer)


if __name__ == "__main__":
    main()
