"""``inspect`` says what a checkpoint holds, and reads no tensor."""

import json
from fractions import Fraction

import pytest
import torch

from megablocks_core import ckpt
from megablocks_core.ckpt.tools.inspecting import inspect, inspect_text
from tests.ckpt.tools.saves import quiet_save, save_ours


def test_ours(tmp_path):
    save_ours(tmp_path / "c")
    for path in (tmp_path / "c").glob("*.safetensors"):  # values do not matter
        path.write_bytes(b"\0" * path.stat().st_size)
    found = json.loads(json.dumps(inspect(tmp_path / "c")))
    assert found["format"] == "megablocks_core.ckpt"
    assert found["entries"]["step"] == {"kind": "json", "value": 7}
    assert found["entries"]["model"] == {"kind": "module"}
    assert found["tensors"]["model/0.weight"] == {"dtype": "F32", "shape": [10, 6], "bytes": 240}
    sizes = {path.name: path.stat().st_size for path in (tmp_path / "c").glob("*.safetensors")}
    assert found["files"] == sizes
    manifest = json.loads((tmp_path / "c" / "manifest.json").read_text())
    for key in ("saved_unix_ns", "xxh3_128"):
        assert found["metadata"][key] == manifest[key]
    text = "\n".join(inspect_text(found))
    for part in ("  step  json  7", "  model/0.weight  F32 [10, 6]  240 B", "  model.safetensors"):
        assert part in text


def test_a_dcp_by_its_own_keys(tmp_path):
    class Odd:
        pass

    quiet_save(
        {"w": {"a": torch.ones(2, 3)}, "n": 3, "set": {1}, "odd": Fraction(1, 3)}, tmp_path / "c"
    )
    found = inspect(tmp_path / "c")
    assert found["format"] == "torch DCP"
    assert found["tensors"] == {"w.a": {"dtype": "F32", "shape": [2, 3], "bytes": 24}}
    assert found["entries"]["n"] == {"kind": "json", "value": 3}
    assert found["entries"]["set"] == {"kind": "set"}
    assert found["entries"]["odd"] == {"kind": "a pickle that is not read"}
    assert found["files"] == {"__0_0.distcp": (tmp_path / "c" / "__0_0.distcp").stat().st_size}
    assert "  n  json  3" in list(inspect_text(found))


def test_what_is_no_checkpoint_is_refused(tmp_path):
    with pytest.raises(ckpt.CheckpointError, match="is no checkpoint"):
        inspect(tmp_path)
