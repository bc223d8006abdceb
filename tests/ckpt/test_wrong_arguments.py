"""Whatever is handed over in place of an argument is refused by name, on all ranks alike.

Nothing is written then, nothing is deleted, and no rank waits for another.
"""

import os
import sys
from datetime import timedelta
from threading import Event
from types import MappingProxyType

import fsspec
import pytest
import torch
from torch import nn

from megablocks_core import ckpt
from megablocks_core.ckpt.saving.saving import save_entries
from megablocks_core.groups import LOCAL, Mesh
from megablocks_core.testing import ranks

NO_PATHS = (None, 3, b"x", [], {}, "", "\0a", "\ud800")
NO_NAMES = (".hidden", "a\nb", "a\\b", "b/..", "b/.c/")
NO_COUNTS = (float("nan"), 1.5, True, "3", [1], 0, -1, (1,))
NO_GROUPS = (None, "world", 2, [0])


def _deep():
    value = []
    for _ in range(3000):
        value = [value]
    return value


def _circular():
    value = {}
    value["self"] = [value]
    return value


NO_VALUES = (_deep(), _circular(), 10**5000, (1,), {1: 2}, {"a": {None: 1}}, object, 1j)
NO_TENSORS = (
    torch.eye(3).to_sparse(),
    torch.zeros(2, device="meta"),
    torch.ones(2, dtype=torch.complex64),
)
NO_STATES = (
    *(None, [], 3, "x", {3: 1}, {"a/b": 1}, {".a": 1}, {"e" * 300: 1}, {"a.00001": 1}),
    *({"value": value} for value in (*NO_VALUES, *NO_TENSORS)),
    {"model": nn.LazyLinear(3)},
)
NO_FILES = (
    *(3, [], "", 0, {3: {}}, {"": 1}, {"a/b": 1}, {"e" * 300: 1}, {"manifest.json": {}}),
    *({"config.json": value} for value in NO_VALUES),
)


def refused(call, values, name, *, world=LOCAL):
    """``call`` refuses each value; on all ranks, even if the last one alone has it."""
    for value in values[: 1 if world.size > 1 else None]:
        with pytest.raises(ValueError, match=name):
            call(value)
    for value in values if world.size > 1 else ():
        with pytest.raises(ValueError, match=name):
            call(value if world.rank == world.size - 1 else _Right)


class _Right:
    """Stands for the argument as it should be."""


@ranks(1, 2)
def test_paths(tmp_path):
    world, state = Mesh().group("dp"), {"step": 1}
    ckpt.save(tmp_path / "a", state, group=world)

    def path(value, right="a"):
        return tmp_path / right if value is _Right else value

    names = [f"{tmp_path}/{name}" for name in NO_NAMES]
    for wrong in (NO_PATHS, names):
        refused(
            lambda p: ckpt.save(path(p, "new"), state, group=world), wrong, "path=", world=world
        )
    assert sorted(os.listdir(tmp_path)) == ["LATEST", "a"]
    refused(lambda p: ckpt.load(path(p), state, group=world), NO_PATHS, "path=", world=world)
    for call in (ckpt.latest, lambda r, group: ckpt.load_latest(r, {}, group=group), ckpt.prune):
        refused(lambda r, call=call: call(path(r), group=world), NO_PATHS, "root=", world=world)
    if world.rank == 0:
        (tmp_path / "file").write_bytes(b"")
        (tmp_path / "dangling").symlink_to(tmp_path / "nowhere")
    world.barrier()
    files = (f"{tmp_path}/file", f"{tmp_path}/dangling")
    for call in (ckpt.latest, lambda r, group: ckpt.load_latest(r, {}, group=group), ckpt.prune):
        refused(lambda r, call=call: call(r, group=world), files, "root=.*must be a folder")
    if world.size == 1:
        refused(ckpt.verify, NO_PATHS, "path=")


@ranks(2)
def test_paths_that_differ(tmp_path):
    world = Mesh().group("dp")
    with pytest.raises(ValueError, match="path must be the same on all ranks"):
        ckpt.save(tmp_path / f"a{world.rank}", {"step": 1}, group=world)
    assert os.listdir(tmp_path) == []


