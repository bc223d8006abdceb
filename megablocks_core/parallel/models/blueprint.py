"""What ``tensor_parallelize`` will do to a model, decided before anything is changed.

Everything that can be refused is refused here, by name.
"""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from torch import nn

from megablocks_core.groups import Group, Segment, ShardSpec
from megablocks_core.parallel.random.dropout_modules import (
    DropoutOfModel,
    place_dropouts,
    refuse_other_dropouts,
)
from megablocks_core.parallel.tensor.plan import (
    Column,
    Experts,
    Heads,
    Replicated,
    Row,
    Style,
    Vocab,
    Whole,
)

# Where a module that was cut keeps what puts it back.
UNDO = "_tensor_parallel_undo"


@dataclass
class Blueprint:
    """The cuts of a model.

    Attributes:
        group: The tensor-parallel ranks.
        slices_layers: The tokens are cut before the first of ``layers`` and gathered after
            ``final_norm`` (a transformers model under sequence parallelism).
        slices_all: The caller cuts the tokens (another model under sequence parallelism).
        layers: Name of the list of decoder layers.
        final_norm: Name of the norm after them.
        styles: By name of a module or parameter, without those that change nothing.
        specs: The cut of each cut parameter, by name.
        summed: Whole parameters used on own heads or tokens.
        attributes: (module, attribute, new value) that models of Llama's kind keep of sizes.
        ties: (name, other name) of each parameter that has two.
    """

    group: Group
    slices_layers: bool = False
    slices_all: bool = False
    layers: str = ""
    final_norm: str = ""
    styles: dict[str, Style] = field(default_factory=dict)
    specs: dict[str, ShardSpec] = field(default_factory=dict)
    summed: list[str] = field(default_factory=list)
    attributes: list[tuple[str, str, Any]] = field(default_factory=list)
    ties: list[tuple[str, str]] = field(default_factory=list)

    def on_own_tokens(self, name: str) -> bool:
        """Whether a module or parameter sees this rank's tokens only."""
        inside = name.startswith((f"{self.layers}.", f"{self.final_norm}."))
        return self.slices_all or (self.slices_layers and inside)

    def siblings(self) -> dict[str, list[str]]:
        """Column projections that share one input with others, by their parent.

        In a sliced layer the parent gathers the tokens for all; elsewhere two or more share
        a copy. Any other column stands alone, and so do gathered ones out of sliced layers.
        """
        found: dict[str, list[str]] = {}
        for name, style in self.styles.items():
            joins = isinstance(style, Column) and (not style.gather or self.on_own_tokens(name))
            if joins and f"{name}.weight" in self.specs:
                found.setdefault(parent_of(name), []).append(name)
        if self.slices_all:
            return {}
        return {
            parent: names
            for parent, names in found.items()
            if len(names) > 1 or self.on_own_tokens(names[0])
        }

    def gathers(self, name: str) -> bool:
        """Whether a module is a column projection whose outputs are gathered."""
        style = self.styles.get(name)
        return isinstance(style, Column) and style.gather

    def cuts_heads(self, module: nn.Module) -> bool:
        """Whether any attention of a transformers model goes on with this rank's heads."""
        blocks = {parent_of(name) for name in self.styles if self._stays_cut(name)}
        return any(hasattr(module.get_submodule(block), "layer_idx") for block in blocks)

    def _stays_cut(self, name: str) -> bool:
        return isinstance(self.styles[name], Column) and not self.gathers(name)

    def in_whole_block(self, name: str) -> bool:
        """Whether a parameter lies in a block that gathers all tokens and all features.

        All ranks use it there alike (norms over all heads at once).
        """
        if not self.slices_layers:
            return False
        return any(
            name.startswith(f"{block}.") and all(map(self.gathers, children))
            for block, children in self.siblings().items()
        )

    def shared(self) -> dict[str, list[str]]:
        """Parameters of which neighbours hold the same slices, by the parent of their module."""
        found: dict[str, list[str]] = {}
        for name, spec in self.specs.items():
            if spec.has_copies:
                found.setdefault(parent_of(parent_of(name)), []).append(name)
        return found

    def summed_by_block(self) -> dict[str, list[str]]:
        """The summed parameters by the module in which one message serves them all."""
        found: dict[str, list[str]] = {}
        for name in dict.fromkeys(self.summed):
            if self.slices_layers and name.startswith(f"{self.layers}."):
                depth = self.layers.count(".") + 2
                block = ".".join(name.split(".")[:depth])
            elif self.slices_layers or self.slices_all:
                block = parent_of(name)
            else:
                block = parent_of(parent_of(name))
            found.setdefault(block, []).append(name)
        return found


