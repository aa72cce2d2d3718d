import numpy as np
import pytest
from models import assert_same, tiger

from jaxpar.pomdp import load_pomdp, save_pomdp
from jaxpar.types import UsageError

TIGER = """
# Comments end with the line.
observations: heard-left heard-right   # in any order
discount: 0.95
values: reward
states: tiger-left tiger-right
actions: listen open-left open-right

T:listen identity
T: open-left
uniform
T: 2 : *
0.5 0.5
O: *
uniform
O: listen : tiger-left 0.85 0.15
O: listen : 1 : heard-left 0.15
O: listen : 1 : heard-right .85
R: listen : * : * : * -1
R: open-left : tiger-left : * : * - 100
R: open-left : tiger-right : * : * +1e1
R: 2 : 0 : * : * 10.0
R: open-right : tiger-right : * : * -100
"""

SMALL = """discount: 0.5
values: {values}
states: a b c
actions: 2
observations: 2
{start}
T: * identity
{more}
O: * uniform
R: * : * : * : * 1.0
"""


def small(values="reward", start="", more=""):
    return load_pomdp(SMALL.format(values=values, start=start, more=more))


def test_tiger_in_many_forms_equals_the_environment():
    assert_same(load_pomdp(TIGER), tiger())


@pytest.mark.parametrize(
    "start, belief",
    [
        ("", [1 / 3] * 3),
        ("start: uniform", [1 / 3] * 3),
        ("start: b", [0, 1, 0]),
        ("start: 2", [0, 0, 1]),
        ("start:\n0.25\n0.5 0.25", [0.25, 0.5, 0.25]),
        ("start include: a 2", [0.5, 0, 0.5]),
        ("start exclude: a", [0, 0.5, 0.5]),
    ],
)
def test_starts(start, belief):
    np.testing.assert_allclose(small(start=start).start, belief, rtol=1e-6)


def test_reset_goes_back_to_the_start_and_later_lines_win():
    model = small(
        start="start include: a c", more="T: 1 : b reset\nT: 0 : a : a 0.5\nT: 0 : a : c 0.5"
    )
    np.testing.assert_allclose(model.transition[1, 1], [0.5, 0, 0.5])
    np.testing.assert_allclose(model.transition[0, 0], [0.5, 0, 0.5])
    np.testing.assert_allclose(model.transition[0, 1], [0, 1, 0])


def test_reset_without_a_start_is_uniform():
    np.testing.assert_allclose(
        small(more="T: 1 : b reset").transition[1, 1], [1 / 3] * 3, rtol=1e-6
    )


def test_matrices_are_read_row_by_row():
    model = small(more="T: 0\n0.1 0.2 0.7\n0 1 0\n0.5 0.25 0.25")
    np.testing.assert_allclose(model.transition[0], [[0.1, 0.2, 0.7], [0, 1, 0], [0.5, 0.25, 0.25]])


def test_costs_are_negative_rewards():
    np.testing.assert_array_equal(small("cost").reward, -np.asarray(small().reward))


def test_rewards_by_next_state_and_observation():
    text = SMALL.format(values="reward", start="", more="T: 1 uniform").replace(
        "O: * uniform", "O: *\n1 0\n0.25 0.75\n0 1"
    )
    by_next = load_pomdp(text + "R: 1 : a : b : * 5\nR: 1 : * : c : * 2")
    assert by_next.reward.shape == (2, 3, 3)
    np.testing.assert_allclose(by_next.reward[1], [[1, 5, 2], [1, 1, 2], [1, 1, 2]])
    np.testing.assert_allclose(by_next.expected_reward[1], [8 / 3, 4 / 3, 4 / 3], rtol=1e-6)
    by_obs = load_pomdp(text + "R: 1 : a : b\n8 4\nR: 1 : c\n1 0\n4 0\n0 9\nR: 0 : * : * : 1 3")
    np.testing.assert_allclose(
        by_obs.reward[1], [[1, 0.25 * 8 + 0.75 * 4, 1], [1, 1, 1], [1, 1, 9]]
    )
    np.testing.assert_allclose(by_obs.reward[0], np.tile([1, 0.25 + 0.75 * 3, 3], (3, 1)))


