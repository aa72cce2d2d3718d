"""`jaxpar lm preset=tiny`, from anywhere, is `python -m experiments.lm preset=tiny` in a checkout.

jaxpar                      # lists the commands
jaxpar lm --help            # describes one of them and its flags
jaxpar papers               # lists the commands of single papers
jaxpar papers trading       # runs one of them
"""

import ast
import difflib
import pathlib
import runpy
import signal
import sys

from . import HERE, before_start, module_of, show

OPTIONAL = {"hydra", "omegaconf", "yaml", "matplotlib", "rich", "sklearn"}
"""Packages that the extra `experiments` installs."""
ASKS_FOR_HELP = ([], ["-h"], ["--help"])


def commands(folder: pathlib.Path = HERE) -> dict[str, str]:
    """Returns the commands in a folder, each with the first line of its file's docstring."""
    found = {}
    for path in sorted(folder.glob("[a-z]*.py")):
        docstring = ast.get_docstring(ast.parse(path.read_text())) or ""
        found[path.stem] = docstring.split("\n")[0]
    return found


def papers() -> dict[str, str]:
    """Returns the commands of single papers."""
    return commands(HERE / "papers")


def listed() -> str:
    """Returns the text that `jaxpar` alone prints."""
    usage = "usage: jaxpar COMMAND [flag=value ...]; jaxpar COMMAND --help lists its flags."
    last = _row(
        "papers", "Lists the commands of single papers: jaxpar papers NAME [flag=value ...]."
    )
    return "\n".join([usage, "", *_rows(commands()), last])


def listed_papers() -> str:
    """Returns the text that `jaxpar papers` alone prints."""
    usage = "usage: jaxpar papers NAME [flag=value ...]; jaxpar papers NAME --help lists its flags."
    return "\n".join([usage, "", *_rows(papers())])


def main() -> None:
    """Runs the command that the first argument names, with the others as its flags."""
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, before_start)
    arguments = sys.argv[1:]
    if arguments in ASKS_FOR_HELP:
        show(listed())
        return

    if arguments[0] == "papers":
        if arguments[1:] in ASKS_FOR_HELP:
            show(listed_papers())
            return
        name = arguments[1]
        flags = arguments[2:]
        known = papers()
    else:
        name = arguments[0]
        flags = arguments[1:]
        known = commands()
        if name in papers():
            print(
                f"note: jaxpar {name} is now jaxpar papers {name}; "
                "the older name goes with the first release.",
                file=sys.stderr,
            )
            known = papers()

    if name not in known:
        near = difflib.get_close_matches(name, [*commands(), *papers()], n=1)
        if near:
            meant = module_of(near[0]).replace(".", " ")
            hint = f"did you mean {meant}?"
        else:
            hint = f"legal are {', '.join(known)}."
        sys.exit(_report(f"there is no command {name!r}; {hint}"))
    _run(name, flags)


def _run(name: str, flags: list[str]) -> None:
    """Runs a command as `python -m` would."""
    sys.argv = [name, *flags]
    try:
        runpy.run_module(f"{__package__}.{module_of(name)}", run_name="__main__", alter_sys=True)
    except ModuleNotFoundError as error:
        if error.name not in OPTIONAL:
            raise
        install = 'pip install "jaxpar[experiments]"'
        sys.exit(_report(f"commands need {error.name}, which is not installed: {install}."))


def _rows(found: dict[str, str]) -> list[str]:
    return [_row(name, text) for name, text in found.items()]


def _row(name: str, text: str) -> str:
    return f"  {name:{24}} {text}"


def _report(sentence: str) -> int:
    """Prints a user's mistake and returns the exit code."""
    print(f"error: {sentence}", file=sys.stderr)
    return 2


if __name__ == "__main__":
    main()
