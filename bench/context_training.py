"""For `bench/context.py`: the longest sequence on which a model is trained, by what is recomputed or how it is split.

Each row is a process of its own, which is told one program at a time: so a row has a limit of its own, tells each
figure when it is there, and what it has found when the limit comes is not lost.
"""

import math
import queue
import threading
import time
from collections.abc import Callable, Iterator

import harness

MOST_OF_MEMORY = 0.95
GOAL, ENOUGH, TRIES = 0.985, 0.97, 6
"""The share of the room that a guess aims at, the share at which a search ends, and its most programs."""

IMPLS = {"dense": "xla", "loop": "xla", "kernel": "auto"}
NOT_FINITE = "the loss is not finite"
BEGUN_S = 20
"""Seconds after which a longest step counts as begun: memory is taken when it begins, and it may take minutes."""


def rounded(length: float) -> int:
    """Returns the largest number not above a length of which all but the first six binary digits are zero."""
    unit = max(1, 2 ** (int(length).bit_length() - 6))
    return int(length) // unit * unit


def guesses(sizes: dict[int, float], room: float, most: int, power: int) -> Iterator[int]:
    """Yields lengths to try, until it is known how many tokens fit.

    `sizes` maps lengths to bytes beside what does not depend on them, which is left out of `room` too; it has one, and
    is filled by who asks. Bytes that grow at most as a power of the length never make a guess too long: over a
    program that has no room XLA may take long, as it looks for what could be computed again.
    """
    while len(sizes) < TRIES:
        fits = [length for length, size in sizes.items() if size <= room]
        if not fits or max(fits) >= most or sizes[max(fits)] >= ENOUGH * room:
            return
        low, high = (
            max(fits),
            min((length for length, size in sizes.items() if size > room), default=most + 1),
        )
        guess = min(rounded(low * (GOAL * room / max(sizes[low], 1)) ** (1 / power)), most)
        guess = guess if guess < high else rounded((low + high) / 2)
        if guess <= low:
            return
        yield guess


class Train:
    """An optimizer step on one row of T tokens, in the process that holds the devices.

    The row is "own" or "jaxpar", what is recomputed, and attention's form: "dense", "loop" (over blocks) or "kernel".
    "ring" recomputes all, and has N devices share the tokens, in zigzag order, "ring_split" weights and optimizer, too.
    """

    def __init__(self, request: dict):
        """Compiles nothing yet."""
        import jax
        from lm_models import lm_config

        from jaxpar.lm import Trainer
        from jaxpar.mesh import MeshSpec, make_mesh, rules_from

        _, kind, impl = request["row"].split()
        self.request, shape = request, request["model"] | {"dtype": request["dtype"]}
        ring = kind.startswith("ring")
        how = (
            dict(remat="full", context="ring", context_order="zigzag") if ring else dict(remat=kind)
        )
        self.rules = rules_from({"embed": "context"} if kind == "ring_split" else {})
        count = request["devices"]
        self.mesh = make_mesh(MeshSpec(context=count), jax.devices()[:count])
        self.config = lm_config(**shape, **how, attention=IMPLS[impl], tied=True, loss_chunk=8192)
        self.trainer = Trainer(self.config, num_steps=10_000)
        memory = (jax.devices()[0].memory_stats() or {}).get(
            "bytes_limit", request.get("memory", math.inf)
        )
        self.memory, self.programs = memory, {}

    def warm(self) -> dict:
        """Returns the bytes that there are."""
        return {"memory": self.memory}

    def answer(self, request: dict) -> dict:
        """Answers `do`: "plan" (bytes of a program), "time" or "begin" it, each of so many tokens."""
        return {"plan": self.plan, "time": self.time, "begin": self.begin}[request["do"]](
            request["length"]
        )

    def flops(self, length: int) -> float:
        """Returns the operations of a step on so many tokens."""
        from jaxpar.lm import flops_per_token

        return flops_per_token(self.config, length, causal=True) * length

    def program(self, length: int):
        """Returns the compiled step, which takes the state's place."""
        import jax

        if length not in self.programs:
            from jaxpar.mesh import named_shardings, use_mesh

            key = jax.random.key(0)
            with use_mesh(self.mesh, self.rules):
                state = jax.eval_shape(self.trainer.init, key)
                layout = named_shardings(state, self.trainer.axes())
                state = jax.tree.map(
                    lambda x, at: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=at), state, layout
                )
                program = jax.jit(self.trainer.step, donate_argnums=1, out_shardings=(layout, None))
                lowered = program.lower(key, state, self.batch(length))
            # Only what is timed is tuned: trials of products of so many tokens would take longer than the compiler.
            tuned = length == self.request["at"] or jax.default_backend() != "gpu"
            self.programs[length] = lowered.compile(
                None if tuned else {"xla_gpu_autotune_level": 0}
            )
        return self.programs[length]

    def batch(self, length: int) -> dict:
        """Returns a row of random tokens as the devices hold it."""
        import jax
        import numpy as np

        from jaxpar.mesh import place_rows, use_mesh
        from jaxpar.nn.attention.context import in_order

        rows = np.random.default_rng(0).integers(
            0, self.config.vocab_size, (1, length + 1), np.int32
        )
        batch = in_order(
            {"tokens": rows[:, :-1], "targets": rows[:, 1:]},
            self.config.order(length),
            self.mesh.size,
        )
        with use_mesh(self.mesh, self.rules):
            return place_rows(
                lambda part: jax.tree.map(lambda x: x[part], batch), 1, ("batch", "seq_layer")
            )

    def plan(self, length: int) -> dict:
        """Returns the bytes of arguments, and of temporary arrays and results that take no argument's place.

        They are infinite where the compiler says that it has no room.
        """
        import jax

        begin = time.perf_counter()
        try:
            stats = self.program(length).memory_analysis()
        except jax.errors.JaxRuntimeError as error:
            if "RESOURCE_EXHAUSTED" not in str(error):
                raise
            return {"fixed": 0, "bytes": math.inf, "compile_s": time.perf_counter() - begin}
        new = stats.output_size_in_bytes - stats.alias_size_in_bytes + stats.temp_size_in_bytes
        return {
            "fixed": stats.argument_size_in_bytes,
            "bytes": new,
            "compile_s": time.perf_counter() - begin,
        }

    def step(self, length: int) -> Callable[[], object]:
        """Returns a function that begins a step on so many tokens and returns its loss."""
        import jax

        from jaxpar.mesh import named_shardings, use_mesh

        program, key, batch = self.program(length), jax.random.key(0), self.batch(length)
        with use_mesh(self.mesh, self.rules):
            layout = named_shardings(jax.eval_shape(self.trainer.init, key), self.trainer.axes())
            state = jax.jit(self.trainer.init, out_shardings=layout)(key)

        def step():
            nonlocal state
            state, info = program(key, state, batch)
            return info["loss"]

        return step

    def time(self, length: int) -> dict:
        """Returns the median and the least time of steps on so many tokens, and the operations of one."""
        import jax

        step, taken = self.step(length), []

        def seconds(count: int) -> float:
            begin = time.perf_counter()
            losses = [step() for _ in range(count)]
            if not all(bool(loss < math.inf) for loss in jax.block_until_ready(losses)):
                raise ValueError(NOT_FINITE)
            taken.append((time.perf_counter() - begin) / count)
            return taken[-1]

        said = harness.medians(seconds, self.request["spend_s"])
        return said | {"least_ms": 1e3 * min(taken), "flops": self.flops(length)}

    def begin(self, length: int) -> dict:
        """Begins a step, and waits a while: whether it found no room, or ended, or goes on after `BEGUN_S`.

        A thread waits for it: the queue of a device holds fewer kernels than a step has, so that whoever asks for a
        step is held until most of it is done.
        """
        import jax

        ended: queue.Queue = queue.Queue()

        def whole() -> None:
            begin = time.perf_counter()
            try:
                loss = float(self.step(length)())
                ended.put(
                    {"ran_s": time.perf_counter() - begin}
                    if loss < math.inf
                    else ValueError(NOT_FINITE)
                )
            except Exception as error:
                ended.put(error)

        threading.Thread(target=whole, daemon=True).start()
        try:
            said = ended.get(timeout=BEGUN_S)
        except queue.Empty:
            return {"began": True}
        if isinstance(said, jax.errors.JaxRuntimeError) and "RESOURCE_EXHAUSTED" in str(said):
            return {"no_room": True}
        if isinstance(said, Exception):
            raise said
        return said


