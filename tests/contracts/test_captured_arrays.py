"""Values of arrays that a jitted closure captures are checked as those outside of jit are.

Such arrays are concrete, and what JAX computes from them is traced. A public function that checks
values of arrays is added to `ROWS`, and nothing else: `test_every_check_has_a_row` names those
that are missing.
"""

import ast
import contextlib
import dataclasses
import functools
from collections.abc import Callable
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tiny
from fast import jit
from flat_decoding import generate
from lm_configs import with_fields

import envs
from envs.puzzles.rubiks_cube import given_cubes
from envs.puzzles.sliding_tile import given_tiles
from envs.puzzles.tiles2048 import given_boards
from jaxpar.decode import Beams, Sampling, beam_search, best_tree, stop_sequences
from jaxpar.decode import forest as tables
from jaxpar.decode.automaton import automaton_of
from jaxpar.decode.trees import expected_tokens
from jaxpar.env import check_action
from jaxpar.fields import check_fields
from jaxpar.lm import AdapterConfig, Decoder
from jaxpar.lm.adapters import num_adapted
from jaxpar.lm.text.batches import check_batch
from jaxpar.mesh import MeshSpec, make_mesh, use_mesh
from jaxpar.neat import CANONICAL
from jaxpar.nn.attention.context import context_attention
from jaxpar.nn.experts.sharded.place import count_crossings, count_transitions
from jaxpar.pomdp import (
    Episode,
    ExactBelief,
    Particles,
    TabularPomdp,
    blind,
    from_environment,
    qmdp,
    solve_exact,
    summarize,
    tabular_update,
)
from jaxpar.pomdp.model import discount_of
from jaxpar.rollout import Trajectory, check_trajectory
from jaxpar.solve import check_causal, check_structure, parallel_scan
from jaxpar.solve.systems import intervals
from jaxpar.types import UsageError


@dataclasses.dataclass(frozen=True)
class Row:
    """A function and the arrays that a closure of it captures.

    Attributes:
      function: The function; it is called with what `arguments` returns.
      arguments: Makes legal arguments.
      names: Names of the public functions that the row covers, as modules export them.
      illegal: Makes arguments that are rejected, eagerly as under jit; None where nothing is, or
        where a check reads a result, which jit leaves unknown.
      context: Devices that sequences are split over.
    """

    function: Callable
    arguments: Callable[[], tuple]
    names: tuple[str, ...]
    illegal: Callable[[], tuple] | None = None
    context: int = 1


MODEL = with_fields(
    tiny.LLAMA,
    num_layers=1,
    embed_dim=4,
    num_heads=1,
    num_kv_heads=1,
    mlp_dim=4,
    head_dim=4,
)
TIGER = from_environment(*envs.make("Tiger"))
HALF = jnp.full(2, 0.5)
PROMPT = jnp.array([[1, 2, 3]])


def continued(prompt, lengths, automaton):
    return generate(
        jax.random.key(0),
        tiny.params_of(MODEL),
        prompt,
        Decoder(MODEL),
        Sampling(max_new_tokens=2),
        prompt_lengths=lengths,
        automaton=automaton,
    )


def searched(prompt, lengths, stops):
    return beam_search(
        tiny.params_of(MODEL),
        prompt,
        Decoder(MODEL),
        Beams(2, 2),
        prompt_lengths=lengths,
        stop_tokens=stops,
    )


def two_tokens_long():
    """The automaton of texts of two tokens or more."""
    return automaton_of({0: {1: 1}, 1: {2: 2}, 2: {3: 2}}, 0, {2}, tiny.VOCAB)


def three_tokens_long():
    return automaton_of({0: {1: 1}, 1: {2: 2}, 2: {3: 3}}, 0, {3}, tiny.VOCAB)


@functools.cache
def forest():
    """Two empty segments of one row, without blocks of their own."""
    return tables.spawn(tables.empty(1, 2, 2, 2), 2)[0]


def attended(positions):
    q = jnp.ones((1, 8, 1, 4))
    return context_attention(q, q, q, positions, order="contiguous")


