"""Progress shows on a terminal, and nowhere else."""

import io

from megablocks_core.files import progress
from megablocks_core.files.progress import Progress, progress_text, size_text, time_text


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
    assert "diff  ##########----------  2.0 MB of 4.0 MB" in stream.getvalue()
    bar.close()
    assert stream.getvalue().endswith(" \r") and "\n" not in stream.getvalue()


def test_the_line_says_how_fast_and_how_long():
    text = progress_text(30_000_000, 120_000_000, 2.0)
    assert text == "#####---------------  30.0 MB of 120.0 MB  15.0 MB/s  0:06 left"
    assert progress_text(0, 10, 0.0) == "--------------------  0 B of 10 B  0 B/s"
    assert len(progress_text(*[999_900_000] * 2, 1.0)) + len("average  ") < 80
    times = {0: "0:00", 0.2: "0:01", 59.5: "1:00", 3600: "1:00:00", 86399: "23:59:59"}
    assert {seconds: time_text(seconds) for seconds in times} == times


def test_what_is_no_bytes_is_counted_by_its_name(monkeypatch):
    text = progress_text(3, 12, 2.0, "samples")
    assert text == "#####---------------  3 of 12 samples  0:06 left"
    monkeypatch.setattr(progress, "_PAUSE", 0.0)
    stream = Terminal()
    Progress("calibrate", unit="samples", stream=stream).show(2, 4)
    assert "calibrate  ##########----------  2 of 4 samples" in stream.getvalue()


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
