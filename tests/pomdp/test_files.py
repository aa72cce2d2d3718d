"""POMDPX, `.policy` and `.alpha` files: what is written is read again, what is factored is multiplied out, by line."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from models import assert_same, random_model, shuttle, tiger

from jaxpar.pomdp import (
    TabularPomdp,
    load_policy,
    load_pomdp,
    load_pomdpx,
    save_policy,
    save_pomdp,
    save_pomdpx,
)
from jaxpar.pomdp.exact.solver import Exact
from jaxpar.types import UsageError


@pytest.mark.parametrize(
    "save, load", [(save_pomdp, load_pomdp), (save_pomdpx, load_pomdpx)], ids=["POMDP", "pomdpx"]
)
@pytest.mark.parametrize(
    "model", [tiger, shuttle, lambda: random_model(3, 4, 3, 5)], ids=["tiger", "shuttle", "random"]
)
@pytest.mark.parametrize("x64", [False, True])
def test_what_is_saved_is_loaded_again(tmp_path, model, x64, save, load):
    with jax.enable_x64(x64):
        model = model()
        save(model, tmp_path / "model")
        assert_same(load(tmp_path / "model"), model)
        assert model.reward.dtype == (jnp.float64 if x64 else jnp.float32)


FACTORED = """<?xml version="1.0" encoding="ISO-8859-1"?>
<pomdpx version="1.0" id="rover">
<Discount> 0.9 </Discount>
<Variable>
 <StateVar vnamePrev="place_0" vnameCurr="place_1" fullyObs="true"><NumValues>2</NumValues></StateVar>
 <StateVar vnamePrev="rock_0" vnameCurr="rock_1"><ValueEnum>good bad</ValueEnum></StateVar>
 <ObsVar vname="look"><ValueEnum>g b</ValueEnum></ObsVar>
 <ActionVar vname="do"><ValueEnum>go stay</ValueEnum></ActionVar>
 <RewardVar vname="pay"/>
</Variable>
<InitialStateBelief>
 <CondProb><Var>place_0</Var><Parent>null</Parent><Parameter type="TBL">
  <Entry><Instance>s0</Instance><ProbTable>1.0</ProbTable></Entry></Parameter></CondProb>
 <CondProb><Var>rock_0</Var><Parent>null</Parent><Parameter>
  <Entry><Instance>-</Instance><ProbTable>uniform</ProbTable></Entry></Parameter></CondProb>
</InitialStateBelief>
<StateTransitionFunction>
 <CondProb><Var>place_1</Var><Parent>do place_0</Parent><Parameter type="TBL">
  <Entry><Instance>* - -</Instance><ProbTable>identity</ProbTable></Entry>
  <Entry><Instance>go s0 -</Instance><ProbTable>0.25 0.75</ProbTable></Entry></Parameter></CondProb>
 <CondProb><Var>rock_1</Var><Parent>do rock_0</Parent><Parameter type="DD"><DAG><Node var="do">
  <Edge val="go"><SubDAG type="persistent" var="rock_1"/></Edge>
  <Edge val="stay"><Node var="rock_0">
   <Edge val="good"><SubDAG type="uniform" var="rock_1"/></Edge>
   <Edge val="bad"><SubDAG type="deterministic" var="rock_1" val="bad"/></Edge></Node></Edge>
 </Node></DAG></Parameter></CondProb>
</StateTransitionFunction>
<ObsFunction>
 <CondProb><Var>look</Var><Parent>rock_1</Parent><Parameter type="TBL">
  <Entry><Instance>- -</Instance><ProbTable>0.9 0.1 0.2 0.8</ProbTable></Entry></Parameter></CondProb>
