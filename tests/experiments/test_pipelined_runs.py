"""Language models trained by pipelines: a run whose stages change from one start to the next is the run without any."""

import dataclasses
import json
import math

import jax
import numpy as np
import pytest
from tolerance import assert_close

from experiments import lm
from jaxpar.mesh import make_mesh, rules_from, use_mesh

FLAGS = (
    "model.num_layers=8", "model.embed_dim=16", "model.attention.num_heads=4",
    "model.attention.num_kv_heads=2", "model.mlp.dim=16",
    "model.dropout=0.2", "model.dtype=float32", "model.embedding.tied=true", "data.seq_len=8", "data.batch_size=32",
    "data.pack=true", "data.split=tail:0.2", "train.eval_every=0", "train.eval_batches=1", "train.save_every=1",
    "optimizer.warmup_steps=1", "optimizer.decay_steps=9", "optimizer.learning_rate=0.01", "optimizer.eps=1e-4",
)  # fmt: skip
STARTS = (
    ("mesh.stage=4", "mesh.data=2", "pipeline=zb_v", "microbatches=16"),
    ("mesh.stage=2", "mesh.data=2", "mesh.tensor=2", "pipeline=1f1b", "microbatches=16"),
    ("mesh.data=2", "train.accumulate=16"),
)


@pytest.fixture
def documents(tmp_path):
    """Lines of JSON, a short text each."""
    path, rng = tmp_path / "texts.jsonl", np.random.default_rng(0)
    lines = (" ".join(f"w{i}" for i in rng.integers(0, 9, 3)) for _ in range(300))
    path.write_text("".join(json.dumps({"text": line}) + "\n" for line in lines))
    return path


def test_checkpoints_move_between_stages(documents, tmp_path, monkeypatch, capsys):
    """Of packed documents with dropout; each step by other stages, the last by none, equal to one device's three."""
    monkeypatch.setattr(lm, "draw_sample", lambda *_: "")  # a program of its own

    def trained(steps, folder, *flags):
        config = lm.compose(*FLAGS, f"data.path={documents}", f"train.steps={steps}", *flags)
        devices = jax.devices()[: math.prod(dataclasses.astuple(config.mesh))]
        with use_mesh(make_mesh(config.mesh, devices), rules_from(layout=config.layout)):
            return lm.train(config, tmp_path / folder).state.params

    want = jax.device_get(trained(3, "alone", "mesh.data=1", "train.accumulate=16"))
    for step, flags in enumerate(STARTS):
        params = trained(step + 1, "moved", *flags)
        assert (params["layers"]["wq"].sharding.spec[0] == "stage") == ("mesh.stage" in flags[0])
    assert capsys.readouterr().out.count("resuming at step") == 2
    assert_close(jax.device_get(params), want, 1e-5)
