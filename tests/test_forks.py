"""Processes forked for tests end as those of Python do."""

import signal

import pytest


@pytest.mark.parametrize(
    ("code", "ends", "out", "err"),
    [
        ("print(__name__)", 0, "__main__\n", ""),
        ("import atexit; atexit.register(print, 'late')", 0, "late\n", ""),
        ("import sys; sys.exit()", 0, "", ""),
        ("import sys; sys.exit(3)", 3, "", ""),
        ("import sys; sys.exit('no')", 1, "", "no\n"),
        ("1 / 0", 1, "", "ZeroDivisionError: division by zero\n"),
        ("import threading; threading.Thread(target=print, args=[5]).start()", 0, "5\n", ""),
    ],
)
def test_code_output_and_errors(code, ends, out, err, launch):
    (process,) = launch("-c", code)
    found = process.communicate()
    assert (process.returncode, found[0]) == (ends, out)
    assert found[1].endswith(err) and bool(found[1]) == bool(err)


def test_a_script_has_its_words_and_folder(tmp_path, launch):
    (tmp_path / "own.py").write_text("value = 7\n")
    (tmp_path / "script.py").write_text("import own, sys; print(own.value, *sys.argv[1:])\n")
    (process,) = launch(tmp_path / "script.py", "a", "b")
    assert process.communicate() == ("7 a b\n", "")


def test_a_signal_is_told(launch):
    (process,) = launch("-c", "import time; time.sleep(100)")
    process.kill()
    assert process.wait() == -signal.SIGKILL
