"""How many generations a second, exclusive or, beside neat-python and TensorNEAT?

    python bench/neat.py --tensorneat FOLDER                     # CPU; FOLDER is a checkout of TensorNEAT
    python bench/neat.py --population 10000 --sides fast,canonical --generations 200     # a GPU, if JAX finds one
    python bench/neat.py --population 100000 --sides fast --devices 1,4         # the population on 1 and 4 of them

All sides live in this process and take turns, round after round; each goes on from the generation that it reached, and
no search ends early. Ours is a program of `--generations` generations, and so is TensorNEAT's, which is GPL-3: run it,
borrow nothing. neat-python, if installed, runs its own loop, with its usual rates of this task. All judge the same
four rows. Compiling is apart, without a cache. Prints a line of JSON a side: the median over rounds, and their range;
and seconds of processors beside those of the clock, for machines that are not idle.
"""

import argparse
import contextlib
import importlib.util
import json
import os
import pathlib
import statistics
import sys
import tempfile
import time
import warnings
from collections.abc import Callable
from typing import Any, NamedTuple

HERE = pathlib.Path(__file__).resolve().parent
sys.path[0] = str(HERE.parent)  # in place of this folder, whose neat.py is not neat-python

import jax  # noqa: E402
import numpy as np  # noqa: E402

from jaxpar.loop import run_until  # noqa: E402
from jaxpar.mesh import MeshSpec, make_mesh, use_mesh  # noqa: E402
from jaxpar.neat import Neat, NeatConfig, Table, xor  # noqa: E402

SIDES = ("fast", "canonical", "neat-python", "tensorneat")
SIZES = dict(
    population=1000, nodes=50, conns=100, species=20,
    generations=50, peer_generations=10, rounds=5, seed=0,
)  # fmt: skip
"""Flags, and their defaults."""


class Built(NamedTuple):
    """Seconds of tracing and of compiling, and of processors for both."""

    trace_s: float = 0.0
    compile_s: float = 0.0
    build_cpu_s: float = 0.0


class Side(NamedTuple):
    """One contestant: what it took to build, and how to go on."""

    built: Built
    advance: Callable[[], int]  # generations made
    told: Callable[[], dict[str, Any]]


def compiled(program: Callable[..., Any], *args: Any) -> tuple[Callable[..., Any], Built]:
    """The program, and what it took to build."""
    began, busy = time.perf_counter(), time.process_time()
    lowered = jax.jit(program).lower(*args)
    traced = time.perf_counter()
    ready = lowered.compile()
    return ready, Built(
        trace_s=traced - began,
        compile_s=time.perf_counter() - traced,
        build_cpu_s=time.process_time() - busy,
    )


def our_run(args: argparse.Namespace, mode: str) -> tuple[Callable[..., Any], tuple[Any, Any]]:
    """The program of ours, and what it is given: a key, and the first generation."""
    config = NeatConfig(
        num_inputs=3,
        num_outputs=1,
        population=args.population,
        max_nodes=args.nodes,
        max_conns=args.conns,
        max_species=args.species,
        mode=mode,
    )
    neat = Neat(config, Table(tolerance=0.0))
    data = xor()
    count = args.generations
    first = jax.jit(neat.init)(jax.random.key(args.seed), None)
    return lambda key, state: run_until(neat, key, state, data, count)[0], (
        jax.random.key(args.seed + 1),
        first,
    )


def ours(args: argparse.Namespace, mode: str, devices: int) -> Side:
    """`jaxpar.neat`, many generations a program, the population split over so many devices; 0 is no mesh."""
    count = args.generations
    mesh = (
        use_mesh(make_mesh(MeshSpec(data=devices), jax.devices()[:devices]))
        if devices
        else contextlib.nullcontext()
    )
    with mesh:
        whole, (key, first) = our_run(args, mode)
        now = [first]
        program, built = compiled(whole, key, first)

    def advance() -> int:
        now[0] = jax.block_until_ready(
            program(jax.random.fold_in(key, int(now[0].generation)), now[0])
        )
        return count

    def told() -> dict[str, Any]:
        genomes = now[0].genomes
        return {"species": int(now[0].species.alive.sum()), "nodes": float(genomes.node_on.sum(1).mean()),
                "conns": float(genomes.on.sum(1).mean())}  # fmt: skip

    return Side(built=built, advance=advance, told=told)


def tensorneat_run(args: argparse.Namespace) -> tuple[Callable[..., Any], Any, Any]:
    """The program of TensorNEAT, from the checkout that the flag names, what it is given, and its algorithm."""
    sys.path.append(str(pathlib.Path(args.tensorneat) / "src"))
    from tensorneat import algorithm, common, genome
    from tensorneat.pipeline import Pipeline
    from tensorneat.problem.func_fit.func_fit import FuncFit

    rows, targets = (np.asarray(xor()[name], np.float32) for name in ("inputs", "targets"))

    class Xor(FuncFit):
        inputs, targets = property(lambda self: rows), property(lambda self: targets)
        input_shape, output_shape = (
            property(lambda self: rows.shape),
            property(lambda self: targets.shape),
        )

    form = genome.DefaultGenome(num_inputs=3, num_outputs=1, max_nodes=args.nodes, max_conns=args.conns,
                                output_transform=common.ACT.sigmoid)  # fmt: skip
    search = algorithm.NEAT(pop_size=args.population, species_size=args.species, genome=form)
    pipeline = Pipeline(search, Xor(), seed=args.seed)
    count = args.peer_generations

    def whole(state):
        return jax.lax.fori_loop(0, count, lambda _, state: pipeline.step(state)[0], state)

    return whole, pipeline.setup(), search


