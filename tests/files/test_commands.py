"""Errors of commands are one line and a status."""

import warnings

import pytest

from megablocks_core.files.commands import run_command


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
