"""Networks over sequences, recurrent layers between a linear map in and one out, and the trainer of any network."""

import dataclasses
import math
from typing import Any

import jax
import jax.numpy as jnp
import optax
from flax import struct
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Int

from jaxpar.fields import AtLeast, OneOf, check_fields, field
from jaxpar.mesh import axes_like, constrain
from jaxpar.nn.cells.aaren import Aaren
from jaxpar.nn.cells.cell import Cell
from jaxpar.nn.leaf import Leaf, init_leaves, leaf_axes
from jaxpar.nn.mixer import DECODING, Context
from jaxpar.nn.mixers.by_name import LAYERS, layer_of
from jaxpar.nn.mixers.matrix_state import MatrixState
from jaxpar.nn.mixers.recurrent import CELLS, cell_of, mixer_leaves, sharded_recurrence
from jaxpar.optim import Optimizer, OptimizerConfig, make_optimizer
from jaxpar.solve.problem import Chooser, Method
from jaxpar.types import Info, PRNGKey, PyTree, UsageError, largest

__all__ = ["SequenceNetwork", "SequenceState", "SequenceTrainer", "weighted_cross_entropy"]

EPS = 1e-6  # of the norms


@dataclasses.dataclass(frozen=True)
class SequenceNetwork:
    """Maps sequences [B, T, inputs] to outputs [B, T, outputs], each of which has seen its past alone.

    A linear map to n features, then in each layer x + recurrent(norm(x)), a norm, and a linear map. Static, hashable.

    Attributes:
      inputs: Features of an input.
      outputs: Features of an output: classes, or 1 for a number.
      cell: One of `jaxpar.nn.mixers.CELLS`, or of `jaxpar.nn.mixers.LAYERS`, whose state is a matrix a head.
      size: n, units of a layer, and features between layers.
      layers: Recurrent layers.
      heads: Blocks of the dense cells' recurrent weights, and heads of aaren and of layers with a matrix state.
      method: How the recurrences are solved, for a cell without a closed form.
      classes: Whether targets are classes (cross entropy) or numbers (squared error).
    """

    inputs: int = field(legal=AtLeast(1))
    outputs: int = field(legal=AtLeast(1))
    cell: str = field("para_gru", OneOf((*CELLS, *LAYERS)))
    size: int = field(64, AtLeast(1))
    layers: int = field(2, AtLeast(1))
    heads: int = field(1, AtLeast(1))
    method: Method | Chooser | None = None
    classes: bool = True

    def __post_init__(self):
        """Refuses what no network can be."""
        check_fields(self)
        if self.cell in LAYERS and self.size % (unit := 4 * self.heads):
            raise UsageError(
                f"size={self.size} must be a multiple of 4 heads, {unit}, for cell={self.cell}."
            )
        if self.cell in LAYERS and self.method is not None:
            raise UsageError(
                f"cell={self.cell} has a closed form, which no method solves; take method=auto."
            )
        self.unit()

    def unit(self) -> Cell | Aaren | MatrixState:
        """Returns the cell of a layer, or the mixer of one with a matrix state."""
        if self.cell in LAYERS:
            return MatrixState(layer_of(self.cell, self.size, self.heads))
        return cell_of(self.cell, self.size, self.heads)

    def leaves(self) -> dict:
        """Declares every parameter."""
        n, out_std, unit = self.size, 1 / math.sqrt(self.size * self.layers), self.unit()
        scale = Leaf((n,), (None,), "ones")
        if isinstance(unit, MatrixState):
            layer = unit.leaves(n, 1 / math.sqrt(n), out_std)["mixer"] | {"norm": scale}
        else:
            layer = mixer_leaves(unit, n, out_std) | {"norm": scale}
        return {
            "w_in": Leaf((self.inputs, n), (None, "embed"), 1 / math.sqrt(self.inputs)),
            "b_in": Leaf((n,), (None,), "zeros"),
            "layers": {str(i): layer for i in range(self.layers)},
            "norm": scale,
            "head": Leaf((n, self.outputs), ("embed", None), 1 / math.sqrt(n)),
            "b_head": Leaf((self.outputs,), (None,), "zeros"),
        }

    def init(self, key: PRNGKey, dtype: DTypeLike = jnp.float32) -> PyTree:
        """Draws the parameters. Consumes `key`."""
        return init_leaves(key, self.leaves(), dtype)

    def axes(self) -> PyTree:
        """Returns the logical axes of every parameter."""
        return leaf_axes(self.leaves())

    def apply(
        self, params: PyTree, xs: Float[Array, "B T D"], states: PyTree | None = None
    ) -> tuple[Float[Array, "B T C"], PyTree, Info]:
        """Computes the outputs; with the states of an earlier call, of what follows there.

        Returns:
          Outputs; the layers' states after the last step, to go on from; and the worst of the layers' iterations,
          residual and converged, all 0, 0 and 1 for a closed form or a sequential method.
        """
        x = jnp.swapaxes(xs, 0, 1)
        x = x @ params["w_in"] + params["b_in"][None, None]
        last, infos = {}, []
        for name, layer in params["layers"].items():
            ys, last[name], info = self._mix(
                layer, _norm(x, layer["norm"]), states and states[name]
            )
            x = constrain(x + ys, None, "batch", None)
            infos.append(info)
        out = _norm(x, params["norm"]) @ params["head"] + params["b_head"][None, None]
        worst = {name: jnp.stack([info[name] for info in infos]) for name in infos[0]}
        info = {
            name: jnp.min(x) if name == "converged" else largest(x) for name, x in worst.items()
        }
        return jnp.swapaxes(out, 0, 1), last, info

    def _mix(
        self, layer: PyTree, x: Float[Array, "T B n"], state: PyTree
    ) -> tuple[Float[Array, "T B n"], PyTree, Info]:
        """Runs one layer from its state, or from the first one."""
        unit = self.unit()
        if not isinstance(unit, MatrixState):
            projections = unit.input_projections(layer, x)
            ys, last, info = sharded_recurrence(
                unit, layer, projections, state, method=self.method, with_info=True
            )
            return ys @ layer["w_out"], last, info
        length, rows, width = x.shape
        if state is None:
            state = {
                "seen": jnp.zeros((rows,), jnp.int32),
                "cache": unit.init_cache(rows, 0, width, x.dtype),
            }
        places = state["seen"][:, None] + jnp.arange(length, dtype=jnp.int32)[None]
        # Time is whole on each device here, in training too.
        context = Context(places, seen=state["seen"], rules=DECODING)
        ys, cache, _ = unit.apply({"mixer": layer}, jnp.swapaxes(x, 0, 1), state["cache"], context)
        closed = {"iterations": jnp.zeros(()), "residual": jnp.zeros(()), "converged": jnp.ones(())}
        return jnp.swapaxes(ys, 0, 1), {"seen": state["seen"] + length, "cache": cache}, closed

    def loss(
        self, params: PyTree, batch: dict[str, jax.Array], key: PRNGKey | None = None
    ) -> tuple[jax.Array, Info]:
        """Computes the loss of a batch, and with it accuracy (of classes), iterations, residual and converged.

        Args:
          params: As from `init`.
          batch: "inputs" [B, T, D], "targets" [B, T] (int classes, or numbers) and "weights" [B, T], what each counts.
          key: Not needed.
        """
        del key
        out, _, info = self.apply(params, batch["inputs"])
        if self.classes:
            loss, accuracy = weighted_cross_entropy(out, batch["targets"], batch["weights"])
            return loss, info | {"accuracy": accuracy}
        weights = batch["weights"] / batch["weights"].sum()
        return (weights * (out[..., 0] - batch["targets"]) ** 2).sum(), info


