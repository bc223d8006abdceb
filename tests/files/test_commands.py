"""Errors of commands are one line and a status."""

import warnings

import pytest

from megablocks_core.files.commands import run_command, say, tell


class FoundError(Exception):
    pass


def raising(error):
    def run():
        raise error

    return run


@pytest.mark.parametrize(
    ("error", "status", "line"),
    [
        (ValueError("two\n lines"), 2, "two lines"),
        (ModuleNotFoundError("no x"), 2, "no x"),
        (FoundError("damaged"), 7, "damaged"),
        (OSError("full"), 7, "full"),
        (KeyboardInterrupt(), 130, "stopped"),
    ],
)
def test_an_error_is_one_line_and_a_status(error, status, line, capsys):
    faults = (FoundError, OSError)
    assert run_command("tool", raising(error), faults=faults, fault_status=7) == status
    assert capsys.readouterr().err == f"tool: {line}\n"


def test_warnings_are_lines_too_and_others_go_through(capsys):
    def run():
        warnings.warn("old", stacklevel=1)
        return 3

    assert run_command("tool", run) == 3
    assert capsys.readouterr().err == "tool: old\n"
    with pytest.raises(TypeError):
        run_command("tool", raising(TypeError("a fault of ours")))


def test_what_a_terminal_obeys_is_shown(capsys):
    """A name in a file may say anything: clear the screen, turn the line, begin another."""
    name = "a\x1b[2J\x07\n\u202eb \xa0\x9b\udc80\u2028\u00e9"
    shown = "a\\x1b[2J\\x07\\n\\u202eb \\xa0\\x9b\\udc80\\u2028\u00e9"
    tell(f"only in the first: tensor {name}")
    assert capsys.readouterr().out == f"only in the first: tensor {shown}\n"
    say("tool", "a\x1b[2J \udc80\n is missing")
    assert capsys.readouterr().err == "tool: a\\x1b[2J \\udc80 is missing\n"
    tell("plain\\text")
    assert capsys.readouterr().out == "plain\\text\n"
