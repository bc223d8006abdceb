"""A sharded module equals its one-process twin in all that training sees.

Compared are the outputs, the gradients of the inputs and of every parameter, the norm that
clipping finds, and every parameter and buffer after one optimizer step. Each rank holds its
share against the same share of the twin, by the shard marks, so that copies which several
ranks hold are all checked. What one rank finds, every rank raises.
"""

from collections.abc import Callable, Iterable, Iterator
from dataclasses import fields, is_dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from megablocks_core.groups import (
    LOCAL,
    Group,
    ShardSpec,
    load_whole,
    logical_shape,
    logical_tensors,
    marks,
    own_slices,
)
from megablocks_core.parallel import clip_grad_norm_

SEED = 1234

# The largest error that passes: of the largest entry in float64, by norm in the others.
TOLERANCES = {torch.float64: 1e-10, torch.float32: 2e-6, torch.bfloat16: 2e-2}


def assert_parallel_equivalence(
    build: Callable[[Group], nn.Module],
    inputs: Any,
    *,
    group: Group,
    loss: Callable[[Any], Tensor],
    split: Callable[[Any], Any] | None = None,
    join: Callable[[Any], Any] | None = None,
    dtype: torch.dtype = torch.float64,
    optimizer: Callable[[list[nn.Parameter]], torch.optim.Optimizer] | None = None,
    reduce: Callable[[nn.Module], Any] | None = None,
    same_start: bool = False,
    tolerance: float | None = None,
) -> None:
    """Compare ``build(group)`` with its twin ``build(LOCAL)`` through one training step.

    Every rank of ``group`` calls it with the same arguments.

    Args:
        build: Makes the module over a group; torch's generator is seeded before each call.
        inputs: Whole inputs, the same on every rank: a tensor, a tuple (positional) or a dict
            (by keyword). Floating tensors are cast to ``dtype`` and get gradients.
        group: The ranks.
        loss: A scalar from the outputs. It sees whole outputs if ``join`` is differentiable
            (``gather_from``), else this rank's; then it must be a sum over what ranks hold.
        split: Takes this rank's part of the inputs, and likewise of their gradients.
        join: Makes whole outputs of this rank's.
        dtype: Of parameters, buffers and inputs.
        optimizer: Makes an optimizer from a list of parameters; default AdamW.
        reduce: Called with the parallel module after backward, where tokens are split.
        same_start: Require that both modules start with the same bits. Without it the
            parallel one is loaded from its twin.
        tolerance: Largest relative error; default 1e-10 of the largest entry in float64,
            2e-6 by norm in float32.

    Raises:
        AssertionError: Something differs; the text names it, its error and the ranks.
    """
    findings = _Findings(dtype, TOLERANCES[dtype] if tolerance is None else tolerance)
    with torch.random.fork_rng(devices=[]):
        twin, module = (_seeded(build, of).to(dtype) for of in (LOCAL, group))
        _start_alike(twin, module, group, findings, same_start)

        whole_inputs = _leaves(inputs, dtype)
        own_inputs = _leaves(split(inputs) if split else inputs, dtype)
        steps = [(optimizer or _adamw)(list(part.parameters())) for part in (twin, module)]

        whole_outputs = _seeded(_call, twin, whole_inputs)
        loss(whole_outputs).backward()
        outputs = _seeded(_call, module, own_inputs)
        joined = join(outputs) if join else outputs
        seen = joined if any(x.requires_grad for _, x in _tensors(joined)) else outputs
        loss(seen).backward()
        if reduce:
            reduce(module)

    findings.compare("output", _paired(joined, whole_outputs))
    gradients = _gradients(whole_inputs)
    expected = split(gradients) if split else gradients
    findings.compare("gradient of input", _paired(_gradients(own_inputs), expected))
    twin_gradients = {name: parameter.grad for name, parameter, _ in marks(twin)}
    findings.compare(
        "gradient of ",
        (
            (name, parameter.grad, _share(twin_gradients.get(name), specs, parameter))
            for name, parameter, specs in marks(module)
        ),
    )
    findings.raise_together(group)

    if any(gradient is not None for gradient in twin_gradients.values()):
        findings.compare("norm of ", [("all gradients", *_clip(module, twin))])
    for step in steps:
        step.step()
    findings.compare("one step later ", _shares(module, twin))
    findings.raise_together(group)


class _Findings:
    """The differences that this rank has found so far, one line each."""

    def __init__(self, dtype: torch.dtype, tolerance: float) -> None:
        self.tolerance = tolerance
        self.order = torch.inf if dtype == torch.float64 else 2
        self.lines: list[str] = []

    def compare(self, kind: str, pairs: Iterable[tuple[str, Tensor | None, Tensor | None]]) -> None:
        """Note each of (name, ours, theirs) whose error is too large.

        An error is measured against the size of the tensor, or a tenth of the largest of its
        kind if that is more: some gradients are zero but for rounding.
        """
        pairs = list(pairs)
        largest = max((self._size(theirs) for _, _, theirs in pairs), default=0.0)
        for name, ours, theirs in pairs:
            problem = self._problem(ours, theirs, floor=largest / 10)
            if problem:
                self.lines.append(f"{kind}{name}: {problem}")

    def _problem(self, ours: Tensor | None, theirs: Tensor | None, *, floor: float) -> str:
        if ours is None or theirs is None:
            if ours is theirs:
                return ""
            missing = "missing here" if ours is None else "missing in the twin"
            return f"{missing}, {self._size(theirs if ours is None else ours):.6g} in the other"
        if ours.shape != theirs.shape:
            return f"shape {list(ours.shape)} instead of {list(theirs.shape)}"
        error = _exact(ours) - _exact(theirs)
        allowed = self.tolerance * max(self._size(theirs), floor)
        if self._size(error) <= allowed:
            return ""
        index = [int(i) for i in torch.unravel_index(error.abs().argmax(), error.shape)]
        return (
            f"largest error {float(error[tuple(index)].abs()):.3g} at {index} of "
            f"{list(error.shape)}; size {self._size(ours):.6g} instead of "
            f"{self._size(theirs):.6g}, error {self._size(error):.3g}, allowed {allowed:.3g}"
        )

    def _size(self, x: Tensor | None) -> float:
        if x is None or x.numel() == 0:
            return 0.0
        return float(torch.linalg.vector_norm(_exact(x), ord=self.order))

    def raise_together(self, group: Group) -> None:
        """Raise on every rank what any has found."""
        found = group.all_gather_object(self.lines)
        if any(found):
            lines = [f"rank {rank}: {line}" for rank, all in enumerate(found) for line in all]
            raise AssertionError(
                f"over {group.size} ranks the module differs from its twin:\n" + "\n".join(lines)
            )


