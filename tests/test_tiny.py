"""The models that files of tests share: drawn and compiled once, changed by no test."""

import jax
import numpy as np
import pytest
import tiny
from fast import noisy_params

from jaxpar.lm import apply, loss

MODELS = {"llama": tiny.LLAMA, "gpt2": tiny.GPT2, "recurrent": tiny.RECURRENT}
each_model = pytest.mark.parametrize("model", MODELS.values(), ids=MODELS)


@each_model
def test_programs_are_the_library_s_functions(model):
    params = tiny.params_of(model)
    batch = tiny.batch_of()
    want = jax.value_and_grad(lambda p: loss(p, batch, model))(params)
    got = tiny.loss_and_gradient(params, batch, model)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6), got, want)
    np.testing.assert_allclose(tiny.loss_of(params, batch, model), want[0], rtol=1e-6)
    logits = apply(params, batch["tokens"], model)
    np.testing.assert_allclose(
        tiny.logits(params, batch["tokens"], model), logits, rtol=1e-5, atol=1e-5
    )


def test_what_a_test_does_to_its_weights_no_other_sees():
    params = tiny.params_of(tiny.LLAMA)
    want = noisy_params(tiny.LLAMA)
    jax.jit(lambda p: jax.tree.map(lambda x: 0 * x, p), donate_argnums=0)(params)
    params.clear()
    jax.tree.map(np.testing.assert_array_equal, tiny.params_of(tiny.LLAMA), want)


def test_a_model_in_double_precision_needs_it():
    with pytest.raises(AssertionError, match="x64"):
        tiny.params_of(tiny.exact(tiny.LLAMA))


def test_weights_in_double_precision(x64):
    for weight in jax.tree.leaves(tiny.params_of(tiny.exact(tiny.LLAMA))):
        assert weight.dtype == "float64"
        assert (weight != weight.astype("float32")).any()
