"""A Llama cut by ``tensor_parallelize`` against the same model cut by transformers' own plan.

A step is a forward pass, the model's own loss and a backward pass, on two ranks. Both give whole
logits, and every gradient of one is the other's.
"""

from copy import deepcopy

import torch
from torch import Tensor, nn
from transformers import LlamaConfig, LlamaForCausalLM

from benchmarks import peers
from benchmarks.timing import Work, on_ranks, report, take_turns
from megablocks_core.groups import Group
from megablocks_core.parallel import tensor_parallelize


def bench(group: Group) -> None:
    """Models of two layers; the wide one is measured in fewer rounds."""
    for hidden, tokens, rounds, repeats, limit in ((256, 128, 21, 4, 0.8), (2048, 256, 11, 1, 1.0)):
        ours = _llama(hidden)
        peer = peers.transformers_model(deepcopy(ours), group=group)
        tensor_parallelize(ours, group=group)
        ids = torch.randint(1024, (1, tokens), generator=torch.Generator().manual_seed(0))
        steps = [_step(model, ids) for model in (ours, peer)]
        for mine, theirs in zip(steps[0](), steps[1](), strict=True):
            peers.assert_close_by_norm(mine, theirs)
        peers.assert_equal_gradients(ours, peer)
        report(
            take_turns(*steps, repeats=repeats, rounds=rounds, group=group),
            benchmark="parallel/tensor_parallelize",
            peer=peers.TRANSFORMERS,
            case={"model": "llama", "hidden": hidden, "tokens": tokens},
            limit=limit,
            group=group,
        )


def _llama(hidden: int) -> LlamaForCausalLM:
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=1024,
        hidden_size=hidden,
        intermediate_size=hidden * 11 // 4,
        num_hidden_layers=2,
        num_attention_heads=hidden // 64,
        num_key_value_heads=hidden // 128,
    )
    return LlamaForCausalLM(config)


def _step(model: nn.Module, ids: Tensor) -> Work:
    def step() -> tuple[Tensor, Tensor]:
        model.zero_grad()
        output = model(input_ids=ids, labels=ids)
        output.loss.backward()
        return output.loss, output.logits

    return step


def main() -> None:
    """Print one JSON line a case."""
    on_ranks(bench)


if __name__ == "__main__":
    main()
