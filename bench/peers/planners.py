"""Other people's planners behind one face: `plan(seed) -> (simulations, tree steps or None)`, `episode(seed, steps)`.

`PomdpPy` is the package pomdp-py. `OfficialVopp` is the code published with VOPP, from a folder; its licence is not
stated, so nothing of it is here. At its newest commit the leaf value of multi-agent RockSample is given the actions of
simulations that have ended, too, and stops with a shape error: `_heuristics` drops those, and nothing else is changed.
"""

import argparse
import builtins
import contextlib
import copy
import importlib
import os
import pathlib
import random
import sys
from typing import Any

import numpy as np


class PomdpPy:
    """pomdp-py's POMCP on its own RockSample, with our map; moves off the map and idle samples cost nothing there."""

    compile_s = 0.0

    def __init__(self, env: Any, simulations: int, depth: int, exploration: float, particles: int):
        import pomdp_py
        from pomdp_py.problems.rocksample import rocksample_problem as problem

        self.package, self.problem, self.env, self.simulations = pomdp_py, problem, env, simulations
        self.options = dict(
            max_depth=depth, discount_factor=0.95, num_sims=simulations, exploration_const=exploration,
            num_visits_init=0,
        )  # fmt: skip
        self.particles = particles

    def _instance(self, good: list[bool]) -> tuple[Any, Any]:
        kind, start = self.problem.RockType, (0, self.env.size // 2)
        states = [
            self.problem.State(
                start, tuple(kind.random() for _ in range(self.env.num_rocks)), False
            )
            for _ in range(self.particles)
        ]
        truth = self.problem.State(start, tuple(kind.GOOD if g else kind.BAD for g in good), False)
        rocks = {tuple(place): i for i, place in enumerate(self.env.map.tolist())}
        made = self.problem.RockSampleProblem(
            self.env.size, self.env.num_rocks, truth, rocks, self.package.Particles(states)
        )
        return made, self.package.POMCP(rollout_policy=made.agent.policy_model, **self.options)

    def plan(self, seed: int) -> tuple[int, int | None]:
        """One plan from the start belief."""
        random.seed(seed)
        made, planner = self._instance([True] * self.env.num_rocks)
        planner.plan(made.agent)
        return planner.last_num_sims, None

    def episode(self, good: list[bool], seed: int, num_steps: int) -> float:
        """The discounted return of one episode; it ends where no particle is left."""
        random.seed(seed)
        made, planner = self._instance(good)
        total, weight = 0.0, 1.0
        for _ in range(num_steps):
            action = planner.plan(made.agent)
            total += weight * made.env.state_transition(action, execute=True)
            weight *= 0.95
            if made.in_exit_area(made.env.state.position):
                break
            seen = made.env.provide_observation(made.agent.observation_model, action)
            made.agent.update_history(action, seen)
            try:
                planner.update(made.agent, action, seen)
            except ValueError:  # its word for depletion
                break
        return total


class OfficialVopp:
    """The published VOPP on its own MARS or Navigation, with our map.

    Args:
        path: Folder of its checkout.
        env: Ours, for the map.
        options: num_simulations (parallel), depth, eta, alpha, particles.
        simulations: Of a plan, in all; 0 plans by the clock.
        budget_s: Seconds of a plan, if by the clock.
    """

    compile_s = 0.0

    def __init__(
        self,
        path: pathlib.Path,
        env: Any,
        options: dict[str, Any],
        simulations: int,
        budget_s: float,
    ):
        sys.path.insert(0, str(path))
        import torch

        self.torch, self.env = torch, env
        is_mars = hasattr(env, "num_rocks")
        problem = "ma_rocksample" if is_mars else "unc_navigation"
        self.args = argparse.Namespace(
            discount_factor=0.983, headless=True, seed=0, device="cuda" if torch.cuda.is_available() else "cpu",
            num_rocks=getattr(env, "num_rocks", 0), map_size=env.size, num_envs=options["num_simulations"],
            max_sampled_episodes=simulations, planning_time_per_step=budget_s or 1e9,
            max_search_depth=options["depth"], eta=options["eta"], alpha_t=options["alpha"], beta_t=1.0,
            num_belief_particles=options["particles"],
        )  # fmt: skip
        with contextlib.redirect_stdout(None):
            (self.kind,) = importlib.import_module(
                f"pomdp_problems.{problem}"
            ).REGISTERED_MODELS.values()
            self.Pomdp, self.Vopp = (
                importlib.import_module("pomdp").POMDP,
                importlib.import_module("vopp").VOPP,
            )
        self.steps, self.sims = 0, 0
        builtins.input = _refuse  # it asks its user what to do when no particle is left

    def _made(self, seed: int) -> tuple[Any, Any]:
        """The world and the planner, on our map."""
        self.args.seed = seed
        device, torch = self.args.device, self.torch
        world = self.kind(args_cli=self.args, num_envs=self.args.num_envs, role="exec")
        if hasattr(self.env, "num_rocks"):
            world.rock_positions = torch.as_tensor(self.env.map.astype(np.int64), device=device)
            world.start_poses = torch.as_tensor(self.env.starts.astype(np.int64), device=device)
        else:
            grid = self.env.known.astype(np.int32)
            grid[self.env.goal] = 2
            world.known_map = torch.as_tensor(grid, device=device)
        mine = self.kind(
            args_cli=copy.deepcopy(self.args),
            num_envs=self.args.num_envs,
            role="planning",
            exec_env=world,
        )
        model = self.Pomdp(mine, self.args.num_belief_particles, self.args.num_envs, device)
        planner = self.Vopp(self.args, model)
        self._watch(model)
        planner.reset()
        return world, planner

    def _watch(self, model: Any) -> None:
        """Counts steps and simulations, and drops the actions of ended simulations before the leaf value."""
        step, heuristics, draw, ended = model.step, model.heuristics, model.sample_belief, [None]

        def counted(state: Any, action: Any, *args: Any, **kinds: Any) -> Any:
            out = step(state, action, *args, **kinds)
            if not kinds.get("belief_update"):
                self.steps += state.shape[0]
                ended[0] = out["terminal"].view(-1)
            return out

        def _heuristics(state: Any, action: Any, **kinds: Any) -> Any:
            if action.shape[0] != state.shape[0]:
                action = action[~ended[0]]
            return heuristics(state, action, **kinds)

        def drawn(**kinds: Any) -> Any:
            states = draw(**kinds)
            self.sims += states.shape[0] if kinds.get("learned") else 0
            return states

        model.step, model.heuristics, model.sample_belief = counted, _heuristics, drawn

    def _planned(self, planner: Any) -> Any:
        with (
            self.torch.no_grad(),
            open(os.devnull, "w") as nowhere,
            contextlib.redirect_stdout(nowhere),
        ):
            action, _ = planner.plan()
            if self.args.device == "cuda":
                self.torch.cuda.synchronize()
        return action

    def plan(self, seed: int) -> tuple[int, int | None]:
        """One plan from the start belief; making the particles is not timed after the first."""
        if not hasattr(self, "_ready"):
            self._ready = self._made(seed)[1]
        self.steps = self.sims = 0
        self._planned(self._ready)
        return self.sims, self.steps

    def episode(self, start: Any, seed: int, num_steps: int) -> float:
        """The discounted return, from discount^0, of one episode from our first state."""
        torch, device = self.torch, self.args.device
        with torch.no_grad():
            world, planner = self._made(seed)
            state = world.sample_initial_belief(1)
            if hasattr(self.env, "num_rocks"):
                words = np.asarray(start.good)
                rocks = [int(words[i // 32] >> (i % 32) & 1) for i in range(self.env.num_rocks)]
                state[0, 4 : 4 + len(rocks)] = torch.as_tensor(rocks, device=device)
            else:
                grid = (np.asarray(start.blocked)[:, None] >> np.arange(self.env.size) & 1).astype(
                    np.int32
                )
                grid[self.env.goal] = 2
                whole = state.view(1, 13, 15)
                whole[0, :, :13] = torch.as_tensor(grid, device=device)
                whole[0, 0, 13], whole[0, 0, 14] = (int(c) for c in np.asarray(start.place))
            total, weight = 0.0, 1.0
            for _ in range(num_steps):
                action = self._planned(planner)
                out = world.sample(state, action)
                state = out["next_state"]
                total, weight = total + weight * float(out["reward"].view(-1)[0]), weight * 0.983
                if bool(out["terminal"].view(-1)[0]):
                    break
                planner.pomdp_model.update_belief(action, out["observation"])
        return total


def _refuse(*_: Any) -> str:
    raise RuntimeError("no particle is left")
