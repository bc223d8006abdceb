"""What each rank's file must hold, cut by hand out of whole tensors; and models to try it on."""

import torch
from torch import Tensor

SIZES = {
    "vocab_size": 11,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 32,
}
GPT2 = {"vocab_size": 11, "n_embd": 16, "n_layer": 3, "n_head": 4, "n_positions": 10}
MAMBA2 = {
    "vocab_size": 11,
    "hidden_size": 16,
    "num_hidden_layers": 3,
    "num_heads": 4,
    "head_dim": 8,
    "state_size": 6,
    "n_groups": 4,
    "expand": 2,
}
EXPERTS = {"num_local_experts": 4, "num_experts_per_tok": 2}
FAMILIES = {
    "llama": {**SIZES, "attention_bias": True, "mlp_bias": True},
    "qwen2": {**SIZES, "tie_word_embeddings": True},
    "qwen3": {**SIZES, "head_dim": 6},
    "mixtral": {**SIZES, **EXPERTS},
    "qwen3_moe": {
        **SIZES,
        "num_experts": 4,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 8,
        "head_dim": 6,
        "norm_topk_prob": True,
    },
    "gpt2": GPT2,
    "gemma": {**SIZES, "head_dim": 6},
    "gemma2": {**SIZES, "head_dim": 6},
    "gemma3_text": {**SIZES, "head_dim": 6},
    "mamba2": MAMBA2,
}
NORMS = {
    "input_layernorm": "input_layernorm",
    "post_attention_layernorm": "post_layernorm",
    "pre_feedforward_layernorm": "pre_feedforward_layernorm",
    "post_feedforward_layernorm": "post_feedforward_layernorm",
    "self_attn.q_norm": "attention.q_layernorm",
    "self_attn.k_norm": "attention.k_layernorm",
}


def ranks_of(family, options, whole, *, tp=1, pp=1, moe_ep=1):
    """The tensors of every rank, from those of a Hugging Face folder."""
    layers = options.get("num_hidden_layers", options.get("n_layer"))
    stages = torch.arange(layers).tensor_split(pp)
    return [
        one_rank(
            family, options, whole, stage.tolist(), (index, tp), moe_ep, (at == 0, at == pp - 1)
        )
        for at, stage in enumerate(stages)
        for index in range(tp)
    ]


