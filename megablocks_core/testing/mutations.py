"""Faults put into ``groups`` on purpose: a suite that stays green under one proves nothing.

    for mutation in mutations():
        with mutation:
            ...  # must go red

Every differentiable collective is dropped, doubled and made local, forward and backward
apart; so are the messages under them that layers start themselves; marks are removed and
falsified. A fault stands in for the function in every module that has it. Over a group of
one nothing changes, so a one-process twin stays right.
"""

import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial, wraps
from typing import Any

import torch
from torch import Tensor

from megablocks_core.groups import Group, Segment, ShardSpec, Specs, collectives, marking, messages
from megablocks_core.groups.messages import learn_sizes

Make = Callable[[Callable[..., Any]], Callable[..., Any]]


@dataclass
class Mutation:
    """One fault, in force inside ``with``.

    Attributes:
        name: What is wrong, such as "copy_to: backward dropped".
        owner: The module or class that holds the function.
        function: Its name there.
        make: Makes the faulty function of the right one.
    """

    name: str
    owner: Any
    function: str
    make: Make

    def __enter__(self) -> None:
        self._right = getattr(self.owner, self.function)
        self._wrong = self.make(self._right)
        self._swap(self._right, self._wrong)

    def __exit__(self, *error: object) -> None:
        self._swap(self._wrong, self._right)

    def _swap(self, old: Any, new: Any) -> None:
        """Put ``new`` wherever ``old`` is: its owner, and all modules that imported it."""
        for holder in [self.owner, *list(sys.modules.values())]:
            if getattr(holder, "__dict__", {}).get(self.function) is old:
                setattr(holder, self.function, new)


def mutations() -> Iterator[Mutation]:
    """All faults."""
    for name, faults in _COLLECTIVES.items():
        for kind, make in (faults | {"backward doubled": _doubled_backward}).items():
            yield Mutation(f"{name}: {kind}", collectives, name, make)
    for owner, name, alone in _MESSAGES:
        yield Mutation(f"{name}: doubled", owner, name, partial(_received, change=_twice))
        yield Mutation(f"{name}: dropped", owner, name, partial(_received, change=alone))
    for name, change in _FALSE_MARKS.items():
        yield Mutation(f"mark: {name}", marking, "mark", partial(_marked, change=change))
    yield Mutation("marks: removed", marking, "specs_of", lambda _: lambda owner, name: Specs())
    yield Mutation("counted: copies too", ShardSpec, "counted", _all_counted)


def mutation(name: str) -> Mutation:
    """The fault called ``name``.

    Raises:
        ValueError: There is none.
    """
    known = {mutation.name: mutation for mutation in mutations()}
    if name not in known:
        raise ValueError(f"name={name!r} must be one of {sorted(known)}")
    return known[name]


# Faults of the differentiable collectives.


def _doubled_forward(right: Callable[..., Tensor]) -> Callable[..., Tensor]:
    @wraps(right)
    def wrong(x: Tensor, **options: Any) -> Tensor:
        y = right(x, **options)
        return y if options["group"].size == 1 else y + y.detach()

    return wrong


def _doubled_backward(right: Callable[..., Any]) -> Callable[..., Any]:
    @wraps(right)
    def wrong(*tensors: Tensor, **options: Any) -> Any:
        if _sends(**options):
            tensors = tuple(_TwiceBackward.apply(x) if x.requires_grad else x for x in tensors)
        return right(*tensors, **options)

    return wrong


def _identity(right: Callable[..., Any]) -> Callable[..., Any]:
    @wraps(right)
    def wrong(*tensors: Tensor, **options: Any) -> Any:
        if not _sends(**options):
            return right(*tensors, **options)
        copies = [x.view_as(x) for x in tensors]
        return copies[0] if len(copies) == 1 and "group" in options else tuple(copies)

    return wrong


def _replaced(
    right: Callable[..., Tensor],
    *,
    forward: Callable[..., Tensor] | None,
    backward: Callable[..., Tensor] | None,
) -> Callable[..., Tensor]:
    @wraps(right)
    def wrong(x: Tensor, **options: Any) -> Tensor:
        if options["group"].size == 1:
            return right(x, **options)
        return _Replaced.apply(x, partial(right, **options), options, forward, backward)

    return wrong


