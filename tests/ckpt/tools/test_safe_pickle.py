"""A pickle makes what was named, and calls nothing else."""

import os
import pickle
import tracemalloc
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


def _nested(times):
    """A few bytes that hold 2**times values."""
    value = ("a",)
    for _ in range(times):
        value = (value, value)
    return value


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (b"\x80\x02\x82\x01.", "operation EXT1"),
        (b"(cos\nsystem\no.", "names os.system"),
        (b"(S'x'\nios\nsystem\n.", "operation STRING"),
        (b"\x80\x02}" + pickle.dumps(_nested(40), 2)[2:-1] + b"Ns.", "a key is of tuple"),
        (b"\x80\x04\x8f(Nu.", "operation EMPTY_SET"),
        (b"\x80\x05\x96" + (2**40).to_bytes(8, "little") + b"x.", "expected 1099511627776 bytes"),
        (b"\x80\x02K\x01K\x02a.", "appends to what is no list"),
        (b"\x80\x02]K\x02K\x01s.", "sets an item of what is no dict"),
        (b"\x80\x02K\x01)R.", "calls what is no function"),
        (b"\x80\x02ctorch\nSize\n)\x81.", "makes an object of what is no class"),
        (b"\x80\x02ctorch\nSize\n}b.", "gives a state to what has none"),
        (b"\x80\x02K\x01(\x86.", "takes more than there is"),
        (b"\x80\x02K\x01K\x02\x93.", "a name is no text"),
        (b"\x80\x02h\x07.", "is not read"),
    ],
)
def test_what_is_not_needed_is_not_done(data, message):
    with pytest.raises(CheckpointError, match=message):
        load_pickle(data, "file", {("torch", "Size"): tuple})


def test_a_place_far_away_takes_no_memory():
    tracemalloc.start()
    assert load_pickle(b"\x80\x02]r\xff\xff\xff\xff.", "file", {}) == []
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < 10**6


def test_depth_and_sharing_cost_nothing():
    load_pickle(b"\x80\x02" + b"]" * 10**5 + b"a" * (10**5 - 1) + b".", "file", {})
    load_pickle(pickle.dumps(_nested(60)), "file", {})


@pytest.mark.parametrize("protocol", range(2, pickle.HIGHEST_PROTOCOL + 1))
def test_plain_values_are_as_pickle_reads_them(protocol):
    value = [{"a": (), "b": [1, -5, 300, 2**40, 0.5, None, True, False]}, ("x" * 300, (1, 2, 3, 4))]
    value.append(value[0])
    found = load_pickle(pickle.dumps(value, protocol), "file", {})
    assert found == value and found[0] is found[2]


def test_a_state_is_no_code():
    data = pickle.dumps(Record())[:-1] + b"}\x8c\x0c__setstate__NsN"
    names = {(Record.__module__, "Record"): Record}
    record = load_pickle(data[:-1] + b"b.", "file", names)
    assert record.__dict__ == {"__setstate__": None}
    load_pickle(data[:-1] + b"b}b.", "file", names)
