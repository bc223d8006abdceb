"""Rows of instruction data as messages, whichever of the usual schemas they have.

A schema is known by its keys; a key whose value is null is not there. In this order:

``messages``  [{role, content}, ...]
``sharegpt``  conversations: [{from, value}, ...]
``alpaca``    instruction, output and, if there is one, input
``dolly``     instruction, response and, if there is one, context
``completion``  prompt and completion, each a string or [{role, content}, ...]
``text``      plain text, which is no conversation
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any, NamedTuple

AUTO = "auto"
ASSISTANT = "assistant"
_NEEDED = {
    "messages": ("messages",),
    "sharegpt": ("conversations",),
    "alpaca": ("instruction", "output"),
    "dolly": ("instruction", "response"),
    "completion": ("prompt", "completion"),
    "text": ("text",),
}
SCHEMAS = tuple(_NEEDED)
_ROLES = {
    "system": "system",
    "human": "user",
    "user": "user",
    "gpt": ASSISTANT,
    "assistant": ASSISTANT,
    "chatgpt": ASSISTANT,
    "tool": "tool",
    "observation": "tool",
    "function_response": "tool",
}

Message = dict[str, Any]


class BadRow(Exception):
    """Why a row is no conversation."""


class Conversation(NamedTuple):
    """A row.

    Attributes:
        schema: That it has.
        messages: Of the conversation; none where the row is plain text.
        text: Where it is that.
        tools: That a template may list.
        prompt: The first messages, of which no turn of the assistant is to be learnt.
    """

    schema: str
    messages: list[Message]
    text: str
    tools: list[Any] | None
    prompt: int = 0


class Preference(NamedTuple):
    """Two answers to one prompt, all as messages."""

    prompt: list[Message]
    chosen: list[Message]
    rejected: list[Message]
    tools: list[Any] | None


def read_conversation(row: Any, schema: str = AUTO) -> Conversation:
    """What a row says, by the schema named or the first whose keys it has.

    Raises:
        BadRow: It is none, or damaged.
    """
    given = _present(row)
    if schema == AUTO:
        schema = next((name for name in SCHEMAS if _has(given, name)), "")
        if not schema:
            raise BadRow("has the keys of no schema")
    elif not _has(given, schema):
        raise BadRow(f"has not the keys of the schema {schema}")
    if schema == "text":
        return Conversation(schema, [], _text(given["text"], "a text"), None)
    if schema == "completion":
        return _completed(given)
    messages = {
        "messages": lambda: _messages(given["messages"]),
        "sharegpt": lambda: _share_gpt(given),
        "alpaca": lambda: _single_turn(given, "input", "output"),
        "dolly": lambda: _single_turn(given, "context", "response"),
    }[schema]()
    return Conversation(schema, messages, "", _tools(given))


def read_preference(row: Any) -> Preference:
    """What a row of ``chosen`` and ``rejected`` says, with or without ``prompt``.

    Each is a list of messages, or a string: the one of the user's message in ``prompt``, of the
    assistant's in the others. Without ``prompt``, or where both hold it too, it is the messages
    that both begin with.

    Raises:
        BadRow: It is none, or damaged.
    """
    given = _present(row)
    if not {"chosen", "rejected"} <= given.keys():
        raise BadRow("has no 'chosen' and 'rejected'")
    chosen, rejected = (_turns(given[key], ASSISTANT) for key in ("chosen", "rejected"))
    strings = [key for key in ("prompt", "chosen", "rejected") if isinstance(given.get(key), str)]
    prompt = _turns(given["prompt"], "user") if "prompt" in given else []
    shared = _shared(chosen, rejected)
    if not prompt and {"chosen", "rejected"} & set(strings):
        raise BadRow("has no 'prompt'")
    repeated = chosen[: len(prompt)] == prompt == rejected[: len(prompt)]
    after_system = strings == ["prompt"] and prompt[0] in chosen[:shared]
    if not prompt or repeated or after_system:
        prompt, chosen, rejected = chosen[:shared], chosen[shared:], rejected[shared:]
    if not prompt:
        raise BadRow("has no 'prompt'")
    for answer in (chosen, rejected):
        if not any(message["role"] == ASSISTANT for message in answer):
            raise BadRow("has an answer without a turn of the assistant")
    return Preference(prompt, chosen, rejected, _tools(given))


def _shared(one: list[Message], other: list[Message]) -> int:
    """How many messages two conversations begin with alike."""
    pairs = zip(one, other, strict=False)
    return next((n for n, (a, b) in enumerate(pairs) if a != b), min(len(one), len(other)))


def _present(row: Any) -> dict[str, Any]:
    if not isinstance(row, Mapping):
        raise BadRow("is no JSON object")
    return {key: value for key, value in row.items() if value is not None}


def _has(row: Mapping[str, Any], schema: str) -> bool:
    return all(key in row for key in _NEEDED[schema])


def _messages(given: Any) -> list[Message]:
    if not isinstance(given, list) or not given:
        raise BadRow("has no list of messages")
    return [_message(each) for each in given]


def _message(given: Any) -> Message:
    """A message with its content as one string; what else it has is for the template."""
    if not isinstance(given, Mapping):
        raise BadRow("has a message that is no JSON object")
    message = {key: value for key, value in given.items() if value is not None}
    if not isinstance(message.get("role"), str):
        raise BadRow("has a message without a role")
    content = message.get("content")
    if content is None:
        if "tool_calls" not in message:
            raise BadRow("has a message without content")
        return message
    if isinstance(content, list):
        content = "".join(map(_part, content))
    return {**message, "content": _text(content, "a content")}


def _part(given: Any) -> str:
    if not isinstance(given, Mapping) or given.get("type") != "text":
        raise BadRow("has a part of a message that is no text")
    return _text(given.get("text"), "a content")


def _share_gpt(row: Mapping[str, Any]) -> list[Message]:
    turns = row["conversations"]
    if not isinstance(turns, list) or not turns:
        raise BadRow("has no list of messages")
    messages = []
    for turn in turns:
        if not isinstance(turn, Mapping):
            raise BadRow("has a message that is no JSON object")
        role = turn.get("from")
        if not isinstance(role, str) or role not in _ROLES:
            raise BadRow("has a message without a role that is known")
        messages.append({"role": _ROLES[role], "content": _text(turn.get("value"), "a content")})
    return _with_system(row, messages)


def _single_turn(row: Mapping[str, Any], more: str, answer: str) -> list[Message]:
    """An instruction, with what it is about after an empty line, and its answer."""
    messages: list[Message] = []
    history = row.get("history", [])
    if not isinstance(history, list):
        raise BadRow("has a history that is no list of pairs")
    for pair in history:
        if not isinstance(pair, list) or len(pair) != 2:
            raise BadRow("has a history that is no list of pairs")
        messages += _pair(_text(pair[0], "a history"), _text(pair[1], "a history"))
    question = _text(row["instruction"], "an instruction")
    if added := _text(row.get(more, ""), f"an {more}" if more == "input" else f"a {more}"):
        question = f"{question}\n\n{added}"
    messages += _pair(question, _text(row[answer], "an answer"))
    return _with_system(row, messages)


def _completed(row: Mapping[str, Any]) -> Conversation:
    prompt = _with_system(row, _turns(row["prompt"], "user"))
    messages = [*prompt, *_turns(row["completion"], ASSISTANT)]
    return Conversation("completion", messages, "", _tools(row), len(prompt))


def _pair(question: str, answer: str) -> list[Message]:
    return [{"role": "user", "content": question}, {"role": ASSISTANT, "content": answer}]


def _with_system(row: Mapping[str, Any], messages: list[Message]) -> list[Message]:
    said = _text(row.get("system", ""), "a system")
    if not said:
        return messages
    if messages[0]["role"] == "system":
        raise BadRow("has two system messages")
    return [{"role": "system", "content": said}, *messages]


def _turns(given: Any, role: str) -> list[Message]:
    return [{"role": role, "content": given}] if isinstance(given, str) else _messages(given)


def _tools(row: Mapping[str, Any]) -> list[Any] | None:
    tools = row.get("tools")
    if isinstance(tools, str):  # as tables have to hold what differs in shape from row to row
        try:
            tools = json.loads(tools) if tools.strip() else None
        except (ValueError, RecursionError):
            raise BadRow("has tools that are not JSON") from None
    if tools is not None and not isinstance(tools, list):
        raise BadRow("has tools that are no list")
    return tools or None


def _text(value: Any, what: str) -> str:
    if not isinstance(value, str):
        raise BadRow(f"has {what} that is no string")
    return value
