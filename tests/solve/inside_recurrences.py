"""Recurrences written with the solver in mind: what it was once wrong about, and the field's own loops."""

import jax
import jax.numpy as jnp
import numpy as np
from outside_recurrences import Recurrence, draws, each, normal, starting, within


def dollars(h, x):
    interest = 0.01 * h["interest"] + jnp.tanh(x)
    cash = jnp.round((h["cash"] + 0.05 + 0.02 * interest) * 100) / 100
    return {"interest": interest, "cash": cash}


def visits(h, x):
    mood = 0.01 * h["mood"] + jnp.tanh(x)
    count = jnp.floor(h["count"] + 0.002 * (mood > 0) + jnp.where(mood > 0, 1.0, 0.0))
    return {"mood": mood, "count": count.astype(h["count"].dtype)}


@jax.custom_jvp
def snapped(value):
    """The value on a grid, with a derivative of zero."""
    return jnp.round(256 * value) / 256


@snapped.defjvp
def snapped_jvp(primals, tangents):
    (value,) = primals
    return snapped(value), jnp.zeros_like(tangents[0])


def grid_state(h, x):
    fast = 0.01 * h["fast"] + 0.5 * jnp.tanh(x)
    return {"fast": fast, "grid": snapped(0.9 * h["grid"] + 0.3 * fast)}


def fast_and_slow(h, x):
    return jnp.stack([0.01 * h[0] + jnp.tanh(x), 0.9999 * h[1] + 1e-4 + 2e-6])


def slow_in_a_crowd(h, x):
    fast = jnp.tanh(0.01 * h + x)
    slow = 0.9999 * h[0] + 1e-4 + 1.2e-7 + 1e-12 * h.sum()
    return fast.at[0].set(slow.astype(h.dtype))


def leaky_memory(h, x):
    return (1 - 1e-4) * h + 1e-4 * x


def enzyme(h, x):
    used = x["most"] * h["substrate"] / (x["half"] + h["substrate"])
    substrate = h["substrate"] + x["feed"] - used
    return {"substrate": substrate, "product": 0.95 * h["product"] + used}


def enzymes(unit):
    """Makes the inputs of `enzyme` for concentrations of a unit."""

    def inputs(T, dtype):
        size = within(dtype, unit)
        feed = size * (0.1 + 0.05 * np.tanh(draws(104, T)))
        return {
            "feed": jnp.asarray(feed, dtype),
            "most": each(T, dtype, 0.3 * size),
            "half": each(T, dtype, 5 * size),
        }

    return inputs


def concentrations(unit):
    def start(dtype):
        size = within(dtype, unit)
        return {"substrate": jnp.asarray(size, dtype), "product": jnp.asarray(size / 10, dtype)}

    return start


def trigger(h, x):
    level = 0.9 * h["level"] + 0.4 * x
    is_on = jnp.where(level > 0.5, 1.0, jnp.where(level < -0.5, 0.0, h["on"]))
    return {"level": level, "on": is_on.astype(level.dtype)}


def alarm(h, x):
    level = 0.8 * h["level"] + 0.3 * x + 0.1 * (h["left"] > 0)
    left = jnp.where(level > 1, 5, jnp.maximum(h["left"] - 1, 0))
    return {"level": level.astype(x.dtype), "left": left}


def alarmed(dtype):
    return {"level": jnp.asarray(0, dtype), "left": jnp.asarray(0, jnp.int32)}


def saturating(h, x):
    return jnp.clip(h + 0.3 * x, -1, 1)


def running_max(h, x):
    return {"best": jnp.maximum(0.999 * h["best"], x), "mean": 0.9 * h["mean"] + 0.1 * h["best"]}


def fires(h, x):
    potential = 0.9 * h["potential"] + 0.5 * x
    fired = jax.lax.stop_gradient((potential > 1).astype(x.dtype))
    return {"potential": potential - fired, "trace": 0.8 * h["trace"] + fired}


