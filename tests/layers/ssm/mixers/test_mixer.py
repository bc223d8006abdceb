"""What holds for mixers of every kind: decoding, packing, compiling, copying."""

import copy
from functools import partial

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch._dynamo.utils import counters
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.testing import assert_close
from torch.utils.checkpoint import checkpoint

from megablocks_core.groups import Group, Mesh
from megablocks_core.layers.ssm import MixerState
from megablocks_core.parallel import SequenceCut
from megablocks_core.testing import ranks
from tests.layers.ssm.mixers.kinds import HIDDEN, KINDS, build, loss, tokens

each_kind = pytest.mark.parametrize("kind", KINDS)
# Compiling takes seconds; one kind stands for the others in the quick tier.
one_kind_quickly = pytest.mark.parametrize(
    "kind",
    [pytest.param(kind, marks=[pytest.mark.slow] * (kind != "Mamba2")) for kind in KINDS],
)
CU_SEQLENS = torch.tensor([0, 5, 5, 6, 9])


@each_kind
def test_chunks_equal_the_recurrence(kind):
    chunked, recurrent = _twins(kind)
    for x_TH, options in (
        (tokens(2, 9, HIDDEN), {}),
        (tokens(11, HIDDEN), {"cu_seqlens": CU_SEQLENS}),
        (tokens(3, 0, HIDDEN), {}),
    ):
        results = []
        for mixer in (chunked, recurrent):
            mixer.zero_grad()
            x = x_TH.clone().requires_grad_()
            y = mixer(x, **options)
            loss(y).backward()
            results.append([y, x.grad, *(_gradient(p) for p in mixer.parameters())])
        assert results[0][0].shape == x_TH.shape
        assert_close(*results, rtol=1e-9, atol=1e-9)


@each_kind
def test_token_by_token_is_the_whole(kind):
    mixer, _ = _twins(kind)
    x_BTH = tokens(2, 7, HIDDEN)
    whole, last = mixer.prefill(x_BTH)
    state, outputs = mixer.empty_state(2), []
    for token in range(7):
        y_BH, state = mixer.step(x_BTH[:, token], state)
        outputs.append(y_BH)
    assert_close(torch.stack(outputs, dim=1), whole)
    assert_close(whole, mixer(x_BTH))
    assert_close(state, last)


@each_kind
def test_a_prompt_may_be_split_anywhere(kind):
    mixer, _ = _twins(kind)
    x_BTH = tokens(2, 6, HIDDEN)
    whole, last = mixer.prefill(x_BTH)
    for at in range(7):
        first, state = mixer.prefill(x_BTH[:, :at])
        second, state = mixer.prefill(x_BTH[:, at:], state=state)
        assert_close(torch.cat((first, second), dim=1), whole)
        assert_close(state, last)


@each_kind
def test_states_of_documents_are_those_of_documents_alone(kind):
    mixer, _ = _twins(kind)
    x_TH = tokens(11, HIDDEN)
    y_TH, states = mixer.prefill(x_TH, cu_seqlens=CU_SEQLENS)
    going_on, _ = mixer.prefill(x_TH[:8], state=states, cu_seqlens=torch.tensor([0, 2, 4, 6, 8]))
    for number, (start, stop) in enumerate(zip(CU_SEQLENS, CU_SEQLENS[1:], strict=False)):
        alone, state = mixer.prefill(x_TH[None, start:stop])
        assert_close(y_TH[start:stop], alone[0])
        assert_close([part[number : number + 1] for part in states], list(state))
        place = slice(2 * number, 2 * number + 2)
        after, _ = mixer.prefill(x_TH[None, place], state=state)
        assert_close(going_on[place], after[0])


@each_kind
def test_a_state_is_never_changed(kind):
    mixer, _ = _twins(kind)
    _, state = mixer.prefill(tokens(2, 5, HIDDEN))
    kept = [part.clone() for part in state]
    mixer.step(tokens(2, HIDDEN), state)
    mixer.prefill(tokens(2, 3, HIDDEN), state=state)
    assert all(torch.equal(*pair) for pair in zip(state, kept, strict=True))


@each_kind
def test_f089_a_prompt_shorter_than_the_convolution_leaves_zeros_on_the_left(kind):
    mixer, _ = _twins(kind)
    _, state = mixer.prefill(tokens(1, 1, HIDDEN))
    assert state.conv.shape[1] == 3
    assert not state.conv[:, :2].any() and state.conv[:, 2].all()


