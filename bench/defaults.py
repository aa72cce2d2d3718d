"""What `parallel_scan` costs where no method is named, beside `lax.scan`: ordinary loops, forwards and with a gradient.

    python bench/defaults.py                                    # the short loops of a CPU: minutes
    python bench/defaults.py --long                             # T of 16,384 and more, for an accelerator
    python bench/defaults.py --cases adam,kalman --rounds 50

Both sides run in one process, in turns. The ratio is of the two medians. Compiling is from the call to the program,
tracing included; each side compiles three times, from a cleared cache, and the least counts. `differs` is the largest
difference of the outputs, relative to the largest of the loop's. Prints as it goes, writes JSON.
"""

import argparse
import math
import pathlib
import statistics
import sys
import time

HERE = pathlib.Path(__file__).resolve().parent
sys.path[:0] = [str(HERE.parent), str(HERE)]

import flax.linen as nn  # noqa: E402
import harness  # noqa: E402
import jax  # noqa: E402
import jax.numpy as jnp  # noqa: E402
import numpy as np  # noqa: E402
import optax  # noqa: E402
import problems  # noqa: E402

from jaxpar.solve import explain, parallel_scan  # noqa: E402


def normal(*shape, seed=0, scale=1.0):
    """Returns numbers of a normal distribution in float32."""
    return jnp.asarray(scale * np.random.default_rng(seed).normal(size=shape), jnp.float32)


def flax_cell(cell, batch, T, n):
    """Returns a cell of flax as a loop; its inputs are as wide as its state."""
    start = cell.initialize_carry(jax.random.key(0), (batch, n))
    params = cell.init(jax.random.key(1), start, jnp.zeros((batch, n)))
    return lambda carry, x: cell.apply(params, carry, x), start, normal(T, batch, n)


def gru(T, batch, n):
    """GRU of flax."""
    return flax_cell(nn.GRUCell(n), batch, T, n)


def lstm(T, batch, n):
    """LSTM of flax."""
    return flax_cell(nn.OptimizedLSTMCell(n), batch, T, n)


def para_gru(T, batch, n):
    """ParaGRU with given gates: units that do not see each other."""
    weights = {
        name: jnp.asarray(value, jnp.float32)
        for name, value in problems.weights("para_gru", n).items()
    }
    gates = tuple(map(jnp.asarray, problems.inputs("para_gru", T, batch, n)))
    return (
        problems.step_of("para_gru", weights, jnp.float32),
        problems.initial("para_gru", (batch, n)),
        gates,
    )


def adam(T, n):
    """Adam on least squares with a drawn row a step."""
    optimizer = optax.adam(1e-2)
    truth = normal(n, seed=1)

    def step(carry, row):
        params, state = carry
        loss, gradient = jax.value_and_grad(lambda params: jnp.square(row @ (params - truth)))(
            params
        )
        updates, state = optimizer.update(gradient, state)
        return (optax.apply_updates(params, updates), state), loss

    params = jnp.zeros(n)
    return step, (params, optimizer.init(params)), normal(T, n)


def lotka_volterra(T):
    """Two species by the method of Runge and Kutta."""

    def slope(state, push):
        prey, predator = state
        return jnp.stack([prey * (1.1 - 0.4 * predator) + push, predator * (0.1 * prey - 0.4)])

    def step(state, push):
        h = 0.05
        a = slope(state, push)
        b = slope(state + h / 2 * a, push)
        c = slope(state + h / 2 * b, push)
        d = slope(state + h * c, push)
        state = state + h / 6 * (a + 2 * b + 2 * c + d)
        return state, state

    return step, jnp.asarray([10.0, 5.0]), normal(T, scale=0.01)


def gae(T, batch):
    """Advantages of a rollout, from its end."""

    def step(advantage, row):
        delta, is_going_on = row
        advantage = delta + 0.99 * 0.95 * is_going_on * advantage
        return advantage, advantage

    ends = np.random.default_rng(1).uniform(size=(T, batch)) > 0.02
    return step, jnp.zeros(batch), (normal(T, batch), jnp.asarray(ends, jnp.float32))


