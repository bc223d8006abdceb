"""Calls of flash-attn 2 fit its functions and give what the twin gives.

The published package is compared under the oracle transformer-engine.
"""

import sys

import pytest
import torch
from hypothesis import given
from torch._subclasses.fake_tensor import DataDependentOutputException, FakeTensorMode
from torch.testing import assert_close

from megablocks_core.layers.attention import AttentionSpec
from megablocks_core.layers.attention.backends import flash_attn
from tests.layers.attention import fake_flash_attn as fake
from tests.layers.attention.published import needs_oracle, signature_in, signature_of, source_of
from tests.layers.attention.requests import by, requests, results, sums, tensors


@needs_oracle
@pytest.mark.parametrize("name", ["flash_attn_func", "flash_attn_varlen_func"])
def test_the_fake_has_the_published_arguments(name):
    source = source_of("flash_attn", "flash_attn_interface.py")
    assert signature_of(getattr(fake, name)) == signature_in(source, name)


@given(requests(sinks=False))
def test_every_request_equals_the_twin(request):
    given, spec = request
    with pytest.MonkeyPatch.context() as monkeypatch:
        fake.install(monkeypatch)
        found = results(flash_attn.attention, given, spec)
    assert_close(found, results(by("naive"), given, spec), rtol=0, atol=1e-10)


def test_f_100_pads_neither_attend_nor_are_attended(monkeypatch):
    fake.install(monkeypatch)
    check_pads(flash_attn.attention)


def test_boundaries_stay_on_their_device_where_the_longest_is_given(monkeypatch):
    fake.install(monkeypatch)
    check_no_read(monkeypatch, flash_attn.attention)


def test_a_missing_package_is_named_with_its_extra(monkeypatch):
    monkeypatch.setitem(sys.modules, "flash_attn", None)
    for spec in (AttentionSpec(), AttentionSpec(cu_seqlens=sums([8]))):
        with pytest.raises(
            ImportError, match=r"flash_attn: pip install 'megablocks-core\[flash\]'"
        ):
            flash_attn.attention(*tensors(), spec)


def check_pads(attention):
    """Documents of 3 and 2 tokens, stored in 4 and 4, whose pads are not numbers (F-100)."""
    given = tensors()
    with torch.no_grad():
        for x in given:
            x[:, [3, 6, 7]] = torch.nan
    spec = AttentionSpec(cu_seqlens=sums([3, 2]), cu_seqlens_padded=sums([4, 4]), max_seqlen=3)
    y, *gradients = results(attention, given, spec)
    assert not y[:, [3, 6, 7]].any()
    for start, stop in ((0, 3), (4, 6)):
        alone = by("naive")(*(x[:, start:stop] for x in given), AttentionSpec())
        assert_close(y[:, start:stop], alone)
    for gradient in gradients:
        assert gradient.isfinite().all()
        assert not gradient[:, [3, 6, 7]].any()


def check_no_read(monkeypatch, attention):
    """Tensors without data: whoever reads one raises."""
    # The check of boundaries is then that of other devices than the CPU.
    monkeypatch.setattr(torch.compiler, "is_compiling", lambda: True)
    # The fakes read boundaries, as kernels do on the device.
    for module in ("flash_attn", "flash_attn_interface"):
        monkeypatch.setattr(
            f"{module}.flash_attn_varlen_func", lambda q, k, v, **options: q.new_empty(v.shape)
        )
    with FakeTensorMode():
        q, k, v = (torch.empty(1, 8, 4, 16, requires_grad=True) for _ in range(3))
        bounds = {
            "cu_seqlens": torch.empty(3, dtype=torch.int32),
            "cu_seqlens_padded": torch.empty(3, dtype=torch.int32),
        }
        attention(q, k, v, AttentionSpec(**bounds, max_seqlen=3))
        with pytest.raises(DataDependentOutputException):
            attention(q, k, v, AttentionSpec(**bounds))
