"""Recomputation: keep what goes into a function, and run it again when its gradient arrives
(Chen et al., https://arxiv.org/abs/1604.06174; of parts: Korthikanti et al.,
https://arxiv.org/abs/2205.05198, section 5).
"""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch._ops import OpOverload
from torch.utils import _pytree as pytree
from torch.utils.checkpoint import (
    CheckpointPolicy,
    checkpoint,
    create_selective_checkpoint_contexts,
)

from megablocks_core.groups import LOCAL, Group, chunk_slice
from megablocks_core.groups.messages import finish_all_gather, start_all_gather
from megablocks_core.parallel.memory.freed import Outputs
from megablocks_core.parallel.memory.replay import Region

Kept = Literal["matmul", "attention", "messages"] | OpOverload

_MATMUL = {"mm", "addmm", "bmm", "baddbmm", "_scaled_mm", "_grouped_mm", "_scaled_grouped_mm"}
_GROUPS = ("matmul", "attention", "messages")


def recompute(
    function: Callable[..., Any],
    *args: Any,
    into: Callable[[Any], Any] | None = None,
    keep: Sequence[Kept] = (),
    cut_over: Group = LOCAL,
) -> Any:
    """``function(*args)``, whose inner results are computed again in backward.

    Outputs and gradients are those of the call itself, to the bit. The second run finds
    torch's random state, autocast and every choice of ``remember`` as the first did, and ends
    once it has what backward asks for. Regions nest, and a graph may be walked twice. Keyword
    arguments go in through ``functools.partial``; where gradients are off this is the call.

    Forward sends what ``function`` sends. Backward sends it again, in the same order on all
    ranks, up to the last tensor that it saves, and one all-gather more for each argument that
    was cut.

    Saved for backward, in bytes: those of the tensors among ``args`` (shared, not copied; a
    copy of 1 / size if cut), of what ``keep`` and ``remember`` hold, and about 5,000 of random
    state; nothing that ``function`` makes inside, and with ``into`` not its output either.

    Args:
        function: Called twice; it must not change its arguments or anything else. Tensors that
            it finds elsewhere than in ``args`` must still be the same in backward.
        *args: Tensors, nests of tensors, or anything else.
        into: Is called with the output of ``function``, and its result is returned. It runs
            once; the output is freed after it, and what it saved of it is computed again when
            its gradient arrives. What keeps the output otherwise is served as ever.
        keep: Operations whose results are kept instead of computed again: "matmul",
            "attention", "messages" (so that backward sends none again), or operations of
            ``torch.ops``. What backward does not need is kept too.
        cut_over: Ranks on which the tensors of ``args`` are equal. Each keeps a slice of those
            that have a gradient (are contiguous, and no parameters), and backward gathers them.

    Raises:
        ValueError: ``function`` or ``into`` cannot be called, ``keep`` names no operation, or
            ``cut_over`` is set in compiled code.
        RuntimeError: In backward: the second run took another path, or an argument, a kept
            result or a choice was changed in place.
    """
    if not callable(function):
        raise ValueError(f"function={function!r} must be callable")
    if not (into is None or callable(into)):
        raise ValueError(f"into={into!r} must be callable, or None")
    chosen = checked_kept(keep)
    if not torch.is_grad_enabled():
        output = function(*args)
        return output if into is None else into(output)
    if torch.compiler.is_compiling():
        return _traced(function, args, into, chosen, cut_over)

    leaves, tree = pytree.tree_flatten(args)
    tensors = _Tensors(leaves, cut_over)
    region = Region(partial(_is_kept, chosen) if chosen else None)
    outputs = Outputs() if into is not None else None

    def call(*saved: Tensor | None) -> Any:
        arguments = pytree.tree_unflatten(tensors.restored(saved), tree)
        with region.run():
            output = function(*arguments)
        return output if outputs is None else outputs.noted(output)

    output = checkpoint(call, *tensors.saved(), use_reentrant=False)
    if into is None or outputs is None:
        return output
    with outputs.watched(output):
        return into(output)


