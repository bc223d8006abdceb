"""Names that we write are names that vLLM and SGLang load, by their pinned sources.

Nothing of theirs is run or built: their model files are parsed. A part of a name ("model",
"q_proj", "w1") is known if a class of the model's file, or of a file of models and of state-space
layers that it imports, has an attribute of this name, or if a string there has it (as those of
their mappings: stacked projections, experts, renamed prefixes). This finds a name, a prefix or a
spelling that they do not have. It does not check shapes, the order of the parts, nor that a part
belongs to the class where it stands.
"""

import ast
import re
import sys
import tarfile
import zipfile
from functools import cache
from pathlib import Path

import pytest

from megablocks_core.export.families import FAMILIES

SOURCES = Path(sys.prefix) / "serving"
pytestmark = pytest.mark.skipif(not SOURCES.exists(), reason="oracle serving")

# Families that both serve with classes of their own, and what their configs must have beside sizes.
SIZES = {
    "vocab_size": 16,
    "hidden_size": 8,
    "intermediate_size": 8,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
}
EXPERTS = {"num_experts": 2, "moe_intermediate_size": 4}
CONFIGS = {
    "llama": {"attention_bias": True},
    "mistral": {},
    "qwen2": {},
    "qwen3": {"head_dim": 4},
    "mixtral": {"num_local_experts": 2},
    "qwen2_moe": {**EXPERTS, "shared_expert_intermediate_size": 4},
    "qwen3_moe": {**EXPERTS, "head_dim": 4},
    "deepseek_v3": {
        "n_routed_experts": 2,
        "moe_intermediate_size": 4,
        "first_k_dense_replace": 1,
        "q_lora_rank": 4,
        "kv_lora_rank": 4,
        "qk_rope_head_dim": 2,
        "qk_nope_head_dim": 2,
        "v_head_dim": 2,
    },
    "glm4_moe": {
        "n_routed_experts": 2,
        "moe_intermediate_size": 4,
        "first_k_dense_replace": 1,
        "use_qk_norm": True,
    },
    "gpt_oss": {"num_local_experts": 2},
    "gemma3_text": {},
    "qwen3_next": {**EXPERTS, "shared_expert_intermediate_size": 4, "head_dim": 4},
    "gpt2": {"n_embd": 8, "n_layer": 2, "n_head": 2, "n_positions": 16},
    "nemotron_h": {
        "layers_block_type": ["mamba", "attention", "mlp", "moe"],
        "n_routed_experts": 2,
        "moe_intermediate_size": 4,
        "moe_shared_expert_intermediate_size": 4,
    },
    "granitemoehybrid": {
        "layers_block_type": ["mamba", "attention"],
        "num_local_experts": 2,
        "shared_intermediate_size": 4,
        "mamba_n_heads": 4,
    },
}
# Folders of models, and of the layers of state-space blocks that they import.
PACKAGES = {
    "vllm": "vllm/model_executor/(?:models|layers/mamba(?:/gdn)?)",
    "sglang": "sglang/srt/(?:models|layers/attention/mamba)",
}


@cache
def model_files(package):
    """Text of each file of models and their layers, by name without ending; of one name, joined."""
    inside = re.compile(rf"(?:.*/)?{PACKAGES[package]}/(\w+)\.py")
    (archive,) = SOURCES.glob(f"{package}-*")
    found = {}
    for name, data in _members(archive, inside.fullmatch):
        found.setdefault(inside.fullmatch(name)[1], []).append(data.decode())
    return {name: "\n".join(texts) for name, texts in found.items()}


def _members(archive, chosen):
    if archive.suffix == ".whl":
        with zipfile.ZipFile(archive) as files:
            yield from ((name, files.read(name)) for name in files.namelist() if chosen(name))
    else:
        with tarfile.open(archive) as files:
            for member in files:
                if chosen(member.name):
                    yield member.name, files.extractfile(member).read()


def file_of(package, architecture):
    """The file whose class serves an architecture."""
    files = model_files(package)
    if package == "vllm":
        row = re.search(rf'"{architecture}": \(\s*"(\w+)"', files["registry"])
        return row and row[1]
    for name, text in files.items():
        if re.search(rf"^class {architecture}\b", text, re.M) and "EntryClass" in text:
            return name
    return None


def parts_known(package, file, seen=None):
    """Attributes and strings of mappings of a file, and of those that it imports."""
    files, seen = model_files(package), set() if seen is None else seen
    if file in seen or file not in files:
        return set()
    seen.add(file)
    known = set()
    for node in ast.walk(ast.parse(files[file])):
        match node:
            case ast.Attribute(attr=name, ctx=ast.Store()):
                known.add(name)
            case ast.Constant(value=str(text)) if re.fullmatch(r"[\w.]+", text):
                known |= set(text.split("."))
            case ast.Call(func=ast.Attribute(attr="register_parameter"), args=[name, *_]):
                known.add(getattr(name, "value", ""))
            case ast.ImportFrom(module=str(module)) if module.split(".")[-1] in files:
                known |= parts_known(package, module.split(".")[-1], seen)
    return known


def unknown_names(package, family, names):
    file = file_of(package, FAMILIES[family].architecture)
    assert file is not None, f"{package} has no class of {FAMILIES[family].architecture}"
    known = parts_known(package, file) | {"weight", "bias"}
    return [
        name
        for name in names
        if any(not part.isdigit() and part not in known for part in name.split("."))
    ]


@pytest.mark.parametrize("package", list(PACKAGES))
@pytest.mark.parametrize("family", list(CONFIGS))
def test_they_know_every_name_that_is_written(package, family):
    names = FAMILIES[family].layout({**SIZES, **CONFIGS[family]}).schema
    assert len(names) > 10
    assert unknown_names(package, family, names) == []


@pytest.mark.parametrize("package", list(PACKAGES))
def test_a_name_that_they_do_not_have_is_found(package):
    wrong = ["model.layers.0.mlp.gating.weight", "decoder_of.layers.0.self_attn.q_proj.weight"]
    right = ["model.layers.0.self_attn.q_proj.weight", "model.norm.weight"]
    assert unknown_names(package, "llama", [*right, *wrong]) == wrong
    experts = "model.layers.0.mlp.experts.0.w9.weight"
    assert unknown_names(package, "mixtral", [experts]) == [experts]


@pytest.mark.parametrize("package", list(PACKAGES))
def test_names_of_another_family_are_found(package):
    names = FAMILIES["mixtral"].layout({**SIZES, **CONFIGS["mixtral"]}).schema
    experts = [name for name in names if "block_sparse_moe" in name]
    assert experts and unknown_names(package, "qwen3", names) == experts
