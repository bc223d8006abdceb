"""The chunked scan is its recurrence, whatever the chunks, documents, dtypes and ranks."""

from functools import partial

import pytest
import torch
import torch.distributed as dist
from hypothesis import example, given, settings
from hypothesis import strategies as st
from torch._dynamo.testing import CompileCounterWithBackend
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.autograd.graph import saved_tensors_hooks
from torch.testing import assert_close

from megablocks_core.groups import Mesh
from megablocks_core.layers.ssm import ssd_chunk_scan
from megablocks_core.layers.ssm.functions.recurrences import ssd_recurrence
from megablocks_core.parallel.sequence import SequenceCut
from megablocks_core.testing import ranks
from tests.layers.ssm.functions.ssd.cases import draw, recurrence, run, sums_of
from tests.parallel import wrong_arguments as no
from tests.traffic import Traffic


@pytest.mark.parametrize("chunk_size", [1, 2, 3, 4])
def test_f085_a_small_recurrence_has_known_values(chunk_size):
    """Confirmed: the step sizes are ln 2, the decays 1/2."""
    one = torch.ones(1, 3, 1, 1)
    dt = torch.full((1, 3, 1), 2.0).log()
    y, final = ssd_chunk_scan(one, dt, -torch.ones(1), one, one, chunk_size=chunk_size)
    right = torch.tensor([0.6931472, 1.0397208, 1.2130076])
    assert_close(y.flatten(), right, rtol=0, atol=1e-6)
    assert_close(final.flatten(), right[-1:], rtol=0, atol=1e-6)
    by_step, _ = ssd_recurrence(one, dt, -torch.ones(1), one, one)
    assert_close(y, by_step, rtol=0, atol=1e-6)


def _check(lengths, behind, *, chunk_size, heads, groups, skip, states, finals, strength=1.0):
    packed = isinstance(lengths, list)
    rows, length = (1, sum(lengths) + behind) if packed else (2, lengths)
    count = len(lengths) if packed else rows
    leaves = draw(
        *(rows, length, heads, groups), skip=skip, states=count * states, strength=strength
    )
    sums = sums_of(lengths) if packed else None
    right = recurrence(leaves, finals=finals, cu_seqlens=sums)
    scan = partial(ssd_chunk_scan, chunk_size=chunk_size, return_final_state=finals)
    for ours, theirs in zip(run(scan, leaves, cu_seqlens=sums), right, strict=True):
        assert_close(ours, theirs, rtol=0, atol=1e-9)


@settings(max_examples=30)
@given(
    length=st.integers(0, 40),
    chunk_size=st.sampled_from([1, 2, 3, 8, 16, 64]),
    heads=st.sampled_from([(1, 1), (4, 1), (4, 2), (3, 3)]),
    skip=st.sampled_from([None, 1, 2]),
    states=st.booleans(),
    finals=st.booleans(),
    strength=st.sampled_from([0.01, 1.0, 30.0]),
)
def test_rows_are_the_recurrence(length, chunk_size, heads, skip, states, finals, strength):
    options = {"skip": skip, "states": states, "finals": finals, "strength": strength}
    _check(length, 0, chunk_size=chunk_size, heads=heads[0], groups=heads[1], **options)


@settings(max_examples=30)
@given(
    lengths=st.lists(st.integers(0, 20), min_size=1, max_size=5),
    behind=st.integers(0, 10),
    chunk_size=st.sampled_from([1, 3, 8, 64]),
    skip=st.sampled_from([None, 1, 2]),
    states=st.booleans(),
    finals=st.booleans(),
)
@example([8, 8, 8], 0, 8, 1, True, True)
@example([7, 9, 8], 0, 8, 1, True, True)
@example([9, 6, 9], 0, 8, 2, True, True)
@example([0, 0, 8, 0, 3, 0, 13, 0], 5, 8, None, True, True)
@example([1, 1, 1, 1, 1, 1], 0, 8, None, True, True)
@example([40], 0, 4, 1, True, False)
@example([0, 0], 3, 8, None, True, True)
@example([0, 0], 0, 8, None, True, True)
def test_documents_are_the_recurrence(lengths, behind, chunk_size, skip, states, finals):
    options = {"skip": skip, "states": states, "finals": finals}
    _check(lengths, behind, chunk_size=chunk_size, heads=4, groups=2, **options)


