"""Decoding: prompts are read once, then a window of tokens a pass, until every row has ended.

A pass reads all weights and each block of the cache once. Its window is the last token that is certain and the drafts
after it, T tokens in all; plain decoding is the window of one. Sampled tokens are argmax(processed logits + noise).
The noise is a function of request, lineage and position alone (`jaxpar.decode.noise`). Tokens are therefore the same
with any draft and in any batch.
"""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import flax.struct
import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from jaxpar._older_fields import newer_arguments
from jaxpar.decode._prompts import check_prompt
from jaxpar.decode.accept import coupled, rejection
from jaxpar.decode.automaton import Automaton
from jaxpar.decode.draft import Draft, ModelDraft, NoDraft, Proposal
from jaxpar.decode.model import TokenModel
from jaxpar.decode.noise import NoiseIndex, gumbel
from jaxpar.decode.penalties import Counts, count_token, count_tokens
from jaxpar.decode.policies import CachePolicy
from jaxpar.decode.process import Sampling, process
from jaxpar.decode.reader import BLOCK, Reading, ReadingOptions, begin, keep, look
from jaxpar.decode.stops import StopSequences, ends_with
from jaxpar.decode.trees import Tree, chain
from jaxpar.fields import AtLeast, OneOf, check_fields, field
from jaxpar.nn.attention import merge_parts
from jaxpar.scan.monoid import LogSumExp
from jaxpar.types import PRNGKey, PyTree, UsageError, concrete_values

__all__ = ["Decoding", "Generated", "Constraints", "Prompts", "generate"]

OLDER = {
    "num_samples": "decoding.num_samples",
    "draft": "decoding.draft",
    "rule": "decoding.rule",
    "stop_tokens": "decoding.stop_tokens",
    "policy": "decoding.policy",
    "merge": "decoding.merge",
    "block": "decoding.block",
    "chunk": "decoding.chunk",
    "sequences": "constraints.sequences",
    "bias": "constraints.bias",
    "automaton": "constraints.automaton",
    "prompt_lengths": "prompt.lengths",
    "seeds": "prompt.seeds",
}
"""Arguments of `generate` that are fields of other arguments today."""


@dataclasses.dataclass(frozen=True)
class Decoding:
    """Samples, draft, rule and cache of a continuation; static under jit.

    Attributes:
      num_samples: Continuations of each prompt, which is read and stored once.
      draft: What guesses tokens.
      rule: "coupled" or "rejection", which needs a draft whose guesses come with their distribution.
      stop_tokens: Tokens that end a row as `Sampling.stop_token` does, such as the `ends` of a
        tokenizer.
      policy: What attention sees of the cache, by default all; for plain decoding.
      merge: How partial states of blocks are added up; where a mesh splits them, by
        `jaxpar.nn.attention.context.merge_shares`.
      block: Slots of a block of the cache.
      chunk: Passes between two looks at whether all rows have ended; each costs a GPU a round trip
        to the host.
    """

    num_samples: int = field(1, AtLeast(1))
    draft: Draft = NoDraft()
    rule: str = field("coupled", OneOf(("coupled", "rejection")))
    stop_tokens: tuple[int, ...] = ()
    policy: CachePolicy | None = None
    merge: Callable[[LogSumExp], LogSumExp] = merge_parts
    block: int = field(BLOCK, AtLeast(1))
    chunk: int = field(1, AtLeast(1))

    def __post_init__(self):
        """Rejects values out of range."""
        check_fields(self)
        object.__setattr__(self, "stop_tokens", tuple(self.stop_tokens))


class Prompts(NamedTuple):
    """Prompts of several lengths.

    Attributes:
      tokens: int32 [B, T], left-aligned; what lies beyond a row's length is ignored.
      lengths: int32 [B], at least 1 each; None for T.
      seeds: int32 [B], of the rows' requests; None for 0 to B - 1, so that rows have noise of their
        own. Rows of one seed share their noise: zeros give equal texts to equal prompts.
    """

    tokens: Int[Array, "B T"]
    lengths: Int[Array, " B"] | None = None
    seeds: Int[Array, " B"] | None = None


