"""Samples of unequal length laid end to end, without padding between them.

Dimensions: n tokens of one sample, T tokens of all, B samples, D documents in all of them.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

PER_TOKEN = ("tokens", "labels", "loss_mask", "position_ids")
PER_SAMPLE = ("sample_ids", "document_ids")
NO_DOCUMENT = -1  # the document id of padding


def collate_packed(
    samples: Sequence[Mapping[str, Any] | Sequence[int] | np.ndarray],
    *,
    length: int | None = None,
) -> dict[str, Any]:
    """Lay samples end to end as one batch; documents of one never see those of another.

    A sample is a row of token ids, one document, or a dict: ``tokens`` [n] or [1 n] and, where
    they differ from what follows from the tokens, ``labels``, ``loss_mask``, ``position_ids``,
    ``cu_seqlens``, and on all samples or none ``sample_ids`` and ``document_ids``. So batches of
    batches work too. Without labels each token's is the next one; the last has none, and its
    place in the mask is 0, by place and never by id: an end token that is also the padding id
    keeps its loss. ``length`` fills up with zeros that count for nothing, as one more document,
    for shapes that stay equal.

    Shapes: ``tokens``, ``labels``, ``position_ids`` [1 T] int64, ``loss_mask`` [1 T] float32;
    ``cu_seqlens`` [D + 1] int64, the same numbers as the list ``cu_seqlens_host``, and the int
    ``max_seqlen``: what a kernel needs on the host is there, and nothing waits for a device.

    Sends nothing.

    Raises:
        ValueError: no sample, one without a token, rows of unequal length in one sample, or more
            than ``length`` tokens together.

    Source: the packed layout of FlashAttention's variable-length functions.
    """
    if not samples:
        raise ValueError("samples=[] must hold at least one sample")
    whole = [_completed(number, sample) for number, sample in enumerate(samples)]
    num_tokens = sum(len(sample["tokens"]) for sample in whole)
    if length is not None and num_tokens > length:
        raise ValueError(f"samples of {num_tokens} tokens must fit into length={length}")
    if length is not None and num_tokens < length:
        whole.append(_padding(length - num_tokens, like=whole[0]))
    batch: dict[str, Any] = {
        name: np.concatenate([sample[name] for sample in whole])[None] for name in PER_TOKEN
    }
    ends = np.cumsum([len(sample["tokens"]) for sample in whole])
    bounds = [
        end - len(sample["tokens"]) + sample["cu_seqlens"][1:]
        for end, sample in zip(ends, whole, strict=True)
    ]
    batch |= host_and_device(np.concatenate([[0], *bounds]))
    for name in PER_SAMPLE:
        given = [name in sample for sample in whole]
        if any(given) and not all(given):
            raise ValueError(f"{name} must be given for every sample or for none")
        if all(given):
            batch[name] = np.concatenate([sample[name] for sample in whole])
    return batch


def host_and_device(cu_seqlens: np.ndarray) -> dict[str, Any]:
    """Return the entries of a batch that say where documents end, for a device and for the host."""
    return {
        "cu_seqlens": cu_seqlens,
        "cu_seqlens_host": cu_seqlens.tolist(),
        "max_seqlen": int(np.diff(cu_seqlens).max(initial=0)),
    }


def cut_sequences(batch: Mapping[str, Any], length: int) -> dict[str, Any]:
    """Cut a packed batch into rows of ``length`` tokens, none of which sees another.

    Only bounds, positions and document ids change: ``tokens.reshape(-1, length)`` are the rows.
    """
    bounds = np.asarray(batch["cu_seqlens"])
    num_tokens = int(bounds[-1])
    if length < 1 or num_tokens % length:
        raise ValueError(f"length={length} must divide the batch of {num_tokens} tokens")
    cu_seqlens = np.union1d(bounds, np.arange(0, num_tokens + 1, length))
    firsts, spans = cu_seqlens[:-1], np.diff(cu_seqlens)
    positions = np.arange(num_tokens) - firsts.repeat(spans)
    cut = {**batch, "position_ids": positions[None], **host_and_device(cu_seqlens)}
    if "document_ids" in batch:  # a later piece of a document is one of its own
        of = bounds.searchsorted(firsts, side="right") - 1
        cut["document_ids"] = np.asarray(batch["document_ids"])[of] + firsts - bounds[of]
    return cut


def dense_mask(cu_seqlens: Sequence[int] | np.ndarray) -> np.ndarray:
    """Return which token may attend to which, [T T] bool: earlier ones of its own document.

    For attention that knows no ``cu_seqlens``; its size grows with the square of T.
    """
    bounds = np.asarray(cu_seqlens)
    documents = np.arange(len(bounds) - 1).repeat(np.diff(bounds))
    return np.tri(len(documents), dtype=bool) & (documents[:, None] == documents)


def _completed(number: int, sample: Mapping[str, Any] | Sequence[int] | np.ndarray) -> Any:
    """Return all entries of a sample as rows."""
    given = sample if isinstance(sample, Mapping) else {"tokens": sample}
    tokens = np.asarray(given["tokens"], np.int64).reshape(-1)
    if not len(tokens):
        raise ValueError(f"samples[{number}] must hold at least one token")
    entries = {
        "tokens": tokens,
        "labels": given.get("labels", [*tokens[1:].tolist(), 0]),
        "loss_mask": given.get("loss_mask", np.ones(len(tokens))),
    }
    entries = {
        name: np.array(value, np.float32 if name == "loss_mask" else np.int64).reshape(-1)
        for name, value in entries.items()
    }
    if "labels" not in given:
        entries["loss_mask"][-1] = 0
    bounds = np.asarray(given.get("cu_seqlens", [0, len(tokens)]), np.int64)
    positions = np.arange(len(tokens)) - bounds[:-1].repeat(np.diff(bounds))
    entries["position_ids"] = np.asarray(given.get("position_ids", positions)).reshape(-1)
    entries["cu_seqlens"] = bounds
    for name in PER_TOKEN:
        if len(entries[name]) != len(tokens):
            raise ValueError(
                f"samples[{number}][{name!r}] of {len(entries[name])} entries must have one for "
                f"each of {len(tokens)} tokens"
            )
    return entries | {name: np.asarray(given[name]) for name in PER_SAMPLE if name in given}


def _padding(length: int, *, like: Mapping[str, Any]) -> dict[str, np.ndarray]:
    zeros = np.zeros(length, np.int64)
    padding = {"tokens": zeros, "labels": zeros, "loss_mask": zeros.astype(np.float32)}
    padding |= {"position_ids": np.arange(length), "cu_seqlens": np.array([0, length])}
    numbers = {"sample_ids": [], "document_ids": [NO_DOCUMENT]}
    return padding | {
        name: np.array(value, np.int64) for name, value in numbers.items() if name in like
    }
