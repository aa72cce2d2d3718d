"""What only a GPU can show: `make test-gpu`."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from lm_configs import lm_config, with_fields

from jaxpar.lm import Decoder, OptimizerConfig, Sampling, Trainer, apply, generate, init
from jaxpar.loop import compile_step
from jaxpar.mesh import MeshSpec, make_mesh, named_shardings, use_mesh
from jaxpar.nn.attention import AttentionExecution, attention

pytestmark = pytest.mark.gpu

SMALL = lm_config(
    vocab_size=512,
    max_seq_len=128,
    num_layers=2,
    embed_dim=128,
    num_heads=2,
    num_kv_heads=1,
    mlp_dim=256,
)


def relative(a, b):
    a, b = np.asarray(a, np.float64), np.asarray(b, np.float64)
    return np.linalg.norm(a - b) / np.linalg.norm(b)


@pytest.mark.parametrize("kv_heads", [4, 2, 1])
def test_cudnn_equals_dense_in_value_and_gradient(kv_heads):
    keys = jax.random.split(jax.random.key(0), 4)
    shapes = [(2, 256, 4, 64), (2, 256, kv_heads, 64), (2, 256, kv_heads, 64), (2, 256, 4, 64)]
    q, k, v, g = (jax.random.normal(key, shape) for key, shape in zip(keys, shapes, strict=True))

    def run(impl, dtype, *args):
        execution = AttentionExecution(impl=impl)
        arrays = (x.astype(dtype) for x in args)
        out, pull = jax.vjp(lambda *a: attention(*a, execution=execution), *arrays)
        return out, *pull(g.astype(dtype))

    with jax.default_matmul_precision("highest"):
        exact = run("xla", jnp.float32, q, k, v)
    # bfloat16 operands: 2^-8 a number, averaged over the sums.
    for kernel, reference in zip(run("cudnn", jnp.bfloat16, q, k, v), exact, strict=True):
        assert relative(kernel, reference) < 1e-2


def test_auto_takes_cudnn_in_the_compiled_step():
    with use_mesh(make_mesh(MeshSpec(data=1), jax.devices()[:1])):
        tokens = jnp.zeros((2, 128), jnp.int32)
        text = (
            jax.jit(apply, static_argnums=2)
            .lower(init(jax.random.key(0), SMALL), tokens, SMALL)
            .compile()
            .as_text()
        )
    assert "fmha" in text.lower() or "sdpa" in text.lower()


@pytest.mark.parametrize(
    "changes", [{}, {"remat": "offload"}, {"remat": "full"}, {"scan_layers": False}]
)
@pytest.mark.parametrize("optimizer", ["adamw", "muon"])
def test_steps_lower_the_loss_and_donate_the_state(changes, optimizer):
    model = with_fields(SMALL, **changes)
    trainer = Trainer(
        model, OptimizerConfig(optimizer, learning_rate=1e-2, warmup_steps=0), num_steps=100
    )
    tokens = jax.random.randint(jax.random.key(1), (8, 129), 0, 512)
    batch = {"tokens": tokens[:, :-1], "targets": tokens[:, 1:]}
    with use_mesh(make_mesh(MeshSpec(data=1), jax.devices()[:1])):
        shardings = named_shardings(jax.eval_shape(trainer.init, jax.random.key(0)), trainer.axes())
        state = jax.jit(trainer.init, out_shardings=shardings)(jax.random.key(0))
        size = sum(leaf.nbytes for leaf in jax.tree.leaves(state))
        step = compile_step(trainer, state, batch, axes=trainer.axes())
        assert step.memory_analysis().alias_size_in_bytes >= size
        losses = []
        for i in range(10):
            state, info = step(jax.random.key(0), np.int32(i), state, batch)
            losses.append(float(info["loss"][0]))
    assert np.isfinite(losses).all() and losses[-1] < losses[0] - 0.1


def test_generate_equals_teacher_forcing():
    # Float32 with exact products, so that no tie is broken by rounding.
    model = dataclasses.replace(SMALL, dtype="float32")
    params = init(jax.random.key(0), model)
    prompt = jax.random.randint(jax.random.key(1), (2, 7), 0, 512)
    with jax.default_matmul_precision("highest"):
        tokens, *_ = generate(
            jax.random.key(2), params, prompt, model, Sampling(8, temperature=0.0)
        )
        logits = apply(params, tokens, model)
    np.testing.assert_array_equal(tokens[:, 7:], logits[:, 6:-1].argmax(-1))


@pytest.mark.parametrize("length", [4096, 4001])
def test_a_long_prompt_is_read_by_cudnn_in_little_memory(length):
    params = jax.jit(init, static_argnums=(1, 2))(jax.random.key(0), SMALL, "bfloat16")
    prompt = jax.random.randint(jax.random.key(1), (1, length), 0, 512)

    def run(config):
        step = jax.jit(
            lambda params, tokens, lengths, config, slots: Decoder(config).prefill(
                params, tokens, lengths, slots
            ),
            static_argnums=(3, 4),
        )
        return step.lower(params, prompt, jnp.array([length]), config, length + 8).compile()

    program, dense = run(SMALL), run(with_fields(SMALL, attention="xla"))
    assert any(name in program.as_text().lower() for name in ("fmha", "sdpa"))
    assert (
        program.memory_analysis().temp_size_in_bytes < SMALL.attention.num_heads * length**2 * 4 / 4
    )
    logits = (run(params, prompt, jnp.array([length]))[0] for run in (program, dense))
    assert relative(*logits) < 3e-2
