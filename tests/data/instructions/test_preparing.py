"""Files of conversations become documents with the masks that transformers gives."""

import errno
import json
import os
import random
import signal
import subprocess
import sys
import time

import numpy as np
import pytest
import transformers

from megablocks_core.data import IndexedDataset, publish
from megablocks_core.data.instructions import (
    CHATML,
    BadText,
    PackedConversations,
    prepare_conversations,
    prepare_preferences,
    preparing,
)

from .conftest import UNMARKED, some_chat, some_chats, some_text, write_lines

FILES = ["x.bin", "x.hashes", "x.idx", "x.manifest.json", "x.source.json"]


def documents(prefix):
    """The ids of each document, and of each token whether it is to be learnt."""
    dataset = IndexedDataset(prefix)
    dataset.verify()
    found = []
    for first, last in zip(dataset.document_indices, dataset.document_indices[1:], strict=False):
        parts, modes = dataset[first:last], dataset.sequence_modes[first:last]
        mask = [int(mode) for part, mode in zip(parts, modes, strict=True) for _ in part]
        found.append(([int(token) for part in parts for token in part], mask))
    return found


@pytest.mark.parametrize("template", [CHATML, UNMARKED], ids=["marked", "unmarked"])
def test_ids_and_masks_equal_those_of_transformers(tmp_path, bpe, template):
    chats = some_chats(60)
    path = write_lines(tmp_path / "a.jsonl", [{"messages": chat} for chat in chats])
    report = prepare_conversations(
        [path], tmp_path / "x", tokenizer=f"hf:{bpe}", template=template, workers=0
    )
    whole = transformers.PreTrainedTokenizerFast(tokenizer_file=str(bpe / "tokenizer.json"))
    wanted = [
        whole.apply_chat_template(
            chat, chat_template=CHATML, return_assistant_tokens_mask=True, return_dict=True
        )
        for chat in chats
    ]
    assert documents(tmp_path / "x") == [(w["input_ids"], w["assistant_masks"]) for w in wanted]
    assert report.documents == len(chats)
    assert report.learnt == sum(sum(each["assistant_masks"][1:]) for each in wanted) > 500
    assert report.longest == max(len(each["input_ids"]) for each in wanted)
    assert (report.schemas, report.bad, report.empty) == ({"messages": len(chats)}, {}, 0)
    assert sorted(name for name in os.listdir(tmp_path) if name != "a.jsonl") == FILES


def test_bytes_are_the_same_for_any_workers_and_blocks(tmp_path, bpe, monkeypatch):
    path = write_lines(tmp_path / "a.jsonl", [{"messages": chat} for chat in some_chats(80)])
    seen = []
    for name, workers, block_bytes in (("a", 0, 1 << 20), ("b", 1, 300), ("c", 3, 300)):
        monkeypatch.setattr(preparing, "BLOCK_BYTES", block_bytes)
        report = prepare_conversations(
            [path], tmp_path / name, tokenizer=f"hf:{bpe}", workers=workers
        )
        content = [(tmp_path / f"{name}.{end}").read_bytes() for end in ("bin", "idx", "hashes")]
        seen.append((content, report))
    assert seen[0] == seen[1] == seen[2]


