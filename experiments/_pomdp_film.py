"""A planned episode step by step on the host, and its film: the state, what is believed of it, the tree."""

from collections.abc import Iterator
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jaxpar.env import reset, step
from jaxpar.pomdp import Evidence, PlanInfo
from jaxpar.pomdp.outline import Branch, outline
from jaxpar.pomdp.search import Search
from jaxpar.types import Array, PRNGKey, PyTree, UsageError

_BLUE, _VERMILION, _GRAY = "#0072B2", "#D55E00", "#888888"


class Move(NamedTuple):
    """One step: the state and the belief that it was planned from, the plan, and what came of it.

    `tree` is the outline of the plan's tree, where the planner has one and it was asked for; `seconds` are those of
    the plan.
    """

    state: PyTree
    belief: Any
    tree: Branch | None
    action: int
    info: PlanInfo
    reward: float
    evidence: Evidence
    terminated: bool
    seconds: float


def moves(
    key: PRNGKey, env: Any, params: PyTree, belief_model: Any, num_steps: int, plan: Any, *,
    start: PyTree | None = None,
) -> Iterator[Move]:  # fmt: skip
    """Yields an episode of at most `num_steps` steps, one by one.

    Args:
      key: Consumed, as by `jaxpar.pomdp.simulate`.
      env: The environment.
      params: Its parameters.
      belief_model: The belief's.
      num_steps: Most steps.
      plan: `(key, belief) -> (action, info, tree or None, seconds)`.
      start: The first state, instead of one that is drawn.
    """
    start_key, belief_key, walk_key = jax.random.split(key, 3)
    state = jax.jit(lambda key: reset(key, env, params)[1])(start_key) if start is None else start
    belief = jax.jit(lambda key: belief_model.init(key, env, params))(belief_key)
    go = jax.jit(lambda key, state, action: step(key, env, state, action, params))
    learn = jax.jit(lambda key, belief, action, obs: belief_model.update(key, belief, action, obs, env, params))
    for step_key in jax.random.split(walk_key, num_steps):
        plan_key, go_key, update_key = jax.random.split(step_key, 3)
        action, info, tree, seconds = plan(plan_key, belief)
        after = go(go_key, state, action)
        updated, evidence = learn(update_key, belief, action, after.obs)
        over = bool(after.terminated | after.truncated)
        yield Move(state, belief, tree, int(action), info, float(after.reward), evidence, over, seconds)
        if over:
            return
        state, belief = after.state, updated


def planned(planner: Any, env: Any, params: PyTree) -> Any:
    """Returns a `plan` for `moves` that makes the planner's own number of batches, and draws up the tree."""
    with_tree = hasattr(planner, "search") and hasattr(planner, "decide")

    @jax.jit
    def search(key: PRNGKey, belief: Any) -> Any:
        return planner.search(key, env, params, belief) if with_tree else planner.plan(key, env, params, belief)

    decide = jax.jit(planner.decide) if with_tree else None

    def plan(key: PRNGKey, belief: Any) -> tuple:
        found = search(key, belief)
        if decide is None:
            return *found, None, 0.0
        action, info = decide(found)
        tree = outline(found, planner, env, params, depth=3, width=3) if isinstance(found, Search) else None
        return action, info, tree, 0.0

    return plan


def film(episode: list[Move], env: Any, params: PyTree, key: PRNGKey, title: str) -> np.ndarray:
    """Draws a frame for each move, uint8 `[T, H, W, 3]`: state, mean picture of 64 drawn states, tree or policy.

    Args:
      episode: The moves.
      env: An environment with `render`.
      params: Its parameters.
      key: Consumed by the draws from the beliefs.
      title: What stands above each frame.
    """

    @jax.jit
    def pictures(key: PRNGKey, state: PyTree, belief: Any) -> tuple[Array, Array]:
        drawn = jax.vmap(lambda state: env.render(state, params))(belief.draw(key, 64))
        return env.render(state, params), jnp.mean(drawn.astype(jnp.float32), axis=0) / 255

    frames, total, weight = [], 0.0, 1.0
    discount = float(getattr(params, "discount", 1.0))
    for t, move in enumerate(episode):
        total, weight = total + weight * move.reward, weight * discount
        shown, believed = pictures(jax.random.fold_in(key, t), move.state, move.belief)
        text = f"{title}\nstep {t}: action {move.action} earns {move.reward:g}; so far {total:.2f}"
        frames.append(_frame(np.asarray(shown), np.asarray(believed), move, text))
    return np.stack(frames)


def _frame(shown: np.ndarray, believed: np.ndarray, move: Move, text: str) -> np.ndarray:
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ImportError as error:
        raise UsageError('the film needs matplotlib: pip install "jaxpar[experiments]"') from error
    figure = Figure(figsize=(10, 3.8), dpi=80, layout="constrained")
    canvas = FigureCanvasAgg(figure)
    state, belief, plan = figure.subplots(1, 3, width_ratios=(1, 1, 1.4))
    for panel, image, name in ((state, shown, "the state"), (belief, believed, "what is believed")):
        panel.imshow(image, interpolation="nearest")
        panel.set_title(name, fontsize=9)
        panel.set_axis_off()
    if move.tree is None:
        _draw_policy(plan, np.asarray(move.info.policy), move.action)
    else:
        _draw_tree(plan, move.tree)
    value = float(move.info.value)
    plan.set_title(f"{int(move.info.nodes):,} beliefs, value {value:.2f}, {int(move.info.depth)} deep", fontsize=9)
    figure.suptitle(text, fontsize=10)
    canvas.draw()
    return np.asarray(canvas.buffer_rgba())[..., :3].copy()


def _draw_policy(panel: Any, policy: np.ndarray, action: int) -> None:
    panel.bar(np.arange(len(policy)), policy, color=[_VERMILION if i == action else _BLUE for i in range(len(policy))])
    panel.set(xlabel="action", ylabel="share")
    panel.spines[["top", "right"]].set_visible(False)


def _draw_tree(panel: Any, root: Branch) -> None:
    """Draws actions as blue and beliefs as gray dots; lines are as thick as their share of visits."""
    placed = 0

    def draw(branch: Branch, depth: int) -> float:
        nonlocal placed
        ends = [draw(below, depth + 1) for below in branch.below]
        if not ends:
            placed += 1
        x = float(np.mean(ends)) if ends else float(placed)
        for end, below in zip(ends, branch.below, strict=True):
            width = 0.3 + 4 * below.visits / max(root.visits, 1)
            panel.plot([x, end], [-depth, -depth - 1], color=_GRAY, linewidth=width, zorder=1)
        is_action = depth % 2 == 1
        panel.scatter([x], [-depth], s=14 if is_action else 24, color=_BLUE if is_action else _GRAY, zorder=2)
        if depth == 1:
            panel.annotate(
                f"{branch.name}\n{branch.value:.1f}", (x, -depth), (4, 0), textcoords="offset points", fontsize=7
            )
        return x

    draw(root, 0)
    panel.margins(0.08)
    panel.set_axis_off()
