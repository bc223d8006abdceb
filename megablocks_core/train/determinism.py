"""Run a step twice from one state and compare every bit."""

from __future__ import annotations

import copy
import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any

import numpy
import torch
import xxhash
from torch import Tensor, nn

from megablocks_core.groups import LOCAL, Group

Seen = list[tuple[str, str]]  # what, and a digest of it


def assert_deterministic(
    step: Callable[[], Any],
    state: Mapping[str, Any],
    *,
    inside: bool = True,
    group: Group = LOCAL,
) -> None:
    """Raise unless two runs of ``step`` from one ``state`` give the same bits.

        assert_deterministic(
            lambda: train_step(model, optimizer, batch),
            {"model": model, "optimizer": optimizer},
            group=world,
        )

    ``state`` maps names to all that ``step`` changes: modules, torch optimizers, tensors, and
    whatever else has ``state_dict`` and ``load_state_dict``. Compared are, in the order in
    which they come to be, the outputs of every submodule (without ``inside``: not, such as for
    compiled models), what ``step`` returns, gradients, and the state afterwards. Afterwards the
    state, gradients, and torch's, NumPy's and Python's default generators are as before the call,
    so a loop can check its first step and go on. Something that ``step`` draws from, such as an
    iterator over data, is not turned back: take the batch outside.

    It costs two steps, a digest of all tensors on the host, and a copy of the state.

    Sent: what ``step`` sends, twice; then one object a rank, so that all ranks raise or none.

    Raises:
        AssertionError: The first tensor that differs, on the first rank that found one.
        ValueError: A value of ``state`` that is none of these.
    """
    saved = {name: _saved(name, value) for name, value in state.items()}
    random_state = _random_state()
    runs: list[Seen] = []
    for _ in range(2):
        try:
            runs.append(_run(step, state, inside))
        finally:
            for name, value in state.items():
                _restore(value, saved[name])
            _set_random_state(random_state)
    differences = group.all_gather_object(_first_difference(*runs))
    for rank, difference in zip(group.ranks, differences, strict=True):
        if difference is not None:
            where = f" on rank {rank}" if group.size > 1 else ""
            raise AssertionError(f"two runs of a step from one state differ{where}: {difference}")


def _run(step: Callable[[], Any], state: Mapping[str, Any], inside: bool) -> Seen:
    seen: Seen = []
    modules = {name: value for name, value in state.items() if isinstance(value, nn.Module)}
    with ExitStack() as stack:
        for name, module in modules.items() if inside else ():
            stack.enter_context(_outputs_seen(name, module, seen))
        returned = step()
    _see(seen, "what the step returned", returned)
    for name, module in modules.items():
        for path, parameter in module.named_parameters():
            _see(seen, f"gradient of {name}.{path}", parameter.grad)
    for name, value in state.items():
        _see(seen, name, _live(value))
    return seen


@contextmanager
def _outputs_seen(name: str, module: nn.Module, seen: Seen) -> Iterator[None]:
    """Note the output of every submodule as it comes."""

    def note(path: str, part: nn.Module, inputs: Any, output: Any) -> None:
        _see(seen, f"output of {path}", output)

    handles = [
        part.register_forward_hook(partial(note, f"{name}.{path}" if path else name))
        for path, part in module.named_modules()
    ]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def _see(seen: Seen, what: str, value: Any) -> None:
    """Note a tensor, or those in a container, or a plain value."""
    if isinstance(value, Tensor):
        seen.append((f"{what}, {_kind(value)}", _digest(value)))
    elif isinstance(value, Mapping):
        for key, item in value.items():
            _see(seen, f"{what}.{key}", item)
    elif isinstance(value, Sequence) and not isinstance(value, str | bytes):
        for index, item in enumerate(value):
            _see(seen, f"{what}[{index}]", item)
    elif isinstance(value, int | float | str | bytes | None):
        seen.append((what, repr(value)))


