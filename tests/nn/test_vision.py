"""A classifier of images equals a loop over its images, tokens and heads, in value and gradient, on any mesh."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from by_hand import slopes
from fast import jit
from tolerance import EXACT_MATHS, LAYOUT, assert_close

from jaxpar.mesh import MeshSpec, make_mesh, shard, use_mesh
from jaxpar.nn import ImageClassifier, ParaGRU, SequenceTrainer
from jaxpar.nn.attention import Attention, Visible
from jaxpar.nn.auxiliary import Aux, Max
from jaxpar.nn.mixers import MatrixState, Recurrent, layer_of
from jaxpar.nn.mlp import Mlp
from jaxpar.nn.norm import Norm
from jaxpar.nn.stack import Stack
from jaxpar.types import UsageError

BOTH_WAYS = Attention(4, 2, 2, visible=Visible(causal=False))


def classifier(dtype="float64", readout="mean", **changes):
    stack = Stack(2, 4, BOTH_WAYS, Mlp(6, "gelu"), Norm("layer", bias=True), dtype=dtype)
    return ImageClassifier(dataclasses.replace(stack, **changes), 2, (4, 6, 2), 3, readout)


def params_and_batch(network, dtype=np.float64, batch=2):
    rng = np.random.default_rng(0)
    shapes = jax.eval_shape(network.init, jax.random.key(0))
    params = jax.tree.map(lambda x: (0.5 * rng.standard_normal(x.shape)).astype(dtype), shapes)
    weights = np.linspace(1, 2, batch).astype(dtype)
    images = rng.standard_normal((batch, *network.shape)).astype(dtype)
    return params, {"inputs": images, "targets": np.arange(batch) % 3, "weights": weights}


# ---------------------------------------------------------------- by hand


def norm_by_hand(x, weights):
    x = x - x.mean()
    return x / np.sqrt((x * x).mean() + 1e-5) * weights["scale"] + weights["bias"]


def layer_by_hand(tokens, layer, heads=4, groups=2, width=2):
    seen, out = [norm_by_hand(x, layer["attn_norm"]) for x in tokens], []
    for x, mine in zip(tokens, seen, strict=True):
        for h in range(heads):
            g, q, total, mixed = h * groups // heads, mine @ layer["wq"][:, h], 0, 0
            for other in seen:
                weight = np.exp((other @ layer["wk"][:, g]) @ q / np.sqrt(width))
                total, mixed = total + weight, mixed + weight * (other @ layer["wv"][:, g])
            x = x + (mixed / total) @ layer["wo"][h]
        up = norm_by_hand(x, layer["mlp_norm"]) @ layer["w_up"]
        gelu = 0.5 * up * (1 + np.tanh(np.sqrt(2 / np.pi) * (up + 0.044715 * up**3)))
        out.append(x + gelu @ layer["w_down"])
    return out


def logits_by_hand(params, image):
    tokens = []
    for row in range(0, 4, 2):
        for column in range(0, 6, 2):
            pixels = [
                image[row + i, column + j, c] for i in range(2) for j in range(2) for c in range(2)
            ]
            tokens.append(
                np.stack(pixels) @ params["w_in"]
                + params["b_in"]
                + params["positions"][len(tokens)]
            )
    for number in range(2):
        tokens = layer_by_hand(tokens, jax.tree.map(lambda x, n=number: x[n], params["layers"]))
    mean = sum(norm_by_hand(x, params["final_norm"]) for x in tokens) / len(tokens)
    return mean @ params["head"] + params["b_head"]


def loss_by_hand(params, batch):
    loss = 0
    for image, target, weight in zip(
        *(batch[name] for name in ("inputs", "targets", "weights")), strict=True
    ):
        out = logits_by_hand(params, image)
        loss = loss + weight * (np.log(np.exp(out).sum()) - out[target])
    return loss / batch["weights"].sum()


def test_it_equals_a_loop_in_value_and_gradient(x64):
    network = classifier()
    params, batch = params_and_batch(network)
    (loss, info), grads = jit(jax.value_and_grad(network.loss, has_aux=True))(params, batch)
    want = {
        "loss": loss_by_hand(params, batch),
        "grads": slopes(lambda p: loss_by_hand(p, batch), params),
    }
    assert_close({"loss": loss, "grads": grads}, want, 10 * EXACT_MATHS["float64"])
    out = np.stack([logits_by_hand(params, image) for image in batch["inputs"]])
    assert_close(jit(network.apply)(params, batch["inputs"])[0], out, EXACT_MATHS["float64"])
    right = (out.argmax(-1) == batch["targets"]) * batch["weights"]
    np.testing.assert_allclose(info["accuracy"], right.sum() / batch["weights"].sum())


# ---------------------------------------------------------------- recurrences over patches


def test_a_recurrence_reads_an_image_at_once_in_chunks_and_patch_by_patch(x64):
    """Retention's three forms (arXiv:2310.19731): one chunk, chunks that do not divide seven tokens, and steps."""

    def by_chunks(chunk):
        mixer = MatrixState(layer_of("retention", 8, 2), chunk=chunk)
        return classifier(readout="token", mixer=mixer, embed_dim=8, num_layers=1)

    def whole(chunk):
        return lambda *args: by_chunks(chunk).apply(*args)[0]

    def in_turn(params, images):
        network = by_chunks(4)

        def step(cache, token):
            y, cache, _ = network.stack.apply(params, token[:, None], cache=cache)
            return cache, y[:, 0]

        x = jnp.swapaxes(network.tokens(params, images), 0, 1)
        cache, out = jax.lax.scan(step, network.stack.init_cache(len(images), 7), x)
        assert (
            sum(leaf.size for leaf in jax.tree.leaves(cache.layers)) == len(images) * 2 * 2 * 4
        )  # rows, heads, K, V
        return network.logits(params, jnp.swapaxes(out, 0, 1))

    network = by_chunks(8)
    params, batch = params_and_batch(network)
    assert network.tokens(params, batch["inputs"]).shape == (2, 7, 8) and params["token"].shape == (
        8,
    )

    def gradient(apply):
        def weighed(params, images):
            out = apply(params, images)
            return (out * jnp.cos(jnp.arange(out.size)).reshape(out.shape)).sum(), out

        return jit(jax.value_and_grad(weighed, (0, 1), has_aux=True))(params, batch["inputs"])

    (value, out), grads = gradient(in_turn)
    assert_close(gradient(whole(4)), ((value, out), grads), EXACT_MATHS["float64"])
    assert_close(jit(whole(8))(params, batch["inputs"]), out, EXACT_MATHS["float64"])
    # All patches and the token itself have a part in the logits.
    assert (np.abs(grads[1]).max((-3, -2, -1)) > 0).all() and (np.abs(grads[0]["token"]) > 0).all()


