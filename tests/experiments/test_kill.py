"""A run that is killed at any moment and started again is the run that nobody touched, bit for bit."""

import json
import random
import re
import shutil
import signal
import time

import numpy as np
import pytest
from killed_at import MOMENTS

from jaxpar.io.lock import LOCK


@pytest.fixture(scope="session")
def cache(compiled):
    """The folder of compiled programs of the processes: what goes on in this one compiles next to nothing."""
    return compiled


def rows(folder):
    """Returns the lines of metrics.jsonl without the clock's numbers; all others are the text that is there."""
    lines = [
        json.loads(line, parse_float=str)
        for line in (folder / "metrics.jsonl").read_text().splitlines()
    ]
    lines = [{k: v for k, v in line.items() if not k.startswith("speed/")} for line in lines]
    return [line for line in lines if line.keys() != {"step"}]


def losses(folder):
    return [float(row["train/loss"]) for row in rows(folder) if "train/loss" in row]


def wait_for_first_step(process):
    for line in process.stderr:
        if line.startswith("training"):
            return


def half_written(folder, since):
    """Returns the checkpoints under way; what an earlier kill left is older."""
    found = []
    for path in (folder / "checkpoints").glob("*tmp*"):
        try:
            found += [path] if path.stat().st_mtime > since else []
        except FileNotFoundError:  # whole by now
            pass
    return found


PHASES = ["start-up", "step", "save", "snapshot", "before commit", "after commit", "deletion"]


def kill_once(command, folder, phase, shuffle):
    """Starts the command and kills it in `phase`; returns what it said, and whether a checkpoint was half-written."""
    began, flags = time.time(), [f"hydra.run.dir={folder}"]
    if phase in MOMENTS:
        return command.finish(
            command.start(*flags, within=[phase, str(shuffle.randint(1, 3))])
        ), False
    process = command.start(*flags)
    if phase == "start-up":
        time.sleep(shuffle.uniform(0, 6))
    else:
        wait_for_first_step(process)
    while phase == "save" and process.poll() is None and not half_written(folder, began):
        time.sleep(0.001)
    time.sleep(shuffle.uniform(0, 0.6 if phase == "step" else 0.02))
    process.kill()
    said = command.finish(process)
    return said, bool(half_written(folder, began))


def newest_whole(folder):
    return max(
        (int(path.name) for path in (folder / "checkpoints").glob("*") if path.name.isdigit()),
        default=0,
    )


def kill_and_compare(command, main, finished, num_kills, seed, phases=PHASES):
    """Kills runs until each of so many was alive when it was, and lets each come to its end.

    Every start goes on from the newest checkpoint that was finished, and refuses none.
    """
    said, reference = finished
    shuffle, killed, halves, round_ = random.Random(seed), [], 0, 0
    while len(killed) < num_kills:
        round_ += 1
        folder, alive = command.cwd / f"round-{round_}", True
        while alive and len(killed) < num_kills:
            phase, expected = phases[len(killed) % len(phases)], newest_whole(folder)
            dying, half = kill_once(command, folder, phase, shuffle)
            alive, halves = dying.code == -signal.SIGKILL, halves + half
            assert alive or dying.code == 0, dying
            killed += [phase] * alive
            resumed = re.search(r"\(resuming at step (\d+)\)", dying.out)
            assert "\nrun " not in dying.out or (int(resumed[1]) if resumed else 0) == expected
            assert newest_whole(folder) >= expected and not list(
                (folder / "checkpoints").glob("*.refused*")
            )
        last = main(f"hydra.run.dir={folder}", compiles=True)
        assert last.code == 0 and "refused" not in last.out + last.err, last
        assert rows(folder) == rows(reference)
        for line in ("validation loss", "corpus"):
            assert [x for x in last.out.splitlines() if x.startswith(line)] == [
                x for x in said.out.splitlines() if x.startswith(line)
            ]
    assert set(killed) == set(phases[:num_kills])
    return halves


