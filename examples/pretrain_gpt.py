"""Pretrain a small language model on text, from parts: the file to copy and change.

    python examples/pretrain_gpt.py --out out/run
    torchrun --nproc-per-node 2 examples/pretrain_gpt.py --out out/run --tp 2

The text is the Python standard library's source, as bytes, unless --data names files, folders
or JSON lines. A run goes on from the newest checkpoint in its folder, at any layout: tensor, data
and expert parallel in any mixture, with the same data, loss curve and weights.
pretrain_mamba.py and pretrain_hybrid.py run other models in the same loop.
"""

import argparse
import math
import os
import sys
import time
from collections.abc import Callable
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import xxhash
from torch import Tensor, nn

from megablocks_core import ckpt, data, export, parallel
from megablocks_core.groups import LOCAL, Group, Mesh, together
from megablocks_core.layers import Decoder, DecoderOutput, DecoderSpec, MoESpec
from megablocks_core.layers.moe import TopKRouter, update_selection_bias
from megablocks_core.train import (
    ExpertsWork,
    FiniteGuard,
    Metrics,
    Progress,
    RunFolder,
    Scheduled,
    StepTimer,
    StopAfter,
    Work,
    collect_every,
    cosine_schedule,
    decoder_work,
    evaluate,
    expert_load,
    matmul_peak,
    parameter_groups,
    run_record,
    training_flops,
    watch,
)

ZERO = """what the data-parallel ranks cut: 0 nothing, 1 the optimizer's state,
2 gradients too, 3 weights too"""
FIXED = ("data", "max_bytes", "packed", "sequence_length", "batch_size", "seed")  # in a run


def parse(arguments: list[str] | None = None) -> argparse.Namespace:
    """The options, each with its default."""
    parser = parser_of_loop(__doc__)
    add = parser.add_argument
    add("--packed", action="store_true", help="documents do not see each other")
    add("--layers", type=count, default=4)
    add("--heads", type=count, default=6)
    add("--kv-heads", type=count, default=2)
    add_experts(parser, number=0, help="in each layer; 0: none, dense layers", balance=0.01)
    return parser.parse_args(arguments)


def parser_of_loop(description: str | None) -> argparse.ArgumentParser:
    """The options of any model."""
    raw = argparse.RawTextHelpFormatter
    parser = argparse.ArgumentParser(description=description, formatter_class=raw)
    parser.set_defaults(experts=0, ep=1, etp=1, balance=0.0, bias_rate=0.0)
    add = parser.add_argument
    add("--out", type=Path, default=Path("out/run"), help="folder of the run")
    add("--data", type=Path, nargs="*", default=[], help="files, folders, .jsonl")
    add("--max-bytes", type=count, default=8_000_000, help="of text to learn from")
    add("--tp", type=count, default=1, help="tensor-parallel ranks")
    add("--dp", type=count, default=-1, help="data-parallel ranks; -1: all others")
    add("--zero", type=int, default=0, choices=range(4), help=ZERO)
    add("--sequence-parallel", action="store_true", help="cut tokens over the tp ranks too")
    add("--dtype", default="float32", choices=["float32", "float64", "bfloat16"])
    add("--hidden-size", type=count, default=192)
    add("--sequence-length", type=count, default=256)
    add("--batch-size", type=count, default=16, help="sequences in a step, all ranks")
    add("--micro-batch-size", type=count, default=8, help="sequences at once, a rank")
    add("--steps", type=count, default=300)
    add("--stop-after", type=count, help="end here, short of --steps, and export nothing")
    add("--minutes", type=amount, help="stop after these, as on SIGTERM, with a checkpoint")
    add("--optimizer", default="adamw", choices=["adamw", "sgd", "muon"])
    add("--learning-rate", type=amount, default=3e-3)
    add("--save-every", type=count, default=50)
    add("--evaluate-every", type=count, default=25)
    add("--evaluate-steps", type=count, default=20, help="batches to validate on")
    add("--seed", type=int, default=1)
    add("--price-per-hour", type=amount, help="of all machines, for the report")
    add("--timeout", type=amount, default=300, help="seconds to wait for another rank")
    return parser


