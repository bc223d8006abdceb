"""What mixers refuse before any rank sends.

Dimensions: B rows, T tokens, H hidden size, E documents.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor

from megablocks_core.layers.ssm.mixers.state import MixerState
from megablocks_core.parallel import SequenceCut
from megablocks_core.parallel.checks import check_floating, check_number, check_tensors, check_whole
from megablocks_core.parallel.sequence import check_cu_seqlens


def check_sizes(**sizes: int) -> None:
    """Raise ``ValueError`` unless each is a whole number of at least 1."""
    for name, size in sizes.items():
        check_whole(name, size, least=1)


def check_eps(name: str, eps: float) -> None:
    """Raise ``ValueError`` unless it can stand under the root of a norm."""
    check_number(name, eps, "positive and finite", lambda value: 0.0 < value < math.inf)


def check_input(x: Tensor, hidden_size: int, *, shape: str) -> None:
    """Raise ``ValueError`` unless ``x`` has numbers of ``shape``, "[... T H]" or "[B H]"."""
    check_tensors(x=x)
    check_floating("x.dtype", x.dtype)
    fits = x.dim() == 2 if shape == "[B H]" else x.dim() >= 2
    if not fits or x.shape[-1] != hidden_size:
        raise ValueError(f"x of shape {tuple(x.shape)} must be {shape} with H={hidden_size}")


def check_state(state: MixerState, like: MixerState) -> None:
    """Raise ``ValueError`` unless ``state`` has the shapes and places of ``like``."""
    if not isinstance(state, MixerState):
        raise ValueError(f"state of type {type(state).__name__} must be a MixerState")
    for name, given, right in zip(state._fields, state, like, strict=True):
        check_tensors(**{f"state.{name}": given})
        check_floating(f"state.{name}.dtype", given.dtype)
        if given.shape != right.shape:
            raise ValueError(
                f"state.{name} of shape {tuple(given.shape)} must have shape {tuple(right.shape)}"
            )
        if given.device != right.device:
            raise ValueError(f"state.{name} on {given.device} must be on {right.device}")


def check_padded(cu_seqlens: Tensor, cu_seqlens_padded: Tensor, *, length: int) -> None:
    """Refuse documents that do not fit where they are stored.

    Values are looked at where that costs no wait: on the CPU, outside of compilers.

    Raises:
        ValueError: One is no vector of sums within ``length`` tokens, the two have not one shape
            and place, or a document is longer than its storage.
    """
    check_cu_seqlens(cu_seqlens, length)
    try:
        check_cu_seqlens(cu_seqlens_padded, length)
    except ValueError as error:
        raise ValueError(str(error).replace("cu_seqlens", "cu_seqlens_padded", 1)) from None
    if cu_seqlens.shape != cu_seqlens_padded.shape or cu_seqlens.device != cu_seqlens_padded.device:
        raise ValueError(
            f"cu_seqlens_padded of shape {tuple(cu_seqlens_padded.shape)} on "
            f"{cu_seqlens_padded.device} must be of cu_seqlens', {tuple(cu_seqlens.shape)} on "
            f"{cu_seqlens.device}"
        )
    if _shown(cu_seqlens) and (cu_seqlens.diff() > cu_seqlens_padded.diff()).any():
        raise ValueError(
            f"cu_seqlens={cu_seqlens.tolist()} must give no document more tokens than "
            f"cu_seqlens_padded={cu_seqlens_padded.tolist()}"
        )


def check_same_documents(cut: SequenceCut, stored: Tensor | None) -> None:
    """Refuse sums that are not the cut's; values are looked at where that costs no wait.

    Raises:
        ValueError: The cut has none, or others than ``stored`` tells.
    """
    if stored is None:
        return
    if cut.cu_seqlens is None:
        raise ValueError("cut must know the documents: SequenceCut(length, cu_seqlens=...)")
    check_cu_seqlens(stored, cut.length)
    differ = stored.shape != cut.cu_seqlens.shape
    if differ or (_shown(stored) and _shown(cut.cu_seqlens) and not stored.equal(cut.cu_seqlens)):
        raise ValueError(f"cut of other documents than cu_seqlens={stored} must not come with it")


def _shown(x: Tensor) -> bool:
    return not (torch.compiler.is_compiling() or isinstance(x, FakeTensor)) and x.is_cpu
