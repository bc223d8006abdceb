"""Folders of tiny models whose weights are quantised, as their authors publish them."""

import json

import torch
import transformers
from safetensors.torch import load_file, save_file

FP8 = {"quant_method": "fp8", "activation_scheme": "dynamic", "fmt": "e4m3"}
MXFP4 = {"quant_method": "mxfp4", "modules_to_not_convert": ["model.layers.*.self_attn"]}


def quantised_fp8(tensor, block):
    """Eight-bit floats and the scale of each block [... O I], whose largest number becomes 448."""
    places = tuple(
        torch.arange(size) // step for size, step in zip(tensor.shape[-2:], block, strict=True)
    )
    count = [int(place[-1]) + 1 for place in places]
    largest = torch.zeros(*tensor.shape[:-2], *count)
    for row in range(count[0]):
        for column in range(count[1]):
            rows, columns = places[0] == row, places[1] == column
            own = tensor[..., rows, :][..., columns].float().abs()
            largest[..., row, column] = own.amax(dim=(-2, -1))
    scales = largest / 448
    return (tensor / scales[..., places[0], :][..., places[1]]).to(torch.float8_e4m3fn), scales


def quantise_fp8(folder, block=(8, 8), scale_dtype=torch.float32):
    """Turn a folder of one file into one whose projections in layers are blocks of FP8."""
    path = folder / "model.safetensors"
    tensors = load_file(path)
    for name, tensor in list(tensors.items()):
        if ".layers." in name and name.endswith("proj.weight"):
            tensors[name], scales = quantised_fp8(tensor, block)
            tensors[f"{name}_scale_inv"] = scales.to(scale_dtype)
    save_file(tensors, path, metadata={"format": "pt"})
    edit_config(folder, quantization_config={**FP8, "weight_block_size": list(block)})


def quantise_mxfp4(folder):
    """Turn a folder of a GPT-OSS into one whose experts are random groups of MXFP4."""
    path = folder / "model.safetensors"
    tensors = load_file(path)
    for name in list(tensors):
        if name.endswith(("experts.gate_up_proj", "experts.down_proj")):
            experts, inputs, outputs = tensors.pop(name).shape
            shape = (experts, outputs, inputs // 32)
            blocks = torch.randint(0, 256, (*shape, 16), dtype=torch.uint8)
            tensors[f"{name}_blocks"] = blocks
            tensors[f"{name}_scales"] = torch.randint(120, 126, shape, dtype=torch.uint8)
    save_file(tensors, path, metadata={"format": "pt"})
    edit_config(folder, quantization_config=MXFP4)


def edit_config(folder, **entries):
    """Write entries into a folder's config; ``None`` takes one out."""
    path = folder / "config.json"
    config = {**json.loads(path.read_text()), **entries}
    path.write_text(json.dumps({key: value for key, value in config.items() if value is not None}))


def tiny_gpt_oss(dtype=torch.bfloat16):
    torch.manual_seed(1)
    config = transformers.GptOssConfig(
        vocab_size=10,
        hidden_size=64,
        intermediate_size=32,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=32,
        num_local_experts=4,
        num_experts_per_tok=2,
        layer_types=["full_attention"],
    )
    return transformers.GptOssForCausalLM(config).to(dtype)
