"""``DataParallel`` against torch's ``DistributedDataParallel``, two ranks, one thread each.

A step is a forward pass, a loss and a backward pass, after which gradients are reduced; they are
first asserted to be the same bits. The model is a Llama of two layers in float32.
"""

from collections.abc import Iterator
from copy import deepcopy
from typing import Any

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from transformers import LlamaConfig, LlamaForCausalLM

from benchmarks.timing import Work, on_ranks, report, take_turns
from megablocks_core.groups import Group
from megablocks_core.parallel import DataParallel

_NAME = "parallel/data_parallel"
_CASES = (
    ({"hidden": 256, "tokens": 128}, 1.0),
    ({"hidden": 256, "tokens": 512}, 1.05),
    ({"hidden": 1024, "tokens": 128}, 1.0),
)


def bench(group: Group) -> None:
    """Both wrappers around the same model, each rank with its own tokens."""
    for case, limit in _CASES:
        whole = _llama(case["hidden"])
        ours, peer = DataParallel(deepcopy(whole), group=group), _ddp(deepcopy(whole), group)
        generator = torch.Generator().manual_seed(group.rank)
        tokens = torch.randint(1024, (1, case["tokens"]), generator=generator)
        steps = [_step(model, tokens) for model in (ours, peer)]
        for _ in range(3):  # both change their buckets after the first step
            for step in steps:
                step()
            for mine, theirs in zip(_gradients(ours), _gradients(peer), strict=True):
                assert torch.equal(mine, theirs)
        times = take_turns(*steps, group=group)
        report(times, benchmark=_NAME, peer="torch DDP", case=case, limit=limit, group=group)


def _llama(hidden: int) -> nn.Module:
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=1024,
        hidden_size=hidden,
        intermediate_size=4 * hidden,
        num_hidden_layers=2,
        num_attention_heads=hidden // 64,
        num_key_value_heads=hidden // 64,
    )
    return LlamaForCausalLM(config)


def _ddp(whole: nn.Module, group: Group) -> nn.Module:
    return DistributedDataParallel(whole, process_group=group.pg)


def _gradients(model: nn.Module) -> Iterator[Any]:
    return (parameter.grad for parameter in model.parameters())


def _step(model: nn.Module, tokens: torch.Tensor) -> Work:
    def step() -> None:
        model.zero_grad()
        model(input_ids=tokens, labels=tokens).loss.backward()

    return step


def main() -> None:
    """Print one JSON line a case."""
    on_ranks(bench)


if __name__ == "__main__":
    main()
