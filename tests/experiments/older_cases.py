"""Small runs, one a command and kind of checkpoint, by the flags that they had at d3543d0.

`make_older_runs.py` makes them with the code of that commit; `test_runs_of_older_code.py` resumes them with today's.
"""

import dataclasses
import json
import random

import numpy as np

WORDS = "words.txt"

TIMES = ("time", "speed/")
"""Metrics that no two runs share, by the beginning of their names."""

SOLVERS = ("train/converged", "train/iterations", "train/residual")
"""Metrics of a method that solves a recurrence; the default method has become the loop where that is faster."""


def words():
    """Returns the text that language models are trained on."""
    shuffle = random.Random(0)
    choices = ["alpha", "beta", "gamma", "delta"]
    return "\n".join(" ".join(shuffle.choices(choices, k=10)) for _ in range(600))


def rows_of(folder):
    """Returns the rows of all metrics of a run, by file."""
    found = {}
    for path in sorted(folder.rglob("metrics.jsonl")):
        rows = [json.loads(line) for line in path.read_text().splitlines()]
        found[str(path.relative_to(folder))] = rows
    return found


def differences(found, expected, rtol=0.0, atol=0.0):
    """Returns what is different in the rows of a run, one line each; times and speeds may differ.

    Args:
      found: Rows by file, as `rows_of` returns them.
      expected: The same of the older code. Files that it does not have do not count.
      rtol: Relative error allowed.
      atol: Error allowed in addition.
    """
    lines = []
    for name, rows in expected.items():
        others = found.get(name, [])
        if len(rows) != len(others):
            lines.append(f"{name} has {len(others)} rows, not {len(rows)}")
        for row, other in zip(rows, others, strict=False):
            for key, value in row.items():
                if key.startswith(TIMES) or key in SOLVERS:
                    continue
                if key not in other:
                    lines.append(f"{name}, step {row['step']}: no {key}")
                # Numbers that are not finite are written as words.
                elif not np.allclose(
                    float(other[key]), float(value), rtol=rtol, atol=atol, equal_nan=True
                ):
                    lines.append(f"{name}, step {row['step']}: {key} is {other[key]}, not {value}")
    return lines


@dataclasses.dataclass(frozen=True)
class Case:
    """A run.

    Attributes:
      name: Name of its folder.
      command: Its experiment.
      flags: But for those of its length.
      begin: Flags that end it after a few steps.
      resume: Flags that continue it.
      needs: Name of the case that has to be made before it.
      resumes: Whether it has a checkpoint to go on from.
    """

    name: str
    command: str
    flags: str
    begin: str
    resume: str
    needs: str = ""
    resumes: bool = True

    def line(self, more):
        """Returns all flags of one call."""
        return [*self.flags.split(), *more.split(), f"hydra.run.dir={self.name}"]


LM = (
    "model.num_layers=1 model.embed_dim=16 model.num_heads=2 model.num_kv_heads=2 model.mlp_dim=16 data.seq_len=8 "
    f"data.batch_size=4 data.path={WORDS} train.eval_every=1 train.eval_batches=1 train.save_every=1 "
    "sampling.max_new_tokens=2 optimizer.learning_rate=0.01 optimizer.warmup_steps=1 cpu_devices=1"
)
RL = (
    "num_seeds=2 num_envs=4 num_steps=8 train.chunk=2 hidden=[8] eval_episodes=4 eval_steps=20 gif=false anneal=false "
    "cpu_devices=1"
)


def lm(name, more, needs=""):
    return Case(name, "lm", f"{LM} {more}", "train.steps=1", "train.steps=2", needs)


def rl(name, more):
    return Case(name, "rl", f"{RL} {more}", "train.steps=128", "train.steps=256")


CASES = (
    lm("full", "model.embed_dim=16"),
    lm(
        "lora",
        "init=run:full adapter=lora adapter.target=[w?,w_up] adapter.rank=2 adapter.base=int8",
        needs="full",
    ),
    lm("ema", "tuning.ema=0.9 optimizer.name=muon"),
    lm("experts", "model.num_experts=4 model.experts_per_token=2 model.tied=true model.norm=layer"),
    lm("mixers", "model.num_layers=3 model.mixers=[attention,gru,gla] model.remat=full"),
    lm("pipelined", "model.num_layers=2 cpu_devices=2 mesh.stage=2 pipeline=1f1b microbatches=2"),
    rl("policy", "algorithm=ppo minibatches=2"),
    rl("memory", "algorithm=ppo minibatches=2 memory=gru memory_size=4"),
    rl("replay", "algorithm=dqn fields.warmup=8 fields.capacity=64 fields.batch_size=8"),
    rl("population_of_policies", "algorithm=ppo minibatches=2 exploit_every=2"),
    rl("search", "algorithm=alpha_zero fields.simulations=4"),
    Case(
        "population",
        "neat",
        "task=regression population=16 max_nodes=8 max_conns=12 max_species=4 train.chunk=2 train.save_every=4 "
        "cpu_devices=1",
        "train.steps=4",
        "train.steps=8",
    ),
    Case(
        "life",
        "life",
        "brain=neat agents=8 robots=2 size=4 lattice=2 window=3 births=4 train.chunk=2 train.save_every=4 frames=3 "
        "cpu_devices=1",
        "train.steps=4",
        "train.steps=8",
    ),
    Case(
        "digits",
        "digits",
        "model.width=8 model.heads=2 model.layers=1 model.mlp=8 model.patch=4 data.batch_size=16 train.eval_every=2 "
        "train.save_every=2 cpu_devices=1",
        "train.steps=2",
        "train.steps=4",
    ),
    Case(
        "moving_digits",
        "moving_digits",
        "model.width=8 model.heads=2 model.pairs=1 model.mlp=8 model.patch=4 data.batch_size=8 data.frames=3 "
        "data.size=8 train.eval_every=2 train.save_every=2 cpu_devices=1",
        "train.steps=2",
        "train.steps=4",
    ),
    Case(
        "recurrent",
        "rnn",
        "model.cell=gru model.size=4 data.task=adding data.batch_size=4 train.eval_every=2 train.save_every=2 "
        "cpu_devices=1",
        "train.steps=2",
        "train.steps=4",
    ),
    Case(
        "own",
        "own",
        "task=maml width=4 batch_size=8 train.eval_every=2 train.save_every=2 cpu_devices=1",
        "train.steps=2",
        "train.steps=4",
    ),
    Case(
        "planner",
        "pomdp",
        "env=Tiger planner.num_simulations=16 planner.iterations=3 planner.max_depth=3 planner.leaf=zero "
        "planner.max_nodes=256 belief.num_particles=32 max_steps=4 gif=false cpu_devices=1",
        "episodes=2",
        "episodes=3",
        resumes=False,
    ),
    Case(
        "compared",
        "compare",
        "model.num_layers=1 model.embed_dim=8 model.num_heads=2 model.num_kv_heads=2 model.mlp_dim=8 data.seq_len=16 "
        f"data.batch_size=8 data.path={WORDS} evaluations=2 eval_batches=1 optimizer.warmup_steps=2 seconds=0.02 "
        "timed_s=0.1 mixers=[min_gru] cpu_devices=1",
        "num_seeds=1",
        "num_seeds=2",
        resumes=False,
    ),
)
