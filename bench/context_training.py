"""For `bench/context.py`: the longest sequence on which a model is trained on one device, by what is recomputed."""

import math
import time
from collections.abc import Callable

import harness

MOST_OF_MEMORY = 0.95
IMPLS = {"dense": "xla", "loop": "xla", "kernel": "auto"}
RATES = {"dense": 1e14, "loop": 4e13, "kernel": 4e14}
"""Operations a second that are expected of attention's forms: whether the longest step ends in a row's time."""


def longest(size: Callable[[int], float], room: float, first: int, most: int) -> int:
    """Returns the largest length whose size has room, to an eighth of itself; 0 if `first` has none, at best `most`.

    Each try is a compilation, so that lengths are guessed from the sizes of those before: along a line, and half way
    between what fits and what does not every other time, since a size may grow as any power of the length.
    """
    sizes = {first: size(first)}
    if sizes[first] > room:
        return 0
    low, high = first, 0
    while low < most and not 0 < high - low <= max(1, low // 8):
        unit = max(1, 2 ** (low.bit_length() - 1) // 8)
        other = high or max((length for length in sizes if length < low), default=0)
        grows = (sizes[other] - sizes[low]) / (other - low) if other and sizes[other] < math.inf else 0.0
        guess = low + (room - sizes[low]) / grows if grows > 0 else 4 * low
        if high and (len(sizes) % 2 or not grows > 0):
            guess = (low + high) / 2
        guess = min(max(int(guess) // unit * unit, low + unit), high - 1 if high else min(most, 8 * low))
        sizes[guess] = size(guess)
        low, high = (guess, high) if sizes[guess] <= room else (low, guess)
    return low


class Train:
    """An optimizer step on one row of T tokens: the longest T whose program fits and runs, and its time at equal T.

    The row is "own" or "jaxpar", what is recomputed, and attention's form: "dense", "loop" (over blocks) or "kernel".
    """

    def __init__(self, request: dict):
        """Searches by compiled programs; nothing runs."""
        import jax

        from jaxpar.lm import LMConfig, Trainer

        _, remat, self.impl = request["row"].split()
        self.request, shape = request, request["model"] | {"dtype": request["dtype"]}
        self.config = LMConfig(**shape, remat=remat, attention=IMPLS[self.impl], tied=True, loss_chunk=8192)
        self.trainer = Trainer(self.config, num_steps=10_000)
        device = jax.devices()[0]
        memory = (device.memory_stats() or {}).get("bytes_limit", request.get("memory", math.inf))
        self.room, self.compile_s, self.programs = MOST_OF_MEMORY * memory, 0.0, {}
        planned = longest(self.size, self.room, request["first"], request["most"])
        self.made: dict = {"longest": planned, "note": f"of {memory / 2**30:.3g} GiB"}
        if planned >= request["at"]:
            self.program(request["at"])

    def warm(self) -> dict:
        """Runs the longest step, unless that takes longer than a third of a row has, and times the one of equal T."""
        import jax

        request, planned = self.request, self.made["longest"]
        ends = self.flops(planned) / RATES[self.impl] < request["row_s"] / 3
        if planned and not ends:
            self.made["note"] += "; planned, too long to be run"
        while self.made["longest"] and ends and "memory" not in request:
            try:
                self.times(self.made["longest"], calls=1)
                break
            except jax.errors.JaxRuntimeError:  # what the compiler planned had no room after all
                self.made["longest"] = self.made["longest"] * 7 // 8 // 256 * 256
        if self.made["longest"] < planned:
            self.made["note"] += f"; {planned:,} were planned"
        if self.made["longest"] >= request["at"]:
            self.made |= self.times(request["at"])
        return self.made | {"compile_s": self.compile_s}

    def flops(self, length: int) -> float:
        """Returns the operations of a step on so many tokens."""
        from jaxpar.lm import flops_per_token

        return flops_per_token(self.config, length, causal=True) * length if length else 0.0

    def program(self, length: int):
        """Returns the compiled step, which takes the state's place."""
        import jax
        import jax.numpy as jnp

        if length not in self.programs:
            tokens = jax.ShapeDtypeStruct((1, length), jnp.int32)
            key = jax.random.key(0)
            state = jax.eval_shape(self.trainer.init, key)
            begin = time.perf_counter()
            step = jax.jit(self.trainer.step, donate_argnums=1)
            self.programs[length] = step.lower(key, state, {"tokens": tokens, "targets": tokens}).compile()
            self.compile_s += time.perf_counter() - begin
        return self.programs[length]

    def bytes_of(self, program) -> int:
        """Returns what a program needs: arguments, temporary arrays, and results that take no argument's place."""
        stats = program.memory_analysis()
        new = stats.output_size_in_bytes - stats.alias_size_in_bytes
        return stats.argument_size_in_bytes + stats.temp_size_in_bytes + new

    def size(self, length: int) -> float:
        """Returns the bytes of the step on so many tokens; infinity where it cannot be compiled for want of them."""
        import jax

        try:
            return self.bytes_of(self.program(length))
        except jax.errors.JaxRuntimeError as error:
            if "RESOURCE_EXHAUSTED" in str(error):
                return math.inf
            raise

    def times(self, length: int, calls: int = 0) -> dict:
        """Returns the median and the least time of steps on so many tokens, and the operations of one."""
        import jax

        program, key = self.program(length), jax.random.key(0)
        state = jax.jit(self.trainer.init)(key)
        rows = jax.random.randint(key, (1, length + 1), 0, self.config.vocab_size, "int32")
        batch = {"tokens": rows[:, :-1], "targets": rows[:, 1:]}
        taken: list[float] = []

        def seconds(count: int) -> float:
            nonlocal state
            begin = time.perf_counter()
            for _ in range(count):
                state, info = program(key, state, batch)
            if not bool(jax.block_until_ready(info["loss"]) < math.inf):
                raise ValueError("the loss is not finite")
            taken.append((time.perf_counter() - begin) / count)
            return taken[-1]

        if calls:
            seconds(calls)
            return {}
        said = harness.medians(seconds, self.request["spend_s"])
        return said | {"least_ms": 1e3 * min(taken), "flops": self.flops(length), "peak_bytes": self.bytes_of(program)}
