"""What tasks of a pipeline's chunk take by themselves, for `bench/pipeline.py`, and how its rows are timed."""

import dataclasses
import statistics
import time
from collections.abc import Callable

from jaxpar.pipeline import Op, TaskCosts

TIMINGS = 5, 20  # at least and at most


@dataclasses.dataclass(frozen=True)
class ChunkCosts(TaskCosts):
    """Times of tasks where BW is not B and W, and where the ends of the model take some too.

    Attributes:
      BW: Of a chunk, both stages at once.
      enter: Of the embedding.
      head: Of norm, head and loss with their gradients, which belong to the last chunk's B or BW.
      leave: Of the embedding's gradient.
      last: Number of the last chunk.
    """

    BW: float = 0.0
    enter: float = 0.0
    head: float = 0.0
    leave: float = 0.0
    last: int = 0

    def of(self, task) -> float:
        """Returns the time of a task."""
        op, chunk, _ = task
        is_back = op in (Op.B, Op.BW)
        time = self.BW if op == Op.BW else super().of(task)
        if chunk == 0:
            time += self.enter if op == Op.F else self.leave if is_back else 0.0
        return time + (self.head if is_back and chunk == self.last else 0.0)


def config_of(request: dict, **changes):
    """Returns the model that a request names."""
    from lm_models import lm_config

    names = ("dtype", "attention", "remat")
    options = request["model"] | {name: request[name] for name in names} | changes
    return lm_config(
        **options, rope_theta=500000.0, low_logits=True, loss_chunk=32768, scan_layers=False
    )


def batch_of(request: dict, rows: int) -> dict:
    """Returns tokens and targets, the same in every process."""
    import jax

    shape = 2, rows, request["length"]
    tokens, targets = jax.random.randint(
        jax.random.key(1), shape, 0, request["model"]["vocab_size"]
    )
    return {"tokens": tokens, "targets": targets}


def timed(call: Callable, spend_s: float) -> dict:
    """Returns the median of calls that are waited for one by one; the first are warm-up."""
    import jax

    taken, most = [], TIMINGS[1]
    while len(taken) < most + 2:
        begin = time.perf_counter()
        out = jax.block_until_ready(call())
        taken.append(time.perf_counter() - begin)
        del out
        most = max(TIMINGS[0], min(most, int(spend_s / max(taken[-1], 1e-6))))
    taken = taken[2:]
    return {
        "ms": 1e3 * statistics.median(taken),
        "least_ms": 1e3 * min(taken),
        "timings": len(taken),
    }


class Chunk:
    """One of `depth` chunks of the model on one device, and the functions that are its tasks.

    Layers are compiled one after the other, with weights where they lie, so no copy into or out of an array of all of
    them is in their times; sums of gradients are float32 and added to in place, as the executor's are.
    """

    def __init__(self, request: dict, depth: int):
        """Draws weights and data."""
        import jax
        import jax.numpy as jnp

        from jaxpar.lm import init
        from jaxpar.lm.stages import stages
        from jaxpar.pipeline.two_stage import two_stage

        size = request["model"]["num_layers"] // depth
        config = config_of(request, num_layers=size)
        self.pieces, self.data = stages(config), batch_of(request, request["rows"])
        self.ends = jax.jit(lambda key: self.pieces.hold(init(key, config)))(jax.random.key(0))
        layers = self.ends.pop("layers")
        self.weights = [jax.tree.map(lambda x, i=i: jnp.copy(x[i]), layers) for i in range(size)]
        self.total = jnp.float32(request["rows"] * request["microbatches"] * request["length"])
        self.x = jax.jit(self.enter)(self.ends)
        self.split = two_stage(self.layer, self.weights[0], self.x, products=self.pieces.products())

    def layer(self, params, x):
        """A layer with the model's remat."""
        return self.pieces.remat(
            lambda params, x: self.pieces.layer(params, 0, x, self.data, None)[0]
        )(params, x)

    def enter(self, ends):
        """The embedding."""
        return self.pieces.first(ends, self.data, None)

    def forward(self, weights, x):
        """F: the output and what is kept."""
        kept = []
        for params in weights:
            x, pull = self.split.forward(params, x)
            kept.append(pull)
        return x, kept

    def backward(self, kept, g):
        """B: the gradient of the input, and factors."""
        factors = []
        for pull in reversed(kept):
            g, more = self.split.backward_input(pull, g)
            factors.append(more)
        return g, factors[::-1]

    def late(self, weights, factors, sums):
        """W: sums with the gradients of the weights."""
        return plus(
            sums,
            [self.split.backward_weights(*pair) for pair in zip(weights, factors, strict=True)],
        )

    def both(self, weights, kept, g, sums):
        """BW, a layer after the other, so that the factors of none outlive it."""
        new = list(sums)
        for i in reversed(range(len(weights))):
            g, factors = self.split.backward_input(kept[i], g)
            new[i] = plus(sums[i], self.split.backward_weights(weights[i], factors))
        return g, new

    def end(self, ends, x, sums):
        """Norm, head and loss, the gradient of their input, and sums with theirs."""
        import jax

        lose = jax.value_and_grad(
            lambda ends, x: self.pieces.last(ends, x, self.data, self.total)[0], (0, 1)
        )
        loss, (more, g) = lose(ends, x)
        return loss, g, plus(sums, more)

    def leave(self, ends, g, sums):
        """Sums with the embedding's gradient."""
        import jax

        return plus(sums, jax.vjp(self.enter, ends)[1](g)[0])


