"""Our side of `bench/context.py`: rows that are made (compiled), timed once a round, and dropped."""

import functools
import math
import time
from collections.abc import Callable
from typing import NamedTuple

import decode_rows
import harness


class Program(NamedTuple):
    """A function, its arguments and what a row says of itself; `join` brings its results into the order of places."""

    function: Callable
    args: tuple
    said: dict
    join: Callable = lambda x: x


def drawn(request: dict) -> list:
    """Draws queries, keys, values and the gradient of the outputs, [1, T, heads, K], the same in every row."""
    import jax

    heads = request["heads"], request["groups"], request["groups"], request["heads"]
    shapes = [(1, request["length"], each, request["width"]) for each in heads]
    keys = jax.random.split(jax.random.key(0), 4)
    return [
        jax.random.normal(key, shape, request["dtype"])
        for key, shape in zip(keys, shapes, strict=True)
    ]


def both_ways(attend: Callable, request: dict) -> Callable:
    """Returns (q, k, v, g, ...) -> outputs, or outputs and gradients."""
    import jax

    def run(q, k, v, g, *places):
        if request["direction"] == "fwd":
            return (attend(q, k, v, *places),)
        out, pull = jax.vjp(lambda q, k, v: attend(q, k, v, *places), q, k, v)
        return out, *pull(g)

    return run


def whole(request: dict) -> Program:
    """JAX's attention of one device: cuDNN's on a GPU."""
    import jax

    kernel = "cudnn" if jax.default_backend() == "gpu" else "xla"
    attend = functools.partial(jax.nn.dot_product_attention, is_causal=True, implementation=kernel)
    return Program(both_ways(attend, request), tuple(drawn(request)), {"note": kernel})


def moves(request: dict) -> Program:
    """Attention of N devices by a move, in an order that is promised or not."""
    if request["row"] == "jax one":
        return whole(request)
    import jax
    import jax.numpy as jnp

    from jaxpar.mesh import named_shardings
    from jaxpar.nn.attention.context import Order, context_attention

    _, move, name = request["row"].split()
    shares, promised = request["mesh"], None if name == "unpromised" else name
    order = Order(promised or "zigzag")
    places = jnp.arange(request["length"], dtype=jnp.int32)[None]
    arrays = [order.split(x, shares) for x in (*drawn(request), places)]
    axes = [("batch", "seq_layer", None, None)] * 4 + [("batch", "seq_layer")]
    args = jax.device_put(arrays, named_shardings(arrays, axes))
    attend = functools.partial(context_attention, move=move, order=promised)
    return Program(
        function=both_ways(attend, request),
        args=tuple(args),
        said={},
        join=lambda x: order.join(x, shares),
    )


def parts(request: dict) -> Program:
    """Attention of one device to its own tokens in P parts, pair by pair, as a ring computes it."""
    if request["row"] == "jax one":
        return whole(request)
    import jax.numpy as jnp

    from jaxpar.nn.attention import merge
    from jaxpar.nn.attention.gradient import Done
    from jaxpar.nn.attention.pairs import attend_pair, attend_pair_gradient

    count = int(request["row"].split()[-1])

    def cut(x):
        return jnp.split(x, count, 1)

    def run(q, k, v, g):
        qs, ks, vs, gs = map(cut, (q, k, v, g))
        states = [attend_pair(qs[i], ks[i], vs[i], True) for i in range(count)]
        for i in range(count):
            for j in range(i):
                states[i] = merge(states[i], attend_pair(qs[i], ks[j], vs[j], False))
        outs, sums = (
            [state.mean.astype(q.dtype) for state in states],
            [state.log_sum for state in states],
        )
        if request["direction"] == "fwd":
            return (jnp.concatenate(outs, 1),)
        grads: list[list] = [[0.0] * count for _ in range(3)]
        for i in range(count):
            done = Done(out=outs[i], log_sum=sums[i], gradient=gs[i])
            for j in range(i + 1):
                more = attend_pair_gradient(qs[i], ks[j], vs[j], done, i == j)
                for kind, at, new in zip(grads, (i, j, j), more, strict=True):
                    kind[at] = kind[at] + new
        return tuple(jnp.concatenate(x, 1).astype(q.dtype) for x in (outs, *grads))

    return Program(
        run, tuple(drawn(request)), {"note": f"pairs of parts: {count * (count + 1) // 2}"}
    )


