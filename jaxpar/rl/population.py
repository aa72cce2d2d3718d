"""Pbt-based training: learners side by side, of whom the worst go on from the best with other rates."""

import dataclasses
import math

import jax
import jax.numpy as jnp

from jaxpar.fields import AtLeast, Between, check_fields, field
from jaxpar.rl.train import Seeds
from jaxpar.types import Array, Info, PRNGKey, PyTree, UsageError

__all__ = ["Pbt", "taken_after"]

OWN = (
    "env_state",
    "agent_done",
    "episode_stats",
    "updates",
    "buffer",
)  # what a member keeps of its state


@dataclasses.dataclass(frozen=True)
class Pbt(Seeds):
    """Pbt-based training (Jaderberg et al. 2017, arXiv:1711.09846), as one `Algorithm`: see `Seeds`.

    Every `period` updates the worst members take weights, optimizer and rates of random ones of the best, as
    `taken_after` says, and each of their rates in `perturb` is multiplied or divided by `factor`, as a coin falls. What
    they have seen stays theirs: environments, and a replay buffer. A member is as good as its last episodes
    (`episode_stats`).

    Attributes:
        period: updates between exploitations.
        share: of the members that are replaced, and of those that they may take after, rounded up; at most a half.
        perturb: names of rates, of those that have no greatest value.
        factor: what they are multiplied or divided by.
        spread: they start at theirs times a number between 1 / spread and spread, uniform in the logarithm.
    """

    period: int = field(20, AtLeast(1))
    share: float = field(0.25, Between(0, 0.5, "(]"))
    perturb: tuple[str, ...] = ("learning_rate",)
    factor: float = field(1.2, AtLeast(1))
    spread: float = field(3.0, AtLeast(1))

    def __post_init__(self):
        """Refuses a population of one, and rates that could leave their range."""
        check_fields(self)
        if self.num_seeds < 2:
            raise UsageError(
                f"a population of num_seeds={self.num_seeds} has nobody to take after; give 2 or more."
            )
        legal = {
            each.name: each.metadata["legal"] for each in dataclasses.fields(self.learner.rates)
        }
        free = [name for name, of in legal.items() if of.high == math.inf]
        for name in self.perturb:
            if name not in free:
                raise UsageError(
                    f"perturb names {name!r}; legal are rates without a greatest value: {', '.join(free)}."
                )

    def init(self, key: PRNGKey, inputs: PyTree) -> PyTree:
        """The first states, with a leading axis of members, rates spread; consumes `key`."""
        state = super().init(key, inputs)
        power = jax.random.uniform(
            self._own(key), (len(self.perturb), self.num_seeds), minval=-1.0, maxval=1.0
        )
        return self._times(state, self.spread**power)

    def step(self, key: PRNGKey, state: PyTree, inputs: PyTree) -> tuple[PyTree, Info]:
        """Makes a step of each, and every `period`-th time lets the worst take after the best; consumes `key`.

        Returns:
            The states, and the info of `Seeds`, with "replaced", how many members were.
        """
        state, info = super().step(key, state, inputs)
        who_key, coin_key = jax.random.split(self._own(key))
        now = state.updates[0] % self.period == 0
        chosen = taken_after(
            who_key, state.episode_stats["return_mean"], math.ceil(self.share * self.num_seeds)
        )
        chosen = jnp.where(now, chosen, jnp.arange(self.num_seeds))
        moved = {
            each.name: jax.tree.map(lambda x: x[chosen], getattr(state, each.name))
            for each in dataclasses.fields(state)
            if each.name not in OWN
        }
        is_new = chosen != jnp.arange(self.num_seeds)
        up = jax.random.bernoulli(coin_key, shape=(len(self.perturb), self.num_seeds))
        times = jnp.where(is_new[None], jnp.where(up, self.factor, 1 / self.factor), 1.0)
        state = self._times(dataclasses.replace(state, **moved), times)
        return state, info | {"replaced": jnp.sum(is_new).astype(jnp.float32)}

    def _times(self, state: PyTree, numbers: Array) -> PyTree:
        """States whose rates in `perturb` are multiplied by the rows of `numbers`."""
        rates = {
            name: getattr(state.rates, name) * row
            for name, row in zip(self.perturb, numbers, strict=True)
        }
        return dataclasses.replace(state, rates=dataclasses.replace(state.rates, **rates))

    def _own(self, key: PRNGKey) -> PRNGKey:
        """A key that is none of the members'."""
        return jax.random.fold_in(key, self.num_seeds)


def taken_after(key: PRNGKey, score: Array, count: int) -> Array:
    """Whom each member goes on from, int32 `[P]`: itself, or for the `count` worst a random one of the `count` best.

    Only of a better one; a score of NaN is below all. Among equals the later member is the worse. Consumes `key`.
    """
    score = jnp.where(jnp.isnan(score), -jnp.inf, score)
    order = jnp.argsort(-score)
    best = order[jax.random.randint(key, (count,), 0, count)]
    worst = order[len(score) - count :]
    better = jnp.where(score[best] > score[worst], best, worst)
    return jnp.arange(len(score)).at[worst].set(better)
