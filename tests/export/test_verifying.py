"""A folder that is not what its config describes is named."""

import json

import pytest

from megablocks_core.export import verify
from tests.export.tiny_models import pretrained


def test_verify_compares_with_the_config(tmp_path):
    pretrained(tmp_path)
    verify(tmp_path)
    path = tmp_path / "config.json"
    config = json.loads(path.read_text())
    path.write_text(json.dumps({**config, "vocab_size": 12}))
    with pytest.raises(ValueError, match=r"lm_head.weight has shape \(10, 16\), described as \(12"):
        verify(tmp_path)
