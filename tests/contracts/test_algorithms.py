"""What every `Algorithm` keeps, one row an algorithm; a new one is added to `ROWS` and nothing else."""

import copy
import dataclasses
import functools
import inspect
from collections.abc import Callable
from typing import Any

import jax
import numpy as np
import optax
import pytest
import tiny
from fast import jit
from lm_configs import with_fields
from tolerance import EXACT_MATHS, assert_close

import envs
from envs.puzzles.knapsack import Items, Knapsack
from jaxpar import rl
from jaxpar.experimental.pseudo_tokens import PromptTokens
from jaxpar.experimental.trained_drafts import DraftTrainer
from jaxpar.life import Jitter, Lstm, Reflex, World
from jaxpar.lm import (
    AdapterConfig,
    ObjectiveConfig,
    OptimizerConfig,
    Trainer,
    TuningConfig,
)
from jaxpar.neat import CANONICAL, Neat, NeatConfig, Substrate, Table, xor
from jaxpar.nn import ImageClassifier, SequenceNetwork, SequenceTrainer
from jaxpar.nn.attention import Attention, Visible
from jaxpar.nn.cells.conv_embedding import ConvEmbedding
from jaxpar.nn.cells.stack_network import StackNetwork
from jaxpar.nn.mixers import Lmu
from jaxpar.nn.mlp import Mlp
from jaxpar.nn.position import Alibi
from jaxpar.nn.stack import Stack
from jaxpar.own import OwnModel
from jaxpar.rl import (
    A2c,
    Against,
    AlphaZero,
    Dqn,
    GuidedSearch,
    Network,
    Pbt,
    Ppo,
    Pqn,
    Sac,
    SelfPlay,
    Td3,
)


@dataclasses.dataclass(frozen=True)
class Row:
    """An algorithm and one example of what its step gets.

    Attributes:
      algorithm: The object itself.
      inputs: Makes the example, of arrays.
      reuses_keys: Why the checker of key reuse is wrong about it; empty if the checker must agree.
    """

    algorithm: Any
    inputs: Callable[[], Any] = lambda: None
    reuses_keys: str = ""


def tokens():
    rows = np.random.default_rng(0).integers(0, 16, (4, 7), dtype=np.int32)
    return {"tokens": rows[:, :-1], "targets": rows[:, 1:]}


def pairs():
    counts = np.ones((4, 6), np.float32)
    return tokens() | {f"rejected_{name}": x[::-1].copy() for name, x in tokens().items()} | {
        "weights": counts, "rejected_weights": counts
    }  # fmt: skip


def model_and_tokens():
    return tokens() | {"model": tiny.params_of(MODEL)}


def series():
    rng = np.random.default_rng(0)
    inputs, targets = (
        rng.standard_normal((4, 6, 2), np.float32),
        rng.integers(0, 3, (4, 6), dtype=np.int32),
    )
    return {"inputs": inputs, "targets": targets, "weights": np.ones((4, 6), np.float32)}


def images():
    rng = np.random.default_rng(0)
    inputs, targets = (
        rng.standard_normal((4, 4, 4, 1), np.float32),
        rng.integers(0, 3, 4, dtype=np.int32),
    )
    return {"inputs": inputs, "targets": targets, "weights": np.ones(4, np.float32)}


def own_init(key):
    return {"params": {"w": jax.random.normal(key, (2, 3))}, "steps": {"made": jax.numpy.zeros(())}}


def own_loss(variables, batch, key):
    noisy = batch["inputs"].mean(1) + 0.1 * jax.random.normal(key, (4, 2))
    error = jax.numpy.square(noisy @ variables["params"]["w"]).mean()
    return error, {"steps": {"made": variables["steps"]["made"] + 1}, "again": error}


OWN = OwnModel(own_init, own_loss, lambda variables, batch: batch["inputs"], optax.adam(1e-3), list)
CART, CART_PARAMS = envs.make("CartPole-v1")


def short_episodes():
    return CART_PARAMS.replace(max_steps=3)


PENDULUM, PENDULUM_PARAMS = envs.make("Pendulum-v1")


def short_swings():
    return PENDULUM_PARAMS.replace(max_steps=3)


