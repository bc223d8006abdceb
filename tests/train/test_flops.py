"""Operations are those that torch counts while a model runs, within one in a hundred."""

import pytest
import torch
from torch import nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import linear, scaled_dot_product_attention, silu
from torch.utils.flop_counter import FlopCounterMode

from megablocks_core.layers import Decoder, DecoderSpec
from megablocks_core.train import (
    AttentionWork,
    ExpertsWork,
    FeedForwardWork,
    LinearWork,
    decoder_work,
    mfu,
    pooled,
    training_flops,
)


def counted(run):
    """Operations of ``run`` by torch; its fused attention on CPU is one that it cannot count."""
    with sdpa_kernel(SDPBackend.MATH), FlopCounterMode(display=False) as counter:
        run()
    return counter.get_total_flops()


def spec(**options):
    sizes = {
        "vocab_size": 96,
        "hidden_size": 32,
        "ffn_size": 80,
        "num_layers": 3,
        "num_heads": 4,
        "num_kv_heads": 4,
        "head_dim": 8,
    }
    return DecoderSpec(**{**sizes, **options})


SPECS = [
    spec(),
    spec(num_kv_heads=2, tied=True),
    spec(num_kv_heads=1, head_dim=16, qk_norm=True, family="qwen3"),
    spec(attention_bias=True, mlp_bias=True),
]


@pytest.mark.parametrize("spec", SPECS, ids=["plain", "grouped-tied", "multi-query", "biases"])
@pytest.mark.parametrize("rows", [(1, 64), (3, 17), (2, 200)])
def test_a_dense_decoder_costs_what_torch_counts(spec, rows):
    model, tokens = Decoder(spec), torch.zeros(rows, dtype=torch.long)
    ours = training_flops(decoder_work(spec), [rows[1]] * rows[0])
    assert ours == pytest.approx(counted(lambda: model(tokens).logits.sum().backward()), rel=0.01)


@pytest.mark.parametrize("lengths", [[64], [1, 63], [20, 1, 1, 100, 6], [5] * 12])
def test_packed_documents_cost_the_squares_of_their_lengths(lengths):
    shape = SPECS[1]
    model = Decoder(shape)
    tokens = torch.zeros(sum(lengths), dtype=torch.long)
    cu_seqlens = torch.tensor([0, *lengths]).cumsum(0)
    found = counted(lambda: model(tokens, cu_seqlens=cu_seqlens).logits.sum().backward())
    ours = training_flops(decoder_work(shape), cu_seqlens.diff().tolist())
    assert ours == pytest.approx(found, rel=0.01)
    if len(lengths) > 2:
        assert ours < training_flops(decoder_work(shape), [sum(lengths)])


class Experts(nn.Module):
    """The plainest mixture of experts: a loop over those that were chosen."""

    def __init__(self, work):
        super().__init__()
        self.top_k, hidden, ffn = work.top_k, work.hidden_size, work.ffn_size
        self.router = nn.Linear(hidden, work.num_experts, bias=False)
        self.experts = nn.ModuleList(_gated(hidden, ffn) for _ in range(work.num_experts))
        self.shared = _gated(hidden, work.shared_ffn_size) if work.shared_ffn_size else None

    def forward(self, x):
        scores, chosen = self.router(x).softmax(-1).topk(self.top_k)
        y = torch.zeros_like(x) if self.shared is None else _apply(self.shared, x)
        for index, expert in enumerate(self.experts):
            token, place = (chosen == index).nonzero(as_tuple=True)
            if len(token):
                update = _apply(expert, x[token]) * scores[token, place, None]
                y = y.index_add(0, token, update)
        return y


def _gated(hidden, ffn):
    sizes = [(hidden, ffn), (hidden, ffn), (ffn, hidden)]
    return nn.ModuleList(nn.Linear(*each, bias=False) for each in sizes)


def _apply(parts, x):
    gate, up, down = parts
    return down(silu(gate(x)) * up(x))


@pytest.mark.parametrize("shared", [0, 24])
@pytest.mark.parametrize("top_k", [1, 2, 8])
def test_experts_cost_what_is_active(top_k, shared):
    work = ExpertsWork(32, 48, num_experts=8, top_k=top_k, shared_ffn_size=shared)
    torch.manual_seed(0)
    layer, x = Experts(work), torch.randn(50, 32, requires_grad=True)
    found = counted(lambda: layer(x).sum().backward())
    assert training_flops([work], [20, 30]) == pytest.approx(found, rel=0.01)


