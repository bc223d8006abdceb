"""Cut a whole model over a tensor-parallel group, in place, by a plan."""

from dataclasses import dataclass, field
from functools import partial
from typing import Any, Literal, NamedTuple

import torch
from torch import nn

from megablocks_core.groups import Group, check_group, load_slices, mark, specs_of, whole_tensor
from megablocks_core.parallel.lora.lora import (
    adapted_parameters,
    refuse_peft,
    restore_adapters,
    spare_adapters,
)
from megablocks_core.parallel.models.blueprint import UNDO, Blueprint, draw, output_head, parent_of
from megablocks_core.parallel.models.pretrained import VocabParallelLoss, save_pretrained
from megablocks_core.parallel.tensor.boundaries import (
    BeginSharing,
    Boundary,
    EndSharing,
    EndSumGradients,
    EnterBlock,
    EnterExperts,
    GatherFeatures,
    GatherTokens,
    LeaveExperts,
    RefuseOutputs,
    ScatterTokens,
    SharedInput,
    SumGradients,
    owner_of,
    take_off_hooks,
)
from megablocks_core.parallel.tensor.embedding import VocabParallelEmbedding, vocab_forward
from megablocks_core.parallel.tensor.linear import ColumnParallelLinear, RowParallelLinear
from megablocks_core.parallel.tensor.plan import Column, Experts, Plan, Row, Vocab, read_plan


class Report(NamedTuple):
    """What became of each parameter, by name.

    Attributes:
        cut: Cut over the group.
        summed: Whole, used on own heads or tokens; the gradient is summed over the group.
        whole: Whole and used alike on every rank.
    """

    cut: tuple[str, ...]
    summed: tuple[str, ...]
    whole: tuple[str, ...]


def tensor_parallelize(
    module: nn.Module,
    plan: Plan | Literal["auto"] = "auto",
    *,
    group: Group,
    sequence_parallel: bool = False,
) -> Report:
    """Cut ``module`` over ``group`` by ``plan``, in place; it then computes what it did before.

    Outputs, losses and gradients are those of one process. Parameters keep their names and
    carry shard marks, so that clipping, checkpoints and ``load_hf`` know them. Adapters of
    ``add_lora`` are cut with their layers. A model on ``meta`` is cut there. Over a group of one
    nothing changes.

    A transformers model needs no plan: "auto" reads its own. Its head gathers, so that logits
    are whole; planned as "column" they stay cut, and the model's own ``labels=`` loss becomes
    the vocabulary-parallel one. Tied heads stay tied, ``save_pretrained`` (called by every
    rank) writes whole tensors, and key and value heads may be fewer than ranks.

    Under sequence parallelism the layers of a transformers model hold equal slices of the
    tokens, along dim -2, which attention and feed-forward blocks gather (and the features too,
    where the plan gathers them). In another model the caller cuts the tokens, and every
    parameter that the plan does not name has its gradient summed.

    A block of a decoder layer sends one all-reduce forward and one backward, or under sequence
    parallelism an all-gather and a reduce-scatter each way.

    Args:
        module: Any model.
        plan: From names of modules or parameters to styles: "column", "column_gather", "row",
            "vocab", "heads", "replicated" (whole, used on own heads or tokens), "whole" (used
            alike by all), or records such as ``Column(unit=64, repeat=True)``. A ``*`` stands
            for one step of a name.
        group: The tensor-parallel ranks.
        sequence_parallel: Cut the tokens between blocks.

    Returns:
        What became of each parameter.

    Raises:
        ValueError: The plan cannot be served: a style is not known; a cut does not divide or
            would go through a head; a module is not an ``nn.Linear`` or ``nn.Embedding``; a
            tied weight is planned on one side only; a parameter beside cut projections is not
            named; it is cut already; it drops otherwise than by ``dropout_modules``; peft has
            wrapped a layer; an adapter is merged; or a block that mixes tokens would see a part
            of them. Nothing was changed.
    """
    check_group(group)
    refuse_peft(module)
    adapters = spare_adapters(module, cut=False)
    try:
        blueprint = draw(
            module, read_plan(module, plan), group=group, sequence_parallel=sequence_parallel
        )
        if group.size > 1:
            _Cutter(module, blueprint).cut()
    finally:
        restore_adapters(module, adapters)
    names = [name for name, _ in module.named_parameters(remove_duplicate=False)]
    cut_too, summed_too = adapted_parameters(module)
    cut = tuple(name for name in names if name in blueprint.specs or name in cut_too)
    summed = tuple(name for name in names if name in blueprint.summed or name in summed_too)
    return Report(cut, summed, tuple(name for name in names if name not in {*cut, *summed}))


def gather(module: nn.Module) -> None:
    """Undo ``tensor_parallelize``, in place: every parameter is whole again, on every rank.

    All-gathers each cut parameter once; every rank must call it. An optimizer made before
    holds the cut parameters and must be made again. Parts of ``module`` that were cut one by
    one are gathered too.

    Raises:
        ValueError: ``module`` is a part of a model that was cut as a whole.
    """
    parts = {name: part for name, part in module.named_modules() if hasattr(part, UNDO)}
    if not parts and any(map(_has_boundary, module.modules())):
        raise ValueError(f"gather the model that was cut, not a {type(module).__name__} in it")
    for part in parts.values():
        adapters = spare_adapters(part, cut=True)
        _gather(part)
        restore_adapters(part, adapters)


