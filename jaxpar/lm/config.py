"""Configuration of a language model: `LMConfig`, and GPT-2 and Llama as two presets of it."""

import dataclasses
from typing import ClassVar, TypeVar

from jaxpar._older_fields import accept_older_fields, newer_fields
from jaxpar.fields import (
    AtLeast,
    Between,
    Each,
    OneOf,
    Positive,
    check_fields,
    field,
    make_nested,
)
from jaxpar.lm.flat_names import FLAT_NAMES
from jaxpar.lm.mixers import MIXERS, check_mixers, mixers_of
from jaxpar.nn.attention.context import CONTEXT_MOVES, CONTEXT_ORDERS, Order, SplitSequence
from jaxpar.nn.attention.mixer import ATTENTION_IMPLS, Attention
from jaxpar.nn.cells.solvers import METHODS
from jaxpar.nn.experts import Experts
from jaxpar.nn.experts.layer import BALANCE_LAYERS
from jaxpar.nn.experts.route import SCORES
from jaxpar.nn.experts.sharded import TRANSPORTS, transport_for
from jaxpar.nn.mlp import ACTIVATIONS, Mlp
from jaxpar.nn.norm import Norm
from jaxpar.nn.position import ROPE_SCALINGS
from jaxpar.nn.stack import REMATS, RESIDUALS, WEIGHTS, Stack
from jaxpar.types import UsageError

__all__ = [
    "AttentionConfig",
    "EmbeddingConfig",
    "ExecutionConfig",
    "ExpertsConfig",
    "LMConfig",
    "LossesConfig",
    "MixerConfig",
    "MlpConfig",
    "NormConfig",
    "ResidualConfig",
    "RopeConfig",
    "gpt2",
    "llama",
]


T = TypeVar("T")

DTYPES = ("bfloat16", "float16", "float32", "float64")


def _execution(default: T, legal: Between | OneOf | None = None) -> T:
    """Declares a field that says how to compute and not what: it is no part of a run's identity."""
    return field(default, legal, identity=False)


def _later(default: T, legal: Between | OneOf | Each | None) -> T:
    """Declares a field that older runs lack: it is part of a run's identity where it is not the default."""
    return field(default, legal, identity="changed")


@dataclasses.dataclass(frozen=True)
class EmbeddingConfig:
    """The embedding and the output head.

    Attributes:
      tied: Whether the embedding is the output head too.
      scale: Whether embeddings are multiplied by sqrt(D).
      logit_cap: c, where a logit z is c tanh(z / c); 0 for none.
    """

    tied: bool = False
    scale: bool = _later(False, None)
    logit_cap: float = _later(0.0, AtLeast(0))

    def __post_init__(self):
        """Rejects values out of range."""
        check_fields(self, "model.embedding.")


@dataclasses.dataclass(frozen=True)
class AttentionConfig:
    """Heads, of attention and of the other mixers that have some, and attention's windows and scores.

    Attributes:
      num_heads: H, query heads.
      num_kv_heads: G, key and value heads: H for multi-head, 1 for multi-query, between for
        grouped-query attention; 0 means H.
      head_dim: K; 0 means D / H.
      windows: Tokens that attention sees, the token itself counted, in layers in turn; 0 for all
        before it, () for all in all layers. (1024,) is Mistral's kind, (4096, 0) Gemma 2's; layers
        may end within a turn.
      qk_norm: Whether queries and keys of a head are normalised, by `norm`, before they are rotated.
      qkv_bias: Whether the products into queries, keys and values have biases, as Qwen 2's; the
        model's `bias` gives them to all products.
      score_cap: c, where an attention score s is c tanh(s / c); 0 for none.
      score_dim: Divisor of scores, which are q . k / sqrt(this); 0 means head_dim.
    """

    num_heads: int = field(4, AtLeast(1))
    num_kv_heads: int = field(0, AtLeast(0))
    head_dim: int = field(0, AtLeast(0))
    windows: tuple[int, ...] = _later((), Each(AtLeast(0)))
    qk_norm: bool = _later(False, None)
    qkv_bias: bool = _later(False, None)
    score_cap: float = _later(0.0, AtLeast(0))
    score_dim: float = _later(0.0, AtLeast(0))

    def __post_init__(self):
        """Rejects values out of range, and heads that do not divide."""
        check_fields(self, "model.attention.")
        object.__setattr__(self, "windows", tuple(self.windows))
        if self.num_kv_heads and self.num_heads % self.num_kv_heads:
            legal = [g for g in range(1, self.num_heads + 1) if self.num_heads % g == 0]
            raise UsageError(
                f"model.attention.num_heads={self.num_heads} is not a multiple of "
                f"model.attention.num_kv_heads={self.num_kv_heads}; "
                f"legal are {', '.join(map(str, legal))}."
            )


