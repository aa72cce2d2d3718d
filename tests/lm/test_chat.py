"""Chat templates: found, rendered, refused, and what of a conversation they let count."""

import datetime
import json

import pytest

from jaxpar.lm.text.chat import ChatTemplate, load_chat
from jaxpar.lm.text.examples import chat_ml, documents_of, pieces_of
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


def line_of(messages, **beside):
    return json.dumps({"messages": messages, **beside}).encode()


def counted(messages, template, **beside):
    """The texts that a conversation becomes, each with what counts in it."""
    documents = documents_of(line_of(messages, **beside), "line 1", template)
    assert not any(ends for _, ends in documents)
    return [
        ("".join(text for text, _ in pieces), [text for text, counts in pieces if counts])
        for pieces, _ in documents
    ]


def user(content):
    return {"role": "user", "content": content}


def assistant(content, **beside):
    return {"role": "assistant", "content": content, **beside}


MARKED = """{% for m in messages %}
<{{ m.role }}>{% if m.role == 'assistant' %}{% generation %}
{{ m.content }}{{ eos_token }}{% endgeneration %}
{% else %}{{ m.content }}{% endif %}

{% endfor %}"""


def test_blocks_of_generation_give_the_mask():
    """No prompt is asked for, so only the blocks can say what the assistant wrote."""
    template = ChatTemplate(MARKED, {"eos_token": "</s>"})
    talk = [user("a"), assistant("b"), user("c"), assistant("d")]
    ((text, answers),) = counted(talk, template)
    assert text == "<user>a\n<assistant>b</s>\n<user>c\n<assistant>d</s>\n"
    assert text == template.render(talk, asks=False) and answers == ["b</s>", "d</s>"]
    assert template.render_answers(talk) == (text, [(19, 24), (44, 49)])
    assert template.has_answers and not ChatTemplate(TEMPLATE).has_answers
    assert ChatTemplate("{{ messages[0].content }}").render_answers(talk) == ("a", None)


def test_a_block_of_generation_has_names_of_its_own_and_stays_as_it_is():
    inner = "{% set x = 1 %}{% generation %}{% set x = 2 %}{{ x }}{% endgeneration %}{{ x }}"
    assert ChatTemplate(inner).render_answers([user("a")]) == ("21", [(0, 1)])
    trimmed = "{% set x %}{% generation %} a {% endgeneration %}{% endset %}{{ x | trim }}"
    with pytest.raises(UsageError, match="changes what its {% generation %} blocks wrote"):
        ChatTemplate(trimmed).render_answers([user("a")])
    with pytest.raises(UsageError, match="line 1: the chat template is no Jinja"):
        counted([user("a")], ChatTemplate("{% generation %}"))


def test_the_date_is_that_of_rendering_or_the_one_given():
    text = "{{ strftime_now('%d %b %Y') }}"
    given = ChatTemplate(text, now=datetime.datetime(2024, 7, 26))
    assert given.render([user("a")]) == "26 Jul 2024"
    before = datetime.datetime.now().year
    year = int(ChatTemplate("{{ strftime_now('%Y') }}").render([user("a")]))
    assert before <= year <= datetime.datetime.now().year


TOOLS = """{% if tools is not none %}[{{ tools | tojson }}]{% endif %}{% for m in messages %}
<{{ m.role }}>{% if m.content %}{{ m.content }}{% endif %}
{% for call in m.tool_calls or [] %}({{ call.function.name }} {{ call.function.arguments | tojson }}){% endfor %}
.{% endfor %}{% if add_generation_prompt %}<assistant>{% endif %}"""
CALL = {"type": "function", "function": {"name": "add", "arguments": {"a": 1}}}


def test_tools_are_none_where_there_are_none():
    template = ChatTemplate(TOOLS)
    assert template.render([user("a")]) == "<user>a.<assistant>"
    text = "{{ tools is none }}{{ documents is none }}{{ tools is defined }}"
    assert ChatTemplate(text).render([user("a")]) == "TrueTrueTrue"
    talk = [user("a"), assistant("b")]
    for none in ({}, {"tools": None}, {"tools": []}):
        assert counted(talk, template, **none) == [("<user>a.<assistant>b.", ["b."])]
    ((text, answers),) = counted(talk, template, tools=[{"name": "add"}])
    assert text == '[[{"name": "add"}]]<user>a.<assistant>b.' and answers == ["b."]


def test_content_may_be_null_where_tools_are_called():
    talk = [user("a"), assistant(None, tool_calls=[CALL]), {"role": "tool", "content": "2"}]
    ((text, answers),) = counted([*talk, assistant("b")], ChatTemplate(TOOLS))
    assert text == '<user>a.<assistant>(add {"a": 1}).<tool>2.<assistant>b.'
    assert answers == ['(add {"a": 1}).', "b."]
    absent = {"role": "assistant", "tool_calls": [CALL]}
    assert counted([user("a"), absent], ChatTemplate(TOOLS))[0][1] == ['(add {"a": 1}).']
    for bad in (assistant(None), assistant(None, tool_calls=[])):
        with pytest.raises(UsageError, match="line 1 has the message .*or null with tool_calls"):
            counted([user("a"), bad], ChatTemplate(TOOLS))
    with pytest.raises(UsageError, match="line 1 has tool_calls='x'; legal are a list of objects"):
        counted([user("a"), assistant("b", tool_calls="x")], ChatTemplate(TOOLS))
    with pytest.raises(UsageError, match="line 1 has tools=3; legal are a list of objects"):
        counted(talk, ChatTemplate(TOOLS), tools=3)


