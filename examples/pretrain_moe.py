"""Pretrain a mixture of experts of one's own making, and draw how its experts are loaded.

    python examples/pretrain_moe.py --out out/moe
    torchrun --nproc-per-node 2 examples/pretrain_moe.py --out out/moe --tp 2 --ep 2

Each block has routed experts and a shared one behind a sigmoid router, whose loads a selection
bias evens out without a loss. The text is the Python standard library's source, as bytes, unless
--data names other text. The losses are the same at any layout. The report is OUT/report.html; it
needs matplotlib (``pip install 'megablocks-core[report]'``), and ``megablocks-report OUT`` writes
it again.
"""

import argparse
import math
import os
import sys
from functools import partial
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor, nn

from megablocks_core import data
from megablocks_core.groups import Mesh, together
from megablocks_core.layers import Attention, DecoderLayer, GatedMLP, RMSNorm, RotaryEmbedding
from megablocks_core.layers.moe import (
    AllToAllDispatcher,
    GroupedExperts,
    MoE,
    TopKRouter,
    update_selection_bias,
)
from megablocks_core.parallel import (
    ColumnParallelLinear,
    DataParallel,
    VocabParallelEmbedding,
    clip_grad_norm_,
    vocab_parallel_cross_entropy,
)
from megablocks_core.train import Metrics, Progress, RunFolder, expert_load
from megablocks_core.train.report import write_report

HIDDEN, HEADS, LAYERS, LENGTH = 96, 4, 2, 128
EXPERTS, TOP_K, WIDTH = 8, 2, 64
VOCAB = 264  # data.VOCAB_SIZE, rounded up so that ranks may share it


def parse(arguments: list[str] | None = None) -> argparse.Namespace:
    """The options, each with its default."""
    raw = argparse.RawTextHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=raw)
    add = parser.add_argument
    add("--out", type=Path, default=Path("out/moe"), help="folder of the run")
    add("--data", type=Path, nargs="*", default=[], help="files, folders, .jsonl")
    add("--tp", type=int, default=1, help="tensor-parallel ranks")
    add("--ep", type=int, default=1, help="ranks that share the experts")
    add("--steps", type=count, default=200)
    add("--batch-size", type=count, default=8, help="sequences in a step, all ranks")
    add("--bias-rate", type=rate, default=0.01, help="a step of the selection bias")
    add("--dtype", default="float32", choices=["float32", "float64"])
    return parser.parse_args(arguments)


def count(text: str) -> int:
    """A number from 1 on."""
    if int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text} must be at least 1")
    return int(text)


def rate(text: str) -> float:
    """A finite number from 0 on."""
    if not 0 <= float(text) < math.inf:
        raise argparse.ArgumentTypeError(f"{text} must be at least 0 and finite")
    return float(text)


def mixture(mesh: Mesh, dtype: torch.dtype) -> MoE:
    """Routed experts over ``ep``, and one that all tokens share over ``tp``."""
    ep, tp = mesh.expert.group("ep"), mesh.group("tp")
    return MoE(
        router=TopKRouter(
            HIDDEN,
            num_experts=EXPERTS,
            top_k=TOP_K,
            score="sigmoid",
            selection_bias=True,
            dtype=dtype,
        ),
        dispatcher=AllToAllDispatcher(num_experts=EXPERTS, ep=ep, tp=tp, tokens="replicated"),
        experts=GroupedExperts(EXPERTS, HIDDEN, WIDTH, ep=ep, dtype=dtype),
        shared=GatedMLP(HIDDEN, WIDTH, tp=tp, dtype=dtype),
    )


