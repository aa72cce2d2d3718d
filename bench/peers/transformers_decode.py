"""The peer of `bench/decode.py` by transformers: `generate` with a growing or a static cache, plain or assisted.

A worker: `make` loads a row's model, from a folder that `jaxpar.lm.to_hf` wrote or of random weights, and runs it
once; `round` times it; `drop` frees all. Rows are "transformers dynamic" (a cache that grows, nothing compiled),
"transformers static" (a static cache; on a GPU `generate` then compiles the step and replays CUDA graphs by itself) and
"transformers compiled" (the same, asked for on a CPU as well).
"""

import os
import pathlib
import sys

HERE = pathlib.Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parent))
os.environ.setdefault("HF_HUB_OFFLINE", "1")

import harness  # noqa: E402
import torch  # noqa: E402
import transformers  # noqa: E402
from torch_rows import CUDA, DEVICE, forget, wait  # noqa: E402

transformers.utils.logging.set_verbosity_error()


def random_model(model: dict):
    """Returns a model of this shape, whose weights nobody trained."""
    shape = dict(vocab_size=model["vocab_size"], bos_token_id=None, eos_token_id=None)
    if model["kind"] == "gpt2":
        config = transformers.GPT2Config(
            n_embd=model["embed_dim"], n_layer=model["num_layers"], n_head=model["num_heads"], n_inner=model["mlp_dim"],
            n_positions=model.get("max_seq_len", 1024), **shape,
        )  # fmt: skip
    else:
        config = transformers.LlamaConfig(
            hidden_size=model["embed_dim"], num_hidden_layers=model["num_layers"], intermediate_size=model["mlp_dim"],
            num_attention_heads=model["num_heads"], num_key_value_heads=model["num_kv_heads"],
            max_position_embeddings=model.get("max_seq_len", 131072), tie_word_embeddings=True, **shape,
        )  # fmt: skip
    with torch.device(DEVICE):
        return transformers.AutoModelForCausalLM.from_config(
            config, dtype=getattr(torch, model["dtype"])
        )


def loaded(folder: str):
    """Returns the model of a folder, in float32."""
    return transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).to(DEVICE)


class Row(harness.Row):
    """Prompts of equal length, continued by batches of `rows` and `new` tokens."""

    def __init__(self, request: dict):
        """Loads the model and runs once, which compiles what is compiled."""
        begin = wait()
        row, self.rows, self.new = request["row"], request["rows"], request["new"]
        self.is_whole = request["kind"] == "drafts"
        self.model = (
            loaded(request["folder"]) if "folder" in request else random_model(request["model"])
        )
        self.model.eval()
        if "prompts" in request:
            prompts = torch.tensor(request["prompts"])
        else:
            prompts = torch.randint(request["model"]["vocab_size"], (self.rows, request["prompt"]))
        self.prompts = prompts.to(DEVICE)
        self.options = dict(do_sample=False, pad_token_id=0, eos_token_id=None, bos_token_id=None)
        if "assistant" in row:
            assistant = loaded(request["assistant"]).eval()
            options = assistant.generation_config
            options.num_assistant_tokens, options.num_assistant_tokens_schedule = (
                request["length"],
                "constant",
            )
            options.assistant_confidence_threshold = 0.0
            self.options["assistant_model"] = assistant
        if "lookup" in row:
            self.options |= {
                "prompt_lookup_num_tokens": request["length"],
                "max_matching_ngram_size": 4,
            }
        self.cache = None
        if "static" in row or "compiled" in row:
            slots = self.prompts.shape[1] + self.new
            self.cache = transformers.StaticCache(config=self.model.config, max_cache_len=slots)
        if "compiled" in row:
            compiles = transformers.CompileConfig(
                mode="reduce-overhead" if CUDA else "default", fullgraph=False
            )
            compiles._compile_all_devices = True
            self.options["compile_config"] = compiles
        for _ in range(2):  # a captured graph is recorded by the second call
            texts = self.generate(self.new)
        tokens = [text.tolist() for text in texts] if "folder" in request else None
        version = f"transformers {transformers.__version__}"
        self.made = {"compile_s": wait() - begin, "version": version}
        self.made |= {"tokens": tokens} if tokens else {}

    def generate(self, new: int) -> list:
        """Returns all texts."""
        out = []
        with torch.no_grad():
            for prompts in self.prompts.split(self.rows):
                options = dict(self.options, max_new_tokens=new, min_new_tokens=new)
                if self.cache is not None:
                    self.cache.reset()
                    options["past_key_values"] = self.cache
                mask = torch.ones_like(prompts)
                out.append(self.model.generate(prompts, attention_mask=mask, **options))
        return [row for batch in out for row in batch]

    def round(self) -> dict:
        """Times the first tokens alone, then all: a step is their difference. Drafts are timed with their prompts."""
        begin = wait()
        if self.is_whole:
            self.generate(self.new)
            return {"ms": 1e3 * (wait() - begin) / (self.new * (len(self.prompts) // self.rows))}
        self.generate(1)
        middle = wait()
        self.generate(self.new)
        first, whole = middle - begin, wait() - middle
        return {
            "first_ms": 1e3 * first,
            "ms": 1e3 * whole,
            "steps": (self.new - 1) * (len(self.prompts) // self.rows),
        }


if __name__ == "__main__":
    harness.serve(harness.Rows(Row, free=forget))
