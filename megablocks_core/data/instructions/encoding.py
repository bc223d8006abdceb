"""Rows of instruction data to ids, with what of them is to be learnt.

What is learnt is a fact of each token: 1 where the token is to be predicted. It is written as the
*mode* of sequences: each document is cut where it changes.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

from megablocks_core.data.instructions.offsets import Located, open_locator
from megablocks_core.data.instructions.rows import Block, rows_of
from megablocks_core.data.instructions.schemas import BadRow, read_conversation, read_preference
from megablocks_core.data.instructions.templates import ALL, EVERYTHING, ChatTemplate, Rendered
from megablocks_core.data.tokenize.encoders import open_encoder
from megablocks_core.data.tokenize.reading import Bad

CONVERSATIONS, PREFERENCES = "conversations", "preferences"


class Settings(NamedTuple):
    """What decides the ids of rows.

    Attributes:
        kind: Conversations or preferences.
        tokenizer: Its spec.
        name: Of the tokenizer, which has its hash.
        dtype: Of the ids.
        schema: Of the rows, or "auto".
        template: Its source, or none where all rows are plain text.
        variables: Of the template.
        date: Of the template.
        train_on: What is learnt.
        end: The id after a plain text, if the tokenizer has one.
        max_bytes: Of a row.
    """

    kind: str
    tokenizer: str
    name: str
    dtype: str
    schema: str
    template: str | None
    variables: dict[str, Any]
    date: Any
    train_on: str
    end: int | None
    max_bytes: int

    def open(self) -> RowEncoder:
        """What encodes by them."""
        return RowEncoder(self)


class EncodedRows(NamedTuple):
    """Of one block.

    Attributes:
        ids: Of all documents, end to end.
        sequences: Their lengths, cut where what is learnt changes.
        modes: 1 for each sequence that is learnt, else 0.
        counts: How many sequences each document has.
        schemas: How many rows had each schema.
        learnt: How many tokens are to be predicted.
        empty: Plain texts without ids.
        control: Rows in which a string of their own is the text of a special token.
        bad: What is no row.
    """

    ids: np.ndarray
    sequences: list[int]
    modes: list[int]
    counts: list[int]
    schemas: dict[str, int]
    learnt: int
    empty: int
    control: int
    bad: list[Bad]


class _Ready(NamedTuple):
    """A row whose texts are to be encoded."""

    line: int
    schema: str
    texts: list[Rendered]
    control: bool


class RowEncoder:
    """Encodes blocks of rows, each by itself; the same block gives the same anywhere."""

    def __init__(self, settings: Settings) -> None:
        self.settings = settings
        if open_encoder(settings.tokenizer).name != settings.name:
            raise ValueError(f"tokenizer={settings.tokenizer!r} has changed since the run began")
        self._locator = open_locator(settings.tokenizer)
        self._template = None
        if settings.template is not None:
            self._template = ChatTemplate(
                settings.template, variables=settings.variables, date=settings.date
            )

    def encode(self, block: Block) -> EncodedRows:
        """What is written of a block."""
        bad: list[Bad] = []
        ready: list[_Ready] = []
        for line, row in rows_of(block, self.settings.max_bytes, bad):
            try:
                ready.append(self._prepared(line, row))
            except BadRow as error:
                bad.append(Bad(block.file, line, str(error)))
        documents: list[np.ndarray] = []
        encoded = EncodedRows(np.empty(0), [], [], [], {}, 0, 0, 0, bad)
        empty = control = learnt = 0
        located = self._locate([one.text for row in ready for one in row.texts])
        for row in ready:
            pieces = [next(located) for _ in row.texts]
            try:
                written = [
                    self._written(row, *each) for each in zip(pieces, row.texts, strict=True)
                ]
            except BadRow as error:
                bad.append(Bad(block.file, row.line, str(error)))
                continue
            if not len(written[0][0]):
                empty += 1
                continue
            for ids, mask in written:
                documents.append(ids)
                learnt += _cut(mask, encoded)
            control += row.control
            encoded.schemas[row.schema] = encoded.schemas.get(row.schema, 0) + 1
        return encoded._replace(
            ids=np.concatenate([*documents, np.empty(0, self.settings.dtype)]),
            empty=empty,
            control=control,
            learnt=learnt,
            bad=sorted(bad),
        )

    def _prepared(self, line: int, row: Any) -> _Ready:
        """The texts of a row and what is learnt of them."""
        train_on, template = self.settings.train_on, self._template
        if self.settings.kind == PREFERENCES:
            assert template
            pair = read_preference(row)
            prompt = len(pair.prompt)
            texts = [
                template.spans([*pair.prompt, *answer], pair.tools, train_on=ALL, prompt=prompt)
                for answer in (pair.chosen, pair.rejected)
            ]
            own, schema = [*pair.prompt, *pair.chosen, *pair.rejected], PREFERENCES
        else:
            schema, messages, text, tools, prompt = read_conversation(row, self.settings.schema)
            if schema == "text":
                texts, own = [Rendered(text, [(0, len(text))])], [{"content": text}]
            elif template is None:
                raise BadRow("is a conversation, which needs a template")
            else:
                prompt = 0 if train_on == EVERYTHING else prompt
                rendered = template.spans(messages, tools, train_on=train_on, prompt=prompt)
                texts, own = [rendered], messages
        for rendered in texts:
            _refuse_text(rendered.text)
        return _Ready(line, schema, texts, self._holds_control(own))

    def _holds_control(self, messages: list[Any]) -> bool:
        contents = [message.get("content") or "" for message in messages]
        return any(token in content for content in contents for token in self._locator.special)

    def _locate(self, texts: list[str]) -> Any:
        """The ids of each text; none of one that the tokenizer fails on."""
        try:
            yield from self._locator.locate(texts)
        except BaseException as error:  # a panic of an engine in Rust is no Exception
            if isinstance(error, KeyboardInterrupt | SystemExit | MemoryError | GeneratorExit):
                raise
            if len(texts) == 1:
                yield None
            else:
                for text in texts:
                    yield from self._locate([text])

    def _written(
        self, row: _Ready, located: Located | None, rendered: Rendered
    ) -> tuple[np.ndarray, np.ndarray]:
        """The ids of a text, and which of them are learnt."""
        if located is None:
            raise BadRow("cannot be encoded by the tokenizer")
        ids, mask = located.ids.astype(self.settings.dtype), located.inside(rendered.spans)
        if row.schema == "text":
            if len(ids) and self.settings.end is not None:
                ids, mask = np.append(ids, ids.dtype.type(self.settings.end)), np.append(mask, True)
        elif not mask[1:].any():
            raise BadRow("has nothing to learn")
        return ids, mask


def _cut(mask: np.ndarray, encoded: EncodedRows) -> int:
    """Add the sequences of a document, cut where the mask changes; return what can be learnt."""
    bounds = [0, *(np.flatnonzero(mask[1:] != mask[:-1]) + 1).tolist(), len(mask)]
    encoded.sequences.extend(np.diff(bounds).tolist())
    encoded.modes.extend(mask[bounds[:-1]].astype(int).tolist())
    encoded.counts.append(len(bounds) - 1)
    return int(mask[1:].sum())  # nothing stands before the first, to predict it from


def _refuse_text(text: str) -> None:
    if "\0" in text:
        raise BadRow("holds a NUL")
    if not text.isascii():
        try:
            text.encode()
        except UnicodeEncodeError:
            raise BadRow("holds half a surrogate pair") from None
