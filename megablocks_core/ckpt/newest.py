"""Which checkpoint of a run is the newest whole one."""

from __future__ import annotations

import os
import warnings
from collections.abc import MutableMapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from megablocks_core.ckpt.loading import load
from megablocks_core.ckpt.manifest import MANIFEST, CheckpointError
from megablocks_core.ckpt.manifest_reading import read_manifest
from megablocks_core.ckpt.places import LocalPlace
from megablocks_core.ckpt.stored import check_sizes
from megablocks_core.files import is_unfinished, replace_file
from megablocks_core.groups import LOCAL, Group, together

LATEST = "LATEST"


def latest(root: str | os.PathLike[str], *, group: Group = LOCAL) -> Path | None:
    """The newest checkpoint under ``root`` that is whole, or ``None`` before the first.

    Whole means: its manifest is intact and every file has its size (``verify`` and ``load``
    check the contents). ``LATEST`` is read first; where it and the folders disagree, the
    newest whole folder counts and a warning says why. The first rank decides for all.

    Raises:
        CheckpointError: There are folders under ``root``, but no whole checkpoint.
    """
    return next(iter(_candidates(Path(root), group)), None)


def load_latest(
    root: str | os.PathLike[str],
    state: MutableMapping[str, Any],
    *,
    group: Group = LOCAL,
    strict: bool = True,
) -> Path | None:
    """Load the newest checkpoint under ``root`` that can be read, and return its path.

    One that turns out damaged is passed over with a warning, on all ranks together.

    Returns:
        The checkpoint that was loaded, or ``None`` if there is none yet.

    Raises:
        CheckpointError: There are checkpoints, and none can be read.
        ValueError: ``state`` does not fit the newest one.
    """
    faults = []
    for path in _candidates(Path(root), group):
        try:
            load(path, state, group=group, strict=strict)
            return path
        except (CheckpointError, OSError) as error:
            faults.append(str(error))
            if group.rank == 0:
                warnings.warn(f"passing over {path}: {error}", stacklevel=2)
    if faults:
        raise CheckpointError(f"no checkpoint under {root} can be read: " + "; ".join(faults))
    return None


def write_latest(root: Path, name: str, digest: str) -> None:
    """Point ``LATEST`` at a checkpoint, durably; if that fails, it is as it was."""
    path = root / LATEST
    before = path.read_bytes() if path.exists() else None
    try:
        replace_file(path, f"{digest} {name}\n".encode())
    except BaseException:
        with suppress(OSError):
            if before is None:
                path.unlink(missing_ok=True)
            else:
                replace_file(path, before)
        raise


def newest_time(root: Path) -> int:
    """Time of the checkpoint that ``LATEST`` names, 0 if it names none."""
    try:
        return read_manifest(LocalPlace(root / _read_latest(root)[0])).saved_unix_ns
    except (CheckpointError, OSError):
        return 0


def _candidates(root: Path, group: Group) -> list[Path]:
    """Whole checkpoints, newest first, as the first rank sees them; warns there of others."""
    found: list[Path] = []
    with together(f"latest({str(root)!r})", group=group, raises=CheckpointError):
        if group.rank == 0 and root.is_dir():
            found, faults = _survey(root)
            for fault in faults:
                warnings.warn(fault, stacklevel=4)
    return group.broadcast_object(found)


def _survey(root: Path) -> tuple[list[Path], list[str]]:
    whole: list[tuple[int, Path, str]] = []
    faults, folders = [], []
    for folder in sorted(path for path in root.iterdir() if path.is_dir()):
        if is_unfinished(folder):
            faults.append(f"{folder} is a save that did not finish")
        if folder.name.startswith("."):
            continue
        folders.append(folder.name)
        try:
            manifest = read_manifest(LocalPlace(folder))
            check_sizes(LocalPlace(folder), manifest)
            whole.append((manifest.saved_unix_ns, folder, manifest.digest))
        except CheckpointError as error:
            if (folder / MANIFEST).exists() or any(folder.glob("*.safetensors")):
                faults.append(f"passing over {folder}: {error}")
    whole.sort(reverse=True)
    if not folders and (root / LATEST).exists():
        raise CheckpointError(f"{root / LATEST} is there, but the checkpoint it names is not")
    if folders and not whole:
        raise CheckpointError(f"{root} has the folders {folders} but no whole checkpoint: {faults}")
    if whole:
        faults += _doubts(root, *whole[0])
    return [folder for _, folder, _ in whole], faults


def _doubts(root: Path, _: int, newest: Path, digest: str) -> list[str]:
    """Why ``LATEST`` does not name the newest whole checkpoint, if so."""
    try:
        name, named_digest = _read_latest(root)
    except (CheckpointError, OSError) as error:
        return [f"{LATEST} cannot be used ({error}); taking {newest}"]
    if (name, named_digest) != (newest.name, digest):
        return [f"{LATEST} names {name!r} ({named_digest}), but {newest} is the newest whole one"]
    return []


def _read_latest(root: Path) -> tuple[str, str]:
    text = (root / LATEST).read_bytes().decode(errors="replace")
    digest, _, name = text.removesuffix("\n").partition(" ")
    if not text.endswith("\n") or len(digest) != 32 or not name or Path(name).name != name:
        raise CheckpointError(f"{root / LATEST} is torn: {text!r}")
    return name, digest