def attend(request: dict) -> Program:
    """A token's attention to a cache: by JAX, or in shares of N devices, even or nine tenths on the first."""
    import jax
    import jax.numpy as jnp

    from jaxpar.mesh import named_shardings
    from jaxpar.nn.attention.context import attend_split_cache

    batch, heads, groups, slots, width = request["shape"]
    shapes = (1, heads), (slots, groups), (slots, groups)
    keys = jax.random.split(jax.random.key(0), 3)
    arrays = [
        jax.random.normal(key, (batch, *shape, width), request["dtype"])
        for key, shape in zip(keys, shapes, strict=True)
    ]
    if request["row"] == "jax one":
        kernel = "cudnn" if jax.default_backend() == "gpu" else "xla"
        call = functools.partial(jax.nn.dot_product_attention, implementation=kernel)
        return Program(lambda *x: (call(*x),), tuple(arrays), {"note": kernel})
    shares = request["devices"]
    lengths, note = [slots // shares] * shares, {}
    if "uneven" in request["row"]:
        room = slots * 9 // 10  # a share has as much room as the largest needs
        lengths = [room, *[(slots - room) // (shares - 1)] * (shares - 1)]
        ends = [sum(lengths[: i + 1]) for i in range(shares)]
        pieces = [
            [x[:, end - size : end] for end, size in zip(ends, lengths, strict=True)]
            for x in arrays[1:]
        ]
        pad = [
            [jnp.pad(p, ((0, 0), (0, room - p.shape[1]), (0, 0), (0, 0))) for p in each]
            for each in pieces
        ]
        arrays[1:] = [jnp.concatenate(each, 1) for each in pad]
        note = {"note": f"{max(lengths) / sum(lengths):.0%} on the first"}
    args = [*arrays, jnp.asarray([lengths], jnp.int32).repeat(batch, 0)]
    if "cut" in request["row"] or "pairs" in request["row"]:
        return Program(lambda *x: (in_parts(request["row"].split()[1:], *x),), tuple(args), note)
    split = ("batch", "seq_layer", None, None)
    args = jax.device_put(
        args, named_shardings(args, [("batch", None, None, None), split, split, ("batch", None)])
    )
    return Program(lambda *x: (attend_split_cache(*x),), tuple(args), note)


def in_parts(form: list[str], q, keys, values, lengths):
    """A token's attention to a full cache by parts: "cut", with the kernel's own numbers, or "pairs" of cuDNN."""
    from jaxpar.nn.attention import finish, merge_parts
    from jaxpar.nn.attention.context.shares_kernel import ShareCut, attend_shares
    from jaxpar.nn.attention.pairs import attend_pair

    kind, *numbers = form
    if kind == "cut":
        step, warps, stages, programs = map(int, numbers)
        cut = ShareCut(step=step, warps=warps, stages=stages, programs=programs)
        parts = attend_shares(q, keys, values, lengths, cut=cut)
        return finish(merge_parts(parts)).astype(q.dtype)
    import jax

    # Parts are rows, and the queries that share a key head tokens of one head, so that a part is read once.
    batch, _, heads, width = q.shape
    groups = keys.shape[2]
    parts = int(numbers[0])
    rows = q.reshape(batch, 1, groups, -1, width).swapaxes(2, 3).repeat(parts, 1)
    rows = rows.reshape(batch * parts, -1, groups, width)
    keys, values = (x.reshape(batch * parts, -1, groups, width) for x in (keys, values))
    state = jax.tree.map(
        lambda x: x.reshape(batch, parts, *x.shape[1:]).swapaxes(0, 1),
        attend_pair(rows, keys, values, False),
    )
    out = finish(merge_parts(state)).astype(q.dtype)  # [B, heads of a group, G, K]
    return out.swapaxes(1, 2).reshape(batch, 1, heads, width)


PROGRAMS = {"moves": moves, "parts": parts, "attend": attend}


def sent(text: str, mesh, members: int = 0) -> float:
    """Returns the bytes that a device sends in a compiled program, whose collectives have so many members, or all."""
    from jaxpar.aot import hlo

    others = 1 - 1 / (members or mesh.size)
    share = {
        "collective-permute": 1.0,
        "all-reduce": 2 * others,
    }  # an all-reduce scatters, then gathers
    return sum(
        each.trips * each.bytes * share.get(each.kind, others)
        for each in hlo.collectives(text, mesh)
    )


class Call(harness.ProgramRow):
    """A row that calls one program; results are compared with those of JAX's attention on one device."""

    def __init__(self, request: dict, expected: dict):
        """Compiles."""
        import jax

        from jaxpar.mesh import MeshSpec, make_mesh, use_mesh

        self.request, self.expected = request, expected
        self.spend_s = request["spend_s"]
        self.mesh = make_mesh(
            MeshSpec(context=request["devices"]), jax.devices()[: request["devices"]]
        )
        with decode_rows.LOCK, use_mesh(self.mesh):
            program = PROGRAMS[request["kind"]](request)
            self.args, self.join, begin = program.args, program.join, time.perf_counter()
            lowered = jax.jit(program.function).lower(*self.args)
        self.program = lowered.compile()
        self.made = (
            program.said
            | {"compile_s": time.perf_counter() - begin}
            | decode_rows.memory_of(self.program)
        )

    def warm(self) -> dict:
        """Calls it and compares; returns what is known of the row."""
        import jax
        import jax.numpy as jnp

        from jaxpar.mesh import use_mesh

        request, mesh, expected = self.request, self.mesh, self.expected
        with use_mesh(mesh):
            out = [jax.device_put(self.join(x), jax.devices()[0]) for x in self.program(*self.args)]
        if request["devices"] > 1:
            grouped = "swap_ring" in request["row"]
            members = math.gcd(request["groups"], mesh.size) if grouped else mesh.size
            self.made["sent"] = sent(self.program.as_text(), mesh, members)
        key = request["case"], request["direction"]
        if request["row"] == "jax one":
            expected[key] = out
            return self.made

        @jax.jit
        def error(got, want):
            got, want = got.astype(jnp.float32), want.astype(jnp.float32)
            return jnp.linalg.norm(got - want) / jnp.linalg.norm(want)

        if key in expected:
            worst = [float(error(*pair)) for pair in zip(out, expected[key], strict=True)]
            self.made["error"] = max(worst, key=lambda x: math.inf if math.isnan(x) else x)
        return self.made


class Step(harness.ProgramRow):
    """A token of B rows through a stack of layers with tensor=N, after as many as fill half of the cache."""

    TOKENS = 16

    def __init__(self, request: dict):
        """Draws weights and compiles a loop over some tokens."""
        import jax
        import jax.numpy as jnp
        from lm_models import lm_config

        from jaxpar.mesh import MeshSpec, make_mesh, named_shardings, use_mesh
        from jaxpar.nn.leaf import Leaf

        rows, slots, residual = (
            int(request["direction"].split()[0]),
            request["slots"],
            request["row"].split()[1],
        )
        stack = lm_config(**request["model"], dtype=request["dtype"], residual=residual).stack()
        self.mesh = make_mesh(
            MeshSpec(tensor=request["devices"]), jax.devices()[: request["devices"]]
        )
        self.spend_s, key = request["spend_s"], jax.random.key(0)

        def run(params, cache, x):
            def one(_, carry):
                x, cache = carry
                x, cache, _ = stack.apply(params, x, cache=cache)
                return x, cache

            return jax.lax.fori_loop(0, self.TOKENS, one, (x, cache))[0]

        with decode_rows.LOCK, use_mesh(self.mesh):
            init = functools.partial(stack.init, dtype=request["dtype"])
            axes = jax.tree.map(
                lambda leaf: leaf.axes, stack.leaves(), is_leaf=lambda x: isinstance(x, Leaf)
            )
            params = jax.jit(init, out_shardings=named_shardings(jax.eval_shape(init, key), axes))(
                key
            )
            size = sum(leaf.nbytes for leaf in jax.tree.leaves(params))
            params = jax.jit(stack.unstacked, donate_argnums=0)(params)
            cache = jax.jit(stack.init_cache, static_argnums=(0, 1))(rows, slots)
            cache = cache.replace(seen=jnp.full_like(cache.seen, slots // 2 - self.TOKENS))
            x = jax.random.normal(key, (rows, 1, stack.embed_dim), request["dtype"])
            self.args, begin = (params, cache, x), time.perf_counter()
            lowered = jax.jit(run).lower(*self.args)
        self.program = lowered.compile()
        self.made = {
            "compile_s": time.perf_counter() - begin,
            "bytes": size,
        } | decode_rows.memory_of(self.program)

    def warm(self) -> dict:
        """Calls it; returns what is known of the row."""
        import jax.numpy as jnp

        if not bool(jnp.isfinite(self.program(*self.args)).all()):
            raise ValueError("the outputs are not finite")
        return self.made

    def round(self) -> dict:
        """Median of several queued calls, by the tokens of one."""
        said = super().round()
        return said | {"ms": said["ms"] / self.TOKENS}


def rates(request: dict) -> dict:
    """Returns FLOP/s of a square product and bytes/s, read plus written, of a copy."""
    import jax
    import jax.numpy as jnp

    size = request["size"]
    x = jnp.ones((size, size), request["dtype"])
    product = harness.time_jax(jax.jit(jnp.matmul), [(x, x)], request["spend_s"])
    copy = decode_rows.copy_rate(request)
    return {"flops": 2 * size**3 / product["ms"] * 1e3, "bytes": copy["rate"]} | copy


@functools.cache
def begin_with(count: int) -> None:
    """Gives this process so many devices where they are CPU's: what is first asked of it says how many."""
    from jaxpar.mesh import simulate_devices

    simulate_devices(count)


class Rows(harness.Rows):
    """The rows that are held; what else is asked is `rates`, or what a row knows."""

    def __init__(self):
        """Holds nothing yet."""
        self.expected: dict = {}
        super().__init__(self.make_row, {"rates": rates}, self.expected.clear)

    def __call__(self, request: dict) -> dict:
        """Answers one request."""
        if request["do"] in ("rates", "prepare", "make"):
            begin_with(request.get("rows", [request])[0]["mesh"])
        if request["do"] in ("rates", "prepare", "make", "round", "drop"):
            return super().__call__(request)
        return self.held[request["name"]].answer(request)

    def make_row(self, request: dict):
        """Returns a new row."""
        if request["kind"] == "train":
            from context_training import Train

            return Train(request)
        if request["kind"] == "step":
            return Step(request)
        if "forest" in request["row"]:
            return decode_rows.Attend(request)
        return Call(request, self.expected)


if __name__ == "__main__":
    harness.serve(Rows())