</ObsFunction>
<RewardFunction>
 <Func><Var>pay</Var><Parent>do</Parent><Parameter type="TBL">
  <Entry><Instance>go</Instance><ValueTable>-1</ValueTable></Entry></Parameter></Func>
 <Func><Var>pay</Var><Parent>place_1 rock_0</Parent><Parameter type="TBL">
  <Entry><Instance>s1 -</Instance><ValueTable>5 -5</ValueTable></Entry></Parameter></Func>
 <Func><Var>pay</Var><Parent>look</Parent><Parameter type="DD"><DAG><Node var="look">
  <Edge val="g"><Terminal>10</Terminal></Edge></Node></DAG></Parameter></Func>
</RewardFunction>
</pomdpx>
"""


def test_factored_models_are_multiplied_out():
    model = load_pomdpx(FACTORED)
    states = [(p, r) for p in range(2) for r in range(2)]
    assert model.states == ("0,good", "0,bad", "1,good", "1,bad") and model.actions == (
        "go",
        "stay",
    )
    assert model.observations == ("g,0", "g,1", "b,0", "b,1")  # where it is seen, too
    rock = np.asarray([np.eye(2), [[0.5, 0.5], [0, 1]]])
    place = np.asarray([[[0.25, 0.75], [0, 1]], np.eye(2)])
    look = np.asarray([[0.9, 0.1], [0.2, 0.8]])
    for a in range(2):
        for i, (p, r) in enumerate(states):
            for j, (q, t) in enumerate(states):
                np.testing.assert_allclose(
                    model.transition[a, i, j], place[a, p, q] * rock[a, r, t], rtol=1e-6
                )
                want = (-1 if a == 0 else 0) + (5 if r == 0 else -5) * (q == 1) + 10 * look[t, 0]
                np.testing.assert_allclose(model.reward[a, i, j], want, rtol=1e-5)
                for k in range(4):
                    want = look[t, k // 2] * (k % 2 == q)
                    np.testing.assert_allclose(model.observation[a, j, k], want, rtol=1e-6)
    np.testing.assert_allclose(model.start, [0.5, 0.5, 0, 0])
    assert float(model.discount) == pytest.approx(0.9)


def test_a_value_persists_only_where_the_diagram_knows_it():
    """Below the edge of one value it is that value's row alone."""
    edited = FACTORED.replace(
        'type="deterministic" var="rock_1" val="bad"', 'type="persistent" var="rock_1"'
    )
    model = load_pomdpx(edited)
    stay = np.asarray(model.transition[1]).reshape(2, 2, 2, 2)[0, :, 0, :]
    np.testing.assert_allclose(stay, [[0.5, 0.5], [0, 1]], rtol=1e-6)


@pytest.mark.parametrize(
    "edit, message",
    [
        (("</pomdpx>", ""), "line 41: this is no well-formed XML"),
        (
            ("pomdpx version", "policy version"),
            "line 40: this is no well-formed XML: mismatched tag",
        ),
        (
            ("<Discount> 0.9", "<Discount> 1.9"),
            r"line 3: the discount must be in \(0, 1\], not 1.9",
        ),
        (
            ("<NumValues>2<", "<NumValues>two<"),
            "line 5: the number of values of place_0 must be a whole number",
        ),
        (
            ("<ValueEnum>good bad<", "<ValueEnum>good good<"),
            "line 6: the values of rock_0 must be different words",
        ),
        (('vname="look"', 'vname="rock_0"'), "line 7: there are two variables 'rock_0'"),
        (
            ("<Instance>go s0 -<", "<Instance>go s7 -<"),
            "line 20: place_0 has no value 's7'; it has s0 to s1",
        ),
        (
            ("<Instance>go s0 -<", "<Instance>s0 -<"),
            "line 20: 3 words are needed, for do place_0 place_1, not 2",
        ),
        (
            ("0.25 0.75", "0.25 0.5"),
            "line 18: place_1 given do=go, place_0=0 sums to 0.75, not to one",
        ),
        (("0.25 0.75", "0.25 0.5 0.25"), "line 20: 2 numbers are needed, not 3"),
        (("0.25 0.75", "0.25 x"), "line 20: expected a number, not 'x'"),
        (("<ValueTable>-1<", "<ValueTable>1e400<"), "line 34: 1e400 is too large a number"),
        (
            ("<Parent>do rock_0<", "<Parent>do rocks<"),
            "line 21: 'rocks' is no variable that can stand here",
        ),
        (
            ('<Edge val="bad">', '<Edge val="ugly">'),
            "line 25: rock_0 has no value 'ugly'; it has good bad",
        ),
        (
            ('type="persistent"', 'type="same"'),
            "line 22: type='same' is unknown; legal are uniform",
        ),
        (('type="DD"', 'type="ADD"'), "line 21: type='ADD' is unknown; legal are TBL, DD"),
        (
            ("<Var>rock_0</Var>", "<Var>place_0</Var>"),
            "line 14: <InitialStateBelief> gives place_0 a second time",
        ),
        (("<ObsFunction>", "<Observe>"), "line"),
    ],
)
def test_malformed_models_are_refused_by_line(edit, message):
    assert edit[0] in FACTORED
    with pytest.raises(UsageError, match=message) as error:
        load_pomdpx(FACTORED.replace(*edit, 1))
    assert "\n" not in str(error.value)


