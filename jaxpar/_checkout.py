"""In a checkout `envs/` and `experiments/` lie beside the library; wheels have them inside of it. One name for both.

Wheels have no such file: there `jaxpar.envs` and `jaxpar.commands` are those folders themselves.
"""

import importlib
import sys
from importlib.abc import InspectLoader, MetaPathFinder
from importlib.machinery import ModuleSpec
from importlib.util import find_spec, module_from_spec, spec_from_file_location
from pathlib import Path
from types import CodeType, ModuleType

__all__ = ["alias"]


def alias(name: str, folder: str) -> None:
    """Makes the module `name`, which is being imported, the package in `folder` of the checkout, submodules as well.

    Where Python finds somebody else's package under that name, ours is loaded as `name` alone, as from a wheel.
    """
    place = Path(__file__).parents[1] / folder
    found = find_spec(folder)
    if (
        found
        and found.submodule_search_locations
        and Path(found.submodule_search_locations[0]).samefile(place)
    ):
        sys.meta_path.insert(0, _Same(name, folder))
        sys.modules[name] = importlib.import_module(folder)
        return
    own = spec_from_file_location(
        name, place / "__init__.py", submodule_search_locations=[str(place)]
    )
    assert own and own.loader, f"{place} is a package of this checkout"
    module = sys.modules[name] = module_from_spec(own)
    own.loader.exec_module(module)


class _Same(MetaPathFinder, InspectLoader):
    """Finds `alias.x` as the module `folder.x`, so that no file is loaded twice with two classes of each name."""

    def __init__(self, alias: str, folder: str):
        self._alias, self._folder = alias, folder

    def _name(self, alias: str) -> str:
        return self._folder + alias.removeprefix(self._alias)

    def find_spec(
        self, fullname: str, path: object = None, target: object = None
    ) -> ModuleSpec | None:
        """The place of a module below the alias, if there is one."""
        real = find_spec(self._name(fullname)) if fullname.startswith(f"{self._alias}.") else None
        if real is None:
            return None
        package = real.submodule_search_locations is not None
        return ModuleSpec(fullname, self, origin=real.origin, is_package=package)

    def exec_module(self, module: ModuleType) -> None:
        """Puts the module into the place of the empty one that Python has made for it."""
        sys.modules[module.__name__] = importlib.import_module(self._name(module.__name__))

    def get_code(self, fullname: str) -> CodeType | None:
        """What `python -m` runs."""
        real = find_spec(self._name(fullname))
        return (
            real.loader.get_code(real.name)
            if real and isinstance(real.loader, InspectLoader)
            else None
        )

    def get_source(self, fullname: str) -> str | None:
        """What tracebacks show."""
        real = find_spec(self._name(fullname))
        return (
            real.loader.get_source(real.name)
            if real and isinstance(real.loader, InspectLoader)
            else None
        )
