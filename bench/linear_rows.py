"""JAX's side of `bench/linear_attention.py`: rows that are made (compiled), timed once a round, and dropped."""

import threading
import time
from collections.abc import Callable

import decode_rows
import harness
import linear_cases

TRACING = threading.Lock()  # tiles, and the delta rule's scan, are exchanged for a while


def function_of(request: dict) -> Callable:
    """Returns the row's function of (q, k, v), log decays and log input gates where there are."""
    import jax
    import jax.numpy as jnp

    from jaxpar.nn.mixers import linear_kernels as kernels
    from jaxpar.nn.mixers.exponential_gates import exponential_attention
    from jaxpar.nn.mixers.linear_attention import linear_attention
    from jaxpar.nn.mixers.options import RecurrenceExecution

    for said in filter(None, request.get("tiles", "").split(",")):
        name, tile = said.split("=")
        deep, wide, warps, stages = map(int, tile.split("x"))
        for each in (*kernels.FORWARD.values(), *kernels.BACKWARD.values()):
            each.cuts[name] = kernels.Cut(deep=deep, wide=wide, warps=warps, stages=stages)
    impl = request["row"].split()[0]
    if request["direction"] == "step":
        return step_of(request, impl)
    if impl == "cudnn":
        if request["sizes"][3] != request["sizes"][4]:
            raise ValueError("attention here has values as wide as keys")
        how = None if jax.default_backend() == "cpu" else "cudnn"
        return lambda q, k, v: jax.nn.dot_product_attention(
            q, k, v, scale=1.0, is_causal=True, implementation=how
        )
    execution = RecurrenceExecution(impl=impl.strip(","))
    if request["decay"] == "delta":
        return delta_of(request["row"].endswith("loop"), execution)
    if request["decay"] == "exponential":
        # From log gates: keys are scaled as queries are, for both frameworks.
        return lambda q, k, v, forget, gate: exponential_attention(
            q, k, v, forget, gate, execution=execution
        )[0].astype(jnp.bfloat16 if q.dtype == jnp.bfloat16 else q.dtype)
    if request["decay"] == "sigmoid":
        return lambda q, k, v, *gates: with_sigmoid(q, k, v, *gates, execution=execution)
    return lambda q, k, v, *decay: linear_attention(q, k, v, *decay, execution=execution)[0]


def with_sigmoid(q, k, v, forget, gate, execution):
    """Returns the mLSTM's outputs where its input gates are sigmoids, which scale keys, and nothing is normalised."""
    import jax

    from jaxpar.nn.mixers.linear_attention import linear_attention

    return linear_attention(
        q, (k * jax.nn.sigmoid(gate)[..., None]).astype(k.dtype), v, forget, execution=execution
    )[0]


def delta_of(loop: bool, execution) -> Callable:
    """Returns the gated delta rule, whose states go from chunk to chunk by an affine scan of matrices, or by a loop."""
    import importlib

    import jax
    import jax.numpy as jnp

    from jaxpar.scan import affine_scan

    module = importlib.import_module(
        "jaxpar.nn.mixers.delta_rule"
    )  # whose name is a function's in its package

    def in_turn(a, b, state, *, kind, axis, axis_name):
        del kind, axis_name
        a, b = (jnp.moveaxis(x, axis, 0) for x in (a, b))

        def step(state, now):
            state = jnp.einsum("...ij,...jk->...ik", now[0], state, precision="highest") + now[1]
            return state, state

        return jnp.moveaxis(jax.lax.scan(step, state, (a, b))[1], 0, axis)

    def run(q, k, v, decay, beta):
        module.affine_scan = in_turn if loop else affine_scan
        return module.delta_rule(q, k, v, beta, decay, execution=execution)[0]

    return run


