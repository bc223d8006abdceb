"""Templates give the text and the places that transformers gives, or refuse the row."""

import datetime
import json

import pytest
import transformers
from transformers.utils.chat_template_utils import render_jinja_template

from megablocks_core.data.instructions import CHATML, ChatTemplate
from megablocks_core.data.instructions.schemas import BadRow
from megablocks_core.data.instructions.templates import open_template

from .conftest import UNMARKED, some_chats

LOOPS = """
{%- macro wrap(role) %}<{{ role | upper }}>{% endmacro -%}
{%- for message in messages -%}
    {%- if message.role == "skip" %}{% continue %}{% endif -%}
    {{ wrap(message.role) }}
    {%- if message.role == "assistant" %}
        {% generation %}
        {{ message.content | trim }}{{ eos_token }}
        {% endgeneration %}
    {% else %}
        {{ message | tojson }}
    {% endif %}
    {%- set ns = namespace(last=loop.last) -%}
{%- endfor -%}
{% if tools %}{{ tools | tojson(indent=2) }}{% endif %}
"""


@pytest.mark.parametrize("source", [CHATML, UNMARKED, LOOPS], ids=["chatml", "unmarked", "loops"])
def test_text_and_marks_equal_those_of_transformers(source):
    chats = some_chats(30)
    marked = "{% generation %}" in source
    texts, spans = render_jinja_template(
        conversations=chats,
        tools=[{"name": "f"}],
        chat_template=source,
        return_assistant_tokens_mask=marked,
        eos_token="<e>",
    )
    template = ChatTemplate(source, variables={"eos_token": "<e>"})
    assert template.has_marks == marked
    for number, chat in enumerate(chats):
        found = template.render(chat, [{"name": "f"}])
        assert found.text == texts[number]
        assert found.spans == [tuple(span) for span in spans[number]] if marked else not found.spans


def test_prefix_differences_are_the_marks_where_a_template_has_none():
    marked, unmarked = ChatTemplate(CHATML), ChatTemplate(UNMARKED)
    for chat in some_chats(30, seed=1):
        for train_on in ("all", "last", "everything"):
            spans = marked.spans(chat, train_on=train_on)
            assert spans == unmarked.spans(chat, train_on=train_on)
            answers = [m["content"] for m in chat if m["role"] == "assistant"]
            learnt = [spans.text[start:stop] for start, stop in spans.spans]
            if train_on == "everything":
                assert learnt == [spans.text]
            else:
                first = -1 if train_on == "last" else 0
                assert learnt == [f"{answer}<|im_end|>\n" for answer in answers[first:]]


def test_a_prompt_is_not_learnt_from():
    chat = [{"role": r, "content": c} for r, c in (("user", "q"), ("assistant", "a")) * 2]
    for source in (CHATML, UNMARKED):
        found = ChatTemplate(source).spans(chat, prompt=2)
        assert [found.text[a:b] for a, b in found.spans] == ["a<|im_end|>\n"]
        assert found.spans[0][0] > len(found.text) // 2


def test_the_last_turn_is_whole_where_it_has_several_marks():
    source = (
        "{% for m in messages %}{% if m.role == 'assistant' %}"
        "{% generation %}<t>{% endgeneration %}|"
        "{% generation %}{{ m.content }}{% endgeneration %}"
        "{% else %}{{ m.content }}{% endif %}"
        "{% endfor %}"
    )
    chat = [{"role": r, "content": c} for r, c in (("user", "q"), ("assistant", "a")) * 2]
    found = ChatTemplate(source).spans(chat, train_on="last")
    assert (found.text, found.spans) == ("q<t>|aq<t>|a", [(7, 10), (11, 12)])


def test_marks_inside_marks_and_empty_ones_are_one_or_none():
    inner = "a{% generation %}b{% endgeneration %}c"
    source = "x{% generation %}" + inner + "{% endgeneration %}y{% generation %}{% endgeneration %}"
    assert ChatTemplate(source).render([]) == ("xabcy", [(1, 4)])


def test_a_template_without_a_prompt_for_the_assistant_gives_what_the_message_added():
    source = "{% for m in messages %}[{{ m.role }}]{{ m.content }}{% endfor %}"
    chat = [{"role": "user", "content": "q"}, {"role": "assistant", "content": "a"}]
    found = ChatTemplate(source).spans(chat)
    assert found.spans == [(7, len(found.text))]
    other = source + "{% if add_generation_prompt %}[assistant]<think>{% endif %}"
    assert ChatTemplate(other).spans(chat) == found


@pytest.mark.parametrize("train_on", ["all", "last"])
def test_a_template_that_rewrites_earlier_turns_is_an_error_and_no_wrong_mask(train_on):
    source = "{{ messages | length }}" + UNMARKED
    chat = some_chats(1)[0]
    with pytest.raises(BadRow, match="writes otherwise when others follow"):
        ChatTemplate(source).spans(chat[:2] + chat[:2], train_on=train_on)
    marked = "{{ 'x' * messages | length }}" + CHATML
    two = [{"role": r, "content": c} for r, c in (("user", "q"), ("assistant", "a")) * 2]
    assert len(ChatTemplate(marked).spans(two).spans) == 2  # where marks stand does not matter
    with pytest.raises(BadRow, match="writes otherwise when others follow"):
        ChatTemplate(marked).spans(two, train_on="last")


