"""Our side of `bench/decode.py`: rows that are made (compiled), timed once a round, and dropped.

What a row of steps calls is named alike by this checkout and by older ones, so that a process whose path begins with
another checkout answers for it.
"""

import functools
import pathlib
import threading
import time

import harness

LOCK = threading.Lock()
"""Held by whoever asks several devices for something, or sets a module's constants, while rows are compiled side by
side: collectives of two programs that devices begin in different orders wait for each other forever."""


def config_of(model: dict):
    """Returns the configuration of a shape."""
    from lm_models import gpt2_of, llama_of

    fields = {name: value for name, value in model.items() if name != "kind"}
    if model["kind"] == "gpt2":
        return gpt2_of(dropout=0.0, **fields)
    return llama_of(**fields)


def parameters(config):
    """Draws them, in the dtype that the model computes in: what decoding reads."""
    import jax

    from jaxpar.lm import init

    return jax.jit(init, static_argnums=(1, 2))(jax.random.key(0), config, config.dtype)


def memory_of(*programs) -> dict:
    """Returns the most bytes that one of the programs asks for, arguments and results included."""
    sizes = []
    for program in programs:
        stats = program.memory_analysis()
        sizes.append(
            stats.argument_size_in_bytes + stats.temp_size_in_bytes + stats.output_size_in_bytes
        )
    return {"peak_bytes": max(sizes)}


def seconds(call) -> float:
    """Seconds of one call."""
    import jax

    begin = time.perf_counter()
    jax.block_until_ready(call())
    return time.perf_counter() - begin


class Steps:
    """`generate` of `new` tokens and of one: a step is the difference, by new - 1."""

    def __init__(self, request: dict):
        """Compiles both programs; with a folder, the model's weights are written there for a peer."""
        import jax
        import jax.numpy as jnp
        from lm_models import generate

        from jaxpar.lm import Sampling

        config = config_of(request["model"])
        params = parameters(config)
        if "folder" in request and not pathlib.Path(request["folder"]).exists():
            from jaxpar.lm import to_hf

            to_hf(params, config, request["folder"])
        readers, shared = request.get("readers", 1), "shared" in request["row"]
        rows = request["rows"] * (1 if shared else readers)
        prompt = jax.random.randint(
            jax.random.key(1), (rows, request["prompt"]), 0, config.vocab_size, jnp.int32
        )
        if readers > 1:
            prompt = jnp.broadcast_to(prompt[:1], prompt.shape)
        if "prompts" in request:
            prompt = jnp.asarray(request["prompts"], jnp.int32)
        options = {"num_samples": readers} if shared else {}
        self.new, self.args, self.programs = request["new"], (jax.random.key(2), params, prompt), []
        begin = time.perf_counter()
        for new in (1, self.new):
            program = jax.jit(functools.partial(
                generate, config=config, sampling=Sampling(new, temperature=0.0), **options
            ))  # fmt: skip
            self.programs.append(program.lower(*self.args).compile())
        self.made = {
            "compile_s": time.perf_counter() - begin,
            "parameters": count(params),
        } | memory_of(*self.programs)
        self.is_read = "folder" in request

    def warm(self) -> dict:
        """Runs both once; returns what is known of the row."""
        import jax

        for program in self.programs:
            out = jax.block_until_ready(program(*self.args))
        return self.made | ({"tokens": out[0].tolist()} if self.is_read else {})

    def round(self) -> dict:
        """Times both once."""
        first, whole = (
            seconds(functools.partial(program, *self.args)) for program in self.programs
        )
        return {"first_ms": 1e3 * first, "ms": 1e3 * whole, "steps": self.new - 1}


def count(params) -> int:
    """Returns how many parameters there are."""
    import jax

    return sum(leaf.size for leaf in jax.tree.leaves(params))


