"""Which requests each back end of attention serves."""

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from megablocks_core.layers.attention.spec import AttentionSpec


class Capabilities(NamedTuple):
    """What a back end can take. All have both masks, grouped heads, scales and 16 bits on CUDA.

    Attributes:
        documents: ``cu_seqlens``.
        pads: ``cu_seqlens_padded``.
        window: ``window``.
        soft_cap: ``soft_cap``.
        sinks: ``sinks`` of whole rows.
        document_sinks: ``sinks`` beside ``cu_seqlens``.
        dropout: ``dropout``.
        lengths: Other numbers of keys than of queries.
        value_width: Values of other widths than keys.
        float32: Tensors of float32.
        float64: Tensors of float64.
        cpu: Tensors outside CUDA.
        cpu_gradients: Of tensors outside CUDA.
        max_width: The largest D and W, ``None`` for any.
        devices: The compute capabilities of devices, from the first to the second.
        module: What is imported, ``None`` for what is always there.
    """

    documents: bool = True
    pads: bool = True
    window: bool = True
    soft_cap: bool = True
    sinks: bool = True
    document_sinks: bool = True
    dropout: bool = False
    lengths: bool = True
    value_width: bool = True
    float32: bool = True
    float64: bool = True
    cpu: bool = True
    cpu_gradients: bool = True
    max_width: int | None = None
    devices: tuple[tuple[int, int], tuple[int, int]] = ((0, 0), (99, 0))
    module: str | None = None


_LATER = (99, 0)

# What packages for GPUs have in common.
_PACKAGE = Capabilities(
    document_sinks=False,
    float32=False,
    float64=False,
    cpu=False,
    cpu_gradients=False,
    max_width=256,
)
_FLASH = _PACKAGE._replace(sinks=False, value_width=False)

# In the order in which "auto" tries them.
CAPABILITIES = {
    "flash_attn_3": _FLASH._replace(devices=((9, 0), (9, 9)), module="flash_attn_interface"),
    "flash_attn": _FLASH._replace(devices=((8, 0), _LATER), module="flash_attn"),
    "transformer_engine": _PACKAGE._replace(
        soft_cap=False, devices=((9, 0), _LATER), module="transformer_engine"
    ),
    "sdpa": Capabilities(soft_cap=False),
    "flex": Capabilities(float64=False, cpu_gradients=False),
    "naive": Capabilities(dropout=True),
}


Needs = Sequence[tuple[str, str]]


def needs_of(q: Tensor, k: Tensor, v: Tensor, spec: AttentionSpec) -> Needs:
    """The fields of ``Capabilities`` that a call needs, and how an error calls them."""
    return (*_needs_of_spec(spec), *_needs_of_tensors(q, k, v, spec))


def lacking(name: str, needs: Needs, q: Tensor, v: Tensor) -> list[str]:
    """What of a call a back end does not serve, in words; whether it is installed aside."""
    able = CAPABILITIES[name]
    missing = [words for field, words in needs if not getattr(able, field)]
    width = max(q.shape[3], v.shape[3])
    if able.max_width is not None and width > able.max_width:
        missing.append(f"heads of {width} features, which must be at most {able.max_width}")
    # Beside CUDA there is no device that packages have kernels for.
    if q.is_cuda and able.module is not None:
        found, (first, last) = torch.cuda.get_device_capability(q.device), able.devices
        if not first <= found <= last:
            missing.append(f"devices of compute capability {found[0]}.{found[1]}")
    return missing


def _needs_of_spec(spec: AttentionSpec) -> Iterator[tuple[str, str]]:
    if spec.cu_seqlens is not None:
        yield "documents", "cu_seqlens"
    if spec.cu_seqlens_padded is not None:
        yield "pads", "cu_seqlens_padded"
    if spec.window != (None, None):
        yield "window", f"window={spec.window}"
    if spec.soft_cap is not None:
        yield "soft_cap", f"soft_cap={spec.soft_cap}"
    if spec.sinks is not None and spec.cu_seqlens is None:
        yield "sinks", "sinks"
    if spec.sinks is not None and spec.cu_seqlens is not None:
        yield "document_sinks", "sinks with cu_seqlens"
    if spec.dropout is not None:
        yield "dropout", f"dropout of {spec.dropout.p} by counter"


def _needs_of_tensors(
    q: Tensor, k: Tensor, v: Tensor, spec: AttentionSpec
) -> Iterator[tuple[str, str]]:
    if q.shape[1] != k.shape[1]:
        yield "lengths", f"{q.shape[1]} queries and {k.shape[1]} keys"
    if q.shape[3] != v.shape[3]:
        yield "value_width", f"keys of {q.shape[3]} and values of {v.shape[3]} features"
    if q.dtype in (torch.float32, torch.float64):
        yield str(q.dtype).removeprefix("torch."), str(q.dtype)
    if not q.is_cuda:
        yield "cpu", f"tensors on {q.device.type}"
        given = (q, k, v) if spec.sinks is None else (q, k, v, spec.sinks)
        if torch.is_grad_enabled() and any(x.requires_grad for x in given):
            yield "cpu_gradients", f"gradients of tensors on {q.device.type}"
