"""What training makes smaller but for the loss of the next token: smoothed targets, a teacher's laws, preferences.

Example:
    import jax, jax.numpy as jnp

    from jaxpar.lm import LMConfig, ObjectiveConfig, Trainer, init

    model = LMConfig(vocab_size=8, num_layers=1, embed_dim=8, dtype="float32")
    trainer = Trainer(model, objective=ObjectiveConfig(distil=0.5, temperature=2.0), teacher=model)
    state = trainer.init(jax.random.key(0))
    batch = dict.fromkeys(("tokens", "targets"), jnp.arange(8).reshape(2, 4))
    batch["teacher"] = init(jax.random.key(1), model)
    state, info = jax.jit(trainer.step)(jax.random.key(2), state, batch)
    assert info["teacher_kl"] > 0
"""

import dataclasses
import math
from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
import optax
from jaxtyping import Array, Float

from jaxpar.fields import Between, OneOf, Positive, check_fields, field
from jaxpar.lm.config import LMConfig
from jaxpar.lm.loss import last
from jaxpar.lm.model import head, hidden, logits
from jaxpar.lm.stages import stages
from jaxpar.lm.text.batches import (
    BatchReport,
    has_invalid,
    report_of,
    token_info,
    valid_batch,
)
from jaxpar.mesh import constrain, mesh_axes
from jaxpar.nn.auxiliary import Aux, Sum, both
from jaxpar.pipeline.accumulation import Stages
from jaxpar.types import PRNGKey, PyTree, UsageError

__all__ = [
    "ObjectiveConfig",
    "Teacher",
    "num_pairs",
    "objective_report",
    "preference_loss",
    "token_log_likelihoods",
]

KINDS = ("tokens", "dpo")


@dataclasses.dataclass(frozen=True)
class ObjectiveConfig:
    """What training makes smaller.

    Attributes:
      kind: "tokens", the loss of the next token; "dpo", that of preferences (arXiv:2305.18290, eq. 7).
      label_smoothing: s: a target is s / V of every symbol and 1 - s of itself besides, in training alone.
      distil: Share of a teacher's laws in the loss, where there is one; the rest is that of the next token.
      temperature: T, of both laws where they are compared; their divergence counts T^2 (arXiv:1503.02531).
      beta: Of preferences: how far the model may go from where it began.
    """

    kind: str = field("tokens", OneOf(KINDS), identity="changed")
    label_smoothing: float = field(0.0, Between(0, 1, "[)"), identity="changed")
    distil: float = field(0.5, Between(0, 1, "(]"), identity="changed")
    temperature: float = field(1.0, Positive(), identity="changed")
    beta: float = field(0.1, Positive(), identity="changed")

    def __post_init__(self):
        """Refuses what would not be heeded."""
        check_fields(self, "objective.")
        if self.kind == "dpo" and self.label_smoothing:
            raise UsageError(
                f"objective.label_smoothing={self.label_smoothing} is of objective.kind=tokens; take 0 with dpo."
            )


class Teacher(NamedTuple):
    """A frozen model, from which another one learns.

    Attributes:
      config: Configuration of a model of the same symbols.
      params: Its parameters.
    """

    config: LMConfig
    params: PyTree


def objective_stages(
    model: LMConfig,
    objective: ObjectiveConfig,
    *,
    teacher: Teacher | None = None,
    reference: PyTree = None,
) -> Stages:
    """Returns a model in pieces whose loss is that of an objective.

    With a teacher, and of preferences, only `Stages.whole` and `total` know the loss, as `InTurn` reads.

    Args:
      model: Its configuration.
      objective: What its loss shall be.
      teacher: A frozen model of the same symbols; None for none.
      reference: Of preferences, frozen parameters of the same model: those that it began with.
    """
    plain = stages(model, objective.label_smoothing)
    if objective.kind == "dpo":

        def preferred(params: PyTree, data: dict, key: PRNGKey | None, total: Array, share: float):
            return preference_loss(
                params, reference, data, model, objective.beta, total, share, _dropped(key, model)
            )

        def total_of(batch: dict):
            # At least 1, so that it divides: without a pair the sum over pairs is 0.
            return jnp.maximum(num_pairs(batch, model), 1)

        return plain._replace(whole=preferred, total=total_of)
    if teacher is None:
        return plain

    def distilled(params: PyTree, data: dict, key: PRNGKey | None, total: Array, share: float):
        return _distilled(
            params, data, model, objective, teacher, total, share, _dropped(key, model)
        )

    return plain._replace(whole=distilled)


