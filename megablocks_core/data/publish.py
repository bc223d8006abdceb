"""Puts the files of a dataset under their names as one: a reader sees the old or the new.

The files of a build are written under names of its own, ``PREFIX.BUILD.tmp.bin`` and so on. Then,
while no other builder of the prefix publishes (``PREFIX.lock``):

1. ``PREFIX.manifest.json`` is replaced by the new one. This one rename is the publication: the
   manifest names the build, and a reader looks for each file under the build's name first.
2. The old ``.idx`` is removed, so that readers that know no manifest find no index of other
   tokens, and the new files are renamed into place, the ``.idx`` last.

A builder killed in step 2 leaves a dataset that reads as the new one; the next builder of the
prefix finishes step 2. Every step is synced before the next, so power may fail as well.
"""

import fcntl
import os
import re
import secrets
import shutil
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import BinaryIO, TypeVar

import xxhash

from megablocks_core.data.manifest import SUFFIX, FileRecord, Manifest, parse_manifest
from megablocks_core.files import sync_file, sync_folder

ENDINGS = (".bin", ".hashes", ".idx")  # in the order in which they take their places
ATTEMPTS = 1000  # of a reader, each spoilt by another publication

T = TypeVar("T")


def staged(prefix: str, build: str, ending: str) -> str:
    """Return the name of a file until it is in place."""
    return f"{prefix}.{build}.tmp{ending}"


def open_ending(open_file: Callable[[str], T], prefix: str, build: str | None, ending: str) -> T:
    """Open a file of a build, in its place or still under the build's own name."""
    if build is not None:
        with suppress(FileNotFoundError):
            return open_file(staged(prefix, build, ending))
    return open_file(prefix + ending)


def open_published(
    open_file: Callable[[str], T], read_file: Callable[[str], bytes], prefix: str
) -> tuple[Manifest | None, T, T]:
    """Open the manifest, index and tokens of one and the same build.

    Files change their build only after the manifest has, so all belong together if it is the
    same before and after.
    """
    for _ in range(ATTEMPTS):
        before = _read(read_file, prefix + SUFFIX)
        manifest = parse_manifest(before, prefix + SUFFIX) if before is not None else None
        build = manifest.build if manifest else None
        try:
            index = open_ending(open_file, prefix, build, ".idx")
            tokens = open_ending(open_file, prefix, build, ".bin")
        except FileNotFoundError:
            if _read(read_file, prefix + SUFFIX) == before:
                raise
            continue
        if _read(read_file, prefix + SUFFIX) == before:
            return manifest, index, tokens
    raise OSError(f"{prefix}: was replaced {ATTEMPTS} times while it was opened")


class Staging:
    """The files of a build in the making.

    Raises:
        FileExistsError: a dataset, or half of one, stands under ``prefix``, now or when it
            comes to ``publish``, and it is not to ``overwrite``.
    """

    def __init__(self, prefix: str, *, overwrite: bool) -> None:
        self.prefix, self.overwrite = prefix, overwrite
        _refuse_folders(prefix)
        self.build = secrets.token_hex(4)
        with _locked(prefix):
            _finish_last(prefix)
            self._refuse_existing()
            self._base = _identity(prefix)
            _sweep(prefix)
            self.files: dict[str, HashedFile] = {}
            tokens = self.create(".bin")
            fcntl.flock(tokens.file, fcntl.LOCK_EX)  # tells other builders that we are alive
        self._discard = weakref.finalize(self, _remove, self.files)

    @property
    def alive(self) -> bool:
        """Whether it is neither published nor discarded."""
        return self._discard.alive

    def create(self, ending: str) -> "HashedFile":
        """Open one of the files for writing."""
        file = HashedFile(staged(self.prefix, self.build, ending))
        self.files[ending] = file
        return file

    def adopt(
        self, ending: str, path: str | os.PathLike[str], digest: "xxhash.xxh3_128"
    ) -> "HashedFile":
        """Take a file that was written elsewhere, and the hash of all of it, as one of the files.

        It keeps its own name too, so that a kill loses nothing; where the file system gives no
        second name, it is copied.
        """
        with _locked(self.prefix):  # in whose absence others look for a lock on the token file
            self.files.pop(ending).file.close()
            os.remove(target := staged(self.prefix, self.build, ending))
            try:
                os.link(path, target)
            except OSError:
                shutil.copyfile(path, target)
            self.files[ending] = HashedFile(target, digest)
            fcntl.flock(self.files[ending].file, fcntl.LOCK_EX)
        return self.files[ending]

    def publish(
        self, manifest: Callable[[dict[str, FileRecord]], Manifest], *, grown: bool
    ) -> None:
        """Publish all files under a manifest made from their sizes and hashes.

        With ``grown`` the build holds what stood under the prefix at the start.

        Raises:
            RuntimeError: with ``grown``, that was replaced since.
        """
        try:
            records = {}
            for ending in ENDINGS:
                sync_file(self.files[ending].file)
                records[ending] = self.files[ending].record()
            draft = self.create(SUFFIX)
            draft.write(manifest(records).text().encode())
            sync_file(draft.file)
            with _locked(self.prefix):
                _finish_last(self.prefix)
                self._refuse_existing()
                if grown and _identity(self.prefix) != self._base:
                    raise RuntimeError(
                        f"{self.prefix}: was replaced by another builder since this one began"
                    )
                sync_folder(_folder(self.prefix))
                os.replace(draft.path, self.prefix + SUFFIX)
                self._discard.detach()  # from here on the files are the dataset
                sync_folder(_folder(self.prefix))
                _take_places(self.prefix, self.build)
        finally:
            if self.alive:
                self._discard()
            for file in self.files.values():
                file.file.close()

    def discard(self) -> None:
        """Remove what was written."""
        self._discard()

    def _refuse_existing(self) -> None:
        for ending in (".idx", ".bin"):
            if not self.overwrite and os.path.exists(path := self.prefix + ending):
                raise FileExistsError(
                    f"{path} exists; overwrite=True replaces the dataset, append=True extends it"
                )


