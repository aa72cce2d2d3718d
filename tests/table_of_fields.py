"""What is legal of each number of each configuration: of library, environments and experiments."""

import math

from envs.arcade.mine_sweeper import MineSweeper
from envs.arcade.tetris import Tetris
from envs.grid import rooms
from envs.grid.rulesets import Tree
from envs.grid.survival import Survival
from envs.grid.xland import XLand
from envs.memory import card_games
from envs.multi import particles
from envs.multi.combat import Combat
from envs.multi.foraging import Foraging
from envs.pomdp.crowd import Crowd
from envs.pomdp.laser_tag import LaserTag
from envs.pomdp.light_dark import LightDark
from envs.pomdp.mars import Mars
from envs.pomdp.navigation import Navigation
from envs.pomdp.rocksample import RockSample
from envs.pomdp.sub_hunt import SubHunt
from envs.puzzles import (
    bin_pack,
    connector_boards,
    countdown,
    job_shop,
    knapsack,
    rubiks_cube,
    sliding_tile,
    sokoban_levels,
    tiles2048,
    tour_levels,
)
from experiments import (
    _evaluate,
    _life_neat,
    compare,
    digits,
    env,
    generate,
    life,
    lm,
    moving_digits,
    neat,
    own,
    pipeline,
    pipelined_speculation,
    pomdp,
    rl,
    rnn,
    step_speculation,
    trading,
    verify,
)
from experiments._pipeline import PipelineConfig
from experiments._run import Processes, RunConfig
from experiments._series import SeriesConfig
from experiments._train import TrainConfig
from jaxpar.decode import (
    Beams,
    BlockTopK,
    CopyDraft,
    Heads,
    HeavyHitters,
    HiddenTransfer,
    JacobiDraft,
    LookaheadDraft,
    ModelDraft,
    PromptTokens,
    Sampling,
    SinksAndWindow,
)
from jaxpar.env.picture import Animation
from jaxpar.life import Jitter, Laws, Lstm, Reflex, World
from jaxpar.lm import AdapterConfig, AdapterTrainer, DraftTrainer, LMConfig, ObjectiveConfig, Trainer, TuningConfig
from jaxpar.lm.corpus import DataConfig
from jaxpar.lm.data import Windows
from jaxpar.loop import Fit
from jaxpar.mesh import MeshSpec
from jaxpar.neat import NeatConfig
from jaxpar.neat.config import Rates
from jaxpar.neat.episodes import Episodes, GeneralizationTest
from jaxpar.neat.hyper import Substrate, SubstrateTable
from jaxpar.neat.problems import Table
from jaxpar.neat.quadtree import Quadtree
from jaxpar.nn.aaren import Aaren
from jaxpar.nn.attention import Attention, Visible
from jaxpar.nn.autoregressive import Made, PixelCnn
from jaxpar.nn.cells import Cell
from jaxpar.nn.conv_embedding import ConvEmbedding
from jaxpar.nn.dense_depth import DenseDepth
from jaxpar.nn.experts import AttentionExperts, Experts
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
from jaxpar.nn.network import SequenceNetwork, SequenceTrainer
from jaxpar.nn.norm import Norm
from jaxpar.nn.position import Rope
from jaxpar.nn.s5 import S5
from jaxpar.nn.stack import Stack
from jaxpar.nn.stack_network import StackNetwork
from jaxpar.nn.vision import FramePredictor, ImageClassifier
from jaxpar.optim import Optimizer, OptimizerConfig
from jaxpar.parallel.experts import AllToAll, Spill
from jaxpar.parallel.pipeline import Pipelined, TaskCosts
from jaxpar.parallel.placement import Split
from jaxpar.pomdp import Despot, ParticleBelief, Pft, Pomcp, RootParallel, Vopp, tree
from jaxpar.pomdp.leaves import RolloutValues
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
from jaxpar.rollout import Chunked, Pool
from jaxpar.solve import Elk, GaussSeidel, Jacobi, Newton, ParallelBackward, Quasi, Sequential, structure
from jaxpar.solve.fixed_point import Picard
from jaxpar.solve.fused import Fused

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
    Attention: {"num_heads num_kv_heads head_dim": COUNT, "dropout": UNDER_1, "score_cap score_dim": FRACTION_FROM_0},
    ConvEmbedding: {"size num_convs": COUNT, "taps": PAIR, "beta": SHARE},
    SpikingMlp: {"size": COUNT, "beta": SHARE},
    Lmu: {"units channels memory": COUNT, "theta": POSITIVE, "beta": SHARE},
    BlockRecurrent: {"num_heads head_dim window": COUNT, "num_states": LEAST_0},
    Tcnca: {"num_heads head_dim chunk dilations": COUNT, "taps": PAIR},
    StackNetwork: {"inputs outputs": COUNT},
    Visible: {"window": LEAST_0},
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
        "factor": FACTOR,
        "original_len": COUNT,
        "share": OVER_0,
    },
    Stack: {"num_layers embed_dim": COUNT, "dropout": UNDER_1, "init_std": POSITIVE, "ladder_from": LEAST_0},
    LMConfig: {
        "vocab_size max_seq_len num_layers embed_dim num_heads rope_original_len loss_chunk": COUNT,
        "num_kv_heads head_dim mlp_dim mixer_dim mixer_key_dim ladder_from": LEAST_0,
        "num_experts shared_experts capacity_group windows": LEAST_0,
        "norm_eps rope_theta init_std rope_low_freq_factor rope_high_freq_factor": POSITIVE,
        "rope_factor": FACTOR,
        "dropout": UNDER_1,
        "expert_failures": SHARE,
        "experts_per_token mixer_chunk mixer_groups mixer_window mixer_states": COUNT,
        "capacity": POSITIVE,
        "z_loss balance_loss router_z_loss router_bias": FRACTION_FROM_0,
        "score_cap score_dim logit_cap rope_theta_local": FRACTION_FROM_0,
        "rope_share": OVER_0,
    },
    ObjectiveConfig: {"label_smoothing": UNDER_1, "distil": OVER_0, "temperature beta": POSITIVE},
    TuningConfig: {"layer_decay": OVER_0, "ema": UNDER_1},
    AdapterConfig: {"rank": LEAST_0, "alpha": POSITIVE, "dropout": UNDER_1},
    AdapterTrainer: {"num_steps accumulate max_skipped": COUNT},
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
    Episodes: {"goal": UNBOUNDED, "episodes max_steps": COUNT, "num_envs": LEAST_0, "output_range": SIGNED},
    GeneralizationTest: {"long_steps short_steps": COUNT, "needed": LEAST_0},
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
    Ppo: {"num_envs num_steps epochs minibatches": COUNT, "lag": LEAST_0, "target_kl": FRACTION_FROM_0},
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
    Pbt: {"period": COUNT, "share": ((0.0, 0.6), (0.1, 0.5)), "factor spread": ((0.9,), (1.0, 2.0))},
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
    PipelineConfig: {"microbatches": LEAST_0, "chunks": COUNT},
    verify.Config: {"microbatches chunks": COUNT},
    Pipelined: {"latency": COUNT},
    TrainConfig: {"steps chunk": COUNT, "save_every": LEAST_0},
    lm.TrainConfig: {
        "steps accumulate keep max_skipped": COUNT,
        "eval_every eval_batches save_every": LEAST_0,
        "keep_every_s": FRACTION_FROM_0,
    },
    _evaluate.EvalConfig: {"batch_size": COUNT, "length": LEAST_0},
    rnn.ModelConfig: {"size layers heads width mlp memory": COUNT, "window": LEAST_0, "theta": POSITIVE},
    rnn.OptimizerConfig: {
        "learning_rate clip_norm": POSITIVE,
        "warmup_steps": LEAST_0,
        "weight_decay": FRACTION_FROM_0,
    },
    rnn.TrainConfig: {"steps keep": COUNT, "eval_every save_every": LEAST_0},
    digits.ModelConfig: {"patch layers width heads mlp": COUNT, "dropout": UNDER_1},
    digits.DataConfig: {"batch_size": COUNT, "held_out": OPEN, "shift": ((-1, 8), (0, 7))},
    compare.Config: {
        "seconds timed_s": POSITIVE,
        "num_seeds": ((0, 1001), (1, 1000)),
        "evaluations": PAIR,
        "eval_batches": COUNT,
    },
    moving_digits.ModelConfig: {"patch pairs width heads mlp": COUNT},
    moving_digits.DataConfig: {"batch_size frames digits": COUNT, "size": ((5,), (6,))},
    SeriesConfig: {"length symbols batch_size": COUNT, "validation": OPEN},
    rl.Config: {
        "num_seeds eval_episodes eval_steps frames memory_size encoder hidden conv": COUNT,
        "num_envs num_steps epochs minibatches exploit_every eval_every": LEAST_0,
    },
    neat.Config: {
        "max_nodes max_conns max_species episodes num_seeds": COUNT,
        "population": PAIR,
        "max_steps together": LEAST_0,
        "goal": UNBOUNDED,
    },
    life.Config: {
        "robots": PAIR,
        "size lattice window births hidden frames": COUNT,
        "agents": ((0, -1), (16,)),
        "mutation": ((-1, 11), (0, 10)),
    },
    trading.Market: {"assets": ((0, 9), (1, 8)), "lot": COUNT},
    _life_neat.NeatBrain: {"max_nodes": ((29,), (30,)), "max_conns": ((215,), (216,)), "std": ((-1, 11), (0, 10))},
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
    own.Config: {"width": ((3,), (4,)), "layers batch_size": COUNT, "learning_rate": POSITIVE},
    pomdp.Config: {"episodes max_steps at_once": COUNT, "budget_s": FRACTION_FROM_0},
    env.Config: {"num_envs num_steps frames": COUNT},
    generate.Config: {
        "num_samples": ((0, 1025), (1, 1024)),
        "batch_size": ((0, 4097), (1, 4096)),
        "draft_length": ((-1, 65), (0, 64)),
    },
    pipeline.Config: {
        "devices microbatches chunks": COUNT,
        "forward backward weights softmax rows latency cap": LEAST_0,
    },
    pipelined_speculation.Config: {
        "stages draft_ticks": ((0, 1025), (1, 1024)),
        "guesses pipelined": ((0, 65), (1, 64)),
        "streamed early": COUNT,
        "hit acceptance": SHARE,
        "tokens": ((1, 2**20 + 1), (2, 2**20)),
    },
    step_speculation.Config: {
        "terms": ((1, 11), (2, 10)),
        "digits": ((0, 10), (1, 9)),
        "target_layers target_steps draft_layers draft_steps batch_size": COUNT,
        "target_width draft_width": ((31,), (32,)),
        "learning_rate": POSITIVE,
        "questions": ((0, 2**16 + 1), (1, 2**16)),
        "thresholds": FRACTION_FROM_0,
        "alphas": SHARE,
    },
    Combat: {"size": ((3,), (4,))},
    Crowd: {"width": ((2,), (3,)), "height num_people": COUNT, "reach layout": LEAST_0},
    Foraging: {"size": ((2,), (3,)), "num_agents num_food max_strength": COUNT, "sight": LEAST_0},
    tiles2048.Start: {"size": ((1, 9), (2, 8))},
    rubiks_cube.Scramble: {"size": ((1, 4), (2, 3)), "moves": ((0, 1001), (1, 1000)), "least": LEAST_0},
    sliding_tile.Shuffle: {"size": ((1, 9), (2, 8))},
    sokoban_levels.ReversePlay: {
        "size": ((4, 33), (5, 32)),
        "boxes played": COUNT,
        "carved": ((7,), (8,)),
    },
    connector_boards.RandomWalks: {"size": ((2, 33), (3, 32)), "num_agents walked": COUNT},
    rooms.Empty: {"size": ((3,), (4,))},
    rooms.DoorKey: {"size": ((4,), (5,))},
    rooms.FourRooms: {"size": ((6,), (7,)), "max_steps": COUNT},
    rooms.Memory: {"size": ((6,), (7,))},
    rooms.GridWorld: {"view": VIEW},
    LaserTag: {"width height": PAIR, "num_obstacles layout start": LEAST_0},
    LightDark: {"radius big_step": COUNT, "light": SIGNED},
    Mars: {"size": ((2, 128), (3, 127)), "num_rocks": COUNT, "layout": LEAST_0},
    card_games.RepeatFirst: {"num_cards num_kinds": PAIR},
    card_games.RepeatPrevious: {"num_cards num_kinds": PAIR, "k": COUNT},
    card_games.CountRecall: {"num_cards num_kinds": PAIR},
    card_games.Autoencode: {"num_cards": PAIR, "num_kinds": ((1, 128), (2, 127))},
    MineSweeper: {"size": PAIR, "num_mines": COUNT},
    Tetris: {"width": ((3, 10), (4, 9))},
    Navigation: {"size": ((4, 16), (5, 15)), "num_obstacles layout": LEAST_0},
    particles.Spread: {"num_agents num_landmarks": COUNT},
    particles.Tag: {"num_chasers num_prey": COUNT, "num_obstacles": LEAST_0},
    countdown.Uniform: {"num_numbers": ((1, 9), (2, 8)), "low high least most": COUNT},
    countdown.Reverse: {"num_numbers": ((1, 9), (2, 8)), "low high most": COUNT},
    knapsack.Items: {"num_items": COUNT, "tightness": POSITIVE},
    knapsack.Integer: {"num_items most": COUNT, "share": POSITIVE},
    tour_levels.Uniform: {"num_places": PAIR},
    tour_levels.Clustered: {"num_places": PAIR, "num_clusters": COUNT, "spread": POSITIVE},
    tour_levels.Demands: {"capacity most": COUNT},
    bin_pack.Split: {"num_items": COUNT},
    bin_pack.BinPack: {"num_spaces": COUNT},
    job_shop.Random: {"num_jobs": COUNT, "num_machines": ((0, 65), (1, 64)), "longest": ((0, 10_001), (1, 10_000))},
    RockSample: {"size num_rocks": COUNT, "layout": LEAST_0},
    Tree: {"depth distractors false_rules": LEAST_0, "prune": SHARE, "kinds": ((0, 12), (1, 11))},
    SubHunt: {"size": ((2,), (3,)), "speed": COUNT},
    Survival: {"size": ((15,), (16,)), "view": ((4,), (5,))},
    XLand: {"size": ((4,), (5,)), "rooms num_tasks": COUNT, "view": VIEW},
}
"""Each configuration with numbers in it: its fields, values outside of their range, and values at its ends."""

