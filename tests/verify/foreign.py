"""Models that are none of the library's: right ones, which `verify` must pass, and wrong ones."""

from collections.abc import Callable
from typing import Any, NamedTuple

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax

from jaxpar.mesh import MeshSpec, constrain, gather, in_role, local, mesh_axes
from jaxpar.verify import Layout, Model

ROWS = 40
WIDTH = 16
HIDDEN = 32
SYMBOLS = 24
STEPS = 8
ADAM = optax.adamw(1e-3, eps=1e-6)
BATCH_AXES = {
    "x": ("batch", None),
    "y": ("batch", None),
    "weights": ("batch",),
    "tokens": ("batch", None),
}
LAYOUTS = (Layout(MeshSpec(data=2, fsdp=2, tensor=2)), Layout(MeshSpec(fsdp=8)))
OF_ROWS = (Layout(MeshSpec(data=2, fsdp=4)), Layout(MeshSpec(fsdp=8)))
"""Layouts of models that nothing of is split over tensor."""


class Foreign(NamedTuple):
    """A model as a user brings it.

    Attributes:
      params: Pytree of float64 arrays.
      axes: Logical axes of each.
      loss: (params, batch) -> scalar.
      optimizer: Optimizer of the steps.
      layouts: Layouts under which it is verified.
      allow: Transfers that are named, beyond the default bound.
    """

    params: Any
    axes: Any
    loss: Callable[[Any, Any], jax.Array]
    optimizer: optax.GradientTransformation = ADAM
    layouts: tuple[Layout, ...] = LAYOUTS
    allow: tuple[str, ...] = ()

    def model(self, dtype: str) -> Model:
        """Returns what `jaxpar.verify.verify` takes."""
        params = jax.tree.map(lambda x: np.asarray(x, dtype), self.params)
        return Model(params, self.axes, self.loss, self.optimizer)


