"""States at the edges of documents, wherever these lie in chunks."""

import pytest
import torch
from torch.testing import assert_close

from megablocks_core.layers.ssm.functions.recurrences import ssd_recurrence
from megablocks_core.layers.ssm.functions.ssd.document_states import (
    Tokens,
    entries_of_documents,
    final_states_of_documents,
)
from tests.layers.ssm.functions.ssd.cases import draw, sums_of

LENGTHS = [[5, 3, 8], [8, 8], [0, 7, 0, 2, 6], [1, 15]]


@pytest.mark.parametrize("lengths", LENGTHS, ids=str)
def test_initial_states_reach_the_end_of_the_chunk_and_the_state_behind_it(lengths):
    x, dt, A, B, C, _, state = draw(1, 18, 4, 2, states=len(lengths))
    sums = sums_of(lengths)
    tokens = Tokens(x[0], dt[0], A, B[0], C[0])
    y, entries = entries_of_documents(tokens, state, sums, 4)
    options = {"initial_state": state, "cu_seqlens": sums}
    right, _ = ssd_recurrence(torch.zeros_like(x), dt, A, B, C, **options)
    behind = torch.zeros(5, 1, 4, 3, 4, dtype=torch.float64)
    for document, (start, stop) in enumerate(zip(sums.tolist(), sums[1:].tolist(), strict=False)):
        end = (start // 4 + 1) * 4
        if start == 0:  # carried into the row
            right[:, :stop] = 0
        right[:, end:stop] = 0
        if 0 < start < end <= stop:
            decay = (dt[0, start:end].sum(0) * A).exp()
            behind[start // 4, 0] += state[document] * decay[:, None, None]
    assert_close(y[None], right, rtol=0, atol=1e-12)
    assert_close(entries, behind, rtol=0, atol=1e-12)


@pytest.mark.parametrize("lengths", LENGTHS, ids=str)
def test_final_states_are_told_from_the_chunk_of_the_last_token(lengths):
    x, dt, A, B, C, _, state = draw(1, 18, 4, 2, states=len(lengths))
    sums = sums_of(lengths)
    tokens = Tokens(x[0], dt[0], A, B[0], C[0])
    before = []
    for chunk in range(5):  # the state there, of the document that is open
        open_ = torch.cat((sums[sums < max(4 * chunk, 1)], torch.tensor([4 * chunk])))
        begun = int((sums[1:] <= 0).sum()) if chunk == 0 else int((sums < 4 * chunk).sum()) - 1
        past = len(lengths) <= begun
        first = state[begun : begun + 1] if not past else torch.zeros_like(state[:1])
        part = slice(int(open_[-2]), int(open_[-1]))
        tokens_before = [each[:, part] for each in (x, dt)]
        _, last = ssd_recurrence(*tokens_before, A, B[:, part], C[:, part], initial_state=first)
        before.append(last[0])
    final = final_states_of_documents(tokens, torch.stack(before), state, sums, 4)
    options = {"initial_state": state, "cu_seqlens": sums}
    _, right = ssd_recurrence(x, dt, A, B, C, **options)
    assert_close(final, right, rtol=0, atol=1e-12)
