"""Executes the notebooks and writes them with what they print and draw: notebooks/NN_topic.py -> .ipynb.

    python tests/write_notebooks.py               # those whose code has changed since; a minute each on two cores
    python tests/write_notebooks.py 05_neat       # these, changed or not
    python tests/write_notebooks.py --all

`make notebooks` calls it. First the address of the repository, which stands in pyproject.toml alone, goes into the line
above each title and into the set-up cell. Where only words have changed, the outputs are kept. A notebook that warns
is not written.
"""

import argparse
import base64
import hashlib
import io
import json
import os
import pathlib
import re
import socket
import sys
import tempfile
import time
import tomllib
from urllib.parse import urlsplit

import jupytext
import nbformat

ROOT = pathlib.Path(__file__).resolve().parents[1]
FOLDER = ROOT / "notebooks"
FULL_SIZE = {"00_tour"}
"""Executed at full size; the others with FAST=1."""
SET_UP = "## Set-up\n"
LIMIT_S = 900
STYLE = "figure.dpi: 80\nsavefig.dpi: 80\n"
"""Of the pictures that are stored, as matplotlib's file."""


def repository() -> str:
    """Returns the address that pyproject.toml states."""
    return tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["urls"]["Repository"]


def colab(address: str, name: str) -> str:
    """Returns the line above a notebook's title, which opens it in Colab."""
    site = urlsplit(address)
    size = "full size" if name in FULL_SIZE else "small size, `FAST=1`"
    if site.netloc == "github.com":
        path = f"{site.path.removesuffix('.git')}/blob/main/notebooks/{name}.ipynb"
        line = f"[Open in Colab](https://colab.research.google.com/github{path})"
    else:  # Colab opens addresses of GitHub alone
        line = f"[Open in Colab](https://colab.research.google.com): File > Upload notebook, from <{address}>"
    return f"{line} · shown below: {size}"


def with_address(text: str, address: str, name: str) -> str:
    """Returns the source of a notebook in which the line above the title and the set-up cell have this address."""
    head, mark, rest = text.partition("# %% [markdown]\n# # ")
    head = re.sub(r"# %% \[markdown\]\n# \[Open in Colab\].*\n\n", "", head)
    rest = re.sub(
        r'^REPOSITORY = ".*"$', f'REPOSITORY = "{address}"', rest, count=1, flags=re.MULTILINE
    )
    return f"{head}# %% [markdown]\n# {colab(address, name)}\n\n{mark}{rest}"


def code_cells(notebook) -> list:
    """Returns the cells of code."""
    return [cell for cell in notebook.cells if cell.cell_type == "code"]


def digest(notebook) -> str:
    """Returns a hash of the code that gives outputs: of all but the set-up cell, which prints nothing."""
    before = [""] + [cell.source for cell in notebook.cells]
    pairs = zip(before, notebook.cells, strict=False)
    code = [
        cell.source
        for above, cell in pairs
        if cell.cell_type == "code" and not above.startswith(SET_UP)
    ]
    return hashlib.sha256(json.dumps(code).encode()).hexdigest()


def execute(notebook, fast: bool = True, programs: str | None = None) -> None:
    """Fills the outputs of a notebook, in an empty folder, on the CPU.

    Nothing was compiled before, unless `programs` is a folder of an earlier run.
    """
    import nbclient

    with tempfile.TemporaryDirectory() as folder:
        place = pathlib.Path(folder, "here")
        place.mkdir()
        (place / "matplotlibrc").write_text(STYLE)
        own = {
            "FAST": "1" if fast else "",
            "PYTHONPATH": os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")])),
            "IPYTHONDIR": f"{folder}/ipython",
            "JAX_COMPILATION_CACHE_DIR": programs or f"{folder}/programs",
            "JAX_PLATFORMS": "cpu",
            "TF_CPP_MIN_LOG_LEVEL": "3",  # a slow machine is told that it compiles slowly
        }
        resources = {"metadata": {"path": str(place)}}
        options = dict(
            timeout=LIMIT_S, kernel_name="python3", resources=resources, record_timing=False
        )
        nbclient.NotebookClient(notebook, **options).execute(env=os.environ | own)
        for cell in code_cells(notebook):
            cell.outputs = [cleaned(output, place) for output in cell.outputs]


