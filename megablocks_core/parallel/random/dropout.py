"""Dropout by counter: each element's fate is a function of its place, however it is computed.

A mask is a hash of (seed, step, sample, position, stream, feature). So it is the same at any
cut over tensor-, sequence-, context-, pipeline- and data-parallel ranks and in any
micro-batches, and a computation that is run again drops the same elements. Random state is
two integers.

Dimensions: T tokens, F features. A lowercase letter is this rank's share of the capital one.
"""

from dataclasses import dataclass
from numbers import Real
from typing import Any

import torch
from torch import Tensor, nn

from megablocks_core.parallel.checks import check_tensors
from megablocks_core.parallel.counter import as_word, bits_of, key_of

# Elements worked on at a time, so that temporary memory is bounded and fits a CPU's cache.
_BLOCK_ON_CPU = 1 << 16
_BLOCK_ELSEWHERE = 1 << 24

_HALF = 1 << 31


@dataclass(frozen=True)
class DropoutKey:
    """What the masks of one optimizer step depend on, beside the places of elements.

    A run that resumes, at any layout, needs these two integers and nothing else.

    Attributes:
        seed: Of the run, from 0 to 2**63 - 1.
        step: Of the optimizer; the micro-batches of a step differ by their samples. A tensor
            spares compiled code a second compilation.

    Raises:
        ValueError: ``seed`` is no such integer, or ``step`` is none.
    """

    seed: int
    step: int | Tensor

    def __post_init__(self) -> None:
        if not (hasattr(self.seed, "__index__") and not isinstance(self.seed, Tensor)):
            raise ValueError(f"seed={self.seed!r} must be a whole number, and no tensor")
        if not 0 <= self.seed < 1 << 63:
            raise ValueError(f"seed={self.seed} must lie between 0 and 2**63 - 1")
        if not _is_integer(self.step) or (isinstance(self.step, Tensor) and self.step.numel() != 1):
            raise ValueError(f"step={self.step!r} must be one integer")

    def index(self, sample_ids: Tensor, positions: Tensor) -> Tensor:
        """One word a token, int64 [... T], that ``dropout`` takes as its ``index``.

        Args:
            sample_ids: The number of each token's sample in the data set or in the global
                batch; integers that broadcast with ``positions``, such as [B 1].
            positions: Each token's place in its sample; integers [T] or [... T].

        Raises:
            ValueError: They do not broadcast, or are no tensors of integers: rounded, tokens
                would share their masks.
        """
        check_tensors(sample_ids=sample_ids, positions=positions)
        for name, numbers in (("sample_ids", sample_ids), ("positions", positions)):
            if not _is_integer(numbers):
                raise ValueError(f"{name} of {numbers.dtype} must be integers")
        sizes = zip(reversed(sample_ids.shape), reversed(positions.shape), strict=False)
        if not all(a == b or a == 1 or b == 1 for a, b in sizes):
            raise ValueError(
                f"sample_ids of shape {list(sample_ids.shape)} must broadcast with positions of "
                f"shape {list(positions.shape)}"
            )
        device = positions.device
        step = bits_of(as_word(self.seed, device), as_word(self.step, device))
        return bits_of(bits_of(step, sample_ids.long()), positions.long())


def dropout(
    x_TF: Tensor, p: float, *, stream: str, index: Tensor, first_feature: int = 0
) -> Tensor:
    """Zero each element with probability ``p``, and multiply the others by ``1 / (1 - p)``.

    Maps ``x`` [... T F] to a tensor like it; the same arguments give the same mask, on every
    rank and device. It is a function of its arguments alone: not of torch's generators, and of
    no training mode. Sends nothing. For backward it saves ``index``, which all layers share,
    and makes the mask again; the mask's probability is exact to 2**-33.

    Args:
        x_TF: Floating tensor.
        p: Probability of zero; at 0 the result is ``x``.
        stream: Name of the layer, such as "layers.3.mlp": other streams, other masks.
        index: A word for each row of ``x``, from ``DropoutKey.index`` [... T].
        first_feature: Where this rank's features start in the whole, if they are cut.

    Raises:
        ValueError: ``x`` is not floating, ``p`` no probability, ``stream`` no name, ``index`` is
            not of the tokens of ``x`` or not int64, or ``first_feature`` is not whole, or negative.
    """
    check_tensors(x=x_TF, index=index)
    if not x_TF.is_floating_point():
        raise ValueError(f"x of {x_TF.dtype} must be floating-point numbers")
    check_probability(p, "p")
    if index.dtype != torch.int64:
        raise ValueError(f"index of {index.dtype} must be int64, as DropoutKey.index makes it")
    if index.shape != x_TF.shape[:-1]:
        raise ValueError(
            f"index of shape {list(index.shape)} must have one word for each row of x, "
            f"{list(x_TF.shape[:-1])}"
        )
    if not (_is_integer(first_feature) and first_feature >= 0):
        raise ValueError(f"first_feature={first_feature!r} must be a whole number of 0 or more")
    if p == 0:
        return x_TF
    return _Dropout.apply(x_TF, index, float(p), _stream_key(stream), first_feature)