class Constraints(NamedTuple):
    """Constraints of what may be drawn.

    Attributes:
      sequences: Sequences of new tokens that end a row, from `stop_sequences`; they are counted in.
      bias: float [V], added to the logits; finite or -inf.
      automaton: What may be drawn after what; a row ends where nothing may. A text is whole when
        its tokens run out. An automaton made without a stop token lets the call's stop tokens
        through wherever its text may end. Where the call has none either, a row ends at the first
        such state.
    """

    sequences: StopSequences | None = None
    bias: Float[Array, " V"] | None = None
    automaton: Automaton | None = None


class Generated(NamedTuple):
    """What was generated; with `num_samples` n, rows b n to b n + n - 1 are those of prompt b.

    Attributes:
      tokens: int32 [B, T + max_new_tokens]: prompt, then what was drawn, then zeros.
      lengths: int32 [B], of prompt and new tokens, a stop token counted in.
      log_probs: float32 [B, max_new_tokens], of each new token by the model's own law, zeros beyond.
      passes: int32 [B], passes of the model until the row had ended, the one over the prompt not counted.
    """

    tokens: Int[Array, "B S"]
    lengths: Int[Array, " B"]
    log_probs: Float[Array, "B N"]
    passes: Int[Array, " B"]


@flax.struct.dataclass
class _State:
    """What the loop over windows carries, of B rows (prompts times samples)."""

    text: Array
    lengths: Array
    ended: Array
    log_probs: Array
    passes: Array
    counts: Counts | None
    automaton: Array | None
    reading: Reading
    draft: PyTree


