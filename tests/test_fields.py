"""Every configuration, of library, environments and experiments, refuses impossible numbers: one table."""

import dataclasses
import importlib
import inspect
import pkgutil
import typing

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from lm_configs import lm_config
from ranges_of_fields import INF, NAN
from table_of_fields import BY_HAND, RESULTS, TABLE

import envs
import experiments
import jaxpar
from jaxpar.aot.placement import Split
from jaxpar.decode import ModelDraft, ModelSizes
from jaxpar.env.picture import Animation
from jaxpar.experimental.attention_experts import AttentionExperts
from jaxpar.experimental.autoregressive import Made, PixelCnn
from jaxpar.experimental.dense_depth import DenseDepth
from jaxpar.experimental.pseudo_tokens import HiddenTransfer, PromptTokens
from jaxpar.experimental.trained_drafts import DraftTrainer
from jaxpar.fields import AtLeast, Between, Each, Finite, OneOf, Positive, check_fields, field
from jaxpar.io import Checkpoints
from jaxpar.lm import AdapterConfig, AdapterTrainer, Trainer
from jaxpar.lm.text.corpus import Tokens
from jaxpar.lm.text.data import Windows
from jaxpar.loop import Fit
from jaxpar.neat import NeatConfig
from jaxpar.neat.config import Rates
from jaxpar.neat.episodes import Episodes, GeneralizationTest
from jaxpar.neat.hyper import Substrate, SubstrateTable
from jaxpar.neat.quadtree import Quadtree
from jaxpar.nn.attention import Attention, Visible
from jaxpar.nn.cells.aaren import Aaren
from jaxpar.nn.cells.cell import Cell
from jaxpar.nn.cells.conv_embedding import ConvEmbedding
from jaxpar.nn.cells.network import SequenceNetwork, SequenceTrainer
from jaxpar.nn.cells.s5 import S5
from jaxpar.nn.cells.stack_network import StackNetwork
from jaxpar.nn.experts import Experts
from jaxpar.nn.images.space_time import SpaceTimeStack
from jaxpar.nn.images.vision import FramePredictor, ImageClassifier
from jaxpar.nn.mixers import (
    BlockRecurrent,
    GatedDelta,
    GatedLinear,
    Hgrn,
    Lmu,
    Mamba2,
    MatrixState,
    MLstm,
    Rwkv6,
    SpikingMlp,
    Tcnca,
)
from jaxpar.nn.mlp import Mlp
from jaxpar.nn.stack import Stack
from jaxpar.optim import Optimizer
from jaxpar.pipeline import Pipelined, gpipe
from jaxpar.pomdp import RootParallel, Vopp
from jaxpar.pomdp.planners import tree
from jaxpar.pomdp.planners.leaves import RolloutValues
from jaxpar.rl import (
    A2c,
    Against,
    AlphaZero,
    AlphaZeroRates,
    Dqn,
    Network,
    Pbt,
    Ppo,
    Pqn,
    Sac,
    Seeds,
    SelfPlay,
    Td3,
)
from jaxpar.rl.a2c import A2cRates
from jaxpar.rl.action_values import ActionValues
from jaxpar.rl.dqn import DqnRates
from jaxpar.rl.ppo import PpoRates
from jaxpar.rl.pqn import PqnRates
from jaxpar.rl.replay import ReplayFields
from jaxpar.rl.sac import SacRates
from jaxpar.rl.td3 import Td3Rates
from jaxpar.solve import structure
from jaxpar.types import Scalar, UsageError


def is_number(value):
    return isinstance(value, int | float) and not isinstance(value, bool)


PARTS = {ReplayFields}
"""Bases that are no configurations by themselves: their fields are those of the classes below."""


def own_numbers(cls):
    """The fields that a class adds, itself or by a base in `PARTS`, and in which there are numbers."""
    added = {
        name
        for kind in (cls, *PARTS.intersection(cls.__mro__))
        for name in kind.__dict__.get("__annotations__", {})
    }
    for declared in dataclasses.fields(cls):
        parts = () if typing.get_origin(declared.type) is dict else typing.get_args(declared.type)
        types = [kind for kind in (declared.type, *parts) if kind in (int, float)]
        swept = declared.type is typing.Any and is_number(declared.default)
        legal = declared.metadata.get("legal")
        ranged = isinstance(legal.legal if isinstance(legal, Each) else legal, Between)
        if declared.name in added and (types or swept or ranged):
            yield declared.name


def is_configuration(package, module, name, cls):
    """True where a name of a module is a public frozen dataclass of its own, with numbers, that is no result."""
    if not (inspect.isclass(cls) and dataclasses.is_dataclass(cls) and cls.__module__ == module):
        return False
    if package is envs and hasattr(cls, "_flax_dataclass"):
        # Parameters, which are traced; flags that change them are checked where they are read.
        return False
    is_known = f"{module.partition('.')[2]}.{name}" in RESULTS or name.startswith("_")
    if is_known or cls in PARTS or not cls.__dataclass_params__.frozen:
        return False
    return any(True for _ in own_numbers(cls))


def configurations():
    """Every public frozen dataclass with numbers of its own in the library and its experiments."""
    for package in (jaxpar, envs, experiments):
        for module in pkgutil.walk_packages(package.__path__, package.__name__ + "."):
            if package is jaxpar and "._" in module.name:
                continue
            for name, cls in vars(importlib.import_module(module.name)).items():
                if is_configuration(package, module.name, name, cls):
                    yield cls