def add_experts(parser: argparse.ArgumentParser, *, number: int, help: str, balance: float) -> None:
    """The options of models with experts."""
    add = parser.add_argument
    add("--ep", type=count, default=1, help="ranks that share the experts")
    add("--etp", type=count, default=1, help="ranks that share each expert")
    add("--experts", type=int, default=number, help=help)
    add("--top-k", type=count, default=2, help="experts of a token")
    add("--balance", type=weight, default=balance, help="of the loss of uneven loads")


def count(text: str) -> int:
    """A number from 1 on."""
    if int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text} must be at least 1")
    return int(text)


def weight(text: str) -> float:
    """A finite number from 0 on."""
    if not 0 <= float(text) < math.inf:
        raise argparse.ArgumentTypeError(f"{text} must be at least 0 and finite")
    return float(text)


def amount(text: str) -> float:
    """A finite number above 0."""
    if not 0 < float(text) < math.inf:
        raise argparse.ArgumentTypeError(f"{text} must be above 0 and finite")
    return float(text)


def model_spec(options: argparse.Namespace) -> DecoderSpec:
    """A Llama with grouped queries and a tied head, or a Mixtral with as much work a token.

    Feed-forward layers are 8/3 as wide as the rest, or all experts of a token are together.
    """
    end, length = data.END_OF_DOCUMENT, options.sequence_length
    parts = options.top_k if options.experts else 1
    ffn_size = 64 * math.ceil(options.hidden_size * 8 / 3 / 64 / parts)
    moe = MoESpec(options.experts, options.top_k, ffn_size) if options.experts else None
    return DecoderSpec(
        vocab_size=data.VOCAB_SIZE,
        hidden_size=options.hidden_size,
        ffn_size=ffn_size,
        num_layers=options.layers,
        num_heads=options.heads,
        num_kv_heads=options.kv_heads,
        head_dim=options.hidden_size // options.heads,
        tied=True,
        moe=moe,
        family="mixtral" if moe else "llama",
        extra={"max_position_embeddings": length, "bos_token_id": end, "eos_token_id": end},
    )


def mesh_of(options: argparse.Namespace) -> Mesh:
    """How the ranks are laid out, for dense parts and for experts."""
    sizes = {axis: getattr(options, axis) for axis in ("tp", "dp", "ep", "etp")}
    return Mesh(**sizes, timeout=timedelta(seconds=options.timeout))


def model_on(mesh: Mesh, spec: DecoderSpec, options: argparse.Namespace) -> Decoder:
    """This rank's share; one seed gives one model, however it is cut."""
    torch.manual_seed(options.seed)
    dtype, cut_tokens = getattr(torch, options.dtype), options.sequence_parallel
    return Decoder(spec, mesh=mesh, sequence_parallel=cut_tokens, dtype=dtype)


def write_tokens(options: argparse.Namespace, *, group: Group) -> None:
    """Tokenize on the first rank, when a run begins."""
    with together("reading the text", group=group, raises=OSError):
        if group.rank == 0 and not (options.out / "checkpoints").exists():
            options.out.mkdir(parents=True, exist_ok=True)
            texts = data.read_texts(*(options.data or data.standard_library()))
            pieces = data.shuffled_pieces(texts, max_bytes=options.max_bytes)
            if not pieces:
                raise ValueError(f"--data {[str(path) for path in options.data]} must hold text")
            data.write_byte_documents(pieces, options.out / "tokens", overwrite=True)