def trajectory(reward, action):
    flags = jnp.zeros((2, 1), bool)
    numbers = jnp.zeros((2, 1))
    return Trajectory(
        obs=numbers,
        action=action,
        reward=reward,
        terminated=flags,
        truncated=flags,
        start=flags,
        valid=~flags,
        ended=flags,
        bootstrap=numbers,
        episode_return=numbers,
        episode_length=jnp.zeros((2, 1), jnp.int32),
        extras={},
        info={},
    )


def checked_trajectory(steps):
    env, params = envs.make("CartPole-v1")
    return check_trajectory(steps, env, params)


def checked_action(action):
    env, params = envs.make("CartPole-v1")
    return check_action(env, params, action)


def checked_force(action):
    env, params = envs.make("Pendulum-v1")
    return check_action(env, params, action)


def sampled(log_weights):
    return Particles(jnp.arange(2), log_weights).sample(jax.random.key(0), 2)


def summarized(value):
    """Summary of two episodes of one step that return one."""
    fields = dict.fromkeys(Episode._fields, jnp.zeros((2, 1)))
    fields |= {"discounted_return": jnp.ones(2), "length": jnp.ones(2), "left": jnp.zeros(2)}
    return summarize(Episode(**fields | {"value": value}))


def exact_update(belief, params):
    env, _ = envs.make("Tiger")
    particles = Particles(jnp.arange(2), jnp.log(belief))
    return ExactBelief().update(jax.random.key(0), particles, 0, 0, env, params)


def slowed(h, x):
    h = jnp.tanh(0.5 * h + x)
    return h, h


def solved(init, xs):
    return parallel_scan(slowed, init, xs, on_fail="raise")


def checked_rate(rate):
    return check_fields(CANONICAL.replace(add_node=rate))


def tabular(transition, discount):
    return TabularPomdp.of(transition, TIGER.observation, TIGER.reward, discount=discount)


