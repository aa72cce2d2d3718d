"""A network that reads what is observed as items, of which an action names one or a few: tours, sacks, jobs, numbers.

An encoder of attention without positions (Vaswani et al. 2017, arXiv:1706.03762; for tours Kool et al. 2019,
arXiv:1803.08475), so that items in another order give the same logits in that order, and the same value.
"""

import dataclasses
import math
from collections.abc import Mapping
from typing import cast

import flax.linen as linen
import jax
import jax.numpy as jnp
import numpy as np

from jaxpar.env import Adapter, Box, Discrete, Environment, Space, capabilities
from jaxpar.fields import AtLeast, OneOf, check_fields, field
from jaxpar.rl.network import ACTIVATIONS, Outputs, drawn, with_gain
from jaxpar.types import Array, PRNGKey, PyTree, UsageError

__all__ = ["Items"]

POINTING = ("policy",)  # heads with a number for each action; others read the mean of all items


@dataclasses.dataclass(frozen=True)
class Items:
    """Rows of items -> layers of attention -> a number for each action of the items it names; static and hashable.

        h = W x + b;    each layer:  h += attention(norm(h)),  h += mlp(norm(h))
        logit(kind, i, j ...) = w_kind . act(U_0 h_i + U_1 h_j + ... + V mean(h)),    value = w . act(V' mean(h))

    An environment tells its items by observations that are a float `Box` `[N, F]`, a row for each, and by actions that
    are rows; or by `items(obs)` and `item_moves(params)`, as `jaxpar.env.Capabilities` says. Costs O(layers N^2 width +
    layers N width^2 + A width) a step.

    Attributes:
        width: of an item inside.
        heads: of attention, which divide the width.
        layers: of attention.
        waves: sines and cosines of each column that are read beside it, of angles pi x 2^k with k below this, which
            tell near numbers apart.
        activation: "tanh", "relu" or "silu".
    """

    width: int = field(64, AtLeast(1))
    heads: int = field(4, AtLeast(1))
    layers: int = field(2, AtLeast(1))
    waves: int = field(0, AtLeast(0))
    activation: str = field("silu", OneOf(ACTIVATIONS))

    def __post_init__(self):
        """Refuses heads that do not divide the width."""
        check_fields(self)
        if self.width % self.heads:
            raise UsageError(f"heads={self.heads} must divide width={self.width}")

    def memory_layer(self) -> None:
        """It has no memory."""

    def initial(self, batch: int) -> PyTree:
        """No carry."""
        return {}

    def init(self, key: PRNGKey, shape: tuple[int, ...], heads: Mapping[str, tuple[int, float]],
             moves: np.ndarray) -> PyTree:  # fmt: skip
        """Draws the parameters; consumes `key`.

        Args:
            key: consumed.
            shape: `[N, F]`, of a step.
            heads: width and gain of each.
            moves: int32 `[A, 1 + k]`, of each action its kind and its items.
        """
        sizes = tuple((name, width, gain) for name, (width, gain) in sorted(heads.items()))
        return drawn(key, self._layers(sizes, moves).init(key, jnp.zeros((1, *shape))))

    def apply(
        self, params: PyTree, xs: Array, starts: Array, carry: PyTree, moves: np.ndarray
    ) -> Outputs:
        """Heads `[T, B, width]` of items `[T, B, N, F]`; `starts` and `carry` are as of a `Network`, and not read."""
        names = [
            name.removeprefix("head_") for name in params["params"] if name.startswith("head_")
        ]
        sizes = tuple(
            (name, params["params"][f"head_{name}"]["kernel"].shape[-1], 1.0)
            for name in sorted(names)
        )
        heads = cast(dict[str, Array], self._layers(sizes, moves).apply(params, xs))
        return Outputs(heads, carry, jnp.ones((), bool))

    def _layers(
        self, heads: tuple[tuple[str, int, float], ...], moves: np.ndarray
    ) -> "_ItemLayers":
        return _ItemLayers(self, heads, tuple(map(tuple, moves.tolist())))


def refuse_items(network: object) -> None:
    """Refuses a network of items where none is read."""
    if isinstance(network, Items):
        raise UsageError(
            "a network of items is for Ppo and A2c alone: learn with these, or give a Network."
        )


