"""Every configuration, of library, environments and experiments, refuses impossible numbers: one table."""

import dataclasses
import importlib
import inspect
import math
import pkgutil
import typing

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import envs
import experiments
import jaxpar
from envs import grid, memory, particles
from envs.combat import Combat
from envs.crowd import Crowd
from envs.foraging import Foraging
from envs.laser_tag import LaserTag
from envs.light_dark import LightDark
from envs.mars import Mars
from envs.mine_sweeper import MineSweeper
from envs.navigation import Navigation
from envs.rocksample import RockSample
from envs.rulesets import Tree
from envs.sub_hunt import SubHunt
from envs.survival import Survival
from envs.xland import XLand
from experiments import env, lm, neat, pomdp, rl, rnn
from experiments._run import Processes, RunConfig
from experiments._series import SeriesConfig
from jaxpar.env.picture import Animation
from jaxpar.fields import AtLeast, Between, Each, Finite, OneOf, Positive, check_fields, field
from jaxpar.io import Checkpoints
from jaxpar.lm import LMConfig, OptimizerConfig, Trainer
from jaxpar.lm.corpus import DataConfig, Tokens
from jaxpar.lm.data import Windows
from jaxpar.lm.sample import Sampling
from jaxpar.loop import Fit
from jaxpar.mesh import MeshSpec
from jaxpar.neat import NeatConfig
from jaxpar.neat.config import Rates
from jaxpar.neat.episodes import Episodes, Examined
from jaxpar.neat.hyper import Painted, Substrate
from jaxpar.neat.problems import Table
from jaxpar.neat.quadtree import Quadtree
from jaxpar.nn.aaren import Aaren
from jaxpar.nn.autoregressive import Made, PixelCnn
from jaxpar.nn.cells import Cell
from jaxpar.nn.dense_depth import DenseDepth
from jaxpar.nn.network import SequenceNetwork, SequenceTrainer
from jaxpar.nn.s5 import S5
from jaxpar.parallel.placement import Split
from jaxpar.pomdp import Despot, ParticleBelief, Pft, Pomcp, RootParallel, Vopp, tree
from jaxpar.rl import A2c, Dqn, Network, Ppo, Pqn, Seeds
from jaxpar.rl.a2c import A2cRates
from jaxpar.rl.action_values import ActionValues
from jaxpar.rl.dqn import DqnRates
from jaxpar.rl.memory import WindowAttention
from jaxpar.rl.optimizer import Optimizer
from jaxpar.rl.ppo import PpoRates
from jaxpar.rl.pqn import PqnRates
from jaxpar.rollout import Chunked, Pool
from jaxpar.solve import Elk, GaussSeidel, Jacobi, Newton, ParallelBackward, Quasi, Sequential, structure
from jaxpar.solve.fixed_point import Picard
from jaxpar.solve.fused import Fused
from jaxpar.types import UsageError

NAN, INF = math.nan, math.inf
# What is illegal just outside of a range, and what is legal at its ends.
COUNT = (0, -1), (1,)
PAIR = (1, 0), (2,)
LEAST_0 = (-1,), (0,)
LEAST_MINUS_1 = (-2,), (-1, 0)
FRACTION_FROM_0 = (-1e-9,), (0.0,)
POSITIVE = (0.0, -1.0), (1e-30,)
FACTOR = (0.0, 0.5), (1.0,)
SHARE = (-0.1, 1.1), (0.0, 1.0)
UNDER_1 = (-0.1, 1.0), (0.0,)
OVER_0 = (0.0, 1.1), (1.0,)
OPEN = (0.0, 1.0), (0.5,)
AXIS = (0, -2), (-1, 1)
SEED = (-1, 2**32), (0, 2**32 - 1)
VIEW = (1, 2, 33), (0, 3, 31)
SIGNED = (), (-5, 0)
UNBOUNDED = (), (INF, -INF, 0.0)

