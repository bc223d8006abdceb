"""Which modules are gathered and freed together: the units of ``fully_shard``.

A parameter belongs to the innermost unit around it; the root takes what lies in no other. A
parameter that two units use would be gathered by one and freed by the other, so units that share
one become one unit.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

from torch import nn

from megablocks_core.groups.marking import clean_name
from megablocks_core.groups.patterns import chosen

ROOT = ""


class Unit(NamedTuple):
    """Modules whose parameters travel together.

    Attributes:
        paths: Of the modules in the tree; the root's is "".
        modules: The modules; several if they share a parameter.
        parameters: (owner, name there) of each parameter, a tied one once, in the tree's order.
    """

    paths: tuple[str, ...]
    modules: tuple[nn.Module, ...]
    parameters: tuple[tuple[nn.Module, str], ...]


def plan_units(module: nn.Module, patterns: Sequence[str] | None) -> list[Unit]:
    """The units, inner ones before those around them, the root last.

    Args:
        module: The root.
        patterns: Of the modules that become units; default every element of the outermost
            ``ModuleList`` and ``ModuleDict`` that has parameters.

    Raises:
        ValueError: A pattern matches no module, or a unit is a container without ``forward``.
    """
    seen: dict[nn.Module, str] = {}
    for path, part in module.named_modules(remove_duplicate=False):
        seen.setdefault(part, path)
    picked = _elements(module) if patterns is None else _matched(seen, patterns)
    homes = {part: seen[part] for part in picked if part is not module}
    joined = _joined(module, homes)
    modules: dict[str, list[nn.Module]] = {ROOT: [module]}
    for part, path in homes.items():
        home = joined[path]
        if home != ROOT and not _inside_another(path, joined):
            modules.setdefault(home, []).append(part)
    for home, parts in modules.items():
        _check_forward(home, parts)
    owned: dict[str, dict[int, tuple[nn.Module, str]]] = {home: {} for home in modules}
    for path, owner, name, parameter in _occurrences(module):
        home = joined[_innermost(module, path, homes)]
        owned[home].setdefault(id(parameter), (owner, name))
    ordered = sorted(modules, key=lambda home: -len(home.split(".")) if home else 1)
    return [
        Unit(
            tuple(seen[part] for part in modules[home]),
            tuple(modules[home]),
            tuple(owned[home].values()),
        )
        for home in ordered
        if owned[home] or home == ROOT
    ]


def logical_path(unit: Unit) -> str:
    """The unit's name in messages: its modules' paths, without what wrappers add."""
    return " + ".join(clean_name(path) or "the module itself" for path in unit.paths)


def _elements(module: nn.Module) -> Iterator[nn.Module]:
    """Elements of the outermost lists and dicts; of one that holds such, its elements."""
    for child in module.children():
        if isinstance(child, nn.ModuleList | nn.ModuleDict):
            yield from _calls(child)
        else:
            yield from _elements(child)


def _calls(container: nn.Module) -> Iterator[nn.Module]:
    for element in container.children():
        if isinstance(element, nn.ModuleList | nn.ModuleDict):
            yield from _calls(element)
        elif next(element.parameters(), None) is not None:
            yield element


def _matched(seen: dict[nn.Module, str], patterns: Sequence[str]) -> list[nn.Module]:
    by_name: dict[str, nn.Module] = {}
    for part, path in seen.items():
        if path:  # of a wrapper and what it wraps, the wrapper
            by_name.setdefault(clean_name(f"{path}.").removesuffix("."), part)
    found = chosen(by_name, patterns)
    if found.unmatched:
        raise ValueError(f"units={list(patterns)}: no module's name matches {found.unmatched}")
    return [by_name[name] for name in found.names]


def _occurrences(module: nn.Module) -> Iterator[tuple[str, nn.Module, str, nn.Parameter]]:
    """(path of the owner, owner, name, parameter) wherever a parameter can be reached."""
    for path, owner in module.named_modules(remove_duplicate=False):
        for name, parameter in owner._parameters.items():
            if parameter is not None:
                yield path, owner, name, parameter


def _innermost(module: nn.Module, path: str, homes: dict[nn.Module, str]) -> str:
    """The path of the innermost unit around ``path``."""
    steps, part, home = path.split(".") if path else [], module, ROOT
    for step in steps:
        part = part._modules[step]
        assert part is not None
        home = homes.get(part, home)
    return home


def _joined(module: nn.Module, homes: dict[nn.Module, str]) -> dict[str, str]:
    """Each unit's path to that of the unit it became part of."""
    parents = {path: path for path in [ROOT, *homes.values()]}

    def top(path: str) -> str:
        while parents[path] != path:
            path = parents[path]
        return path

    first: dict[int, str] = {}
    for path, _, _, parameter in _occurrences(module):
        home = top(_innermost(module, path, homes))
        known = top(first.setdefault(id(parameter), home))
        if known != home:
            # The root keeps its path, so that what shares with it becomes part of it; else the
            # outer one does, whose forward pass spans the other's.
            low, high = sorted((known, home), key=lambda one: one.count(".") if one else -1)
            parents[high] = low
    return {path: top(path) for path in parents}


def _inside_another(path: str, joined: dict[str, str]) -> bool:
    """Whether a module around this one belongs to the same unit."""
    return any(
        path.startswith(f"{other}.") and joined[other] == joined[path] for other in joined if other
    )


def _check_forward(home: str, parts: list[nn.Module]) -> None:
    for part in parts:
        if type(part).forward is nn.Module.forward:
            where = f"unit {home!r}" if home else "module"
            raise ValueError(f"{where} ({type(part).__name__}) must have a forward of its own")
