"""Progress shows on a terminal, and nowhere else."""

import io

from megablocks_core.ckpt.tools import progress
from megablocks_core.ckpt.tools.progress import Progress, size_text


class Terminal(io.StringIO):
    def isatty(self):
        return True


def test_a_terminal_gets_one_line_which_goes_away(monkeypatch):
    monkeypatch.setattr(progress, "_PAUSE", 0.0)
    stream = Terminal()
    bar = Progress("diff", 4_000_000, stream=stream)
    bar.add(1_000_000)
    bar.add(1_000_000)
    assert stream.getvalue().count("\r") == 2
    assert "diff  ############------------  2.0 MB of 4.0 MB" in stream.getvalue()
    bar.close()
    assert stream.getvalue().endswith(" \r") and "\n" not in stream.getvalue()


def test_lines_come_seldom():
    stream = Terminal()
    bar = Progress("diff", 10, stream=stream)
    for _ in range(10):
        bar.add(1)
    assert stream.getvalue() == ""


def test_a_file_gets_nothing(monkeypatch):
    monkeypatch.setattr(progress, "_PAUSE", 0.0)
    stream = io.StringIO()
    bar = Progress("diff", 10, stream=stream)
    bar.add(5)
    bar.close()
    assert stream.getvalue() == ""


def test_sizes_are_short():
    sizes = {0: "0 B", 999: "999 B", 1500: "1.5 kB", 2_000_000: "2.0 MB", 3 * 10**12: "3.0 TB"}
    assert {size: size_text(size) for size in sizes} == sizes
