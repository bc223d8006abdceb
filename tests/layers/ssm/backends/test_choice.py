"""Functions are found by their names and those of back ends."""

import pytest
import torch

from megablocks_core.layers.ssm import ssd_chunk_scan
from megablocks_core.layers.ssm.backends import by_backend, choice, mamba_ssm
from tests.layers.ssm.backends.published import record_of


def test_functions_are_found():
    assert by_backend("ssd_chunk_scan") is ssd_chunk_scan
    assert by_backend("selective_scan", "mamba_ssm") is mamba_ssm.selective_scan


def test_every_back_end_has_the_signature_of_the_function():
    for found in choice._BY_BACKEND.values():
        one, *others = [record_of(function) for function in found.values()]
        assert all(other == one for other in others)


def test_what_is_unknown_is_refused():
    with pytest.raises(ValueError, match="function='scan' must be one of ssd_chunk_scan, "):
        by_backend("scan")
    with pytest.raises(ValueError, match="backend='fla' must be one of auto, mamba_ssm for sel"):
        by_backend("selective_scan", "fla")


def test_triton_refuses_what_its_kernels_do_not_serve(monkeypatch):
    x, weight = torch.randn(1, 4, 2), torch.randn(2, 3)
    with pytest.raises(ValueError, match="causal_conv1d has Triton kernels for tensors on CUDA"):
        by_backend("causal_conv1d", "triton")(x, weight, initial_state=torch.zeros(1, 2, 2))
    seen = []
    monkeypatch.setattr(choice, "triton_serves", lambda *given: bool(seen.extend(given)) or True)
    state = torch.zeros(1, 2, 2)
    by_backend("causal_conv1d", "triton")(x, weight, activation=True, initial_state=state)
    assert [each.shape for each in seen] == [x.shape, weight.shape, state.shape]
