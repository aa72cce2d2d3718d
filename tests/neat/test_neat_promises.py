"""What must hold whatever one does: breaks, padding, meshes of one device, files that others wrote or broke."""

import copy
import dataclasses
import inspect
import json
import pathlib
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from fast import jit
from hypothesis import given, settings
from hypothesis import strategies as st
from plain_neat import random_genomes

from envs.classic.double_pole import DoublePole
from jaxpar.io import Checkpoints, RunMismatchError
from jaxpar.io.reading import flatten, nest
from jaxpar.loop import Hooks, resume, run
from jaxpar.mesh import MeshSpec, make_mesh, use_mesh
from jaxpar.neat import (
    CANONICAL,
    FAST,
    RENAMED,
    Neat,
    NeatConfig,
    PlayOptions,
    Table,
    check_genomes,
    express,
    from_json,
    play,
    to_json,
    xor,
)
from jaxpar.neat.distance import centres_of, distances
from jaxpar.types import UsageError

GROWING = FAST.replace(add_node=0.4, add_conn=0.4, threshold=1.0)
SMALL = NeatConfig(3, 1, population=12, max_nodes=10, max_conns=16, max_species=4, rates=GROWING)


def test_a_break_at_any_generation_changes_nothing(tmp_path):
    neat = Neat(SMALL, Table(tolerance=0.0))
    step = jit(
        lambda number, state: neat.step(jax.random.fold_in(jax.random.key(1), number), state, xor())
    )
    states = [jax.jit(neat.init)(jax.random.key(0), None)]
    for number in range(6):
        states.append(step(number, states[-1])[0])
    assert states[-1].counters.node > SMALL.num_io and states[-1].species.next_number > 1
    for pause in (0, 1, 4):
        checkpoints = Checkpoints(tmp_path / str(pause))
        checkpoints.save(pause, states[pause], {}, {})
        checkpoints.wait()
        state = checkpoints.restore(pause, jax.eval_shape(lambda pause=pause: states[pause]))
        checkpoints.close()
        for number in range(pause, 6):
            state, _ = step(number, state)
        jax.tree.map(np.testing.assert_array_equal, state, states[-1])


@pytest.mark.slow
def test_a_mesh_of_one_device_is_none():
    neat = Neat(SMALL, Table(tolerance=0.0))
    rows = jax.tree.map(lambda x: jnp.broadcast_to(x, (20, *x.shape)), xor())

    def trajectory():
        state = jax.jit(neat.init)(jax.random.key(0), None)
        return jax.device_get(jax.jit(lambda s: run(neat, jax.random.key(1), s, rows, 20))(state))

    want = trajectory()
    with use_mesh(make_mesh(MeshSpec(data=1), devices=jax.devices()[:1])):
        jax.tree.map(np.testing.assert_array_equal, trajectory(), want)


@pytest.mark.parametrize("mode, rates", [("fast", FAST), ("canonical", CANONICAL)])
def test_room_changes_no_distance(mode, rates):
    small = NeatConfig(2, 2, max_nodes=9, max_conns=14, mode=mode)
    large = dataclasses.replace(small, max_nodes=40, max_conns=80)
    genomes = random_genomes(np.random.default_rng(0), small, 16)
    padded = jax.tree.map(
        lambda x: np.pad(x, ((0, 0), (0, (40 if x.shape[1] == 9 else 80) - x.shape[1]))), genomes
    )
    check_genomes(large, padded)
    far = [
        jit(lambda g, config=config: distances(config, rates, g, centres_of(g.rows(slice(0, 5)))))(
            g
        )
        for config, g in ((small, genomes), (large, padded))
    ]
    np.testing.assert_allclose(*far, rtol=1e-6)
    np.testing.assert_array_equal(
        *(express(c, g).sweeps for c, g in ((small, genomes), (large, padded)))
    )


CONFIG = NeatConfig(2, 1, max_nodes=6, max_conns=8, kind="ctrnn")
DOCUMENT = json.loads(
    to_json(CONFIG, random_genomes(np.random.default_rng(1), CONFIG, 1, hidden=2, conns=6))
)
JUNK = st.one_of(
    st.none(), st.booleans(), st.integers(-3, 9), st.floats(), st.text(max_size=3), st.just([]), st.just({}),
    st.just([1]), st.just({"name": "sigmoid"}), st.just({"name": []}),
)  # fmt: skip


def places(tree, path=()):
    """Every path into a document."""
    inside = (
        tree.items()
        if isinstance(tree, dict)
        else enumerate(tree)
        if isinstance(tree, list)
        else ()
    )
    for key, value in inside:
        yield (*path, key)
        yield from places(value, (*path, key))


@settings(max_examples=300, deadline=None)
@given(where=st.sampled_from(sorted(places(DOCUMENT), key=str)), junk=JUNK, drop=st.booleans())
def test_a_broken_file_is_read_or_refused_in_a_sentence(where, junk, drop):
    document = copy.deepcopy(DOCUMENT)
    parent = document
    for key in where[:-1]:
        parent = parent[key]
    if drop:
        del parent[where[-1]]
    else:
        parent[where[-1]] = junk
    try:
        config, genomes = from_json(json.dumps(document))
    except UsageError as error:
        assert str(error).endswith(".") and "\n" not in str(error)
        return
    check_genomes(config, genomes)
    numbers = genomes.weight, genomes.bias, genomes.response, genomes.time_constant
    assert (
        all(np.isfinite(x).all() for x in numbers)
        and (genomes.time_constant[genomes.node_on][2:] > 0).all()
    )
    assert from_json(to_json(config, genomes))[0].num_io == config.num_io


