"""Bad input ends in one sentence and exit code 2, before anything is compiled."""

import errno
import os
import pathlib
import re
import shutil
import subprocess
import sys
import tempfile
import types

import pytest

from experiments.app.mistakes import sentence_of
from jaxpar.io.metrics import JsonlWriter

FIXED = [
    # layout
    (
        "mesh.data=3",
        "mesh data=3 needs 3 devices but 8 are here; the nearest legal choice is data=8",
    ),
    (
        "mesh.data=2 mesh.fsdp=8",
        "mesh data=2 fsdp=8 needs 16 devices .* nearest legal choice is fsdp=4",
    ),
    ("mesh.data=0", "mesh.data=0 must be at least 1, or -1"),
    ("mesh.data=-1 mesh.fsdp=-1", "leaves data and fsdp open; only one axis may be -1"),
    (
        "mesh.data=1 mesh.fsdp=8 model.embed_dim=36",
        "mesh.fsdp=8: embed of size 36 of embedding does not divide over 8 devices; "
        "expected mesh.fsdp of 1, 2, 3, 4, 6",
    ),
    (
        "mesh.data=2 mesh.tensor=4",
        "mesh.tensor=4: kv_heads of size 2 of layers.wk does not divide over 4 devices",
    ),
    (
        "mesh.data=8 data.batch_size=12",
        "data.batch_size=12 does not divide over mesh.data=8; the nearest legal are 8 or 16",
    ),
    (
        "mesh.data=1 mesh.context=8 data.seq_len=12 model.experts.num_experts=4",  # without experts rows are padded
        "data.seq_len=12 does not divide over mesh.context=8; .* 8 or 16",
    ),
    (
        "mesh.data=8 train.accumulate=2",
        "data.batch_size=8 in train.accumulate=2 parts does not divide over mesh.data=8; the nearest legal is 16",
    ),
    (
        "mesh.data=2 mesh.fsdp=4 mesh.inner=2 data.batch_size=12",
        "data.batch_size=12 does not divide over mesh.data=2 x mesh.fsdp=4 = 8; the nearest legal are 8 or 16",
    ),
    (
        "mesh.data=1 mesh.stage=8",
        "mesh.stage=8 needs pipeline=; legal are gpipe, 1f1b",
    ),
    (
        "mesh.data=4 mesh.expert=2",
        "mesh.expert=2 leaves 2 devices .* a language model has nothing along expert",
    ),
    (
        "rules.batch=none rules.embed=none",
        "mesh.data=2 .* has nothing along data, which splits population",
    ),
    (
        "mesh.data=1 mesh.tensor=8 rules.heads=none rules.kv_heads=none rules.mlp=none rules.vocab=none",
        "mesh.tensor=8",
    ),
    ("rules.embed=up", "rule embed=up names unknown mesh axis 'up'; legal are .*fsdp"),
    ("rules.emb=fsdp", "rule for unknown axis 'emb'; logical axes are .*embed"),
    (
        "mesh.data=1 mesh.fsdp=8 mesh.inner=3",
        "mesh inner=3 does not divide fsdp=8; legal are 1, 2, 4, 8",
    ),
    ("rules.embed_weight=up", "rule embed_weight=up names unknown mesh axis 'up'"),
    (
        "layout=zero9",
        "layout 'zero9' is unknown; legal are zero3, zero2, .*sequence, 2d, several joined by [+]",
    ),
    ("layout=zero2+", "layout '' is unknown; legal are zero3"),
    ("processes.coordinator=host:1", "coordinator=host:1 also needs num_processes"),
    # model, optimizer, data, sampling
    (
        "model.attention.num_heads=6 model.attention.num_kv_heads=4",
        "model.attention.num_heads=6 .* model.attention.num_kv_heads=4; legal are 1, 2, 3, 6",
    ),
    (
        "model.attention.num_heads=3 model.attention.num_kv_heads=1",
        "model.embed_dim=32 is not a multiple of model.attention.num_heads=3; .* 30",
    ),
    ("model.norm.kind=batch", "model.norm.kind='batch' is unknown; legal are rms, layer"),
    ("model.positions=learned model.max_seq_len=8", "data.seq_len=16 is over model.max_seq_len=8"),
    (
        "mesh.data=1 mesh.context=8 data.seq_len=12 model.positions=learned model.max_seq_len=12",
        "data.seq_len=12 is padded to 16 over mesh.context=8, which is over model.max_seq_len=12",
    ),
    ("optimizer.name=sgd", "optimizer.name='sgd' is unknown; legal are adamw, muon"),
    ("data.tokenizer=words", "tokenizer must be 'bytes' or 'bpe:N'"),
    ("data.split=half", "split must be 'hash:f' or 'tail:f'"),
    ("sampling.top_p=2", "sampling.top_p=2.0 must be over 0 and at most 1"),
    # the command line
    ("model.num_layer=3", "unknown flag 'model.num_layer'; did you mean model.num_layers[?]"),
    (
        "optimiser.learning_rate=3",
        "unknown flag 'optimiser.learning_rate'; did you mean optimizer.learning_rate[?]",
    ),
    ("batch_size=3", "unknown flag 'batch_size'; did you mean data.batch_size or .*[?]"),
    ("lr=3", "unknown flag 'lr'; did you mean optimizer.learning_rate[?]"),
    ("zzz=3", "unknown flag 'zzz'"),
    (
        "model.num_layers=two",
        r"model.num_layers=two is of the wrong type; model.num_layers takes int\.$",
    ),
    ("train.steps=1.5", "train.steps=1.5 is of the wrong type; train.steps takes int"),
    ("data.pack=maybe", "data.pack=maybe is of the wrong type; data.pack takes bool"),
    (
        "metrics=tensorboard",
        r"of the wrong type; metrics takes list\[str\], such as metrics=\[tensorboard\]\.",
    ),
    ("preset=huge", "there is no preset 'huge'; legal for preset= are finetune, gpt2_124m, .*tiny"),
    ("preset=3", "there is no preset '3'; legal for preset= are finetune, gpt2_124m, .*tiny"),
    ("model.num_layers", "flag 'model.num_layers' cannot be read; flags are name=value"),
    ("metrics=[", r"flag 'metrics=\[' cannot be read"),
    (
        "--train.steps=20",
        r"flag '--train.steps=20' begins with -; flags have none: train.steps=20\.$",
    ),
    ("--seed 3", r"flag '--seed' begins with -; flags have none: seed=value\.$"),
    ("=3", "flag '=3' has no name; flags are name=value"),
    ("+x=3 hydra.run.dir=run", "unknown flag 'x'"),
    (
        "layout=zero2,zero3",
        "layout=zero2,zero3 has several values; -m at the end makes a run of each",
    ),
    (
        "rules.embed=[data,fsdp]",
        r"rules.embed=\[data,fsdp\] is of the wrong type; rules.embed takes str",
    ),
    (
        "mesh=3",
        "mesh=3 is of the wrong type; mesh takes no value but flags of its own, for data, fsdp",
    ),
    ("seed=-1", "seed=-1 must be at least 0 and at most 4294967295"),
    ("seed=99999999999999999999", "seed=99999999999999999999 must be at least 0"),
    ("metrics=[paper]", "metrics cannot go to 'paper'; choose among tensorboard, wandb"),
    # train and mode
    ("train.accumulate=3", "train.accumulate=3 does not divide data.batch_size=8"),
    ("train.accumulate=0", "train.accumulate=0 must be at least 1"),
    ("train.steps=0", "train.steps=0 must be at least 1"),
    ("train.max_skipped=0", "train.max_skipped=0 must be at least 1"),
    ("train.keep=0", "train.keep=0 must be at least 1"),
    ("train.eval_batches=-1", "train.eval_batches=-1 must be at least 0"),
    ("train.profile=9", "profile='9' is not first:last"),
    ("train.profile=40:50", "profile='40:50' begins after the run's 40 steps"),
    ("tuning.freeze=[wz]", "tuning.freeze=wz matches no parameter; legal are patterns of .*wq"),
    ("tuning.layer_decay=0", "tuning.layer_decay=0.0 must be over 0 and at most 1"),
    (
        "use_ema=true",
        "use_ema=true asks for an average that this run does not keep; give tuning.ema",
    ),
    ("objective.kind=kto", "objective.kind='kto' is unknown; legal are tokens, dpo"),
    ("teacher=large", "teacher=large names no model; legal are hf:folder, run:folder, or nothing"),
    ("eval.kind=choices", "eval.kind=choices with eval.path=''; legal are split without a file"),
    ("mode=dream", "mode='dream' is unknown; legal are train, sample, eval"),
    ("checkpoint=last", "checkpoint='last' is unknown; legal are best, newest"),
    ("mode=sample", "mode=sample needs run= to name an existing folder, not ''"),
    ("mode=eval run=nowhere", "mode=eval needs run= to name an existing folder, not 'nowhere'"),
    ("mode=eval run=.", "is no run folder: it has no config.yaml"),
    ("mode=export run=.", "mode=export needs out="),
    ("mode=export run=. out=model.bin", "out=model.bin ends in .bin; legal are .safetensors, .npz"),
    # files
    (
        "checkpoints=s4://bucket/a",
        "s4:// is no storage; legal are a local folder and gs://bucket/folder",
    ),
    ("checkpoints=/proc/nowhere", "the checkpoint folder /proc/nowhere/.* cannot be written"),
    ("data.path=/nowhere/text.txt", "data path '/nowhere/text.txt' is neither a file nor a folder"),
    ("hydra.run.dir=/proc/nowhere", "/proc/nowhere cannot be opened or written: no such file"),
]


