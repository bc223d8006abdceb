"""Any mixture of inputs becomes the documents of its texts, whatever happens on the way."""

import errno
import json
import os
import random
import resource
import signal
import subprocess
import sys
import threading
import time

import numpy as np
import pytest
import tokenizers

from megablocks_core.data.tokenize import BadText, tokenize, tokenizing
from megablocks_core.data.tokenize.encoders import open_encoder
from megablocks_core.files import disk

from .conftest import END, contents, documents, json_lines, write_parquet

FILES = ["x.bin", "x.hashes", "x.idx", "x.manifest.json", "x.source.json"]


@pytest.fixture
def small_units(monkeypatch):
    monkeypatch.setattr(tokenizing, "UNIT_BYTES", 400)
    monkeypatch.setattr(tokenizing, "COMMIT_SECONDS", 0.0)


@pytest.mark.parametrize("engine", ["hf", "gigatoken"])
@pytest.mark.parametrize("append_eod", [False, True])
def test_documents_are_the_ids_of_the_texts_one_by_one(
    tmp_path, corpus, bpe, small_units, engine, append_eod
):
    folder, texts = corpus
    report = tokenize(
        [folder],
        tmp_path / "x",
        tokenizer=f"hf:{bpe}",
        engine=engine,
        workers=0,
        append_eod=append_eod,
    )
    plain = open_encoder(f"hf:{bpe}")
    ends = [plain.id_of(END)] if append_eod else []
    rows = [[*plain.encode([text]).ids.tolist(), *ends] for text in texts if text]
    assert documents(tmp_path / "x") == rows
    assert (report.documents, report.tokens) == (len(rows), sum(map(len, rows)))
    assert (report.empty, report.bad) == (texts.count(""), {})
    assert report.empty > 0
    assert (report.engine, report.dtype, report.resumed) == (engine, "uint16", 0)
    assert report.text_bytes == sum(len(text.encode()) for text in texts)
    assert sorted(name for name in os.listdir(tmp_path) if name != "corpus") == FILES


def test_f_150_bytes_are_the_same_for_any_workers_and_units(tmp_path, corpus, monkeypatch):
    """Confirmed for 0, 1, 2 and 7 workers, and for any size of units."""
    folder, _ = corpus
    seen = []
    for name, workers, unit_bytes in (
        ("a", 0, 1 << 22),
        ("b", 1, 300),
        ("c", 2, 300),
        ("d", 7, 300),
    ):
        monkeypatch.setattr(tokenizing, "UNIT_BYTES", unit_bytes)
        tokenize([folder], tmp_path / name, tokenizer="bytes", workers=workers, append_eod=True)
        seen.append(contents(tmp_path / name))
    assert seen[1:] == seen[:-1]
    assert len(seen[0][0]) > 10_000


@pytest.mark.parametrize("append_eod", [False, True])
def test_bytes_are_the_same_for_threads_processes_and_engines(
    tmp_path, corpus, bpe, small_units, monkeypatch, append_eod
):
    folder, _ = corpus
    given = {"tokenizer": f"hf:{bpe}", "append_eod": append_eod}
    made, real = [], tokenizing._open_workers

    def noted(settings, pool):
        made.append(real(settings, pool))
        return made[-1]

    monkeypatch.setattr(tokenizing, "_open_workers", noted)
    tokenize([folder], tmp_path / "hf", engine="hf", workers=2, **given)
    for workers in (0, 1, 4, 5):
        report = tokenize([folder], tmp_path / f"x{workers}", workers=workers, **given)
        assert report.engine == "gigatoken"
        assert contents(tmp_path / f"x{workers}") == contents(tmp_path / "hf")
    names = [type(one).__name__ for one in made]
    assert names == ["Pool", "OwnProcess", "Threads", "Threads", "Pool"]


def test_without_the_fast_engine_workers_are_processes(tmp_path, corpus, bpe, monkeypatch):
    monkeypatch.setitem(sys.modules, "gigatoken", None)
    monkeypatch.setattr(tokenizing, "Threads", None)
    given = {"tokenizer": f"hf:{bpe}", "workers": 2}
    assert tokenize([corpus[0]], tmp_path / "x", **given).engine == "hf"
    assert len(documents(tmp_path / "x")) > 100


