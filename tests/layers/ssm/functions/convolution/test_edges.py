"""States at the edges of documents and pieces, on inputs that are read off by eye."""

import torch

from megablocks_core.layers.ssm.functions.convolution import edges


def _tokens(*numbers):
    return torch.tensor(numbers, dtype=torch.float64).view(1, -1, 1)


SUMS = torch.tensor([0, 1, 1, 3, 8])  # documents of 1, 0, 2 and 5 tokens
STATES = torch.arange(-12.0, 0.0).double().view(4, 3, 1)


def test_rows_carry_on_what_the_initial_state_still_gives():
    state = _tokens(-3, -2, -1)
    zeros = _tokens(0, 0, 0)
    assert edges.carried(state, zeros, 0).flatten().tolist() == [-3, -2, -1]
    assert edges.carried(state, _tokens(0, 0, 1), 1).flatten().tolist() == [-2, -1, 1]
    assert edges.carried(state, _tokens(5, 6, 7), 7).flatten().tolist() == [5, 6, 7]


def test_the_last_tokens_of_rows():
    assert edges.last_of_rows(_tokens(1, 2), _tokens(-3, -2, -1)).flatten().tolist() == [-1, 1, 2]
    assert edges.last_of_rows(_tokens(1, 2), torch.zeros(1, 0, 1)).shape == (1, 0, 1)


def test_the_last_tokens_of_documents_start_with_their_initial_states():
    x, before = _tokens(*range(1, 9)), _tokens(0, 0, 0)
    states = edges.last_of_documents(x, before, STATES, cu_seqlens=SUMS, start=0)
    assert states.flatten(1).tolist() == [[-11, -10, 1], [-9, -8, -7], [-4, 2, 3], [6, 7, 8]]
    states = edges.last_of_documents(x, before, None, cu_seqlens=SUMS, start=0)
    assert states.flatten(1).tolist() == [[0, 0, 1], [0, 0, 0], [0, 2, 3], [6, 7, 8]]
    # The last document ends in a piece of one token; the others are not asked for.
    states = edges.last_of_documents(_tokens(8), _tokens(5, 6, 7), None, cu_seqlens=SUMS, start=7)
    assert states[3].flatten().tolist() == [6, 7, 8]


def test_initial_states_add_to_the_first_outputs_of_their_documents():
    weight = torch.tensor([[1.0, 10, 100, 1000]]).double()
    args = {"weight": weight, "cu_seqlens": SUMS}
    whole = edges.with_initial_states(_tokens(*[0] * 8), STATES, start=0, **args)
    first, _, third, fourth = STATES.flatten(1).tolist()

    def added(state, place):
        return sum(number * 10.0**power for power, number in enumerate(state[place:]))

    expected = [added(first, 0), *(added(third, i) for i in range(2))]
    expected += [*(added(fourth, i) for i in range(3)), 0, 0]
    assert whole.flatten().tolist() == expected
    pieces = [
        edges.with_initial_states(_tokens(*[0] * (stop - start)), STATES, start=start, **args)
        for start, stop in ((0, 2), (2, 2), (2, 5), (5, 8))
    ]
    assert torch.cat(pieces, dim=1).flatten().tolist() == expected
