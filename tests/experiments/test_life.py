"""`python -m experiments.life`: it lives, tells, films, and goes on where it was; NEAT's networks are brains, too."""

import dataclasses
import pathlib
import tarfile

import jax
import jax.numpy as jnp
import numpy as np
from bench_modules import bench_modules
from fast import jit

from experiments import life
from experiments.app import runner
from experiments.app.env.neat_brains import NUM_INPUTS, NeatBrain
from jaxpar.life import Laws, Sight
from jaxpar.life.brains import sight_of_one
from jaxpar.life.laws import FIRST_LAWS
from jaxpar.neat.genome import check_genomes

TINY = (
    "brain=neat agents=8 robots=2 size=4 lattice=2 window=3 births=4 train.chunk=2 train.save_every=4 frames=3 "
    "cpu_devices=8"
).split()


def test_it_lives_tells_and_goes_on(main, tmp_path):
    first = main(*TINY, "train.steps=4", "hydra.run.dir=run", of="life", compiles=True)
    assert first.code == 0 and "after      4 steps" in first.out, first
    assert runner.load(tmp_path / "run", life.Config).usual_laws == "lasting"
    second = main(*TINY, "train.steps=8", "hydra.run.dir=run", of="life", compiles=True)
    assert "resuming at step 4" in second.out, second
    whole = main(*TINY, "train.steps=8", "hydra.run.dir=whole", of="life", compiles=True)
    told = [
        next(line for line in said.out.splitlines() if line.startswith("after"))
        for said in (second, whole)
    ]
    assert told[0] == told[1] and "after      8 steps" in told[0]
    films = [(tmp_path / run / "plots" / "life.gif").read_bytes() for run in ("run", "whole")]
    assert films[0] == films[1] and (tmp_path / "run" / "plots" / "life.png").stat().st_size > 50
    filmed = main("mode=film", "run=run", "cpu_devices=8", "hydra.run.dir=film", of="life")
    assert (
        filmed.code == 0
        and "checkpoint of step 8 of run\nfilm           film/plots/after.gif" in filmed.out
    ), filmed
    assert (tmp_path / "film/plots/after.gif").stat().st_size > 50
    for run in ("run", "whole"):
        kept = sorted(path.name for path in (tmp_path / run / "frames").iterdir())
        assert kept == ["0000000004.npz", "0000000008.npz"], "at most three, from first to last"
        assert (tmp_path / run / "plots" / "lineages.png").stat().st_size > 50
    assert "run is of mode=film" in main(*TINY, "run=run", of="life").sentence()


def laws_in(config, folder):
    """Returns the laws that a run in `folder` has, and what identifies it."""
    resolved = life.with_usual_laws(config, folder)
    return life.make_world(resolved, unnamed="first").laws, runner.identity(resolved)


def test_a_run_keeps_the_laws_that_it_began_with(tmp_path):
    config = life.compose(*TINY)
    (tmp_path / "older").mkdir()
    (tmp_path / "older" / "config.yaml").write_text("name: life\nbrain: neat\n")
    assert laws_in(config, tmp_path / "older") == (FIRST_LAWS, runner.identity(config))
    assert "usual_laws" not in runner.identity(config)
    laws, identity = laws_in(config, tmp_path / "new")
    assert laws == Laws() and identity["usual_laws"] == "lasting"
    asked = life.compose(*TINY, "usual_laws=first", "laws.fee=3")
    assert laws_in(asked, tmp_path / "new")[0] == dataclasses.replace(FIRST_LAWS, fee=3)
    assert runner.folder_name(asked) != runner.folder_name(life.compose(*TINY, "laws.fee=3"))
    assert life.make_world(config).laws == Laws()


def test_an_older_run_is_filmed_under_its_laws(tmp_path, monkeypatch):
    with tarfile.open(pathlib.Path(__file__).parent / "older" / "runs.tar.xz") as archive:
        archive.extractall(tmp_path, filter="data")
    filmed = []
    monkeypatch.setattr(life, "_save_film", lambda config, plots, world, *_: filmed.append(world))
    life.execute(life.compose("mode=film", f"run={tmp_path / 'life'}", "cpu_devices=8"), tmp_path)
    assert filmed[0].laws == FIRST_LAWS


def test_the_measured_world_is_that_of_the_command():
    with bench_modules("life_laws") as modules:
        assert modules["life_laws"].usual_world() == life.make_world(life.compose())


def test_children_of_growing_networks_are_sound():
    brain, sight = NeatBrain(max_nodes=40), sight_of_one(3, 4, 2)
    genomes = brain.init(jax.random.key(0), sight, 6)
    children, mutate = genomes, jit(brain.mutate)
    for number in range(30):
        children = mutate(jax.random.key(number), children)
    check_genomes(brain.config, jax.device_get(children))
    assert (np.asarray(children.node_on.sum(1)) > NUM_INPUTS + 12).any()
    seen = Sight(*(jnp.ones((6, *each.shape)) for each in sight))
    outputs, carry = brain.act(children, brain.rest(6), seen)
    assert (
        outputs.shape == (6, 44)
        and (np.abs(outputs) <= 1).all()
        and not np.asarray(outputs[:, 7:39]).any()
    )
    assert carry.shape == brain.rest(6).shape
