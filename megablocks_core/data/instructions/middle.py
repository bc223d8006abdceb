"""Fill-in-the-middle: a document is cut in three and its middle comes last.

M. Bavarian et al., Efficient training of language models to fill in the middle (2022), section 3.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from megablocks_core.data.checks import real, row, whole_number
from megablocks_core.data.permutation import GOLDEN, WORD, mix

ADDED = 3  # ids that a rearranged document has more


@dataclass(frozen=True)
class FillInTheMiddle:
    """Rearranges documents for filling in their middle.

    A share ``rate`` of all documents is cut at two places into prefix, middle and suffix. Of these,
    a share ``spm_rate`` becomes suffix, prefix, middle (SPM), the others prefix, suffix, middle
    (PSM), with the ids ``prefix``, ``suffix`` and ``middle`` as marks::

        PSM:  <prefix> prefix <suffix> suffix <middle> middle
        SPM:  <prefix> <suffix> suffix <middle> prefix middle

    Each place, before the first token, between two, or after the last, is as likely as any other
    to be either cut, so parts may be empty. All is drawn from a hash of (``seed``, sample, part),
    which is all that resuming needs: the same on any rank, in any worker, in any order.

    ``tokens`` cuts between ids, which stay as they are; ``text`` cuts between characters and
    encodes the three parts one by one, so that a model also learns to go on from half a token.

    Raises:
        ValueError: Marks that are not three different ids, rates outside 0 to 1.
    """

    prefix: int
    middle: int
    suffix: int
    rate: float = 0.5
    spm_rate: float = 0.5
    seed: int = 0

    def __post_init__(self) -> None:
        marks = (self.prefix, self.middle, self.suffix)
        for name, mark in zip(("prefix", "middle", "suffix"), marks, strict=True):
            whole_number(name, mark, 0)
        if len(set(marks)) < len(marks):
            raise ValueError(f"prefix, middle and suffix={marks} must be three different ids")
        for name in ("rate", "spm_rate"):
            if real(name, value := getattr(self, name)) > 1:
                raise ValueError(f"{name}={value} must be between 0 and 1")
        whole_number("seed", self.seed, 0, WORD)

    def applies(self, samples: np.ndarray, parts: np.ndarray) -> np.ndarray:
        """Which parts of which samples are rearranged, all [n]."""
        key = self._key(samples.astype(np.uint64), parts.astype(np.uint64))
        return (_word(key, 0) >> np.uint64(11)) < np.uint64(round(self.rate * 2**53))

    def tokens(self, ids: Sequence[int] | np.ndarray, sample: int, part: int = 0) -> np.ndarray:
        """The ids of a document, rearranged or not, as (sample, part) decides, int64."""
        given = row("ids", ids)
        drawn = self._draw(len(given), sample, part)
        if drawn is None:
            return given
        first, last, spm = drawn
        return self._joined([given[:first], given[first:last], given[last:]], spm)

    def text(
        self, text: str, encode: Callable[[str], Any], sample: int, part: int = 0
    ) -> np.ndarray:
        """The ids of a text, rearranged or not, int64; ``encode`` gives those of each part."""
        drawn = self._draw(len(text), sample, part)
        if drawn is None:
            return row("encode", encode(text))
        first, last, spm = drawn
        parts = (text[:first], text[first:last], text[last:])
        return self._joined([row("encode", encode(each)) for each in parts], spm)

    def undo(self, ids: Sequence[int] | np.ndarray) -> np.ndarray:
        """The ids of the document that others were made of; those of no such are returned.

        Raises:
            ValueError: Its marks are not the three, in their order.
        """
        given = row("ids", ids)
        marks = (self.prefix, self.suffix, self.middle)
        at = np.flatnonzero(np.isin(given, marks))
        if not len(at):
            return given
        if given[at].tolist() != list(marks) or at[0] != 0:
            raise ValueError(f"ids must begin with {marks[0]} and hold each of {marks} once, so")
        # In SPM the prefix stands where PSM has the middle: both read the same.
        before, after = given[1 : at[1]], given[at[1] + 1 : at[2]]
        return np.concatenate([before, given[at[2] + 1 :], after])

    def _draw(self, size: int, sample: int, part: int) -> tuple[int, int, bool] | None:
        """Where a document is cut, and whether it becomes SPM; none if it stays."""
        sample, part = whole_number("sample", sample, 0), whole_number("part", part, 0)
        if not self.applies(np.array([sample]), np.array([part]))[0]:
            return None
        key = self._key(sample, part)
        first, last = sorted(_word(key, nth) * (size + 1) >> 64 for nth in (1, 2))
        return first, last, _word(key, 3) >> 11 < round(self.spm_rate * 2**53)

    def _key(self, sample: Any, part: Any) -> Any:
        key = mix(GOLDEN ^ self.seed)
        for word in (sample, part):
            key = mix((word ^ key) + GOLDEN & WORD)
        return key

    def _joined(self, parts: list[np.ndarray], spm: bool) -> np.ndarray:
        before, middle, after = parts
        first, rest = ([], [before, middle]) if spm else ([before], [middle])
        pieces = [[self.prefix], *first, [self.suffix], after, [self.middle], *rest]
        return np.concatenate([np.asarray(piece, np.int64) for piece in pieces])


def _word(key: Any, nth: int) -> Any:
    """The nth number that a key gives, 64 bits."""
    return mix(key + (GOLDEN * (nth + 1) & WORD) & WORD)
