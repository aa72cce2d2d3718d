"""The chat template of a folder: found, rendered, refused."""

import json

import pytest

from jaxpar.lm.text.chat import load_chat
from jaxpar.types import UsageError

TEMPLATE = """{{ bos_token }}{% for m in messages %}
{% if m.role not in ['user', 'assistant'] %}
    {{ raise_exception('no role ' + m.role) }}
{% endif %}
<{{ m.role }}>{{ m.content | trim }}{{ eos_token }}
{% endfor %}
{% if add_generation_prompt %}
<assistant>{% endif %}"""
TALK = [{"role": "user", "content": " <b>'hi' "}, {"role": "assistant", "content": "ho"}]


@pytest.mark.parametrize("where", ["file", "text", "list"])
def test_a_template_is_found_and_rendered(where, tmp_path):
    settings: dict = {"bos_token": "<s>", "eos_token": {"content": "</s>"}}
    if where == "file":
        (tmp_path / "chat_template.jinja").write_text(TEMPLATE)
        settings["chat_template"] = "older"
    else:
        named = [{"name": "tool", "template": "x"}, {"name": "default", "template": TEMPLATE}]
        settings["chat_template"] = TEMPLATE if where == "text" else named
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(settings))
    chat = load_chat(tmp_path)
    assert chat is not None
    said = "<s><user><b>'hi'</s>\n<assistant>ho</s>\n"
    assert chat.render(TALK, asks=False) == said
    assert chat.render(TALK) == said + "<assistant>"
    with pytest.raises(
        UsageError, match="the chat template cannot take these messages: 'no role system'"
    ):
        chat.render([{"role": "system", "content": ""}])


def test_a_folder_may_have_none_and_what_is_none_is_refused(tmp_path):
    assert load_chat(tmp_path) is None
    for bad in (3, "", [{"name": "tool", "template": "x"}]):
        (tmp_path / "tokenizer_config.json").write_text(json.dumps({"chat_template": bad}))
        with pytest.raises(UsageError, match="legal is a template, or a list with a default one"):
            load_chat(tmp_path)


def test_a_template_changes_and_reaches_nothing(tmp_path):
    for bad in (
        "{{ messages.append(1) }}",
        "{{ ''.__class__.__mro__ }}{{ ''.__class__.mro() }}",
        "{% if %}",
    ):
        (tmp_path / "chat_template.jinja").write_text(bad)
        chat = load_chat(tmp_path)
        assert chat is not None
        with pytest.raises(UsageError, match="cannot take these messages|is no Jinja"):
            chat.render(list(TALK))