SHAPES_ALONE = "rollout.env_state evaluates shapes, and nothing else, with a key that was used"
MODEL = tiny.LLAMA
ADAPTED = OptimizerConfig(warmup_steps=1)
FORAGING, FORAGING_PARAMS = envs.make("Foraging-8x8-2p-2f")
VALUES = Network(hidden=(4,), activation="relu", layer_norm=True)
STACK = Stack(
    1, 4, Attention(2, 2, 2, positions=Alibi(), visible=Visible(window=3)), Mlp(4), init_std=0.5
)
LAYERS = Stack(1, 4, Lmu(4, memory=3, theta=5.0), Mlp(4, "gelu"), init_std=0.5, dtype="float32")
BOTH_WAYS = Stack(1, 4, Attention(2, 2, 2, visible=Visible(causal=False)), Mlp(4), dropout=0.1)
TINY = {"num_envs": 2, "num_steps": 4, "epochs": 1, "minibatches": 2}
SUBSTRATE = Substrate((((-1.0, -1.0), (0.0, -1.0), (1.0, -1.0)), ((0.0, 1.0),)))
LIVING = {
    "num_agents": 6,
    "num_robots": 2,
    "size": 4,
    "lattice": 2,
    "window": 1,
    "seen_agents": 2,
    "max_births": 2,
    "newcomers": 2,
}
REPLAY = {
    "num_envs": 2,
    "num_steps": 4,
    "gradient_steps": 2,
    "batch_size": 4,
    "capacity": 16,
    "warmup": 1,
}
ROWS = {
    "lm-adamw": Row(Trainer(MODEL), tokens),
    "lm-muon-dropout-accumulate": Row(
        Trainer(
            dataclasses.replace(MODEL, dropout=0.3, bias=True),
            OptimizerConfig("muon"),
            accumulate=2,
        ),
        tokens,
    ),
    "lm-draft": Row(DraftTrainer(MODEL, PromptTokens(2), num_anchors=3), model_and_tokens),
    "lm-tuned": Row(Trainer(MODEL, tuning=TuningConfig(("embedding", "w_*"), 0.5, 0.9)), tokens),
    "lm-adapters": Row(
        Trainer(
            MODEL,
            ADAPTED,
            accumulate=2,
            adapter=AdapterConfig("lora", rank=2, dropout=0.1, dora=True, base="nf4"),
        ),
        tokens,
    ),
    "lm-preferences": Row(Trainer(MODEL, objective=ObjectiveConfig("dpo")), pairs),
    "lm-min-gru": Row(Trainer(with_fields(MODEL, mixer="min_gru")), tokens),
    "lm-gla": Row(Trainer(with_fields(MODEL, mixer="gla")), tokens),
    "neat-fast": Row(Neat(NeatConfig(3, 1, 12, 8, 10, 4), Table(tolerance=0.0)), xor),
    "neat-canonical": Row(
        Neat(
            NeatConfig(
                3,
                1,
                12,
                8,
                10,
                4,
                "canonical",
                "recurrent",
                sub_steps=3,
                rates=CANONICAL.replace(add_node=0.5),
            ),
            Table(),
        ),
        xor,
    ),
    "neat-decoded": Row(Neat(NeatConfig(5, 1, 12, 8, 14, 4), Table(decoder=SUBSTRATE)), xor),
    "life": Row(World(Reflex(Jitter(0.1), std=1.0), **LIVING)),
    "life-lstm": Row(World(Lstm(4, 4, 2), **LIVING)),
    "ppo": Row(
        Ppo(CART, Network(hidden=(8,)), num_envs=2, num_steps=6, epochs=2, minibatches=2),
        short_episodes,
        SHAPES_ALONE,
    ),
    "ppo-lag": Row(
        Ppo(CART, Network(hidden=(8,)), num_envs=2, num_steps=6, epochs=2, minibatches=2, lag=2),
        short_episodes,
        SHAPES_ALONE,
    ),
    "pbt": Row(
        Pbt(A2c(CART, Network(hidden=(4,)), num_envs=2, num_steps=4), 2, period=1),
        short_episodes,
        SHAPES_ALONE,
    ),
    "self-play": Row(
        SelfPlay(A2c(Against(FORAGING, VALUES), VALUES, num_envs=2, num_steps=4), pool=2),
        lambda: FORAGING_PARAMS.replace(max_steps=3),
        SHAPES_ALONE,
    ),
    "alpha-zero": Row(
        AlphaZero(
            CART, Network(hidden=(4,)), GuidedSearch(3, noise=0.25), **TINY, normalize_obs=True
        ),
        short_episodes,
    ),
    "alpha-zero-items": Row(
        AlphaZero(Knapsack(Items(4)), rl.Items(4, 1, 1), GuidedSearch(3), **TINY)
    ),
    "a2c-para-gru": Row(
        A2c(CART, Network((8,), (8,), memory="para_gru", memory_size=4), num_envs=2, num_steps=6),
        short_episodes,
        SHAPES_ALONE,
    ),  # fmt: skip
    "a2c-stack": Row(
        A2c(CART, Network((8,), (8,), memory=STACK), num_envs=2, num_steps=6),
        short_episodes,
        SHAPES_ALONE,
    ),  # fmt: skip
    "own": Row(OWN, series),
    "images": Row(SequenceTrainer(ImageClassifier(BOTH_WAYS, 2, (4, 4, 1), 3)), images),
    "sequence-lmuformer": Row(
        SequenceTrainer(StackNetwork(LAYERS, 2, 3, embedding=ConvEmbedding(4, 1))), series
    ),
    "sequence-para-gru": Row(SequenceTrainer(SequenceNetwork(2, 3, "para_gru", 8, 1)), series),
    "pqn": Row(Pqn(CART, VALUES, **TINY), short_episodes, SHAPES_ALONE),
    "pqn-min-gru": Row(
        Pqn(CART, Network(hidden=(), memory="min_gru", memory_size=4), **TINY),
        short_episodes,
        SHAPES_ALONE,
    ),
    "pqn-qmix": Row(
        Pqn(FORAGING, VALUES, decomposition="qmix", decomposition_size=4, **TINY),
        lambda: FORAGING_PARAMS.replace(max_steps=3),
        SHAPES_ALONE,
    ),  # fmt: skip
    "dqn": Row(Dqn(CART, VALUES, **REPLAY), short_episodes, SHAPES_ALONE),
    "td3": Row(Td3(PENDULUM, Network(hidden=(4,)), **REPLAY), short_swings, SHAPES_ALONE),
    "sac": Row(Sac(PENDULUM, Network(hidden=(4,)), **REPLAY), short_swings, SHAPES_ALONE),
}
SLOW = (
    "life-lstm",
    "lm-gla",
    "lm-draft",
    "lm-tuned",
    "lm-adapters",
    "lm-preferences",
    "lm-muon-dropout-accumulate",
    "a2c-para-gru",
    "a2c-stack",
    "ppo-lag",
    "pbt",
    "alpha-zero",
    "self-play",
    "pqn-min-gru",
    "pqn-qmix",
    "dqn",
    "td3",
    "sac",
)  # half a minute of compiling; parts have tests of their own
each_row = pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[pytest.mark.slow] if name in SLOW else []) for name in ROWS]
)

