"""Recurrences that were written without a look at the solver: half are mean, half are ordinary.

Each works in bfloat16, float16, float32 and float64, and for any number of steps. What depends on
the range of a dtype stands in inputs and starts, so that a loop in float64 can follow the same one.
"""

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np


class Recurrence(NamedTuple):
    """A loop over small states: how it begins, what it reads, and why it is in the list.

    Attributes:
        name: What tests call it.
        kind: The kind of loop that it stands for.
        step: `step(h, x) -> h`, on any pytree; it keeps the dtype of its state.
        start: `start(dtype) -> h`, the state before the first step.
        inputs: `inputs(T, dtype) -> xs`, of leading length T, the same at each call. Fewer steps
            read the first of the inputs of more.
        smooth: Whether derivatives see all dependence. Kinks count as smooth, as each side has its
            slope; jumps do not. Chaotic ones may be smooth, and may still be too much for Newton.
        why: What a solver may get wrong in it.
    """

    name: str
    kind: str
    step: Callable[[Any, Any], Any]
    start: Callable[[Any], Any]
    inputs: Callable[[int, Any], Any]
    smooth: bool
    why: str


def starting(**leaves):
    """Makes `start` of leaves by name."""

    def start(dtype):
        return {name: jnp.asarray(value, dtype) for name, value in leaves.items()}

    return start


def draws(seed, T, *shape):
    """Standard normal numbers, of which more steps only add to the end."""
    return np.random.default_rng(seed).normal(size=(T, *shape))


def normal(seed, *shape, scale=1.0, mean=0.0):
    """Makes `inputs` of one array of normal numbers."""

    def inputs(T, dtype):
        return jnp.asarray(mean + scale * draws(seed, T, *shape), dtype)

    return inputs


def within(dtype, size):
    """A size as it is, or the nearest that float16 has room for."""
    if jnp.finfo(dtype).maxexp > 16:
        return size
    return min(max(size, 1e-3), 1e3)


def each(T, dtype, value):
    """One value for every step."""
    return jnp.full((T,), value, dtype)


# Mean: an iteration with small residuals and small updates may stand far from the loop.


def bank(cents, x):
    return jnp.round(cents + 1e-6 * cents + x)


def deposits(T, dtype):
    return jnp.asarray(np.round(10 * draws(1, T)), dtype)


def slow_integrator(h, x):
    fast = 0.9 * h["fast"] - jnp.sin(5 * h["slow"]) + x
    return {"fast": fast, "slow": h["slow"] + 1e-5 * fast**3}


def tiny_filter(h, x):
    tiny = h[1]
    pull = jnp.sign(x["drive"] - 0.5 * tiny / x["unit"])
    return jnp.stack([0.9 * h[0] + x["size"] * x["drive"], 0.9 * tiny + x["unit"] * pull])


def tiny_units(T, dtype):
    unit = within(dtype, 1e-9)
    # A tolerance that float64 can afford is smaller, and so is what hides below it.
    if jnp.dtype(dtype) == np.float64:
        unit = 1e-20
    return {
        "drive": normal(3)(T, dtype),
        "unit": each(T, dtype, unit),
        "size": each(T, dtype, within(dtype, 1e4)),
    }


def friction(h, x):
    speed = h["speed"] + 0.05 * (x - 0.5 * jnp.sign(h["speed"]))
    return {"speed": speed, "place": h["place"] + 0.05 * speed}


def straight_through(h, x):
    rounded = h + jax.lax.stop_gradient(jnp.round(h) - h)
    a = rounded[0]
    b = rounded[1]
    return jnp.stack([0.6 * a + 0.5 * b, 0.6 * b - 0.5 * a]) + x


@jax.custom_jvp
def hidden(value):
    """The value itself, with a derivative of zero."""
    return value


@hidden.defjvp
def hidden_jvp(primals, tangents):
    (value,) = primals
    (tangent,) = tangents
    return value, jnp.zeros_like(tangent)


