"""Flags to configurations, their identity, and the folders of runs."""

import dataclasses
import re

import jax
import jax.numpy as jnp
import pytest
from lm_configs import field_of

from experiments import digits, env, estimate, generate, life, lm, neat, pomdp, rl, rnn
from experiments.app import runner
from experiments.app.mistakes import RENAMED, _flags, presets_of
from experiments.papers import moving_digits, pipelined_speculation, step_speculation
from jaxpar.lm import gpt2, llama, num_params
from jaxpar.lm.flat_names import FLAT_NAMES
from jaxpar.lm.text.tokenizer import Bytes
from jaxpar.mesh import MeshSpec, make_mesh, use_mesh
from jaxpar.types import UsageError

PRESETS = sorted(path.stem for path in (runner.CONF / "lm" / "preset").glob("*.yaml"))


@pytest.mark.parametrize("preset", PRESETS)
def test_each_preset_traces_a_whole_step_on_its_mesh(preset):
    config = lm.with_vocabulary(lm.compose(f"preset={preset}"), Bytes())
    assert config.name == preset
    with use_mesh(make_mesh(config.mesh)):
        trainer = lm.make_trainer(config)
        state = jax.eval_shape(trainer.init, jax.random.key(0))
        tokens = jax.ShapeDtypeStruct((config.data.batch_size, config.data.seq_len), jnp.int32)
        new, info = jax.eval_shape(
            trainer.step, jax.random.key(0), state, {"tokens": tokens, "targets": tokens}
        )
    assert jax.tree.map(lambda x: (x.shape, x.dtype), new) == jax.tree.map(
        lambda x: (x.shape, x.dtype), state
    )
    assert sum(leaf.size for leaf in jax.tree.leaves(state.params)) == num_params(config.model)
    assert info["loss"].shape == ()


@pytest.mark.parametrize(
    "path",
    [
        "/data/données à moi/a b.jsonl",
        "日本/テキスト",
        "mix:7*a b.jsonl+3*é/c",
        "/tmp/e\u0301.txt",
        "/a:b/é",
    ],
)
def test_paths_may_have_spaces_and_accents(path):
    assert lm.compose(f"data.path={path}").data.path == path
    assert generate.compose(f"prompts='{path}'", "hf=é").prompts == path


def test_other_signs_beside_accents_are_refused_as_without():
    for value in ("é, b", "[é", "é=1", "é(1)"):
        with pytest.raises(UsageError, match=r"cannot be read|several values"):
            lm.compose(f"data.path={value}")


@pytest.mark.parametrize("preset", PRESETS)
def test_each_preset_opens_with_its_command(preset):
    lines = (runner.CONF / "lm" / "preset" / f"{preset}.yaml").read_text().splitlines()
    flags = re.search(r"python -m experiments.lm([^)]*)", "\n".join(lines[:2]))[1].split()
    if preset == "tiny":
        assert flags == [] and lm.compose().name == "tiny"
    else:
        assert flags[0] == f"preset={preset}"
    assert lm.compose(*flags).name == preset


PUBLISHED = {
    "gpt2_124m": 124_439_808 + 47 * 768,
    "llama_1b": 1_235_814_400,
    "llama_8b": 8_030_261_248,
}


@pytest.mark.parametrize("preset", PUBLISHED)
def test_a_preset_is_the_model_that_it_is_named_after_whatever_the_tokenizer(preset):
    """Estimated, trained over bytes and trained over its own tokens, it has the same number of parameters."""
    config = lm.compose(f"preset={preset}")
    assert (
        num_params(config.model)
        == num_params(estimate.compose(f"preset={preset}").model)
        == PUBLISHED[preset]
    )
    assert lm.with_vocabulary(config, Bytes()).model == config.model
    count, _, unit = re.fullmatch(r"\w+_([\d]+)(\.\d+)?([mb])", preset).groups()
    assert float(count) == pytest.approx(PUBLISHED[preset] / {"m": 1e6, "b": 1e9}[unit], abs=0.5)
    lines = (runner.CONF / "lm" / "preset" / f"{preset}.yaml").read_text()
    assert f"{PUBLISHED[preset]:,} parameters" in lines


