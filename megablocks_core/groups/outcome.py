"""One step that all ranks of a group take, and that fails on all of them or on none."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from megablocks_core.groups.group import Group, check_group


@contextmanager
def together(task: str, *, group: Group, raises: type[Exception] = RuntimeError) -> Iterator[None]:
    """Run the body on every rank; if it raises on one rank, raise on every rank.

    A rank whose body raised gets its own exception; the others get a ``ValueError`` if it was
    one, else ``raises``, which names the task, the first rank that failed and its error. So no
    rank waits for one that gave up. The body must not communicate. One small message (every
    rank's outcome) at the end.
    """
    check_group(group)
    mine: Exception | None = None
    try:
        yield
    except Exception as error:
        mine = error
    outcome = mine and (isinstance(mine, ValueError), f"{type(mine).__name__}: {mine}")
    outcomes = group.all_gather_object(outcome)
    if mine is not None:
        raise mine
    for rank, outcome in zip(group.ranks, outcomes, strict=True):
        if outcome is not None:
            is_value_error, text = outcome
            kind = ValueError if is_value_error else raises
            raise kind(f"{task} failed on rank {rank}: {text}")