def rows(cls):
    return [(name, *ends) for names, ends in TABLE[cls].items() for name in names.split()]


def test_the_table_has_every_configuration_and_every_number():
    found = {
        cls: {name for name in own_numbers(cls) if (cls, name) not in BY_HAND}
        for cls in configurations()
    }
    assert {cls: {name for name, *_ in rows(cls)} for cls in TABLE} == found


# ---------------------------------------------------------------- how each is made

CART = envs.make("CartPole-v1")[0]
FORAGING = envs.make("Foraging-8x8-2p-2f")[0]
PENDULUM = envs.make("Pendulum-v1")[0]
TOKENS = Tokens(np.zeros(40, np.uint8), np.zeros(1, np.int64), np.full(1, 40))
BOTH_WAYS = Attention(1, 1, 4, visible=Visible(causal=False))
PLANE = ((0.0, 0.0),)
BASIS = {
    Windows: (TOKENS, 8, 2, 0),
    ModelDraft: (None,),
    ModelSizes: (9, 1, 1, 1, 1),
    HiddenTransfer: (0,),
    AdapterTrainer: (lm_config(), AdapterConfig("lora")),
    DraftTrainer: (lm_config(), PromptTokens()),
    Trainer: (lm_config(),),
    Pipelined: (gpipe(1, 1),),
    Fit: (8,),
    NeatConfig: (2, 1),
    Against: (FORAGING,),
    SelfPlay: (A2c(Against(FORAGING)),),
    Episodes: (CART, 10.0),
    GeneralizationTest: (None, CART),
    Substrate: ((PLANE, PLANE),),
    SubstrateTable: (Substrate((PLANE, PLANE)),),
    Quadtree: (PLANE, PLANE),
    Aaren: (4,),
    Attention: (2, 2, 4),
    Mlp: (4,),
    Hgrn: (4,),
    ConvEmbedding: (4,),
    SpikingMlp: (4,),
    Lmu: (4,),
    BlockRecurrent: (2, 2, 4),
    Tcnca: (2, 2, 4),
    StackNetwork: (Stack(1, 4, Attention(1, 1, 4), Mlp(4)), 3, 2),
    Experts: (4, 2),
    MatrixState: (MLstm(1, 2, 2),),
    GatedLinear: (1, 2, 2),
    MLstm: (1, 2, 2),
    Mamba2: (1, 2, 2),
    GatedDelta: (1, 2, 2),
    Rwkv6: (1, 2, 2),
    AttentionExperts: (Attention(2, 2, 4), 2),
    Stack: (1, 4, None, Mlp(4)),
    Made: (4,),
    PixelCnn: (2, 2),
    Cell: (lambda x: x, 4),
    DenseDepth: (3, 2, 4),
    S5: (4,),
    SequenceNetwork: (3, 2),
    ImageClassifier: (Stack(1, 4, BOTH_WAYS, Mlp(4)), 1, (4, 4, 1), 2),
    FramePredictor: (
        SpaceTimeStack(Stack(1, 4, BOTH_WAYS, Mlp(4)), Attention(1, 1, 4)),
        1,
        (2, 4, 4),
    ),
    SequenceTrainer: (SequenceNetwork(3, 2),),
    Split: (0,),
    RolloutValues: (5,),
    RootParallel: (Vopp(),),
    tree.DenseChildren: (2,),
    A2c: (CART,),
    AlphaZero: (CART,),
    Ppo: (CART,),
    Pqn: (CART,),
    Dqn: (CART,),
    Td3: (PENDULUM,),
    Sac: (PENDULUM,),
    ActionValues: (CART, Network()),
    Optimizer: (optax.scale_by_adam(),),
    Seeds: (None, 2),
    Pbt: (Ppo(CART), 2),
    Animation: ([],),
    structure.Block: (2,),
}
OWNERS = {
    Rates: lambda rates: NeatConfig(2, 1, rates=rates),
    A2cRates: lambda rates: A2c(CART, rates=rates),
    AlphaZeroRates: lambda rates: AlphaZero(CART, rates=rates),
    PpoRates: lambda rates: Ppo(CART, rates=rates),
    PqnRates: lambda rates: Pqn(CART, rates=rates),
    DqnRates: lambda rates: Dqn(CART, rates=rates),
    Td3Rates: lambda rates: Td3(PENDULUM, rates=rates),
    SacRates: lambda rates: Sac(PENDULUM, rates=rates),
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


@pytest.mark.parametrize(
    "cls", TABLE, ids=lambda cls: f"{cls.__module__}.{cls.__name__}".removeprefix("jaxpar.")
)
def test_impossible_numbers_are_refused(cls):
    for name, outside, ends in rows(cls):
        annotation = next(each for each in dataclasses.fields(cls) if each.name == name).type
        is_whole = int in {annotation, *typing.get_args(annotation)}
        infinite = () if INF in ends else (INF, -INF)
        for value in (NAN, *infinite, True, "1", *outside, *([2.0, 1.5] if is_whole else [])):
            with pytest.raises(UsageError) as error:
                changed(cls, name, value)
            said = str(error.value)
            assert (
                f"{name}=" in said
                and repr(value) in said
                and said.endswith(".")
                and "\n" not in said
            ), said
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
    swept: Scalar = field(0.5, Positive())
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
