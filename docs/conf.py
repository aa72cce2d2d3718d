"""Sphinx configuration: MyST pages, notebooks with their outputs, the API from docstrings."""

import os
import pathlib
import re
import sys

ROOT = pathlib.Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "docs")]

os.environ.setdefault(
    "JAX_PLATFORMS", "cpu"
)  # no page needs an accelerator, nor to wait for one to be looked for

import jaxpar  # noqa: E402

project = "jaxpar"
author = "the jaxpar authors"
release = version = jaxpar.__version__

extensions = [
    "myst_nb",
    "sphinx.ext.autodoc",
    "sphinx.ext.napoleon",
    "sphinx.ext.viewcode",
    "names",
]
# docs/notebooks is a link to notebooks/, where each .ipynb stands beside its source of the same name.
exclude_patterns = [
    "_build",
    "conf.py",
    "collectives.py",
    "cut_episode.py",
    "forest.py",
    "life_saliency.py",
    "names.py",
    "picture.py",
    "saliency.py",
    "notebooks/*.py",
]
html_theme = "sphinx_book_theme"
html_title = "jaxpar"
html_static_path = ["_static"]
html_css_files = ["pages.css"]
html_logo = "_static/logo.svg"
html_favicon = "_static/logo.svg"
html_theme_options = {"show_toc_level": 2, "home_page_in_toc": True}

myst_enable_extensions = ["amsmath", "colon_fence", "deflist", "dollarmath"]
myst_heading_anchors = 3

# Notebooks are shown as they are stored, with what they printed and drew when `make notebooks` executed them.
nb_execution_mode = "off"
nb_merge_streams = True

default_role = "code"  # docstrings set names in single backticks
autodoc_member_order = "bysource"
autodoc_typehints_format = "short"
python_use_unqualified_type_names = True
python_maximum_signature_line_length = 88  # longer ones have a line for each parameter
autodoc_preserve_defaults = True
autodoc_default_options = {"no-value": True}
napoleon_google_docstring = True
napoleon_numpy_docstring = False
napoleon_use_ivar = True


def _to_rst(app, what, name, obj, options, lines):
    """Docstrings are written for eyes: Markdown tables, "`Array`s", a dimension's letter as a whole sentence."""
    out, inside = [], False
    for line in lines:
        row = bool(re.match(r"\s*\|.*\|\s*$|[-|]{9,}$|\S+\s+\| ", line))
        if row != inside:
            out += ["", "::", ""] if row else [""]
        if not row:
            line = re.sub(
                r"(``.+?``|`[^`]+`)(?=\w)|(``.+?``|`[^`]+`)", lambda m: m[2] or m[1] + "\\ ", line
            )
            line = re.sub(
                r"^(\s*:\w+ \w+: )(?=[A-Z]\.$)", r"\1\\", line
            )  # else it is an enumeration
        out.append("    " + line if row else line)
        inside = row
    lines[:] = out


def _as_code(app, what, name, obj, options, lines):
    """The block below "Example:" is code, not text; before napoleon, which takes its indentation."""
    if "Example:" in lines:
        head = lines.index("Example:")
        inside = [not line or line.startswith(" ") for line in lines[head + 1 :]] + [False]
        end = head + 1 + inside.index(False)
        lines[head + 1 : end] = ["    ::", "", *("    " + line for line in lines[head + 1 : end])]


def setup(app):
    """Connects the above."""
    app.connect("autodoc-process-docstring", _as_code, priority=400)
    app.connect("autodoc-process-docstring", _to_rst)