# ---------------------------------------------------------------- meshes, trainer, mistakes


def test_eight_devices_learn_what_one_does():
    network = classifier("float32")
    params, batch = params_and_batch(network, np.float32, 8)
    value = jax.value_and_grad(network.loss, has_aux=True)
    want = jit(value)(params, batch)
    with use_mesh(make_mesh(MeshSpec(data=2, fsdp=2, tensor=2))):
        rows = {"inputs": ("batch", None, None, None), "targets": ("batch",), "weights": ("batch",)}
        args = shard((params, batch), (network.axes(), rows))
        assert args[0]["layers"]["wq"].sharding.shard_shape((2, 4, 4, 2)) == (2, 2, 2, 2)
        got = jit(value)(*args)
    assert_close(jax.device_get(got), jax.device_get(want), LAYOUT["float32"])


def test_the_trainer_drops_by_its_key_and_judges_without():
    network = classifier("float32", dropout=0.5, ranges=True)
    trainer = SequenceTrainer(
        network, dataclasses.replace(SequenceTrainer.optimizer, warmup_steps=0)
    )
    batch = jax.tree.map(jnp.asarray, params_and_batch(network, np.float32)[1])
    state, step = trainer.init(jax.random.key(0)), jit(trainer.step)
    moved, info = step(jax.random.key(1), state, batch)
    other, again = (step(jax.random.key(key), state, batch)[1]["loss"] for key in (2, 1))
    assert info["loss"] == again != other and np.isfinite(info["residual_max"])
    plain = trainer.metrics(state.params, batch)
    np.testing.assert_allclose(plain["loss"], network.loss(state.params, batch)[0])
    assert plain["loss"] not in (info["loss"], other) and moved.step == 1


def test_losses_of_layers_are_added():
    class Telling(Attention):
        def apply(self, *args):
            y, cache, _ = super().apply(*args)
            return y, cache, Aux({"balance": jnp.float32(0.25)}, {"most": Max(jnp.float32(3))})

    network = classifier("float32")
    params, batch = params_and_batch(network, np.float32)
    loss, info = classifier("float32", mixer=Telling(4, 2, 2, visible=Visible(causal=False))).loss(
        params, batch
    )
    np.testing.assert_allclose(loss, network.loss(params, batch)[0] + 2 * 0.25, rtol=1e-5)
    assert info["balance"] == 0.5 and info["most"] == 3


def test_what_no_classifier_can_be_is_refused():
    causal = dataclasses.replace(BOTH_WAYS, visible=Visible())
    for mixer in (causal, Recurrent(ParaGRU(4))):
        with pytest.raises(
            UsageError, match="see each other, but this stack's mixer is causal.*or readout=token"
        ):
            classifier(mixer=mixer)
    stack = classifier().stack
    with pytest.raises(
        UsageError, match="patch=3 does not divide images of 4 x 6 pixels; legal are 1, 2"
    ):
        ImageClassifier(stack, 3, (4, 6, 2), 3)
    with pytest.raises(
        UsageError, match=r"shape=\(4, 6\) of images must be height, width and channels"
    ):
        ImageClassifier(stack, 2, (4, 6), 3)
    with pytest.raises(
        UsageError, match=r"images of shape \(6, 4, 2\) are none of shape \(4, 6, 2\)"
    ):
        classifier().patches(jnp.zeros((1, 6, 4, 2)))