# What costs programs of its own is seen of one row of each family; 30 s for the others.
FAMILIES = ("lm-adamw", "neat-fast", "ppo", "sequence-para-gru")
one_of_each_family = pytest.mark.parametrize(
    "name",
    [pytest.param(name, marks=[] if name in FAMILIES else [pytest.mark.slow]) for name in ROWS],
)


@functools.cache
def compiled(name):
    """The row's jitted init and step, and how often the step was traced."""
    algorithm, traces = ROWS[name].algorithm, []

    def step(key, state, inputs):
        traces.append(1)
        return algorithm.step(key, state, inputs)

    return jit(algorithm.init), jit(step), traces


@functools.cache
def first_state(name):
    return compiled(name)[0](jax.random.key(0), ROWS[name].inputs())


def types(tree):
    return jax.tree.map(lambda x: (x.shape, x.dtype, getattr(x, "weak_type", False)), tree)


@each_row
def test_argument_names(name):
    algorithm = ROWS[name].algorithm
    assert list(inspect.signature(algorithm.init).parameters) == ["key", "inputs"]
    assert list(inspect.signature(algorithm.step).parameters) == ["key", "state", "inputs"]
    if hasattr(algorithm, "done"):
        assert list(inspect.signature(algorithm.done).parameters) == ["state"]


