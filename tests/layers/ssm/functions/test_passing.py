"""A recurrence over ranks that hold pieces is the recurrence of one process."""

from functools import partial

import pytest
import torch
import torch.distributed as dist
from torch._dynamo.testing import CompileCounterWithBackend
from torch.testing import assert_close

from megablocks_core.groups import Mesh
from megablocks_core.layers.ssm.functions.passing import documents_of, halo, over_cut
from megablocks_core.layers.ssm.functions.recurrences import (
    gated_delta_recurrence,
    selective_recurrence,
    ssd_recurrence,
)
from megablocks_core.parallel import SequenceCut
from megablocks_core.testing import ranks
from tests.traffic import Traffic

KINDS = ("contiguous", "zigzag")

# Documents of 16 tokens, so that ranks' pieces begin at multiples of 8, 4 and (zigzag) 2: they
# start at such a place, one before and one behind it; empty ones; and more ranks than tokens.
PACKINGS = [
    ([4, 4, 8], 0),
    ([3, 5, 8], 0),
    ([5, 2, 6], 3),
    ([0, 0, 12, 0, 3, 0], 1),
    ([16], 0),
    ([2, 0, 1], 0),
    ([0], 0),
]
ROWS = [16, 11, 3, 0]


def _selective():
    return selective_recurrence, ((3,), (3,), (2,), (2,)), -torch.rand(3, 2).double(), torch.mul


def _ssd():
    return ssd_recurrence, ((2, 3), (2,), (1, 2), (1, 2)), -torch.rand(2).double(), torch.mul


def _delta():
    shapes = ((2, 3), (2, 3), (2, 2), (2,), (2,))
    return gated_delta_recurrence, shapes, None, torch.matmul


def _call(function, tensors, weight, **options):
    """The tensors in the function's order: the weight of Mamba's comes third."""
    if weight is None:
        return function(*tensors, **options)
    first, second, *others = tensors
    return function(first, second, weight, *others, **options)


class _Twin:
    """``scan`` and ``state_map`` of a piece, from running the recurrence over it."""

    def __init__(self, function, weight, initial_state, compose):
        self.function, self.weight, self.compose = function, weight, compose
        self.initial_state = initial_state

    def scan(self, *tensors, cu_seqlens, carry):
        if cu_seqlens is None:
            return _call(self.function, tensors, self.weight, initial_state=carry)
        sums, first = self._documents(cu_seqlens, tensors)
        states = torch.cat((self.initial_state, torch.zeros_like(carry)))
        states = torch.cat((states[:first], carry, states[first + 1 :]))
        options = {"cu_seqlens": sums, "initial_state": states}
        y, final = _call(self.function, tensors, self.weight, **options)
        return y, final[:-1]

    def state_map(self, *tensors, cu_seqlens):
        length = tensors[0].shape[1]
        start, state = 0, self.initial_state[:1] * 0
        if cu_seqlens is not None and length:
            sums, _ = self._documents(cu_seqlens, tensors)
            last = int((sums <= length - 1).sum()) - 1
            start = int(sums[last])
            if start > 0 and last < len(self.initial_state):
                state = self.initial_state[last : last + 1]
        elif cu_seqlens is None:
            state = self.initial_state * 0
        part = [x[:, start:] for x in tensors]
        _, end = _call(self.function, part, self.weight, initial_state=state)
        transition = self._transition(part, state)
        return transition * (start == 0), end

    def _transition(self, part, state):
        """What the recurrence makes of ones, or of the unit matrix, without input."""
        if self.compose is torch.mul:
            quiet = [part[0] * 0, *part[1:]]
            return _call(self.function, quiet, self.weight, initial_state=torch.ones_like(state))[1]
        rows, _, heads, keys = part[1].shape
        unit = torch.eye(keys).to(state).expand(rows, heads, keys, keys)
        value = part[2].new_zeros(*part[2].shape[:3], keys)
        return self.function(*part[:2], value, *part[3:], initial_state=unit)[1]

    @staticmethod
    def _documents(cu_seqlens, tensors):
        """The documents and what lies behind them, and the one of the first token."""
        sums = torch.cat((cu_seqlens, torch.tensor([tensors[0].shape[1]])))
        first = int((sums <= 0).sum()) - 1
        return sums, min(first, len(sums) - 2)


