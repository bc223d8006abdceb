"""Checkpoints of TensorRT-LLM as plain Hugging Face folders of Llama's layout, in few lines.

Nothing of the exporter is used: slices of ranks are joined as the format's description says.
"""

import json

import torch
from safetensors.torch import load_file, save_file


def dequantised_trtllm(folder, config, out):
    """A plain folder in float32, with ``config``; scales of inputs, keys and values by name."""
    said = json.loads((folder / "config.json").read_text())
    tp, pp = said["mapping"]["tp_size"], said["mapping"]["pp_size"]
    ranks = [load_file(folder / f"rank{rank}.safetensors") for rank in range(tp * pp)]
    stages = [ranks[stage * tp : stage * tp + tp] for stage in range(pp)]
    vocab = said["vocab_size"]
    embedding = _joined(stages[0], "transformer.vocab_embedding", 0)
    weights = {
        "model.embed_tokens.weight": embedding[:vocab],
        "model.norm.weight": stages[-1][0]["transformer.ln_f.weight"].float(),
        "lm_head.weight": _joined(stages[-1], "lm_head", 0)[:vocab],
    }
    scales = {}
    counts = [len(part) for part in torch.arange(said["num_hidden_layers"]).tensor_split(pp)]
    for stage, count in zip(stages, counts, strict=True):
        for local in range(count):
            layer = sum(name.endswith("q_proj.weight") for name in weights)
            ours, theirs = f"model.layers.{layer}", f"transformer.layers.{local}"
            weights |= _layer(stage, theirs, ours, said)
            scales |= _scales(stage[0], theirs, ours)
    out.mkdir()
    config = {**config, "dtype": "float32", "torch_dtype": "float32"}
    (out / "config.json").write_text(json.dumps(config))
    tensors = {name: weight.contiguous() for name, weight in weights.items()}
    save_file(tensors, out / "model.safetensors", metadata={"format": "pt"})
    return scales


def _layer(stage, theirs, ours, said):
    heads, kv_heads, size = (
        said[name] for name in ("num_attention_heads", "num_key_value_heads", "head_size")
    )
    tp = len(stage)
    parts = [heads // tp * size, max(1, kv_heads // tp) * size, max(1, kv_heads // tp) * size]
    rows = [_weight(one, f"{theirs}.attention.qkv").split(parts) for one in stage]
    q, k, v = ([row[index] for row in rows] for index in range(3))
    copies = max(1, tp // kv_heads)
    found = {
        "self_attn.q_proj": torch.cat(q),
        "self_attn.k_proj": torch.cat(k[::copies]),
        "self_attn.v_proj": torch.cat(v[::copies]),
        "self_attn.o_proj": _joined(stage, f"{theirs}.attention.dense", 1),
        **(_experts if "moe" in said else _mlp)(stage, theirs, said),
        "input_layernorm": stage[0][f"{theirs}.input_layernorm.weight"].float(),
        "post_attention_layernorm": stage[0][f"{theirs}.post_layernorm.weight"].float(),
    }
    return {f"{ours}.{name}.weight": weight for name, weight in found.items()}


def _mlp(stage, theirs, _):
    return {
        "mlp.gate_proj": _joined(stage, f"{theirs}.mlp.fc", 0),
        "mlp.up_proj": _joined(stage, f"{theirs}.mlp.gate", 0),
        "mlp.down_proj": _joined(stage, f"{theirs}.mlp.proj", 1),
    }


def _experts(stage, theirs, said):
    """Mixtral's: neighbours have other experts; slices of one are further apart."""
    ep, count = said["mapping"]["moe_ep_size"], said["moe"]["num_experts"]
    found = {"block_sparse_moe.gate": stage[0][f"{theirs}.mlp.router.weight"]}
    for expert in range(count):
        owner, local = divmod(expert, count // ep)
        halves, downs = [], []
        for rank in stage[owner::ep]:
            halves.append(_weight(rank, f"{theirs}.mlp.fc")[local].chunk(2))
            downs.append(_weight(rank, f"{theirs}.mlp.proj")[local])
        up, gate = (torch.cat(parts) for parts in zip(*halves, strict=True))
        own = f"block_sparse_moe.experts.{expert}"
        found |= {f"{own}.w1": gate, f"{own}.w3": up, f"{own}.w2": torch.cat(downs, 1)}
    return found


def _joined(stage, name, dim):
    return torch.cat([_weight(one, name) for one in stage], dim)


def _weight(tensors, name):
    factor = tensors.get(f"{name}.weights_scaling_factor", torch.ones(1))
    if factor.numel() > 1:  # of each expert
        factor = factor.view(-1, 1, 1)
    return tensors[f"{name}.weight"].float() * factor


def _scales(tensors, theirs, ours):
    places = {
        "attention.qkv": ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
        "attention.dense": ("self_attn.o_proj",),
        "mlp.fc": ("mlp.gate_proj",),
        "mlp.gate": ("mlp.up_proj",),
        "mlp.proj": ("mlp.down_proj",),
    }
    found = {}
    for name, modules in places.items():
        factor = tensors.get(f"{theirs}.{name}.activation_scaling_factor")
        if factor is not None:
            found |= {f"{ours}.{one}.input_scale": factor.item() for one in modules}
    factor = tensors.get(f"{theirs}.attention.kv_cache_scaling_factor")
    if factor is not None:
        found |= {f"{ours}.self_attn.{one}_proj.{one}_scale": factor.item() for one in "kv"}
    return found
