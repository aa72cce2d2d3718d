"""Modules and names that have moved: older names work until a release, each with a sentence."""

import importlib
import sys
import warnings
from importlib.abc import InspectLoader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import CodeType, ModuleType

__all__ = [
    "find_renamed",
    "renamed",
    "warn_of_older",
]

MODULES = {
    "jaxpar.aot.flops": "jaxpar.lower.flops",
    "jaxpar.decode.conformal": "jaxpar.experimental.conformal",
    "jaxpar.decode.pseudo": "jaxpar.experimental.pseudo_tokens",
    "jaxpar.lm.architectures": "jaxpar.lm.hub.architectures",
    "jaxpar.lm.batches": "jaxpar.lm.text.batches",
    "jaxpar.lm.chat": "jaxpar.lm.text.chat",
    "jaxpar.lm.corpus": "jaxpar.lm.text.corpus",
    "jaxpar.lm.data": "jaxpar.lm.text.data",
    "jaxpar.lm.distil": "jaxpar.experimental.trained_drafts",
    "jaxpar.lm.examples": "jaxpar.lm.text.examples",
    "jaxpar.lm.exchange": "jaxpar.lm.hub.exchange",
    "jaxpar.lm.folders": "jaxpar.lm.hub.folders",
    "jaxpar.lm.keys": "jaxpar.lm.hub.keys",
    "jaxpar.lm.llamas": "jaxpar.lm.hub.llamas",
    "jaxpar.lm.mixture": "jaxpar.lm.text.mixture",
    "jaxpar.lm.peft": "jaxpar.lm.hub.peft",
    "jaxpar.lm.shards": "jaxpar.lm.text.shards",
    "jaxpar.lm.stored": "jaxpar.lm.hub.stored",
    "jaxpar.lm.tokenizer": "jaxpar.lm.text.tokenizer",
    "jaxpar.nn.aaren": "jaxpar.nn.cells.aaren",
    "jaxpar.nn.autoregressive": "jaxpar.experimental.autoregressive",
    "jaxpar.nn.conv_embedding": "jaxpar.nn.cells.conv_embedding",
    "jaxpar.nn.dense_depth": "jaxpar.experimental.dense_depth",
    "jaxpar.nn.experts.attention": "jaxpar.experimental.attention_experts",
    "jaxpar.nn.gated": "jaxpar.nn.cells.gated",
    "jaxpar.nn.layer": "jaxpar.nn.cells.layer",
    "jaxpar.nn.narrow": "jaxpar.nn.weights.narrow",
    "jaxpar.nn.network": "jaxpar.nn.cells.network",
    "jaxpar.nn.s5": "jaxpar.nn.cells.s5",
    "jaxpar.nn.schedule": "jaxpar.pipeline.accumulation",
    "jaxpar.nn.solvers": "jaxpar.nn.cells.solvers",
    "jaxpar.nn.space_time": "jaxpar.nn.images.space_time",
    "jaxpar.nn.stack_network": "jaxpar.nn.cells.stack_network",
    "jaxpar.nn.ternary": "jaxpar.nn.weights.ternary",
    "jaxpar.nn.two_stage": "jaxpar.pipeline.two_stage",
    "jaxpar.nn.vision": "jaxpar.nn.images.vision",
    "jaxpar.parallel.context": "jaxpar.nn.attention.context",
    "jaxpar.parallel.context.orders": "jaxpar.nn.attention.context.token_orders",
    "jaxpar.parallel.controller.dataflow": "jaxpar.experimental.controller",
    "jaxpar.parallel.controller.transfer": "jaxpar.transfers",
    "jaxpar.parallel.experts": "jaxpar.nn.experts.sharded",
    "jaxpar.parallel.experts.exchange": "jaxpar.nn.experts.sharded.all_to_all",
    "jaxpar.parallel.pipeline": "jaxpar.pipeline",
    "jaxpar.parallel.placement.chain": "jaxpar.experimental.product_chain",
    "jaxpar.parallel.placement.placements": "jaxpar.aot.placement",
    "jaxpar.pomdp.adding": "jaxpar.pomdp.planners.adding",
    "jaxpar.pomdp.belief": "jaxpar.pomdp.beliefs.belief",
    "jaxpar.pomdp.bounds": "jaxpar.pomdp.exact.bounds",
    "jaxpar.pomdp.cassandra": "jaxpar.pomdp.files.cassandra",
    "jaxpar.pomdp.clock": "jaxpar.pomdp.planners.clock",
    "jaxpar.pomdp.despot": "jaxpar.pomdp.planners.despot",
    "jaxpar.pomdp.exact_belief": "jaxpar.pomdp.beliefs.exact_belief",
    "jaxpar.pomdp.leaves": "jaxpar.pomdp.planners.leaves",
    "jaxpar.pomdp.outline": "jaxpar.pomdp.planners.outline",
    "jaxpar.pomdp.particle_search": "jaxpar.pomdp.planners.particle_search",
    "jaxpar.pomdp.pft": "jaxpar.pomdp.planners.pft",
    "jaxpar.pomdp.planner": "jaxpar.pomdp.planners.planner",
    "jaxpar.pomdp.policies": "jaxpar.pomdp.files.policies",
    "jaxpar.pomdp.pomcp": "jaxpar.pomdp.planners.pomcp",
    "jaxpar.pomdp.pomcpow": "jaxpar.pomdp.planners.pomcpow",
    "jaxpar.pomdp.pomdpx": "jaxpar.pomdp.files.pomdpx",
    "jaxpar.pomdp.root_parallel": "jaxpar.pomdp.planners.root_parallel",
    "jaxpar.pomdp.scenario_tree": "jaxpar.pomdp.planners.scenario_tree",
    "jaxpar.pomdp.scenarios": "jaxpar.pomdp.planners.scenarios",
    "jaxpar.pomdp.simulations": "jaxpar.pomdp.planners.simulations",
    "jaxpar.pomdp.tree": "jaxpar.pomdp.planners.tree",
    "jaxpar.pomdp.tree_search": "jaxpar.pomdp.planners.tree_search",
    "jaxpar.pomdp.vopp": "jaxpar.pomdp.planners.vopp",
    "jaxpar.pomdp.widening": "jaxpar.pomdp.planners.widening",
    "jaxpar.verify.compare": "jaxpar.aot.verify.compare",
    "jaxpar.verify.layouts": "jaxpar.aot.verify.layouts",
    "jaxpar.verify.program": "jaxpar.aot.verify.program",
    "jaxpar.verify.run": "jaxpar.aot.verify.run",
    "jaxpar.verify.transfers": "jaxpar.aot.verify.collectives",
}
"""Modules by their older names; what lies below one is found below the new one."""

