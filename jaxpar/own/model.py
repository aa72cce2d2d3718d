"""A model of one's own as an `Algorithm`: three functions, an optimizer, and how the parameters lie on a mesh."""

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import flax.core
import jax
import jax.numpy as jnp
import numpy as np
import optax

from jaxpar.mesh import axes_like, gather, in_role
from jaxpar.optim import Optimizer
from jaxpar.optim.update import finite_or_old
from jaxpar.types import Info, PRNGKey, PyTree, UsageError

__all__ = ["OwnModel", "OwnState", "path_of"]

OWN_METRICS = ("loss", "grad_norm", "skipped")

Axes = tuple[str | None, ...]


class OwnState(NamedTuple):
    """Where a run is.

    Attributes:
      params: What is trained.
      collections: What flax's modules change beside that, such as {"batch_stats": ...}; {} if nothing, and None where
        variables are the parameters themselves.
      optimizer: The optimizer's state.
    """

    params: PyTree
    collections: dict[str, PyTree] | None
    optimizer: PyTree


@dataclasses.dataclass(frozen=True)
class OwnModel:
    """A model, its task and how it is trained; static, and an `Algorithm`.

    `init` makes `variables`: a pytree of parameters, or what flax's `module.init` returns, {"params": ...} with other
    collections beside. The gradient is that of the parameters. The rest, such as batch statistics, is what `loss` says.

    Attributes:
      init_variables: key -> variables.
      loss: (variables, batch, key) -> scalar, or (scalar, {name: ...}) with metrics, which are scalars, and the new
        value of each other collection than "params". The key belongs to the step, for dropout and the like.
      predict: (variables, batch) -> pytree of arrays, the rows of the batch in front.
      optimizer: One of optax's, or `jaxpar.optim.Optimizer` with a schedule.
      collate: list of n examples -> pytree of NumPy arrays with n rows in front; a function of the examples alone.
      names: Logical axes of each parameter, in the order of the tree's leaves, as `lay_out` finds them; () leaves all
        whole.
      validation_loss: (variables, batch) -> scalar, or (scalar, metrics): the loss of held-out
        examples, without dropout and with kept statistics; a mean over the rows. None takes `loss`
        with the key of seed 0.
    """

    init_variables: Callable[[PRNGKey], PyTree]
    loss: Callable[[PyTree, PyTree, PRNGKey], Any]
    predict: Callable[[PyTree, PyTree], PyTree]
    optimizer: optax.GradientTransformation | Optimizer
    collate: Callable[[list], PyTree]
    names: tuple[Axes, ...] = ()
    # A scalar, or (scalar, metrics).
    validation_loss: Callable[[PyTree, PyTree], Any] | None = None

    def init(self, key: PRNGKey, inputs: PyTree = None) -> OwnState:
        """Makes the first state.

        Raises:
          UsageError: A parameter is no array of floats.
        """
        del inputs
        variables = flax.core.meta.unbox(self.init_variables(key))
        params, collections = parted(variables)
        if not jax.tree.leaves(params):
            raise UsageError("init_variables made no parameter, so there is nothing to train.")
        for path, leaf in jax.tree_util.tree_leaves_with_path(
            {"params": params} | (collections or {})
        ):
            if not isinstance(leaf, jax.Array | np.ndarray):
                kind = type(leaf).__name__
                raise UsageError(
                    f"{path_of(path)} is a {kind}, not an array; legal leaves of variables are arrays."
                )
            if path[0].key == "params" and not jnp.issubdtype(leaf.dtype, jnp.floating):
                raise UsageError(
                    f"{path_of(path)} is of {leaf.dtype}, which has no gradient; legal are parameters of floats, and "
                    "other arrays in a collection of their own beside 'params'."
                )
        params, collections = jax.tree.map(jnp.asarray, (params, collections))
        return OwnState(params, collections, self.rule().init(params))

    def step(self, key: PRNGKey, state: OwnState, inputs: PyTree) -> tuple[OwnState, Info]:
        """Makes one optimizer step on a batch; without a finite loss and parameters it changes nothing.

        Nor does one that would write a number that is not finite over a finite one of a collection,
        such as a running mean: all that is predicted later would be of it.

        Returns:
          The state, and "loss", "grad_norm", "skipped" (1 where the state is the old one) and the metrics of `loss`.
        """

        def value(params):
            total, metrics, collections = self.valued(params, state.collections, inputs, key)
            return total, (metrics, collections)

        (total, (metrics, collections)), grads = jax.value_and_grad(value, has_aux=True)(
            state.params
        )
        updates, optimizer = self.rule().update(grads, state.optimizer, state.params)
        norm = optax.tree.norm(grads)
        new = optax.apply_updates(state.params, updates), (optimizer, collections)
        old = state.params, (state.optimizer, state.collections)
        (params, (optimizer, collections)), good = finite_or_old(
            new, old, norm, jnp.isfinite(total) & _stay_finite(collections, state.collections)
        )
        info = {"loss": total, "grad_norm": norm, "skipped": (~good).astype(jnp.float32)}
        return OwnState(params, collections, optimizer), info | metrics

    def axes(self) -> OwnState:
        """Logical axes of the state: of the parameters and their copies in the optimizer; all else is whole."""
        shapes = jax.eval_shape(self.init, jax.random.key(0))
        axes = self.param_axes(shapes.params)
        whole = jax.tree.map(lambda x: (None,) * len(x.shape), shapes.collections)
        return OwnState(axes, whole, axes_like(shapes.optimizer, shapes.params, axes))

    def param_axes(self, params: PyTree) -> PyTree:
        """Returns the logical axes of the parameters, in their structure."""
        leaves, structure = jax.tree.flatten(params)
        names = self.names or tuple((None,) * len(leaf.shape) for leaf in leaves)
        return jax.tree.unflatten(structure, names)

    def valued(
        self, params: PyTree, collections: dict[str, PyTree] | None, batch: PyTree, key: PRNGKey
    ) -> tuple[jax.Array, Info, dict[str, PyTree] | None]:
        """Returns loss, metrics and the new collections of a batch; on a mesh, weights are gathered before use.

        Raises:
          UsageError: The loss is no scalar, or what comes with it is not what `loss` may return.
        """
        if self.names:
            params = jax.tree.map(_for_use, params, self.param_axes(params))
        result = self.loss(variables_of(params, collections), batch, key)
        total, more = _total_and_rest(result, "loss")
        new = _new_collections(collections or {}, more)
        return total, _metrics(more, new), None if collections is None else new

    def judged(
        self, params: PyTree, collections: dict[str, PyTree] | None, batch: PyTree
    ) -> tuple[jax.Array, Info]:
        """Returns loss and metrics of held-out examples, by `validation_loss` where there is one.

        Raises:
          UsageError: As `valued`.
        """
        if self.validation_loss is None:
            total, metrics, _ = self.valued(params, collections, batch, jax.random.key(0))
            return total, metrics
        if self.names:
            params = jax.tree.map(_for_use, params, self.param_axes(params))
        result = self.validation_loss(variables_of(params, collections), batch)
        total, more = _total_and_rest(result, "validation_loss")
        rest = {name: value for name, value in more.items() if name not in (collections or {})}
        return total, _metrics(rest, {})

    def rule(self) -> optax.GradientTransformation:
        """Returns the optimizer as one of optax's."""
        return (
            self.optimizer.transformation()
            if isinstance(self.optimizer, Optimizer)
            else self.optimizer
        )


