"""Names on the pages are those that people import, and lead to where they are explained, here or in JAX's own pages.

`jaxpar.scan.affine.affine_scan` is `jaxpar.scan.affine_scan` to whoever uses it: the imports of `__init__.py` say so,
and are read as text. A name in backticks becomes a link where it can only mean one thing.
"""

import ast
import builtins
import functools
import pathlib
import re

from docutils import nodes
from sphinx.addnodes import pending_xref
from sphinx.domains.python import PyModule, PyObject
from sphinx.transforms.post_transforms import SphinxPostTransform

ROOT = pathlib.Path(__file__).resolve().parent.parent

# Pages of JAX's documentation, one a name.
JAX_PAGE = "https://docs.jax.dev/en/latest/_autosummary/{}.html"
JAX = set(
    """jax.Array jax.ShapeDtypeStruct jax.block_until_ready jax.checkpoint jax.default_backend
    jax.default_matmul_precision jax.device_put jax.devices jax.distributed.initialize jax.grad jax.hessian
    jax.jacfwd jax.jacrev jax.jit jax.jvp jax.lax.all_gather jax.lax.all_to_all jax.lax.associative_scan
    jax.lax.cond jax.lax.conv_general_dilated jax.lax.custom_root jax.lax.fori_loop jax.lax.ppermute
    jax.lax.psum jax.lax.psum_scatter jax.lax.ragged_all_to_all jax.lax.ragged_dot jax.lax.scan jax.lax.split
    jax.lax.switch jax.lax.top_k jax.lax.while_loop jax.make_jaxpr jax.make_mesh jax.nn.dot_product_attention
    jax.numpy.asarray jax.numpy.einsum jax.numpy.nonzero jax.random.fold_in jax.random.key jax.random.poisson
    jax.random.split jax.shard_map jax.tree.map jax.value_and_grad jax.vjp jax.vmap
    """.split()
)
SHORT = {"lax.": "jax.lax.", "jnp.": "jax.numpy."}


@functools.cache
def public_names(root: pathlib.Path = ROOT) -> dict[str, str]:
    """The name to import of each name that a package takes from its files, by the name in the file."""
    found: dict[str, str] = {}
    for path in sorted(
        root.glob("jaxpar/**/__init__.py"), key=lambda path: (len(path.parts), path)
    ):
        package = ".".join(path.parent.relative_to(root).parts)
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.ImportFrom) and (node.module or "").startswith(package + "."):
                for name in node.names:
                    if name.asname in (None, name.name) and not name.name.startswith("_"):
                        found.setdefault(f"{node.module}.{name.name}", f"{package}.{name.name}")
    return found


def as_imported(name: str) -> str:
    """`name`, of a module's member or of a member of that, beginning with the package that people import it from."""
    head, rest = name, ""
    while "." in head:
        if head in public_names():
            return public_names()[head] + rest
        head, _, last = head.rpartition(".")
        rest = f".{last}{rest}"
    return name


def _run_module(directive, plain=PyModule.run):
    """Describes a file; where what people import from it has the file's own name, a link means that."""
    if directive.arguments[0].strip() in public_names().values():
        directive.options["no-index"] = None
    return plain(directive)


def _run(directive):
    """Describes an object of a file under the module that it is imported from."""
    module = directive.options.get("module")
    if module and directive.arguments:
        name = re.match(r"\w+", directive.arguments[0])[0]
        directive.options["module"] = as_imported(f"{module}.{name}").rpartition(".")[0]
    return super(PyObject, directive).run()


def _meant(objects) -> dict[str, str]:
    """What a name without its module means: the one public object of that name, or the only object at all."""
    public, others = {}, {}
    for full, entry in objects.items():
        if entry.objtype in (
            "class",
            "function",
            "exception",
            "data",
            "method",
            "attribute",
            "property",
        ):
            parts = full.split(".")
            nested = entry.objtype in ("method", "attribute", "property")
            short = ".".join(parts[-2:] if nested else parts[-1:])
            table = public if full in public_names().values() else others
            table.setdefault(short, set()).add(full)
    return {
        short: min(meant)
        for short in public | others
        if len(meant := public.get(short) or others[short]) == 1 and re.search(r"[A-Z_.]", short)
    }


class Links(SphinxPostTransform):
    """Makes links of names in backticks."""

    default_priority = 500

    def run(self, **kwargs):
        """Replaces literal nodes by references."""
        objects = self.env.get_domain("py").objects
        if not hasattr(self.app, "jaxpar_meant"):
            self.app.jaxpar_meant = _meant(objects)
        for node in list(self.document.findall(nodes.literal)):
            outer = node.parent
            while outer is not None and not isinstance(
                outer, (nodes.reference, nodes.title, nodes.term)
            ):
                outer = outer.parent
            name = re.fullmatch(r"(\w[\w.]*)(\(.*\))?", node.astext())
            if outer is None and name:
                self.link(node, name[1], objects)

    def link(self, node, name, objects):
        """Links one node, if `name` is known."""
        jax = next(
            (full + name[len(short) :] for short, full in SHORT.items() if name.startswith(short)),
            name,
        )
        known = (
            as_imported(name) if as_imported(name) in objects else self.app.jaxpar_meant.get(name)
        )
        if jax in JAX:
            reference = nodes.reference("", "", internal=False, refuri=JAX_PAGE.format(jax))
        elif known:
            entry = objects[known]
            page = self.app.builder.get_relative_uri(self.env.docname, entry.docname)
            reference = nodes.reference(
                "", "", internal=True, refuri=f"{page}#{entry.node_id}", reftitle=known
            )
        else:
            return
        node.replace_self(reference)
        reference += node


def _read(app, doctree):
    """A type of Python's own, such as bytes, is nobody's attribute of that name; docs/notebooks is a link."""
    for node in doctree.findall(pending_xref):
        if node.get("refdomain") == "doc" and node["reftarget"].startswith(str(ROOT / "notebooks")):
            node["reftarget"] = f"notebooks/{pathlib.Path(node['reftarget']).name}"
        if node.get("refdomain") == "py" and hasattr(builtins, node.get("reftarget", "")):
            node["reftarget"] = f"builtins.{node['reftarget']}"


def _missing(app, env, node, contnode):
    """Types in signatures name the file that an object is in."""
    target = node.get("reftarget", "")
    if node.get("refdomain") == "py" and target in JAX:
        return nodes.reference("", "", contnode, internal=False, refuri=JAX_PAGE.format(target))
    public = as_imported(target)
    if node.get("refdomain") == "py" and public != target:
        return env.get_domain("py").resolve_xref(
            env, node["refdoc"], app.builder, node["reftype"], public, node, contnode
        )
    return None


def setup(app):
    """Connects the above."""
    PyObject.run, PyModule.run = _run, _run_module
    app.add_post_transform(Links)
    app.connect("doctree-read", _read)
    app.connect("missing-reference", _missing)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
