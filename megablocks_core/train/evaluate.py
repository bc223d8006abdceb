"""Loss over a whole validation set, the same number at any split and batch size."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from megablocks_core.groups import LOCAL, Group
from megablocks_core.train.metrics import Mean, Metrics

Batch = Mapping[str, Any]


def next_token_loss(model: nn.Module, batch: Batch) -> tuple[Tensor, Tensor]:
    """Cross-entropy of ``model``'s logits, weighted by ``loss_mask``, and the mask's sum.

    Calls ``model(tokens)``, with ``positions=`` and ``cu_seqlens=`` where the batch holds packed
    documents, and with ``gather_logits=True`` where the model takes it; whole logits [... V],
    or an output that has them as ``logits``, must come back. In float32 or better. Labels of
    -100 count for nothing.
    """
    takes = inspect.signature(model.forward).parameters
    options: dict[str, Any] = {"gather_logits": True} if "gather_logits" in takes else {}
    if batch.get("cu_seqlens") is not None:
        options.update(positions=batch["position_ids"], cu_seqlens=batch["cu_seqlens"])
    output = model(batch["tokens"], **options)
    logits = getattr(output, "logits", output).flatten(0, -2)
    logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
    labels = batch["labels"].flatten()
    mask = batch["loss_mask"].flatten().to(logits.dtype) * (labels != -100)
    losses = cross_entropy(logits, labels, reduction="none")
    return torch.where(mask > 0, losses * mask, 0.0).sum(dtype=torch.float64), mask.sum()


def evaluate(
    model: nn.Module,
    loader: Iterable[Batch],
    *,
    loss: Callable[[Any, Any], tuple[Tensor | float, Tensor | float]] = next_token_loss,
    group: Group = LOCAL,
) -> Mean:
    """Mean loss of ``model`` over all that the ranks' ``loader``s hold together.

    Each rank of ``group`` (those that hold different data, ``mesh.group("dp", "cp")``) goes
    through its own batches, dicts with ``tokens``, ``labels`` and ``loss_mask``; ``loss(model,
    batch)`` returns a sum and a count. Runs in evaluation mode without gradients; afterwards,
    also after an error, every submodule is in the mode it was in.

    Sent: one message of 16 bytes at the end, besides what the model sends.

    Raises:
        ValueError: Nothing was counted on any rank: there is no mean.
    """
    device = next((parameter.device for parameter in model.parameters()), None)
    total = Metrics("loss", group=group, device=device)
    with _evaluation_mode(model), torch.no_grad():
        for batch in loader:
            total.add("loss", *loss(model, batch))
    means = total.reduce()
    if "loss" not in means:
        raise ValueError("loader=<nothing counted> must hold a batch with a loss mask that is set")
    return means["loss"]


@contextmanager
def _evaluation_mode(model: nn.Module) -> Iterator[None]:
    modes = [(module, module.training) for module in model.modules()]
    model.eval()
    try:
        yield
    finally:
        for module, training in modes:
            module.training = training
