"""A DCP checkpoint under our names: nested state dicts become modules, optimizers and JSON.

torch keeps, for each key, the way to it through the nested state dict that was saved. The first
step is the entry's name. An entry with "state" and "param_groups" by parameter name is an
optimizer (``torch.distributed.checkpoint.state_dict.get_optimizer_state_dict``, nested or
flattened); one that holds other tensors is a module; one without tensors is JSON. A state dict
of one module, saved as it is (tensors alone, some with a dot in the name), becomes the entry
"model".
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from torch import Tensor

from megablocks_core.ckpt.format.file_names import FILE_NAME, NUMBERED
from megablocks_core.ckpt.json_values import check_json
from megablocks_core.ckpt.state.optimizers import group_tensor
from megablocks_core.ckpt.tools.checkpoint import Held
from megablocks_core.ckpt.tools.dcp_reading import DcpFolder
from megablocks_core.groups.cuts import Box

Path = tuple[str | int, ...]


class DcpCheckpoint:
    """A DCP checkpoint as one of this library.

    Attributes:
        folder: It.
        state: What a manifest would say of each entry.
        tensors: By "entry/name".

    Raises:
        ValueError: It holds what has no place in a checkpoint of this library.
    """

    def __init__(self, folder: DcpFolder) -> None:
        self.folder = folder
        self._keys: dict[str, str] = {}
        self.state: dict[str, dict[str, Any]] = {}
        entries = _by_entry(folder)
        for entry, keys in entries.items():
            if not FILE_NAME.fullmatch(entry) or NUMBERED.fullmatch(entry):
                raise ValueError(
                    f"{folder} has the entry {entry!r}, which must be letters, digits, '_', '.' "
                    "and '-', and not end as the files of a rank are numbered"
                )
            if not _is_optimizer(keys, folder):
                self.state[entry] = self._plain(entry, keys)
        modules = {
            name.partition("/")[::2]: name
            for name in self._keys
            if self.state[name.partition("/")[0]]["kind"] == "module"
        }
        for entry, keys in entries.items():
            if _is_optimizer(keys, folder):
                self.state[entry] = _Optimizer(entry, keys, folder, modules, self._keys).entry()
        self.state = {entry: self.state[entry] for entry in entries}
        self.tensors: dict[str, Held] = {
            name: folder.index.tensors[key] for name, key in self._keys.items()
        }

    def read(self, name: str, box: Box) -> Tensor:
        """A box of a tensor; as for ``Checkpoint``."""
        return self.folder.read(self._keys[name], box)

    def beside(self) -> dict[str, bytes]:
        """Nothing: torch writes no other files."""
        return {}

    def _plain(self, entry: str, keys: Mapping[Path, str]) -> dict[str, Any]:
        """A module, a tensor or a JSON value."""
        tensors = {path: key for path, key in keys.items() if key in self.folder.index.tensors}
        if not tensors:
            value = _json(_tree(keys, self.folder), f"{self.folder}: {entry!r}")
            return {"kind": "json", "value": value}
        others = [key for key in keys.values() if key not in tensors.values()]
        if others:
            raise ValueError(
                f"{self.folder}: {others[0]!r} is no tensor, but stands among the tensors of "
                f"{entry!r}, which can hold nothing else"
            )
        if () in tensors:
            self._keys[f"{entry}/{entry}"] = tensors[()]
            return {"kind": "tensor"}
        for path, key in tensors.items():
            self._keys[f"{entry}/{'.'.join(map(str, path))}"] = key
        return {"kind": "module"}


def _by_entry(folder: DcpFolder) -> dict[str, dict[Path, str]]:
    """The keys of each entry, by the path inside it."""
    paths = folder.index.paths
    flat = all(len(path) == 1 for path in paths.values()) and any("." in key for key in paths)
    if flat and not folder.index.objects:
        return {"model": {path: key for key, path in paths.items()}}
    entries: dict[str, dict[Path, str]] = {}
    for key, path in paths.items():
        entries.setdefault(str(path[0]), {})[path[1:]] = key
    return entries


def _is_optimizer(keys: Mapping[Path, str], folder: DcpFolder) -> bool:
    if () in keys:
        return False
    parts = {str(path[0]).partition(".")[0] for path in keys}
    tensors = any(key in folder.index.tensors for key in keys.values())
    return parts <= {"state", "param_groups", "values"} and (
        "param_groups" in parts or ("state" in parts and tensors)
    )


class _Optimizer:
    """An optimizer's state dict by parameter name, nested or flattened.

    Args:
        entry: Its name.
        keys: By the path inside it.
        folder: The checkpoint.
        modules: The full name of each tensor of a module, by (entry, name).
        names: Where the keys of its tensors are put, by full name.
    """

    def __init__(
        self,
        entry: str,
        keys: Mapping[Path, str],
        folder: DcpFolder,
        modules: Mapping[tuple[str, ...], str],
        names: dict[str, str],
    ) -> None:
        self._entry, self._folder, self._names = entry, folder, names
        self._full: dict[str, list[str]] = {}
        for (_, name), full in modules.items():
            self._full.setdefault(name, []).append(full)
        self._tree = _tree(
            {self._nested(path): key for path, key in keys.items()}, folder, keep=True
        )

    def entry(self) -> dict[str, Any]:
        """What a manifest says of it."""
        numbers: dict[str, dict[str, Any]] = {}
        for parameter, fields in self._dict(self._tree.get("state", {})).items():
            full = self._owner(parameter)
            for field, value in self._dict(fields).items():
                if isinstance(value, _Key):
                    self._names[f"{self._entry}/{full}/{field}"] = value.key
                else:
                    numbers.setdefault(full, {})[field] = _json(value, f"{self._what()} {field!r}")
        if "values" in self._tree:
            value = {"values": _json(self._tree["values"], self._what())}
        else:
            value = {"param_groups": self._groups(), "state": numbers}
        return {"kind": "optimizer", "value": value}

    def _groups(self) -> list[dict[str, Any]]:
        saved = self._tree.get("param_groups", [])
        if not isinstance(saved, list):
            return self._grouped(self._dict(saved))
        groups = []
        for index, group in enumerate(saved):
            names = [self._owner(one) for one in self._dict(group).get("params", [])]
            values = {}
            for key, value in group.items():
                if isinstance(value, _Key):
                    self._names[str(group_tensor(self._entry, index, key))] = value.key
                elif key not in ("params", "param_names"):
                    values[key] = _json(value, f"{self._what()} {key!r}")
            groups.append({"names": names, "values": values})
        return groups

    def _grouped(self, saved: Mapping[str, dict[str, Any]]) -> list[dict[str, Any]]:
        """Groups of parameters with equal hyperparameters, which a flattened dict has one by one"""
        groups: dict[str, dict[str, Any]] = {}
        for parameter, hyperparameters in saved.items():
            values = {
                key: _json(value, f"{self._what()} {key!r}")
                for key, value in self._dict(hyperparameters).items()
                if key != "param_names"
            }
            text = json.dumps(values, sort_keys=True)
            group = groups.setdefault(text, {"names": [], "values": values})
            group["names"].append(self._owner(parameter))
        return list(groups.values())

    def _nested(self, path: Path) -> Path:
        """A path as in a nested dict: a flattened one has "state.NAME.FIELD" in one step."""
        if len(path) != 1 or not isinstance(path[0], str) or "." not in path[0]:
            return path
        what, _, rest = path[0].partition(".")
        # Names may hold dots: the longest that a module has is meant.
        cuts = [at for at, letter in enumerate(rest) if letter == "." and rest[:at] in self._full]
        if not cuts:
            raise ValueError(f"{self._what()}: {path[0]!r} is of no tensor of a module beside it")
        return (what, rest[: cuts[-1]], rest[cuts[-1] + 1 :])

    def _owner(self, parameter: Any) -> str:
        """The full name of a parameter."""
        found = self._full.get(parameter, [])
        if not found and str(parameter).isdecimal():
            raise ValueError(
                f"{self._what()} numbers its parameters; save it with "
                "torch.distributed.checkpoint.state_dict.get_optimizer_state_dict, which names them"
            )
        if len(found) != 1:
            raise ValueError(
                f"{self._what()} has state of {parameter!r}, which must be a tensor of one module "
                f"beside it, not of {len(found)}"
            )
        return found[0]

    def _dict(self, value: Any) -> dict[Any, Any]:
        if not isinstance(value, dict):
            raise ValueError(f"{self._what()} has {str(value)[:99]!r} where a dict should be")
        return value

    def _what(self) -> str:
        return f"{self._folder}: optimizer {self._entry!r}"


class _Key:
    """Stands for the tensor under a key."""

    def __init__(self, key: str) -> None:
        self.key = key


def _tree(keys: Mapping[Path, str], folder: DcpFolder, *, keep: bool = False) -> Any:
    """The nested value that paths lead through; with ``keep``, tensors stay as ``_Key``."""
    if () in keys:
        key = keys[()]
        if key in folder.index.tensors:
            if keep:
                return _Key(key)
            raise ValueError(f"{folder}: {key!r} is a tensor among values that are none")
        return folder.object(key)
    inner: dict[str | int, dict[Path, str]] = {}
    for path, key in keys.items():
        inner.setdefault(path[0], {})[path[1:]] = key
    found = {step: _tree(rest, folder, keep=keep) for step, rest in inner.items()}
    if found and all(isinstance(step, int) for step in found):
        return [found[step] for step in sorted(found, key=int)]
    return found


def _json(value: Any, what: str) -> Any:
    """A value as JSON has it, tuples as lists.

    Raises:
        ValueError: JSON has no form for it.
    """
    plain = _without_tuples(value)
    check_json(plain, what)
    return plain


def _without_tuples(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _without_tuples(item) for key, item in value.items()}
    if isinstance(value, tuple | list):
        return [_without_tuples(item) for item in value]
    return value