TABLE = {
    LMConfig: {
        "vocab_size max_seq_len num_layers embed_dim num_heads mlp_dim rope_original_len loss_chunk": COUNT,
        "num_kv_heads head_dim mixer_dim": LEAST_0,
        "norm_eps rope_theta init_std rope_low_freq_factor rope_high_freq_factor": POSITIVE,
        "rope_factor": FACTOR,
        "dropout": UNDER_1,
    },
    OptimizerConfig: {
        "learning_rate eps": POSITIVE,
        "final_ratio": SHARE,
        "warmup_steps decay_steps": LEAST_0,
        "weight_decay clip_norm": FRACTION_FROM_0,
        "b1 b2": UNDER_1,
    },
    Trainer: {"num_steps accumulate max_skipped": COUNT},
    Sampling: {
        "max_new_tokens": COUNT,
        "temperature": FRACTION_FROM_0,
        "top_k": LEAST_0,
        "top_p": OVER_0,
        "stop_token": LEAST_MINUS_1,
    },
    DataConfig: {"seq_len batch_size": COUNT},
    Windows: {"seq_len batch_size": COUNT, "seed": SIGNED},
    Fit: {"num_steps chunk": COUNT, "eval_every save_every": LEAST_0},
    MeshSpec: {"data fsdp tensor context expert stage": AXIS, "inner": COUNT},
    Rates: {
        "weights weight_perturb weight_replace node_perturb node_replace redraw add_node add_conn del_node del_conn "
        "toggle reenable survival mutate_only mate_only interspecies disable average stale": SHARE,
        "weight_power weight_init weight_limit node_power bias_init excess disjoint difference small threshold "
        "champion stagnation stall": FRACTION_FROM_0,
        "target": UNBOUNDED,
    },
    NeatConfig: {
        "num_inputs num_outputs population max_nodes max_conns max_species sub_steps widths": COUNT,
        "time_step": POSITIVE,
    },
    Episodes: {"goal": UNBOUNDED, "episodes max_steps": COUNT, "lanes": LEAST_0, "output_range": SIGNED},
    Examined: {"long_steps short_steps": COUNT, "needed": LEAST_0},
    Substrate: {"threshold": FRACTION_FROM_0, "largest": POSITIVE},
    Painted: {"tolerance": FRACTION_FROM_0},
    Table: {"tolerance": FRACTION_FROM_0},
    Quadtree: {
        "initial_depth max_depth": COUNT,
        "iterations sweeps": LEAST_0,
        "division band": FRACTION_FROM_0,
        "variance largest": POSITIVE,
    },
    Aaren: {"size heads": COUNT},
    Made: {"num_dims": PAIR, "hidden": COUNT},
    PixelCnn: {"height width channels num_blocks mixtures": COUNT, "levels": PAIR},
    Cell: {"size lanes heads": COUNT},
    DenseDepth: {"input_dim num_layers width": COUNT},
    S5: {"size": COUNT},
    SequenceNetwork: {"inputs outputs size layers heads": COUNT},
    SequenceTrainer: {
        "learning_rate clip_norm": POSITIVE,
        "num_steps": COUNT,
        "warmup_steps": LEAST_0,
        "weight_decay": FRACTION_FROM_0,
    },
    Split: {"dim": LEAST_0},
    ParticleBelief: {"num_particles": COUNT, "resample_below": SHARE},
    Despot: {
        "num_scenarios iterations max_depth max_nodes max_particles": COUNT,
        "max_reward": SIGNED,
        "regularization": FRACTION_FROM_0,
        "gap_ratio discount": OVER_0,
    },
    Pft: {
        "num_simulations iterations max_depth num_particles rollout_depth max_nodes max_edges": COUNT,
        "exploration": FRACTION_FROM_0,
        "k_observations k_actions": POSITIVE,
        "alpha_observations alpha_actions": SHARE,
        "discount": OVER_0,
    },
    Pomcp: {
        "num_simulations iterations max_depth rollout_depth expand_after max_nodes max_edges": COUNT,
        "exploration": FRACTION_FROM_0,
        "discount": OVER_0,
    },
    RootParallel: {"trees": COUNT},
    tree.Dense: {"num_observations": COUNT},
    tree.Hashed: {"probes": COUNT},
    Vopp: {
        "num_simulations iterations max_depth rollout_depth expand_after max_nodes max_edges": COUNT,
        "eta depth_scale widen": POSITIVE,
        "depth_power": FRACTION_FROM_0,
        "widen_power": SHARE,
        "discount": OVER_0,
    },
    A2cRates: {
        "learning_rate": POSITIVE,
        "anneal value max_grad_norm": FRACTION_FROM_0,
        "discount trace": SHARE,
        "entropy reward_scale": SIGNED,
    },
    PpoRates: {
        "learning_rate": POSITIVE,
        "anneal clip value max_grad_norm": FRACTION_FROM_0,
        "discount trace": SHARE,
        "entropy reward_scale": SIGNED,
    },
    PqnRates: {
        "learning_rate": POSITIVE,
        "anneal explore max_grad_norm": FRACTION_FROM_0,
        "discount trace epsilon last_epsilon": SHARE,
        "reward_scale": SIGNED,
    },
    DqnRates: {
        "learning_rate": POSITIVE,
        "anneal explore max_grad_norm": FRACTION_FROM_0,
        "discount epsilon last_epsilon target": SHARE,
        "reward_scale": SIGNED,
    },
    A2c: {"num_lanes num_steps": COUNT},
    Ppo: {"num_lanes num_steps epochs minibatches": COUNT},
    Pqn: {"num_lanes num_steps epochs minibatches mixer_size": COUNT},
    Dqn: {
        "num_lanes num_steps gradients batch_size capacity n_step target_period mixer_size": COUNT,
        "warmup": LEAST_0,
    },
    ActionValues: {"mixer_size": COUNT},
    WindowAttention: {"size heads window": COUNT},
    Network: {"encoder hidden conv memory_size": COUNT},
    Optimizer: {"eps": POSITIVE},
    Seeds: {"num_seeds": COUNT},
    Chunked: {"size": COUNT},
    Pool: {"size": COUNT},
    Animation: {"fps": POSITIVE},
    Newton: {"window max_iters": COUNT, "clip": POSITIVE, "damping": SHARE},
    Quasi: {"samples window max_iters": COUNT, "seed": SIGNED, "clip": POSITIVE, "damping": SHARE},
    Elk: {"lam": FRACTION_FROM_0, "window max_iters": COUNT},
    Jacobi: {"window max_iters": COUNT},
    Picard: {"window max_iters": COUNT},
    GaussSeidel: {"block window max_iters": COUNT, "shot_above": LEAST_0},
    Sequential: {"unroll": COUNT},
    ParallelBackward: {"window unroll": COUNT},
    Fused: {"window unroll": COUNT},
    structure.Block: {"k": COUNT},
    structure.Dense: {"batch_dims": LEAST_0},
    RunConfig: {"seed": SEED, "cpu_devices": LEAST_0},
    Processes: {"num_processes": LEAST_0, "process_id": LEAST_MINUS_1},
    lm.TrainConfig: {
        "steps accumulate keep max_skipped": COUNT,
        "eval_every eval_batches save_every": LEAST_0,
        "keep_every_s": FRACTION_FROM_0,
    },
    rnn.ModelConfig: {"size layers heads": COUNT, "window": LEAST_0},
    rnn.OptimizerConfig: {
        "learning_rate clip_norm": POSITIVE,
        "warmup_steps": LEAST_0,
        "weight_decay": FRACTION_FROM_0,
    },
    rnn.TrainConfig: {"steps keep": COUNT, "eval_every save_every": LEAST_0},
    SeriesConfig: {"length symbols batch_size": COUNT, "validation": OPEN},
    rl.Config: {
        "num_seeds steps chunk eval_episodes eval_steps frames memory_size encoder hidden conv": COUNT,
        "num_envs num_steps epochs minibatches save_every": LEAST_0,
    },
    neat.Config: {
        "population generations max_nodes max_conns max_species episodes chunk seeds": COUNT,
        "max_steps save_every together": LEAST_0,
        "goal": UNBOUNDED,
    },
    pomdp.Config: {"episodes steps at_once": COUNT, "budget_s": FRACTION_FROM_0},
    env.Config: {"num_envs num_steps frames": COUNT},
    Combat: {"size": ((3,), (4,))},
    Crowd: {"width": ((2,), (3,)), "height num_people": COUNT, "reach layout": LEAST_0},
    Foraging: {"size": ((2,), (3,)), "num_agents num_food max_strength": COUNT, "sight": LEAST_0},
    grid.Empty: {"size": ((3,), (4,))},
    grid.DoorKey: {"size": ((4,), (5,))},
    grid.FourRooms: {"size": ((6,), (7,)), "max_steps": COUNT},
    grid.Memory: {"size": ((6,), (7,))},
    grid.GridWorld: {"view": VIEW},
    LaserTag: {"width height": PAIR, "num_obstacles layout start": LEAST_0},
    LightDark: {"radius big_step": COUNT, "light": SIGNED},
    Mars: {"size": ((2, 128), (3, 127)), "num_rocks": COUNT, "layout": LEAST_0},
    memory.RepeatFirst: {"num_cards num_kinds": PAIR},
    memory.RepeatPrevious: {"num_cards num_kinds": PAIR, "k": COUNT},
    memory.CountRecall: {"num_cards num_kinds": PAIR},
    memory.Autoencode: {"num_cards": PAIR, "num_kinds": ((1, 128), (2, 127))},
    MineSweeper: {"size": PAIR, "num_mines": COUNT},
    Navigation: {"size": ((4, 16), (5, 15)), "num_obstacles layout": LEAST_0},
    particles.Spread: {"num_agents num_landmarks": COUNT},
    particles.Tag: {"num_chasers num_prey": COUNT, "num_obstacles": LEAST_0},
    RockSample: {"size num_rocks": COUNT, "layout": LEAST_0},
    Tree: {"depth distractors false_rules": LEAST_0, "prune": SHARE, "kinds": ((0, 12), (1, 11))},
    SubHunt: {"size": ((2,), (3,)), "speed": COUNT},
    Survival: {"size": ((15,), (16,)), "view": ((4,), (5,))},
    XLand: {"size": ((4,), (5,)), "rooms num_tasks": COUNT, "view": VIEW},
}
"""Each configuration with numbers in it: its fields, values outside of their range, and values at its ends."""

