"""A condition raises with what was found; compiled code asserts it. Rules name what they judge."""

import math
from functools import partial

import numpy as np
import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from megablocks_core.parallel.checks import (
    check_choice,
    check_floating,
    check_groups,
    check_mapping,
    check_number,
    check_parameters,
    check_whole,
    check_words,
    is_whole,
    require,
)


def test_a_condition_that_fails_tells_what_was_found():
    require(torch.tensor(True), "all is well")
    with pytest.raises(ValueError, match="^ids must be small$"):
        require(torch.tensor(False), "ids must be small")
    with pytest.raises(ValueError, match="^found 7$"):
        require(torch.tensor(False), "ids must be small", lambda: "found 7")


def test_fake_values_are_not_read():
    with FakeTensorMode():
        require(torch.ones(3).sum() == 4, "text")


def test_whole_numbers_are_no_bools():
    assert [is_whole(value) for value in (3, True, 3.0, None)] == [True, False, False, False]


def test_compiled_code_asserts():
    @torch.compile(fullgraph=True, backend="aot_eager")
    def doubled(x):
        require((x > 0).all(), "x must be positive", lambda: f"found {x.min()}")
        return 2 * x

    assert doubled(torch.ones(2)).tolist() == [2.0, 2.0]
    with pytest.raises(RuntimeError, match="x must be positive"):
        doubled(-torch.ones(2))


@pytest.mark.parametrize(
    ("check", "arguments", "said"),
    [
        (check_choice, ("mode", "c", ("a", "b")), 'mode=\'c\' must be "a" or "b"'),
        (partial(check_whole, least=1), ("n", 0), "n=0 must be a whole number of at least 1"),
        (
            partial(check_whole, least=1, most=9),
            ("n", True),
            "n=True must be a whole number from 1 to 9",
        ),
        (check_number, ("lr", math.nan, "any", lambda x: True), "lr=nan must be any"),
        (check_floating, ("dtype", torch.int8), "dtype=torch.int8 must be a floating-point dtype"),
        (check_words, ("units", "all"), "units='all' must be a tuple of patterns"),
        (check_mapping, ("state", {"a": 1}, ("a", "b")), r"state of \['a'\] must have \['b'\]"),
        (check_groups, ("groups", [{}]), r"groups\[0\] of \[\] must have \['params'\]"),
        (check_parameters, ([3],), r"module_or_parameters=\[3\] with 3 in it must be a module"),
    ],
)
def test_a_rule_names_the_argument_and_its_value(check, arguments, said):
    with pytest.raises(ValueError, match=said):
        check(*arguments)


def test_numbers_of_numpy_are_as_good_as_pythons():
    check_whole("n", np.int64(3), least=1)
    check_number("lr", np.float32(0.5), "any", lambda x: x == 0.5)
    check_number("lr", 10**20, "large", lambda x: x > 1)