def loaders(options: argparse.Namespace, *, group: Group) -> list[Callable[..., data.Loader]]:
    """What makes the batches to learn from, and those to validate on."""
    corpus = data.IndexedDataset(options.out / "tokens")
    splits = data.split_documents(corpus.num_documents, "95,5", names=("train", "valid"))
    steps = {"train": options.steps, "valid": options.evaluate_steps}
    sampled = partial(data.GPTDataset, corpus, options.sequence_length, seed=options.seed)
    batches_of = partial(
        data.Loader,
        global_batch_size=options.batch_size,
        micro_batch_size=min(options.micro_batch_size, max(1, options.batch_size // group.size)),
        group=group,
    )
    return [
        partial(batches_of, sampled(split=split, num_samples=steps[name] * options.batch_size))
        for name, split in splits.items()
    ]


def run_on(
    model: Any, batch: dict[str, Any], *, packed: bool
) -> tuple[Tensor, Tensor, DecoderOutput]:
    """Sum of the tokens' losses, how many there are, and the output.

    Tokens are rows of one length, or all documents of the batch one behind another.
    """
    shape = (1, -1) if packed else (-1, model.spec.extra["max_position_embeddings"])
    rows, labels, mask = (batch[name].view(shape) for name in ("tokens", "labels", "loss_mask"))
    bounds = {name: batch[name] for name in ("cu_seqlens", "max_seqlen")} if packed else {}
    output = model(rows, **bounds)
    losses = parallel.vocab_parallel_cross_entropy(
        output.logits,
        labels,
        vocab_size=model.spec.vocab_size,
        reduction="none",
        group=model.tp,
    )
    return (losses * mask).sum(), mask.sum(), output


def loss_of(model: Any, batch: dict[str, Any], *, packed: bool) -> tuple[Tensor, Tensor]:
    """Sum of the tokens' losses, and how many there are."""
    return run_on(model, batch, packed=packed)[:2]


def shared(
    model: Decoder, options: argparse.Namespace, *, group: Group, expert_group: Group
) -> tuple[nn.Module, torch.optim.Optimizer]:
    """What runs the model on the ranks of ``group`` as --zero says, and --optimizer for it."""
    called: nn.Module = model
    ranks: dict[str, Any] = {"group": group, "expert_group": expert_group, "reduction": "sum"}
    is_muon, is_cut = options.optimizer == "muon", options.zero in (1, 2)
    if is_muon and options.zero == 2:
        raise ValueError("--zero 2 must be 0, 1 or 3: --optimizer muon needs whole gradients")
    if options.zero == 3:
        called = parallel.fully_shard(model, **ranks)
    elif is_muon or not is_cut:
        called = parallel.DataParallel(model, **ranks)
    groups = parameter_groups(model, {"lr": options.learning_rate, "weight_decay": 0.1})
    if is_muon:
        dealt = group if is_cut else LOCAL
        muon = parallel.Muon(model, groups=groups, adjust_lr="match_rms_adamw", group=dealt)
        return called, muon
    kinds: dict[str, Any] = {
        "sgd": (torch.optim.SGD, {"momentum": 0.9}),
        "adamw": (torch.optim.AdamW, {"betas": (0.9, 0.95)}),
    }
    kind, settings = kinds[options.optimizer]
    if not is_cut:
        return called, kind(groups, **settings)
    settings |= {**ranks, "zero": options.zero}
    return called, parallel.ShardedOptimizer(model, kind, groups=groups, **settings)


def label_of(mesh: Mesh, options: argparse.Namespace) -> str:
    """The layout in a few words."""
    sizes = {"tp": options.tp, "dp": mesh.size("dp"), "zero": options.zero}
    sizes |= {"ep": options.ep, "etp": options.etp} if options.experts else {}
    return ", ".join(f"{name}={size}" for name, size in sizes.items())


def model_work(spec: DecoderSpec) -> list[Work]:
    """What the parts of a model cost; of experts those that are active."""
    experts = None
    if spec.moe is not None:
        sizes = (spec.moe.ffn_size, spec.moe.num_experts, spec.moe.top_k)
        experts = ExpertsWork(spec.hidden_size, *sizes)
    return decoder_work(spec, feed_forward=experts)


def flops_per_token(work: list[Work], options: argparse.Namespace) -> float:
    """Of forward and backward, as if a document filled each sequence."""
    return training_flops(work, [options.sequence_length]) / options.sequence_length


def scheduled(optimizer: torch.optim.Optimizer, options: argparse.Namespace) -> Scheduled:
    """The optimizer's rates, by the samples that were learnt from."""
    samples = options.steps * options.batch_size
    return Scheduled(optimizer, cosine_schedule(samples, warmup=samples // 20, end=0.1))


def resume(state: dict[str, Any], options: argparse.Namespace, *, group: Group) -> None:
    """Load the newest checkpoint, if there is one, of a run with the same data and sizes."""
    state["settings"] = settings = {name: str(getattr(options, name)) for name in FIXED}
    ckpt.load_latest(options.out / "checkpoints", state, group=group)
    for name, saved in state["settings"].items():
        if settings[name] != saved:
            option = f"--{name.replace('_', '-')}"
            raise ValueError(f"{option} {settings[name]} must be {saved} to go on in {options.out}")
    if state["step"] > options.steps:
        raise ValueError(
            f"--steps {options.steps} must be at least {state['step']}: so many are done"
        )
    if state["step"] < options.steps and (options.out / "hf").exists():
        raise ValueError(f"{options.out / 'hf'} holds a model of fewer steps: move it to go on")


def save(folder: Path, state: dict[str, Any], *, group: Group) -> None:
    """Write a checkpoint; a damaged one of this name, which the run passed over, moves aside."""
    if group.rank == 0 and folder.exists():
        folder.rename(folder.with_name(f".{folder.name}.damaged.{time.time_ns()}"))
    config = state["model"].spec.to_hf()  # with which megablocks-export makes a folder of it
    ckpt.save(folder, state, group=group, files={"config.json": config})


def backward(
    micro_batches: list[dict[str, Any]],
    num_tokens: int,
    called: nn.Module,
    timer: StepTimer,
    metrics: Metrics,
    *,
    packed: bool,
    balance: float,
) -> tuple[Tensor, list[Tensor]]:
    """Gradients of the mean loss of all ranks' ``num_tokens`` tokens, clipped.

    Their norm, and how many of this rank's tokens chose each expert, a layer each.
    """
    loads = []
    for batch in micro_batches:
        with timer("forward"):
            loss_sum, num_own, output = run_on(called, batch, packed=packed)
            uneven = sum(total for total, _ in output.losses.get("load_balance", ()))
        with timer("backward"):
            ((loss_sum + balance * uneven) / num_tokens).backward()  # and summed over the ranks
        metrics.add("loss", loss_sum, num_own)
        loads.append(output.tokens_per_expert)
    with timer("optimizer"):
        norm = parallel.clip_grad_norm_(called, 1.0)
    return norm, [torch.stack(layer).sum(0) for layer in zip(*loads, strict=True)]


def update(
    optimizer: torch.optim.Optimizer,
    model: Decoder,
    loads: list[Tensor],
    *,
    bias_rate: float,
    group: Group,
) -> None:
    """A step; then routers with biases on choices move them toward experts with less work."""
    optimizer.step()
    routers = [part for part in model.modules() if isinstance(part, TopKRouter)]
    for router, load in zip(routers, loads, strict=True):
        if (bias := router.e_score_correction_bias) is not None:
            update_selection_bias(bias, load, rate=bias_rate, group=group)


def train(
    options: argparse.Namespace,
    *,
    make_spec: Callable[[argparse.Namespace], DecoderSpec] = model_spec,
    make_work: Callable[[DecoderSpec], list[Work]] = model_work,
) -> Decoder | None:
    """Train from the newest checkpoint, or from the start; the model if the end is reached."""
    mesh = mesh_of(options)
    dp, world = mesh.group("dp"), mesh.group("tp", "dp")
    apart = world if options.sequence_parallel else dp  # ranks with different tokens
    write_tokens(options, group=world)
    train_batches, valid_batches = loaders(options, group=dp)
    model = model_on(mesh, make_spec(options), options)
    called, optimizer = shared(model, options, group=dp, expert_group=mesh.expert.group("edp"))
    rates = scheduled(optimizer, options)
    record = run_record(
        label=label_of(mesh, options),
        mesh=mesh.describe(),
        spec=model.spec.to_hf(),
        data=xxhash.xxh3_128_hexdigest((options.out / "tokens.bin").read_bytes()),
        tokenizer="bytes",
        optimizer=optimizer,
        schedule=rates,
        flops_per_token=flops_per_token(make_work(model.spec), options),
        peak_flops=matmul_peak(group=world),
        price_per_hour=options.price_per_hour,
    )
    state = {"model": model, "optimizer": optimizer, "step": 0, "consumed": 0}
    resume(state, options, group=world)
    first, last = state["step"], min(options.steps, options.stop_after or options.steps)
    if first >= last:
        return model if first == options.steps else None
    batches = train_batches(consumed=state["consumed"])

    metrics, is_finite = Metrics("loss", group=dp), FiniteGuard()
    timer = StepTimer(sample_every=50, group=world)
    watched = watch(model, every=50, step=first, group=world)
    progress = Progress(last, start=first, group=world)
    with (
        RunFolder(options.out, record=record, step=first, group=world) as run,
        StopAfter(minutes=options.minutes, group=world) as stop,
        collect_every(100) as collect,
    ):
        for done in range(first + 1, last + 1):
            with timer("data"):
                micro_batches, num_tokens = next(batches)
            norm, loads = backward(
                micro_batches,
                num_tokens,
                called,
                timer,
                metrics,
                packed=options.packed,
                balance=options.balance,
            )
            watched.step()
            with timer("optimizer"):
                rate = options.learning_rate * rates.set(batches.consumed)
                sound = is_finite({"grad_norm": norm})  # that of all ranks: they agree
                if sound:
                    update(optimizer, model, loads, bias_rate=options.bias_rate, group=apart)
                optimizer.zero_grad()
            own_tokens = sum(batch["tokens"].numel() for batch in micro_batches)
            timer.step(tokens=num_tokens, own_tokens=own_tokens, read_bytes=own_tokens * 2)

            values = {**metrics.reduce(), "grad_norm": norm.item(), "learning_rate": rate}
            if done % options.evaluate_every == 0 or done == last:
                with timer("evaluation"):
                    values["validation_loss"] = evaluate(
                        called,
                        valid_batches(),
                        loss=partial(loss_of, packed=options.packed),
                        group=dp,
                    )
            if loads:
                values |= expert_load(loads, group=apart)
            values |= {**timer.reduce(), **watched.read(), "skipped": float(not sound)}
            run.write(done - 1, values)  # first, so that a run from the checkpoint has the line
            progress.update(done - 1, values)
            if stop() or done % options.save_every == 0 or done == last:
                state |= {"step": done, "consumed": batches.consumed}
                with timer("checkpoint"):  # told by the next line, or after the last
                    save(options.out / f"checkpoints/{done:06}", state, group=world)
            if stop.reason:
                break
            collect()
        run.add({"checkpoint_seconds": timer.reduce()["checkpoint_seconds"]})
    progress.close()
    return model if state["step"] == options.steps else None


def main(options: argparse.Namespace, **model: Any) -> None:
    """Train on the ranks that torchrun started, or on one, and export what comes out.

    ``model`` is for ``train``: what makes another one.
    """
    if int(os.environ.get("WORLD_SIZE", "1")) > 1:  # "nccl" on GPUs
        dist.init_process_group("gloo", timeout=timedelta(seconds=options.timeout))
    world = Mesh().group("dp")
    try:
        trained, folder = train(options, **model), options.out / "hf"
        if trained is not None and not folder.exists():
            export.save_hf(trained, folder, group=world)
    except (ValueError, OSError, ArithmeticError, ckpt.CheckpointError) as error:
        sys.exit(f"rank {world.rank}: {error}")  # what a user can mend, in one line
    except KeyboardInterrupt:
        sys.exit("stopped")
    finally:
        if world.size > 1:
            dist.destroy_process_group()


if __name__ == "__main__":
    main(parse())