ROWS = {
    "intervals": Row(
        function=intervals,
        arguments=lambda: (jnp.array([0.0, 0.5, 2.0]), jnp.ones(2)),
        illegal=lambda: (jnp.array([0.0, 2.0, 0.5]), jnp.ones(2)),
        names=("intervals",),
    ),
    "parallel-scan": Row(
        function=solved,
        arguments=lambda: (jnp.zeros(2), jnp.ones((4, 2))),
        names=("parallel_scan",),
    ),
    "generate": Row(
        function=continued,
        arguments=lambda: (PROMPT, jnp.array([2]), two_tokens_long()),
        illegal=lambda: (PROMPT, jnp.array([2]), three_tokens_long()),
        names=("generate",),
    ),
    "generate-lengths": Row(
        function=continued,
        arguments=lambda: (PROMPT, jnp.array([3]), None),
        illegal=lambda: (PROMPT, jnp.array([4]), None),
        names=("generate",),
    ),
    "generate-tokens": Row(
        function=continued,
        arguments=lambda: (PROMPT, None, None),
        illegal=lambda: (PROMPT + tiny.VOCAB, None, None),
        names=("generate",),
    ),
    "beam-search": Row(
        function=searched,
        arguments=lambda: (PROMPT, jnp.array([2]), jnp.array([1])),
        illegal=lambda: (PROMPT, jnp.array([4]), jnp.array([1])),
        names=("beam_search",),
    ),
    "beam-search-stops": Row(
        function=searched,
        arguments=lambda: (PROMPT, None, jnp.array([1])),
        illegal=lambda: (PROMPT, None, jnp.array([tiny.VOCAB])),
        names=("beam_search",),
    ),
    "reserve": Row(
        function=tables.reserve,
        arguments=lambda: (forest(), jnp.array([[0]]), jnp.array([[2]]), jnp.array([1, 0])),
        illegal=lambda: (forest(), jnp.array([[0]]), jnp.array([[2]]), jnp.array([1, 1])),
        names=("reserve",),
    ),
    "arranged-view": Row(
        function=tables.arranged_view,
        arguments=lambda: (forest(), jnp.array([[[0, 1]]]), jnp.array([[1]])),
        illegal=lambda: (forest(), jnp.array([[[1, 1]]]), jnp.array([[1]])),
        names=("arranged_view",),
    ),
    "joined-view": Row(
        function=tables.joined_view,
        arguments=lambda: (forest(), jnp.array([[0, 1]]), jnp.array([1])),
        names=("joined_view",),
    ),
    "stop-sequences": Row(
        function=lambda tokens: stop_sequences([tokens]),
        arguments=lambda: (jnp.array([1, 2]),),
        illegal=lambda: (jnp.array([-1, 2]),),
        names=("stop_sequences",),
    ),
    "best-tree": Row(
        function=lambda rates: best_tree(rates, 3),
        arguments=lambda: (jnp.array([[0.6, 0.2], [0.5, 0.1]]),),
        illegal=lambda: (jnp.array([[0.6, 0.7], [0.5, 0.1]]),),
        names=("best_tree",),
    ),
    "expected-tokens": Row(
        function=lambda rates: expected_tokens(best_tree(rates, 3), rates),
        arguments=lambda: (jnp.array([[0.6, 0.2], [0.5, 0.1]]),),
        illegal=lambda: (jnp.array([[0.6, 0.7], [0.5, 0.1]]),),
        names=("expected_tokens",),
    ),
    "check-batch": Row(
        function=lambda tokens, targets: check_batch({"tokens": tokens, "targets": targets}, 4),
        arguments=lambda: (jnp.array([[1, 2]]), jnp.array([[3, -100]])),
        illegal=lambda: (jnp.array([[1, 2]]), jnp.array([[4, -100]])),
        names=("check_batch",),
    ),
    "count-crossings": Row(
        function=lambda chosen, devices: count_crossings(count_transitions(chosen, 2), devices),
        arguments=lambda: (jnp.array([[[0], [1]], [[1], [1]]]), jnp.array([[0, 1], [1, 0]])),
        names=("count_transitions", "count_crossings"),
    ),
    "from-environment": Row(
        function=lambda params: from_environment(envs.make("Tiger")[0], params),
        arguments=lambda: (jax.tree.map(jnp.asarray, envs.make("Tiger")[1]),),
        illegal=lambda: (envs.make("Tiger")[1].replace(discount=jnp.float32(2.0)),),
        names=("from_environment",),
    ),
    "check-structure": Row(
        function=lambda h, x: check_structure(slowed, h, x, "diag").proved,
        arguments=lambda: (jnp.zeros(2), jnp.ones(2)),
        names=("check_structure",),
    ),
    "context-attention": Row(
        function=attended,
        arguments=lambda: (jnp.arange(8)[None],),
        illegal=lambda: (jnp.arange(8)[None, ::-1],),
        names=("context_attention",),
        context=2,
    ),
    "check-trajectory": Row(
        function=checked_trajectory,
        arguments=lambda: (trajectory(jnp.ones((2, 1)), jnp.ones((2, 1), jnp.int32)),),
        illegal=lambda: (trajectory(jnp.ones((2, 1)), jnp.full((2, 1), 2)),),
        names=("check_trajectory",),
    ),
    "check-trajectory-rewards": Row(
        function=check_trajectory,
        arguments=lambda: (trajectory(jnp.ones((2, 1)), jnp.ones((2, 1), jnp.int32)),),
        illegal=lambda: (trajectory(jnp.full((2, 1), jnp.nan), jnp.ones((2, 1), jnp.int32)),),
        names=("check_trajectory",),
    ),
    "check-action": Row(
        function=checked_action,
        arguments=lambda: (jnp.int32(1),),
        illegal=lambda: (jnp.int32(2),),
        names=("check_action",),
    ),
    "check-action-box": Row(
        function=checked_force,
        arguments=lambda: (jnp.ones(1),),
        illegal=lambda: (jnp.full(1, 3.0),),
        names=("check_action",),
    ),
    "tabular-update": Row(
        function=tabular_update,
        arguments=lambda: (TIGER, HALF, jnp.int32(0), jnp.int32(1)),
        illegal=lambda: (TIGER, HALF, jnp.int32(0), jnp.int32(2)),
        names=("tabular_update",),
    ),
    "tabular-model": Row(
        function=tabular,
        arguments=lambda: (TIGER.transition, jnp.float32(0.5)),
        illegal=lambda: (TIGER.transition, jnp.float32(1.5)),
        names=("TabularPomdp",),
    ),
    "discount": Row(
        function=discount_of,
        arguments=lambda: (None, jnp.array([0.5, 1.0])),
        illegal=lambda: (None, jnp.array([0.5, 1.5])),
        names=("discount_of",),
    ),
    "qmdp": Row(
        function=qmdp,
        arguments=lambda: (TIGER,),
        illegal=lambda: (TIGER.replace(discount=jnp.ones(())),),
        names=("qmdp", "fib"),
    ),
    "blind": Row(
        function=blind,
        arguments=lambda: (TIGER,),
        illegal=lambda: (TIGER.replace(discount=jnp.ones(())),),
        names=("blind",),
    ),
    "solve-exact": Row(
        function=lambda model: solve_exact(model, horizon=2),
        arguments=lambda: (TIGER.replace(reward=jnp.stack([TIGER.reward] * 2, -1)),),
        names=("solve_exact",),
    ),
    "particles": Row(
        function=sampled,
        arguments=lambda: (jnp.log(HALF),),
        illegal=lambda: (jnp.full(2, -jnp.inf),),
        names=("Particles",),
    ),
    "exact-belief": Row(
        function=exact_update,
        arguments=lambda: (HALF, envs.make("Tiger")[1]),
        names=("ExactBelief",),
    ),
    "summarize": Row(
        function=summarized,
        arguments=lambda: (jnp.ones((2, 1)),),
        names=("summarize",),
    ),
    "check-fields": Row(
        function=checked_rate,
        arguments=lambda: (jnp.array([0.1, 0.2]),),
        illegal=lambda: (jnp.array([0.1, 1.2]),),
        names=("check_fields",),
    ),
    "given-tiles": Row(
        function=given_tiles,
        arguments=lambda: (jnp.array([[1, 2], [0, 3]]),),
        illegal=lambda: (jnp.array([[2, 1], [3, 0]]),),
        names=("given_tiles",),
    ),
    "given-boards": Row(
        function=given_boards,
        arguments=lambda: (jnp.array([[0, 2], [2, 4]]),),
        illegal=lambda: (jnp.array([[2, 4], [4, 2]]),),
        names=("given_boards",),
    ),
    "given-cubes": Row(
        function=given_cubes,
        arguments=lambda: ("R U",),
        illegal=lambda: ("R R'",),
        names=("given_cubes",),
    ),
    "num-adapted": Row(
        function=lambda: num_adapted(MODEL, AdapterConfig("lora")),
        arguments=tuple,
        names=("num_adapted",),
    ),
}
each_row = pytest.mark.parametrize("name", ROWS)


