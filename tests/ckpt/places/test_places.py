"""A caller's path or URL names a place, and paths below come back in the caller's form."""

from pathlib import Path

import pytest

from megablocks_core.ckpt.places.local_place import LocalPlace
from megablocks_core.ckpt.places.places import above, below, is_url, place_of, root_of
from megablocks_core.ckpt.places.store_place import StorePlace


def test_paths_and_urls():
    assert not is_url("a/b") and not is_url(Path("a")) and is_url("memory://a")
    local, remote = place_of("a/b"), place_of("memory://a/b/")
    assert isinstance(local, LocalPlace) and str(local) == str(Path("a/b").absolute())
    assert isinstance(remote, StorePlace) and str(remote) == "memory://a/b"


@pytest.mark.parametrize("path", ["runs/a", "/runs/a/", Path("a"), "memory://runs/a"])
def test_above_and_below_are_inverse(path):
    root, name = above(path)
    assert name == "a"
    assert str(place_of(below(str(root), name))) == str(root.child(name)) == str(place_of(path))


def test_the_callers_form_is_kept():
    assert below("runs", "a") == Path("runs/a")
    assert below("memory://runs/", "a") == "memory://runs/a"


def test_names_that_nobody_would_find_are_refused():
    for path in ("a/.b", Path("a/.."), "/", "a\nb", "memory://a/.b/"):
        with pytest.raises(ValueError, match="must end in the name of a folder"):
            above(path)
    with pytest.raises(ValueError, match="must name a folder in a store"):
        above("memory://a")


def test_a_root_is_a_folder_or_not_there_yet(tmp_path):
    (tmp_path / "f").write_text("f")
    assert str(root_of(tmp_path)) == str(tmp_path) and not root_of(tmp_path / "a").is_there()
    with pytest.raises(ValueError, match="root='.*/f' must be a folder"):
        root_of(tmp_path / "f")