@pytest.mark.parametrize("packed", [False, True])
def test_gradients_are_those_of_differences(packed):
    lengths = [2, 0, 4] if packed else 7
    count = 3 if packed else 1
    leaves = draw(1, 7, 2, 1, features=2, state=2, skip=1, states=count)
    sums = sums_of(lengths) if packed else None

    def scan(*leaves):
        *tensors, D, state = leaves
        options = {"D": D, "initial_state": state, "cu_seqlens": sums, "chunk_size": 3}
        return ssd_chunk_scan(*tensors, **options)

    assert torch.autograd.gradcheck(scan, leaves)


def test_no_second_gradient_is_promised():
    x, *others = draw(1, 5, 2, 1)[:5]
    y, _ = ssd_chunk_scan(x, *others)
    (dx,) = torch.autograd.grad(y.square().sum(), x, create_graph=True)
    with pytest.raises(RuntimeError, match="once_differentiable"):
        dx.sum().backward()


def _long(length, strength, dtype, heads=2, features=8, state=8):
    """Inputs of ``dtype`` and a gradient in y; decays a token are up to ``strength``."""
    torch.manual_seed(0)
    rates = torch.tensor([1.0, 0.1])
    steps = torch.rand(1, length, heads) * strength
    shapes = ((1, length, heads, features), (1, length, 1, state), (1, length, 1, state))
    x, B, C = (torch.randn(shape).to(dtype) for shape in shapes)
    leaves = [x, steps, -rates[:heads], B, C]
    return [leaf.requires_grad_() for leaf in leaves], torch.randn(x.shape).to(dtype)


def _is_close_to_float64(length, strength, dtype, sums=None):
    leaves, dy = _long(length, strength, dtype)
    wide = [leaf.detach().double().requires_grad_() for leaf in leaves]
    tolerance = 2e-5 if dtype == torch.float32 else 2e-2
    results = []
    for inputs in (leaves, wide):
        y, final = ssd_chunk_scan(*inputs, cu_seqlens=sums)
        loss = (y * dy.to(y.dtype)).sum() + final.sin().sum()
        results.append((y, final, *torch.autograd.grad(loss, inputs)))
    assert results[0][0].dtype == dtype and results[0][1].dtype == torch.float32
    for ours, right in zip(*results, strict=True):
        assert ours.isfinite().all()
        distance = (ours.double() - right).norm()
        assert distance <= tolerance * right.norm(), (distance / right.norm(), ours.shape)


STRENGTHS = [1e-5, 1e-2, 1.0, 20.0, 1e4]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("strength", STRENGTHS)
def test_weak_and_strong_decays_are_near_float64(strength, dtype):
    _is_close_to_float64(2_048 + 7, strength, dtype)


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("strength", STRENGTHS)
def test_long_sequences_are_near_float64(strength, dtype):
    _is_close_to_float64(65_536, strength, dtype)
    _is_close_to_float64(65_536, strength, dtype, torch.tensor([0, 63, 64, 30_001, 65_536]))


def test_weak_decays_behind_strong_ones_keep_their_digits():
    """Sums of a thousand, of which a difference of a hundredth has to be told."""
    leaves, dy = _long(256, 1.0, torch.float32)
    with torch.no_grad():
        leaves[1].copy_(torch.where(torch.rand(1, 256, 2) < 0.3, 55.0, 1e-3))
        leaves[2].fill_(-1.0)
    results = []
    for inputs in (leaves, [leaf.detach().double().requires_grad_() for leaf in leaves]):
        y, _ = ssd_chunk_scan(*inputs)
        results.append((y, *torch.autograd.grad(y, inputs, dy.to(y.dtype))))
    for ours, right in zip(*results, strict=True):
        assert (ours.double() - right).norm() <= 1e-6 * right.norm()


def test_strong_decays_alone_have_a_gradient_with_digits():
    """What a token makes of itself, which is large, is not in the gradient of its decay."""
    leaves, dy = _long(256, 1.0, torch.float32)
    with torch.no_grad():
        leaves[1].fill_(25.0)
    wide = [leaf.detach().double().requires_grad_() for leaf in leaves]
    grads = [
        torch.autograd.grad(ssd_chunk_scan(*inputs)[0], inputs[2], dy.to(inputs[0].dtype))[0]
        for inputs in (leaves, wide)
    ]
    assert_close(grads[0].double(), grads[1], rtol=1e-4, atol=0)
    assert (grads[1] != 0).all()


