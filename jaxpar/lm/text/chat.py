"""The chat template of a Hugging Face folder: messages to the text that its model was trained on."""

import dataclasses
import functools
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from jaxpar.lm.hub.keys import brief, read_json
from jaxpar.types import UsageError


@dataclasses.dataclass(frozen=True)
class ChatTemplate:
    """A Jinja template, rendered as transformers does it: in a sandbox that can change nothing.

    Attributes:
      text: The template.
      tokens: What it calls special tokens, such as bos_token.
    """

    text: str
    tokens: Mapping[str, str] = dataclasses.field(default_factory=dict)

    def render(
        self, messages: Sequence[Mapping[str, object]], *, asks: bool = True, **values: object
    ) -> str:
        """Returns the text of a conversation.

        Args:
          messages: Each with "role" and "content".
          asks: Whether an answer is to follow: `add_generation_prompt`.
          values: What else the template reads, such as tools.

        Raises:
          UsageError: If jinja2 is absent, or the template refuses the messages or is none.
        """
        template, wrong = _compiled(self.text)
        try:
            return template.render(
                messages=messages, add_generation_prompt=asks, **self.tokens, **values
            )
        except (wrong, TypeError) as error:
            raise UsageError(
                f"the chat template cannot take these messages: {brief(str(error))}"
            ) from None

    def __call__(self, messages: Sequence[Mapping[str, object]], answer: bool) -> str:
        """Returns `render`'s text, as `jaxpar.lm.text.examples.Template`."""
        return self.render(messages, asks=answer)


@functools.lru_cache(maxsize=16)  # JSONL has many conversations of one template
def _compiled(
    text: str,
) -> tuple[Any, type[Exception]]:  # jinja2 is not always there to name its types
    """Returns a template of jinja2's sandbox, and what it raises."""
    try:
        import jinja2
        from jinja2.sandbox import ImmutableSandboxedEnvironment
    except ImportError:
        raise UsageError("chat templates need jinja2; pip install 'jaxpar[chat]'.") from None

    def refuse(sentence: str) -> None:
        raise jinja2.TemplateError(sentence)

    room = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols"]
    )
    room.filters["tojson"] = lambda x, **options: json.dumps(x, ensure_ascii=False, **options)
    room.globals["raise_exception"] = refuse
    try:
        return room.from_string(text), jinja2.TemplateError
    except jinja2.TemplateError as error:
        raise UsageError(f"the chat template is no Jinja: {brief(str(error))}") from None


def open_template(path: str | Path) -> ChatTemplate:
    """Returns the template in a file of Jinja text, or that of a Hugging Face folder.

    Raises:
      UsageError: If there is none.
    """
    path = Path(path).expanduser()
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
    folder = Path(folder)
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