RESULTS = {
    "aot.job.Job", "aot.plan.Plan", "aot.roofline.Roofline", "aot.search.Finding", "aot.topology.Chip",
    "env.check.Report", "env.spaces.Box", "env.spaces.Discrete", "env.spaces.MultiDiscrete", "fields.Between",
    "io.layers.Source", "parallel.chain.Plan", "parallel.placement.Step",
    "pomdp.exact.Exact", "pomdp.outline.Branch", "solve.carries.Division",
    "solve.carries.Loop", "solve.problem.Problem", "solve.program.Recurrence",
    "solve.solution.Solve", "plan.Candidate", "pomdp.Results", "_rocks.Flips",
    "_walk.Walk",
}  # fmt: skip
"""Frozen dataclasses with numbers that the library makes, or an environment says, and that no user configures."""
BY_HAND = {(Despot, "default")}
"""Numbers whose range another field or the environment gives: here, an action."""


def is_number(value):
    return isinstance(value, int | float) and not isinstance(value, bool)


def own_numbers(cls):
    """The fields that a class itself adds and in which there are numbers."""
    for declared in dataclasses.fields(cls):
        parts = () if typing.get_origin(declared.type) is dict else typing.get_args(declared.type)
        types = [kind for kind in (declared.type, *parts) if kind in (int, float)]
        swept = declared.type is typing.Any and is_number(declared.default)
        ranged = isinstance(declared.metadata.get("legal"), Between | Each)
        if declared.name in cls.__dict__.get("__annotations__", {}) and (types or swept or ranged):
            yield declared.name