def test_autocast_rounds_nothing():
    leaves, _ = _long(70, 1.0, torch.float32)
    scan = partial(ssd_chunk_scan, *leaves, initial_state=torch.randn(2, 2, 8, 8))
    sums = torch.tensor([0, 33, 70])
    right = scan(cu_seqlens=sums)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        found = scan(cu_seqlens=sums)
    for ours, theirs in zip(found, right, strict=True):
        assert torch.equal(ours, theirs)


def test_nothing_is_changed_and_no_layout_is_asked_for():
    leaves = draw(2, 20, 4, 2, skip=1, states=2)
    before = [leaf.detach().clone() for leaf in leaves]
    right = run(partial(ssd_chunk_scan, chunk_size=8), leaves)
    turned = [
        leaf.detach().transpose(0, -1).contiguous().transpose(0, -1).requires_grad_()
        for leaf in leaves
    ]
    for ours, theirs in zip(run(partial(ssd_chunk_scan, chunk_size=8), turned), right, strict=True):
        assert torch.equal(ours, theirs)
    for leaf, old in zip(leaves, before, strict=True):
        assert torch.equal(leaf, old)


def _kept(leaves, **options):
    """Bytes saved for backward, each storage once."""
    kept = {}

    def pack(x):
        kept[x.untyped_storage().data_ptr()] = x.untyped_storage().nbytes()
        return x

    with saved_tensors_hooks(pack, lambda x: x):
        result = ssd_chunk_scan(*leaves, return_final_state=False, **options)
    assert result is not None
    return sum(kept.values())


@pytest.mark.parametrize("length", [1024, 4096])
def test_kept_are_the_arguments_and_the_state_before_every_eighth_chunk(length):
    """As the docstring says, and so linear in the length."""
    leaves, _ = _long(length, 1.0, torch.float32, features=64, state=32)
    held = sum(leaf.nbytes for leaf in leaves) + 2 * 64 * 32 * 4 * length // (8 * 64)
    assert _kept(leaves) == held
    documents = 8 * length
    assert _kept(leaves, cu_seqlens=torch.tensor([0, 100, 333])) == held + documents


