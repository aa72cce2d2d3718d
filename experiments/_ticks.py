"""One request's tokens through a pipeline of stages, a tick at a time: schedules of speculative runs, cancelled or not.

A *run* is a window of tokens on its way through the target's stages, a stage a tick; as it leaves the last one it says
which token follows each of its own. What a schedule decides is when runs start and whose tokens they hold, never what a
run says: the text is that of the greedy loop.
"""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool

Target = Callable[[Any, Any], Any]
"""Tokens and the position after each of them, int32 -> the target's token there, in [0, VOCAB)."""
VOCAB = 64


class Schedule(NamedTuple):
    """When runs start; static.

    Attributes:
      stages: Of the target, so many ticks from a run's start to its end.
      guesses: Tokens of the draft in a run; 0 for plain decoding.
      draft_ticks: Time in which the draft makes them, on a device of its own.
      ahead: Ticks that the draft has for the next run before this one has ended, where an early exit of the target
        named the token that will follow: Mirror-SD (arXiv:2510.13161).
      continuous: Whether the draft goes on guessing while runs are under way, so that several are, the first after each
        mistake being of the one known token: PipeInfer (arXiv:2407.11798). Otherwise there is one run at a time.
      cancel: Whether runs that go on from a mistake end at once, or take up their stages to the end.
    """

    stages: int
    guesses: int = 0
    draft_ticks: int = 0
    ahead: int = 0
    continuous: bool = False
    cancel: bool = True

    @property
    def longest(self) -> int:
        """Ticks in which a token becomes certain, at the latest."""
        return self.stages + self.draft_ticks


class Runs(NamedTuple):
    """The run in each stage: tokens int32 [S, W], and [S] the first one's position, how many, after which mistake."""

    tokens: Array
    first: Array
    length: Array
    epoch: Array


class Ticks(NamedTuple):
    """The state after some ticks; counts are of runs unless they say otherwise.

    Attributes:
      text: int32 [N], of which `length` tokens are certain.
      length: int32 [].
      reads: int32 [N], how often each token was verified: stood in a run that was kept up to it.
      ticks: Until N tokens were certain.
      started: Runs that entered the first stage.
      kept: Runs that left the last stage and gave tokens.
      stale: Runs that left it to no avail.
      cancelled: Runs that were ended before.
      busy: Ticks times stages that held a run.
      runs: Those under way.
      epoch: Mistakes, and what is no mistake but a start after a run alone.
      root: The last token that was put into a run, or is to be the first of the next one.
      place: Its position.
      fresh: Whether it is to be.
      drafted: Ticks that the draft has spent on what follows it.
    """

    text: Array
    length: Array
    reads: Array
    ticks: Array
    started: Array
    kept: Array
    stale: Array
    cancelled: Array
    busy: Array
    runs: Runs
    epoch: Array
    root: Array
    place: Array
    fresh: Array
    drafted: Array


def guess(target: Target, agrees: Array, token: Array, position: Array) -> Array:
    """The draft's token at a position: the target's where they agree, else another."""
    right = target(token, position)
    return jnp.where(agrees[position], right, (right + 1) % VOCAB)


@functools.partial(jax.jit, static_argnums=(0, 1, 4))
def simulate(
    schedule: Schedule, target: Target, agrees: Bool[Array, " N"], hits: Bool[Array, " N"], first: int = 1
) -> Ticks:
    """Decodes N tokens, the token `first` at position 0 being given.

    Args:
      schedule: When runs start.
      target: The model: its greedy token from the one before.
      agrees: Whether the draft's token at each position is the target's, where the one before is.
      hits: Whether the early exit names the token at each position.
      first: The prompt.
    """
    size, none = len(agrees), jnp.zeros((), jnp.int32)
    width = schedule.guesses + 1
    stages = jnp.zeros(schedule.stages, jnp.int32)
    runs = Runs(jnp.zeros((schedule.stages, width), jnp.int32), stages, stages, stages)
    text = jnp.zeros(size, jnp.int32).at[0].set(first)
    state = Ticks(
        text, none + 1, jnp.zeros(size, jnp.int32), ticks=none, started=none, kept=none, stale=none, cancelled=none,
        busy=none, runs=runs, epoch=none, root=none + first, place=none, fresh=none == 0, drafted=none,
    )  # fmt: skip
    step = functools.partial(_tick, schedule, target, agrees, hits)

    def tick(state: Ticks, _: None) -> tuple[Ticks, None]:
        after = step(state)
        return jax.tree.map(lambda old, new: jnp.where(state.length >= size, old, new), state, after), None

    return jax.lax.scan(tick, state, None, length=size * schedule.longest)[0]