def _kind(tensor: Tensor) -> str:
    return f"{str(tensor.dtype).removeprefix('torch.')} {list(tensor.shape)}"


def _digest(tensor: Tensor) -> str:
    local: Any = tensor.detach()
    local = local.to_local() if hasattr(local, "to_local") else local
    flat = local.cpu().contiguous().reshape(-1).view(torch.uint8)
    return xxhash.xxh3_128_hexdigest(flat.numpy())


def _first_difference(first: Seen, second: Seen) -> str | None:
    for (what, digest), (other, other_digest) in zip(first, second, strict=False):
        if what != other:
            return f"{what} where the second run has {other}"
        if digest != other_digest:
            return what
    if len(first) != len(second):
        longer = max(first, second, key=len)
        return f"only one run has {longer[min(len(first), len(second))][0]}"
    return None


def _live(value: Any) -> Any:
    if isinstance(value, nn.Module):
        return {**dict(value.named_parameters()), **dict(value.named_buffers())}
    return value if isinstance(value, Tensor) else value.state_dict()


def _saved(name: str, value: Any) -> Any:
    """A copy of one value of the state, and of the gradients of a module."""
    if isinstance(value, nn.Module):
        gradients = [parameter.grad for parameter in value.parameters()]
        modes = [(part, part.training) for part in value.modules()]
        return _copied(list(_live(value).values())), _copied(gradients), modes
    if isinstance(value, torch.optim.Optimizer):  # whose load_state_dict may change dtypes
        options = [
            {key: copy.deepcopy(option) for key, option in group.items() if key != "params"}
            for group in value.param_groups
        ]
        return {p: copy.deepcopy(kept) for p, kept in value.state.items()}, options
    if isinstance(value, Tensor):
        return value.detach().clone()
    if hasattr(value, "state_dict") and hasattr(value, "load_state_dict"):
        return copy.deepcopy(value.state_dict())
    raise ValueError(
        f"state[{name!r}] of type {type(value).__name__} must be a module, an optimizer, a tensor "
        "or have state_dict and load_state_dict"
    )


def _copied(tensors: Sequence[Tensor | None]) -> list[Tensor | None]:
    return [None if tensor is None else tensor.detach().clone() for tensor in tensors]


def _restore_module(
    module: nn.Module,
    tensors: list[Tensor],
    gradients: list[Tensor | None],
    modes: list[tuple[nn.Module, bool]],
) -> None:
    for part, training in modes:
        part.training = training
    for tensor, before in zip(_live(module).values(), tensors, strict=True):
        tensor.copy_(before)
    for parameter, before in zip(module.parameters(), gradients, strict=True):
        if parameter.grad is None or before is None:
            parameter.grad = None if before is None else before.clone()
        else:  # in place: it may be a part of a buffer
            parameter.grad.copy_(before)


@torch.no_grad()
def _restore(value: Any, saved: Any) -> None:
    if isinstance(value, nn.Module):
        _restore_module(value, *saved)
    elif isinstance(value, torch.optim.Optimizer):
        states, options = saved
        value.state.clear()
        value.state.update({p: copy.deepcopy(kept) for p, kept in states.items()})
        for group, before in zip(value.param_groups, options, strict=True):
            for key, option in before.items():
                if isinstance(current := group[key], Tensor):
                    current.copy_(option)
                else:
                    group[key] = copy.deepcopy(option)
    elif isinstance(value, Tensor):
        value.copy_(saved)
    else:
        value.load_state_dict(copy.deepcopy(saved))


def _random_state() -> Any:
    cuda = torch.cuda.get_rng_state_all() if torch.cuda.is_initialized() else None
    return torch.get_rng_state(), cuda, numpy.random.get_state(), random.getstate()


def _set_random_state(state: Any) -> None:
    on_cpu, cuda, of_numpy, of_python = state
    torch.set_rng_state(on_cpu)
    if cuda is not None:
        torch.cuda.set_rng_state_all(cuda)
    numpy.random.set_state(of_numpy)
    random.setstate(of_python)
