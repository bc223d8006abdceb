"""The chunked scan against mamba_ssm's references, and against the arguments it has."""

import inspect

import pytest
import torch
from torch.nn.functional import silu, softplus
from torch.testing import assert_close

from megablocks_core.layers.ssm import ssd_chunk_scan
from tests.layers.ssm.functions.ssd.cases import draw
from tests.layers.ssm.mamba_ssm_oracle import mamba_ssm

combined = mamba_ssm("ops.triton.ssd_combined")
interface = mamba_ssm("ops.selective_scan_interface")

pytestmark = pytest.mark.skipif(combined is None, reason="oracle mamba")


def _leaves(length, heads, groups):
    # Their gradients overflow where decays are stronger: their mask comes behind the exponential.
    leaves = draw(2, length, heads, groups, features=8, state=4, skip=1, strength=0.1)[:6]
    return [leaf.detach().float().requires_grad_() for leaf in leaves]


def _equal(ours, theirs, leaves):
    dy = torch.randn_like(ours)
    grads = [torch.autograd.grad(y, leaves, dy) for y in (ours, theirs)]
    assert_close(ours, theirs, rtol=1e-4, atol=1e-4)
    for one, other in zip(*grads, strict=True):
        assert (one - other).norm() <= 1e-4 * other.norm()


def test_outputs_and_gradients_are_those_of_the_combined_reference():
    x, dt, A, B, C, D = leaves = _leaves(64, 4, 2)
    bias = torch.randn(4)
    z = torch.randn_like(x)
    theirs = combined.ssd_chunk_scan_combined_ref(
        x, dt, A, B, C, 16, D=D, z=z, dt_bias=bias, dt_softplus=True
    )
    y, _ = ssd_chunk_scan(x, softplus(dt + bias), A, B, C, D=D, chunk_size=16)
    _equal(y * silu(z), theirs, leaves)


def test_outputs_states_and_gradients_are_those_of_the_scan_of_mamba_1():
    """With one rate and step for all features of a head that function is the same."""
    x, dt, A, B, C, D = leaves = _leaves(37, 2, 1)
    wide = [part.repeat_interleave(8, dim=-1) for part in (dt, A, D)]
    theirs, state = interface.selective_scan_ref(
        x.flatten(2).mT,
        wide[0].mT,
        wide[1][:, None].expand(-1, 4),
        B[:, :, 0].mT,
        C[:, :, 0].mT,
        D=wide[2],
        return_last_state=True,
    )
    y, final = ssd_chunk_scan(x, dt, A, B, C, D=D, chunk_size=16)
    assert_close(final.flatten(1, 2), state, rtol=1e-4, atol=1e-4)
    _equal(y.flatten(2).mT, theirs, leaves)


def test_the_docstring_names_every_argument():
    arguments = inspect.signature(combined.mamba_chunk_scan_combined).parameters
    table = ssd_chunk_scan.__doc__.split("====\n", 1)[1].split("Args:")[0]
    missing = [name for name in arguments if name not in table.replace(",", " ").split()]
    assert not missing
