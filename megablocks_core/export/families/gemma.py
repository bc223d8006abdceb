"""Gemma 3, text alone: each sublayer between two norms, norms of heads, a tied head.

Norms are stored around zero: a layer multiplies by one plus the weight. They keep these values, bit
for bit, and no ``Offset`` turns them into weights around one: in bfloat16 numbers near one are
coarser than those near zero, so that the sum would lose what the file holds. A layer that reads
them adds the one.

Folders of ``Gemma3ForConditionalGeneration`` (``model_type="gemma3"``) hold a vision tower too and
are not of this family: transformers' text class does not write their prefix.
"""

from __future__ import annotations

from megablocks_core.export.families.dense import (
    QK_NORMS,
    TRUNK,
    attention_biases,
    dense_family,
)
from megablocks_core.export.families.weights import Weight

GEMMA_FAMILIES = {
    "gemma3_text": dense_family(
        "Gemma3ForCausalLM",
        (
            *TRUNK,
            Weight("model.layers.{}.pre_feedforward_layernorm.weight", "hidden"),
            Weight("model.layers.{}.post_feedforward_layernorm.weight", "hidden"),
            *QK_NORMS,
            *attention_biases("attention_bias", *"qkvo"),
        ),
        {"num_key_value_heads": 4, "head_dim": 256, "tie_word_embeddings": True},
    )
}
