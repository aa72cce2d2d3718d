"""`jaxpar lm preset=tiny`, from anywhere, is `python -m experiments.lm preset=tiny` in a checkout.

jaxpar                      # lists the commands
jaxpar lm --help            # what one of them does and takes
"""

import ast
import difflib
import pathlib
import runpy
import signal
import sys

from . import before_start, show

OPTIONAL = {"hydra", "omegaconf", "yaml", "matplotlib", "rich", "sklearn"}
"""What the extra `experiments` installs."""


def commands() -> dict[str, str]:
    """Returns the commands and what each does, the first line of its file."""
    paths = sorted(pathlib.Path(__file__).parent.glob("[a-z]*.py"))
    return {
        path.stem: (ast.get_docstring(ast.parse(path.read_text())) or "").split("\n")[0]
        for path in paths
    }


def listed() -> str:
    """Returns what `jaxpar` alone prints."""
    rows = [f"  {name:{24}} {text}" for name, text in commands().items()]
    return "\n".join(
        [
            "usage: jaxpar COMMAND [flag=value ...]; jaxpar COMMAND --help tells its flags.",
            "",
            *rows,
        ]
    )


def main() -> None:
    """Runs the command that the first argument names, with the others as its flags."""
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, before_start)
    if sys.argv[1:2] in ([], ["-h"], ["--help"]):
        show(listed())
        return
    name, known = sys.argv[1], commands()
    if name not in known:
        near = difflib.get_close_matches(name, known, n=1)
        hint = f"did you mean {near[0]}?" if near else f"legal are {', '.join(known)}."
        sys.exit(_say(f"there is no command {name!r}; {hint}"))
    sys.argv = sys.argv[1:]
    try:
        runpy.run_module(f"{__package__}.{name}", run_name="__main__", alter_sys=True)
    except ModuleNotFoundError as error:
        if error.name not in OPTIONAL:
            raise
        sys.exit(
            _say(
                f'commands need {error.name}, which is not installed: pip install "jaxpar[experiments]".'
            )
        )


def _say(sentence: str) -> int:
    """Prints a user's mistake and returns the exit code."""
    print(f"error: {sentence}", file=sys.stderr)
    return 2


if __name__ == "__main__":
    main()