def test_threads_end_at_a_bad_line_and_the_next_call_goes_on(tmp_path, hostile, small_units, bpe):
    folder, places = hostile
    before = threading.active_count()
    given = {"tokenizer": f"hf:{bpe}", "engine": "gigatoken"}
    tokenize([folder], tmp_path / "whole", workers=0, on_bad="skip", **given)
    with pytest.raises(BadText, match=r"a\.jsonl: line 31 is not JSON"):
        tokenize([folder], tmp_path / "x", workers=2, **given)
    assert threading.active_count() == before
    report = tokenize([folder], tmp_path / "x", workers=2, on_bad="report", **given)
    assert report.resumed > 0
    assert sum(report.bad.values()) == len(places)
    assert contents(tmp_path / "x") == contents(tmp_path / "whole")
    assert threading.active_count() == before


def test_f_145_an_empty_first_text_gives_no_document_and_is_counted(tmp_path):
    (tmp_path / "a.jsonl").write_text('{"text": ""}\n{"text": "a b"}\n')
    report = tokenize(
        [tmp_path / "a.jsonl"], tmp_path / "x", tokenizer="bytes", workers=0, append_eod=True
    )
    assert documents(tmp_path / "x") == [[*b"a b", 256]]
    assert (report.documents, report.empty) == (1, 1)


@pytest.mark.parametrize(("size", "dtype"), [(256, "uint8"), (65_536, "uint16"), (65_537, "int32")])
def test_f_111_the_dtype_holds_every_id(tmp_path, size, dtype):
    """Confirmed: uint16 up to 65,536 ids, int32 from 65,537 on; the largest is stored as it is."""
    words = {f"w{n}": n for n in range(size)}
    tokenizer = tokenizers.Tokenizer(tokenizers.models.WordLevel(words, "w0"))
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    tokenizer.save(str(tmp_path / "t.json"))
    (tmp_path / "a.jsonl").write_bytes(json_lines([f"w{size - 1} w1"]))
    report = tokenize(
        [tmp_path / "a.jsonl"], tmp_path / "x", tokenizer=f"hf:{tmp_path}/t.json", workers=0
    )
    assert report.dtype == dtype
    assert documents(tmp_path / "x") == [[size - 1, 1]]


def test_f_148_one_worker_writes_both_files(tmp_path):
    """Confirmed: there are no partitions; one worker gives what two give."""
    (tmp_path / "a.jsonl").write_bytes(json_lines(["one. two.", "three."]))
    for workers in (1, 2):
        tokenize(
            [tmp_path / "a.jsonl"], tmp_path / f"x{workers}", tokenizer="bytes", workers=workers
        )
    assert contents(tmp_path / "x1") == contents(tmp_path / "x2")


def test_ends_that_stand_in_the_texts_are_counted(tmp_path, bpe):
    (tmp_path / "a.jsonl").write_bytes(json_lines([f"a{END}b{END}", "c"]))
    given = {"tokenizer": f"hf:{bpe}", "workers": 0, "append_eod": True}
    assert tokenize([tmp_path / "a.jsonl"], tmp_path / "x", **given).inner_ends == 2


@pytest.fixture
def hostile(tmp_path):
    """A folder in which a few things are bad, and where they are."""
    folder = tmp_path / "hostile"
    folder.mkdir()
    lines = json_lines([f"text {n}" for n in range(100)]).splitlines()
    lines[30], lines[60], lines[61] = b"no JSON", b'{"text": "\xff"}', b'{"text": 3}'
    (folder / "a.jsonl").write_bytes(b"\n".join(lines))
    write_parquet(folder / "b.parquet", ["x"], key="other")
    write_parquet(folder / "c.parquet", ["x", None, "y"])
    (folder / "d.txt").write_bytes(b"\0")
    places = [
        ("a.jsonl", 31, "is not JSON"),
        ("a.jsonl", 61, "is not UTF-8"),
        ("a.jsonl", 62, "has no string for a text"),
        ("b.parquet", None, "has no column 'text'"),
        ("c.parquet", 2, "has no string for a text"),
        ("d.txt", None, "holds a NUL"),
    ]
    return folder, places