PARTS = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
OF_TEXT = "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}"
OF_PARTS = """{% for m in messages %}<{{ m.role }}>{% for part in m.content -%}
{% if part.type == 'text' %}{{ part.text }}|{% endif %}{% endfor %}{% endfor %}"""
OF_BOTH = """{% for m in messages %}<{{ m.role }}>{% if m.content is string %}{{ m.content }}{% else %}
{% for part in m.content %}{{ part.text }}{% endfor %}{% endif %}{% endfor %}"""


@pytest.mark.parametrize(
    ("text", "parts", "string"),
    [(OF_TEXT, "ab", "ab"), (OF_PARTS, "a|b|", "ab|"), (OF_BOTH, "ab", "ab"), (None, "ab", "ab")],
)
def test_content_may_be_a_list_of_parts(text, parts, string):
    template = ChatTemplate(text or "")
    begin = "<user>"
    end = ""
    if text is None:
        template = chat_ml
        begin = "<|im_start|>user\n"
        end = "<|im_end|>\n"
    assert template([user(PARTS)], False) == f"{begin}{parts}{end}"
    assert template([user("ab")], False) == f"{begin}{string}{end}"
    image = [{"type": "image", "url": "x"}]
    with pytest.raises(UsageError, match="line 1: a message has the content .*image.*legal are"):
        counted([user(image)], template)


def test_chat_ml_refuses_what_it_does_not_write():
    for beside in ({"tool_calls": [CALL]}, {"reasoning_content": "r"}, {"thinking": "r"}):
        (key,) = beside
        with pytest.raises(UsageError, match=f"line 1: a message has {key}=.*data.template= gives"):
            counted([user("a"), assistant("b", **beside)], chat_ml)
    with pytest.raises(UsageError, match="line 1 has tools=.*data.template= gives one"):
        counted([user("a"), assistant("b")], chat_ml, tools=[{"name": "add"}])
    empty = assistant("b", tool_calls=None, reasoning_content="")
    assert counted([user("a"), empty], chat_ml)[0][1] == ["b<|im_end|>\n"]


# Reasoning is written in the turns behind the last question alone, as reasoning models have it.
RETHOUGHT = """{% set ns = namespace(last=0) %}{% for m in messages %}
{% if m.role == 'user' %}{% set ns.last = loop.index0 %}{% endif %}{% endfor %}
{% for m in messages %}<{{ m.role }}>
{% if m.role == 'assistant' and loop.index0 > ns.last %}
<think>{{ m.reasoning_content or '' }}</think>{% endif %}
{{ m.content }}.{% endfor %}{% if add_generation_prompt %}<assistant>
{% endif %}"""
REASONED = [
    user("a"),
    assistant("b", reasoning_content="r1"),
    user("c"),
    assistant("d", reasoning_content="r2"),
    {"role": "tool", "content": "t"},
    assistant("e", reasoning_content="r3"),
]


def test_turns_that_are_rewritten_later_are_trained_as_they_were_written():
    template = ChatTemplate(RETHOUGHT.replace("\n", ""))
    first, second = counted(REASONED, template)
    assert first == ("<user>a.<assistant><think>r1</think>b.", ["<think>r1</think>b."])
    later = "<user>a.<assistant>b.<user>c.<assistant><think>r2</think>d.<tool>t.<assistant>"
    assert second == (
        later + "<think>r3</think>e.",
        ["<think>r2</think>d.", "<think>r3</think>e."],
    )
    assert second[0] == template.render(REASONED, asks=False)
    for upto, (text, answers) in ((2, first), (6, second)):  # what is served begins what is trained
        assert text == template.render(REASONED[: upto - 1]) + answers[-1]
    # A question behind the last answer rewrites it as well.
    assert counted(REASONED[:3], template) == [first]


def test_turns_that_are_rewritten_later_are_marked_where_they_were_written():
    text = RETHOUGHT.replace("\n", "").replace(
        "{{ m.content }}.", "{% generation %}{{ m.content }}.{% endgeneration %}"
    )
    first, second = counted(REASONED, ChatTemplate(text))
    assert first[1] == ["b."] and second[1] == ["d.", "e."]


def test_what_cannot_be_trained_is_said():
    """A prompt that begins a thought which the turns of a conversation do not have."""
    asks = "{% if add_generation_prompt %}<assistant><think>{% endif %}"
    template = ChatTemplate(OF_TEXT + asks)
    with pytest.raises(
        UsageError,
        match="line 1: message 2 cannot be trained, as the chat template does not "
        "write it behind its prompt; legal are templates that do, or that mark it by {% gen",
    ):
        counted([user("a"), assistant("b")], template)
    for beside in ({"reasoning_content": "rr"}, {"tool_calls": [CALL]}):
        (key,) = beside
        with pytest.raises(UsageError, match=f"line 1: message 2 has {key}, which the chat temp"):
            counted([user("a"), assistant("b", **beside)], ChatTemplate(OF_TEXT))


def test_one_document_of_a_line_by_the_older_name():
    with pytest.warns(FutureWarning, match="pieces_of is now documents_of"):
        assert pieces_of(b'{"text": "a"}', "x") == ([("a", True)], True)
    with pytest.warns(FutureWarning), pytest.raises(UsageError, match="x is 2 documents"):
        pieces_of(line_of(REASONED), "x", ChatTemplate(RETHOUGHT.replace("\n", "")))
