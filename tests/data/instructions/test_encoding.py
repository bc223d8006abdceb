"""A block of rows becomes documents cut where what is learnt changes; a bad row is one bad row."""

import json
import subprocess
import sys

import numpy as np
import pytest

from megablocks_core.data.instructions import CHATML
from megablocks_core.data.instructions.encoding import (
    CONVERSATIONS,
    PREFERENCES,
    RowEncoder,
    Settings,
)
from megablocks_core.data.instructions.rows import Block

Q, A = {"role": "user", "content": "q"}, {"role": "assistant", "content": "a"}


def encoder(kind=CONVERSATIONS, template=CHATML, name="bytes"):
    settings = Settings(
        kind, "bytes", name, "uint16", "auto", template, {}, None, "all", 256, 1 << 20
    )
    return settings.open()


def block(*rows):
    return Block("a.json", 3, 11, list(rows), "", 0)


def test_documents_are_cut_where_what_is_learnt_changes():
    found = encoder().encode(block({"messages": [Q, A, Q, A]}, {"text": "tt"}))
    assert found.counts == [4, 1]
    assert found.modes == [0, 1, 0, 1, 1]
    texts = [
        bytes(part[part < 256].astype(np.uint8)).decode()
        for part in np.split(found.ids, np.cumsum(found.sequences)[:-1])
    ]
    given, learnt = "<|im_start|>user\nq<|im_end|>\n<|im_start|>assistant\n", "a<|im_end|>\n"
    assert texts == [given, learnt, given, learnt, "tt"]
    assert found.ids.dtype == np.uint16
    assert found.learnt == 2 * len(learnt) + 2  # of a plain text all but the first, and its end


@pytest.mark.parametrize("kind", [CONVERSATIONS, PREFERENCES])
def test_a_text_that_the_tokenizer_fails_on_is_one_bad_row(kind):
    rows = []
    for content in ("good", "panic", "fine", "panic"):
        answer = {"role": "assistant", "content": content}
        row = {"messages": [Q, answer]}
        if kind == PREFERENCES:
            row = {"prompt": [Q], "chosen": [A], "rejected": [answer]}
        rows.append(row)
    plain, failing = encoder(kind), encoder(kind)
    locate = failing._locator.locate

    def failing_locate(texts):
        if any("panic" in text for text in texts):
            raise BaseException("as engines in Rust do")
        return locate(texts)

    failing._locator.locate = failing_locate
    found, wanted = failing.encode(block(*rows, {})), plain.encode(block(rows[0], rows[2]))
    assert [(one.file, one.line, one.reason) for one in found.bad] == [
        (3, 12, "cannot be encoded by the tokenizer"),
        (3, 14, "cannot be encoded by the tokenizer"),
        (3, 15, found.bad[-1].reason),
    ]
    assert found.ids.tolist() == wanted.ids.tolist()
    assert (found.counts, found.modes) == (wanted.counts, wanted.modes)


def test_interrupts_are_no_bad_rows():
    stopped = encoder()

    def interrupted(texts):
        raise KeyboardInterrupt

    stopped._locator.locate = interrupted
    with pytest.raises(KeyboardInterrupt):
        stopped.encode(block({"text": "t"}))


def test_a_conversation_whose_first_token_alone_is_marked_has_nothing_to_learn():
    template = "{% generation %}x{% endgeneration %}{{ messages[0].content }}"
    found = encoder(template=template).encode(block({"messages": [Q, A]}))
    assert [one.reason for one in found.bad] == ["has nothing to learn"]
    assert not found.counts and not len(found.ids)


def test_a_tokenizer_that_changed_is_refused():
    with pytest.raises(ValueError, match="has changed since the run began"):
        encoder(name="another")


def test_the_encoder_is_opened_by_its_settings():
    assert isinstance(encoder(), RowEncoder)


def test_the_package_loads_no_optional_package_and_no_torch():
    code = (
        "import json, sys, megablocks_core.data.instructions\n"
        "print(json.dumps([n for n in ('torch', 'jinja2', 'tokenizers', 'tiktoken', 'pyarrow',"
        " 'sentencepiece', 'transformers') if n in sys.modules]))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert json.loads(done.stdout) == []
