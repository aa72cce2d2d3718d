"""How much memory and time does a long prompt take? A 1B model (Llama 3.2's shape) reads 32k tokens and goes on.

    python bench/prefill.py                                   # a GPU or TPU: 32,768 tokens, one row
    python bench/prefill.py --length 131072 --rows 1 --attention xla
    python bench/prefill.py --tiny                            # any machine: checks that the script runs

Prints what the compiler asks for, the device's peak, and tokens/s (median of `--rounds`, compilation apart); the
dense scores that were written before, [H, T, T] in float32, are printed beside it.
"""

import argparse
import json
import pathlib
import statistics
import sys
import time

HERE = pathlib.Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parent))


def measure(config, rows: int, length: int, new: int, rounds: int) -> dict:
    """Times `prefill`, then `generate` of `new` tokens, on the first device."""
    import jax
    import jax.numpy as jnp
    from lm_models import generate, prefill

    from jaxpar.lm import Sampling, init, num_params

    device = jax.devices()[0]
    params = jax.jit(init, static_argnums=(1, 2))(jax.random.key(0), config, config.dtype)
    prompt = jax.random.randint(jax.random.key(1), (rows, length), 0, config.vocab_size, jnp.int32)
    lengths = jnp.full((rows,), length)
    start = time.perf_counter()
    program = (
        jax.jit(prefill, static_argnums=(3, 4))
        .lower(params, prompt, lengths, config, length + new)
        .compile()
    )
    compile_s = time.perf_counter() - start
    stats, text = program.memory_analysis(), (program.as_text() or "").lower()

    def seconds(run):
        jax.block_until_ready(run())
        times = []
        for _ in range(rounds):
            begin = time.perf_counter()
            jax.block_until_ready(run())
            times.append(time.perf_counter() - begin)
        return statistics.median(times)

    read = seconds(lambda: program(params, prompt, lengths))
    logits, _ = program(params, prompt, lengths)
    if not bool(jnp.isfinite(logits).all()):
        raise SystemExit("the logits are not finite")
    go_on = jax.jit(generate, static_argnums=(3, 4))
    whole = seconds(
        lambda: go_on(jax.random.key(2), params, prompt, config, Sampling(new, temperature=0.0))
    )
    peak = (device.memory_stats() or {}).get("peak_bytes_in_use", 0)
    return {
        "device": device.device_kind,
        "version": f"jax {jax.__version__}",
        "parameters": num_params(config),
        "rows": rows,
        "length": length,
        "kernel": "flash"
        if any(word in text for word in ("fmha", "sdpa", "splash"))
        else "dense, in blocks",
        "compile_s": compile_s,
        "prefill_s": read,
        "prompt_tokens_per_s": rows * length / read,
        "new_tokens_per_s": rows * (new - 1) / max(whole - read, 1e-9),
        "arguments_bytes": stats.argument_size_in_bytes,
        "temporary_bytes": stats.temp_size_in_bytes,
        "peak_bytes": peak,
        "dense_scores_bytes": rows * config.attention.num_heads * length**2 * 4,
    }


def main() -> None:
    """Parses flags, measures, prints, and writes bench/results/prefill.json."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--length", type=int, default=32768)
    parser.add_argument("--rows", type=int, default=1)
    parser.add_argument("--new", type=int, default=65, help="tokens to draw after the prompt")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--attention", default="auto", help="auto, or xla for the dense form")
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--tiny", action="store_true")
    args = parser.parse_args()

    from lm_models import llama_of

    config = llama_of(attention=args.attention, dtype=args.dtype)
    if args.tiny:
        config = llama_of(
            num_layers=2, embed_dim=64, num_heads=4, num_kv_heads=2, mlp_dim=128, vocab_size=512
        )
        args.length, args.new, args.rounds = 600, 5, 1
    row = measure(config, args.rows, args.length, args.new, args.rounds)
    print(
        f"{row['device']}, {row['version']}: {row['parameters']:,} parameters, {args.rows} x {args.length:,} tokens"
    )
    print(f"attention  {row['kernel']}; compiled in {row['compile_s']:.1f} s")
    print(f"prompt     {row['prefill_s']:.3f} s, {row['prompt_tokens_per_s']:,.0f} tokens/s")
    print(f"after it   {row['new_tokens_per_s']:,.0f} tokens/s")
    for name in ("arguments", "temporary", "peak", "dense_scores"):
        print(f"{name:12} {row[f'{name}_bytes'] / 2**30:9.3f} GiB")
    folder = HERE / "results"
    folder.mkdir(exist_ok=True)
    (folder / "prefill.json").write_text(json.dumps(row, indent=1) + "\n")


if __name__ == "__main__":
    main()
