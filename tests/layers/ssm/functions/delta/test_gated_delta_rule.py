"""The gated delta rule: published references, long decays, wrong arguments.

That it is its recurrence, also over documents and ranks, is tested in ``chunked``.
"""

import pytest
import torch
from torch.nn.functional import normalize
from torch.testing import assert_close

from megablocks_core.layers.ssm import gated_delta_rule
from megablocks_core.layers.ssm.functions.recurrences import gated_delta_recurrence
from tests.parallel import wrong_arguments as no


def _inputs(length, dtype=torch.float32, heads=2, keys=3, values=4):
    torch.manual_seed(0)
    found = [
        torch.randn(1, length, heads, keys),
        normalize(torch.randn(1, length, heads, keys), dim=-1),
        torch.randn(1, length, heads, values),
        -torch.rand(1, length, heads),
        torch.rand(1, length, heads),
    ]
    return [x.to(dtype) for x in found]


@pytest.mark.parametrize("function", ["torch_chunk", "torch_recurrent"])
@pytest.mark.parametrize("with_norm", [False, True])
def test_it_is_what_transformers_computes(function, with_norm):
    """Their functions normalize q and k if asked to; ours takes them as they are."""
    modeling = pytest.importorskip("transformers.models.qwen3_next.modeling_qwen3_next")
    reference = getattr(modeling, f"{function}_gated_delta_rule")
    q, k, v, g, beta = _inputs(70)
    state = torch.randn(1, 2, 3, 4)
    right, last = reference(
        *(q, k, v, g, beta),
        initial_state=state,
        output_final_state=True,
        use_qk_l2norm_in_kernel=with_norm,
    )
    if with_norm:
        q, k = (x * torch.rsqrt(x.square().sum(-1, keepdim=True) + 1e-6) for x in (q, k))
    o, final = gated_delta_rule(q, k, v, g, beta, initial_state=state)
    assert_close(o, right, rtol=1e-4, atol=1e-4)
    assert_close(final, last, rtol=1e-4, atol=1e-4)


def test_the_scale_is_of_the_outputs_alone():
    q, k, v, g, beta = _inputs(9)
    o, final = gated_delta_rule(q, k, v, g, beta)
    scaled, same = gated_delta_rule(q, k, v, g, beta, scale=1.0)
    assert_close(scaled, o * 3**0.5)
    assert_close(final, same)


def test_two_householders_rotate():
    """Reflections by two keys at an angle are a rotation by twice that angle, without decay."""
    angle = torch.tensor(0.3)
    keys = torch.stack((torch.tensor([1.0, 0.0]), torch.stack((angle.cos(), angle.sin()))))
    length = 5
    k = keys.repeat(length, 1).view(1, 2 * length, 1, 2)
    q, zeros = torch.eye(2)[:1].expand(1, length, 1, 2), torch.zeros(1, 2 * length, 1, 2)
    beta = torch.full((1, 2 * length, 1), 2.0)
    options = {"scale": 1.0, "householders": 2, "initial_state": torch.eye(2).view(1, 1, 2, 2)}
    o, final = gated_delta_rule(q, k, zeros, torch.zeros(1, length, 1), beta, **options)
    turns = 0.6 * torch.arange(1, length + 1)
    assert_close(o[0, :, 0], torch.stack((turns.cos(), -turns.sin()), dim=-1))
    assert final is not None
    assert_close(final[0, 0].det(), torch.tensor(1.0))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("decay", [1e4, 1.0, 1e-3, 0.0])
def test_long_rows_with_strong_and_weak_decays(dtype, decay):
    """65,536 tokens that forget at once, in 1,000 tokens, and never."""
    q, k, v, g, beta = _inputs(65536, dtype, heads=1)
    given = [x.requires_grad_() for x in (q, k, v, g * decay, beta)]
    wide = [x.detach().double().requires_grad_() for x in given]
    results = []
    for inputs in (given, wide):
        o, final = gated_delta_rule(*inputs)
        assert final is not None
        results.append((o, final, *torch.autograd.grad(o.sum() / 256, inputs)))
    for ours, right in zip(*results, strict=True):
        assert ours.isfinite().all()
        tolerance = 1e-4 if ours.dtype == torch.float32 else 1e-2
        assert (ours.double() - right).norm() <= tolerance * right.norm() + 1e-9


def test_decays_to_nothing_are_finite():
    q, k, v, g, beta = _inputs(40, torch.float64)
    g[:, 5:9], g[:, 20] = -torch.inf, -1e30
    inputs = [x.requires_grad_() for x in (q, k, v, g, beta)]
    o, _ = gated_delta_rule(*inputs, chunk_size=16)
    assert_close(o, gated_delta_recurrence(*inputs)[0])
    assert all(x.isfinite().all() for x in torch.autograd.grad(o.sum(), inputs))


def test_wrong_arguments_are_refused():
    names = ("q", "k", "v", "g", "beta")
    right = dict(zip(names, _inputs(8), strict=True))
    wrong = {
        "q": (torch.zeros(1, 8, 3), torch.zeros(3)),
        "k": (torch.zeros(1, 8, 2, 4), torch.zeros(1, 16, 2, 3), torch.zeros(8, 2, 3)),
        "v": (torch.zeros(1, 8, 8), torch.zeros(1, 8, 3, 4), torch.zeros(2, 8, 2, 4)),
        "g": (torch.zeros(1, 8), torch.zeros(1, 8, 3), torch.zeros(1, 7, 2)),
        "beta": (torch.zeros(1, 8, 1), torch.zeros(1, 8, 2, 1)),
        "chunk_size": (0, -1),
        "householders": (0, -2),
        "initial_state": (torch.zeros(1, 2, 4, 3), torch.zeros(2, 2, 3, 4)),
        "cu_seqlens": (torch.tensor([0, 9]), torch.tensor([1, 8]), torch.zeros(3)),
    }
    no.refused(gated_delta_rule, right, wrong, besides=("scale", "cut", "return_final_state"))
