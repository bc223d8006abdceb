"""A function of state-space layers by the name of what computes it."""

from collections.abc import Callable
from functools import wraps
from typing import Any

from torch import Tensor

from megablocks_core.layers.kernels import triton_serves
from megablocks_core.layers.ssm.backends import causal_conv1d as conv1d
from megablocks_core.layers.ssm.backends import fla, mamba_ssm
from megablocks_core.layers.ssm.functions.convolution import causal_conv1d
from megablocks_core.layers.ssm.functions.delta import gated_delta_rule
from megablocks_core.layers.ssm.functions.selective import selective_scan
from megablocks_core.layers.ssm.functions.ssd import ssd_chunk_scan
from megablocks_core.layers.ssm.functions.steps import causal_conv1d_step

Function = Callable[..., tuple[Tensor, Tensor | None]]


def by_backend(function: str, backend: str = "auto") -> Function:
    """A function of ``layers.ssm``, or one with its signature that a back end computes.

    Args:
        function: "ssd_chunk_scan", "selective_scan", "causal_conv1d", "causal_conv1d_step" or
            "gated_delta_rule".
        backend: "auto", this library's: Triton for CUDA tensors where it has kernels, else plain
            torch. "triton": the same, and a call that kernels do not serve raises. Or "mamba_ssm",
            "causal_conv1d" or "fla", which are imported when called.

    Raises:
        ValueError: There is no such function, or the back end does not have it.
    """
    if function not in _BY_BACKEND:
        raise ValueError(f"function={function!r} must be one of {', '.join(_BY_BACKEND)}")
    found = _BY_BACKEND[function]
    if backend not in found:
        raise ValueError(f"backend={backend!r} must be one of {', '.join(found)} for {function}")
    return found[backend]


def _in_triton(function: Function) -> Function:
    @wraps(function)
    def served(*tensors: Tensor, **options: Any) -> tuple[Tensor, Tensor | None]:
        given = (*tensors, *(each for each in options.values() if isinstance(each, Tensor)))
        if not triton_serves(*given):
            raise ValueError(
                f"{function.__name__} has Triton kernels for tensors on CUDA with something in "
                "them, of 16 or 32 bits, outside of compilers, and where Triton is installed"
            )
        return function(*tensors, **options)

    return served


_BY_BACKEND: dict[str, dict[str, Function]] = {
    "ssd_chunk_scan": {
        "auto": ssd_chunk_scan,
        "triton": _in_triton(ssd_chunk_scan),
        "mamba_ssm": mamba_ssm.ssd_chunk_scan,
    },
    "selective_scan": {"auto": selective_scan, "mamba_ssm": mamba_ssm.selective_scan},
    "causal_conv1d": {
        "auto": causal_conv1d,
        "triton": _in_triton(causal_conv1d),
        "causal_conv1d": conv1d.causal_conv1d,
    },
    "causal_conv1d_step": {
        "auto": causal_conv1d_step,
        "causal_conv1d": conv1d.causal_conv1d_step,
    },
    "gated_delta_rule": {"auto": gated_delta_rule, "fla": fla.gated_delta_rule},
}