@pytest.mark.parametrize(
    "edit, message",
    [
        (("discount: 0.5", "discount: 1.5"), "line 1: the discount must be in"),
        (("discount: 0.5", "discount: half"), "line 1: expected a number, not 'half'"),
        (("values: reward", "values: money"), "line 2: values must be 'reward' or 'cost'"),
        (
            ("states: a b c", "states: a b a"),
            "line 3: states must be a number or a list of different",
        ),
        (("states: a b c", "states: a 2b c"), "line 3: '2b' cannot be a name among states"),
        (("states: a b c", "states: 0"), "line 3: states must be at least one"),
        (("actions: 2", "actions: 2\nactions: 3"), "line 5: actions is given a second time"),
        (("observations: 2\n", ""), "line 8: observations must be given before O"),
        (
            ("T: * identity", "T: 5 identity"),
            "line 7: actions are numbered 0 to 1, so there is no 5",
        ),
        (("T: * identity", "T: go identity"), "line 7: there is no 'go' among the actions"),
        (("T: * identity", "T: 0 identity"), "T: 1 : a is nowhere given"),
        (
            ("T: * identity", "T: *\n1 0 0\n0 1 0\n0 0"),
            "line 10: T with 1 indices takes 9 numbers, not 8",
        ),
        (
            ("T: * identity", "T: * identity\nT: 1 : b : c 0.25"),
            "line 8: T: 1 : b sums to 1.25, not to one",
        ),
        (("T: * identity", "T: * identity\nT: 1 : b : c -0.5"), "line 8: -0.5 is no probability"),
        (("T: * identity", "T: * : a identity"), "line 7: 'identity' is for a square matrix"),
        (
            ("T: * identity", "T: * : a : b : c 1"),
            "line 7: T takes at most 3 of actions, states, states",
        ),
        (("O: * uniform", "O: * reset"), "line 9: 'reset' is for T"),
        (("R: * : * : * : * 1.0", "R: * 1.0"), "line 10: R needs at least an action and a state"),
        (
            ("R: * : * : * : * 1.0", "R: * : * : * : * uniform"),
            "line 10: 'uniform' is for matrices and rows",
        ),
        (("R: * : * : * : * 1.0", "R: *"), "line 10: R needs"),
        (("R: * : * : * : * 1.0", "R: * : * :"), "line 11: the file ends in the middle"),
        (("R: * : * : * : * 1.0", "Q: 1"), "line 10: 'Q'|line 10: 'O'|expected"),
        (("R: * : * : * : * 1.0", "discount: 0.3"), "line 10: discount is given a second time"),
        (("T: *", "start: 0.5 0.4 0\nT: *"), "line 7: start sums to 0.9"),
        (("T: *", "start exclude: a b c\nT: *"), "line 7: start excludes every state"),
        (("T: *", "start: d\nT: *"), "line 7: there is no 'd' among the states"),
        (("T: *", "start 0\nT: *"), "line 7: expected ':' after 'start', not '0'"),
        (
            ("T: *", "start: a\nstart: uniform\nT: *"),
            "line 8: start is given a second time, after line 7",
        ),
        (
            ("O: *", "T: 0 : a reset\nstart: b\nO: *"),
            "line 10: start must come before the 'reset' of line 9",
        ),
        (
            ("R: * : * : * : * 1.0", "R: * : * : * : * 1e400"),
            "line 10: 1e400 is too large a number",
        ),
        (
            ("R: * : * : * : * 1.0", "R: * : * : * : * -1e39"),
            "line 10: -1e39 is too large a number",
        ),
    ],
)
def test_malformed_files_are_refused_by_line(edit, message):
    text = SMALL.format(values="reward", start="", more="")
    assert edit[0] in text
    with pytest.raises(UsageError, match=message):
        load_pomdp(text.replace(*edit))


def test_files_and_names_that_cannot_be(tmp_path):
    with pytest.raises(UsageError, match="nowhere.POMDP cannot be read"):
        load_pomdp(tmp_path / "nowhere.POMDP")
    with pytest.raises(UsageError, match="states cannot be written with the name 'a b'"):
        save_pomdp(tiger().replace(states=("a b", "c")), tmp_path / "model.POMDP")
