"""Routers of published models, on the same weights, in transformers' own code."""

from importlib import import_module

import pytest
import torch
from torch.testing import assert_close

from megablocks_core.layers.moe import GroupLimit, TopKRouter

pytest.importorskip("transformers", reason="oracle transformers")

T, H, E = 40, 16, 16
DEEPSEEK = {"n_group": 4, "topk_group": 2, "norm_topk_prob": True, "routed_scaling_factor": 2.5}
SIGMOID = {
    "score": "sigmoid",
    "scale": 2.5,
    "groups": GroupLimit(4, 2, best=2),
    "selection_bias": True,
}

# Model, its router's class, entries of its config, and what they are here.
ROUTERS = [
    ("mixtral", "MixtralTopKRouter", {"num_local_experts": E}, {}),
    ("qwen3_moe", "Qwen3MoeTopKRouter", {"num_experts": E, "norm_topk_prob": True}, {}),
    (
        "qwen3_next",
        "Qwen3NextTopKRouter",
        {"num_experts": E, "norm_topk_prob": False},
        {"renormalize": False},
    ),
    (
        "olmoe",
        "OlmoeTopKRouter",
        {"num_experts": E, "norm_topk_prob": False},
        {"renormalize": False},
    ),
    ("deepseek_v3", "DeepseekV3TopkRouter", {"n_routed_experts": E, **DEEPSEEK}, SIGMOID),
    ("glm4_moe", "Glm4MoeTopkRouter", {"n_routed_experts": E, **DEEPSEEK}, SIGMOID),
    (
        "deepseek_v2",
        "DeepseekV2TopkRouter",
        {
            "n_routed_experts": E,
            **DEEPSEEK,
            "topk_method": "group_limited_greedy",
            "num_attention_heads": 1,
        },
        {"renormalize": False, "scale": 2.5, "groups": GroupLimit(4, 2)},
    ),
    ("gpt_oss", "GptOssTopKRouter", {"num_local_experts": E}, {"bias": True}),
]


@pytest.mark.parametrize("model, name, entries, options", ROUTERS, ids=[r[0] for r in ROUTERS])
def test_choices_weights_and_gradients_are_theirs(model, name, entries, options):
    package = f"transformers.models.{model}"
    configs = import_module(f"{package}.configuration_{model}")
    (kind,) = {
        value
        for key, value in vars(configs).items()
        if key.endswith("Config") and getattr(value, "model_type", None) == model
    }
    config = kind(hidden_size=H, num_experts_per_tok=4, **entries)
    theirs = getattr(import_module(f"{package}.modeling_{model}"), name)(config)
    torch.manual_seed(0)
    ours = TopKRouter(H, num_experts=E, top_k=4, **options)
    if options.get("selection_bias"):
        ours.e_score_correction_bias.copy_(0.1 * torch.randn(E))
    if options.get("bias"):
        ours.bias.data.normal_()
    theirs.load_state_dict(ours.state_dict())

    x = torch.randn(1, T, H)
    xs = [x.clone().requires_grad_() for _ in range(2)]
    routing = ours(xs[0][0])
    _, weights, indices = theirs(xs[1][0] if model == "gpt_oss" else xs[1])
    order = indices.sort(dim=-1).indices
    own = routing.indices.sort(dim=-1).indices
    assert torch.equal(routing.indices.gather(1, own), indices.gather(1, order))
    assert_close(routing.weights.gather(1, own), weights.gather(1, order))

    slope = torch.randn(T, 4)
    (routing.weights.gather(1, own) * slope).sum().backward()
    (weights.gather(1, order) * slope).sum().backward()
    assert_close(xs[0].grad, xs[1].grad)
    assert_close(ours.weight.grad, theirs.weight.grad)


def test_dbrx_divides_by_the_sum_of_absolute_values():
    configs, models = (
        import_module(f"transformers.models.dbrx.{kind}_dbrx")
        for kind in ("configuration", "modeling")
    )
    ffn = {"moe_num_experts": E, "moe_top_k": 4, "ffn_hidden_size": 8}
    ours = TopKRouter(H, num_experts=E, top_k=4)
    for p in (1.0, 2.0):
        config = configs.DbrxConfig(
            d_model=H, n_heads=2, ffn_config={**ffn, "moe_normalize_expert_weights": p}
        )
        config.ffn_config.hidden_size = H
        theirs = models.DbrxFFN(config).eval()
        theirs.router.layer.weight.data.copy_(ours.weight.data)
        x = torch.randn(T, H)
        weights, indices = theirs.route_tokens_to_experts(theirs.router(x))
        ours.renormalize = p
        routing = ours(x)
        assert torch.equal(routing.indices, indices)
        assert_close(routing.weights, weights)
