"""Softmax of blocks of logits: their exponentials summed up, and made into gradients.

Dimensions: n tokens, b columns of a block of the vocabulary, k numbers a token.

The extension does each in one pass (``cpp/softmax_blocks.hpp``) where a column's logits lie side
by side in a CPU's memory, in float32 or bfloat16; the plain twins take whatever torch does.
"""

from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from megablocks_core.parallel.losses.chunked_head import maxima

try:
    import megablocks_core._native as _native
except ModuleNotFoundError:  # a pure wheel; an extension that is there and broken still raises
    _native = None


class Terms(NamedTuple):
    """What gradients are made of: ``exp(x - top) * factor - shift``, and ``hit`` at the target."""

    top_n: Tensor
    factor_n: Tensor
    shift_n: Tensor | None
    hit_n: Tensor


def takes_bfloat16() -> bool:
    """Whether bfloat16 logits on CPU give sums in float32, and gradients rounded once."""
    return _native is not None


def softmax_sums_(x_nb: Tensor, targets_n: Tensor, *, all_logits: bool) -> Tensor:
    """Numbers of each token [3 n]: maximum, sum of ``exp(x - maximum)``, the target's logit.

    And the sum of logits as a fourth, if asked for. The target's is zero where ``targets_n``, its
    column in this block, is none. The logits become what ``prepare_`` makes of them.
    """
    if _native is None or not _fits(x_nb):
        return softmax_sums_plain_(x_nb, targets_n, all_logits=all_logits)
    out_kn = x_nb.new_empty(3 + all_logits, len(x_nb), dtype=torch.float32)
    threads = torch.get_num_threads()
    _native.softmax_sums(_bits(x_nb), targets_n.numpy(), out=out_kn.numpy(), threads=threads)
    return out_kn


def prepare_(x_nb: Tensor, top_n: Tensor) -> None:
    """Make of logits what ``make_gradients_`` takes, with their maximum in this block."""
    if _native is None or not _fits(x_nb):
        x_nb.sub_(top_n.unsqueeze(-1)).exp_()


def make_gradients_(x_nb: Tensor, targets_n: Tensor, top_n: Tensor, terms: Terms) -> None:
    """Make gradients of what ``prepare_`` left, whose maximum in this block was ``top_n``."""
    if _native is None or not _fits(x_nb):
        return make_gradients_plain_(x_nb, targets_n, top_n, terms)
    shift_n = torch.zeros_like(top_n) if terms.shift_n is None else terms.shift_n
    terms_kn = torch.stack([terms.top_n, terms.factor_n, shift_n, terms.hit_n]).numpy()
    threads = torch.get_num_threads()
    _native.softmax_gradients(_bits(x_nb), targets_n.numpy(), terms=terms_kn, threads=threads)


def softmax_sums_plain_(x_nb: Tensor, targets_n: Tensor, *, all_logits: bool) -> Tensor:
    """``softmax_sums_`` by torch."""
    top_n, target_n = maxima(x_nb), x_nb.new_zeros(len(x_nb))
    if x_nb.shape[-1]:
        here_n, place_n1 = _places(x_nb, targets_n)
        target_n = torch.where(here_n, x_nb.gather(-1, place_n1).squeeze(-1), 0.0)
    others = [target_n, x_nb.sum(-1)] if all_logits else [target_n]
    x_nb.sub_(top_n.unsqueeze(-1)).exp_()
    return torch.stack([top_n, x_nb.sum(-1), *others])


def make_gradients_plain_(x_nb: Tensor, targets_n: Tensor, top_n: Tensor, terms: Terms) -> None:
    """``make_gradients_`` by torch, of exponentials."""
    factor_n = (top_n - terms.top_n).exp_() * terms.factor_n
    x_nb.mul_(factor_n.unsqueeze(-1))
    if terms.shift_n is not None:
        x_nb.sub_(terms.shift_n.unsqueeze(-1))
    if x_nb.shape[-1]:
        here_n, place_n1 = _places(x_nb, targets_n)
        x_nb.scatter_add_(-1, place_n1, torch.where(here_n, terms.hit_n, 0.0).unsqueeze(-1))


def _places(x_nb: Tensor, targets_n: Tensor) -> tuple[Tensor, Tensor]:
    """Whether each token's target is in this block, and a column to look at."""
    width = x_nb.shape[-1]
    here_n = (targets_n >= 0) & (targets_n < width)
    return here_n, targets_n.clamp(0, width - 1).unsqueeze(-1)


def _fits(x_nb: Tensor) -> bool:
    """Whether the extension takes these logits."""
    known = x_nb.device.type == "cpu" and x_nb.dtype in (torch.float32, torch.bfloat16)
    return known and x_nb.t().is_contiguous()


def _bits(x_nb: Tensor) -> NDArray[np.float32 | np.int16]:
    """The logits [b n], those of bfloat16 as integers; NumPy has no such numbers."""
    x_bn = x_nb.t()
    return (x_bn.view(torch.int16) if x_bn.dtype == torch.bfloat16 else x_bn).numpy()