def lorenz(h, x):
    a, b, c = h
    push = 0.01 * x
    slope = jnp.stack([10 * (b - a) + push, a * (28 - c) - b, a * b - 8 / 3 * c])
    return h + 0.01 * slope.astype(h.dtype)


def expanding(h, x):
    return 1.001 * h + 0.01 * x


def turning(h, x):
    cosine = 0.8
    sine = 0.6
    return jnp.stack([cosine * h[0] - sine * h[1], sine * h[0] + cosine * h[1]]) + 0.01 * x


def document(h, x):
    total = jnp.where(x["is_first"], jnp.zeros_like(h), 0.95 * h)
    return total + x["value"]


def documents(T, dtype):
    is_first = np.random.default_rng(115).uniform(size=T) < 0.02
    return {"value": normal(116)(T, dtype), "is_first": jnp.asarray(is_first)}


WEIGHTS = np.random.default_rng(117).normal(size=(6, 6, 6)) / np.sqrt(6)


def gru(h, x):
    def product(number, value):
        return jnp.asarray(WEIGHTS[number], h.dtype) @ value

    keep = jax.nn.sigmoid(product(0, x) + product(1, h))
    reset = jax.nn.sigmoid(product(2, x) + product(3, h))
    new = jnp.tanh(product(4, x) + product(5, reset * h))
    return keep * h + (1 - keep) * new


def lstm(h, x):
    cell, out = h["cell"], h["out"]
    pre = [jnp.asarray(WEIGHTS[number], x.dtype) @ out + x for number in range(4)]
    cell = jax.nn.sigmoid(pre[0] + 1) * cell + jax.nn.sigmoid(pre[1]) * jnp.tanh(pre[2])
    return {"cell": cell, "out": jax.nn.sigmoid(pre[3]) * jnp.tanh(cell)}


def biquad(h, x):
    new = 1.6 * h[0] - 0.8 * h[1] + 0.2 * x
    return jnp.stack([new, h[0]])


def predator(h, x):
    prey = h["prey"] * (1 + 0.02 * (1.1 - 0.4 * h["predator"])) + 0.001 * jnp.abs(x)
    hunters = h["predator"] * (1 + 0.02 * (0.1 * h["prey"] - 0.4))
    return {"prey": prey, "predator": hunters}


def pendulum(h, x):
    speed = 0.98 * h["speed"] - 0.1 * jnp.sin(h["angle"]) + 0.02 * x
    return {"angle": h["angle"] + 0.1 * speed, "speed": speed}


def shares(h, x):
    return jax.nn.softmax(0.9 * h + 0.1 * x)


def fast_weights(h, x):
    key = x / jnp.sqrt(1e-3 + jnp.sum(x * x))
    seen = h @ key
    return 0.99 * h + 0.5 * jnp.outer(jnp.tanh(x) - seen, key)


def momentum(h, x):
    slope = h["place"] - x
    speed = 0.9 * h["speed"] + slope
    return {"place": h["place"] - 0.05 * speed, "speed": speed}


def huber(h, x):
    error = x - h
    step = jnp.where(jnp.abs(error) < 0.5, error, 0.5 * jnp.sign(error))
    return h + 0.2 * step


def moments(h, x):
    mean = h["mean"] + 0.05 * (x - h["mean"])
    spread = 0.95 * h["spread"] + 0.05 * jnp.square(x - mean)
    return {
        "mean": mean,
        "spread": spread,
        "score": 0.5 * h["score"] + (x - mean) / jnp.sqrt(spread + 1e-3),
    }


def tally(h, x):
    return {"total": 0.99 * h["total"] + x, "steps": h["steps"] + 1}


def tallied(dtype):
    return {"total": jnp.asarray(0, dtype), "steps": jnp.asarray(0, jnp.int32)}


def row(name, kind, step, start, inputs, why, smooth=True):
    return Recurrence(
        name=name, kind=kind, step=step, start=start, inputs=inputs, smooth=smooth, why=why
    )


def ones(*shape):
    """Makes a start of ones."""
    return lambda dtype: jnp.ones(shape, dtype)