def batch(step: int) -> dict[str, np.ndarray]:
    """Returns a batch with uneven weights and a row of padding."""
    draw = np.random.default_rng(step)
    weights = draw.integers(1, 9, ROWS) / 4
    weights[ROWS // 2] = 0
    return {
        "x": draw.standard_normal((ROWS, WIDTH)).astype(np.float32),
        "y": draw.standard_normal((ROWS, WIDTH)).astype(np.float32),
        "weights": weights.astype(np.float32),
        "tokens": draw.integers(0, SYMBOLS, (ROWS, STEPS)).astype(np.int32),
    }


def draw(*shape: int, seed: int = 0) -> np.ndarray:
    """Returns normal weights of a fan-in scale."""
    fan_in = 1
    if len(shape) > 1:
        fan_in = shape[-2]
    return np.random.default_rng((seed, *shape)).standard_normal(shape) / np.sqrt(fan_in)


def weighted_mean(values: jax.Array, batch: Any) -> jax.Array:
    """Returns the mean over rows by their weights."""
    weights = batch["weights"].astype(values.dtype)
    return (values * weights).sum() / weights.sum()


def squared_error(out: jax.Array, batch: Any) -> jax.Array:
    """Returns the weighted mean of the squared error of outputs."""
    return weighted_mean(jnp.square(out - batch["y"].astype(out.dtype)).mean(-1), batch)


def used(params: Any, axes: Any, name: str) -> jax.Array:
    """Returns a weight as it is multiplied, by the table; its gradient is summed into shares."""
    names = axes[name]
    return gather(params[name], names, in_role(names, "use"), in_role(names, "grad"), name)


MLP_AXES = {"up": ("embed", "mlp"), "down": ("mlp", "embed")}


def mlp_params() -> dict[str, np.ndarray]:
    """Returns the two weights of a network."""
    return {"up": draw(WIDTH, HIDDEN), "down": draw(HIDDEN, WIDTH)}


def mlp(params: Any, x: jax.Array) -> jax.Array:
    """Computes a network of two products."""
    inside = jnp.tanh(x.astype(params["up"].dtype) @ used(params, MLP_AXES, "up"))
    out = constrain(inside, "batch", "mlp") @ used(params, MLP_AXES, "down")
    return constrain(out, "batch", None)


def by_hand() -> Foreign:
    """Returns a network that says how its weights and activations lie."""

    def loss(params, batch):
        return squared_error(mlp(params, batch["x"]), batch)

    return Foreign(mlp_params(), MLP_AXES, loss)


def _of_module(module: nn.Module, axes: Callable[[Any], Any], **options: Any) -> Foreign:
    """A module of flax that knows no mesh.

    Its parameters lie by their shapes, and are whole where it takes them.
    """
    sample = batch(0)["x"]
    params = jax.device_get(module.init(jax.random.key(0), sample, **options))["params"]
    lie = jax.tree.map(axes, params)

    def loss(params, batch):
        x = batch["x"].astype(jax.tree.leaves(params)[0].dtype)
        whole = jax.tree.map(lambda w, names: gather(w, names, in_role(names, "use")), params, lie)
        return squared_error(module.apply({"params": whole}, x, **options), batch)

    return Foreign(params, lie, loss, layouts=OF_ROWS)


def _fsdp_axes(x: Any) -> tuple[str | None, ...]:
    """Splits the first dimension of a matrix over fsdp."""
    if x.ndim == 2 and x.shape[0] % 8 == 0:
        return ("embed", None)
    return (None,) * x.ndim


class Dense(nn.Module):
    """Three layers of flax."""

    @nn.compact
    def __call__(self, x):
        for _ in range(2):
            x = nn.gelu(nn.Dense(HIDDEN, param_dtype=x.dtype)(x))
        return nn.Dense(WIDTH, param_dtype=x.dtype)(x)


def flax_mlp() -> Foreign:
    """Returns a network of flax with kernels that are split over fsdp at rest."""
    return _of_module(Dense(), _fsdp_axes)


def batch_norm() -> Foreign:
    """Returns a network that normalises over the batch: means over all devices' rows."""

    def loss(params, batch):
        x = batch["x"].astype(params["up"].dtype) @ used(params, MLP_AXES, "up")
        x = constrain(x, "batch", "mlp")
        mean = x.mean(0)
        variance = jnp.square(x - mean).mean(0)
        x = params["scale"] * (x - mean) * jax.lax.rsqrt(variance + 1e-5)
        out = jnp.tanh(x) @ used(params, MLP_AXES, "down")
        return squared_error(constrain(out, "batch", None), batch)

    params = mlp_params() | {"scale": np.ones(HIDDEN)}
    return Foreign(params, MLP_AXES | {"scale": ("mlp",)}, loss)


def tied() -> Foreign:
    """Returns a model with an embedding that is its head too."""
    axes = {"table": (None, "embed"), "mix": ("embed", None)}

    def loss(params, batch):
        table = used(params, axes, "table")
        x = constrain(table[batch["tokens"]], "batch", None, None)
        x = x + jnp.tanh(x @ used(params, axes, "mix"))
        logits = constrain(x[:, :-1] @ table.T, "batch", None, None)
        next_symbols = batch["tokens"][:, 1:, None]
        chosen = jnp.take_along_axis(jax.nn.log_softmax(logits), next_symbols, -1)[..., 0]
        return -weighted_mean(chosen.mean(-1), batch)

    params = {"table": draw(SYMBOLS, WIDTH), "mix": draw(WIDTH, WIDTH)}
    return Foreign(params, axes, loss, layouts=OF_ROWS)


def frozen() -> Foreign:
    """Returns a network with a bias that never learns, and another of the same name that does."""
    axes = MLP_AXES | {"b": (None,), "inner": {"b": (None,)}}

    def loss(params, batch):
        out = mlp(params, batch["x"]) + jax.lax.stop_gradient(params["b"]) + params["inner"]["b"]
        return squared_error(out, batch)

    params = mlp_params() | {"b": draw(WIDTH), "inner": {"b": draw(WIDTH, seed=1)}}
    return Foreign(params, axes, loss)


def scanned() -> Foreign:
    """Returns a scan over layers; each gathers its weights when it is computed."""
    stacked = {name: (None, *axes) for name, axes in MLP_AXES.items()}

    def loss(params, batch):
        def layer(x, weights):
            return x + mlp(weights, x), None

        x = constrain(batch["x"].astype(params["up"].dtype), "batch", None)
        x, _ = jax.lax.scan(jax.checkpoint(layer), x, params)
        return squared_error(x, batch)

    params = {"up": draw(3, WIDTH, HIDDEN) / 3, "down": draw(3, HIDDEN, WIDTH) / 3}
    return Foreign(params, stacked, loss)


class Recurrent(nn.Module):
    """An LSTM of flax over the symbols of a row."""

    @nn.compact
    def __call__(self, x):
        steps = x.reshape(x.shape[0], 4, -1)
        cell = nn.OptimizedLSTMCell(WIDTH, param_dtype=x.dtype)
        return nn.RNN(cell)(steps)[:, -1]


def lstm() -> Foreign:
    """Returns an LSTM with whole kernels."""
    return _of_module(Recurrent(), lambda x: (None,) * x.ndim)


def experts() -> Foreign:
    """Returns a mixture with experts that devices share: each adds its own part of every row."""
    axes = {"router": (None, None), "up": ("experts", None, None), "down": ("experts", None, None)}

    def loss(params, batch):
        x = constrain(batch["x"].astype(params["router"].dtype), "batch-experts", None)
        shares = jax.nn.softmax(x @ params["router"])
        inside = jnp.tanh(jnp.einsum("nd,edf->nef", x, params["up"]))
        inside = constrain(inside, "batch-experts", "experts", None)
        each = jnp.einsum("nef,efd->ned", inside, params["down"])
        out = jnp.einsum("ned,ne->nd", each, shares)
        return squared_error(constrain(out, "batch-experts", None), batch)

    params = {
        "router": draw(WIDTH, 4),
        "up": draw(4, WIDTH, HIDDEN),
        "down": draw(4, HIDDEN, WIDTH),
    }
    layout = Layout(MeshSpec(data=4, expert=2))
    return Foreign(params, axes, loss, layouts=(layout,), allow=("gather over expert",))


def sharded_embedding() -> Foreign:
    """Returns a model with an embedding that is split over tensor: each device looks its own up."""
    axes = {"table": ("vocab", None), "out": (None, None)}

    def looked_up(table, tokens):
        first = 0
        if mesh_axes("vocab"):
            first = jax.lax.axis_index(mesh_axes("vocab")) * table.shape[0]
        mine = (tokens >= first) & (tokens < first + table.shape[0])
        x = jnp.where(mine[..., None], table[jnp.where(mine, tokens - first, 0)], 0)
        if mesh_axes("vocab"):
            return jax.lax.psum(x, mesh_axes("vocab"))
        return x

    def loss(params, batch):
        split = [("vocab", None), ("batch", None)]
        x = local(looked_up, split, ("batch", None, None))(params["table"], batch["tokens"])
        return squared_error(jnp.tanh(x).mean(1) @ params["out"], batch)

    params = {"table": draw(SYMBOLS, WIDTH), "out": draw(WIDTH, WIDTH)}
    return Foreign(params, axes, loss, layouts=LAYOUTS[:1])


class Convolved(nn.Module):
    """A convolution of flax over the numbers of a row."""

    @nn.compact
    def __call__(self, x):
        x = nn.relu(nn.Conv(4, (3,), param_dtype=x.dtype)(x[..., None]))
        return nn.Dense(WIDTH, param_dtype=x.dtype)(x.reshape(x.shape[0], -1))


def convolution() -> Foreign:
    """Returns a convolution and a product."""
    return _of_module(Convolved(), _fsdp_axes)


class Attending(nn.Module):
    """Attention of flax over the parts of a row."""

    @nn.compact
    def __call__(self, x):
        parts = x.reshape(x.shape[0], 4, -1)
        attention = nn.MultiHeadDotProductAttention(2, param_dtype=x.dtype, dtype=x.dtype)
        return attention(parts, parts).reshape(x.shape[0], -1)


def attention() -> Foreign:
    """Returns attention with whole weights."""
    return _of_module(Attending(), lambda x: (None,) * x.ndim)


def plain_descent() -> Foreign:
    """Returns a network with an optimizer that has no state."""
    return by_hand()._replace(optimizer=optax.sgd(0.1))


def stateless() -> Foreign:
    """Returns a network; the state of its optimizer is an empty tuple."""
    rule = optax.GradientTransformation(
        lambda params: (),
        lambda grads, state, params=None: (jax.tree.map(lambda g: -0.1 * g, grads), state),
    )
    return by_hand()._replace(optimizer=rule)


def accumulated() -> Foreign:
    """Returns a network with an optimizer that steps after every second gradient."""
    return by_hand()._replace(optimizer=optax.MultiSteps(ADAM, 2).gradient_transformation())


CORRECT = (
    by_hand,
    flax_mlp,
    batch_norm,
    tied,
    frozen,
    scanned,
    lstm,
    experts,
    sharded_embedding,
    convolution,
    attention,
    plain_descent,
    stateless,
    accumulated,
)


# Wrong ones, each a network with a loss that is right on one device.


def local_means() -> Foreign:
    """Takes each device's own mean by weights, and the plain mean of these."""

    def mean(values, weights):
        own = (values * weights).sum() / jnp.maximum(weights.sum(), 1e-6)
        if mesh_axes("batch"):
            return jax.lax.pmean(own, mesh_axes("batch"))
        return own

    def loss(params, batch):
        difference = mlp(params, batch["x"]) - batch["y"].astype(params["up"].dtype)
        values = jnp.square(difference).mean(-1)
        weights = batch["weights"].astype(values.dtype)
        return local(mean, [("batch",), ("batch",)], (), check=False)(values, weights)

    return by_hand()._replace(loss=loss, layouts=(Layout(MeshSpec(data=8)),))


def whole_batch() -> Foreign:
    """Has every device compute all rows."""

    def loss(params, batch):
        batch = {name: constrain(x, *(None,) * x.ndim) for name, x in batch.items()}
        up, down = (used(params, MLP_AXES, name) for name in ("up", "down"))
        return squared_error(jnp.tanh(batch["x"].astype(up.dtype) @ up) @ down, batch)

    return by_hand()._replace(loss=loss, layouts=(Layout(MeshSpec(fsdp=8)),))


def gathered_activations() -> Foreign:
    """Makes the hidden layer whole on every device to take its median over the batch."""

    def loss(params, batch):
        inside = jnp.tanh(batch["x"].astype(params["up"].dtype) @ used(params, MLP_AXES, "up"))
        whole = constrain(constrain(inside, "batch", None), None, None)
        inside = constrain(inside, "batch", None) - jnp.sort(whole, axis=0)[ROWS // 2]
        out = constrain(inside @ used(params, MLP_AXES, "down"), "batch", None)
        return squared_error(out, batch)

    return by_hand()._replace(loss=loss, layouts=(Layout(MeshSpec(fsdp=8)),))


def gathered_four_times() -> Foreign:
    """Gathers its weights for each of four parts of a row."""

    def loss(params, batch):
        def part(total, scale):
            return total + scale * mlp(params, scale * batch["x"].astype(params["up"].dtype)), None

        zero = jnp.zeros(batch["x"].shape, params["up"].dtype)
        out, _ = jax.lax.scan(jax.checkpoint(part), zero, jnp.ones(4, params["up"].dtype) / 4)
        return squared_error(out, batch)

    return by_hand()._replace(loss=loss, layouts=(Layout(MeshSpec(fsdp=8)),))


def whole_weights() -> Foreign:
    """Has every device hold all weights, also those that tensor splits."""

    def loss(params, batch):
        split = {name: constrain(params[name], *MLP_AXES[name]) for name in ("up", "down")}
        up = constrain(split["up"], None, None)
        down = constrain(split["down"], None, None)
        out = constrain(jnp.tanh(batch["x"].astype(up.dtype) @ up), "batch", None) @ down
        return squared_error(constrain(out, "batch", None), batch)

    return by_hand()._replace(loss=loss, layouts=(Layout(MeshSpec(fsdp=2, tensor=2)),))


WRONG = (local_means, whole_batch, gathered_activations, gathered_four_times, whole_weights)
