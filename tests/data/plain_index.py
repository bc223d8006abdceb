"""The sample index of Megatron-LM, written down as a walk."""


def plain_index(lengths, document_index, length, *, extra_token=True, drop_last=True):
    """Walk through the stream one document at a time."""
    left = sum(lengths[d] for d in document_index) - extra_token
    rows, place, offset = [[0, 0]], 0, 0
    while left >= length or (left > 0 and not drop_last):
        needed = min(length, left) + extra_token
        while needed > lengths[document_index[place]] - offset:
            needed -= lengths[document_index[place]] - offset
            place, offset = place + 1, 0
        offset += needed - extra_token
        left -= length
        rows.append([place, offset])
    if left < 0 and not extra_token:  # what is cut short ends where the stream does
        rows[-1] = [len(document_index) - 1, lengths[document_index[-1]]]
    return rows