def test_the_uninterrupted_run_leaves_its_files(finished):
    said, folder = finished
    assert {path.name for path in folder.iterdir()} >= {
        "config.yaml",
        "env.json",
        "metrics.jsonl",
        "checkpoints",
    }
    assert (folder / "plots" / "loss.png").read_bytes().startswith(b"\x89PNG")
    facts = json.loads((folder / "env.json").read_text())
    assert len(facts["devices"]) == 8 and facts["jax"] and facts["jaxpar"]
    train = [row["step"] for row in rows(folder) if "train/loss" in row]
    validation = {
        row["step"]: float(row["validation/loss"])
        for row in rows(folder)
        if "validation/loss" in row
    }
    assert train == list(range(1, 41)) and list(validation) == [20, 40]
    assert abs(validation[40] - losses(folder)[-1]) < 0.5  # of other words from the same four
    assert sorted(path.name for path in (folder / "checkpoints").iterdir()) == [LOCK, "36", "40"]
    for name in ("plots/loss.png", "metrics.jsonl", "checkpoints"):
        assert f"run/{name}" in said.out
    assert losses(folder)[-1] < 0.7 * losses(folder)[0]


def test_two_kills_change_no_bit(command, main, finished):
    kill_and_compare(command, main, finished, 2, seed=0, phases=["save", "deletion"])


@pytest.mark.slow
def test_fifty_kills_in_all_phases_change_no_bit(command, main, finished):
    assert kill_and_compare(command, main, finished, 50, seed=1) >= 4


def test_what_only_reads_leaves_a_damaged_checkpoint_to_the_run_and_reads_another(main, copied):
    for path in (copied / "checkpoints" / "40").rglob("*"):
        if path.parent.name == "d":
            path.write_bytes(path.read_bytes()[:-100])
    before = {path: path.read_bytes() for path in copied.rglob("*") if path.is_file()}
    said = main("mode=eval", "run=run", "checkpoint=newest")
    assert said.code == 0 and "\ncheckpoint of step 36 of run\n" in said.out, said
    assert re.search(r"^the checkpoint \S+/40 .*; step 36 is read instead$", said.out, re.MULTILINE)
    assert {path: path.read_bytes() for path in copied.rglob("*") if path.is_file()} == before


def test_the_newest_being_damaged_the_run_goes_on_from_the_one_before(main, copied, finished):
    for path in (copied / "checkpoints" / "40").rglob("*"):
        if path.parent.name == "d":
            path.write_bytes(path.read_bytes()[:-100])
    said = main("hydra.run.dir=run", compiles=True)
    assert said.code == 0 and "(resuming at step 36)" in said.out, said
    assert re.search(
        r"^the checkpoint \S+/40 .*; it was set aside as 40\.refused$", said.out, re.MULTILINE
    )
    assert rows(copied) == rows(finished[1])
    assert sorted(path.name for path in (copied / "checkpoints").iterdir()) == [
        LOCK,
        "36",
        "40",
        "40.refused",
    ]


@pytest.mark.slow
def test_preemption_in_a_save_and_again_in_the_last_save_loses_nothing(command, finished, tmp_path):
    began = time.time()
    process = command.start()
    wait_for_first_step(process)
    while not half_written(tmp_path / "run", began):
        time.sleep(0.001)
    process.send_signal(signal.SIGTERM)
    time.sleep(0.02)
    if process.poll() is None:
        process.send_signal(signal.SIGTERM)  # some clusters send it twice
    said = command.finish(process)
    assert said.code in (128 + signal.SIGTERM, -signal.SIGTERM) and "Traceback" not in said.err, (
        said
    )
    step = newest_whole(tmp_path / "run")
    assert step >= len(losses(tmp_path / "run")) > 0
    if said.code > 0:  # the second came before the run had ended
        assert f"interrupted; the checkpoint of step {step} is whole" in said.err
    again = command()
    assert again.code == 0 and f"(resuming at step {step})" in again.out, again
    assert rows(tmp_path / "run") == rows(finished[1])


