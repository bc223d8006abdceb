"""The table of docs/huggingface.md, from the code: which families there are, and who serves them.

python tools/family_table.py          # print it
python tools/family_table.py --write  # put it into the page
"""

import sys
from pathlib import Path

from megablocks_core.export.families import FAMILIES
from megablocks_core.layers.spec.families import FAMILIES as PLAIN
from megablocks_core.layers.spec.families import MISSING
from megablocks_core.layers.spec.hybrid_families import HYBRIDS

PAGE = Path(__file__).parents[1] / "docs" / "huggingface.md"
BEGIN, END = "<!-- families: tools/family_table.py -->\n", "<!-- end of families -->\n"
# What sets a family apart from those above it.
DIFFERS = {
    "llama": "biases of attention and feed-forward projections where the config says so",
    "mistral": "no biases",
    "qwen2": "biases of q, k, v",
    "qwen3": "norms of query and key heads",
    "mixtral": "experts, on disk `block_sparse_moe.gate` and `experts.N.w1`, `w3`, `w2`",
    "qwen2_moe": "experts and dense layers as `qwen3_moe`; a shared expert with a gate",
    "qwen3_moe": "`qwen3`, with experts in all layers but some, on disk `mlp.experts.N.gate_proj`",
    "olmoe": "experts as `qwen3_moe`; norms over whole query and key projections",
    "deepseek_v2": "latent attention; first layers dense; shared experts",
    "deepseek_v3": "as `deepseek_v2`, with a bias on the choice of experts",
    "kimi_k2": "as `deepseek_v3`",
    "glm4_moe": "attention as Llama's, experts as `deepseek_v3`",
    "gpt_oss": "sinks; experts of a layer in one tensor, gate and up alternating; biases",
    "llama4_text": "experts of a layer in one tensor, the other way round; a shared expert",
    "llama4": "as `llama4_text`, beside a vision tower whose tensors keep their names",
    "gemma": "norms stored around zero; a tied head",
    "gemma2": "as `gemma`; a norm before and behind each sublayer",
    "gemma3_text": "as `gemma2`; norms of query and key heads",
    "gpt2": "q, k and v in one tensor, matrices the other way round; learned positions",
    "mamba": "Mamba in every layer",
    "mamba2": "Mamba-2 in every layer",
    "nemotron_h": "one mixer a layer: Mamba-2, attention, feed-forward without a gate, or experts",
    "bamba": "Mamba-2 or attention, and a feed-forward layer, in every layer",
    "granitemoehybrid": "as `bamba`, with scales and experts, whose gate and up are one tensor",
    "qwen3_next": "gated delta nets, and gated attention in some layers; experts",
    "qwen3_5_text": "as `qwen3_next` without experts; other tensors on disk",
    "qwen3_5_moe_text": "as `qwen3_5_text`, with experts of a layer in one tensor",
}


def served(family: str) -> str:
    """ "yes", or the part that a Decoder lacks."""
    if family in PLAIN or family in HYBRIDS:
        return "yes"
    return f"no {MISSING[family]}"


def table() -> str:
    """The rows, in the order of the code, and that of the folders that have no ``model_type``."""
    rows = ["| `model_type` | in and out | `Decoder` | differs by |", "|---|---|---|---|"]
    rows += [f"| `{name}` | yes | {served(name)} | {DIFFERS[name]} |" for name in FAMILIES]
    authors = "Mamba or Mamba-2 in the folders of their authors, state-spaces"
    rows.append(f"| none, with `d_model` | yes | yes | {authors} |")
    return "\n".join(rows) + "\n"


def with_table(page: str) -> str:
    """The page with the table of now."""
    before, _, rest = page.partition(BEGIN)
    _, mark, after = rest.partition(END)
    if not mark:
        raise ValueError(f"the page must have a line {BEGIN.strip()!r} and a line {END.strip()!r}")
    return before + BEGIN + table() + END + after


if __name__ == "__main__":
    if sys.argv[1:] == ["--write"]:
        PAGE.write_text(with_table(PAGE.read_text()))
    else:
        print(table(), end="")