@pytest.mark.parametrize("workers", [0, 2])
def test_the_policy_of_bad_lines(tmp_path, hostile, small_units, workers):
    folder, places = hostile
    given = {"tokenizer": "bytes", "workers": workers}
    with pytest.raises(BadText, match=r"a\.jsonl: line 31 is not JSON \(on_bad='skip'"):
        tokenize([folder], tmp_path / "x", **given)
    assert sorted(os.listdir(tmp_path)) == ["hostile", "x.tokenizing"]
    report = tokenize([folder], tmp_path / "x", on_bad="report", **given)  # goes on from there
    assert report.resumed > 0
    counted = {}
    for _, _, reason in places:
        counted[reason] = counted.get(reason, 0) + 1
    assert report.bad == counted
    listed = [json.loads(line) for line in (tmp_path / "x.bad.jsonl").read_text().splitlines()]
    assert [(one["file"], one["line"], one["reason"]) for one in listed] == [
        (str(folder / name), line, reason) for name, line, reason in places
    ]
    expected = [f"text {n}" for n in range(100) if n not in (30, 60, 61)] + ["x", "y"]
    assert documents(tmp_path / "x") == [list(text.encode()) for text in expected]
    assert tokenize([folder], tmp_path / "y", on_bad="skip", **given).bad == counted
    assert not (tmp_path / "y.bad.jsonl").exists()
    assert contents(tmp_path / "y") == contents(tmp_path / "x")
    for name in ("x", "y"):
        assert json.loads((tmp_path / f"{name}.source.json").read_text())["bad"] == counted


def test_a_run_that_skipped_lines_does_not_go_on_to_stop_at_them(
    tmp_path, hostile, small_units, monkeypatch
):
    def dies(*arguments, **options):
        raise RuntimeError("killed")

    with monkeypatch.context() as patch:
        patch.setattr(tokenizing, "publish", dies)
        with pytest.raises(RuntimeError, match="killed"):
            tokenize([hostile[0]], tmp_path / "x", tokenizer="bytes", workers=0, on_bad="skip")
    with pytest.raises(BadText, match="6 bad lines were skipped already"):
        tokenize([hostile[0]], tmp_path / "x", tokenizer="bytes", workers=0)


def test_an_input_that_changes_is_refused(tmp_path, monkeypatch, small_units):
    (tmp_path / "a.jsonl").write_bytes(json_lines(["abc"] * 90))
    real = tokenizing._write_units

    def changes(*arguments):
        real(*arguments)
        with open(tmp_path / "a.jsonl", "ab") as file:
            file.write(b"\n")

    with monkeypatch.context() as patch:
        patch.setattr(tokenizing, "_write_units", changes)
        with pytest.raises(ValueError, match=r"a\.jsonl: was changed while"):
            tokenize([tmp_path / "a.jsonl"], tmp_path / "x", tokenizer="bytes", workers=0)
    with pytest.raises(ValueError, match="was begun with inputs="):
        tokenize([tmp_path / "a.jsonl"], tmp_path / "x", tokenizer="bytes", workers=0)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"on_bad": "ignore"}, "on_bad='ignore' must be one of stop, skip, report"),
        ({"max_bytes": 0}, "max_bytes=0 must be between"),
        ({"workers": -1}, "workers=-1 must be between"),
        ({"tokenizer": "gpt2"}, "tokenizer='gpt2' must be"),
        ({"engine": "x"}, "engine='x' must be one of"),
        ({"append_eod": 257}, "append_eod=257 must be"),
        ({"prefix": ""}, "prefix='' must be a path"),
    ],
)
def test_wrong_arguments(tmp_path, options, message):
    (tmp_path / "a.jsonl").write_bytes(b"")
    given = {"prefix": tmp_path / "x", "tokenizer": "bytes", "workers": 0, **options}
    with pytest.raises(ValueError, match=message):
        tokenize([tmp_path / "a.jsonl"], **given)
    assert os.listdir(tmp_path) == ["a.jsonl"]


