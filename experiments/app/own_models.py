"""Three models of one's own in three functions each: a language model, meta-learning, a policy."""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx

from jaxpar import envs
from jaxpar.env import reset, step
from jaxpar.mesh import local
from jaxpar.own import OwnModel, from_nnx
from jaxpar.types import PyTree

from .sequences import sums


@dataclasses.dataclass(frozen=True)
class OwnTask:
    """What is trained on what.

    Attributes:
      model: Its functions.
      examples: To train on.
      held_out: Others.
      judge: (predictions of the held-out examples, those examples) -> metrics.
      text: What it is, for a person.
      allow: Transfers that its program asks for by hand, as of `jaxpar.own.verify_own`.
    """

    model: OwnModel
    examples: Sequence[Any]
    held_out: Sequence[Any]
    judge: Callable[[PyTree, Sequence[Any]], dict[str, float]]
    text: str
    allow: tuple[str, ...] = ()


# ---------------------------------------------------------------- a language model, of linen


class Transformer(nn.Module):
    """A decoder of flax's own layers: int [B, T] -> logits [B, T, V]."""

    width: int
    layers: int
    heads: int
    vocab: int
    length: int

    @nn.compact
    def __call__(self, tokens):
        """Returns the scores of every next token."""
        places = self.param("places", nn.initializers.normal(0.02), (self.length, self.width))
        x = nn.Embed(self.vocab, self.width)(tokens) + places[None, : tokens.shape[1]]
        mask = nn.make_causal_mask(tokens)
        for _ in range(self.layers):
            x = x + nn.MultiHeadDotProductAttention(self.heads)(nn.LayerNorm()(x), mask=mask)
            h = nn.gelu(nn.Dense(4 * self.width)(nn.LayerNorm()(x)))
            x = x + nn.Dense(self.width)(h)
        return nn.Dense(self.vocab, use_bias=False)(nn.LayerNorm()(x))