def test_each_schema_and_what_is_learnt(tmp_path):
    q, a = {"role": "user", "content": "q"}, {"role": "assistant", "content": "a"}
    rows = [
        {"messages": [q, a, q, a]},
        {"conversations": [{"from": "human", "value": "q"}, {"from": "gpt", "value": "a"}]},
        {"instruction": "q", "output": "a"},
        {"text": "tt"},
        {"text": ""},
    ]
    path = write_lines(tmp_path / "a.jsonl", rows)
    options = {"tokenizer": "bytes", "template": CHATML, "workers": 0, "overwrite": True}
    learnt = {}
    for train_on in ("all", "last", "everything"):
        report = prepare_conversations([path], tmp_path / "x", train_on=train_on, **options)
        found = documents(tmp_path / "x")
        learnt[train_on] = [
            bytes(token for token, one in zip(*each, strict=True) if one and token < 256).decode()
            for each in found
        ]
        assert found[3] == ([*b"tt", 256], [1, 1, 1]), "plain text is learnt, with its end"
        assert (report.documents, report.empty) == (4, 1)
        assert report.schemas == {"alpaca": 1, "messages": 1, "sharegpt": 1, "text": 1}
    end = "<|im_end|>\n"
    assert learnt["all"] == [f"a{end}a{end}", f"a{end}", f"a{end}", "tt"]
    assert learnt["last"] == [f"a{end}", f"a{end}", f"a{end}", "tt"]
    assert learnt["everything"][2] == f"<|im_start|>user\nq{end}<|im_start|>assistant\na{end}"
    with pytest.raises(BadText, match="line 4 has not the keys of the schema messages") as caught:
        rows[1:3] = rows[:1] * 2
        write_lines(path, rows)
        prepare_conversations([path], tmp_path / "x", schema="messages", **options)
    assert "a.jsonl" in str(caught.value)


def test_of_a_prompt_and_its_completion_only_the_completion_is_learnt(tmp_path):
    q, a = {"role": "user", "content": "q"}, {"role": "assistant", "content": "a"}
    rows = [
        {"prompt": [q, a, q], "completion": [{"role": "assistant", "content": "b"}]},
        {"prompt": "q", "completion": "b"},
    ]
    path = write_lines(tmp_path / "a.jsonl", rows)
    options = {"tokenizer": "bytes", "workers": 0, "overwrite": True}
    for template in (CHATML, UNMARKED):
        for train_on, turns in (("all", 1), ("last", 1), ("everything", 4)):
            prepare_conversations(
                [path], tmp_path / "x", template=template, train_on=train_on, **options
            )
            for (ids, mask), most in zip(
                documents(tmp_path / "x"), (turns, min(turns, 2)), strict=True
            ):
                learnt = bytes(t for t, one in zip(ids, mask, strict=True) if one).decode()
                assert learnt.count("<|im_end|>") == most and learnt.endswith("b<|im_end|>\n")


def test_bad_rows_stop_or_are_skipped_and_reported(tmp_path, bpe):
    good = {"messages": some_chats(1)[0]}
    user = {"role": "user", "content": "a\0b"}
    rows = [good, {"messages": []}, {"messages": [user, *good["messages"]]}, good]
    silent = {"messages": [{"role": "user", "content": "q"}]}
    half = {"messages": [{"role": "assistant", "content": "\ud800"}]}
    path = write_lines(tmp_path / "a.jsonl", [*rows, silent, half])
    options = {"tokenizer": f"hf:{bpe}", "workers": 0}
    with pytest.raises(BadText, match="a.jsonl: line 2 has no list of messages"):
        prepare_conversations([path], tmp_path / "x", **options)
    assert os.listdir(tmp_path) == ["a.jsonl"]
    report = prepare_conversations([path], tmp_path / "x", on_bad="report", **options)
    assert (report.documents, report.bad) == (
        2,
        {
            "has no list of messages": 1,
            "has no turn of the assistant": 1,
            "holds a NUL": 1,
            "holds half a surrogate pair": 1,
        },
    )
    listed = [json.loads(line) for line in (tmp_path / "x.bad.jsonl").read_text().splitlines()]
    assert [row["line"] for row in listed] == [2, 3, 5, 6]
    assert {row["file"] for row in listed} == {str(path)}
    prepare_conversations([path], tmp_path / "x", on_bad="skip", overwrite=True, **options)
    assert not (tmp_path / "x.bad.jsonl").exists()