def test_what_stands_there_is_refused_before_any_work(tmp_path, monkeypatch):
    (tmp_path / "a.jsonl").write_bytes(json_lines(["abc"]))
    given = {"tokenizer": "bytes", "workers": 0}
    tokenize([tmp_path / "a.jsonl"], tmp_path / "x", **given)
    before = contents(tmp_path / "x")
    with monkeypatch.context() as patch:
        patch.setattr(tokenizing, "_write_all", None)
        with pytest.raises(FileExistsError):
            tokenize([tmp_path / "a.jsonl"], tmp_path / "x", **given)
        with pytest.raises(FileNotFoundError):
            tokenize([tmp_path / "a.jsonl"], tmp_path / "no" / "x", **given)
    assert contents(tmp_path / "x") == before
    (tmp_path / "a.jsonl").write_bytes(json_lines(["d"]))
    tokenize([tmp_path / "a.jsonl"], tmp_path / "x", overwrite=True, **given)
    assert documents(tmp_path / "x") == [[100]]


STEPS = ["write", "sync", "replace", "rename", "make_folder"]


def run_in_child(work):
    child = os.fork()
    if not child:
        status = 1
        try:
            work()
            status = 0
        finally:
            os._exit(status)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


def killed_at(step, work, module=disk):
    """Run ``work`` in a child that kills itself before one of its calls to the disk; its status."""

    def dying():
        calls = []

        def counted(real):
            def call(*arguments, **options):
                calls.append(1)
                if len(calls) == step + 1:
                    os.kill(os.getpid(), signal.SIGKILL)
                return real(*arguments, **options)

            return call

        for name in STEPS:
            setattr(disk, name, counted(getattr(disk, name)))
        os.fsync = lambda descriptor: None
        os.replace = counted(os.replace)
        os.link = counted(os.link)
        os.remove = counted(os.remove)
        work()

    return run_in_child(dying)


@pytest.mark.parametrize("stride", [7, pytest.param(1, marks=pytest.mark.drill)])
def test_a_kill_before_any_call_to_the_disk_and_a_restart(tmp_path, hostile, small_units, stride):
    """Each process dies a little further on, and the next one ends with the same bytes."""
    folder, _ = hostile
    given = {"tokenizer": "bytes", "workers": 0, "append_eod": True, "on_bad": "report"}
    tokenize([folder], tmp_path / "whole", **given)
    status, step = -signal.SIGKILL, 0
    while status:  # one kill, and then a run that is left alone
        prefix = tmp_path / f"once-{step}"
        status = killed_at(step, lambda: tokenize([folder], prefix, **given))  # noqa: B023
        assert status in (0, -signal.SIGKILL)
        if status:
            seen = documents(prefix) if os.path.exists(f"{prefix}.manifest.json") else None
            assert seen in (None, documents(tmp_path / "whole"))
            if not os.path.exists(f"{prefix}.source.json"):
                tokenize([folder], prefix, **given)
        assert contents(prefix) == contents(tmp_path / "whole")
        assert (tmp_path / f"once-{step}.bad.jsonl").read_bytes() == (
            tmp_path / "whole.bad.jsonl"
        ).read_bytes()
        step += stride
    assert step > 50


def test_killed_again_and_again_it_still_ends_and_redoes_little(tmp_path, hostile, small_units):
    folder, _ = hostile
    given = {"tokenizer": "bytes", "workers": 0, "append_eod": True, "on_bad": "report"}
    tokenize([folder], tmp_path / "whole", **given)
    kills = 0
    while killed_at(45, lambda: tokenize([folder], tmp_path / "x", **given)):
        kills += 1  # each does a few units more than the one before
        assert kills < 50
    assert kills > 2
    assert contents(tmp_path / "x") == contents(tmp_path / "whole")
    assert not (tmp_path / "x.tokenizing").exists()