class _Job(NamedTuple):
    """Models, configurations and requests, none of which the loop changes."""

    model: TokenModel
    params: PyTree
    draft_params: PyTree
    sampling: Sampling
    decoding: Decoding
    constraints: Constraints
    key: PRNGKey
    seeds: Array
    lineage: Array
    starts: Array
    stops: Array

    def start(self, prompt: Array, reading: Reading) -> _State:
        """The state before the first new token."""
        room, zeros = self.sampling.max_new_tokens, jnp.zeros((len(prompt),), jnp.int32)
        is_counted, starts = self.sampling.needs_counts, self.starts
        ended = zeros > 0
        if self.constraints.automaton is not None:
            ended = self.is_over(zeros)
        return _State(
            text=jnp.pad(prompt, ((0, 0), (0, room))),
            lengths=starts,
            ended=ended,
            log_probs=jnp.zeros((len(prompt), room), jnp.float32),
            passes=zeros,
            counts=count_tokens(prompt, starts, starts, self.model.vocab_size)
            if is_counted
            else None,
            automaton=None if self.constraints.automaton is None else zeros,
            reading=reading,
            draft=self.decoding.draft.init(self.draft_params, prompt, starts, room),
        )

    def noise(self, positions: Array) -> Array | None:
        """Noise [B, T, V] of the tokens that will stand at these positions [B, T]; None for greedy decoding."""
        if self.sampling.temperature == 0:
            return None
        seeds, lineage = (
            jnp.broadcast_to(x[:, None], positions.shape) for x in (self.seeds, self.lineage)
        )
        return gumbel(self.key, seeds, positions, lineage, self.model.vocab_size)

    def decide(self, logits: Array, positions: Array) -> tuple[Array, Array]:
        """A draft's token from its logits and the shared noise, and their law; penalties would only be guessed at."""
        free = dataclasses.replace(
            self.sampling, repetition_penalty=1.0, presence_penalty=0.0, frequency_penalty=0.0
        )
        law, noise = process(logits, free), self.noise(positions[:, None])
        scores = law if noise is None else law + noise[:, 0]
        return scores.argmax(-1).astype(jnp.int32), law

    def accept(self, state: _State, logits: Array, proposal: Proposal, tokens: Array, tree: Tree):
        """What is kept of a window, and the scores by which the model chose after each of its nodes, [B, T, V]."""
        counts, allowed = state.counts, None
        if counts is not None:
            counts = _along(counts, tree, lambda counts, node: count_token(counts, tokens[:, node]))
        if self.constraints.automaton is not None:
            after = self.constraints.automaton.step
            states = _along(
                state.automaton, tree, lambda state, node: after(state, tokens[:, node])
            )
            left = self.starts + self.sampling.max_new_tokens - state.lengths
            allowed = self.constraints.automaton.allowed(
                states, left[:, None] - jnp.asarray(tree.depth, jnp.int32)[None]
            )
            if self.constraints.automaton.closing is not None:
                may_close = self.constraints.automaton.may_close(states)[..., None]
                is_stop = jnp.isin(jnp.arange(self.model.vocab_size), self.stops)
                allowed = allowed | (may_close & is_stop[None, None])
        law = process(
            logits, self.sampling, counts=counts, bias=self.constraints.bias, allowed=allowed
        )
        noise = self.noise(state.lengths[:, None] + jnp.asarray(tree.depth, jnp.int32)[None])
        scores = law if noise is None else law + noise
        if self.decoding.rule == "coupled" or noise is None or tree.size == 1:
            return coupled(scores, tokens, tree), scores
        index = NoiseIndex(seeds=self.seeds, positions=state.lengths, lineage=self.lineage)
        accepted = rejection(self.key, law, proposal.logits, tokens, tree, index)
        return accepted, scores

    def settle(self, state: _State, logits: Array, proposal: Proposal, tokens: Array, tree: Tree):
        """Decides on a window; returns the state with the tokens that are kept and the one after, and what was kept."""
        accepted, scores = self.accept(state, logits, proposal, tokens, tree)
        room, place = (
            self.sampling.max_new_tokens,
            jnp.arange(tokens.shape[1], dtype=jnp.int32)[None],
        )
        automata = self.automata(state, accepted.tokens)
        is_end = self.ends(state, accepted.tokens, automata) & (place < accepted.count[:, None])
        until = jnp.where(is_end.any(1), is_end.argmax(1) + 1, accepted.count)
        made = state.lengths - self.starts
        count = jnp.where(state.ended, 0, jnp.minimum(until, room - made)).astype(jnp.int32)
        new = place < count[:, None]
        rows = jnp.arange(len(count))[:, None]

        def put(array, start, values):  # what is not kept lies beyond the end, and is dropped
            into = jnp.where(new, start[:, None] + place, array.shape[1])
            return array.at[rows, into].set(values, mode="drop")

        node = jnp.maximum(accepted.path, 0)
        sure = logits[rows, node, accepted.tokens] - jax.nn.logsumexp(logits, -1)[rows, node]
        counts = state.counts
        for number in range(tokens.shape[1] if counts is not None else 0):
            assert counts is not None
            counts = count_token(counts, accepted.tokens[:, number], new[:, number])
        accepted = accepted._replace(count=count)
        guesses = (
            state.draft
            if tree.size == 1
            else self.decoding.draft.update(state.draft, tokens, scores, accepted)
        )
        return dataclasses.replace(
            state,
            text=put(state.text, state.lengths, accepted.tokens),
            lengths=state.lengths + count,
            ended=state.ended | (is_end & new).any(1) | (made + count >= room),
            log_probs=put(state.log_probs, made, sure.astype(jnp.float32)),
            counts=counts,
            automaton=None if automata is None else automata[rows[:, 0], count],
            draft=guesses,
        ), accepted

    def automata(self, state: _State, tokens: Array) -> Array | None:
        """States of the automaton before these tokens and after each, int32 [B, T+1]."""
        if self.constraints.automaton is None or state.automaton is None:
            return None
        each = [state.automaton]
        for number in range(tokens.shape[1]):
            each.append(self.constraints.automaton.step(each[-1], tokens[:, number]))
        return jnp.stack(each, 1)

    def is_over(self, states: Array) -> Array:
        """Returns where the automaton ends a row, because no token may follow or could end it."""
        automaton = self.constraints.automaton
        assert automaton is not None
        over = automaton.is_done(states)
        if automaton.closing is None:
            return over
        return over | (automaton.may_close(states) & (self.stops < 0).all())

    def ends(self, state: _State, tokens: Array, automata: Array | None) -> Array:
        """Whether a row ends with each of these tokens, bool [B, T]."""
        is_end = jnp.isin(tokens, self.stops)
        if self.constraints.automaton is not None and automata is not None:
            if self.constraints.automaton.closing is not None:
                # Elsewhere a stop token that the table lets through is text.
                is_end = is_end & self.constraints.automaton.may_close(automata[:, :-1])
            is_end = is_end | self.is_over(automata[:, 1:])
        if self.constraints.sequences is not None:
            rows, place = jnp.arange(len(tokens))[:, None], jnp.arange(tokens.shape[1])[None]
            text = state.text.at[rows, state.lengths[:, None] + place].set(tokens, mode="drop")
            each = [
                ends_with(text, state.lengths + number + 1, self.constraints.sequences, self.starts)
                for number in range(tokens.shape[1])
            ]
            is_end = is_end | jnp.stack(each, 1)
        return is_end

    def steps(self, count: int, state: _State) -> _State:
        """Some passes; rows that have ended are left alone."""
        return (
            jax.lax.fori_loop(0, count, lambda _, state: self.step(state), state)
            if count > 1
            else self.step(state)
        )

    def step(self, state: _State) -> _State:
        """One pass of the model over a window."""
        tree = self.decoding.draft.tree
        root = jnp.take_along_axis(state.text, state.lengths[:, None] - 1, 1)
        proposal, guesses = self.decoding.draft.propose(
            self.draft_params, state.draft, state.text, state.lengths, self.decide
        )  # fmt: skip
        tokens = jnp.concatenate([root, proposal.tokens], 1)
        known = jnp.where(
            (tokens >= 0) & (tokens < self.model.vocab_size), tokens, 0
        )  # no guess: any, not accepted
        logits, reading = look(self.model, self.params, state.reading, known, tree, proposal.pseudo)
        state = dataclasses.replace(state, draft=guesses, passes=state.passes + ~state.ended)
        state, accepted = self.settle(state, logits, proposal, tokens, tree)
        reading = keep(self.model, self.params, reading, known, accepted.path, accepted.count)
        return dataclasses.replace(state, reading=reading)


