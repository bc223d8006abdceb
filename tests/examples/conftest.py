"""Examples as users run them: scripts, alone or on several ranks."""

import sys

import pytest

from tests.examples.tiny import EXAMPLES

sys.path.append(str(EXAMPLES))  # where examples that build on each other look


@pytest.fixture
def printed(launch):
    """Runs an example to its end on some ranks; what each rank printed."""

    def run(name, *arguments, ranks=1):
        processes = launch(EXAMPLES / name, *arguments, ranks=ranks)
        outputs = [process.communicate(timeout=300) for process in processes]
        for process, (_, errors) in zip(processes, outputs, strict=True):
            assert process.returncode == 0, errors
        return [output for output, _ in outputs]

    return run
