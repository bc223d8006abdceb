"""Pretrain a small Mamba-2 on packed documents.

    python examples/pretrain_mamba.py --out out/mamba
    torchrun --nproc-per-node 2 examples/pretrain_mamba.py --out out/mamba --tp 2

Every block is a Mamba-2 mixer. All documents of a batch stand in one row, one behind another, and
the state begins anew with each. Data, loop, checkpoints and export are those of pretrain_gpt.py:
the losses are the same at any layout, and OUT/hf is a model that transformers opens.
"""

import argparse
from dataclasses import replace

from pretrain_gpt import count, main, parser_of_loop

from megablocks_core import data
from megablocks_core.layers import DecoderSpec, Mamba2Spec, mamba
from megablocks_core.train import LinearWork, Work


def parse(arguments: list[str] | None = None) -> argparse.Namespace:
    """The options, each with its default."""
    parser = parser_of_loop(__doc__)
    parser.set_defaults(packed=True)
    add = parser.add_argument
    add("--layers", type=count, default=6)
    add_mamba(parser)
    return parser.parse_args(arguments)


def add_mamba(parser: argparse.ArgumentParser) -> None:
    """The options of Mamba-2 blocks."""
    parser.add_argument("--state-size", type=count, default=32, help="of each feature of a head")
    parser.add_argument("--mamba-head-dim", type=count, default=32)


def head_dim(options: argparse.Namespace) -> int:
    """Features of a Mamba-2 head; heads together are twice as wide as the model."""
    width, inner = options.mamba_head_dim, 2 * options.hidden_size
    if inner % width:
        raise ValueError(f"--mamba-head-dim {width} must divide {inner}, twice --hidden-size")
    return width


def make_spec(options: argparse.Namespace) -> DecoderSpec:
    """A Mamba-2 with a tied head."""
    end, length = data.END_OF_DOCUMENT, options.sequence_length
    spec = mamba(
        data.VOCAB_SIZE,
        hidden_size=options.hidden_size,
        num_layers=options.layers,
        state_size=options.state_size,
        head_dim=head_dim(options),
    )
    extra = {"max_position_embeddings": length, "bos_token_id": end, "eos_token_id": end}
    return replace(spec, tied=True, extra=extra)


def make_work(spec: DecoderSpec) -> list[Work]:
    """What the parts of a model cost."""
    head = LinearWork(spec.hidden_size, spec.vocab_size)
    return [*mixer_work(spec) * spec.num_layers, head]


def mixer_work(spec: DecoderSpec) -> list[Work]:
    """What a Mamba-2 block costs: projections, convolution, and the scan token by token."""
    mixer, hidden = spec.mamba, spec.hidden_size
    assert isinstance(mixer, Mamba2Spec)
    inner, groups = mixer.num_heads * mixer.head_dim, 2 * mixer.num_groups * mixer.state_size
    return [
        LinearWork(hidden, 2 * inner + groups + mixer.num_heads),
        LinearWork(mixer.conv_kernel, inner + groups),
        LinearWork(mixer.state_size, inner, times=2),  # into the state, and out of it
        LinearWork(inner, hidden),
    ]


if __name__ == "__main__":
    main(parse(), make_spec=make_spec, make_work=make_work)
