"""What a language model is: `LMConfig`, and GPT-2 and Llama as two presets of it."""

import dataclasses
from typing import Any, TypeVar

from jaxpar.fields import AtLeast, Between, Each, OneOf, Positive, check_fields, field
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

__all__ = ["LMConfig", "gpt2", "llama"]


T = TypeVar("T")

DTYPES = ("bfloat16", "float16", "float32", "float64")


def _execution(default: T, legal: Between | OneOf | None = None) -> T:
    """A field that says how to compute and not what: it is no part of a run's identity."""
    return field(default, legal, identity=False)


def _later(default: T, legal: Between | OneOf | Each | None) -> T:
    """A field that runs made before it was there lack: part of a run's identity where it is not the default."""
    return field(default, legal, identity="changed")


@dataclasses.dataclass(frozen=True)
class LMConfig:
    """A decoder-only transformer. Defaults are a small Llama over bytes.

    Attributes:
      vocab_size: V, symbols.
      max_seq_len: Longest T that learned positions cover; rope needs no such bound.
      num_layers: L, of blocks.
      embed_dim: D, width of the residual stream.
      num_heads: H, query heads.
      num_kv_heads: G, key and value heads: H for multi-head, 1 for multi-query, between for grouped-query
        attention; 0 means H.
      head_dim: K; 0 means D / H.
      mlp_dim: F; 0 for no mlp, and no norm before it: layers are x + mixer(norm(x)) alone, as Mamba-2's.
      mixer: What mixes the tokens of a block: "attention", a recurrent cell of `jaxpar.nn`, or another of
        `jaxpar.nn.mixers`, a row of `jaxpar.lm.mixers.MIXERS`.
      mixer_dim: Units of a recurrent layer; 0 means as many as make it as large as attention would be. The dense ones,
        aaren and those with a matrix state have them in `num_heads` heads.
      mixer_key_dim: K, rows of a head's matrix state; 0 leaves that to the mixer.
      mixer_groups: Of heads that share keys and queries, in mamba2.
      mixer_chunk: Tokens whose pairs a mixer with a matrix state multiplies, a power of two.
      mixer_window: Tokens that a mixer holds or takes at once: theta of lmu, W of block_recurrent, windowed and tcnca.
      mixer_states: What it keeps of what came before: d numbers a head of lmu, S states of block_recurrent.
      norm: "rms" or "layer".
      norm_eps: Added to the variance, in the layers' norms and in that within mamba2.
      positions: "rope", "learned" or "none"; mixers other than attention apply no rope, and retention one of its own.
      rope_theta: Base of the rotary wavelengths.
      rope_factor: Llama 3's scaling of long wavelengths; 1 switches it off (`jaxpar.nn.position.Rope`).
      rope_low_freq_factor: Wavelengths over `rope_original_len / this` are divided in full.
      rope_high_freq_factor: Wavelengths under `rope_original_len / this` are kept.
      rope_original_len: Context length before scaling, in tokens.
      activation: "swiglu" or "geglu" (gated), "gelu" (tanh form, GPT-2's) or "gelu_exact" (erf form).
      bias: Whether projections and LayerNorms have biases.
      tied: Whether the embedding is the output head too.
      dropout: Rate on embeddings, attention weights and the residual branches, while training.
      init_std: Standard deviation of weights at the start; of B branches, their last projections use it / sqrt(B).
      dtype: Of activations and of weights where they are multiplied. Master weights, norms, softmax and
        losses are float32 at least.
      remat: What the backward pass recomputes, from nothing to layers: "none", "dots", "names", "offload", "full",
        or "blockwise", which needs no memory [T, T] nor [T, F] either; see `jaxpar.nn.stack.Stack`.
      attention: "auto" takes cuDNN on GPU, splash on TPU, dense XLA elsewhere.
      context: What travels between devices that share a sequence, of
        `jaxpar.nn.attention.context.MOVES`; "auto" takes what loads a link least, and no gather.
      context_order: In which order they hold it: "contiguous", "zigzag" or "striped"; "auto" takes zigzag where it can.
      solver: How a recurrent mixer is solved, by a name of `jaxpar.nn.cells.solvers`; "auto" leaves it to the mixer.
      scan_layers: Whether layers run in one `lax.scan` (compiles once) or unrolled (no stacking copies: faster
        on GPU, slower to compile).
      low_logits: Whether the loss stores logits in `dtype` instead of float32: half the traffic, rounding of
        2^-9 a logit in bfloat16. Sums over them are float32 either way.
      loss_chunk: Tokens a device whose logits exist at the same time.
      residual: "standard", or "ladder", another model of the same parameters; see `jaxpar.nn.stack.Stack`.
      ladder_from: The first layer whose branches read so.
      z_loss: Weight of the mean square of the log normaliser in the loss; 0 for none.
      ranges: Whether training tells the largest magnitude of the residual stream, at one more read of it a layer.
      num_experts: E, mlps of width F each of which `jaxpar.nn.experts` sends a token to a few; 0 for one mlp for all.
      experts_per_token: k; by its score's share of their sum if over 1, else by its score.
      capacity: Choices that an expert takes of a row in training, as a multiple of T k / E; None for all.
      capacity_group: Consecutive tokens of a row in which that is counted, T of them; 0 for whole rows.
      router_scores: "softmax" or "sigmoid".
      balance_loss: Weight of the loss that evens the experts' loads.
      router_z_loss: Weight of the mean square of the router's log normaliser.
      router_bias: Weight of the gradient that corrects the choice by a bias of each expert, in place of a loss.
      transport: How tokens reach experts that devices share, of `jaxpar.nn.experts.sharded.TRANSPORTS`.
      expert_failures: Share of the experts that do not answer a row of the batch in training; others count for them.
      shared_experts: n, of which all tokens pass: one mlp of width n F, added to what the chosen experts make.
      qk_norm: Whether queries and keys of a head are normalised, by `norm`, before they are rotated.
      weights: "full", or "ternary": -1, 0 and 1 where layers multiply; with mixer=hgrn the MatMul-free language model.
      mixers: Names of `mixer` that layers have in turn, in place of one for all: layer l has number l mod their number.
        Recurrent ones are of `mixer_dim` units, or each as large as attention would be.
      windows: How many tokens attention sees, the token itself counted, of layers in turn; 0 for all before it, () for
        all in all layers. (1024,) is Mistral's kind, (4096, 0) Gemma 2's; layers may end within a turn.
      qkv_bias: Whether the products into queries, keys and values have biases, as Qwen 2's; bias gives them to all.
      score_cap: c, where an attention score s is c tanh(s / c); 0 for none.
      score_dim: Scores are q . k / sqrt(this); 0 means head_dim.
      logit_cap: c, where a logit z is c tanh(z / c); 0 for none.
      embed_scale: Whether embeddings are multiplied by sqrt(D).
      post_norms: Whether what a branch adds is normalised before it is added.
      norm_plus_one: Whether a norm's scale is 1 + w of its parameter w.
      rope_theta_local: Base of the rotary wavelengths of layers with a window, which are not scaled; 0 means those of
        the others.
      rope_scaling: What rope_factor does: "llama3", or "linear": all wavelengths are divided.
      rope_share: Of a head's numbers that are rotated.
      balance_layers: "summed" adds up the balance losses of layers, each 1 at even loads.
        "concatenated" is one loss over the tokens of all layers, k at even loads: transformers'.
    """

    vocab_size: int = field(256, AtLeast(1))
    max_seq_len: int = field(1024, AtLeast(1))
    num_layers: int = field(4, AtLeast(1))
    embed_dim: int = field(128, AtLeast(1))
    num_heads: int = field(4, AtLeast(1))
    num_kv_heads: int = field(0, AtLeast(0))
    head_dim: int = field(0, AtLeast(0))
    mlp_dim: int = field(384, AtLeast(0))
    mixer: str = _later("attention", OneOf(tuple(MIXERS)))
    mixer_dim: int = _later(0, AtLeast(0))
    mixer_key_dim: int = _later(0, AtLeast(0))
    mixer_groups: int = _later(1, AtLeast(1))
    mixer_chunk: int = _execution(64, AtLeast(1))
    mixer_window: int = _later(128, AtLeast(1))
    mixer_states: int = _later(32, AtLeast(1))
    norm: str = field("rms", OneOf(("rms", "layer")))
    norm_eps: float = field(1e-5, Positive())
    positions: str = field("rope", OneOf(("rope", "learned", "none")))
    rope_theta: float = field(10000.0, Positive())
    rope_factor: float = field(1.0, AtLeast(1))
    rope_low_freq_factor: float = field(1.0, Positive())
    rope_high_freq_factor: float = field(4.0, Positive())
    rope_original_len: int = field(8192, AtLeast(1))
    activation: str = field("swiglu", OneOf(ACTIVATIONS))
    bias: bool = False
    tied: bool = False
    dropout: float = field(0.0, Between(0, 1, "[)"))
    init_std: float = field(0.02, Positive())
    dtype: str = field("bfloat16", OneOf(DTYPES))
    low_logits: bool = False
    remat: str = _execution("none", OneOf(REMATS))
    attention: str = _execution("auto", OneOf(ATTENTION_IMPLS))
    context: str = _execution("auto", OneOf(CONTEXT_MOVES))
    context_order: str = _execution("auto", OneOf(CONTEXT_ORDERS))
    solver: str = _execution("auto", OneOf(METHODS))
    scan_layers: bool = _execution(True)
    loss_chunk: int = _execution(8192, AtLeast(1))
    residual: str = _later("standard", OneOf(RESIDUALS))
    ladder_from: int = _later(0, AtLeast(0))
    z_loss: float = _later(0.0, AtLeast(0))
    ranges: bool = _execution(False)
    num_experts: int = _later(0, AtLeast(0))
    experts_per_token: int = _later(2, AtLeast(1))
    capacity: float | None = _later(None, Positive())
    capacity_group: int = _later(0, AtLeast(0))
    router_scores: str = _later("softmax", OneOf(SCORES))
    balance_loss: float = _later(0.01, AtLeast(0))
    router_z_loss: float = _later(0.0, AtLeast(0))
    router_bias: float = _later(0.0, AtLeast(0))
    transport: str = _execution("auto", OneOf(TRANSPORTS))
    expert_failures: float = _later(0.0, Between(0, 1))
    shared_experts: int = _later(0, AtLeast(0))
    qk_norm: bool = _later(False, None)
    weights: str = _later("full", OneOf(WEIGHTS))
    mixers: tuple[str, ...] = _later((), Each(OneOf(tuple(MIXERS))))
    windows: tuple[int, ...] = _later((), Each(AtLeast(0)))
    qkv_bias: bool = _later(False, None)
    score_cap: float = _later(0.0, AtLeast(0))
    score_dim: float = _later(0.0, AtLeast(0))
    logit_cap: float = _later(0.0, AtLeast(0))
    embed_scale: bool = _later(False, None)
    post_norms: bool = _later(False, None)
    norm_plus_one: bool = _later(False, None)
    rope_theta_local: float = _later(0.0, AtLeast(0))
    rope_scaling: str = _later("llama3", OneOf(ROPE_SCALINGS))
    rope_share: float = _later(1.0, Between(0, 1, "(]"))
    balance_layers: str = _later("summed", OneOf(BALANCE_LAYERS))

    def __post_init__(self):
        """Fills derived sizes and refuses what no model can be."""
        check_fields(self, "model.")
        blends = self.rope_factor != 1 and self.rope_scaling == "llama3"
        if blends and not self.rope_low_freq_factor < self.rope_high_freq_factor:
            raise UsageError(
                f"model.rope_high_freq_factor={self.rope_high_freq_factor} must be over "
                f"model.rope_low_freq_factor={self.rope_low_freq_factor}."
            )
        if not self.num_kv_heads:
            object.__setattr__(self, "num_kv_heads", self.num_heads)
        if self.num_heads % self.num_kv_heads:
            legal = [g for g in range(1, self.num_heads + 1) if self.num_heads % g == 0]
            raise UsageError(
                f"model.num_heads={self.num_heads} is not a multiple of model.num_kv_heads={self.num_kv_heads}; "
                f"legal are {', '.join(map(str, legal))}."
            )
        if not self.head_dim:
            if self.embed_dim % self.num_heads:
                raise UsageError(
                    f"model.embed_dim={self.embed_dim} is not a multiple of model.num_heads={self.num_heads}; "
                    f"nearest is {self.embed_dim // self.num_heads * self.num_heads or self.num_heads}, or give "
                    "model.head_dim."
                )
            object.__setattr__(self, "head_dim", self.embed_dim // self.num_heads)
        if self.positions == "rope" and self.head_dim % 2:
            raise UsageError(f"model.head_dim={self.head_dim} must be even for rope.")
        windows = tuple(self.windows)
        turn = (
            tuple(windows[layer % len(windows)] for layer in range(self.num_layers))
            if windows
            else ()
        )
        object.__setattr__(self, "windows", shortest_turn(turn) if any(turn) else ())
        if self.score_dim == self.head_dim:
            object.__setattr__(self, "score_dim", 0.0)
        if self.rope_theta_local and not self.windows:
            raise UsageError(
                f"model.rope_theta_local={self.rope_theta_local:g} is of layers with model.windows; take 0."
            )
        check_mixers(self)
        _check_experts(self)
        self.stack()

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
            norm=Norm(self.norm, self.norm_eps, self.bias, self.norm_plus_one),
            dropout=self.dropout,
            init_std=self.init_std,
            dtype=self.dtype,
            remat=self.remat,
            scan_layers=self.scan_layers,
            ranges=self.ranges,
            residual=self.residual,
            ladder_from=self.ladder_from,
            weights=self.weights,
            post_norms=self.post_norms,
        )


