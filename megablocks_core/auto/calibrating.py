"""Calibrate the model in a Hugging Face folder on an indexed dataset, in one process."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator

import torch
from torch import Tensor

from megablocks_core.auto.decoders import decoder_from_hf
from megablocks_core.data import GPTDataset, IndexedDataset
from megablocks_core.export import calibrate
from megablocks_core.export.quantising import Recipe
from megablocks_core.export.quantising.calibration import Calibration

_LENGTH = 2048


def calibrate_folder(
    path: str | os.PathLike[str],
    data: str | os.PathLike[str],
    *,
    recipe: Recipe,
    num_sequences: int = 512,
    sequence_length: int | None = None,
    seed: int = 0,
    device: torch.device | str | None = None,
    progress: Callable[[int, int], None] | None = None,
) -> Calibration:
    """What ``calibrate`` finds of a folder's model on samples of ``data``, one at a time.

    Args:
        path: A Hugging Face folder that ``decoder_from_hf`` opens.
        data: The prefix of an indexed dataset, of the model's tokens.
        recipe: Which weights are asked for.
        num_sequences: How many samples; fewer if an epoch has fewer.
        sequence_length: Tokens of a sample; default 2048, or what the model takes at most.
        seed: Of the order of samples.
        device: Where the model runs; default torch's default device.
        progress: Called with the samples done, and all.

    Raises:
        ValueError: What ``decoder_from_hf``, ``GPTDataset`` and ``calibrate`` say; a number is
            not above 0, samples are longer than what the model takes, or a token is beyond its
            vocabulary.
    """
    for name, value in (("num_sequences", num_sequences), ("sequence_length", sequence_length)):
        whole = type(value) is int and value > 0
        if not (whole or value is None and name == "sequence_length"):
            raise ValueError(f"{name}={value!r} must be a whole number above 0")
    model = decoder_from_hf(path, device=device)
    longest = model.spec.extra.get("max_position_embeddings")
    if sequence_length is None:
        sequence_length = _LENGTH if longest is None else min(_LENGTH, longest)
    if longest is not None and sequence_length > longest:
        raise ValueError(
            f"sequence_length={sequence_length} must be at most max_position_embeddings={longest}"
        )
    samples = _Samples(
        GPTDataset(IndexedDataset(data), sequence_length, seed=seed),
        num_sequences,
        model.spec.vocab_size,
        next(model.parameters()).device,
    )
    return calibrate(model, samples, recipe=recipe, progress=progress)


class _Samples:
    """The first samples of a dataset as batches of one [1 T].

    Args:
        dataset: Where they are from.
        count: How many at most.
        vocab_size: What tokens must be below.
        device: Of the batches.
    """

    def __init__(
        self, dataset: GPTDataset, count: int, vocab_size: int, device: torch.device
    ) -> None:
        self._dataset, self._count = dataset, min(count, len(dataset))
        self._vocab_size, self._device = vocab_size, device

    def __len__(self) -> int:
        return self._count

    def __iter__(self) -> Iterator[Tensor]:
        for index in range(self._count):
            tokens = torch.as_tensor(self._dataset[index]["tokens"])
            if int(tokens.max()) >= self._vocab_size:
                raise ValueError(
                    f"data holds the token {int(tokens.max())}, which must be below the model's "
                    f"vocab_size={self._vocab_size}"
                )
            yield tokens.unsqueeze(0).to(self._device)
