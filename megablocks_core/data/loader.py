"""Global batches cut over data-parallel ranks; the state is the number of samples consumed.

Dimensions: B samples of a global batch, b of a micro-batch, S tokens of a sample, T = b S.
"""

from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple, Protocol

import numpy as np

from megablocks_core.groups import LOCAL, Group


class Samples(Protocol):
    """What a loader needs of a dataset; ``GPTDataset`` has it."""

    def __len__(self) -> int: ...

    def batch(self, samples: np.ndarray) -> Mapping[str, Any]:
        """Return some samples as one batch."""
        ...

    def num_loss_tokens(self, samples: np.ndarray) -> int:
        """Return how many labels of some samples count, without communication."""
        ...


class Step(NamedTuple):
    """One optimizer step: this rank's batches, and the loss tokens of all ranks' together."""

    micro_batches: list[dict[str, Any]]
    num_tokens: int


class Loader:
    """Iterates over ``Step(micro_batches, num_tokens)`` from sample ``consumed`` on.

    A global batch is the next B samples of the dataset, whatever the number of ranks. Its
    micro-batch ``m`` is the samples ``m b P`` to ``(m + 1) b P`` over the P ranks of
    ``group``, and rank ``r`` takes b of them from ``m b P + r b`` on. So the order of the
    data is the same for any number of ranks and any micro-batch, and a run resumes with any
    other. ``group`` is the data-parallel group: ranks outside it that share its rank, such
    as those of one tensor-parallel group, get the same data.

    ``num_tokens`` is the sum of the loss masks of the whole global batch, known before the
    first forward pass: divide the sum of the losses by it and micro-batches, ranks and masks
    leave no trace in the gradient.

    ``consumed`` counts the samples of all steps handed out, and is all a checkpoint needs.
    Iterating goes on from there and never starts over: for another pass build another
    loader, which costs nothing. Samples past the last whole global batch are left out;
    ``len`` is the number of steps that remain.

    Shapes: a micro-batch is a dict of tensors ``tokens``, ``labels``, ``position_ids``,
    ``loss_mask`` [1 T] and ``cu_seqlens`` [documents + 1], all on the CPU, and the int
    ``max_seqlen``. ``tokens.view(b, S)`` are the samples as rows. The tensors belong to the
    caller; no buffer is used twice. torch is loaded with the first step.

    Sends nothing.

    Raises:
        ValueError: ``global_batch_size`` is not a multiple of ``micro_batch_size`` times the
            ranks, or ``consumed`` lies outside the dataset.

    Source: the batches of Megatron-LM's sequential sampler.
    """

    def __init__(
        self,
        dataset: Samples,
        *,
        global_batch_size: int,
        micro_batch_size: int,
        consumed: int = 0,
        group: Group = LOCAL,
    ) -> None:
        if micro_batch_size < 1:
            raise ValueError(f"micro_batch_size={micro_batch_size} must be at least 1")
        if global_batch_size < 1 or global_batch_size % (micro_batch_size * group.size):
            raise ValueError(
                f"global_batch_size={global_batch_size} must be a multiple of "
                f"micro_batch_size={micro_batch_size} times {group.size} ranks"
            )
        if not 0 <= consumed <= len(dataset):
            raise ValueError(f"consumed={consumed} must be between 0 and {len(dataset)} samples")
        self.dataset = dataset
        self.global_batch_size = global_batch_size
        self.micro_batch_size = micro_batch_size
        self.group = group
        self.consumed = consumed

    def __len__(self) -> int:
        return (len(self.dataset) - self.consumed) // self.global_batch_size

    def __iter__(self) -> Iterator[Step]:
        return self

    def __next__(self) -> Step:
        if len(self) == 0:
            raise StopIteration
        whole = self.consumed + np.arange(self.global_batch_size)
        mine = whole.reshape(-1, self.group.size, self.micro_batch_size)[:, self.group.rank]
        step = Step(
            [as_tensors(self.dataset.batch(samples)) for samples in mine],
            self.dataset.num_loss_tokens(whole),
        )
        self.consumed += self.global_batch_size
        return step


def as_tensors(batch: Mapping[str, Any]) -> dict[str, Any]:
    """Return a batch with its NumPy arrays as torch tensors over the same memory."""
    import torch

    return {
        name: torch.from_numpy(value) if isinstance(value, np.ndarray) else value
        for name, value in batch.items()
    }