def hmc(T, n):
    """Hamiltonian Monte Carlo on a normal distribution, each draw with a key of its own."""
    scales = jnp.linspace(0.5, 2.0, n)

    def energy(place):
        return jnp.sum(jnp.square(place / scales)) / 2

    def leap(pair, _):
        place, speed = pair
        speed = speed - 0.1 * jax.grad(energy)(place)
        place = place + 0.2 * speed
        return (place, speed - 0.1 * jax.grad(energy)(place)), None

    def step(place, key):
        speed_key, accept_key = jax.random.split(key)
        speed = jax.random.normal(speed_key, place.shape)
        (proposal, end), _ = jax.lax.scan(leap, (place, speed), None, 8)
        change = energy(proposal) + jnp.sum(end**2) / 2 - energy(place) - jnp.sum(speed**2) / 2
        place = jnp.where(jax.random.uniform(accept_key) < jnp.exp(-change), proposal, place)
        return place, place

    return step, jnp.zeros(n), jax.random.split(jax.random.key(0), T)


def kalman(T, batch, n=4, seen=2):
    """Kalman's filter: mean and covariance."""
    turn = jnp.asarray(
        np.linalg.qr(np.random.default_rng(2).normal(size=(n, n)))[0] * 0.98, jnp.float32
    )
    sees = normal(seen, n, seed=3)

    def step(carry, y):
        mean, spread = carry
        mean = mean @ turn.T
        spread = turn @ spread @ turn.T + 0.1 * jnp.eye(n)
        gain = jnp.linalg.solve(sees @ spread @ sees.T + jnp.eye(seen), sees @ spread).T
        mean = mean + (y - mean @ sees.T) @ gain.T
        spread = spread - gain @ sees @ spread
        return (mean, spread), mean

    return step, (jnp.zeros((batch, n)), jnp.eye(n)), normal(T, batch, seen)


def s5(T, batch, n):
    """S5's state space: turning pairs, real and imaginary part, with a step of its own for each entry."""
    angle = jnp.linspace(0.01, 1.5, n)
    size = jnp.exp(-jnp.linspace(0.01, 0.5, n))
    real = size * jnp.cos(angle)
    imaginary = size * jnp.sin(angle)

    def step(state, x):
        a, b = state
        state = (real * a - imaginary * b + x, imaginary * a + real * b)
        return state, state[0]

    zeros = jnp.zeros((batch, n))
    return step, (zeros, zeros), normal(T, batch, n)


def affine(T, n):
    """A line: h = a h + x."""
    a = jnp.linspace(0.9, 0.99, n)

    def step(h, x):
        h = a * h + x
        return h, h

    return step, jnp.zeros(n), normal(T, n)


SHORT = {
    "gru32": lambda: gru(200, 4, 32),
    "gru64": lambda: gru(200, 4, 64),
    "lstm16": lambda: lstm(200, 4, 16),
    "adam": lambda: adam(300, 16),
    "lotka_volterra": lambda: lotka_volterra(2000),
    "gae": lambda: gae(1000, 64),
    "hmc": lambda: hmc(300, 8),
    "kalman": lambda: kalman(500, 1),
    "s5": lambda: s5(1000, 4, 32),
    "affine": lambda: affine(1_000_000, 4),
}
LONG = {
    "s5": lambda: s5(65_536, 8, 64),
    "gru32": lambda: gru(16_384, 16, 32),
    "para_gru": lambda: para_gru(16_384, 8, 256),
    "kalman": lambda: kalman(16_384, 16),
}
TINY = {
    "gru32": lambda: gru(9, 2, 4),
    "lstm16": lambda: lstm(9, 2, 4),
    "para_gru": lambda: para_gru(9, 2, 4),
    "adam": lambda: adam(9, 3),
    "lotka_volterra": lambda: lotka_volterra(9),
    "gae": lambda: gae(9, 2),
    "hmc": lambda: hmc(9, 2),
    "kalman": lambda: kalman(9, 2),
    "s5": lambda: s5(9, 2, 4),
    "affine": lambda: affine(9, 2),
}


def passes(solve, step, start, xs, is_reverse):
    """Returns the forward pass and the gradient of its outputs' mean square by the start, as functions of both."""

    def forward(start, xs):
        return solve(step, start, xs, reverse=is_reverse)[1]

    def loss(start, xs):
        return sum(jnp.mean(jnp.square(leaf)) for leaf in jax.tree.leaves(forward(start, xs)))

    return {"fwd": forward, "fwd+bwd": jax.value_and_grad(loss, allow_int=True)}


