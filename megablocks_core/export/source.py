"""Read a Hugging Face folder: its config, and its tensors as lazy slices."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open

from megablocks_core.export.families import FAMILIES, Family
from megablocks_core.files import read_json
from megablocks_core.groups.stacks import Stack

INDEX = "model.safetensors.index.json"
SINGLE = "model.safetensors"


class HfFolder:
    """A folder with ``config.json`` and one or many safetensors files.

    Attributes:
        config: The entries of ``config.json``.
        tensors: On-disk name to lazy slice (``get_shape()``, ``get_dtype()``, indexing).
        family: Its row of the table, or ``None`` for a ``model_type`` that has none.

    Raises:
        ValueError: A file is missing or damaged, or files and index disagree.
    """

    def __init__(self, folder: Path) -> None:
        self.path = folder
        self.config = read_json(folder / "config.json", dict)
        self.family: Family | None = FAMILIES.get(self.config.get("model_type", ""))
        self.tensors: dict[str, Any] = {}
        for name in sorted(set(self._weight_map().values())):
            self._open(folder / name)
        listed = self._weight_map() if (folder / INDEX).exists() else self.tensors
        if set(listed) != set(self.tensors):
            raise ValueError(
                f"{folder / INDEX} does not agree with the files: only in the index "
                f"{sorted(set(listed) - set(self.tensors))}, only in the files "
                f"{sorted(set(self.tensors) - set(listed))}"
            )

    def shape(self, name: str) -> tuple[int, ...]:
        """Whole shape of a tensor."""
        return tuple(self.tensors[name].get_shape())

    def whole(self, names: list[str], *, stacked: bool) -> Any:
        """The one tensor as a lazy slice, or all of them, of one shape, as their stack."""
        return Stack(self.tensors, names) if stacked else self.tensors[names[0]]

    def _weight_map(self) -> dict[str, str]:
        if not (self.path / INDEX).exists():
            return {"": SINGLE}
        weight_map = read_json(self.path / INDEX, dict).get("weight_map")
        if not isinstance(weight_map, dict) or not weight_map:
            raise ValueError(f"{self.path / INDEX} must have a weight_map")
        outside = sorted({file for file in weight_map.values() if Path(file).name != file})
        if outside:
            raise ValueError(f"{self.path / INDEX} names files outside its folder: {outside}")
        return weight_map

    def _open(self, file: Path) -> None:
        if not file.is_file():
            others = sorted(path.name for path in self.path.glob("*.bin"))
            hint = f"; {others} are pickles, which are not read" if others else ""
            raise ValueError(f"{file} is missing{hint}")
        try:
            opened: Any = safe_open(str(file), "pt")
        except SafetensorError as error:
            raise ValueError(f"{file} is damaged or cut short: {error}") from error
        twice = sorted(set(opened.keys()) & set(self.tensors))
        if twice:
            raise ValueError(f"{file} holds tensors that another file holds too: {twice}")
        for name in opened.keys():  # noqa: SIM118, not a dict
            self.tensors[name] = opened.get_slice(name)