PAPERS = (
    "gru_svm",
    "information_gain_trellis",
    "l2mu",
    "moving_digits",
    "pipelined_speculation",
    "rl_scaling",
    "scattered_attention",
    "step_speculation",
    "trading",
    "volunteer_experts",
)
"""Commands of single papers, which lay beside the others."""
for _command in PAPERS:
    MODULES[f"experiments.{_command}"] = f"experiments.papers.{_command}"
    MODULES[f"jaxpar.commands.{_command}"] = f"jaxpar.commands.papers.{_command}"

GONE = ("jaxpar.parallel", "jaxpar.parallel.controller", "jaxpar.parallel.placement")
"""Packages that are no more: their modules went to several others."""

NAMES = {
    "jaxpar.aot.verify": {
        "Compiled": "jaxpar.aot.verify.program",
        "NOISE": "jaxpar.aot.verify.compare",
        "breaches_of": "jaxpar.aot.verify.collectives",
        "dead_leaves": "jaxpar.aot.verify.compare",
        "found_transfers": "jaxpar.aot.verify.collectives",
        "leaf_errors": "jaxpar.aot.verify.compare",
        "of_live": "jaxpar.aot.verify.compare",
        "sum_by_axis": "jaxpar.transfers",
    },
    "jaxpar.decode": {
        "Calibration": "jaxpar.experimental.conformal",
        "Heads": "jaxpar.experimental.pseudo_tokens",
        "HiddenTransfer": "jaxpar.experimental.pseudo_tokens",
        "PromptTokens": "jaxpar.experimental.pseudo_tokens",
        "Selection": "jaxpar.decode.policies",
        "automaton_of": "jaxpar.decode.automaton",
        "conformal_p": "jaxpar.experimental.conformal",
        "conformal_rejects": "jaxpar.experimental.conformal",
        "count_token": "jaxpar.decode.penalties",
        "count_tokens": "jaxpar.decode.penalties",
        "empty_calibration": "jaxpar.experimental.conformal",
        "expected_length": "jaxpar.decode.accept",
        "expected_tokens": "jaxpar.decode.trees",
        "tokens_read": "jaxpar.decode.cost",
    },
    "jaxpar.env": {
        "Adapted": "jaxpar.env.adapt",
        "check_params": "jaxpar.env.check",
    },
    "jaxpar.life": {
        "HEARD": "jaxpar.experimental.action_saliency",
        "Ledger": "jaxpar.life.inhabitants",
        "action_saliency": "jaxpar.experimental.action_saliency",
        "half_adder": "jaxpar.life.gadgets",
        "nand_gate": "jaxpar.life.gadgets",
        "set_robots": "jaxpar.life.gadgets",
    },
    "jaxpar.lm": {
        "DraftTrainer": "jaxpar.experimental.trained_drafts",
        "accept_rates": "jaxpar.experimental.trained_drafts",
    },
    "jaxpar.lm.adapters": {
        "AdaptedState": "jaxpar.lm.train",
        "AdapterTrainer": "jaxpar.lm.train",
    },
    "jaxpar.neat": {
        "Discovered": "jaxpar.neat.quadtree",
    },
    "jaxpar.neat.uniforms": {
        "normal": "jaxpar.neat.modes",
    },
    "jaxpar.nn.attention.context": {
        "ORDERS": "jaxpar.nn.attention.context.token_orders",
    },
    "jaxpar.nn.cells": {
        "gate_leaves": "jaxpar.nn.cells.cell",
        "gate_products": "jaxpar.nn.cells.cell",
        "heads_product": "jaxpar.nn.cells.cell",
    },
    "jaxpar.nn.experts": {
        "AttentionExperts": "jaxpar.experimental.attention_experts",
    },
    "jaxpar.optim": {
        "Joined": "jaxpar.optim.update",
        "matrices": "jaxpar.optim.masks",
    },
    "jaxpar.parallel.controller": {
        "Client": "jaxpar.experimental.controller",
        "Event": "jaxpar.experimental.controller",
        "Future": "jaxpar.experimental.controller",
        "NodeError": "jaxpar.experimental.controller",
        "move": "jaxpar.transfers",
        "plot_trace": "jaxpar.experimental.controller",
        "start_pathways": "jaxpar.experimental.controller",
    },
    "jaxpar.parallel.placement": {
        "Broadcast": "jaxpar.aot.placement",
        "ChainPlacement": "jaxpar.experimental.product_chain",
        "ConversionStep": "jaxpar.aot.placement",
        "MATMUL_PLACEMENTS": "jaxpar.experimental.product_chain",
        "OPS": "jaxpar.aot.placement",
        "Partial": "jaxpar.aot.placement",
        "Placement": "jaxpar.aot.placement",
        "Split": "jaxpar.aot.placement",
        "Stage": "jaxpar.experimental.product_chain",
        "conversion": "jaxpar.aot.placement",
        "convert": "jaxpar.experimental.placement_conversion",
        "matmul_placements": "jaxpar.experimental.product_chain",
        "place_chain": "jaxpar.experimental.product_chain",
        "specs": "jaxpar.experimental.placement_conversion",
    },
    "jaxpar.pipeline": {
        "COLUMNS": "jaxpar.pipeline.pack",
        "Preference": "jaxpar.pipeline.greedy",
        "Side": "jaxpar.pipeline.ops",
        "SlotSizes": "jaxpar.pipeline.timing",
        "TickTable": "jaxpar.pipeline.pack",
        "closed_forms": "jaxpar.pipeline.search",
        "mirrored": "jaxpar.pipeline.ops",
        "wave": "jaxpar.pipeline.ops",
    },
    "jaxpar.pomdp": {
        "DenseChildren": "jaxpar.pomdp.planners.tree",
        "DespotInfo": "jaxpar.pomdp.planners.scenario_tree",
        "HashedChildren": "jaxpar.pomdp.planners.tree",
        "check_tabular": "jaxpar.pomdp.check",
        "iterated_values": "jaxpar.pomdp.exact.solver",
        "reachable_beliefs": "jaxpar.pomdp.exact.solver",
    },
    "jaxpar.pomdp.exact": {
        "iterated_values": "jaxpar.pomdp.exact.solver",
        "reachable_beliefs": "jaxpar.pomdp.exact.solver",
    },
    "jaxpar.rl": {
        "CellMemory": "jaxpar.rl.memory",
        "next_values": "jaxpar.rl.returns",
        "saliency": "jaxpar.experimental.saliency",
    },
    "jaxpar.rollout": {
        "Value": "jaxpar.rollout.policies",
    },
    "jaxpar.solve": {
        "Choice": "jaxpar.solve.default",
    },
}
"""Names that have left a package, by that package, with the module that has each."""


