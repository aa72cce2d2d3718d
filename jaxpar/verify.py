"""`jaxpar.verify`: proof that a layout equals one device, from `jaxpar.aot.verify`."""

from jaxpar._renamed import renamed
from jaxpar.aot.verify import *  # noqa: F403
from jaxpar.aot.verify import __all__ as __all__

__path__: list[str] = []  # its modules are found by their older names


def __getattr__(name: str) -> object:
    return renamed("jaxpar.aot.verify", name)
