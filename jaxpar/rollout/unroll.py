"""The one loop of a policy in an environment."""

import dataclasses
import functools
import inspect
from typing import Any, Protocol

import flax.struct
import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec as P

from jaxpar.env import step
from jaxpar.mesh import mesh_axes, platform
from jaxpar.rollout.draws import check_draw, lane_keys, step_keys
from jaxpar.rollout.lanes import Lanes, cast_like, check_lanes, check_params, name_of, per_lane, where
from jaxpar.rollout.resets import Chunked, NextStep, NoReset, pool_of, prepared, restarted
from jaxpar.types import Array, PRNGKey, PyTree, UsageError

__all__ = ["Policy", "Steps", "unroll"]


class Policy(Protocol):
    """Acts in one lane; hashable, since it is static. Its `params` are traced, its `carry` is its memory.

    One that names a parameter `action_mask` is given the environment's, or None where it has none.
    """

    def __call__(self, key: PRNGKey, params: PyTree, obs: PyTree, carry: PyTree) -> tuple:
        """Returns `(action, carry)` or `(action, carry, extras)`; consumes `key`."""
        ...


@flax.struct.dataclass
class Steps:
    """T steps of B lanes; of several agents, reward, flags and bootstrap have an axis N behind.

    Attributes:
        obs: what the policy saw `[T, B, ...]`.
        action: what it did.
        reward: float32, 0 where not `valid`.
        terminated: bool, the process ended; False where not `valid`.
        truncated: bool, the episode was cut; False where not `valid`.
        start: bool `[T, B]`, `obs` is the first of its episode: a memory is emptied before it.
        valid: bool `[T, B]`, a step of an episode; not the wait of a finished lane nor its reset (`NextStep`).
        ended: bool `[T, B]`, an episode ended with this step.
        bootstrap: float32, the value of the last observation where an episode was truncated and not terminated, else 0.
        episode_return: float32, rewards of the episode up to and with this step.
        episode_length: int32 `[T, B]`, steps of the episode likewise.
        extras: what the policy added.
        info: what the environment added.
    """

    obs: PyTree
    action: PyTree
    reward: Array
    terminated: Array
    truncated: Array
    start: Array
    valid: Array
    ended: Array
    bootstrap: Array
    episode_return: Array
    episode_length: Array
    extras: PyTree
    info: PyTree


def unroll(
    key: PRNGKey,
    lanes: Lanes,
    env: Any,
    params: PyTree,
    policy: Any,
    policy_params: PyTree,
    num_steps: int,
    *,
    reset: Any = None,
    draw: str = "lane",
    value: Any = None,
    keep: Any = None,
    trip: int | None = None,
) -> tuple[Lanes, Any]:
    """Walks every lane `num_steps` steps on: a `lax.scan` over steps of a `vmap` over lanes.

    On the ambient mesh (`jaxpar.mesh.use_mesh`) lanes are split by the rule of "envs", and each device walks its own
    without a word to the others. Same key, same lanes: the same bits, on any number of devices.

    Args:
        key: root key; that of step s, counted since `begin`, is `fold_in(key, s)`. So one key may serve many calls.
        lanes: of `begin`, or of the `unroll` before.
        env: an `Environment`, or an adapter with `reset` and `step`; static.
        params: its parameters.
        policy: a `Policy`; static.
        policy_params: its parameters.
        num_steps: T; static.
        reset: what happens to finished lanes: `Chunked` by default, `SameStep`, `NextStep`, `NoReset`, `Pool` or
            `GivenLevel`.
        draw: "lane", the reference, or "batch", faster; equal in distribution (`jaxpar.rollout.draws`).
        value: `(policy_params, obs, carry) -> float32` (`[N]` agents), for one lane: what truncation bootstraps. It is
            evaluated on the last observation, only in steps in which some lane of the device was truncated; one that
            names a parameter `action_mask` is given the environment's, or None where it has none; static.
        keep: `Steps [B] -> pytree`, what to keep of a step, by default all of it; whatever it keeps must have a leading
            axis B. For long walks over large observations of which only statistics are wanted; static.
        trip: steps that the compiled loop makes at once; more fuse across steps, and take longer to compile. None is
            1 on CPUs and 4 elsewhere: 1.2 to 1.6 times as fast there in small environments, at twice the compile time.

    Returns:
        The lanes after the last step, and `Steps [T, B]`, or what `keep` makes of each step, stacked.

    Raises:
        UsageError: for a number of lanes that the devices do not divide, another environment's parameters, an unknown
            reset policy or `draw`, actions of another shape than the space's, or an environment that changes shapes.
    """
    check_lanes(len(lanes.start))
    check_params(env, params)
    check_draw(draw)
    trip = (1 if platform() == "cpu" else 4) if trip is None else trip
    if trip < 1:
        raise UsageError(f"trip={trip} is no number of steps; give 1 or more, or None.")
    reset = prepared(Chunked() if reset is None else reset, env, params, len(lanes.start))
    walk = _Walk(env, policy, value, keep)
    return _unrolled(walk, (num_steps, trip), draw, key, lanes, params, policy_params, reset)