def mesh_of(row):
    """The mesh that a row's program runs on, entered outside of jit."""
    if row.context == 1:
        return contextlib.nullcontext()
    return use_mesh(make_mesh(MeshSpec(context=row.context), jax.devices()[: row.context]))


def captured(function, arguments):
    """The result of a jitted closure of `arguments`; what is no array bypasses the program."""
    leaves = []
    structure = []

    def closure():
        found, tree = jax.tree.flatten(function(*arguments))
        leaves.extend(found)
        structure.append(tree)
        return {number: leaf for number, leaf in enumerate(found) if is_array(leaf)}

    for number, leaf in jit(closure)().items():
        leaves[number] = leaf
    return structure[0].unflatten(leaves)


def is_array(leaf):
    return isinstance(leaf, jax.Array | np.ndarray | np.generic)


@each_row
def test_a_captured_array_is_checked_as_outside(name):
    row = ROWS[name]
    with mesh_of(row):
        want = row.function(*row.arguments())
        got = captured(row.function, row.arguments())
    assert jax.tree.structure(got) == jax.tree.structure(want)
    for ours, theirs in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        if isinstance(theirs, jax.Array | np.ndarray | float):
            np.testing.assert_allclose(ours, theirs, 1e-5, 1e-6)
        else:
            assert ours == theirs


