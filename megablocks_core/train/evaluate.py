"""Loss over a whole validation set, the same number at any split and batch size."""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any, overload

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from megablocks_core.groups import LOCAL, Group
from megablocks_core.train.metrics import Mean, Metrics

Batch = Mapping[str, Any]
Pair = tuple[Tensor | float, Tensor | float]  # a sum and a count
Loss = Callable[[Any, Any], Pair]

_FAILED = "ranks that failed"
# What a rank says before each batch, with ``in_step``.
_WITHOUT, _HAS_ONE, _AT_ITS_END, _BROKEN = range(4)


def next_token_loss(model: nn.Module, batch: Batch) -> tuple[Tensor, Tensor]:
    """Cross-entropy of ``model``'s logits, weighted by ``loss_mask``, and the mask's sum.

    Calls ``model(tokens)``, with ``positions=`` and ``cu_seqlens=`` where the batch holds packed
    documents, and with ``gather_logits=True`` where the model takes it; whole logits [... V],
    or an output that has them as ``logits``, must come back. In float32 or better. Labels of
    -100 count for nothing.

    Raises:
        ValueError: ``batch`` is no dict with tokens, labels and loss_mask.
    """
    _check_batch(batch)
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


@overload
def evaluate(
    model: nn.Module,
    loader: Mapping[str, Iterable[Any]],
    *,
    loss: Loss = ...,
    in_step: bool = ...,
    group: Group = ...,
) -> dict[str, Mean]: ...


@overload
def evaluate(
    model: nn.Module,
    loader: Iterable[Any],
    *,
    loss: Loss = ...,
    in_step: bool = ...,
    group: Group = ...,
) -> Mean: ...


def evaluate(
    model: nn.Module,
    loader: Iterable[Any] | Mapping[str, Iterable[Any]],
    *,
    loss: Loss = next_token_loss,
    in_step: bool = False,
    group: Group = LOCAL,
) -> Mean | dict[str, Mean]:
    """Mean loss of ``model`` over all that the ranks' ``loader``s hold together.

    Each rank of ``group`` (those that hold different data, ``mesh.group("dp", "cp")``) goes
    through its own batches, however many, to the end; ``loss(model, batch)`` returns a sum and a
    count. A batch is a dict with ``tokens``, ``labels`` and ``loss_mask``, or whatever ``loss``
    takes; an item with ``micro_batches``, such as a ``data.Loader`` yields, counts as those.
    Several loaders by name give several means by name.

    It runs in evaluation mode without gradients. Afterwards, also after an error, every
    submodule is in the mode it was in, the default generators are where they were, and so is a
    loader that tells its position (``consumed``, or ``state_dict`` and ``load_state_dict``).

    ``in_step`` is for a model that sends over ``group`` itself (FSDP, experts): ranks then take
    batches together, and one that has none left runs another's without counting it.

    Sent: one message of 16 bytes a set and 16 more at the end, besides what the model sends;
    ``in_step`` 8 bytes a rank before each batch, and a batch to ranks that never had one.

    Raises:
        ValueError: Nothing was counted in a set on any rank: there is no mean; what is to be
            gone through is no loader, or several without names; or ``loss`` returned no pair.
        RuntimeError: Another rank failed. The rank that did raises what went wrong there.
    """
    sets = loader if isinstance(loader, Mapping) else {"loss": loader}
    if not sets:
        raise ValueError("loader={} must name at least one loader")
    device = next((parameter.device for parameter in model.parameters()), torch.device("cpu"))
    total = Metrics(*sets, _FAILED, group=group, device=device)
    failure: Exception | None = None
    try:
        with _untouched(model, sets.values(), device):
            for name, items in sets.items():
                _check_loader(name, items)
                batches = (batch for item in items for batch in _batches_of(item))
                run = partial(_pair, loss, model)
                pairs = _in_step(batches, run, device, group) if in_step else map(run, batches)
                for pair in pairs:
                    total.add(name, *pair)
    except Exception as error:
        failure = error
    total.add(_FAILED, failure is not None)
    means = total.reduce()
    if failure is not None:
        raise failure
    if _FAILED in means and means[_FAILED].sum:
        failed = round(means[_FAILED].sum)
        raise RuntimeError(f"evaluation failed on {failed} of {group.size} ranks, not on this one")
    if empty := [name for name in sets if name not in means]:
        raise ValueError(
            f"loader=<nothing counted in {empty}> must hold a batch with a loss mask that is set"
        )
    return {name: means[name] for name in sets} if sets is loader else means["loss"]