def _seeded(call: Callable[..., Any], *args: Any) -> Any:
    torch.manual_seed(SEED)
    return call(*args)


def _call(module: nn.Module, inputs: Any) -> Any:
    if isinstance(inputs, dict):
        return module(**inputs)
    return module(*inputs) if isinstance(inputs, tuple | list) else module(inputs)


def _adamw(parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
    # With AdamW's own eps, rounding in a gradient that should be zero becomes a whole step.
    return torch.optim.AdamW(parameters, lr=1e-3, eps=1e-4)


def _start_alike(
    twin: nn.Module, module: nn.Module, group: Group, findings: _Findings, same_start: bool
) -> None:
    """Check that both have the same whole tensors, and the same values or give them."""
    ours = {name: logical_shape(x, specs) for name, x, specs in logical_tensors(module)}
    theirs = {name: tuple(x.shape) for name, x, _ in logical_tensors(twin)}
    findings.lines += [
        f"whole {name}: shape {ours.get(name)} instead of {theirs.get(name)}"
        for name in sorted(ours.keys() | theirs.keys())
        if ours.get(name) != theirs.get(name)
    ]
    findings.raise_together(group)
    if same_start:
        findings.lines += [
            f"initial {name}: other bits"
            for name, ours, theirs in _shares(module, twin)
            if not torch.equal(ours, theirs)
        ]
        findings.raise_together(group)
    else:
        load_whole(module, {name: x.detach() for name, x, _ in logical_tensors(twin)})


def _shares(module: nn.Module, twin: nn.Module) -> Iterator[tuple[str, Tensor, Tensor]]:
    """(name, our share, the same share of the twin) of each parameter and buffer."""
    whole = {name: x.detach() for name, x, _ in logical_tensors(twin)}
    for name, x, specs in logical_tensors(module):
        yield name, x.detach(), _share(whole[name], specs, x)


def _share(whole: Any, specs: tuple[ShardSpec, ...], like: Tensor) -> Any:
    """The part of a whole tensor (or of nothing) that this rank holds in ``like``."""
    if whole is None:
        return None
    share = whole.new_empty(like.shape)
    for theirs, ours in own_slices(specs, tuple(whole.shape)):
        share[ours] = whole[theirs]
    return share


def _clip(module: nn.Module, twin: nn.Module) -> tuple[Tensor, Tensor]:
    """Clip both to half of the twin's norm; the norms that they found."""
    gradients = [x.grad for x in twin.parameters() if x.grad is not None]
    half = float(torch.nn.utils.get_total_norm(gradients)) / 2
    return (
        clip_grad_norm_(module, half),
        torch.nn.utils.clip_grad_norm_(twin.parameters(), half),
    )


def _leaves(inputs: Any, dtype: torch.dtype) -> Any:
    """Fresh copies in which floating tensors have ``dtype`` and collect gradients."""

    def leaf(x: Tensor) -> Tensor:
        x = x.detach().clone()
        return x.to(dtype).requires_grad_() if x.is_floating_point() else x

    return pytree.tree_map_only(Tensor, leaf, inputs)


def _gradients(inputs: Any) -> Any:
    """The inputs' gradients in their places, zero where there is none."""
    return pytree.tree_map_only(
        Tensor, lambda x: torch.zeros_like(x) if x.grad is None else x.grad, inputs
    )


def _paired(ours: Any, theirs: Any) -> list[tuple[str, Tensor | None, Tensor | None]]:
    """The tensors of two nests of results, by their place."""
    mine, others = dict(_tensors(ours)), dict(_tensors(theirs))
    if not others:
        kind = type(theirs).__name__
        raise ValueError(f"outputs={kind} must be tensors in tuples, lists, dicts or dataclasses")
    return [(name, mine.get(name), others.get(name)) for name in {**others, **mine}]


def _tensors(nest: Any, name: str = "") -> Iterator[tuple[str, Tensor]]:
    """(place, tensor) in a nest of tuples, lists, dicts and dataclasses."""
    if isinstance(nest, Tensor):
        yield name, nest
    elif isinstance(nest, dict):
        for key, value in nest.items():
            yield from _tensors(value, f"{name}[{key!r}]")
    elif isinstance(nest, tuple | list):
        for index, value in enumerate(nest):
            yield from _tensors(value, f"{name}[{index}]")
    elif is_dataclass(nest):
        for field in fields(nest):
            yield from _tensors(getattr(nest, field.name), f"{name}.{field.name}")


def _exact(x: Tensor) -> Tensor:
    x = x.detach()
    return (x.full_tensor() if hasattr(x, "full_tensor") else x).to(torch.float64)  # type: ignore
