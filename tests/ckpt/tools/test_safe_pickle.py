"""A pickle makes what was named, and calls nothing else."""

import os
import pickle
from pathlib import PosixPath

import pytest
import torch

from megablocks_core.ckpt.manifest import CheckpointError
from megablocks_core.ckpt.tools.safe_pickle import Record, load_pickle


class Exploit:
    """Runs a command when it is read by ``pickle.load``."""

    def __init__(self, command):
        self.command = command

    def __reduce__(self):
        return os.system, (self.command,)


def test_an_exploit_is_refused_by_name_and_does_nothing(tmp_path):
    data = pickle.dumps({"a": Exploit(f"touch {tmp_path}/ran")})
    with pytest.raises(CheckpointError, match="file is not read: it names posix.system"):
        load_pickle(data, "file", {})
    assert not (tmp_path / "ran").exists()
    pickle.loads(data)
    assert (tmp_path / "ran").exists(), "the exploit must be a real one"


@pytest.mark.parametrize("protocol", range(pickle.HIGHEST_PROTOCOL + 1))
def test_every_protocol_asks_for_its_names(tmp_path, protocol):
    data = pickle.dumps(Exploit(f"touch {tmp_path}/ran"), protocol)
    with pytest.raises(CheckpointError, match="not allowed"):
        load_pickle(data, "file", {})
    assert not (tmp_path / "ran").exists()


def test_a_way_round_through_an_allowed_name_is_refused():
    # Protocol 4 lets a name hold dots: torch.serialization.os.system.
    for module, name in (("torch", "serialization.os.system"), ("torch", "load"), ("torch", "os")):
        data = b"\x80\x04" + b"".join(
            b"\x8c" + bytes([len(text)]) + text.encode() for text in (module, name)
        )
        with pytest.raises(CheckpointError, match="not allowed"):
            load_pickle(data + b"\x93.", "file", {("torch", "Size"): tuple})


def test_what_is_named_becomes_a_stand_in():
    data = pickle.dumps([torch.float16, PosixPath("/a"), torch.Size([2, 3])])
    names = {("pathlib", "PosixPath"): lambda *_: None, ("torch", "Size"): tuple}
    assert load_pickle(data, "file", names) == [torch.float16, None, (2, 3)]


def test_a_record_takes_attributes_or_a_state():
    record = Record()
    record.__setstate__({"a": 1})
    assert record.__dict__ == {"a": 1}
    record.__setstate__((1, 2))
    assert record.state == (1, 2)


def test_damage_and_storages_are_refused():
    for data in (b"", b"\x80\x04", b"garbage"):
        with pytest.raises(CheckpointError, match="file is not read"):
            load_pickle(data, "file", {})
    with pytest.raises(CheckpointError, match="names a storage"):
        load_pickle(b"\x80\x02K\x01Q.", "file", {})
    assert load_pickle(b"\x80\x02K\x01Q.", "file", {}, load_storage=lambda pid: pid + 1) == 2