@each_kind
def test_the_state_has_the_bytes_that_the_page_says(kind):
    expected = {
        "Mamba1": 3 * 16 * 2 + 16 * 3 * 4,
        "Mamba2": 3 * (8 + 2 * 6) * 2 + 4 * 2 * 3 * 4,
        "GatedDeltaNet": 3 * (2 * 12 + 16) * 2 + 8 * 3 * 2 * 4,
    }
    mixer = build(kind, dtype=torch.bfloat16)
    _, prefilled = mixer.prefill(tokens(5, 4, HIDDEN, dtype=torch.bfloat16))
    for state in (mixer.empty_state(5), prefilled):
        assert isinstance(state, MixerState)
        assert sum(part.nbytes for part in state) == 5 * expected[kind]
        assert (state.conv.dtype, state.ssm.dtype) == (torch.bfloat16, torch.float32)


@each_kind
def test_f100_storage_with_pads_equals_documents_alone(kind):
    mixer, _ = _twins(kind)
    x_TH = tokens(10, HIDDEN)
    real = [0, 1, 2, 4, 5]
    x_TH[[3, 6, 7, 8, 9]] = torch.inf
    leaf = x_TH.requires_grad_()
    y_TH = mixer(
        leaf, cu_seqlens=torch.tensor([0, 3, 5]), cu_seqlens_padded=torch.tensor([0, 4, 8])
    )
    packed = mixer(x_TH[real], cu_seqlens=torch.tensor([0, 3, 5]))
    assert_close(y_TH[real], packed)
    assert not y_TH[[3, 6, 7, 8, 9]].any()
    loss(y_TH).backward()
    assert leaf.grad[real].any() and not leaf.grad[[3, 6, 7, 8, 9]].any()
    assert all(parameter.grad.isfinite().all() for parameter in mixer.parameters())


@pytest.mark.parametrize("kind", ["Mamba1", "Mamba2"])
def test_outputs_at_pads_are_zero_or_the_last_bias(kind):
    mixer = build(kind, bias=True)
    sums = {"cu_seqlens": torch.tensor([0, 3, 5]), "cu_seqlens_padded": torch.tensor([0, 4, 8])}
    y_TH = mixer(tokens(9, HIDDEN, dtype=torch.float32), **sums)
    assert_close(y_TH[[3, 6, 7, 8]], mixer.get_parameter("out_proj.bias").expand(4, HIDDEN))


@ranks(2)
def test_pads_lie_where_they_are_when_ranks_hold_slices_of_the_tokens():
    tp = Mesh(tp=2).group("tp")
    torch.manual_seed(0)
    whole = build("Mamba2")
    torch.manual_seed(0)
    mixer = build("Mamba2", tp=tp, sequence_parallel=True)
    x_TH = tokens(8, HIDDEN, dtype=torch.float32)
    x_TH[[2, 3, 7]] = torch.inf
    sums = {"cu_seqlens": torch.tensor([0, 2, 5]), "cu_seqlens_padded": torch.tensor([0, 4, 8])}
    own = slice(4 * tp.rank, 4 * tp.rank + 4)
    y_TH = mixer(x_TH[own], **sums)
    assert y_TH.isfinite().all()
    assert_close(y_TH, whole(x_TH, **sums)[own])


@ranks(2)
def test_steps_of_cut_rows_are_steps_of_all_rows():
    tp = Mesh(tp=2).group("tp")
    torch.manual_seed(0)
    whole = build("Mamba2").double()
    torch.manual_seed(0)
    mixer = build("Mamba2", tp=tp, sequence_parallel=True).double()
    x_BH, own = tokens(4, HIDDEN), slice(2 * tp.rank, 2 * tp.rank + 2)
    states = [each.empty_state(4) for each in (mixer, whole)]
    for _ in range(3):
        y_BH, states[0] = mixer.step(x_BH[own], states[0])
        expected, states[1] = whole.step(x_BH, states[1])
        assert_close(y_BH, expected[own])


@each_kind
def test_copies_and_saved_tensors_are_the_same_mixer(kind):
    mixer, _ = _twins(kind)
    loaded = build(kind).double()
    loaded.load_state_dict(mixer.state_dict())
    for other in (copy.deepcopy(mixer), loaded):
        assert_close(other(tokens(6, HIDDEN)), mixer(tokens(6, HIDDEN)), rtol=0, atol=0)


