"""Episodes on tape, with every end in every place, and what learners make of them, by hand in plain NumPy.

Of the library the hand takes only the order of its keys, which `jaxpar.rollout` documents, and
JAX's draws from them.
"""

import dataclasses
import functools
import itertools

import flax.struct
import jax
import jax.numpy as jnp
import numpy as np
from fast import jit

from jaxpar.env import Box, Discrete

POLICY, RESET = 0, 2  # uses of a step's key
TERMINATES, IS_CUT, BOTH = ENDS = range(1, 4)
LONGEST, FEATURES, ACTIONS = 3, 3, 3


@functools.cache
def tables(agents):
    """K tapes, of every end of every agent: obs, masks, rewards by action and flags `[K, time, N, ...]`."""
    ends = np.array(
        list(itertools.product(itertools.product(range(LONGEST), ENDS), repeat=agents))
    )  # [K, N, 2]
    rng, shape = np.random.default_rng(agents), (len(ends), LONGEST + 1, agents)
    mask = rng.random((*shape, ACTIONS)) < 0.6
    np.put_along_axis(mask, rng.integers(0, ACTIONS, (*shape, 1)), True, -1)
    over = (
        np.arange(LONGEST)[None, :, None] >= ends[:, None, :, 0]
    )  # whoever has ended says so in every later step
    return {
        "obs": rng.normal(size=(*shape, FEATURES)).astype(np.float32),
        "mask": mask,
        "reward": rng.normal(size=(len(ends), LONGEST, agents, ACTIONS)).astype(
            np.float32
        ),  # the dead earn, too
        "terminated": over & (ends[:, None, :, 1] != IS_CUT),
        "truncated": over & (ends[:, None, :, 1] != TERMINATES),
    }


@flax.struct.dataclass
class TapeParams:
    pay: float = 1.0


@flax.struct.dataclass
class TapeState:
    tape: jax.Array
    time: jax.Array


@dataclasses.dataclass(frozen=True)
class Tape:
    """Plays a tape drawn at its start."""

    name = "Tape"
    default_params = TapeParams()

    def told(self, what, state, time):
        table = tables(getattr(self, "num_agents", 1))[what]
        row = jnp.asarray(table)[state.tape, time]
        return row if hasattr(self, "num_agents") else row[0]

    def shape(self):
        return (self.num_agents,) if hasattr(self, "num_agents") else ()

    def observation_space(self, params):
        return Box(-9.0, 9.0, (*self.shape(), FEATURES))

    def action_space(self, params):
        return Discrete(ACTIONS, self.shape())

    def init(self, key, params):
        count = len(tables(getattr(self, "num_agents", 1))["obs"])
        return TapeState(jax.random.randint(key, (), 0, count), jnp.int32(0))

    def transition(self, key, state, action, params):
        return state.replace(time=state.time + 1)

    def observe(self, key, state, action, params):
        return self.told("obs", state, state.time)

    def reward(self, state, action, next_state, params):
        row = self.told("reward", state, state.time)
        return params.pay * jnp.take_along_axis(row, action[..., None], -1)[..., 0]

    def terminal(self, state, params):
        return self.told("terminated", state, state.time - 1)

    def truncated(self, state, params):
        return self.told("truncated", state, state.time - 1)

    def action_mask(self, state, params):
        return self.told("mask", state, state.time)


@dataclasses.dataclass(frozen=True)
class Tapes(Tape):
    """The same for two, whose ends are their own."""

    num_agents = 2


# By hand, from here on. Arrays have an axis of agents always, of length 1 for a lone one.


def head(weights, name):
    return weights["heads"][name]["params"]["out"]


def remembered(weights, obs, h):
    """One step of encoder and memory, `[..., F]` and `[..., M]` -> `[..., M]`; the encoder alone without a memory."""
    dense = weights["encoder"]["params"]["Dense_0"]
    x = np.tanh(obs @ dense["kernel"] + dense["bias"])
    if "memory" not in weights:
        return x
    cell = weights["memory"]
    z = 1 / (1 + np.exp(-(x @ cell["wz"] + cell["bz"])))
    return (1 - z) * h + z * (x @ cell["wh"] + cell["bh"])


def read(weights, name, h):
    out = head(weights, name)
    return h @ out["kernel"] + out["bias"]


def log_softmax(logits, mask):
    exps = np.where(mask, np.exp(logits - logits.max(-1, keepdims=True)), 0)
    with np.errstate(divide="ignore"):
        return np.log(exps / exps.sum(-1, keepdims=True))


@jit
def _key(root, step, use, copy):
    return jax.random.fold_in(jax.random.split(jax.random.fold_in(root, step), 3)[use], copy)


@functools.partial(jit, static_argnums=1)
def _tape(key, count):
    return jax.random.randint(jax.random.split(key)[0], (), 0, count)


@jit
def _categorical(key, logits):
    return jax.random.categorical(key, logits)