def _check(make, length, cut_of, lengths=None):
    function, shapes, weight, compose = make()
    sums = None if lengths is None else torch.tensor([0, *lengths]).cumsum(0)
    rows = 2 if sums is None else 1
    whole = [torch.randn(rows, length, *shape).double() * 0.5 for shape in shapes]
    positive = 3 if make is _delta else 1
    whole[positive] = whole[positive].abs() * (-1 if make is _delta else 1)
    cut = cut_of(length, cu_seqlens=sums)
    mine = [index for start, stop in cut.pieces for index in range(start, stop)]

    def leaves(tensors):
        return [None if x is None else x.detach().clone().requires_grad_() for x in tensors]

    states = torch.randn_like(_call(function, whole, weight, cu_seqlens=sums)[1])
    *inputs, weight_one, states_one = leaves([*whole, weight, states])
    options = {"cu_seqlens": sums, "initial_state": states_one}
    y_one, final_one = _call(function, inputs, weight_one, **options)
    slope, final_slope = torch.randn_like(y_one), torch.randn_like(final_one)
    ((y_one * slope).sum() + (final_one * final_slope).sum()).backward()

    *parts, weight, states = leaves([*(x[:, mine] for x in whole), weight, states])
    twin = _Twin(function, weight, states, compose)
    with Traffic() as forward:
        y, final = over_cut(
            parts,
            cut=cut,
            state_map=twin.state_map,
            scan=twin.scan,
            compose=compose,
            initial_state=states,
        )
    with Traffic() as backward:
        ((y * slope[:, mine]).sum() + (final * final_slope).sum()).backward()
    close = partial(assert_close, rtol=0, atol=1e-9)
    close(y, y_one[:, mine])
    close(cut.group.all_reduce(final), final_one)
    for part, one in zip(parts, inputs, strict=True):
        close(_gradient(part), _gradient(one)[:, mine])
    for part, one in ((weight, weight_one), (states, states_one)):
        if part is not None:
            close(cut.group.all_reduce(_gradient(part)), _gradient(one))
    return forward.totals(), backward.totals()


def _gradient(x):
    """That of a tensor without tokens may be missing."""
    return torch.zeros_like(x) if x.grad is None else x.grad


def _cut_of(kind):
    group = Mesh(cp=dist.get_world_size()).group("cp")
    return partial(SequenceCut, group=group, kind=kind)


@ranks(1, 2, 4)
def test_documents_that_start_around_the_cuts():
    torch.manual_seed(0)
    kinds = ("zigzag", "contiguous", "zigzag", "contiguous", "zigzag", "zigzag", "contiguous")
    for kind, (lengths, behind) in zip(kinds, PACKINGS, strict=True):
        _check(_ssd, sum(lengths) + behind, _cut_of(kind), lengths)


@ranks(1, 2, 4)
def test_rows_of_one_length():
    torch.manual_seed(0)
    for kind, length in (("zigzag", 11), ("contiguous", 3), ("zigzag", 0)):
        _check(_ssd, length, _cut_of(kind))


@ranks(2, 4)
def test_matrices_and_decays_of_channels_are_composed():
    torch.manual_seed(0)
    _check(_delta, 11, _cut_of("zigzag"))
    _check(_delta, 16, _cut_of("contiguous"), [5, 2, 6])
    _check(_selective, 16, _cut_of("zigzag"), [5, 2, 6])


@pytest.mark.slow
@ranks(1, 2, 4)
def test_every_recurrence_and_packing():
    torch.manual_seed(0)
    for make in (_selective, _ssd, _delta):
        for kind in KINDS:
            for lengths, behind in PACKINGS:
                _check(make, sum(lengths) + behind, _cut_of(kind), lengths)
            for length in ROWS:
                _check(make, length, _cut_of(kind))