def generate(
    key: PRNGKey,
    params: PyTree,
    prompt: Int[Array, "B T"] | Prompts,
    model: TokenModel,
    sampling: Sampling = Sampling(),
    decoding: Decoding = Decoding(),
    constraints: Constraints = Constraints(),
    *,
    draft_params: PyTree = None,
    **older: Any,  # values of fields that were arguments, by `OLDER`
) -> Generated:
    """Continues prompts; pure, so jit it with `model`, `sampling` and `decoding` static.

    By the rule "coupled" the tokens are the plain loop's, whatever the draft. They are a function
    of key, prompt, seed and sample, never of other rows. A row's index enters only as
    its seed where none is given. Two rows of one prompt and one seed agree; rows of several seeds
    and samples of a prompt are independent. That holds up to rounding:
    where two scores are as near as the logits' own rounding, another batch or window may decide
    otherwise, which in bfloat16 does happen. By "rejection" the distribution is kept, not the tokens.

    Args:
      key: Consumed.
      params: The model's.
      prompt: Tokens [B, T] of prompts that are all as long, or `Prompts`.
      model: What decodes.
      sampling: How tokens are drawn, and how many at most.
      decoding: How many samples, by which draft, from which cache.
      constraints: Where texts end, and what may be drawn.
      draft_params: The draft's parameters, where it has any.
      **older: Values of fields that were arguments, until the first release.

    Raises:
      UsageError: If prompts are empty, too long for the model's positions or outside its vocabulary
        (where values are known), or the draft cannot serve the rule.
    """
    prompts = prompt if isinstance(prompt, Prompts) else Prompts(prompt)
    groups = {"prompt": prompts, "decoding": decoding, "constraints": constraints}
    prompts, decoding, constraints = newer_arguments("generate", OLDER, groups, older).values()
    _check(prompts, model, sampling, decoding, constraints.automaton)
    tokens, lengths, seeds = _arrays(prompts)
    options = ReadingOptions(
        room=sampling.max_new_tokens,
        readers=decoding.num_samples,
        block=decoding.block,
        policy=decoding.policy,
        merge=decoding.merge,
    )
    logits, reading = begin(model, params, tokens, lengths, options)
    # Of each prompt, once for each of its samples.
    tokens, lengths, logits, seeds = (
        jnp.repeat(x, decoding.num_samples, axis=0) for x in (tokens, lengths, logits, seeds)
    )
    samples = jnp.arange(decoding.num_samples, dtype=jnp.int32)
    job = _Job(
        model=model,
        params=model.held(params),
        draft_params=draft_params,
        sampling=sampling,
        decoding=decoding,
        constraints=constraints,
        key=key,
        seeds=seeds,
        lineage=jnp.tile(samples, len(tokens) // decoding.num_samples),
        starts=lengths,
        stops=jnp.asarray([sampling.stop_token, *decoding.stop_tokens], jnp.int32),
    )
    state = job.start(tokens, reading)
    state, _ = job.settle(state, logits[:, None], Proposal(tokens[:, :0]), tokens[:, :1], chain(0))
    state = jax.lax.while_loop(
        lambda state: ~state.ended.all(), functools.partial(job.steps, decoding.chunk), state
    )
    return Generated(
        tokens=state.text,
        lengths=state.lengths,
        log_probs=state.log_probs,
        passes=state.passes,
    )


def _arrays(prompts: Prompts) -> tuple[Array, Array, Array]:
    """Returns tokens, zeros beyond each row's, how many there are, and the seeds of the requests."""
    rows, start = prompts.tokens.shape
    if prompts.lengths is None:
        lengths = jnp.full((rows,), start, jnp.int32)
    else:
        lengths = jnp.asarray(prompts.lengths, jnp.int32)
    if prompts.seeds is None:
        seeds = jnp.arange(rows, dtype=jnp.int32)
    else:
        seeds = jnp.asarray(prompts.seeds)
    is_token = jnp.arange(start)[None] < lengths[:, None]
    tokens = jnp.where(is_token, jnp.asarray(prompts.tokens, jnp.int32), 0)
    return tokens, lengths, seeds


def _along(first: PyTree, tree: Tree, step: Callable[[PyTree, int], PyTree]) -> PyTree:
    """What holds before the token after each node, [B, T, ...]: `step` goes from a parent's to that of a node."""
    each = [first]
    for node, parent in enumerate(tree.parents[1:], 1):
        each.append(step(each[parent], node))
    return jax.tree.map(lambda *x: jnp.stack(x, 1), *each)


def _check(
    prompts: Prompts,
    model: TokenModel,
    sampling: Sampling,
    decoding: Decoding,
    automaton: Automaton | None,
) -> None:
    """Rejects what cannot be continued; values are looked at where they are known."""
    draft = decoding.draft
    if isinstance(draft, ModelDraft) and draft.model.vocab_size != model.vocab_size:
        raise UsageError(
            f"the draft's {draft.model.vocab_size} symbols are not the model's {model.vocab_size}; give one of "
            "the same tokenizer."
        )
    length = prompts.tokens.shape[1]
    room = sampling.max_new_tokens
    most = model.max_positions
    if length < 1:
        raise UsageError("the prompt has no tokens; give at least one.")
    if most is not None and length + room > most:
        raise UsageError(
            f"{length} prompt and {room} new tokens are over the model's {most} positions."
        )
    if decoding.policy is not None and draft.tree.size > 1:
        raise UsageError(
            "a policy sees a window of drafts otherwise than token after token; leave one of the two out."
        )
    if automaton is not None:
        known = concrete_values(automaton.distance)
        if known is not None and known[0][0] > room:
            found = f"{known[0][0]} tokens, not {room}"
            raise UsageError(f"the shortest text that the automaton takes has {found}.")
    check_prompt(prompts.tokens, prompts.lengths, model.vocab_size)