@jit
def _epsilon_greedy(key, q, mask, epsilon):
    anyhow, legal = jax.random.split(key)
    random = jax.random.categorical(legal, jnp.where(mask, 0.0, -1e9))
    return jnp.where(jax.random.uniform(anyhow, random.shape) < epsilon, random, jnp.argmax(q, -1))


class Hand:
    """Environments that are walked by hand, one step of one environment after another, over any number of rollouts."""

    def __init__(self, key, env, num_envs, size, next_step=False, epsilon=None):
        self.lone, self.agents = not hasattr(env, "num_agents"), getattr(env, "num_agents", 1)
        self.table, self.next_step, self.epsilon, self.made = (
            tables(self.agents),
            next_step,
            epsilon,
            0,
        )
        first = jax.random.split(jax.random.fold_in(key, 2**32 - 1), 1)[0]
        self.envs = [self.start(jax.random.fold_in(first, copy), size) for copy in range(num_envs)]
        self.size, self.seen = size, set()

    def start(self, key, size):
        nobody, nothing = np.zeros(self.agents, bool), np.zeros((self.agents, size))
        return {"tape": int(_tape(key, len(self.table["obs"]))), "time": 0, "h": nothing, "agent_done": nobody,
                "start": True, "over": False}  # fmt: skip

    def told(self, what, copy):
        return self.table[what][copy["tape"], copy["time"]]

    def act(self, key, weights, h, mask):
        """What the agents of an environment do, and what that or the best is worth."""
        cut = (lambda x: x[0]) if self.lone else (lambda x: x)
        if self.epsilon is None:
            logits = np.where(mask, read(weights, "policy", h), -1e9)
            drawn = np.asarray(_categorical(key, cut(logits).astype(np.float32))).reshape(-1)
        else:
            q = np.where(mask, read(weights, "q", h), -1e9)
            drawn = np.asarray(_epsilon_greedy(key, cut(q), cut(mask), self.epsilon)).reshape(-1)
        return drawn, self.worth(weights, h, mask)

    def worth(self, weights, h, mask):
        if self.epsilon is None:
            return read(weights, "value", h)[:, 0]
        return np.where(mask, read(weights, "q", h), -np.inf).max(-1)

    def rollout(self, key, weights, num_steps):
        """Rows `[T, B, N, ...]` of what happened; `led_to` is the value of what each step led to, 0 after an end."""
        names = (
            "obs mask start counts raw_action value "
            "log_prob reward led_to next_obs next_mask cut terminated"
        ).split()
        rows = {name: [] for name in names}
        before = np.stack([copy["h"] for copy in self.envs])
        for row in range(num_steps):
            made = [self.step(key, number, weights, row) for number in range(len(self.envs))]
            self.made += 1
            for name in rows:
                rows[name].append(np.stack([one[name] for one in made]))
        return {name: np.stack(x) for name, x in rows.items()} | {"before": before}

    def step(self, key, number, weights, row):
        copy = self.envs[number]
        if copy["start"]:
            copy["h"], copy["agent_done"] = np.zeros_like(copy["h"]), np.zeros(self.agents, bool)
        obs, mask = self.told("obs", copy), self.told("mask", copy)
        one = {"obs": obs, "mask": mask, "start": np.full(self.agents, copy["start"])}
        copy["start"] = False
        if copy["over"]:  # a step of no episode, in which the next one is drawn
            copy |= self.start(_key(key, self.made, RESET, number), self.size) | {"h": copy["h"]}
            nothing = np.zeros(self.agents)
            return one | {"counts": nothing > 0, "raw_action": nothing.astype(int), "value": nothing,
                          "log_prob": nothing,
                          "reward": nothing, "led_to": nothing, "next_obs": obs, "next_mask": mask,
                          "cut": nothing == 0, "terminated": nothing > 0}  # fmt: skip
        copy["h"] = remembered(weights, obs, copy["h"])
        drawn, value = self.act(_key(key, self.made, POLICY, number), weights, copy["h"], mask)
        reward = np.take_along_axis(self.told("reward", copy), drawn[:, None], -1)[:, 0]
        terminated, truncated = self.told("terminated", copy), self.told("truncated", copy)
        over, counts = terminated | truncated, ~copy["agent_done"]
        copy["time"] += 1
        next_obs, next_mask = self.told("obs", copy), self.told("mask", copy)
        then = self.worth(weights, remembered(weights, next_obs, copy["h"]), next_mask)
        for agent in np.flatnonzero(over & counts):
            kind = terminated[agent] + 2 * truncated[agent]
            self.seen.add((row, int(kind), "with all" if over.all() else "alone"))
        if not over.all():
            self.seen |= {(row, "agent_done")} if copy["agent_done"].any() else set()
        copy["agent_done"] = over
        if over.all() and self.next_step:
            copy["over"] = True
        elif over.all():
            copy |= self.start(_key(key, self.made, RESET, number), self.size) | {"h": copy["h"]}
        policy = (
            log_softmax(read(weights, "policy", copy["h"]), mask)
            if self.epsilon is None
            else np.zeros(mask.shape)
        )
        return one | {
            "counts": counts, "raw_action": drawn, "value": value, "reward": reward, "cut": over,
            "terminated": terminated,
            "log_prob": np.take_along_axis(policy, drawn[:, None], -1)[:, 0], "next_obs": next_obs,
            "next_mask": next_mask, "led_to": np.where(terminated, 0, then),
        }  # fmt: skip


