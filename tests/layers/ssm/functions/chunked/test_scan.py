"""The scan over chunks: what it keeps for backward, and how chunks together map a state."""

import pytest
import torch
from torch.testing import assert_close

from megablocks_core.layers.ssm.functions.chunked.borders import Borders
from megablocks_core.layers.ssm.functions.chunked.layout import lay_out, to_chunks
from megablocks_core.layers.ssm.functions.chunked.scan import recurrence_of, scan, state_map
from tests.layers.ssm.functions.chunked.kinds import KINDS, states, sums


@pytest.mark.parametrize("name", ["selective", "delta 1"])
@pytest.mark.parametrize("chunk_size", [16, 64])
def test_what_is_saved_is_the_inputs_and_a_state_every_1024_tokens(name, chunk_size):
    """As docstrings say, and so linear in the length."""
    kind = KINDS[name]
    bytes_of_state = 4 * torch.Size(kind.state).numel()
    for length in (2048, 4096):
        leaves = kind.leaves(1, length, torch.float32)
        inputs = sum(leaf.nbytes for leaf in leaves)
        states = length // 1024 * bytes_of_state
        # What is saved of q is q times the scale.
        assert _saved(kind, leaves, chunk_size=chunk_size) == inputs + states
        documents = sums([5, length - 10])  # three, of which each may need a chunk more
        packed = _saved(kind, leaves, chunk_size=chunk_size, cu_seqlens=documents)
        places = length + 3 * chunk_size
        # Where each place's token is and back, 17 bytes; two numbers of each chunk; a block more.
        most = inputs * places // length + 17 * places + 16 * places // chunk_size
        assert inputs < packed <= most + states + bytes_of_state


def _saved(kind, leaves, **options):
    """Bytes, each storage once."""
    saved = {}

    def pack(x):
        saved[x.untyped_storage().data_ptr()] = x
        return x

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda x: x):
        kept = kind.run(leaves, return_final_state=False, **options)
    assert kept is not None
    return sum(x.untyped_storage().nbytes() for x in saved.values())


@pytest.mark.parametrize("name", ["selective", "gated_delta"])
@pytest.mark.parametrize("lengths", [None, [3, 9], [0, 12, 0], [14], [9, 5, 0]])
def test_chunks_together_map_a_state_as_the_scan_does(name, lengths):
    """Of 14 tokens; a transition of zeros where a document starts among them."""
    torch.manual_seed(0)
    kind = KINDS["selective" if name == "selective" else "delta 1"]
    leaves = [leaf.detach() for leaf in kind.leaves(1, 14)]
    order = [0, 1, 3, 4] if name == "selective" else range(5)
    constants = [leaves[2].requires_grad_()] if name == "selective" else []
    documents, borders, initial = None, Borders(), None
    if lengths is not None:
        documents = lay_out(sums(lengths), length=14, chunk_size=4)
        initial = states(kind, len(lengths) + 1)
        first = documents.first & (torch.arange(len(documents.first)) > 0)
        borders = Borders(first, documents.document, initial, documents.last)
    inputs = [to_chunks(leaves[i], 4, documents).requires_grad_() for i in order]
    carry = states(kind, 1)
    given = [*inputs, *constants, carry, *([] if initial is None else [initial])]
    _, last, _ = scan(name, inputs, constants, carry, borders)
    transition, addition = state_map(name, inputs, constants, carry.detach(), borders)
    assert transition.shape == (1, *kind.transition)
    alone = lengths is None or sum(length > 0 for length in [*lengths, 14 - sum(lengths)]) == 1
    assert bool(transition.any()) == alone
    mapped = recurrence_of(name).compose(transition, carry) + addition
    assert_close(mapped, last, rtol=0, atol=1e-12)
    for ours, right in zip(
        *(
            torch.autograd.grad(x.sin().sum(), given, allow_unused=True, materialize_grads=True)
            for x in (mapped, last)
        ),
        strict=True,
    ):
        assert_close(ours, right, rtol=0, atol=1e-12)


def test_outputs_that_are_not_asked_for_are_not_made():
    for name, kind in (("selective", KINDS["selective"]), ("gated_delta", KINDS["delta 1"])):
        leaves = kind.leaves(1, 8)
        order = [0, 1, 3, 4] if name == "selective" else range(5)
        constants = [leaves[2]] if name == "selective" else []
        inputs = [leaves[i][:, None] for i in order]
        carry = states(kind, 1)
        y, last, finals = scan(name, inputs, constants, carry, Borders(), outputs=False)
        whole, right, _ = scan(name, inputs, constants, carry, Borders())
        assert y.numel() == finals.numel() == 0 and whole.shape[:3] == (1, 1, 8)
        assert_close(last, right)
        for ours, wanted in zip(
            *(
                torch.autograd.grad(x.sum(), [*inputs, carry], allow_unused=True)
                for x in (last, right)
            ),
            strict=True,
        ):
            assert_close(ours, wanted)
