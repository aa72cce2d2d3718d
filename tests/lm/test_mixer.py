"""Recurrent mixers in attention's place: the same model but for what mixes tokens, on any mesh, and streamed."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from fast import jit, noisy_params
from flat_decoding import lm_generate as generate
from lm_configs import lm_config, with_fields
from tolerance import EXACT_MATHS, assert_close

from experiments import verify
from jaxpar.lm import Sampling, apply, flops_per_token, loss, num_params, to_hf
from jaxpar.lm.mixers import with_mixer
from jaxpar.lm.params import axes, decay_mask, leaves
from jaxpar.lm.sample import empty_cache, extend
from jaxpar.mesh import MeshSpec, make_mesh, use_mesh
from jaxpar.nn.mixer import TokenInfo
from jaxpar.nn.mixers import CELLS
from jaxpar.optim import muon_dimensions
from jaxpar.types import UsageError

T, V, PROMPT, NEW = 7, 16, 4, 3
SMALL = lm_config(
    vocab_size=V, num_layers=2, embed_dim=16, num_heads=4, mlp_dim=24, init_std=0.3, dtype="float32"
)
MODELS = {name: with_fields(SMALL, mixer=name) for name in CELLS}
each_mixer = pytest.mark.parametrize("name", CELLS)


def some(*names):
    """These mixers in CI, the others in the long run: compiling a solver takes seconds."""
    return pytest.mark.parametrize(
        "name",
        [name if name in names else pytest.param(name, marks=pytest.mark.slow) for name in CELLS],
    )


ROUNDING = 5 * EXACT_MATHS["float32"]


def tokens(rows=2, length=T):
    return np.random.default_rng(1).integers(0, V, (rows, length))


@functools.cache
def logits_of(name):
    return jit(functools.partial(apply, config=MODELS[name]))


@some("min_gru", "aaren")
def test_a_place_sees_its_past_and_nothing_else(name):
    params, mix = (
        noisy_params(MODELS[name]),
        np.random.default_rng(0).standard_normal(V).astype(np.float32),
    )
    segments = np.array([[0, 0, 0, 1, 1, 2, 2]])

    @jit
    def influence(params, segments):
        def mixed(table):
            params_ = params | {"embedding": table}
            info = TokenInfo(segments=segments)
            return apply(params_, np.arange(T)[None], MODELS[name], info)[0] @ mix

        return jnp.linalg.norm(jax.jacrev(mixed)(params["embedding"])[:, :T], axis=-1)

    want = np.tril(segments[0][:, None] == segments[0][None, :])
    np.testing.assert_array_equal(influence(params, segments) != 0, want)
    np.testing.assert_array_equal(
        influence(params, 0 * segments) != 0, np.tril(np.ones((T, T), bool))
    )


@some("para_gru", "lstm")
def test_streaming_equals_the_whole_sequence(name):
    config, params = MODELS[name], noisy_params(MODELS[name])
    run = jit(functools.partial(extend, config=config))
    cache, parts, start = empty_cache(config, 2, T), [], 0
    for size in (4, 1, 1, 1):
        logits, cache = run(params, tokens()[:, start : start + size], cache)
        parts.append(logits)
        start += size
    assert_close(np.concatenate(parts, 1), logits_of(name)(params, tokens()), ROUNDING)
    assert sum(leaf.size for leaf in jax.tree.leaves(cache.layers)) <= 2 * 2 * 3 * 64, (
        "it grows with the past"
    )


@some("min_lstm", "aaren")
def test_generation_equals_asking_the_whole_model(name):
    """Prompts of different lengths: what lies beyond a row's must not enter its state."""
    config, params, lengths = MODELS[name], noisy_params(MODELS[name]), np.array([4, 1, 3])
    draw = jit(generate, static_argnums=(3, 4))
    prompt = tokens(3, PROMPT)
    out, *_ = draw(
        jax.random.key(0),
        params,
        prompt,
        config,
        Sampling(NEW, temperature=0),
        prompt_lengths=lengths,
    )
    want = np.zeros((3, PROMPT + NEW), int)
    for row, length in enumerate(lengths):
        line = list(prompt[row, :length])
        for _ in range(NEW):
            padded = np.pad(line, (0, PROMPT + NEW - len(line)))[None]
            line.append(int(logits_of(name)(params, padded)[0, len(line) - 1].argmax()))
        want[row, : len(line)] = line
    np.testing.assert_array_equal(out, want)


