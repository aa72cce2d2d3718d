"""XML as a tree whose elements know their lines, so that what is wrong in a file can be named."""

import codecs
import dataclasses
import os
from pathlib import Path
from typing import NoReturn
from xml.parsers import expat

from jaxpar.types import UsageError


@dataclasses.dataclass
class Element:
    """One element: its name, attributes, own text, children in order, and the line where it begins in `file`."""

    tag: str
    attributes: dict[str, str]
    line: int
    file: str
    text: str = ""
    children: list["Element"] = dataclasses.field(default_factory=list)

    def refuse(self, why: str) -> NoReturn:
        """Raises a `UsageError` that names file and line."""
        raise UsageError(f"{self.file}, line {self.line}: {why}")

    def all(self, tag: str) -> list["Element"]:
        """The children of that name."""
        return [child for child in self.children if child.tag == tag]

    def one(self, tag: str) -> "Element":
        """The only child of that name."""
        found = self.all(tag)
        if len(found) != 1:
            self.refuse(f"<{self.tag}> needs one <{tag}>, and has {len(found)}")
        return found[0]

    def get(self, name: str) -> str:
        """An attribute."""
        if name not in self.attributes:
            self.refuse(f"<{self.tag}> needs the attribute {name}")
        return self.attributes[name]

    def words(self) -> list[str]:
        """The text's words."""
        return self.text.split()


def source_of(source: str | os.PathLike) -> tuple[bytes, str]:
    """The bytes of a file, or of a text that has more than one line, and what to call it in errors."""
    if isinstance(source, str) and "\n" in source:
        return source.encode(), "text"
    path = Path(source)
    try:
        content = path.read_bytes()
    except OSError as error:
        raise UsageError(f"{path} cannot be read: {error}") from None
    return content.removeprefix(codecs.BOM_UTF8), path.name


def parse(source: str | os.PathLike, root: str) -> Element:
    """The tree of a file or text whose outermost element is `root`.

    Raises:
        UsageError: it cannot be read, is not well formed, or is something else; entities of a document's own are
            refused, too.
    """
    content, name = source_of(source)
    parser = expat.ParserCreate("utf-8" if isinstance(source, str) and "\n" in source else None)
    parser.buffer_text = True  # vectors are long, and come in pieces otherwise
    open_ones: list[Element] = []
    outermost: list[Element] = []

    def begin(tag: str, attributes: dict[str, str]) -> None:
        element = Element(tag, attributes, parser.CurrentLineNumber, name)
        (open_ones[-1].children if open_ones else outermost).append(element)
        open_ones.append(element)

    def end(tag: str) -> None:
        open_ones.pop()

    def add(text: str) -> None:
        open_ones[-1].text += text

    def entity(*given: object) -> None:
        raise UsageError(
            f"{name}, line {parser.CurrentLineNumber}: a document with entities of its own is not read"
        )

    parser.StartElementHandler, parser.EndElementHandler, parser.CharacterDataHandler = (
        begin,
        end,
        add,
    )
    parser.EntityDeclHandler = entity
    try:
        parser.Parse(content, True)
    except (expat.ExpatError, ValueError) as error:
        line = error.lineno if isinstance(error, expat.ExpatError) else 1
        raise UsageError(f"{name}, line {line}: this is no well-formed XML: {error}") from None
    if outermost[0].tag != root:
        outermost[0].refuse(f"expected <{root}>, not <{outermost[0].tag}>")
    return outermost[0]
