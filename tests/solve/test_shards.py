"""A sequence split over devices gives the same states and gradients, and sends the same bytes whatever its length."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from cells_to_solve import CELLS, distance, inputs, start, weights
from fast import jit
from jax.sharding import PartitionSpec as P

from jaxpar.aot.hlo import collectives
from jaxpar.mesh import MeshSpec, make_mesh
from jaxpar.solve import GaussSeidel, Newton, Sequential, parallel_scan

LENGTH = 48


def solver(parts, cell="rnn", reverse=False, method=None):
    """parallel_scan on `parts` devices, of arrays of the whole sequence."""
    mesh = make_mesh(MeshSpec(context=parts), devices=jax.devices()[:parts])

    def local(params, h, xs):
        step = functools.partial(CELLS[cell], params)
        return parallel_scan(
            step, h, xs, reverse=reverse, method=method, axis_name="context", with_stats=True
        )

    specs = {"in_specs": (P(), P(), P("context")), "out_specs": (P(), P("context"), P())}
    return mesh, jax.shard_map(local, mesh=mesh, **specs)


def value_and_outputs(solve, params, h, xs):
    carry, ys, *stats = solve(params, h, xs)
    return sum(jnp.sin(leaf).sum() for leaf in jax.tree.leaves((carry, ys))), (carry, ys, stats)


@pytest.mark.parametrize(
    "parts, cell, reverse",
    [(1, "rnn", False), (2, "rnn", True), (4, "lstm", False), (8, "rnn", False)],
)
def test_any_number_of_shards_agrees(parts, cell, reverse, x64):
    args = weights(), start(cell), inputs(LENGTH)

    def loop(params, h, xs):
        return jax.lax.scan(functools.partial(CELLS[cell], params), h, xs, reverse=reverse)

    def both(solve):
        return jit(
            jax.value_and_grad(functools.partial(value_and_outputs, solve), (0, 1, 2), has_aux=True)
        )(*args)

    (got, (carry, ys, (stats,))), grads = both(solver(parts, cell, reverse)[1])
    (want, (want_carry, want_ys, _)), want_grads = both(loop)
    assert stats.converged and stats.first_bad == LENGTH and stats.iterations < 20
    assert abs(got - want) < 1e-10 and distance((carry, ys), (want_carry, want_ys)) < 1e-10
    name = "a" if cell == "lstm" else "w"
    assert distance((grads[0][name], *grads[1:]), (want_grads[0][name], *want_grads[1:])) < 1e-8


@pytest.mark.parametrize("method", [Newton(max_iters=2), Sequential()], ids=["fails", "sequential"])
def test_devices_take_turns_where_iteration_fails(method, x64):
    args = weights("normal"), start("rnn"), inputs(LENGTH)
    carry, ys, stats = jit(solver(4, method=method)[1])(*args)
    want = jax.lax.scan(functools.partial(CELLS["rnn"], args[0]), *args[1:])
    assert distance((carry, ys), want) < 1e-12
    assert bool(stats.converged) == isinstance(method, Sequential)
    assert (0 < stats.first_bad < LENGTH) == isinstance(method, Newton)


def test_all_devices_look_for_rounding_or_none():
    """Blocks of the first device have not met, those of the other have: alone, it would wait for ever."""
    length = 2048
    keep = np.where(np.arange(length) < 600, 0.99, 0.3).astype(np.float32)
    noise = np.random.default_rng(0).standard_normal(length).astype(np.float32)

    def leaky(h, x):
        keep, noise = x
        h = keep * h + (1 - keep) * (1 + noise)
        return h, h

    def local(xs):
        method = GaussSeidel(block=16, max_iters=12)
        init = jnp.float32(0)
        how = {"method": method, "axis_name": "context", "with_stats": True}
        return parallel_scan(leaky, init, xs, **how)[1:]

    mesh = make_mesh(MeshSpec(context=2), devices=jax.devices()[:2])
    split = jax.shard_map(local, mesh=mesh, in_specs=P("context"), out_specs=(P("context"), P()))
    ys, stats = jit(split)((keep, noise))
    want = jax.lax.scan(leaky, jnp.float32(0), (keep, noise))[1]
    assert not stats.converged and stats.first_bad < 600
    np.testing.assert_allclose(ys, want, rtol=1e-5)


def test_bytes_sent_do_not_depend_on_the_length():
    mesh, solve = solver(4)

    def sent(length):
        shapes = jax.eval_shape(lambda: (weights(), start("rnn"), inputs(length)))
        text = jit(solve).lower(*shapes).compile().as_text()
        return sorted((each.kind, each.shapes, each.bytes) for each in collectives(text, mesh))

    short, long = sent(64), sent(1024)
    assert short == long and {"collective-permute", "all-gather"} <= {kind for kind, *_ in short}
    assert max(size for *_, size in short) <= 4 * 4 * 4 * (
        4 + 1
    )  # a summary [n, n + 1] of each device
