"""Every Python block of the README runs as it stands: alone, or on two ranks.

The first one for two ranks runs under torchrun, as the README says; that is slow.
"""

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
ON_RANKS = [line for line, block in BLOCKS.items() if "init_process_group" in block]


@pytest.mark.parametrize("line", BLOCKS)
def test_readme_block_runs(line, tmp_path, launch):
    script = tmp_path / f"readme_line_{line}.py"
    script.write_text(BLOCKS[line])
    processes = launch(script, ranks=2 if line in ON_RANKS else 1, cwd=tmp_path)
    told = [process.communicate() for process in processes]
    assert not any(process.returncode for process in processes), told


def test_the_first_block_for_ranks_runs_under_torchrun(tmp_path):
    script = tmp_path / "mlp.py"
    script.write_text(BLOCKS[ON_RANKS[0]])
    launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    command = [sys.executable, *launcher, str(script)]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stdout + done.stderr


def test_the_readme_shows_one_process_and_two_ranks():
    assert 0 < len(ON_RANKS) < len(BLOCKS)


def test_what_starts_ranks_ends_them():
    pages = [README, *(ROOT / "docs").glob("*.md"), *(ROOT / "examples").glob("*.py")]
    for page in pages:  # a rank of gloo that exits without it aborts now and then (torch 2.13)
        text = page.read_text()
        started, ended = (text.count(f"dist.{do}_process_group(") for do in ("init", "destroy"))
        assert started <= ended, page
