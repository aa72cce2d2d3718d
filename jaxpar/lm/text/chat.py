"""The chat template of a Hugging Face folder: messages to the text that its model was trained on."""

import dataclasses
import datetime
import functools
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from jaxpar.lm.hub.gguf_files import folder_of
from jaxpar.lm.hub.keys import brief, read_json
from jaxpar.types import UsageError

__all__ = ["ChatTemplate", "load_chat", "open_template"]

_BEGIN = "\ufdd0"
_END = "\ufdd1"
"""Marks around an answer: no characters, by Unicode's rule, so no text has them."""

_PROBE = "jaxparprobe"


@dataclasses.dataclass(frozen=True)
class ChatTemplate:
    """A Jinja template, rendered as transformers does it: in a sandbox that can change nothing.

    Attributes:
      text: The template.
      tokens: What it calls special tokens, such as bos_token.
      now: Moment that `strftime_now` returns; None: the present one.
    """

    text: str
    tokens: Mapping[str, str] = dataclasses.field(default_factory=dict)
    now: datetime.datetime | None = None

    def render(
        self, messages: Sequence[Mapping[str, object]], *, asks: bool = True, **values: object
    ) -> str:
        """Returns the text of a conversation.

        A content may be a list of parts of text. A template that reads strings alone gets them
        joined, and one that reads parts alone gets a string as one part.

        Args:
          messages: Each with "role" and "content", and what else the template reads in it.
          asks: Whether an answer is to follow: `add_generation_prompt`.
          values: What else the template reads, such as tools; `tools` and `documents` are None
            unless given.

        Raises:
          UsageError: If jinja2 is absent, or the template refuses the messages or is none, or a
            part of a content is no text.
        """
        return self._render(self._as_read(messages), asks, values)

    def render_answers(
        self, messages: Sequence[Mapping[str, object]], **values: object
    ) -> tuple[str, list[tuple[int, int]] | None]:
        """Returns the text of a conversation, and spans of the template's `{% generation %}` blocks.

        Returns:
          The text as `render` returns it with `asks=False`, and spans of its characters in order,
          first and one past the last; None where the template has no such block.

        Raises:
          UsageError: As `render`; or a block's text is changed after it was written.
        """
        read = self._as_read(messages)
        text = self._render(read, False, values)
        if not self.has_answers:
            return text, None
        marks = {"generation_begins": _BEGIN, "generation_ends": _END}
        marked = self._render(read, False, {**values, **marks})
        spans = []
        pieces = marked.split(_BEGIN)
        length = len(pieces[0])
        for piece in pieces[1:]:
            answer, end, rest = piece.partition(_END)
            spans.append((length, length + len(answer)))
            length += len(answer) + len(rest)
            if not end:
                break
        if marked.replace(_BEGIN, "").replace(_END, "") != text or length != len(text):
            raise UsageError(
                "the chat template changes what its {% generation %} blocks wrote; legal are blocks "
                "that are written as they are."
            )
        return text, spans

    @property
    def has_answers(self) -> bool:
        """True if the template marks answers by `{% generation %}` blocks."""
        return _compiled(self.text)[2]

    def __call__(self, messages: Sequence[Mapping[str, object]], answer: bool) -> str:
        """Returns `render`'s text, as `jaxpar.lm.text.examples.Template`."""
        return self.render(messages, asks=answer)

    def _render(self, messages: object, asks: bool, values: Mapping[str, object]) -> str:
        template, wrong, _ = _compiled(self.text)
        now = self.now or datetime.datetime.now()
        read = {"tools": None, "documents": None, "strftime_now": now.strftime, **self.tokens}
        read |= {**values, "messages": messages, "add_generation_prompt": asks}
        try:
            return template.render(read)
        except (wrong, TypeError) as error:
            raise UsageError(
                f"the chat template cannot take these messages: {brief(str(error))}"
            ) from None

    def _as_read(self, messages: Sequence[Mapping[str, object]]) -> list[Mapping[str, object]]:
        """Returns messages with contents in the form that the template reads."""
        contents = [message.get("content") for message in messages]
        if not any(isinstance(content, str | list) for content in contents):
            return list(messages)
        reads_text, reads_parts = _contents_read(self)
        out = []
        for message, content in zip(messages, contents, strict=True):
            if isinstance(content, list):
                joined = text_of(content)
                if not reads_parts:
                    message = {**message, "content": joined}
            elif isinstance(content, str) and reads_parts and not reads_text:
                message = {**message, "content": [{"type": "text", "text": content}]}
            out.append(message)
        return out