def configurations():
    """Every public frozen dataclass with numbers of its own in the library and its experiments."""
    for package in (jaxpar, envs, experiments):
        for module in pkgutil.walk_packages(package.__path__, package.__name__ + "."):
            parts = module.name.split(".")
            if package is jaxpar and any(part.startswith("_") for part in parts):
                continue
            for name, cls in vars(importlib.import_module(module.name)).items():
                if not (inspect.isclass(cls) and dataclasses.is_dataclass(cls)) or cls.__module__ != module.name:
                    continue
                if package is envs and hasattr(cls, "_flax_dataclass"):
                    continue  # parameters, which are traced; flags that change them are checked where they are read
                known = f"{'.'.join(parts[1:])}.{name}" in RESULTS or name.startswith("_")
                if cls.__dataclass_params__.frozen and not known and any(True for _ in own_numbers(cls)):
                    yield cls


def rows(cls):
    return [(name, *ends) for names, ends in TABLE[cls].items() for name in names.split()]


def test_the_table_has_every_configuration_and_every_number():
    found = {cls: {name for name in own_numbers(cls) if (cls, name) not in BY_HAND} for cls in configurations()}
    assert {cls: {name for name, *_ in rows(cls)} for cls in TABLE} == found


# ---------------------------------------------------------------- how each is made