def draw(
    module: nn.Module, styles: Mapping[str, Style], *, group: Group, sequence_parallel: bool
) -> Blueprint:
    """Decide every cut of ``module``.

    Raises:
        ValueError: What the styles ask for cannot be served.
    """
    if any(hasattr(part, UNDO) for part in module.modules()):
        raise ValueError(f"{_kind(module)} is cut already, whole or in part: gather it first")
    styles = dict(styles)
    layers, final_norm = _decoder_layers(module)
    dropouts = {
        name: styles.pop(name, None)
        for name, part in module.named_modules()
        if isinstance(part, DropoutOfModel)
    }
    blueprint = Blueprint(
        group,
        slices_layers=sequence_parallel and bool(layers),
        slices_all=sequence_parallel and not layers,
        layers=layers,
        final_norm=final_norm,
        styles={name: style for name, style in styles.items() if not isinstance(style, Whole)},
    )
    drafter = _Drafter(module, blueprint)
    for name, style in blueprint.styles.items():
        drafter.draw(name, style)
    planned = {below for name in styles for below in drafter.parameters_below(name)}
    rest = [name for name, _ in module.named_parameters() if name not in planned]
    if sequence_parallel:
        blueprint.summed += [
            name
            for name in rest
            if blueprint.on_own_tokens(name) and not blueprint.in_whole_block(name)
        ]
        _refuse_uncut_mixing(module, blueprint)
        _refuse_whole_on_own_tokens(styles, blueprint)
    else:
        _refuse_beside_cuts(module, blueprint, rest)
    if group.size > 1:
        refuse_other_dropouts(module)
    blueprint.attributes += place_dropouts(
        dropouts, beside_cuts=_beside_cuts(module, blueprint), group=group
    )
    _find_ties(module, blueprint)
    _count_heads(module, blueprint)
    return blueprint


def parent_of(name: str) -> str:
    """The name of the module that holds ``name``; "" is the model."""
    return name.rpartition(".")[0]


def output_head(module: nn.Module) -> str:
    """The name of a transformers model's output head, "" if it has none."""
    head = getattr(module, "get_output_embeddings", lambda: None)()
    return next((name for name, part in module.named_modules() if head is part), "")