def zeros(*shape):
    """Makes a start of zeros."""
    return lambda dtype: jnp.zeros(shape, dtype)


RECURRENCES = (
    row(
        "dollars",
        "ledger",
        dollars,
        starting(interest=0, cash=1e4),
        normal(101),
        "cents are rounded",
        False,
    ),
    row(
        "visits",
        "counter",
        visits,
        starting(mood=0, count=500),
        normal(102),
        "counts by whole numbers",
        False,
    ),
    row(
        "grid_state",
        "quantised",
        grid_state,
        starting(fast=0, grid=0.5),
        normal(103),
        "a derivative of zero",
        False,
    ),
    row(
        "fast_and_slow",
        "slow",
        fast_and_slow,
        lambda d: jnp.asarray([0, 1], d),
        normal(104),
        "one rate for all",
    ),
    row(
        "slow_in_a_crowd",
        "slow",
        slow_in_a_crowd,
        lambda d: jnp.zeros(20, d).at[0].set(1),
        normal(105),
        "one slow entry of twenty moves by roundings",
    ),
    row(
        "leaky_memory", "slow", leaky_memory, zeros(3), normal(106, 3), "remembers for 10,000 steps"
    ),
    row("nanomoles", "chemistry", enzyme, concentrations(1e-9), enzymes(1e-9), "small states"),
    row("megamoles", "chemistry", enzyme, concentrations(1e6), enzymes(1e6), "large states"),
    row(
        "trigger",
        "hysteresis",
        trigger,
        starting(level=0, on=0),
        normal(107),
        "a switch that remembers",
        False,
    ),
    row("alarm", "hysteresis", alarm, alarmed, normal(108), "an integer that feeds a float", False),
    row("saturating", "clipping", saturating, zeros(), normal(109), "forgets where it is clipped"),
    row(
        "running_max",
        "clipping",
        running_max,
        starting(best=0, mean=0),
        normal(110),
        "a kink that stays",
    ),
    row(
        "fires",
        "spikes",
        fires,
        starting(potential=0, trace=0),
        normal(111),
        "jumps without a derivative",
        False,
    ),
    row("lorenz", "chaotic", lorenz, ones(3), normal(112), "errors grow for ever"),
    row("expanding", "expanding", expanding, zeros(), normal(113), "errors grow slowly"),
    row(
        "turning",
        "rotation",
        turning,
        lambda d: jnp.asarray([1, 0], d),
        normal(114),
        "nothing is forgotten",
    ),
    row("document", "resets", document, zeros(), documents, "starts again now and then"),
    row("gru", "network", gru, zeros(6), normal(118, 6), "what everybody runs"),
    row(
        "lstm",
        "network",
        lstm,
        lambda d: {"cell": jnp.zeros(6, d), "out": jnp.zeros(6, d)},
        normal(119, 6),
        "two leaves",
    ),
    row("biquad", "filter", biquad, zeros(2), normal(120), "rings"),
    row(
        "predator",
        "biology",
        predator,
        starting(prey=4, predator=2),
        normal(121),
        "circles without an end",
    ),
    row("pendulum", "mechanics", pendulum, starting(angle=1, speed=0), normal(122), "oscillates"),
    row("shares", "softmax", shares, lambda d: jnp.full(4, 0.25, d), normal(123, 4), "sums to one"),
    row(
        "fast_weights",
        "matrix",
        fast_weights,
        zeros(3, 3),
        normal(124, 3),
        "a state that is a matrix",
    ),
    row(
        "momentum",
        "optimiser",
        momentum,
        starting(place=0, speed=0),
        normal(125),
        "two coupled entries",
    ),
    row(
        "moments",
        "statistics",
        moments,
        starting(mean=0, spread=1, score=0),
        normal(126),
        "roots of small numbers",
    ),
    row("tally", "counter", tally, tallied, normal(127), "an integer that only counts"),
    row("huber", "tracking", huber, zeros(), normal(128), "a bounded step"),
)
