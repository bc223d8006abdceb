"""A back end by name or by what a request needs: nothing asked for is left out."""

import pytest
import torch
from hypothesis import given
from torch.testing import assert_close

from megablocks_core.layers.attention import BACKENDS, AttentionSpec, attention
from megablocks_core.layers.attention.backends import CAPABILITIES
from megablocks_core.layers.attention.choice import chosen
from megablocks_core.layers.attention.dropping import Dropped
from tests.layers.attention.requests import by, kind, requests, results, sums, tensors


def test_the_names_are_those_of_the_table():
    assert ("auto", *CAPABILITIES) == BACKENDS
    with pytest.raises(ValueError, match="backend='cudnn' must be one of auto, flash_attn_3"):
        attention(*tensors(), backend="cudnn")


def test_all_that_is_missing_is_named():
    q, k, v = tensors(value_width=3)
    spec = AttentionSpec(cu_seqlens=sums([3, 5]), sinks=torch.zeros(4), soft_cap=2.0)
    told = (
        r"backend='flash_attn' does not serve sinks with cu_seqlens, keys of 8 and values of 3 "
        r"features, torch.float64, tensors on cpu, gradients of tensors on cpu"
    )
    with pytest.raises(ValueError, match=told):
        attention(q, k, v, spec, backend="flash_attn")
    with pytest.raises(ValueError, match="soft_cap=2.0"):
        attention(q, k, v, spec, backend="sdpa")
    with pytest.raises(ValueError, match="heads of 264 features, which must be at most 256"):
        attention(*tensors(width=264), backend="transformer_engine")


def test_dropping_by_counter_is_refused_where_kernels_would_drop_by_their_own_masks():
    spec = AttentionSpec(dropout=Dropped(0.5, "a", torch.zeros(1, 8, 4, dtype=torch.int64)))
    for name in BACKENDS[1:-1]:
        with pytest.raises(ValueError, match="dropout of 0.5 by counter"):
            attention(*tensors(), spec, backend=name)
    assert chosen(*tensors(), spec) == "naive"


def test_auto_takes_the_first_that_serves():
    q, k, v = tensors()
    assert chosen(q, k, v, AttentionSpec()) == "sdpa"
    assert chosen(q, k, v, AttentionSpec(soft_cap=1.0)) == "naive"  # gradients, float64
    with torch.no_grad():
        assert chosen(q.float(), k.float(), v.float(), AttentionSpec(soft_cap=1.0)) == "flex"


@pytest.mark.parametrize("name", ["flash_attn_3", "flash_attn", "transformer_engine", "sdpa"])
def test_auto_on_a_device_of_its_own(monkeypatch, name):
    """As on an H200 where only some packages are installed, by tensors that say they are there."""
    modules = {able.module for able in CAPABILITIES.values()} - {None, CAPABILITIES[name].module}
    monkeypatch.setattr(
        "megablocks_core.layers.attention.choice.is_installed",
        lambda module: module not in modules,
    )
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: (9, 0))
    q, k, v = (_OnCuda(x.detach().bfloat16()) for x in tensors())
    assert chosen(q, k, v, AttentionSpec(cu_seqlens=sums([8]))) == name  # pyright: ignore


def test_auto_passes_by_devices_that_a_package_has_no_kernels_for(monkeypatch):
    monkeypatch.setattr("megablocks_core.layers.attention.choice.is_installed", lambda module: True)
    q, k, v = (_OnCuda(x.detach().bfloat16()) for x in tensors())
    for found, name in {(7, 5): "sdpa", (8, 0): "flash_attn", (10, 0): "flash_attn"}.items():
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda d=None, f=found: f)
        assert chosen(q, k, v, AttentionSpec()) == name  # pyright: ignore


class _OnCuda:
    """A tensor that says that it is on CUDA."""

    is_cuda = True
    device = torch.device("cuda", 0)
    requires_grad = False

    def __init__(self, x):
        self.shape, self.dtype = x.shape, x.dtype


@given(requests())
def test_whatever_is_asked_for_auto_equals_the_twin(request):
    given, spec = request
    assert_close(
        results(by("auto"), given, spec), results(by("naive"), given, spec), rtol=0, atol=1e-10
    )


@pytest.mark.parametrize("name", ["window", "sinks", "documents with pads", "soft cap"])
def test_compiled_whole_nothing_changes(name):
    spec = kind(name)
    compiled = torch.compile(
        lambda q, k, v, sinks: attention(q, k, v, AttentionSpec(**{**vars(spec), "sinks": sinks})),
        fullgraph=True,
        backend="aot_eager",
    )
    given = tensors()
    found = results(lambda q, k, v, spec: compiled(q, k, v, spec.sinks), given, spec)
    assert_close(found, results(by("auto"), given, spec), rtol=0, atol=1e-12)