def few_roundings(seed):
    """Makes `inputs` of a few roundings of 1 a step, all of one sign."""

    def inputs(T, dtype):
        eps = float(jnp.finfo(dtype).eps)
        return jnp.asarray(12 * eps * (1 + 0.5 * np.tanh(draws(seed, T))), dtype)

    return inputs


def hidden_link(h, x):
    return {
        "left": 0.5 * h["left"] + 0.5 * hidden(h["right"]) + x,
        "right": 0.5 * h["right"] + 0.5 * hidden(h["left"]),
    }


def hidden_decay(h, x):
    return jax.lax.stop_gradient(h) * (1 - x)


def phase(h, x):
    turned = h["phase"] + 0.618 + 0.05 * jnp.sin(2 * math.pi * h["phase"]) + 0.01 * x
    whole = jnp.floor(turned)
    return {"phase": turned - whole, "turns": h["turns"] + whole}


def bandit(h, rewards):
    chosen = jnp.arange(3) == jnp.argmax(h["values"])
    error = jnp.where(chosen, rewards - h["values"], 0)
    gained = jnp.sum(jnp.where(chosen, rewards, 0))
    return {"values": h["values"] + 0.1 * error, "total": h["total"] + gained}


def energy(place):
    return 2 * (place * place - 1) ** 2 + 0.3 * place


def accept_reject(h, x):
    proposed = h["place"] + 0.7 * x["move"]
    accepted = x["log_uniform"] < energy(h["place"]) - energy(proposed)
    place = jnp.where(accepted, proposed, h["place"])
    return {"place": place, "accepted": h["accepted"] + accepted.astype(place.dtype)}


def proposals(T, dtype):
    uniform = np.random.default_rng(10).uniform(1e-3, 1, size=T)
    return {"move": normal(11)(T, dtype), "log_uniform": jnp.asarray(np.log(uniform), dtype)}


def thermostat(h, x):
    heater = jnp.where(h["room"] < 19, 1.0, jnp.where(h["room"] > 21, 0.0, h["heater"]))
    heater = heater.astype(h["heater"].dtype)
    wall = h["wall"] + 0.02 * (x - h["wall"]) + 0.1 * (h["room"] - h["wall"])
    room = h["room"] + 0.1 * (h["wall"] - h["room"]) + 0.8 * heater
    return {"room": room, "wall": wall, "heater": heater}


def schedule(h, x):
    count = (h["count"].astype(jnp.int32) + 1).astype(h["count"].dtype)
    rate = 0.05 * (1 + jnp.cos(math.pi * (count / x["last"])))
    return {"count": count, "weight": h["weight"] - rate * (h["weight"] - x["target"])}


def resumed(dtype):
    return {
        "count": jnp.asarray(within(dtype, 1e6), dtype),
        "weight": jnp.asarray(1, dtype),
    }


def long_schedule(T, dtype):
    return {"target": normal(13)(T, dtype), "last": each(T, dtype, within(dtype, 1e7))}


def rounding_residue(h, x):
    add = x["value"] - h["lost"]
    total = h["total"] + add
    lost = (total - h["total"]) - add
    return {"total": total, "lost": lost, "echo": 0.9 * h["echo"] + x["scale"] * lost}


def values_to_add(T, dtype):
    scale = 1 / float(jnp.finfo(dtype).eps)
    return {"value": normal(14, mean=0.1)(T, dtype), "scale": each(T, dtype, scale)}


def spiking(v, x):
    fired = v > 1
    spikes = fired.astype(v.dtype)
    heard = 0.3 * jnp.roll(spikes, 1) - 0.2 * jnp.roll(spikes, -1)
    return jnp.where(fired, 0, 0.95 * v) + heard + x


def autocatalysis(h, x):
    made = x["rate"] * h["food"] * h["seed"]
    food = h["food"] + 0.001 * (x["supply"] - h["food"]) - made
    return {"food": food, "seed": 0.999 * h["seed"] + made}


def seeded(dtype):
    return {
        "food": jnp.asarray(within(dtype, 1e6), dtype),
        "seed": jnp.asarray(within(dtype, 1e-12), dtype),
    }


