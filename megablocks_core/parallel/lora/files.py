"""Adapters as files, in the format of Hugging Face's peft, which loads them and whose it loads.

A folder holds ``adapter_model.safetensors`` (whole factors by the name of their layer, which for
a stack is that of each matrix) and ``adapter_config.json``.
"""

import json
import os
import re
import shutil
from collections.abc import Mapping
from pathlib import Path
from tempfile import mkdtemp
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor, nn

from megablocks_core.groups import (
    LOCAL,
    Group,
    load_slices,
    specs_of,
    together,
    whole_tensor,
)
from megablocks_core.groups.stacks import Stack
from megablocks_core.parallel.lora.layers import modules_by_name
from megablocks_core.parallel.lora.lora import adapt
from megablocks_core.parallel.lora.sites import Site, StackSite, adapted_sites, sites_of

_TENSORS, _CONFIG = "adapter_model.safetensors", "adapter_config.json"
_PREFIX = "base_model.model."
_FACTOR = re.compile(r"(.+)\.(lora_A\.weight|lora_B\.weight|lora_embedding_A|lora_embedding_B)")
_BASE = ".base_layer.weight"
# Settings that change what an adapter computes, and the values that are served.
_SERVED: dict[str, tuple[Any, ...]] = {
    "peft_type": ("LORA",),
    "bias": ("none",),
    "fan_in_fan_out": (False,),
    "use_dora": (False,),
    # Others take out of the base weights what they start from, which no file tells.
    "init_lora_weights": (True, False, None, "gaussian", "eva", "orthogonal"),
    "use_qalora": (False,),
    "arrow_config": (None,),
    "lora_bias": (False,),
    "modules_to_save": (None, []),
    "layer_replication": (None,),
    "alora_invocation_tokens": (None,),
    "target_parameters": (None, []),
}


def save_lora(module: nn.Module, path: str | os.PathLike[str], *, group: Group = LOCAL) -> None:
    """Write the adapters of ``module`` alone, as whole tensors, for peft and ``load_lora``.

    Every rank of ``group`` and of the groups that cut the adapters calls it; cut factors are
    gathered, one all-gather each, and the first rank of ``group`` writes. The folder appears
    complete or not at all.

    Args:
        module: A model with adapters, or with merged ones.
        path: The folder: new or empty.
        group: All ranks that call it (usually the world): it says which of them writes. Over
            ``LOCAL`` every rank that calls it writes, and all but the first to end are refused.

    Raises:
        ValueError: ``module`` has no adapter, its adapters differ in ``rslora``, they are cut
            over ranks that ``group`` lacks, or ``path`` is a folder with files; on every rank.
    """
    with together("save_lora", group=group):
        _require_all_holders(module, group)
    tensors: dict[str, Tensor] = {}
    adapters = {}
    for site in adapted_sites(module):
        names = site.layers()
        adapters |= dict.fromkeys(names, site.adapter)
        for leaf, factor in site.factors():
            whole = whole_tensor(factor.weight, specs_of(factor, "weight")).cpu()
            matrices = whole.unbind(0) if isinstance(site, StackSite) else [whole]
            for name, matrix in zip(names, matrices, strict=True):
                tensors[_PREFIX + _stored_name(name, leaf)] = matrix.contiguous()
    with together("save_lora", group=group):
        if not adapters:
            raise ValueError("module must have adapters, which add_lora puts there")
        if len({adapter.rslora for adapter in adapters.values()}) > 1:
            raise ValueError("adapters must agree on rslora to be saved together")
        if group.rank == 0:
            settings = {name: (x.rank, x.alpha) for name, x in adapters.items()}
            rslora = any(x.rslora for x in adapters.values())
            _write(Path(path), tensors, _config(settings, rslora))