@dataclasses.dataclass(frozen=True)
class MixerConfig:
    """Mixer of the tokens of a block.

    Attributes:
      kind: "attention", a recurrent cell of `jaxpar.nn`, or another of `jaxpar.nn.mixers`, a row of
        `jaxpar.lm.mixers.MIXERS`.
      in_turn: Kinds that layers have in turn, in place of one for all: layer l has number l mod
        their number. Recurrent ones have `dim` units, or each as many as make it as large as
        attention would be.
      dim: Units of a recurrent layer; 0 means as many as make it as large as attention would be.
        The dense ones, aaren and those with a matrix state have them in `attention.num_heads` heads.
      key_dim: K, rows of a head's matrix state; 0 leaves that to the mixer.
      groups: Groups of heads that share keys and queries, in mamba2.
      window: Tokens that a mixer holds or takes at once: theta of lmu, W of block_recurrent,
        windowed and tcnca.
      states: Size of what it keeps of earlier tokens: d numbers a head of lmu, S states of
        block_recurrent.
    """

    kind: str = _later("attention", OneOf(tuple(MIXERS)))
    in_turn: tuple[str, ...] = _later((), Each(OneOf(tuple(MIXERS))))
    dim: int = _later(0, AtLeast(0))
    key_dim: int = _later(0, AtLeast(0))
    groups: int = _later(1, AtLeast(1))
    window: int = _later(128, AtLeast(1))
    states: int = _later(32, AtLeast(1))

    def __post_init__(self):
        """Rejects values out of range, and one kind for all beside several in turn."""
        check_fields(self, "model.mixer.")
        object.__setattr__(self, "in_turn", tuple(self.in_turn))
        if self.in_turn and self.kind != "attention":
            raise UsageError(
                f"model.mixer.kind={self.kind} is one for all layers; "
                "take model.mixer.in_turn or it, not both."
            )

    @property
    def kinds(self) -> tuple[str, ...]:
        """The kinds that layers have in turn."""
        return self.in_turn or (self.kind,)


@dataclasses.dataclass(frozen=True)
class MlpConfig:
    """The mlp of a block, or each expert.

    Attributes:
      dim: F; 0 for no mlp, and no norm before it: layers are x + mixer(norm(x)) alone, as Mamba-2's.
      activation: "swiglu" or "geglu" (gated), "gelu" (tanh form, GPT-2's) or "gelu_exact" (erf form).
    """

    dim: int = field(384, AtLeast(0))
    activation: str = field("swiglu", OneOf(ACTIVATIONS))

    def __post_init__(self):
        """Rejects values out of range."""
        check_fields(self, "model.mlp.")


@dataclasses.dataclass(frozen=True)
class ExpertsConfig:
    """Experts in place of one mlp.

    Attributes:
      num_experts: E, mlps of width F of which `jaxpar.nn.experts` sends a token to a few; 0 for one
        mlp for all.
      experts_per_token: k; weights are a score's share of the sum of k if over 1, else the score.
      capacity: Choices that an expert takes of a row in training, as a multiple of T k / E; None
        for all.
      capacity_group: Consecutive tokens of a row in which that is counted, T of them; 0 for whole
        rows.
      scores: "softmax" or "sigmoid".
      failures: Share of the experts that do not answer a row of the batch in training; others count
        for them.
      shared: n, experts that all tokens pass: one mlp of width n F, added to what the chosen
        experts make.
    """

    num_experts: int = _later(0, AtLeast(0))
    experts_per_token: int = _later(2, AtLeast(1))
    capacity: float | None = _later(None, Positive())
    capacity_group: int = _later(0, AtLeast(0))
    scores: str = _later("softmax", OneOf(SCORES))
    failures: float = _later(0.0, Between(0, 1))
    shared: int = _later(0, AtLeast(0))

    def __post_init__(self):
        """Rejects values out of range."""
        check_fields(self, "model.experts.")