def tensorneat(args: argparse.Namespace) -> Side:
    """TensorNEAT, with its own defaults besides the sizes."""
    whole, first, search = tensorneat_run(args)
    now, count = [first], args.peer_generations
    program, built = compiled(whole, first)

    def advance() -> int:
        now[0] = jax.block_until_ready(program(now[0]))
        return count

    def told() -> dict[str, Any]:
        nodes, conns = search.ask(now[0])
        return {"species": int((~np.isnan(np.asarray(now[0].species.species_keys))).sum()),
                "nodes": float((~np.isnan(np.asarray(nodes[..., 0]))).sum(1).mean()),
                "conns": float((~np.isnan(np.asarray(conns[..., 0]))).sum(1).mean())}  # fmt: skip

    return Side(built=built, advance=advance, told=told)


def neat_python(args: argparse.Namespace) -> Side:
    """neat-python, as installed, judging by its own networks."""
    import neat

    rows = [
        (tuple(map(float, x)), float(y[0]))
        for x, y in zip(*(xor()[k] for k in ("inputs", "targets")), strict=True)
    ]

    def judge(genomes, config):
        for _, one in genomes:
            network = neat.nn.FeedForwardNetwork.create(one, config)
            one.fitness = (4 - sum(abs(network.activate(x)[0] - y) for x, y in rows)) ** 2

    with tempfile.TemporaryDirectory() as folder:
        path = os.path.join(folder, "config")
        pathlib.Path(path).write_text(
            (HERE / "peers" / "neat_python_xor.ini").read_text().format(**vars(args))
        )
        config = neat.Config(
            neat.DefaultGenome,
            neat.DefaultReproduction,
            neat.DefaultSpeciesSet,
            neat.DefaultStagnation,
            path,
        )
        population = neat.Population(config)

    def advance() -> int:
        population.run(judge, args.peer_generations)
        return args.peer_generations

    def told() -> dict[str, Any]:
        sizes = np.array([one.size() for one in population.population.values()], float).mean(0)
        return {
            "species": len(population.species.species),
            "nodes": sizes[0] + 3,
            "conns": sizes[1],
        }

    return Side(built=Built(), advance=advance, told=told)


def main() -> None:
    """Measures what the flags ask for."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    for name, value in SIZES.items():
        parser.add_argument(f"--{name.replace('_', '-')}", type=int, default=value)
    parser.add_argument("--tensorneat", default="", help="a checkout of TensorNEAT")
    parser.add_argument(
        "--sides", default="", help=f"of {','.join(SIDES)}; by default all that are there"
    )
    numbers = lambda text: [int(x) for x in text.split(",")]  # noqa: E731
    parser.add_argument(
        "--devices", type=numbers, default=[0], help="of ours, such as 1,4; by default no mesh"
    )
    args = parser.parse_args()
    there = [*SIDES[:2], *(["neat-python"] if importlib.util.find_spec("neat") else []),
             *(["tensorneat"] if args.tensorneat else [])]  # fmt: skip
    chosen = args.sides.split(",") if args.sides else there
    if unknown := set(chosen) - set(there):
        raise SystemExit(
            f"--sides: {', '.join(sorted(unknown))} is not there; there are {', '.join(there)}."
        )
    jax.config.update("jax_enable_compilation_cache", False)
    warnings.simplefilter("ignore")
    makers = {"neat-python": neat_python, "tensorneat": tensorneat}
    sides = {}
    for name in chosen:
        if name in makers:
            sides[name] = makers[name](args)
        else:
            sides |= {f"{name} on {n}" if n else name: ours(args, name, n) for n in args.devices}
    speeds: dict[str, list[float]] = {name: [] for name in sides}
    busy: dict[str, list[float]] = {name: [] for name in sides}
    for turn in range(args.rounds + 1):  # the first is a warm-up
        for name, side in sides.items():
            began, cpu = time.perf_counter(), time.process_time()
            count = side.advance()
            if turn:
                speeds[name].append(count / (time.perf_counter() - began))
                busy[name].append(1e3 * (time.process_time() - cpu) / count)
    device = jax.devices()[0].device_kind
    print(
        json.dumps(
            {
                "device": device,
                "cores": os.cpu_count(),
                "load": os.getloadavg()[0],
                "jax": jax.__version__,
            }
        )
    )
    for name, side in sides.items():
        speed = statistics.median(speeds[name])
        row = {"side": name, "generations_per_s": speed, "slowest": min(speeds[name])}
        row |= {"fastest": max(speeds[name]), "cpu_ms_a_generation": statistics.median(busy[name])}
        row |= side.built._asdict()
        print(
            json.dumps(
                {
                    k: round(v, 4) if isinstance(v, float) else v
                    for k, v in (row | side.told()).items()
                }
            )
        )


if __name__ == "__main__":
    main()