class _EndedError(Exception):
    """A question had no answer."""


def trained(bench: harness.Bench, row: dict, say: Callable[[str], None] = harness.say) -> dict:
    """Measures a row by a process of its own, within `row_s` of it; returns what was found by then.

    Says each program's bytes when they are known: of `at` tokens, whose step is timed, then of lengths that come near
    to what fits, the longest of which is begun. A dense form, which has no room for so many, begins with `first`.
    """
    end, sizes, found = time.monotonic() + row["row_s"], {}, {"compile_s": 0.0, "note": ""}

    def ask(do: str, **more) -> dict:
        left = end - time.monotonic()
        answer = (
            {"failed": "its time is spent"}
            if left < 1
            else bench.ask(row["side"], row | {"do": do, **more}, left)
        )
        if "failed" in answer:
            raise _EndedError(answer["failed"])
        return answer

    def plan(length: int) -> None:
        nonlocal room
        said = ask("plan", length=length)
        sizes[length], found["compile_s"] = said["bytes"], found["compile_s"] + said["compile_s"]
        room = MOST_OF_MEMORY * memory - said["fixed"] if said["fixed"] else room
        total = (said["fixed"] + said["bytes"]) / 2**30
        say(
            f"  {row['row']}: T {length:,} needs {total:.4g} GiB, compiled in {said['compile_s']:.1f} s"
        )
        if said["bytes"] <= room:
            found["longest"] = max(length, found.get("longest", 0))
        if length == row["at"] and said["bytes"] <= room:
            found.update(ask("time", length=length), peak_bytes=said["fixed"] + said["bytes"])
            say(f"  {row['row']}: T {length:,} takes {found['ms']:.1f} ms")

    try:
        memory = ask("make")["memory"]
        room, notes = MOST_OF_MEMORY * memory, [f"of {memory / 2**30:.3g} GiB"]
        found["note"] = notes[0]
        dense = row["row"].endswith("dense")
        plan(row["first"] if dense else row["at"])
        for length in guesses(sizes, room, row["most"], 2 if dense else 1):
            plan(length)
        while found.get("longest"):
            length, said = found["longest"], ask("begin", length=found["longest"])
            if "no_room" not in said:
                notes.append(
                    f"ran in {said['ran_s']:.1f} s" if "ran_s" in said else "begun, not awaited"
                )
                break
            notes.append(f"{length:,} planned, had no room")
            del found["longest"]
            plan(rounded(length * 15 / 16))
        found.setdefault("longest", 0)
        found["note"] = "; ".join(notes)
    except _EndedError as error:
        found = {"failed": str(error)} if not sizes else found
        found["note"] = f"not begun, the search had not ended: {error}"
    bench.close(
        row["side"]
    )  # it wants all memory there is, of which pools of frameworks give nothing back
    return row | found
