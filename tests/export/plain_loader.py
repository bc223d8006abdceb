"""Quantised folders as plain weights and rounded activations, in as few lines as there can be.

Nothing of the exporter is used: a format is read as its description says.
"""

import json

import torch
from safetensors.torch import load_file, save_file

FP4 = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0])


def tensors_in(folder):
    """All tensors of a folder's files."""
    files = sorted(folder.glob("*.safetensors"))
    return {name: tensor for file in files for name, tensor in load_file(file).items()}


def dequantised(folder, out):
    """A plain folder in float32 of a quantised one; scales of inputs, keys and values by name."""
    config = json.loads((folder / "config.json").read_text())
    settings = config.pop("quantization_config")
    method = settings.get("quant_algo", settings["quant_method"])
    tensors, weights = tensors_in(folder), {}
    scales = {
        name: float(value)
        for name, value in tensors.items()
        if name.rpartition(".")[2] in ("input_scale", "k_scale", "v_scale")
    }
    for name, value in tensors.items():
        if name.endswith("weight"):
            weights[name] = _weight(method, settings, name, value, tensors).contiguous()
        elif name.endswith(("bias", "A_log", ".D")):
            weights[name] = value.float()
    out.mkdir()
    config["dtype"] = config["torch_dtype"] = "float32"
    (out / "config.json").write_text(json.dumps(config))
    save_file(weights, out / "model.safetensors", metadata={"format": "pt"})
    return method, scales


def _weight(method, settings, name, value, tensors):
    if f"{name}_scale_inv" in tensors:
        return _by_blocks(value, tensors[f"{name}_scale_inv"], settings["weight_block_size"])
    scale = tensors.get(f"{name}_scale")
    if scale is None:
        return value.float()
    if method == "FP8":
        return value.float() * scale
    if method == "W8A16":
        return value.float() * scale[:, None]
    if method == "NVFP4":
        codes = torch.stack([value & 15, value >> 4], -1).flatten(1).long()
        numbers = FP4[codes & 7] * torch.where(codes >= 8, -1.0, 1.0)
        return numbers * scale.float().repeat_interleave(16, 1) * tensors[f"{name}_scale_2"]
    assert method == "W4A16_AWQ"
    codes = torch.stack([value & 15, value >> 4], 1).flatten(0, 1).int()
    numbers = torch.where(codes >= 8, codes - 16, codes).float()
    numbers = numbers * scale.repeat_interleave(numbers.shape[1] // scale.shape[1], 1)
    return numbers * tensors[name.replace("weight", "pre_quant_scale")].float()


def _by_blocks(value, scales, block):
    rows, columns = value.shape
    whole = scales.repeat_interleave(block[0], 0).repeat_interleave(block[1], 1)
    return value.float() * whole[:rows, :columns]


def rounding(model, method, scales):
    """Have a Decoder round what its weights multiply, and what a cache would hold, as servers do.

    Returns:
        How many places round: an input of each weight, and a cache of each layer.
    """
    places = 0
    modules = dict(model.named_modules())
    for name, scale in scales.items():
        path, _, kind = name.rpartition(".")
        if kind == "input_scale" and path in modules:
            round_ = _fp8 if method == "FP8" else _nvfp4
            modules[path].register_forward_pre_hook(
                lambda _, args, round_=round_, scale=scale: (round_(args[0], scale),)
            )
            places += 1
        elif kind == "k_scale":
            value_scale = scales[f"{path.removesuffix('k_proj')}v_proj.v_scale"]
            modules[path.removesuffix("k_proj") + "cached_heads"].register_forward_pre_hook(
                lambda _, heads, pair=(scale, value_scale): tuple(map(_fp8, heads, pair))
            )
            places += 1
    return places


def _fp8(x, scale):
    return (x / scale).clamp(-448, 448).to(torch.float8_e4m3fn).to(x.dtype) * scale


def _nvfp4(x, scale):
    """Groups of 16, each with an E4M3 scale of its own, which are scaled by one for all."""
    groups = x.unflatten(-1, (-1, 16))
    own = (groups.abs().amax(-1, keepdim=True) / 6 / scale).clamp(2.0**-9, 448)
    own = own.to(torch.float8_e4m3fn).float() * scale
    distance = ((groups / own).abs().unsqueeze(-1) - FP4).abs()
    return (FP4[distance.argmin(-1)] * groups.sign() * own).flatten(-2)