def compiled(function, args, times):
    """Returns the program and the least seconds that making it took."""
    least = math.inf
    for _ in range(times):
        jax.clear_caches()
        # A new function each time: nothing of it has been traced.
        fresh = jax.jit(lambda *args: function(*args))
        began = time.perf_counter()
        program = fresh.lower(*args).compile()
        least = min(least, time.perf_counter() - began)
    return program, least


def in_turns(programs, args, rounds, spend_s):
    """Returns the median seconds of each program, called in turns."""
    taken = {name: [] for name in programs}
    for program in programs.values():
        jax.block_until_ready(program(*args))
    end = time.perf_counter() + spend_s
    for number in range(rounds):
        for name, program in programs.items():
            began = time.perf_counter()
            jax.block_until_ready(program(*args))
            taken[name].append(time.perf_counter() - began)
        if number >= 4 and time.perf_counter() > end:
            break
    return {name: statistics.median(values) for name, values in taken.items()}


COLUMNS = {
    "loop": lambda row: row["case"],
    "pass": lambda row: row["pass"],
    "default": lambda row: row["method"],
    "lax.scan ms": lambda row: f"{row['scan_ms']:.3f}",
    "ms": lambda row: f"{row['ms']:.3f}",
    "of lax.scan": lambda row: f"{row['ms'] / row['scan_ms']:.2f}x",
    "compiles in s": lambda row: f"{row['compile_s']:.2f}",
    "of lax.scan's": lambda row: f"{row['compile_s'] / row['scan_compile_s']:.2f}x",
    "differs": lambda row: f"{row['differs']:.1e}",
}


def rows_of(name, args):
    """Measures both passes of a loop."""
    step, start, xs = args.known[name]()
    is_reverse = name == "gae"
    method = type(explain(step, start, xs, reverse=is_reverse).method).__name__
    with_default = passes(parallel_scan, step, start, xs, is_reverse)
    by_loop = passes(jax.lax.scan, step, start, xs, is_reverse)
    for which in with_default:
        sides = {"scan": by_loop[which], "default": with_default[which]}
        made = {
            side: compiled(function, (start, xs), args.compilations)
            for side, function in sides.items()
        }
        programs = {side: program for side, (program, _) in made.items()}
        results = [jax.tree.leaves(program(start, xs)) for program in programs.values()]
        floats = [
            pair
            for pair in zip(results[1], results[0], strict=True)
            if jnp.issubdtype(pair[1].dtype, jnp.floating)
        ]
        seconds = in_turns(programs, (start, xs), args.rounds, args.spend_s)
        yield {
            "case": name,
            "pass": which,
            "method": method,
            "scan_ms": 1e3 * seconds["scan"],
            "ms": 1e3 * seconds["default"],
            "scan_compile_s": made["scan"][1],
            "compile_s": made["default"][1],
            "differs": float(np.max([harness.error_of([a], [b]) for a, b in floats])),
        }


def main():
    """Measures every loop and prints it."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--cases", help="separated by commas; by default all")
    parser.add_argument("--long", action="store_true", help="the loops for an accelerator")
    parser.add_argument(
        "--tiny", action="store_true", help="a few steps: checks that the script runs"
    )
    parser.add_argument("--rounds", type=int, default=100, help="calls of each side, in turns")
    parser.add_argument(
        "--spend-s",
        type=float,
        default=5,
        help="no round starts after these seconds; five at least",
    )
    parser.add_argument(
        "--compilations", type=int, default=3, help="of each side, of which the least counts"
    )
    parser.add_argument("--out", type=pathlib.Path, default=HERE / "results" / "defaults.json")
    args = parser.parse_args()
    args.known = TINY if args.tiny else LONG if args.long else SHORT
    jax.config.update("jax_enable_compilation_cache", False)
    jax.config.update("jax_default_matmul_precision", "float32")  # of both sides: no TF32
    table = harness.Table(COLUMNS, args.out)
    table.head(f"{jax.devices()[0].device_kind}, jax {jax.__version__}")
    for name in harness.chosen(args.cases, args.known):
        for row in rows_of(name, args):
            table.add(row)


if __name__ == "__main__":
    main()