def test_gpt2_without_padding_is_the_published_one():
    assert (
        num_params(lm.compose("preset=gpt2_124m", "model.vocab_size=50257").model)
        == num_params(gpt2())
        == 124_439_808
    )
    assert num_params(llama()) == PUBLISHED["llama_1b"]


@pytest.mark.parametrize(
    "flags, derived",
    [
        ("", dict(num_heads=4, num_kv_heads=2, head_dim=32)),
        ("model.attention.num_heads=8", dict(num_heads=8, num_kv_heads=2, head_dim=16)),
        ("model.embed_dim=64", dict(num_heads=4, head_dim=16)),
        (
            "model.attention.num_heads=2 model.attention.num_kv_heads=0",
            dict(num_kv_heads=2, head_dim=64),
        ),
        ("model.attention.head_dim=8", dict(num_heads=4, head_dim=8)),
        (
            "preset=gpt2_124m model.attention.num_heads=6",
            dict(num_heads=6, num_kv_heads=6, head_dim=128),
        ),
        ("preset=gpt2_124m model.embed_dim=384", dict(num_heads=12, num_kv_heads=12, head_dim=32)),
    ],
)
def test_derived_sizes_follow_the_flags(flags, derived):
    model = lm.compose(*flags.split()).model
    assert {name: field_of(model, name) for name in derived} == derived


def test_flags_beat_the_preset_and_the_preset_beats_the_schema():
    config = lm.compose(
        "preset=llama_1b", "train.steps=7", "mesh.tensor=2", "rules.embed=none", "metrics=[wandb]"
    )
    assert (config.train.steps, config.train.accumulate, config.train.keep) == (
        7,
        4,
        lm.TrainConfig().keep,
    )
    assert config.mesh == MeshSpec(data=1, fsdp=-1, tensor=2)
    assert config.rules == {"embed": "none"} and config.metrics == ["wandb"]
    assert isinstance(config, lm.Config) and isinstance(config.model, lm.LMConfig)
    with pytest.raises(dataclasses.FrozenInstanceError):
        config.seed = 1


def test_compose_refuses_in_one_sentence():
    with pytest.raises(UsageError, match="did you mean model.num_layers"):
        lm.compose("model.num_layer=2")
    assert lm.compose("model.num_layers=2").model.num_layers == 2  # and can be called again


SAME = [
    "mesh.fsdp=4 mesh.data=2", "rules.embed=none", "cpu_devices=2", "train.steps=7", "train.accumulate=2",
    "train.save_every=3 train.eval_every=9 train.keep=5 train.profile=1:2", "metrics=[tensorboard]", "prompt=once",
    "model.execution.remat=full", "model.execution.kernel=xla",
    "model.execution.scan_layers=false", "model.execution.loss_chunk=64",
    "sampling.temperature=0", "name=other", "resume=false", "mode=eval", "checkpoint=newest", "use_ema=true",
]  # fmt: skip
OTHER = [
    "seed=1", "model.num_layers=2", "model.dtype=bfloat16", "model.dropout=0.1", "model.vocab_size=320",
    "model.losses.low_logits=true", "data.path=/text", "data.tokenizer=bpe:300",
    "data.split=tail:0.2", "data.seq_len=64",
    "data.batch_size=8", "data.pack=true", "optimizer.name=muon", "optimizer.learning_rate=0.1", "optimizer.b1=0.8",
    "optimizer.decay_steps=50",
]  # fmt: skip


@pytest.mark.parametrize("flags", SAME)
def test_how_a_run_is_computed_is_no_part_of_its_identity(flags):
    assert runner.identity(lm.compose(*flags.split())) == runner.identity(lm.compose())


def test_what_a_run_computes_is_its_identity():
    usual, others = lm.compose(), [lm.compose(flag) for flag in OTHER]
    older = {f"model.{path}": f"model.{name}" for name, path in FLAT_NAMES.items()}
    for flag, other in zip(OTHER, map(runner.identity, others), strict=True):
        name = flag.partition("=")[0]
        changed = [name for name, value in runner.identity(usual).items() if other[name] != value]
        assert changed == [older.get(name, name)]
    assert len({runner.folder_name(config) for config in [usual, *others]}) == 1 + len(OTHER)


