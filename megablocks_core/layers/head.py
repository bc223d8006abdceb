"""Language-model head whose vocabulary is split over a group.

Dimensions: T tokens, H hidden size, V vocabulary; v is this rank's rows of V, by the rule of
``torch.chunk``, as in ``VocabParallelEmbedding``.
"""

import torch
from torch import Tensor, nn

from megablocks_core.groups import LOCAL, Group, Segment, ShardSpec, chunk_slice, gather_from, mark
from megablocks_core.parallel import column_linears
from megablocks_core.parallel.initial import key_for, normal_


class VocabParallelHead(nn.Module):
    """``logits = x W^T`` with the rows of ``W`` [V H] split over ``group``.

    Maps ``x`` [... T H], equal on every rank, to logits [... T v]. Forward sends nothing and
    backward all-reduces the gradient of ``x`` once. Under sequence parallelism ``x`` is this
    rank's tokens: forward all-gathers them, backward gathers them again and reduce-scatters
    the gradient. ``weight`` may be set to that of a ``VocabParallelEmbedding`` (tied).

    Args:
        hidden_size: H.
        vocab_size: V, any number; ranks may hold unequal numbers of rows, or none.
        sequence_parallel: The ranks hold equal slices of the tokens.
        group: The tensor-parallel ranks.
        device: Of the weight.
        dtype: Of the weight.
    """

    bias = None
    gather_output = False

    def __init__(
        self,
        hidden_size: int,
        vocab_size: int,
        *,
        sequence_parallel: bool = False,
        group: Group = LOCAL,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        self.vocab_size = vocab_size
        self.sequence_parallel, self.group = sequence_parallel, group
        self.spec = ShardSpec(0, group, (Segment(vocab_size),))
        rows = chunk_slice(vocab_size, group.size, group.rank)
        weight_vH = torch.empty(rows.stop - rows.start, hidden_size, device=device, dtype=dtype)
        self.weight = nn.Parameter(weight_vH)
        mark(self, "weight", self.spec)
        self.reset_parameters()

    def reset_parameters(self, seed: int | None = None, prefix: str = "") -> None:
        """Draw normal values of deviation ``H^-0.5``; one seed is one model at any size."""
        key = key_for(self.weight, f"{prefix}weight", seed)
        normal_(self.weight, key=key, std=self.weight.shape[1] ** -0.5, specs=(self.spec,))

    def forward(self, x_TH: Tensor) -> Tensor:
        """Logits over this rank's part of the vocabulary."""
        return column_linears(x_TH, self)[0]  # pyright: ignore[reportArgumentType]

    def gather(self, logits_Tv: Tensor) -> Tensor:
        """Logits over the whole vocabulary: an all-gather; all ranks must go on with them alike."""
        parts = (chunk_slice(self.vocab_size, self.group.size, r) for r in range(self.group.size))
        sizes = [part.stop - part.start for part in parts]
        return gather_from(logits_Tv, dim=-1, group=self.group, sizes=sizes)

    def extra_repr(self) -> str:
        """The whole sizes and the number of ranks."""
        return f"{self.weight.shape[1]}, {self.vocab_size}, ranks={self.group.size}"