def chemistry(T, dtype):
    supply = within(dtype, 1e6)
    rate = 0.05 * (1 + 0.5 * np.tanh(draws(16, T))) / supply
    return {"rate": jnp.asarray(rate, dtype), "supply": each(T, dtype, supply)}


def chaos(h, x):
    grown = x * h * (1 - h)
    return 0.95 * grown + 0.05 * jnp.flip(grown)


def growth_rates(T, dtype):
    return jnp.asarray(3.8 + 0.1 * np.tanh(draws(17, T)), dtype)


def gear_box(h, throttle):
    ratio = 4 / (h["gear"] + 1).astype(throttle.dtype)
    turning = h["speed"] * ratio
    up = (turning > 6).astype(jnp.int32)
    down = (turning < 2).astype(jnp.int32)
    pull = throttle * ratio * (1 - turning / 10)
    speed = h["speed"] + 0.05 * (pull - 0.1 * h["speed"])
    return {
        "gear": jnp.clip(h["gear"] + up - down, 0, 4),
        "speed": speed,
        "way": h["way"] + 0.05 * speed,
    }


def parked(dtype):
    zero = jnp.asarray(0, dtype)
    return {"gear": jnp.asarray(0, jnp.int32), "speed": zero, "way": zero}


def throttles(T, dtype):
    waves = np.sin(0.03 * np.arange(T))
    return jnp.asarray(1 + waves + 0.3 * draws(18, T), dtype)


MEAN = (
    Recurrence(
        name="bank",
        kind="bank account",
        step=bank,
        start=lambda dtype: jnp.asarray(within(dtype, 1e7), dtype),
        inputs=deposits,
        smooth=False,
        why="Rounding to cents hides the balance; a step adds a millionth to it, which adds up.",
    ),
    Recurrence(
        name="slow_integrator",
        kind="slow integrator beside a fast mode",
        step=slow_integrator,
        start=starting(fast=0.1, slow=0),
        inputs=normal(2, scale=0.3),
        smooth=True,
        why="The slow leaf forgets nothing, so residuals below a tolerance of the fast one add up.",
    ),
    Recurrence(
        name="tiny_filter",
        kind="entries of very different size",
        step=tiny_filter,
        start=lambda dtype: jnp.zeros(2, dtype),
        inputs=tiny_units,
        smooth=False,
        why="An entry of 1e-9 beside one of 1e4 in one leaf: zeros pass any absolute tolerance.",
    ),
    Recurrence(
        name="friction",
        kind="friction",
        step=friction,
        start=starting(speed=0.3, place=0),
        inputs=normal(4, scale=0.7),
        smooth=False,
        why="The sign of the speed has no slope, and flips near zero by tiny differences.",
    ),
    Recurrence(
        name="straight_through",
        kind="straight-through estimator",
        step=straight_through,
        start=lambda dtype: jnp.asarray([0.3, -1.2], dtype),
        inputs=normal(5, 2),
        smooth=False,
        why="The derivative says rotation where the truth is a staircase.",
    ),
    Recurrence(
        name="hidden_link",
        kind="derivative of zero by rule",
        step=hidden_link,
        start=starting(left=1, right=1),
        inputs=few_roundings(6),
        smooth=False,
        why="Halves forget by their derivatives, but their sum keeps every small input.",
    ),
    Recurrence(
        name="hidden_decay",
        kind="stopped gradient",
        step=hidden_decay,
        start=lambda dtype: jnp.asarray(1, dtype),
        inputs=few_roundings(7),
        smooth=False,
        why="A decay by a few roundings a step, of which no derivative tells.",
    ),
    Recurrence(
        name="phase",
        kind="modular phase",
        step=phase,
        start=starting(phase=0.1, turns=0),
        inputs=normal(8),
        smooth=False,
        why="A phase that wraps a step early is off by a turn for one step, or for ever.",
    ),
    Recurrence(
        name="bandit",
        kind="argmax-driven state",
        step=bandit,
        start=lambda dtype: {"values": jnp.zeros(3, dtype), "total": jnp.zeros((), dtype)},
        inputs=normal(9, 3, mean=0.2),
        smooth=False,
        why="The choice hangs on small gaps, begins with a tie, and decides what is learned.",
    ),
    Recurrence(
        name="accept_reject",
        kind="accept or reject",
        step=accept_reject,
        start=starting(place=1, accepted=0),
        inputs=proposals,
        smooth=False,
        why="One other decision moves the walk to another well, and a count keeps it.",
    ),
    Recurrence(
        name="thermostat",
        kind="hysteresis",
        step=thermostat,
        start=starting(room=15, wall=12, heater=0),
        inputs=normal(12, scale=2, mean=5),
        smooth=False,
        why="The heater is a state that only comparisons write: it has memory and no slope.",
    ),
    Recurrence(
        name="schedule",
        kind="scheduler with a float counter",
        step=schedule,
        start=resumed,
        inputs=long_schedule,
        smooth=False,
        why="Resumed at a million steps, and cast through integers: one more is a small residual.",
    ),
    Recurrence(
        name="rounding_residue",
        kind="floating-point residue",
        step=rounding_residue,
        start=starting(total=0, lost=0, echo=0),
        inputs=values_to_add,
        smooth=False,
        why="A leaf of pure rounding, zero by algebra and by derivative, is echoed at full size.",
    ),
    Recurrence(
        name="spiking",
        kind="leaky integrate-and-fire neurons",
        step=spiking,
        start=lambda dtype: jnp.asarray([0, 0.3, 0.6], dtype),
        inputs=normal(15, 3, scale=0.1, mean=0.1),
        smooth=False,
        why="Spikes cross from neuron to neuron through a threshold without a slope.",
    ),
    Recurrence(
        name="autocatalysis",
        kind="chemistry",
        step=autocatalysis,
        start=seeded,
        inputs=chemistry,
        smooth=True,
        why="A seed of 1e-12 grows to 1e6; that it stays at zero has a residual of 1e-12.",
    ),
    Recurrence(
        name="chaos",
        kind="chaotic, expanding map",
        step=chaos,
        start=lambda dtype: jnp.asarray([0.3, 0.4], dtype),
        inputs=growth_rates,
        smooth=True,
        why="Each error doubles in two steps, so a small residual says nothing of the states.",
    ),
    Recurrence(
        name="gear_box",
        kind="gear box with an integer gear",
        step=gear_box,
        start=parked,
        inputs=throttles,
        smooth=False,
        why="An integer leaf rules a float by comparisons, and the way only adds up.",
    ),
)


