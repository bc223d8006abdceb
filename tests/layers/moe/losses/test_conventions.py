"""Converted coefficients pull on a router as those of other libraries do."""

import pytest
import torch
from torch.nn.functional import one_hot
from torch.testing import assert_close
from transformers.models.mixtral.modeling_mixtral import load_balancing_loss_func

from megablocks_core.layers.moe.losses import convert_coefficient, load_balance_loss, z_loss
from megablocks_core.layers.moe.losses.conventions import BALANCE, Z
from megablocks_core.layers.moe.routers import route_top_k

B, S, E, K, LAYERS = 3, 4, 6, 2, 2
SIZES = {"num_experts": E, "top_k": K, "num_layers": LAYERS, "data_parallel": 2}


def layers(count=LAYERS):
    """Logits of each layer [B*S E]."""
    made = torch.Generator().manual_seed(0)
    logits = [torch.randn(B * S, E, generator=made, dtype=torch.float64) for _ in range(count)]
    return [each.requires_grad_() for each in logits]


def chosen(logits, top_k=K):
    """How many tokens chose each expert, and mean probabilities."""
    scores = logits.softmax(-1)
    return one_hot(scores.topk(top_k).indices, E).sum((0, 1)).double(), scores.mean(0)


def megablocks(weight, logits):
    counts, means = zip(*(chosen(each) for each in logits), strict=True)
    scale = weight * E / (len(logits) * B * S * K)
    return scale * torch.dot(torch.cat(counts), torch.cat(means))


def switch(weight, logits):
    return sum(
        weight * E * torch.dot(counts / (B * S), means)
        for counts, means in (chosen(each, top_k=1) for each in logits)
    )


def gshard(weight, logits):
    parts = (chosen(each, top_k=1) for each in logits)
    return sum(weight * (counts / (B * S) * means).mean() for counts, means in parts)


def torchtitan(weight, logits):
    total = 0
    for each in logits:
        counts, means = chosen(each)
        total = total + weight * (E * counts / counts.sum() * means * B * S).sum() / (B * S)
    return total


def olmo_local(weight, logits):
    parts = (chosen(each) for each in logits)
    return sum(weight * E / K * torch.dot(counts, means) / (B * S) for counts, means in parts)


def olmo_instance(weight, logits):
    total = 0
    for each in logits:
        for sequence in each.split(S):
            counts, means = chosen(sequence)
            total = total + weight * E / K * torch.dot(counts, means) / (B * S)
    return total


def deepseek(weight, logits):
    total = 0
    for each in logits:
        for sequence in each.split(S):
            counts, means = chosen(sequence)
            total = total + weight * torch.dot(E / (K * S) * counts, means) / B
    return total


@pytest.mark.parametrize(
    ("source", "theirs", "top_k", "options"),
    [
        ("megablocks.load_balancing_loss", megablocks, K, {}),
        ("torchtitan.load_balance_loss", torchtitan, K, {}),
        ("olmo_core.local_batch", olmo_local, K, {}),
        ("olmo_core.instance", olmo_instance, K, {"sequence_length": S}),
        ("deepseek_v3", deepseek, K, {"sequence_length": S}),
        ("switch", switch, 1, {}),
        ("gshard", gshard, 1, {}),
    ],
)
def test_balance_losses_by_their_published_formulas(source, theirs, top_k, options):
    expected, ours = layers(), layers()
    theirs(0.3, expected).backward()
    coefficient = convert_coefficient(0.3, source=source, **SIZES)
    for logits in ours:
        routing = route_top_k(logits, top_k=top_k)
        (coefficient * load_balance_loss(routing, **options)).backward()
    for one, other in zip(ours, expected, strict=True):
        assert_close(one.grad, other.grad, atol=1e-12, rtol=0)


def test_f070_transformers_does_not_divide_by_top_k():
    (expected,), (ours,) = layers(1), layers(1)
    (0.3 * torch.as_tensor(load_balancing_loss_func((expected,), E, K))).backward()
    sizes = {"top_k": K, "num_layers": 1}
    source = "transformers.load_balancing_loss"
    coefficient = convert_coefficient(0.3, source=source, **sizes)
    (coefficient * load_balance_loss(route_top_k(ours, top_k=K))).backward()
    assert_close(ours.grad, expected.grad, atol=1e-7, rtol=0)  # it counts in float32


