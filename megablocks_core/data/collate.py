"""Samples of unequal length laid end to end, without padding between them.

Dimensions: n tokens of one sample, T tokens of all, B samples, D documents in all of them.
"""

import reprlib
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import Any

import numpy as np

from megablocks_core.data.checks import bounds, row, several, whole_number

PER_TOKEN = ("tokens", "labels", "loss_mask", "position_ids")
PER_SAMPLE = ("sample_ids", "document_ids")
# The last two say the same as ``cu_seqlens``, and are made anew.
KNOWN = {*PER_TOKEN, *PER_SAMPLE, "cu_seqlens", "cu_seqlens_host", "max_seqlen"}
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
    if isinstance(samples, Mapping):
        raise ValueError("samples must be several, such as a list of one")
    if length is not None:
        length = whole_number("length", length, 1)
    whole = [_completed(number, each) for number, each in enumerate(several("samples", samples))]
    if not whole:
        raise ValueError("samples=[] must hold at least one sample")
    num_tokens = sum(len(sample["tokens"]) for sample in whole)
    if length is not None and num_tokens > length:
        raise ValueError(f"samples of {num_tokens} tokens must fit into length={length}")
    if length is not None and num_tokens < length:
        whole.append(_padding(length - num_tokens, like=whole[0]))
    batch: dict[str, Any] = {
        name: np.concatenate([sample[name] for sample in whole])[None] for name in PER_TOKEN
    }
    ends = np.cumsum([len(sample["tokens"]) for sample in whole])
    ends_of_documents = [
        end - len(sample["tokens"]) + sample["cu_seqlens"][1:]
        for end, sample in zip(ends, whole, strict=True)
    ]
    batch |= host_and_device(np.concatenate([[0], *ends_of_documents]))
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
    given, length = np.asarray(batch["cu_seqlens"]), whole_number("length", length, 1)
    num_tokens = int(given[-1])
    if num_tokens % length:
        raise ValueError(f"length={length} must divide the batch of {num_tokens} tokens")
    cu_seqlens = np.union1d(given, np.arange(0, num_tokens + 1, length))
    firsts, spans = cu_seqlens[:-1], np.diff(cu_seqlens)
    positions = np.arange(num_tokens) - firsts.repeat(spans)
    cut = {**batch, "position_ids": positions[None], **host_and_device(cu_seqlens)}
    if "document_ids" in batch:  # a later piece of a document is one of its own
        of = given.searchsorted(firsts, side="right") - 1
        cut["document_ids"] = np.asarray(batch["document_ids"])[of] + firsts - given[of]
    return cut


def dense_mask(cu_seqlens: Sequence[int] | np.ndarray) -> np.ndarray:
    """Return which token may attend to which, [T T] bool: earlier ones of its own document.

    For attention that knows no ``cu_seqlens``; its size grows with the square of T.
    """
    ends = bounds("cu_seqlens", cu_seqlens)
    documents = np.arange(len(ends) - 1).repeat(np.diff(ends))
    return np.tri(len(documents), dtype=bool) & (documents[:, None] == documents)


def _completed(number: int, sample: Mapping[str, Any] | Sequence[int] | np.ndarray) -> Any:
    """Return all entries of a sample as rows."""
    given = sample if isinstance(sample, Mapping) else {"tokens": sample}
    place = f"samples[{number}]"
    if "tokens" not in given or not set(given) <= KNOWN:
        raise ValueError(f"{place} of {list(given)} must have 'tokens', and only {sorted(KNOWN)}")
    entries = {
        name: (_mask if name == "loss_mask" else _numbers)(f"{place}[{name!r}]", given[name])
        for name in (*PER_TOKEN, *PER_SAMPLE)
        if name in given
    }
    tokens = entries["tokens"]
    if not len(tokens):
        raise ValueError(f"{place} must hold at least one token")
    ends = bounds(f"{place}['cu_seqlens']", given.get("cu_seqlens", [0, len(tokens)]), len(tokens))
    positions = np.arange(len(tokens)) - ends[:-1].repeat(np.diff(ends))
    entries = {"position_ids": positions, "loss_mask": np.ones(len(tokens), np.float32)} | entries
    if "labels" not in given:
        entries["labels"] = np.append(tokens[1:], 0)
        entries["loss_mask"][-1:] = 0
    needed = dict.fromkeys(PER_TOKEN, len(tokens)) | {"document_ids": len(ends) - 1}
    for name, count in needed.items():
        if len(entries.get(name, range(count))) != count:
            raise ValueError(
                f"{place}[{name!r}] of {len(entries[name])} entries must have {count}: one for "
                f"each of its {'documents' if name in PER_SAMPLE else 'tokens'}"
            )
    return entries | {"cu_seqlens": ends}


def _numbers(name: str, value: Any) -> np.ndarray:
    """Return whole numbers [n] or [1 n] as a row."""
    with suppress(TypeError, ValueError, LookupError):
        if len(value) == 1 and np.ndim(value[0]) == 1:
            value = value[0]
    return row(name, value)


def _mask(name: str, value: Any) -> np.ndarray:
    """Return a loss mask [n] or [1 n] as a row of its own."""
    try:
        mask = np.array(value, np.float32).reshape(-1)
    except (TypeError, ValueError):
        mask = np.full(1, np.nan)
    if not np.isfinite(mask).all():
        raise ValueError(f"{name}={reprlib.repr(value)} must be one row of finite numbers")
    return mask


def _padding(length: int, *, like: Mapping[str, Any]) -> dict[str, np.ndarray]:
    zeros = np.zeros(length, np.int64)
    padding = {"tokens": zeros, "labels": zeros, "loss_mask": zeros.astype(np.float32)}
    padding |= {"position_ids": np.arange(length), "cu_seqlens": np.array([0, length])}
    numbers = {"sample_ids": [], "document_ids": [NO_DOCUMENT]}
    return padding | {
        name: np.array(value, np.int64) for name, value in numbers.items() if name in like
    }