def test_a_template_that_drops_the_reasoning_of_earlier_turns_is_an_error():
    source = (
        "{% for m in messages %}[{{ m.role }}]{% if loop.last %}{{ m.thinking }}{% endif %}"
        "{{ m.content }}{% endfor %}{% if add_generation_prompt %}[assistant]{% endif %}"
    )
    q, a = {"role": "user", "content": "q"}, {"role": "assistant", "content": "a"}
    thought = {**a, "thinking": "so "}
    assert ChatTemplate(source).spans([q, thought]).spans == [(18, 22)]
    with pytest.raises(BadRow, match="writes otherwise when others follow"):
        ChatTemplate(source).spans([q, thought, q, thought])
    assert ChatTemplate(source).spans([q, thought, q, thought], train_on="last").spans


def test_rows_that_a_template_refuses_are_named():
    refusing = ChatTemplate("{{ raise_exception('roles must alternate') }}")
    with pytest.raises(BadRow, match="is refused by the template: roles must alternate"):
        refusing.render([])
    telling = ChatTemplate("{{ raise_exception(messages[0].content) }}")
    with pytest.raises(BadRow, match=r"template: a\\x1b\[2J\\ud800$"):
        telling.render([{"role": "user", "content": "a\x1b[2J\ud800"}])
    deep = {"role": "user", "content": "q", "more": json.loads('{"a":' * 900 + "1" + "}" * 900)}
    with pytest.raises(BadRow, match="is nested too deeply"):
        ChatTemplate(CHATML).render([deep])
    failing = ChatTemplate("{{ messages[0]['content'] + 1 }}")
    with pytest.raises(BadRow, match="is refused by the template"):
        failing.render([{"role": "user", "content": "q"}])


def test_the_sandbox_holds():
    for attack in (
        "{{ messages.append(1) }}",
        "{{ ''.__class__.__mro__ }}{{ messages.__class__.__base__.__subclasses__() }}",
        "{{ range(10000000) | list }}",
    ):
        with pytest.raises(BadRow, match="is refused by the template"):
            ChatTemplate(attack).render([{"role": "user", "content": "q"}])


def test_codes_of_marks_are_refused_in_rows_and_only_there():
    chat = [{"role": "user", "content": "\ufdd0"}, {"role": "assistant", "content": "a"}]
    with pytest.raises(BadRow, match="holds a code that is no character"):
        ChatTemplate(CHATML).render(chat)
    assert "\ufdd0" in ChatTemplate(UNMARKED).render(chat).text
    cut = "{% set x %}{% generation %}ab{% endgeneration %}{% endset %}{{ x[:2] }}"
    with pytest.raises(BadRow, match="is cut by the template"):
        ChatTemplate(cut).render([])


def test_the_date_is_given_and_never_asked_of_the_clock():
    source = "{{ strftime_now('%Y') }}"
    with pytest.raises(BadRow, match="give date="):
        ChatTemplate(source).render([])
    assert ChatTemplate(source, date=datetime.date(2024, 1, 2)).render([]).text == "2024"


def test_what_is_no_template_is_refused():
    with pytest.raises(ValueError, match="must be a template"):
        ChatTemplate("{% for %}")


def test_a_conversation_without_an_answer_is_refused():
    with pytest.raises(BadRow, match="has no turn of the assistant"):
        ChatTemplate(CHATML).spans([{"role": "user", "content": "q"}])


def test_a_template_comes_with_its_tokenizer(bpe, tmp_path):
    source, variables = open_template(None, f"hf:{bpe}")
    assert (source, variables) == (CHATML, {"eos_token": "<|endoftext|>"})
    assert open_template("{{ x }}", f"hf:{bpe}", variables={"eos_token": "e"}) == (
        "{{ x }}",
        {"eos_token": "e"},
    )
    (tmp_path / "t.jinja").write_text("from a file")
    assert open_template(tmp_path / "t.jinja", "bytes") == ("from a file", {})
    assert open_template(None, "bytes") == (None, {})
    with pytest.raises(ValueError, match="must be a file of UTF-8"):
        open_template(tmp_path / "none", "bytes")
    (tmp_path / "t.jinja").write_bytes(b"\xff{{ x }}")
    with pytest.raises(ValueError, match="t.jinja' must be a file of UTF-8"):
        open_template(tmp_path / "t.jinja", "bytes")


@pytest.mark.parametrize(
    ("template", "variables", "message"),
    [
        ("chat.jinja", None, "^template='chat.jinja' must be the text of a template; of a file"),
        (3, None, "^template=3 must be the text of a template, or a Path"),
        (CHATML, ["a"], r"^variables=\['a'\] must be values by name"),
    ],
)
def test_arguments_that_are_no_template_are_refused(template, variables, message):
    with pytest.raises(ValueError, match=message):
        open_template(template, "bytes", variables=variables)


def test_templates_are_found_as_transformers_saves_them(bpe, tmp_path):
    whole = transformers.PreTrainedTokenizerFast(
        tokenizer_file=str(bpe / "tokenizer.json"), bos_token="<|im_start|>", chat_template=CHATML
    )
    whole.save_pretrained(tmp_path)
    source, variables = open_template(None, f"hf:{tmp_path}")
    assert (source, variables["bos_token"]) == (CHATML, "<|im_start|>")
    assert variables == whole.special_tokens_map
    (tmp_path / "chat_template.jinja").unlink()
    named = [{"name": "a", "template": "A"}, {"name": "default", "template": "D"}]
    config = tmp_path / "tokenizer_config.json"
    config.write_text(json.dumps({"chat_template": named}))
    assert open_template(None, f"hf:{tmp_path}")[0] == "D"
    config.write_text(json.dumps({"chat_template": named[:1]}))
    with pytest.raises(ValueError, match=r"has the templates \['a'\]"):
        open_template(None, f"hf:{tmp_path}")