def objective_report(
    batch: dict[str, Array],
    model: LMConfig,
    objective: ObjectiveConfig,
) -> BatchReport:
    """Returns the counts of a batch; of preferences it is empty where no pair counts."""
    report = report_of(batch, model)
    if objective.kind == "dpo":
        return report._replace(empty=num_pairs(batch, model) == 0)
    return report


def _dropped(key: PRNGKey | None, config: LMConfig) -> PRNGKey | None:
    return key if config.dropout else None


def _distilled(
    params: PyTree,
    data: dict,
    model: LMConfig,
    objective: ObjectiveConfig,
    teacher: Teacher,
    total: Array,
    share: float,
    key: PRNGKey | None,
) -> tuple[Array, Aux]:
    """Returns (1 - distil) times the loss of the next token plus distil T^2 sum w KL(teacher || model) / total."""
    temperature = objective.temperature

    def divergence(x, x_teacher):
        own, theirs = _scores(held, x, model), _scores(held_teacher, x_teacher, teacher.config)
        own, theirs = (
            jax.nn.log_softmax(own / temperature),
            jax.nn.log_softmax(theirs / temperature),
        )
        return optax.losses.kl_divergence_with_log_targets(own, theirs)

    x, held, aux = _features(params, data, model, key)
    frozen = jax.lax.stop_gradient(teacher.params)
    x_teacher, held_teacher, _ = _features(frozen, data, teacher.config)
    value, told = last(x, head(params), data, model, total, objective.label_smoothing)
    weights = valid_batch(data, model)["weights"] / total
    chunk = min(model.execution.loss_chunk, teacher.config.execution.loss_chunk)
    apart = (weights * _by_chunks(divergence, chunk, x, x_teacher)).sum()
    value = (1 - objective.distil) * value + objective.distil * temperature**2 * apart
    told = both(told, Aux({}, {"teacher_kl": Sum(apart)}))
    return value + share * _extra(aux, value), both(aux, told)


def _extra(aux: Aux, like: Array) -> Array:
    return sum(aux.losses.values(), jnp.zeros((), like.dtype))


def num_pairs(batch: dict[str, Array], config: LMConfig | None = None) -> Array:
    """Returns how many pairs of a batch count: those with a token that does.

    With the model's configuration, a pair with an id outside of [0, V) does not count either.
    """
    return _pair_counts(batch, config).sum().astype(jnp.float32)


def _pair_counts(batch: dict[str, Array], config: LMConfig | None) -> Array:
    """Returns a flag for each pair that counts, [B]."""
    counts = jnp.any(batch["weights"] > 0, -1)
    if config is None:
        return counts
    return counts & ~has_invalid(batch, config)


def preference_loss(
    params: PyTree,
    reference: PyTree,
    batch: dict[str, Array],
    config: LMConfig,
    beta: float,
    total: Array | None = None,
    share: float = 1.0,
    dropout_key: PRNGKey | None = None,
) -> tuple[Float[Array, ""], Aux]:
    """Computes the loss of direct preference optimisation, the mean over pairs of -log sigmoid(margin).

        margin = beta ((l(chosen) - l_ref(chosen)) - (l(rejected) - l_ref(rejected)))

    where l is the log-likelihood of a completion given its prompt, summed over its tokens (arXiv:2305.18290, eq. 7).

    Cost: that of a step on 2 B rows, with a forward pass more, and one more of the reference.

    Args:
      params: The model's.
      reference: Of the same model, frozen.
      batch: "tokens", "targets" int and "weights" float [B, T], whose weights are 1 where a token is the completion's,
        of what was chosen; the same with ``rejected_`` before their names.
      config: The model; static.
      beta: How much a nat of difference counts.
      total: What the sum over pairs is divided by; by default how many there are.
      share: Of losses that layers tell.
      dropout_key: Switches dropout of the model on; consumed.

    Returns:
      The loss; and, told, "preference_accuracy", the share of pairs whose margin is over 0, and "preference_margin".
    """
    counted = _pair_counts(batch, config)
    if total is None:
        total = jnp.maximum(counted.sum().astype(jnp.float32), 1)
    rows, length = batch["tokens"].shape
    pairs = {  # beside each other, so that devices which share rows hold both of a pair
        name: jnp.stack([batch[name], batch.get(f"rejected_{name}", batch[name])], 1).reshape(
            2 * rows, length
        )
        for name in batch
        if not name.startswith("rejected_")
    }
    pairs = {name: constrain(x, "batch", "seq_layer") for name, x in pairs.items()}
    pairs = valid_batch(pairs, config)

    def of_completions(params: PyTree, key: PRNGKey | None):
        likely, aux = _likelihoods(params, pairs, config, key)
        return jnp.where(pairs["weights"] > 0, likely, 0).sum(-1).reshape(rows, 2), aux

    own, aux = of_completions(params, dropout_key)
    gained = own - jax.lax.stop_gradient(of_completions(reference, None)[0])
    margin = beta * (gained[:, 0] - gained[:, 1])
    counts = counted.astype(margin.dtype) / total.astype(margin.dtype)
    value = (
        counts * optax.losses.sigmoid_binary_cross_entropy(margin, jnp.ones_like(margin))
    ).sum()
    told: dict = {
        "preference_accuracy": Sum((counts * (margin > 0)).sum()),
        "preference_margin": Sum((counts * margin).sum()),
    }
    return value + share * _extra(aux, value), both(aux, Aux({}, jax.lax.stop_gradient(told)))


