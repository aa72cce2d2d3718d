"""Countdown against fractions of Python, its verifier against both, and what can be made by trying everything."""

import functools
import random
from fractions import Fraction

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from fast import jit
from journey import record
from twin_countdown import CountdownTwin, reachable

import envs
from envs.puzzles.arithmetic import apply_move, legal_moves, moves
from envs.puzzles.countdown import Countdown, Reverse, Uniform, given, score, score_many, solve
from envs.puzzles.expressions import REASONS, RULES, postfix
from jaxpar.types import UsageError


def mostly_legal(key, env, state, params):
    """Now and then an action that is illegal."""
    wild_key, any_key, legal_key = jax.random.split(key, 3)
    legal = jax.random.categorical(legal_key, jnp.where(state.legal, 0.0, -jnp.inf))
    wild = jax.random.bernoulli(wild_key, 0.05)
    return jnp.where(wild, env.action_space(params).sample(any_key), legal).astype(jnp.int32)


LEVELS = (
    ((1, 3, 2), 5), ((3, 8, 3), 1), ((9, 9, 9), 2), ((99991, 99989, 99971), 5), ((5, 7, 4), 27), ((50000, 60000, 9), 6)
)  # fmt: skip
ENVS = [
    Countdown(given(*LEVELS, solvable=False), "rational", rewards="dense"),
    Countdown(Reverse(4, 1, 9, 50), "natural", False),
    Countdown(given(((50000, 60000, 7), 60007), rules="integer", use_all=False), "integer", False),
]


@functools.cache
def played(env):
    return record(env, env.default_params, 40, 20, policy=mostly_legal)


@pytest.mark.parametrize("env", ENVS, ids=lambda env: env.name)
def test_equals_fractions_step_by_step_and_text_scores_as_it_is_played(env):
    obs, states, masks, actions, moved = played(env)
    judged = {True: 0, False: 0}
    for b in range(20):
        paid = 0.0
        for t in range(40):
            if states.time[t, b] == 0 and not states.illegal[t, b]:
                numbers, target, paid = states.num[t, b], states.target[t, b], 0.0
                twin = CountdownTwin(numbers, target, env.rules, env.use_all)
                assert not twin.over()
            assert masks[t, b].tolist() == twin.legal()
            twin.step(actions[t, b])
            after = jax.tree.map(lambda leaf, t=t, b=b: leaf[t, b], moved.state)
            left = {
                i: Fraction(int(after.num[i]), int(after.den[i]))
                for i in np.flatnonzero(after.left)
            }
            assert left == {i: value for i, (value, _) in twin.items.items()}
            assert all(after.den[i] == left[i].denominator for i in left), (
                "a fraction is not reduced"
            )
            assert (after.solved, after.illegal, moved.terminated[t, b]) == (
                twin.solved,
                twin.illegal,
                twin.over(),
            )
            paid += float(moved.reward[t, b])
            if not twin.over():
                continue
            np.testing.assert_allclose(paid, -1 if twin.illegal else twin.solved, atol=1e-6)
            if not twin.illegal and (twin.solved or len(twin.items) == 1):
                verdict = score(
                    twin.made, numbers.tolist(), target, rules=env.rules, use_all=env.use_all
                )
                assert verdict.solved == twin.solved
                judged[twin.solved] += 1
    assert sum(judged.values()) > 20


def test_dense_and_sparse_returns_are_equal():
    env = ENVS[0]
    _, states, _, actions, moved = played(env)
    sparse_env = Countdown(env.generator, env.rules)
    pay = jit(jax.vmap(jax.vmap(lambda *step: sparse_env.reward(*step, env.default_params))))
    sparse, ends = np.asarray(pay(states, actions, moved.state)), np.asarray(moved.terminated)
    dense = np.asarray(moved.reward)
    assert not sparse[~ends].any() and np.count_nonzero(dense) > 2 * np.count_nonzero(sparse)
    for b in range(20):
        pieces = (
            np.diff(np.cumsum(rewards[:, b])[ends[:, b]], prepend=0) for rewards in (dense, sparse)
        )
        np.testing.assert_allclose(*pieces, atol=1e-5)


