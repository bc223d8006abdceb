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
import random
import sysconfig
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import xxhash
from torch import Tensor

from megablocks_core import ckpt, data, export
from megablocks_core.groups import Group, Mesh
from megablocks_core.layers import Decoder, DecoderSpec
from megablocks_core.parallel import (
    clip_grad_norm_,
    reduce_gradients,
    vocab_parallel_cross_entropy,
)
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
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--out", type=Path, default=Path("out/run"), help="folder of the run")
    parser.add_argument("--data", type=Path, nargs="*", default=[], help="files, folders, .jsonl")
    parser.add_argument("--max-bytes", type=int, default=8_000_000, help="of text to learn from")
    parser.add_argument("--tp", type=int, default=1, help="tensor-parallel ranks; the rest is dp")
    parser.add_argument("--sequence-parallel", action="store_true", help="cut tokens over tp too")
    parser.add_argument("--dtype", default="float32", choices=["float32", "float64", "bfloat16"])
    parser.add_argument("--hidden-size", type=int, default=192)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--heads", type=int, default=6)
    parser.add_argument("--kv-heads", type=int, default=2)
    parser.add_argument("--sequence-length", type=int, default=256)
    parser.add_argument("--batch-size", type=int, default=16, help="sequences in a step, all ranks")
    parser.add_argument("--micro-batch-size", type=int, default=8, help="sequences at once, a rank")
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--stop-after", type=int, help="end here, short of --steps")
    parser.add_argument("--learning-rate", type=float, default=3e-3)
    parser.add_argument("--save-every", type=int, default=50)
    parser.add_argument("--evaluate-every", type=int, default=25)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--price-per-hour", type=float, help="of all machines, for the report")
    return parser.parse_args(arguments)


def model_spec(options: argparse.Namespace) -> DecoderSpec:
    """A Llama with grouped queries and a tied head; its feed-forward layers are 8/3 as wide."""
    end = data.END_OF_DOCUMENT
    return DecoderSpec(
        vocab_size=data.VOCAB_SIZE,
        hidden_size=options.hidden_size,
        ffn_size=64 * math.ceil(options.hidden_size * 8 / 3 / 64),
        num_layers=options.layers,
        num_heads=options.heads,
        num_kv_heads=options.kv_heads,
        head_dim=options.hidden_size // options.heads,
        tied=True,
        extra={
            "max_position_embeddings": options.sequence_length,
            "bos_token_id": end,
            "eos_token_id": end,
        },
    )


def texts(options: argparse.Namespace) -> list[str]:
    """Documents in a fixed random order, up to the number of bytes asked for."""
    places = options.data
    if not places:
        library = Path(sysconfig.get_paths()["stdlib"])
        packages = {init.parent for init in library.glob("*/__init__.py")} - {library / "test"}
        places = sorted(library.glob("*.py")) + sorted(packages)
    found = list(data.read_texts(*places, suffixes=() if options.data else (".py",)))
    random.Random(0).shuffle(found)
    room, kept = options.max_bytes, []
    for text in found:
        if room > 0:
            kept.append(text)
            room -= len(text)
    return kept


def datasets(options: argparse.Namespace, world: Group) -> tuple[data.GPTDataset, data.GPTDataset]:
    """Samples to learn from and to validate on; the first rank tokenizes if nobody has."""
    prefix = options.out / "tokens"
    if world.rank == 0 and not prefix.with_suffix(".idx").exists():
        options.out.mkdir(parents=True, exist_ok=True)
        data.write_byte_documents(texts(options), prefix)
    world.barrier()
    corpus = data.IndexedDataset(prefix)
    splits = data.split_documents(corpus.num_documents, "95,5", names=("train", "valid"))
    length, seed = options.sequence_length, options.seed
    needed = options.steps * options.batch_size
    train = data.GPTDataset(corpus, length, seed=seed, split=splits["train"], num_samples=needed)
    return train, data.GPTDataset(corpus, length, seed=seed, split=splits["valid"])