def test_transformers_divides_by_the_number_of_layers():
    same = layers(1)[0].detach()
    expected, ours = ([same.clone().requires_grad_() for _ in range(3)] for _ in range(2))
    (0.3 * torch.as_tensor(load_balancing_loss_func(tuple(expected), E, K))).backward()
    source = "transformers.load_balancing_loss"
    coefficient = convert_coefficient(0.3, source=source, top_k=K, num_layers=3)
    for logits in ours:
        (coefficient * load_balance_loss(route_top_k(logits, top_k=K))).backward()
    assert_close(ours[0].grad, expected[0].grad, atol=1e-7, rtol=0)


def test_z_losses_are_means_over_tokens_added_over_layers():
    for source in Z:
        assert convert_coefficient(0.3, source=source) == 0.3
    (logits,) = layers(1)
    routing = route_top_k(logits, top_k=K)
    assert_close(z_loss(routing), logits.exp().sum(-1).log().square().mean())


def test_from_one_library_to_another_and_back():
    for source in BALANCE:
        for to in BALANCE:
            there = convert_coefficient(0.3, source=source, to=to, **SIZES)
            assert_close(convert_coefficient(there, source=to, to=source, **SIZES), 0.3)
    transformers = "transformers.load_balancing_loss"
    value = convert_coefficient(0.01, source="megatron.aux_loss", to=transformers, **SIZES)
    assert_close(value, 0.01 * LAYERS / K)
    # Both divide by the number of layers.
    megablocks = "megablocks.load_balancing_loss"
    assert_close(convert_coefficient(0.1, source=megablocks, to=transformers, top_k=K), 0.1 / K)


def test_what_cannot_be_converted_is_refused():
    for options, words in (
        ({"source": "mine"}, "source='mine' must be one of"),
        ({"source": "switch", "to": "z_loss"}, "to='z_loss' must be one of"),
        ({"source": "z_loss", "to": "switch"}, "to='switch' must be one of"),
        ({"source": "gshard"}, "num_experts=None must be at least 1"),
        ({"source": "switch", "to": "megablocks.load_balancing_loss"}, "num_layers=None"),
        ({"source": "gshard", "num_experts": 0}, "num_experts=0"),
    ):
        with pytest.raises(ValueError, match=words):
            convert_coefficient(1.0, **options)


def test_megatron_losses_by_its_own_functions():
    name = "megatron.core.transformer.moe.moe_utils"
    moe = pytest.importorskip(name, reason="oracle megatron")

    def theirs(logits, *, width=E, tokens=B * S, counts=None):
        chosen_TE, scores_TE = moe.compute_routing_scores_for_aux_loss(logits, K, "softmax")
        chosen_TE, scores_TE = (x.reshape(-1, width) for x in (chosen_TE, scores_TE))
        counts = chosen_TE.sum(0) if counts is None else counts
        return moe.switch_load_balancing_loss_func(scores_TE, counts, tokens, K, E, 0.3)

    def gradients(loss_of):
        (logits,) = layers(1)
        loss_of(logits).backward()
        return logits.grad

    def check(source, options, loss_of):
        coefficient = convert_coefficient(0.3, source=source, **SIZES)
        ours = gradients(
            lambda logits: coefficient * load_balance_loss(route_top_k(logits, top_k=K), **options)
        )
        assert_close(ours, gradients(loss_of), atol=1e-7, rtol=0)  # it computes in float32

    check("megatron.aux_loss", {}, theirs)
    # A batch of B lies beside experts there: tokens are [S B].
    check(
        "megatron.seq_aux_loss",
        {"sequence_length": S},
        lambda logits: (
            theirs(logits.view(B, S, E).transpose(0, 1).reshape(-1, E), width=B * E, tokens=S) / B
        ),
    )

    # Two data-parallel ranks, each with its tokens and all counts; gradients are averaged.
    def over_two_ranks(logits):
        counts = chosen(logits.detach())[0]
        return sum(theirs(part, counts=counts) / 2 for part in logits.tensor_split(2))

    check("megatron.global_aux_loss", {}, over_two_ranks)
    assert_close(
        gradients(lambda logits: moe.z_loss_func(logits, 0.3)),
        gradients(lambda logits: 0.3 * z_loss(route_top_k(logits, top_k=K))),
    )