def test_ctrl_c_says_how_to_go_on_and_any_mesh_does(command, main, finished, tmp_path):
    profile = "train.profile=2:4"
    process = command.start(profile)
    wait_for_first_step(process)
    while len((tmp_path / "run" / "metrics.jsonl").read_text().splitlines()) < 5:
        time.sleep(0.001)
    process.send_signal(signal.SIGINT)
    said = command.finish(process)
    assert said.code == 130 and "Traceback" not in said.err, said
    sentence = r"^interrupted; the checkpoint of step (\d+) is whole, and the same command goes on from it\.$"
    step = int(re.search(sentence, said.err, re.MULTILINE)[1])
    assert 5 <= step < 40
    assert rows(tmp_path / "run") == rows(finished[1])[: len(rows(tmp_path / "run"))]
    assert list((tmp_path / "run" / "profile").rglob("*.xplane.pb"))

    shutil.copytree(tmp_path / "run", tmp_path / "moved")
    again = main("hydra.run.dir=run", profile, compiles=True)
    assert again.code == 0 and f"(resuming at step {step})" in again.out, again
    assert rows(tmp_path / "run") == rows(finished[1])

    moved = main("hydra.run.dir=moved", "mesh.data=4", "mesh.fsdp=2", compiles=True)
    assert moved.code == 0 and "data=4 fsdp=2 on 8 cpu devices" in moved.out, moved
    assert f"(resuming at step {step})" in moved.out
    got, want = losses(tmp_path / "moved"), losses(finished[1])
    assert got[:step] == want[:step]
    np.testing.assert_allclose(
        got, want, rtol=1e-4
    )  # the order of sums differs, and Adam magnifies that


def test_a_finished_run_prints_its_result_and_how_to_go_on(main, copied, finished):
    said = main("hydra.run.dir=run", "train.steps=4")  # fewer than it has
    assert said.code == 0, said
    assert "this run is finished; extend it with train.steps=80 " in said.out
    result = re.compile(r"^validation loss ([\d.]+) nats a token after 40 steps$", re.MULTILINE)
    got, want = (float(result.search(out)[1]) for out in (said.out, finished[0].out))
    assert abs(got - want) < 2e-4  # two processes compile with different options
    assert rows(copied) == rows(finished[1])


def test_eval_and_sample_work_on_a_run(main, copied):
    said = main("mode=eval", "run=run")
    assert said.code == 0 and "checkpoint of step 40 of run" in said.out, said
    value = float(said.out.rsplit("validation/loss ", 1)[1].split()[0])
    final = [float(row["validation/loss"]) for row in rows(copied) if "validation/loss" in row][-1]
    assert abs(value - final) < 0.3  # the whole split against one batch of it
    said = main(
        "mode=sample", "run=run", "prompt=beta g", "checkpoint=newest", "sampling.temperature=0"
    )
    assert said.code == 0 and "\nbeta g" in said.out, said


def test_no_resume_makes_the_next_folder(main, finished, tmp_path):
    from experiments import lm
    from experiments.app import runner

    name = runner.folder_name(lm.compose(*main.flags))
    shutil.copytree(finished[1], tmp_path / "runs" / "lm" / name)
    for count in (2, 3):
        with pytest.raises(AssertionError, match="a training step is compiled"):
            main("resume=false")
        assert (tmp_path / "runs" / "lm" / f"{name}-{count}" / "metrics.jsonl").is_file()
    assert rows(tmp_path / "runs" / "lm" / name) == rows(finished[1])


def test_other_text_is_refused(main, text, tmp_path):
    own = tmp_path / "words.txt"  # the text of the others is shared by all workers
    own.write_bytes(text.read_bytes())
    flags = ["hydra.run.dir=run", f"data.path={own}", "train.steps=4", "train.eval_every=4"]
    assert main(*flags, compiles=True).code == 0
    own.write_bytes(text.read_bytes().replace(b"alpha", b"omega"))
    said = main(*flags).sentence()
    assert "the checkpoint of step 4 was made with corpus=" in said


def test_a_loss_that_stays_not_finite_stops_the_run(main, tmp_path):
    flags = "optimizer.learning_rate=1e30 optimizer.warmup_steps=0 optimizer.clip_norm=0 train.max_skipped=3"
    said = main(*flags.split(), "hydra.run.dir=run", compiles=True).sentence()
    assert (
        "the loss, its gradient or the new parameters were not finite for 3 steps up to step 4; lower"
        in said
    )
    assert [row.get("train/skipped_in_a_row") for row in rows(tmp_path / "run")][-1] == "3.0"