@some("para_gru", "gru")
def test_on_a_mesh_it_is_what_it_is_on_one_device(name):
    """Loss, gradients and steps in double precision, and no collective between devices that is not declared."""
    flags = (
        "model.num_layers=1 model.embed_dim=32 model.mlp.dim=32 "
        "model.vocab_size=64 data.seq_len=8 data.batch_size=8"
    )
    solver = (
        "model.execution.solver=newton" if name == "para_gru" else "model.execution.solver=auto"
    )
    optimizer = "optimizer.name=muon" if name == "lstm" else "optimizer.name=adamw"
    config = verify.compose(
        *flags.split(),
        f"model.mixer.kind={name}",
        solver,
        optimizer,
        "dtypes=[float64]",
        "topology=none",
    )
    rows = verify.verify_lm(config, [verify.parse_layout("data2.fsdp2.tensor2")])
    for row in rows:
        assert not row.refused and not row.breaches, row


@pytest.mark.parametrize("remat, scan_layers", [("none", False), ("names", True), ("full", True)])
def test_remat_and_unrolled_layers_change_no_number(remat, scan_layers):
    def gradient(config):
        batch = {"tokens": tokens()[:, :-1], "targets": tokens()[:, 1:]}
        return jit(jax.value_and_grad(lambda params: loss(params, batch, config)))(
            noisy_params(config)
        )

    config = MODELS["para_gru"]
    assert_close(
        gradient(with_fields(config, remat=remat, scan_layers=scan_layers)),
        gradient(config),
        1e-5,
    )


@each_mixer
def test_it_is_as_large_as_attention_would_be(name):
    big = lm_config(embed_dim=256, num_heads=8, num_kv_heads=2, mlp_dim=512)
    ratio = num_params(with_fields(big, mixer=name)) / num_params(big)
    assert abs(ratio - 1) < 0.02, ratio
    given = with_fields(big, mixer=name, mixer_dim=64)
    assert given.stack().mixer.cell.size == 64 and num_params(given) < num_params(big)
    assert flops_per_token(given, 4096) == flops_per_token(given, 16), (
        "a recurrence costs no token more for its past"
    )


WITHOUT_CELLS = (
    "lmu",
    "spiking_lmu",
    "windowed",
    "block_recurrent",
    "block_recurrent_lstm",
    "tcnca",
)


@pytest.mark.parametrize(
    "name",
    [
        name if name == "block_recurrent" else pytest.param(name, marks=pytest.mark.slow)
        for name in WITHOUT_CELLS
    ],
)  # 5 s each
def test_mixers_without_cells_mix_in_a_language_model(name):
    """Prompts of two lengths and what follows them, across windows, against the whole; its cache does not grow."""
    config = with_fields(SMALL, mixer=name, mixer_window=3)
    params, cache = noisy_params(config), empty_cache(config, 2, T)
    whole, run = (
        jit(functools.partial(apply, config=config)),
        jit(functools.partial(extend, config=config)),
    )
    _, cache = run(params, tokens()[:, :4], cache, valid=np.array([4, 2]))
    then, cache = run(params, tokens()[:, 4:6], cache)
    lines = np.stack([tokens()[0], np.concatenate([np.delete(tokens()[1], [2, 3]), [0, 0]])])
    want = whole(params, lines)
    assert_close(then, np.stack([want[0, 4:6], want[1, 2:4]]), 50 * ROUNDING)
    sizes = [jax.eval_shape(lambda n=n: empty_cache(config, 2, n)).layers for n in (8, 64)]
    assert jax.tree.map(lambda x: x.shape, sizes[0]) == jax.tree.map(lambda x: x.shape, sizes[1])


def test_a_legendre_memory_is_as_large_as_attention_would_be():
    big = lm_config(embed_dim=256, num_heads=8, num_kv_heads=2, mlp_dim=512)
    assert abs(num_params(with_fields(big, mixer="lmu")) / num_params(big) - 1) < 0.02


