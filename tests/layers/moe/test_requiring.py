"""What is not so raises a ``ValueError``, and what is so reads nothing on the host."""

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from megablocks_core.layers.moe.requiring import is_whole, require


def test_what_is_not_so_is_named():
    require(torch.tensor(True), "text")
    with pytest.raises(ValueError, match="^text$"):
        require(torch.tensor(False), "text")
    with pytest.raises(ValueError, match="^found$"):
        require(torch.tensor(False), "text", lambda: "found")


def test_fake_values_are_not_read():
    with FakeTensorMode():
        require(torch.ones(3).sum() == 4, "text")


def test_compiled_code_raises_too():
    compiled = torch.compile(
        lambda x: (require(x.sum() > 0, "text"), x + 1)[1], fullgraph=True, backend="aot_eager"
    )
    compiled(torch.ones(2))
    with pytest.raises(RuntimeError, match="text"):
        compiled(-torch.ones(2))


def test_whole_numbers():
    assert [is_whole(value) for value in (3, True, 3.0, None)] == [True, False, False, False]