def _gather(module: nn.Module) -> None:
    undo: _Undo = module.__dict__.pop(UNDO)
    for name, part in list(module.named_modules()):
        take_off_hooks(part, Boundary)
        if isinstance(part, ColumnParallelLinear | RowParallelLinear):
            _replace(module, name, part.to_linear())
        elif isinstance(part, VocabParallelEmbedding):
            _replace(module, name, part.to_embedding())
    for name in undo.cut:
        owner, leaf = owner_of(module, name)
        share = owner.get_parameter(leaf)
        whole = whole_tensor(share, specs_of(owner, leaf))
        setattr(owner, leaf, nn.Parameter(whole, requires_grad=share.requires_grad))
        mark(owner, leaf)
    for name, attribute, value in undo.attributes:
        setattr(module.get_submodule(name), attribute, value)
    for name, attribute in undo.added:
        delattr(module.get_submodule(name), attribute)
    _tie(module, undo.ties)


@dataclass
class _Undo:
    """What ``gather`` puts back.

    Attributes:
        cut: Parameters that were cut in a module that stayed.
        attributes: (module, attribute, old value).
        added: (module, attribute) of attributes that were not there.
        ties: (name, other name) of parameters with two.
    """

    cut: list[str] = field(default_factory=list)
    attributes: list[tuple[str, str, Any]] = field(default_factory=list)
    added: list[tuple[str, str]] = field(default_factory=list)
    ties: list[tuple[str, str]] = field(default_factory=list)


