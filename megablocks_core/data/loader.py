"""Global batches cut over data-parallel ranks; the state is the number of samples consumed.

Dimensions: B samples of a global batch, b of a micro-batch, S tokens of a sample, T = b S.
"""

import weakref
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple, Protocol

import numpy as np

from megablocks_core.data.checks import whole_number
from megablocks_core.data.collate import collate_packed, cut_sequences
from megablocks_core.data.place import Place
from megablocks_core.data.prefetch import Prefetch
from megablocks_core.data.steps import Skips, Stages, StepPlan, as_stages, value_at
from megablocks_core.groups import LOCAL, Group

NEEDED = ("__len__", "batch", "num_loss_tokens")


class Samples(Protocol):
    """What a loader needs of a dataset; ``GPTDataset`` and ``BlendedDataset`` have it.

    For a state it has a ``fingerprint`` too, and ``locate`` for places.
    """

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

    Any B goes with any number of ranks: where samples run out, the step's first one stands in
    with a loss mask of zeros, so that all ranks run equal micro-batches.

    ``num_tokens`` is the sum of the loss masks of the whole global batch, known before the
    first forward pass: divide the sum of the losses by it and micro-batches, ranks and masks
    leave no trace in the gradient.

    ``global_batch_size`` may be pairs (sample, B), the first at sample 0: B from that sample on.
    ``sequence_length``, one number or such pairs, cuts the samples into rows of that many tokens,
    which must divide the dataset's: none sees another, and ``tokens.view(-1, length)`` are they.

    ``consumed`` counts the samples of all steps handed out, and is all a checkpoint needs.
    Iterating goes on from there and never starts over: for another pass build another
    loader, which costs nothing. Samples past the last whole global batch are left out, unless
    ``drop_last=False``; ``len`` is the number of steps that remain. Steps are numbered from
    sample 0 on: ``step`` is the next one, ``skip=[(1000, 1020)]`` leaves steps 1000 to 1019 out
    and all others as they were, ``loader[i]`` is the step that comes ``i`` after the next.

    With ``workers`` threads, up to ``prefetch`` steps are made ahead; the order stays.
    As a map from numbers to steps, a loader is a dataset for torch's ``DataLoader`` with
    ``batch_size=None``, whose worker processes make the steps then.

    Shapes: a micro-batch is a dict of tensors ``tokens``, ``labels``, ``position_ids``,
    ``loss_mask`` [1 T] and ``cu_seqlens`` [documents + 1], all on the CPU, the list
    ``cu_seqlens_host`` and the int ``max_seqlen``. ``tokens.view(b, S)`` are the samples as rows.
    The tensors belong to the caller; no buffer is used twice. torch is loaded with the first step.

    Sends nothing.

    Raises:
        ValueError: sizes below 1, a schedule or ranges out of order, or ``consumed`` outside the
            dataset.

    Source: the batches of Megatron-LM's sequential sampler.
    """

    def __init__(
        self,
        dataset: Samples,
        *,
        global_batch_size: Stages,
        micro_batch_size: int,
        sequence_length: Stages | None = None,
        consumed: int = 0,
        skip: Sequence[tuple[int, int]] = (),
        drop_last: bool = True,
        workers: int = 0,
        prefetch: int = 2,
        group: Group = LOCAL,
    ) -> None:
        if missing := [name for name in NEEDED if not hasattr(dataset, name)]:
            raise ValueError(f"dataset={dataset!r} must have {missing}, as a GPTDataset has")
        if not hasattr(group, "rank"):
            raise ValueError(f"group={group!r} must be a Group, such as mesh.group('dp')")
        self._sizes = as_stages(global_batch_size)
        self._lengths = self._checked_lengths(dataset, sequence_length)
        self.dataset = dataset
        self.global_batch_size = global_batch_size
        self.micro_batch_size = whole_number("micro_batch_size", micro_batch_size, 1)
        self.drop_last = drop_last
        self.workers = whole_number("workers", workers, 0)
        self.prefetch = whole_number("prefetch", prefetch, 1)
        self.group = group
        self._skips = Skips(skip)
        self._ahead: Prefetch | None = None
        self.consumed = consumed

    @property
    def consumed(self) -> int:
        """Samples of the steps handed out, and of those skipped before them."""
        return self._consumed

    @consumed.setter
    def consumed(self, consumed: int) -> None:
        consumed = whole_number("consumed", consumed, 0, len(self.dataset))
        self._consumed = consumed
        self._plan = StepPlan(self._sizes, sample=consumed)
        self._last = self._plan.num_steps(len(self.dataset), drop_last=self.drop_last)
        self._ahead = None

    @property
    def step(self) -> int:
        """Number of the next step."""
        return self._skips.nth(self._plan.step_at(self._consumed))

    def __len__(self) -> int:
        return self._skips.left(self._plan.step_at(self._consumed), self._last)

    def __iter__(self) -> Iterator[Step]:
        return self

    def __next__(self) -> Step:
        number = self.step
        if number >= self._last:
            raise StopIteration
        step = self._prefetched(number) if self.workers else self.make(number)
        self._consumed = self._bounds(number)[1]
        return step

    def __getitem__(self, index: int) -> Step:
        return self.make(self._nth(index))

    def make(self, step: int) -> Step:
        """Return a step by its number; what was handed out does not matter and does not change."""
        step = whole_number("step", step)
        first, last = self._bounds(step)
        per_rank = self.micro_batch_size
        micro_batches = []
        for begin in range(first, last, per_rank * self.group.size):
            mine = begin + self.group.rank * per_rank
            samples = np.arange(min(mine, last), min(mine + per_rank, last))
            micro_batches.append(self._micro_batch(samples, first))
        return Step(micro_batches, self.dataset.num_loss_tokens(np.arange(first, last)))

    def locate(self, step: int) -> list[Place]:
        """Return where each sample of a step's global batch comes from, without reading any."""
        dataset: Any = self.dataset
        first, last = self._bounds(whole_number("step", step))
        return [dataset.locate(sample) for sample in range(first, last)]

    def state_dict(self, ahead: int = 0) -> dict[str, Any]:
        """Return the state after ``ahead`` more steps, the same on every rank.

        With ``ahead`` it is the state after as many steps of a torch ``DataLoader`` over this.
        """
        ahead = whole_number("ahead", ahead, 0)
        consumed = self._bounds(self._nth(ahead - 1))[1] if ahead else self._consumed
        return {"consumed": consumed, "recipe": self._recipe(consumed)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on where a loader of the same recipe was, over any ranks, batches and workers.

        Raises:
            ValueError: another recipe for the samples consumed; both are named. Something that
                is no state, such as a list with one of each rank.
        """
        if not isinstance(state, Mapping) or not {"consumed", "recipe"} <= set(state):
            raise ValueError(f"state={state!r} must hold what state_dict() gave on any one rank")
        consumed = whole_number("consumed", state["consumed"], 0, len(self.dataset))
        saved = state["recipe"]
        if saved != (own := self._recipe(consumed)):
            raise ValueError(
                f"recipe={saved!r} of the state must be {own!r}, as of this dataset: its first "
                f"{consumed} samples were others"
            )
        self.consumed = consumed

    def _recipe(self, consumed: int) -> str:
        dataset: Any = self.dataset
        if hasattr(dataset, "fingerprint_until"):
            return dataset.fingerprint_until(consumed)
        return dataset.fingerprint

    def _nth(self, index: int) -> int:
        index = whole_number("index", index)
        if not 0 <= index < len(self):
            raise IndexError(f"step {index} of the {len(self)} that remain")
        return self._skips.nth(self._plan.step_at(self._consumed), index)

    def _bounds(self, step: int) -> tuple[int, int]:
        """Return the first sample of a step, and the one after its last."""
        if not 0 <= step < self._last:
            raise IndexError(f"step {step} of {self._last}")
        return self._plan.start(step), min(self._plan.start(step + 1), len(self.dataset))

    def _micro_batch(self, samples: np.ndarray, stand_in: int) -> dict[str, Any]:
        """Return samples as tensors, filled up with one that does not count."""
        length = value_at(self._lengths, stand_in) if self._lengths else None
        missing = self.micro_batch_size - len(samples)
        batches = [self.dataset.batch(samples)] if len(samples) else []
        if missing:
            batch = self.dataset.batch(np.full(missing, stand_in))
            batches.append({**batch, "loss_mask": np.zeros_like(batch["loss_mask"])})
        batch = batches[0] if len(batches) == 1 else collate_packed(batches)
        return as_tensors(cut_sequences(batch, length) if length else batch)

    def _prefetched(self, number: int) -> Step:
        if self._ahead is None:
            # Threads end when the loader is dropped: they do not keep it.
            loader = weakref.ref(self)

            def make(step: int) -> Step | None:
                alive = loader()
                return alive.make(step) if alive else None

            self._ahead = Prefetch(make, workers=self.workers, ahead=self.prefetch)

        def following(step: int) -> int | None:
            after = self._skips.nth(step + 1)
            return after if after < self._last else None

        return self._ahead.get(number, following)

    def _checked_lengths(
        self, dataset: Samples, lengths: Stages | None
    ) -> list[tuple[int, int]] | None:
        if lengths is None:
            return None
        stages = as_stages(lengths, "sequence_length")
        whole = getattr(dataset, "sequence_length", None)
        if whole and (odd := [length for _, length in stages if whole % length]):
            raise ValueError(f"sequence_length={odd[0]} must divide the dataset's, {whole}")
        return stages

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_ahead": None}  # threads stay with the process


def as_tensors(batch: Mapping[str, Any]) -> dict[str, Any]:
    """Return a batch with its NumPy arrays as torch tensors over the same memory."""
    import torch

    return {
        name: torch.from_numpy(value) if isinstance(value, np.ndarray) else value
        for name, value in batch.items()
    }