@each_row
def test_the_object_is_a_static_argument(name):
    algorithm = ROWS[name].algorithm
    twin = copy.deepcopy(algorithm)
    assert twin == algorithm and hash(twin) == hash(algorithm)
    assert dataclasses.is_dataclass(algorithm)
    assert not any(
        isinstance(x, jax.Array | np.ndarray)
        for x in jax.tree.leaves(dataclasses.asdict(algorithm))
    )
    with pytest.raises(dataclasses.FrozenInstanceError):
        setattr(algorithm, dataclasses.fields(algorithm)[0].name, None)


@each_row
def test_types_of_the_state_never_change(name):
    row, (init, step, _) = ROWS[name], compiled(name)
    first = jax.eval_shape(init, jax.random.key(0), row.inputs())
    second, info = jax.eval_shape(step, jax.random.key(0), first, row.inputs())
    assert types(second) == types(first)
    assert not any(x.weak_type for x in jax.tree.leaves((first, info)))
    assert isinstance(info, dict) and all(x.shape == () for x in info.values())
    state = first_state(name)
    assert types(state) == types(first)
    stepped, stepped_info = step(jax.random.key(1), state, row.inputs())
    assert types(stepped) == types(first) and types(stepped_info) == types(info)
    if hasattr(row.algorithm, "done"):
        done = jax.eval_shape(row.algorithm.done, first)
        assert (done.shape, done.dtype) == ((), bool)


@one_of_each_family
def test_eager_equals_jit(name):
    (_, step, _), state = compiled(name), first_state(name)
    eager = ROWS[name].algorithm.step(jax.random.key(1), state, ROWS[name].inputs())
    # Fusion reorders sums, and an optimizer divides by the root of small squares.
    assert_close(
        eager,
        step(jax.random.key(1), state, ROWS[name].inputs()),
        10 * EXACT_MATHS["float32"],
        ("bk",),
    )


@one_of_each_family
def test_vmap_over_keys_equals_loop(name):
    algorithm, inputs = ROWS[name].algorithm, ROWS[name].inputs()
    keys, more_keys = jax.random.split(jax.random.key(2), (2, 3))
    init, step, _ = compiled(name)

    @jit
    def both(keys, more_keys, inputs):
        states = jax.vmap(algorithm.init, (0, None))(keys, inputs)
        return jax.vmap(algorithm.step, (0, 0, None))(more_keys, states, inputs)

    many = jax.device_get(both(keys, more_keys, inputs))
    for i, (key, next_key) in enumerate(zip(keys, more_keys, strict=True)):
        one = step(next_key, init(key, inputs), inputs)
        assert_close(
            jax.tree.map(lambda x, i=i: x[i], many), one, 10 * EXACT_MATHS["float32"], ("bk",)
        )


@each_row
def test_same_key_same_bits_in_one_trace(name):
    (_, step, traces), state = compiled(name), first_state(name)
    runs = []
    for _ in range(2):
        now = state
        for number in range(5):
            now, info = step(
                jax.random.fold_in(jax.random.key(3), number), now, ROWS[name].inputs()
            )
        runs.append((now, info))
    jax.tree.map(np.testing.assert_array_equal, *runs)
    assert len(traces) == 1, (
        "ten calls should trace once: a type of the state changes, or the step is no pure function"
    )


@each_row
def test_no_key_is_used_twice(name):
    row = ROWS[name]
    if row.reuses_keys:
        pytest.skip(row.reuses_keys)

    def once(key):
        first, second = jax.random.split(key)
        return row.algorithm.step(second, row.algorithm.init(first, row.inputs()), row.inputs())

    with jax.debug_key_reuse(True):  # which looks at traces
        jit(once).trace(jax.random.key(4))


def test_the_checker_of_key_reuse_sees_a_reuse():
    with jax.debug_key_reuse(True), pytest.raises(jax.errors.KeyReuseError):
        jit(lambda key: jax.random.normal(key) + jax.random.uniform(key)).trace(jax.random.key(0))
