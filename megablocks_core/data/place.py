"""Where a sample comes from."""

from typing import NamedTuple


class Place(NamedTuple):
    """The documents that the tokens of one sample were taken from, in their order.

    ``source`` is the name of the split, or of the source of a blend. ``documents`` holds
    (document, start, stop) with the number of the document in its dataset and the range of its
    tokens. Together the ranges are the sample's ``tokens``; the last label is the token after.
    """

    source: str
    documents: list[tuple[int, int, int]]