def shortest_turn(items: tuple) -> tuple:
    """Returns the shortest tuple that, repeated and cut off, is `items`."""
    return next(
        items[:n]
        for n in range(1, len(items) + 1)
        if all(x == items[i % n] for i, x in enumerate(items))
    )


def _mlp(config: LMConfig) -> Mlp | Experts | None:
    if config.num_experts:
        return _experts(config)
    return Mlp(config.mlp_dim, config.activation, config.bias) if config.mlp_dim else None


def _experts(config: LMConfig) -> Experts:
    k, losses = config.experts_per_token, (config.balance_loss, config.router_z_loss)
    sizes = (
        config.mlp_dim,
        config.num_experts,
        k,
        config.activation,
        config.capacity,
        config.router_scores,
    )
    bias, shared, transport = (
        config.router_bias,
        config.shared_experts,
        transport_for(config.transport),
    )
    group, fail = config.capacity_group, config.expert_failures
    more = (0.0, bias, 0.0, fail, transport, shared, group)  # without information gain and noise
    return Experts(*sizes, k > 1, *losses, *more, balance_layers=config.balance_layers)


def _check_experts(config: LMConfig) -> None:
    fields = "experts_per_token capacity capacity_group router_scores balance_loss router_z_loss router_bias"
    names = (*fields.split(), "transport", "shared_experts", "expert_failures", "balance_layers")
    changed = [name for name in names if getattr(config, name) != getattr(LMConfig, name)]
    if changed and not config.num_experts:
        raise UsageError(
            f"model.{changed[0]}={getattr(config, changed[0])} is of experts; give model.num_experts too."
        )
    if config.num_experts and not config.mlp_dim:
        raise UsageError(
            f"model.num_experts={config.num_experts} are mlps, but model.mlp_dim=0; give one over 0."
        )
    if config.num_experts and (config.bias or config.remat == "blockwise"):
        raise UsageError(
            "experts have neither model.bias=true nor model.remat=blockwise; take false, or remat=full."
        )


def gpt2(**changes) -> LMConfig:
    """Returns GPT-2 124M: LayerNorm, learned positions, GELU, biases, tied head; `changes` override."""
    base: dict[str, Any] = dict(
        vocab_size=50257, max_seq_len=1024, num_layers=12, embed_dim=768, num_heads=12, mlp_dim=3072,
        norm="layer", positions="learned", activation="gelu", bias=True, tied=True, dropout=0.1,
    )  # fmt: skip
    return LMConfig(**(base | changes))


def llama(**changes) -> LMConfig:
    """Returns Llama 3.2 1B: RMSNorm, scaled RoPE, SwiGLU, grouped queries, tied; `changes` override."""
    base: dict[str, Any] = dict(
        vocab_size=128256, max_seq_len=131072, num_layers=16, embed_dim=2048, num_heads=32, num_kv_heads=8,
        mlp_dim=8192, rope_theta=500000.0, rope_factor=32.0, tied=True,
    )  # fmt: skip
    return LMConfig(**(base | changes))