class _Cutter:
    """Carries a blueprint out."""

    def __init__(self, module: nn.Module, blueprint: Blueprint) -> None:
        self.module, self.blueprint, self.group = module, blueprint, blueprint.group
        self.undo = _Undo(ties=blueprint.ties)
        self.siblings = {name for names in blueprint.siblings().values() for name in names}

    def cut(self) -> None:
        """Change the model."""
        self.module.__dict__[UNDO] = self.undo
        self._sum_gradients()
        self._cut_tokens()
        self._share_inputs()
        replaced = [self._replace_module(name) for name in self.blueprint.styles]
        for name in self.blueprint.specs:
            if parent_of(name) not in replaced:
                self._cut_parameter(name)
        for name, attribute, value in self.blueprint.attributes:
            self._set(name, attribute, value)
        _tie(self.module, self.blueprint.ties)
        self._adopt_transformers_model()

    def _sum_gradients(self) -> None:
        """One message for the summed parameters of a block, and one for slices held twice."""
        specs = self.blueprint.specs
        for block, names in self.blueprint.summed_by_block().items():
            self._around(block, SumGradients(self.group, _below(block, names)))
        for name in dict.fromkeys(map(parent_of, self.blueprint.summed)):
            # What an adapter of that module must know.
            if f"{name}.weight" not in specs:
                self._add(name, "summed_over", self.group)
        for block, names in self.blueprint.shared().items():
            # A parallel layer sums its own.
            names = [name for name in names if parent_of(name) in self.siblings]
            cuts = tuple(specs[name] for name in names)
            if names:
                self._around(block, SumGradients(self.group, _below(block, names), cuts))

    def _around(self, block: str, start: SumGradients) -> None:
        part = self.module.get_submodule(block)
        part.register_forward_pre_hook(start)
        part.register_forward_hook(EndSumGradients(start), always_call=True)

    def _cut_tokens(self) -> None:
        """Where the tokens of a transformers model are cut and gathered; and its experts."""
        blueprint, part = self.blueprint, self.module.get_submodule
        if blueprint.slices_layers:
            first, norm = part(f"{blueprint.layers}.0"), part(blueprint.final_norm)
            first.register_forward_pre_hook(ScatterTokens(self.group), with_kwargs=True)
            norm.register_forward_hook(GatherTokens(self.group))
            self._refuse_outputs(
                ("output_hidden_states", "output_router_logits"),
                "under sequence parallelism: inside the layers every rank has its own tokens alone",
            )
        if blueprint.cuts_heads(self.module):
            self._refuse_outputs(
                ("output_attentions",),
                "where attention is cut: inside it every rank has its own heads alone",
            )
        for name, style in blueprint.styles.items():
            if isinstance(style, Experts):
                sliced = blueprint.on_own_tokens(name)
                part(name).register_forward_pre_hook(EnterExperts(self.group, sliced))
                part(name).register_forward_hook(LeaveExperts(self.group, sliced))

    def _refuse_outputs(self, flags: tuple[str, ...], reason: str) -> None:
        """At the model and at the one around its layers, whichever is called."""
        for name in dict.fromkeys(("", parent_of(self.blueprint.layers))):
            part = self.module.get_submodule(name)
            part.register_forward_pre_hook(RefuseOutputs(flags, reason), with_kwargs=True)

    def _share_inputs(self) -> None:
        """One message for all projections that read one input."""
        for name, children in self.blueprint.siblings().items():
            parent = self.module.get_submodule(name)
            if self.blueprint.on_own_tokens(children[0]):
                parent.register_forward_pre_hook(EnterBlock(self.group), with_kwargs=True)
                for child in filter(self.blueprint.gathers, children):
                    joined = GatherFeatures(self.blueprint.specs[f"{child}.weight"])
                    self.module.get_submodule(child).register_forward_hook(joined)
                continue
            shared = SharedInput(self.group)
            parent.register_forward_pre_hook(BeginSharing(shared))
            parent.register_forward_hook(EndSharing(shared), always_call=True)
            for child in children:
                self.module.get_submodule(child).register_forward_pre_hook(shared)

    def _replace_module(self, name: str) -> str | None:
        """Put a parallel layer in the place of a module; its name, or ``None`` if it stays."""
        style, blueprint = self.blueprint.styles[name], self.blueprint
        spec = blueprint.specs.get(f"{name}.weight")
        if spec is None or name in self.siblings:
            return None
        part, sliced = self.module.get_submodule(name), blueprint.on_own_tokens(name)
        if isinstance(style, Column) and isinstance(part, nn.Linear):
            layer = ColumnParallelLinear.from_linear(
                part,
                gather_output=style.gather,
                sequence_parallel=sliced,
                segments=spec.segments,
                uneven=True,
                group=self.group,
            )
        elif isinstance(style, Row) and isinstance(part, nn.Linear):
            layer = RowParallelLinear.from_linear(
                part,
                input_is_parallel=not style.split_input,
                sequence_parallel=sliced,
                group=self.group,
            )
        elif isinstance(style, Vocab) and type(part) is nn.Embedding:
            layer = VocabParallelEmbedding.from_embedding(
                part, sequence_parallel=sliced, group=self.group
            )
        else:
            return None
        _replace(self.module, name, layer)
        return name

    def _cut_parameter(self, name: str) -> None:
        """Cut a parameter whose module stays what it is."""
        spec, (owner, leaf) = self.blueprint.specs[name], owner_of(self.module, name)
        whole = owner.get_parameter(leaf)
        shape = list(whole.shape)
        shape[spec.dim] = spec.held_length(shape[spec.dim])
        share = torch.empty(shape, dtype=whole.dtype, device=whole.device)
        if not whole.is_meta:
            load_slices(share, (spec,), whole)
        setattr(owner, leaf, nn.Parameter(share, requires_grad=whole.requires_grad))
        mark(owner, leaf, spec)
        self.undo.cut.append(name)
        if isinstance(owner, nn.Linear) and leaf == "weight":
            self._set(parent_of(name), "out_features", shape[0])
        elif isinstance(owner, nn.Embedding):
            self._cut_embedding(parent_of(name), owner, spec.ranges(whole.shape[0])[0])

    def _cut_embedding(self, name: str, part: nn.Embedding, rows: slice) -> None:
        """An embedding of a class of its own, such as one that scales, goes on with own rows."""
        padding = part.padding_idx
        own = padding is not None and rows.start <= padding < rows.stop
        self._set(name, "padding_idx", padding - rows.start if own else None)
        self._add(name, "forward", partial(vocab_forward, part, self.group, rows.start))

    def _adopt_transformers_model(self) -> None:
        """A loss that takes cut logits, and a ``save_pretrained`` that writes whole tensors."""
        style = self.blueprint.styles.get(output_head(self.module))
        if isinstance(style, Column) and not style.gather:
            self._add("", "_loss_function", VocabParallelLoss(self.group))
        if hasattr(self.module, "save_pretrained"):
            self._add("", "save_pretrained", partial(save_pretrained, self.module, self.group))

    def _set(self, name: str, attribute: str, value: Any) -> None:
        part = self.module.get_submodule(name)
        self.undo.attributes.append((name, attribute, getattr(part, attribute)))
        setattr(part, attribute, value)

    def _add(self, name: str, attribute: str, value: Any) -> None:
        self.undo.added.append((name, attribute))
        setattr(self.module.get_submodule(name), attribute, value)


def _below(block: str, names: list[str]) -> tuple[str, ...]:
    start = len(block) + 1 if block else 0
    return tuple(name[start:] for name in names)


def _replace(module: nn.Module, name: str, layer: nn.Module) -> None:
    owner, leaf = owner_of(module, name)
    setattr(owner, leaf, layer)


def _has_boundary(part: nn.Module) -> bool:
    hooks = (*part._forward_pre_hooks.values(), *part._forward_hooks.values())
    return any(isinstance(hook, Boundary) for hook in hooks)


def _tie(module: nn.Module, ties: list[tuple[str, str]]) -> None:
    for name, other in ties:
        (owner, leaf), (twin, its_leaf) = owner_of(module, name), owner_of(module, other)
        setattr(twin, its_leaf, owner.get_parameter(leaf))
