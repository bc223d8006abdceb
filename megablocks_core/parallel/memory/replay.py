"""What a recomputed region takes over from its first run: choices, and results worth keeping.

A region runs once for its results and again for its gradients. Most of it is computed anew;
what must not change in between (a router's indices, a draw of one's own generator) is
remembered, and what is dear to compute may be kept.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from contextvars import ContextVar
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

T = TypeVar("T")
Keeps = Callable[[Any], bool]  # whether the result of an operation is kept


def remember(compute: Callable[[], T]) -> T:
    """``compute()``, decided once: a recomputed region finds the value of its first run again.

    For choices that must be the same when the region runs again, such as the experts that a
    router chose, or the integers that name a random draw. They have no gradient: ``compute``
    runs under ``no_grad``. Outside a recomputed region that is all. Inside one, the second run
    calls nothing, sends nothing, and goes on with torch's random state as ``compute`` left it.
    In compiled code ``compute`` is traced, as part of the graph: there it must depend on what
    goes into the graph alone.

    Args:
        compute: Without arguments; gives tensors, numbers, or nests of them, which must not be
            changed in place. The region holds them until its backward is done.
    """
    run = None if torch.compiler.is_compiling() else _current.get()
    return _decided(compute) if run is None else run.remembered(compute)


class Region:
    """One recomputed call: its choices and kept results, and the runs that make and use them.

    Args:
        keeps: Whether the result of an operation is kept; ``None``: of none.
    """

    def __init__(self, keeps: Keeps | None = None) -> None:
        self.keeps = keeps
        self.choices: list[_Choice] = []
        self.results: list[_Result] = []
        self.has_run = False

    @contextmanager
    def run(self) -> Iterator[None]:
        """Around every run of the function; the first records, the others replay."""
        run = _Run(self, parent=_current.get(), first=not self.has_run)
        self.has_run = True
        modes = _Recording if run.first else _Replaying
        token = _current.set(run)
        try:
            with nullcontext() if self.keeps is None else modes(self, self.keeps):
                yield
        finally:
            _current.reset(token)


class _Choice(NamedTuple):
    """A remembered value, the versions of its tensors, and random state if the choice drew."""

    value: Any
    versions: list[int]
    random_state: list[Tensor] | None


class _Run:
    """One run of a region, inside the run of another (``parent``) or of none."""

    def __init__(self, region: Region, *, parent: "_Run | None", first: bool) -> None:
        self.region, self.parent, self.first = region, parent, first
        self.replayed = 0

    def remembered(self, compute: Callable[[], Any]) -> Any:
        """The value that was chosen in this place before, else ``compute()``."""
        if not self.first:
            return self._replay()
        before = _as_bytes(_random_state())
        # A region around this one may be replaying, and knows the value.
        value = _decided(compute) if self.parent is None else self.parent.remembered(compute)
        after = _random_state()
        drew = after if _as_bytes(after) != before else None
        self.region.choices.append(_Choice(value, _versions(value), drew))
        return value

    def _replay(self) -> Any:
        if self.replayed == len(self.region.choices):
            raise RuntimeError(
                f"a recomputed function remembers more than the {self.replayed} choices of its "
                "first run: it must take the same path again"
            )
        value, versions, random_state = self.region.choices[self.replayed]
        if _versions(value) != versions:
            raise RuntimeError(f"a remembered choice was changed in place: {value}")
        self.replayed += 1
        if random_state is not None:
            _set_random_state(random_state)
        return value


_current: ContextVar[_Run | None] = ContextVar("recomputed run", default=None)


@torch.no_grad()
def _decided(compute: Callable[[], T]) -> T:
    """Compute a choice; regions around take no note of what runs for it."""
    if torch.compiler.is_compiling():
        return compute()
    token = _current.set(None)
    try:
        return compute()
    finally:
        _current.reset(token)


def _versions(value: Any) -> list[int]:
    return [x._version for x in pytree.tree_leaves(value) if isinstance(x, Tensor)]


def _random_state() -> list[Tensor]:
    on_device = [torch.cuda.get_rng_state()] if torch.cuda.is_initialized() else []
    return [torch.get_rng_state(), *on_device]


def _as_bytes(states: Sequence[Tensor]) -> list[bytes]:
    return [state.numpy().tobytes() for state in states]


def _set_random_state(states: Sequence[Tensor]) -> None:
    torch.set_rng_state(states[0])
    for state in states[1:]:
        torch.cuda.set_rng_state(state)


class _Result(NamedTuple):
    """Kept tensors of one operation, and their versions."""

    operation: Any
    value: Any
    versions: list[int]


class _Recording(TorchDispatchMode):
    """Notes the results of chosen operations."""

    def __init__(self, region: Region, keeps: Keeps) -> None:
        super().__init__()
        self.region, self.keeps = region, keeps

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if self.keeps(func) and _current.get() is not None:
            alias = pytree.tree_map_only(Tensor, _alias, result)
            self.region.results.append(_Result(func, alias, _versions(alias)))
        return result


class _Replaying(TorchDispatchMode):
    """Gives the noted results in place of running the operations."""

    def __init__(self, region: Region, keeps: Keeps) -> None:
        super().__init__()
        self.region, self.keeps = region, keeps
        self.replayed = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if not self.keeps(func) or _current.get() is None:
            return func(*args, **(kwargs or {}))
        known = self.region.results[self.replayed : self.replayed + 1]
        if not known or known[0].operation is not func:
            raise RuntimeError(
                f"a recomputed function comes to {func}, which its first run did not: it must "
                "take the same path again"
            )
        if _versions(known[0].value) != known[0].versions:
            raise RuntimeError(f"a kept result of {func} was changed in place")
        self.replayed += 1
        return pytree.tree_map_only(Tensor, _alias, known[0].value)


def _alias(x: Tensor) -> Tensor:
    """The same memory without the graph; shares the count of changes in place.

    Below autograd, where modes run, ``detach`` would start a new count.
    """
    with torch._C._SetExcludeDispatchKeyGuard(torch._C.DispatchKey.ADInplaceOrView, False):
        return x.detach()