def test_urls():
    for call in (lambda p: ckpt.save(p, {"step": 1}), lambda p: ckpt.load(p, {}), ckpt.verify):
        refused(call, ["unknown://a/b"], "path='unknown://a.*must be a URL")
        with pytest.MonkeyPatch.context() as patch:
            patch.setitem(sys.modules, "aiohttp", None)
            patch.delitem(sys.modules, "fsspec.implementations.http", raising=False)
            with pytest.raises(ModuleNotFoundError, match="http://a.*not installed: .*aiohttp"):
                call("http://a/b/c")
    for url in ("memory://a", "memory:///"):
        refused(lambda p: ckpt.save(p, {"step": 1}), [url], "path='memory://.* must ")


def test_a_file_of_a_store_is_no_root():
    fsspec.filesystem("memory").pipe_file("/wrong/file", b"x")
    refused(ckpt.latest, ["memory://wrong/file"], "root=.*must be a folder")
    refused(ckpt.prune, ["memory://wrong/file/"], "root=.*must be a folder")
    assert ckpt.latest("memory://wrong/none") is None


@ranks(1, 2)
def test_states(tmp_path):
    world = Mesh().group("dp")

    def state(value):
        return {"value": 1} if value is _Right else value

    names = "state|value|model"
    for call in (
        lambda s: ckpt.save(tmp_path / "a", state(s), group=world),
        lambda s: ckpt.LocalTier(tmp_path / "tier", group=world, copies=0).save(1, state(s)),
    ):
        refused(call, NO_STATES, names, world=world)
    assert not os.path.exists(tmp_path / "a")
    ckpt.save(tmp_path / "a", {"value": 1}, group=world)
    wrong = [s for s in NO_STATES if not isinstance(s, dict) or "value" not in s]
    refused(lambda s: ckpt.load(tmp_path / "a", state(s), group=world), wrong, names, world=world)
    fixed = [MappingProxyType({"value": 1})]
    refused(lambda s: ckpt.load(tmp_path / "a", s, group=world), fixed, "MutableMapping")


@ranks(1, 2)
def test_files_and_counts(tmp_path):
    world, root = Mesh().group("dp"), tmp_path / "runs"
    ckpt.save(root / "a-1", {"step": 1}, group=world)
    ckpt.save(root / "a-2", {"step": 2}, group=world)

    def save(**options):
        options = {name: None if one is _Right else one for name, one in options.items()}
        ckpt.save(root / "b", {"step": 1}, group=world, **options)

    refused(lambda f: save(files=f), NO_FILES, "files", world=world)
    for name in ("keep_last", "keep_every"):
        refused(lambda n, name=name: save(**{name: n}), NO_COUNTS, f"{name}=", world=world)

        def prune(count, name=name):
            ckpt.prune(root, **{name: None if count is _Right else count}, group=world)

        refused(prune, NO_COUNTS, f"{name}=", world=world)
    world.barrier()
    assert sorted(os.listdir(root)) == ["LATEST", "a-1", "a-2"]


@ranks(1, 2)
def test_how_to_load(tmp_path):
    world, path = Mesh().group("dp"), tmp_path / "a"
    ckpt.save(path, {"x": torch.ones(2)}, group=world)
    half, single = torch.bfloat16, torch.float32
    wrong = (3, "x", [single], {"float32": half}, {single: "bfloat16"}, {single: torch.int32}, 0)

    def load(**options):
        options = {name: one for name, one in options.items() if one is not _Right}
        state = {"x": torch.zeros(2)}
        try:
            ckpt.load(path, state, group=world, **options)
        finally:
            assert not state["x"].any()

    refused(lambda c: load(cast=c), wrong, "cast=", world=world)
    refused(lambda s: load(strict=s), (None, 1, "no", [], {}), "strict=", world=world)
    state = {"x": torch.zeros(2), "y": 1}
    if world.size > 1:
        with pytest.raises(ValueError, match="strict must be the same on all ranks"):
            ckpt.load(path, state, group=world, strict=world.rank == 0)


