"""Newton-Schulz iteration: a matrix with its singular values driven towards one.

With coefficients (a, b, c), each step maps X to ``a X + (b G + c G^2) X`` where ``G = X X^T``. The
usual ones are steep at zero and do not converge: values end between about 0.7 and 1.2
(Jordan et al., https://kellerjordan.github.io/posts/muon/).

Dimensions: M rows, N columns, n this rank's share of the columns.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from megablocks_core.groups import Group
from megablocks_core.parallel.checks import (
    check_floating,
    check_number,
    check_tensors,
    check_whole,
)

# Elements of matrices of one shape that are worked on at a time, or of a message of Gram matrices.
_BATCH = 1 << 24


@dataclass(frozen=True)
class NewtonSchulz:
    """How matrices are orthogonalised.

    Attributes:
        steps: Number of iterations.
        coefficients: (a, b, c).
        eps: The least norm that a matrix is divided by.
        dtype: Of the products, such as ``torch.bfloat16``. Default: float32, or float64 for
            float64 parameters.

    Raises:
        ValueError: ``steps`` is no whole number from 1 to 99, there are not three coefficients,
            ``eps`` is not above 0, or ``dtype`` is none of floating point.
    """

    steps: int = 5
    coefficients: tuple[float, float, float] = (3.4445, -4.7750, 2.0315)
    eps: float = 1e-7
    dtype: torch.dtype | None = None

    def __post_init__(self) -> None:
        check_whole("steps", self.steps, least=1, most=99)
        if not isinstance(self.coefficients, tuple | list) or len(self.coefficients) != 3:
            raise ValueError(f"coefficients={self.coefficients!r} must be three numbers")
        for value in self.coefficients:
            check_number("one of coefficients", value, "a finite number", math.isfinite)
        check_number("eps", self.eps, "above 0, and finite", lambda x: 0 < x < math.inf)
        if self.dtype is not None:
            check_floating("dtype", self.dtype)

    def dtype_for(self, dtype: torch.dtype) -> torch.dtype:
        """The dtype of the products for parameters of ``dtype``."""
        if dtype == torch.float64:
            return dtype
        return torch.float32 if self.dtype is None else self.dtype

    def __call__(self, x: Tensor) -> Tensor:
        """Orthogonalise matrices [... M N], each alone, in their own dtype.

        Raises:
            ValueError: ``x`` is no tensor of floating-point matrices.
        """
        check_tensors(x=x)
        if x.dim() < 2 or not x.is_floating_point():
            raise ValueError(f"x of {tuple(x.shape)}, {x.dtype}, must be floating-point matrices")
        x_MN = x.reshape(-1, *x.shape[-2:])
        if x.shape[-2] > x.shape[-1]:  # the smaller Gram matrix, with the same result
            x_MN = x_MN.mT
        norm = torch.linalg.vector_norm(x_MN, dim=(1, 2), keepdim=True)
        x_MN = x_MN / norm.clamp(min=self.eps)
        for _ in range(self.steps):
            x_MN = self.step(x_MN, x_MN @ x_MN.mT)
        return (x_MN.mT if x.shape[-2] > x.shape[-1] else x_MN).reshape(x.shape)

    def step(self, x_MN: Tensor, gram_MM: Tensor) -> Tensor:
        """One iteration, given the Gram matrices ``X X^T``; columns may be any of the whole's."""
        a, b, c = self.coefficients
        update_MM = torch.baddbmm(gram_MM, gram_MM, gram_MM, beta=b, alpha=c)
        return torch.baddbmm(x_MN, update_MM, x_MN, beta=a)


def orthogonalize(matrices: Sequence[Tensor], method: NewtonSchulz) -> list[Tensor]:
    """Orthogonalise whole matrices [M N], those of one shape together."""
    found: list[Tensor] = list(matrices)
    alike: dict[tuple[torch.Size, torch.dtype, torch.device], list[int]] = {}
    for index, x in enumerate(matrices):
        if x.numel():
            alike.setdefault((x.shape, x.dtype, x.device), []).append(index)
    for (shape, *_), indices in alike.items():
        count = max(1, _BATCH // math.prod(shape))
        for start in range(0, len(indices), count):
            batch = indices[start : start + count]
            done = method(torch.stack([matrices[index] for index in batch]))
            for index, x in zip(batch, done.unbind(), strict=True):
                found[index] = x
    return found


class Columns(NamedTuple):
    """This rank's columns of a matrix that is cut by columns.

    Attributes:
        x_Mn: They.
        counted: The places of those that no earlier rank holds too; ``None``: all.
    """

    x_Mn: Tensor
    counted: Tensor | None = None

    def own(self, x_Mn: Tensor) -> Tensor:
        """Those of ``x_Mn`` that count in sums over the ranks."""
        return x_Mn if self.counted is None else x_Mn[:, self.counted]


def orthogonalize_columns(
    matrices: Sequence[Columns], method: NewtonSchulz, groups: Sequence[Group]
) -> list[Tensor]:
    """Orthogonalise matrices of which each rank holds columns: this rank's columns of the result.

    No rank sees a whole matrix. Sends the norms once and, in each step, the Gram matrices
    [M M], each in one all-reduce over each of ``groups`` for many matrices.

    Args:
        matrices: Of one dtype and device, with the same M on every rank.
        method: How.
        groups: The ranks that hold the columns together.
    """
    found: list[Tensor] = []
    for batch in _batches(matrices):
        norms = [m.own(m.x_Mn).double().square().sum().view(1) for m in batch]
        norms = _summed(norms, groups)
        xs = [
            m.x_Mn / norm.sqrt().to(m.x_Mn.dtype).clamp(min=method.eps)
            for m, norm in zip(batch, norms, strict=True)
        ]
        for _ in range(method.steps):
            owns = [m.own(x) for m, x in zip(batch, xs, strict=True)]
            grams = _summed([own @ own.mT for own in owns], groups)
            xs = [method.step(x[None], g[None])[0] for x, g in zip(xs, grams, strict=True)]
        found += xs
    return found


def _batches(matrices: Sequence[Columns]) -> list[list[Columns]]:
    """Consecutive matrices whose Gram matrices fill one message."""
    batches: list[list[Columns]] = []
    room = 0
    for matrix in matrices:
        size = len(matrix.x_Mn) ** 2
        if not batches or size > room:
            batches.append([])
            room = _BATCH
        batches[-1].append(matrix)
        room -= size
    return batches


def _summed(tensors: Sequence[Tensor], groups: Sequence[Group]) -> list[Tensor]:
    flat = torch.cat([tensor.reshape(-1) for tensor in tensors])
    for group in groups:
        flat = group.all_reduce(flat)
    parts = flat.split([tensor.numel() for tensor in tensors])
    return [part.view(x.shape) for part, x in zip(parts, tensors, strict=True)]
