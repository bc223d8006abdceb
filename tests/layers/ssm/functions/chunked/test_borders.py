"""States and gradients between chunks, where documents start and end."""

import torch

from megablocks_core.layers.ssm.functions.chunked.borders import Borders, BordersBack

# Four chunks: the end of document 0, all of document 1, two of document 2.
_FIRST = torch.tensor([False, True, True, False])
_DOCUMENT = torch.tensor([0, 1, 2, 2])
_INITIAL = torch.tensor([[10.0], [11.0], [12.0]])


def test_rows_have_no_borders():
    state = torch.ones(2, 1)
    way = BordersBack(Borders(), state.new_zeros(0), None, 3)
    assert Borders().within(1, 3).enter(0, state) is way.enter(1, state) is state
    assert way.behind(1, state) is way.before(1, state) is state
    assert Borders().no_finals(state).shape == (0,)
    assert Borders().collect(state, [state]) is state


def test_a_document_starts_from_its_own_state():
    state = torch.full((1, 1), torch.nan)
    borders = Borders(_FIRST, _DOCUMENT, _INITIAL)
    entered = [borders.enter(chunk, state) for chunk in range(4)]
    assert entered[0].isnan() and entered[3].isnan()
    assert (entered[1].item(), entered[2].item()) == (11, 12)
    assert Borders(_FIRST, _DOCUMENT).enter(1, state).item() == 0
    assert borders.within(2, 4).enter(0, state).item() == 12


def test_states_behind_documents_are_collected_block_by_block():
    borders = Borders(_FIRST, _DOCUMENT, None, torch.tensor([0, 1, 3]))
    states = [torch.full((1, 1), float(chunk)) for chunk in range(4)]
    finals = borders.no_finals(states[0])
    for start, stop in ((0, 2), (2, 4)):
        finals = borders.within(start, stop).collect(finals, states[start:stop])
    assert finals.tolist() == [[0], [1], [3]]
    spread = [borders.within(*block).spread(finals + 1, 2) for block in ((0, 2), (2, 4))]
    assert torch.cat([x for x in spread if x is not None]).tolist() == [[1], [2], [0], [4]]


def test_gradients_end_where_documents_start():
    dinitial = torch.zeros(3, 1)
    borders = Borders(_FIRST, _DOCUMENT, _INITIAL, torch.tensor([0, 1, 3]))
    way = BordersBack(borders, torch.tensor([[1.0], [2.0], [4.0]]), dinitial, 4)
    dstate = torch.zeros(1, 1)
    for chunk in reversed(range(4)):
        dstate = way.before(chunk, way.behind(chunk, dstate))
    assert dstate.item() == 1
    assert dinitial.tolist() == [[0], [2], [4]]
    nothing = way.before(1, torch.full((1, 1), torch.nan))
    assert nothing.item() == 0
