"""The peer of `bench/finetune.py`: `torch.compile` of transformers' LlamaForCausalLM, SDPA and fused AdamW.

A worker: a request is one row. "float32" has float32 weights under bfloat16 autocast, "bfloat16" has everything in it.
"""

import pathlib
import statistics
import sys

HERE = pathlib.Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parent))

import harness  # noqa: E402
import torch  # noqa: E402
from torch_rows import CUDA, DEVICE, wait  # noqa: E402


def answer(request: dict) -> dict:
    """Times training steps of a row."""
    import transformers

    torch.set_float32_matmul_precision("high")
    torch.manual_seed(0)
    model, is_low = request["model"], request["row"].endswith("bfloat16")
    config = transformers.LlamaConfig(
        hidden_size=model["embed_dim"], num_hidden_layers=model["num_layers"], intermediate_size=model["mlp_dim"],
        num_attention_heads=model["num_heads"], num_key_value_heads=model["num_kv_heads"],
        vocab_size=model["vocab_size"], max_position_embeddings=model["max_seq_len"], tie_word_embeddings=model["tied"],
        rope_parameters={"rope_type": "default", "rope_theta": model["rope_theta"]}, attn_implementation="sdpa",
        bos_token_id=None, eos_token_id=None,
    )  # fmt: skip
    with torch.device(DEVICE):
        net = transformers.AutoModelForCausalLM.from_config(
            config, dtype=torch.bfloat16 if is_low else torch.float32
        )
        tokens = torch.randint(model["vocab_size"], (request["rows"], request["length"]))
    net.train()
    optimizer, compiled = (
        torch.optim.AdamW(net.parameters(), lr=1e-5, fused=True),
        torch.compile(net),
    )

    def step():
        with torch.autocast(DEVICE, dtype=torch.bfloat16, enabled=not is_low):
            loss = compiled(input_ids=tokens, labels=tokens, use_cache=False).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        return loss

    begin = wait()
    step()
    compile_s = wait() - begin
    for _ in range(2):
        begin = wait()
        step()
        once = wait() - begin
    if CUDA:
        torch.cuda.reset_peak_memory_stats()
    calls, taken = max(1, min(20, round(request["spend_s"] / (7 * once)))), []
    for _ in range(7):
        begin = wait()
        for _ in range(calls):
            loss = step()
        taken.append(1e3 * (wait() - begin) / calls)
    if not torch.isfinite(loss):
        raise ValueError("the loss is not finite")
    said = {
        "ms": statistics.median(taken),
        "least_ms": min(taken),
        "rounds": taken,
        "compile_s": compile_s,
    }
    if CUDA:
        said |= {
            "step_bytes": torch.cuda.max_memory_allocated(),
            "held_bytes": torch.cuda.max_memory_reserved(),
        }
    note = f"torch {torch.__version__}, transformers {transformers.__version__}"
    return said | {"note": note, "device": torch.cuda.get_device_name() if CUDA else "cpu"}


if __name__ == "__main__":
    harness.serve(answer)