@ranks(2, 4)
def test_one_message_each_way_whose_size_is_independent_of_the_length():
    size = dist.get_world_size()
    for kind, pieces in (("contiguous", 1), ("zigzag", 2)):
        for length in (8, 12):
            forward, backward = _check(_ssd, length, _cut_of(kind))
            # The twin's transition is as large as the state, 2 rows of 2 x 3 x 2; and a digest.
            assert forward == {"all_gather": (1, size * pieces * (2 * 24 + 1))}
            assert backward == {"reduce_scatter": (1, size * pieces * (2 * 24 + 1))}


@ranks(2)
def test_ranks_that_cut_otherwise_are_told():
    group = Mesh(cp=2).group("cp")
    own = group.rank
    documents = {"cu_seqlens": torch.tensor([0, 3 + own, 16])}
    for length, options in ((16 + own, {}), (16, documents), (16, documents if own else {})):
        cut = SequenceCut(length, group=group, **options)
        x = torch.ones(1, cut.local_length, 1)
        with pytest.raises(ValueError, match="^cut=.* the same length, kind and cu_seqlens"):
            over_cut(
                [x],
                cut=cut,
                state_map=lambda x, *, cu_seqlens: (torch.ones(1, 1), x.sum(1)),
                scan=lambda x, *, cu_seqlens, carry: (x, None),
                compose=torch.mul,
            )


@ranks(2)
def test_a_tensor_may_have_several_entries_a_token():
    cut = _cut_of("zigzag")(9)
    seen = []

    def scan(x, double, *, cu_seqlens, carry):
        seen.append((x.shape[1], double.shape[1]))
        return x + double.unflatten(1, (-1, 2)).sum(2), None

    def state_map(x, double, *, cu_seqlens):
        return torch.ones(1, 1), torch.zeros(1, 1)

    x = torch.randn(1, cut.local_length, 2)
    options = {"cut": cut, "state_map": state_map, "scan": scan, "compose": torch.mul}
    y, final = over_cut([x, x.repeat_interleave(2, dim=1)], **options)
    assert seen == [(stop - start, 2 * (stop - start)) for start, stop in cut.pieces]
    assert final is None
    assert_close(y, 3 * x)


@ranks(4)
def test_a_rank_whose_piece_is_empty_takes_part_in_backward():
    cut = _cut_of("contiguous")(2)
    x = torch.ones(1, cut.local_length, 1, requires_grad=True)

    def state_map(x, *, cu_seqlens):
        return torch.ones(1, 1), x.sum(1) if x.shape[1] else torch.zeros(1, 1)

    def scan(x, *, cu_seqlens, carry):
        return (x + carry[:, None] if x.shape[1] else x.detach()), None

    options = {"cut": cut, "state_map": state_map, "scan": scan, "compose": torch.mul}
    y, _ = over_cut([x], **options)
    y.sum().backward()
    assert x.grad.flatten().tolist() == [[2.0], [1.0], [], []][cut.group.rank]


@ranks(1, 2, 4)
def test_the_tokens_before_each_piece():
    size = dist.get_world_size()
    for kind in KINDS:
        for length in (0, 1, 3, 7, 16):
            for width in (0, 1, 3):
                _check_halo(_cut_of(kind)(length), width, size)


def _check_halo(cut, width, size):
    whole = torch.arange(1.0, 1 + 2 * cut.length * 3).double().view(2, cut.length, 3)
    padded = torch.cat((torch.zeros(2, width, 3).double(), whole), dim=1)
    slopes = [torch.randn(2, width, 3).double() for _ in range(2 * size)]  # alike on all ranks
    mine = [index for start, stop in cut.pieces for index in range(start, stop)]
    x = whole[:, mine].requires_grad_()
    with Traffic() as forward:
        found = halo(x, cut=cut, width=width)
    expected = torch.zeros_like(padded)
    for number, (rank, index) in enumerate(cut.order):
        start, stop = cut.pieces_of(rank)[index]
        if start < stop:
            expected[:, start : start + width] += slopes[number]
            if rank == cut.group.rank:
                assert_close(found[index], padded[:, start : start + width], rtol=0, atol=0)
        elif rank == cut.group.rank:
            assert found[index].shape == (2, width, 3) and not found[index].any()
    if size == 1:
        assert not forward.counts() and not found[0].requires_grad
        return
    own = [slopes[number] for number, place in enumerate(cut.order) if place[0] == cut.group.rank]
    with Traffic() as backward:
        (torch.stack(found) * torch.stack(own)).sum().backward()
    assert_close(x.grad, expected[:, width:][:, mine], rtol=0, atol=1e-12)
    messages = int(size > 1 and width > 0)
    for traffic in (forward, backward):
        number, elements = traffic.totals().get("all_to_all", (0, 0))
        assert (number, traffic.counts()) == (messages, {"all_to_all": 1} if messages else {})
        # A rank whose pieces are both followed, or preceded, by others' has two to send or get.
        assert elements <= len(cut.pieces) * width * 2 * 3 * (1 if cut.length >= 16 else size)


