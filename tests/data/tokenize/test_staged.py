"""What is staged is what was promised, after any end of the process that wrote it."""

import copy
import errno
import json
import os
import shutil

import numpy as np
import pytest

from megablocks_core.data.tokenize.encoding import Encoded
from megablocks_core.data.tokenize.reading import Bad
from megablocks_core.data.tokenize.staged import FILES, Staged
from megablocks_core.data.tokenize.units import Lines
from megablocks_core.files import disk

RECIPE = {"tokenizer": "bytes", "inputs": [["a", 1], ["b", 2]]}


def unit(number, file=0):
    """A unit of three lines, one of them bad, and what came of it."""
    ids = np.full(4, number, np.uint16)
    encoded = Encoded(
        ids, np.array([3, 1], np.int32), np.array([number, 7], np.uint64), 1, [], 3, 9, 2, b"p" * 16
    )
    return Lines((file,), "a", 0, 5, 5), encoded, [("a", Bad(file, number, "is odd"))]


def contents(folder):
    return {name: (folder / name).read_bytes() for name in FILES}


def test_a_staged_folder_goes_on_after_what_was_committed(tmp_path):
    staged = Staged(tmp_path / "x", RECIPE)
    staged.append(*unit(1))
    staged.append(*unit(2))
    staged.commit()
    committed = contents(staged.folder)
    assert committed["tokens"] == np.repeat(np.array([1, 2], np.uint16), 4).tobytes()
    assert [json.loads(line)["line"] for line in committed["bad"].splitlines()] == [1, 2]
    digest = staged.hash.hexdigest()
    again = copy.deepcopy(staged.counts)
    staged.append(*unit(3))  # never promised
    staged.close()
    staged = Staged(tmp_path / "x", RECIPE)
    assert contents(staged.folder) == committed
    assert (staged.counts, staged.hash.hexdigest(), staged.build) == (again, digest, "")
    assert (staged.counts.units, staged.counts.documents, staged.counts.tokens) == (2, 4, 8)
    assert (staged.counts.empty, staged.counts.bad) == (2, {"is odd": 2})
    assert (staged.counts.nbytes, staged.counts.text_bytes, staged.counts.inner_ends) == (10, 18, 4)
    staged.remove()
    assert not list(tmp_path.iterdir())


def test_a_line_of_the_journal_is_written_after_all_that_it_promises_is_synced(
    tmp_path, monkeypatch
):
    staged = Staged(tmp_path / "x", RECIPE)
    names = {staged._descriptors[name]: name for name in staged._descriptors}
    calls = []
    for call in ("write", "sync"):
        real = getattr(disk, call)

        def noted(descriptor, *rest, call=call, real=real):
            calls.append((call, names[descriptor]))
            return real(descriptor, *rest)

        monkeypatch.setattr(disk, call, noted)
    staged.append(*unit(1))
    assert {call for call, _ in calls} == {"write"}
    calls.clear()
    staged.commit()
    assert calls[-2:] == [("write", "journal"), ("sync", "journal")]
    assert sorted(calls[:-2]) == sorted(("sync", name) for name in FILES)
    staged.close()


def test_lines_are_counted_by_file(tmp_path):
    staged = Staged(tmp_path / "x", RECIPE)
    assert staged.lines_before(unit(1)[0]) == 0
    staged.append(*unit(1))
    staged.append(*unit(2))
    assert staged.lines_before(unit(1)[0]) == 6
    assert staged.lines_before(unit(1, file=1)[0]) == 0
    staged.append(*unit(3, file=1))
    assert staged.lines_before(unit(1, file=1)[0]) == 3
    staged.close()


def test_a_journal_cut_anywhere_gives_its_last_whole_line(tmp_path):
    staged = Staged(tmp_path / "x", RECIPE)
    ends = [0]
    for number in range(3):
        staged.append(*unit(number))
        staged.commit()
        ends.append(staged.path("journal").stat().st_size)
    staged.close()
    for cut in range(0, ends[-1] + 1, 29):
        shutil.copytree(staged.folder, tmp_path / "y.tokenizing")
        os.truncate(tmp_path / "y.tokenizing" / "journal", cut)
        again = Staged(tmp_path / "y", RECIPE)
        assert again.counts.units == max(n for n, end in enumerate(ends) if end <= cut)
        again.append(*unit(9))
        again.commit()
        again.close()
        assert Staged(tmp_path / "y", RECIPE).counts.units == again.counts.units
        shutil.rmtree(again.folder)


def test_another_recipe_is_refused_with_what_differs(tmp_path):
    Staged(tmp_path / "x", RECIPE).close()
    with pytest.raises(ValueError, match=r'begun with tokenizer="bytes", not "hf"; give'):
        Staged(tmp_path / "x", {**RECIPE, "tokenizer": "hf"})
    with pytest.raises(ValueError, match=r'begun with inputs=\["b", 2\], not \["b", 3\]'):
        Staged(tmp_path / "x", {**RECIPE, "inputs": [["a", 1], ["b", 3]]})
    with pytest.raises(ValueError, match="begun with inputs="):
        Staged(tmp_path / "x", {**RECIPE, "inputs": [["a", 1]]})
    Staged(tmp_path / "x", RECIPE).close()


def test_only_one_process_writes(tmp_path):
    staged = Staged(tmp_path / "x", RECIPE)
    with pytest.raises(RuntimeError, match="another process writes to it"):
        Staged(tmp_path / "x", RECIPE)
    staged.close()
    Staged(tmp_path / "x", RECIPE).close()


def test_changed_or_missing_bytes_are_refused(tmp_path):
    staged = Staged(tmp_path / "x", RECIPE)
    staged.append(*unit(1))
    staged.commit()
    staged.close()
    data = staged.path("tokens").read_bytes()
    staged.path("tokens").write_bytes(b"\xff" + data[1:])
    with pytest.raises(ValueError, match="tokens: is not what was written"):
        Staged(tmp_path / "x", RECIPE)
    staged.path("tokens").write_bytes(data[:-1])
    with pytest.raises(ValueError, match="tokens: holds 7 bytes, must hold 8"):
        Staged(tmp_path / "x", RECIPE)


@pytest.mark.parametrize("failing", range(7))
def test_a_full_disk_is_named_and_the_next_one_goes_on(tmp_path, monkeypatch, failing):
    staged = Staged(tmp_path / "x", RECIPE)
    staged.append(*unit(1))
    staged.commit()
    real, calls = disk.write, []

    def full(descriptor, parts, offset):
        calls.append(1)
        if len(calls) > failing:
            os.pwrite(descriptor, parts[0][:1], offset)  # some of it found room
            raise OSError(errno.ENOSPC, "No space left on device")
        real(descriptor, parts, offset)

    with monkeypatch.context() as patch:
        patch.setattr(disk, "write", full)
        try:
            staged.append(*unit(2))
            staged.commit()
        except OSError as error:
            assert error.errno == errno.ENOSPC
            assert "call again when there is room" in str(error)
            assert str(staged.folder) in str(error)
        else:
            assert failing == 6
    staged.close()
    again = Staged(tmp_path / "x", RECIPE)
    assert again.counts.units == (2 if failing == 6 else 1)
    again.close()