def test_a_flag_that_came_later_leaves_the_names_of_runs_as_they_were():
    later = ("optimizer.warmup_start", "tuning.", "objective.", "teacher", "data.pairs", "eval.")
    assert not [name for name in runner.identity(lm.compose()) if name.startswith(later)]
    flags = ["tuning.freeze=[wq]", "tuning.ema=0.5", "objective.distil=0.3", "teacher=run:x"]
    known = runner.identity(lm.compose(*flags))
    assert (
        known["tuning.freeze"] == ["wq"]
        and known["teacher"] == "run:x"
        and known["objective.distil"] == 0.3
    )
    assert runner.identity(lm.compose("objective.kind=dpo"))["data.pairs"]
    assert runner.identity(lm.compose("optimizer.warmup_start=0"))["optimizer.warmup_start"] == 0


def test_the_folder_is_named_after_preset_and_identity():
    assert re.fullmatch("tiny-[0-9a-f]{8}", runner.folder_name(lm.compose()))
    assert re.fullmatch("gpt2_124m-[0-9a-f]{8}", runner.folder_name(lm.compose("preset=gpt2_124m")))
    assert re.fullmatch("mine-[0-9a-f]{8}", runner.folder_name(lm.compose("name=mine")))
    assert runner.folder_name(lm.compose("train.steps=3")) == runner.folder_name(lm.compose())


def words():
    """The rows of the quick start's table of flags: flag -> experiments that have it."""
    page = (runner.CONF.parents[1] / "docs" / "quickstart.md").read_text()
    rows = re.findall(r"^\| `([\w.]+)` \| .* \| ([a-z_, ]+) \|$", page, re.MULTILINE)
    return {flag: sorted(names.split(", ")) for flag, names in rows}


def test_one_word_means_one_thing_in_every_experiment():
    experiments = {
        "digits": digits,
        "env": env,
        "generate": generate,
        "lm": lm,
        "neat": neat,
        "pomdp": pomdp,
    }
    experiments |= {"rl": rl, "rnn": rnn, "pipelined_speculation": pipelined_speculation}
    experiments |= {
        "step_speculation": step_speculation,
        "moving_digits": moving_digits,
        "life": life,
    }
    flags = {name: dict(_flags(module.Config)) for name, module in experiments.items()}
    for name in experiments:
        flags[name] |= {"preset": str} if presets_of(name, "preset") else {}
        assert not flags[name].keys() & set(RENAMED), "an old name is back"
    assert len(words()) == 8
    for flag, where in words().items():
        assert where == sorted(name for name in experiments if flag in flags[name]), flag
        assert len({flags[name][flag] for name in where}) == 1, f"{flag} is of several types"


@pytest.mark.parametrize(
    "experiment, flag, new",
    [
        (lm, "steps=3", "train.steps"),
        (rl, "steps=3", "train.steps"),
        (rl, "chunk=3", "train.chunk"),
        (rl, "recall=true", "last_action_reward"),
        (rl, "draw=batch", "prng"),
        (env, "draw=batch", "prng"),
        (neat, "save_every=3", "train.save_every"),
        (neat, "generations=3", "train.steps"),
        (neat, "steps=3", "train.steps"),
        (neat, "seeds=3", "num_seeds"),
        (neat, "protocol=paper_xor", "preset"),
        (pomdp, "steps=3", "max_steps"),
    ],
)
def test_a_flag_by_its_old_name_gets_the_new_one(experiment, flag, new):
    with pytest.raises(UsageError) as error:
        experiment.compose(flag)
    assert re.search(rf"(is|is called) {re.escape(new)} now", str(error.value)), error.value


def test_a_preset_may_be_given_as_the_model():
    assert lm.compose("model=gpt2_124m", "model.num_layers=2") == lm.compose(
        "preset=gpt2_124m", "model.num_layers=2"
    )
    with pytest.raises(
        UsageError, match="there is no preset 'tinny'; legal for preset= are .*tiny"
    ):
        lm.compose("model=tinny")
    with pytest.raises(
        UsageError, match="model=3 is of the wrong type; model takes no value but flags of its own"
    ):
        lm.compose("model=3")


