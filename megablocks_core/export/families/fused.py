"""Families whose files hold the experts of a layer in one tensor: GPT-OSS and Llama 4.

Both store [E inputs outputs], which is the other way round than matrices of ``nn.Linear``. The
outputs of GPT-OSS's first product alternate, gate and up; in Llama 4's all gates come first.
Which way round a tensor is stands here, and is never guessed from its shape.

Llama 4 is published with a vision tower (``model_type="llama4"``), whose tensors keep their names;
a language model without one is filled from such a folder too.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from megablocks_core.export.families.dense import (
    DENSE,
    FRAME,
    NEEDED,
    SPARSE,
    attention_biases,
    dense_family,
    dense_sizes,
    mlp,
    mlp_shapes,
)
from megablocks_core.export.families.weights import (
    Config,
    Family,
    Sizes,
    Step,
    Weight,
    split,
    transpose,
    unstack,
)

_OURS = "model.layers.{}.mlp"
_TURN = transpose(1, 2)


def _stack(name: str, shape: str, ours: Sequence[str], *steps: Step) -> Weight:
    """A tensor of all experts; ``ours`` are names inside of one."""
    inside = tuple(f"{_OURS}.experts.{{}}.{part}" for part in ours)
    return Weight(name, shape, ours=inside, kind=SPARSE, steps=(*steps, unstack()))


def _gpt_oss() -> tuple[Weight, ...]:
    alternate = split("1 1", dim=1, groups="expert")
    theirs = f"{_OURS}.experts"
    weights = ("gate_proj.weight", "up_proj.weight")
    biases = ("gate_proj.bias", "up_proj.bias")
    return (
        *FRAME,
        *attention_biases("attention_bias", *"qkvo"),
        Weight("model.layers.{}.self_attn.sinks", "heads"),
        Weight(f"{_OURS}.router.weight", "experts hidden", ours=f"{_OURS}.gate.weight"),
        Weight(f"{_OURS}.router.bias", "experts", ours=f"{_OURS}.gate.bias"),
        _stack(
            f"{theirs}.gate_up_proj", "experts hidden expert_gate_up", weights, _TURN, alternate
        ),
        _stack(f"{theirs}.gate_up_proj_bias", "experts expert_gate_up", biases, alternate),
        _stack(f"{theirs}.down_proj", "experts expert hidden", ["down_proj.weight"], _TURN),
        _stack(f"{theirs}.down_proj_bias", "experts hidden", ["down_proj.bias"]),
    )


def _llama4() -> tuple[Weight, ...]:
    theirs = "model.layers.{}.feed_forward"
    return (
        *FRAME,
        *attention_biases("attention_bias", *"qkvo"),
        *(
            replace(weight, name=weight.name.replace(_OURS, theirs), ours=weight.name)
            for weight in mlp(DENSE)
        ),
        Weight(
            f"{theirs}.router.weight", "experts hidden", ours=f"{_OURS}.gate.weight", kind=SPARSE
        ),
        _stack(
            f"{theirs}.experts.gate_up_proj",
            "experts hidden expert_gate_up",
            ("gate_proj.weight", "up_proj.weight"),
            _TURN,
            split("expert expert", dim=1),
        ),
        _stack(f"{theirs}.experts.down_proj", "experts expert hidden", ["down_proj.weight"], _TURN),
        *(
            Weight(
                f"{theirs}.shared_expert.{name}_proj.weight",
                shape,
                ours=f"{_OURS}.shared_experts.{name}_proj.weight",
                kind=SPARSE,
            )
            for name, shape in mlp_shapes("expert").items()
        ),
    )


def _llama4_sizes(config: Config) -> Sizes:
    sizes = dense_sizes({**config, "moe_intermediate_size": config["intermediate_size"]})
    return {**sizes, "ffn": config["intermediate_size_mlp"]}


def _llama4_kinds(config: Config) -> list[str]:
    count, step = config["num_hidden_layers"], config["interleave_moe_layer_step"]
    sparse = config.get("moe_layers", range(step - 1, count, step))
    return [SPARSE if layer in sparse else DENSE for layer in range(count)]


def _vision() -> tuple[Weight, ...]:
    """The vision tower and what leads from it to the language model."""
    tower, layer = "vision_model", "vision_model.model.layers.{}"
    adapter = f"{tower}.vision_adapter.mlp"
    shapes = {
        f"{tower}.class_embedding": "vision",
        f"{tower}.positional_embedding_vlm": "patches vision",
        f"{tower}.patch_embedding.linear.weight": "vision pixels",
        f"{adapter}.fc1.weight": "adapter_hidden vision_ffn",
        f"{adapter}.fc2.weight": "adapter_out adapter_out",
        f"{layer}.mlp.fc1.weight": "vision_ffn vision",
        f"{layer}.mlp.fc1.bias": "vision_ffn",
        f"{layer}.mlp.fc2.weight": "vision vision_ffn",
        f"{layer}.mlp.fc2.bias": "vision",
        "multi_modal_projector.linear_1.weight": "hidden projected",
    }
    for name in "qkvo":
        shapes[f"{layer}.self_attn.{name}_proj.weight"] = "vision vision"
        shapes[f"{layer}.self_attn.{name}_proj.bias"] = "vision"
    layer_norms = (f"{layer}.input_layernorm", f"{layer}.post_attention_layernorm")
    for norm in (f"{tower}.layernorm_pre", f"{tower}.layernorm_post", *layer_norms):
        shapes |= {f"{norm}.weight": "vision", f"{norm}.bias": "vision"}
    return tuple(Weight(name, shape) for name, shape in shapes.items())


_VISION_DEFAULTS = {
    "hidden_size": 768,
    "num_hidden_layers": 34,
    "intermediate_size": 5632,
    "num_channels": 3,
    "image_size": 448,
    "patch_size": 14,
    "projector_input_dim": 4096,
    "projector_output_dim": 4096,
    "vision_output_dim": 7680,
}


def _whole_sizes(config: Config) -> Sizes:
    """Of the language model and of the vision tower."""
    vision = {**_VISION_DEFAULTS, **config.get("vision_config", {})}
    hidden, patch = vision["hidden_size"], vision["patch_size"]
    return {
        **_llama4_sizes(config),
        "beside": vision["num_hidden_layers"],
        "vision": hidden,
        "vision_ffn": vision["intermediate_size"],
        "pixels": vision["num_channels"] * patch**2,
        "patches": (vision["image_size"] // patch) ** 2 + 1,
        "adapter_hidden": vision["projector_input_dim"],
        "adapter_out": vision["projector_output_dim"],
        "projected": vision["vision_output_dim"],
    }


def _text_alone(config: Config) -> Config:
    """What the config says of the language model stands in ``text_config``."""
    tied = config.get("tie_word_embeddings", False)
    text = config.get("text_config") or {}
    return {**config, **text, "tie_word_embeddings": tied}


_LLAMA4_DEFAULTS = {
    "num_key_value_heads": 8,
    "head_dim": 128,
    "num_local_experts": 16,
    "intermediate_size_mlp": 16384,
    "interleave_moe_layer_step": 1,
}
_LLAMA4 = Family(
    "Llama4ForCausalLM", _llama4(), _llama4_sizes, _llama4_kinds, NEEDED, _LLAMA4_DEFAULTS
)

FUSED_FAMILIES = {
    "gpt_oss": dense_family(
        "GptOssForCausalLM",
        _gpt_oss(),
        {
            "num_key_value_heads": 8,
            "head_dim": 64,
            "num_local_experts": 128,
            "attention_bias": True,
        },
    ),
    "llama4_text": _LLAMA4,
    "llama4": replace(
        _LLAMA4,
        architecture="Llama4ForConditionalGeneration",
        weights=tuple(
            replace(weight, name=f"language_model.{weight.name}", ours=weight.ours or weight.name)
            for weight in _LLAMA4.weights
        ),
        sizes=_whole_sizes,
        needed=("text_config",),
        defaults={
            **_LLAMA4_DEFAULTS,
            "vocab_size": 202048,
            "hidden_size": 5120,
            "intermediate_size": 8192,
            "num_hidden_layers": 48,
            "num_attention_heads": 40,
        },
        ties={"language_model.lm_head.weight": "model.embed_tokens.weight"},
        in_others_words=_text_alone,
        beside=_vision(),
    ),
}
