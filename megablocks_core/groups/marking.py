"""Shard marks: which parameter is cut, along which dimension, over which group.

A mark lives on the module that owns the parameter, because attributes of parameters are
lost by ``deepcopy``, ``to_empty`` and assign-loading. Marks are the one source for gradient
reduction, clipping, checkpoints and export. No layer reads a mark in ``forward``; an
unmarked parameter is replicated.
"""

from __future__ import annotations

import re
from collections.abc import Iterator

from torch import nn

from megablocks_core.groups.cuts import ShardSpec, Specs

_ATTRIBUTE = "_shard_marks"
_REPLICATED = Specs()
# What wrappers put into a parameter's path without changing which parameter it is.
_WRAPPERS = re.compile(
    r"(?:^|(?<=\.))(?:_orig_mod|_fsdp_wrapped_module|_checkpoint_wrapped_module)\."
)
_PARAMETRIZED = re.compile(r"parametrizations\.([^.]+)\.original$")


def mark(
    module: nn.Module, name: str, *specs: ShardSpec, each: str | None = None, expert: bool = False
) -> None:
    """Say how parameter or buffer ``name`` of ``module`` is cut; a second mark replaces the first.

    Args:
        module: The module that owns the parameter.
        name: Its name there, such as "weight".
        *specs: The cuts, in order; an FSDP cut comes last and lies inside. None: replicated.
        each: Names of the tensors that dimension 0 stacks, such as
            "experts.{}.up_proj.weight", relative to the module's parent.
        expert: Its copies lie on the expert data-parallel group.

    Raises:
        ValueError: The module has no such parameter or buffer, a cut dimension is not one of
            its dimensions, or ``each`` has not exactly one "{}".
    """
    if name not in module._parameters and name not in module._buffers:
        raise ValueError(f"name={name!r} must be a parameter or buffer of {type(module).__name__}")
    tensor = getattr(module, name)
    for spec in specs:
        if tensor is not None and spec.dim >= tensor.dim():
            raise ValueError(f"dim={spec.dim} must be below {tensor.dim()}, the dims of {name!r}")
    if each is not None and each.count("{}") != 1:
        raise ValueError(f"each={each!r} must have exactly one {{}}")
    module.__dict__.setdefault(_ATTRIBUTE, {})[name] = Specs(specs, each=each, expert=expert)


def marks(
    module: nn.Module, *, remove_duplicate: bool = True
) -> Iterator[tuple[str, nn.Parameter, Specs]]:
    """Yield (logical name, parameter, specs) for every parameter below ``module``.

    The logical name is the path without the prefixes of wrappers. A tied parameter comes
    once, under its first name, unless ``remove_duplicate`` is false. ``specs`` is a tuple of
    ``ShardSpec``, empty if replicated, with the attributes ``each`` and ``expert``.
    """
    found = list(_owned(module))
    known: dict[int, Specs] = {}
    for owner, name, _, parameter in found:
        specs = specs_of(owner, name)
        if specs or specs.expert or specs.each:
            known.setdefault(id(parameter), specs)
    seen: set[int] = set()
    for _, _, path, parameter in found:
        if remove_duplicate and id(parameter) in seen:
            continue
        seen.add(id(parameter))
        yield clean_name(path), parameter, known.get(id(parameter), _REPLICATED)


def specs_of(owner: nn.Module, name: str) -> Specs:
    """The mark of one parameter or buffer on the module that owns it; empty if replicated."""
    match = re.fullmatch(r"parametrizations\.([^.]+)\.original", name)
    return owner.__dict__.get(_ATTRIBUTE, {}).get(match.group(1) if match else name, _REPLICATED)


def clean_name(path: str) -> str:
    """A parameter's path without what wrappers and parametrizations put into it."""
    return _PARAMETRIZED.sub(r"\1", _WRAPPERS.sub("", path))


def _owned(module: nn.Module) -> Iterator[tuple[nn.Module, str, str, nn.Parameter]]:
    """(owner, name there, path, parameter); parametrized originals belong to the outer module."""
    for prefix, owner in module.named_modules(remove_duplicate=False):
        if type(owner).__name__ == "ParametrizationList":
            continue
        path = without_ddp(module, prefix)
        for name, parameter in owner._parameters.items():
            if parameter is not None:
                yield owner, name, f"{path}.{name}" if path else name, parameter
        for name, hidden in _parametrized(owner):
            yield owner, name, f"{path}.{name}" if path else name, hidden


def _parametrized(owner: nn.Module) -> Iterator[tuple[str, nn.Parameter]]:
    for name, parts in getattr(owner, "parametrizations", {}).items():
        for original, parameter in parts._parameters.items():  # several for a weight norm
            if parameter is not None:
                yield f"parametrizations.{name}.{original}", parameter


def without_ddp(module: nn.Module, prefix: str) -> str:
    """Drop the "module" step under each DistributedDataParallel or DataParallel wrapper."""
    steps, kept = prefix.split(".") if prefix else [], []
    part = module
    for step in steps:
        wrapped = step == "module" and isinstance(
            part, nn.parallel.DistributedDataParallel | nn.DataParallel
        )
        if not wrapped:
            kept.append(step)
        part = part.get_submodule(step)
    return ".".join(kept)
