"""Which parameters a run updates and how fast: freezing by pattern, rates by depth; and their running average.

Example:
    import jax, jax.numpy as jnp

    from jaxpar.lm import LMConfig, Trainer, TuningConfig

    model = LMConfig(vocab_size=8, num_layers=2, embed_dim=8, dtype="float32")
    trainer = Trainer(model, tuning=TuningConfig(freeze=("embedding", "w_*"), layer_decay=0.5))
    state = trainer.init(jax.random.key(0))
    batch = dict.fromkeys(("tokens", "targets"), jnp.arange(8).reshape(2, 4))
    after, _ = jax.jit(trainer.step)(jax.random.key(1), state, batch)
    assert (after.params["embedding"] == state.params["embedding"]).all()
"""

import dataclasses
import fnmatch
from collections.abc import Callable, Collection
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.extend.core import Var

from jaxpar.fields import Between, check_fields, field
from jaxpar.lm.config import LMConfig
from jaxpar.lm.params import Leaf, leaves
from jaxpar.pipeline.accumulation import Stages
from jaxpar.types import Array, PRNGKey, PyTree, UsageError

__all__ = ["TuningConfig"]


@dataclasses.dataclass(frozen=True)
class TuningConfig:
    """What of a model is updated, and how fast.

    Attributes:
      freeze: Patterns of parameters that stay as they are, as of a shell: of names such as embedding, head, final_norm,
        wq or w_up, or of layers.wq. They have neither gradients nor moments.
      layer_decay: d, of rates by depth: layer l of L has d^(L - l) of the rate, embeddings d^(L + 1), final norm and
        head all of it.
      ema: d, of a running average a <- d a + (1 - d) p of what is trained; 0 keeps none.
    """

    freeze: tuple[str, ...] = field((), None, identity="changed")
    layer_decay: float = field(1.0, Between(0, 1, "(]"), identity="changed")
    ema: float = field(0.0, Between(0, 1, "[)"), identity="changed")

    def __post_init__(self):
        """Refuses numbers that are none."""
        check_fields(self, "tuning.")
        object.__setattr__(self, "freeze", tuple(self.freeze))  # flags are lists


def frozen_names(model: LMConfig, patterns: tuple[str, ...]) -> frozenset[str]:
    """Returns the parameters that patterns mean, by names such as "layers.wq".

    Raises:
      UsageError: A pattern means none, or all together mean every one.
    """
    found = named_parameters(model, patterns, "tuning.freeze")
    if len(found) == len(jax.tree.leaves(leaves(model), is_leaf=_is_leaf)):
        raise UsageError(
            f"tuning.freeze={','.join(patterns)} leaves nothing to train; leave a parameter out."
        )
    return found


def named_parameters(model: LMConfig, patterns: tuple[str, ...], flag: str) -> frozenset[str]:
    """Returns the parameters that the patterns of a flag mean, by names such as "layers.wq".

    Raises:
      UsageError: A pattern means none.
    """
    flat = jax.tree_util.tree_leaves_with_path(leaves(model), is_leaf=_is_leaf)
    names = [jax.tree_util.keystr(path, simple=True, separator=".") for path, _ in flat]
    found: set[str] = set()
    for pattern in patterns:
        hits = {
            name
            for name in names
            if any(fnmatch.fnmatchcase(part, pattern) for part in _called(name))
        }
        if not hits:
            legal = ", ".join(name.removeprefix("layers.") for name in names)
            raise UsageError(
                f"{flag}={pattern} matches no parameter; legal are patterns of {legal}."
            )
        found |= hits
    return frozenset(found)


def _is_leaf(value: object) -> bool:
    return isinstance(value, Leaf)


def _called(name: str) -> tuple[str, ...]:
    """What a pattern may call a parameter: all of its path, that within the layers, or its end."""
    return name, name.removeprefix("layers."), name.rpartition(".")[2]


def without(tree: PyTree, names: Collection[str], prefix: str = "") -> PyTree:
    """Returns nested dicts without the leaves of these dotted names, nor dicts that are left empty."""
    if not names:
        return tree
    out = {}
    for key, value in tree.items():
        name = f"{prefix}{key}"
        if isinstance(value, dict):
            value = without(value, names, f"{name}.")
            if not value:
                continue
        if name not in names:
            out[key] = value
    return out


def laid_over(tree: PyTree, over: PyTree) -> PyTree:
    """Returns nested dicts of the leaves of both; where both have one, that in `over`."""
    if not isinstance(tree, dict):
        return over
    return tree | {
        key: laid_over(tree[key], value) if key in tree else value for key, value in over.items()
    }


