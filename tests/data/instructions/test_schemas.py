"""Each of the usual schemas gives the messages it means; what is none is refused with a reason."""

import pytest

from megablocks_core.data.instructions.schemas import (
    BadRow,
    read_conversation,
    read_preference,
)

Q, A = {"role": "user", "content": "q"}, {"role": "assistant", "content": "a"}
SYSTEM = {"role": "system", "content": "s"}


@pytest.mark.parametrize(
    ("row", "schema", "messages"),
    [
        ({"messages": [Q, A]}, "messages", [Q, A]),
        ({"messages": [Q, A], "text": "t", "instruction": "i"}, "messages", [Q, A]),
        ({"messages": None, "conversations": [{"from": "human", "value": "q"}]}, "sharegpt", [Q]),
        (
            {"conversations": [{"from": "human", "value": "q"}, {"from": "gpt", "value": "a"}]},
            "sharegpt",
            [Q, A],
        ),
        ({"conversations": [{"from": "system", "value": "s"}]}, "sharegpt", [SYSTEM]),
        ({"system": "s", "conversations": [{"from": "user", "value": "q"}]}, "sharegpt", None),
        ({"instruction": "q", "output": "a"}, "alpaca", [Q, A]),
        ({"instruction": "q", "input": "", "output": "a"}, "alpaca", [Q, A]),
        ({"instruction": "q", "response": "a", "category": "c"}, "dolly", [Q, A]),
        ({"prompt": "q", "completion": "a", "text": "t"}, "completion", [Q, A]),
        ({"prompt": [Q], "completion": [A]}, "completion", [Q, A]),
        ({"system": "s", "prompt": "q", "completion": [A]}, "completion", [SYSTEM, Q, A]),
    ],
)
def test_a_schema_is_known_by_its_keys(row, schema, messages):
    found = read_conversation(row)
    assert found.schema == schema
    assert found.messages == (messages or [SYSTEM, Q])
    assert read_conversation(row, schema) == found


def test_what_a_question_is_about_follows_after_an_empty_line():
    more = {"role": "user", "content": "q\n\nmore"}
    assert read_conversation({"instruction": "q", "input": "more", "output": "a"}).messages == [
        more,
        A,
    ]
    row = {"instruction": "q", "context": "more", "response": "a", "system": "s"}
    assert read_conversation(row).messages == [SYSTEM, more, A]
    row = {"instruction": "q2", "output": "a2", "history": [["q", "a"]]}
    assert [m["content"] for m in read_conversation(row).messages] == ["q", "a", "q2", "a2"]


def test_parts_of_text_are_joined_and_what_else_a_message_has_is_kept():
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    call = {"role": "assistant", "content": None, "tool_calls": [{"function": {"name": "f"}}]}
    row = {"messages": [{"role": "user", "content": parts, "name": "x"}, call], "tools": '["t"]'}
    found = read_conversation(row)
    assert found.messages[0] == {"role": "user", "content": "ab", "name": "x"}
    assert found.messages[1] == {"role": "assistant", "tool_calls": call["tool_calls"]}
    assert found.tools == ["t"]


def test_plain_text_is_no_conversation():
    assert read_conversation({"text": "t"})[:3] == ("text", [], "t")


@pytest.mark.parametrize(
    ("row", "reason"),
    [
        ([1], "is no JSON object"),
        ("text", "is no JSON object"),
        ({}, "has the keys of no schema"),
        ({"instruction": "q"}, "has the keys of no schema"),
        ({"prompt": "q"}, "has the keys of no schema"),
        ({"prompt": "q", "completion": []}, "has no list of messages"),
        ({"prompt": 1, "completion": "a"}, "has no list of messages"),
        ({"messages": []}, "has no list of messages"),
        ({"messages": "[]"}, "has no list of messages"),
        ({"messages": ["q"]}, "has a message that is no JSON object"),
        ({"messages": [{"content": "q"}]}, "has a message without a role"),
        ({"messages": [{"role": 1, "content": "q"}]}, "has a message without a role"),
        ({"messages": [{"role": "user"}]}, "has a message without content"),
        ({"messages": [{"role": "user", "content": 3}]}, "has a content that is no string"),
        (
            {"messages": [{"role": "user", "content": [{"type": "image"}]}]},
            "has a part of a message that is no text",
        ),
        ({"conversations": [{"from": "cat", "value": "q"}]}, "without a role that is known"),
        ({"conversations": [{"from": ["gpt"], "value": "q"}]}, "without a role that is known"),
        ({"conversations": [{"from": "gpt"}]}, "has a content that is no string"),
        ({"conversations": 1}, "has no list of messages"),
        ({"instruction": "q", "output": ["a"]}, "has an answer that is no string"),
        ({"instruction": "q", "output": "a", "history": [["q"]]}, "history that is no list of"),
        ({"text": 1}, "has a text that is no string"),
        ({"messages": [Q, A], "tools": "{"}, "has tools that are not JSON"),
        ({"messages": [Q, A], "tools": {"a": 1}}, "has tools that are no list"),
        (
            {"conversations": [{"from": "system", "value": "s"}], "system": "t"},
            "has two system messages",
        ),
    ],
)
def test_what_is_none_is_refused(row, reason):
    with pytest.raises(BadRow, match=reason):
        read_conversation(row)


def test_a_schema_that_is_named_is_the_only_one():
    with pytest.raises(BadRow, match="has not the keys of the schema alpaca"):
        read_conversation({"messages": [Q, A]}, "alpaca")


def test_pairs_of_messages_and_of_strings():
    bad = {"role": "assistant", "content": "b"}
    explicit = read_preference({"prompt": [Q], "chosen": [A], "rejected": [bad]})
    assert explicit == ([Q], [A], [bad], None)
    assert read_preference({"prompt": "q", "chosen": "a", "rejected": "b"}) == explicit
    assert read_preference({"chosen": [Q, A], "rejected": [Q, bad]}) == explicit


def test_answers_that_hold_the_prompt_hold_it_once():
    bad = {"role": "assistant", "content": "b"}
    explicit = read_preference({"prompt": [Q], "chosen": [A], "rejected": [bad]})
    for prompt in ("q", [Q]):
        row = {"prompt": prompt, "chosen": [Q, A], "rejected": [Q, bad]}
        assert read_preference(row) == explicit
    row = {"prompt": "q", "chosen": [SYSTEM, Q, A], "rejected": [SYSTEM, Q, bad]}
    assert read_preference(row) == ([SYSTEM, Q], [A], [bad], None)
    row = {"prompt": [Q], "chosen": [A, Q, A], "rejected": [A, Q, bad]}
    assert read_preference(row) == ([Q], [A, Q, A], [A, Q, bad], None)


@pytest.mark.parametrize(
    ("row", "reason"),
    [
        ({"chosen": "a"}, "has no 'chosen' and 'rejected'"),
        ({"chosen": "a", "rejected": "b"}, "has no 'prompt'"),
        ({"chosen": [A], "rejected": [Q]}, "has no 'prompt'"),
        ({"chosen": [Q, A], "rejected": [Q, A]}, "an answer without a turn of the assistant"),
        ({"prompt": [Q], "chosen": [Q], "rejected": [A]}, "an answer without a turn"),
        ({"prompt": 3, "chosen": [A], "rejected": [A]}, "has no list of messages"),
    ],
)
def test_what_is_no_pair_is_refused(row, reason):
    with pytest.raises(BadRow, match=reason):
        read_preference(row)
