"""What others wrote is data: nothing of it is executed, no name leads elsewhere; and a folder has one run at a time."""

import contextlib
import errno
import fcntl
import json
import pathlib
import re
import signal
import subprocess
import sys

import jax.numpy as jnp
import numpy as np
import pytest
from omegaconf import OmegaConf

from experiments import lm
from experiments.app import run_folder, runner
from experiments.app.run_folder import LOCK, held
from jaxpar.io import Checkpoints
from jaxpar.lm import from_hf
from jaxpar.lm.text.corpus import open_corpus
from jaxpar.lm.text.data import DataConfig
from jaxpar.neat import from_json
from jaxpar.types import UsageError

# ---------------------------------------------------------------- configurations


@pytest.mark.parametrize(
    "content, name",
    [
        ("seed: ${oc.env:HOME}", "seed"),
        ("prompt: of ${oc.env:HOME}", "prompt"),
        ("data: {path: '${witness:}'}", "data.path"),
        ("metrics: [tensorboard, '${witness:}']", r"metrics[1]"),
        ("rules: {embed: '${seed}'}", "rules.embed"),
        ("prompt: '\\${witness:}'", "prompt"),
    ],
)
def test_a_configuration_refers_to_nothing(tmp_path, content, name):
    asked = []
    OmegaConf.register_new_resolver("witness", lambda: asked.append(1) or "x", replace=True)
    (tmp_path / "config.yaml").write_text(content)
    try:
        with pytest.raises(UsageError) as end:
            runner.load(tmp_path, lm.Config)
    finally:
        OmegaConf.clear_resolver("witness")
    said = str(end.value)
    assert (
        f"config.yaml has {name}='" in said
        and "which refers to something else" in said
        and "\n" not in said
    )
    assert not asked


@pytest.mark.parametrize(
    "content",
    [
        "seed: !!python/object/apply:pathlib.Path.touch [{witness}]",
        "prompt: !!python/name:os.system",
        "!!python/object/new:os.system [touch {witness}]",
        "seed: !include other.yaml",
        "- 1",
        "3",
        "a: " + "[" * 3000,
        "\x00",
        "name: ../../elsewhere",
    ],
)
def test_a_configuration_is_plain_data(tmp_path, content):
    witness = tmp_path / "witness"
    (tmp_path / "config.yaml").write_text(content.replace("{witness}", str(witness)))
    with pytest.raises(UsageError, match="config.yaml is not the configuration of such a run"):
        runner.load(tmp_path, lm.Config)
    assert not witness.exists()


def test_the_command_says_so_in_a_sentence(main, tmp_path):
    (tmp_path / "config.yaml").write_text("seed: ${oc.env:HOME}")
    said = main("mode=sample", "run=.").sentence()
    assert (
        "config.yaml has seed='${oc.env:HOME}', which refers to something else; legal are plain values."
        in said
    )


# ---------------------------------------------------------------- names

OUTSIDE = ["../out", "a/b", "/out", "..", ".", "", ".hidden", "a\\b", "a\x00b", "a\nb"]


@pytest.mark.parametrize("name", OUTSIDE)
def test_a_name_that_leads_out_of_the_folder_of_runs(name):
    with pytest.raises(UsageError, match="cannot name a folder; legal are names without /"):
        runner.RunConfig(name=name)


@pytest.mark.parametrize(
    "of, flag",
    [
        ("lm", "name=../../out"),
        ("rl", "env=../../out"),
        ("lm", "preset=../preset/tiny"),
        ("rl", "preset=../preset/rl2"),
    ],
)
def test_no_folder_is_made_outside(main, tmp_path, monkeypatch, of, flag):
    (tmp_path / "here" / "there").mkdir(parents=True)
    monkeypatch.chdir(tmp_path / "here" / "there")
    said = main(flag, of=of).sentence()
    assert (
        "cannot name a folder" in said
        or f"there is no preset {flag.partition('=')[2]!r}; legal for " in said
    )
    assert {path.name for path in tmp_path.rglob("*")} == {"here", "there"}