def token_log_likelihoods(
    params: PyTree, batch: dict[str, Array], config: LMConfig, dropout_key: PRNGKey | None = None
) -> Float[Array, "B T"]:
    """Computes log softmax(logits)[target] of each token, differentiable as often as one likes.

    Cost: 2 B T V D operations and those of the layers; with the gradient 8 B T V D, as logits are made anew in the
    backward pass. Memory: the logits of `config.loss_chunk` tokens a device.

    Args:
      params: As from `jaxpar.lm.init`.
      batch: As `jaxpar.lm.loss` takes it; "weights" are not read.
      config: The model; static.
      dropout_key: Switches dropout on; consumed.
    """
    return _likelihoods(params, batch, config, dropout_key)[0]


def _likelihoods(
    params: PyTree, batch: dict, config: LMConfig, key: PRNGKey | None
) -> tuple[Array, Aux]:
    def chosen(x, target):
        z = _scores(held, x, config)
        hit = (
            jnp.arange(z.shape[-1])[None, None] == target[..., None]
        )  # no gather, as devices may share the symbols
        return jnp.where(hit, z, 0).sum(-1) - jax.nn.logsumexp(z, -1)

    x, held, aux = _features(params, batch, config, key)
    return _by_chunks(chosen, config.execution.loss_chunk, x, batch["targets"]), aux


def _features(
    params: PyTree, batch: dict[str, Array], config: LMConfig, key: PRNGKey | None = None
):
    """Returns what the head is multiplied by, the head, gathered once for all chunks, and what layers told."""
    batch = valid_batch(batch, config)
    x, aux = hidden(
        params,
        batch["tokens"],
        config,
        token_info(batch),
        dropout_key=key,
    )
    return x, {"embedding": constrain(head(params).astype(x.dtype), "vocab", None)}, aux


def _scores(held: PyTree, x: Float[Array, "B t D"], config: LMConfig) -> Float[Array, "B t V"]:
    return constrain(logits(held, x, config), "batch", None, "vocab")


def _by_chunks(fn: Callable[..., Array], chunk: int, *arrays: Array) -> Array:
    """Applies fn([B, t, ...], ...) -> [B, t] to some tokens at a time, `chunk` a device; nothing of it is kept."""
    rows, length = arrays[0].shape[:2]
    mesh = jax.sharding.get_abstract_mesh().shape
    share = -(-rows // math.prod(mesh[axis] for axis in mesh_axes("batch")))
    count = -(-length // max(1, chunk // share))
    fn = jax.checkpoint(fn)  # type: ignore[reportPrivateImportUsage]
    if count == 1:
        return fn(*arrays)
    size = -(-length // count)

    def cut(x):
        x = jnp.pad(x, [(0, 0), (0, count * size - length)] + [(0, 0)] * (x.ndim - 2))
        return x.reshape(rows, count, size, *x.shape[2:]).swapaxes(0, 1)

    out = jax.lax.map(lambda parts: fn(*parts), tuple(map(cut, arrays)))
    return out.swapaxes(0, 1).reshape(rows, count * size)[:, :length]