def weighted_cross_entropy(
    out: Float[Array, "... C"], targets: Int[Array, "..."], weights: Float[Array, "..."]
) -> tuple[jax.Array, jax.Array]:
    """Returns the weighted means of -log softmax(out)[target] and of whether the largest is the target's."""
    weights = weights / weights.sum()
    losses = optax.softmax_cross_entropy_with_integer_labels(out, targets)
    return (weights * losses).sum(), ((out.argmax(-1) == targets) * weights).sum()


def _norm(x: jax.Array, scale: jax.Array) -> jax.Array:
    return (
        x
        * jax.lax.rsqrt(jnp.square(x).mean(-1, keepdims=True) + EPS)
        * scale.reshape((1,) * (x.ndim - 1) + (-1,))
    )


@struct.dataclass
class SequenceState:
    """Parameters, the optimizer's state, and int32 [] steps made."""

    params: PyTree
    opt_state: PyTree
    step: jax.Array


@dataclasses.dataclass(frozen=True)
class SequenceTrainer:
    """Trains a network; an `Algorithm`.

    Attributes:
      network: What is trained: with `init(key)`, `axes()` and `loss(params, batch, key) -> (loss, info)`.
      optimizer: The update rule: by default Adam, warmed up from 0, then a cosine to 0. Matrices alone decay.
      num_steps: Length of the run, for the schedule.
    """

    network: Any
    optimizer: OptimizerConfig = OptimizerConfig(
        learning_rate=3e-3, warmup_start=0.0, final_ratio=0.0, b2=0.999, weight_decay=0.0
    )
    num_steps: int = field(1000, AtLeast(1))

    def __post_init__(self):
        """Refuses what nothing can be trained with."""
        check_fields(self)
        self.make_optimizer()

    def init(self, key: PRNGKey, inputs: PyTree = None) -> SequenceState:
        """Draws the parameters. Consumes `key`; ignores `inputs`."""
        del inputs
        params = self.network.init(key)
        return SequenceState(params, self.make_optimizer().init(params), jnp.zeros((), jnp.int32))

    def axes(self) -> SequenceState:
        """Returns the logical axes of every leaf of the state."""
        state = jax.eval_shape(lambda: self.init(jax.random.key(0)))
        return axes_like(state, state.params, self.network.axes())

    def step(
        self, key: PRNGKey, state: SequenceState, inputs: dict[str, jax.Array]
    ) -> tuple[SequenceState, Info]:
        """Makes one optimizer step on a batch as the network's `loss` takes it, which gets `key`.

        Returns:
          The new state, and scalars: those of `metrics`, grad_norm before clipping, learning_rate, and skipped: 1 where
          loss, gradient or new parameters are not finite, so that these are not taken.
        """

        def loss(params):
            loss, info = self.network.loss(params, inputs, key)
            return loss, info | {"loss": loss}

        grads, info = jax.grad(loss, has_aux=True)(state.params)
        params, opt_state, said = self.make_optimizer().update(
            grads, state.opt_state, state.params, good=jnp.isfinite(info["loss"])
        )
        return SequenceState(params, opt_state, state.step + 1), jax.tree.map(
            jnp.float32, info | said
        )

    def metrics(self, params: PyTree, batch: dict[str, jax.Array]) -> Info:
        """Computes what the network's `loss` does of a batch, the loss among it, as in use: without dropout."""
        loss, info = self.network.loss(params, batch)
        return info | {"loss": loss}

    def make_optimizer(self) -> Optimizer:
        """Returns the optimizer, whose state is `SequenceState.opt_state`."""
        return make_optimizer(self.optimizer, self.num_steps, axes=self.network.axes())