@pytest.mark.parametrize("name", [name for name, row in ROWS.items() if row.illegal])
def test_an_illegal_captured_array_is_rejected_as_outside(name):
    row = ROWS[name]
    with mesh_of(row), pytest.raises(UsageError) as outside:
        row.function(*row.illegal())
    with mesh_of(row), pytest.raises(UsageError) as inside:
        captured(row.function, row.illegal())
    assert str(inside.value) == str(outside.value)


def test_a_check_that_must_run_outside_says_so():
    with pytest.raises(UsageError, match="outside"):
        jit(lambda: check_causal(lambda x: jnp.cumsum(x) - x, HALF))()
    with pytest.raises(UsageError, match="outside"):
        jit(lambda: solve_exact(TIGER))()
    steps = trajectory(jnp.ones((2, 1)), jnp.ones((2, 1), jnp.int32))
    with pytest.raises(UsageError, match="outside"):
        jit(checked_trajectory)(steps)


# Public functions that check values and have no row, each with its reason.
OUTSIDE = {
    "check_causal": "must run outside of jit: test_a_check_that_must_run_outside_says_so",
}
ROOT = Path(__file__).parents[2]


@functools.cache
def modules():
    """Parsed files of the library and its environments, by module."""
    parsed = {}
    for path in sorted([*ROOT.glob("jaxpar/**/*.py"), *ROOT.glob("envs/**/*.py")]):
        name = path.relative_to(ROOT).with_suffix("").as_posix().replace("/", ".")
        parsed[name.removesuffix(".__init__")] = ast.parse(path.read_text())
    return parsed


def sources(module):
    """name -> the module and the name that it is imported from; the library imports absolutely."""
    found = {}
    for node in ast.walk(modules()[module]):
        if isinstance(node, ast.ImportFrom) and not node.level:
            for alias in node.names:
                found[alias.asname or alias.name] = (node.module, alias.name)
    return found


def callers():
    """(module, name) -> the functions and classes that name it, whatever it is imported through."""
    taken = {module: sources(module) for module in modules()}
    found = {}
    for module, tree in modules().items():
        for node in tree.body:
            if not isinstance(node, ast.FunctionDef | ast.ClassDef):
                continue
            for word in {each.id for each in ast.walk(node) if isinstance(each, ast.Name)}:
                source = (module, word)
                while source[1] in taken.get(source[0], {}):
                    source = taken[source[0]][source[1]]
                found.setdefault(source, set()).add((module, node.name))
    return found


def exported(module):
    """Names in the module's `__all__`."""
    for node in modules()[module].body:
        if isinstance(node, ast.Assign) and getattr(node.targets[0], "id", "") == "__all__":
            return ast.literal_eval(node.value)
    return []


def public_checks():
    """Names of the public functions nearest to a call of `concrete_values`."""
    by_callee = callers()
    seen = set()
    public = set()
    todo = [("jaxpar.types", "concrete_values")]
    while todo:
        for caller in by_callee.get(todo.pop(), set()) - seen:
            seen.add(caller)
            if caller[1] in exported(caller[0]):
                public.add(caller[1])
            else:
                todo.append(caller)
    return public


def test_every_check_has_a_row():
    checks = public_checks()
    assert {"intervals", "generate", "tabular_update"} <= checks
    covered = {name for row in ROWS.values() for name in row.names}
    assert not checks - covered - OUTSIDE.keys(), "add rows for these, or say in OUTSIDE why not"
    assert not covered & OUTSIDE.keys() and OUTSIDE.keys() <= checks
