"""Pretrain a small language model on text, from parts: the file to copy and change.

    python examples/pretrain_gpt.py --out out/run
    torchrun --nproc-per-node 2 examples/pretrain_gpt.py --out out/run --tp 2

The text is the Python standard library's source, as bytes, unless --data names files, folders
or JSON lines. A run goes on from the newest checkpoint in its folder, at any layout: tensor
parallel, data parallel or both, with the same data, loss curve and weights.
"""

import argparse
import math
import os
import sys
import time
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import xxhash
from torch import Tensor

from megablocks_core import ckpt, data, export, parallel
from megablocks_core.groups import Group, Mesh, logical_shape, marks, together
from megablocks_core.layers import Decoder, DecoderSpec
from megablocks_core.train import (
    Metrics,
    Progress,
    RunFolder,
    StepTimer,
    evaluate,
    matmul_peak,
    run_record,
)


def parse(arguments: list[str] | None = None) -> argparse.Namespace:
    """The options, each with its default."""
    raw = argparse.RawTextHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=raw)
    add = parser.add_argument
    add("--out", type=Path, default=Path("out/run"), help="folder of the run")
    add("--data", type=Path, nargs="*", default=[], help="files, folders, .jsonl")
    add("--max-bytes", type=int, default=8_000_000, help="of text to learn from")
    add("--tp", type=int, default=1, help="tensor-parallel ranks; the rest is data parallel")
    add("--sequence-parallel", action="store_true", help="cut tokens over the tp ranks too")
    add("--dtype", default="float32", choices=["float32", "float64", "bfloat16"])
    add("--hidden-size", type=int, default=192)
    add("--layers", type=int, default=4)
    add("--heads", type=int, default=6)
    add("--kv-heads", type=int, default=2)
    add("--sequence-length", type=int, default=256)
    add("--batch-size", type=int, default=16, help="sequences in a step, all ranks")
    add("--micro-batch-size", type=int, default=8, help="sequences at once, a rank")
    add("--steps", type=int, default=300)
    add("--stop-after", type=int, help="end here, short of --steps, and export nothing")
    add("--learning-rate", type=float, default=3e-3)
    add("--save-every", type=int, default=50)
    add("--evaluate-every", type=int, default=25)
    add("--evaluate-steps", type=int, default=20, help="batches to validate on")
    add("--sample-length", type=int, default=300, help="bytes to write in the end")
    add("--seed", type=int, default=1)
    add("--price-per-hour", type=float, help="of all machines, for the report")
    add("--timeout", type=float, default=300, help="seconds to wait for another rank")
    return parser.parse_args(arguments)


def model_spec(options: argparse.Namespace) -> DecoderSpec:
    """A Llama with grouped queries and a tied head; its feed-forward layers are 8/3 as wide."""
    end, length = data.END_OF_DOCUMENT, options.sequence_length
    return DecoderSpec(
        vocab_size=data.VOCAB_SIZE,
        hidden_size=options.hidden_size,
        ffn_size=64 * math.ceil(options.hidden_size * 8 / 3 / 64),
        num_layers=options.layers,
        num_heads=options.heads,
        num_kv_heads=options.kv_heads,
        head_dim=options.hidden_size // options.heads,
        tied=True,
        extra={"max_position_embeddings": length, "bos_token_id": end, "eos_token_id": end},
    )


def datasets(options: argparse.Namespace, world: Group) -> tuple[data.GPTDataset, data.GPTDataset]:
    """Samples to learn from and to validate on; the first rank tokenizes when a run begins."""
    prefix = options.out / "tokens"
    with together("reading the text", group=world, raises=OSError):
        if world.rank == 0 and not (options.out / "checkpoints").exists():
            options.out.mkdir(parents=True, exist_ok=True)
            texts = data.read_texts(*(options.data or data.standard_library()))
            pieces = data.shuffled_pieces(texts, max_bytes=options.max_bytes)
            data.write_byte_documents(pieces, prefix, overwrite=True)
    corpus = data.IndexedDataset(prefix)
    splits = data.split_documents(corpus.num_documents, "95,5", names=("train", "valid"))
    sampled = partial(data.GPTDataset, corpus, options.sequence_length, seed=options.seed)
    return (
        sampled(split=splits["train"], num_samples=options.steps * options.batch_size),
        sampled(split=splits["valid"], num_samples=options.evaluate_steps * options.batch_size),
    )


def loss_of(model: Decoder, batch: dict[str, Any], *, length: int) -> tuple[Tensor, Tensor]:
    """Sum of the tokens' losses, and how many there are; the batch is rows of ``length``."""
    rows = batch["tokens"].view(-1, length)
    losses = parallel.vocab_parallel_cross_entropy(
        model(rows).logits,
        batch["labels"].view(rows.shape),
        vocab_size=model.spec.vocab_size,
        reduction="none",
        group=model.tp,
    )
    mask = batch["loss_mask"].view(rows.shape)
    return (losses * mask).sum(), mask.sum()


