"""Gemma 1 to 3, text alone: a tied head; from 2 on norms around each sublayer, in 3 of heads too.

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

_AROUND = (
    *TRUNK,
    Weight("model.layers.{}.pre_feedforward_layernorm.weight", "hidden"),
    Weight("model.layers.{}.post_feedforward_layernorm.weight", "hidden"),
)
_BIASES = attention_biases("attention_bias", *"qkvo")
_TIED = {"head_dim": 256, "tie_word_embeddings": True}

GEMMA_FAMILIES = {
    "gemma": dense_family(
        "GemmaForCausalLM", (*TRUNK, *_BIASES), {"num_key_value_heads": 16, **_TIED}
    ),
    "gemma2": dense_family(
        "Gemma2ForCausalLM", (*_AROUND, *_BIASES), {"num_key_value_heads": 4, **_TIED}
    ),
    "gemma3_text": dense_family(
        "Gemma3ForCausalLM",
        (*_AROUND, *QK_NORMS, *_BIASES),
        {"num_key_value_heads": 4, **_TIED},
    ),
}
