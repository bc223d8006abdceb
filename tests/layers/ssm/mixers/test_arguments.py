"""Mixers refuse what would be a wrong value, by the argument's name."""

import pytest
import torch

from megablocks_core.groups import Mesh
from megablocks_core.layers.ssm import MixerState
from megablocks_core.layers.ssm.mixers.arguments import check_padded, check_same_documents
from megablocks_core.parallel import SequenceCut
from megablocks_core.testing import ranks
from tests.layers.ssm.mixers.kinds import HIDDEN, KINDS, build, tokens
from tests.traffic import Traffic

each_kind = pytest.mark.parametrize("kind", KINDS)
by_heads = pytest.mark.parametrize("kind", ["Mamba2", "GatedDeltaNet"])
SIZES = {
    "Mamba1": ("inner_size", "state_size", "dt_rank"),
    "Mamba2": ("num_heads", "head_dim", "state_size", "num_groups", "norm_groups"),
    "GatedDeltaNet": ("num_key_heads", "num_value_heads", "key_dim", "value_dim"),
}
FLAGS = {
    "Mamba1": ("bias", "conv_bias"),
    "Mamba2": ("bias", "conv_bias", "norm_before_gate"),
    "GatedDeltaNet": (),
}
SUMS = torch.tensor([0, 4, 9])


@each_kind
def test_inputs_have_tokens_of_the_hidden_size(kind):
    mixer = build(kind)
    for x in (
        [1.0],
        None,
        torch.ones(HIDDEN),
        torch.ones(3, HIDDEN + 1),
        torch.ones(3, HIDDEN) > 0,
    ):
        for call in (mixer, mixer.prefill, lambda x: mixer.step(x, mixer.empty_state(3))):
            with pytest.raises(ValueError, match=r"^x\b"):
                call(x)
    with pytest.raises(ValueError, match=r"^x of shape \(1, 3, 8\) must be \[B H\]"):
        mixer.step(torch.ones(1, 3, HIDDEN), mixer.empty_state(3))


@each_kind
def test_states_are_those_of_the_rows(kind):
    mixer = build(kind)
    x_BTH = tokens(3, 2, HIDDEN, dtype=torch.float32)
    conv, ssm = mixer.empty_state(3)
    for state, name in (
        (None, "state"),
        ((conv, ssm), "state"),
        (MixerState(conv[:1], ssm), "state.conv"),
        (MixerState(conv[:, 1:], ssm), "state.conv"),
        (MixerState(conv, ssm[:1]), "state.ssm"),
        (MixerState(conv, ssm[..., :1]), "state.ssm"),
        (MixerState(conv, ssm.to("meta")), "state.ssm"),
        (MixerState(conv.long(), ssm), "state.conv.dtype"),
        (MixerState(conv, ssm > 0), "state.ssm.dtype"),
        (MixerState(conv, None), "state.ssm"),  # type: ignore[arg-type]
    ):
        with pytest.raises(ValueError, match=rf"^{name}\b"):
            mixer.step(x_BTH[:, 0], state)
        if state is not None:
            with pytest.raises(ValueError, match=rf"^{name}\b"):
                mixer.prefill(x_BTH, state=state)
    with pytest.raises(ValueError, match="^state.conv"):
        x_TH = tokens(1, 9, HIDDEN, dtype=torch.float32)
        mixer.prefill(x_TH, state=mixer.empty_state(1), cu_seqlens=SUMS)
    for rows in (-1, 1.5, "a"):
        with pytest.raises(ValueError, match="^rows="):
            mixer.empty_state(rows)


@each_kind
def test_sizes_are_whole_numbers(kind):
    for name in (*SIZES[kind], "conv_kernel", "chunk_size"):
        for size in (0, -2, 2.5, True, "4"):
            with pytest.raises(ValueError, match=f"^{name}="):
                build(kind, **{name: size})
    for bounds in (3, (0.1,), (0.1, torch.inf), ("a", "b"), None):
        with pytest.raises(ValueError, match="^time_step_range="):
            build(kind, time_step_range=bounds)


@each_kind
def test_options_are_flags_and_numbers(kind):
    for name in ("sequence_parallel", *FLAGS[kind]):
        for wrong in ("no", 1, None):
            with pytest.raises(ValueError, match=f"^{name}="):
                build(kind, **{name: wrong})
    for eps in (0.0, -1e-5, torch.nan, torch.inf, "a", None):
        with pytest.raises(ValueError, match="^norm_eps="):
            build(kind, norm_eps=eps)


@pytest.mark.parametrize(
    ("lengths", "stored", "message"),
    [
        ([0, 5, 9], [0, 4, 9], r"^cu_seqlens=.* no document more tokens"),
        ([0, 9], [0, 10], "^cu_seqlens_padded="),
        ([1, 9], [0, 9], "^cu_seqlens="),
        ([0.0, 9.0], [0, 9], "^cu_seqlens of"),
        ([0, 9], [0.0, 9.0], "^cu_seqlens_padded of"),
        ([0, 3, 9], [0, 9], "^cu_seqlens_padded of"),
    ],
)
def test_documents_fit_where_they_are_stored(lengths, stored, message):
    sums = {"cu_seqlens": torch.tensor(lengths), "cu_seqlens_padded": torch.tensor(stored)}
    with pytest.raises(ValueError, match=message):
        build("Mamba2")(tokens(9, HIDDEN, dtype=torch.float32), **sums)
    check_padded(torch.tensor([0, 3, 5]), torch.tensor([0, 4, 9]), length=9)


def test_a_cut_and_its_documents_agree():
    cut = SequenceCut(9, cu_seqlens=SUMS)
    check_same_documents(cut, None)
    check_same_documents(cut, SUMS.clone())
    mixer, x_TH = build("Mamba2"), tokens(9, HIDDEN, dtype=torch.float32)
    with pytest.raises(ValueError, match="^cut of other documents"):
        mixer(x_TH, cut=cut, cu_seqlens=torch.tensor([0, 5, 9]))
    for wrong in (9, SequenceCut(8), SequenceCut(18)):
        with pytest.raises(ValueError, match="^cut="):
            mixer(x_TH, cut=wrong)


@by_heads
@ranks(2)
def test_a_cut_gives_these_tokens(kind):
    """Before anything is sent; under sequence parallelism the ranks' tokens together."""
    cp, tp = Mesh(cp=2).group("cp"), Mesh(tp=2).group("tp")
    mixer = build(kind, cp=cp, context="heads")
    x_TH = tokens(9, HIDDEN, dtype=torch.float32)
    with Traffic() as traffic, pytest.raises(ValueError, match="^cut=.* give this rank 9 tokens"):
        mixer(x_TH, cut=SequenceCut(9, group=cp))
    halves = build(kind, tp=tp, sequence_parallel=True)
    halves(x_TH, cut=SequenceCut(18))
    with traffic, pytest.raises(ValueError, match="^cut=.* give this rank 18 tokens, not 9"):
        halves(x_TH, cut=SequenceCut(9))
    assert traffic.counts() == {}
