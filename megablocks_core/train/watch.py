"""Statistics of every layer's gradient, parameters and output, exact however a model is cut."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from megablocks_core.groups import LOCAL, Group, check_group, gather_from, marks, specs_of
from megablocks_core.groups.marking import clean_name, without_ddp
from megablocks_core.groups.patterns import chosen
from megablocks_core.groups.placements import local
from megablocks_core.groups.shares import Share, gradient_part, share_of
from megablocks_core.train.moments import WIDTH, add_rows, row_of, statistics

Patterns = str | Sequence[str]


def watch(
    model: nn.Module,
    *,
    gradients: Patterns = "*",
    parameters: Patterns = "*",
    activations: Patterns | None = None,
    every: int = 100,
    step: int = 0,
    group: Group = LOCAL,
) -> Watch:
    """Watch ``model`` on the steps whose number divides by ``every``.

        watched = watch(model, every=100, step=start, group=world)
        for step in range(start, steps):
            ...                                    # forward, backward, reduction
            watched.step()                         # gradients are whole
            optimizer.step()
            run.write(step, {**metrics.reduce(), **watched.read()})

    ``read`` gives ``{"gradient.norm/layers.0.mlp.weight": 0.31, ...}``, a key for each kind
    ("gradient", "parameter", "activation"), statistic and name: ``norm``, ``mean``, ``rms``,
    ``max_abs``, and the fractions ``zeros`` and ``nonfinite``. Sums are in float64. They are
    those of one process: what ranks hold twice counts once, by marks. An activation is the
    output of a module in training mode (a tensor, or the first one of a tuple), all
    micro-batches together; what backward recomputes is not counted again. It has no norm, which
    would grow with the tokens; the rest is pooled over ``group``, and so is right whether ranks
    hold it alike, or parts of its tokens or features. Several watched steps between two calls of
    ``read`` are pooled too; the norm is then the root of the mean square.

    Nothing waits for a device before ``read``. On other steps nothing is hooked into the model.
    Modules that ``torch.compile`` has compiled have outputs only as a whole. A projection whose
    output is watched is called on its own: those that would share a message with it send their
    own, and gradients of that step may differ in their last bits. With the default, none is.

    Sent: one gather of names here, over ``group``; one gather by ``read``, 48 bytes a row and
    rank, a row for each kind and name, after a watched step and else nothing.

    Args:
        model: Its parameters and modules have the names of ``marks``.
        gradients: Names of parameters, as shell patterns; ``()`` is none.
        parameters: The same.
        activations: Names of modules; default the layers, which are what a ``ModuleList`` or a
            ``Sequential`` holds.
        every: Steps between watched ones, and one.
        step: Number of the step to come.
        group: All ranks that hold parts of the model or other tokens.

    Raises:
        ValueError: ``every`` is below 1 or not whole, a pattern other than "*" matches no name
            on any rank, or ``group`` lacks a rank that holds a part of a watched parameter.
    """
    return Watch(
        model,
        {"gradient": gradients, "parameter": parameters, "activation": activations},
        every=every,
        step=step,
        group=group,
    )


class Watch:
    """What ``watch`` returns; it has no state to save."""

    def __init__(
        self,
        model: nn.Module,
        patterns: dict[str, Patterns | None],
        *,
        every: int,
        step: int,
        group: Group,
    ) -> None:
        check_group(group)
        if not isinstance(every, int) or every < 1:
            raise ValueError(f"every={every} must be a whole number of at least 1")
        self.group = group
        self._every, self._next = every, step
        self._tensors: dict[tuple[str, str], tuple[Tensor, Share]] = {}
        for name, parameter, specs in marks(model):
            for kind in ("gradient", "parameter"):
                if _matches(name, patterns[kind]):
                    self._tensors[kind, name] = (parameter, share_of(parameter, specs))
        named = patterns["activation"]
        self._modules = {
            ("activation", name): module
            for name, module, is_layer in _named_modules(model)
            if (is_layer if named is None else _matches(name, named))
        }
        self._require_all_parts()
        self._copies = self._agree()
        _require_matches(patterns, self._copies)
        row_of_key = {key: row for row, key in enumerate(self._copies)}
        device = next((parameter.device for parameter in model.parameters()), None)
        self._table = torch.zeros(len(self._copies), WIDTH, dtype=torch.float64, device=device)
        self._row_of_module = {key: row_of_key[key] for key in self._modules}
        self._rows = torch.tensor([row_of_key[key] for key in self._tensors], device=device)
        self._num_watched = 0
        self._hooks: list[RemovableHandle] = []
        self._removed = False
        self._hook_if_due()

    @torch.no_grad()
    def step(self) -> None:
        """Gradients are whole now: call it on every rank between reduction and optimizer."""
        if self._is_due():
            self._add_tensors()
            self._unhook()
            self._num_watched += 1
        self._next += 1
        self._hook_if_due()

    @torch.no_grad()
    def read(self) -> dict[str, float]:
        """Statistics of the steps watched since the last call, equal on every rank."""
        if not self._num_watched:
            return {}
        sizes = [len(self._table)] * self.group.size
        gathered = gather_from(self._table, dim=0, group=self.group, sizes=sizes)
        total, *others = gathered.cpu().clone().view(self.group.size, -1, WIDTH)
        for other in others:
            add_rows(total, other)
        found = {
            f"{kind}.{figure}/{name}": value
            for ((kind, name), copies), row in zip(
                self._copies.items(), total.tolist(), strict=True
            )
            for figure, value in statistics(row, copies=copies and copies * self._num_watched)
        }
        self._table.zero_()
        self._num_watched = 0
        return found

    def remove(self) -> None:
        """Take the hooks off the model and watch no further step; ``read`` still works."""
        self._unhook()
        self._removed = True

    def _is_due(self) -> bool:
        return not self._removed and self._next % self._every == 0

    def _hook_if_due(self) -> None:
        if self._is_due():
            self._hooks = [
                module.register_forward_hook(
                    partial(self._add_output, self._row_of_module[key], _own_features(module))
                )
                for key, module in self._modules.items()
            ]

    def _unhook(self) -> None:
        for hook in self._hooks:
            hook.remove()
        self._hooks = []

    def _add_tensors(self) -> None:
        if not self._tensors:
            return
        none = self._table.new_zeros(WIDTH)
        rows = []
        for (kind, _), (parameter, share) in self._tensors.items():
            row = (
                row_of(share.of(parameter))
                if kind == "parameter"
                else _gradient_row(parameter, share)
            )
            rows.append(none if row is None else row.to(none.device))
        total = self._table[self._rows]
        add_rows(total, torch.stack(rows))
        self._table[self._rows] = total

    def _add_output(
        self, row: int, features: _Features | None, module: nn.Module, _: Any, output: Any
    ) -> None:
        if torch.compiler.is_compiling() or not module.training or _inside_backward():
            return
        while isinstance(output, tuple | list) and output:
            output = output[0]
        if isinstance(output, Tensor) and output.is_floating_point():
            with torch.no_grad():
                held = local(output)
                if features is not None and held.shape[-1] == features.held:
                    held = held.index_select(-1, features.counted)
                add_rows(self._table[row], row_of(held).to(self._table.device))

    def _require_all_parts(self) -> None:
        for (_, name), (_, share) in self._tensors.items():
            for cut in share.groups:
                if not set(cut.ranks) <= set(self.group.ranks):
                    raise ValueError(
                        f"group={list(self.group.ranks)} must include the ranks "
                        f"{list(cut.ranks)} that hold parts of {name}"
                    )

    def _agree(self) -> dict[tuple[str, str], float | None]:
        """Every kind and name that any rank has, and how often ranks hold each element of it."""
        own = {key: float(share.num_cuts) for key, (_, share) in self._tensors.items()}
        everybody: list[dict[tuple[str, str], float | None]]
        everybody = self.group.all_gather_object(own | dict.fromkeys(self._modules))
        return {
            key: cuts and sum(key in others for others in everybody) / cuts
            for held in everybody
            for key, cuts in held.items()
        }


def _gradient_row(parameter: Tensor, share: Share) -> Tensor | None:
    """Sums over a gradient; a range of it counts as often as if each rank held the whole."""
    part = gradient_part(parameter, (), share)
    if part.counted is None:
        return None
    row = row_of(part.counted)
    row[:-1] *= math.prod(group.size for group in part.groups) / share.num_cuts
    return row


def _require_matches(
    patterns: dict[str, Patterns | None], found: Iterable[tuple[str, str]]
) -> None:
    names = {kind: [name for known, name in found if known == kind] for kind in patterns}
    for kind, asked in patterns.items():
        for pattern in chosen(names[kind], asked or (), across=True).unmatched:
            if pattern != "*":
                what = "module" if kind == "activation" else "parameter"
                raise ValueError(f"{kind} pattern {pattern!r} must match the name of a {what}")


def _matches(name: str, patterns: Patterns | None) -> bool:
    return bool(chosen([name], patterns or (), across=True).names)


def _named_modules(model: nn.Module) -> Iterator[tuple[str, nn.Module, bool]]:
    """Modules below ``model``, named as by ``marks``, and whether each is a layer.

    A wrapper stands for what it wraps.
    """
    layers = {
        id(layer)
        for holder in model.modules()
        if isinstance(holder, nn.ModuleList | nn.Sequential)
        for layer in holder.children()
    }
    seen = {""}
    for path, module in model.named_modules():
        name = clean_name(without_ddp(model, path) + ".").rstrip(".")
        if name not in seen:
            seen.add(name)
            yield name, module, id(module) in layers


class _Features(NamedTuple):
    """Number of output features on this rank, and the places of those that count here."""

    held: int
    counted: Tensor


def _own_features(module: nn.Module) -> _Features | None:
    """What counts of a column-parallel layer's output, where neighbours hold features too.

    Heads fewer than ranks are held by neighbours, and so are the rows of the weight that makes
    them.
    """
    specs = specs_of(module, "weight")
    if not any(spec.has_copies and spec.dim == 0 for spec in specs):
        return None
    weight = module.weight
    assert isinstance(weight, Tensor)
    return _Features(len(local(weight)), share_of(weight, specs).counted[0].to(weight.device))


def _inside_backward() -> bool:
    """Whether this thread runs a backward pass, which runs forward again to recompute."""
    return torch._C._current_graph_task_id() != -1