def test_a_model_too_large_to_be_written_out_is_refused_before_it_is():
    with pytest.raises(
        UsageError, match="line 4: 200000 states, 2 actions and 200000 observations make an array"
    ):
        load_pomdpx(FACTORED.replace("<NumValues>2<", "<NumValues>100000<", 1))
    bomb = '<?xml version="1.0"?>\n<!DOCTYPE pomdpx [<!ENTITY a "aaaa">]>\n<pomdpx>&a;</pomdpx>'
    with pytest.raises(UsageError, match="line 2: a document with entities of its own is not read"):
        load_pomdpx(bomb)
    with pytest.raises(UsageError, match="cannot be written with the name '-'"):
        save_pomdpx(tiger().replace(actions=("-", "b", "c")), "nowhere.pomdpx")
    with pytest.raises(UsageError, match="cannot be read"):
        load_pomdpx("nowhere.pomdpx")


def some_policy(model, count=4):
    alphas = jnp.asarray(
        np.random.default_rng(0).normal(size=(count, len(model.states))), model.start.dtype
    )
    value = (alphas @ model.start).max()
    actions = jnp.arange(count, dtype=jnp.int32) % len(model.actions)
    return Exact(value, value, jnp.asarray(jnp.inf, value.dtype), alphas, actions, False, 0)


@pytest.mark.parametrize("suffix", [".alpha", ".policy"])
@pytest.mark.parametrize("x64", [False, True])
def test_policies_that_are_saved_are_loaded_again(tmp_path, suffix, x64):
    with jax.enable_x64(x64):
        model = shuttle()
        policy = some_policy(model)
        save_policy(policy, tmp_path / f"model{suffix}")
        again = load_policy(tmp_path / f"model{suffix}", model)
        assert_same(again, policy)
        assert int(again.action(model.start)) == int(policy.action(model.start))


ALPHA = "0\n1.5 -2\n\n# a comment\n2\n3e0\n4\n"
POLICY = """<?xml version="1.0" encoding="ISO-8859-1"?>
<Policy version="0.1" type="value" model="Tiger.pomdp">
<AlphaVector vectorLength="2" numObsValue="1" numVectors="2">
<Vector action="0" obsValue="0">1.5 -2 </Vector>
<SparseVector action="2" obsValue="0"><Entry>1 4</Entry><Entry>0 3.0</Entry></SparseVector>
</AlphaVector></Policy>
"""


@pytest.mark.parametrize("text", [ALPHA, POLICY], ids=["alpha", "policy"])
def test_both_formats_as_others_write_them(text):
    policy = load_policy(text, tiger())
    assert policy.actions.tolist() == [0, 2] and policy.alphas.tolist() == [[1.5, -2], [3, 4]]
    assert float(policy.value) == 3.5 and np.isinf(policy.upper) and not policy.converged