@pytest.mark.parametrize("flags, sentence", FIXED, ids=[flags for flags, _ in FIXED])
def test_bad_flags(main, flags, sentence):
    said = main(*flags.split()).sentence()
    assert re.search(sentence, said, re.IGNORECASE), said
    assert said.count("\n") == 0 and len(said) < 300


OTHERS = [
    ("verify", "layouts=[foo8]", "layout 'foo8' is unknown; legal are sizes such as data2.fsdp4"),
    ("verify", "layouts=[data2.data4]", "layout 'data2.data4' is unknown; .* each once"),
    (
        "verify",
        "layouts=[data16] topology=none",
        "no layout is legal here; data16 zero3: mesh data=16 needs 16",
    ),
    ("verify", "layouts=[]", r"layouts=\[\] leaves nothing to verify"),
    ("verify", "dtypes=[]", r"dtypes=\[\] leaves nothing to verify; legal are float32, float64"),
    (
        "verify",
        "dtypes=[int8]",
        "dtypes=int8 is not judged; expected any of float32, float64, bfloat16",
    ),
    ("verify", "layout=zero2", r"mesh and layout are not read here; .* layouts=\[fsdp8/zero2\]"),
    ("verify", "mesh.fsdp=8", "mesh and layout are not read here"),
    (
        "verify",
        "layouts=[data8] topology=v5e:3x5",
        "topology=v5e:3x5 has 15 devices and the layouts 8",
    ),
    ("verify", "layouts=[data8,data4] topology=v5e:2x4", "has 8 devices and the layouts 4 and 8"),
    (
        "verify",
        "topology=v9:1x1",
        "topology='v9:1x1' is unknown; legal are a kind of chip and a shape",
    ),
    (
        "estimate",
        "topology=h100:8 mesh.fsdp=7",
        "mesh data=-1 fsdp=7 needs 7 devices but 8 are here; .* fsdp=8",
    ),
    (
        "estimate",
        "topology=h100:8 search=true mesh.fsdp=8",
        "search=true tries every mesh; leave mesh, show and source",
    ),
    ("estimate", "topology=h100:8 layout=zero9", "layout 'zero9' is unknown"),
    ("estimate", "hf=/nonexistent", "/nonexistent"),
    (
        "estimate",
        "topology=h100:8 mesh.fsdp=1 mesh.stage=8 pipeline=zb_v",
        "4 layers do not divide over the 16",
    ),
    (
        "estimate",
        "topology=h100:8 mesh.stage=8 pipeline=zb_v show=true",
        "a pipeline tells of its schedules alone",
    ),
    ("estimate", "topology=h100:8 mesh.fsdp=1 mesh.stage=8", "mesh.stage=8 needs pipeline="),
    (
        "estimate",
        "topology=h100:8 decode=true mesh.context=8",
        "mesh.context=8 .* sampling has nothing along context",
    ),
    (
        "estimate",
        "topology=h100:8 decode=true data.batch_size=6",
        "data.batch_size=6 does not divide over mesh.fsdp=8",
    ),
    (
        "verify",
        "layouts=[data8/zb_v] topology=none",
        "'data8/zb_v' has no stages for zb_v; .* stage2.data4/zb_v",
    ),
    (
        "verify",
        "layouts=[stage4.data2/zb_v] topology=none",
        "no layout is legal here; data2.stage4 zero3.stages zb_v: 4 layers do not divide over the 8 chunks",
    ),
    (
        "rl",
        "mesh.data=4 mesh.tensor=2 cpu_devices=8",
        "mesh.tensor=2 leaves .* learning has nothing along tensor, .* data or fsdp",
    ),
    (
        "rl",
        "num_envs=6 cpu_devices=8",
        "num_envs=6 does not divide over mesh.data=2 x mesh.fsdp=2 = 4; the nearest legal are 4 or 8",
    ),
    (
        "env",
        "mesh.context=8 mesh.data=1 cpu_devices=8",
        "mesh.context=8 leaves .* a rollout has nothing along context",
    ),
    (
        "env",
        "mesh.data=8 num_envs=12 cpu_devices=8",
        "num_envs=12 does not divide over mesh.data=8; the nearest legal are 8 or 16",
    ),
    (
        "life",
        "agents=10 births=4 cpu_devices=8",
        "agents=10 does not divide over mesh.data=2 x mesh.fsdp=2 = 4; .* are 8 or 12",
    ),
    ("life", "laws.tax=1", "there is no laws.tax; legal are start, child, fee"),
    (
        "neat",
        "mesh.data=4 mesh.expert=2 cpu_devices=8",
        "mesh.expert=2 leaves .* a search has nothing along expert",
    ),
    (
        "neat",
        "population=10 cpu_devices=8",
        "population=10 does not divide over mesh.data=2 x mesh.fsdp=2 = 4; .* are 8 or 12",
    ),
    (
        "pomdp",
        "mesh.data=8 cpu_devices=8",
        "mesh.data=8 leaves .* planning has nothing along data, .* mesh.data=1: it runs on one",
    ),
    (
        "rnn",
        "mesh.data=4 mesh.stage=2 cpu_devices=8",
        "mesh.stage=2 leaves .* a recurrent network has nothing along stage",
    ),
]


