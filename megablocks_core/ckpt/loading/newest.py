"""Which checkpoint of a run is the newest whole one."""

from __future__ import annotations

import os
import warnings
from collections.abc import Mapping, MutableMapping
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

import torch

from megablocks_core.ckpt.arguments import check_path
from megablocks_core.ckpt.format.manifest_reading import read_manifest
from megablocks_core.ckpt.format.stored import check_sizes
from megablocks_core.ckpt.loading.loading import load
from megablocks_core.ckpt.manifest import MANIFEST, CheckpointError
from megablocks_core.ckpt.places.places import Place, below, root_of
from megablocks_core.groups import LOCAL, Group, together

LATEST = "LATEST"


def latest(root: str | os.PathLike[str], *, group: Group = LOCAL) -> Path | str | None:
    """The newest checkpoint under ``root`` that is whole, or ``None`` before the first.

    Whole means: its manifest is intact and every file has its size (``verify`` and ``load``
    check the contents). ``LATEST`` is read first; where it and the folders disagree, the
    newest whole folder counts and a warning says why. So it does of a folder that cannot be read.
    The first rank decides for all.

    Returns:
        A ``Path``, or a URL if ``root`` is one.

    Raises:
        ValueError: ``root`` is no folder.
        CheckpointError: There are folders under ``root``, but no whole checkpoint.
    """
    return next(iter(_candidates(root, group)), None)


def load_latest(
    root: str | os.PathLike[str],
    state: MutableMapping[str, Any],
    *,
    group: Group = LOCAL,
    strict: bool = True,
    cast: Mapping[torch.dtype, torch.dtype] | None = None,
) -> Path | str | None:
    """Load the newest checkpoint under ``root`` that can be read, and return its path.

    One that turns out damaged is passed over with a warning, on all ranks together. ``strict``
    and ``cast`` are those of ``load``.

    Returns:
        The checkpoint that was loaded, or ``None`` if there is none yet.

    Raises:
        CheckpointError: There are checkpoints, and none can be read.
        ValueError: ``state`` does not fit the newest one.
    """
    faults = []
    for path in _candidates(root, group):
        try:
            load(path, state, group=group, strict=strict, cast=cast)
            return path
        except Exception as error:
            if not is_passed_over(error, group=group):
                raise
            faults.append(str(error))
            if group.rank == 0:
                warnings.warn(f"passing over {path}: {error}", stacklevel=2)
    if faults:
        raise CheckpointError(f"no checkpoint under {root} can be read: " + "; ".join(faults))
    return None


def is_passed_over(error: Exception, *, group: Group) -> bool:
    """Whether what a load raised is damage on all ranks, so that an older one may be tried.

    A load that fails on one rank fails on all, but with the error itself on that rank alone.
    """
    return all(group.all_gather_object(isinstance(error, CheckpointError | OSError)))


def write_latest(root: Place, name: str, digest: str) -> None:
    """Point ``LATEST`` at a checkpoint, durably; if that fails, it is as it was."""
    before = root.read(LATEST)
    try:
        root.replace(LATEST, f"{digest} {name}\n".encode())
    except BaseException:
        with suppress(OSError):
            if before is None:
                root.delete(LATEST)
            else:
                root.replace(LATEST, before)
        raise


def newest_time(root: Place) -> int:
    """Time of the checkpoint that ``LATEST`` names, 0 if it names none."""
    try:
        folder = root.child(_read_latest(root)[0])
        return read_manifest(folder, tensors=False).saved_unix_ns
    except (CheckpointError, OSError):
        return 0


class Survey(NamedTuple):
    """What lies in a run's folder.

    Attributes:
        whole: Names of the whole checkpoints, newest first.
        faults: What there is to say about everything else.
    """

    whole: list[str]
    faults: list[str]


def survey(root: Place) -> Survey:
    """Look at all checkpoints under ``root``.

    Raises:
        CheckpointError: There are folders under ``root``, but no whole checkpoint.
    """
    found: list[tuple[int, str, str]] = []
    faults = [
        f"{root.child(name)} is left of a save that did not finish, or of a removal"
        for name in root.leftovers()
    ]
    folders = root.names()[0]
    named, doubt = _read_latest_or_none(root)
    # A store may list late what LATEST already names.
    for name in sorted({*folders, *(named or [])[:1]}):
        folder = root.child(name)
        try:
            manifest = read_manifest(folder, tensors=False)
            check_sizes(folder, manifest)
            found.append((manifest.saved_unix_ns, name, manifest.digest))
        except OSError as error:  # such as a folder of another owner
            faults.append(f"passing over {folder}, which cannot be read: {error}")
        except CheckpointError as error:
            if _is_like_one(folder):
                faults.append(f"passing over {folder}: {error}")
    if not found and folders:
        raise CheckpointError(f"{root} has the folders {folders} but no whole checkpoint: {faults}")
    if not found and root.size(LATEST) is not None:
        raise CheckpointError(f"{root.child(LATEST)} is there, but the checkpoint it names is not")
    # Of copies and links, which are as new, the one that LATEST names.
    found.sort(key=lambda one: (one[0], one[1:] == named, one[1]), reverse=True)
    if found:
        _, newest, digest = found[0]
        if named is None:
            faults.append(f"{LATEST} cannot be used ({doubt}); taking {root.child(newest)}")
        elif named != (newest, digest):
            faults.append(
                f"{LATEST} names {named[0]!r} ({named[1]}), but {root.child(newest)} is the "
                "newest whole one"
            )
    return Survey([name for _, name, _ in found], faults)


def _candidates(root: str | os.PathLike[str], group: Group) -> list[Path | str]:
    """Whole checkpoints, newest first, as the first rank sees them; warns there of others."""
    names: list[str] = []
    with together(f"latest({str(root)!r})", group=group, raises=CheckpointError):
        check_path(root, "root")
        if group.rank == 0:
            names, faults = survey(root_of(root))
            for fault in faults:
                warnings.warn(fault, stacklevel=4)
    return [below(root, name) for name in group.broadcast_object(names)]


def _is_like_one(folder: Place) -> bool:
    """Whether a folder has what checkpoints have, or nobody can tell."""
    try:
        files = folder.names()[1]
    except OSError:
        return True
    return MANIFEST in files or any(file.endswith(".safetensors") for file in files)


def _read_latest_or_none(root: Place) -> tuple[tuple[str, str] | None, str]:
    """What ``LATEST`` says, or why it says nothing."""
    try:
        return _read_latest(root), ""
    except CheckpointError as error:
        return None, str(error)


def _read_latest(root: Place) -> tuple[str, str]:
    """The name and the manifest's hash of the checkpoint that ``LATEST`` names."""
    data = root.read(LATEST)
    if data is None:
        raise CheckpointError(f"{root.child(LATEST)} is missing")
    text = data.decode(errors="replace")
    digest, _, name = text.removesuffix("\n").partition(" ")
    plain = name and not name.startswith(".") and not set(name) & set("/\\\0\n")
    if not text.endswith("\n") or len(digest) != 32 or not plain:
        raise CheckpointError(f"{root.child(LATEST)} is torn: {text!r}")
    return name, digest