def _tick(schedule: Schedule, target: Target, agrees: Array, hits: Array, state: Ticks) -> Ticks:
    """A run leaves, another enters, the draft works on."""
    state = _start(schedule, target, agrees, _leave(schedule, target, agrees, hits, state))
    more = state.length < len(agrees)  # else the last token was there as this tick began
    busy = state.busy + more * (state.runs.length > 0).sum()
    return state._replace(ticks=state.ticks + more, drafted=state.drafted + 1, busy=busy)


def _leave(schedule: Schedule, target: Target, agrees: Array, hits: Array, state: Ticks) -> Ticks:
    """All runs move on by a stage; the one that leaves says what follows its tokens, and where the draft was wrong."""
    last = jax.tree.map(lambda x: x[-1], state.runs)
    runs = jax.tree.map(lambda x: jnp.roll(x, 1, axis=0), state.runs)
    runs = runs._replace(length=runs.length.at[0].set(0))
    live, size = (last.length > 0) & (last.epoch == state.epoch), len(agrees)
    inside = jnp.arange(len(last.tokens))
    places = last.first + inside
    says = target(last.tokens, places + 1)
    right = (inside < last.length) & jnp.concatenate([jnp.ones(1, bool), last.tokens[1:] == says[:-1]])
    kept = jnp.where(live, jnp.cumprod(right).sum(), 0)
    token, place = says[kept - 1], last.first + kept  # the new last one that is certain
    expected = guess(target, agrees, last.tokens[kept - 1], place)  # what later runs, or those to come, go on from
    missed = live & ((kept < last.length) | (not schedule.continuous) | (expected != token))
    ended = jnp.where(missed & schedule.cancel, runs.length > 0, False)
    into = jnp.where(inside < kept, places, size)
    return state._replace(
        text=state.text.at[into + 1].set(says, mode="drop"),
        length=state.length + kept,
        reads=state.reads.at[into].add(1, mode="drop"),
        kept=state.kept + live,
        stale=state.stale + ((last.length > 0) & ~live),
        cancelled=state.cancelled + ended.sum(),
        runs=runs._replace(length=jnp.where(ended, 0, runs.length)),
        epoch=state.epoch + missed,
        root=jnp.where(missed, token, state.root),
        place=jnp.where(missed, place, state.place),
        fresh=state.fresh | missed,
        drafted=jnp.where(missed, min(schedule.ahead, schedule.draft_ticks) * hits[place], state.drafted),
    )


def _start(schedule: Schedule, target: Target, agrees: Array, state: Ticks) -> Ticks:
    """A run starts where its tokens are there: a known one and guesses; if continuous, either of them."""
    chain = [state.root]
    for number in range(schedule.guesses):
        chain.append(guess(target, agrees, chain[-1], state.place + 1 + number))
    tokens, ready = jnp.stack(chain), state.drafted >= schedule.draft_ticks
    if schedule.continuous:
        starts, late = state.fresh | ready, (~state.fresh).astype(jnp.int32)
        first, tokens = state.place + late, jnp.where(late > 0, jnp.roll(tokens, -1), tokens)
        count = jnp.where(state.fresh, 1, schedule.guesses)
        moved = late * schedule.guesses
    else:
        starts, first, count, moved = state.fresh & ready, state.place, jnp.int32(schedule.guesses + 1), 0
    run = Runs(tokens, first, jnp.where(starts, count, 0), state.epoch)
    return state._replace(
        runs=jax.tree.map(lambda x, new: x.at[0].set(new), state.runs, run),
        started=state.started + starts,
        root=jnp.where(starts & (moved > 0), chain[-1], state.root),
        place=state.place + jnp.where(starts, moved, 0),
        fresh=state.fresh & ~starts,
        drafted=jnp.where(starts & schedule.continuous, 0, state.drafted),
    )


def expected_ticks(schedule: Schedule, acceptance: float, hit: float = 0.0) -> float:
    """Ticks a token in the long run where each guess agrees with probability a, and each early exit names with h.

    One run at a time: (S + D - h min(D, ahead)) / (1 + a + ... + a^k) for k guesses in D ticks. Continuous, D <= S: a
    mistake costs the pipeline's length, a run of k tokens enters every D ticks: (1 - a) S + D (a - a^2) / (1 - a^k).
    """
    stages, k, draft = schedule.stages, schedule.guesses, schedule.draft_ticks
    if schedule.continuous:
        runs = 1 / k if acceptance == 1 else (acceptance - acceptance**2) / (1 - acceptance**k)
        return (1 - acceptance) * stages + draft * runs
    tokens = sum(acceptance**number for number in range(k + 1))
    return (stages + draft - hit * min(draft, schedule.ahead)) / tokens
