"""Pretrain a small hybrid of Mamba-2, attention and experts on packed documents, as Nemotron-H.

    python examples/pretrain_hybrid.py --out out/hybrid
    torchrun --nproc-per-node 2 examples/pretrain_hybrid.py --out out/hybrid --tp 2 --ep 2

A letter of --pattern is a block: M is Mamba-2, * attention without positions, - a feed-forward
layer, E a mixture of experts behind a sigmoid router, whose loads a bias on choices evens out
without a loss. All documents of a batch stand in one row, one behind another: no state and no
attention goes from one to the next. Data, loop, checkpoints and export are those of
pretrain_gpt.py: the losses are the same at any layout, and OUT/hf is a model that transformers
opens.
"""

import argparse
import math
from dataclasses import replace

from pretrain_gpt import add_experts, count, main, parser_of_loop, weight
from pretrain_mamba import add_mamba, head_dim, mixer_work

from megablocks_core import data
from megablocks_core.layers import DecoderSpec, Mamba2Spec, MoESpec, hybrid
from megablocks_core.train import AttentionWork, ExpertsWork, FeedForwardWork, LinearWork, Work


def parse(arguments: list[str] | None = None) -> argparse.Namespace:
    """The options, each with its default."""
    parser = parser_of_loop(__doc__)
    parser.set_defaults(packed=True)
    add = parser.add_argument
    add("--pattern", default="M-M*-ME", help="a letter a block, of M, *, - and E")
    add("--heads", type=count, default=6)
    add("--kv-heads", type=count, default=2)
    add_mamba(parser)
    add_experts(parser, number=8, help="of each E; 0: E is -", balance=0.0)
    add("--bias-rate", type=weight, default=0.01, help="a step of the bias on choices")
    return parser.parse_args(arguments)


def make_spec(options: argparse.Namespace) -> DecoderSpec:
    """A Nemotron-H whose feed-forward layers are four times as wide as the rest."""
    end, length, hidden = data.END_OF_DOCUMENT, options.sequence_length, options.hidden_size
    blocks = options.pattern if options.experts else options.pattern.replace("E", "-")
    ffn_size = 4 * hidden
    spec = hybrid(
        data.VOCAB_SIZE,
        blocks,
        hidden_size=hidden,
        num_heads=options.heads if "*" in blocks else 0,
        num_kv_heads=options.kv_heads if "*" in blocks else 0,
        ffn_size=ffn_size if "-" in blocks else 0,
        mamba=mixer(options) if "M" in blocks else None,
        moe=mixture(options) if "E" in blocks else None,
    )
    extra = {"max_position_embeddings": length, "bos_token_id": end, "eos_token_id": end}
    return replace(spec, extra=extra)


def mixer(options: argparse.Namespace) -> Mamba2Spec:
    """Mamba-2 with the least step size of Nemotron-H."""
    width = head_dim(options)
    heads = 2 * options.hidden_size // width
    return Mamba2Spec(heads, width, options.state_size, time_step_limit=(1e-3, math.inf))


def mixture(options: argparse.Namespace) -> MoESpec:
    """Experts of which a token's own and the one that all share are as wide as a dense layer."""
    own_size, shared_size = 2 * options.hidden_size // options.top_k, 2 * options.hidden_size
    return MoESpec(
        options.experts,
        options.top_k,
        own_size,
        score="sigmoid",
        selection_bias=True,
        shared_ffn_size=shared_size,
    )


def make_work(spec: DecoderSpec) -> list[Work]:
    """What the parts of a model cost; of experts those that are active."""
    blocks = [part for letter in spec.pattern or "" for part in block_work(spec, letter)]
    return [*blocks, LinearWork(spec.hidden_size, spec.vocab_size)]


def block_work(spec: DecoderSpec, letter: str) -> list[Work]:
    """What a block of that letter costs."""
    hidden, moe = spec.hidden_size, spec.moe
    if letter == "M":
        return mixer_work(spec)
    if letter == "*":
        return [AttentionWork(hidden, spec.num_heads, spec.num_kv_heads, spec.head_dim)]
    if letter == "-" or moe is None:
        return [FeedForwardWork(hidden, spec.ffn_size, gated=False)]
    sizes = (moe.ffn_size, moe.num_experts, moe.top_k, moe.shared_ffn_size)
    return [ExpertsWork(hidden, *sizes, gated=False)]


if __name__ == "__main__":
    main(parse(), make_spec=make_spec, make_work=make_work)
