"""Twenty steps of fine-tuning on packed rows of chats against transformers, PEFT and torch's AdamW.

Both sides begin with one folder, and read one run's rows: transformers gets positions, and segments
as a mask that is added to scores. Losses agree to 1e-6, in float32 on both sides.
"""

import json

import jax
import numpy as np
import of_peft
import pytest
from fast import OPTIMISED

from jaxpar.lm import AdapterConfig, OptimizerConfig, Trainer, from_hf, to_peft
from jaxpar.lm.text.corpus import DataConfig
from jaxpar.lm.text.mixture import open_with_layout, training_batches
from jaxpar.optim.schedules import learning_rate

NUM_STEPS = 20
CLIP_NORM = 1.45
OPTIMIZER = OptimizerConfig(
    learning_rate=2e-3, warmup_steps=4, weight_decay=0.1, clip_norm=CLIP_NORM
)
ADAPTERS = {
    "full": AdapterConfig(),
    "lora": AdapterConfig("lora", rank=4, alpha=8.0),
    "dora": AdapterConfig("lora", rank=4, alpha=8.0, target=("w[qv]", "w_down"), dora=True),
    "saved": AdapterConfig(
        "lora",
        rank=4,
        alpha=8.0,
        target=("wq", "w_down"),
        modules_to_save=("embedding", "head", "*norm*"),
    ),
}


@pytest.fixture(scope="module")
def rows(tmp_path_factory):
    """Batches by step, of chats that share rows."""
    folder = tmp_path_factory.mktemp("chats")
    rng = np.random.default_rng(0)
    words = "the cat sat on a mat . what is it ? yes no dog house tree".split()

    def text():
        return " ".join(rng.choice(words, rng.integers(1, 8)))

    turns = [("user", "assistant") * int(rng.integers(1, 3)) for _ in range(200)]
    chats = [{"messages": [{"role": role, "content": text()} for role in each]} for each in turns]
    (folder / "chats.jsonl").write_text("".join(json.dumps(chat) + "\n" for chat in chats))
    config = DataConfig(str(folder / "chats.jsonl"), seq_len=256, batch_size=2, layout="packed")
    corpora, config = open_with_layout(config, folder / "cache")
    batches = training_batches(corpora, config, 0)
    some = batches(0)
    assert some["segments"].max() > 1 and 0 < some["weights"].mean() < 0.9
    # Rotary angles see differences alone, so no loss would notice positions that go on.
    for segments, positions in zip(some["segments"], some["positions"], strict=True):
        counts = np.unique(segments, return_counts=True)[1]
        assert positions.tolist() == np.concatenate([np.arange(count) for count in counts]).tolist()
    return batches


@pytest.mark.slow  # the extra `peers`: its absence fails
@pytest.mark.filterwarnings(
    "ignore::DeprecationWarning", "ignore::FutureWarning", "ignore::UserWarning"
)
@pytest.mark.parametrize("name", ADAPTERS)
def test_losses_of_twenty_steps_are_those_of_peers(name, rows, tmp_path):
    adapter = ADAPTERS[name]
    of_peft.save_llama(tmp_path / "base")
    model, params = from_hf(tmp_path / "base", dtype="float32")
    trainer = Trainer(model, OPTIMIZER, NUM_STEPS, adapter=adapter)
    state = trainer.begin(params, jax.random.key(0))
    theirs = of_peft.read_llama(tmp_path / "base")
    if adapter.kind != "none":
        to_peft(state.params, model, tmp_path / "adapter", adapter, adapters=state.adapters)
        theirs = of_peft.with_adapter(theirs, tmp_path / "adapter")
    step = jax.jit(trainer.step, compiler_options=OPTIMISED)
    ours = []
    for number in range(NUM_STEPS):
        state, info = step(jax.random.key(number), state, rows(number))
        ours.append((float(info["loss"]), float(info["grad_norm"])))
    schedule = learning_rate(OPTIMIZER, NUM_STEPS)
    want = of_peft.losses(
        theirs,
        rows,
        NUM_STEPS,
        rate=lambda number: float(schedule(number)),
        clip_norm=CLIP_NORM,
        weight_decay=OPTIMIZER.weight_decay,
    )
    got, norms = np.array(ours).T
    np.testing.assert_allclose(got, list(want), rtol=1e-6)
    assert got[-1] < got[0] - 0.2  # it learns
    assert norms.max() > CLIP_NORM  # clipping bites
