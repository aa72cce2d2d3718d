"""Legal numbers of each configuration of library, environments and experiments, and an instance."""

import numpy as np
import optax
from lm_configs import lm_config
from ranges_of_fields import (
    AXIS,
    COUNT,
    FACTOR,
    FRACTION_FROM_0,
    LEAST_0,
    LEAST_MINUS_1,
    OVER_0,
    PAIR,
    POSITIVE,
    SHARE,
    SIGNED,
    UNBOUNDED,
    UNDER_1,
)
from table_of_environment_fields import ENVIRONMENTS
from table_of_experiment_fields import EXPERIMENTS

import envs
from envs.puzzles import bin_pack
from jaxpar.aot.placement import Split
from jaxpar.decode import (
    Beams,
    BlockTopK,
    CopyDraft,
    Decoding,
    HeavyHitters,
    JacobiDraft,
    LookaheadDraft,
    ModelDraft,
    ModelSizes,
    Sampling,
    SinksAndWindow,
)
from jaxpar.env.picture import Animation
from jaxpar.experimental.attention_experts import AttentionExperts
from jaxpar.experimental.autoregressive import Made, PixelCnn
from jaxpar.experimental.dense_depth import DenseDepth
from jaxpar.experimental.pseudo_tokens import Heads, HiddenTransfer, PromptTokens
from jaxpar.experimental.trained_drafts import DraftTrainer
from jaxpar.io import ProgressLabels
from jaxpar.life import Jitter, Laws, Lstm, Reflex, World
from jaxpar.lm import (
    AdapterConfig,
    AttentionConfig,
    EmbeddingConfig,
    ExecutionConfig,
    ExpertsConfig,
    LMConfig,
    LossesConfig,
    MixerConfig,
    MlpConfig,
    NormConfig,
    ObjectiveConfig,
    ResidualConfig,
    RopeConfig,
    Trainer,
    TuningConfig,
)
from jaxpar.lm.text.corpus import DataConfig, Tokens
from jaxpar.lm.text.data import Windows
from jaxpar.lm.text.row_layouts import DocumentRows, Stream
from jaxpar.loop import Fit
from jaxpar.mesh import MeshSpec
from jaxpar.neat import NeatConfig
from jaxpar.neat.config import Rates
from jaxpar.neat.episodes import Episodes, GeneralizationTest, PlayOptions
from jaxpar.neat.hyper import Substrate
from jaxpar.neat.problems import SubstrateTable, Table
from jaxpar.neat.quadtree import Quadtree
from jaxpar.nn.attention import Attention, Dropout, Visibility, Visible
from jaxpar.nn.cells.aaren import Aaren
from jaxpar.nn.cells.cell import Cell
from jaxpar.nn.cells.conv_embedding import ConvEmbedding
from jaxpar.nn.cells.network import SequenceNetwork, SequenceTrainer
from jaxpar.nn.cells.s5 import S5
from jaxpar.nn.cells.stack_network import StackNetwork
from jaxpar.nn.experts import Experts
from jaxpar.nn.experts.sharded import AllToAll, Spill
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
    RecurrenceExecution,
    Rwkv6,
    SpikingMlp,
    Tcnca,
)
from jaxpar.nn.mlp import Mlp
from jaxpar.nn.norm import Norm
from jaxpar.nn.position import Rope
from jaxpar.nn.stack import Stack
from jaxpar.optim import Optimizer, OptimizerConfig
from jaxpar.pipeline import Pipelined, TaskCosts, gpipe
from jaxpar.pomdp import Despot, ParticleBelief, Pft, Pomcp, RootParallel, Trials, Vopp
from jaxpar.pomdp.planners import tree
from jaxpar.pomdp.planners.leaves import RolloutValues
from jaxpar.rl import (
    A2c,
    Against,
    AlphaZero,
    AlphaZeroRates,
    Dqn,
    GuidedSearch,
    Items,
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
from jaxpar.rl.sac import SacRates
from jaxpar.rl.td3 import Td3Rates
from jaxpar.rollout import Chunked, Pool, RolloutOptions
from jaxpar.solve import (
    Elk,
    GaussSeidel,
    Jacobi,
    Newton,
    ParallelBackward,
    Quasi,
    Sequential,
    structure,
)
from jaxpar.solve.fixed_point import Picard
from jaxpar.solve.fused import Fused
from jaxpar.verify import VerifyOptions

TABLE = {
    **ENVIRONMENTS,
    **EXPERIMENTS,
    Attention: {
        "num_heads num_kv_heads head_dim": COUNT,
        "dropout": UNDER_1,
        "score_cap score_dim": FRACTION_FROM_0,
    },
    ConvEmbedding: {"size num_convs": COUNT, "taps": PAIR, "beta": SHARE},
    SpikingMlp: {"size": COUNT, "beta": SHARE},
    Lmu: {"units channels memory": COUNT, "theta": POSITIVE, "beta": SHARE},
    BlockRecurrent: {"num_heads head_dim window": COUNT, "num_states": LEAST_0},
    Tcnca: {"num_heads head_dim chunk dilations": COUNT, "taps": PAIR},
    StackNetwork: {"inputs outputs": COUNT},
    Visible: {"window": LEAST_0},
    Visibility: {"cap": FRACTION_FROM_0},
    Dropout: {"rate": UNDER_1},
    Mlp: {"size": COUNT},
    Experts: {
        "size num_experts experts_per_token": COUNT,
        "capacity": POSITIVE,
        "shared capacity_group": LEAST_0,
        "balance_loss z_loss information_gain bias noise": FRACTION_FROM_0,
        "failures": SHARE,
    },
    AttentionExperts: {"num_experts experts_per_token": COUNT, "balance_loss": FRACTION_FROM_0},
    AllToAll: {"room": POSITIVE},
    MatrixState: {"chunk": COUNT},
    GatedLinear: {"num_heads key_dim value_dim rank": COUNT, "temperature": POSITIVE},
    MLstm: {"num_heads key_dim value_dim": COUNT},
    Mamba2: {"num_heads key_dim value_dim num_groups": COUNT, "taps": PAIR, "eps": POSITIVE},
    GatedDelta: {"num_heads key_dim value_dim": COUNT, "taps": PAIR},
    Rwkv6: {"num_heads key_dim value_dim rank": COUNT},
    Spill: {"slots min_chunk": COUNT, "alpha tolerated": ((0.999,), (1.0,)), "room": POSITIVE},
    TaskCosts: {"F B W S T offload fetch gather reduce scale": FRACTION_FROM_0},
    Norm: {"eps": POSITIVE},
    Hgrn: {"size": COUNT, "eps": LEAST_0},
    Rope: {
        "theta low_freq_factor high_freq_factor": POSITIVE,
        "score_scale": FRACTION_FROM_0,
        "factor": FACTOR,
        "original_len": COUNT,
        "share": OVER_0,
    },
    Stack: {
        "num_layers embed_dim": COUNT,
        "dropout": UNDER_1,
        "init_std": POSITIVE,
        "ladder_from": LEAST_0,
    },
    LMConfig: {
        "vocab_size max_seq_len num_layers embed_dim": COUNT,
        "init_std": POSITIVE,
        "dropout": UNDER_1,
    },
    EmbeddingConfig: {"logit_cap": FRACTION_FROM_0},
    AttentionConfig: {
        "num_heads": COUNT,
        "num_kv_heads head_dim windows": LEAST_0,
        "score_cap score_dim": FRACTION_FROM_0,
    },
    MixerConfig: {"dim key_dim": LEAST_0, "groups window states": COUNT},
    MlpConfig: {"dim": LEAST_0},
    ExpertsConfig: {
        "num_experts shared capacity_group": LEAST_0,
        "experts_per_token": COUNT,
        "capacity": POSITIVE,
        "failures": SHARE,
    },
    NormConfig: {"eps": POSITIVE},
    RopeConfig: {
        "theta low_freq_factor high_freq_factor": POSITIVE,
        "theta_local score_scale": FRACTION_FROM_0,
        "factor": FACTOR,
        "original_len": COUNT,
        "share": OVER_0,
    },
    ResidualConfig: {"ladder_from": LEAST_0},
    LossesConfig: {"z_loss balance_loss router_z_loss router_bias": FRACTION_FROM_0},
    ExecutionConfig: {"loss_chunk mixer_chunk": COUNT},
    ObjectiveConfig: {"label_smoothing": UNDER_1, "distil": OVER_0, "temperature beta": POSITIVE},
    TuningConfig: {"layer_decay": OVER_0, "ema": UNDER_1},
    AdapterConfig: {"rank": LEAST_0, "alpha": POSITIVE, "dropout": UNDER_1},
    OptimizerConfig: {
        "learning_rate eps": POSITIVE,
        "final_ratio": SHARE,
        "warmup_steps decay_steps": LEAST_0,
        "weight_decay clip_norm": FRACTION_FROM_0,
        "b1 b2": UNDER_1,
        "warmup_start": SHARE,
    },
    Optimizer: {"clip_norm weight_decay": FRACTION_FROM_0},
    Trainer: {"num_steps accumulate max_skipped": COUNT},
    Sampling: {
        "max_new_tokens": COUNT,
        "temperature": ((-1e-9, 1e-31), (0.0, 1e-30)),
        "top_k": LEAST_0,
        "top_p": OVER_0,
        "min_p": SHARE,
        "repetition_penalty": POSITIVE,
        "presence_penalty frequency_penalty": SIGNED,
        "stop_token": LEAST_MINUS_1,
    },
    Decoding: {"num_samples block chunk": COUNT},
    ProgressLabels: {"tokens_per_step": COUNT},
    RolloutOptions: {"unroll": COUNT},
    VerifyOptions: {"steps": COUNT},
    ModelSizes: {"num_params num_layers num_heads num_kv_heads head_dim itemsize": COUNT},
    Beams: {"width max_new_tokens": COUNT, "length_penalty": SIGNED},
    BlockTopK: {"blocks": ((1,), (2,))},
    HeavyHitters: {
        "heavy window observe horizon": COUNT,
        "tau last_tau": POSITIVE,
        "seed": SIGNED,
    },
    SinksAndWindow: {"sinks": LEAST_0, "window": COUNT},
    DraftTrainer: {"num_steps num_anchors max_skipped": COUNT, "decay": OVER_0},
    Heads: {"length": COUNT},
    HiddenTransfer: {"layer": LEAST_0, "length": COUNT},
    PromptTokens: {"length": COUNT},
    CopyDraft: {"length match": COUNT, "gaps": LEAST_0},
    JacobiDraft: {"length": COUNT},
    LookaheadDraft: {"width guesses pool": COUNT, "ngram": ((1,), (2,))},
    ModelDraft: {"length block": COUNT},
    DataConfig: {"seq_len batch_size workers": COUNT},
    Windows: {"seq_len batch_size": COUNT, "seed": SIGNED},
    Stream: {"seq_len batch_size": COUNT, "seed": SIGNED},
    DocumentRows: {"seq_len batch_size": COUNT, "seed": SIGNED},
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
    Episodes: {
        "goal": UNBOUNDED,
        "episodes max_steps": COUNT,
        "num_envs": LEAST_0,
        "output_range": SIGNED,
    },
    GeneralizationTest: {"long_steps short_steps": COUNT, "needed": LEAST_0},
    PlayOptions: {"output_range": SIGNED},
    Substrate: {"threshold": FRACTION_FROM_0, "largest": POSITIVE},
    SubstrateTable: {"tolerance": FRACTION_FROM_0},
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
    FramePredictor: {"patch": COUNT},
    ImageClassifier: {"patch": COUNT, "classes": PAIR},
    SequenceNetwork: {"inputs outputs size layers heads": COUNT},
    SequenceTrainer: {"num_steps": COUNT},
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
    RolloutValues: {"length": COUNT},
    RootParallel: {"trees": COUNT},
    Trials: {"num_paths depth": COUNT},
    tree.DenseChildren: {"num_observations": COUNT},
    tree.HashedChildren: {"probes": COUNT},
    Vopp: {
        "num_simulations iterations max_depth rollout_depth expand_after max_nodes max_edges": COUNT,
        "eta depth_scale widen": POSITIVE,
        "depth_power": FRACTION_FROM_0,
        "widen_power": SHARE,
        "discount": OVER_0,
    },
    A2cRates: {
        "learning_rate": POSITIVE,
        "anneal value_coef max_grad_norm": FRACTION_FROM_0,
        "discount gae_lambda": SHARE,
        "entropy_coef reward_scale": SIGNED,
    },
    PpoRates: {
        "learning_rate": POSITIVE,
        "anneal clip value_coef max_grad_norm": FRACTION_FROM_0,
        "discount gae_lambda": SHARE,
        "entropy_coef reward_scale": SIGNED,
    },
    PqnRates: {
        "learning_rate": POSITIVE,
        "anneal epsilon_anneal max_grad_norm": FRACTION_FROM_0,
        "discount q_lambda epsilon_start epsilon_end": SHARE,
        "reward_scale": SIGNED,
    },
    DqnRates: {
        "learning_rate": POSITIVE,
        "anneal epsilon_anneal max_grad_norm": FRACTION_FROM_0,
        "discount epsilon_start epsilon_end tau": SHARE,
        "reward_scale": SIGNED,
    },
    Td3Rates: {
        "learning_rate": POSITIVE,
        "anneal noise target_noise noise_clip": FRACTION_FROM_0,
        "discount tau": SHARE,
        "reward_scale": SIGNED,
    },
    SacRates: {
        "learning_rate temperature": POSITIVE,
        "anneal": FRACTION_FROM_0,
        "discount tau": SHARE,
        "target_entropy reward_scale": SIGNED,
    },
    A2c: {"num_envs num_steps": COUNT, "lag": LEAST_0},
    Ppo: {
        "num_envs num_steps epochs minibatches": COUNT,
        "lag": LEAST_0,
        "target_kl": FRACTION_FROM_0,
    },
    Against: {"seat": ((-1,), (0, 1))},
    SelfPlay: {"pool period": COUNT, "newest": SHARE},
    AlphaZeroRates: {
        "learning_rate": POSITIVE,
        "anneal value_coef max_grad_norm": FRACTION_FROM_0,
        "discount td_lambda": SHARE,
    },
    AlphaZero: {"num_envs num_steps epochs minibatches": COUNT},
    GuidedSearch: {
        "simulations": COUNT,
        "exploration": FRACTION_FROM_0,
        "noise": SHARE,
        "concentration": POSITIVE,
    },
    Pqn: {"num_envs num_steps epochs minibatches decomposition_size": COUNT},
    Dqn: {
        "num_envs num_steps gradient_steps batch_size capacity n_step target_period decomposition_size": COUNT,
        "warmup": LEAST_0,
    },
    Td3: {
        "num_envs num_steps gradient_steps batch_size capacity n_step policy_period": COUNT,
        "warmup": LEAST_0,
    },
    Sac: {"num_envs num_steps gradient_steps batch_size capacity n_step": COUNT, "warmup": LEAST_0},
    ActionValues: {"decomposition_size": COUNT},
    Network: {"encoder hidden conv memory_size": COUNT},
    Items: {"width heads layers": COUNT, "waves": LEAST_0},
    Seeds: {"num_seeds": COUNT},
    Pbt: {
        "period": COUNT,
        "share": ((0.0, 0.6), (0.1, 0.5)),
        "factor spread": ((0.9,), (1.0, 2.0)),
    },
    Chunked: {"size": COUNT},
    Pool: {"size": COUNT},
    Animation: {"fps": POSITIVE},
    RecurrenceExecution: {"chunk": COUNT},
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
    Pipelined: {"latency": COUNT},
    Laws: {
        "start": ((-1, 1025), (0, 1024)),
        "child": ((0, 1025), (0.01, 1024)),
        "fee": ((-1, 33), (0, 32)),
        "upkeep move push hit speak shape evaporation": ((-1, 9), (0, 8)),
        "aging bite speed shaping": SHARE,
        "stomach": ((0, 2**19), (1024, 2**18)),
        "relax": ((-1, 0.02), (0, 0.01)),
        "drift": ((-1, 0.2), (0, 0.1)),
    },
    World: {
        "num_agents": ((0, 8193), (1, 8192)),
        "num_robots": ((1, 8193), (2, 8192)),
        "size": ((0, 1025), (1, 1024)),
        "sight": ((0, 17), (1, 16)),
        "lattice window seen_agents seen_robots max_births ticks": COUNT,
        "num_start newcomers": LEAST_0,
    },
    Lstm: {"hidden width heads": COUNT},
    Jitter: {"std": LEAST_0},
    Reflex: {"std": LEAST_0},
}
"""Each configuration with numbers in it: its fields, values outside of their range, and values at its ends."""

RESULTS = {
    "lm.train.AdaptedState", "nn.linear.InBlocks", "nn.linear.Lora",
    "aot.job.Job", "aot.estimate.Estimate", "aot.roofline.Roofline", "aot.candidates.Finding", "aot.topology.Chip",
    "decode.trees.Tree",
    "env.capabilities.Capabilities", "env.check.Report", "env.spaces.Box", "env.spaces.Discrete",
    "env.spaces.MultiDiscrete", "fields.Between",
    "io.layers.LeafSource", "lower.lookback.KernelSource", "lower.lookback.Tile",
    "pipeline.ops.Schedule", "pipeline.pack.TickTable", "pipeline.timing.Timing",
    "experimental.product_chain.ChainPlacement", "aot.placement.ConversionStep",
    "pomdp.exact.solver.Exact", "pomdp.model.Model", "pomdp.planners.outline.Branch",
    "pomdp.planners.particle_search.ParticleTreeSearch", "pomdp.planners.tree_search.TreeSearch",
    "solve.carries.Division",
    "solve.blindness.Entry", "solve.carries.Loop", "solve.default.CostModel",
    "solve.problem.Problem", "solve.program.Recurrence", "solve.structure.Structure",
    "solve.solution.Solve", "aot.verify.judge.Limits", "estimate.Candidate", "pomdp.Results",
    "app.env.world_film.Frames",
    "app.env.rock_beliefs.Flips", "app.env.policies.PolicyRun", "app.lm.judged_trainings.Training",
}  # fmt: skip
"""Frozen dataclasses with numbers that the library makes, or an environment says, and that no user configures."""
BY_HAND = {
    (bin_pack.Split, "container"),
    (Despot, "default"),
    (ImageClassifier, "shape"),
    (FramePredictor, "shape"),
    (Decoding, "stop_tokens"),
}
"""Numbers whose range something else gives: an action, sizes that a patch divides, sides, tokens of a model."""

CART = envs.make("CartPole-v1")[0]
FORAGING = envs.make("Foraging-8x8-2p-2f")[0]
PENDULUM = envs.make("Pendulum-v1")[0]
TOKENS = Tokens(np.zeros(40, np.uint8), np.zeros(1, np.int64), np.full(1, 40))
BOTH_WAYS = Attention(1, 1, 4, visible=Visible(causal=False))
PLANE = ((0.0, 0.0),)
BASIS = {
    Windows: (TOKENS, 8, 2, 0),
    Stream: (TOKENS, 8, 2, 0),
    DocumentRows: (TOKENS, 8, 2, 0, True),
    ModelDraft: (None,),
    ModelSizes: (9, 1, 1, 1, 1),
    HiddenTransfer: (0,),
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
