"""Cut a Hugging Face model over tensor-parallel ranks with one call, and train it.

    python examples/swap_hf_llama.py
    torchrun --nproc-per-node 2 examples/swap_hf_llama.py

Prints the same losses on any number of ranks. The model is a tiny random Llama; put
`AutoModelForCausalLM.from_pretrained(...)` in its place.
"""

import os

import torch
import torch.distributed as dist
from transformers import LlamaConfig, LlamaForCausalLM

from megablocks_core.groups import Group, Mesh
from megablocks_core.parallel import clip_grad_norm_, tensor_parallelize


def train(tp: Group, *, steps: int = 5) -> list[float]:
    """Steps on one batch; the losses."""
    torch.manual_seed(0)  # every rank draws the same whole model before it is cut
    model = LlamaForCausalLM(
        LlamaConfig(
            vocab_size=1000,
            hidden_size=128,
            intermediate_size=256,
            num_hidden_layers=2,
            num_attention_heads=8,
            num_key_value_heads=4,
        )
    )
    report = tensor_parallelize(model, group=tp)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    tokens = torch.randint(1000, (4, 64))

    losses = []
    for step in range(steps):
        loss = model(input_ids=tokens, labels=tokens).loss
        loss.backward()
        norm = clip_grad_norm_(model, 1.0)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
        if tp.rank == 0:
            print(f"step {step}  loss {loss.item():.4f}  gradient norm {norm.item():.4f}")
    if tp.rank == 0:
        print(f"ranks: {tp.size}; cut {len(report.cut)} parameters, kept {len(report.whole)} whole")
    return losses


def main() -> None:
    """Train on the ranks that torchrun started, or on one."""
    ranks = int(os.environ.get("WORLD_SIZE", "1"))
    if ranks > 1:
        dist.init_process_group("gloo")  # "nccl" on GPUs
    train(Mesh(tp=ranks).group("tp"))
    if ranks > 1:
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