class HashedFile:
    """A new file that counts and hashes what is written to it, in order.

    With a ``digest`` it is an old one, which that is the hash of.
    """

    def __init__(self, path: str, digest: "xxhash.xxh3_128 | None" = None) -> None:
        self.path = path
        mode = "xb" if digest is None else "ab"
        self.file: BinaryIO = open(path, mode, buffering=1 << 20)  # noqa: SIM115
        self._size = os.fstat(self.file.fileno()).st_size
        self._hash = xxhash.xxh3_128() if digest is None else digest

    def write(self, data: bytes | memoryview, /) -> None:
        """Append bytes."""
        self.file.write(data)
        self._size += memoryview(data).nbytes
        self._hash.update(data)

    def record(self) -> FileRecord:
        """Return the size and the hash so far."""
        return FileRecord(self._size, self._hash.hexdigest())


def _refuse_folders(prefix: str) -> None:
    """Refuse a prefix whose files have no place."""
    if not os.path.isdir(folder := _folder(prefix)):
        raise FileNotFoundError(f"{folder}: must be a folder that exists, for {prefix=}")
    for ending in (*ENDINGS, SUFFIX):
        if os.path.isdir(path := prefix + ending):
            raise FileExistsError(f"{path} is a folder, must be a file or not there")


def _remove(files: dict[str, HashedFile]) -> None:
    """Close and remove what a builder wrote."""
    for file in files.values():
        with suppress(FileNotFoundError):
            os.remove(file.path)
    for file in files.values():
        with suppress(OSError):  # buffered bytes may still find no room; they are not wanted
            file.file.close()


def _take_places(prefix: str, build: str) -> None:
    """Rename the files of the published build into place, or those that are not there yet."""
    folder = _folder(prefix)
    if os.path.exists(staged(prefix, build, ".idx")):
        with suppress(FileNotFoundError):
            os.remove(prefix + ".idx")
        sync_folder(folder)
    for ending in ENDINGS:
        if ending == ENDINGS[-1]:
            sync_folder(folder)
        with suppress(FileNotFoundError):
            os.replace(staged(prefix, build, ending), prefix + ending)
    sync_folder(folder)


def _finish_last(prefix: str) -> None:
    """Finish what a killed builder published."""
    try:
        with open(prefix + SUFFIX, "rb") as file:
            build = parse_manifest(file.read(), prefix + SUFFIX).build
    except (FileNotFoundError, ValueError):
        return  # nothing published, or damaged since: the files under their names count
    if any(os.path.exists(staged(prefix, build, ending)) for ending in ENDINGS):
        _take_places(prefix, build)


def _sweep(prefix: str) -> None:
    """Remove what killed builders left; those that live hold a lock on their token file."""
    folder, name = _folder(prefix), os.path.basename(prefix)
    endings = "|".join(map(re.escape, (*ENDINGS, SUFFIX)))
    pattern = re.compile(rf"{re.escape(name)}\.([0-9a-f]{{8}})\.tmp({endings})")
    for found in filter(None, map(pattern.fullmatch, os.listdir(folder))):
        if not _is_locked(staged(prefix, found[1], ".bin")):
            with suppress(FileNotFoundError):
                os.remove(os.path.join(folder, found[0]))


def _is_locked(path: str) -> bool:
    try:
        with open(path, "rb") as file:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except FileNotFoundError:
        return False
    except OSError:
        return True
    return False


@contextmanager
def _locked(prefix: str) -> Iterator[None]:
    """Keep other builders of the prefix out; the lock of a killed process is free."""
    path = prefix + ".lock"
    while True:
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o666)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX)
            if os.path.exists(path) and os.path.samestat(os.stat(path), os.fstat(descriptor)):
                break  # else the one who held it removed it: others lock another file
        except FileNotFoundError:
            pass
        except OSError as error:
            os.close(descriptor)
            raise OSError(error.errno, f"{error.strerror} (flock is needed)", path) from error
        except BaseException:
            os.close(descriptor)
            raise
        os.close(descriptor)
    try:
        yield
    finally:
        with suppress(FileNotFoundError):
            os.remove(path)
        fcntl.flock(descriptor, fcntl.LOCK_UN)  # also for children forked in the meantime
        os.close(descriptor)


def _identity(prefix: str) -> list[tuple[int, int, int, int] | None]:
    """Return what changes when one of the two files is replaced or written to."""
    found: list[tuple[int, int, int, int] | None] = []
    for ending in (".bin", ".idx"):
        try:
            at = os.stat(prefix + ending)
            found.append((at.st_dev, at.st_ino, at.st_size, at.st_mtime_ns))
        except FileNotFoundError:
            found.append(None)
    return found


def _folder(prefix: str) -> str:
    return os.path.dirname(prefix) or "."


def _read(read_file: Callable[[str], bytes], path: str) -> bytes | None:
    try:
        return read_file(path)
    except FileNotFoundError:
        return None