def test_groups(tmp_path):
    ckpt.save(tmp_path / "a", {"step": 1})
    for call in (
        lambda g: ckpt.save(tmp_path / "b", {"step": 1}, group=g),
        lambda g: ckpt.load(tmp_path / "a", {"step": 1}, group=g),
        lambda g: ckpt.latest(tmp_path, group=g),
        lambda g: ckpt.load_latest(tmp_path, {"step": 1}, group=g),
        lambda g: ckpt.prune(tmp_path, keep_last=1, group=g),
        lambda g: ckpt.AsyncSaver(group=g),
        lambda g: ckpt.LocalTier(tmp_path / "tier", group=g, copies=0),
    ):
        refused(call, NO_GROUPS, "group=")


def test_async_saver(tmp_path):
    refused(lambda f: ckpt.AsyncSaver(on_durable=f), [None, 3, "x"], "on_durable=")
    with ckpt.AsyncSaver() as saver:
        state, path = {"step": 1}, tmp_path / "a"
        refused(lambda p: saver.save(p, state), NO_PATHS, "path=")
        refused(lambda n: saver.save(tmp_path / n, state), NO_NAMES, "path=")
        refused(lambda s: saver.save(path, s), NO_STATES, "state|value|model")
        refused(lambda f: saver.save(path, state, files=f), NO_FILES, "files")
        refused(lambda n: saver.save(path, state, keep_last=n), NO_COUNTS, "keep_last=")
        refused(lambda n: saver.save(path, state, keep_every=n), NO_COUNTS, "keep_every=")
        assert os.listdir(tmp_path) == []


def test_files_are_copied_before_an_async_save_returns(tmp_path):
    files, changed = {"config.json": {"a": 1}}, Event()

    def late(*arguments, **options):
        assert changed.wait(60)
        save_entries(*arguments, **options)

    with ckpt.AsyncSaver() as saver, pytest.MonkeyPatch.context() as patch:
        patch.setattr("megablocks_core.ckpt.saving.async_saver.save_entries", late)
        saver.save(tmp_path / "a", {"step": 1}, files=files)
        files["config.json"]["a"] = 2
        changed.set()
        saver.wait()
    assert '"a": 1' in (tmp_path / "a" / "config.json").read_text()


@ranks(2)
def test_async_saver_of_two_ranks(tmp_path):
    world = Mesh(timeout=timedelta(seconds=60)).group("dp")
    with ckpt.AsyncSaver(group=world) as saver:
        for options in ({"keep_last": 1.5}, {"files": 3}):
            if world.rank == 1:
                with pytest.raises(ValueError, match="keep_last=|files="):
                    saver.save(tmp_path / "a", {"step": 1}, **options)
            else:
                saver.save(tmp_path / "a", {"step": 1})
                with pytest.raises(ValueError, match="failed on rank 1.*(keep_last=|files=)"):
                    saver.wait()
    assert os.listdir(tmp_path) == []


@ranks(1, 2)
def test_local_tier(tmp_path):
    world = Mesh().group("dp")

    def tier(folder=tmp_path / "tier", **options):
        options = {name: one for name, one in options.items() if one is not _Right}
        folder = tmp_path / "tier" if folder is _Right else folder
        return ckpt.LocalTier(folder, group=world, **{"copies": 0, **options})

    refused(tier, (*NO_PATHS, "memory://a/b"), "folder=", world=world)
    refused(lambda n: tier(copies=n), (1.0, "1", None, True, -1, 2, [0]), "copies", world=world)
    refused(lambda n: tier(keep_last=n), (*NO_COUNTS, None), "keep_last=", world=world)
    hosts = ("ab"[: world.size], 3, [1] * world.size, ["a"] * 3, [], {"a": 1, "b": 2}, [None])
    refused(lambda h: tier(hosts=h), hosts, "hosts=", world=world)
    assert os.listdir(tmp_path) == []

    def save(step):
        tier().save(1 if step is _Right else step, {"step": 1})

    refused(save, (None, 1.0, "1", True, -1, [1], 2**63, 10**5000), "step=", world=world)
    ckpt.LocalTier(tmp_path / "tier", group=world, copies=0).save(1, {"step": 1})
    for state in (None, [], {3: 1}):
        with pytest.raises(ValueError, match="state"):
            tier().load_newest(state)
