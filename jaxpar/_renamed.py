"""Modules and names that have moved: the older ones work until a version is released, each with one sentence."""

import importlib
import sys
import warnings
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType

__all__ = ["find_renamed", "renamed"]

MODULES = {
    "jaxpar.aot.flops": "jaxpar.lower.flops",
    "jaxpar.decode.conformal": "jaxpar.experimental.conformal",
    "jaxpar.decode.pseudo": "jaxpar.experimental.pseudo_tokens",
    "jaxpar.lm.distil": "jaxpar.experimental.trained_drafts",
    "jaxpar.nn.autoregressive": "jaxpar.experimental.autoregressive",
    "jaxpar.nn.dense_depth": "jaxpar.experimental.dense_depth",
    "jaxpar.nn.experts.attention": "jaxpar.experimental.attention_experts",
    "jaxpar.nn.schedule": "jaxpar.pipeline.accumulation",
    "jaxpar.nn.two_stage": "jaxpar.pipeline.two_stage",
    "jaxpar.parallel.context": "jaxpar.nn.attention.context",
    "jaxpar.parallel.context.orders": "jaxpar.nn.attention.context.token_orders",
    "jaxpar.parallel.controller.dataflow": "jaxpar.experimental.controller",
    "jaxpar.parallel.controller.transfer": "jaxpar.transfers",
    "jaxpar.parallel.experts": "jaxpar.nn.experts.sharded",
    "jaxpar.parallel.experts.exchange": "jaxpar.nn.experts.sharded.all_to_all",
    "jaxpar.parallel.pipeline": "jaxpar.pipeline",
    "jaxpar.parallel.placement.chain": "jaxpar.experimental.product_chain",
    "jaxpar.parallel.placement.placements": "jaxpar.aot.placements",
    "jaxpar.verify.compare": "jaxpar.aot.verify.compare",
    "jaxpar.verify.judge": "jaxpar.aot.verify.judge",
    "jaxpar.verify.layouts": "jaxpar.aot.verify.layouts",
    "jaxpar.verify.program": "jaxpar.aot.verify.program",
    "jaxpar.verify.run": "jaxpar.aot.verify.run",
    "jaxpar.verify.transfers": "jaxpar.aot.verify.collectives",
}
"""Modules by their older names; what lies below one is found below the new one."""

GONE = ("jaxpar.parallel", "jaxpar.parallel.controller", "jaxpar.parallel.placement")
"""Packages that are no more: their modules went to several others."""

NAMES = {
    "jaxpar.decode": {
        "Calibration": "jaxpar.experimental.conformal",
        "Heads": "jaxpar.experimental.pseudo_tokens",
        "HiddenTransfer": "jaxpar.experimental.pseudo_tokens",
        "PromptTokens": "jaxpar.experimental.pseudo_tokens",
        "conformal_p": "jaxpar.experimental.conformal",
        "conformal_rejects": "jaxpar.experimental.conformal",
        "empty_calibration": "jaxpar.experimental.conformal",
    },
    "jaxpar.life": {
        "HEARD": "jaxpar.experimental.action_saliency",
        "action_saliency": "jaxpar.experimental.action_saliency",
    },
    "jaxpar.lm": {
        "DraftTrainer": "jaxpar.experimental.trained_drafts",
        "accept_rates": "jaxpar.experimental.trained_drafts",
    },
    "jaxpar.nn.experts": {"AttentionExperts": "jaxpar.experimental.attention_experts"},
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
        "Broadcast": "jaxpar.aot.placements",
        "ChainPlacement": "jaxpar.experimental.product_chain",
        "ConversionStep": "jaxpar.aot.placements",
        "MATMUL_PLACEMENTS": "jaxpar.experimental.product_chain",
        "OPS": "jaxpar.aot.placements",
        "Partial": "jaxpar.aot.placements",
        "Placement": "jaxpar.aot.placements",
        "Split": "jaxpar.aot.placements",
        "Stage": "jaxpar.experimental.product_chain",
        "conversion": "jaxpar.aot.placements",
        "convert": "jaxpar.experimental.placement_conversion",
        "matmul_placements": "jaxpar.experimental.product_chain",
        "place_chain": "jaxpar.experimental.product_chain",
        "specs": "jaxpar.experimental.placement_conversion",
    },
    "jaxpar.rl": {"saliency": "jaxpar.experimental.saliency"},
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
    _warn(f"{package}.{name}", f"{module}.{name}", level=3)
    return getattr(importlib.import_module(module), name)


def _warn(older: str, name: str, level: int) -> None:
    sentence = f"{older} is now {name}; the older name goes with the first release."
    warnings.warn(sentence, FutureWarning, stacklevel=level + 1)


def _today(older: str) -> str | None:
    """Returns today's name of a module, None where it has not moved."""
    parts = older.split(".")
    for count in range(len(parts), 0, -1):
        name = MODULES.get(".".join(parts[:count]))
        if name:
            return ".".join([name, *parts[count:]])
    return None


class _Finder(MetaPathFinder, Loader):
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
        return ModuleSpec(fullname, self, is_package=True)

    def exec_module(self, module: ModuleType) -> None:
        """Replaces the empty module that Python has made by the one of today's name."""
        older = module.__name__
        name = _today(older)
        if name is None:
            module.__getattr__ = lambda attribute: renamed(older, attribute)  # type: ignore[method-assign]
            return
        sys.modules[older] = importlib.import_module(name)
        _warn(older, name, level=2)