@dataclasses.dataclass(frozen=True)
class NormConfig:
    """Normalisation of the residual stream.

    Attributes:
      kind: "rms" or "layer".
      eps: Number added to the variance, in the layers' norms and in that within mamba2.
      plus_one: Whether a norm's scale is 1 + w of its parameter w.
      post_norms: Whether the output of a branch is normalised before it is added.
    """

    kind: str = field("rms", OneOf(("rms", "layer")))
    eps: float = field(1e-5, Positive())
    plus_one: bool = _later(False, None)
    post_norms: bool = _later(False, None)

    def __post_init__(self):
        """Rejects values out of range."""
        check_fields(self, "model.norm.")


@dataclasses.dataclass(frozen=True)
class RopeConfig:
    """Rotary positions.

    Attributes:
      theta: Base of the wavelengths.
      theta_local: Base of those of layers with a window, which are not scaled; 0 means `theta`.
      factor: Scaling of long wavelengths; 1 switches it off (`jaxpar.nn.position.Rope`).
      scaling: Rule of `factor`: "llama3", "yarn", "dynamic", which scales texts longer than
        `original_len` alone, or "linear", where all wavelengths are divided.
      low_freq_factor: Wavelengths over `original_len / this` are divided in full.
      high_freq_factor: Wavelengths under `original_len / this` are kept.
      original_len: Context length before scaling, in tokens.
      share: Share of a head's numbers that are rotated.
      score_scale: Factor of rotated queries and keys, by "yarn" alone; 0 means 0.1 ln(factor) + 1.
    """

    theta: float = field(10000.0, Positive())
    theta_local: float = _later(0.0, AtLeast(0))
    factor: float = field(1.0, AtLeast(1))
    scaling: str = _later("llama3", OneOf(ROPE_SCALINGS))
    low_freq_factor: float = field(1.0, Positive())
    high_freq_factor: float = field(4.0, Positive())
    original_len: int = field(8192, AtLeast(1))
    share: float = _later(1.0, Between(0, 1, "(]"))
    score_scale: float = _later(0.0, AtLeast(0))

    def __post_init__(self):
        """Rejects values out of range, and bounds of wavelengths in the wrong order."""
        check_fields(self, "model.rope.")
        if self.score_scale and self.scaling != "yarn":
            raise UsageError(
                f"model.rope.score_scale={self.score_scale:g}: a factor of "
                f"model.rope.scaling=yarn, and this is {self.scaling}; expected 0."
            )
        blends = self.factor != 1 and self.scaling in ("llama3", "yarn")
        if blends and not self.low_freq_factor < self.high_freq_factor:
            raise UsageError(
                f"model.rope.high_freq_factor={self.high_freq_factor} must be over "
                f"model.rope.low_freq_factor={self.low_freq_factor}."
            )


@dataclasses.dataclass(frozen=True)
class ResidualConfig:
    """The residual stream.

    Attributes:
      kind: "standard", or "ladder", another model of the same parameters; see
        `jaxpar.nn.stack.Stack`.
      ladder_from: The first layer whose branches read so.
    """

    kind: str = _later("standard", OneOf(RESIDUALS))
    ladder_from: int = _later(0, AtLeast(0))

    def __post_init__(self):
        """Rejects values out of range."""
        check_fields(self, "model.residual.")


