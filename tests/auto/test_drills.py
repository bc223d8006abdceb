"""What kills and full disks leave of a folder that megablocks-export writes: nothing, or all.

A run ends at every call of the disk in turn, as a kill from outside may end it.
"""

import signal

import pytest
import torch

from megablocks_core.auto.command import main
from megablocks_core.export import verify
from megablocks_core.files import is_unfinished
from tests.auto.runs import contents, save, trained
from tests.export.test_drills import mounted

# The command, killed before or after a call of the disk; more calls than there are: it ends.
PROGRAM = """
import os, signal, sys
from megablocks_core.auto.command import main
from megablocks_core.files import disk

end, when, *arguments = sys.argv[1:]
left = [int(end)]

def counted(real):
    def call(*arguments, **options):
        left[0] -= 1
        if not left[0] and when == "before":
            os.kill(os.getpid(), signal.SIGKILL)
        done = real(*arguments, **options)
        if not left[0] and when == "after":
            os.kill(os.getpid(), signal.SIGKILL)
        return done
    return call

for name in ("create", "write", "sync", "rename", "make_folder"):
    setattr(disk, name, counted(getattr(disk, name)))
sys.exit(main(arguments))
"""
OPTIONS = ("--max-file-size", "30kB")


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    """A training checkpoint, and the files that an undisturbed run makes of it."""
    folder = tmp_path_factory.mktemp("run")
    save(folder / "step-1", *trained("llama", {}, dtype=torch.float32))
    assert main(["hf", str(folder / "step-1"), str(folder / "whole"), *OPTIONS]) == 0
    files = contents(folder / "whole")
    assert len(files) > 3
    return folder / "step-1", files


@pytest.mark.drill
@pytest.mark.parametrize("when", ["before", "after"])
def test_a_run_that_is_killed_at_any_call_leaves_nothing_or_all(tmp_path, launch, checkpoint, when):
    step, whole = checkpoint
    killed = published = 0
    for call in range(1, 200):
        out = tmp_path / f"{call}" / "out"
        (process,) = launch("-c", PROGRAM, call, when, "hf", step, out, *OPTIONS)
        _, errors = process.communicate(timeout=120)
        if process.returncode == 0:
            break
        assert process.returncode == -signal.SIGKILL, errors
        killed += 1
        if out.exists():
            published += 1
            assert contents(out) == whole
            continue
        left = list(out.parent.iterdir()) if out.parent.exists() else []
        assert all(is_unfinished(path) for path in left), left
        assert main(["hf", str(step), str(out), *OPTIONS]) == 0
        assert contents(out) == whole
    # Each of the files is created, written and synced; the last calls come after the rename.
    assert killed >= 3 * len(whole) and published in (1, 2)
    assert contents(out) == whole


@pytest.mark.drill
@pytest.mark.parametrize(
    ("options", "message"),
    [
        ("size=12k", "No space left on device"),
        ("size=1m,nr_inodes=4", "No space left on device"),
        ("ro", "Read-only file system"),
    ],
)
def test_a_disk_that_takes_no_more_is_an_error_of_one_line(
    tmp_path, launch, checkpoint, options, message
):
    step, _ = checkpoint
    with mounted(tmp_path / "to", options):
        out = tmp_path / "to" / "out"
        (process,) = launch("-c", PROGRAM, 0, "before", "hf", step, out, *OPTIONS)
        _, errors = process.communicate(timeout=120)
        (line,) = errors.splitlines()
        assert process.returncode == 1
        assert line.startswith("megablocks-export: ") and message in line
        assert list((tmp_path / "to").iterdir()) == []
    verify_again = tmp_path / "again"
    assert main(["hf", str(step), str(verify_again), *OPTIONS]) == 0
    verify(verify_again, values=True)
