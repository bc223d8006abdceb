"""Embedding whose vocabulary is split over a group (Megatron-LM,
https://arxiv.org/abs/1909.08053, section 3).

Dimensions: T tokens, V vocabulary, H features; v is this rank's rows of V, by the rule of
``torch.chunk``: ranks may hold unequal numbers of rows, or none, and no padding.
"""

from collections.abc import Callable
from functools import partial
from typing import Self

import torch
from torch import Tensor, nn
from torch.nn.functional import embedding

from megablocks_core.groups import (
    LOCAL,
    Group,
    Segment,
    ShardSpec,
    chunk_slice,
    load_slices,
    mark,
    reduce_from,
    reduce_scatter_to,
    whole_tensor,
)
from megablocks_core.parallel.checks import require
from megablocks_core.parallel.initial import key_for, normal_
from megablocks_core.parallel.tensor.adapters import Adapter


class VocabParallelEmbedding(nn.Module):
    """Embedding whose rows are split over ``group``.

    Maps ids [... T], equal on every rank, to vectors [... T H], equal on every rank; over
    ``LOCAL`` it is ``nn.Embedding``. Forward all-reduces the vectors once and backward sends
    nothing. Under sequence parallelism forward reduce-scatters them to this rank's tokens
    [... T/size H] (``torch.chunk``'s rule), and backward all-gathers their gradient.

    Args:
        num_embeddings: V, any number.
        embedding_dim: H.
        padding_idx: An id of the whole vocabulary whose row starts as zero and has no
            gradient; negative ones count from the end.
        sequence_parallel: The ranks go on with slices of the tokens, along dim -2 of the result.
        group: The tensor-parallel ranks.
        device: Of the weight.
        dtype: Of the weight.

    Raises:
        ValueError: ``padding_idx`` is not in the vocabulary. In ``forward``: an id is not in
            the vocabulary (on other devices than the CPU an asynchronous assertion).
    """

    def __init__(
        self,
        num_embeddings: int,
        embedding_dim: int,
        *,
        padding_idx: int | None = None,
        sequence_parallel: bool = False,
        group: Group = LOCAL,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        if padding_idx is not None and not -num_embeddings <= padding_idx < num_embeddings:
            raise ValueError(f"padding_idx={padding_idx} must be one of {num_embeddings} ids")
        self.num_embeddings, self.embedding_dim = num_embeddings, embedding_dim
        self.padding_idx = None if padding_idx is None else padding_idx % num_embeddings
        self.sequence_parallel = sequence_parallel
        self.group = group
        self.spec = ShardSpec(0, group, (Segment(num_embeddings),))
        self.rows = chunk_slice(num_embeddings, group.size, group.rank)
        num_rows = self.rows.stop - self.rows.start
        self.weight = nn.Parameter(torch.empty(num_rows, embedding_dim, device=device, dtype=dtype))
        mark(self, "weight", self.spec)
        self.adapter: Adapter | None = None
        self.reset_parameters()

    @classmethod
    def from_embedding(
        cls, whole: nn.Embedding, *, sequence_parallel: bool = False, group: Group = LOCAL
    ) -> Self:
        """This rank's share of a whole embedding, equal on every rank; sends nothing.

        Raises:
            ValueError: The embedding uses ``max_norm``, ``scale_grad_by_freq`` or ``sparse``.
        """
        for option in ("max_norm", "scale_grad_by_freq", "sparse"):
            if getattr(whole, option):
                raise ValueError(f"{option}={getattr(whole, option)} must not be set")
        share = cls(
            whole.num_embeddings,
            whole.embedding_dim,
            padding_idx=whole.padding_idx,
            sequence_parallel=sequence_parallel,
            group=group,
            device="meta",
            dtype=whole.weight.dtype,
        ).to_empty(device=whole.weight.device)
        share.weight.requires_grad_(whole.weight.requires_grad)
        if not whole.weight.is_meta:
            load_slices(share.weight, (share.spec,), whole.weight)
        return share.train(whole.training)

    def to_embedding(self) -> nn.Embedding:
        """The whole embedding, on every rank: all-gathers the weight."""
        whole = nn.Embedding(
            self.num_embeddings, self.embedding_dim, padding_idx=self.padding_idx, device="meta"
        )
        weight_VH = whole_tensor(self.weight, (self.spec,)).clone()
        whole.weight = nn.Parameter(weight_VH, requires_grad=self.weight.requires_grad)
        return whole.train(self.training)

    def reset_parameters(self, seed: int | None = None, prefix: str = "") -> None:
        """Draw the weight as ``nn.Embedding`` does; one seed is one model at any size."""
        key = key_for(self.weight, f"{prefix}weight", seed)
        normal_(self.weight, key=key, std=1.0, specs=(self.spec,))
        padding_row = self._own_padding_row()
        if padding_row is not None:
            with torch.no_grad():
                self.weight[padding_row].zero_()

    def forward(self, ids_T: Tensor) -> Tensor:
        """The ids' rows: of all tokens, or of this rank's."""
        _require_ids(ids_T, self.num_embeddings)
        if self.group.size == 1:
            return self._rows(ids_T, self.padding_idx)
        lookup = partial(self._rows, padding_row=self._own_padding_row())
        y_TH = _own_rows(ids_T, self.rows.start, self.weight, lookup)
        if self.sequence_parallel:
            return reduce_scatter_to(y_TH, dim=-2, group=self.group)
        return reduce_from(y_TH, group=self.group)

    def extra_repr(self) -> str:
        """The whole sizes and the number of ranks."""
        padding = "" if self.padding_idx is None else f", padding_idx={self.padding_idx}"
        return f"{self.num_embeddings}, {self.embedding_dim}{padding}, ranks={self.group.size}"

    def _rows(self, index_T: Tensor, padding_row: int | None) -> Tensor:
        """Rows of this rank's share, with what an adapter adds to them."""
        if len(self.weight) == 0:
            y_TH = _no_rows(index_T, self.weight)
        else:
            y_TH = embedding(index_T, self.weight, padding_row)
        return y_TH if self.adapter is None else self.adapter.add(y_TH, index_T, padding_row)

    def _own_padding_row(self) -> int | None:
        """The row of ``padding_idx`` here, or ``None`` if another rank holds it."""
        if self.padding_idx is None or not self.rows.start <= self.padding_idx < self.rows.stop:
            return None
        return self.padding_idx - self.rows.start


def vocab_forward(module: nn.Embedding, group: Group, first: int, ids_T: Tensor) -> Tensor:
    """The forward of an embedding's own class, from this rank's rows, summed over ``group``.

    For classes whose result is linear in the row, such as an embedding that scales.

    Args:
        module: The embedding, whose weight is this rank's rows.
        group: The tensor-parallel ranks.
        first: The id of this rank's first row.
        ids_T: Ids of the whole vocabulary [... T].

    Raises:
        ValueError: An id is not in the vocabulary (on other devices than the CPU an
            asynchronous assertion): every rank would take it for another's.
    """

    def lookup(index_T: Tensor) -> Tensor:
        if len(module.weight) == 0:
            return _no_rows(index_T, module.weight)
        return type(module).forward(module, index_T)

    _require_ids(ids_T, module.num_embeddings)
    return reduce_from(_own_rows(ids_T, first, module.weight, lookup), group=group)


def _require_ids(ids_T: Tensor, num_embeddings: int) -> None:
    rule = f"ids must lie between 0 and num_embeddings={num_embeddings}"
    require(
        ~((ids_T < 0) | (ids_T >= num_embeddings)).any(),
        rule,
        lambda: f"{rule}; found {int(ids_T.min())} to {int(ids_T.max())}",
    )


def _own_rows(
    ids_T: Tensor, first: int, weight_vH: Tensor, lookup: Callable[[Tensor], Tensor]
) -> Tensor:
    """What ``lookup`` gives for the ids of this rank's rows, from ``first`` on; zero for others."""
    index_T = ids_T - first
    foreign_T = (index_T < 0) | (index_T >= len(weight_vH))
    return lookup(index_T.masked_fill(foreign_T, 0)).masked_fill(foreign_T.unsqueeze(-1), 0.0)


def _no_rows(index_T: Tensor, weight_vH: Tensor) -> Tensor:
    """Zeros: a sum over no rows, so that the weight has a gradient here too."""
    return weight_vH.sum(0).expand(*index_T.shape, -1)
