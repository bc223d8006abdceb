"""Calls of flash-attention 3 fit its functions and give what the twin gives.

It cannot be installed for a comparison of signatures: no package index has it, and it is built for
CUDA alone. An earlier state of its file, which comes with flash-attn 2.8.3.post2, is compared.

The published package is compared under the oracle transformer-engine.
"""

import sys

import pytest
from hypothesis import given
from torch.testing import assert_close

from megablocks_core.layers.attention import AttentionSpec
from megablocks_core.layers.attention.backends import flash_attn_3
from tests.layers.attention import fake_flash_attn as fake
from tests.layers.attention.backends.test_flash_attn import check_no_read, check_pads
from tests.layers.attention.published import needs_oracle, signature_in, signature_of, source_of
from tests.layers.attention.requests import by, requests, results, tensors


@needs_oracle
@pytest.mark.parametrize("name", ["func", "varlen_func"])
def test_the_fake_has_the_published_arguments_and_one_that_came_later(name):
    found = signature_in(source_of("hopper", "flash_attn_interface.py"), f"flash_attn_{name}")
    *recorded, last = signature_of(getattr(fake, f"flash_attn_3_{name}"))
    assert recorded == found
    assert last[0] == "return_attn_probs"


@given(requests(sinks=False))
def test_every_request_equals_the_twin(request):
    given, spec = request
    with pytest.MonkeyPatch.context() as monkeypatch:
        fake.install(monkeypatch)
        found = results(flash_attn_3.attention, given, spec)
    assert_close(found, results(by("naive"), given, spec), rtol=0, atol=1e-10)


def test_builds_that_give_logarithms_too_are_served(monkeypatch):
    fake.install(monkeypatch)
    given = tensors()
    expected = flash_attn_3.attention(*given, AttentionSpec())
    monkeypatch.setattr(
        "flash_attn_interface.flash_attn_func",
        lambda *given, **options: (fake.flash_attn_3_func(*given, **options), None),
    )
    assert_close(flash_attn_3.attention(*given, AttentionSpec()), expected)


def test_f_100_pads_neither_attend_nor_are_attended(monkeypatch):
    fake.install(monkeypatch)
    check_pads(flash_attn_3.attention)


def test_boundaries_stay_on_their_device_where_the_longest_is_given(monkeypatch):
    fake.install(monkeypatch)
    check_no_read(monkeypatch, flash_attn_3.attention)


def test_a_missing_build_is_told_where_it_comes_from(monkeypatch):
    monkeypatch.setitem(sys.modules, "flash_attn_interface", None)
    with pytest.raises(ImportError, match="folder hopper of Dao-AILab/flash-attention"):
        flash_attn_3.attention(*tensors(), AttentionSpec())