@each_kind
def test_it_runs_where_no_value_can_be_read(kind):
    mixer, mode = build(kind), FakeTensorMode()
    for part in mixer.modules():
        for name, parameter in list(part.named_parameters(recurse=False)):
            setattr(part, name, nn.Parameter(mode.from_tensor(parameter.detach())))
    with mode:
        x_TH = torch.randn(9, HIDDEN, requires_grad=True)
        sums = torch.tensor([0, 4, 8])
        mixer(x_TH, cu_seqlens=sums // 2, cu_seqlens_padded=sums).sum().backward()
        y_TH, state = mixer.prefill(x_TH, cu_seqlens=sums)
        y_BH, _ = mixer.step(torch.randn(2, HIDDEN), state)
    assert (y_TH.shape, y_BH.shape) == ((9, HIDDEN), (2, HIDDEN))


@one_kind_quickly
@ranks(1, 2, timeout=300)
def test_it_compiles_whole(kind):
    tp = Mesh(tp=dist.get_world_size()).group("tp")
    mixer = build(kind, tp=tp)
    compiled = torch.compile(mixer, fullgraph=True, backend="aot_eager")
    results = []
    for call in (compiled, mixer):
        mixer.zero_grad()
        x_TH = tokens(9, HIDDEN, dtype=torch.float32).requires_grad_()
        y_TH = call(x_TH, cu_seqlens=torch.tensor([0, 2, 7]))
        loss(y_TH).backward()
        results.append([y_TH, x_TH.grad, *(p.grad for p in mixer.parameters())])
    assert_close(*results)


@one_kind_quickly
def test_twenty_packings_compile_at_most_three_times(kind):
    torch._dynamo.reset()
    mixer = build(kind)
    compiled = torch.compile(mixer, fullgraph=True, backend="aot_eager")
    before = counters["stats"]["unique_graphs"]
    for number in range(20):
        length = 8 + number % 5
        bounds = torch.linspace(0, length, 3 + number % 4).long()
        compiled(tokens(length, HIDDEN, dtype=torch.float32), cu_seqlens=bounds).sum().backward()
    assert counters["stats"]["unique_graphs"] - before <= 3


@each_kind
def test_it_is_computed_again_in_backward(kind):
    mixer, _ = _twins(kind)
    results = []
    for run in (mixer, partial(checkpoint, mixer, use_reentrant=False)):
        mixer.zero_grad()
        x_TH = tokens(11, HIDDEN).requires_grad_()
        loss(run(x_TH, cu_seqlens=CU_SEQLENS)).backward()
        results.append([x_TH.grad, *(p.grad for p in mixer.parameters())])
    assert_close(*results, rtol=0, atol=0)


def test_pieces_need_a_cut_over_their_ranks():
    cp = Group((0, 1))
    mixer = build("Mamba2", cp=cp)
    x_TH = tokens(4, HIDDEN, dtype=torch.float32)
    with pytest.raises(ValueError, match="cut=None must say how the row is cut over 2 ranks"):
        mixer(x_TH)
    with pytest.raises(ValueError, match="must be over cp="):
        build("Mamba2")(x_TH, cut=SequenceCut(8, group=cp))
    with pytest.raises(ValueError, match="cut must know the documents"):
        mixer(x_TH, cu_seqlens=CU_SEQLENS, cut=SequenceCut(8, group=cp))
    for call in (mixer.prefill, lambda x: mixer.step(x, mixer.empty_state(4))):
        with pytest.raises(ValueError, match="which sees whole rows"):
            call(x_TH)


def test_places_of_documents_without_their_lengths_raise():
    with pytest.raises(ValueError, match="cu_seqlens_padded must come with cu_seqlens"):
        build("Mamba2")(torch.zeros(4, HIDDEN), cu_seqlens_padded=torch.tensor([0, 4]))


def test_a_mixer_takes_any_number_of_leading_dimensions():
    mixer = build("Mamba2")
    x = tokens(2, 3, 5, HIDDEN, dtype=torch.float32)
    assert_close(mixer(x)[1, 2], mixer(x[1, 2]))


def _gradient(parameter):
    """Zeros where a loop over no tokens used nothing."""
    return torch.zeros_like(parameter) if parameter.grad is None else parameter.grad


def _twins(kind):
    """A mixer of random values over chunks and one over recurrences, in float64."""
    torch.manual_seed(0)
    chunked, recurrent = build(kind).double(), build(kind, recurrent=True).double()
    with torch.no_grad():
        for parameter in chunked.parameters():
            parameter.add_(torch.randn_like(parameter) / 5)
    recurrent.load_state_dict(chunked.state_dict())
    return chunked, recurrent