def selected(tree: PyTree, names: Collection[str], prefix: str = "") -> PyTree:
    """Returns nested dicts of the leaves of these dotted names alone: what `without` leaves out."""
    out = {}
    for key, value in tree.items():
        name = f"{prefix}{key}"
        if name in names:
            out[key] = value
        elif isinstance(value, dict):
            part = selected(value, names, f"{name}.")
            if part:
                out[key] = part
    return out


class Trained(NamedTuple):
    """What of a model is trained: its parameters in two parts, and how they are one again.

    `join(*split(params, key))` is `params`, but for what a rounded base loses.

    Attributes:
      split: (params, key) -> (trained, kept); the key draws what a model has not, as adapters, and
        may be None where nothing is drawn.
      join: (trained, kept, key) -> params as `jaxpar.lm.apply` takes them; a key switches dropout
        of what is trained on, and None leaves it off.
      layer: (a turn's params of `join` without a key, its number, key) -> the same with a key.
    """

    split: Callable[[PyTree, PRNGKey | None], tuple[PyTree, PyTree]]
    join: Callable[[PyTree, PyTree, PRNGKey | None], PyTree]
    layer: Callable[[PyTree, int | Array, PRNGKey | None], PyTree]


def trained_but(names: Collection[str]) -> Trained:
    """Returns that all parameters are trained, except these dotted names, which are kept."""

    def split(params: PyTree, key: PRNGKey | None):
        del key
        return without(params, names), selected(params, names)

    def join(trained: PyTree, kept: PyTree, key: PRNGKey | None):
        del key
        if not names:
            return trained
        return laid_over(kept, trained)

    return Trained(split=split, join=join, layer=lambda params, index, key: params)


def trained_stages(plain: Stages, parts: Trained, kept: PyTree) -> Stages:
    """Returns a model in pieces, with the trained parameters alone.

    Layers' arrays that do not depend on them have no gradient in any schedule.

    Args:
      plain: The model in pieces, of all parameters.
      parts: How they are parted.
      kept: Those that stay.
    """

    def joined(trained: PyTree) -> PyTree:
        return parts.join(trained, kept, None)

    def whole(trained: PyTree, data: PyTree, key: PRNGKey | None, total: Array, share: float):
        return plain.whole(parts.join(trained, kept, key), data, key, total, share)

    def layer(params: PyTree, index: int | Array, x: PyTree, data: PyTree, key: PRNGKey | None):
        return plain.layer(parts.layer(params, index, key), index, x, data, key)

    def release(trained: PyTree, gradient: PyTree):
        params, pull = jax.vjp(joined, trained)
        return pull(plain.release(params, gradient))[0]

    def fixed(trained: PyTree) -> tuple[bool, ...]:
        return _independent(lambda trained: plain.hold(joined(trained))["layers"], trained)

    return plain._replace(
        hold=lambda trained: plain.hold(joined(trained)),
        layer=layer,
        whole=whole,
        release=release,
        fixed=fixed,
    )


def _independent(fn: Callable[[PyTree], PyTree], argument: PyTree) -> tuple[bool, ...]:
    """Returns of each array that `fn` makes whether it does not depend on its argument.

    Of an inner program all results depend on an input of it, or none.
    """
    program = jax.make_jaxpr(fn)(argument).jaxpr
    some = set(program.invars)
    for equation in program.eqns:
        if any(isinstance(atom, Var) and atom in some for atom in equation.invars):
            some.update(equation.outvars)
    return tuple(not (isinstance(atom, Var) and atom in some) for atom in program.outvars)


def average_of(trained: PyTree, decay: float) -> PyTree:
    """Returns the running average before the first step: a copy, or None where none is kept."""
    return jax.tree.map(jnp.copy, trained) if decay else None


def next_average(average: PyTree, trained: PyTree, decay: float, good: Array) -> PyTree:
    """Returns the running average after a step, the old one where the step changed nothing; None of None."""
    if average is None:
        return None
    new = optax.incremental_update(trained, average, 1 - decay)
    return jax.tree.map(lambda new, old: jnp.where(good, new, old), new, average)


def depth_scales(model: LMConfig, decay: float) -> Callable[[PyTree], PyTree]:
    """Returns a function of (a part of) the parameters, or of adapters, to what their rates are multiplied by.

    That is a number a leaf, or of stacked layers an array [L, 1, ...].
    """

    def one(path, leaf):
        names, num = [part.key for part in path], model.num_layers
        if names[0] == "layers":
            period = model.stack().period
            place = int(names[1]) if period > 1 else 0
            layers = np.arange(leaf.shape[0]) * period + place
            return (decay ** (num - layers)).reshape(-1, *[1] * (leaf.ndim - 1))
        return decay ** (num + 1) if names[0] in ("embedding", "positions") else 1.0

    return lambda tree: jax.tree_util.tree_map_with_path(one, tree)