@pytest.mark.parametrize(
    "flag", ["preset=null", "preset=3", "preset=", "preset=lm/tiny", "preset=tiny"]
)
def test_presets_are_those_of_the_experiment(flag):
    with pytest.raises(
        UsageError,
        match=f"there is no preset .*{flag[7:]}'; legal for preset= are double_pole.* paper_xor",
    ):
        neat.compose(flag)


def test_renamed_flags_leave_the_names_of_runs_as_they_were():
    assert runner.identity(pomdp.compose("max_steps=7"))["steps"] == 7
    names = {
        rl: "CartPole-v1-8a2fc571",
        neat: "neat-68548286",
        pomdp: "RockSample-7-8-d6bf3bb5",
        lm: "tiny-90ecd57b",
    }
    assert all(
        runner.folder_name(experiment.compose()).startswith(name)
        for experiment, name in names.items()
    )


def test_a_fresh_folder_takes_the_next_number(tmp_path):
    folder = tmp_path / "runs" / "tiny"
    assert runner.fresh_folder(folder, resume=False) == folder  # new
    assert runner.fresh_folder(folder, resume=False) == folder  # still empty
    for count in (2, 3):
        (
            tmp_path / "runs" / ("tiny" if count == 2 else f"tiny-{count - 1}") / "metrics.jsonl"
        ).write_text("{}\n")
        assert runner.fresh_folder(folder, resume=True) == folder
        assert runner.fresh_folder(folder, resume=False) == folder.with_name(f"tiny-{count}")


@pytest.mark.parametrize(
    "flags",
    [
        "",
        "preset=llama_8b",
        "preset=gpt2_124m model.attention.num_heads=6 rules.embed=none metrics=[wandb] seed=3",
    ],
)
def test_a_saved_configuration_loads_as_it_was(tmp_path, flags):
    config = lm.compose(*flags.split())
    runner.write_start(tmp_path, config)
    assert runner.load(tmp_path, lm.Config) == config


def test_a_folder_without_configuration_is_refused(tmp_path):
    with pytest.raises(UsageError, match="it has no config.yaml"):
        runner.load(tmp_path, lm.Config)


def test_the_mesh_that_nobody_asked_for_has_no_idle_axis(monkeypatch, tmp_path):
    monkeypatch.setattr(runner, "_quieten", lambda: None)
    monkeypatch.setenv(
        "JAX_COMPILATION_CACHE_DIR", jax.config.jax_compilation_cache_dir or str(tmp_path)
    )
    before = jax.config.jax_compilation_cache_dir
    whole, split = (
        dict.fromkeys((digits, lm, moving_digits, rnn), (2, 2, 2)),
        dict.fromkeys((rl, env, neat), (2, 2, 1)),
    )
    kinds = (whole | split | {pomdp: (1, 1, 1)}).items()
    opened = []

    def record(config, *usual):
        with open_devices(config, *usual) as mesh:
            opened.append(tuple(mesh.shape[axis] for axis in ("data", "fsdp", "tensor")))
        raise UsageError("that is all")

    open_devices = runner.open_devices
    monkeypatch.setattr(runner, "open_devices", record)
    for experiment, sizes in kinds:
        for flags, want in (("", sizes), ("mesh.data=8", (8, 1, 1))):
            with pytest.raises(UsageError, match="that is all"):
                experiment.execute(experiment.compose("cpu_devices=8", *flags.split()), tmp_path)
            assert opened[-1] == want, experiment
    jax.config.update("jax_compilation_cache_dir", before)


@pytest.mark.slow  # 30 s
def test_a_run_with_an_odd_length_over_a_split_sequence_is_that_of_one_device(command):
    flags = "data.seq_len=13 train.steps=4 train.eval_every=4 cpu_devices=4".split()
    told = []
    for mesh in (["mesh.data=4"], ["mesh.data=1", "mesh.context=4"]):
        end = command(*flags, *mesh, f"hydra.run.dir=run{len(mesh)}")
        assert end.code == 0, end
        out = end.out
        assert ("padded to rows of 16 over mesh.context" in out) == (len(mesh) == 2)
        told.append(re.search(r"validation loss ([\d.]+)", out).group(1))
    assert told[0] == told[1]