@dataclasses.dataclass(frozen=True)
class LossesConfig:
    """Weights of what is added to the cross entropy, and the type in which its logits are stored.

    Attributes:
      z_loss: Weight of the mean square of the log normaliser; 0 for none.
      low_logits: Whether logits are stored in the model's `dtype` instead of float32: half the
        traffic, rounding of 2^-9 a logit in bfloat16. Sums over them are float32 either way.
      balance_loss: Weight of the loss that evens the experts' loads.
      balance_layers: "summed" adds up the balance losses of layers, each 1 at even loads.
        "concatenated" is one loss over the tokens of all layers, k at even loads: transformers'.
      router_z_loss: Weight of the mean square of the router's log normaliser.
      router_bias: Weight of the gradient that corrects the choice by a bias of each expert, in
        place of a loss.
    """

    z_loss: float = _later(0.0, AtLeast(0))
    low_logits: bool = False
    balance_loss: float = _later(0.01, AtLeast(0))
    balance_layers: str = _later("summed", OneOf(BALANCE_LAYERS))
    router_z_loss: float = _later(0.0, AtLeast(0))
    router_bias: float = _later(0.0, AtLeast(0))

    def __post_init__(self):
        """Rejects values out of range."""
        check_fields(self, "model.losses.")


@dataclasses.dataclass(frozen=True)
class ExecutionConfig:
    """Execution of the model; no field changes its results but by rounding.

    Attributes:
      remat: What the backward pass recomputes, from nothing to layers: "none", "dots", "names",
        "offload", "full", or "blockwise", which needs no memory [T, T] nor [T, F] either; see
        `jaxpar.nn.stack.Stack`.
      kernel: Attention's: "auto" takes cuDNN on GPU, splash on TPU, dense XLA elsewhere.
      context: What travels between devices that share a sequence, of
        `jaxpar.nn.attention.context.MOVES`; "auto" takes what loads a link least, and no gather.
      context_order: Order in which they hold it: "contiguous", "zigzag" or "striped"; "auto" takes
        zigzag where it can.
      solver: Method of a recurrent mixer, by a name of `jaxpar.nn.cells.solvers`; "auto" leaves it
        to the mixer.
      transport: How tokens reach experts that devices share, of
        `jaxpar.nn.experts.sharded.TRANSPORTS`.
      scan_layers: Whether layers run in one `lax.scan` (compiles once) or unrolled (no stacking
        copies: faster on GPU, slower to compile).
      loss_chunk: Tokens a device whose logits exist at the same time.
      mixer_chunk: Tokens whose pairs a mixer with a matrix state multiplies, a power of two.
      ranges: Whether training reports the largest magnitude of the residual stream, at one more
        read of it a layer.
    """

    remat: str = _execution("none", OneOf(REMATS))
    kernel: str = _execution("auto", OneOf(ATTENTION_IMPLS))
    context: str = _execution("auto", OneOf(CONTEXT_MOVES))
    context_order: str = _execution("auto", OneOf(CONTEXT_ORDERS))
    solver: str = _execution("auto", OneOf(METHODS))
    transport: str = _execution("auto", OneOf(TRANSPORTS))
    scan_layers: bool = _execution(True)
    loss_chunk: int = _execution(8192, AtLeast(1))
    mixer_chunk: int = _execution(64, AtLeast(1))
    ranges: bool = _execution(False)

    def __post_init__(self):
        """Rejects values out of range."""
        check_fields(self, "model.execution.")


