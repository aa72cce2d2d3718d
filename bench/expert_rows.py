"""JAX's side of `bench/experts.py`: rows that are made (compiled), timed once a round, and dropped."""

import functools
import time
from collections.abc import Callable

import decode_rows
import harness
from expert_cases import choices

MOSAIC = dict(block_m=128, block_n=128, block_k=64, max_concurrent_steps=4, grid_block_n=4)
"""Of the configurations that its own script tries, one of the middle."""


def both_ways(function: Callable, request: dict) -> Callable:
    """Returns (g, *args) -> the result, or the result and all gradients."""
    import jax

    def run(g, *args):
        if request["direction"] == "fwd":
            return function(*args)
        y, pull = jax.vjp(function, *args)
        return y, *pull(g)

    return run


def product_by_mosaic(sizes) -> Callable:
    """JAX's own kernels for Hopper: the product, the same with weights transposed, and the gradient of weights."""
    import jax
    from jax.experimental.pallas.ops.gpu.ragged_dot_mgpu import ragged_dot
    from jax.experimental.pallas.ops.gpu.transposed_ragged_dot_mgpu import transposed_ragged_dot

    @jax.custom_vjp
    def run(x, w):
        return ragged_dot(x, w, group_sizes=sizes, **MOSAIC)

    def backward(kept, g):
        x, w = kept
        dx = ragged_dot(g, w, group_sizes=sizes, transpose_rhs=True, **MOSAIC)
        return dx, transposed_ragged_dot(x, g, group_sizes=sizes, **MOSAIC)

    run.defvjp(lambda x, w: (run(x, w), (x, w)), backward)
    return run


def product(request: dict) -> tuple[Callable, tuple, dict]:
    """One grouped product: its function, the gradient of its result and its arguments, and what a row says."""
    import jax
    import jax.numpy as jnp

    from jaxpar.nn.experts import by_index, grouped, grouped_matmul

    order, sizes = (jnp.asarray(x) for x in choices(request))
    tokens, k, depth, width = (request[name] for name in ("tokens", "k", "depth", "width"))
    keys, dtype, row = jax.random.split(jax.random.key(0), 3), request["dtype"], request["row"]
    # Summed up, a token's k rows are an output; read, a token is k rows.
    inputs, outputs = (
        tokens if "read" in row else tokens * k,
        tokens if "write" in row else tokens * k,
    )
    x, g = (
        jax.random.normal(keys[0], (inputs, depth), dtype),
        jax.random.normal(keys[2], (outputs, width), dtype),
    )
    w = jax.random.normal(keys[1], (request["experts"], depth, width), dtype) * depth**-0.5
    said: dict = {}
    if row == "jax dense":
        return jnp.matmul, (g, x, w[0]), said
    if row == "jax ragged_dot":
        return (
            (lambda x, w: jax.lax.ragged_dot(x, w, sizes, preferred_element_type=x.dtype)),
            (g, x, w),
            said,
        )
    if row == "jax mosaic":
        return product_by_mosaic(sizes), (g, x, w), said
    if row == "jax tokamax":
        import tokamax

        return (lambda x, w: tokamax.ragged_dot(x, w, group_sizes=sizes)), (g, x, w), said
    said["note"] = (
        "kernel"
        if grouped.has_index_kernel(dtype, depth, width)
        else "tiles: there is no kernel here"
    )
    if "tile " in row:
        rows, columns, terms, warps, stages = map(int, row.split()[-1].split("x"))
        tile = by_index.Cut(rows=rows, columns=columns, terms=terms, warps=warps, stages=stages)
        by_index.cut_for = lambda *_: tile
    how = {"jaxpar read": dict(read=order), "jaxpar write": dict(write=order, summed=k)}.get(
        row, {}
    )
    return (lambda x, w: grouped_matmul(x, w, sizes, **how)), (g, x, w), said


