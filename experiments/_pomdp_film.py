"""A planned episode step by step on the host, and its film: the state, what is believed of it, the tree."""

from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jaxpar.env import Environment, capabilities, own_discount, reset, step
from jaxpar.pomdp import Belief, BeliefUpdater, Evidence, PlanInfo, Planner, SearchPlanner, TreeSearch
from jaxpar.pomdp.outline import Branch, outline
from jaxpar.types import Array, PRNGKey, PyTree, UsageError

_BLUE, _VERMILION, _GRAY = "#0072B2", "#D55E00", "#888888"


class Move(NamedTuple):
    """One step: the state and the belief that it was planned from, the plan, and what came of it.

    `tree` is the outline of the plan's tree, where the planner has one and it was asked for; `seconds` are those of
    the plan.
    """

    state: PyTree
    belief: Belief
    tree: Branch | None
    action: int
    info: PlanInfo
    reward: float
    evidence: Evidence
    terminated: bool
    seconds: float


Plan = Callable[[PRNGKey, Belief], tuple[Array, PlanInfo, Branch | None, float]]
"""`(key, belief) -> (action, info, tree or None, seconds)`."""


def moves(
    key: PRNGKey, env: Environment, params: PyTree, updater: BeliefUpdater, num_steps: int, plan: Plan, *,
    start: PyTree | None = None,
) -> Iterator[Move]:  # fmt: skip
    """Yields an episode of at most `num_steps` steps, one by one.

    Args:
      key: Consumed, as by `jaxpar.pomdp.simulate`.
      env: The environment.
      params: Its parameters.
      updater: What makes the beliefs.
      num_steps: Most steps.
      plan: What chooses the actions.
      start: The first state, instead of one that is drawn.
    """
    start_key, belief_key, steps_key = jax.random.split(key, 3)
    state = jax.jit(lambda key: reset(key, env, params)[1])(start_key) if start is None else start
    belief = jax.jit(lambda key: updater.init(key, env, params))(belief_key)
    go = jax.jit(lambda key, state, action: step(key, env, state, action, params))
    learn = jax.jit(lambda key, belief, action, obs: updater.update(key, belief, action, obs, env, params))
    for step_key in jax.random.split(steps_key, num_steps):
        plan_key, go_key, update_key = jax.random.split(step_key, 3)
        action, info, tree, seconds = plan(plan_key, belief)
        after = go(go_key, state, action)
        updated, evidence = learn(update_key, belief, action, after.obs)
        over = bool(after.terminated | after.truncated)
        yield Move(state, belief, tree, int(action), info, float(after.reward), evidence, over, seconds)
        if over:
            return
        state, belief = after.state, updated


def planned(planner: Planner, env: Environment, params: PyTree) -> Plan:
    """Returns a `plan` for `moves` that makes the planner's own number of batches, and draws up the tree.

    Trees of particle sets are not drawn up: without observation keys their nodes have no names.
    """
    searching = planner.tree_search() if isinstance(planner, SearchPlanner) else None
    if not isinstance(searching, TreeSearch):
        go = jax.jit(lambda key, belief: planner.plan(key, env, params, belief))
        return lambda key, belief: (*go(key, belief), None, 0.0)
    grow = jax.jit(lambda key, belief: searching.search(key, env, params, belief))
    decide = jax.jit(searching.decide)

    def plan(key: PRNGKey, belief: Belief) -> tuple[Array, PlanInfo, Branch | None, float]:
        found = grow(key, belief)
        action, info = decide(found)
        return action, info, outline(found, searching, env, params, depth=3, width=3), 0.0

    return plan


def film(episode: list[Move], env: Environment, params: PyTree, key: PRNGKey, title: str) -> np.ndarray:
    """Draws a frame for each move, uint8 `[T, H, W, 3]`: state, mean picture of 64 drawn states, tree or policy.

    Args:
      episode: The moves.
      env: An environment with `render`.
      params: Its parameters.
      key: Consumed by the draws from the beliefs.
      title: What stands above each frame.
    """
    render = capabilities(env).render
    if render is None:
        raise UsageError(f"a film needs render of the environment, and {env.name} has none.")

    @jax.jit
    def pictures(key: PRNGKey, state: PyTree, belief: Belief) -> tuple[Array, Array]:
        drawn = jax.vmap(lambda state: render(state, params))(belief.sample(key, 64))
        return render(state, params), jnp.mean(drawn.astype(jnp.float32), axis=0) / 255

    frames, total, weight = [], 0.0, 1.0
    own = own_discount(params)
    discount = 1.0 if own is None else float(own)
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