@accept_older_fields(FLAT_NAMES)
@dataclasses.dataclass(frozen=True, kw_only=True)
class LMConfig:
    """A decoder-only transformer. Defaults are a small Llama over bytes.

    Attributes:
      vocab_size: V, symbols.
      max_seq_len: Longest T that learned positions cover; rope needs no such bound.
      num_layers: L, of blocks.
      embed_dim: D, width of the residual stream.
      positions: "rope", "learned" or "none"; mixers other than attention apply no rope, and
        retention one of its own.
      bias: Whether projections and LayerNorms have biases.
      dropout: Rate on embeddings, attention weights and the residual branches, while training.
      init_std: Standard deviation of weights at the start; of B branches, their last projections
        use it / sqrt(B).
      dtype: Type of activations and of weights where they are multiplied. Master weights, norms,
        softmax and losses are float32 at least.
      weights: "full", or "ternary": -1, 0 and 1 where layers multiply; with mixer.kind=hgrn the
        MatMul-free language model.
      embedding: The embedding and the output head.
      attention: Heads, windows and scores.
      mixer: What mixes the tokens of a block, if not attention.
      mlp: The mlp of a block.
      experts: Experts in place of one mlp.
      norm: Normalisation.
      rope: Rotary positions.
      residual: The residual stream.
      losses: What is added to the cross entropy.
      execution: How all of it is computed.
    """

    vocab_size: int = field(256, AtLeast(1))
    max_seq_len: int = field(1024, AtLeast(1))
    num_layers: int = field(4, AtLeast(1))
    embed_dim: int = field(128, AtLeast(1))
    positions: str = field("rope", OneOf(("rope", "learned", "none")))
    bias: bool = False
    dropout: float = field(0.0, Between(0, 1, "[)"))
    init_std: float = field(0.02, Positive())
    dtype: str = field("bfloat16", OneOf(DTYPES))
    weights: str = _later("full", OneOf(WEIGHTS))
    embedding: EmbeddingConfig = EmbeddingConfig()
    attention: AttentionConfig = AttentionConfig()
    mixer: MixerConfig = MixerConfig()
    mlp: MlpConfig = MlpConfig()
    experts: ExpertsConfig = ExpertsConfig()
    norm: NormConfig = NormConfig()
    rope: RopeConfig = RopeConfig()
    residual: ResidualConfig = ResidualConfig()
    losses: LossesConfig = LossesConfig()
    execution: ExecutionConfig = ExecutionConfig()

    older_names: ClassVar[dict[str, str]] = FLAT_NAMES

    def __post_init__(self):
        """Fills derived sizes and rejects what no model can be."""
        check_fields(self, "model.")
        object.__setattr__(self, "attention", self._filled_attention())
        if self.positions == "rope" and self.attention.head_dim % 2:
            raise UsageError(
                f"model.attention.head_dim={self.attention.head_dim} must be even for rope."
            )
        if self.rope.theta_local and not self.attention.windows:
            raise UsageError(
                f"model.rope.theta_local={self.rope.theta_local:g} is of layers with "
                "model.attention.windows; take 0."
            )
        check_mixers(self)
        _check_experts(self)
        self.stack()

    def _filled_attention(self) -> AttentionConfig:
        """Returns attention's part with derived sizes in place of zeros."""
        attention = self.attention
        head_dim = attention.head_dim
        if not head_dim:
            heads = attention.num_heads
            if self.embed_dim % heads:
                nearest = self.embed_dim // heads * heads or heads
                raise UsageError(
                    f"model.embed_dim={self.embed_dim} is not a multiple of "
                    f"model.attention.num_heads={heads}; nearest is {nearest}, or give "
                    "model.attention.head_dim."
                )
            head_dim = self.embed_dim // heads

        windows = attention.windows
        if windows:
            each = [windows[layer % len(windows)] for layer in range(self.num_layers)]
            windows = shortest_turn(tuple(each)) if any(each) else ()

        score_dim = attention.score_dim
        return dataclasses.replace(
            attention,
            num_kv_heads=attention.num_kv_heads or attention.num_heads,
            head_dim=head_dim,
            windows=windows,
            score_dim=0.0 if score_dim == head_dim else score_dim,
        )

    def order(self, length: int) -> Order:
        """Returns the order in which the ambient mesh's devices hold the T tokens of a sequence."""
        mixer = self.stack().mixer
        if isinstance(mixer, Attention) and isinstance(mixer.attend, SplitSequence):
            return mixer.attend.order_of(mixer, length)
        return Order("contiguous")

    def stack(self) -> Stack:
        """Returns the layers between embedding and head."""
        return Stack(
            num_layers=self.num_layers,
            embed_dim=self.embed_dim,
            mixer=mixers_of(self),
            mlp=_mlp(self),
            norm=self.norm_layer(),
            dropout=self.dropout,
            init_std=self.init_std,
            dtype=self.dtype,
            remat=self.execution.remat,
            scan_layers=self.execution.scan_layers,
            ranges=self.execution.ranges,
            residual=self.residual.kind,
            ladder_from=self.residual.ladder_from,
            weights=self.weights,
            post_norms=self.norm.post_norms,
        )

    def norm_layer(self) -> Norm:
        """Returns the norm of the residual stream."""
        return Norm(
            kind=self.norm.kind, eps=self.norm.eps, bias=self.bias, plus_one=self.norm.plus_one
        )


