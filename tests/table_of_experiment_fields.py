"""What is legal of each number of a configuration of experiments."""

from ranges_of_fields import (
    COUNT,
    FRACTION_FROM_0,
    LEAST_0,
    LEAST_MINUS_1,
    OPEN,
    PAIR,
    POSITIVE,
    SEED,
    SHARE,
    SIGNED,
    UNBOUNDED,
    UNDER_1,
)

from experiments import (
    compare,
    digits,
    env,
    generate,
    hosted,
    life,
    lm,
    neat,
    own,
    pipeline,
    pomdp,
    rl,
    rnn,
    verify,
)
from experiments.app.env import neat_brains
from experiments.app.env.solved_policies import ExactPolicy, QmdpPolicy
from experiments.app.harness import TrainConfig
from experiments.app.lm import benchmark
from experiments.app.lm.pipeline_flags import PipelineConfig
from experiments.app.runner import Processes, RunConfig
from experiments.app.sequences.series import SeriesConfig
from experiments.papers import (
    gru_svm,
    information_gain_trellis,
    l2mu,
    moving_digits,
    pipelined_speculation,
    rl_scaling,
    scattered_attention,
    step_speculation,
    trading,
    volunteer_experts,
)

EXPERIMENTS = {
    RunConfig: {"seed": SEED, "cpu_devices": LEAST_0},
    Processes: {"num_processes": LEAST_0, "process_id": LEAST_MINUS_1},
    PipelineConfig: {"microbatches": LEAST_0, "chunks": COUNT},
    verify.Config: {
        "microbatches chunks accumulate float32_every": COUNT,
        "num_experts jobs": LEAST_0,
        "ema": UNDER_1,
    },
    TrainConfig: {"steps chunk": COUNT, "save_every": LEAST_0},
    lm.TrainConfig: {
        "steps accumulate keep max_skipped": COUNT,
        "eval_every eval_batches save_every": LEAST_0,
        "keep_every_s": FRACTION_FROM_0,
    },
    benchmark.EvalConfig: {"batch_size": COUNT, "length": LEAST_0},
    rnn.ModelConfig: {
        "size layers heads width mlp memory": COUNT,
        "window": LEAST_0,
        "theta": POSITIVE,
    },
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
        "max_nodes max_conns max_species episodes num_seeds eval_episodes frames sub_steps": COUNT,
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
    gru_svm.Config: {"steps seeds size": COUNT, "length": PAIR},
    hosted.Config: {"steps rounds": COUNT, "num_envs": PAIR},
    information_gain_trellis.Config: {
        "blocks width steps": COUNT,
        "weight": FRACTION_FROM_0,
        "seeds": SEED,
    },
    l2mu.Config: {"steps": LEAST_0, "neurons": COUNT},
    rl_scaling.Config: {"updates": ((7,), (8,)), "groups": COUNT},
    scattered_attention.Config: {"voxels": PAIR, "sides": COUNT},
    trading.Config: {"updates members": COUNT},
    volunteer_experts.Config: {
        "dimensions k steps": COUNT,
        "places": ((0, -1), (2,)),
        "failures": SHARE,
        "delays": LEAST_0,
        "seeds": SEED,
    },
    trading.Market: {"assets": ((0, 9), (1, 8)), "lot": COUNT},
    neat_brains.NeatBrain: {
        "max_nodes": ((29,), (30,)),
        "max_conns": ((215,), (216,)),
        "std": ((-1, 11), (0, 10)),
    },
    own.Config: {"width": ((3,), (4,)), "layers batch_size": COUNT, "learning_rate": POSITIVE},
    ExactPolicy: {"tolerance": POSITIVE, "max_iterations": COUNT},
    QmdpPolicy: {"tolerance": POSITIVE},
    pomdp.Config: {"episodes max_steps at_once trees": COUNT, "budget_s": FRACTION_FROM_0},
    env.Config: {"num_envs num_steps frames": COUNT},
    generate.Config: {
        "num_samples": ((0, 1025), (1, 1024)),
        "batch_size": ((0, 4097), (1, 4096)),
        "draft_length": ((-1, 65), (0, 64)),
        "beams": ((-1, 1025), (0, 1024)),
        "length_penalty": SIGNED,
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
}
