"""Documents of a packed row: what is refused, and which token is whose."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch._subclasses.fake_tensor import FakeTensorMode

from megablocks_core.layers.ssm.functions.documents import check_documents, document_of_token


@pytest.mark.parametrize(
    ("sums", "rows"),
    [
        ([0, 3], 2),
        ([1, 3], 1),
        ([0, 3, 2], 1),
        ([0, 6], 1),
        ([0], 1),
        ([[0, 3]], 1),
        ([0.0, 3.0], 1),
        ([-1, 3], 1),
    ],
)
def test_sums_that_describe_no_row_are_named(sums, rows):
    with pytest.raises(ValueError, match="cu_seqlens"):
        check_documents(torch.tensor(sums), rows=rows, length=5)


@pytest.mark.parametrize("sums", [[0, 5], [0, 0, 5, 5], [0, 2, 4], [0, 0]])
def test_empty_documents_and_tokens_behind_the_last_are_served(sums):
    check_documents(torch.tensor(sums), rows=1, length=5)


def test_rows_without_documents_are_any_number():
    check_documents(None, rows=7, length=5)


def test_values_are_not_read_where_that_would_wait():
    with FakeTensorMode():
        check_documents(torch.tensor([0, 9]), rows=1, length=5)
    check_documents(torch.tensor([0, 9], device="meta"), rows=1, length=5)


@given(st.lists(st.integers(0, 4), min_size=1, max_size=6), st.integers(0, 3))
def test_every_token_has_its_document(lengths: list[int], behind: int):
    sums = torch.tensor([0, *torch.tensor(lengths).cumsum(0).tolist()], dtype=torch.int32)
    total = sum(lengths) + behind
    owners = [number for number, length in enumerate([*lengths, behind]) for _ in range(length)]
    assert document_of_token(sums, total).tolist() == owners
