"""Random walks through an environment, recorded whole, for twins that follow them on the host."""

import functools

import jax
import jax.numpy as jnp
import numpy as np

from jaxpar.env import reset, step


def legal_action(key, env, state, params):
    """A uniform draw among the legal actions."""
    if not hasattr(env, "action_mask"):
        return env.action_space(params).sample(key)
    return jax.random.categorical(key, jnp.where(env.action_mask(state, params), 0.0, -jnp.inf)).astype(jnp.int32)


@functools.partial(jax.jit, static_argnums=(1, 3, 4))
def travel(key, env, params, num_steps, act=legal_action):
    """`num_steps` steps with a reset where one ends: everything about each, `[T, ...]`.

    Returns:
        A dictionary: `before` (state), `seen` (its observation), `start` (whether an episode began there), `action`,
        `after` (a `Transition`), `done`.
    """

    def one(carry, key):
        state, seen, start = carry
        act_key, step_key, reset_key = jax.random.split(key, 3)
        action = act(act_key, env, state, params)
        after = step(step_key, env, state, action, params)
        done = after.terminated | after.truncated
        fresh_seen, fresh = reset(reset_key, env, params)
        following = jax.tree.map(lambda a, b: jnp.where(done, a, b), (fresh, fresh_seen), (after.state, after.obs))
        record = {"before": state, "seen": seen, "start": start, "action": action, "after": after, "done": done}
        return (*following, done), record

    first_key, key = jax.random.split(key)
    seen, state = reset(first_key, env, params)
    return jax.lax.scan(one, (state, seen, jnp.ones((), bool)), jax.random.split(key, num_steps))[1]


def steps_of(env, params, num_steps, seed=0, act=legal_action, leg=1000):
    """The steps of journeys of `leg` steps each, one by one, as NumPy pytrees."""
    for place in range(num_steps // leg):
        record = jax.device_get(travel(jax.random.key(seed + 1000 * place), env, params, leg, act))
        leaves, tree = jax.tree.flatten(record)
        leaves = [np.asarray(leaf) for leaf in leaves]
        for t in range(leg):
            yield jax.tree.unflatten(tree, [leaf[t] for leaf in leaves])


def abstract(tree):
    """Shapes, dtypes and weak types, with the structure."""
    leaves, structure = jax.tree.flatten(tree)
    return structure, [(leaf.shape, leaf.dtype, leaf.weak_type) for leaf in leaves]


def assert_sound(env, seed=0, num_steps=1000):
    """Stable and strong types from reset to step; spaces true; finite; hashable by value; a picture that vmaps."""
    params, key = env.default_params, jax.random.key(seed)
    twin = type(env)(**env.__dict__)
    assert env == twin and hash(env) == hash(twin)

    def parts(key):
        seen, state = reset(key, env, params)
        action = env.action_space(params).sample(key)
        assert env.action_space(params).contains(action).shape == ()
        return seen, state, step(key, env, state, action, params)

    seen, state, after = jax.eval_shape(parts, key)
    assert abstract(state) == abstract(after.state) and abstract(seen) == abstract(after.obs)
    assert not any(leaf.weak_type for leaf in jax.tree.leaves((state, seen, after)))
    assert after.reward.dtype == jnp.float32 and after.reward.shape == ()
    record = travel(key, env, params, num_steps)

    @jax.jit
    def judged(record):
        views, actions = [record["seen"], record["after"].obs], env.action_space(params)
        inside = [jax.vmap(env.observation_space(params).contains)(view) for view in views]
        inside.append(jax.vmap(actions.contains)(record["action"]))
        finite = [jnp.isfinite(leaf) for leaf in jax.tree.leaves((views, record["after"].reward))]
        few = jax.tree.map(lambda leaf: leaf[:8], record["before"])
        return [jnp.all(x) for x in (*inside, *finite)], jax.vmap(lambda state: env.render(state, params))(few)

    verdicts, frames = judged(record)
    assert all(bool(verdict) for verdict in verdicts)
    assert frames.dtype == jnp.uint8 and frames.ndim == 4 and frames.shape[-1] == 3
    assert len(np.unique(np.asarray(frames[0]).reshape(-1, 3), axis=0)) > 1, "an empty picture"