def _check_batch(batch: object) -> None:
    needed = ("tokens", "labels", "loss_mask")
    if not isinstance(batch, Mapping) or any(name not in batch for name in needed):
        what = sorted(batch) if isinstance(batch, Mapping) else f"type {type(batch).__name__}"
        raise ValueError(
            f"a batch of {what} must be a dict with {', '.join(needed)}; several loaders go in "
            "by name, as a dict"
        )


def _check_loader(name: str, loader: object) -> None:
    if isinstance(loader, Tensor | str) or not isinstance(loader, Iterable):
        raise ValueError(f"loader {name!r} of type {type(loader).__name__} must yield batches")


def _batches_of(item: Any) -> Iterable[Any]:
    if isinstance(item, Iterator) or hasattr(item, "consumed"):
        raise ValueError(
            f"loader yields another, a {type(item).__name__}: several go in by name, as a dict"
        )
    return getattr(item, "micro_batches", (item,))


def _pair(loss: Loss, model: nn.Module, batch: Any) -> Pair:
    found = loss(model, batch)
    if not isinstance(found, tuple | list) or len(found) != 2:
        raise ValueError(f"loss={found!r} of a batch must be a pair: a sum and a count")
    return found[0], found[1]


def _in_step(
    batches: Iterator[Any], run: Callable[[Any], Pair], device: torch.device, group: Group
) -> Iterator[Pair]:
    """What ``run`` says of each own batch; all ranks of ``group`` run one as often.

    A rank that fails says so when the next batch is due, so that all end in the same place.
    """
    held: Any = None
    failure: Exception | None = None
    while True:
        batch, problem = (None, failure) if failure else _attempt(next, batches)
        if isinstance(problem, StopIteration):
            state = _WITHOUT if held is None else _AT_ITS_END
        else:
            state = _BROKEN if problem else _HAS_ONE
            held = batch
        own = torch.tensor([state], device=device)
        states = [int(each) for each in group.all_gather(own)]
        if state == _BROKEN:
            assert problem is not None
            raise problem
        if _BROKEN in states:
            raise RuntimeError(f"evaluation failed on rank {group.ranks[states.index(_BROKEN)]}")
        if _HAS_ONE not in states:
            return
        if _WITHOUT in states:
            lender = states.index(_HAS_ONE)
            lent = group.broadcast_object(held if group.rank == lender else None, lender)
            held = lent if state == _WITHOUT else held
        found, failure = _attempt(run, held)
        if state == _HAS_ONE and failure is None:
            yield found


def _attempt(call: Callable[[Any], Any], argument: Any) -> tuple[Any, Exception | None]:
    """What ``call`` returns, or what it raises."""
    try:
        return call(argument), None
    except Exception as error:
        return None, error


@contextmanager
def _untouched(model: nn.Module, loaders: Iterable[Any], device: torch.device) -> Iterator[None]:
    """Evaluation mode without gradients; all that was changed inside is put back."""
    modes = [(module, module.training) for module in model.modules()]
    with ExitStack() as stack:
        stack.enter_context(torch.no_grad())
        on_cpu = device.type in ("cpu", "meta")
        stack.enter_context(
            torch.random.fork_rng(
                devices=[] if on_cpu else [device], device_type="cuda" if on_cpu else device.type
            )
        )
        for loader in loaders:
            stack.enter_context(_position_kept(loader))
        model.eval()
        try:
            yield
        finally:
            for module, training in modes:
                module.training = training


@contextmanager
def _position_kept(loader: Any) -> Iterator[None]:
    if hasattr(loader, "consumed"):
        consumed = loader.consumed
        try:
            yield
        finally:
            loader.consumed = consumed
    elif hasattr(loader, "state_dict") and hasattr(loader, "load_state_dict"):
        state = copy.deepcopy(loader.state_dict())
        try:
            yield
        finally:
            loader.load_state_dict(state)
    else:
        yield