SHARDS = [
    "../model.safetensors",
    "/etc/model.safetensors",
    "..",
    "",
    "a\\b.safetensors",
    "weights.bin",
    3,
    None,
    ["a"],
]


@pytest.mark.parametrize("name", SHARDS)
def test_an_index_names_files_beside_it(tmp_path, name):
    config = dict(model_type="llama", vocab_size=16, num_hidden_layers=1, hidden_size=8, num_attention_heads=2,
                  intermediate_size=8)  # fmt: skip
    (tmp_path / "config.json").write_text(json.dumps(config))
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {"a": name}}))
    with pytest.raises(UsageError, match="legal is a safetensors file of that folder"):
        from_hf(tmp_path)


def test_a_cached_corpus_leads_nowhere_else(tmp_path):
    (tmp_path / "text.txt").write_text("some words\n" * 500)
    (tmp_path / "other.txt").write_text("a secret!!\n" * 500)
    config = DataConfig(path=str(tmp_path / "text.txt"), seq_len=16, split="tail:0.1")
    open_corpus(config, tmp_path / "cache")
    (record,) = (tmp_path / "cache").glob("*/corpus.json")
    for elsewhere in (str(tmp_path / "other.txt"), "../../other.txt"):
        record.write_text(json.dumps(json.loads(record.read_text()) | {"data": elsewhere}))
        with pytest.raises(UsageError, match="names the tokens"):
            open_corpus(config, tmp_path / "cache")


def test_a_link_in_place_of_a_file_is_not_followed(tmp_path):
    folder, outside = tmp_path / "run", tmp_path / "outside"
    folder.mkdir()
    outside.write_text("mine")
    for name in ("config.yaml", "env.json", LOCK, ".config.yaml.partial"):
        (folder / name).symlink_to(outside)
    runner.write_start(folder, lm.compose())
    with pytest.raises(UsageError, match="cannot be written"), held(folder):
        pass
    assert outside.read_text() == "mine" and runner.load(folder, lm.Config) == lm.compose()


# ---------------------------------------------------------------- checkpoints and networks

_heard: list[str] | None = None


def listen(event, args):
    if _heard is not None and event in (
        "pickle.find_class",
        "os.system",
        "subprocess.Popen",
        "os.exec",
    ):
        _heard.append(event)


def test_nothing_of_a_checkpoint_is_executed(tmp_path, monkeypatch):
    """Names of Python's are put wherever Orbax's own files hold a name or a type."""
    sys.addaudithook(listen)  # for good, but it listens here alone
    with contextlib.closing(Checkpoints(tmp_path)) as checkpoints:
        checkpoints.save(1, {"w": jnp.arange(6.0)}, {}, {"seed": 0})
        checkpoints.wait()
        changed = 0
        for path in [*(tmp_path / "1").rglob("*METADATA*"), *(tmp_path / "1").rglob("_sharding")]:
            text = path.read_text()
            evil = json.dumps(poisoned(json.loads(text)))
            changed += evil != text
            path.write_text(evil)
        assert changed >= 2
        monkeypatch.setattr(sys.modules[__name__], "_heard", heard := [])
        for read in (checkpoints.numpy, checkpoints.metadata):
            try:
                read(1)
            except UsageError:  # damaged, as it is
                pass
        assert heard == []


def poisoned(value):
    """Puts the name of a function that acts in place of each text that names a type or a class."""
    if isinstance(value, dict):
        return {key: poisoned(x) for key, x in value.items()}
    if isinstance(value, list):
        return [poisoned(x) for x in value]
    return (
        "os.system"
        if isinstance(value, str) and ("." in value or "jax" in value or "np" in value)
        else value
    )


def test_a_network_nested_without_end_is_a_mistake():
    with pytest.raises(UsageError):
        from_json("[" * 100_000)


def test_an_array_file_with_objects_is_refused(tmp_path):
    from experiments.app.sequences.series import read_series

    np.savez(tmp_path / "x.npz", x=np.array([[object()]]), y=np.zeros(1))
    with pytest.raises(UsageError, match="is not a whole .npz file"):
        read_series(str(tmp_path / "x.npz"))


