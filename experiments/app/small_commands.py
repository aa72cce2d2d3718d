"""Commands of a few flags that keep no run: read, told by `--help` and refused in a sentence, as those of `_run` are.

They have no file in `conf/`: a frozen dataclass in the command's file says all.
"""

import dataclasses
import sys
from collections.abc import Callable
from typing import Any

from omegaconf import OmegaConf

from jaxpar.fields import check_fields
from jaxpar.mesh import MeshSpec
from jaxpar.types import UsageError

from .. import show
from . import help_text, runner
from .mistakes import FLAG_ERRORS, refuse_malformed, sentence_of


@dataclasses.dataclass(frozen=True)
class SmallConfig:
    """What the configuration of each of them has.

    Attributes:
      cache: Whether compiled programs are kept for the next run: in a folder of this machine's kind below
        ~/.cache/jaxpar, or in JAX_COMPILATION_CACHE_DIR.
    """

    cache: bool = True

    def __post_init__(self):
        """Refuses what no field may hold."""
        check_fields(self)


def read(name: str, schema: type, flags: list[str]) -> Any:
    """Returns the configuration that these flags give.

    Raises:
      UsageError: One of them is no flag of this command, or not legal.
    """
    refuse_malformed(name, flags)
    node = OmegaConf.structured(schema)
    OmegaConf.set_readonly(node, None)
    for flag in flags:
        key, equals, value = flag.partition("=")
        if not equals:
            raise UsageError(
                f"flag {flag!r} has no value; flags are name=value, such as cache=false."
            )
        try:
            node.merge_with_dotlist([flag])
        except FLAG_ERRORS as error:
            # Of a value of another type OmegaConf does not say whose it is.
            wrong = ValueError(f"Error merging override {key}={value}") if key in node else error
            raise UsageError(sentence_of(wrong, schema)) from None
    return OmegaConf.to_object(node)


def launch(
    name: str,
    schema: type,
    execute: Callable[..., None],
    before: Callable[[Any], Any] | None = None,
) -> None:
    """Reads the command line, opens one device and calls `execute(config)`; ends as `_run.launch` does.

    Args:
      name: The command.
      schema: Its configuration, which extends `SmallConfig`.
      execute: What it does and prints.
      before: What is to be made before JAX and this process have threads; `execute` is then called with that as well.
    """

    def begin(mistakes: list[BaseException]) -> None:
        given = [flag for flag in sys.argv[1:] if flag not in help_text.ASKED]
        config = read(name, schema, given)
        if len(given) < len(sys.argv[1:]):
            show(help_text.text_of(name, schema, config, SmallConfig))
            return
        made = [before(config)] if before else []
        with runner.open_devices(runner.RunConfig(cpu_devices=1, cache=config.cache), MeshSpec()):
            execute(config, *made)

    runner.answered(schema, begin)
