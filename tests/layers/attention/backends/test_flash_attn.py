"""Calls of flash-attn 2 fit its functions and give what the twin gives."""

import sys

import pytest
import torch
from hypothesis import given
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
    """Nothing of the boundaries is read but by checks on the CPU, and the longest if missing."""
    bounds = "megablocks_core.layers.attention.backends.boundaries.Boundaries"
    monkeypatch.setattr(f"{bounds}._check", lambda self, num_tokens: None)
    reads = []
    for name in ("__int__", "tolist", "item"):
        real = getattr(torch.Tensor, name)
        monkeypatch.setattr(torch.Tensor, name, lambda x, real=real: (reads.append(x), real(x))[1])
    # The fake itself reads: it is called with what it would be told.
    for module in ("flash_attn", "flash_attn_interface"):
        monkeypatch.setattr(
            f"{module}.flash_attn_varlen_func", lambda q, k, v, **options: q.new_zeros(v.shape)
        )
    spec = {"cu_seqlens": sums([3, 2]), "cu_seqlens_padded": sums([4, 4])}
    attention(*tensors(), AttentionSpec(**spec, max_seqlen=3))
    assert not reads
    attention(*tensors(), AttentionSpec(**spec))
    assert len(reads) == 1