def shortest_turn(items: tuple) -> tuple:
    """Returns the shortest tuple that, repeated and cut off, is `items`."""
    return next(
        items[:n]
        for n in range(1, len(items) + 1)
        if all(x == items[i % n] for i, x in enumerate(items))
    )


def _mlp(config: LMConfig) -> Mlp | Experts | None:
    if config.experts.num_experts:
        return _experts(config)
    if not config.mlp.dim:
        return None
    return Mlp(config.mlp.dim, config.mlp.activation, config.bias)


def _experts(config: LMConfig) -> Experts:
    experts = config.experts
    losses = config.losses
    return Experts(
        size=config.mlp.dim,
        num_experts=experts.num_experts,
        experts_per_token=experts.experts_per_token,
        activation=config.mlp.activation,
        capacity=experts.capacity,
        capacity_group=experts.capacity_group,
        scores=experts.scores,
        # Of one expert a token a share of the sum would be 1, of which no router learns.
        normalise=experts.experts_per_token > 1,
        balance_loss=losses.balance_loss,
        balance_layers=losses.balance_layers,
        z_loss=losses.router_z_loss,
        bias=losses.router_bias,
        failures=experts.failures,
        transport=transport_for(config.execution.transport),
        shared=experts.shared,
    )


OF_EXPERTS = {
    "experts": (
        "experts_per_token",
        "capacity",
        "capacity_group",
        "scores",
        "failures",
        "shared",
    ),
    "losses": ("balance_loss", "balance_layers", "router_z_loss", "router_bias"),
    "execution": ("transport",),
}
"""Fields that experts read, by the group of each."""


def _check_experts(config: LMConfig) -> None:
    if not config.experts.num_experts:
        usual = LMConfig.__dataclass_fields__
        for group, names in OF_EXPERTS.items():
            for name in names:
                value = getattr(getattr(config, group), name)
                if value != getattr(usual[group].default, name):
                    raise UsageError(
                        f"model.{group}.{name}={value} is of experts; "
                        "give model.experts.num_experts too."
                    )
        return
    if not config.mlp.dim:
        raise UsageError(
            f"model.experts.num_experts={config.experts.num_experts} are mlps, but "
            "model.mlp.dim=0; give one over 0."
        )
    if config.bias or config.execution.remat == "blockwise":
        raise UsageError(
            "experts have neither model.bias=true nor model.execution.remat=blockwise; "
            "take false, or remat=full."
        )


GPT2: dict[str, object] = {
    "vocab_size": 50257,
    "max_seq_len": 1024,
    "num_layers": 12,
    "embed_dim": 768,
    "attention.num_heads": 12,
    "mlp.dim": 3072,
    "mlp.activation": "gelu",
    "norm.kind": "layer",
    "positions": "learned",
    "bias": True,
    "embedding.tied": True,
    "dropout": 0.1,
}
LLAMA: dict[str, object] = {
    "vocab_size": 128256,
    "max_seq_len": 131072,
    "num_layers": 16,
    "embed_dim": 2048,
    "attention.num_heads": 32,
    "attention.num_kv_heads": 8,
    "mlp.dim": 8192,
    "rope.theta": 500000.0,
    "rope.factor": 32.0,
    "embedding.tied": True,
}


def gpt2(**changes: object) -> LMConfig:
    """Returns GPT-2 124M: LayerNorm, learned positions, GELU, biases, tied head.

    Args:
      **changes: Other values of fields, whole groups or, by their paths, parts of them:
        `gpt2(num_layers=2, **{"attention.num_heads": 4})`.
    """
    return _changed(GPT2, changes)


def llama(**changes: object) -> LMConfig:
    """Returns Llama 3.2 1B: RMSNorm, scaled RoPE, SwiGLU, grouped queries, tied.

    Args:
      **changes: Other values of fields, as of `gpt2`.
    """
    return _changed(LLAMA, changes)


def _changed(usual: dict[str, object], changes: dict[str, object]) -> LMConfig:
    changes = newer_fields(LMConfig, FLAT_NAMES, changes, level=4)
    # A group that is given whole has nothing of the usual one.
    kept = {path: value for path, value in usual.items() if path.partition(".")[0] not in changes}
    return make_nested(LMConfig, kept | changes)