CART = envs.make("CartPole-v1")[0]
TOKENS = Tokens(np.zeros(40, np.uint8), np.zeros(1, np.int64), np.full(1, 40))
PLANE = ((0.0, 0.0),)
BASIS = {
    Windows: (TOKENS, 8, 2, 0),
    Trainer: (LMConfig(),),
    Fit: (8,),
    NeatConfig: (2, 1),
    Episodes: (CART, 10.0),
    Examined: (None, CART),
    Substrate: ((PLANE, PLANE),),
    Painted: (Substrate((PLANE, PLANE)),),
    Quadtree: (PLANE, PLANE),
    Aaren: (4,),
    Made: (4,),
    PixelCnn: (2, 2),
    Cell: (lambda x: x, 4),
    DenseDepth: (3, 2, 4),
    S5: (4,),
    SequenceNetwork: (3, 2),
    SequenceTrainer: (SequenceNetwork(3, 2),),
    Split: (0,),
    RootParallel: (Vopp(),),
    tree.Dense: (2,),
    A2c: (CART,),
    Ppo: (CART,),
    Pqn: (CART,),
    Dqn: (CART,),
    ActionValues: (CART, Network()),
    WindowAttention: (4,),
    Optimizer: ("adam", 1e-5),
    Seeds: (None, 2),
    Animation: ([],),
    structure.Block: (2,),
}
OWNERS = {
    Rates: lambda rates: NeatConfig(2, 1, rates=rates),
    A2cRates: lambda rates: A2c(CART, rates=rates),
    PpoRates: lambda rates: Ppo(CART, rates=rates),
    PqnRates: lambda rates: Pqn(CART, rates=rates),
    DqnRates: lambda rates: Dqn(CART, rates=rates),
}
"""Rates are arrays in a state, so that what they belong to checks them, where they are numbers."""


def changed(cls, name, value):
    """A configuration with another value in one field, in a tuple where the field holds several."""
    declared = next(each for each in dataclasses.fields(cls) if each.name == name)
    value = (value,) if isinstance(declared.metadata["legal"], Each) else value
    made = dataclasses.replace(cls(*BASIS.get(cls, ())), **{name: value})
    return OWNERS[cls](made) if cls in OWNERS else made


def legal_of(cls, name):
    legal = next(each for each in dataclasses.fields(cls) if each.name == name).metadata["legal"]
    return legal.legal if isinstance(legal, Each) else legal