def find_renamed() -> None:
    """Lets Python find modules by their older names."""
    if not any(isinstance(finder, _Finder) for finder in sys.meta_path):
        # First: a package that has moved has files, which Python would load a second time.
        sys.meta_path.insert(0, _Finder())


def renamed(package: str, name: str) -> object:
    """Returns a name that has left a package, for its `__getattr__`.

    Raises:
      AttributeError: The package never had such a name.
    """
    module = NAMES.get(package, {}).get(name)
    if module is None:
        raise AttributeError(f"module {package!r} has no attribute {name!r}")
    warn_of_older(f"{package}.{name}", f"{module}.{name}", level=3)
    return getattr(importlib.import_module(module), name)


def warn_of_older(older: str, name: str, level: int) -> None:
    """Warns the caller that lies `level` frames above this one of a name that is another today."""
    warnings.warn(_sentence(older, name), FutureWarning, stacklevel=level + 1)


def _sentence(older: str, name: str) -> str:
    return f"{older} is now {name}; the older name goes with the first release."


def _today(older: str) -> str | None:
    """Returns today's name of a module, None where it has not moved."""
    parts = older.split(".")
    for count in range(len(parts), 0, -1):
        name = MODULES.get(".".join(parts[:count]))
        if name:
            return ".".join([name, *parts[count:]])
    return None