@ranks(2)
def test_under_a_cut_a_few_states_more_are_kept_whatever_the_length():
    """And with documents another byte a token, besides the 8 that the scan keeps."""
    group, state = Mesh(cp=2).group("cp"), 4 * 2 * 64 * 32
    for sums in (None, [0, 100]):
        more = set()
        for length in (2048, 8192):
            leaves, _ = _long(length // 2, 1.0, torch.float32, features=64, state=32)
            documents = None if sums is None else torch.tensor([*sums, length])
            cut = SequenceCut(length, cu_seqlens=documents, group=group)
            told = 0 if sums is None else 9 * length // 2
            more.add(_kept(leaves, cut=cut) - _kept(leaves) - told)
        assert len(more) == 1 and 0 <= more.pop() < 4 * state


def _packed(leaves, sums):
    return run(partial(ssd_chunk_scan, chunk_size=8), leaves, cu_seqlens=sums)


def test_no_value_is_read_on_the_host():
    for states in (0, 3):
        leaves = draw(1, 30, 4, 2, skip=1, states=states)
        right = [x.shape for x in _packed(leaves, torch.tensor([0, 4, 4, 20]))]
        with FakeTensorMode(allow_non_fake_inputs=False) as mode:
            fake = [None if leaf is None else mode.from_tensor(leaf) for leaf in leaves]
            found = _packed(fake, torch.zeros(4, dtype=torch.int64))
        assert [x.shape for x in found] == right


@pytest.mark.parametrize("states", [False, True])
def test_one_graph_serves_many_packings(states):
    torch._dynamo.reset()
    counter = CompileCounterWithBackend("aot_eager")

    def scan(x, dt, A, B, C, D, state, sums):
        options = {"chunk_size": 8, "initial_state": state, "return_final_state": states}
        return ssd_chunk_scan(x, dt, A, B, C, D=D, cu_seqlens=sums, **options)

    compiled = torch.compile(scan, fullgraph=True, backend=counter)
    for index in range(20):
        lengths = [index % 5, 3 + index % 7, 9]
        leaves = draw(1, sum(lengths) + index % 3, 2, 1, skip=1, states=3 * states)
        results = []
        for function in (scan, compiled):
            y, final = function(*leaves, sums_of(lengths))
            loss = y.sin().sum() + (final.sin().sum() if states else 0)
            given = [leaf for leaf in leaves if leaf is not None]
            results.append((y, *torch.autograd.grad(loss, given)))
        for ours, right in zip(*results, strict=True):
            assert_close(ours, right, rtol=0, atol=1e-12)
    assert counter.frame_count <= 3


def test_wrong_arguments_are_refused():
    x, dt, A, B, C, *_ = draw(1, 8, 4, 2)
    right = {"x": x, "dt": dt, "A": A, "B": B, "C": C}
    wrong = {
        "x": (None, x[0], x.long(), [1.0]),
        "dt": (None, dt[0], dt[..., :2]),
        "A": (None, A[:2], A[None]),
        "B": (None, B[0], B[..., :0, :], B[:, :, [0, 1, 1]]),
        "C": (None, C[0], C[..., :2]),
        "D": (torch.zeros(3), torch.zeros(4, 2), torch.zeros(1, 4, 3), [1.0]),
        "chunk_size": no.NO_COUNTS,
        "initial_state": (torch.zeros(2, 4, 3, 4), torch.zeros(4, 3, 4), torch.zeros(1, 4, 4, 3)),
        "cu_seqlens": (torch.tensor([0, 9]), torch.tensor([1, 8]), torch.zeros(3)),
        "return_final_state": no.NO_FLAGS,
    }
    no.refused(ssd_chunk_scan, right, wrong, besides=("cut",))
    cut = SequenceCut(8, cu_seqlens=torch.tensor([0, 8]))
    with pytest.raises(ValueError, match="cu_seqlens must not come with a cut"):
        ssd_chunk_scan(*right.values(), cu_seqlens=torch.tensor([0, 8]), cut=cut)


# Documents of 24 tokens and more, so that they begin at a rank's first token, before, and behind.
PACKINGS = [([6, 6, 12], 0), ([5, 8, 11], 0), ([7, 5, 9], 3), ([0, 18, 0, 5], 1), ([2, 0, 1], 0)]


@ranks(1, 2, 4)
@pytest.mark.parametrize("kind", ["contiguous", "zigzag"])
def test_ranks_that_hold_pieces_give_what_one_process_gives(kind):
    group = Mesh(cp=dist.get_world_size()).group("cp")
    for number, (lengths, behind) in enumerate([*PACKINGS, (21, 0), (3, 0), (0, 0)]):
        _check_over_ranks(group, kind, lengths, behind, states=number % 3 > 0)


def _check_over_ranks(group, kind, lengths, behind, *, states):
    packed = isinstance(lengths, list)
    rows, length = (1, sum(lengths) + behind) if packed else (2, lengths)
    sums = sums_of(lengths) if packed else None
    count = len(lengths) if packed else rows
    leaves = draw(rows, length, 4, 2, skip=1, states=count * states)
    right, final, *grads = recurrence(leaves, cu_seqlens=sums)
    cut = SequenceCut(length, cu_seqlens=sums, group=group, kind=kind)
    mine = [index for start, stop in cut.pieces for index in range(start, stop)]
    part = [
        leaf if leaf is None or index in (2, 5, 6) else leaf[:, mine].detach().requires_grad_()
        for index, leaf in enumerate(leaves)
    ]
    y, our_final, *ours = run(partial(ssd_chunk_scan, chunk_size=4, cut=cut), part)
    close = partial(assert_close, rtol=0, atol=1e-9)
    close(y, right[:, mine])
    # The loss of final states is that of each rank's own; zeros elsewhere add nothing.
    close(group.all_reduce(our_final), final)
    for index, (one, other) in enumerate(zip(ours, grads, strict=True)):
        if index in (2, 5, 6):
            close(group.all_reduce(one), other)
        else:
            close(one, other[:, mine])


@ranks(2)
def test_ranks_send_one_message_whose_size_is_not_that_of_the_sequence():
    group = Mesh(cp=2).group("cp")
    for length in (64, 512):
        leaves = draw(1, length, 4, 2)
        cut = SequenceCut(2 * length, group=group)
        with Traffic() as forward:
            y, _ = ssd_chunk_scan(*leaves[:5], cut=cut)
        with Traffic() as backward:
            y.sum().backward()
        maps = 2 * (4 + 4 * 3 * 4 + 1)  # of two ranks: decays [H], a state [H P N], a digest
        assert forward.sizes == {"all_gather": [maps]}
        assert backward.sizes == {"reduce_scatter": [maps]}