# Ordinary: what a solver in parallel ought to get right, and to say so.


def clipped_walk(h, x):
    return jnp.clip(h + x, 0, 1)


WEIGHTS = 0.7 * np.linalg.qr(np.random.default_rng(20).normal(size=(4, 4)))[0]


def relu_net(h, x):
    mixed = jnp.sum(jnp.asarray(WEIGHTS, h.dtype) * h[None, :], axis=1)
    return jax.nn.relu(mixed + x)


def michaelis_menten(h, x):
    bound = h["trace"] / (x["unit"] + h["trace"])
    trace = 0.98 * h["trace"] + x["unit"] * (0.1 * x["feed"] - 0.1 * bound)
    return {"trace": trace, "bulk": 0.95 * h["bulk"] + x["size"] * bound}


def feeding(T, dtype):
    return {
        "feed": jnp.asarray(1 + 0.5 * np.tanh(draws(22, T)), dtype),
        "unit": each(T, dtype, within(dtype, 1e-12)),
        "size": each(T, dtype, within(dtype, 1e6)),
    }


def rotation(h, x):
    turned = math.cos(0.3) * h["re"] - math.sin(0.3) * h["im"]
    return {"re": turned + x, "im": math.sin(0.3) * h["re"] + math.cos(0.3) * h["im"]}


def kalman(h, x):
    variance = h["variance"] + 0.05
    gain = variance / (variance + x["noise"])
    error = x["seen"] - h["mean"]
    return {"mean": h["mean"] + gain * error, "variance": (1 - gain) * variance}


def sightings(T, dtype):
    noise = np.exp(0.5 * draws(24, T))
    return {"seen": normal(25)(T, dtype), "noise": jnp.asarray(noise, dtype)}