@functools.partial(jax.jit, static_argnums=(0, 1, 2))
def _unrolled(walk, length, draw, key, lanes, params, policy_params, reset):
    num_steps, trip = length
    keys = step_keys(key, lanes.step + jnp.arange(num_steps), 3, draw)
    pool = pool_of(reset, jax.random.fold_in(key, lanes.step), draw, walk.env, params)

    def walked(lanes, keys, params, policy_params, reset, pool):
        def body(lanes, keys):
            return walk(lanes, keys, params, policy_params, reset, pool)

        return jax.lax.scan(body, lanes, keys, unroll=trip)

    over = mesh_axes("envs")
    if over:
        split: Any = Lanes(*[P(over)] * 8, first_carry=P(), step=P())  # type: ignore[arg-type]
        walked = jax.shard_map(
            walked,
            in_specs=(split, P(), P(), P(), P(over), P()),
            out_specs=(split, P(None, over)),
            check_vma=False,
        )
    lanes, steps = walked(lanes, keys, params, policy_params, reset, pool)
    return lanes, steps if walk.keep else _whole(steps)


def _whole(steps: Steps) -> Steps:
    """Adds what is constant: made here, no step writes it."""
    if steps.bootstrap is None:
        steps = steps.replace(bootstrap=jnp.zeros(steps.reward.shape, jnp.float32))
    if steps.valid is None:
        steps = steps.replace(valid=jnp.ones(steps.start.shape, bool))
    return steps


@dataclasses.dataclass(frozen=True)
class _Walk:
    """One step of every lane."""

    env: Any
    policy: Any
    value: Any
    keep: Any

    def __call__(self, lanes, keys, params, policy_params, reset, pool):
        policy_key, step_key, reset_key = keys[0], keys[1], keys[2]
        carry = where(lanes.start, lanes.first_carry, lanes.carry)
        action, carry, extras = self.act(lane_keys(policy_key, lanes.index), params, policy_params, lanes, carry)
        made = jax.vmap(lambda key, state, action: step(key, self.env, state, action, params))(
            lane_keys(step_key, lanes.index), lanes.state, action
        )
        now = cast_like((made.obs, made.state), (lanes.obs, lanes.state), "step")
        reward, terminated, truncated = made.reward.astype(jnp.float32), made.terminated, made.truncated
        valid: Any = None  # stands for "all"
        if isinstance(reset, NoReset | NextStep):
            valid = ~lanes.ended
            mask = per_lane(valid, reward)
            reward, terminated, truncated = jnp.where(mask, reward, 0), terminated & mask, truncated & mask
            now = where(valid, now, (lanes.obs, lanes.state))
        ended = jnp.all((terminated | truncated).reshape(len(terminated), -1), 1)
        row = Steps(
            obs=lanes.obs,
            action=action,
            reward=reward,
            terminated=terminated,
            truncated=truncated,
            start=lanes.start,
            valid=valid,
            ended=ended,
            bootstrap=self.bootstrap(params, policy_params, now, carry, truncated & ~terminated),
            episode_return=jnp.where(per_lane(lanes.start, reward), 0, lanes.episode_return) + reward,
            episode_length=jnp.where(lanes.start, 0, lanes.episode_length) + (1 if valid is None else valid),
            extras=extras,
            info=made.info,
        )
        match reset:
            case NoReset():
                start, waiting = jnp.zeros_like(ended), lanes.ended | ended
            case NextStep():
                start, waiting = lanes.ended, ended
            case _:
                start, waiting = ended, jnp.zeros_like(ended)
        if not isinstance(reset, NoReset):
            now = restarted(reset, self.env, params, reset_key, lanes.index, start, pool, now)
        lanes = lanes.replace(
            state=now[1],
            obs=now[0],
            start=start,
            ended=waiting,
            carry=cast_like(carry, lanes.carry, "carry"),
            episode_return=row.episode_return,
            episode_length=row.episode_length,
            step=lanes.step + 1,
        )
        return lanes, self.keep(_whole(row)) if self.keep else row

    def act(self, keys, params, policy_params, lanes, carry):
        """Actions, memories and extras of all lanes."""

        def one(key, obs, carry, state):
            legal = self.legal(self.policy, state, params)
            action, carry, *extras = self.policy(key, policy_params, obs, carry, **legal)
            self.check_action(action, params)
            return action, carry, extras[0] if extras else {}

        return jax.vmap(one)(keys, lanes.obs, carry, lanes.state)

    def legal(self, asks, state, params) -> dict[str, Any]:
        """The mask of a state, for a function that names a parameter `action_mask`; None where there is no mask."""
        if "action_mask" not in inspect.signature(asks).parameters:
            return {}
        return {"action_mask": self.env.action_mask(state, params) if hasattr(self.env, "action_mask") else None}

    def check_action(self, action, params):
        """Refuses actions that are no elements of the space by their shapes; values are `check_steps`'s to judge."""
        expected = jax.eval_shape(lambda: self.env.action_space(params).sample(jax.random.key(0)))
        shapes, wanted = (jax.tree.map(lambda x: tuple(jnp.shape(x)), tree) for tree in (action, expected))
        if shapes != wanted:
            raise UsageError(f"the policy's action has shape {shapes}; {name_of(self.env)} takes {wanted}.")

    def bootstrap(self, params, policy_params, now, carry, cut) -> Any:
        """The values of the last observations of lanes that were cut, 0 elsewhere; None without a value function."""
        if self.value is None:
            return None

        def one(obs, state, carry):
            return self.value(policy_params, obs, carry, **self.legal(self.value, state, params))

        def values():
            found = jax.vmap(one)(now[0], now[1], carry)
            if found.shape != cut.shape:
                raise UsageError(f"value gives shape {found.shape[1:]} a lane; legal is {cut.shape[1:]}.")
            return jnp.where(cut, found, 0).astype(jnp.float32)

        return jax.lax.cond(jnp.any(cut), values, lambda: jnp.zeros(cut.shape, jnp.float32))
