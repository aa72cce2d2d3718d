"""A Legendre memory whose every linear map goes through spikes: inputs, memory and units are populations of neurons.

    python -m experiments.papers.l2mu                        # two CPU cores, two minutes
    python -m experiments.papers.l2mu steps=0                # the first table alone, ten seconds
    python -m experiments.papers.l2mu steps=200
    python -m experiments.papers.l2mu neurons=32             # nearer to the memory without spikes, and slower
    python -m experiments.papers.l2mu neurons=4 steps=300

L2MU (arXiv:2407.04076): each number that a linear map reads is encoded by N leaky integrate-and-fire neurons, whose
spikes of the step are decoded by least squares. So with <x> for what comes back of x,

    u[t] = tanh(w_u . x[t] + b_u),  z[t] = ((A - s) m[t-1] + B <u[t]>) / (1 - s),  m[t] = s m[t-1] + (1 - s) <z[t]>,
    h[t] = spikes of (w_x x[t] + w_m m[t] + b),

where s is what a synapse keeps of a step, and a linear read-out of a trace of h. As N grows <z> goes to z and so m to
the memory of `jaxpar.nn.mixers.legendre`, as the first table shows; digits are learned by surrogate gradients.
"""

import dataclasses
import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jaxtyping import Array, Float

from jaxpar.fields import AtLeast, field
from jaxpar.nn.mixers.legendre import legendre, memory
from jaxpar.nn.mixers.spikes import integrate_and_fire

from ..app import small_commands
from ..app.sequences.series import SeriesConfig, open_task

BETA, TRACE, SYNAPSE, RANGE = (
    0.9,
    0.95,
    0.9,
    2.0,
)  # RANGE: of z, in the unit in which populations have it in [-1, 1]


class State(NamedTuple):
    """Potentials of the populations of u [B, 1, N] and z [B, d, N] and of the units [B, n]; m [B, d]; trace of h."""

    u: Array
    m: Array
    h: Array
    memory: Array
    trace: Array


@functools.cache
def population(size: int, seed: int = 0) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Returns gains, biases and decoders [N] of N neurons for a number in [-1, 1].

    Half of them fire more as it grows, half as it falls, each from its own point on; decoders are the least squares of
    rates, as simulated at 81 numbers, with a penalty for the noise of spikes.
    """
    rng = np.random.default_rng(seed)
    begins = rng.uniform(-1, 0.9, size)
    gain = rng.uniform(0.4, 0.8, size) / (1 - begins)
    gains, biases = gain * np.where(np.arange(size) % 2, 1.0, -1.0), (1 - BETA) - gain * begins
    x, v, rates = np.linspace(-1, 1, 81), rng.uniform(0, 1, (81, size)), np.zeros((81, size))
    for step in range(400):
        v = BETA * v + x[:, None] * gains + biases
        rates += (v > 1) * (step >= 100) / 300
        v = v - (v > 1)
    return gains, biases, np.linalg.solve(rates.T @ rates + 8.1 * np.eye(size), rates.T @ x)


def through(x: Float[Array, "B n"], v: Float[Array, "B n N"]) -> tuple[Array, Array, Array]:
    """Returns what a step's spikes say of `x`, the spikes and the potentials after them."""
    gains, biases, decoders = (
        jnp.asarray(each, x.dtype)[None, None] for each in population(v.shape[-1])
    )
    currents = x[..., None] * gains + biases
    fired, v = integrate_and_fire(currents[:, None], v, beta=BETA)
    return (fired[:, 0] * decoders).sum(-1), fired[:, 0], v[:, 0]


def begin(batch: int, size: int, units: int, neurons: int, dtype=jnp.float32) -> State:
    """Returns the state before the first step: potentials evenly in [0, 1), so that neurons do not fire at once."""
    even = jnp.asarray(np.random.default_rng(1).permutation(neurons) / neurons, dtype)
    zeros = jnp.zeros((batch, units), dtype)
    return State(
        u=jnp.broadcast_to(even[None, None], (batch, 1, neurons)),
        m=jnp.broadcast_to(even[None, None], (batch, size, neurons)),
        h=zeros,
        memory=jnp.zeros((batch, size), dtype),
        trace=zeros,
    )


