"""What is handed over in place of an argument, and the check that each is refused by name."""

import inspect
import re

import torch
from torch import nn

NAN = float("nan")

NO_MODULES = (None, 3, "model", nn.Linear, [nn.Linear(2, 2)], torch.ones(2))
NO_GROUPS = (None, "dp", 2, [0])
NO_FLAGS = (None, 1, 0, "yes", torch.tensor(True))
NO_REDUCTIONS = (None, "avg", "MEAN", 1, ["mean"], torch.ones(2))
NO_DTYPES = (
    *("bf16", 16, float),
    *(torch.int32, torch.bool, torch.complex64, torch.float8_e4m3fn),
)
NO_NUMBERS = (None, "1", True, NAN, [1.0], 1j)
NO_COUNTS = (None, "3", True, 0, -1, 1.5, NAN, [1])
NO_PATTERNS = (3, [3], ("a", None), {"a": True}, b"a")
NO_PARAMETERS = (None, 3, "model", nn.Linear, {"w": torch.ones(1)}, [3], [("w", torch.ones(1))])


def refused(function, right, wrong, *, besides=()):
    """Each wrong value is refused by its argument's name, and every argument has some.

    Args:
        function: What is called with keywords.
        right: Arguments that it takes.
        wrong: For each argument values that it must not take.
        besides: Arguments that have no wrong values.
    """
    parameters = inspect.signature(function).parameters.values()
    named = {one.name for one in parameters if one.kind is not inspect.Parameter.VAR_KEYWORD}
    assert named == {*wrong, *besides}
    for name, values in wrong.items():
        each_refused(lambda value, name=name: function(**{**right, name: value}), name, values)


def each_refused(call, name, values):
    """``call`` refuses each value by this name, and with a rule."""
    for value in values:
        try:
            call(value)
        except ValueError as error:
            rule = re.search(rf"\b{name}\b.* must ", str(error), re.DOTALL)
            assert rule, f"{name}={value!r}: {error}"
        else:
            raise AssertionError(f"{name}={value!r} was taken")
