"""Trains a draft that the model makes itself, the model frozen, and measures what its guesses are worth."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
from flax import struct
from jaxtyping import Array, Float, Int

from jaxpar.experimental.pseudo_tokens import TrainedDraft, pseudo_tokens
from jaxpar.fields import AtLeast, Between, check_fields, field
from jaxpar.lm.config import LMConfig
from jaxpar.lm.model import hidden, logits
from jaxpar.mesh import axes_like
from jaxpar.nn.leaf import Leaf, init_leaves
from jaxpar.nn.mixer import TokenInfo
from jaxpar.optim import Optimizer, OptimizerConfig, make_optimizer
from jaxpar.types import Info, PRNGKey, PyTree, UsageError

__all__ = ["DraftTrainer", "accept_rates"]


def guesses(
    params: PyTree,
    draft_params: PyTree,
    tokens: Int[Array, "B T"],
    anchors: Int[Array, " A"],
    config: LMConfig,
    draft: TrainedDraft,
) -> tuple[Float[Array, "B A k V"], Float[Array, "B A k V"]]:
    """Returns the logits of the tokens 2 to k + 1 places after each anchor: the model's, and the draft's.

    The model knows the tokens between, the draft does not. One pass over T tokens and A k pseudo tokens, which see what
    those of a window see, and which no token sees.

    Args:
      params: The model's.
      draft_params: The draft's.
      tokens: Texts.
      anchors: Places from 0 to T - k - 1.
      config: The model; static.
      draft: The draft; static.
    """
    length, size = tokens.shape[1], draft.length
    places = (
        anchors[:, None] + 1 + jnp.arange(size)[None]
    )  # of pseudo tokens, and of the tokens in whose place they are
    positions = jnp.concatenate([jnp.arange(length), places.reshape(-1)])
    number = jnp.arange(len(anchors) * size)
    text = (
        jnp.arange(length)[None]
        <= jnp.concatenate([jnp.arange(length), jnp.repeat(anchors, size)])[:, None]
    )
    own = (
        number[:, None] // size == number[None] // size
    )  # of which later positions are not seen anyway
    visible = jnp.concatenate([text, jnp.pad(own, ((length, 0), (0, 0)))], 1)
    rows, total = len(tokens), len(positions)
    info = TokenInfo(
        positions=jnp.broadcast_to(positions, (rows, total)),
        visible=jnp.broadcast_to(visible, (rows, total, total)),
    )
    pseudo = pseudo_tokens(draft, draft_params, len(anchors), anchors)
    x, _ = hidden(params, tokens, config, info, pseudo=pseudo)
    both = logits(params, jnp.concatenate([x[:, places.reshape(-1)], x[:, length:]], 1), config)
    both = both.reshape(rows, 2, len(anchors), size, -1)
    return jax.lax.stop_gradient(both[:, 0]), both[:, 1]


def distillation(
    own: Float[Array, "B A k V"], guessed: Float[Array, "B A k V"]
) -> Float[Array, " k"]:
    """Returns of each place the mean divergence KL(model's law || draft's law), in nats."""
    own, guessed = jax.nn.log_softmax(own), jax.nn.log_softmax(guessed)
    return (jnp.exp(own) * (own - guessed)).sum(-1).mean((0, 1))


def accept_rates(
    params: PyTree,
    draft_params: PyTree,
    tokens: Int[Array, "B T"],
    config: LMConfig,
    draft: TrainedDraft,
    num_ranks: int,
    start: int = 0,
) -> Float[np.ndarray, "k ranks"]:
    """Measures what `jaxpar.decode.best_tree` asks: how often the guess of a rank is the token, by place.

    A place counts where the tokens of the places before it were among the first `num_ranks` guesses, for only then is
    it reached.

    Args:
      params: The model's.
      draft_params: The draft's.
      tokens: Texts that the model itself continued, greedily: on others the rates are those of their writer.
      config: The model.
      draft: The draft.
      num_ranks: Candidates of a node, at most.
      start: First place that the model wrote.
    """
    length, size = tokens.shape[1], draft.length
    anchors = jnp.arange(max(start - 1, 0), length - size - 1)
    targets = tokens[:, anchors[:, None] + 2 + jnp.arange(size)[None]]
    program = jax.jit(guesses, static_argnums=(4, 5))
    guessed = program(params, draft_params, tokens, anchors, config, draft)[1]
    best = np.asarray(jax.lax.top_k(guessed, num_ranks)[1])  # [B, A, k, ranks]
    hit = best == np.asarray(targets)[..., None]
    found = hit.any(-1)
    reached = np.cumprod(np.concatenate([np.ones_like(found[..., :1]), found[..., :-1]], -1), -1)
    return (hit * reached[..., None]).sum((0, 1)) / np.maximum(reached.sum((0, 1)), 1)[:, None]


@struct.dataclass
class DraftState:
    """What a run carries: nothing of the model.

    Attributes:
      params: The draft's, float32 unless the model runs in float64.
      opt_state: Of the optimizer.
      step: int32 [], steps made.
      skipped_in_a_row: int32 [], steps up to now that changed nothing, being not finite.
    """

    params: PyTree
    opt_state: PyTree
    step: jax.Array
    skipped_in_a_row: jax.Array


@dataclasses.dataclass(frozen=True)
class DraftTrainer:
    """Distils a model's own laws into a draft, by sum_j decay^(j - 1) KL_j / k over the k places it guesses.

    Attributes:
      model: The model, which stays as it is.
      draft: What is trained.
      optimizer: The update rule.
      num_steps: Length of the run.
      num_anchors: Places of a row, the same in all rows of a batch, behind which guesses are made.
      decay: What a place counts, of the place before it.
      max_skipped: Steps in a row that changed nothing after which `done` is true.
    """

    model: LMConfig
    draft: TrainedDraft
    optimizer: OptimizerConfig = OptimizerConfig(learning_rate=1e-2, weight_decay=0.0)
    num_steps: int = field(1000, AtLeast(1))
    num_anchors: int = field(32, AtLeast(1))
    decay: float = field(0.8, Between(0, 1, "(]"))
    max_skipped: int = field(10, AtLeast(1))

    __post_init__ = check_fields

    def init(self, key: PRNGKey, inputs: PyTree = None) -> DraftState:
        """Draws the draft's parameters. Consumes `key`; ignores `inputs`."""
        del inputs
        params = init_leaves(key, self._leaves(), jnp.promote_types(self.model.dtype, jnp.float32))
        steps, skipped = (
            jnp.zeros((), jnp.int32) for _ in range(2)
        )  # two arrays, as `fit` donates each
        return DraftState(params, self.make_optimizer().init(params), steps, skipped)

    def axes(self) -> DraftState:
        """Returns the logical axes of every leaf of the state."""
        state = jax.eval_shape(lambda: self.init(jax.random.key(0)))
        return axes_like(state, state.params, self._axes())

    def step(
        self, key: PRNGKey, state: DraftState, inputs: dict[str, PyTree]
    ) -> tuple[DraftState, Info]:
        """Makes one optimizer step. Consumes `key` for the anchors.

        Args:
          key: Consumed.
          state: As from `init` or the last step.
          inputs: "tokens", int [B, T], T over k + the anchors; "model", the model's parameters, the same at every step.
            In `jaxpar.loop.fit` take a chunk of 1, which alone does not copy them.

        Returns:
          The new state, and "loss", "kl_1" to "kl_k" (nats, by place), "grad_norm", "learning_rate", "skipped".

        Raises:
          UsageError: If rows are too short, or hold several documents.
        """
        tokens = inputs["tokens"]
        most = tokens.shape[1] - self.draft.length
        if self.num_anchors > most:
            raise UsageError(
                f"num_anchors={self.num_anchors} of rows of {tokens.shape[1]} tokens; legal are 1 to {most}."
            )
        if "segments" in inputs:
            raise UsageError("drafts learn from rows of one document each; leave data.pack out.")
        anchors = jax.random.permutation(key, most)[: self.num_anchors]

        def objective(params):
            own, guessed = guesses(inputs["model"], params, tokens, anchors, self.model, self.draft)
            apart = distillation(own, guessed)
            return (self.decay ** jnp.arange(self.draft.length) * apart).mean(), apart

        (value, apart), grads = jax.value_and_grad(objective, has_aux=True)(state.params)
        params, opt_state, info = self.make_optimizer().update(
            grads, state.opt_state, state.params, good=jnp.isfinite(value)
        )
        bad = jnp.where(info["skipped"] > 0, state.skipped_in_a_row + 1, 0)
        info |= {"loss": value} | {f"kl_{place + 1}": each for place, each in enumerate(apart)}
        return DraftState(params, opt_state, state.step + 1, bad), jax.tree.map(jnp.float32, info)

    def done(self, state: DraftState) -> jax.Array:
        """Whether the run has broken down: `max_skipped` bad steps in a row."""
        return state.skipped_in_a_row >= self.max_skipped

    def make_optimizer(self) -> Optimizer:
        """Returns the optimizer, whose state is `DraftState.opt_state`."""
        return make_optimizer(self.optimizer, self.num_steps, axes=self._axes())

    def _leaves(self) -> dict[str, Leaf]:
        return self.draft.leaves(self.model.embed_dim, self.model.init_std)

    def _axes(self) -> PyTree:
        return {name: leaf.axes for name, leaf in self._leaves().items()}
