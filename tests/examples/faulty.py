"""Runs a script as Python would, with a fault on one rank at an exact moment.

    python faulty.py kill os:fsync 5 0 SCRIPT ARGUMENTS...

kills rank 0 (SIGKILL) as it calls ``os.fsync`` for the fifth time. ``stop`` stops it, so that it
is there and never answers; ``raise`` raises in it.
"""

import importlib
import os
import runpy
import signal
import sys
from operator import attrgetter


def main():
    deed, place, number, rank, script, *arguments = sys.argv[1:]
    if os.environ.get("RANK", "0") == rank:
        arm(deed, place, int(number))
    sys.argv = [script, *arguments]
    runpy.run_path(script, run_name="__main__")


def arm(deed, place, number):
    """Replace the function at ``module:name`` by one that does ``deed`` at call ``number``."""
    module, _, name = place.partition(":")
    *owners, name = name.split(".")
    owner = importlib.import_module(module)
    owner = attrgetter(".".join(owners))(owner) if owners else owner
    function, calls = getattr(owner, name), []

    def faulty(*arguments, **options):
        calls.append(1)
        if len(calls) == number:
            commit(deed)
        return function(*arguments, **options)

    setattr(owner, name, faulty)


def commit(deed):
    if deed == "raise":
        raise RuntimeError("a fault of this rank alone")
    os.kill(os.getpid(), {"kill": signal.SIGKILL, "stop": signal.SIGSTOP}[deed])


if __name__ == "__main__":
    main()
