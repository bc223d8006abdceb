"""What an attention shall compute, beside its queries, keys and values."""

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from megablocks_core.layers.attention.dropping import Dropped


@dataclass(frozen=True, eq=False)
class AttentionSpec:
    """A request to ``attention``; the default is causal attention over whole rows.

    Dimensions: N query heads, E documents. Query t of T stands at the place of key t + S - T of S.

    Attributes:
        mask: "causal", keys up to the query's place, or "full".
        cu_seqlens: Sums of the lengths of documents that lie in one row, from 0 [E+1]. Keys of
            another document are not seen.
        max_seqlen: Length of the longest document. Back ends that ask for it read it from
            ``cu_seqlens`` on the host where it is missing.
        cu_seqlens_padded: Where documents are stored, if pads lie between them: the sums of
            their lengths with pads [E+1].
        window: How many keys before and behind the query's place are seen beside that at it,
            ``None`` for all. Behind it, a causal mask has 0 or ``None``.
        soft_cap: Products become ``soft_cap * tanh(products / soft_cap)``.
        sinks: A logit for each query head that stands in the denominator of its softmax [N].
        scale: Of the products; default 1 / sqrt(D).
        dropout: Which probabilities are dropped.

    Raises:
        ValueError: A value is out of its range, or needs another one that is missing.
    """

    mask: Literal["causal", "full"] = "causal"
    cu_seqlens: Tensor | None = None
    max_seqlen: int | None = None
    cu_seqlens_padded: Tensor | None = None
    window: tuple[int | None, int | None] = (None, None)
    soft_cap: float | None = None
    sinks: Tensor | None = None
    scale: float | None = None
    dropout: Dropped | None = None

    def __post_init__(self) -> None:
        if self.mask not in ("causal", "full"):
            raise ValueError(f"mask={self.mask!r} must be 'causal' or 'full'")
        check_window(self.window, causal=self.mask == "causal")
        for name, value in (("soft_cap", self.soft_cap), ("scale", self.scale)):
            if value is not None and not (_is_number(value) and 0 < value < float("inf")):
                raise ValueError(f"{name}={value} must be above 0 and finite")
        for name in ("cu_seqlens", "cu_seqlens_padded"):
            _check_sums(name, getattr(self, name))
        if self.cu_seqlens is None:
            for name in ("max_seqlen", "cu_seqlens_padded"):
                if getattr(self, name) is not None:
                    raise ValueError(f"{name} must come with cu_seqlens")

    @property
    def limits(self) -> tuple[int | None, int | None]:
        """How far before and behind its own place a query sees, ``None`` for no limit."""
        left, right = self.window
        return left, 0 if self.mask == "causal" else right


def check_window(window: tuple[int | None, int | None], *, causal: bool = True) -> None:
    """Raise ``ValueError`` if this is no window of a spec."""
    pair = isinstance(window, (tuple, list)) and len(window) == 2
    if not pair or not all(size is None or (_is_whole(size) and size >= 0) for size in window):
        raise ValueError(f"window={window!r} must be two numbers from 0 on, or None for all keys")
    if causal and window[1] not in (None, 0):
        raise ValueError(f"window={window} must have 0 or None behind the place of a causal query")


def _is_whole(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _is_number(value: object) -> bool:
    return isinstance(value, float) or _is_whole(value)


def _check_sums(name: str, sums: object) -> None:
    if sums is None:
        return
    if not isinstance(sums, Tensor):
        raise ValueError(f"{name}={sums!r} must be a tensor")
    if sums.ndim != 1 or not len(sums) or sums.dtype not in (torch.int32, torch.int64):
        raise ValueError(
            f"{name} {list(sums.shape)} of {sums.dtype} must be whole numbers [E+1], the first 0"
        )


def check_tensors(q_BTND: Tensor, k_BSKD: Tensor, v_BSKW: Tensor, spec: AttentionSpec) -> None:
    """Raise ``ValueError`` if shapes or dtypes do not fit each other or the spec."""
    _check_dtypes(q_BTND, k_BSKD, v_BSKW)
    shapes = f"q {list(q_BTND.shape)}, k {list(k_BSKD.shape)}, v {list(v_BSKW.shape)}"
    if not q_BTND.ndim == k_BSKD.ndim == v_BSKW.ndim == 4:
        raise ValueError(f"{shapes} must have four dimensions each")
    rows, tokens, heads, width = q_BTND.shape
    if k_BSKD.shape[:3] != v_BSKW.shape[:3] or (rows, width) != (k_BSKD.shape[0], k_BSKD.shape[3]):
        raise ValueError(f"{shapes} must be [B T N D], [B S K D] and [B S K W]")
    if not heads or not width or not k_BSKD.shape[2]:
        raise ValueError(f"{shapes} must have a head and a feature at least")
    if heads % k_BSKD.shape[2]:
        raise ValueError(f"{shapes}: {k_BSKD.shape[2]} key heads must divide {heads} query heads")
    if spec.cu_seqlens is not None:
        if rows != 1:
            raise ValueError(f"cu_seqlens must come with one row of tokens, not {rows}")
        if k_BSKD.shape[1] != tokens:
            raise ValueError(f"{shapes}: with cu_seqlens there must be a key for each query")
    if spec.sinks is not None and spec.sinks.shape != (heads,):
        raise ValueError(f"sinks {list(spec.sinks.shape)} must have one for each of {heads} heads")
    if spec.dropout is not None and spec.dropout.index_BTN.shape != (rows, tokens, heads):
        raise ValueError(
            f"the words of dropout {list(spec.dropout.index_BTN.shape)} must be "
            f"{[rows, tokens, heads]}, one for each query"
        )


def _check_dtypes(q: Tensor, k: Tensor, v: Tensor) -> None:
    if not all(isinstance(x, Tensor) for x in (q, k, v)):
        raise ValueError(f"q={q!r}, k={k!r} and v={v!r} must be tensors")
    dtypes = {q.dtype, k.dtype, v.dtype}
    # Autocast makes them one.
    mixed = len(dtypes) > 1 and not torch.is_autocast_enabled(q.device.type)
    if mixed or not all(dtype.is_floating_point for dtype in dtypes):
        raise ValueError(
            f"q of {q.dtype}, k of {k.dtype} and v of {v.dtype} must be of one floating dtype"
        )
