"""Texts to learn from: files, folders, JSON lines, and the text that every machine has."""

import json
import os
import random
import sysconfig
from collections.abc import Iterable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import NoReturn

from megablocks_core.data.checks import several, whole_number


def read_texts(*paths: str | os.PathLike[str], suffixes: Iterable[str] = ()) -> Iterator[str]:
    """Yield the texts of files and folders, in the order given.

    A ``.jsonl`` file yields the ``"text"`` of each line, any other file its whole text. A
    folder yields its files and those of the folders inside, sorted by path: those that end in
    ``suffixes`` if any are given, and without those that are not UTF-8 text. Such a file
    named itself is a ``ValueError``, and so is a line that is no JSON object with a
    ``"text"``, wherever it stands.
    """
    endings = (suffixes,) if isinstance(suffixes, str) else tuple(suffixes)
    if not all(isinstance(ending, str) for ending in endings):
        raise ValueError(f"suffixes={suffixes!r} must be ends of names, such as '.py'")
    if not all(isinstance(path, str | os.PathLike) for path in paths):
        raise ValueError(f"paths={paths!r} must be paths of files and folders")
    for path in map(Path, paths):
        if path.is_dir():
            for inside in _files_in(path):
                if inside.name.endswith(endings or ("",)):
                    with suppress(UnicodeDecodeError):
                        yield from _texts_of(inside)
        else:
            try:
                yield from _texts_of(path)
            except UnicodeDecodeError as error:
                raise ValueError(f"{path}: must be UTF-8 text ({error})") from None


def utf8_of(texts: Iterable[str | bytes]) -> Iterator[bytes]:
    """Yield the UTF-8 of some texts; bytes are taken as they are.

    Raises:
        ValueError: one that is no text, or a single text instead of several.
    """
    for number, text in enumerate(several("texts", texts)):
        if not isinstance(text, str | bytes | bytearray):
            raise ValueError(f"texts[{number}] of {type(text)} must be text or bytes")
        try:
            content = text.encode() if isinstance(text, str) else bytes(text)
        except UnicodeEncodeError as error:
            raise ValueError(f"texts[{number}] must be UTF-8 text: {error}") from None
        yield content


def standard_library() -> list[Path]:
    """Return the source files of Python's library: modules, then packages.

    Its tests are left out, and the tables of encodings.
    """
    root = Path(sysconfig.get_paths()["stdlib"])
    packages = sorted(init.parent for init in root.glob("*/__init__.py"))
    unwanted = {"test", "tests", "encodings"}
    inside = (sorted(package.rglob("*.py")) for package in packages)
    return sorted(root.glob("*.py")) + [
        path for paths in inside for path in paths if not unwanted & set(path.parts)
    ]


def shuffled_pieces(texts: Iterable[str], *, max_bytes: int, seed: int = 0) -> list[bytes]:
    """Cut the first ``max_bytes`` of some texts into pieces in a fixed random order.

    No piece is longer than a hundredth of all, so that even one text fills two splits.
    """
    max_bytes, seed = whole_number("max_bytes", max_bytes, 1), whole_number("seed", seed)
    found, room = [], max_bytes
    for text in utf8_of(texts):
        found.append(text[:room])
        room -= len(found[-1])
        if not room:
            break
    longest = max(1, (max_bytes - room) // 100)
    pieces = [text[at : at + longest] for text in found for at in range(0, len(text), longest)]
    random.Random(seed).shuffle(pieces)
    return pieces


def _files_in(folder: Path) -> list[Path]:
    """All files below it, sorted; unlike ``rglob``, a folder that cannot be read is an error."""

    def fail(error: OSError) -> NoReturn:
        raise error

    walk = os.walk(folder, onerror=fail)
    found = (Path(place) / name for place, _, names in walk for name in names)
    return sorted(path for path in found if path.is_file())


def _texts_of(path: Path) -> Iterator[str]:
    if path.suffix.lower() != ".jsonl":
        yield path.read_bytes().decode()
        return
    with path.open("rb") as lines:
        for number, line in enumerate(lines, 1):
            if line.strip():
                yield _text_of(line, f"{path}: line {number}")


def _text_of(line: bytes, place: str) -> str:
    try:
        text = json.loads(line)["text"]
        text.encode()
    except (ValueError, LookupError, TypeError, AttributeError, RecursionError):
        raise ValueError(f'{place} must be a JSON object with a "text" of UTF-8') from None
    return text