class _Finder(MetaPathFinder, InspectLoader):
    """Finds modules by older names, as the same modules: no class exists twice."""

    def find_spec(
        self, fullname: str, path: object = None, target: object = None
    ) -> ModuleSpec | None:
        """Returns a spec for an older name; None for all others."""
        if fullname in GONE:
            return ModuleSpec(fullname, self, is_package=True)
        name = _today(fullname)
        if name is None:
            return None
        # `python -m` would look for the main module of a package.
        is_command = fullname.startswith(("experiments.", "jaxpar.commands."))
        return ModuleSpec(fullname, self, is_package=not is_command)

    def exec_module(self, module: ModuleType) -> None:
        """Replaces the empty module that Python has made by the one of today's name."""
        older = module.__name__
        name = _today(older)
        if name is None:
            module.__getattr__ = lambda attribute: renamed(older, attribute)  # type: ignore[method-assign]
            return
        sys.modules[older] = importlib.import_module(name)
        warn_of_older(older, name, level=2)

    def get_code(self, fullname: str) -> CodeType:
        """Returns a program for `python -m` that runs the module of today's name."""
        name = _today(fullname)
        print(f"note: {_sentence(fullname, str(name))}", file=sys.stderr)
        program = f"import runpy; runpy.run_module({name!r}, run_name='__main__', alter_sys=True)"
        return compile(program, fullname, "exec")

    def get_source(self, fullname: str) -> str | None:
        """Returns nothing: the source belongs to the module of today's name."""
        return None