@ranks(2)
def test_one_graph_serves_many_packings_and_lengths():
    group = Mesh(cp=2).group("cp")
    sums = [torch.tensor([0, index % 8, 9 + index % 5]) for index in range(20)]
    _check_one_graph([SequenceCut(16, cu_seqlens=one, group=group, kind="zigzag") for one in sums])
    _check_one_graph([SequenceCut(length, group=group) for length in range(40, 50)])


def _check_one_graph(cuts):
    """Sums of all tokens before: what they mean is tested above, with recurrences."""

    def state_map(x, *, cu_seqlens):
        return torch.ones_like(x[:, :1]).sum(1), x.sum(1)

    def scan(x, *, cu_seqlens, carry):
        y = carry[:, None] + x.cumsum(1)
        return y, y.sum(1) if cu_seqlens is None else y.sum(1).expand(len(cu_seqlens) - 1, -1)

    def run(x, state, cut):
        options = {"cut": cut, "state_map": state_map, "scan": scan, "compose": torch.mul}
        return over_cut([x], initial_state=state, **options)

    torch._dynamo.reset()
    counter = CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(run, fullgraph=True, backend=counter)
    for cut in cuts:
        x = torch.randn(1, cut.local_length, 3, dtype=torch.float64, requires_grad=True)
        documents = 1 if cut.cu_seqlens is None else len(cut.cu_seqlens) - 1
        state = torch.randn(documents, 3, dtype=torch.float64, requires_grad=True)
        results = []
        for function in (run, compiled):
            y, final = function(x, state, cut)
            grads = torch.autograd.grad(y.sin().sum() + final.sin().sum(), (x, state))
            results.append((y, final, *grads))
        for ours, right in zip(*results, strict=True):
            assert_close(ours, right, rtol=0, atol=1e-12)
    assert counter.frame_count <= 3


def test_wrong_tokens_are_refused():
    cut = SequenceCut(8)
    scan = pytest.fail
    options = {"state_map": scan, "scan": scan, "compose": torch.mul}
    for call in (partial(halo, width=3), lambda x, cut: over_cut([x], cut=cut, **options)):
        with pytest.raises(ValueError, match=r"x of shape \(1, 7, 2\) must have the 8 tokens"):
            call(torch.zeros(1, 7, 2), cut=cut)
        packed = SequenceCut(8, cu_seqlens=torch.tensor([0, 8]))
        with pytest.raises(ValueError, match="cu_seqlens must come with one row of tokens, not 2"):
            call(torch.zeros(2, 8, 2), cut=packed)


def test_documents_are_told_once():
    sums = torch.tensor([0, 3, 8])
    assert (
        documents_of(None, None, tokens=8) is documents_of(SequenceCut(8), None, tokens=8) is None
    )
    assert documents_of(None, sums, tokens=8) is sums
    assert documents_of(SequenceCut(8, cu_seqlens=sums), None, tokens=8) is sums
    with pytest.raises(ValueError, match="cu_seqlens must not come with a cut"):
        documents_of(SequenceCut(8), torch.tensor([0, 8]), tokens=8)


@pytest.mark.parametrize("cut", [SequenceCut(4), SequenceCut(16), "zigzag"])
def test_a_cut_of_other_tokens_is_refused(cut):
    with pytest.raises(ValueError, match=r"^cut=.* must (give this rank 8 tokens|be a Seq)"):
        documents_of(cut, None, tokens=8)
