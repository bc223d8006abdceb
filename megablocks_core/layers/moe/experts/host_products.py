"""Products of matrices on a CPU, by the faster of torch's two libraries.

torch asks MKL for products in float32. MKL takes AVX-512 on Intel's processors alone; on others
with AVX-512, oneDNN needs less than half the time.

Dimensions: R rows, S summed, C columns.
"""

import torch
from torch import Tensor

try:
    import megablocks_core._native as _native
except ModuleNotFoundError:  # a pure wheel; an extension that is there and broken still raises
    _native = None

_ONEDNN_DTYPES = (torch.bfloat16, torch.float16)
_STEP = 64


def row_step(dtype: torch.dtype) -> int:
    """What the rows of products had better be a multiple of.

    oneDNN builds a kernel for each new shape, so where it is asked, counts go in steps.
    """
    by_onednn = dtype in _ONEDNN_DTYPES or (dtype == torch.float32 and _onednn_is_faster())
    return _STEP if by_onednn else 1


def multiply(a_RS: Tensor, b_SC: Tensor, *, out: Tensor) -> None:
    """Write ``a b`` into ``out`` [R C]."""
    if _asks_onednn(a_RS):
        out.copy_(_by_onednn(a_RS, b_SC))
    else:
        torch.mm(a_RS, b_SC, out=out)


def add_multiplied(a_RS: Tensor, b_SC: Tensor, *, to: Tensor) -> None:
    """Add ``a b`` to ``to`` [R C]."""
    if _asks_onednn(a_RS):
        to.add_(_by_onednn(a_RS, b_SC))
    else:
        to.addmm_(a_RS, b_SC)


def _asks_onednn(a_RS: Tensor) -> bool:
    on_host = a_RS.dtype == torch.float32 and a_RS.device.type == "cpu" and a_RS.numel() > 0
    return on_host and _onednn_is_faster()


def _onednn_is_faster() -> bool:
    """For products in float32 on this processor."""
    return (
        _native is not None
        and not _native.is_intel()
        and torch.backends.mkldnn.is_available()
        and torch.backends.cpu.get_cpu_capability() == "AVX512"
    )


def _by_onednn(a_RS: Tensor, b_SC: Tensor) -> Tensor:
    return torch.ops.mkldnn._linear_pointwise(a_RS, b_SC.t(), None, "none", [], "")
