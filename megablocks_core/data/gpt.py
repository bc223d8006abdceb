"""Fixed-length samples for next-token training, in an order that needs no index.

Dimensions: S sequence length, B samples of a batch, T = B S tokens of a batch laid end to end,
D documents (or parts of documents) in a sample or batch.
"""

from collections.abc import Sequence
from functools import cached_property
from typing import Any, Self

import numpy as np

from megablocks_core.data.checks import whole_number
from megablocks_core.data.fingerprint import facts_of_split, fingerprint
from megablocks_core.data.gather import gather_tokens
from megablocks_core.data.indexed import IndexedDataset
from megablocks_core.data.megatron_order import MegatronIndex, MegatronOrder
from megablocks_core.data.native_order import NativeOrder
from megablocks_core.data.place import Place
from megablocks_core.data.samples import IndexedSamples
from megablocks_core.data.split import Split
from megablocks_core.data.stream import Parts


class GPTDataset(IndexedSamples):
    """Samples of ``sequence_length`` tokens and the tokens that follow them.

    The documents of ``split`` (by default all) are one stream of N tokens, in file order.
    Window ``w`` holds the tokens ``w S`` to ``w S + S`` of it: S inputs and, one further on,
    S labels. So a window may begin and end inside a document, neighbours share one token, and
    an epoch has ``(N - 1) // S`` windows; up to S - 1 tokens at the end of the stream are in
    none. Sample ``k`` of epoch ``e`` is window ``Permutation(windows, seed, e)(k)``: each
    epoch has every window once, in an order of its own, and the only state is the number of
    samples consumed. Nothing is stored or built, whatever the size.

    ``num_samples`` is the length of the dataset (default: one epoch); past an epoch it goes
    on in the order of the next one.

    ``order="megatron"``, or a ``MegatronOrder`` with its options, is the reference's order for
    the same seed, documents and number of samples, in arrays that each rank builds in memory.

    Documents end where the index says so, whatever their tokens; with ``end_token`` they end
    after each such token instead, for files that hold many documents as one. Where they end:

    - ``cross_document_loss=False`` masks the labels that are the first token of another one;
    - ``cross_document_attention=True`` leaves their bounds out of ``cu_seqlens``;
    - ``restart_positions=False`` counts positions through the whole sample.

    Shapes: ``tokens``, ``labels``, ``position_ids`` [S] int64; ``loss_mask`` [S] float32;
    ``cu_seqlens`` [D + 1] int64, the bounds of the documents in the sample, from 0 to S.
    Positions count from 0 in each document, and at the start of the sample. The loss mask is
    1 where nothing is masked. A sample that the order leaves short is filled with 0 at its end,
    without loss, as part of its last document.

    Sends nothing; every rank computes any sample for itself.

    Raises:
        ValueError: too few tokens for one sample (names split, documents and tokens), an
            unknown ``order``, tokens that are not integers.

    Source: samples with one token of overlap, and the order ``"megatron"``, as in Megatron-LM's
    ``GPTDataset``; the native order is another one.
    """

    def __init__(
        self,
        indexed: IndexedDataset,
        sequence_length: int,
        *,
        seed: int,
        order: str | MegatronOrder = "native",
        split: Split | None = None,
        num_samples: int | None = None,
        cross_document_loss: bool = True,
        cross_document_attention: bool = False,
        restart_positions: bool = True,
        end_token: int | None = None,
    ) -> None:
        order = MegatronOrder() if order == "megatron" else order
        if order != "native" and not isinstance(order, MegatronOrder):
            raise ValueError(f"order={order!r} must be 'native', 'megatron' or a MegatronOrder")
        super().__init__(indexed, seed=seed, split=split)
        sequence_length = whole_number("sequence_length", sequence_length, 1)
        if num_samples is not None:
            num_samples = whole_number("num_samples", num_samples, 1)
        if end_token is not None:  # an id that the file can hold
            ids = np.iinfo(indexed.dtype)
            end_token = whole_number("end_token", end_token, int(ids.min), int(ids.max))
        self.sequence_length = sequence_length
        self.order = "native" if order == "native" else "megatron"
        self.cross_document_loss = cross_document_loss
        self.cross_document_attention = cross_document_attention
        self.restart_positions = restart_positions
        self.end_token = end_token
        # An order turns sample numbers into parts of documents, S + 1 tokens a sample.
        if isinstance(order, MegatronOrder):
            self._order = MegatronIndex(
                indexed,
                sequence_length,
                seed=self.seed,
                split=self.split,
                num_samples=num_samples,
                order=order,
            )
        else:
            self._order = NativeOrder(indexed, sequence_length, seed=self.seed, split=self.split)
        self.samples_per_epoch = self._order.samples_per_epoch
        self._length = self.samples_per_epoch if num_samples is None else num_samples

    @cached_property
    def fingerprint(self) -> str:
        """What changes with the order or the tokens, and not with the number of samples."""
        return fingerprint(
            tokens=self.indexed.fingerprint,
            split=facts_of_split(self.split),
            sequence_length=self.sequence_length,
            seed=self.seed,
            order=self._order.facts,
            cross_document_loss=self.cross_document_loss,
            cross_document_attention=self.cross_document_attention,
            restart_positions=self.restart_positions,
            end_token=self.end_token,
        )

    def resized(self, num_samples: int) -> Self:
        """Return the same samples in the same order, but as many as this."""
        other = super().resized(num_samples)
        if isinstance(self._order, MegatronIndex) and len(other) > self._order.num_samples:
            raise ValueError(
                f"num_samples={num_samples} must be at most {self._order.num_samples}: in the "
                f"order 'megatron' more of them come in another order"
            )
        return other

    def batch(self, samples: Sequence[int] | np.ndarray) -> dict[str, Any]:
        """Return samples laid end to end: arrays as above but [1 T], and the int ``max_seqlen``.

        ``cu_seqlens`` bounds the documents of all samples, so that none sees another through
        attention; ``cu_seqlens_host`` is the same as a list, for what plans by them and must
        not wait for a device. ``tokens.reshape(B, S)`` are the samples as rows, for attention
        without them. For dropout by counter, ``sample_ids`` [B] int64 numbers the rows, and
        ``document_ids`` [D] the documents, each like no other of the run.
        """
        length, ids = self.sequence_length, self._checked(samples)
        parts = self._order.parts(ids)
        tokens_T, labels_T, loss_mask_T = self._gather(parts, len(ids))
        rows = np.arange(len(ids) + 1) * length
        crossing = self._crossing(parts, tokens_T, loss_mask_T)
        if not self.cross_document_loss:
            loss_mask_T[crossing] = 0
        bounds = rows
        if len(crossing) and not (self.cross_document_attention and not self.restart_positions):
            opening = crossing + 1
            bounds = np.sort(np.concatenate([rows, opening[opening % length != 0]]))
        cu_seqlens = rows if self.cross_document_attention else bounds
        firsts, spans = cu_seqlens[:-1], np.diff(cu_seqlens)
        counted = bounds if self.restart_positions else rows
        positions_T = _positions(counted)
        return {
            "tokens": tokens_T[None],
            "labels": labels_T[None],
            "loss_mask": loss_mask_T[None],
            "position_ids": positions_T[None],
            "cu_seqlens": cu_seqlens,
            "cu_seqlens_host": cu_seqlens.tolist(),
            "max_seqlen": int(spans.max(initial=0)),
            "sample_ids": ids,
            "document_ids": ids[firsts // length] * length + firsts % length,
        }

    def num_loss_tokens(self, samples: Sequence[int] | np.ndarray) -> int:
        """Return the sum of the loss masks of some samples.

        It is found without reading a token, except for ``end_token`` with masked labels.
        """
        ids = self._checked(samples)
        if self.cross_document_loss and self.order == "native":
            return len(ids) * self.sequence_length
        if self.end_token is not None and not self.cross_document_loss:
            return int(self.batch(ids)["loss_mask"].sum())
        parts = self._order.parts(ids)
        total = int(parts.lengths.sum()) - len(ids)
        if not self.cross_document_loss:
            total -= int(np.count_nonzero(parts.columns))
        return total

    def locate(self, sample: int) -> Place:
        """Return the documents, and the ranges of their tokens, that a sample is made of."""
        parts = self._order.parts(self._checked([sample]))
        lengths = np.minimum(parts.lengths, self.sequence_length - parts.columns)
        ranges = zip(
            parts.documents.tolist(),
            parts.offsets.tolist(),
            (parts.offsets + lengths).tolist(),
            strict=True,
        )
        return Place(self.split.name, [part for part in ranges if part[1] < part[2]])

    def starts(self, samples: Sequence[int] | np.ndarray) -> np.ndarray:
        """Return where in ``indexed.tokens`` each sample begins, [B] int64."""
        parts = self._order.parts(self._checked(samples))
        return parts.starts[parts.columns == 0]

    def _gather(self, parts: Parts, num_samples: int) -> tuple[np.ndarray, ...]:
        """Return tokens, labels and loss mask [T]; the mask is 0 where there is no label."""
        length = self.sequence_length
        tokens_T, labels_T = np.empty((2, num_samples * length), np.int64)
        loss_mask_T = np.ones(len(tokens_T), np.float32)
        # The last token of a sample is no input, and the first no label.
        opens, closes = parts.columns == 0, parts.columns + parts.lengths == length + 1
        inputs = (parts.starts, parts.lengths - closes)
        targets = (parts.starts + opens, parts.lengths - opens)
        if np.count_nonzero(closes) == num_samples:
            self._read(*inputs, out=tokens_T)
            self._read(*targets, out=labels_T)
            return tokens_T, labels_T, loss_mask_T
        real = np.bincount(parts.windows, parts.lengths, num_samples).astype(np.int64)
        places = np.arange(length)
        for out_T, (starts, lengths), held in (
            (tokens_T, inputs, np.minimum(real, length)),
            (labels_T, targets, real - 1),
        ):
            filled = (places < held[:, None]).ravel()
            out_T[:] = 0
            out_T[filled] = self._read(starts, lengths)
        return tokens_T, labels_T, filled.astype(np.float32)

    def _crossing(self, parts: Parts, tokens_T: np.ndarray, has_label_T: np.ndarray) -> np.ndarray:
        """Return the places in [T] whose label is the first token of another document."""
        if self.end_token is not None:
            return np.flatnonzero((tokens_T == self.end_token) & (has_label_T > 0))
        opening = parts.columns > 0
        return parts.windows[opening] * self.sequence_length + parts.columns[opening] - 1


def _positions(bounds: np.ndarray) -> np.ndarray:
    """Count from 0 between each two bounds."""
    spans = np.diff(bounds)
    positions_T = np.empty(bounds[-1], np.int64)
    count = np.arange(spans.max(initial=0))
    gather_tokens(count, np.zeros_like(spans), spans, out=positions_T)
    return positions_T
