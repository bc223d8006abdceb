"""A causal convolution is its recurrence, token by token, with documents and over ranks."""

from functools import partial

import pytest
import torch
import torch.distributed as dist
from hypothesis import example, given
from hypothesis import strategies as st
from torch._dynamo.testing import CompileCounterWithBackend
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.testing import assert_close

from megablocks_core.groups import Mesh
from megablocks_core.layers.ssm.functions.convolution import causal_conv1d
from megablocks_core.layers.ssm.functions.recurrences import causal_conv1d_recurrence
from megablocks_core.layers.ssm.functions.steps import causal_conv1d_step
from megablocks_core.parallel import SequenceCut
from megablocks_core.testing import ranks
from tests.parallel import wrong_arguments as no
from tests.traffic import Traffic

KERNEL = torch.tensor([[1.0, 10.0, 100.0, 1000.0]])


def _numbers(*numbers):
    return torch.tensor(numbers, dtype=torch.float32).view(1, -1, 1)


def test_f089_a_prompt_shorter_than_the_kernel_starts_from_zeros():
    """Confirmed: the cache is filled with zeros on the left, and nobody else's is changed."""
    shared = torch.zeros(1, 3, 1)
    y, state = causal_conv1d(_numbers(1, 2), KERNEL, initial_state=shared)
    outputs = y.flatten().tolist()
    assert state.flatten().tolist() == [0, 1, 2]
    for token in (3.0, 4.0):
        y, state = causal_conv1d_step(torch.full((1, 1), token), KERNEL, state=state)
        outputs.append(y.item())
    assert outputs == [1000, 2100, 3210, 4321]
    assert not shared.any()


def test_f090_several_tokens_go_on_from_a_state():
    """Confirmed: the second call sees the first one's tokens."""
    _, state = causal_conv1d(_numbers(1, 2), KERNEL)
    y, state = causal_conv1d(_numbers(3, 4), KERNEL, initial_state=state)
    assert y.flatten().tolist() == [3210, 4321]
    assert state.flatten().tolist() == [2, 3, 4]


@st.composite
def _cases(draw):
    """Taps, lengths (of documents or of rows), tokens behind, a bias, states, an activation."""
    taps = draw(st.integers(1, 5))
    lengths = draw(st.lists(st.integers(0, 6), min_size=1, max_size=5))
    packed = draw(st.booleans())
    behind = draw(st.integers(0, 4)) if packed else 0
    return taps, lengths if packed else lengths[0], behind, *draw(st.tuples(*[st.booleans()] * 3))


def _tensors(taps, lengths, behind, bias, states):
    """x, weight, bias and initial states as leaves, and the sums of lengths."""
    packed = isinstance(lengths, list)
    rows, total = (1, sum(lengths) + behind) if packed else (2, lengths)
    documents = len(lengths) if packed else rows
    shapes = [(rows, total, 3), (3, taps), (3,), (documents, taps - 1, 3)]
    wanted = (True, True, bias, states)
    leaves = [
        torch.randn(shape, dtype=torch.float64, requires_grad=True) if use else None
        for shape, use in zip(shapes, wanted, strict=True)
    ]
    return leaves, _sums(lengths) if packed else None


def _sums(lengths):
    return torch.tensor([0, *lengths]).cumsum(0)


@given(_cases())
@example((4, [0, 2, 0, 5, 1, 0], 2, True, True, True))
@example((4, [1, 0, 2], 0, False, False, False))
@example((1, [2, 0], 1, True, True, True))
@example((4, 0, 0, True, True, True))
def test_outputs_states_and_gradients_are_those_of_the_recurrence(case):
    taps, lengths, behind, bias, states, activation = case
    torch.manual_seed(0)
    leaves, sums = _tensors(taps, lengths, behind, bias, states)
    results = []
    for function in (causal_conv1d, causal_conv1d_recurrence):
        x, weight, bias, state = leaves
        options = {"initial_state": state, "cu_seqlens": sums, "activation": activation}
        y, final = function(x, weight, bias, **options)
        assert y.shape == x.shape
        loss = (y * (y.detach() + 1)).sum() + (final * (final.detach() + 2)).sum()
        given = [leaf for leaf in leaves if leaf is not None]
        grads = torch.autograd.grad(loss, given, allow_unused=True, materialize_grads=True)
        results.append((y, final, *grads))
    for ours, right in zip(*results, strict=True):
        assert_close(ours, right, rtol=0, atol=1e-9)


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("activation", [False, True])
def test_gradients_are_those_of_differences(packed, activation):
    torch.manual_seed(0)
    leaves, sums = _tensors(3, [2, 0, 4] if packed else 4, 1, bias=True, states=True)

    def run(x, weight, bias, state):
        options = {"initial_state": state, "cu_seqlens": sums, "activation": activation}
        return causal_conv1d(x, weight, bias, **options)

    assert torch.autograd.gradcheck(run, leaves)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_short_dtypes_are_summed_in_float32(dtype):
    torch.manual_seed(0)
    x, weight = torch.randn(1, 40, 8, dtype=dtype), torch.randn(8, 4, dtype=dtype)
    y, state = causal_conv1d(x, weight, cu_seqlens=torch.tensor([0, 9, 40]), activation=True)
    options = {"cu_seqlens": torch.tensor([0, 9, 40]), "activation": True}
    exact, _ = causal_conv1d_recurrence(x.double(), weight.double(), **options)
    assert y.dtype == state.dtype == dtype
    tolerance = 1e-6 if dtype == torch.float32 else 2**-8
    assert_close(y.double(), exact, rtol=tolerance, atol=tolerance)