def text_of(content: object) -> str:
    """Returns the text of a message's content: a string, a list of parts of text, or None for none.

    Raises:
      UsageError: If it is something else.
    """
    if content is None or isinstance(content, str):
        return content or ""
    if not isinstance(content, list):
        raise _no_content(content)
    texts = []
    for part in content:
        if not isinstance(part, dict) or part.get("type") != "text":
            raise _no_content(part)
        text = part.get("text")
        if not isinstance(text, str):
            raise _no_content(part)
        texts.append(text)
    return "".join(texts)


def _no_content(value: object) -> UsageError:
    return UsageError(
        f"a message has the content {brief(value)}; legal are a string, null and a list of "
        '{"type": "text", "text": ...}.'
    )


@functools.lru_cache(maxsize=16)
def _contents_read_by(text: str, tokens: tuple[tuple[str, str], ...]) -> tuple[bool, bool]:
    template = ChatTemplate(text, dict(tokens))
    found = []
    for content in (_PROBE, [{"type": "text", "text": _PROBE}]):
        try:
            out = template._render([{"role": "user", "content": content}], False, {})
        except UsageError:  # it may need a turn of the system
            out = ""
        # A list that was written as Python or JSON does was not read.
        found.append(_PROBE in out and f"'{_PROBE}'" not in out and f'"{_PROBE}"' not in out)
    return found[0], found[1]


def _contents_read(template: ChatTemplate) -> tuple[bool, bool]:
    """Returns whether a template writes the text of a string, and of a list of parts."""
    return _contents_read_by(template.text, tuple(sorted(template.tokens.items())))


@functools.lru_cache(maxsize=16)  # JSONL has many conversations of one template
def _compiled(
    text: str,
) -> tuple[Any, type[Exception], bool]:  # jinja2 is not always there to name its types
    """Returns a template of jinja2's sandbox, what it raises, and whether it marks answers."""
    try:
        import jinja2
        import jinja2.ext
        from jinja2 import nodes
        from jinja2.sandbox import ImmutableSandboxedEnvironment
    except ImportError:
        raise UsageError("chat templates need jinja2; pip install 'jaxpar[chat]'.") from None
    marks = []

    class Generation(jinja2.ext.Extension):
        """Reads `{% generation %}` blocks: their bodies between two names, undefined by default."""

        tags = {"generation"}

        def parse(self, parser: Any) -> Any:  # jinja2 is not always there to name its types
            marks.append(next(parser.stream).lineno)
            body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
            begin = nodes.Output([nodes.Name("generation_begins", "load")])
            end = nodes.Output([nodes.Name("generation_ends", "load")])
            return nodes.Scope([begin, *body, end], lineno=marks[-1])

    def refuse(sentence: str) -> None:
        raise jinja2.TemplateError(sentence)

    room = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols", Generation]
    )
    room.filters["tojson"] = lambda x, **options: json.dumps(x, ensure_ascii=False, **options)
    room.globals["raise_exception"] = refuse
    try:
        return room.from_string(text), jinja2.TemplateError, bool(marks)
    except jinja2.TemplateError as error:
        raise UsageError(f"the chat template is no Jinja: {brief(str(error))}") from None


def open_template(path: str | Path) -> ChatTemplate:
    """Returns the template in a file of Jinja text, a Hugging Face folder or a GGUF file.

    Raises:
      UsageError: If there is none.
    """
    path = folder_of(Path(path).expanduser())
    found = (
        ChatTemplate(path.read_text("utf-8"))
        if path.is_file()
        else load_chat(path)
        if path.is_dir()
        else None
    )
    if found is None:
        raise UsageError(
            f"{path} has no chat template; legal are a file of Jinja text and a folder that has one."
        )
    return found


def load_chat(folder: str | Path) -> ChatTemplate | None:
    """Returns a folder's template, of `chat_template.jinja`, else `tokenizer_config.json`; None where there is none.

    Raises:
      UsageError: If what is there is no template.
    """
    folder = folder_of(folder)
    file = folder / "tokenizer_config.json"
    settings = read_json(file) if file.is_file() else {}
    tokens = {}
    for key in ("bos_token", "eos_token", "pad_token", "unk_token"):
        value = settings.get(key)
        value = value.get("content") if isinstance(value, dict) else value
        if isinstance(value, str):
            tokens[key] = value
    if (folder / "chat_template.jinja").is_file():
        return ChatTemplate((folder / "chat_template.jinja").read_text("utf-8"), tokens)
    text = settings.get("chat_template")
    if isinstance(text, list):  # several by name
        text = next(
            (x.get("template") for x in text if isinstance(x, dict) and x.get("name") == "default"),
            "",
        )
    if text is None:
        return None
    if not isinstance(text, str) or not text:
        raise UsageError(
            f"{file} has chat_template={brief(text)}; legal is a template, or a list with a default one."
        )
    return ChatTemplate(text, tokens)