def plus(sums, more):
    """Adds gradients to sums in their dtypes."""
    import jax

    return jax.tree.map(lambda a, b: a + b.astype(a.dtype), sums, more)


def measured_costs(request: dict, depth: int) -> tuple[ChunkCosts, dict]:
    """Returns what tasks of one of `depth` chunks take on one device, in ms, and bytes that F and B leave."""
    import jax
    import jax.numpy as jnp

    chunk, spend = Chunk(request, depth), request["spend_s"] / 4
    weights, ends = chunk.weights, chunk.ends

    def zeros(tree):
        return jax.tree.map(
            lambda leaf: jnp.zeros(leaf.shape, jnp.promote_types(leaf.dtype, jnp.float32)), tree
        )

    def adding(task: Callable, args: tuple, sums, sums_of: Callable) -> float:
        """Times a task that is given sums last, and replaces them."""
        program, held = jax.jit(task, donate_argnums=len(args)), [sums]

        def call():
            out = program(*args, held[0])
            held[0] = sums_of(out)
            return out

        return timed(call, spend)["ms"]

    enter, forward, backward = (
        jax.jit(task) for task in (chunk.enter, chunk.forward, chunk.backward)
    )
    y, kept = forward(weights, chunk.x)
    _, factors = backward(kept, y)
    known = {leaf.unsafe_buffer_pointer() for leaf in jax.tree.leaves((weights, ends, chunk.data))}
    left = {leaf.unsafe_buffer_pointer(): leaf.nbytes for leaf in jax.tree.leaves(kept)}
    stash = sum(size for where, size in left.items() if where not in known)
    pairs = sum(leaf.nbytes for leaf in jax.tree.leaves([each.pairs for each in factors]))
    times = {
        "F": timed(lambda: forward(weights, chunk.x), spend)["ms"],
        "B": timed(lambda: backward(kept, y), spend)["ms"],
        "W": adding(chunk.late, (weights, factors), zeros(weights), lambda out: out),
        "BW": adding(chunk.both, (weights, kept, y), zeros(weights), lambda out: out[-1]),
        "enter": timed(lambda: enter(ends), spend)["ms"],
        "head": adding(chunk.end, (ends, y), zeros(ends), lambda out: out[-1]),
        "leave": adding(chunk.leave, (ends, y), zeros(ends), lambda out: out),
    }
    times |= host_times(stash, spend) if request["what"] == "offload" else {}
    return ChunkCosts(**times, last=depth - 1), {"stash_bytes": stash, "factor_bytes": pairs}


def host_times(size: int, spend_s: float) -> dict:
    """Returns ms of so many bytes to pinned memory of the host, and back."""
    import jax
    import jax.numpy as jnp
    from jax.sharding import SingleDeviceSharding

    device = jax.devices()[0]
    here, there = (
        SingleDeviceSharding(device, memory_kind=kind) for kind in ("device", "pinned_host")
    )
    x = jax.device_put(jnp.ones(max(size, 4) // 4, jnp.float32), here)
    out = jax.block_until_ready(jax.device_put(x, there))
    return {
        "offload": timed(lambda: jax.device_put(x, there), spend_s)["ms"],
        "fetch": timed(lambda: jax.device_put(out, here), spend_s)["ms"],
    }
