"""What a quantised folder says of itself: ``quantization_config`` and ``hf_quant_config.json``.

ModelOpt has two shapes for the same: its file holds the older, with "quantization" inside, and
``config.json`` the flat one, in words of compressed-tensors. Blocks of E4M3 have the words of
DeepSeek-V3's folders instead, and no file.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

from megablocks_core.export.lazies import Shape
from megablocks_core.export.quantising.recipe import (
    Fp8,
    Fp8Blocks,
    Int4,
    Int8,
    Nvfp4,
    Recipe,
    module_of,
)
from megablocks_core.export.quantising.tensors import GROUP_OF_NVFP4
from megablocks_core.files import read_json

ENTRY = "quantization_config"
FILE = "hf_quant_config.json"
# Whose format it is. TensorRT-LLM reads folders of this producer alone.
_PRODUCER = {"name": "modelopt", "version": "0.47.0"}
_CACHE_SCHEME = {"dynamic": False, "num_bits": 8, "type": "float"}


@dataclass(frozen=True)
class Settings:
    """How a folder is quantised, as it says.

    Attributes:
        recipe: The format.
        excluded: Patterns of modules whose weights are plain.
    """

    recipe: Recipe
    excluded: tuple[str, ...]

    def excludes(self, name: str) -> bool:
        """Whether the weight with this on-disk name is said to be plain."""
        return any(fnmatchcase(module_of(name), pattern) for pattern in self.excluded)

    def takes(self, name: str, shape: Shape) -> bool:
        """Whether it must be quantised, by its name and plain shape; others may be."""
        return len(shape) == 2 and self.recipe.takes(name) and not self.excludes(name)


def excluded_modules(kept: Sequence[str]) -> tuple[str, ...]:
    """The modules of weights, by on-disk names, that stay as they are."""
    return tuple(sorted({module_of(name) for name in kept}))


def quantization_config(settings: Settings) -> dict[str, Any]:
    """The entry of ``config.json``, in the flat shape."""
    recipe, excluded = settings.recipe, list(settings.excluded)
    if isinstance(recipe, Fp8Blocks):
        return {
            "quant_method": "fp8",
            "fmt": "e4m3",
            "activation_scheme": "dynamic",
            "weight_block_size": list(recipe.block),
            "modules_to_not_convert": excluded,
        }
    cache = {"kv_cache_scheme": dict(_CACHE_SCHEME)} if recipe.cache_algorithm else {}
    return {
        "config_groups": {"group_0": {**_numbers(recipe), "targets": ["Linear"]}},
        "ignore": excluded,
        "quant_algo": recipe.algorithm,
        **cache,
        "producer": dict(_PRODUCER),
        "quant_method": "modelopt",
    }


def quantization_file(settings: Settings) -> dict[str, Any] | None:
    """What ``hf_quant_config.json`` holds, in the older shape; ``None`` for no file."""
    recipe = settings.recipe
    if isinstance(recipe, Fp8Blocks):
        return None
    more: dict[str, Any] = {}
    if isinstance(recipe, Nvfp4):
        more = {"group_size": GROUP_OF_NVFP4}
    elif isinstance(recipe, Int4):
        more = {"group_size": recipe.group_size, "has_zero_point": False, "pre_quant_scale": True}
    quantization = {
        "quant_algo": recipe.algorithm,
        "kv_cache_quant_algo": recipe.cache_algorithm,
        **more,
        "exclude_modules": list(settings.excluded),
    }
    return {"producer": dict(_PRODUCER), "quantization": quantization}


def _numbers(recipe: Recipe) -> dict[str, Any]:
    """What weights are, and what activations are where these are quantised."""
    if isinstance(recipe, Fp8):
        numbers: dict[str, Any] = {"dynamic": False, "num_bits": 8, "type": "float"}
    elif isinstance(recipe, Nvfp4):
        size = {"group_size": GROUP_OF_NVFP4}
        numbers = {"dynamic": False, "num_bits": 4, "type": "float", **size}
    elif isinstance(recipe, Int4):
        size = {"group_size": recipe.group_size}
        numbers = {"dynamic": False, "num_bits": 4, "type": "int", **size}
    else:
        numbers = {"dynamic": False, "num_bits": 8, "type": "int"}
    activations = {"input_activations": dict(numbers)} if recipe.is_calibrated else {}
    return {**activations, "weights": numbers}


def settings_of(config: Mapping[str, Any], folder: Path) -> Settings | None:
    """How a folder says that it is quantised; ``None``: not at all, or by no recipe of ours.

    Raises:
        ValueError: Its algorithm is not served, or its two files do not say the same.
    """
    beside = None
    if (folder / FILE).is_file():
        beside = _settings(read_json(folder / FILE, dict), str(folder / FILE))
    entry = config.get(ENTRY)
    if not isinstance(entry, Mapping) or entry.get("quant_method") not in ("fp8", "modelopt"):
        return beside
    # ModelOpt's own flat shape has no size of groups of integers.
    size = beside.recipe.group_size if beside and isinstance(beside.recipe, Int4) else None
    inline = _settings(entry, f"{folder}/config.json: {ENTRY}", size)
    if beside is not None and inline != beside:
        raise ValueError(
            f"{folder}: {ENTRY} in config.json and {FILE} must say the same, not "
            f"{inline} and {beside}"
        )
    return inline


def _settings(found: Mapping[str, Any], where: str, group_size: int | None = None) -> Settings:
    """What either shape says, with the size of groups if it does not say that."""
    if not isinstance(found, Mapping):
        raise ValueError(f"{where}={found!r} must be an object")
    try:
        if found.get("quant_method") == "fp8":
            rows, columns = found["weight_block_size"]
            recipe: Recipe = Fp8Blocks(block=(rows, columns))
            return Settings(recipe, _patterns(found.get("modules_to_not_convert") or []))
        if "quantization" in found:
            inner = found["quantization"]
            cache, size = inner.get("kv_cache_quant_algo"), inner.get("group_size")
            excluded = inner.get("exclude_modules") or []
        else:
            inner = found
            cache = "FP8" if found.get("kv_cache_scheme") == _CACHE_SCHEME else None
            cache = cache or found.get("kv_cache_scheme")
            groups = found.get("config_groups") or {"group_0": {"weights": {}}}
            size = groups["group_0"]["weights"].get("group_size", group_size)
            excluded = found.get("ignore") or []
        recipe = _recipe(inner["quant_algo"], cache, size)
        return Settings(recipe, _patterns(excluded))
    except (KeyError, TypeError, AttributeError, ValueError) as error:
        raise ValueError(
            f"{where} must name a format that is served and its sizes, not "
            f"{json.dumps(dict(found))[:300]}: {error}"
        ) from error


def _recipe(algorithm: object, cache: object, group_size: object) -> Recipe:
    if algorithm in ("FP8", "NVFP4") and cache in ("FP8", None):
        return (Fp8 if algorithm == "FP8" else Nvfp4)(kv_cache=cache is not None)
    if algorithm == "W8A16" and cache is None:
        return Int8()
    if algorithm == "W4A16_AWQ" and cache is None and isinstance(group_size, int):
        return Int4(group_size=group_size)
    raise ValueError(f"quant_algo={algorithm!r} with the cache {cache!r} is not served")


def _patterns(given: Any) -> tuple[str, ...]:
    if not (isinstance(given, list) and all(isinstance(one, str) for one in given)):
        raise ValueError(f"excluded modules {given!r} must be a list of patterns")
    return tuple(given)