def one_rank(family, options, whole, layers, share, moe_ep, ends):
    index, tp = share
    found = {}
    root = "backbone" if family == "mamba2" else "transformer"
    tables = {
        "gpt2": ("transformer.wte.weight", "transformer.ln_f"),
        "mamba2": ("backbone.embeddings.weight", "backbone.norm_f"),
    }
    embedding, norm = tables.get(family, ("model.embed_tokens.weight", "model.norm"))
    rows = -(-11 // tp) * tp
    if ends[0]:
        table = whole[embedding]
        if family != "mamba2":
            table = padded(table, rows, torch.zeros_like(table[:1])).chunk(tp)[index]
        found[f"{root}.vocab_embedding.weight"] = table
        if family == "gpt2":
            positions = whole["transformer.wpe.weight"]
            many = -(-10 // tp) * tp
            table = padded(positions, many, torch.zeros_like(positions[:1])).chunk(tp)[index]
            found[f"{root}.position_embedding.weight"] = table
    for local, layer in enumerate(layers):
        prefix = {"gpt2": "transformer.h", "mamba2": "backbone.layers"}.get(family, "model.layers")
        own = {
            name.removeprefix(f"{prefix}.{layer}."): tensor
            for name, tensor in whole.items()
            if name.startswith(f"{prefix}.{layer}.")
        }
        make = {"gpt2": gpt2_layer, "mamba2": mamba_layer}.get(family, layer_of)
        made = make(family, options, own, index, tp, moe_ep)
        found |= {f"{root}.layers.{local}.{name}": tensor for name, tensor in made.items()}
    if ends[1]:
        for kind in ("weight", "bias"):
            if f"{norm}.{kind}" in whole:
                around = 1 if family.startswith("gemma") else 0
                found[f"{root}.ln_f.{kind}"] = whole[f"{norm}.{kind}"] + around
        head = whole.get("lm_head.weight", whole[embedding])
        found["lm_head.weight"] = padded(
            head, rows, head[:16].double().mean(0, keepdim=True).to(head.dtype)
        ).chunk(tp)[index]
    return found


def padded(table, rows, row):
    return torch.cat([table, row.expand(rows - len(table), -1)])


def heads_of(parts, options, index, tp):
    query, *cached = parts
    heads = options.get("num_key_value_heads", 4)
    found = [query.chunk(tp)[index]]
    for whole in cached:
        each = whole.chunk(heads)
        if heads < tp:
            found.append(each[index * heads // tp])
        else:
            found += each[index * heads // tp : (index + 1) * heads // tp]
    return torch.cat(found)


def layer_of(family, options, own, index, tp, moe_ep) -> dict[str, Tensor]:
    around = 1 if family.startswith("gemma") else 0
    found = {
        f"{ours}.weight": own[f"{theirs}.weight"] + around
        for theirs, ours in NORMS.items()
        if f"{theirs}.weight" in own
    }
    for kind in ("weight", "bias"):
        if f"self_attn.q_proj.{kind}" in own:
            parts = [own[f"self_attn.{name}_proj.{kind}"] for name in "qkv"]
            found[f"attention.qkv.{kind}"] = heads_of(parts, options, index, tp)
    rows(found, "attention.dense", own, "self_attn.o_proj", index, tp)
    if "mlp.gate_proj.weight" in own:
        for theirs, ours in (("gate_proj", "fc"), ("up_proj", "gate")):
            for kind in ("weight", "bias"):
                if f"mlp.{theirs}.{kind}" in own:
                    found[f"mlp.{ours}.{kind}"] = own[f"mlp.{theirs}.{kind}"].chunk(tp)[index]
        rows(found, "mlp.proj", own, "mlp.down_proj", index, tp)
        return found
    block = "block_sparse_moe" if family == "mixtral" else "mlp"
    gate, up, down = (
        ("w1", "w3", "w2") if family == "mixtral" else ("gate_proj", "up_proj", "down_proj")
    )
    found["mlp.router.weight"] = own[f"{block}.gate.weight"].float()
    moe_tp = tp // moe_ep
    at, dealt = index // moe_ep, index % moe_ep
    mine = torch.arange(4).chunk(moe_ep)[dealt].tolist()
    expert = f"{block}.experts.{{}}.{{}}.weight"
    found["mlp.fc.weight"] = torch.stack(
        [
            torch.cat([own[expert.format(one, part)].chunk(moe_tp)[at] for part in (up, gate)])
            for one in mine
        ]
    )
    found["mlp.proj.weight"] = torch.stack(
        [own[expert.format(one, down)].chunk(moe_tp, 1)[at] for one in mine]
    )
    return found


def rows(found, ours, own, theirs, index, tp):
    found[f"{ours}.weight"] = own[f"{theirs}.weight"].chunk(tp, 1)[index]
    if f"{theirs}.bias" in own:
        found[f"{ours}.bias"] = own[f"{theirs}.bias"]


def gpt2_layer(_, options, own, index, tp, moe_ep):
    found = {}
    for kind in ("weight", "bias"):
        found[f"input_layernorm.{kind}"] = own[f"ln_1.{kind}"]
        found[f"post_layernorm.{kind}"] = own[f"ln_2.{kind}"]
    weight, bias = own["attn.c_attn.weight"].T, own["attn.c_attn.bias"]
    found["attention.qkv.weight"] = heads_of(weight.chunk(3), options, index, tp)
    found["attention.qkv.bias"] = heads_of(bias.chunk(3), options, index, tp)
    found["mlp.fc.weight"] = own["mlp.c_fc.weight"].T.chunk(tp)[index]
    found["mlp.fc.bias"] = own["mlp.c_fc.bias"].chunk(tp)[index]
    for theirs, ours in (("attn.c_proj", "attention.dense"), ("mlp.c_proj", "mlp.proj")):
        found[f"{ours}.weight"] = own[f"{theirs}.weight"].T.chunk(tp, 1)[index]
        found[f"{ours}.bias"] = own[f"{theirs}.bias"]
    return found


def mamba_layer(_, options, own, index, tp, moe_ep):
    inner, groups = 32, 24
    found = {"input_layernorm.weight": own["norm.weight"]}
    for name, sizes in (
        ("in_proj.weight", (inner, inner, groups, groups, 4)),
        ("conv1d.weight", (inner, groups, groups)),
        ("conv1d.bias", (inner, groups, groups)),
    ):
        parts = own[f"mixer.{name}"].split(sizes)
        found[f"ssm.{name}"] = torch.cat([part.chunk(tp)[index] for part in parts])
    found["ssm.conv1d.weight"] = found["ssm.conv1d.weight"][..., None]
    found["ssm.out_proj.weight"] = own["mixer.out_proj.weight"].chunk(tp, 1)[index]
    found["ssm.norm.weight"] = own["mixer.norm.weight"].chunk(tp)[index]
    found["ssm.A"] = -own["mixer.A_log"].double().exp().float().chunk(tp)[index]
    found["ssm.D"] = own["mixer.D"].float().chunk(tp)[index]
    found["ssm.dt_bias"] = own["mixer.dt_bias"].float().chunk(tp)[index]
    return found
