"""Random play under jit, recorded whole, for twins to replay on the host."""

import jax
import jax.numpy as jnp
import numpy as np

from jaxpar.env import reset, step


def play(env, params, num_steps, seed=0):
    """`num_steps` of random legal-or-not actions with a reset after every end.

    Returns the first observation and state, and the record of every step: key, action, mask before
    it, the transition before any reset, and the observation and state that the next step starts
    from.
    """

    def one(carry, key):
        state = carry
        act_key, step_key, reset_key = jax.random.split(key, 3)
        action = env.action_space(params).sample(act_key)
        mask = env.action_mask(state, params)
        made = step(step_key, env, state, action, params)
        done = made.terminated | made.truncated
        fresh = jax.lax.cond(
            done, lambda: reset(reset_key, env, params), lambda: (made.obs, made.state)
        )
        return fresh[1], dict(
            key=step_key, action=action, mask=mask, made=made, obs=fresh[0], state=fresh[1]
        )

    def run(key):
        first_key, steps_key = jax.random.split(key)
        obs, state = reset(first_key, env, params)
        return obs, state, jax.lax.scan(one, state, jax.random.split(steps_key, num_steps))[1]

    obs, state, record = jax.jit(run)(jax.random.key(seed))
    inside = jax.vmap(env.observation_space(params).contains)(record["made"].obs)
    assert bool(jnp.all(inside)), "an observation outside its space"
    keys = record.pop("key")
    return jax.tree.map(np.asarray, (obs, state)), keys, jax.tree.map(np.asarray, record)


def at(tree, index):
    """One step of a record."""
    return jax.tree.map(lambda leaf: leaf[index], tree)
