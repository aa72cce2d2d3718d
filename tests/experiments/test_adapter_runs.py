"""adapter=lora: a run that begins with another run's model, resumes, is exported both ways and continued."""

import jax
import numpy as np
import pytest

from experiments import estimate, generate, lm
from experiments.app.runner import folder_name
from jaxpar import aot
from jaxpar.lm import from_hf, from_peft, merge_adapters, with_adapters
from jaxpar.mesh import MeshSpec, make_mesh, use_mesh
from jaxpar.nn.weights.narrow import Quantised
from jaxpar.types import UsageError

SIZES = (
    "model.num_layers=1", "model.embed_dim=16", "model.attention.num_heads=2",
    "model.attention.num_kv_heads=2", "model.mlp.dim=16",
    "data.seq_len=8", "data.batch_size=8", "data.split=tail:0.2", "train.eval_every=0", "train.eval_batches=1",
    "train.save_every=1", "sampling.max_new_tokens=2", "optimizer.learning_rate=0.01",
)  # fmt: skip
LORA = (
    "adapter=lora",
    "adapter.target=[w?,w_up]",
    "adapter.rank=2",
    "adapter.base=int8",
    "adapter.dropout=0.1",
)


def compose(tmp_path, *flags):
    text = tmp_path / "text.txt"
    if not text.exists():
        text.write_text(" ".join(f"w{i}" for i in np.random.default_rng(0).integers(0, 99, 600)))
    return lm.compose(*SIZES, f"data.path={text}", *flags)


def same(a, b):
    jax.tree.map(np.testing.assert_array_equal, a, b)


@pytest.mark.slow  # 10 s
def test_a_run_of_adapters_begins_with_a_run_resumes_and_is_exported(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(lm, "draw_sample", lambda *_: "")  # a program of its own
    flags = (f"init=run:{tmp_path / 'base'}", *LORA)
    with use_mesh(make_mesh(MeshSpec(), jax.devices()[:1])):
        lm.train(compose(tmp_path, "train.steps=1"), tmp_path / "base")
        first = lm.train(compose(tmp_path, *flags, "train.steps=1"), tmp_path / "run").state
        assert "320 of them in lora are trained beside a base in int8" in capsys.readouterr().out
        last = lm.train(compose(tmp_path, *flags, "train.steps=2"), tmp_path / "run").state
        assert "resuming at step 1" in capsys.readouterr().out
        assert isinstance(last.base["layers"]["w_down"], Quantised)
        same(last.base, first.base)
        export = ("mode=export", f"run={tmp_path / 'run'}", "checkpoint=newest")
        lm.export(lm.compose(*export, f"out={tmp_path / 'peft'}"), tmp_path)
        lm.export(lm.compose(*export, f"out={tmp_path / 'hf'}", "adapter.merge=true"), tmp_path)
        model, merged = from_hf(tmp_path / "hf", dtype="float32")
        same(merged, merge_adapters(last.params))
        found, adapters = from_peft(tmp_path / "peft", model)
        assert (found.rank, found.alpha, found.dropout) == (2, 16.0, 0.1)
        same(adapters, last.adapters)
        # Both in experiments.generate: the run with its adapter, and PEFT's files beside the base.
        config = generate.Config(run=str(tmp_path / "run"), checkpoint="newest")
        kept = generate.load(config.run, config, "run")
        same(merge_adapters(kept.params), merge_adapters(last.params))
        base = generate.load(str(tmp_path / "base"), generate.Config(checkpoint="newest"), "run")
        got = generate.adapted(base, str(tmp_path / "peft"))
        same(got.params, with_adapters(base.params, adapters, found.scale))


@pytest.mark.slow  # 8 s
def test_saved_modules_and_an_adapted_embedding_are_exported(tmp_path, monkeypatch):
    """The running average too, with other changes."""
    monkeypatch.setattr(lm, "draw_sample", lambda *_: "")  # a program of its own
    adapter = (
        f"init=run:{tmp_path / 'base'}", "adapter=lora", "adapter.target=[wq,embedding]",
        "adapter.rank=2", "adapter.modules_to_save=[*norm*,head]", "tuning.ema=0.5", "train.steps=2",
    )  # fmt: skip
    export = ("mode=export", f"run={tmp_path / 'run'}", "checkpoint=newest")
    with use_mesh(make_mesh(MeshSpec(), jax.devices()[:1])):
        base = lm.train(compose(tmp_path, "train.steps=1"), tmp_path / "base").state
        last = lm.train(compose(tmp_path, *adapter), tmp_path / "run").state
        model = lm.compose(*SIZES).model
        for name, flags, want in (
            ("newest", (), last.adapters),
            ("average", ("use_ema=true",), last.average),
        ):
            lm.export(lm.compose(*export, *flags, f"out={tmp_path / name}"), tmp_path)
            found, adapters = from_peft(tmp_path / name, model)
            same(adapters, want)
            assert found.target == ("*", "embedding") and "head" in found.modules_to_save
        got = with_adapters(base.params, adapters, found.scale)
        same(merge_adapters(got), merge_adapters(last.averaged))


def test_an_adapter_is_part_of_what_a_run_is():
    plain = folder_name(lm.compose())
    names = {
        folder_name(lm.compose(*flags))
        for flags in ((), ("adapter=lora",), ("adapter=dora",), ("adapter=rslora",))
    }
    assert len(names) == 4 and folder_name(lm.compose("adapter.merge=true")) == plain
    assert lm.compose("adapter=lora", "adapter.target=[wq]").adapter.target == ("wq",)


@pytest.mark.parametrize(
    ("flags", "sentence"),
    [
        (("adapter=lora", "adapter.target=[q_proj]"), "adapter.target=q_proj matches no product"),
        (("adapter=lora", "optimizer.name=muon"), "muon is not for adapters"),
    ],
)
def test_what_cannot_be_adapted_is_refused(flags, sentence):
    with use_mesh(make_mesh(MeshSpec(data=8))), pytest.raises(UsageError, match=sentence):
        lm.make_trainer(lm.compose(*flags))


def test_an_estimate_counts_what_is_trained():
    """Of AdamW two moments an adapter's number, of a base in nf4 half a byte and a scale for 64 numbers."""

    def held(*flags):
        config = estimate.compose(
            "preset=llama_1b", "mesh.data=1", "data.batch_size=4", "data.seq_len=128", *flags
        )
        with jax.default_device(jax.devices()[0]):
            rows = aot.placements(estimate.make_job(config, jax.devices()[:1]))
        return {
            group: sum(row.bytes for row in rows if row.group == group)
            for group in ("parameters", "optimizer")
        }

    full, small = held(), held("adapter=lora", "adapter.base=nf4")
    layers, rest = 973_078_528, 262_735_872  # products, and embedding with norms
    own = 11_272_192 // 2
    assert full["optimizer"] == pytest.approx(8 * (layers + rest), rel=1e-3)
    assert small["optimizer"] == pytest.approx(8 * own, rel=1e-3)
    assert small["parameters"] == pytest.approx(
        (1 / 2 + 1 / 16) * layers + 2 * rest + 4 * own, rel=1e-3
    )
