"""How many generations a second, exclusive or, beside neat-python?

    python bench/neat.py --population 1000                       # CPU: the bar is 10 times TensorNEAT's 1.37
    python bench/neat.py --population 10000 --mode canonical     # a GPU, if JAX finds one
    python bench/neat.py --population 1000 --neat-python FOLDER  # a folder with the package `neat`

Ours are `--generations` generations as one program, the least of `--repeats` timings after a warm-up, compilation
apart; the search never ends early. neat-python runs its own loop, with its usual rates of this task. Prints a line of
JSON a row.
"""

import argparse
import json
import os
import pathlib
import sys
import tempfile
import time
import warnings

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[1]))

_PEER = """
[NEAT]
fitness_criterion = max
fitness_threshold = 100
no_fitness_termination = True
pop_size = {population}
reset_on_extinction = False
[DefaultGenome]
activation_default = sigmoid
activation_mutate_rate = 0.0
activation_options = sigmoid
aggregation_default = sum
aggregation_mutate_rate = 0.0
aggregation_options = sum
bias_init_mean = 0.0
bias_init_stdev = 1.0
bias_init_type = gaussian
bias_max_value = 30.0
bias_min_value = -30.0
bias_mutate_power = 0.5
bias_mutate_rate = 0.7
bias_replace_rate = 0.1
compatibility_disjoint_coefficient = 1.0
compatibility_weight_coefficient = 0.5
conn_add_prob = 0.5
conn_delete_prob = 0.5
enabled_default = True
enabled_mutate_rate = 0.01
enabled_rate_to_true_add = 0.0
enabled_rate_to_false_add = 0.0
feed_forward = True
initial_connection = full
node_add_prob = 0.2
node_delete_prob = 0.2
num_hidden = 0
num_inputs = 3
num_outputs = 1
response_init_mean = 1.0
response_init_stdev = 0.0
response_init_type = gaussian
response_max_value = 30.0
response_min_value = -30.0
response_mutate_power = 0.0
response_mutate_rate = 0.0
response_replace_rate = 0.0
single_structural_mutation = False
structural_mutation_surer = default
weight_init_mean = 0.0
weight_init_stdev = 1.0
weight_init_type = gaussian
weight_max_value = 30
weight_min_value = -30
weight_mutate_power = 0.5
weight_mutate_rate = 0.8
weight_replace_rate = 0.1
[DefaultSpeciesSet]
compatibility_threshold = 3.0
[DefaultStagnation]
species_fitness_func = max
max_stagnation = 20
species_elitism = 2
[DefaultReproduction]
elitism = 2
survival_threshold = 0.2
min_species_size = 2
"""


def ours(args: argparse.Namespace) -> dict:
    """One row: seconds to trace and compile, generations a second."""
    import jax

    from jaxpar.loop import run_until
    from jaxpar.neat import Neat, NeatConfig, Table, xor

    config = NeatConfig(3, 1, args.population, args.nodes, args.conns, args.species, args.mode)
    neat, data = Neat(config, Table(tolerance=0.0)), xor()
    state = jax.jit(neat.init)(jax.random.key(args.seed), None)
    program = jax.jit(lambda key, state: run_until(neat, key, state, data, args.generations)[0])
    began = time.perf_counter()
    lowered = program.lower(jax.random.key(1), state)
    traced = time.perf_counter()
    compiled = lowered.compile()
    row = {"what": f"jaxpar {args.mode}", "trace_s": traced - began, "compile_s": time.perf_counter() - traced}
    last = jax.block_until_ready(compiled(jax.random.key(1), state))
    walls, busy = [], []
    for _ in range(args.repeats):
        wall, cpu = time.perf_counter(), time.process_time()
        jax.block_until_ready(compiled(jax.random.key(1), state))
        walls.append(time.perf_counter() - wall)
        busy.append(time.process_time() - cpu)
    return row | {
        "device": jax.devices()[0].device_kind,
        "generations_per_s": args.generations / min(walls),
        "ms_a_generation": 1e3 * min(walls) / args.generations,
        "cpu_s_a_generation": min(busy) / args.generations,
        "species": int(last.species.alive.sum()),
        "nodes": float(last.genomes.node_on.sum(1).mean()),
    }


def peer(args: argparse.Namespace) -> dict:
    """neat-python's row, from the folder that the flag names."""
    sys.path.insert(0, args.neat_python)
    warnings.simplefilter("ignore")
    import neat

    rows = [((a, b, 1.0), float(a != b)) for a in (0.0, 1.0) for b in (0.0, 1.0)]

    def judge(genomes, config):
        for _, genome in genomes:
            network = neat.nn.FeedForwardNetwork.create(genome, config)
            genome.fitness = (4 - sum(abs(network.activate(x)[0] - y) for x, y in rows)) ** 2

    with tempfile.TemporaryDirectory() as folder:
        path = os.path.join(folder, "config")
        pathlib.Path(path).write_text(_PEER.format(population=args.population))
        parts = neat.DefaultGenome, neat.DefaultReproduction, neat.DefaultSpeciesSet, neat.DefaultStagnation
        population = neat.Population(neat.Config(*parts, path))
    count = max(3, args.generations // 10)
    wall, cpu = time.perf_counter(), time.process_time()
    population.run(judge, count)
    seconds = time.perf_counter() - wall
    return {
        "what": f"neat-python {neat.__version__}" if hasattr(neat, "__version__") else "neat-python",
        "generations_per_s": count / seconds,
        "cpu_s_a_generation": (time.process_time() - cpu) / count,
        "species": len(population.species.species),
    }


def main() -> None:
    """Measures what the flags ask for."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    sizes = dict(population=1000, nodes=50, conns=100, species=20, generations=50, repeats=5, seed=0)
    for name, value in sizes.items():
        parser.add_argument(f"--{name}", type=int, default=value)
    parser.add_argument("--mode", choices=("fast", "canonical"), default="fast")
    parser.add_argument("--neat-python", default="", help="a folder with the package `neat`")
    args = parser.parse_args()
    for measure in (ours, *([peer] if args.neat_python else [])):
        row = measure(args)
        print(json.dumps({k: round(v, 4) if isinstance(v, float) else v for k, v in row.items()}), flush=True)


if __name__ == "__main__":
    main()
