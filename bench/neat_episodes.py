"""How many useful environment steps a second does evolution make, beside TensorNEAT?

    python bench/neat_episodes.py --tensorneat FOLDER          # CartPole; FOLDER is a checkout of TensorNEAT
    python bench/neat_episodes.py --tensorneat FOLDER --env DoublePole --population 10000 --generations 10

Both sides evolve from the start, generation by generation, on the same environment code, with as many episodes a
network; a step is useful if it belongs to an episode (its return says so where every step earns 1). Time is of whole
generations, breeding included; the first, which warms up, is left out, and compiling is apart. TensorNEAT is GPL-3: run
it, borrow nothing. Prints a line of JSON a side.
"""

import argparse
import json
import os
import pathlib
import sys
import time
import types
import warnings

HERE = pathlib.Path(__file__).resolve().parent
sys.path[0] = str(HERE.parent)

import jax  # noqa: E402
import numpy as np  # noqa: E402

import envs  # noqa: E402
from jaxpar.env import adapt, reset, step  # noqa: E402
from jaxpar.neat import Episodes, Neat, NeatConfig, io_sizes  # noqa: E402
from jaxpar.neat.episodes import act  # noqa: E402


def made(name: str):
    """The environment, its parameters, and how many numbers a network sees and gives."""
    import gymnax

    if name in gymnax.registered_envs:
        env, params = gymnax.make(name)
        env = adapt(env, params)
    else:
        env, params = envs.make(name)
    return env, params, io_sizes(env, params, False)


def ours(args, env, params, ends):
    """Our generations: a call that makes one and gives its mean return, after compiling."""
    num_inputs, num_outputs = ends
    config = NeatConfig(
        num_inputs=num_inputs,
        num_outputs=num_outputs,
        population=args.population,
        max_nodes=args.nodes,
        max_conns=args.conns,
        max_species=args.species,
        mode=args.mode,
    )
    episodes = Episodes(
        env=env,
        goal=float("inf"),
        episodes=args.episodes,
        num_envs=args.num_envs,
        max_steps=args.steps,
        constant=False,
    )
    neat = Neat(config, episodes)
    state = jax.jit(neat.init)(jax.random.key(args.seed), None)
    program = jax.jit(neat.step).lower(jax.random.key(0), state, params).compile()

    def generation(number, state):
        state, info = program(
            jax.random.fold_in(jax.random.key(args.seed + 1), number), state, params
        )
        return state, info["fitness_mean"]

    return generation, state


def tensorneat(args, env, params, ends):
    """TensorNEAT's, on the same environment, with its own defaults besides the sizes."""
    for name in ("brax", "brax.envs", "brax.io", "brax.io.image", "imageio", "mujoco_playground"):
        sys.modules.setdefault(name, types.ModuleType(name))
    sys.path.append(str(pathlib.Path(args.tensorneat) / "src"))
    from tensorneat import algorithm, common, genome
    from tensorneat.pipeline import Pipeline
    from tensorneat.problem.rl.rl_jit import RLEnv

    space = env.action_space(params)

    class Problem(RLEnv):
        input_shape, output_shape = property(lambda self: ends[:1]), property(lambda self: ends[1:])

        def env_reset(self, key):
            return reset(key, env, params)

        def env_step(self, key, state, y):
            after = step(key, env, state, act(space, y), params)
            return after.obs, after.state, after.reward, after.terminated | after.truncated, {}

    form = genome.DefaultGenome(num_inputs=ends[0], num_outputs=ends[1], max_nodes=args.nodes, max_conns=args.conns,
                                output_transform=common.ACT.sigmoid)  # fmt: skip
    search = algorithm.NEAT(pop_size=args.population, species_size=args.species, genome=form)
    pipeline = Pipeline(
        search, Problem(max_step=args.steps, repeat_times=args.episodes), seed=args.seed
    )
    state = pipeline.setup()
    program = jax.jit(pipeline.step).lower(state).compile()

    def generation(number, state):
        state, _, fitness = program(state)
        return state, fitness.mean()

    return generation, state


def main() -> None:
    """Measures what the flags ask for."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    sizes = dict(
        population=1000,
        episodes=5,
        steps=500,
        generations=15,
        nodes=50,
        conns=100,
        species=20,
        num_envs=0,
        seed=0,
    )
    for name, value in sizes.items():
        parser.add_argument(f"--{name.replace('_', '-')}", type=int, default=value)
    parser.add_argument("--env", default="CartPole-v1", help="where every step earns 1")
    parser.add_argument("--mode", default="fast")
    parser.add_argument("--tensorneat", default="", help="a checkout of TensorNEAT")
    args = parser.parse_args()
    warnings.simplefilter("ignore")
    env, params, ends = made(args.env)
    print(
        json.dumps(
            {
                "device": jax.devices()[0].device_kind,
                "load": os.getloadavg()[0],
                "jax": jax.__version__,
            }
        )
    )
    for name, make in (
        {args.mode: ours} | ({"tensorneat": tensorneat} if args.tensorneat else {})
    ).items():
        began = time.perf_counter()
        generation, state = make(args, env, params, ends)
        built, means, seconds = time.perf_counter() - began, [], []
        for number in range(args.generations):
            began = time.perf_counter()
            state, mean = jax.block_until_ready(generation(number, state))
            seconds.append(time.perf_counter() - began)
            means.append(float(mean))
        useful = args.population * args.episodes * np.array(means[1:])
        row = {"side": name, "env": args.env, "population": args.population, "build_s": built,
               "useful_steps_per_s": useful.sum() / sum(seconds[1:]), "last_per_s": useful[-1] / seconds[-1],
               "ms_a_generation": 1e3 * np.median(seconds[1:]), "mean_return": means[-1]}  # fmt: skip
        print(
            json.dumps({k: round(v, 3) if isinstance(v, float) else v for k, v in row.items()}),
            flush=True,
        )


if __name__ == "__main__":
    main()
