"""What the commands have in common: what they say is lines, their errors are lines on stderr."""

from __future__ import annotations

import os
import sys
import warnings
from collections.abc import Callable

STOPPED = 130  # the status of what Ctrl-C ended, as shells have it


def say(program: str, text: str) -> None:
    """One line on stderr."""
    sys.stderr.write(f"{program}: {printable(' '.join(text.split()))}\n")


def tell(text: str) -> None:
    """One line on stdout, for people: of what was found, with names as files have them."""
    sys.stdout.write(f"{printable(text)}\n")


def printable(text: str) -> str:
    """``text`` with a backslash for what a terminal obeys or hides, as Python writes it.

    Such as escapes, ends of lines and marks that turn the direction; names in files may hold all.
    """
    if text.isprintable():
        return text
    return "".join(one if one.isprintable() else repr(one)[1:-1] for one in text)


def run_command(
    program: str,
    run: Callable[[], int],
    *,
    faults: tuple[type[Exception], ...] = (OSError,),
    fault_status: int = 1,
) -> int:
    """Run a command; return its exit status.

    Args:
        program: Its name, which begins each line on stderr.
        run: The command.
        faults: What it raises for a fault that was found, beside ``ValueError`` and a missing
            package, which are wrong usage: status 2.
        fault_status: The status of a fault.
    """
    with warnings.catch_warnings():
        warnings.showwarning = lambda message, *_, **__: say(program, str(message))
        try:
            return run()
        except BrokenPipeError:  # whoever read the output has enough
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
            return 1
        except (ValueError, ModuleNotFoundError) as error:
            say(program, str(error))
            return 2
        except faults as error:
            say(program, str(error))
            return fault_status
        except KeyboardInterrupt:
            say(program, "stopped")
            return STOPPED
