"""Chat templates: the text of a conversation, and where in it the assistant speaks.

A template is a program in Jinja that comes with a model, so it runs in Jinja's sandbox, with the
functions and the layout of blocks that the field's templates are written for.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

from megablocks_core.data.instructions.schemas import ASSISTANT, BadRow, Message
from megablocks_core.data.packages import package
from megablocks_core.data.tokenize.encoders import tokenizer_file

CHATML = (
    "{% for message in messages %}"
    "<|im_start|>{{ message['role'] }}\n"
    "{% if message['role'] == 'assistant' %}"
    "{% generation %}{{ message['content'] }}<|im_end|>\n{% endgeneration %}"
    "{% else %}{{ message['content'] }}<|im_end|>\n{% endif %}"
    "{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
ALL, LAST, EVERYTHING = "all", "last", "everything"
TRAIN_ON = (ALL, LAST, EVERYTHING)
# Codes that Unicode gives no meaning in exchanged text stand at both ends of what is generated.
_BEGIN, _END = "\ufdd0", "\ufdd1"
_OTHERWISE = "has turns that the template writes otherwise when others follow"
_SPECIAL = ("bos", "eos", "unk", "sep", "pad", "cls", "mask")

Span = tuple[int, int]


class Rendered(NamedTuple):
    """The text of a conversation, and the characters [start, stop) that ``{% generation %}`` made.

    The spans are in order, do not overlap and are not empty.
    """

    text: str
    spans: list[Span]


class ChatTemplate:
    """A chat template with the variables that it is given beside the messages.

    Args:
        source: Its text.
        variables: Such as ``eos_token`` or ``enable_thinking``.
        date: What ``strftime_now`` formats: any object with ``strftime``. A template that asks
            for the date when there is none is an error, so that the same rows give the same ids
            tomorrow.

    Raises:
        ValueError: The source is no template.
        ModuleNotFoundError: Jinja is missing.
    """

    def __init__(
        self, source: str, *, variables: Mapping[str, Any] | None = None, date: Any = None
    ) -> None:
        self.source = source
        self._variables = dict(variables or {})
        self._jinja = package("jinja2", what="a chat template", extra="instructions")
        marks: list[int] = []
        environment = _environment(self._jinja, date, marks)
        try:
            self._template = environment.from_string(source)
        except self._jinja.TemplateError as error:
            raise ValueError(f"template={_shown(source)} must be a template: {error}") from None
        self.has_marks = bool(marks)

    def render(
        self,
        messages: Sequence[Message],
        tools: Sequence[Any] | None = None,
        *,
        add_generation_prompt: bool = False,
    ) -> Rendered:
        """The text of messages.

        Raises:
            BadRow: The template refuses them or fails on them.
        """
        try:
            if self.has_marks:
                _refuse_codes([list(messages), tools])
            text = self._template.render(
                **self._variables,
                messages=list(messages),
                tools=tools,
                documents=None,
                add_generation_prompt=add_generation_prompt,
            )
        except (BadRow, MemoryError):
            raise
        except RecursionError:
            raise BadRow("is nested too deeply") from None
        except Exception as error:  # whatever a program does with a row it did not expect
            raise BadRow(f"is refused by the template: {_first_line(error)}") from None
        return _unmarked(text) if self.has_marks else Rendered(text, [])

    def spans(
        self,
        messages: Sequence[Message],
        tools: Sequence[Any] | None = None,
        *,
        train_on: str = ALL,
        prompt: int = 0,
    ) -> Rendered:
        """The text of messages with what is to be learnt of it.

        That is what the template marks by ``{% generation %}``. Without such marks, it is what an
        assistant's message adds to the text of those before it and the generation prompt, or to
        the former alone where the latter is not what the template itself begins the message with.

        Args:
            messages: All of them.
            tools: For the template.
            train_on: "all" turns of the assistant, the "last" one, or "everything".
            prompt: The first messages, of which nothing is to be learnt.

        Raises:
            BadRow: The text of some messages does not begin that of all: then no place in
                it is known to be a message's.
        """
        whole = self.render(messages, tools)
        if train_on == EVERYTHING and not prompt:
            return Rendered(whole.text, [(0, len(whole.text))] if whole.text else [])
        turns = [i for i, message in enumerate(messages) if message["role"] == ASSISTANT]
        turns = [i for i in turns if i >= prompt]
        if not turns:
            raise BadRow("has no turn of the assistant")
        first = turns[-1] if train_on == LAST else turns[0]
        if self.has_marks:
            if first == next(i for i, m in enumerate(messages) if m["role"] == ASSISTANT):
                return whole
            before = self.render(messages[:first], tools).spans
            if whole.spans[: len(before)] != before:
                raise BadRow(_OTHERWISE)
            return Rendered(whole.text, whole.spans[len(before) :])
        if train_on == LAST:
            turns = turns[-1:]
        found = [self._added(whole.text, messages, turn, tools) for turn in turns]
        return Rendered(whole.text, [span for span in found if span[0] < span[1]])

    def _added(
        self, whole: str, messages: Sequence[Message], turn: int, tools: Sequence[Any] | None
    ) -> Span:
        """What of the text one message added."""
        before = self.render(messages[:turn], tools).text if turn else ""
        prompted = self.render(messages[:turn], tools, add_generation_prompt=True).text
        through = self.render(messages[: turn + 1], tools).text
        if not through.startswith(before) or not whole.startswith(through):
            raise BadRow(_OTHERWISE)
        return len(prompted if through.startswith(prompted) else before), len(through)


def open_template(
    template: str | Path | None, tokenizer: str, *, variables: Mapping[str, Any] | None = None
) -> tuple[str | None, dict[str, Any]]:
    """The source of a template, if there is one, and its variables.

    Args:
        template: Its text, the path of a file that holds it, or none: the one that comes with
            the tokenizer.
        tokenizer: ``hf:PATH``; the special tokens beside it are variables such as ``eos_token``.
        variables: More of them, which go before.

    Raises:
        ValueError: There are several, the file cannot be read, or the text is that of a path.
    """
    if variables is not None and not isinstance(variables, Mapping):
        raise ValueError(f"variables={variables!r} must be values by name")
    if not isinstance(template, str | Path | None):
        raise ValueError(f"template={template!r} must be the text of a template, or a Path")
    if isinstance(template, str) and template and "{" not in template:
        raise ValueError(
            f"template={_shown(template)} must be the text of a template; of a file, give a Path"
        )
    folder = tokenizer_file(tokenizer[3:]).parent if tokenizer.startswith("hf:") else None
    config = _json(folder / "tokenizer_config.json") if folder else {}
    special = {**(_json(folder / "special_tokens_map.json") if folder else {}), **config}
    tokens = {f"{name}_token": special.get(f"{name}_token") for name in _SPECIAL}
    contents = {
        name: token.get("content") if isinstance(token, dict) else token
        for name, token in tokens.items()
        if token is not None
    }
    if isinstance(template, Path):
        try:
            source = template.read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            why = f"must be a file of UTF-8: {error}"
            raise ValueError(f"template={str(template)!r} {why}") from None
    else:
        source = template or _beside(folder, config, tokenizer)
    return source, {**contents, **(variables or {})}


def _beside(folder: Path | None, config: dict[str, Any], tokenizer: str) -> str | None:
    """The template in a tokenizer's folder."""
    if folder and (folder / "chat_template.jinja").is_file():
        return (folder / "chat_template.jinja").read_text(encoding="utf-8")
    source = config.get("chat_template")
    if isinstance(source, list):
        named = {each["name"]: each["template"] for each in source}
        source = named.get("default")
        if source is None:
            raise ValueError(
                f"tokenizer={tokenizer!r} has the templates {sorted(named)}; give the text of one"
            )
    return source if isinstance(source, str) else None