def test_other_models_are_lists_of_parts():
    """A hybrid: a block with attention, one with experts, and one that the user describes."""
    shape, experts = SPECS[1], ExpertsWork(32, 48, num_experts=4, top_k=2)

    class Scan:
        def flops(self, lengths):
            return 1000 * sum(lengths)

    parts = [AttentionWork(32, 4, 2, 8), experts, Scan(), LinearWork(32, 96)]
    lengths = [7, 9]
    assert training_flops(parts, lengths) == 3 * sum(part.flops(lengths) for part in parts)
    sparse = decoder_work(shape, feed_forward=experts)
    assert sparse.count(experts) == 3 and not any(isinstance(p, FeedForwardWork) for p in sparse)


def test_only_pairs_that_attend_count_if_asked_for():
    def pairs(length, **options):
        work = AttentionWork(1, 1, 1, 1, **options)
        return (work.flops([length]) - 2 * length * 4) // 4

    for length in range(12):
        ones = torch.ones(length, length).tril()
        assert pairs(length, causal=True) == ones.sum()
        for window in (1, 3, 20):
            banded = ones - ones.tril(-window)
            assert pairs(length, causal=True, window=window) == banded.sum()
            assert pairs(length, window=window) == length * min(length, window)
        assert pairs(length) == length**2


def test_a_window_that_covers_all_costs_what_torch_counts():
    weights = [torch.randn(32, 32, requires_grad=True) for _ in range(4)]

    def run():
        x = torch.randn(40, 32, requires_grad=True)
        q, k, v = (linear(x, w).view(1, 40, 4, 8).transpose(1, 2) for w in weights[:3])
        y = scaled_dot_product_attention(q, k, v, is_causal=True)
        linear(y.transpose(1, 2).reshape(40, 32), weights[3]).sum().backward()

    for window in (None, 40):
        assert training_flops([AttentionWork(32, 4, 4, 8, window)], [40]) == counted(run)


def test_a_feed_forward_layer_without_gate_has_two_matrices():
    layer = nn.Sequential(nn.Linear(32, 48), nn.GELU(), nn.Linear(48, 32))
    x = torch.randn(10, 32, requires_grad=True)
    found = counted(lambda: layer(x).sum().backward())
    assert training_flops([FeedForwardWork(32, 48, gated=False)], [4, 6]) == found
    assert training_flops([LinearWork(32, 48), LinearWork(48, 32)], [10]) == found
    assert LinearWork(32, 48, times=3).flops([10]) == 3 * LinearWork(32, 48).flops([10])


def test_lengths_in_a_tensor_do_not_wrap_around():
    parts, lengths = [LinearWork(4096, 14336, times=32)], [4096, 4096]
    found = training_flops(parts, torch.tensor(lengths, dtype=torch.int32))
    assert type(found) is int and found == training_flops(parts, lengths) > 2**40


def test_mfu_pools_over_steps_of_different_lengths():
    steps = [mfu(30.0, seconds=1.0, peak_flops=100.0), mfu(10.0, seconds=3.0, peak_flops=100.0)]
    assert steps[0] == 0.3 and pooled(steps) == 0.1


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: LinearWork(0, 4), "in_features=0 must be at least 1"),
        (lambda: AttentionWork(32, 4, 4, 8, window=0), "window=0 must be at least 1"),
        (lambda: FeedForwardWork(32, -1), "ffn_size=-1 must be at least 1"),
        (lambda: ExpertsWork(32, 8, 4, 5), "top_k=5 must not be above num_experts=4"),
        (lambda: ExpertsWork(32, 8, 4, 2, -1), "shared_ffn_size=-1 must be at least 0"),
        (lambda: LinearWork(float("nan"), 4), "in_features=nan must be at least 1"),
        (lambda: training_flops([], [3, -1]), r"lengths=\[3, -1\] must not be negative"),
        (lambda: training_flops([], [3, 1.5]), r"lengths=\[3, 1.5\] must be integers"),
        (lambda: mfu(1.0, seconds=1.0, peak_flops=0.0), "peak_flops=0.0 must be positive"),
        (lambda: mfu(1.0, seconds=-1.0, peak_flops=1.0), "seconds=-1.0 must not be negative"),
    ],
)
def test_wrong_sizes_are_refused(make, message):
    with pytest.raises(ValueError, match=message):
        make()
