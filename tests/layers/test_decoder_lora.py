"""A decoder with adapters equals one process at any size."""

import pytest
import torch
import torch.distributed as dist
from torch import nn

from megablocks_core.groups import Group, Mesh
from megablocks_core.layers import Decoder, DecoderSpec
from megablocks_core.parallel import add_lora
from megablocks_core.testing import assert_parallel_equivalence, ranks
from tests.parallel.lora_models import fill

_TOKENS = torch.arange(14).view(2, 7) * 7
_SPEC = DecoderSpec(97, 32, 48, 2, 4, 2, 8, qk_norm=True, family="qwen3")


class _Logits(nn.Module):
    """A decoder with whole logits."""

    def __init__(self, group, sequence_parallel):
        super().__init__()
        mesh = Mesh(tp=group.size) if group.size > 1 else None
        self.decoder = Decoder(_SPEC, mesh=mesh, sequence_parallel=sequence_parallel)
        add_lora(self.decoder, ["embed_tokens", "*_proj", "lm_head"], rank=3, alpha=6)
        fill(self.decoder)

    def forward(self, tokens):
        return self.decoder(tokens, gather_logits=True).logits


def _loss(logits):
    weights = torch.linspace(-1, 1, logits.numel(), dtype=logits.dtype)
    return (logits.reshape(-1) * weights).sum() + logits.square().mean()


@ranks(1, 2, 4)
@pytest.mark.parametrize("sequence_parallel", [False, True])
def test_decoders_with_adapters_equal_one_process(sequence_parallel):
    assert_parallel_equivalence(
        lambda group: _Logits(group, sequence_parallel),
        {"tokens": _TOKENS},
        group=Group.of(dist.group.WORLD),
        loss=_loss,
        same_start=True,
    )
