"""Quantised linear layers of TensorRT-LLM: numbers, and the factors beside them.

E4M3 numbers and float32 factors, as ModelOpt 0.47 writes them: a factor is what numbers are times
to give the weight, and for what it is multiplied with likewise. Queries, keys and values are one
weight, with one factor, which the two that lead into an activation share as well; the experts of a
layer are one tensor, with a factor each.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import torch

from megablocks_core.export.lazies import Lazy
from megablocks_core.export.quantising.tensors import converted, fp8_numbers, fp8_scale
from megablocks_core.export.trtllm.slices import numbers, stacked

_F8, _F32 = torch.float8_e4m3fn, torch.float32


class Piece(NamedTuple):
    """A tensor of a rank's file: its name, what it is made of, and the dtype that it has there."""

    name: str
    value: Lazy
    dtype: torch.dtype


@dataclass(frozen=True)
class Scales:
    """Which weights are quantised, and the largest magnitudes that factors are made of.

    Attributes:
        taken: On-disk names of weights in Hugging Face's folder.
        weights: Of each of these.
        inputs: Of what each of these is multiplied with.
        keys: Of cached keys, by ``k_proj``'s name; empty: they are not quantised.
        values: Of cached values, by ``v_proj``'s name.
        excluded: Names of modules here that are not quantised, where no more is known than that;
            ``taken`` is not asked then.
    """

    taken: Collection[str] = ()
    weights: Mapping[str, float] = field(default_factory=dict)
    inputs: Mapping[str, float] = field(default_factory=dict)
    keys: Mapping[str, float] = field(default_factory=dict)
    values: Mapping[str, float] = field(default_factory=dict)
    excluded: Collection[str] | None = None

    def _takes(self, name: str, sources: Sequence[str]) -> bool:
        """Whether a module here is quantised.

        Raises:
            ValueError: Some of the weights that it is made of are taken, and others not.
        """
        if self.excluded is not None:
            return name not in self.excluded
        found = {source in self.taken for source in sources}
        if len(found) > 1:
            names = ", ".join(sources)
            raise ValueError(f"recipe must take all of {names}, or none: they share a factor")
        return True in found

    def linear(
        self, name: str, sources: Sequence[str], weight: Lazy, dtype: torch.dtype
    ) -> list[Piece]:
        """A linear layer whose factor ``sources`` share; ``weight`` is this rank's slice."""
        if not self._takes(name, sources):
            return [Piece(f"{name}.weight", weight, dtype)]
        scale = fp8_scale(max(self.weights[source] for source in sources))
        inputs = fp8_scale(max(self.inputs[source] for source in sources))
        return [
            Piece(f"{name}.weight", _numbers(weight, scale, dtype), _F8),
            Piece(f"{name}.weights_scaling_factor", numbers([scale]), _F32),
            Piece(f"{name}.activation_scaling_factor", numbers([inputs]), _F32),
        ]

    def experts(
        self,
        name: str,
        sources: Sequence[Sequence[str]],
        weights: Mapping[int, Lazy],
        dtype: torch.dtype,
    ) -> list[Piece]:
        """The linear layers of experts in one tensor.

        Args:
            name: Of the tensor, without ".weight".
            sources: The names of each expert's weights, of all experts.
            weights: This rank's slices, by expert.
            dtype: Of what is not quantised.
        """
        if not self._takes(name, [one for names in sources for one in names]):
            return [Piece(f"{name}.weight", stacked(list(weights.values())), dtype)]
        scales = [fp8_scale(max(self.weights[one] for one in sources[i])) for i in weights]
        inputs = fp8_scale(max(self.inputs[one] for names in sources for one in names))
        found = zip(weights.values(), scales, strict=True)
        made = [_numbers(weight, scale, dtype) for weight, scale in found]
        return [
            Piece(f"{name}.weight", stacked(made), _F8),
            Piece(f"{name}.weights_scaling_factor", numbers(scales, 1), _F32),
            Piece(f"{name}.activation_scaling_factor", numbers([inputs]), _F32),
        ]

    def cache(self, name: str, key: str, value: str) -> list[Piece]:
        """The factors of cached keys and values, which are at least 1, as ModelOpt has them."""
        if key not in self.keys:
            return []
        keys, values = (max(1.0, fp8_scale(amax)) for amax in (self.keys[key], self.values[value]))
        return [
            Piece(f"{name}.{kind}_cache_scaling_factor", numbers([scale]), _F32)
            for kind, scale in (("k", keys), ("v", values), ("kv", max(keys, values)))
        ]


def _numbers(weight: Lazy, scale: float, dtype: torch.dtype) -> Lazy:
    """E4M3 numbers of the weight as ``dtype`` has it; quotients are not rounded in between."""
    return fp8_numbers(converted(converted(weight, dtype), torch.float32), scale)