RESULTS = {
    "lm.adapters.AdaptedState", "nn.linear.Lora",
    "aot.job.Job", "aot.estimate.Estimate", "aot.roofline.Roofline", "aot.candidates.Finding", "aot.topology.Chip",
    "decode.trees.Tree",
    "env.capabilities.Capabilities", "env.check.Report", "env.spaces.Box", "env.spaces.Discrete",
    "env.spaces.MultiDiscrete", "fields.Between",
    "io.layers.LeafSource", "lower.lookback.KernelSource", "lower.lookback.Tile",
    "parallel.pipeline.ops.Schedule", "parallel.pipeline.pack.TickTable", "parallel.pipeline.timing.Timing",
    "parallel.placement.chain.ChainPlacement", "parallel.placement.placements.ConversionStep",
    "pomdp.exact.Exact", "pomdp.outline.Branch", "pomdp.particle_search.ParticleTreeSearch",
    "pomdp.tree_search.TreeSearch", "solve.carries.Division",
    "solve.carries.Loop", "solve.problem.Problem", "solve.program.Recurrence",
    "solve.solution.Solve", "estimate.Candidate", "pomdp.Results", "_rocks.Flips",
    "_policy_run.PolicyRun",
}  # fmt: skip
"""Frozen dataclasses with numbers that the library makes, or an environment says, and that no user configures."""
BY_HAND = {(bin_pack.Split, "container"), (Despot, "default"), (ImageClassifier, "shape"), (FramePredictor, "shape")}
"""Numbers whose range another field or the environment gives: an action, sizes that a patch divides, or three sides."""
