"""Read a Hugging Face folder: its config, and its tensors as lazy slices."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any, NamedTuple

from megablocks_core.export.families import family_of
from megablocks_core.export.layout import Layout
from megablocks_core.export.lazies import Lazy, shape_of
from megablocks_core.export.pickles import PICKLE, read_pickle
from megablocks_core.export.quantised import dequantised, with_file
from megablocks_core.files import read_json
from megablocks_core.files.slices import open_tensors

INDEX = "model.safetensors.index.json"
SINGLE = "model.safetensors"
# Codes of floating-point dtypes.
FLOATS = ("BF16", "F16", "F32", "F64")


class Found(NamedTuple):
    """What a folder holds for one logical tensor.

    Attributes:
        names: On-disk names of all that it is made of.
        whole: The tensor.
    """

    names: tuple[str, ...]
    whole: Lazy


class HfFolder:
    """A folder with ``config.json`` and one or many safetensors files.

    Attributes:
        config: The entries of ``config.json``.
        tensors: On-disk name to lazy slice (``get_shape()``, ``get_dtype()``, indexing); what is
            quantised is there as the plain tensor that it stands for.
        stored: The same as the files have them, numbers and scales for themselves.
        layout: What its config describes; empty for a ``model_type`` that nobody knows.

    Raises:
        ValueError: A file is missing or damaged, files and index disagree, or the config lacks
            a size, or names a quantisation that is not served or that the tensors do not have.
    """

    def __init__(self, folder: Path) -> None:
        self.path = folder
        self.config = with_file(read_json(folder / "config.json", dict), folder)
        family = family_of(self.config)
        self.layout = Layout(()) if family is None else family.layout(self.config)
        self.tensors: dict[str, Any] = {}
        self.stored: dict[str, Any] = self.tensors
        if family is not None and family.pickled and (folder / PICKLE).is_file():
            self.tensors = self.stored = read_pickle(folder / PICKLE)
            return
        places = self._weight_map()
        for name in sorted(set(places.values())):
            self._open(folder / name)
        if (folder / INDEX).exists():
            self._check_index(places)
        if family is not None:
            self.tensors = family.prefixed(self.tensors)
        self.stored = self.tensors
        self.tensors = dequantised(self.stored, self.config)

    def shape(self, name: str) -> tuple[int, ...]:
        """Whole shape of a tensor."""
        return shape_of(self.tensors[name])

    def found(self, names: Iterable[str]) -> dict[str, Found]:
        """What the files hold for a model whose logical tensors have these ``names``.

        Returns:
            By logical name. Tensors that no layout describes have their own names; tables that
            nobody reads are left out. A tensor whose shape is not the described one is there as
            it is, for its name to be told.
        """
        layout = self.layout.named(names)
        found: dict[str, Found] = {}
        for rule in layout.rules:
            theirs = tuple(rule.theirs)
            if any(name not in self.tensors for name in theirs):
                continue
            wrong = [name for name in theirs if self.shape(name) != rule.theirs[name]]
            wholes = [self.tensors[name] for name in theirs]
            ours = {} if wrong else rule.to_ours(wholes)
            for name in rule.ours:
                found[name] = Found(theirs, self.tensors[wrong[0]] if wrong else ours[name])
        described = layout.schema.keys()
        for name, whole in self.tensors.items():
            if name not in described and not layout.ignores(name):
                found[name] = Found((name,), whole)
        return found

    def _weight_map(self) -> dict[str, str]:
        if not (self.path / INDEX).exists():
            return {"": SINGLE}
        weight_map = read_json(self.path / INDEX, dict).get("weight_map")
        if not isinstance(weight_map, dict) or not weight_map:
            raise ValueError(f"{self.path / INDEX} must have a weight_map")
        files = list(dict.fromkeys(map(str, weight_map.values())))
        outside = sorted(name for name in files if not name or Path(name).name != name)
        if outside:
            raise ValueError(f"{self.path / INDEX} names files outside its folder: {outside}")
        return {name: str(file) for name, file in weight_map.items()}

    def _check_index(self, places: dict[str, str]) -> None:
        held = {name: tensor.file.path.name for name, tensor in self.tensors.items()}
        faults = []
        if set(places) != set(held):
            faults.append(
                f"only in the index {sorted(places.keys() - held.keys())}, only in the files "
                f"{sorted(held.keys() - places.keys())}"
            )
        elsewhere = sorted(name for name in places if held.get(name, places[name]) != places[name])
        if elsewhere:
            faults.append(f"in another file than the index says {elsewhere}")
        if faults:
            raise ValueError(
                f"{self.path / INDEX} does not agree with the files: {'; '.join(faults)}"
            )

    def _open(self, file: Path) -> None:
        if not file.is_file():
            others = sorted(path.name for path in self.path.glob("*.bin"))
            hint = f"; {others} are pickles, which are not read" if others else ""
            raise ValueError(f"{file} is missing{hint}")
        try:
            opened = open_tensors(file)
        except ValueError as error:
            raise ValueError(f"{file} is damaged or cut short: {error}") from error
        twice = sorted(opened.keys() & self.tensors.keys())
        if twice:
            raise ValueError(f"{file} holds tensors that another file holds too: {twice}")
        self.tensors |= opened