@pytest.mark.parametrize("name", ["block_recurrent", "block_recurrent_lstm", "windowed"])
@pytest.mark.parametrize("heads", [1, 4])
def test_a_mixer_beside_attention_has_its_size(name, heads):
    """Of heads whose size is even, since nothing else of it can change."""
    big = lm_config(embed_dim=64, num_heads=heads, num_kv_heads=heads, mlp_dim=192)
    config = with_mixer(big, name)
    away = num_params(config) - num_params(big)
    step = 2 * heads * 64 * 16 * big.num_layers  # two more a head, in 16 products at most
    assert (
        abs(away) <= step / 2
        and config.mixer.kind == name
        and (config.attention.head_dim == big.attention.head_dim) == (name == "windowed")
    )


@pytest.mark.slow  # 40 s each
@pytest.mark.parametrize("optimizer", ["adamw", "muon"])
@pytest.mark.parametrize("name", ["lmu", "block_recurrent", "block_recurrent_lstm", "tcnca"])
def test_mixers_without_cells_are_what_they_are_on_one_device(name, optimizer):
    flags = (
        "model.num_layers=1 model.embed_dim=32 model.mlp.dim=32 model.vocab_size=64 data.seq_len=8 data.batch_size=8 "
        "model.mixer.window=3 model.attention.num_kv_heads=0 dtypes=[float64] topology=none"
    )
    config = verify.compose(
        *flags.split(), f"model.mixer.kind={name}", f"optimizer.name={optimizer}"
    )
    for row in verify.verify_lm(config, [verify.parse_layout("data2.fsdp2.tensor2")]):
        assert not row.refused and not row.breaches, row


def test_bfloat16_keeps_a_wide_state():
    config = dataclasses.replace(MODELS["min_gru"], dtype="bfloat16")
    params = noisy_params(config)
    logits, state = jit(functools.partial(extend, config=config))(
        params, tokens(), empty_cache(config, 2, T)
    )
    assert {leaf.dtype for leaf in jax.tree.leaves(state.layers)} == {jnp.dtype("float32")}
    assert_close(logits, logits_of("min_gru")(params, tokens()), 0.1)


def test_muon_takes_the_products_and_leaves_the_recurrence():
    sides = muon_dimensions(axes(MODELS["gru"]), decay_mask(MODELS["gru"]))["layers"]["mixer"]
    assert {name for name, numbers in sides.items() if numbers is not None} == {
        "wr",
        "wz",
        "wn",
        "w_out",
    }
    assert leaves(MODELS["gru"])["layers"]["mixer"]["u"].shape == (2, 4, 4, 3, 4)


def test_a_split_sequence_is_refused():
    with (
        use_mesh(make_mesh(MeshSpec(context=2, data=4))),
        pytest.raises(UsageError, match="give mesh.context=1"),
    ):
        logits_of("para_gru")(noisy_params(MODELS["para_gru"]), tokens(4, 8))


def test_a_hugging_face_folder_is_refused(tmp_path):
    with pytest.raises(UsageError, match="no folder can hold a model with mixer.kind=para_gru"):
        to_hf(noisy_params(MODELS["para_gru"]), MODELS["para_gru"], tmp_path / "out")


@pytest.mark.parametrize(
    "fields, sentence",
    [
        (dict(mixer="rnn"), "model.mixer.kind='rnn' is unknown; legal are attention, para_gru"),
        (
            dict(mixer_dim=8),
            "model.mixer.dim=8 is of recurrent mixers and .* not of model.mixer.kind=attention; take 0.",
        ),
        (
            dict(mixer_window=8),
            "model.mixer.window=8 is of lmu, .* not of model.mixer.kind=attention; take 128.",
        ),
        (
            dict(mixer="tcnca", mixer_states=8),
            "model.mixer.states=8 is of lmu and block_recurrent, not of model.mixer.kind=tcnca",
        ),
        (dict(mixer="lmu", context="ring"), "model.mixer.kind=lmu reads tokens in turn"),
        (
            dict(mixer="tcnca", mixer_dim=8),
            "model.mixer.dim=8 is of recurrent mixers and .* not of model.mixer.kind=tcnca",
        ),
        (dict(mixer="gru", mixer_dim=10), "heads=4 of cell gru do not divide size=10"),
        (dict(mixer="para_gru", mixer_dim=-1), "model.mixer.dim=-1 must be at least 0"),
        (
            dict(mixer="para_gru", solver="newt"),
            "model.execution.solver='newt' is unknown; legal are auto, newton",
        ),
    ],
)
def test_what_no_mixer_can_be_is_refused(fields, sentence):
    with pytest.raises(UsageError, match=sentence):
        with_fields(SMALL, **fields)