def _stay_finite(new: PyTree, old: PyTree) -> jax.Array:
    """Returns whether no finite float of a tree becomes one that is not, bool []."""
    good = jnp.bool_(True)
    for after, before in zip(jax.tree.leaves(new), jax.tree.leaves(old), strict=True):
        if jnp.issubdtype(after.dtype, jnp.inexact):
            good = good & (jnp.isfinite(after) | ~jnp.isfinite(before)).all()
    return good


def _total_and_rest(
    result: object, name: str
) -> tuple[jax.Array, Mapping[str, Any]]:  # metrics and collections, which are read later
    """Returns the scalar that a user's function made, and the rest that it returned."""
    total, more = result if isinstance(result, tuple) and len(result) == 2 else (result, {})
    if (
        not isinstance(total, jax.Array)
        or total.shape
        or not jnp.issubdtype(total.dtype, jnp.floating)
    ):
        is_array = isinstance(total, jax.Array)
        found = f"{total.dtype}{list(total.shape)}" if is_array else f"a {type(total).__name__}"
        raise UsageError(
            f"{name} must return a float scalar, or (scalar, dict), but made {found}; take a mean."
        )
    if not isinstance(more, Mapping):
        raise UsageError(
            f"{name} returned (scalar, {type(more).__name__}); legal beside the scalar is a dict."
        )
    return total, more


def _new_collections(old: Mapping[str, PyTree], more: Mapping[str, PyTree]) -> dict[str, PyTree]:
    """Takes the new collections out of what a loss returned."""
    if missing := sorted(old.keys() - more.keys()):
        raise UsageError(
            f"loss must return the new {missing[0]!r}, a collection that init made, as in "
            f"(scalar, {{{missing[0]!r}: ...}}); flax's apply gives it with mutable=[{missing[0]!r}]."
        )
    new = {name: flax.core.unfreeze(more[name]) for name in old}
    shapes = [
        jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), tree)
        for tree in (dict(old), new)
    ]
    if shapes[0] != shapes[1]:
        raise UsageError(
            f"loss returned {', '.join(old)} with other names, shapes or dtypes than it was given."
        )
    return new


def _metrics(more: Mapping[str, PyTree], collections: Mapping[str, PyTree]) -> Info:
    """Takes the metrics out of what a loss returned."""
    found = {}
    for name in sorted(more.keys() - collections.keys()):
        if not isinstance(more[name], jax.Array | np.ndarray | float | int):
            made = ", ".join(collections) or "none"
            raise UsageError(
                f"loss returned {name!r}, neither a scalar nor a collection that init made ({made})."
            )
        found[name] = jnp.asarray(more[name])
        if found[name].shape or name in OWN_METRICS:
            reason = (
                f"has shape {found[name].shape}"
                if found[name].shape
                else "is one that every run has"
            )
            raise UsageError(f"metric {name!r} of loss {reason}; legal are scalars by other names.")
    return found


def _for_use(x: jax.Array, axes: Axes) -> jax.Array:
    """Gathers a weight over what fsdp splits; its gradient is summed into shares again."""
    return gather(x, axes, in_role(axes, "use"), in_role(axes, "grad"), "a parameter")


def parted(variables: PyTree) -> tuple[PyTree, dict[str, PyTree] | None]:
    """Returns what is trained of variables, and their other collections, None where there can be none."""
    if not (isinstance(variables, Mapping) and "params" in variables):
        return variables, None
    whole = flax.core.unfreeze(dict(variables))
    return whole.pop("params"), whole


def variables_of(params: PyTree, collections: Mapping[str, PyTree] | None) -> PyTree:
    """Returns the variables that a user's functions get."""
    return params if collections is None else {"params": params, **collections}


def path_of(path: Sequence[Any]) -> str:  # the parts of JAX's key paths have no type of their own
    """Returns the path of a leaf, its parts joined by slashes."""
    return jax.tree_util.keystr(tuple(path), simple=True, separator="/")
