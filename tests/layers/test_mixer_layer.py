"""Hybrid models: one mixer a block, the same at any layout, packed or one by one."""

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch._dynamo.testing import CompileCounterWithBackend
from torch.nn import functional as F
from torch.testing import assert_close

from megablocks_core.groups import Mesh
from megablocks_core.layers import (
    MLP,
    Attention,
    Decoder,
    DecoderSpec,
    DeltaSpec,
    GatedMLP,
    Mamba1Spec,
    Mamba2Spec,
    MixerLayer,
    MoESpec,
    RMSNorm,
)
from megablocks_core.layers.moe import MoE
from megablocks_core.layers.ssm import GatedDeltaNet, Mamba1, Mamba2
from megablocks_core.testing import assert_parallel_equivalence, ranks

F64 = torch.float64
TOKENS = torch.arange(22).view(2, 11) * 7 % 50
MAMBA, DELTA, MOE = Mamba2Spec(8, 4, 8, 2), DeltaSpec(4, 8, 4, 4), MoESpec(4, 2, 8)


def _spec(pattern: str, **fields: object) -> DecoderSpec:
    heads = (4, 2, 8) if "*" in pattern else (0, 0, 0)
    specs = {
        "mamba": MAMBA if "M" in pattern else None,
        "delta": DELTA if "G" in pattern else None,
        "moe": MOE if "E" in pattern else None,
    }
    blocks = pattern.replace("|", "")
    sizes = (50, 32, 24 if "-" in pattern else 0, len(blocks))
    return DecoderSpec(*sizes, *heads, pattern=pattern, **(specs | fields))


def _seeded(spec: DecoderSpec, **options: object) -> Decoder:
    torch.manual_seed(0)
    return Decoder(spec, dtype=F64, **options)


def test_each_letter_is_a_kind_of_block():
    decoder = Decoder(_spec("M*-|EG"), device="meta")
    kinds = [type(layer.mixer) for layer in decoder.model.layers]
    assert kinds == [Mamba2, Attention, GatedMLP, MoE, GatedDeltaNet]
    other = _spec("M-", mamba=Mamba1Spec(16, 4, 2), gated_mlp=False)
    kinds = [type(layer.mixer) for layer in Decoder(other, device="meta").model.layers]
    assert kinds == [Mamba1, MLP]


@ranks(1, 2, 4)
@pytest.mark.parametrize("sequence_parallel", [False, True])
def test_it_equals_one_process(sequence_parallel):
    """Eleven tokens, which no number of ranks divides."""
    mesh, spec = Mesh(tp=dist.get_world_size()), _spec("M*-G", residual_scale=0.5, rope=False)
    assert_parallel_equivalence(
        lambda group: _Logits(
            Decoder(
                spec,
                mesh=mesh if group.size > 1 else None,
                sequence_parallel=sequence_parallel,
            )
        ),
        TOKENS,
        group=mesh.group("tp"),
        loss=lambda logits: (logits.sin() * torch.arange(50)).sum(),
        same_start=True,
    )


@ranks(1, 2)
def test_documents_equal_documents_alone():
    """Also where pads follow each document, and where the row is padded inside."""
    packed = TOKENS.view(-1)[:9]
    storage = F.pad(packed, (0, 1))[[0, 1, 2, 9, 3, 9, 4, 5, 6, 7, 8]]
    cu_seqlens, padded = torch.tensor([0, 3, 4, 9]), torch.tensor([0, 4, 6, 11])
    real = [0, 1, 2, 4, 6, 7, 8, 9, 10]
    mesh = Mesh(tp=dist.get_world_size())
    decoder = _seeded(_spec("M*EG"), mesh=mesh, sequence_parallel=True)

    def logits(tokens: torch.Tensor, **documents: torch.Tensor) -> torch.Tensor:
        return decoder(tokens, gather_logits=True, **documents).logits

    alone = torch.cat([logits(document) for document in packed.split([3, 1, 5])])
    together = logits(packed, cu_seqlens=cu_seqlens)
    apart = logits(storage, cu_seqlens=cu_seqlens, cu_seqlens_padded=padded)[real]
    assert_close(together, alone, rtol=0, atol=1e-10)
    assert_close(apart, alone, rtol=0, atol=1e-10)


def test_routings_and_losses_are_those_of_experts():
    decoder = _seeded(_spec("ME-E"))
    output = decoder(TOKENS)
    assert len(output.losses["load_balance"]) == len(output.tokens_per_expert) == 2


def test_the_residual_stream_is_wide_if_the_spec_says_so():
    torch.manual_seed(0)
    seen = []
    decoder = Decoder(_spec("M-M", float32_residual=True), dtype=torch.bfloat16)
    for layer in decoder.model.layers:
        layer.register_forward_hook(lambda _, inputs, output: seen.append(output.dtype))
    assert decoder(TOKENS).logits.dtype == torch.bfloat16
    assert seen == [torch.float32] * 3


def test_one_seed_is_one_model_and_state_space_values_are_their_own():
    first, second = _seeded(_spec("M*")), _seeded(_spec("M*"))
    first.reset_parameters(seed=3)
    second.reset_parameters(seed=3)
    mixer = first.get_submodule("model.layers.0.mixer")
    assert isinstance(mixer, Mamba2)
    assert_close(first.state_dict(), second.state_dict(), rtol=0, atol=0)
    assert torch.equal(mixer.D, torch.ones_like(mixer.D))
    rates = mixer.A_log.exp()
    assert rates.min() >= 1
    assert rates.max() <= 16
    assert mixer.get_parameter("in_proj.weight").std().item() == pytest.approx(0.02, rel=0.1)


def test_dropout_needs_the_name_of_a_stream():
    with pytest.raises(ValueError, match="stream"):
        MixerLayer(4, mixer=nn.Identity(), norm=RMSNorm, hidden_dropout=0.5)


class _Logits(nn.Module):
    """A decoder that gives nothing but its gathered logits."""

    def __init__(self, decoder: Decoder) -> None:
        super().__init__()
        self.decoder = decoder

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.decoder(tokens, gather_logits=True).logits


@pytest.mark.slow
def test_packings_recompile_at_most_twice():
    torch._dynamo.reset()
    counter = CompileCounterWithBackend("aot_eager")
    decoder = _seeded(_spec("M*-G"))
    compiled = torch.compile(decoder, fullgraph=True, backend=counter)
    for packing in ([3, 4], [2, 2, 5], [9], [1, 1, 1, 1, 7], [6, 3, 2, 8], [4, 12]):
        cu_seqlens = F.pad(torch.tensor(packing).cumsum(0), (1, 0))
        tokens = torch.arange(sum(packing) + 1) * 7 % 50
        results = []
        for call in (compiled, decoder):
            decoder.zero_grad()
            logits = call(tokens, cu_seqlens=cu_seqlens, max_seqlen=max(packing)).logits
            logits.square().sum().backward()
            results.append([logits, *(p.grad for p in decoder.parameters())])
        assert_close(*results)
    assert counter.frame_count <= 3


@ranks(2, timeout=300)
def test_it_compiles_whole_on_two_ranks():
    decoder = _seeded(_spec("MG"), mesh=Mesh(tp=2), sequence_parallel=True)
    compiled = torch.compile(decoder, fullgraph=True, backend="aot_eager")
    results = []
    for call in (compiled, decoder):
        decoder.zero_grad()
        logits = call(TOKENS, gather_logits=True).logits
        logits.square().sum().backward()
        results.append([logits, *(p.grad for p in decoder.parameters())])
    assert_close(*results)