def one_step(
    params: dict, state: State, x: Float[Array, "B D"], theta: float
) -> tuple[State, tuple[Array, Array]]:
    """Returns the state after a step, its memory m [B, d] and the spikes of its units [B, n]."""
    a, b = (jnp.asarray(each, x.dtype) for each in legendre(state.memory.shape[1], theta))
    u, _, v_u = through(jnp.tanh(x @ params["w_u"] + params["b_u"][None]), state.u)
    z = (state.memory @ (a.T - SYNAPSE * jnp.eye(len(a), dtype=a.dtype)) + u * b[None]) / (
        1 - SYNAPSE
    )
    z, _, v_m = through(z / RANGE, state.m)
    m = SYNAPSE * state.memory + (1 - SYNAPSE) * RANGE * z
    current = x @ params["w_x"] + m @ params["w_m"] + params["b"][None]
    fired, v_h = integrate_and_fire(current[:, None], state.h, beta=BETA)
    trace = TRACE * state.trace + (1 - TRACE) * fired[:, 0]
    after = State(u=v_u, m=v_m, h=v_h[:, 0], memory=m, trace=trace)
    return after, (m, fired[:, 0])


def run(params: dict, xs: Float[Array, "B T D"], state: State, theta: float):
    """Returns the last state, and memories [T, B, d] and spikes [T, B, n] of all steps."""
    return jax.lax.scan(
        lambda state, x: one_step(params, state, x, theta), state, jnp.swapaxes(xs, 0, 1)
    )


def init(seed: int, inputs: int, size: int, units: int, outputs: int) -> dict:
    """Draws w_u, b_u, w_x, w_m, b and the read-out."""
    rng, shapes = (
        np.random.default_rng(seed),
        {"w_u": (inputs, 1), "w_x": (inputs, units), "w_m": (size, units)},
    )
    params = {
        name: jnp.asarray(rng.standard_normal(s) / s[0] ** 0.5, jnp.float32)
        for name, s in shapes.items()
    }
    biases = {"b_u": jnp.zeros(1), "b": jnp.full(units, 0.1), "b_out": jnp.zeros(outputs)}
    return (
        params
        | biases
        | {"w_out": jnp.asarray(rng.standard_normal((units, outputs)) / units**0.5, jnp.float32)}
    )


def memory_error(neurons: int, size: int = 6, theta: float = 24.0, length: int = 200) -> float:
    """Returns the root mean square error of the memory of N neurons a number, of the exact memory's own root mean."""
    wave = np.sin(np.arange(length) / 9) * 0.6 + np.sin(np.arange(length) / 23) * 0.3
    params = init(0, 1, size, 2, 2) | {"w_u": jnp.ones((1, 1))}
    got = jax.jit(functools.partial(run, theta=theta))(
        params, wave[None, :, None], begin(1, size, 2, neurons)
    )[1][0]
    want = memory(jnp.tanh(jnp.asarray(wave))[None, :, None], size=size, theta=theta)[0, :, 0]
    return float(jnp.sqrt(jnp.square(got[:, 0] - want).mean() / jnp.square(want).mean()))


def learn(
    steps: int, neurons: int, seed: int = 0, size: int = 32, units: int = 128, theta: float = 64.0
) -> float:
    """Trains on digits pixel by pixel and returns the accuracy on those held out."""
    task, params = open_task(SeriesConfig(), seed), init(seed, 1, size, units, 10)
    rule = optax.adam(optax.cosine_decay_schedule(3e-3, steps))

    def logits(params, xs):
        last, _ = run(params, xs, begin(len(xs), size, units, neurons), theta)
        return last.trace @ params["w_out"] * 10 + params["b_out"][None]

    @jax.jit
    def update(params, moments, xs, targets):
        def loss(params):
            return optax.softmax_cross_entropy_with_integer_labels(
                logits(params, xs), targets
            ).mean()

        value, grads = jax.value_and_grad(loss)(params)
        grads, moments = rule.update(grads, moments, params)
        return optax.apply_updates(params, grads), moments, value

    moments, right = rule.init(params), []
    for step in range(steps):
        batch = task.train(step)
        params, moments, value = update(params, moments, batch["inputs"], batch["targets"][:, -1])
        if step % 100 == 99:
            print(f"step {step + 1}: loss {value:.3f}", flush=True)
    for batch in task.validation:
        hit = jax.jit(logits)(params, batch["inputs"]).argmax(-1) == batch["targets"][:, -1]
        right += hit[batch["weights"][:, -1] > 0].tolist()
    return float(np.mean(right))


@dataclasses.dataclass(frozen=True)
class Config(small_commands.SmallConfig):
    """What it trains.

    Attributes:
      steps: Of training on digits; 0 for none, and the table of the memory's error alone.
      neurons: N of each number, in training.
    """

    steps: int = field(600, AtLeast(0))
    neurons: int = field(16, AtLeast(1))


def execute(config: Config) -> None:
    """Prints the memory's error by numbers of neurons, and how well digits are learned."""
    for n in (8, 32, 128, 512, 2048):
        print(f"{n:5} neurons a number: error of the memory {memory_error(n):.3f}", flush=True)
    if config.steps:
        print(f"digits held out: accuracy {learn(config.steps, config.neurons):.4f}")


if __name__ == "__main__":
    small_commands.launch("l2mu", Config, execute)