def language(
    width: int, layers: int, seed: int, optimizer: optax.GradientTransformation
) -> OwnTask:
    """Sums in words of digits, such as 12+95=107: the answers are to be foretold, the questions are not."""
    texts, prompt = sums.written(sums.draw(np.random.default_rng([seed, 1]), 4096, 2, 2), 2)
    vocab = 64 * (-(-sums.VOCAB // 64))
    module = Transformer(width, layers, 4, vocab, texts.shape[1] - 1)

    def collate(rows):
        rows = np.stack(rows)
        counts = np.broadcast_to(np.arange(1, rows.shape[1]) >= prompt, rows[:, 1:].shape)
        return {"tokens": rows[:, :-1], "targets": rows[:, 1:], "counts": counts.astype(np.float32)}

    def loss(variables, batch, key):
        del key  # nothing is dropped
        scores = module.apply(variables, batch["tokens"])
        each = optax.softmax_cross_entropy_with_integer_labels(scores, batch["targets"])
        return (each * batch["counts"]).sum() / batch["counts"].sum()

    def predict(variables, batch):
        return module.apply(variables, batch["tokens"]).argmax(-1)

    def judge(tokens, rows):
        right = (tokens == np.stack(rows)[:, 1:])[:, prompt - 1 :]
        return {"accuracy": float(right.mean())}

    sample = jnp.zeros((1, texts.shape[1] - 1), jnp.int32)
    model = OwnModel(lambda key: module.init(key, sample), loss, predict, optimizer, collate)
    text = f"a transformer of linen, {layers} layers of {width}, on sums"
    return OwnTask(model, texts[:3840], texts[3840:], judge, text)


# ---------------------------------------------------------------- meta-learning


class Curve(nn.Module):
    """A network of two hidden layers: [..., 1] -> [..., 1]."""

    width: int

    @nn.compact
    def __call__(self, x):
        """Returns the height at each place."""
        for _ in range(2):
            x = nn.tanh(nn.Dense(self.width)(x))
        return nn.Dense(1)(x)


def sinusoids(
    width: int, seed: int, optimizer: optax.GradientTransformation, rate: float = 0.05
) -> OwnTask:
    """MAML (arXiv:1703.03400): weights from which one step of descent on ten points of a sinusoid draws the rest.

    An example is (amplitude, phase, its own seed); the inner gradient is a part of the loss, and so is its derivative.
    """
    module = Curve(width)
    rng = np.random.default_rng([seed, 1])
    waves = np.stack([rng.uniform(0.1, 5.0, 1280), rng.uniform(0, np.pi, 1280), np.arange(1280)], 1)

    def collate(rows):
        places = np.stack(
            [np.random.default_rng([seed, int(row[2])]).uniform(-5, 5, (20, 1)) for row in rows]
        )
        amplitude, phase = (np.stack(rows)[:, i, None, None] for i in (0, 1))
        heights = amplitude * np.sin(places - phase)
        return {"x": places.astype(np.float32), "y": heights.astype(np.float32)}

    def error(variables, x, y):
        return jnp.square(module.apply(variables, x) - y).mean()

    def adapted(variables, x, y):
        grads = jax.grad(error)(variables, x[:10], y[:10])
        return jax.tree.map(lambda w, g: w - rate * g, variables, grads)

    def loss(variables, batch, key):
        del key

        def of_task(x, y):
            return error(variables, x[10:], y[10:]), error(adapted(variables, x, y), x[10:], y[10:])

        before, after = jax.vmap(of_task)(batch["x"], batch["y"])
        return after.mean(), {"before": before.mean()}

    def predict(variables, batch):
        return jax.vmap(lambda x, y: module.apply(adapted(variables, x, y), x[10:]))(
            batch["x"], batch["y"]
        )

    def judge(heights, rows):
        want = collate(rows)["y"][:, 10:]
        return {"error": float(np.square(heights - want).mean()), "variance": float(want.var())}

    model = OwnModel(
        lambda key: module.init(key, jnp.zeros((1, 1))), loss, predict, optimizer, collate
    )
    return OwnTask(
        model,
        waves[:1024],
        waves[1024:],
        judge,
        f"MAML on sinusoids, two layers of {width} of linen",
    )


# ---------------------------------------------------------------- reinforcement learning, of NNX


class Actor(nnx.Module):
    """Scores of the actions: [..., O] -> [..., A]."""

    def __init__(self, inputs: int, width: int, outputs: int, rngs: nnx.Rngs):
        self.first = nnx.Linear(inputs, width, rngs=rngs)
        self.last = nnx.Linear(width, outputs, rngs=rngs)

    def __call__(self, obs):
        """Returns the scores."""
        return self.last(nnx.tanh(self.first(obs)))


def balance(
    width: int, seed: int, optimizer: optax.GradientTransformation, length: int = 200
) -> OwnTask:
    """REINFORCE on CartPole-v1: an example is the seed of an episode, which the loss plays inside its program.

    The baseline of a step is the mean over the batch of what is still earned from it on.
    """
    env, params = envs.make("CartPole-v1")

    def played(module, key):
        """Plays an episode: obs [T, O], action [T], reward [T], 0 after the end."""
        first, rest = jax.random.split(key)
        obs, state = reset(first, env, params)

        def move(carry, t):
            obs, state, alive = carry
            choose, go = jax.random.split(jax.random.fold_in(rest, t))
            action = jax.random.categorical(choose, module(obs))
            next_ = step(go, env, state, action, params)
            ended = next_.terminated | next_.truncated
            return (next_.obs, next_.state, alive & ~ended), (
                obs,
                action,
                jnp.where(alive, next_.reward, 0.0),
            )

        return jax.lax.scan(move, (obs, state, jnp.bool_(True)), jnp.arange(length))[1]

    def collate(rows):
        return {"seed": np.asarray(rows, np.uint32)}

    def play_all(module, batch):
        # Every device plays its own episodes: GSPMD would split the loop's arrays in other ways, and exchange them.
        graph, weights = nnx.split(module)
        leaves, structure = jax.tree.flatten(jax.lax.stop_gradient(weights))

        def own_episodes(seeds, *leaves):
            actor = nnx.merge(graph, jax.tree.unflatten(structure, leaves))
            return jax.vmap(lambda seed: played(actor, jax.random.key(seed)))(seeds)

        axes = [("batch",), *((None,) * leaf.ndim for leaf in leaves)]
        out_axes = (("batch", None, None), ("batch", None), ("batch", None))
        return local(own_episodes, axes, out_axes, check=False)(batch["seed"], *leaves)

    def loss(module, batch):
        obs, action, reward = play_all(module, batch)
        ahead = jnp.cumsum(reward[:, ::-1], 1)[:, ::-1]
        better = jnp.where(reward > 0, ahead - ahead.mean(0, keepdims=True), 0.0)
        chosen = jnp.take_along_axis(jax.nn.log_softmax(module(obs)), action[..., None], -1)[..., 0]
        return -(chosen * better).sum(1).mean() / length, {"return": reward.sum(1).mean()}

    def predict(module, batch):
        return play_all(module, batch)[2].sum(1)

    def judge(returns, rows):
        return {"return": float(returns.mean())}

    model = from_nnx(lambda rngs: Actor(4, width, 2, rngs), loss, predict, optimizer, collate)
    seeds = np.random.default_rng([seed, 1]).permutation(2**20)
    text = f"REINFORCE on {env.name}, a layer of {width} of NNX"
    # A device plays with all of the weights.
    return OwnTask(model, seeds[:-512], seeds[-512:], judge, text, allow=("gather over tensor",))