def cleaned(output, place: pathlib.Path):
    """Returns an output without the names of this machine's folders, and its picture in few colours."""
    names = {
        f"{place}/": "",
        str(place): ".",
        f"{ROOT}/": "",
        str(ROOT): ".",
        str(pathlib.Path.home()): "~",
    }
    names[str(place.parent)] = "TEMP"
    names |= {socket.gethostname(): "host"} if len(socket.gethostname()) > 8 else {}

    def plain(value):
        if isinstance(value, str):
            for found, instead in names.items():
                value = value.replace(found, instead)
            value = re.sub(rf"{re.escape(tempfile.gettempdir())}/[\w-]+", "TEMP", value)
        return value

    if output.output_type == "stream":
        output.text = plain(output.text)
    data = output.get("data", {})
    for kind, value in data.items():
        data[kind] = smaller(value) if kind == "image/png" else plain(value)
    if len(data) > 1:  # of a film this would be its numbers
        data["text/plain"] = data["text/plain"].partition("(")[0]
    return output


def smaller(png: str) -> str:
    """Returns a picture, in base64, with a table of 128 colours."""
    from PIL import Image

    picture = (
        Image.open(io.BytesIO(base64.b64decode(png)))
        .convert("RGB")
        .quantize(128, dither=Image.Dither.NONE)
    )
    out = io.BytesIO()
    picture.save(out, "PNG", optimize=True)
    written = base64.b64encode(out.getvalue()).decode()
    return min(png, written, key=len)


def merged(outputs: list) -> list:
    """Returns outputs in which what was printed in a row is one, and a line that was written over is its last state."""
    out = []
    for output in outputs:
        if (
            out
            and output.output_type == "stream" == out[-1].output_type
            and output.name == out[-1].name
        ):
            out[-1].text += output.text
        else:
            out.append(output)
    for output in out:
        if output.output_type == "stream":
            output.text = re.sub(r"[^\n]*\r(?!\n)", "", output.text)
    return out


def warned(notebook) -> list[str]:
    """Returns what a notebook wrote to its error stream."""
    return [
        o.text for cell in code_cells(notebook) for o in cell.outputs if o.get("name") == "stderr"
    ]


def finished(notebook, code: str):
    """Returns a notebook with what is the same whoever writes it: numbers as names of cells, few metadata."""
    known = notebook.metadata
    notebook.metadata = {key: known[key] for key in ("jupytext", "kernelspec") if key in known}
    notebook.metadata |= {"language_info": {"name": "python"}, "jaxpar": {"code": code}}
    for number, cell in enumerate(notebook.cells):
        cell.id, cell.metadata = f"{number:02}", {}
    for cell in code_cells(notebook):
        cell.outputs = merged(cell.outputs)
    notebook.nbformat, notebook.nbformat_minor = 4, 5
    return nbformat.from_dict(notebook)


def write(source: pathlib.Path, anyhow: bool) -> str:
    """Writes the twin of a source; returns what was done."""
    source.write_text(with_address(source.read_text(), repository(), source.stem))
    notebook, twin = jupytext.read(source), source.with_suffix(".ipynb")
    code = digest(notebook)
    old = nbformat.read(twin, as_version=4) if twin.exists() else None
    began = time.monotonic()
    if old and old.metadata.get("jaxpar", {}).get("code") == code and not anyhow:
        for cell, same in zip(code_cells(notebook), code_cells(old), strict=True):
            cell.outputs, cell.execution_count = same.outputs, same.execution_count
        done = "kept"
    else:
        execute(notebook, source.stem not in FULL_SIZE)
        done = f"executed in {time.monotonic() - began:.0f} s"
    if found := warned(notebook):
        return f"RED: it warns, and was not written\n{''.join(found)}"
    nbformat.write(finished(notebook, code), twin)
    return f"{done}, {twin.stat().st_size / 1e3:.0f} kB"


def main() -> int:
    """Ends with 1 if a notebook was not written."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "names", nargs="*", metavar="NAME", help="05_neat and others; all if none is named"
    )
    parser.add_argument(
        "--all", action="store_true", help="execute those that have not changed as well"
    )
    asked, red = parser.parse_args(), False
    for source in sorted(FOLDER.glob("*.py")):
        if not asked.names or source.stem in asked.names:
            said = write(source, asked.all or bool(asked.names))
            red |= said.startswith("RED")
            print(f"{source.stem}: {said}", flush=True)
    return int(red)


if __name__ == "__main__":
    sys.exit(main())
