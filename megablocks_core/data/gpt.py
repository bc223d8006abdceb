"""Fixed-length samples for next-token training, in an order that needs no index.

Dimensions: S sequence length, B samples of a batch, T = B S tokens of a batch laid end to end,
D documents (or parts of documents) in a sample or batch.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np

from megablocks_core.data.gather import gather_tokens
from megablocks_core.data.indexed import IndexedDataset
from megablocks_core.data.permutation import Permutation
from megablocks_core.data.split import Split


class GPTDataset:
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

    Shapes: ``tokens``, ``labels``, ``position_ids`` [S] int64; ``loss_mask`` [S] float32;
    ``cu_seqlens`` [D + 1] int64, the bounds of the documents in the sample, from 0 to S.
    Positions count from 0 in each document, and at the start of the sample. The loss mask is
    1 throughout; with ``cross_document_loss=False`` it is 0 where the label is the first token
    of another document. It goes by place, never by token id.

    Sends nothing; every rank computes any sample for itself.

    Raises:
        ValueError: too few tokens for one sample (names split, documents and tokens), an
            unknown ``order``, tokens that are not integers.

    Source: samples with one token of overlap as in Megatron-LM's ``GPTDataset``; its order
    (documents and samples shuffled by a stored index) is another one.
    """

    def __init__(
        self,
        indexed: IndexedDataset,
        sequence_length: int,
        *,
        seed: int,
        order: str = "native",
        split: Split | None = None,
        num_samples: int | None = None,
        cross_document_loss: bool = True,
    ) -> None:
        if order != "native":
            raise ValueError(f"order={order!r} must be 'native'")
        if indexed.dtype.kind not in "iu":
            raise ValueError(f"indexed.dtype={indexed.dtype.name} must be an integer type")
        if sequence_length < 1:
            raise ValueError(f"sequence_length={sequence_length} must be at least 1")
        if num_samples is not None and num_samples < 1:
            raise ValueError(f"num_samples={num_samples} must be at least 1")
        split = split or Split("all", range(indexed.num_documents))
        documents = split.documents
        if not 0 <= documents.start <= documents.stop <= indexed.num_documents:
            raise ValueError(f"split={split} must lie in {indexed.num_documents} documents")
        if documents.step != 1:
            raise ValueError(f"split={split} must leave out no document between its ends")
        self.indexed = indexed
        self.sequence_length = sequence_length
        self.seed = seed
        self.split = split
        self.cross_document_loss = cross_document_loss

        self._first_token = indexed.document_start(documents.start)
        self.num_tokens = indexed.document_start(documents.stop) - self._first_token
        self.samples_per_epoch = (self.num_tokens - 1) // sequence_length
        if self.samples_per_epoch < 1:
            raise ValueError(
                f"split {split.name!r} (documents {documents.start} to {documents.stop} of "
                f"{indexed.num_documents}) holds {self.num_tokens} tokens, must hold at least "
                f"{sequence_length + 1} for one sample of sequence_length={sequence_length}"
            )
        self._length = self.samples_per_epoch if num_samples is None else num_samples
        self._order = Permutation(self.samples_per_epoch, seed=seed, epoch=0)

    def __len__(self) -> int:
        return self._length

    def __getitem__(self, sample: int) -> dict[str, np.ndarray]:
        batch = self.batch([sample])
        rows = ("tokens", "labels", "loss_mask", "position_ids")
        return {name: batch[name][0] for name in rows} | {"cu_seqlens": batch["cu_seqlens"]}

    def batch(self, samples: Sequence[int] | np.ndarray) -> dict[str, Any]:
        """Return samples laid end to end: arrays as above but [1 T], and the int ``max_seqlen``.

        ``cu_seqlens`` bounds the documents of all samples, so that none sees another through
        attention. ``tokens.reshape(B, S)`` are the samples as rows, for attention without it.
        For dropout by counter, ``sample_ids`` [B] int64 numbers the rows, and ``document_ids``
        [D] the documents, each like no other of the run.
        """
        length = self.sequence_length
        starts = self.starts(samples)
        lengths = np.full(len(starts), length)
        tokens_T, labels_T = np.empty((2, len(starts) * length), np.int64)
        gather_tokens(self.indexed.tokens, starts, lengths, out=tokens_T)
        gather_tokens(self.indexed.tokens, starts + 1, lengths, out=labels_T)

        loss_mask_T = np.ones(len(tokens_T), np.float32)
        bounds = [np.arange(len(starts) + 1) * length]
        for row, start in enumerate(starts.tolist()):
            after = row * length + self._first_labels(start)  # a label opens a document
            bounds.append(after[after < (row + 1) * length - 1] + 1)
            if not self.cross_document_loss:
                loss_mask_T[after] = 0
        cu_seqlens = np.sort(np.concatenate(bounds))
        firsts, spans, ids = cu_seqlens[:-1], np.diff(cu_seqlens), np.array(samples, np.int64)
        return {
            "tokens": tokens_T[None],
            "labels": labels_T[None],
            "loss_mask": loss_mask_T[None],
            "position_ids": (np.arange(len(tokens_T)) - np.repeat(firsts, spans))[None],
            "cu_seqlens": cu_seqlens,
            "max_seqlen": int(spans.max(initial=0)),
            "sample_ids": ids,
            "document_ids": np.repeat(ids, length)[firsts] * length + firsts % length,
        }

    def num_loss_tokens(self, samples: Sequence[int] | np.ndarray) -> int:
        """Return the sum of the loss masks of some samples, without reading a token."""
        starts = self.starts(samples)
        total = len(starts) * self.sequence_length
        if not self.cross_document_loss:
            total -= sum(len(self._first_labels(start)) for start in starts.tolist())
        return total

    def starts(self, samples: Sequence[int] | np.ndarray) -> np.ndarray:
        """Return where in ``indexed.tokens`` each sample begins, [B] int64."""
        wanted = np.asarray(samples, np.int64)
        if wanted.size and not 0 <= wanted.min() <= wanted.max() < len(self):
            raise IndexError(f"samples {wanted.min()} to {wanted.max()} of {len(self)}")
        epochs, places = np.divmod(wanted, self.samples_per_epoch)
        windows = np.empty_like(places)
        for epoch in np.unique(epochs).tolist():
            now = epochs == epoch
            windows[now] = self._permutation(epoch)(places[now])
        return self._first_token + windows * self.sequence_length

    def _permutation(self, epoch: int) -> Permutation:
        order = self._order
        if order.epoch != epoch:
            order = Permutation(self.samples_per_epoch, seed=self.seed, epoch=epoch)
            self._order = order
        return order

    def _first_labels(self, start: int) -> np.ndarray:
        """Return the places in a window whose label is the first token of a document."""
        first = start + 1
        return self.indexed.document_starts(first, first + self.sequence_length) - first