def loss_of(model: Decoder, batch: dict[str, Any], *, length: int) -> tuple[Tensor, Tensor]:
    """Sum of the tokens' losses, and how many there are; the batch is rows of ``length``."""
    rows = batch["tokens"].view(-1, length)
    losses = vocab_parallel_cross_entropy(
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


def flops_per_token(model: Decoder, spec: DecoderSpec, length: int) -> float:
    """Forward and backward: 6 a weight, and the scores and values of causal attention."""
    weights = spec.vocab_size * spec.hidden_size + spec.num_layers * (
        spec.hidden_size * spec.head_dim * 2 * (spec.num_heads + spec.num_kv_heads)
        + 3 * spec.hidden_size * spec.ffn_size
    )
    return 6 * weights + 6 * spec.num_layers * spec.num_heads * spec.head_dim * length


def train(options: argparse.Namespace) -> Decoder:
    """Train from the newest checkpoint, or from the start, to the end."""
    mesh = Mesh(tp=options.tp)
    dp, world = mesh.group("dp"), mesh.group("tp", "dp")
    train_set, valid_set = datasets(options, world)
    torch.manual_seed(options.seed)
    spec = model_spec(options)
    model = Decoder(
        spec,
        mesh=mesh,
        sequence_parallel=options.sequence_parallel,
        dtype=getattr(torch, options.dtype),
    )
    optimizer = torch.optim.AdamW(model.parameters(), betas=(0.9, 0.95), weight_decay=0.1)
    state = {"model": model, "optimizer": optimizer, "step": 0, "consumed": 0}
    ckpt.load_latest(options.out / "checkpoints", state, group=world)

    def loader(dataset: data.GPTDataset, consumed: int = 0) -> data.Loader:
        return data.Loader(
            dataset,
            global_batch_size=options.batch_size,
            micro_batch_size=min(options.micro_batch_size, options.batch_size // dp.size),
            group=dp,
            consumed=consumed,
        )

    def validation_batches() -> Iterator[dict[str, Any]]:
        for validation_step in loader(valid_set):
            yield from validation_step.micro_batches

    record = run_record(
        label=f"tp={options.tp}, dp={dp.size}",
        mesh=mesh.describe(),
        spec=spec.to_hf(),
        data=xxhash.xxh3_128_hexdigest((options.out / "tokens.bin").read_bytes()),
        tokenizer="bytes",
        flops_per_token=flops_per_token(model, spec, options.sequence_length),
        peak_flops=matmul_peak(group=world),
        price_per_hour=options.price_per_hour,
    )
    loss = partial(loss_of, length=options.sequence_length)
    metrics = Metrics("loss", "grad_norm", group=dp)
    timer = StepTimer(sample_every=20, group=world)
    progress = Progress(options.steps, start=state["step"], group=world)
    batches = loader(train_set, state["consumed"])
    last = min(options.steps, options.stop_after or options.steps)
    steps = iter(batches)
    with RunFolder(options.out, record=record, step=state["step"], group=world) as run:
        for step in range(state["step"], last):
            with timer("data"):
                micro_batches, num_tokens = next(steps)
            for batch in micro_batches:
                with timer("forward"):
                    loss_sum, count = loss(model, batch)
                with timer("backward"):
                    (loss_sum / num_tokens).backward()
                metrics.add("loss", loss_sum.detach(), count)
            with timer("reduction"):
                reduce_gradients(model, group=dp, reduction="sum")
                metrics.add("grad_norm", clip_grad_norm_(model, 1.0))
            with timer("optimizer"):
                for settings in optimizer.param_groups:
                    settings["lr"] = learning_rate(step, options)
                optimizer.step()
                optimizer.zero_grad()
            own = sum(batch["tokens"].numel() for batch in micro_batches)
            timer.step(tokens=num_tokens, own_tokens=own, read_bytes=own * 2)
            values = dict(metrics.reduce())
            if (step + 1) % options.evaluate_every == 0 or step + 1 == last:
                with timer("evaluation"):
                    found = evaluate(model, validation_batches(), loss=loss, group=dp)
                    values["validation_loss"] = found
            if (step + 1) % options.save_every == 0 or step + 1 == last:
                state.update(step=step + 1, consumed=batches.consumed)
                with timer("checkpoint"):
                    ckpt.save(options.out / f"checkpoints/{step + 1:06}", state, group=world)
            values.update(timer.reduce())
            run.write(step, values)
            progress.update(step, values)
    return model


@torch.no_grad()
def write_on(model: Decoder, prompt: str, *, context: int, length: int = 300) -> str:
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
    """Train on the ranks that torchrun started, or on one; then export and show a sample."""
    options = parse()
    ranks = int(os.environ.get("WORLD_SIZE", "1"))
    torch.set_num_threads(max(1, (os.cpu_count() or 1) // ranks))
    if ranks > 1:
        dist.init_process_group("gloo")
    model = train(options)
    if options.stop_after is None:
        world = Group.of(dist.group.WORLD) if ranks > 1 else model.tp
        export.save_hf(model, options.out / "hf", group=world)
        sample = write_on(model, "def ", context=options.sequence_length)
        if world.rank == 0:
            (options.out / "sample.txt").write_text(sample)
    if ranks > 1:
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
