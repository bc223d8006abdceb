"""Every Python block of the README runs as it stands: alone, or on two ranks under torchrun."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
README = ROOT / "README.md"


def python_blocks():
    """Yield the line number and the text of each fenced Python block."""
    text = README.read_text()
    for block in re.finditer(r"^```python\n(.*?)^```", text, re.DOTALL | re.MULTILINE):
        yield text.count("\n", 0, block.start(1)) + 1, block[1]


BLOCKS = dict(python_blocks())


@pytest.mark.parametrize("line", BLOCKS)
def test_readme_block_runs(line, tmp_path):
    script = tmp_path / f"readme_line_{line}.py"
    script.write_text(BLOCKS[line])
    launcher = []
    if "init_process_group" in BLOCKS[line]:
        launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    command = [sys.executable, *launcher, str(script)]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stdout + done.stderr


def test_the_readme_shows_one_process_and_two_ranks():
    on_ranks = ["init_process_group" in block for block in BLOCKS.values()]
    assert True in on_ranks
    assert False in on_ranks


def test_what_starts_ranks_ends_them():
    pages = [README, *(ROOT / "docs").glob("*.md"), *(ROOT / "examples").glob("*.py")]
    for page in pages:  # a rank of gloo that exits without it aborts now and then (torch 2.13)
        text = page.read_text()
        started, ended = (text.count(f"dist.{do}_process_group(") for do in ("init", "destroy"))
        assert started <= ended, page