@pytest.mark.parametrize(
    "name, flags, sentence", OTHERS, ids=[f"{name} {flags}" for name, flags, _ in OTHERS]
)
def test_bad_flags_of_other_experiments(main, name, flags, sentence):
    said = main(*flags.split(), of=name).sentence()
    assert re.search(sentence, said), said


@pytest.mark.parametrize(
    "content, why", [("{not yaml: [", "while parsing"), ("foo: 3", "unknown flag 'foo'")]
)
def test_a_run_folder_of_something_else(main, tmp_path, content, why):
    (tmp_path / "config.yaml").write_text(content)
    said = main("mode=sample", "run=.").sentence()
    assert "config.yaml is not the configuration of such a run" in said and why in said


@pytest.mark.parametrize(
    "content, flags, sentence",
    [
        (b"", "", "{path} holds no text"),
        (
            b"caf\xe9 " * 4000,
            "data.tokenizer=bpe:300",
            "{path} is not UTF-8 at byte 3, but perhaps Latin-1; expected UTF-8",
        ),
        (
            b"short\n" * 5,
            "data.split=tail:0.03",
            "1 of them in the validation split, but a target needs 2",
        ),
        (
            b"short\n" * 5,
            "data.split=tail:0.97",
            "0 of them in the training split, but a target needs 2",
        ),
    ],
    ids=["empty", "not UTF-8", "short validation", "short training"],
)
def test_bad_text(main, tmp_path, content, flags, sentence):
    path = tmp_path / "text.txt"
    path.write_bytes(content)
    assert sentence.format(path=path) in main(f"data.path={path}", *flags.split()).sentence()