def load_lora(
    module: nn.Module, path: str | os.PathLike[str], *, dtype: torch.dtype | None = None
) -> tuple[str, ...]:
    """Read adapters that ``save_lora`` or peft wrote into ``module``, cut or not.

    A layer that has no adapter gets one, as by ``add_lora``; one that has must have the same
    rank and scale. The layers of a stack have one rank and scale, and all of them are there.
    Each rank reads its own slices; nothing is sent. A rate of dropout in the settings is a
    matter of training and is not taken over.

    Args:
        module: A model whose layers have the names that they had when the adapters were saved.
        path: The folder.
        dtype: Of adapters that are added; default that of each layer's weight.

    Returns:
        The names of the layers, as ``add_lora`` gives them.

    Raises:
        ValueError: The settings ask for what is not served, a tensor names no layer of
            ``module`` or has another shape, a part of a stack is missing, or an adapter
            differs. Nothing was changed.
    """
    config = json.loads((Path(path) / _CONFIG).read_text())
    for key, served in _SERVED.items():
        if config.get(key, served[0]) not in served:
            raise ValueError(f"{_CONFIG}: {key}={config[key]!r} is not served")
    with safe_open(Path(path) / _TENSORS, framework="pt") as file:
        stored = {name: file.get_slice(name) for name in file.keys()}  # noqa: SIM118
        sites = {site.name: (site, factors) for site, factors in _factors(module, stored)}
        settings = {
            name: (_rank(factors), _alpha(config, site)) for name, (site, factors) in sites.items()
        }
        adapt(module, settings, rslora=bool(config.get("use_rslora")), dtype=dtype, present=True)
        for site, factors in sites.values():
            for leaf, factor in site.factors():
                load_slices(factor.weight, specs_of(factor, "weight"), factors[leaf])
        _fill_base(module, stored)
    return tuple(sites)


def _require_all_holders(module: nn.Module, group: Group) -> None:
    for site in adapted_sites(module):
        for _, factor in site.factors():
            for spec in specs_of(factor, "weight"):
                if not set(spec.group.ranks) <= set(group.ranks) and spec.group.size > 1:
                    raise ValueError(
                        f"group of ranks {list(group.ranks)} must include the ranks "
                        f"{list(spec.group.ranks)}, which hold parts of {site.name}"
                    )


def _stored_name(name: str, leaf: str) -> str:
    """peft keeps an embedding's factors as bare parameters."""
    return f"{name}.{leaf}" if leaf.startswith("lora_embedding") else f"{name}.{leaf}.weight"


def _config(settings: Mapping[str, tuple[int, float]], rslora: bool) -> dict[str, Any]:
    (rank, alpha), *_ = settings.values()
    return {
        "peft_type": "LORA",
        "base_model_name_or_path": None,
        "task_type": None,
        "inference_mode": True,
        "r": rank,
        "lora_alpha": _number(alpha),
        "rank_pattern": _patterns({name: r for name, (r, _) in settings.items()}, rank),
        "alpha_pattern": _patterns(
            {name: _number(a) for name, (_, a) in settings.items()}, _number(alpha)
        ),
        "target_modules": list(settings),
        "use_rslora": rslora,
        "lora_dropout": 0.0,
        "bias": "none",
        "fan_in_fan_out": False,
    }


def _patterns(values: Mapping[str, float], default: float) -> dict[str, float]:
    """Those that differ; the first match counts, and a name matches all that end in it."""
    differ = {name for name, value in values.items() if value != default}
    hidden = {name for name in values if any(name.endswith(f".{other}") for other in differ)}
    return {name: values[name] for name in sorted(differ | hidden, key=len, reverse=True)}


def _number(alpha: float) -> float:
    return int(alpha) if alpha == int(alpha) else alpha


def _write(target: Path, tensors: dict[str, Tensor], config: dict[str, Any]) -> None:
    _require_new(target)
    target.parent.mkdir(parents=True, exist_ok=True)
    staging = Path(mkdtemp(prefix=f".{target.name}.", suffix=".partial", dir=target.parent))
    try:
        staging.chmod(target.parent.stat().st_mode & 0o777)
        save_file(tensors, staging / _TENSORS, metadata={"format": "pt"})
        (staging / _CONFIG).write_text(json.dumps(config, indent=2) + "\n")
        try:
            staging.rename(target)
        except OSError:
            _require_new(target)  # another process, such as a rank without group=, was faster
            raise
    finally:
        shutil.rmtree(staging, ignore_errors=True)