# ---------------------------------------------------------------- one run a folder


@pytest.mark.parametrize("of", ["lm", "env"])
def test_a_second_run_in_a_folder_in_use_refuses(main, tmp_path, of):
    with held(tmp_path / "run"):
        said = main(
            "hydra.run.dir=run", *([] if of == "lm" else ["num_envs=8", "cpu_devices=8"]), of=of
        ).sentence()
        assert sorted(path.name for path in (tmp_path / "run").iterdir()) == [LOCK]
        if of == "lm":
            runner.write_start(tmp_path / "run", lm.compose(*main.flags))
            assert (
                "run has no checkpoint yet; train it first"
                in main("mode=eval", "run=run").sentence()
            )
    assert re.fullmatch(r"error: \S*run is in use by process \d+ on \S+; wait for its end, or begin another run with "
                        r"resume=false\.", said)  # fmt: skip
    assert (tmp_path / "run" / LOCK).read_text() == ""


HOLDER = """
import fcntl, sys, time
file = open(sys.argv[1], "w")
fcntl.flock(file, fcntl.LOCK_EX)
file.write("process 7 on moon\\n")
file.flush()
print("held", flush=True)
time.sleep(60)
"""


def test_a_killed_run_holds_nothing(tmp_path):
    holder = subprocess.Popen(
        [sys.executable, "-c", HOLDER, str(tmp_path / LOCK)], stdout=subprocess.PIPE
    )
    holder.stdout.readline()
    with (
        pytest.raises(UsageError, match="is in use by process 7 on moon; wait for its end"),
        held(tmp_path),
    ):
        pass
    holder.send_signal(signal.SIGKILL)
    holder.communicate()
    with held(tmp_path), pytest.raises(UsageError, match="is in use by process"), held(tmp_path):
        pass
    with held(tmp_path):
        pass


@pytest.mark.parametrize("number", [errno.ENOLCK, errno.EOPNOTSUPP])
def test_storage_without_locks_is_told_of(tmp_path, monkeypatch, capsys, number):
    def flock(file, operation):
        raise OSError(number, "No locks available")

    monkeypatch.setattr(fcntl, "flock", flock)
    with held(tmp_path):
        pass
    assert capsys.readouterr().out == f"note: {tmp_path} cannot be locked (no locks available); start no second run " \
        "in it.\n"  # fmt: skip


def test_only_process_0_locks_and_all_refuse(tmp_path, monkeypatch):
    told = []
    monkeypatch.setattr(run_folder.jax, "process_index", lambda: 1)
    monkeypatch.setattr(run_folder.jax, "process_count", lambda: 2)
    monkeypatch.setattr(
        run_folder.multihost_utils, "process_allgather", lambda own: told.append(own) or [of_0, own]
    )
    of_0 = False
    with held(tmp_path):
        assert not (tmp_path / LOCK).exists()
    of_0 = True
    with pytest.raises(UsageError, match="could not be locked by process 0"), held(tmp_path):
        pass
    assert told == [False, False]


def test_another_run_with_resume_false_takes_the_next_folder(tmp_path):
    with run_folder.run_folder(tmp_path / "a", False) as first:
        (first / "metrics.jsonl").write_text("")
        with run_folder.run_folder(tmp_path / "a", False) as second:
            assert (first.name, second.name) == ("a", "a-2")
    with (
        run_folder.run_folder(tmp_path / "a", False) as third,
        run_folder.run_folder(pathlib.Path(tmp_path / "a"), True),
    ):
        assert third.name == "a-2"  # nothing but a lock was left in it


def test_checkpoints_elsewhere_are_held_as_well(tmp_path):
    where = str(tmp_path / "elsewhere" / "a")
    with (
        run_folder.saving(tmp_path / "one", True, where),
        pytest.raises(UsageError, match="elsewhere/a is in use by"),
    ):
        with run_folder.saving(tmp_path / "two", True, where):
            pass
