"""Run the benchmarks: all, or those whose name contains a given word.

    python benchmarks/run.py [WORD...]

Each file runs in a process of its own and prints JSON lines of one schema
(``benchmarks/timing.py``). Ratios above what is promised are named at the end, and make the exit
status 1.
"""

import json
import subprocess
import sys
from pathlib import Path

_FOLDER = Path(__file__).parent


def main(words: list[str]) -> int:
    """Run them; the exit status."""
    files = sorted(_FOLDER.glob("*/**/bench_*.py"))
    names = {str(path.relative_to(_FOLDER).with_suffix("")): path for path in files}
    chosen = [name for name in names if not words or any(word in name for word in words)]
    if not chosen:
        print(f"no benchmark of {sorted(names)} contains {words}", file=sys.stderr)
        return 2
    missed, failed = [], []
    for name in chosen:
        lines, status = _run("benchmarks." + name.replace("/", "."))
        missed += [line for line in lines if line["limit"] and line["ratio"] > line["limit"]]
        failed += [name] if status else []
    for line in missed:
        print(f"above its limit: {json.dumps(line)}", file=sys.stderr)
    for name in failed:
        print(f"failed: {name}", file=sys.stderr)
    return 1 if missed or failed else 0


def _run(module: str) -> tuple[list[dict], int]:
    command = [sys.executable, "-m", module]
    process = subprocess.Popen(command, cwd=_FOLDER.parent, stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    lines = []
    for line in process.stdout:
        print(line, end="", flush=True)
        lines.append(json.loads(line))
    return lines, process.wait()


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