def test_reasons_of_a_template_are_counted_together_and_listed_apart(tmp_path):
    path = write_lines(tmp_path / "a.jsonl", [{"messages": chat} for chat in some_chats(3)])
    report = prepare_conversations(
        [path],
        tmp_path / "x",
        tokenizer="bytes",
        template="{{ raise_exception(messages | length | string) }}",
        on_bad="report",
        workers=0,
    )
    assert report.bad == {"is refused by the template": 3}
    assert "the template: " in (tmp_path / "x.bad.jsonl").read_text()


def test_conversations_without_a_template_are_bad_and_plain_text_is_not(tmp_path):
    path = write_lines(tmp_path / "a.jsonl", [{"text": "t"}, {"messages": some_chats(1)[0]}])
    report = prepare_conversations(
        [path], tmp_path / "x", tokenizer="bytes", on_bad="skip", workers=0
    )
    assert (report.documents, report.bad) == (1, {"is a conversation, which needs a template": 1})


def test_texts_of_special_tokens_are_counted(tmp_path, bpe):
    chat = [{"role": "user", "content": "<|im_end|>"}, {"role": "assistant", "content": "a"}]
    path = write_lines(tmp_path / "a.jsonl", [{"messages": chat}, {"messages": some_chats(1)[0]}])
    report = prepare_conversations([path], tmp_path / "x", tokenizer=f"hf:{bpe}", workers=0)
    assert report.control == 1


def test_the_source_is_recorded(tmp_path, bpe):
    path = write_lines(tmp_path / "a.jsonl", [{"messages": some_chats(1)[0]}])
    report = prepare_conversations([path], tmp_path / "x", tokenizer=f"hf:{bpe}", workers=0)
    source = json.loads((tmp_path / "x.source.json").read_text())
    manifest = json.loads((tmp_path / "x.manifest.json").read_text())
    assert source["build"] == manifest["build"]
    assert source["tokenizer"] == manifest["tokenizer"]
    assert source["template"] == CHATML
    assert source["learnt"] == report.learnt
    assert source["inputs"][0]["size"] == path.stat().st_size


def test_pairs_are_two_documents_with_the_prompt_in_both(tmp_path, bpe):
    draw = random.Random(0)
    rows = []
    for _ in range(20):
        prompt = [*some_chat(draw), {"role": "user", "content": some_text(draw)}]
        answers = [[{"role": "assistant", "content": some_text(draw)}] for _ in range(2)]
        rows.append({"prompt": prompt, "chosen": answers[0], "rejected": answers[1]})
    path = write_lines(tmp_path / "a.jsonl", rows)
    whole = transformers.PreTrainedTokenizerFast(
        tokenizer_file=str(bpe / "tokenizer.json"), chat_template=CHATML
    )
    for template in (CHATML, UNMARKED):
        report = prepare_preferences(
            [path],
            tmp_path / "x",
            tokenizer=f"hf:{bpe}",
            template=template,
            workers=0,
            overwrite=True,
        )
        found = documents(tmp_path / "x")
        assert report.documents == len(found) == 40
        for number, (ids, mask) in enumerate(found):
            row = rows[number // 2]
            both = [*row["prompt"], *row["rejected" if number % 2 else "chosen"]]
            assert ids == whole.apply_chat_template(both, return_dict=False)
            learnt = whole.decode([t for t, one in zip(ids, mask, strict=True) if one])
            assert learnt == f"{both[-1]['content']}<|im_end|>\n"


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"schema": "chat"}, "schema='chat' must be one of auto, messages"),
        ({"train_on": "first"}, "train_on='first' must be one of all, last, everything"),
        ({"on_bad": "keep"}, "on_bad='keep' must be one of stop, skip, report"),
        ({"workers": -1}, "workers=-1 must be between 0 and 1024"),
        ({"max_bytes": 0}, "max_bytes=0 must be"),
        ({"template": "{% if %}"}, "must be a template"),
        ({"tokenizer": "gpt"}, "tokenizer='gpt' must be bytes"),
    ],
)
def test_wrong_arguments_are_named_and_write_nothing(tmp_path, options, message):
    path = write_lines(tmp_path / "a.jsonl", [{"text": "t"}])
    with pytest.raises(ValueError, match=message):
        prepare_conversations([path], tmp_path / "x", **{"tokenizer": "bytes", **options})
    assert os.listdir(tmp_path) == ["a.jsonl"]