class Model(nn.Module):
    """A decoder whose feed-forward layers are mixtures; gives logits and each layer's routing."""

    def __init__(self, mesh: Mesh, *, dtype: torch.dtype) -> None:
        super().__init__()
        tp = mesh.group("tp")
        head_dim = HIDDEN // HEADS
        attention = partial(
            Attention,
            HIDDEN,
            HEADS,
            num_kv_heads=HEADS,
            head_dim=head_dim,
            rotary=RotaryEmbedding(head_dim),
            tp=tp,
            dtype=dtype,
        )
        norm = partial(RMSNorm, dtype=dtype)
        self.embed = VocabParallelEmbedding(VOCAB, HIDDEN, group=tp, dtype=dtype)
        self.layers = nn.ModuleList(
            DecoderLayer(
                HIDDEN, attention=attention(), feed_forward=mixture(mesh, dtype), norm=norm
            )
            for _ in range(LAYERS)
        )
        self.norm = norm(HIDDEN)
        self.head = ColumnParallelLinear(HIDDEN, VOCAB, bias=False, group=tp, dtype=dtype)

    def forward(self, tokens: Tensor) -> tuple[Tensor, list[Tensor]]:
        """Logits [B T v], and how many tokens chose each expert, a layer each."""
        x, loads = self.embed(tokens), []
        positions = torch.arange(tokens.shape[-1])
        for layer in self.layers:
            x, routing = layer(x, positions=positions)
            loads.append(routing.tokens_per_expert)
        return self.head(self.norm(x)), loads


def batches(options: argparse.Namespace, mesh: Mesh) -> data.Loader:
    """Batches of the text, which the first rank tokenizes; each is one micro-batch a rank."""
    dp, world = mesh.group("dp"), mesh.group("tp", "dp")
    if options.batch_size % dp.size:
        raise ValueError(f"--batch-size {options.batch_size} must divide over {dp.size} ranks")
    with together("reading the text", group=world, raises=OSError):
        if world.rank == 0:
            texts = data.read_texts(*(options.data or data.standard_library()))
            pieces = data.shuffled_pieces(texts, max_bytes=2_000_000)
            options.out.mkdir(parents=True)  # refuses the folder of another run
            data.write_byte_documents(pieces, options.out / "tokens")
    samples = data.GPTDataset(
        data.IndexedDataset(options.out / "tokens"),
        LENGTH,
        seed=1,
        num_samples=options.steps * options.batch_size,
    )
    rows = options.batch_size // dp.size
    return data.Loader(
        samples, global_batch_size=options.batch_size, micro_batch_size=rows, group=dp
    )


def train(options: argparse.Namespace) -> list[float]:
    """Train, and write the report; the losses, one a step."""
    torch.manual_seed(1)  # one seed is one model at any layout
    mesh = Mesh(tp=options.tp, ep=options.ep)
    dp, tp, world = mesh.group("dp"), mesh.group("tp"), mesh.group("tp", "dp")
    model = Model(mesh, dtype=getattr(torch, options.dtype))
    called = DataParallel(model, group=dp, expert_group=mesh.expert.group("edp"), reduction="sum")
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    metrics, losses = Metrics("loss", group=dp), []
    progress = Progress(options.steps, group=world)
    loader = batches(options, mesh)
    with RunFolder(options.out, record={"label": mesh.describe()}, group=world) as run:
        for step, ((batch,), num_tokens) in enumerate(loader):
            logits, loads = called(batch["tokens"].view(-1, LENGTH))
            labels = batch["labels"].view(-1, LENGTH)
            each = vocab_parallel_cross_entropy(
                logits, labels, vocab_size=data.VOCAB_SIZE, reduction="none", group=tp
            )
            mask = batch["loss_mask"].view(-1, LENGTH)
            loss = (each * mask).sum()
            (loss / num_tokens).backward()  # and summed over the ranks
            metrics.add("loss", loss, mask.sum())
            norm = clip_grad_norm_(called, 1.0)
            optimizer.step()
            optimizer.zero_grad()
            for number, load in enumerate(loads):
                bias = model.get_buffer(f"layers.{number}.mlp.gate.e_score_correction_bias")
                update_selection_bias(bias, load, rate=options.bias_rate, group=dp)
            values = {**metrics.reduce(), "grad_norm": norm.item(), **expert_load(loads, group=dp)}
            losses.append(float(values["loss"]))
            run.write(step, values)
            progress.update(step, values)
    progress.close()
    if world.rank == 0:
        print(write_report(options.out))
    return losses


def main() -> None:
    """Train on the ranks that torchrun started, or on one."""
    options = parse()
    if "RANK" in os.environ:
        dist.init_process_group("gloo")
    try:
        train(options)
    except (ValueError, OSError, ImportError) as error:
        sys.exit(str(error))
    except KeyboardInterrupt:
        sys.exit("stopped")
    finally:
        if dist.is_initialized():
            dist.destroy_process_group()


if __name__ == "__main__":
    main()