@pytest.mark.parametrize("cls", TABLE, ids=lambda cls: f"{cls.__module__}.{cls.__name__}".removeprefix("jaxpar."))
def test_impossible_numbers_are_refused(cls):
    for name, outside, ends in rows(cls):
        annotation = next(each for each in dataclasses.fields(cls) if each.name == name).type
        is_whole = int in {annotation, *typing.get_args(annotation)}
        infinite = () if INF in ends else (INF, -INF)
        for value in (NAN, *infinite, True, "1", *outside, *([2.0, 1.5] if is_whole else [])):
            with pytest.raises(UsageError) as error:
                changed(cls, name, value)
            said = str(error.value)
            assert f"{name}=" in said and repr(value) in said and said.endswith(".") and "\n" not in said, said
            assert not outside or isinstance(value, bool | str) or "must be" in said, said
        for value in ends:
            assert value in legal_of(cls, name), (name, value)


def test_checkpoints_refuse_impossible_numbers(tmp_path):
    for name, values in (("keep", (0, 1.5, NAN, True)), ("keep_every_s", (-1.0, NAN, INF, "1"))):
        for value in values:
            with pytest.raises(UsageError, match=f"{name}={value!r} must be"):
                Checkpoints(tmp_path, **{name: value})


# ---------------------------------------------------------------- ranges themselves


@dataclasses.dataclass(frozen=True)
class Example:
    whole: int = field(3, AtLeast(1, also=(-1,)))
    real: float = field(0.5, Between(0, 1, "[)"))
    swept: typing.Any = field(0.5, Positive())
    maybe: int | None = field(None, AtLeast(1))
    widths: tuple[int, ...] = field((), Each(AtLeast(1)), identity=False)
    name: str = field("a", OneOf({"a": 1, "b": 2}))
    signed: float = field(0.0, Finite())

    def __post_init__(self):
        check_fields(self, "example.")


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        (dict(whole=0), "example.whole=0 must be at least 1, or -1."),
        (dict(whole=2.0), "example.whole=2.0 must be a whole number, at least 1, or -1."),
        (dict(real=1.0), "example.real=1.0 must be at least 0 and under 1."),
        (dict(real=NAN), "example.real=nan must be a finite number, at least 0 and under 1."),
        (dict(swept=-1), "example.swept=-1 must be over 0."),
        (dict(swept=np.float32(0)), "example.swept=np.float32(0.0) must be over 0."),
        (dict(swept=jnp.array([1.0, NAN])), "must be a finite number, over 0."),
        (dict(maybe=0), "example.maybe=0 must be at least 1, or None."),
        (dict(widths=(4, 0)), "example.widths=(4, 0) has an entry that must be at least 1."),
        (dict(widths=4), "example.widths=4 must be a list, each entry at least 1."),
        (dict(name="c"), "example.name='c' is unknown; legal are a, b."),
        (dict(name=1), "example.name=1 is unknown; legal are a, b."),
        (dict(signed=INF), "example.signed=inf must be a finite number."),
    ],
    ids=str,
)
def test_sentences(changes, sentence):
    with pytest.raises(UsageError) as error:
        Example(**changes)
    assert str(error.value).endswith(sentence)


def test_what_is_legal_is_taken():
    Example(whole=-1, real=0, swept=3, maybe=2, widths=[1, 2], name="b", signed=-7)
    Example(whole=np.int64(2), real=np.float32(0.5), swept=jnp.float32(2), signed=np.float64(1))


def test_a_number_that_is_swept_is_not_looked_at():
    jax.vmap(lambda x: Example(swept=x).swept)(jnp.array([1.0, -1.0, NAN]))
    jax.jit(lambda x: Vopp(eta=x).eta)(-1.0)


def test_other_metadata_stays():
    declared = {each.name: each.metadata for each in dataclasses.fields(Example)}
    assert declared["widths"]["identity"] is False and "identity" not in declared["whole"]
