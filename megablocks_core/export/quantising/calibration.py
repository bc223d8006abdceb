"""What data has shown of a model's activations, as numbers and as a file."""

from __future__ import annotations

import json
import os
import reprlib
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from pathlib import Path

import torch

from megablocks_core.files import make_folder, read_json, replace_file

_FORMAT, _VERSION = "megablocks_core calibration", 1
_LARGEST = torch.finfo(torch.float32).max


@dataclass(frozen=True)
class Calibration:
    """Largest magnitudes (amax) by the on-disk names of weights, such as ``calibrate`` finds.

    Attributes:
        inputs: Of what a weight is multiplied with.
        keys: Of the keys that a cache would hold, after norms and positions; by the weight that
            makes them.
        values: Of the values that a cache would hold, by the weight that makes them.

    Raises:
        ValueError: A magnitude is negative, no number, or more than float32 holds; by name.
    """

    inputs: Mapping[str, float]
    keys: Mapping[str, float]
    values: Mapping[str, float]

    def __post_init__(self) -> None:
        """Refuse what is no magnitude."""
        for field in fields(self):
            found = getattr(self, field.name)
            if not isinstance(found, Mapping):
                raise ValueError(f"{field.name}={reprlib.repr(found)} must be a mapping")
            for name, value in found.items():
                if not (isinstance(name, str) and _is_magnitude(value)):
                    raise ValueError(
                        f"{field.name}[{name!r}]={reprlib.repr(value)} must be a number of "
                        "float32, 0 or more, by the name of a weight"
                    )

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write a JSON file, new or in place of an old one; a reader sees one of them whole.

        Raises:
            OSError: A fault of the file system.
        """
        said = {"format": _FORMAT, "version": _VERSION}
        said |= {name: dict(sorted(found.items())) for name, found in asdict(self).items()}
        make_folder(Path(path).absolute().parent)
        replace_file(Path(path), (json.dumps(said, indent=2) + "\n").encode())

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> Calibration:
        """Read what ``save`` has written.

        Raises:
            ValueError: There is no such file, or it is none of these; by name.
        """
        said = read_json(Path(path), dict)
        if said.get("format") != _FORMAT or said.get("version") != _VERSION:
            raise ValueError(
                f"{path} must be a {_FORMAT} of version {_VERSION}, not "
                f"{said.get('format')!r} of {said.get('version')!r}"
            )
        names = [field.name for field in fields(cls)]
        if said.keys() != {"format", "version", *names}:
            raise ValueError(f"{path} must hold {names} beside format and version")
        try:
            return cls(*(said[name] for name in names))
        except ValueError as error:
            raise ValueError(f"{path}: {error}") from error


def _is_magnitude(value: object) -> bool:
    return type(value) in (float, int) and 0 <= value <= _LARGEST  # pyright: ignore[reportOperatorIssue]