def _environment(jinja: Any, date: Any, marks: list[int]) -> Any:
    sandbox = package("jinja2.sandbox", what="a chat template", extra="instructions")
    extensions = package("jinja2.ext", what="a chat template", extra="instructions")
    environment = sandbox.ImmutableSandboxedEnvironment(
        trim_blocks=True,
        lstrip_blocks=True,
        extensions=[_generation(jinja, extensions, marks), extensions.loopcontrols],
    )

    def refuse(message: str) -> None:
        raise jinja.TemplateError(message)

    def now(layout: str) -> str:
        if date is None:
            raise jinja.TemplateError("it asks for the date, so give date=")
        return date.strftime(layout)

    environment.filters["tojson"] = _to_json
    environment.globals |= {"raise_exception": refuse, "strftime_now": now}
    return environment


def _generation(jinja: Any, extensions: Any, marks: list[int]) -> type:
    """The tag ``{% generation %}``, which puts a code at both ends of what it holds.

    The lines of the tags of templates are added to ``marks``.
    """

    class Generation(extensions.Extension):
        tags = {"generation"}

        def parse(self, parser: Any) -> Any:
            line = next(parser.stream).lineno
            marks.append(line)
            body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
            call = self.call_method("_marked")
            return jinja.nodes.CallBlock(call, [], [], body).set_lineno(line)

        def _marked(self, caller: Any) -> str:
            return f"{_BEGIN}{caller()}{_END}"

    return Generation


def _unmarked(text: str) -> Rendered:
    """Take the codes out and note where they stood."""
    parts, spans, length, depth, start = [], [], 0, 0, 0
    for piece in text.replace(_END, _BEGIN + _END).split(_BEGIN):
        if parts:
            if piece.startswith(_END):
                piece, depth = piece[1:], depth - 1
                if not depth and length > start:
                    spans.append((start, length))
            else:
                start, depth = (start if depth else length), depth + 1
        parts.append(piece)
        length += len(piece)
    if depth:
        raise BadRow("is cut by the template where it marks what is generated")
    return Rendered("".join(parts), spans)


def _refuse_codes(value: Any) -> None:
    """Raise ``BadRow`` if a string of a row holds a code that stands for the ends of a span."""
    if isinstance(value, str):
        if _BEGIN in value or _END in value:
            raise BadRow("holds a code that is no character")
    elif isinstance(value, Mapping):
        for item in value.items():
            _refuse_codes(item)
    elif isinstance(value, list | tuple):
        for item in value:
            _refuse_codes(item)


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: Any = None,
    sort_keys: bool = False,
) -> str:
    write = partial(json.dumps, indent=indent, separators=separators, sort_keys=sort_keys)
    return write(value, ensure_ascii=ensure_ascii)


def _json(path: Path) -> dict[str, Any]:
    with suppress(OSError, ValueError):
        found = json.loads(path.read_bytes())
        return found if isinstance(found, dict) else {}
    return {}


def _first_line(error: Exception) -> str:
    line = (str(error).strip() or type(error).__name__).splitlines()[0][:80]
    return "".join(each if each.isprintable() else ascii(each)[1:-1] for each in line)


def _shown(source: str) -> str:
    return repr(source if len(source) < 60 else source[:57] + "...")