def learning_rate(step: int, options: argparse.Namespace) -> float:
    """Rise over the first twentieth of the steps, then half a cosine down to a tenth."""
    warmup = max(1, options.steps // 20)
    if step < warmup:
        return options.learning_rate * (step + 1) / warmup
    done = (step - warmup) / max(1, options.steps - warmup)
    return options.learning_rate * (0.55 + 0.45 * math.cos(math.pi * done))


def flops_per_token(model: Decoder, length: int) -> float:
    """Forward and backward: 6 a weight, and the scores and values of causal attention."""
    weights = sum(math.prod(logical_shape(part, specs)) for _, part, specs in marks(model))
    spec = model.spec
    return 6 * weights + 6 * spec.num_layers * spec.num_heads * spec.head_dim * length


def save(folder: Path, state: dict[str, Any], *, group: Group) -> None:
    """Write a checkpoint; a damaged one of this name, which the run passed over, moves aside."""
    if group.rank == 0 and folder.exists():
        folder.rename(folder.with_name(f".{folder.name}.damaged.{time.time_ns()}"))
    ckpt.save(folder, state, group=group)


def train(options: argparse.Namespace) -> Decoder:
    """Train from the newest checkpoint, or from the start, to the end."""
    mesh = Mesh(tp=options.tp, timeout=timedelta(seconds=options.timeout))
    dp, world = mesh.group("dp"), mesh.group("tp", "dp")
    train_set, valid_set = datasets(options, world)
    own_batch = max(1, options.batch_size // dp.size)
    batches_of = partial(
        data.Loader,
        global_batch_size=options.batch_size,
        micro_batch_size=min(options.micro_batch_size, own_batch),
        group=dp,
    )
    torch.manual_seed(options.seed)  # one seed gives one model, however it is cut
    dtype, cut_tokens = getattr(torch, options.dtype), options.sequence_parallel
    model = Decoder(model_spec(options), mesh=mesh, sequence_parallel=cut_tokens, dtype=dtype)
    optimizer = torch.optim.AdamW(model.parameters(), betas=(0.9, 0.95), weight_decay=0.1)
    state = {"model": model, "optimizer": optimizer, "step": 0, "consumed": 0}
    ckpt.load_latest(options.out / "checkpoints", state, group=world)
    first, last = state["step"], min(options.steps, options.stop_after or options.steps)
    batches = batches_of(train_set, consumed=state["consumed"])

    loss = partial(loss_of, length=options.sequence_length)
    metrics = Metrics("loss", "grad_norm", group=dp)
    timer = StepTimer(sample_every=20, group=world)
    progress = Progress(options.steps, start=first, group=world)
    record = run_record(
        label=f"tp={options.tp}, dp={dp.size}",
        mesh=mesh.describe(),
        spec=model.spec.to_hf(),
        data=xxhash.xxh3_128_hexdigest((options.out / "tokens.bin").read_bytes()),
        tokenizer="bytes",
        flops_per_token=flops_per_token(model, options.sequence_length),
        peak_flops=matmul_peak(group=world),
        price_per_hour=options.price_per_hour,
    )
    with RunFolder(options.out, record=record, step=first, group=world) as run:
        for step in range(first, last):
            with timer("data"):
                micro_batches, num_tokens = next(batches)
            for batch in micro_batches:
                with timer("forward"):
                    loss_sum, count = loss(model, batch)
                with timer("backward"):
                    (loss_sum / num_tokens).backward()
                metrics.add("loss", loss_sum, count)
            with timer("reduction"):
                parallel.reduce_gradients(model, group=dp, reduction="sum")
                metrics.add("grad_norm", parallel.clip_grad_norm_(model, 1.0))
            with timer("optimizer"):
                optimizer.param_groups[0]["lr"] = learning_rate(step, options)
                optimizer.step()
                optimizer.zero_grad()
            own_tokens = sum(batch["tokens"].numel() for batch in micro_batches)
            timer.step(tokens=num_tokens, own_tokens=own_tokens, read_bytes=own_tokens * 2)

            values: dict[str, float] = {**metrics.reduce()}
            done = step + 1
            if done % options.evaluate_every == 0 or done == last:
                held_out = (batch for step in batches_of(valid_set) for batch in step.micro_batches)
                with timer("evaluation"):
                    values["validation_loss"] = evaluate(model, held_out, loss=loss, group=dp)
            values.update(timer.reduce())
            run.write(
                step, values
            )  # before the checkpoint: a run that goes on from it has the line
            progress.update(step, values)
            if done % options.save_every == 0 or done == last:
                state.update(step=done, consumed=batches.consumed)
                with timer("checkpoint"):  # told by the next line
                    save(options.out / f"checkpoints/{done:06}", state, group=world)
    progress.close()
    return model


@torch.no_grad()
def write_on(model: Decoder, prompt: str, *, context: int, length: int) -> str:
    """Go on from ``prompt``, at temperature 0.7; the same bytes on every rank."""
    generator = torch.Generator().manual_seed(0)
    tokens = [data.END_OF_DOCUMENT, *prompt.encode()]
    for _ in range(length):
        seen = torch.tensor([tokens[-context:]])
        logits = model(seen, gather_logits=True).logits[0, -1].float()
        choice = torch.multinomial((logits / 0.7).softmax(-1), 1, generator=generator)
        tokens.append(int(choice))
    return data.decode_bytes(tokens)


def main() -> None:
    """Train on the ranks that torchrun started, or on one; then show a sample and export."""
    options = parse()
    ranks = int(os.environ.get("WORLD_SIZE", "1"))
    if ranks > 1:  # "nccl" on GPUs
        dist.init_process_group("gloo", timeout=timedelta(seconds=options.timeout))
    world = Mesh().group("dp")
    try:
        model = train(options)
        if options.stop_after is None:
            context, length = options.sequence_length, options.sample_length
            sample = write_on(model, "def ", context=context, length=length)
            if world.rank == 0:
                (options.out / "sample.txt").write_text(sample)
            export.save_hf(model, options.out / "hf", group=world)
    except (ValueError, OSError, ckpt.CheckpointError) as error:  # what a user can mend
        sys.exit(f"rank {world.rank}: {error}")
    if ranks > 1:
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