def test_nothing_wraps_and_nothing_legal_is_refused_on_ten_thousand_states():
    """All moves of random pairs of large fractions by Python's integers."""
    rng = np.random.default_rng(0)
    size = 2 ** rng.integers(1, 32, (10_000, 4)) - 1
    num = np.where(rng.random(size.shape) < 0.5, -1, 1) * rng.integers(0, size)
    size = 2 ** rng.integers(0, 32, (10_000, 4))
    den = np.clip(rng.integers(1, size + 1), 1, 2**31 - 1)
    common = np.gcd(num, den)
    num, den = (num // common).astype(np.int32), (den // common).astype(np.int32)

    @jit
    @jax.vmap
    def both(num, den):
        table = jnp.asarray(moves(2))
        results = jax.vmap(lambda move: apply_move(num, den, move, "rational"))(table)
        return legal_moves(num, den, jnp.ones(2, bool), "rational"), results

    legal, (top, low) = jax.tree.map(np.asarray, both(num[:, :2], den[:, :2]))
    for row in range(10_000):
        twin = CountdownTwin([1, 1], 1, "rational", True)
        twin.items = {i: (Fraction(int(num[row, i]), int(den[row, i])), "") for i in range(2)}
        want = [twin.value(*move) for move in twin.moves()]
        assert legal[row].tolist() == [value is not None for value in want]
        for value, *got in zip(want, top[row], low[row], strict=True):
            assert value is None or got == [value.numerator, value.denominator]
    assert 0.2 < legal.mean() < 0.8


def test_reverse_levels_have_a_solution_and_the_search_finds_just_what_can_be_made():
    env = Countdown(Reverse(4, 1, 12, 60))
    levels = jit(jax.vmap(env.generator))(jax.random.split(jax.random.key(0), 40))
    for numbers, target in zip(
        np.asarray(levels.numbers).tolist(), np.asarray(levels.target).tolist(), strict=True
    ):
        text = solve(numbers, target, rules="natural")
        assert text and score(text, numbers, target, rules="natural").solved and 1 <= target <= 60
    assert len(set(np.asarray(levels.target).tolist())) > 10
    for rules, use_all in (("rational", True), ("natural", False), ("integer", True)):
        made = reachable((2, 3, 5), rules, use_all)
        for target in range(1, 40):
            text = solve((2, 3, 5), target, rules=rules, use_all=use_all)
            assert (text is not None) == (target in made)
            assert (
                text is None or score(text, (2, 3, 5), target, rules=rules, use_all=use_all).solved
            )


def test_a_solution_replays_and_earns_one():
    env = Countdown(given(((3, 3, 8, 8), 24)), "rational")  # 8 / (3 - 8 / 3)
    params, key = env.default_params, jax.random.key(0)
    state, step = env.init(key, params), jit(lambda s, a: env.transition(key, s, a, params))
    table = moves(4).tolist()
    total = 0.0
    for move in ((2, 0, 3), (1, 2, 2), (3, 1, 3)):
        before, state = state, step(state, jnp.int32(table.index(list(move))))
        total += float(env.reward(before, 0, state, params))
    assert bool(state.solved) and total == 1 and bool(env.terminal(state, params))
    assert int(state.num[3]) == 24 and float(env.heuristic(state, params)) == 0


@pytest.mark.parametrize(
    ("text", "reason", "value"),
    [
        ("(3+5)*7-2", "solved", 54),
        (" ( 3 + 5 ) × 7 - 2 ", "solved", 54),
        ("7*(5+3)-2", "solved", 54),
        ("((3+5))*7-2", "solved", 54),
        ("3+5*7-2", "wrong value", 36),
        ("(3+5)*7", "other numbers", None),
        ("(3+5)*7-2-2", "other numbers", None),
        ("(3+5)*7-2.0", "not an expression", None),
        ("(3+5)*7-2=54", "not an expression", None),
        ("(3+5)*7--2", "not an expression", None),
        ("-2+(3+5)*7", "not an expression", None),
        ("(3+5)7-2", "not an expression", None),
        ("3 5+7-2", "not an expression", None),
        ("((3+5)*7-2", "not an expression", None),
        ("(3+5))*7-2", "not an expression", None),
        ("()3+5*7-2", "not an expression", None),
        ("__import__('os')", "not an expression", None),
        ("n+n", "not an expression", None),
        ("54", "not an expression", None),
        ("", "not an expression", None),
        ("٣+5*7-2", "not an expression", None),
        ("7/(5-3-2)", "division by zero", None),
        ("(3+5)*7**2", "not an expression", None),
        ("1" * 5000 + "+3", "other numbers", None),
    ],
)
def test_verdicts(text, reason, value):
    numbers = [3, 5, 7, 2]
    verdict = score(text, numbers, 54)
    assert verdict == (reason, value) and verdict.solved == (reason == "solved")
    texts = [text] * 5 + ["3+5+7+2"]
    assert [REASONS[code] for code in score_many(texts, numbers, 54)] == [reason] * 5 + [
        "wrong value"
    ]


def test_rules_of_values_on_the_way():
    assert score("4*(7/2)", [4, 7, 2], 14).solved
    assert score("4*(7/2)", [4, 7, 2], 14, rules="integer") == (
        "a value against the rules",
        Fraction(7, 2),
    )
    assert score("9-(2-5)", [2, 5, 9], 12, rules="integer").solved
    assert score("9-(2-5)", [2, 5, 9], 12, rules="natural") == ("a value against the rules", -3)
    assert (
        score("3+4", [3, 4, 4], 7).reason == "other numbers"
        and score("3+4", [3, 4, 4], 7, use_all=False).solved
    )
    assert score("4+4", [3, 4], 8, use_all=False).reason == "other numbers"
    assert score("23.99", [1], 24).reason == score("6*4-0", [6, 4], 24).reason.replace(
        "other numbers", REASONS[1]
    )


def test_many_are_judged_as_one_by_one():
    random.seed(0)
    texts, numbers, targets = [], [], []
    for row in range(3000):
        given_numbers = [
            random.choice((1, 2, 3, 4, 6, 999_999_999 if row % 50 == 0 else 8)) for _ in range(4)
        ]
        items = list(
            map(str, given_numbers if row % 3 else given_numbers[:3] + [random.choice((1, 5))])
        )
        while len(items) > 1 and random.random() < 0.97:
            a, b = (items.pop(random.randrange(len(items))) for _ in range(2))
            items.append(
                random.choice(("({}{}{})", "{} {} {}", "{}{}{}")).format(
                    a, random.choice("+-*/"), b
                )
            )
        text = items[-1]
        if row % 17 == 0:
            place = random.randrange(len(text))
            text = text[:place] + random.choice("()+ 7\nx²") + text[place:]
        texts.append(text)
        numbers.append(given_numbers)
        targets.append(random.choice((6, 8, 10, 24)))
    for rules in RULES:
        for use_all in (True, False):
            want = [
                score(*each, rules=rules, use_all=use_all)
                for each in zip(texts, numbers, targets, strict=True)
            ]
            got = score_many(texts, np.array(numbers), targets, rules=rules, use_all=use_all)
            assert [REASONS[code] for code in got] == [verdict.reason for verdict in want]
            assert len(set(got.tolist())) == (6 if rules == "integer" else 5)


def test_deep_and_long_answers_are_judged_in_linear_time():
    assert postfix("(" * 100_000 + "1+1" + ")" * 100_000) == ["1", "1", "+"]
    assert score("+".join(["1"] * 100_000), [1] * 100_000, 100_000).solved


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (
            lambda: given(((1, 1, 1, 1), 24)),
            "24 cannot be made from \\(1, 1, 1, 1\\) by the rational rules",
        ),
        (lambda: given(((3,), 3)), "takes two numbers or more"),
        (lambda: given(((3, 0), 3)), "from 1 to 10\\^6"),
        (lambda: Reverse(4, 1, 20, 10), "most=10 must be at least high=20"),
        (lambda: Uniform(4, 5, 4), "from low to high"),
        (lambda: Reverse(9), "num_numbers=9 must be"),
        (lambda: Countdown("uniform"), "takes a generator"),
        (lambda: Countdown(rules="real"), "rules='real' is unknown"),
        (lambda: Countdown(rewards="some"), "rewards='some' is unknown"),
        (lambda: score("1+1", [1, 1], 2, rules="real"), "rules='real' is unknown"),
        (lambda: score_many(["1+1"], np.ones((2, 2)), 2), "1 answers take numbers"),
        (lambda: score_many(["1+1"], [0, 1], 2), "numbers must be over 0"),
    ],
)
def test_bad_input_ends_in_a_sentence(make, message):
    with pytest.raises(UsageError, match=message):
        make()


def test_pictures_show_fractions():
    env, params = envs.make("Game24")
    state = env.init(jax.random.key(0), params).replace(
        num=jnp.array([-7, 1, 2, 3]), den=jnp.array([2, 1, 1, 1])
    )
    first = np.asarray(env.render(state, params))
    assert first.shape == (60, 22 * 12, 3) and first.dtype == np.uint8
    changed = np.asarray(env.render(state.replace(num=jnp.array([7, 1, 2, 3])), params)) != first
    assert set(np.argwhere(changed)[:, 0] // 12) == {0}, "the sign stands in the first row"
