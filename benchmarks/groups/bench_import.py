"""What an import costs: ``groups`` must load no torch, and little may come on top of torch.

Times are processor time of fresh interpreters, compared with a tenth of a second. Modules are
compiled before, as those of an installed package are.
"""

import os
import subprocess
import sys
import tempfile

from benchmarks.timing import ROUNDS, Times, report

_CASES = {
    "groups, without torch": (
        "import sys",
        "import megablocks_core.groups; assert 'torch' not in sys.modules",
    ),
    "groups and parallel, after torch": (
        "import torch",
        "import megablocks_core.groups, megablocks_core.parallel",
    ),
}


def seconds(before: str, measured: str, *, compiled: str) -> float:
    """Processor time of ``measured`` in an interpreter that has run ``before``."""
    code = f"import time\n{before}\nstart = time.process_time()\n{measured}\n"
    code += "print(time.process_time() - start)"
    # An empty PYTHONDONTWRITEBYTECODE lets Python write to the folder.
    env = os.environ | {"PYTHONPYCACHEPREFIX": compiled, "PYTHONDONTWRITEBYTECODE": ""}
    return float(subprocess.check_output([sys.executable, "-c", code], env=env, text=True))


def main() -> None:
    """Print one JSON line a case."""
    for name, (before, measured) in _CASES.items():
        with tempfile.TemporaryDirectory() as folder:
            seconds(before, measured, compiled=folder)
            times = [seconds(before, measured, compiled=folder) for _ in range(ROUNDS)]
        report(
            Times(times, [0.1] * len(times)),
            benchmark="groups/import",
            peer="a tenth of a second",
            case={"import": name},
            limit=1.0,
        )


if __name__ == "__main__":
    main()