def adam(h, x):
    slope = h["weight"] - x
    first = 0.9 * h["first"] + 0.1 * slope
    second = 0.99 * h["second"] + 0.01 * slope * slope
    power_1 = 0.9 * h["power_1"]
    power_2 = 0.99 * h["power_2"]
    size = jnp.sqrt(second / (1 - power_2) + 1e-4)
    return {
        "weight": h["weight"] - 0.01 * first / (1 - power_1) / size,
        "first": first,
        "second": second,
        "power_1": power_1,
        "power_2": power_2,
    }


def averages(h, x):
    kept = jnp.asarray([0.5, 0.99, 0.9999], h.dtype)
    return kept * h + (1 - kept) * x


def ranked(h, x):
    return jnp.sort(0.8 * h + x)


def queues(h, x):
    waiting = h["first"] + x[0]
    first = jnp.maximum(waiting - x[1], 0)
    return {"first": first, "second": jnp.maximum(h["second"] + (waiting - first) - x[2], 0)}


def work(T, dtype):
    means = np.asarray([[0.8, 1.0, 1.1]])
    return jnp.asarray(means * np.exp(0.5 * draws(29, T, 3)), dtype)


def inventory(stock, demand):
    left = stock - demand
    return jnp.where(left < 10, 40, left).astype(stock.dtype)


def demands(T, dtype):
    return jnp.asarray(3 * np.exp(0.5 * draws(30, T)), dtype)


def pid(h, x):
    error = x - h["place"]
    wanted = 2 * error + h["sum"]
    given = jnp.clip(wanted, -1, 1)
    return {
        "place": 0.95 * h["place"] + 0.1 * given,
        "sum": h["sum"] + 0.05 * error + 0.1 * (given - wanted),
    }


def targets(T, dtype):
    return jnp.asarray(np.sign(np.sin(0.05 * np.arange(T))) + 0.1 * draws(31, T), dtype)


def dead_zone(h, x):
    outside = h - jnp.clip(h, -0.5, 0.5)
    return h - 0.3 * outside + x


CHANCES = np.log(np.asarray([[0.8, 0.1, 0.1], [0.2, 0.7, 0.1], [0.1, 0.3, 0.6]]))


def log_filter(h, x):
    joint = h[:, None] + jnp.asarray(CHANCES, h.dtype)
    told = jax.nn.logsumexp(joint, axis=0) + x
    return told - jax.nn.logsumexp(told)


def quantised(h, x):
    return (8 * (0.5 * h + x)).astype(jnp.int32).astype(h.dtype) / 8


def running_mean(h, x):
    count = h["count"] + 1
    mean = h["mean"] + (x - h["mean"]) / count
    return {"count": count, "mean": mean, "spread": h["spread"] + (x - h["mean"]) * (x - mean)}


def resets(h, x):
    return jnp.where(x["done"], x["first"], jnp.tanh(1.2 * h + x["value"]))


def episodes(T, dtype):
    return {
        "done": jnp.asarray(np.random.default_rng(35).uniform(size=T) < 0.05),
        "first": normal(36)(T, dtype),
        "value": normal(37)(T, dtype),
    }


def ratchet(h, x):
    return {"mark": jnp.maximum(0.999 * h["mark"], 0.3 * h["mark"] + x), "last": x}