def test_a_run_folder_that_cannot_be_made(main, tmp_path):
    (tmp_path / "file").write_text("")
    for path in ("file", "file/run"):
        said = main(f"hydra.run.dir={tmp_path / path}").sentence()
        assert f"{tmp_path / path} cannot be opened or written" in said


def test_a_run_folder_that_may_not_be_written(main, text):
    for place in (pathlib.Path(__file__), pathlib.Path(sys.prefix)):
        if os.geteuid() == 0 and not all(
            p.stat().st_mode & 0o005 == 0o005 for p in place.resolve().parents
        ):
            pytest.skip("an ordinary user may not read this checkout or its environment")
    with tempfile.TemporaryDirectory() as parent:
        folder = pathlib.Path(parent) / "run"
        folder.mkdir(mode=0o555)
        os.chmod(parent, 0o755)
        shutil.copy(text, parent)
        was = os.geteuid()
        if was == 0:
            os.seteuid(65534)  # root may write anywhere
        try:
            said = main(f"hydra.run.dir={folder}", f"data.path={parent}/{text.name}").sentence()
        finally:
            os.seteuid(was)
    assert "permission denied" in said.lower() and str(folder) in said


@pytest.mark.parametrize(
    "flags, words",
    [
        ("mesh.data=3", "needs 3 devices but 8 are here"),
        *(  # 2 s each; what they say is tested above
            pytest.param(*each, marks=pytest.mark.slow)
            for each in (
                ("model.num_layer=3", "did you mean model.num_layers?"),
                ("data.path=/nowhere", "neither a file nor a folder"),
            )
        ),
    ],
)
def test_a_real_process_says_nothing_but_the_sentence(command, flags, words):
    finished = command(*flags.split())
    assert words in finished.sentence()
    said = [
        line for line in finished.err.splitlines() if not line.startswith("starting: ")
    ]  # where it took long
    assert len(said) == 1, finished.err


