"""One request's tokens through a pipeline of stages, a tick at a time: schedules of speculative runs, cancelled or not.

A *run* is a window of tokens on its way through the target's stages, a stage a tick; as it leaves the last one it says
which token follows each of its own. What a schedule decides is when runs start and whose tokens they hold, never what a
run says: the text is that of the greedy loop.
"""

import functools
from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool

Target = Callable[
    [Array, Array], Array
]  # tokens, the position after each -> the target's token there, below VOCAB
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


class Runs(NamedTuple):
    """The run in each stage, [S]: its first token's position, how many (0: none), whether no mistake is before it."""

    first: Array
    length: Array
    valid: Array


class Ticks(NamedTuple):
    """The state after some ticks.

    Of `text` int32 [N] `length` tokens are certain, and on the way the draft's guesses follow them; `reads` says how
    often each was verified: stood in a run that was kept up to it. All were so after `ticks`; `busy` is ticks times
    stages that held a run. Of the runs, `started` entered the first stage, `kept` left the last one and gave tokens,
    `stale` left it to no avail, `cancelled` were ended before, and `runs` are under way. The first token that is in no
    run yet is at `place`, and the draft has spent `drafted` ticks on the next run.
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
    place: Array
    drafted: Array


@functools.partial(jax.jit, static_argnums=(0, 1))
def simulate(
    schedule: Schedule, target: Target, agrees: Bool[Array, " N"], hits: Bool[Array, " N"]
) -> Ticks:
    """Decodes N tokens, token 1 at position 0 being given.

    Args:
      schedule: When runs start.
      target: The model: its greedy token from the one before.
      agrees: Whether the draft's token at each position is the target's, where the one before is.
      hits: Whether the early exit names the token at each position.
    """
    size, none, stages = (
        len(agrees),
        jnp.zeros((), jnp.int32),
        jnp.zeros(schedule.stages, jnp.int32),
    )
    text = (
        jnp.zeros(size + schedule.guesses, jnp.int32).at[0].set(1)
    )  # the last run may reach beyond N
    reads, runs = jnp.zeros(size, jnp.int32), Runs(stages, stages, stages > 0)
    state = Ticks(
        text, none + 1, reads, none, none, none, none, none, none, runs, place=none, drafted=none
    )
    enter = functools.partial(_start, schedule, target, agrees)
    leave = functools.partial(_leave, schedule, target, hits)
    end = jax.lax.while_loop(
        lambda state: state.length < size, lambda state: leave(enter(state)), state
    )
    return end._replace(text=end.text[:size])


def _start(schedule: Schedule, target: Target, agrees: Array, state: Ticks) -> Ticks:
    """Runs move on by a stage, for a tick; one starts where its tokens are there: a known one, guesses or both."""
    text, ready, known = (
        state.text,
        state.drafted >= schedule.draft_ticks,
        state.place < state.length,
    )
    for place in [state.place + number for number in range(schedule.guesses + 1)]:
        guess = (
            target(text[place - 1], place) + ~agrees[place]
        ) % VOCAB  # another token where they disagree
        text = text.at[place].set(jnp.where(place < state.length, text[place], guess))
    starts = known | ready if schedule.continuous else known & ready
    count = jnp.where(ready, schedule.guesses, 1) if schedule.continuous else schedule.guesses + 1
    run = Runs(state.place, starts * count, starts)
    runs = jax.tree.map(lambda x, new: jnp.roll(x, 1).at[0].set(new), state.runs, run)
    return state._replace(
        text=text,
        ticks=state.ticks + 1,
        started=state.started + starts,
        busy=state.busy + (runs.length > 0).sum(),
        runs=runs,
        place=state.place + run.length,
        drafted=jnp.where(starts, 0, state.drafted) + 1,
    )


def _leave(schedule: Schedule, target: Target, hits: Array, state: Ticks) -> Ticks:
    """The run in the last stage says what follows its tokens; runs that go on from a mistake are not valid any more."""
    last, inside = jax.tree.map(lambda x: x[-1], state.runs), jnp.arange(schedule.guesses + 1)
    places = last.first + inside  # where a valid run's tokens still stand in the text
    says = target(state.text[places], places + 1)
    agreed = jnp.cumprod((says == state.text[places + 1]) & (inside < last.length)).sum()
    kept = jnp.where(
        last.valid, jnp.minimum(agreed + 1, last.length), 0
    )  # what follows a mistake is known as well
    missed = last.valid & (
        (agreed < last.length) | (not schedule.continuous)
    )  # in turn, each run is followed anew
    under_way = state.runs.length.at[-1].set(0)
    ended = (under_way > 0) & missed & schedule.cancel
    into, certain = jnp.where(inside < kept, places, len(state.text)), state.length + kept
    return state._replace(
        text=state.text.at[into + 1].set(says, mode="drop"),
        length=certain,
        reads=state.reads.at[into].add(1, mode="drop"),
        kept=state.kept + last.valid,
        stale=state.stale + ((last.length > 0) & ~last.valid),
        cancelled=state.cancelled + ended.sum(),
        runs=Runs(state.runs.first, jnp.where(ended, 0, under_way), state.runs.valid & ~missed),
        place=jnp.where(missed, certain - 1, state.place),
        drafted=jnp.where(
            missed, min(schedule.ahead, schedule.draft_ticks) * hits[certain - 1], state.drafted
        ),
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
