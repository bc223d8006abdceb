"""What the files of each family of Hugging Face models hold, as data."""

from __future__ import annotations

from megablocks_core.export.families.deepseek import DEEPSEEK_FAMILIES
from megablocks_core.export.families.dense import DENSE_FAMILIES
from megablocks_core.export.families.fused import FUSED_FAMILIES
from megablocks_core.export.families.gated_delta import GATED_DELTA_FAMILIES
from megablocks_core.export.families.gemma import GEMMA_FAMILIES
from megablocks_core.export.families.gpt2 import GPT2_FAMILIES
from megablocks_core.export.families.hybrid import HYBRID_FAMILIES
from megablocks_core.export.families.state_spaces import STATE_SPACES, layer_of
from megablocks_core.export.families.weights import Config, Family

FAMILIES: dict[str, Family] = {
    **DENSE_FAMILIES,
    **DEEPSEEK_FAMILIES,
    **FUSED_FAMILIES,
    **GEMMA_FAMILIES,
    **GPT2_FAMILIES,
    **HYBRID_FAMILIES,
    **GATED_DELTA_FAMILIES,
}


def family_of(config: Config) -> Family | None:
    """The family of a config, by its ``model_type`` or by what the authors of Mamba call things."""
    if "model_type" not in config and "d_model" in config:
        return STATE_SPACES.get(layer_of(config))
    name = config.get("model_type")
    return FAMILIES.get(name) if isinstance(name, str) else None