def _sends(*, group: Group | None = None, specs: tuple[ShardSpec, ...] = (), **_: Any) -> bool:
    return group.size > 1 if group else any(spec.has_copies for spec in specs)


class _TwiceBackward(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> Tensor:
        return 2 * dy


class _Replaced(torch.autograd.Function):
    """The right collective runs both ways, so that ranks stay in step; its result may not count."""

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        right: Callable[[Tensor], Tensor],
        options: dict[str, Any],
        forward: Callable[..., Tensor] | None,
        backward: Callable[..., Tensor] | None,
    ) -> Tensor:
        ctx.options, ctx.replacement = options, backward
        ctx.x = x.detach().requires_grad_(x.requires_grad)
        with torch.enable_grad():
            ctx.y = right(ctx.x)
        y = ctx.y.detach()
        return y.clone() if forward is None else forward(ctx.x.detach(), y, **options)

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        (dx,) = torch.autograd.grad(ctx.y, ctx.x, dy)
        if ctx.replacement is not None:
            dx = ctx.replacement(dy, dx, **_reversed(ctx.options))
        return dx, None, None, None, None


def _reversed(options: dict[str, Any]) -> dict[str, Any]:
    if "send" not in options:
        return options
    return {**options, "send": options["receive"], "receive": options["send"]}


# What a rank would have if a message had not been sent: (input, right result) to wrong result.


def _keep(x: Tensor, y: Tensor, **_: Any) -> Tensor:
    return x.clone()


def _summed(x: Tensor, y: Tensor, *, group: Group) -> Tensor:
    return group.all_reduce(x)


def _placed(x: Tensor, y: Tensor, *, dim: int, group: Group, **_: Any) -> Tensor:
    """Own slice in its place, zero elsewhere."""
    whole = torch.zeros_like(y)
    whole.narrow(dim, _start(x, dim, group), x.shape[dim]).copy_(x)
    return whole


def _taken(x: Tensor, y: Tensor, *, dim: int, group: Group, **_: Any) -> Tensor:
    """Own slice of what this rank alone has."""
    return x.narrow(dim, _start(y, dim, group), y.shape[dim]).clone()


def _first(x: Tensor, y: Tensor, *, dim: int, group: Group, **_: Any) -> Tensor:
    """The first slice, whatever the rank."""
    return x.narrow(dim, 0, y.shape[dim]).clone()


def _summed_slice(x: Tensor, y: Tensor, *, dim: int, group: Group, **_: Any) -> Tensor:
    return _taken(group.all_reduce(x), y, dim=dim, group=group)


def _own_rows(x: Tensor, y: Tensor, *, send: list[int], receive: list[int], group: Group) -> Tensor:
    """The rows that stay on this rank, zero for those of others."""
    rows = torch.zeros_like(y)
    stay = x.split(list(send))[group.rank]
    rows.split(list(receive))[group.rank].copy_(stay)
    return rows


def _start(part: Tensor, dim: int, group: Group) -> int:
    return sum(learn_sizes(part, dim=dim, group=group)[: group.rank])


def _drop(
    forward: Callable[..., Tensor] | None = None, backward: Callable[..., Tensor] | None = None
) -> Make:
    return partial(_replaced, forward=forward, backward=backward)


# The faults of each collective besides "backward doubled". Where backward sends nothing, the
# fault is to send: the adjoint of its neighbour.
_COLLECTIVES: dict[str, dict[str, Make]] = {
    "copy_to": {"backward dropped": _identity},
    "copy_slices_to": {"backward dropped": _identity},
    "reduce_from": {
        "forward doubled": _doubled_forward,
        "forward dropped": _drop(_keep),
        "backward summed": _drop(backward=_summed),
    },
    "gather_from": {
        "forward doubled": _doubled_forward,
        "forward dropped": _drop(_placed),
        "backward summed": _drop(backward=_summed_slice),
    },
    "all_gather_to": {
        "forward doubled": _doubled_forward,
        "forward dropped": _drop(_placed),
        "backward dropped": _drop(backward=_taken),
        "made local": _drop(_placed, _taken),
    },
    "scatter_to": {
        "forward doubled": _doubled_forward,
        "first slice taken": _drop(_first),
        "backward dropped": _drop(backward=_placed),
    },
    "reduce_scatter_to": {
        "forward doubled": _doubled_forward,
        "forward dropped": _drop(_taken),
        "backward dropped": _drop(backward=_placed),
        "made local": _drop(_taken, _placed),
    },
    "all_to_all": {
        "forward doubled": _doubled_forward,
        "forward dropped": _drop(_own_rows),
        "backward dropped": _drop(backward=_own_rows),
        "made local": _drop(_own_rows, _own_rows),
    },
}


