"""The layer alone equals transformers' blocks of families whose attention is not built yet."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn
from transformers.models.dbrx.modeling_dbrx import DbrxFFN
from transformers.models.deepseek_v3 import modeling_deepseek_v3 as deepseek
from transformers.models.glm4_moe import modeling_glm4_moe as glm
from transformers.models.gpt_oss.configuration_gpt_oss import GptOssConfig
from transformers.models.gpt_oss.modeling_gpt_oss import GptOssMLP
from transformers.models.qwen3_next.configuration_qwen3_next import Qwen3NextConfig
from transformers.models.qwen3_next.modeling_qwen3_next import Qwen3NextSparseMoeBlock

from megablocks_core.layers import GatedMLP
from megablocks_core.layers.moe import GroupedExperts, GroupLimit, LocalDispatcher, MoE, TopKRouter

F64 = torch.float64
WIDTH, FFN, EXPERTS, TOP_K = 16, 12, 8, 3
SIZES: dict[str, Any] = {
    "hidden_size": WIDTH,
    "moe_intermediate_size": FFN,
    "num_experts_per_tok": TOP_K,
    "hidden_act": "silu",
    "_experts_implementation": "eager",
}


def _eager(config):
    config._experts_implementation = "eager"
    return config


def _deepseek(of=deepseek, kind="Deepseek"):
    name = "DeepseekV3" if kind == "Deepseek" else "Glm4Moe"
    config = getattr(of, f"{name}Config")(
        **{k: v for k, v in SIZES.items() if not k.startswith("_")},
        n_routed_experts=EXPERTS,
        n_shared_experts=2,
        n_group=4,
        topk_group=2,
        routed_scaling_factor=2.5,
        norm_topk_prob=True,
    )
    theirs = getattr(of, f"{name}MoE")(_eager(config))
    router = _router(
        score="sigmoid", scale=2.5, groups=GroupLimit(4, 2, best=2), selection_bias=True
    )
    ours = _moe(router, shared=GatedMLP(WIDTH, 2 * FFN, dtype=F64))
    return theirs, ours, lambda name: name


def _glm():
    return _deepseek(glm, "Glm")


def _gpt_oss():
    config = GptOssConfig(
        hidden_size=WIDTH,
        intermediate_size=FFN,
        num_local_experts=EXPERTS,
        num_experts_per_tok=TOP_K,
    )
    experts = GroupedExperts(EXPERTS, WIDTH, FFN, activation="clamped_swiglu", bias=True, dtype=F64)
    ours = _moe(_router(bias=True), experts=experts)
    return GptOssMLP(_eager(config)), ours, lambda name: name.replace("router.", "gate.")


def _dbrx():
    ffn = SimpleNamespace(
        hidden_size=WIDTH,
        ffn_hidden_size=FFN,
        moe_num_experts=EXPERTS,
        moe_top_k=TOP_K,
        moe_jitter_eps=None,
        moe_normalize_expert_weights=2.0,
        ffn_act_fn={"name": "silu"},
    )
    theirs = DbrxFFN(SimpleNamespace(ffn_config=ffn))
    return theirs, _moe(_router(renormalize=2.0)), lambda name: name.replace("router.layer", "gate")


def _qwen3_next():
    config = Qwen3NextConfig(
        **{k: v for k, v in SIZES.items() if not k.startswith("_")},
        num_experts=EXPERTS,
        shared_expert_intermediate_size=20,
        norm_topk_prob=True,
    )
    ours = _moe(
        _router(),
        shared=GatedMLP(WIDTH, 20, dtype=F64),
        shared_gate=nn.Linear(WIDTH, 1, bias=False, dtype=F64),
    )
    theirs = Qwen3NextSparseMoeBlock(_eager(config))
    return theirs, ours, lambda name: name.replace("shared_expert.", "shared_experts.")


BLOCKS = {
    "DeepSeek-V3": _deepseek,
    "GLM-4.5": _glm,
    "GPT-OSS": _gpt_oss,
    "DBRX": _dbrx,
    "Qwen3-Next": _qwen3_next,
}


@pytest.mark.parametrize("name", BLOCKS)
def test_outputs_and_gradients_are_those_of_transformers(name):
    torch.manual_seed(0)
    theirs, ours, renamed = BLOCKS[name]()
    theirs = theirs.to(F64)
    for tensor in (*theirs.parameters(), *theirs.buffers()):
        nn.init.normal_(tensor, std=0.5)
    values = _ours_of({renamed(key): value for key, value in theirs.state_dict().items()})
    ours.load_state_dict(values)
    x, dy = (torch.randn(3, 11, WIDTH, dtype=F64) for _ in range(2))
    leaves = [x.clone().requires_grad_() for _ in range(2)]
    expected = theirs(leaves[0])
    expected = expected[0] if isinstance(expected, tuple) else expected
    (expected * dy).sum().backward()
    y, routing = ours(leaves[1])
    (y * dy).sum().backward()
    _assert_close("output", y, expected)
    _assert_close("gradient of input", leaves[1].grad, leaves[0].grad)
    gradients = _ours_of({renamed(key): value.grad for key, value in theirs.named_parameters()})
    found = {key: value.grad for key, value in ours.named_parameters()}
    assert found.keys() == gradients.keys()
    for key, gradient in gradients.items():
        _assert_close(key, found[key], gradient)
    assert (routing.tokens_per_expert > 0).sum() > TOP_K


def _router(**options):
    return TopKRouter(WIDTH, num_experts=EXPERTS, top_k=TOP_K, dtype=F64, **options)


def _moe(router, *, experts=None, **options):
    experts = experts or GroupedExperts(EXPERTS, WIDTH, FFN, dtype=F64)
    return MoE(router=router, dispatcher=LocalDispatcher(), experts=experts, **options)


def _ours_of(tensors):
    """Fused tensors of experts taken apart, in the layouts of ours."""
    values = {}
    for name, tensor in tensors.items():
        if name == "experts.gate_up_proj" and "experts.gate_up_proj_bias" in tensors:
            values["experts.gate_proj"] = tensor[..., ::2].mT  # GPT-OSS interleaves, inputs first
            values["experts.up_proj"] = tensor[..., 1::2].mT
        elif name == "experts.gate_up_proj":
            values["experts.gate_proj"], values["experts.up_proj"] = tensor.chunk(2, 1)
        elif name == "experts.gate_up_proj_bias":
            values["experts.gate_bias"], values["experts.up_bias"] = tensor[:, ::2], tensor[:, 1::2]
        elif name == "experts.down_proj_bias":
            values["experts.down_bias"] = tensor
        elif name == "experts.down_proj" and "experts.down_proj_bias" in tensors:
            values[name] = tensor.mT
        elif name in ("experts.mlp.w1", "experts.mlp.v1"):
            part = "gate_proj" if name.endswith("w1") else "up_proj"
            values[f"experts.{part}"] = tensor.unflatten(0, (EXPERTS, FFN))
        elif name == "experts.mlp.w2":
            values["experts.down_proj"] = tensor.unflatten(0, (EXPERTS, FFN)).mT
        else:
            values[name] = tensor
    return values


def _assert_close(name, ours, theirs):
    """Transformers rounds scores, or what a router reads, to float32."""
    error = (ours - theirs).norm() / theirs.norm()
    assert error < 2e-6, f"{name}: {error}"