@pytest.mark.parametrize(
    "path, value, words",
    [
        (("connections", 0, "weight"), float("nan"), "weight nan"),
        (("connections", 0, "weight"), "1.0", "weight '1.0'"),
        (("nodes", 0, "bias"), None, "bias None"),
        (("nodes", 0, "time_constant"), 0.0, "time_constant 0.0"),
        (("topology", "input_keys"), [-1, -1], "twice"),
        (("topology", "output_keys"), [], "num_outputs=0"),
        (("nodes", 1, "id"), 0, "twice"),
        (("connections", 0, "to"), -1, "into an input"),
    ],
)
def test_what_is_wrong_with_a_file_is_said(path, value, words):
    document = copy.deepcopy(DOCUMENT)
    parent = document
    for key in path[:-1]:
        parent = parent[key]
    parent[path[-1]] = value
    with pytest.raises(UsageError, match=words):
        from_json(json.dumps(document))


@pytest.mark.parametrize(
    "fields, words",
    [
        ({"population": 2.5}, "population=2.5 must be a whole number"),
        ({"max_nodes": 3}, "max_nodes=3 is too small"),
        ({"time_step": 0.0}, "time_step=0.0"),
        (
            {"rates": FAST.replace(threshold=float("nan"))},
            "rates.threshold=nan must be a finite number",
        ),
        ({"rates": FAST.replace(add_node=np.ones(2))}, "state.rates"),
        ({"activations": ["tanh", "blub"]}, "'blub' is no activation"),
    ],
)
def test_what_no_search_can_be_is_refused(fields, words):
    with pytest.raises(UsageError, match=words):
        NeatConfig(3, 1, **fields)


def test_lists_are_tuples():
    config = NeatConfig(3, 1, activations=["tanh"], evolved=["bias"], widths=[16, 50])
    assert hash(config) == hash(
        NeatConfig(3, 1, activations=("tanh",), evolved=("bias",), widths=(16, 50))
    )


def test_what_does_not_fit_together_is_refused():
    neat = Neat(SMALL, Table())
    one = jax.eval_shape(lambda: neat.init(jax.random.key(0), None))
    other = jax.eval_shape(
        lambda: Neat(dataclasses.replace(SMALL, population=8)).init(jax.random.key(0), None)
    )
    with pytest.raises(UsageError, match=r"of another configuration.*\(8, 16\)"):
        neat.tell(jax.random.key(0), other, jnp.zeros(12))
    with (
        jax.enable_x64(True),
        pytest.raises(UsageError, match="are float32, and JAX makes float64 now; legal is"),
    ):
        neat.tell(jax.random.key(0), one, jnp.zeros(12))
    networks = express(SMALL, random_genomes(np.random.default_rng(0), SMALL, 2))
    with pytest.raises(UsageError, match=r"targets have the shape \(4, 2\); legal is \(4, 1\)"):
        Table()(jax.random.key(0), networks, {**xor(), "targets": jnp.zeros((4, 2))})
    env = DoublePole()
    with pytest.raises(UsageError, match="3 inputs and 1 outputs; the environment takes 7 and 1"):
        play(jax.random.key(0), networks, env, env.default_params, 1, 2, 10)
    seven = express(NeatConfig(7, 1), random_genomes(np.random.default_rng(0), NeatConfig(7, 1), 2))
    sizes = {"episodes": 1, "num_envs": 2, "max_steps": 10}
    for name, value, words in (
        *((name, 0, f"{name}=0") for name in sizes),
        ("options", PlayOptions(output_range=(1.0, 0.0)), "must ascend"),
    ):
        with pytest.raises(UsageError, match=words):
            play(jax.random.key(0), seven, env, env.default_params, **(sizes | {name: value}))
    with pytest.raises(UsageError, match="there is no genome 2; there are 2"):
        to_json(SMALL, random_genomes(np.random.default_rng(0), SMALL, 2), 2)


def test_a_mode_is_compared_with_a_string_nowhere():
    """The operators read its rules, which are hashable and so static."""
    files = pathlib.Path(inspect.getfile(Neat)).parent.glob("*.py")
    compares = re.compile(r"\.mode\s*(==|!=|in\b)")
    assert [path.name for path in files if compares.search(path.read_text())] == []
    rules = {mode: NeatConfig(3, 1, mode=mode).rules for mode in ("fast", "canonical")}
    assert len(set(rules.values())) == 2
    assert [found.numbers_per_conn for found in rules.values()] == [4, 6]
    assert NeatConfig(3, 1).evolved == rules["fast"].evolved == ("bias",)


def test_a_state_with_marks_for_innovations_is_restored(tmp_path):
    """As it was saved before connections had an `innovation`."""
    neat, checkpoints = Neat(NeatConfig(3, 1, 4, 6, 8, 2), Table()), Checkpoints(tmp_path)
    state = jit(lambda key: neat.init(key, None))(jax.random.key(0))
    then = {path.replace("innovation", "mark"): leaf for path, leaf in flatten(state).items()}
    assert {"genomes/mark", "champion/mark", "counters/mark"} <= set(then)
    checkpoints.save(2, nest(then), {}, {})
    checkpoints.wait()
    with pytest.raises(RunMismatchError, match="genomes/innovation is absent there"):
        resume(neat, Hooks(checkpoints=checkpoints))
    step, restored = resume(neat, Hooks(checkpoints=checkpoints, renamed=RENAMED))
    assert step == 2 and jax.tree.structure(restored) == jax.tree.structure(state)
    jax.tree.map(np.testing.assert_array_equal, restored, state)
    checkpoints.close()