@pytest.mark.parametrize(
    "text, edit, message",
    [
        (ALPHA, ("1.5 -2", "1.5 x"), "line 2: expected a number, not 'x'"),
        (ALPHA, ("1.5 -2", "1.5 nan"), "line 2: nan is no finite number"),
        (ALPHA, ("2\n3e0", "3\n3e0"), "line 5: expected an action, 0 to 2, not '3'"),
        (
            ALPHA,
            ("\n4\n", "\n"),
            "line 7: the vector after line 5 needs 2 numbers, one a state, and has 1",
        ),
        ("# empty\n\n", ("#", "#"), "line 3: there is no vector in it"),
        (POLICY, ("</Policy>", ""), "line 7: this is no well-formed XML"),
        (
            POLICY,
            ('vectorLength="2"', 'vectorLength="3"'),
            "line 3: the vectors have length 3, and the model has 2",
        ),
        (
            POLICY,
            ('numObsValue="1"', 'numObsValue="4"'),
            "line 3: the policy is of a model with fully observed",
        ),
        (POLICY, ('numVectors="2"', 'numVectors="5"'), "line 3: there should be 5 vectors"),
        (POLICY, ('action="0"', 'action="9"'), "line 4: expected an action, 0 to 2, not '9'"),
        (POLICY, ("1.5 -2", "1.5"), "line 4: a vector needs 2 numbers, one a state, and has 1"),
        (POLICY, ("1.5 -2", "1.5 inf"), "line 4: inf is no finite number"),
        (
            POLICY,
            ("<Entry>1 4<", "<Entry>7 4<"),
            "line 5: an entry is a state, 0 to 1, and a number",
        ),
        (POLICY.replace("Policy", "Plan"), ("", ""), "line 2: expected <Policy>, not <Plan>"),
    ],
)
def test_malformed_policies_are_refused_by_line(text, edit, message):
    with pytest.raises(UsageError, match=message) as error:
        load_policy(text.replace(*edit, 1), tiger())
    assert "\n" not in str(error.value)


def test_policies_need_a_known_suffix(tmp_path):
    with pytest.raises(UsageError, match=r"must end with .alpha \(pomdp-solve\) or .policy"):
        save_policy(some_policy(tiger()), tmp_path / "model.txt")
    assert isinstance(tiger(), TabularPomdp)


def test_a_byte_order_mark_is_no_part_of_a_file(tmp_path):
    """Editors of Windows put one before the text of each of the formats."""
    model = tiger()
    policy = some_policy(model)
    for name, save, load in (
        ("a.POMDP", lambda path: save_pomdp(model, path), load_pomdp),
        ("a.pomdpx", lambda path: save_pomdpx(model, path), load_pomdpx),
        ("a.alpha", lambda path: save_policy(policy, path), lambda path: load_policy(path, model)),
        ("a.policy", lambda path: save_policy(policy, path), lambda path: load_policy(path, model)),
    ):
        path = tmp_path / name
        save(path)
        plain = load(path)
        path.write_bytes(b"\xef\xbb\xbf" + path.read_bytes())
        for ours, theirs in zip(jax.tree.leaves(load(path)), jax.tree.leaves(plain), strict=True):
            np.testing.assert_array_equal(ours, theirs)


def test_other_encodings_of_a_file_are_named(tmp_path):
    path = tmp_path / "a model.POMDP"
    save_pomdp(tiger(), path)
    text = path.read_text()
    path.write_text(text, encoding="utf-16")
    with pytest.raises(UsageError, match=r"a model\.POMDP is UTF-16; expected UTF-8, convert it: "):
        load_pomdp(path)
    path.write_text("# Größe\n" + text, encoding="latin-1")
    with pytest.raises(
        UsageError, match=r"is not UTF-8 at byte 4, but perhaps Latin-1; .*-t UTF-8 '.*a model"
    ):
        load_pomdp(path)
