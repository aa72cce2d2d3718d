"""A GRU read by a support vector machine: Newton's states are the loop's, the loss is its sum over rows, it learns."""

import jax
import numpy as np
import pytest
from fast import jit
from tolerance import assert_close

from experiments.papers import gru_svm
from jaxpar.solve import Sequential

SIZE, ROWS, LENGTH = 3, 4, 9


def by_hand(params, xs, labels, penalty):
    """The machine's loss, row by row, from the cell's equations."""
    p, sigmoid, total = params["cell"], lambda x: 1 / (1 + np.exp(-x)), 0.0
    r_h, z_h, n_h = (np.asarray(p["u"])[0, :, gate] for gate in range(3))
    for x, label in zip(xs, labels, strict=True):
        h = np.zeros(SIZE)
        for event in x:
            r = sigmoid(event @ p["wr"] + p["br"] + h @ r_h)
            z = sigmoid(event @ p["wz"] + p["bz"] + h @ z_h)
            n = np.tanh(event @ p["wn"] + p["bn"] + r * (h @ n_h + p["bu"]))
            h = (1 - z) * n + z * h
        total += max(0, 1 - label * (h @ params["w"][:, 0] + params["b"][0])) ** 2
    return total / len(xs) + (params["w"] ** 2).sum() / (2 * penalty)


@pytest.mark.parametrize("head", gru_svm.HEADS)
def test_newtons_states_and_gradients_are_the_loops(head, x64):
    params = jax.tree.map(np.float64, gru_svm.init(0, SIZE, head))
    rng = np.random.default_rng(0)
    params = jax.tree.map(lambda x: x + 0.5 * rng.standard_normal(x.shape), params)
    xs, labels = gru_svm.traffic(rng, ROWS, LENGTH)
    xs = xs.astype(float)

    def both(method):
        def run(params):
            return gru_svm.loss(params, xs, labels, method, penalty=3.0)

        return jit(jax.value_and_grad(run, has_aux=True))(params), jit(
            gru_svm.states, static_argnums=2
        )(params, xs, method)

    got = both(None)
    assert_close(got, both(Sequential()), 1e-10)
    if head == "svm":
        np.testing.assert_allclose(got[0][0][0], by_hand(params, xs, labels, 3.0), rtol=1e-12)
    else:
        scores = got[0][0][1]
        np.testing.assert_allclose(
            got[0][0][0], np.log1p(np.exp(-labels * scores)).mean(), rtol=1e-12
        )


def test_traffic_is_labelled_by_its_marked_events():
    xs, labels = gru_svm.traffic(np.random.default_rng(1), 64, 12)
    assert (xs[..., 1].sum(1) == 2).all() and (xs[:, :6, 1].sum(1) == 1).all()
    np.testing.assert_array_equal(labels, np.sign((xs[..., 0] * xs[..., 1]).sum(1)))
    assert 0.3 < (labels > 0).mean() < 0.7


@pytest.mark.slow  # 30 s
def test_a_machine_learns_what_is_an_attack():
    assert gru_svm.learn("svm", 0, 300) > 0.9