def step_of(request: dict, impl: str) -> Callable:
    """Returns the row's function of one token, log gates and a state, which it returns."""
    from jaxpar.nn.mixers.exponential_gates import exponential_attention
    from jaxpar.nn.mixers.linear_attention import linear_attention
    from jaxpar.nn.mixers.options import RecurrenceExecution

    execution = RecurrenceExecution(impl=impl)
    if request["decay"] == "exponential":

        def step(q, k, v, forget, gate, state):
            first = (state, state[:, :, 0, 0])
            return exponential_attention(q, k, v, forget, gate, state=first, execution=execution)

        return step
    return lambda q, k, v, decay, state: linear_attention(
        q, k, v, decay, state=state, execution=execution
    )


def truth(request: dict, args: tuple):
    """Outputs of the first row's first two heads by chunks in float32, and gradients if they are asked for."""
    import jax
    import jax.numpy as jnp

    from jaxpar.nn.mixers.exponential_gates import exponential_attention
    from jaxpar.nn.mixers.linear_attention import linear_attention
    from jaxpar.nn.mixers.options import RecurrenceExecution

    execution = RecurrenceExecution(impl="chunked")
    g, *rest = (x[:1, :, :2].astype(jnp.float32) for x in args)

    def run(*rest):
        if request["decay"] == "delta":
            return delta_of(False, execution)(*rest)
        if request["decay"] == "exponential":
            return exponential_attention(*rest, execution=execution)[0]
        if request["decay"] == "sigmoid":
            return with_sigmoid(*rest, execution=execution)
        return linear_attention(*rest, execution=execution)[0]

    with jax.default_matmul_precision("highest"):
        return jax.jit(lambda g, *rest: both_ways(run, request)(g, *rest))(g, *rest)


def both_ways(function: Callable, request: dict) -> Callable:
    """Returns (g, *args) -> the result, and all gradients where they are asked for."""
    import jax

    def run(g, *args):
        if request["direction"] != "fwd+bwd":
            return (function(*args),)
        y, pull = jax.vjp(function, *args)
        return y, *pull(g.astype(y.dtype))

    return run


class Call(harness.ProgramRow):
    """A row that calls one program."""

    def __init__(self, request: dict):
        """Compiles, and compares with the float32 form."""
        import jax
        import jax.numpy as jnp

        made = linear_cases.arrays(request)
        narrow = {
            name: jnp.asarray(x, request["dtype"])
            for name, x in made.items()
            if name not in linear_cases.WIDE
        }
        names = ["q", "k", "v", *(name for name in linear_cases.WIDE if name in made)]
        self.args = (
            narrow["g"],
            *(narrow[name] if name in narrow else jnp.asarray(made[name]) for name in names),
        )
        begin, self.spend_s = time.perf_counter(), request["spend_s"]
        with TRACING:
            lowered = jax.jit(both_ways(function_of(request), request)).lower(*self.args)
        self.program = lowered.compile()
        self.made = {"compile_s": time.perf_counter() - begin} | decode_rows.memory_of(self.program)
        out = self.program(*self.args)
        if not all(bool(jnp.isfinite(each).all()) for each in jax.tree.leaves(out)):
            raise ValueError("the results are not finite")
        if "attention" not in request["row"] and request["direction"] != "step":
            want = truth(request, self.args)
            parts = [
                float(
                    jnp.linalg.norm(mine[:1, :, :2].astype(jnp.float32) - right)
                    / jnp.linalg.norm(right)
                )
                for mine, right in zip(out, want, strict=True)
            ]
            self.made |= linear_cases.told(parts, names)


def rates(request: dict) -> dict:
    """Returns the bytes a second of a copy, read and written."""
    import jax
    import jax.numpy as jnp

    x = jnp.zeros((request["size"],), jnp.float32)
    copy = jax.jit(lambda x: x + 1).lower(x).compile()
    ms = harness.time_jax(copy, [(x,)], request["spend_s"])["ms"]
    return {
        "device": jax.devices()[0].device_kind,
        "version": f"jax {jax.__version__}",
        "bytes": 8e3 * x.size / ms,
    }


if __name__ == "__main__":
    harness.serve(harness.Rows(Call, {"rates": rates}))