def _require_new(target: Path) -> None:
    if target.exists() and not (target.is_dir() and not any(target.iterdir())):
        raise ValueError(f"path={str(target)!r} must be new or an empty folder")


def _factors(module: nn.Module, stored: Mapping[str, Any]) -> list[tuple[Site, dict[str, Any]]]:
    """The two factors of each site by their names there, those of a stack as stacks."""
    layers: dict[str, dict[str, Any]] = {}
    sites = {name: site for site in sites_of(module).values() for name in site.layers()}
    for key, tensor in stored.items():
        match = _FACTOR.fullmatch(key.removeprefix(_PREFIX))
        if match and match[1] in sites:
            layers.setdefault(match[1], {})[match[2].removesuffix(".weight")] = tensor
        elif _base_name(key) not in sites:
            raise ValueError(f"{_TENSORS}: {key} names no layer of a {type(module).__name__}")
    found = []
    for site in dict.fromkeys(sites[name] for name in layers):
        for name in site.layers():
            _check_factors(name, site, layers.get(name, {}))
        found.append((site, _joined(site, layers)))
    return found


def _joined(site: Site, layers: Mapping[str, dict[str, Any]]) -> dict[str, Any]:
    names = site.layers()
    if not isinstance(site, StackSite):
        return layers[names[0]]
    parts = {f"{name}.{leaf}": x for name in names for leaf, x in layers[name].items()}
    return {leaf: Stack(parts, [f"{n}.{leaf}" for n in names]) for leaf in layers[names[0]]}


def _check_factors(name: str, site: Site, factors: Mapping[str, Any]) -> None:
    place = site.place()
    kind = "lora_embedding" if place.embeds else "lora"
    if set(factors) != {f"{kind}_A", f"{kind}_B"}:
        raise ValueError(f"{_TENSORS}: {name} must have {kind}_A and _B, not {sorted(factors)}")
    (rank, inputs), (outputs, columns) = (factors[f"{kind}_{x}"].get_shape() for x in "AB")
    if (outputs, inputs) != place.shape or columns != rank:
        raise ValueError(
            f"{_TENSORS}: factors [{rank} {inputs}] and [{outputs} {columns}] do not fit {name}, "
            f"whose weight is {list(place.shape)}"
        )


def _base_name(key: str) -> str | None:
    """The layer whose own weight peft stored too, as it does for an embedding."""
    name = key.removeprefix(_PREFIX)
    return name.removesuffix(_BASE) if name.endswith(_BASE) else None


def _rank(factors: Mapping[str, Any]) -> int:
    first = next(tensor for leaf, tensor in factors.items() if leaf.endswith("_A"))
    return first.get_shape()[-2]


def _alpha(config: Mapping[str, Any], site: Site) -> float:
    """peft's rule: a pattern is a regular expression for the last steps of a name."""
    patterns = [
        (re.compile(rf"(.*\.)?({pattern})"), alpha)
        for pattern, alpha in (config.get("alpha_pattern") or {}).items()
    ]
    found = {
        next((alpha for match, alpha in patterns if match.fullmatch(name)), config["lora_alpha"])
        for name in site.layers()
    }
    if len(found) > 1:
        raise ValueError(f"{_CONFIG}: {site.name} must have one alpha, not {sorted(found)}")
    return found.pop()


def _fill_base(module: nn.Module, stored: Mapping[str, Any]) -> None:
    parts = modules_by_name(module)
    for key, tensor in stored.items():
        name = _base_name(key)
        if name is not None:
            weight, specs = parts[name].get_parameter("weight"), specs_of(parts[name], "weight")
            load_slices(weight, specs, tensor)
