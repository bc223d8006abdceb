"""Calls of ``DotProductAttention`` fit its arguments and give what the twin gives.

The published package is compared under the oracle transformer-engine.
"""

import ast
import sys

import pytest
import torch
from hypothesis import given
from torch.testing import assert_close

from megablocks_core.layers.attention import AttentionSpec
from megablocks_core.layers.attention.backends import transformer_engine
from tests.layers.attention import fake_flash_attn
from tests.layers.attention.backends.test_flash_attn import check_no_read, check_pads
from tests.layers.attention.published import needs_oracle, signature_of, source_of
from tests.layers.attention.requests import by, requests, results, sums, tensors
from tests.parallel.transformer_engine import fake
from tests.parallel.transformer_engine.fake_attention import DotProductAttention

te = fake.fixture
SOURCE = "pytorch/attention/dot_product_attention/dot_product_attention.py"


@needs_oracle
@pytest.mark.parametrize("name", ["__init__", "forward"])
def test_the_fake_has_the_published_arguments(name):
    (kind,) = (
        node
        for node in ast.parse(source_of("transformer_engine", SOURCE)).body
        if isinstance(node, ast.ClassDef) and node.name == "DotProductAttention"
    )
    (method,) = (
        node for node in kind.body if isinstance(node, ast.FunctionDef) and node.name == name
    )
    for argument in method.args.args:
        argument.annotation = None
    published = eval(f"lambda {ast.unparse(method.args)}: None")
    assert signature_of(getattr(DotProductAttention, name)) == signature_of(published)


@given(requests(soft_cap=False))
def test_every_request_equals_the_twin(request):
    given, spec = request
    with fake.installed():
        found = results(transformer_engine.attention, given, spec)
    expected = results(by("naive"), given, spec)
    assert_close(found[:4], expected[:4], rtol=0, atol=1e-10)
    # Sinks are handed over in float32, as the module holds them, and so are their gradients.
    assert_close(found[4:], expected[4:], rtol=1e-6, atol=1e-6)


def test_f_099_gradients_come_to_the_sinks_that_were_given(te):
    q = torch.zeros(1, 1, 1, 4)
    k, v = torch.zeros(1, 2, 1, 4), torch.eye(2).view(1, 2, 1, 2)
    for scale in (1.0, 2.0):
        sinks = torch.full((1,), scale).log().requires_grad_()
        spec = AttentionSpec(mask="full", sinks=sinks)
        y = transformer_engine.attention(q, k, v, spec)
        p = 1 / (2 + scale)
        assert_close(y.flatten(), torch.full((2,), p))
        (gradient,) = torch.autograd.grad(y.sum(), sinks)
        assert_close(gradient, torch.tensor([-2 * scale * p * p]))


def test_f_100_pads_neither_attend_nor_are_attended(te):
    check_pads(transformer_engine.attention)


def test_boundaries_stay_on_their_device_where_the_longest_is_given(te, monkeypatch):
    # The stand-in reads boundaries, as kernels do on the device.
    monkeypatch.setattr(
        DotProductAttention,
        "forward",
        lambda self, q, k, v, **options: q.new_empty(*v.shape[:-2], v.shape[-2:].numel()),
    )
    fake_flash_attn.install(monkeypatch)
    check_no_read(monkeypatch, transformer_engine.attention)


def test_a_missing_package_is_named_with_its_extra(monkeypatch):
    monkeypatch.setitem(sys.modules, "transformer_engine", None)
    monkeypatch.setitem(sys.modules, "transformer_engine.pytorch", None)
    with pytest.raises(ImportError, match=r"pip install 'megablocks-core\[te\]'"):
        transformer_engine.attention(*tensors(), AttentionSpec(cu_seqlens=sums([8])))