def test_nothing_of_another_document_gets_through():
    x = torch.randn(1, 12, 2)
    x[:, 4] = torch.nan
    x[:, 7] = torch.inf
    x.requires_grad_()
    # The second document has one token: the rest of its state is nobody's.
    states = torch.full((4, 3, 2), torch.nan)
    states[2] = 0
    sums = torch.tensor([0, 4, 5, 7, 10])
    y, final = causal_conv1d(x, torch.ones(2, 4), initial_state=states, cu_seqlens=sums)
    assert y[:, 5:7].isfinite().all() and y[:, 10:].isfinite().all()
    assert final[2].isfinite().all() and y[:, :5].isnan().any()
    (grad,) = torch.autograd.grad(y[:, 5:7].sum(), x)
    assert grad[:, 5:7].isfinite().all() and not grad[:, [0, 1, 2, 3, 4, 7, 8, 9, 10, 11]].any()


def test_no_states_are_made_for_training():
    y, final = causal_conv1d(torch.ones(1, 5, 2), torch.ones(2, 4), return_final_state=False)
    assert final is None and y.shape == (1, 5, 2)


def _run(x, weight, bias, state, sums):
    y, final = causal_conv1d(x, weight, bias, activation=True, initial_state=state, cu_seqlens=sums)
    return y, final


def test_no_value_is_read_on_the_host():
    with FakeTensorMode():
        leaves = [torch.randn(1, 9, 3), torch.randn(3, 4), torch.randn(3), torch.randn(2, 3, 3)]
        leaves = [leaf.requires_grad_() for leaf in leaves]
        sums = torch.zeros(3, dtype=torch.int64)
        for state in (None, leaves[3]):
            y, final = _run(*leaves[:3], state, sums)
            (y.sum() + final.sum()).backward()
        assert y.shape == (1, 9, 3) and final.shape == (2, 3, 3)


@pytest.mark.parametrize("with_state", [False, True])
def test_one_graph_serves_many_packings(with_state):
    torch._dynamo.reset()
    torch.manual_seed(0)
    counter = CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(_run, fullgraph=True, backend=counter)
    for index in range(20):
        lengths = [index % 5, 3 + index % 7, 9]
        leaves, sums = _tensors(4, lengths, index % 3, bias=True, states=True)
        results = []
        for run in (_run, compiled):
            y, final = run(*leaves[:3], leaves[3] if with_state else None, sums)
            grads = torch.autograd.grad(y.sin().sum() + final.sin().sum(), leaves[:3])
            results.append((y, final, *grads))
        for ours, right in zip(*results, strict=True):
            assert_close(ours, right, rtol=0, atol=1e-12)
    assert counter.frame_count <= 3


def test_wrong_arguments_are_refused():
    x, weight = torch.zeros(1, 8, 3), torch.zeros(3, 4)
    wrong = {
        "x": (None, torch.zeros(8, 3), [1.0]),
        "weight": (None, torch.zeros(4), torch.zeros(4, 4), torch.zeros(3, 0)),
        "bias": (torch.zeros(4), torch.zeros(3, 1)),
        "activation": no.NO_FLAGS,
        "initial_state": (torch.zeros(1, 4, 3), torch.zeros(2, 3, 3), torch.zeros(3, 3)),
        "cu_seqlens": (torch.tensor([0, 9]), torch.tensor([1, 8]), torch.zeros(3), [0, 8]),
        "return_final_state": no.NO_FLAGS,
    }
    no.refused(causal_conv1d, {"x": x, "weight": weight}, wrong, besides=("cut",))
    sums = torch.tensor([0, 8])
    cut = SequenceCut(8, cu_seqlens=sums)
    with pytest.raises(ValueError, match="cu_seqlens must not come with a cut"):
        causal_conv1d(x, weight, cu_seqlens=sums, cut=cut)
    for rows, tokens in ((2, 8), (1, 7)):
        with pytest.raises(ValueError, match="must"):
            causal_conv1d(torch.zeros(rows, tokens, 3), weight, cut=cut)