def advantages(rows, discount, lambda_):
    """Generalised advantages as sums of errors, each to the end of its trajectory."""
    error = rows["reward"] + discount * rows["led_to"] - rows["value"]
    total = np.zeros_like(error)
    for t, copy, agent in np.ndindex(error.shape):
        for s in range(t, len(error)):
            total[t, copy, agent] += (discount * lambda_) ** (s - t) * error[s, copy, agent]
            if rows["cut"][s, copy, agent]:
                break
    return total


def returns(rows, discount, num_steps):
    """Rewards `[T, B, N]` of up to so many steps and, after m of them, discount^m and the step that they end with."""
    total, power = np.zeros(rows["reward"].shape), np.ones(rows["reward"].shape)
    last = np.zeros(rows["reward"].shape, int)
    for place in np.ndindex(total.shape):
        for s in range(place[0], min(place[0] + num_steps, len(total))):
            at = (s, *place[1:])
            total[place] += power[place] * rows["reward"][at]
            power[place], last[place] = power[place] * discount, s
            if rows["cut"][at]:
                break
    return total, power, last


def lambda_returns(rows, discount, lambda_):
    """Returns that mix all lengths, by the recursion of Sutton and Barto (12.18)."""
    total = np.zeros(rows["reward"].shape)
    for t in reversed(range(len(total))):
        later = (
            rows["led_to"][t]
            if t == len(total) - 1
            else np.where(rows["cut"][t], rows["led_to"][t], total[t + 1])
        )
        total[t] = rows["reward"][t] + discount * (
            (1 - lambda_) * rows["led_to"][t] + lambda_ * later
        )
    return total


def through(weights, rows, envs):
    """What is remembered in every step of these environments, emptied where an episode starts, `[T, b, N, M]`."""
    h, out = rows["before"][envs], []
    for obs, start in zip(rows["obs"][:, envs], rows["start"][:, envs], strict=True):
        h = remembered(weights, obs, np.where(start[..., None], 0, h))
        out.append(h)
    return np.stack(out)


def ppo_loss(weights, rows, envs, rates):
    """Schulman et al. 2017, over what counts: the loss, its policy's and value's parts, and the entropy."""
    h, on = through(weights, rows, envs), rows["counts"][:, envs]
    drawn, mask, old, before, advantage, target = (
        rows[name][:, envs][on]
        for name in ("raw_action", "mask", "log_prob", "value", "advantage", "target")
    )
    log_p = log_softmax(read(weights, "policy", h)[on], mask)
    value, p = read(weights, "value", h)[on][:, 0], np.exp(log_p)
    ratio = np.exp(np.take_along_axis(log_p, drawn[:, None], -1)[:, 0] - old)
    advantage = (advantage - advantage.mean()) / (advantage.std() + 1e-8)
    policy = -np.minimum(
        ratio * advantage, ratio.clip(1 - rates.clip, 1 + rates.clip) * advantage
    ).mean()
    near = before + (value - before).clip(-rates.clip, rates.clip)
    error = np.maximum((value - target) ** 2, (near - target) ** 2).mean() / 2
    entropy = -np.where(mask, p * np.where(mask, log_p, 0), 0).sum(-1).mean()
    return policy + rates.value_coef * error - rates.entropy_coef * entropy, policy, error, entropy


def q_loss(weights, rows, envs, rates):
    """Half the mean squared error of what was done, over what counts; and the mean of its values."""
    h, on = through(weights, rows, envs), rows["counts"][:, envs]
    q = np.take_along_axis(read(weights, "q", h), rows["raw_action"][:, envs][..., None], -1)[
        ..., 0
    ][on]
    return np.mean((q - rows["target"][:, envs][on]) ** 2) / 2, q.mean()


def slope(loss, weights):
    """The gradient of `loss(weights)[0]` by central differences, leaf by leaf."""
    leaves, tree = jax.tree.flatten(weights)
    found = [np.zeros_like(leaf) for leaf in leaves]
    for leaf, out in zip(leaves, found, strict=True):
        for at in np.ndindex(leaf.shape):
            here, ends = leaf[at], []
            for move in (1e-6, -1e-6):
                leaf[at] = here + move
                ends.append(loss(jax.tree.unflatten(tree, leaves))[0])
            leaf[at] = here
            out[at] = (ends[0] - ends[1]) / 2e-6
    return jax.tree.unflatten(tree, found)