ORDINARY = (
    Recurrence(
        name="clipped_walk",
        kind="clipping",
        step=clipped_walk,
        start=lambda dtype: jnp.asarray(0.5, dtype),
        inputs=normal(19, scale=0.2),
        smooth=True,
        why="A walk between two walls, which forget what came before.",
    ),
    Recurrence(
        name="relu_net",
        kind="relu net",
        step=relu_net,
        start=lambda dtype: jnp.zeros(4, dtype),
        inputs=normal(21, 4),
        smooth=True,
        why="A small net with kinks that contracts by 0.7.",
    ),
    Recurrence(
        name="michaelis_menten",
        kind="chemistry",
        step=michaelis_menten,
        start=starting(trace=0, bulk=0),
        inputs=feeding,
        smooth=True,
        why="A stable reaction of 1e-12 that feeds one of 1e6.",
    ),
    Recurrence(
        name="rotation",
        kind="rotation",
        step=rotation,
        start=starting(re=1, im=0),
        inputs=normal(23, scale=0.01),
        smooth=True,
        why="A linear loop that neither grows nor forgets.",
    ),
    Recurrence(
        name="kalman",
        kind="Kalman filter",
        step=kalman,
        start=starting(mean=0, variance=10),
        inputs=sightings,
        smooth=True,
        why="A variance that feeds the mean and hears nothing of it.",
    ),
    Recurrence(
        name="adam",
        kind="Adam",
        step=adam,
        start=starting(weight=2, first=0, second=0, power_1=1, power_2=1),
        inputs=normal(26),
        smooth=True,
        why="Moments, a weight, and powers that sink to nothing and only feed.",
    ),
    Recurrence(
        name="averages",
        kind="exponential moving averages",
        step=averages,
        start=lambda dtype: jnp.zeros(3, dtype),
        inputs=normal(27, mean=1),
        smooth=True,
        why="Linear, with memories of 2, 100 and 10,000 steps.",
    ),
    Recurrence(
        name="ranked",
        kind="sorted state",
        step=ranked,
        start=lambda dtype: jnp.asarray([-1, 0, 0, 1], dtype),
        inputs=normal(28, 4),
        smooth=True,
        why="Sorting swaps entries but keeps distances, and the rest contracts.",
    ),
    Recurrence(
        name="queues",
        kind="queue",
        step=queues,
        start=starting(first=0, second=0),
        inputs=work,
        smooth=True,
        why="Two queues in a row, empty now and then, which forgets the past.",
    ),
    Recurrence(
        name="inventory",
        kind="inventory with an (s, S) policy",
        step=inventory,
        start=lambda dtype: jnp.asarray(40, dtype),
        inputs=demands,
        smooth=False,
        why="A threshold on the stock, after which the past is forgotten.",
    ),
    Recurrence(
        name="pid",
        kind="PID with anti-windup",
        step=pid,
        start=starting(place=0, sum=0),
        inputs=targets,
        smooth=True,
        why="A controller that saturates and lets its sum leak while it does.",
    ),
    Recurrence(
        name="dead_zone",
        kind="dead zone",
        step=dead_zone,
        start=lambda dtype: jnp.asarray(0, dtype),
        inputs=normal(32, scale=0.2),
        smooth=True,
        why="Nothing is forgotten inside of the zone, much outside of it.",
    ),
    Recurrence(
        name="log_filter",
        kind="log-domain filter",
        step=log_filter,
        start=lambda dtype: jnp.full(3, -np.log(3), dtype),
        inputs=normal(33, 3),
        smooth=True,
        why="Beliefs over three states in logarithms, normalised at each step.",
    ),
    Recurrence(
        name="quantised",
        kind="quantised state",
        step=quantised,
        start=lambda dtype: jnp.asarray(0, dtype),
        inputs=normal(34),
        smooth=False,
        why="A cast through integers; halving makes different pasts meet exactly in a few steps.",
    ),
    Recurrence(
        name="running_mean",
        kind="float counter",
        step=running_mean,
        start=starting(count=0, mean=0, spread=0),
        inputs=normal(38, mean=2),
        smooth=True,
        why="A counter that only feeds, a mean, and a sum that feeds nothing back.",
    ),
    Recurrence(
        name="resets",
        kind="resets by inputs",
        step=resets,
        start=lambda dtype: jnp.asarray(0, dtype),
        inputs=episodes,
        smooth=True,
        why="Inputs end episodes, so that the select hides no dependence on the carry.",
    ),
    Recurrence(
        name="ratchet",
        kind="ratchet",
        step=ratchet,
        start=starting(mark=0, last=0),
        inputs=normal(39),
        smooth=True,
        why="A high-water mark that leaks, beside a leaf that feeds nothing back.",
    ),
)

RECURRENCES = MEAN + ORDINARY