class Attend(harness.ProgramRow):
    """Attention of one token to the S tokens of a cache of blocks, by itself."""

    def __init__(self, request: dict):
        """Fills a forest of one segment; a row tells a block's size, and may the kernel's stages and most splits."""
        import jax
        import jax.numpy as jnp

        from jaxpar.decode import forest as tables
        from jaxpar.decode import split_k
        from jaxpar.decode.blocks import BlockCache
        from jaxpar.nn.attention import PositionRule, finish
        from jaxpar.nn.mixer import DECODING, Context

        batch, heads, groups, slots, size = request["shape"]
        block, *kernel = map(int, request["row"].split()[2:])
        self.spend_s = request["spend_s"]
        keys = jax.random.split(jax.random.key(0), 5)
        full = jnp.full((batch, 1), slots, jnp.int32)
        forest, root = tables.spawn(tables.empty(batch, 1, -(-slots // block), block))
        forest, _ = tables.reserve(forest, root, full)
        forest, view, _ = jax.jit(tables.write, static_argnums=3)(
            forest, tables.lineage_view(forest, root), full, slots
        )

        def draw(key, *shape):
            return jax.random.normal(key, (batch, *shape), request["dtype"])

        past = [draw(key, groups, forest.num_blocks, block, size) for key in keys[:2]]
        q = draw(keys[2], 1, heads, size)
        k = draw(keys[3], 1, groups, size)
        v = draw(keys[4], 1, groups, size)
        context = Context(positions=jnp.full((batch, 1), slots, jnp.int32), rules=DECODING)

        def attend(past, forest, view, q, k, v, positions):
            past_keys, past_values = past
            cache = BlockCache(keys=past_keys, values=past_values).for_pass(forest, view)
            state, _ = cache.attend(q, k, v, PositionRule(), context._replace(positions=positions))
            return finish(state)

        self.args = past, forest, view, q, k, v, context.positions
        begin = time.perf_counter()
        with LOCK:
            usual = split_k.STAGES, split_k.MOST_SPLITS
            split_k.STAGES, split_k.MOST_SPLITS = *kernel, *usual[len(kernel) :]
            lowered = jax.jit(attend).lower(*self.args)
            split_k.STAGES, split_k.MOST_SPLITS = usual
        self.program = lowered.compile()
        self.made = {"compile_s": time.perf_counter() - begin} | memory_of(self.program)


class Prompt:
    """`prefill` of whole prompts."""

    def __init__(self, request: dict):
        """Compiles."""
        import jax
        import jax.numpy as jnp
        from lm_models import prefill

        config, rows, length = config_of(request["model"]), request["rows"], request["prompt"]
        params = parameters(config)
        prompt = jax.random.randint(
            jax.random.key(1), (rows, length), 0, config.vocab_size, jnp.int32
        )
        self.args, begin = (params, prompt, jnp.full((rows,), length)), time.perf_counter()
        self.program = (
            jax.jit(prefill, static_argnums=(3, 4)).lower(*self.args, config, length).compile()
        )
        self.made = {
            "compile_s": time.perf_counter() - begin,
            "parameters": count(params),
        } | memory_of(self.program)

    def warm(self) -> dict:
        """Runs it once; returns what is known of the row."""
        import jax

        jax.block_until_ready(self.program(*self.args))
        return self.made

    def round(self) -> dict:
        """Times it once."""
        return {"ms": 1e3 * seconds(functools.partial(self.program, *self.args))}


def copy_rate(request: dict) -> dict:
    """Returns the bytes/s, read plus written, of a large copy."""
    import jax
    import jax.numpy as jnp

    import jaxpar

    x = jnp.ones((request["bytes"] // 4,), jnp.float32)
    full = harness.time_jax(jax.jit(lambda x: -x), [(x,)], request["spend_s"])
    device = jax.devices()[0].device_kind
    rate, whose = 2 * x.nbytes / full["ms"] * 1e3, str(pathlib.Path(jaxpar.__file__).parents[1])
    return {"rate": rate, "device": device, "version": f"jax {jax.__version__}", "from": whose}


def make_row(request: dict):
    """Returns a new row of a kind."""
    return KINDS[request["kind"]](request)


KINDS = {"steps": Steps, "attend": Attend, "prompt": Prompt}