COMMAND = """
import sys
from megablocks_core.data.tokenize import tokenizing
tokenizing.UNIT_BYTES, tokenizing.COMMIT_SECONDS = 2000, 0.0
folder, prefix, tokenizer, workers = sys.argv[1:]
given = {"tokenizer": tokenizer, "workers": int(workers), "append_eod": True}
report = tokenizing.tokenize([folder], prefix, **given)
print(report.resumed)
"""


def random_kills(tmp_path, folder, seconds, seed):
    """Kills at random moments until a run ends by itself; how many, and its units before it."""
    draw, kills = random.Random(seed), 0
    while True:
        workers = str(draw.choice([0, 1, 2]))
        command = [sys.executable, "-c", COMMAND, str(folder), str(tmp_path / "x"), "bytes"]
        command.append(workers)
        pipe = subprocess.PIPE
        process = subprocess.Popen(command, stdout=pipe, stderr=pipe, text=True)
        try:
            told, error = process.communicate(timeout=draw.uniform(*seconds) * (1 + kills / 20))
        except subprocess.TimeoutExpired:
            process.kill()
            process.communicate()
            kills += 1
            continue
        if (tmp_path / "x.source.json").exists() and "FileExistsError" in error:
            return kills, None  # the last kill came when all was done
        assert process.returncode == 0, error
        return kills, int(told)