# Faults of the messages that layers start and finish themselves.


def _received(right: Callable[..., Any], *, change: Callable[..., Any]) -> Callable[..., Any]:
    """Send the message, then give ``change(result, *arguments)`` in place of its result."""

    @wraps(right)
    def wrong(*args: Any, **options: Any) -> Any:
        result = right(*args, **options)
        group = options["group"] if "group" in options else args[0]
        if group.size == 1:
            return result
        if isinstance(result, Tensor):
            result = messages.wait(result)
        return change(result, *args, **options)

    return wrong


def _twice(result: Any, *_: Any, **__: Any) -> Any:
    return 2 * result if isinstance(result, Tensor) else [2 * part for part in result]


def _own_sum(result: Tensor, x: Tensor, *, group: Group) -> Tensor:
    return x.clone()


def _own_block(result: Tensor, x: Tensor, *, group: Group, **_: Any) -> Tensor:
    """Zero in all blocks of a gathered message but this rank's."""
    blocks = torch.zeros_like(result).chunk(group.size)
    blocks[group.rank].copy_(result.chunk(group.size)[group.rank])
    return torch.cat(blocks)


def _own_part(result: Tensor, x: Tensor, *, dim: int, group: Group, sizes: list[int]) -> Tensor:
    """This rank's part of its own summand, padded as the sum is."""
    part = torch.zeros_like(result)
    part[: sizes[group.rank]] = x.movedim(dim, 0).split(list(sizes))[group.rank]
    return part


def _own_tensors(result: Any, tensors: Any, **_: Any) -> list[Tensor]:
    return [x.clone() for x in tensors]


def _own_slice(result: list[Tensor], x: Tensor, *, group: Group) -> list[Tensor]:
    return [y if rank == group.rank else 0 * y for rank, y in enumerate(result)]


def _own_value(result: Tensor, group: Group, x: Tensor, op: str = "sum") -> Tensor:
    return x.clone()


_MESSAGES: list[tuple[Any, str, Callable[..., Any]]] = [
    (messages, "start_all_reduce", _own_sum),
    (messages, "start_all_gather", _own_block),
    (messages, "start_reduce_scatter", _own_part),
    (messages, "start_all_to_all", lambda y, x, **options: _own_rows(x, y, **options)),
    (messages, "sum_flat", _own_tensors),
    (messages, "all_gather_lists", _own_slice),
    (Group, "all_reduce", _own_value),
]


# Faults of marks.


def _marked(
    right: Callable[..., None], *, change: Callable[[dict[str, Any]], None]
) -> Callable[..., None]:
    @wraps(right)
    def wrong(module: Any, name: str, *specs: ShardSpec, **options: Any) -> None:
        options["specs"] = specs
        change(options)
        right(module, name, *options.pop("specs"), **options)

    return wrong


def _resegmented(
    change: Callable[[tuple[Segment, ...]], tuple[Segment, ...]],
) -> Callable[[dict[str, Any]], None]:
    def changed(options: dict[str, Any]) -> None:
        options["specs"] = tuple(
            replace(spec, segments=change(spec.segments)) if spec.segments else spec
            for spec in options["specs"]
        )

    return changed


_FALSE_MARKS: dict[str, Callable[[dict[str, Any]], None]] = {
    "segments merged": _resegmented(lambda parts: (Segment(sum(part.size for part in parts)),)),
    "a segment forgotten": _resegmented(lambda parts: parts[:-1] or parts),
    "copies forgotten": _resegmented(lambda parts: tuple(Segment(part.size) for part in parts)),
    "expert forgotten": lambda options: options.update(expert=False),
    "stacking forgotten": lambda options: options.update(each=None),
}


def _all_counted(right: Callable[..., list[slice]]) -> Callable[..., list[slice]]:
    @wraps(right)
    def wrong(self: ShardSpec, whole_length: int, rank: int | None = None) -> list[slice]:
        return [slice(0, sum(part.stop - part.start for part in self.ranges(whole_length, rank)))]

    return wrong
