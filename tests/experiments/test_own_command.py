"""`python -m experiments.own`: it shows its axes, trains, resumes bit for bit on its mesh, verifies; sentences."""

import contextlib
import json
import re

import jax
import numpy as np
import pytest

from experiments import own
from experiments.app import own_models
from jaxpar.io import Checkpoints

TINY = "task=maml width=4 batch_size=8 train.eval_every=2 train.save_every=2 cpu_devices=8".split()


def saved(folder, step):
    """The state of a checkpoint, on one device."""
    shapes = jax.eval_shape(own.open_own(own.compose(*TINY)).model.init, jax.random.key(0))
    device = jax.sharding.SingleDeviceSharding(jax.devices()[0])
    abstract = jax.tree.map(
        lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=device), shapes
    )
    with contextlib.closing(Checkpoints(folder / "checkpoints", read_only=True)) as checkpoints:
        return checkpoints.restore(step, abstract)


def test_it_shows_trains_and_resumes_bit_for_bit(main, tmp_path, monkeypatch):
    task = own.open_own(own.compose(*TINY))
    monkeypatch.setattr(
        own, "open_own", lambda config: task
    )  # what was compiled of its functions is compiled
    flags = [*TINY, "hydra.run.dir=whole"]
    said = main(*flags, "train.steps=4", of="own", compiles=True)
    assert said.code == 0, said
    assert re.search(r"params/Dense_1/kernel +4 x 4 +mlp=tensor, embed=fsdp +16\n", said.out), (
        said.out
    )
    assert said.out.index("bytes of parameters a device") < said.out.index(
        "after 4 steps: validation/before"
    )
    folder = tmp_path / "whole"
    assert {"config.yaml", "env.json", "metrics.jsonl", "checkpoints", "plots"} <= {
        p.name for p in folder.iterdir()
    }
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    names = {name for row in rows for name in row}
    assert {"train/loss", "train/before", "validation/loss", "validation/error"} <= names
    for steps in (2, 4):
        said = main(*TINY, "hydra.run.dir=cut", f"train.steps={steps}", of="own", compiles=True)
    assert "(resuming at step 2)" in said.out
    states = [saved(tmp_path / run, 4) for run in ("whole", "cut")]
    jax.tree.map(np.testing.assert_array_equal, *states)
    again = main(*flags, "train.steps=4", of="own")
    assert again.code == 0 and "this run is finished; extend it with train.steps=8" in again.out


def test_it_shows_axes_alone(main):
    said = main(*TINY, "mode=axes", "mesh.tensor=2", "mesh.data=4", of="own")
    assert said.code == 0 and "mlp=tensor" in said.out and "resuming" not in said.out


@pytest.mark.slow  # what it calls is tested in tests/own; 6 s
def test_it_verifies(main):
    said = main(*TINY, "mode=verify", "layouts=[fsdp2.tensor2]", of="own")
    assert said.code == 0 and "1 of 1 layouts hold" in said.out, said


@pytest.mark.parametrize(
    "flags, sentence",
    [
        ("task=chess", "task='chess' is unknown; legal are lm, maml, policy"),
        ("task=lm width=6", "width=6 must be a multiple of 4, the number of heads"),
        ("mode=play", "mode='play' is unknown; legal are train, axes, verify"),
        (
            "batch_size=6",
            "batch_size=6 does not divide over the mesh's data x fsdp = 4; the nearest legal: 4 and 8",
        ),
        ("mesh.data=4 mesh.context=2", "mesh.context=2 splits nothing of such a model"),
        ("mode=verify layouts=[]", "there is no layout to verify"),
        ("mode=verify layouts=[data16]", "16 devices|needs 16"),
    ],
)
def test_mistakes_end_in_a_sentence(main, flags, sentence):
    assert re.search(sentence, main(*TINY, *flags.split(), of="own").sentence())


def test_sinusoids_are_adapted_by_one_step_of_descent():
    task = own_models.sinusoids(
        4, 0, own.open_own(own.compose("task=maml")).model.optimizer, rate=0.1
    )
    variables = jax.jit(task.model.init_variables)(jax.random.key(0))
    batch = task.model.collate(list(task.examples[:2]))
    found = task.model.predict(variables, batch)
    params = jax.tree.map(np.float64, variables["params"])

    def forward(w, x):
        h = [x]
        for name in ("Dense_0", "Dense_1"):
            h.append(np.tanh(h[-1] @ w[name]["kernel"] + w[name]["bias"]))
        return h, h[-1] @ w["Dense_2"]["kernel"] + w["Dense_2"]["bias"]

    for i in range(2):  # back-propagation by hand
        x, y = np.float64(batch["x"][i]), np.float64(batch["y"][i])
        h, out = forward(params, x[:10])
        back, new = 2 * (out - y[:10]) / 10, {}
        for layer in (2, 1, 0):
            w = params[f"Dense_{layer}"]
            kernel, bias = h[layer].T @ back, back.sum(0)
            new[f"Dense_{layer}"] = {
                "kernel": w["kernel"] - 0.1 * kernel,
                "bias": w["bias"] - 0.1 * bias,
            }
            back = (back @ w["kernel"].T) * (1 - h[layer] ** 2) if layer else None
        np.testing.assert_allclose(found[i], forward(new, x[10:])[1], rtol=1e-4, atol=1e-5)


def test_the_policys_gradient_is_the_score_functions():
    task = own_models.balance(
        4, 0, own.open_own(own.compose("task=maml")).model.optimizer, length=12
    )
    state = task.model.init(jax.random.key(0))
    batch = task.model.collate(list(task.examples[:8]))
    loss = lambda params: task.model.valued(params, state.collections, batch, jax.random.key(0))[0]  # noqa: E731
    grads, returns = (
        jax.jit(jax.grad(loss))(state.params),
        task.model.predict({"params": state.params}, batch),
    )
    assert returns.shape == (8,) and (returns > 0).all() and (returns <= 12).all()
    assert np.abs(grads["last"]["kernel"]).max() > 0
    # A change of all scores alike changes no probability.
    np.testing.assert_allclose(grads["last"]["bias"].sum(), 0, atol=1e-6)
    np.testing.assert_allclose(grads["last"]["kernel"].sum(1), 0, atol=1e-6)