def by_loop(request: dict, x, w):
    """The grouped product of a row's arguments, expert by expert: one program, whatever their sizes."""
    import jax
    import jax.numpy as jnp

    order, sizes = choices(request)
    if request["row"] == "jax dense":
        return x @ w
    x = x[order // request["k"]] if "read" in request["row"] else x
    most = int(sizes.max())

    def one(y, expert):
        start, size, w = expert
        rows = jax.lax.dynamic_slice_in_dim(padded, start, most)
        old = jax.lax.dynamic_slice_in_dim(y, start, most)
        new = jnp.where(jnp.arange(most)[:, None] < size, rows @ w, old)
        return jax.lax.dynamic_update_slice_in_dim(y, new, start, 0), None

    padded = jnp.pad(x, [(0, most), (0, 0)])
    start = jnp.zeros((len(padded), w.shape[-1]), x.dtype)
    y, _ = jax.lax.scan(one, start, (jnp.asarray(sizes.cumsum() - sizes), jnp.asarray(sizes), w))
    y = y[: len(x)]
    if "write" in request["row"]:
        y = jnp.zeros_like(y).at[order].set(y).reshape(-1, request["k"], y.shape[1]).sum(1)
    return y


def plain_layer(request: dict) -> Callable:
    """The layer in the fewest words, by `jax.lax.ragged_dot`."""
    import jax
    import jax.numpy as jnp

    k, experts = request["k"], request["experts"]

    def run(params, x):
        scores = jax.nn.softmax((x @ params["w_router"]).astype(jnp.float32))
        weight, expert = jax.lax.top_k(scores, k)
        weight = (weight / weight.sum(-1, keepdims=True)).astype(x.dtype).reshape(-1)
        order = jnp.argsort(expert.reshape(-1), stable=True)
        sizes = jnp.bincount(expert.reshape(-1), length=experts).astype(jnp.int32)
        rows = x[order // k]
        inside = jax.nn.silu(jax.lax.ragged_dot(rows, params["w_gate"], sizes))
        inside = inside * jax.lax.ragged_dot(rows, params["w_up"], sizes)
        out = jax.lax.ragged_dot(inside, params["w_down"], sizes) * weight[order, None]
        return jnp.zeros_like(x).at[order // k].add(out)

    return run


def layer(request: dict) -> tuple[Callable, tuple, dict]:
    """The whole layer: its function, the gradient of its result and its arguments, and what a row says."""
    import jax
    import jax.numpy as jnp

    from jaxpar.nn.experts import Experts, grouped, transport
    from jaxpar.nn.mixer import Context

    tokens, depth, width, dtype = (request[name] for name in ("tokens", "depth", "width", "dtype"))
    mixture = Experts(width, request["experts"], request["k"], balance_loss=0.0)
    keys = jax.random.split(jax.random.key(0), 6)
    params = {
        name: jax.random.normal(key, leaf.shape, dtype) * 0.02
        for key, (name, leaf) in zip(
            keys[2:], mixture.leaves(depth, 0.02, 0.02).items(), strict=True
        )
    }
    x, g = (jax.random.normal(key, (tokens, depth), dtype) for key in keys[:2])
    if request["row"] == "jax ragged_dot":
        return plain_layer(request), (g, params, x), {}
    has_index_kernel = grouped.has_index_kernel(dtype, depth, width)
    transport.has_index_kernel = (
        (lambda *_: False) if "copies" in request["row"] else grouped.has_index_kernel
    )

    def run(params, x):
        return mixture.apply(params, x[None], Context(jnp.zeros((1, tokens), jnp.int32)))[0][0]

    return (
        run,
        (g, params, x),
        {"note": "kernel" if has_index_kernel else "tiles: there is no kernel here"},
    )


class Call(harness.ProgramRow):
    """A row that calls one program."""

    def __init__(self, request: dict):
        """Compiles, and compares a product with a loop over experts."""
        import jax
        import jax.numpy as jnp

        from jaxpar.nn.experts import by_index

        cut_for = by_index.cut_for
        function, self.args, said = (product if request["kind"] == "product" else layer)(request)
        begin, self.spend_s = time.perf_counter(), request["spend_s"]
        self.program = jax.jit(both_ways(function, request)).lower(*self.args).compile()
        by_index.cut_for = cut_for
        self.made = (
            said | {"compile_s": time.perf_counter() - begin} | decode_rows.memory_of(self.program)
        )
        out = self.program(*self.args)
        if not all(bool(jnp.isfinite(each).all()) for each in jax.tree.leaves(out)):
            raise ValueError("the results are not finite")
        if request["kind"] == "product":
            y = out if request["direction"] == "fwd" else out[0]
            want = jax.jit(functools.partial(by_loop, request))(*self.args[1:])
            off, size = (jnp.linalg.norm(each.astype(jnp.float32)) for each in (y - want, want))
            self.made["error"] = float(off / size)


def rates(request: dict) -> dict:
    """Returns the FLOP/s of a square product."""
    import jax
    import jax.numpy as jnp

    size = request["size"]
    x = jax.random.normal(jax.random.key(0), (size, size), request["dtype"])
    ms = harness.time_jax(jax.jit(jnp.matmul), [(x, x)], request["spend_s"])["ms"]
    return {
        "device": jax.devices()[0].device_kind,
        "version": f"jax {jax.__version__}",
        "flops": 2e3 * size**3 / ms,
    }


if __name__ == "__main__":
    # One at a time: its compile time is told.
    harness.serve(harness.Rows(Call, {"rates": rates, "prepare": lambda _: {}}))
