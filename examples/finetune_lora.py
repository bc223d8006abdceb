"""Fine-tune a Hugging Face model with low-rank adapters: only they are trained and saved.

    python examples/finetune_lora.py out/demo/hf --data texts.jsonl
    torchrun --nproc-per-node 2 examples/finetune_lora.py out/demo/hf --data texts.jsonl --tp 2

The model is a folder in Hugging Face's format, its tokenizer the folder's own, or bytes if it
has none. In the end out/lora/adapter is a folder that peft reads, and out/lora/hf the model with
the adapters merged into its weights.
"""

import argparse
import os
import sys
from pathlib import Path

import torch
import torch.distributed as dist

from megablocks_core import data, export, parallel
from megablocks_core.auto import decoder_from_hf
from megablocks_core.groups import Group, Mesh, together
from megablocks_core.layers import Decoder
from megablocks_core.train import (
    Metrics,
    RunFolder,
    Scheduled,
    cosine_schedule,
    parameter_groups,
    run_record,
)


def parse(arguments: list[str] | None = None) -> argparse.Namespace:
    """The options, each with its default."""
    raw = argparse.RawTextHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=raw)
    add = parser.add_argument
    add("model", type=Path, help="folder of the model")
    add("--data", type=Path, nargs="+", required=True, help="files, folders, .jsonl")
    add("--out", type=Path, default=Path("out/lora"), help="folder of the run")
    add("--tp", type=int, default=1, help="tensor-parallel ranks; the rest is data parallel")
    add("--dtype", choices=["float32", "float64", "bfloat16"], help="default the folder's")
    add("--layers", nargs="+", default=["*_proj"], help="patterns of layers to adapt")
    add("--rank", type=int, default=8)
    add("--sequence-length", type=int, default=256)
    add("--batch-size", type=int, default=8, help="sequences in a step, all ranks")
    add("--micro-batch-size", type=int, default=4, help="sequences at once, a rank")
    add("--steps", type=int, default=50)
    add("--learning-rate", type=float, default=1e-3)
    add("--seed", type=int, default=1)
    return parser.parse_args(arguments)


def require_new(out: Path) -> None:
    """Refuse a folder that a run before has saved to, before any training and not after it."""
    for saved in (out / "adapter", out / "hf"):
        if saved.exists():
            raise ValueError(f"--out={out} must be a new folder: {saved} is there already")


def tokenize(options: argparse.Namespace, *, vocab_size: int) -> None:
    """Write the texts as tokens, each with an end."""
    texts, prefix = data.read_texts(*options.data), options.out / "tokens"
    options.out.mkdir(parents=True, exist_ok=True)
    if (options.model / "tokenizer_config.json").exists():
        from transformers import AutoTokenizer

        tokenizer = AutoTokenizer.from_pretrained(options.model, local_files_only=True)
        if tokenizer.eos_token_id is None:
            raise ValueError(f"{options.model} must have a tokenizer with an eos_token")
        with data.IndexedDatasetBuilder(prefix, dtype=data.smallest_dtype(vocab_size)) as builder:
            for text in texts:
                builder.add_document([*tokenizer.encode(text), tokenizer.eos_token_id])
    elif vocab_size >= data.VOCAB_SIZE:
        data.write_byte_documents(texts, prefix)
    else:
        raise ValueError(f"{options.model} must have a tokenizer or a vocabulary of bytes")


def train(options: argparse.Namespace) -> Decoder:
    """Adapt the model, and train the adapters on every rank."""
    mesh = Mesh(tp=options.tp)
    dp, world = mesh.group("dp"), mesh.group("tp", "dp")
    dtype = getattr(torch, options.dtype) if options.dtype else None
    model = decoder_from_hf(options.model, mesh=mesh, dtype=dtype)
    with together("reading the texts", group=world, raises=OSError):
        if world.rank == 0:
            require_new(options.out)
            tokenize(options, vocab_size=model.spec.vocab_size)
    samples = data.GPTDataset(
        data.IndexedDataset(options.out / "tokens"),
        options.sequence_length,
        seed=options.seed,
        num_samples=options.steps * options.batch_size,
    )
    batches = data.Loader(
        samples,
        global_batch_size=options.batch_size,
        micro_batch_size=min(options.micro_batch_size, max(1, options.batch_size // dp.size)),
        group=dp,
    )

    adapted = parallel.add_lora(
        model, options.layers, rank=options.rank, alpha=2 * options.rank, seed=options.seed
    )
    optimizer = torch.optim.AdamW(parameter_groups(model, {"lr": options.learning_rate}))
    rate = Scheduled(optimizer, cosine_schedule(len(samples), warmup=len(samples) // 10))
    metrics = Metrics("loss", "grad_norm", group=dp)
    spec = {**model.spec.to_hf(), "adapted_layers": adapted}
    record = run_record(mesh=mesh.describe(), spec=spec, optimizer=optimizer, schedule=rate)
    with RunFolder(options.out, record=record, group=world) as run:
        for step, (micro_batches, num_tokens) in enumerate(batches):
            for batch in micro_batches:
                rows = batch["tokens"].view(-1, options.sequence_length)
                losses = parallel.vocab_parallel_cross_entropy(
                    model(rows).logits,
                    batch["labels"].view(rows.shape),
                    vocab_size=model.spec.vocab_size,
                    reduction="none",
                    group=model.tp,
                )
                mask = batch["loss_mask"].view(rows.shape)
                loss_sum = (losses * mask).sum()
                (loss_sum / num_tokens).backward()
                metrics.add("loss", loss_sum, mask.sum())
            parallel.reduce_gradients(model, group=dp, reduction="sum")
            metrics.add("grad_norm", parallel.clip_grad_norm_(model, 1.0))
            rate.set(batches.consumed)
            optimizer.step()
            optimizer.zero_grad()
            values = metrics.reduce()
            run.write(step, values)
            if world.rank == 0:
                print(f"step {step}  loss {values['loss']:.4f}", flush=True)
    return model


def write(model: Decoder, out: Path, *, group: Group) -> None:
    """Save the adapters alone, and the model with them merged in."""
    parallel.save_lora(model, out / "adapter", group=group)
    parallel.merge_lora(model)
    parallel.remove_lora(model)
    export.save_hf(model, out / "hf", group=group)


def main() -> None:
    """Train on the ranks that torchrun started, or on one, and save."""
    options = parse()
    if int(os.environ.get("WORLD_SIZE", "1")) > 1:
        dist.init_process_group("gloo")  # "nccl" on GPUs
    world = Mesh().group("dp")
    try:
        write(train(options), options.out, group=world)
    except (ValueError, OSError) as error:  # what a user can mend
        sys.exit(f"rank {world.rank}: {error}")
    if world.size > 1:
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