def moves_of(env: Environment | Adapter, space: Space) -> np.ndarray:
    """What actions of `space` do to the items of `env`, int32 `[A, 1 + k]`.

    Raises:
        UsageError: the environment tells no items, or not what its actions do to them.
    """
    params, able = env.default_params, capabilities(env)
    shape = item_shape(env)
    if not isinstance(space, Discrete) or space.shape:
        raise UsageError(
            f"{env.name} takes actions of {space}; a network of items acts by a lone Discrete."
        )
    if able.item_moves is None:
        if space.n != shape[0]:
            raise UsageError(
                f"{env.name} has {space.n} actions for {shape[0]} items and no item_moves that say what they do; give "
                "it item_moves, or use Network."
            )
        return np.stack([np.zeros(space.n, np.int32), np.arange(space.n, dtype=np.int32)], axis=1)
    moves = np.asarray(able.item_moves(params), np.int32)
    if (
        moves.ndim != 2
        or moves.shape[0] != space.n
        or moves.shape[1] < 2
        or moves[:, 1:].max() >= shape[0]
    ):
        raise UsageError(
            f"item_moves of {env.name} must be [{space.n}, 1 + k] with items below {shape[0]}."
        )
    return moves


def items_of(env: Environment | Adapter, obs: PyTree) -> Array:
    """The items `[*L, N, F]` of observations `[*L, ...]`."""
    told = capabilities(env).items
    if told is None:
        return obs
    space = env.observation_space(env.default_params)
    lead = jax.tree.leaves(obs)[0].ndim - len(
        jax.tree.leaves(jax.eval_shape(space.sample, jax.random.key(0)))[0].shape
    )
    for _ in range(lead):
        told = jax.vmap(told)
    return told(obs)


def item_shape(env: Environment | Adapter) -> tuple[int, int]:
    """N and F.

    Raises:
        UsageError: the environment tells no items.
    """
    space = env.observation_space(env.default_params)
    told = capabilities(env).items
    if (
        told is None
        and isinstance(space, Box)
        and len(space.shape) == 2
        and jnp.issubdtype(space.dtype, jnp.floating)
    ):
        return space.shape
    if told is None:
        raise UsageError(
            f"{env.name} observes {space}, which are no rows of items; use Network, or give the environment items(obs)."
        )
    return jax.eval_shape(lambda key: told(space.sample(key)), jax.random.key(0)).shape


class _ItemLayers(linen.Module):
    net: Items
    out: tuple[tuple[str, int, float], ...]
    moves: tuple[tuple[int, ...], ...]

    @linen.compact
    def __call__(self, x: Array) -> dict[str, Array]:
        net, act = self.net, ACTIVATIONS[self.net.activation]

        def dense(size: int, name: str, gain: float = 1.0) -> linen.Dense:
            return linen.Dense(size, kernel_init=with_gain(gain), name=name)

        waves = [wave(math.pi * 2**k * x) for wave in (jnp.sin, jnp.cos) for k in range(net.waves)]
        x = jnp.concatenate([x, *waves], -1)
        h = dense(net.width, "enter")(x)
        for place in range(net.layers):
            q, k, v = (
                part.reshape(*part.shape[:-1], net.heads, -1)
                for part in jnp.split(
                    dense(3 * net.width, f"qkv_{place}")(linen.LayerNorm()(h)), 3, -1
                )
            )
            scores = jnp.einsum("...nhd,...mhd->...hnm", q, k) / math.sqrt(net.width / net.heads)
            mixed = jnp.einsum("...hnm,...mhd->...nhd", jax.nn.softmax(scores), v).reshape(h.shape)
            h = h + dense(net.width, f"mix_{place}")(mixed)
            inner = act(dense(2 * net.width, f"inner_{place}", math.sqrt(2))(linen.LayerNorm()(h)))
            h = h + dense(net.width, f"outer_{place}")(inner)
        h = linen.LayerNorm()(h)
        pooled = jnp.mean(h, -2)
        heads = {}
        for name, size, gain in self.out:
            seen = dense(net.width, f"pool_{name}", math.sqrt(2))(pooled)
            if name not in POINTING:
                heads[name] = dense(size, f"head_{name}", gain)(act(seen))
                continue
            moves, seen = np.array(self.moves), seen[..., None, :]
            for slot in range(1, moves.shape[1]):
                own = linen.Dense(
                    net.width,
                    use_bias=False,
                    kernel_init=with_gain(1.0),
                    name=f"slot_{slot}_{name}",
                )(h)
                seen = seen + own[..., moves[:, slot], :]
            kinds = int(moves[:, 0].max()) + 1  # of a single one, a bias would change nothing
            every = linen.Dense(
                kinds, use_bias=kinds > 1, kernel_init=with_gain(gain), name=f"head_{name}"
            )(act(seen))
            kind = np.broadcast_to(np.arange(every.shape[-1])[None] == moves[:, :1], every.shape)
            heads[name] = jnp.sum(jnp.where(kind, every, 0), -1)
        return heads
