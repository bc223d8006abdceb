"""Plans: which modules of a model are cut how, as data.

A plan maps names to styles. A name is that of a module or a parameter; ``*`` stands for one
step of it, so "layers.*.mlp.up_proj" names one projection of every layer. This module reads
and resolves plans; ``tensor_parallelize`` carries them out.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from torch import nn

from megablocks_core.groups import Segment
from megablocks_core.groups.patterns import matcher

Named = Literal[
    "column", "column_gather", "row", "vocab", "heads", "replicated", "whole", "experts"
]


@dataclass(frozen=True)
class Column:
    """Cut the output features of a linear layer (or of stacked weights [E O I]).

    Attributes:
        unit: Features that no cut may separate, such as the width of a head. Default: that of
            a head if the module's parent has a ``head_dim`` that divides the features.
        repeat: With fewer units than ranks, neighbours hold the same unit, and their
            gradients are summed (key and value heads).
        segments: Lengths of packed parts (q|k|v, gate|up), or ``Segment`` records; each part
            is cut on its own.
        gather: All-gather the outputs; the ranks go on with them alike.
    """

    unit: int | None = None
    repeat: bool = False
    segments: Sequence[int | Segment] | None = None
    gather: bool = False


@dataclass(frozen=True)
class Row:
    """Cut the input features of a linear layer (or of stacked weights [E O I]).

    Attributes:
        split_input: The input comes whole and is cut here; else it is cut already.
    """

    split_input: bool = False


@dataclass(frozen=True)
class Vocab:
    """Cut the rows of an embedding."""


@dataclass(frozen=True)
class Heads:
    """Cut a vector or matrix that holds one entry, or row, for each head along dimension 0."""


@dataclass(frozen=True)
class Replicated:
    """Keep a weight whole that each rank uses on its own heads or tokens: sum its gradient."""


@dataclass(frozen=True)
class Whole:
    """Keep a weight whole that all ranks use alike."""


@dataclass(frozen=True)
class Experts:
    """A module whose stacked expert weights are cut: it gives a part of a sum."""


Style = Column | Row | Vocab | Heads | Replicated | Whole | Experts
Plan = Mapping[str, Named | Style]

_NAMED: dict[str, Style] = {
    "column": Column(),
    "column_gather": Column(gather=True),
    "row": Row(),
    "vocab": Vocab(),
    "heads": Heads(),
    "replicated": Replicated(),
    "whole": Whole(),
    "experts": Experts(),
}
# The styles of transformers' plans that are served. "packed_colwise" packs two equal parts.
_TRANSFORMERS: dict[str, Style] = {
    "colwise": Column(),
    "colwise_gather_output": Column(gather=True),
    "colwise_rep": Column(gather=True),
    "packed_colwise": Column(segments=(1, 1)),
    "rowwise": Row(),
    "rowwise_split_input": Row(split_input=True),
    "rowwise_rep": Row(split_input=True),
    "embedding_rowwise": Vocab(),
    "replicated_with_grad_allreduce": Replicated(),
    "replicate": Whole(),
    "moe_tp_experts": Experts(),
}
# Of these, neighbours may hold the same heads where a model brings its own plan.
_KEY_AND_VALUE = ("k_proj", "v_proj")


def read_plan(module: nn.Module, plan: Plan | Literal["auto"]) -> dict[str, Style]:
    """Styles by the full name of a module or parameter of ``module``.

    Args:
        module: The model.
        plan: A plan, or "auto": that of the model's ``_tp_plan`` (transformers), else its
            ``config.base_model_tp_plan``.

    Raises:
        ValueError: There is no such plan, a style is unknown or not served, or a name of a
            given plan matches nothing.
    """
    if plan == "auto":
        styles = _served(_transformers_plan(module))
        found, _ = _resolved(module, styles)
        return {name: _with_repeat(name, style) for name, style in found.items()}
    if isinstance(plan, str):
        raise ValueError(f'plan={plan!r} must be "auto" or map names to styles')
    found, unmatched = _resolved(module, {name: _style(name, kind) for name, kind in plan.items()})
    if unmatched:
        raise ValueError(f"plan must name modules or parameters of the model, not {unmatched}")
    return found


def _style(name: str, kind: Any) -> Style:
    if isinstance(kind, str) and kind in _NAMED:
        return _NAMED[kind]
    if isinstance(kind, Style):
        return kind
    raise ValueError(f"plan[{name!r}]={kind!r} must be one of {sorted(_NAMED)} or a record")


def _transformers_plan(module: nn.Module) -> Mapping[str, str]:
    merged = getattr(module, "_tp_plan", None)
    if merged:
        return merged
    base = getattr(getattr(module, "config", None), "base_model_tp_plan", None)
    if base:
        return base
    raise ValueError(
        f'plan="auto" needs a model with a plan (_tp_plan or config.base_model_tp_plan), which '
        f"{type(module).__name__} has not; hand in a plan such as "
        '{"layers.*.up": "column", "layers.*.down": "row"}'
    )


def _served(plan: Mapping[str, str]) -> dict[str, Style]:
    refused = {name: style for name, style in plan.items() if style not in _TRANSFORMERS}
    if refused:
        raise ValueError(
            f"the model's plan has styles that are not served: {refused}; hand in a plan of your "
            f"own without them (served are {sorted(_TRANSFORMERS)})"
        )
    return {name: _TRANSFORMERS[style] for name, style in plan.items()}


def _with_repeat(name: str, style: Style) -> Style:
    """Key and value projections of a model's own plan may repeat heads on neighbours."""
    if isinstance(style, Column) and name.rpartition(".")[2] in _KEY_AND_VALUE:
        return Column(style.unit, repeat=True, segments=style.segments, gather=style.gather)
    return style


def _resolved(module: nn.Module, styles: Mapping[str, Style]) -> tuple[dict[str, Style], list[str]]:
    """Styles by full name, later patterns first if several match; and patterns without a match."""
    names = [name for name, _ in module.named_modules() if name]
    names += [name for name, _ in module.named_parameters(remove_duplicate=False)]
    found: dict[str, Style] = {}
    unmatched = []
    for pattern, style in styles.items():
        matched = list(filter(matcher(pattern), names))
        found.update(dict.fromkeys(matched, style))
        if not matched:
            unmatched.append(pattern)
    return found, unmatched