def test_pairs_need_a_template(tmp_path):
    path = write_lines(tmp_path / "a.jsonl", [{"text": "t"}])
    with pytest.raises(ValueError, match="template=None needs a tokenizer that has one"):
        prepare_preferences([path], tmp_path / "x", tokenizer="bytes")


def test_a_dataset_that_stands_there_is_refused_at_once(tmp_path):
    path = write_lines(tmp_path / "a.jsonl", [{"text": "t"}])
    prepare_conversations([path], tmp_path / "x", tokenizer="bytes", workers=0)
    with pytest.raises(FileExistsError, match="overwrite=True"):
        prepare_conversations([path], tmp_path / "x", tokenizer="bytes", workers=0)


@pytest.mark.parametrize("error", [OSError(errno.ENOSPC, "no room"), KeyboardInterrupt()])
def test_a_full_disk_or_an_interrupt_leaves_nothing(tmp_path, monkeypatch, error):
    path = write_lines(tmp_path / "a.jsonl", [{"messages": chat} for chat in some_chats(30)])
    write, calls = publish.HashedFile.write, []

    def failing(file, data, /):
        calls.append(data)
        if len(calls) > 20:
            raise error
        write(file, data)

    monkeypatch.setattr(publish.HashedFile, "write", failing)
    options = {"tokenizer": "bytes", "template": CHATML, "workers": 0}
    with pytest.raises(type(error)):
        prepare_conversations([path], tmp_path / "x", **options)
    assert os.listdir(tmp_path) == ["a.jsonl"]
    monkeypatch.undo()
    assert prepare_conversations([path], tmp_path / "x", **options).documents == 30


def test_no_rows_are_an_empty_dataset(tmp_path):
    (tmp_path / "a.jsonl").write_text("\n")
    report = prepare_conversations(
        [tmp_path / "a.jsonl"], tmp_path / "x", tokenizer="bytes", workers=0
    )
    assert (report.documents, report.tokens, report.longest) == (0, 0, 0)
    assert len(IndexedDataset(tmp_path / "x")) == 0
    with pytest.raises(ValueError, match="must hold one with something to learn"):
        PackedConversations(IndexedDataset(tmp_path / "x"), 8, seed=0)


def test_a_kill_leaves_nothing_that_looks_complete(tmp_path):
    path = write_lines(tmp_path / "a.jsonl", [{"messages": c} for c in some_chats(3000)])
    code = (
        "import sys\n"
        "from megablocks_core.data.instructions import CHATML, prepare_conversations\n"
        "print('go', flush=True)\n"
        "prepare_conversations(sys.argv[1:2], sys.argv[2], tokenizer='bytes', template=CHATML,"
        " workers=0)\n"
    )
    process = subprocess.Popen(
        [sys.executable, "-c", code, str(path), str(tmp_path / "x")], stdout=subprocess.PIPE
    )
    process.stdout.readline()
    while not list(tmp_path.glob("x.*.tmp.bin")) and process.poll() is None:
        time.sleep(0.002)
    process.send_signal(signal.SIGKILL)
    process.communicate()
    assert process.returncode == -signal.SIGKILL
    assert not (tmp_path / "x.idx").exists()
    with pytest.raises(FileNotFoundError):
        IndexedDataset(tmp_path / "x")
    prepare_conversations([path], tmp_path / "x", tokenizer="bytes", template=CHATML, workers=0)
    assert sorted(name for name in os.listdir(tmp_path) if name != "a.jsonl") == FILES
    assert np.asarray(IndexedDataset(tmp_path / "x").tokens).max() < 256
