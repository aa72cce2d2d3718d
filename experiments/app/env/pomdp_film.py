"""A planned episode step by step on the host, and its film: the state, what is believed of it, the tree."""

from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jaxpar.env import Environment, capabilities, own_discount, reset, step
from jaxpar.io import BLUE, GRAY, VERMILION, empty_figure, tidy
from jaxpar.pomdp import (
    Belief,
    BeliefUpdater,
    Branch,
    Evidence,
    PlanInfo,
    Planner,
    SearchPlanner,
    TreeSearch,
    outline,
)
from jaxpar.types import Array, PRNGKey, PyTree, UsageError

from .policies import action_text


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
    learn = jax.jit(
        lambda key, belief, action, obs: updater.update(key, belief, action, obs, env, params)
    )
    for step_key in jax.random.split(steps_key, num_steps):
        plan_key, go_key, update_key = jax.random.split(step_key, 3)
        action, info, tree, seconds = plan(plan_key, belief)
        after = go(go_key, state, action)
        updated, evidence = learn(update_key, belief, action, after.obs)
        over = bool(after.terminated | after.truncated)
        yield Move(
            state, belief, tree, int(action), info, float(after.reward), evidence, over, seconds
        )
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


def film(
    episode: list[Move], env: Environment, params: PyTree, key: PRNGKey, title: str
) -> np.ndarray:
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
    own, space = own_discount(params), env.action_space(params)
    discount = 1.0 if own is None else float(own)
    for t, move in enumerate(episode):
        total, weight = total + weight * move.reward, weight * discount
        shown, believed = pictures(jax.random.fold_in(key, t), move.state, move.belief)
        did = f"action {action_text(space, move.action)} earns {move.reward:g}"
        sofar = (
            f"discounted return so far {total:.2f}"
            if discount < 1
            else f"return so far {total:.2f}"
        )
        text = f"{title}\nstep {t}: {did}, {sofar}" + (
            "; the episode ends" if move.terminated else ""
        )
        frames.append(
            _frame(np.asarray(shown), np.asarray(believed), move, getattr(space, "names", ()), text)
        )
    return np.stack(frames)


def _frame(
    shown: np.ndarray, believed: np.ndarray, move: Move, names: Sequence[str], text: str
) -> np.ndarray:
    figure = empty_figure(10, 4)
    from matplotlib.backends.backend_agg import FigureCanvasAgg

    figure.set_dpi(80)
    canvas = FigureCanvasAgg(figure)
    state, belief, plan = figure.subplots(1, 3, width_ratios=(1, 1, 1.6))
    for panel, image, name in (
        (state, shown, "the state"),
        (belief, believed, "the belief: mean of 64 states"),
    ):
        panel.imshow(image, interpolation="nearest")
        panel.set_title(name, fontsize=9)
        panel.set_axis_off()
    found = f"{int(move.info.nodes):,} beliefs, {int(move.info.depth)} deep, value {float(move.info.value):.2f}"
    if move.tree is None:
        _draw_policy(plan, np.asarray(move.info.policy), move.action, names)
        plan.set_title(f"the plan: {found}", fontsize=9)
    else:
        _draw_tree(plan, move.tree)
        plan.set_title(
            f"the tree: {found}\nblue: actions, with their values; gray: beliefs; thick: visits",
            fontsize=9,
        )
    figure.suptitle(text, fontsize=10)
    canvas.draw()
    return np.asarray(canvas.buffer_rgba())[..., :3].copy()


def _draw_policy(panel: Any, policy: np.ndarray, action: int, names: Sequence[str]) -> None:
    panel.bar(
        np.arange(len(policy)),
        policy,
        color=[VERMILION if i == action else BLUE for i in range(len(policy))],
    )
    panel.set(xlabel="action (red: chosen)", ylabel="share", ylim=(0, 1))
    if names and len(names) <= 20:
        panel.set_xticks(range(len(names)), names, rotation=0 if len(names) < 4 else 90, fontsize=8)
    tidy(panel, "y")


def _draw_tree(panel: Any, root: Branch) -> None:
    """Draws actions as blue and beliefs as gray dots; lines are as thick as their share of visits.

    Each action of the root has at least a quarter of the width of the widest, so that their labels have room.
    """
    from matplotlib.collections import LineCollection

    def leaves(branch: Branch) -> int:
        return sum(map(leaves, branch.below)) or 1

    # A picture has some hundred of both: all together are drawn in a twentieth of the time that each alone takes.
    lines, dots = [], []

    def draw(branch: Branch, depth: int, left: float, right: float) -> float:
        sizes = np.array([leaves(below) for below in branch.below], float)
        if depth == 0 and len(sizes):
            sizes = np.maximum(sizes, sizes.max() / 4)
        edges = left + (right - left) * np.concatenate(
            [[0], np.cumsum(sizes) / max(sizes.sum(), 1)]
        )
        x = (left + right) / 2
        for i, below in enumerate(branch.below):
            end = draw(below, depth + 1, edges[i], edges[i + 1])
            lines.append(
                ([(x, -depth), (end, -depth - 1)], 0.3 + 4 * below.visits / max(root.visits, 1))
            )
        is_action = depth % 2 == 1
        dots.append((x, -depth, 14 if is_action else 24, BLUE if is_action else GRAY))
        if depth == 1:
            box = {"facecolor": "white", "edgecolor": "none", "alpha": 0.85, "pad": 1}
            panel.annotate(f"{branch.name}\n{branch.value:.1f}", (x, -depth), (0, 5), textcoords="offset points",
                           fontsize=8, ha="center", va="bottom", bbox=box, zorder=3)  # fmt: skip
        return x

    draw(root, 0, 0.0, 1.0)
    if lines:
        ends, widths = zip(*lines, strict=True)
        panel.add_collection(LineCollection(ends, linewidths=widths, colors=GRAY, zorder=1))
    x, y, sizes, colors = zip(*dots, strict=True)
    panel.scatter(x, y, s=sizes, color=colors, zorder=2)
    panel.margins(0.08)
    panel.set_axis_off()
