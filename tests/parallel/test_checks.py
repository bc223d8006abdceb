"""A condition raises with what was found; compiled code asserts it."""

import pytest
import torch

from megablocks_core.parallel.checks import require


def test_a_condition_that_fails_tells_what_was_found():
    require(torch.tensor(True), "all is well")
    with pytest.raises(ValueError, match="^ids must be small$"):
        require(torch.tensor(False), "ids must be small")
    with pytest.raises(ValueError, match="ids must be small; found 7"):
        require(torch.tensor(False), "ids must be small", lambda: "found 7")


def test_compiled_code_asserts():
    @torch.compile(fullgraph=True, backend="aot_eager")
    def doubled(x):
        require((x > 0).all(), "x must be positive", lambda: f"found {x.min()}")
        return 2 * x

    assert doubled(torch.ones(2)).tolist() == [2.0, 2.0]
    with pytest.raises(RuntimeError, match="x must be positive"):
        doubled(-torch.ones(2))
