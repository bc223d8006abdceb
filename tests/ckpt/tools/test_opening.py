"""The kind of a checkpoint is told by what lies in its folder."""

import pytest

from megablocks_core.ckpt.manifest import CheckpointError
from megablocks_core.ckpt.tools.dcp_names import DcpCheckpoint
from megablocks_core.ckpt.tools.opening import open_checkpoint
from megablocks_core.ckpt.tools.own import OwnCheckpoint
from tests.ckpt.tools.saves import save_dcp, save_ours, trained


def test_both_kinds_are_told_apart(tmp_path):
    save_ours(tmp_path / "ours")
    save_dcp(tmp_path / "dcp", *trained())
    assert isinstance(open_checkpoint(tmp_path / "ours"), OwnCheckpoint)
    assert isinstance(open_checkpoint(str(tmp_path / "dcp")), DcpCheckpoint)


def test_another_folder_is_refused(tmp_path):
    for path in (tmp_path, tmp_path / "missing"):
        with pytest.raises(CheckpointError, match=r"neither manifest.json nor .metadata"):
            open_checkpoint(path)
