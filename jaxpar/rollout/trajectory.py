"""The rollout: the one loop of a policy in environments."""

import dataclasses
import functools
from collections.abc import Callable

import flax.struct
import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec as P

from jaxpar._older_fields import newer_arguments
from jaxpar.env import Adapter, Environment, capabilities, step
from jaxpar.fields import AtLeast, check_fields, field
from jaxpar.mesh import mesh_axes, platform
from jaxpar.rollout.env_state import (
    EnvState,
    cast_like,
    check_num_envs,
    check_params_type,
    per_env,
    where,
)
from jaxpar.rollout.policies import Policy, Value, takes_mask
from jaxpar.rollout.prng import check_prng, env_keys, step_keys
from jaxpar.rollout.resets import (
    Chunked,
    NextStep,
    NoReset,
    Reset,
    draw_pool,
    reset_finished,
    with_levels,
)
from jaxpar.types import Array, PRNGKey, PyTree, UsageError

__all__ = ["RolloutOptions", "Trajectory", "rollout"]


@flax.struct.dataclass
class Trajectory:
    """T steps of B environments; of several agents, reward, flags and bootstrap have an axis N behind.

    Attributes:
        obs: what the policy saw `[T, B, ...]`.
        action: what it did.
        reward: float32, 0 where not `valid`.
        terminated: bool, the process ended; False where not `valid`.
        truncated: bool, the episode was cut short; False where not `valid`.
        start: bool `[T, B]`, `obs` is the first of its episode: the policy's carry is reset before it.
        valid: bool `[T, B]`, a step of an episode; not the wait of a finished environment nor its reset (`NextStep`).
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


@flax.struct.dataclass
class RolloutOptions:
    """Options of `rollout`: a reset policy may hold arrays, all else is static.

    Attributes:
        reset: policy for finished environments: `Chunked` by default, `SameStep`, `NextStep`,
            `NoReset`, `Pool` or `GivenLevel`.
        prng: "env", the reference, or "batch", faster; equal in distribution
            (`jaxpar.rollout.prng`).
        value: `(policy_params, obs, carry) -> float32` (`[N]` agents), for one environment: what
            truncation bootstraps. It is evaluated on the last observation, only in steps that
            truncated some environment of the device; one that names a parameter `action_mask` is
            given the environment's, or None where it has none.
        keep: `Trajectory [B] -> pytree`, what is kept of a step, by default all of it; whatever it
            keeps must have a leading axis B. For long rollouts over large observations of which
            only statistics are wanted.
        unroll: steps in one iteration of the compiled loop, that of `lax.scan`; more fuse across
            steps, and take longer to compile. None is 1 on CPUs and 4 elsewhere: 1.2 to 1.6 times
            as fast there in small environments, at twice the compile time.
    """

    reset: Reset | None = None
    prng: str = field("env", pytree_node=False)
    value: Value | None = field(None, pytree_node=False)
    keep: Callable[[Trajectory], PyTree] | None = field(None, pytree_node=False)
    unroll: int | None = field(None, AtLeast(1), pytree_node=False)

    __post_init__ = check_fields


_OLDER = {each.name: f"options.{each.name}" for each in dataclasses.fields(RolloutOptions)}
"""Arguments of `rollout` that are fields of its options today."""


def rollout(
    key: PRNGKey,
    env_state: EnvState,
    env: Environment | Adapter,
    params: PyTree,
    policy: Policy,
    policy_params: PyTree,
    num_steps: int,
    options: RolloutOptions | None = None,
    **older: object,
) -> tuple[EnvState, PyTree]:
    """Steps every environment `num_steps` times: a `lax.scan` over steps of a `vmap` over environments.

    On the ambient mesh (`jaxpar.mesh.use_mesh`) environments are split by the rule of "envs", and each device steps its
    own without communication. The same key and state give the same bits on any number of devices.

    Args:
        key: root key; that of step s, counted since `init`, is `fold_in(key, s)`. So one key may serve many calls.
        env_state: of `init`, or of the call before.
        env: an `Environment`, or an adapter with `reset` and `step`; static.
        params: its parameters.
        policy: a `Policy`; static.
        policy_params: its parameters.
        num_steps: T; static.
        options: reset policy, keys, value, what is kept and how the loop is compiled; None means
            the defaults.
        **older: fields of `options`, which were arguments; accepted until the first release.

    Returns:
        The state after the last step, and the `Trajectory [T, B]`, or what `options.keep` makes of
        each step, stacked.

    Raises:
        TypeError: for an unknown keyword.
        UsageError: for a number of environments that the devices do not divide, another environment's parameters, an
            unknown reset policy or `prng`, actions of another shape than the space's, or an environment that changes
            shapes.
    """
    groups = {"options": options or RolloutOptions()}
    chosen: RolloutOptions = newer_arguments("rollout", _OLDER, groups, older)["options"]
    num_envs = len(env_state.start)
    check_num_envs(num_envs)
    check_params_type(env, params)
    check_prng(chosen.prng)
    unroll = chosen.unroll
    if unroll is None:
        unroll = 1 if platform() == "cpu" else 4
    reset = Chunked() if chosen.reset is None else chosen.reset
    reset = with_levels(reset, env, params, num_envs)
    one_step = _BatchStep(env=env, policy=policy, value=chosen.value, keep=chosen.keep)
    return _rollout(
        one_step, (num_steps, unroll), chosen.prng, key, env_state, params, policy_params, reset
    )


@functools.partial(jax.jit, static_argnums=(0, 1, 2))
def _rollout(one_step, length, prng, key, env_state, params, policy_params, reset):
    num_steps, unroll = length
    keys = step_keys(key, env_state.step + jnp.arange(num_steps), 3, prng)
    pool = draw_pool(jax.random.fold_in(key, env_state.step), reset, prng, one_step.env, params)

    def run(env_state, keys, params, policy_params, reset, pool):
        def body(env_state, keys):
            return one_step(env_state, keys, params, policy_params, reset, pool)

        return jax.lax.scan(body, env_state, keys, unroll=unroll)

    over = mesh_axes("envs")
    if over:
        by_envs: PyTree = P(over)
        whole: PyTree = P()
        split = EnvState(
            state=by_envs,
            obs=by_envs,
            start=by_envs,
            ended=by_envs,
            carry=by_envs,
            episode_return=by_envs,
            episode_length=by_envs,
            index=by_envs,
            first_carry=whole,
            step=whole,
        )
        # By hand rather than by GSPMD: no environment reads another, so no device may wait for another in the loop.
        run = jax.shard_map(
            run,
            in_specs=(split, P(), P(), P(), P(over), P()),
            out_specs=(split, P(None, over)),
            check_vma=False,
        )
    env_state, trajectory = run(env_state, keys, params, policy_params, reset, pool)
    return env_state, trajectory if one_step.keep else _with_constants(trajectory)


def _with_constants(trajectory: Trajectory) -> Trajectory:
    """Adds the fields that are constant: made once here, so that no step of the scan writes them."""
    if trajectory.bootstrap is None:
        trajectory = trajectory.replace(bootstrap=jnp.zeros(trajectory.reward.shape, jnp.float32))
    if trajectory.valid is None:
        trajectory = trajectory.replace(valid=jnp.ones(trajectory.start.shape, bool))
    return trajectory


@dataclasses.dataclass(frozen=True)
class _BatchStep:
    """One step of all environments: `(env_state, keys, ...) -> (env_state, a Trajectory without the axis T)`."""

    env: Environment | Adapter
    policy: Policy
    value: Value | None
    keep: Callable[[Trajectory], PyTree] | None

    def __call__(self, env_state, keys, params, policy_params, reset, pool):
        policy_key, step_key, reset_key = keys[0], keys[1], keys[2]
        carry = where(env_state.start, env_state.first_carry, env_state.carry)
        action, carry, extras = self.act(
            env_keys(policy_key, env_state.index), params, policy_params, env_state, carry
        )
        result = jax.vmap(lambda key, state, action: step(key, self.env, state, action, params))(
            env_keys(step_key, env_state.index), env_state.state, action
        )
        now = cast_like((result.obs, result.state), (env_state.obs, env_state.state), "step")
        reward, terminated, truncated = (
            result.reward.astype(jnp.float32),
            result.terminated,
            result.truncated,
        )
        valid: PyTree = None  # all are valid; `_with_constants` fills it in
        if isinstance(reset, NoReset | NextStep):
            valid = ~env_state.ended
            # A finished environment steps on with the others, and what it gives is thrown away.
            mask = per_env(valid, reward)
            reward, terminated, truncated = (
                jnp.where(mask, reward, 0),
                terminated & mask,
                truncated & mask,
            )
            now = where(valid, now, (env_state.obs, env_state.state))
        # Of several agents, the episode ends when it has for all of them.
        ended = jnp.all((terminated | truncated).reshape(len(terminated), -1), 1)
        row = Trajectory(
            obs=env_state.obs,
            action=action,
            reward=reward,
            terminated=terminated,
            truncated=truncated,
            start=env_state.start,
            valid=valid,
            ended=ended,
            bootstrap=self.bootstrap(params, policy_params, now, carry, truncated & ~terminated),
            episode_return=jnp.where(per_env(env_state.start, reward), 0, env_state.episode_return)
            + reward,
            episode_length=jnp.where(env_state.start, 0, env_state.episode_length)
            + (1 if valid is None else valid),
            extras=extras,
            info=result.info,
        )
        match reset:
            case NoReset():
                start, waiting = jnp.zeros_like(ended), env_state.ended | ended
            case NextStep():
                start, waiting = env_state.ended, ended
            case _:
                start, waiting = ended, jnp.zeros_like(ended)
        if not isinstance(reset, NoReset):
            now = reset_finished(
                reset, self.env, params, reset_key, env_state.index, start, pool, now
            )
        env_state = env_state.replace(
            state=now[1],
            obs=now[0],
            start=start,
            ended=waiting,
            carry=cast_like(carry, env_state.carry, "carry"),
            episode_return=row.episode_return,
            episode_length=row.episode_length,
            step=env_state.step + 1,
        )
        return env_state, self.keep(_with_constants(row)) if self.keep else row

    def act(self, keys, params, policy_params, env_state, carry):
        """Actions, carries and extras of all environments."""

        def one(key, obs, carry, state):
            legal = self.legal(self.policy, state, params)
            action, carry, *extras = self.policy(key, policy_params, obs, carry, **legal)
            self.check_action(action, params)
            return action, carry, extras[0] if extras else {}

        return jax.vmap(one)(keys, env_state.obs, carry, env_state.state)

    def legal(self, function: Policy | Value, state, params) -> dict[str, Array | None]:
        """The mask of a state, for a function that names a parameter `action_mask`; None where there is no mask."""
        if not takes_mask(function):
            return {}
        mask = capabilities(self.env).action_mask
        return {"action_mask": None if mask is None else mask(state, params)}

    def check_action(self, action, params):
        """Refuses actions that are no elements of the space by their shapes; values are for `check_trajectory`."""
        expected = jax.eval_shape(lambda: self.env.action_space(params).sample(jax.random.key(0)))
        shapes, wanted = (
            jax.tree.map(lambda x: tuple(jnp.shape(x)), tree) for tree in (action, expected)
        )
        if shapes != wanted:
            raise UsageError(
                f"the policy's action has shape {shapes}; {self.env.name} takes {wanted}."
            )

    def bootstrap(self, params, policy_params, now, carry, cut) -> PyTree:
        """Values of the last observations where `cut`, 0 elsewhere; None without a value function."""
        if self.value is None:
            return None

        value = self.value

        def one(obs, state, carry):
            return value(policy_params, obs, carry, **self.legal(value, state, params))

        def values():
            found = jax.vmap(one)(now[0], now[1], carry)
            if found.shape != cut.shape:
                raise UsageError(
                    f"value gives shape {found.shape[1:]} an environment; legal is {cut.shape[1:]}."
                )
            return jnp.where(cut, found, 0).astype(jnp.float32)

        # Most steps truncate nothing, and the value function may cost more than the step.
        return jax.lax.cond(jnp.any(cut), values, lambda: jnp.zeros(cut.shape, jnp.float32))
