"""What one rank cannot do, no rank does."""

import pytest

from megablocks_core.groups import LOCAL, Mesh, together
from megablocks_core.testing import ranks


def test_one_process_keeps_its_own_error():
    with pytest.raises(KeyError), together("task", group=LOCAL):
        raise KeyError("x")


@ranks(2)
def test_an_error_on_one_rank_raises_on_all():
    group = Mesh().group("dp")
    with (
        pytest.raises(OSError if group.rank == 1 else LookupError) as caught,
        together("write(f)", group=group, raises=LookupError),
    ):
        if group.rank == 1:
            raise OSError("disk full")
    if group.rank == 0:
        assert str(caught.value) == "write(f) failed on rank 1: OSError: disk full"


@ranks(2)
def test_a_value_error_is_one_everywhere():
    group = Mesh().group("dp")
    with (
        pytest.raises(ValueError, match="size=3"),
        together("check", group=group, raises=LookupError),
    ):
        if group.rank == 0:
            raise ValueError("size=3 must be even")
