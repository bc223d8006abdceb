"""Whatever is handed over in place of an argument is refused by name, and no rank waits."""

from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from megablocks_core.auto import checkpoint_to_hf, decoder_from_hf, save_adapted_hf
from megablocks_core.export import arguments, load_hf, save_hf, verify
from megablocks_core.export.differing import diff
from megablocks_core.groups import Mesh
from megablocks_core.testing import ranks
from tests.export.tiny_models import pretrained, tiny_model

NO_PATHS = (None, 3, b"x", [], {}, "", "\0a", "\ud800")
NO_COUNTS = (float("nan"), 1.5, True, "5GB", None, 0, -1)
NO_GROUPS = (None, "world", 2, [0])


def refused(call, values, name):
    for value in values:
        with pytest.raises(ValueError, match=name):
            call(value)


def test_paths(tmp_path):
    model = pretrained(tmp_path / "in")
    for call in (
        lambda path: verify(path),
        lambda path: load_hf(model, path),
        lambda path: save_hf(model, path),
        lambda path: decoder_from_hf(path),
        lambda path: list(diff(path, tmp_path / "in")),
        lambda path: list(diff(tmp_path / "in", path)),
        lambda path: checkpoint_to_hf(tmp_path / "in", path),
    ):
        refused(call, NO_PATHS, "^path=")
    refused(lambda like: save_hf(model, tmp_path / "out", like=like), NO_PATHS[1:], "^like=")
    assert [path.name for path in tmp_path.iterdir()] == ["in"]
    assert arguments.folder_of(str(tmp_path)) == arguments.folder_of(tmp_path) == Path(tmp_path)


def test_models_groups_counts_and_devices(tmp_path):
    model = pretrained(tmp_path / "in")
    models = (None, 3, {}, model.state_dict(), tmp_path)
    refused(lambda one: load_hf(one, tmp_path / "in"), models, "^model=")
    refused(lambda one: save_hf(one, tmp_path / "out"), models, "^model=")
    refused(lambda one: save_adapted_hf(one, tmp_path / "out"), models, "^model=")
    refused(lambda one: load_hf(model, tmp_path / "in", group=one), NO_GROUPS, "^group=")
    refused(lambda one: save_hf(model, tmp_path / "out", group=one), NO_GROUPS, "^group=")
    refused(
        lambda one: save_hf(model, tmp_path / "out", max_file_bytes=one),
        NO_COUNTS,
        "^max_file_bytes=",
    )
    refused(
        lambda one: load_hf(model, tmp_path / "in", device=one), ("x", "cuda:x", [], {}), "^device="
    )
    refused(
        lambda one: save_hf(model, tmp_path / "out", dtype=one),
        ("bf16", 3, torch.int8, torch.float8_e4m3fn, [], {}),
        "^dtype=",
    )
    assert [path.name for path in tmp_path.iterdir()] == ["in"]


@ranks(2)
def test_one_rank_alone_is_called_wrongly(tmp_path):
    """All raise, and are together again afterwards."""
    model = pretrained(tmp_path / "in")
    world, is_last = Mesh().group("dp"), dist.get_rank() == 1
    cases = (
        (lambda: load_hf(model, None if is_last else tmp_path / "in", group=world), "path="),
        (lambda: load_hf(None if is_last else model, tmp_path / "in", group=world), "model="),
        (lambda: save_hf(model, 3 if is_last else tmp_path / "out", group=world), "path="),
        (
            lambda: save_hf(model, tmp_path / "out", group=world, like=3 if is_last else None),
            "like=",
        ),
        (lambda: save_hf(model, tmp_path / f"{world.rank}", group=world), r"agree on \['path'\]"),
        (
            lambda: save_hf(
                model,
                tmp_path / "out",
                group=world,
                max_file_bytes=3000 if is_last else 2000,
                dtype=torch.bfloat16 if is_last else None,
            ),
            r"agree on \['max_file_bytes', 'dtype'\]",
        ),
    )
    for call, message in cases:
        with pytest.raises(ValueError, match=message):
            call()
        assert world.all_gather_object(world.rank) == [0, 1]
    assert [path.name for path in tmp_path.iterdir()] == ["in"]


def test_a_model_may_be_written_where_an_empty_folder_is(tmp_path):
    save_hf(tiny_model(), str(tmp_path), max_file_bytes=1)
    assert len(list(tmp_path.glob("model-*.safetensors"))) > 4