def large(tmp_path, lines):
    folder = tmp_path / "large"
    folder.mkdir()
    text = np.random.default_rng(0).integers(97, 123, lines * 40, dtype=np.uint8).tobytes().decode()
    texts = [text[n * 40 : n * 40 + 40] for n in range(lines)]
    (folder / "a.jsonl").write_bytes(json_lines(texts))
    write_parquet(folder / "b.parquet", texts[: lines // 2], rows=1000)
    return folder


@pytest.mark.drill
@pytest.mark.parametrize("seed", range(6))
def test_sigkill_at_random_moments(tmp_path, seed):
    folder = large(tmp_path, 60_000)
    tokenize([folder], tmp_path / "whole", tokenizer="bytes", workers=0, append_eod=True)
    began = time.monotonic()
    subprocess.run(
        [sys.executable, "-c", COMMAND, str(folder), str(tmp_path / "timed"), "bytes", "1"],
        check=True,
    )
    seconds = time.monotonic() - began
    kills, resumed = random_kills(tmp_path, folder, (0.3 * seconds, 0.9 * seconds), seed)
    assert contents(tmp_path / "x") == contents(tmp_path / "whole")
    assert kills == 0 or resumed is None or resumed > 0


@pytest.mark.parametrize("kind", ["processes", "threads"])
def test_one_sigkill_while_workers_work(tmp_path, bpe, kind):
    folder = large(tmp_path, 6000)
    tokenizer = "bytes" if kind == "processes" else f"hf:{bpe}"
    tokenize([folder], tmp_path / "whole", tokenizer=tokenizer, workers=0, append_eod=True)
    command = [sys.executable, "-c", COMMAND, str(folder), str(tmp_path / "x"), tokenizer, "2"]
    process = subprocess.Popen(command)
    journal = tmp_path / "x.tokenizing" / "journal"
    while not (journal.exists() and journal.stat().st_size > 2000):
        assert process.poll() is None
        time.sleep(0.01)
    process.kill()
    process.wait()
    assert not os.path.exists(tmp_path / "x.idx")
    done = subprocess.run([*command[:-1], "1"], stdout=subprocess.PIPE, text=True, check=True)
    assert int(done.stdout) > 5
    assert contents(tmp_path / "x") == contents(tmp_path / "whole")


@pytest.mark.parametrize("room", [0, 1000, 9000])
def test_a_full_disk_leaves_nothing_that_looks_complete_and_goes_on(
    tmp_path, monkeypatch, small_units, hostile, room
):
    folder, _ = hostile
    given = {"tokenizer": "bytes", "workers": 0, "on_bad": "skip"}
    tokenize([folder], tmp_path / "whole", **given)
    real, left = disk.write, [room]

    def full(descriptor, parts, offset):
        left[0] -= sum(part.nbytes for part in parts)
        if left[0] < 0:
            raise OSError(errno.ENOSPC, "No space left on device")
        real(descriptor, parts, offset)

    with monkeypatch.context() as patch:
        patch.setattr(disk, "write", full)
        with pytest.raises(OSError, match="No space left on device"):
            tokenize([folder], tmp_path / "x", **given)
    assert not [
        name for name in os.listdir(tmp_path) if name.startswith("x.") and name != "x.tokenizing"
    ]
    report = tokenize([folder], tmp_path / "x", **given)
    assert (report.resumed > 0) == (room == 9000)
    assert contents(tmp_path / "x") == contents(tmp_path / "whole")


@pytest.mark.parametrize("limit", [300, 1100, 2000])
def test_the_kernel_writes_no_byte_past_a_limit(tmp_path, small_units, hostile, limit):
    """As on a full disk, a write is cut short somewhere in a file."""
    folder, _ = hostile
    given = {"tokenizer": "bytes", "workers": 0, "on_bad": "skip", "append_eod": True}
    tokenize([folder], tmp_path / "whole", **given)

    def limited():
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        resource.setrlimit(resource.RLIMIT_FSIZE, (limit, limit))
        tokenize([folder], tmp_path / "x", **given)

    assert run_in_child(limited) == 1
    assert [name for name in os.listdir(tmp_path) if name.startswith("x.")] == ["x.tokenizing"]
    tokenize([folder], tmp_path / "x", **given)
    assert contents(tmp_path / "x") == contents(tmp_path / "whole")


def test_progress_is_told_of_every_byte_and_not_of_those_done_before(
    tmp_path, monkeypatch, small_units, hostile
):
    shown = []

    class Recorder:
        def __init__(self, what, total):
            shown.append([total])

        def add(self, nbytes):
            shown[-1].append(nbytes)

        def close(self):
            shown[-1].append("closed")

    monkeypatch.setattr(tokenizing, "Progress", Recorder)
    total = sum(path.stat().st_size for path in hostile[0].iterdir())
    with pytest.raises(BadText):
        tokenize([hostile[0]], tmp_path / "x", tokenizer="bytes", workers=0)
    tokenize([hostile[0]], tmp_path / "x", tokenizer="bytes", workers=0, on_bad="skip")
    first, second = shown
    assert first[-1] == second[-1] == "closed"
    assert first[0] == total
    assert second[0] == sum(second[1:-1]) == total - sum(first[1:-1])
    assert len(first) > 2


def test_no_room_for_the_index_leaves_no_dataset(tmp_path, monkeypatch, small_units, hostile):
    from megablocks_core.data import publish

    folder, _ = hostile
    given = {"tokenizer": "bytes", "workers": 0, "on_bad": "skip"}
    tokenize([folder], tmp_path / "whole", **given)

    def full(file, data):
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(publish.HashedFile, "write", full)
        with pytest.raises(OSError, match="No space left on device"):
            tokenize([folder], tmp_path / "x", **given)
    assert [name for name in os.listdir(tmp_path) if name.startswith("x.")] == ["x.tokenizing"]
    assert tokenize([folder], tmp_path / "x", **given).resumed > 5
    assert contents(tmp_path / "x") == contents(tmp_path / "whole")


def test_a_script_without_a_guard_may_call_it(tmp_path):
    (tmp_path / "a.jsonl").write_bytes(json_lines(["abc"]))
    (tmp_path / "script.py").write_text(
        "from megablocks_core.data.tokenize import tokenize\n"
        "print(tokenize(['a.jsonl'], 'x', tokenizer='bytes', workers=2).documents)\n"
    )
    done = subprocess.run(
        [sys.executable, "script.py"], cwd=tmp_path, stdout=subprocess.PIPE, text=True, check=True
    )
    assert done.stdout == "1\n"