class _Drafter:
    """Draws the cuts of one module or parameter after the other."""

    def __init__(self, module: nn.Module, blueprint: Blueprint) -> None:
        self.module, self.blueprint, self.group = module, blueprint, blueprint.group
        self.modules = dict(module.named_modules(remove_duplicate=False))
        self.parameters = dict(module.named_parameters(remove_duplicate=False))
        self.head = output_head(module)

    def parameters_below(self, name: str) -> list[str]:
        """The parameter ``name``, or those of the module ``name``."""
        if name in self.parameters:
            return [name]
        return [below for below in self.parameters if below.startswith(f"{name}.")]

    def draw(self, name: str, style: Style) -> None:
        """Decide the cuts of ``name``."""
        part = self.modules.get(name)
        if isinstance(style, Replicated):
            self.blueprint.summed += self.parameters_below(name)
        elif isinstance(style, Heads):
            for below in self.parameters_below(name):
                self._cut(below, 0, self._even(below, 0))
        elif isinstance(style, Experts):
            if part is None:
                raise ValueError(f"plan[{name!r}] must name a module of experts")
        elif part is None:
            self._draw_stacked(name, style)
        else:
            self._draw_module(name, style, part)

    def _draw_module(self, name: str, style: Style, part: nn.Module) -> None:
        """An embedding or a linear layer."""
        if isinstance(style, Vocab):
            if not isinstance(part, nn.Embedding):
                raise ValueError(f"plan[{name!r}] must name an nn.Embedding, not {_kind(part)}")
            self._cut(f"{name}.weight", 0, (Segment(part.num_embeddings),))
        elif type(part) is not nn.Linear:
            raise ValueError(f"plan[{name!r}] must name an nn.Linear, not {_kind(part)}")
        elif isinstance(style, Column):
            segments = self._segments(name, style, part.out_features)
            for below in self.parameters_below(name):
                self._cut(below, 0, segments)
        else:
            self._cut(f"{name}.weight", 1, self._even(f"{name}.weight", 1))

    def _draw_stacked(self, name: str, style: Style) -> None:
        """A parameter that is cut by itself, such as stacked expert weights [E O I]."""
        dims = self.parameters[name].dim()
        if isinstance(style, Column) and dims >= 2:
            length = self.parameters[name].shape[dims - 2]
            self._cut(name, dims - 2, self._segments(name, style, length))
        elif isinstance(style, Row) and dims >= 2:
            self._cut(name, dims - 1, self._even(name, dims - 1))
        else:
            shape = tuple(self.parameters[name].shape)
            raise ValueError(f"plan[{name!r}]={style} cannot cut a parameter of shape {shape}")

    def _cut(self, name: str, dim: int, segments: tuple[Segment, ...]) -> None:
        self.blueprint.specs[name] = ShardSpec(dim, self.group, segments)

    def _even(self, name: str, dim: int) -> tuple[Segment, ...]:
        length = self.parameters[name].shape[dim]
        if length % self.group.size:
            raise ValueError(
                f"{name}: length {length} of dimension {dim} must divide evenly over a group of "
                f"{self.group.size} ranks"
            )
        return (Segment(length),)

    def _segments(self, name: str, style: Column, length: int) -> tuple[Segment, ...]:
        """The packed parts of ``length`` output features."""
        parts = style.segments or (length,)
        total = sum(part.size if isinstance(part, Segment) else part for part in parts)
        if total < 1 or length % total:
            raise ValueError(
                f"plan[{name!r}]: segments={style.segments} must add up to its {length} output "
                "features, or to a divisor of them"
            )
        unit = self._head_dim(name, length) if style.unit is None else style.unit
        return tuple(
            part
            if isinstance(part, Segment)
            else self._segment(name, style, part * (length // total), unit)
            for part in parts
        )

    def _segment(self, name: str, style: Column, length: int, unit: int) -> Segment:
        ranks = self.group.size
        if style.gather or (unit == 1 and name == self.head):
            # A vocabulary may be of any size, and what is gathered again be cut anywhere.
            return Segment(length)
        units, rest = divmod(length, unit)
        if rest:
            raise ValueError(f"plan[{name!r}]: unit={unit} must divide {length} output features")
        if units % ranks == 0:
            return Segment(length)
        if style.repeat and ranks % units == 0:
            return Segment(length, parts=units)
        raise ValueError(
            f"{name}: {units} units of {unit} output features must divide evenly over a group of "
            f"{ranks} ranks"
            + (", or be a divisor of it" if style.repeat else "")
            + "; no cut may go through a unit, such as a head"
        )

    def _head_dim(self, name: str, length: int) -> int:
        """The width of a head in the module around ``name``, 1 if it has no heads."""
        width = getattr(self.modules[parent_of(name)], "head_dim", None)
        return width if isinstance(width, int) and width > 0 and length % width == 0 else 1


def _decoder_layers(module: nn.Module) -> tuple[str, str]:
    """The names of a transformers model's list of layers and of the norm after it, or ""."""
    plan = getattr(module, "_pp_plan", None) or {}
    layers = next((name for name in plan if name.rpartition(".")[2] == "layers"), "")
    norm = f"{parent_of(layers)}.norm".lstrip(".")
    return (layers, norm) if layers and norm in plan else ("", "")


def _refuse_beside_cuts(module: nn.Module, blueprint: Blueprint, names: Iterable[str]) -> None:
    """A parameter beside cut projections is likely used on own heads: the plan must say so."""
    for name in filter(_beside_cuts(module, blueprint), names):
        raise ValueError(
            f"plan must name {name}, because it lies beside projections that are cut: as "
            '"replicated" if it is used on own heads or features, as "whole" if on whole '
            "activations"
        )


def _beside_cuts(module: nn.Module, blueprint: Blueprint) -> Callable[[str], bool]:
    """Whether a name lies beside projections whose outputs stay cut."""
    head = output_head(module)
    beside = {
        parent_of(name)
        for name, style in blueprint.styles.items()
        if isinstance(style, Column) and not style.gather and name != head
    }

    def lies(name: str) -> bool:
        owner = parent_of(name)
        return owner in beside or (owner != "" and parent_of(owner) in beside)

    return lies


def _refuse_whole_on_own_tokens(styles: dict[str, Style], blueprint: Blueprint) -> None:
    for name, style in styles.items():
        own = blueprint.on_own_tokens(name) and not blueprint.in_whole_block(name)
        if isinstance(style, Whole) and own:
            raise ValueError(
                f'plan[{name!r}]="whole" is used on this rank\'s tokens under sequence '
                'parallelism: plan it as "replicated", or leave it out'
            )


def _refuse_uncut_mixing(module: nn.Module, blueprint: Blueprint) -> None:
    """A block that mixes tokens must see all of them: it enters by columns and leaves by rows.

    Such blocks of transformers models keep a cache, so they know their ``layer_idx``.
    """
    if not blueprint.layers:
        if hasattr(module, "_pp_plan"):
            raise ValueError(
                f"sequence_parallel=True is not served for {_kind(module)}, whose _pp_plan names "
                "no list of layers with a norm after it"
            )
        return
    entered = blueprint.siblings()
    left = {parent_of(name) for name, style in blueprint.styles.items() if isinstance(style, Row)}
    for index, layer in enumerate(module.get_submodule(blueprint.layers).children()):
        for leaf, block in layer.named_children():
            name = f"{blueprint.layers}.{index}.{leaf}"
            if hasattr(block, "layer_idx") and not (name in entered and name in left):
                raise ValueError(
                    f"sequence_parallel=True needs a plan that cuts {name}, which mixes tokens: "
                    'its first projections as "column", its last as "row"'
                )


def _find_ties(module: nn.Module, blueprint: Blueprint) -> None:
    """Both names of a tied parameter are cut alike, or neither."""
    first: dict[int, str] = {}
    for name, parameter in module.named_parameters(remove_duplicate=False):
        other = first.setdefault(id(parameter), name)
        if other == name:
            continue
        if blueprint.specs.get(name) != blueprint.specs.get(other):
            raise ValueError(f"{name} is tied to {other}: plan must cut both alike, or neither")
        blueprint.ties.append((other, name))


def _count_heads(module: nn.Module, blueprint: Blueprint) -> None:
    """Where ranks share key heads, fewer query heads of a rank share each."""
    _refuse_mixed_heads(module, blueprint)
    for path, names in blueprint.shared().items():
        attention = module.get_submodule(path)
        names = [name for name in names if not blueprint.gathers(parent_of(name))]
        if not names:
            continue  # the ranks go on with all heads
        queries = blueprint.specs.get(f"{path}.q_proj.weight".lstrip("."))
        groups = getattr(attention, "num_key_value_groups", None)
        if queries is None or not isinstance(groups, int):
            raise ValueError(
                f"{names[0]}: fewer key and value heads than ranks are served in attention of "
                f"Llama's kind (q_proj, num_key_value_groups), which {_kind(attention)} is not"
            )
        segments = blueprint.specs[names[0]].segments or ()
        copies = max(segment.copies(blueprint.group) for segment in segments)
        blueprint.attributes.append((path, "num_key_value_groups", groups // copies))


def _refuse_mixed_heads(module: nn.Module, blueprint: Blueprint) -> None:
    """Own query heads do not meet all key heads, nor the other way round."""
    for path, attention in module.named_modules():
        if not isinstance(getattr(attention, "num_key_value_groups", None), int):
            continue
        names = [f"{path}.{leaf}".lstrip(".") for leaf in ("q_proj", "k_proj", "v_proj")]
        cut = [name for name in names if f"{name}.weight" in blueprint.specs]
        gathered = [name for name in cut if blueprint.gathers(name)]
        if gathered and len(gathered) < len(cut):
            raise ValueError(
                f"plan must gather all of {cut} or none, not {gathered} alone: queries, keys and "
                "values meet head by head"
            )


def _kind(part: Any) -> str:
    return f"a {type(part).__name__}"
