"""Several datasets as one, mixed by weights that may change on the way.

Dimensions: S sequence length, B samples of a batch, T = B S tokens, D sources.
"""

from collections.abc import Mapping, Sequence
from functools import cached_property
from math import inf
from typing import Any

import numpy as np

from megablocks_core.data.blend_order import exhaustive, greedy
from megablocks_core.data.checks import pairs, real, row, whole_number
from megablocks_core.data.collate import PER_TOKEN, host_and_device
from megablocks_core.data.fingerprint import fingerprint
from megablocks_core.data.mixture import Mixture
from megablocks_core.data.permutation import WORD
from megablocks_core.data.place import Place
from megablocks_core.data.samples import Samples
from megablocks_core.data.sources import Source, checked_sources, epoch_of, tokenizers_of

Weights = Mapping[str, float]
ENDLESS = 2**62  # samples, where no limit is set


class BlendedDataset(Samples):
    """Samples of several ``sources``, by name, in proportion to ``weights``.

    Each sample is a whole sample of one source, and a source gives its samples in its own order,
    none left out and none twice. Which source gives sample ``k``, and which of its samples that
    is, is arithmetic on ``k``: nothing is built or stored, and the state is one number.

    - ``weights={"web": 7, "code": 3}`` mixes in that proportion: each 64 samples have it, to
      a few samples, and are shuffled among each other.
    - ``weights=[(0, {...}), (50_000, {...})]`` are segments: other weights from that sample on.
      Each source goes on where it stopped. A segment, also with new sources, may be added to a
      run, at the sample where it stands or later; what lies before must stay.
    - without ``weights`` each source is used up, an epoch of each, mixed evenly to the end.

    ``num_samples`` is the length; by default as long as the sources last. ``max_repetition``, one
    number or one for each name, is how many epochs a source may give (``math.inf``: any):
    asking for more is an error here, not in the middle of the run.

    ``order="megatron"`` is the reference's order instead: always the source furthest behind its
    share, with the first of equals. It is an array of all samples, and its weights cannot change.
    Sources keep their lengths then; the reference makes them 0.5% longer than their share.

    Shapes: samples and batches are those of ``GPTDataset``; ``sample_ids`` and ``document_ids``
    number the samples of the blend.

    Sends nothing; every rank computes any sample for itself.

    Raises:
        ValueError: an empty source, sources of other lengths, of two tokenizers or with the same
            shuffle, weights that are none, segments out of order, or a source asked beyond what it
            may give (names the source, what is asked and what is there).

    Source: orders of Megatron-LM's ``BlendedDataset`` for ``order="megatron"``.
    """

    def __init__(
        self,
        sources: Mapping[str, Source],
        *,
        seed: int,
        weights: Weights | Sequence[tuple[int, Weights]] | None = None,
        num_samples: int | None = None,
        max_repetition: float | Mapping[str, float] = 1.0,
        order: str = "native",
    ) -> None:
        if order not in ("native", "megatron"):
            raise ValueError(f"order={order!r} must be 'native' or 'megatron'")
        if num_samples is not None:
            num_samples = whole_number("num_samples", num_samples, 1)
        self.sources = checked_sources(sources)
        self.seed, self.order = whole_number("seed", seed, 0, WORD), order
        self.sequence_length = next(iter(self.sources.values())).sequence_length
        epochs = [epoch_of(source) for source in self.sources.values()]
        self.segments = self._checked_segments(weights, epochs)
        self.exhaustive = weights is None
        if self.exhaustive:
            if num_samples not in (None, sum(epochs)):
                raise ValueError(f"num_samples={num_samples} must be left out without weights")
            num_samples = sum(epochs)
        available = self._available(epochs, max_repetition)
        if order == "native":
            dense = [(start, list(by_name.values())) for start, by_name in self.segments]
            stop = num_samples if self.exhaustive else None
            self._mixture = Mixture(len(self.sources), dense, seed=self.seed, stop=stop)
        else:
            self._drawn = self._draw(num_samples, epochs)
        self._length = num_samples or self._longest(available)
        self._give(self._asked(self._length), available)

    @property
    def tokenizer(self) -> str | None:
        """What names the tokenizer of the sources, where a builder recorded it."""
        return next(iter(tokenizers_of(self.sources).values()), None)

    @cached_property
    def fingerprint(self) -> str:
        """What changes with the order or the tokens of any sample."""
        return self.fingerprint_until(None)

    def fingerprint_until(self, num_samples: int | None) -> str:
        """What changes with the order or the tokens of the first samples, and of no later one."""
        if num_samples is not None:
            num_samples = whole_number("num_samples", num_samples, 0)
        segments = [
            (start, [(name, weight) for name, weight in weights.items() if weight])
            for start, weights in self.segments
            if num_samples is None or start < num_samples
        ]
        used = dict(weight for _, weights in segments for weight in weights)
        sources = {name: self.sources[name].fingerprint for name in used}
        facts = {"segments": segments, "sources": sources, "exhaustive": self.exhaustive}
        return fingerprint(seed=self.seed, order=self.order, **facts)

    def batch(self, samples: Sequence[int] | np.ndarray) -> dict[str, Any]:
        """Return samples laid end to end, as ``GPTDataset.batch`` does."""
        ids, length = row("samples", samples), self.sequence_length
        dtypes = {**dict.fromkeys(PER_TOKEN, np.int64), "loss_mask": np.float32}
        whole = {name: np.empty((len(ids), length), dtype) for name, dtype in dtypes.items()}
        bounds = [np.array([len(ids) * length])]
        for source, rows, indices in self._by_source(ids):
            part = source.batch(indices)
            for name in PER_TOKEN:
                whole[name][rows] = part[name].reshape(len(rows), length)
            own = np.asarray(part["cu_seqlens"])[:-1]
            bounds.append(rows[own // length] * length + own % length)
        cu_seqlens = np.sort(np.concatenate(bounds))
        firsts = cu_seqlens[:-1]
        return {
            **{name: rows.reshape(1, -1) for name, rows in whole.items()},
            **host_and_device(cu_seqlens),
            "sample_ids": ids,
            "document_ids": ids[firsts // length] * length + firsts % length,
        }

    def num_loss_tokens(self, samples: Sequence[int] | np.ndarray) -> int:
        """Return the sum of the loss masks of some samples."""
        drawn = self._by_source(row("samples", samples))
        return sum(source.num_loss_tokens(indices) for source, _, indices in drawn)

    def locate(self, sample: int) -> Place:
        """Return where a sample comes from; ``source`` is the name of the source here."""
        number, index = self.find([sample])
        name, source = list(self.sources.items())[int(number[0])]
        place = source.locate(int(index[0]))
        inner = f"/{place.source}" if isinstance(source, BlendedDataset) else ""
        return Place(name + inner, place.documents)

    def find(self, samples: Sequence[int] | np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Return which source each sample is of, and which of its samples, both [B]."""
        samples = self._checked(samples)
        if self.order == "native":
            return self._mixture.find(samples)
        return self._drawn.source[samples].astype(np.int64), self._drawn.index[samples]

    def counts(self, num_samples: int) -> dict[str, int]:
        """Return how many of the first samples each source gives."""
        num_samples = whole_number("num_samples", num_samples, 0, len(self))
        return dict(zip(self.sources, self._asked(num_samples).tolist(), strict=True))

    def _by_source(self, ids: np.ndarray) -> list[tuple[Source, np.ndarray, np.ndarray]]:
        """Return each source that gives some of the samples, with their rows and its indices."""
        numbers, indices = self.find(ids)
        sources = list(self.sources.values())
        chosen = [(sources[n], np.flatnonzero(numbers == n)) for n in np.unique(numbers).tolist()]
        return [(source, own, indices[own]) for source, own in chosen]

    def _checked_segments(
        self, weights: Weights | Sequence[tuple[int, Weights]] | None, epochs: list[int]
    ) -> list[tuple[int, Weights]]:
        """Return segments from sample 0 on, each with a weight for every source."""
        if weights is None:
            weights = dict(zip(self.sources, epochs, strict=True))
        segments = [(0, weights)] if isinstance(weights, Mapping) else weights
        rule = "weights by name, or pairs (from this sample on, weights by name)"
        given = [
            (whole_number("weights: sample", start, 0), self._checked_weights(by_name, rule))
            for start, by_name in pairs("weights", segments, rule)
        ]
        starts = [start for start, _ in given]
        if not given or starts[0] != 0 or starts != sorted(set(starts)):
            raise ValueError(f"weights begin at samples {starts}, must begin at 0 and increase")
        if self.order == "megatron" and len(given) > 1:
            raise ValueError("order='megatron' must have the same weights throughout")
        return given

    def _checked_weights(self, weights: Weights, rule: str) -> Weights:
        """Return a weight for every source."""
        if not isinstance(weights, Mapping):
            raise ValueError(f"weights={weights!r} must be {rule}")
        if unknown := [name for name in weights if name not in self.sources]:
            raise ValueError(f"weights name {unknown}, must name of {list(self.sources)}")
        values = {name: real(f"weights: {name}", weights.get(name, 0)) for name in self.sources}
        if not 0 < sum(map(float, values.values())) < inf:
            raise ValueError(f"weights={weights} must have one above 0 and a finite sum")
        return values

    def _available(self, epochs: list[int], limit: float | Mapping[str, float]) -> np.ndarray:
        """Return how many samples each source may give."""
        limits = limit if isinstance(limit, Mapping) else dict.fromkeys(self.sources, limit)
        if set(limits) - set(self.sources):
            raise ValueError(f"max_repetition={limit} must be for names of the sources")
        times = [real("max_repetition", limits.get(name, 1), finite=False) for name in self.sources]
        return np.array(
            [int(min(n * number, ENDLESS)) for n, number in zip(epochs, times, strict=True)]
        )

    def _draw(self, num_samples: int | None, epochs: list[int]) -> Any:
        if self.exhaustive:
            return exhaustive(epochs)
        if num_samples is None:
            raise ValueError("num_samples=None must be a number for order='megatron'")
        values = np.array(list(self.segments[0][1].values()), np.float64)
        return greedy(values / values.sum(), num_samples)

    def _asked(self, num_samples: int) -> np.ndarray:
        if self.order == "native":
            return self._mixture.counts(num_samples)
        return np.bincount(self._drawn.source[:num_samples], minlength=len(self.sources))

    def _longest(self, available: np.ndarray) -> int:
        """Return the number of samples after which the first source has given all it may."""
        fits, too_many = 0, min(sum(available.tolist()), ENDLESS) + 1
        while too_many - fits > 1:
            middle = (fits + too_many) // 2
            if (self._asked(middle) <= available).all():
                fits = middle
            else:
                too_many = middle
        if not fits:
            raise ValueError(f"max_repetition leaves {list(self.sources)} no sample to give")
        return fits

    def _give(self, asked: np.ndarray, available: np.ndarray) -> None:
        """Refuse what a source cannot give, and make sources as long as they are asked to be."""
        for (name, source), wanted, most in zip(
            list(self.sources.items()), asked.tolist(), available.tolist(), strict=True
        ):
            resized = getattr(source, "resized", None) if self.order == "native" else None
            if wanted > most:
                raise ValueError(
                    f"source {name!r} is asked for {wanted} samples, must be asked for at most "
                    f"{most}, which is what max_repetition leaves of an epoch of {epoch_of(source)}"
                )
            if not resized and wanted > len(source):
                raise ValueError(
                    f"source {name!r} is asked for {wanted} samples and has {len(source)}: build "
                    f"it with num_samples={wanted}"
                )
            if resized and wanted > len(source):
                self.sources[name] = resized(wanted)