class Dropout(nn.Module):
    """``dropout`` in training, at a layer's own rate and stream; in evaluation the identity.

    Args:
        p: Probability of zero.
        stream: Name of the layer, which other layers of the model must not have.

    Raises:
        ValueError: ``p`` is no probability, or it is above zero and ``stream`` is "".
    """

    def __init__(self, p: float, *, stream: str = "") -> None:
        super().__init__()
        check_probability(p, "p")
        if p and not stream:
            raise ValueError(f"stream={stream!r} must name the layer that drops, p={p}")
        self.p, self.stream = float(p), stream

    @property
    def drops(self) -> bool:
        """Whether calling it would drop anything."""
        return self.training and self.p > 0

    def forward(self, x_TF: Tensor, *, index: Tensor | None, first_feature: int = 0) -> Tensor:
        """Drop; ``index`` may be ``None`` where nothing drops.

        Raises:
            ValueError: ``index`` is missing, or see ``dropout``.
        """
        if not self.drops:
            return x_TF
        index = self.required(index)
        return dropout(x_TF, self.p, stream=self.stream, index=index, first_feature=first_feature)

    def required(self, index: Tensor | None) -> Tensor:
        """``index``, which must be there."""
        if index is None:
            raise ValueError(
                f"dropout_index=None must be the words of DropoutKey.index, because "
                f"{self.stream!r} drops in training with p={self.p}"
            )
        return index

    def extra_repr(self) -> str:
        """Rate and stream."""
        return f"p={self.p}, stream={self.stream!r}"


def check_probability(p: float, name: str) -> None:
    """Raise a ``ValueError`` that names ``p`` if it is no probability."""
    if not (isinstance(p, Real) and 0 <= p <= 1):
        raise ValueError(f"{name}={p!r} must lie between 0 and 1")


def _is_integer(number: int | Tensor) -> bool:
    if isinstance(number, Tensor):
        return not (number.is_floating_point() or number.is_complex())
    return hasattr(number, "__index__")


def _stream_key(stream: str) -> int:
    if not isinstance(stream, str) or not stream:
        raise ValueError(f"stream={stream!r} must be the name of a layer")
    return key_of(0, stream)


# What torch.compiler.assume_constant_result does, but for its import of the whole compiler.
_stream_key._dynamo_marked_constant = True  # type: ignore[attr-defined]


class _Dropout(torch.autograd.Function):
    """Linear in ``x``, so backward is the same function of the gradient."""

    @staticmethod
    def forward(x: Tensor, index: Tensor, p: float, stream: int, first: int) -> Tensor:
        if p == 1:
            return torch.zeros_like(x)
        rows = bits_of(index, stream)
        if torch.compiler.is_compiling():
            return _drop(x, rows, p, first)
        limit = _BLOCK_ON_CPU if x.device.type == "cpu" else _BLOCK_ELSEWHERE
        features = x.shape[-1]
        step = max(1, limit // max(1, features))
        if rows.numel() <= step:
            return _drop(x, rows, p, first)
        blocks = zip(x.reshape(-1, features).split(step), rows.view(-1).split(step), strict=True)
        return torch.cat([_drop(*block, p, first) for block in blocks]).view(x.shape)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        _, index, *ctx.options = inputs
        ctx.save_for_backward(index)

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        (index,) = ctx.saved_tensors
        return (_Dropout.apply(dy, index, *ctx.options), None, None, None, None)


def _drop(x_TF: Tensor, rows_T: Tensor, p: float, first: int) -> Tensor:
    kept = _bits(rows_T, first, x_TF.shape[-1]) >= min(round(p * 2 * _HALF), 2 * _HALF - 1) - _HALF
    return (x_TF * kept).mul_(1 / (1 - p))


def _bits(rows_T: Tensor, first: int, count: int) -> Tensor:
    """32 random bits for each of ``count`` features from ``first`` on, int32.

    A hash has 64, which serve two neighbours: feature ``2 i`` takes the lower half.
    """
    pairs = torch.arange(first // 2, (first + count + 1) // 2, device=rows_T.device)
    halves = bits_of(rows_T.unsqueeze(-1), pairs).view(torch.int32)
    return halves[..., first % 2 : first % 2 + count]