def _traced(
    function: Callable[..., Any],
    args: Sequence[Any],
    into: Callable[[Any], Any] | None,
    chosen: tuple[Kept, ...],
    cut_over: Group,
) -> Any:
    """In compiled code the compiler runs the region again; what ``into`` saves is its choice."""
    if cut_over.size > 1:
        raise ValueError(f"cut_over={cut_over} must be LOCAL in compiled code")
    if chosen:
        contexts = partial(create_selective_checkpoint_contexts, partial(_policy, chosen))
        output = checkpoint(function, *args, use_reentrant=False, context_fn=contexts)
    else:
        output = checkpoint(function, *args, use_reentrant=False)
    return output if into is None else into(output)


# Which operations are kept.


def checked_kept(keep: Sequence[Kept]) -> tuple[Kept, ...]:
    """``keep`` as a tuple.

    Raises:
        ValueError: It names no operation.
    """
    for one in keep:
        if one not in _GROUPS and not isinstance(one, OpOverload):
            raise ValueError(f"keep={one!r} must be one of {_GROUPS} or an operation of torch.ops")
    return tuple(keep)


def _is_kept(chosen: tuple[Kept, ...], operation: Any) -> bool:
    if operation in chosen:
        return True
    if not isinstance(operation, OpOverload):
        return False
    namespace, _, name = operation._schema.name.partition("::")
    return (
        ("matmul" in chosen and namespace == "aten" and name in _MATMUL)
        or ("attention" in chosen and "attention" in name)
        or ("messages" in chosen and namespace == "_c10d_functional")
    )


def _policy(
    chosen: tuple[Kept, ...], context: Any, operation: Any, *args: Any, **kwargs: Any
) -> Any:
    kept = _is_kept(chosen, operation)
    return CheckpointPolicy.MUST_SAVE if kept else CheckpointPolicy.PREFER_RECOMPUTE


# What is saved of the arguments.


class _Tensors:
    """The arguments of a region: saved as they are, or cut over ranks that hold them alike.

    The first run takes them whole; later ones put them together again.
    """

    def __init__(self, leaves: list[Any], group: Group) -> None:
        self.group = group
        self.leaves = [None if isinstance(leaf, Tensor) else leaf for leaf in leaves]
        self.places = [index for index, leaf in enumerate(leaves) if isinstance(leaf, Tensor)]
        self.shapes = [
            leaves[place].shape if _is_cut(leaves[place], group) else None for place in self.places
        ]
        self._whole = [[leaves[place] for place in self.places]]

    def saved(self) -> list[Tensor]:
        """One tensor for each among the arguments."""
        return [
            x if shape is None else _slice(x, self.group)
            for x, shape in zip(self._whole[0], self.shapes, strict=True)
        ]

    def restored(self, saved: Sequence[Any]) -> list[Any]:
        """All arguments, from what was saved."""
        leaves = list(self.leaves)
        tensors = (
            self._whole.pop() if self._whole else map(self._gathered, saved, range(len(saved)))
        )
        for place, x in zip(self.places, tensors, strict=True):
            leaves[place] = x
        return leaves

    def _gathered(self, x: Tensor, index: int) -> Tensor:
        shape = self.shapes[index]
        if shape is None:
            return x
        count, ranks = shape.numel(), range(self.group.size)
        slices = [chunk_slice(count, self.group.size, rank) for rank in ranks]
        sizes = [part.stop - part.start for part in slices]
        with torch.no_grad():
            flying = start_all_gather(x, dim=0, group=self.group, sizes=sizes)
            whole = finish_all_gather(flying, dim=0, sizes=sizes).view(shape)
        return whole.requires_grad_()


def _is_cut(x: Tensor, group: Group) -> bool:
    """What has no gradient is often shared by many regions, and a parameter is held anyway.

    Another layout than the contiguous one could change how an operation rounds.
    """
    is_activation = x.requires_grad and not isinstance(x, nn.Parameter)
    return group.size > 1 and is_activation and x.is_contiguous()


def _slice(x: Tensor, group: Group) -> Tensor:
    flat = x.detach().view(-1)
    return flat[chunk_slice(len(flat), group.size, group.rank)].clone()
