"""Run the suite under every fault of ``megablocks_core.testing.mutations`` and name survivors.

    python tools/mutate.py [FAULT-PART ...] [-- PYTEST-ARGUMENTS ...]

Each fault must turn some test red; the run under it stops at the first. Parts of names choose
faults ("copy_to", "dropped"). Exits with 1 if a fault survives that ``EXPLAINED`` does not have.
The harness's own tests are left out: they put in the faults themselves.
"""

import subprocess
import sys
import time

from megablocks_core.testing.mutations import mutations

EXPLAINED: dict[str, str] = {}
PYTEST = [sys.executable, "-m", "pytest", "-x", "-q", "-p", "no:cacheprovider"]


def main(arguments: list[str]) -> int:
    """Run all chosen faults and return the exit code."""
    cut = arguments.index("--") if "--" in arguments else len(arguments)
    parts, options = arguments[:cut], arguments[cut + 1 :]
    names = [fault.name for fault in mutations()]
    chosen = [name for name in names if not parts or any(part in name for part in parts)]
    survivors = []
    for name in chosen:
        start = time.monotonic()
        command = [*PYTEST, f"--mutation={name}", "--ignore=tests/testing", *options]
        run = subprocess.run(command, capture_output=True, text=True)
        failed = [line for line in run.stdout.splitlines() if line.startswith("FAILED")]
        if run.returncode and not failed:  # such as an error in collection
            sys.exit(f"{' '.join(command)} gives no verdict:\n{run.stdout}{run.stderr}")
        seconds = time.monotonic() - start
        if failed:
            print(f"found     {name} ({seconds:.0f} s): {failed[0].split(' - ')[0]}", flush=True)
        else:
            reason = EXPLAINED.get(name)
            print(f"SURVIVES  {name} ({seconds:.0f} s): {reason or 'unexplained'}", flush=True)
            survivors += [] if reason else [name]
    print(f"{len(chosen)} faults, {len(survivors)} unexplained survivors")
    return 1 if survivors else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
