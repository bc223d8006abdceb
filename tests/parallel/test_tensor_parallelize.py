"""A model cut in place computes what it did before: outputs, losses, gradients, norms, steps."""

import pytest
import torch
import torch.distributed as dist
from torch.testing import assert_close

from megablocks_core.groups import Group
from megablocks_core.parallel import tensor_parallelize
from megablocks_core.testing import assert_parallel_equivalence, ranks
from tests.parallel.tiny_models import tiny_model

_TOKENS = torch.arange(16).view(2, 8) * 7 % 101


def _world() -> Group:
    return Group.of(dist.group.WORLD)


def _loss(output):
    weights = torch.linspace(-1, 1, output.logits.numel(), dtype=output.logits.dtype)
    return (output.logits.reshape(-1) * weights).sum() + output.logits.square().mean()


@ranks(1, 2, 4)
@pytest.mark.parametrize("sequence_parallel", [False, True])
@pytest.mark.parametrize("kind", ["llama", "qwen3", "gemma3", "mixtral"])
def test_transformers_models_equal_one_process(kind, sequence_parallel):
    def build(group):
        model = tiny_model(kind, tied=kind == "gemma3")
        tensor_parallelize(model, group=group, sequence_parallel=sequence_parallel)
        return model

    assert_parallel_equivalence(
        build, {"input_ids": _TOKENS}, group=_world(), loss=_loss, same_start=True
    )
