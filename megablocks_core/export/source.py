"""Read a Hugging Face folder: its config, and its tensors as lazy slices."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any, NamedTuple

from safetensors import SafetensorError, safe_open

from megablocks_core.export.families import family_of
from megablocks_core.export.layout import Layout
from megablocks_core.export.operations import Lazy
from megablocks_core.export.pickles import PICKLE, read_pickle
from megablocks_core.export.quantised import dequantised
from megablocks_core.files import read_json

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
        layout: What its config describes; empty for a ``model_type`` that nobody knows.

    Raises:
        ValueError: A file is missing or damaged, files and index disagree, or the config lacks
            a size, or names a quantisation that is not served or that the tensors do not have.
    """

    def __init__(self, folder: Path) -> None:
        self.path = folder
        self.config = read_json(folder / "config.json", dict)
        family = family_of(self.config)
        self.layout = Layout(()) if family is None else family.layout(self.config)
        self.tensors: dict[str, Any] = {}
        if family is not None and family.pickled and (folder / PICKLE).is_file():
            self.tensors = read_pickle(folder / PICKLE)
            return
        for name in sorted(set(self._weight_map().values())):
            self._open(folder / name)
        listed = self._weight_map() if (folder / INDEX).exists() else self.tensors
        if set(listed) != set(self.tensors):
            raise ValueError(
                f"{folder / INDEX} does not agree with the files: only in the index "
                f"{sorted(set(listed) - set(self.tensors))}, only in the files "
                f"{sorted(set(self.tensors) - set(listed))}"
            )
        if family is not None:
            self.tensors = family.prefixed(self.tensors)
        self.tensors = dequantised(self.tensors, self.config)

    def shape(self, name: str) -> tuple[int, ...]:
        """Whole shape of a tensor."""
        return tuple(self.tensors[name].get_shape())

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
        described = {name for rule in layout.rules for name in rule.theirs}
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
