"""Whatever the formula of a loss is, the compiler sees one operation that keeps its word."""

import pytest
import torch

from megablocks_core.parallel.losses.linear_cross_entropy import _operation
from megablocks_core.parallel.losses.linear_divergence import _operation_stored, _operation_whole

_T, _V, _H = 5, 7, 4


def _random(*shape, dtype=torch.float32):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(0)).to(dtype)


def _tensors(kind):
    counts = torch.tensor([[True, False, True, True, True]])
    if kind == "cross-entropy":
        return [counts, torch.arange(_T).view(1, _T)], [0.1, 0.1], ""
    if kind == "stored":
        stored = _random(1, _T, _V).log_softmax(-1).topk(3)
        return [counts, *stored], [0.0, 1.0], "bucket"
    return [counts, _random(1, _T, 3), _random(_V, 3)], [1.0, 2.0, 0.0], ""


_OPERATIONS = {
    "cross-entropy": _operation,
    "stored": _operation_stored,
    "whole": _operation_whole,
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("kind", _OPERATIONS)
def test_the_compiler_is_told_the_shapes_and_strides_that_come(kind, dtype):
    """Inputs of any layout; what comes is dense, as the stand-in says."""
    hidden, weight = _random(1, _T, _H, dtype=dtype), _random(_V, _H, dtype=dtype)
    layouts = (
        (hidden, weight),
        (hidden.permute(2, 1, 0).contiguous().permute(2, 1, 0), weight.t().contiguous().t()),
        (hidden[:, :1].expand(1, _T, _H), weight[:1].expand(_V, _H)),
    )
    for x, w in layouts:
        for wanted in ([True, True, True], [False, False, True], [False, False, False]):
            arguments = (x, w, _random(_V), torch.ones(()), wanted, *_tensors(kind))
            torch.library.opcheck(
                _OPERATIONS[kind],
                (*arguments, None, 3.0, False, ""),
                test_utils=("test_schema", "test_faketensor"),
            )
