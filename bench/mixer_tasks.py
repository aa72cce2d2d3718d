"""Which tasks tell mixers apart? Each learns each task of `experiments.rnn` for as many steps, at equal size.

    python bench/mixer_tasks.py                                   # two CPU cores: all tasks, seven mixers
    python bench/mixer_tasks.py --tasks s5,mqar --cells gru,gated_delta --steps 3000 --seeds 0,1,2
    python bench/mixer_tasks.py --tiny                            # checks that the script runs

s5 composes a swap and a cycle of five things, sixteen in all, so a state must be followed; mqar asks for the values
of many keys, and recall for the newest value of a key that came several times; delayed_copy tells again what came so
many steps before.
Two layers, of as many units as bring a network nearest to the parameters of a GRU of `--size` units; the same batches,
rate and schedule for all. Accuracy is of what is asked, on rows that training does not see. JSON, which is written
after each row, goes to bench/results/mixer_tasks.json.
"""

import argparse
import functools
import json
import os
import pathlib
import statistics
import sys
import time

import jax
import jax.numpy as jnp
import numpy as np

HERE = pathlib.Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parent))

from experiments import rnn  # noqa: E402
from experiments.app.sequences.series import Task, open_task  # noqa: E402
from jaxpar.types import UsageError  # noqa: E402

CELLS = "gru para_gru min_gru aaren gla mamba2 mlstm gated_delta"
TASKS = {  # flags, and what guessing gets right
    "s5": ("data.length=16 data.symbols=2", 1 / 120),
    "mqar": ("data.length=24 data.symbols=8", 1 / 16),
    "recall": ("data.length=4 data.symbols=8", 1 / 16),
    "delayed_copy": ("data.length=8 data.symbols=16", 1 / 16),
}
CHUNK = 50
"""Steps that are one call, whose batches are drawn before it."""


def config_of(task: str, cell: str, size: int, steps: int, seed: int, rate: float) -> rnn.Config:
    """Returns the run of `experiments.rnn`."""
    flags = f"data.task={task} {TASKS[task][0]} model.cell={cell} model.size={size} model.heads=2 seed={seed}"
    return rnn.compose(*flags.split(), f"train.steps={steps}", f"optimizer.learning_rate={rate}")


def count_params(config: rnn.Config, task: Task) -> int:
    """Returns how many parameters a run's network has; nothing is computed."""
    state = jax.eval_shape(rnn.make_trainer(config, task).init, jax.random.key(0))
    return sum(leaf.size for leaf in jax.tree.leaves(state.params))


def nearest_size(task: str, cell: str, goal: int) -> int:
    """Returns the units, a multiple of 8, whose network comes nearest to `goal` parameters."""
    one = config_of(task, cell, 8, 1, 0, 1e-2)
    opened = open_task(one.data, 0)

    @functools.cache
    def away(size: int) -> int:
        return abs(count_params(config_of(task, cell, size, 1, 0, 1e-2), opened) - goal)

    size = 8
    while away(size + 8) < away(size):
        size += 8
    return size


def learn(config: rnn.Config) -> dict:
    """Trains a network, without a run's folder; returns what it gets right and how long it took."""
    task = open_task(config.data, config.seed)
    trainer, key = rnn.make_trainer(config, task), jax.random.key(config.seed)

    @jax.jit
    def steps(state, batches, first):
        def one(state, numbered):
            number, batch = numbered
            return trainer.step(jax.random.fold_in(key, number), state, batch)[0], None

        count = len(jax.tree.leaves(batches)[0])
        return jax.lax.scan(one, state, (first + jnp.arange(count), batches))[0]

    state, begin, told = jax.jit(trainer.init)(key), time.perf_counter(), []
    for first in range(0, config.train.steps, CHUNK):
        drawn = [task.train(step) for step in range(first, min(first + CHUNK, config.train.steps))]
        state = steps(
            state, {name: np.stack([batch[name] for batch in drawn]) for name in drawn[0]}, first
        )
    evaluate = rnn.make_evaluate(trainer, task)
    told = {name.partition("/")[2]: float(value) for name, value in evaluate(state).items()}
    return told | {"params": count_params(config, task), "seconds": time.perf_counter() - begin}


def main() -> None:
    """Parses flags, learns all rows and prints a table: a line a mixer, a column a task."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--tasks", default=",".join(TASKS), help=f"of {', '.join(TASKS)}")
    parser.add_argument(
        "--cells", default=",".join(CELLS.split()), help="what model.cell= takes, with commas"
    )
    parser.add_argument(
        "--size", type=int, default=32, help="units of the GRU that all are as large as"
    )
    parser.add_argument("--steps", type=int, default=1000, help="of 64 rows each")
    parser.add_argument("--seeds", default="0")
    parser.add_argument("--rate", type=float, default=5e-3, help="of learning")
    parser.add_argument("--tiny", action="store_true", help="two mixers, a few steps")
    args = parser.parse_args()
    tasks, cells, seeds = (
        args.tasks.split(","),
        args.cells.split(","),
        [int(x) for x in args.seeds.split(",")],
    )
    if not set(tasks) <= set(TASKS):
        parser.error(f"--tasks knows {', '.join(TASKS)}")
    if args.tiny:
        tasks, cells, args.steps, args.size = tasks[:2], cells[:2], 2, 8
    rows, out, load = [], HERE / "results" / "mixer_tasks.json", os.getloadavg()[0]
    out.parent.mkdir(exist_ok=True)
    try:
        for task in tasks:
            plain = config_of(task, "gru", args.size, 1, 0, args.rate)
            goal = count_params(plain, open_task(plain.data, 0))
            for cell in cells:
                size = nearest_size(task, cell, goal)
                for seed in seeds:
                    found = learn(config_of(task, cell, size, args.steps, seed, args.rate))
                    rows.append({"task": task, "cell": cell, "size": size, "seed": seed, **found})
                    print(json.dumps(rows[-1]), file=sys.stderr, flush=True)
                    out.write_text(
                        json.dumps({"steps": args.steps, "rate": args.rate, "rows": rows}, indent=1)
                        + "\n"
                    )
    except UsageError as error:
        parser.error(str(error))
    print(
        f"| mixer | {' | '.join(f'{task} (parameters)' for task in tasks)} |\n{'|---' * (len(tasks) + 1)}|"
    )
    for cell in cells:
        mine = {
            task: [row for row in rows if (row["task"], row["cell"]) == (task, cell)]
            for task in tasks
        }
        right = {task: [row["accuracy"] for row in each] for task, each in mine.items()}
        spread = {
            task: f" +- {statistics.stdev(x):.3f}" if len(x) > 1 else ""
            for task, x in right.items()
        }
        cells_of = [
            f"{statistics.mean(right[t]):.3f}{spread[t]} ({mine[t][0]['params']:,})" for t in tasks
        ]
        print(f"| {cell} | {' | '.join(cells_of)} |")
    print(f"| guessing | {' | '.join(f'{TASKS[task][1]:.3f}' for task in tasks)} |")
    print(
        f"\n{jax.devices()[0].device_kind}, jax {jax.__version__}, {args.steps} steps, load {load:.1f} when it began"
    )


if __name__ == "__main__":
    main()
