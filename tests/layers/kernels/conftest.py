"""Fixtures of kernels: what is compiled leaves no trace."""

import pytest
from triton import knobs
from triton.runtime import driver

from tests.layers.kernels.compiling import compiled


@pytest.fixture
def compile_for(monkeypatch, tmp_path):
    """Compiles a launch as Triton would on a GPU of that architecture."""
    monkeypatch.setattr(knobs.cache, "dir", str(tmp_path))
    before = driver._active
    yield compiled
    driver._active = before
