"""The slow reference: an ordinary loop over environments and steps, one key at a time."""

import jax
import jax.numpy as jnp

from jaxpar.env import reset, step

POLICY, STEP, RESET = range(3)


def key_of(root, step_number, use, index):
    return jax.random.fold_in(
        jax.random.split(jax.random.fold_in(root, step_number), 3)[use], index
    )


def first_key_of(root, index):
    return jax.random.fold_in(jax.random.split(jax.random.fold_in(root, 2**32 - 1), 1)[0], index)


def walk(
    root,
    env,
    params,
    policy,
    policy_params,
    num_envs,
    num_steps,
    first_carry,
    when="same",
    value=None,
):
    """Rows by environment: a list of dictionaries an environment. `when` is "same", "next" or "never"."""
    rows = [[] for _ in range(num_envs)]
    for index in range(num_envs):
        obs, state = reset(first_key_of(root, index), env, params)
        carry, start, waiting, total, length = first_carry, True, False, 0.0, 0
        for s in range(num_steps):
            if start:
                carry, total, length = first_carry, 0.0, 0
            action, carry, extras = policy(
                key_of(root, s, POLICY, index), policy_params, obs, carry
            )
            row = {
                "obs": obs,
                "action": action,
                "start": start,
                "valid": not waiting,
                "extras": extras,
            }
            row |= {"reward": 0.0, "terminated": False, "truncated": False, "bootstrap": 0.0}
            start = False
            if waiting:
                if when == "next":
                    obs, state = reset(key_of(root, s, RESET, index), env, params)
                    start, waiting = True, False
            else:
                obs, state, reward, terminated, truncated, _ = step(
                    key_of(root, s, STEP, index), env, state, action, params
                )
                row |= {
                    "reward": reward,
                    "terminated": bool(terminated),
                    "truncated": bool(truncated),
                }
                total, length = total + reward, length + 1
                if value and truncated and not terminated:
                    row["bootstrap"] = value(policy_params, obs, carry)
                if terminated or truncated:
                    waiting = when != "same"
                    if when == "same":
                        obs, state = reset(key_of(root, s, RESET, index), env, params)
                        start = True
            row |= {
                "episode_return": total,
                "episode_length": length,
                "ended": row["terminated"] or row["truncated"],
            }
            rows[index].append(row)
    return rows


def column(rows, name):
    """One field as an array `[T, B, ...]`."""
    return jnp.stack([jnp.stack([jnp.asarray(row[name]) for row in index]) for index in rows], 1)
