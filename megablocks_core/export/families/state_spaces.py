"""The state-spaces models as their authors publish them (https://github.com/state-spaces/mamba).

Their configs have no ``model_type``; what a block is stands in the entry ``ssm_cfg``.
"""

from __future__ import annotations

from dataclasses import replace

from megablocks_core.export.families.hybrid import HYBRID_FAMILIES
from megablocks_core.export.families.weights import Config, Family, Weight

_OWN_NAMES = {"backbone.embeddings.weight": "backbone.embedding.weight"}
_FAMILIES = {"Mamba1": "mamba", "Mamba2": "mamba2"}
# Entries of ``ssm_cfg`` in transformers' words; what is absent means what it does there, but for
# the groups of Mamba-2.
_BLOCKS = {
    "d_state": "state_size",
    "d_conv": "conv_kernel",
    "expand": "expand",
    "dt_rank": "time_step_rank",
    "headdim": "head_dim",
    "ngroups": "n_groups",
    "bias": "use_bias",
    "conv_bias": "use_conv_bias",
}


def layer_of(config: Config) -> str:
    """The class of a config's blocks."""
    blocks = config.get("ssm_cfg", {})
    return str(blocks.get("layer", "Mamba1")) if isinstance(blocks, dict) else ""


def _in_others_words(config: Config) -> Config:
    blocks = {"ngroups": 1, **config.get("ssm_cfg", {})}
    step = config.get("pad_vocab_size_multiple", 8)
    words = {new: blocks[old] for old, new in _BLOCKS.items() if old in blocks}
    inner = blocks.get("expand", 2) * config["d_model"]
    return {
        **words,
        "num_heads": inner // blocks.get("headdim", 64),
        "vocab_size": -(-config["vocab_size"] // step) * step,
        "hidden_size": config["d_model"],
        "num_hidden_layers": config["n_layer"],
        "tie_word_embeddings": config.get("tie_embeddings", True),
    }


def _named(weight: Weight) -> Weight:
    return replace(weight, name=_OWN_NAMES.get(weight.name, weight.name))


STATE_SPACES: dict[str, Family] = {
    layer: replace(
        HYBRID_FAMILIES[family],
        architecture="MambaLMHeadModel",
        weights=tuple(_named(weight) for weight in HYBRID_FAMILIES[family].weights),
        needed=("vocab_size", "d_model", "n_layer"),
        in_others_words=_in_others_words,
        pickled=True,
    )
    for layer, family in _FAMILIES.items()
}
