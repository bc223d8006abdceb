"""Norms equal torch's, compute in at least float32, and sum weight gradients over parts."""

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor.debug import CommDebugMode
from torch.testing import assert_close

from megablocks_core.groups import LOCAL, Mesh
from megablocks_core.layers.norm import LayerNorm, RMSNorm, on_part
from megablocks_core.testing import ranks


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
@pytest.mark.parametrize("kind", [RMSNorm, LayerNorm])
def test_norm_follows_its_formula(kind, dtype):
    norm = _filled(kind(16, eps=1e-3, dtype=dtype))
    x_TH = torch.randn(5, 16, dtype=dtype, requires_grad=True)
    y_TH = norm(x_TH)
    assert y_TH.dtype == dtype
    assert_close(y_TH, _formula(norm, x_TH.double()).to(dtype))


def test_float64_is_not_rounded():
    norm = _filled(RMSNorm(16, dtype=torch.float64))
    x_TH = torch.randn(5, 16, dtype=torch.float64)
    assert_close(norm(x_TH), _formula(norm, x_TH), atol=1e-14, rtol=1e-14)


def test_16_bit_values_are_squared_and_summed_in_float32():
    norm = RMSNorm(4096, dtype=torch.float16)  # The square of 1000 is beyond float16.
    assert_close(norm(torch.full((1, 4096), 1e3).half()), torch.ones(1, 4096).half())


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_a_norm_around_zero_multiplies_by_one_plus_its_weight(dtype):
    norm, x_TH = RMSNorm(16, eps=1e-3, zero_centered=True, dtype=dtype), torch.randn(99, 16)
    x_TH = x_TH.to(dtype)
    assert_close(norm(x_TH), RMSNorm(16, eps=1e-3, dtype=dtype)(x_TH))
    with torch.no_grad():
        norm.weight.uniform_(-0.1, 0.1)
    around_one = RMSNorm(16, eps=1e-3, dtype=torch.float64)
    around_one.weight = nn.Parameter(1 + norm.weight.double())
    y_TH, expected_TH = norm(x_TH), around_one(x_TH.double()).to(dtype)
    assert_close(y_TH, expected_TH)
    # A weight that was added to one in bfloat16 would change every third value.
    if dtype == torch.bfloat16:
        assert (y_TH == expected_TH).double().mean() > 0.98


@pytest.mark.parametrize("kind", [RMSNorm, LayerNorm])
def test_names_and_initial_values_are_those_of_torch(kind):
    ours, torchs = kind(8), {RMSNorm: nn.RMSNorm, LayerNorm: nn.LayerNorm}[kind](8)
    assert_close(dict(ours.state_dict()), dict(torchs.state_dict()))
    assert "bias" not in LayerNorm(8, bias=False).state_dict()


def test_meta_norms_get_their_values_after_to_empty():
    norm = LayerNorm(8, device="meta").to_empty(device="cpu")
    norm.reset_parameters(seed=3, prefix="model.norm.")
    assert_close(norm.weight, torch.ones(8))
    assert_close(norm.bias, torch.zeros(8))


def test_on_part_over_one_rank_is_the_module_itself():
    norm = RMSNorm(8)
    assert on_part(norm, group=LOCAL) == [norm]


@ranks(2, 4)
def test_on_part_sums_all_weight_gradients_in_one_message():
    tp = Mesh(tp=dist.get_world_size()).group("tp")
    norms = [_filled(RMSNorm(8).double()), _filled(LayerNorm(8).double())]
    x_TH = torch.randn(4 * tp.size, 8, dtype=torch.float64)
    own = slice(4 * tp.rank, 4 * tp.rank + 4)

    first, second = on_part(*norms, group=tp)
    y_TH = second(first(x_TH[own]))
    assert_close(y_TH, norms[1](norms[0](x_TH[own])))
    with CommDebugMode() as traffic:
        y_TH.square().sum().backward()
    parts = [weight.grad for norm in norms for weight in norm.parameters()]

    for norm in norms:
        norm.zero_grad()
    norms[1](norms[0](x_TH)).square().sum().backward()
    whole = [weight.grad for norm in norms for weight in norm.parameters()]
    assert_close(parts, whole)
    assert traffic.get_total_counts() == 1


@ranks(2)
def test_on_part_serves_a_single_norm_of_another_library():
    tp = Mesh(tp=2).group("tp")
    norm = nn.RMSNorm(8)
    (call,) = on_part(norm, group=tp)
    call(torch.ones(1, 8) * (1 + tp.rank)).sum().backward()
    assert_close(norm.weight.grad, torch.full((8,), 2.0))


@pytest.mark.parametrize("zero_centered", [False, True])
def test_norms_compile(zero_centered):
    norm = _filled(RMSNorm(8, zero_centered=zero_centered))
    x_TH = torch.randn(3, 8)
    assert_close(torch.compile(norm, fullgraph=True, backend="aot_eager")(x_TH), norm(x_TH))


def _formula(norm, x_TH):
    if isinstance(norm, LayerNorm):
        x_TH = x_TH - x_TH.mean(-1, keepdim=True)
    y_TH = x_TH / (x_TH.square().mean(-1, keepdim=True) + norm.eps).sqrt() * norm.weight.double()
    bias = getattr(norm, "bias", None)
    return y_TH if bias is None else y_TH + bias.double()


def _filled(norm):
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for weight in norm.parameters():
            weight.copy_(torch.randn(weight.shape, generator=generator))
    return norm