def contents(folder):
    return {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}


@pytest.mark.parametrize(
    "flags, field",
    [
        ("seed=3", "seed=0 and this run has 3"),
        ("model.mlp.dim=32", "model.mlp.dim=64 and this run has 32"),
        ("optimizer.b2=0.9", "optimizer.b2=0.95 and this run has 0.9"),
        ("data.seq_len=8", "data.seq_len=16 and this run has 8"),
    ],
)
def test_the_folder_of_another_run_is_left_alone(main, copied, flags, field):
    with (copied / "metrics.jsonl").open("a") as file:  # as a killed run leaves it
        file.write('{"step": 41, "train/loss": 1.0}\n')
    before = contents(copied)
    assert (
        f"the checkpoint of step 40 was made with {field}"
        in main("hydra.run.dir=run", flags).sentence()
    )
    assert contents(copied) == before


def test_a_full_disk(command, copied):
    """A limit on the size of files stands in for it: the logs still fit, the next checkpoint does not."""
    shutil.rmtree(copied / "checkpoints" / "40")
    before, limit = contents(copied / "checkpoints" / "36"), 2**14
    assert max(map(len, before.values())) > limit
    said = command(max_file_size=limit).sentence()
    assert "the checkpoint of step 40 could not be written" in said and "file too large" in said
    assert "the last whole one is step 36 and is intact" in said
    assert contents(copied / "checkpoints" / "36") == before


@pytest.mark.skipif(
    not os.path.exists("/dev/full"), reason="this system has no file that is always full"
)
def test_a_full_disk_names_its_file(tmp_path):
    full = tmp_path / "champion.json"
    full.symlink_to("/dev/full")

    def no_room(text):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    log = JsonlWriter(tmp_path / "metrics.jsonl", None)
    log.close()
    log._file = types.SimpleNamespace(name=log._file.name, write=no_room)

    def by_hand():
        with full.open("w") as file:
            file.write("text")

    for write, name in (
        (lambda: full.write_text("text"), "champion.json"),
        (by_hand, "champion.json"),
        (lambda: log.write(1, {"loss": 2.0}), "metrics.jsonl"),
    ):
        with pytest.raises(OSError) as error:
            write()
        sentence = f"{tmp_path / name} cannot be opened or written: No space left on device."
        assert sentence_of(error.value) == sentence


@pytest.mark.slow
def test_a_disk_that_really_is_full(command):
    disk = command.cwd / "disk"
    disk.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=3m", "tmpfs", str(disk)]
    try:
        subprocess.run(mount, check=True, capture_output=True)
    except (OSError, subprocess.CalledProcessError):
        pytest.skip("this user cannot mount a small disk")
    try:
        said = command("hydra.run.dir=disk/run", "train.keep=100").sentence()
        whole = sorted(
            int(path.name)
            for path in (disk / "run" / "checkpoints").iterdir()
            if path.name.isdigit()
        )
        assert "no space left on device" in said.lower() and whole and whole[0] == 4
        assert f"step {whole[-1]} and is intact" in said
    finally:
        subprocess.run(["umount", "-l", str(disk)], check=True)
    finished = command(
        "hydra.run.dir=disk/run", "train.keep=100"
    )  # on the disk below, which has room
    assert finished.code == 0, finished
