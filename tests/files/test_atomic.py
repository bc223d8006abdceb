"""Files and folders appear whole or not at all, and what is renamed was synced before."""

import os
import stat

import pytest

from megablocks_core.files import (
    NewFolder,
    create_file,
    is_removed,
    is_unfinished,
    make_folder,
    remove,
    replace_file,
    sync_folder,
)


@pytest.fixture
def calls(monkeypatch):
    """What the operating system is asked for, in order; ``calls.fail`` names one that fails."""

    class Calls(list[str]):
        fail = ""

        def note(self, call):
            self.append(call)
            if call == self.fail:
                raise OSError(28, "No space left on device")

    calls = Calls()
    fsync, rename, replace = os.fsync, os.rename, os.replace

    def noted_fsync(descriptor):
        is_folder = stat.S_ISDIR(os.fstat(descriptor).st_mode)
        calls.note("sync folder" if is_folder else "sync file")
        fsync(descriptor)

    def noted_rename(*paths):
        calls.note("rename")
        rename(*paths)

    def noted_replace(*paths):
        calls.note("replace")
        replace(*paths)

    monkeypatch.setattr(os, "fsync", noted_fsync)
    monkeypatch.setattr(os, "rename", noted_rename)
    monkeypatch.setattr(os, "replace", noted_replace)
    return calls


def test_a_file_is_created_once(tmp_path, calls):
    create_file(tmp_path / "a", b"one")
    assert calls == ["sync file"]
    with pytest.raises(FileExistsError):
        create_file(tmp_path / "a", b"two")
    assert (tmp_path / "a").read_bytes() == b"one"


def test_a_file_is_replaced_after_its_bytes_are_safe(tmp_path, calls):
    for data in (b"one", b"two"):
        replace_file(tmp_path / "a", data)
        assert (tmp_path / "a").read_bytes() == data
    assert calls == ["sync file", "replace", "sync folder"] * 2
    assert os.listdir(tmp_path) == ["a"]


@pytest.mark.parametrize("fails", ["sync file", "replace"])
def test_a_file_that_cannot_be_replaced_stays(tmp_path, calls, fails):
    (tmp_path / "a").write_bytes(b"one")
    calls.fail = fails
    with pytest.raises(OSError, match="No space left"):
        replace_file(tmp_path / "a", b"two")
    assert os.listdir(tmp_path) == ["a"]
    assert (tmp_path / "a").read_bytes() == b"one"


def test_each_folder_made_is_synced_into_the_one_above(tmp_path, calls):
    make_folder(tmp_path / "a" / "b")
    make_folder(tmp_path / "a" / "b")
    assert (tmp_path / "a" / "b").is_dir()
    assert calls == ["sync folder"] * 2


def test_syncing_a_folder_leaves_no_descriptor_open(tmp_path, calls):
    calls.fail = "sync folder"
    first_free = os.open(tmp_path, os.O_RDONLY)
    os.close(first_free)
    with pytest.raises(OSError, match="No space left"):
        sync_folder(tmp_path)
    again = os.open(tmp_path, os.O_RDONLY)
    os.close(again)
    assert again == first_free


def test_a_folder_appears_when_published_only(tmp_path, calls):
    target = tmp_path / "deep" / "run" / "step-1"
    folder = NewFolder(target)
    create_file(folder.staging / "a", b"a")
    assert not target.exists()
    calls.clear()
    folder.publish()
    assert calls == ["sync folder", "rename", "sync folder"]
    folder.discard()
    assert os.listdir(target.parent) == ["step-1"]
    assert (target / "a").read_text() == "a"


def test_discarded_and_withdrawn_folders_leave_nothing(tmp_path):
    for published in (False, True):
        folder = NewFolder(tmp_path / "step-1")
        (folder.staging / "a").write_text("a")
        if published:
            folder.publish()
        folder.withdraw()
        folder.discard()
        assert not any(tmp_path.iterdir())


def test_an_empty_target_is_accepted_and_others_refused(tmp_path):
    target = tmp_path / "step-1"
    target.mkdir()
    folder = NewFolder(target)
    folder.publish()
    late = NewFolder(target)
    (target / "a").write_text("a")
    with pytest.raises(OSError):
        late.publish()
    with pytest.raises(ValueError, match="must be new or an empty folder"):
        NewFolder(target)
    with pytest.raises(ValueError, match="must be new or an empty folder"):
        NewFolder(target / "a")
    assert (target / "a").read_text() == "a"


def test_what_a_crash_leaves_is_told_from_finished_folders(tmp_path):
    folder = NewFolder(tmp_path / "step-1")
    assert is_unfinished(folder.staging)
    folder.publish()
    assert not is_unfinished(folder.target)
    assert not is_unfinished(tmp_path / ".git")
    assert not is_unfinished(tmp_path / "step-1.partial")


def test_a_removed_folder_loses_its_name_first(tmp_path, calls):
    folder = tmp_path / "step-1"
    (folder / "sub").mkdir(parents=True)
    (folder / "sub" / "a").write_text("a")
    calls.fail = "sync folder"
    with pytest.raises(OSError, match="No space left"):
        remove(folder)
    assert not folder.exists()
    (hidden,) = tmp_path.iterdir()
    assert is_removed(hidden) and not is_unfinished(hidden)
    calls.fail = ""
    remove(hidden)
    file = tmp_path / ".LATEST.0a1b2c3d.partial"
    file.write_text("")
    assert is_unfinished(file)
    remove(file)
    assert os.listdir(tmp_path) == []


def test_what_a_link_points_to_is_not_removed(tmp_path):
    (tmp_path / "a").mkdir()
    (tmp_path / "a" / "f").write_text("f")
    (tmp_path / "b").symlink_to("a")
    remove(tmp_path / "b")
    assert os.listdir(tmp_path) == ["a"] and (tmp_path / "a" / "f").read_text() == "f"
