"""What a folder's weights are quantised to, and which of them are."""

from __future__ import annotations

import re
from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Any

# The modules that hold a layer's large matrices: attention, feed-forward layers, experts, and what
# leads into and out of state-space layers and delta nets. Whatever has another name stays as it
# is: routers, norms, embeddings, heads, convolutions, small projections.
_MODULES = frozenset(
    (
        *("q_proj", "k_proj", "v_proj", "o_proj"),
        *("q_a_proj", "q_b_proj", "kv_a_proj_with_mqa", "kv_b_proj"),
        *("gate_proj", "up_proj", "down_proj", "w1", "w2", "w3"),
        *("input_linear", "output_linear"),
        *("in_proj", "in_proj_qkvz", "in_proj_qkv", "in_proj_z", "out_proj"),
    )
)
_IN_LAYER = re.compile(r"(?:^|\.)(?:model|backbone)\.layers\.\d+\.")
# Modules that runtimes compute as one product: their inputs are one, and so should be scales.
_TOGETHER = (("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj"), ("w1", "w3"))


def module_of(name: str) -> str:
    """The module that owns a tensor, by on-disk names; a stack of experts is owned by these."""
    return name.rpartition(".")[0]


@dataclass(frozen=True, kw_only=True)
class Recipe(ABC):
    """What weights are quantised to; the subclasses are the formats.

    Attributes:
        exclude: Patterns of modules' on-disk names, such as "*.o_proj" or "model.layers.0.*",
            whose weights stay as they are.
        include: Patterns of further modules, whose weights are matrices.
    """

    exclude: tuple[str, ...] = ()
    include: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        """Raise for patterns that are none."""
        for name in ("exclude", "include"):
            patterns = getattr(self, name)
            if not (isinstance(patterns, tuple) and all(isinstance(one, str) for one in patterns)):
                raise ValueError(f"{name}={patterns!r} must be a tuple of patterns of names")

    @property
    @abstractmethod
    def algorithm(self) -> str:
        """The name that ModelOpt and TensorRT-LLM have for it."""

    @property
    def is_calibrated(self) -> bool:
        """Whether activations are quantised by scales that data has given."""
        return False

    @property
    def cache_algorithm(self) -> str | None:
        """The name of what cached keys and values are quantised to, by scales that data gave."""
        return None

    def takes(self, name: str) -> bool:
        """Whether the weight with this on-disk name is quantised, if it is a matrix."""
        module, _, last = name.rpartition(".")
        if last != "weight" or any(fnmatchcase(module, one) for one in self.exclude):
            return False
        if any(fnmatchcase(module, one) for one in self.include):
            return True
        is_large = module.rpartition(".")[2] in _MODULES
        return is_large and "vision" not in module and _IN_LAYER.search(module) is not None


@dataclass(frozen=True, kw_only=True)
class _WithCache(Recipe):
    kv_cache: bool = True

    def __post_init__(self) -> None:
        """Raise for what is no choice."""
        super().__post_init__()
        if type(self.kv_cache) is not bool:
            raise ValueError(f"kv_cache={self.kv_cache!r} must be True or False")

    @property
    def is_calibrated(self) -> bool:
        """Activations have one scale for each product."""
        return True

    @property
    def cache_algorithm(self) -> str | None:
        """Keys and values of E4M3, with one scale each in a layer."""
        return "FP8" if self.kv_cache else None


@dataclass(frozen=True, kw_only=True)
class Fp8(_WithCache):
    """E4M3 numbers, one scale for each weight and one for what it is multiplied with.

    Gate and up of an expert share theirs.

    Attributes:
        kv_cache: Whether cached keys and values are E4M3 too.
    """

    @property
    def algorithm(self) -> str:
        """FP8."""
        return "FP8"


@dataclass(frozen=True, kw_only=True)
class Nvfp4(_WithCache):
    """E2M1 numbers, an E4M3 scale for each 16 of them, and one scale for all of these.

    Weights of one product (q, k and v; gate and up) share the last.

    Attributes:
        kv_cache: Whether cached keys and values are E4M3.
    """

    @property
    def algorithm(self) -> str:
        """NVFP4."""
        return "NVFP4"


@dataclass(frozen=True, kw_only=True)
class Fp8Blocks(Recipe):
    """E4M3 numbers and a float32 scale for each block, as DeepSeek-V3's folders have them.

    Attributes:
        block: Rows and columns. Edges need not be whole blocks.
    """

    block: tuple[int, int] = (128, 128)

    def __post_init__(self) -> None:
        """Raise for what is no block."""
        super().__post_init__()
        if not (isinstance(self.block, tuple) and len(self.block) == 2):
            raise ValueError(f"block={self.block!r} must be a block's rows and columns")
        for size in self.block:
            _check_size("block", self.block, size)

    @property
    def algorithm(self) -> str:
        """FP8_BLOCK_SCALES."""
        return "FP8_BLOCK_SCALES"


@dataclass(frozen=True, kw_only=True)
class Int8(Recipe):
    """Integers of 8 bits and a float32 scale for each row; activations stay as they are."""

    @property
    def algorithm(self) -> str:
        """W8A16."""
        return "W8A16"


@dataclass(frozen=True, kw_only=True)
class Int4(Recipe):
    """Integers of 4 bits and a float32 scale for some of a row; activations stay as they are.

    Attributes:
        group_size: How many numbers of a row share a scale; rows must be whole groups.
    """

    group_size: int = 128

    def __post_init__(self) -> None:
        """Raise for what is no size."""
        super().__post_init__()
        _check_size("group_size", self.group_size, self.group_size)

    @property
    def algorithm(self) -> str:
        """W4A16_AWQ, the name of the layout, however scales were found."""
        return "W4A16_AWQ"


RECIPES: Mapping[str, type[Recipe]] = {
    "fp8": Fp8,
    "fp8-blocks": Fp8Blocks,
    "nvfp4": Nvfp4,
    "int8": Int8,
    "int4": Int4,
}


def together_with(name: str) -> tuple[str, ...]:
    """The on-disk names of weights that runtimes multiply at once, this one among them."""
    module, _, last = name.rpartition(".")
    before, _, part = module.rpartition(".")
    for parts in _TOGETHER:
        if part in parts:
            return tuple(f"{before}.{one}.{last}" for one in parts)
    return (name,)


def _check_size(name: str, given: Any, size: object) -> None:
    if type(size) is not int or size < 1:
        raise ValueError(f"{name}={given!r} must be whole numbers above 0")