# Documents of 16 tokens, so that they begin at a rank's first token, one before and one behind.
PACKINGS = [([4, 4, 8], 0), ([3, 5, 8], 0), ([5, 2, 6], 3), ([0, 12, 0, 3], 1), ([2, 0, 1], 0)]


@ranks(1, 2, 4)
@pytest.mark.parametrize("kind", ["contiguous", "zigzag"])
def test_ranks_that_hold_pieces_give_what_one_process_gives(kind):
    torch.manual_seed(0)
    group = Mesh(cp=dist.get_world_size()).group("cp")
    cases = [*PACKINGS, *((rows, 0) for rows in (11, 3, 0))]
    for number, (lengths, behind) in enumerate(cases):
        _check_over_ranks(group, kind, lengths, behind, states=number % 3 > 0)


def _check_over_ranks(group, kind, lengths, behind, *, states):
    leaves, sums = _tensors(4, lengths, behind, bias=True, states=states)
    whole = leaves[0]
    cut = SequenceCut(whole.shape[1], cu_seqlens=sums, group=group, kind=kind)
    mine = [index for start, stop in cut.pieces for index in range(start, stop)]
    x, weight, bias, state = leaves
    options = {"initial_state": state, "activation": True}
    right, final = causal_conv1d_recurrence(x, weight, bias, cu_seqlens=sums, **options)
    given = [leaf for leaf in leaves if leaf is not None]
    gradient = partial(torch.autograd.grad, allow_unused=True, materialize_grads=True)
    dx, *others = gradient(right.sin().sum() + (final**2).sum(), given)

    part = whole[:, mine].detach().requires_grad_()
    given[0] = part
    with Traffic() as forward:
        y, mine_final = causal_conv1d(part, weight, bias, cut=cut, **options)
    with Traffic() as backward:
        our_dx, *ours = gradient(y.sin().sum() + (mine_final**2).sum(), given)
    close = partial(assert_close, rtol=0, atol=1e-9)
    close(y, right[:, mine])
    close(group.all_reduce(mine_final), final)
    close(our_dx, dx[:, mine])
    for one, other in zip(ours, others, strict=True):
        close(group.all_reduce(one), other)
    messages = {"all_to_all": 1} if group.size > 1 else {}
    assert forward.counts() == backward.counts() == messages


@ranks(2)
def test_one_graph_serves_ranks():
    torch.manual_seed(0)
    group = Mesh(cp=2).group("cp")
    packings = [_sums([index % 5, 3 + index % 7]) for index in range(20)]
    _check_one_graph(
        [SequenceCut(16, cu_seqlens=sums, group=group, kind="zigzag") for sums in packings], True
    )
    _check_one_graph([SequenceCut(length, group=group) for length in range(40, 50)], False)


def _check_one_graph(cuts, with_state):
    def run(x, weight, state, cut):
        options = {"activation": True, "cut": cut, "initial_state": state}
        return causal_conv1d(x, weight, return_final_state=with_state, **options)

    torch._dynamo.reset()
    counter = CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(run, fullgraph=True, backend=counter)
    for cut in cuts:
        shapes = ((1, cut.local_length, 3), (3, 4))
        leaves = [torch.randn(s, dtype=torch.float64, requires_grad=True) for s in shapes]
        documents = 1 if cut.cu_seqlens is None else len(cut.cu_seqlens) - 1
        state = torch.randn(documents, 3, 3, dtype=torch.float64) if with_state else None
        results = []
        for function in (run, compiled):
            y, final = function(*leaves, state, cut)
            given = [y] if final is None else [y, final]
            loss = sum(one.sin().sum() for one in given)
            results.append((*given, *torch.autograd.grad(loss, leaves)))  # pyright: ignore
        for ours, right in zip(*results, strict=True):
            assert_close(ours, right, rtol=0, atol=1e-12)
    assert counter.frame_count <= 3


@ranks(4)
def test_ranks_without_tokens_take_part_in_backward():
    cut = SequenceCut(2, group=Mesh(cp=4).group("cp"))
    x = torch.ones(1, cut.local_length, 1, requires_grad=True)
    for keep in (False, True):
        y, _ = causal_conv1d(x, torch.ones(1, 3), cut=cut, return_final_state=keep)
        (gradient,) = torch.autograd.grad(y.sum(), x)
        assert gradient.flatten().tolist() == [[2.0], [1.0], [], []][cut.group.rank]
