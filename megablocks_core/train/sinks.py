"""Where a step's values go: one interface, and the places beside the lines on disk.

A sink has ``write(step, values)`` and ``close()``, and works on rank 0 of its group: the other
ranks call the same and nothing happens. ``RunFolder`` and ``JsonLines`` are sinks too.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any, Protocol

from megablocks_core.groups import LOCAL, Group


class Sink(Protocol):
    """A place for values."""

    def write(self, step: int, values: Mapping[str, float]) -> None:
        """Take the values of ``step``, counted from 0 and rising."""
        ...

    def close(self) -> None:
        """Make sure that all is written."""
        ...


class Sinks:
    """Several sinks as one; a ``with`` block closes them, or leaves their own blocks.

        run = RunFolder(out, record=record, step=first, group=world)
        with Sinks(run, TensorBoard(out / "board", step=first, group=world)) as sinks:
            sinks.write(step, values)

    Each sink is told, also after one has failed; the first error is raised then. Sends nothing.
    """

    def __init__(self, *sinks: Sink) -> None:
        self.sinks = sinks

    def write(self, step: int, values: Mapping[str, float]) -> None:
        """Hand ``values`` to every sink."""
        _each([partial(sink.write, step, values) for sink in self.sinks])

    def close(self) -> None:
        """Close every sink, the last first."""
        _each([sink.close for sink in reversed(self.sinks)])

    def __enter__(self) -> Sinks:
        return self

    def __exit__(self, *outcome: Any) -> None:
        _each([partial(_leave, sink, *outcome) for sink in reversed(self.sinks)])


class TensorBoard:
    """Event files that TensorBoard shows, in the folder ``path``; needs the extra "tensorboard".

    ``step`` is the first step to come: TensorBoard hides what an earlier start wrote from there
    on. Every value is a scalar of its name; a slash in a name makes a section.

    Raises:
        ImportError: tensorboard is missing; the message names the extra that brings it.
    """

    def __init__(self, path: str | Path, *, step: int = 0, group: Group = LOCAL) -> None:
        self._writer: Any = None
        if group.rank == 0:
            try:
                from torch.utils.tensorboard import SummaryWriter
            except ImportError as error:
                raise ImportError(
                    "TensorBoard needs tensorboard: pip install 'megablocks-core[tensorboard]'"
                ) from error
            self._writer = SummaryWriter(str(path), purge_step=step)

    def write(self, step: int, values: Mapping[str, float]) -> None:
        """Add the values of ``step``."""
        if self._writer is not None:
            for name, value in values.items():
                self._writer.add_scalar(name, float(value), step)

    def close(self) -> None:
        """Write what is pending and close the file."""
        if self._writer is not None:
            self._writer.close()
            self._writer = None


class WandB:
    """A run of Weights & Biases; needs the extra "wandb".

        WandB("project", run_id="small-2", path=out, config=record, group=world)

    A start with the ``run_id`` of an earlier one goes on with that run. What W&B has of steps
    that run again stays as it was, as it takes no step twice. ``path`` is where its files lie,
    ``config`` what it shows beside the curves, ``mode`` "online", "offline" or "disabled".

    Raises:
        ImportError: wandb is missing; the message names the extra that brings it.
    """

    def __init__(
        self,
        project: str,
        *,
        name: str | None = None,
        run_id: str | None = None,
        path: str | Path = ".",
        config: Mapping[str, Any] | None = None,
        mode: str = "online",
        group: Group = LOCAL,
    ) -> None:
        self._run: Any = None
        if group.rank == 0:
            try:
                import wandb  # pyright: ignore[reportMissingImports]
            except ImportError as error:
                raise ImportError(
                    "WandB needs wandb: pip install 'megablocks-core[wandb]'"
                ) from error
            self._run = wandb.init(
                project=project,
                name=name,
                id=run_id,
                resume=None if run_id is None else "allow",
                dir=str(path),
                config=None if config is None else dict(config),
                mode=mode,
            )

    def write(self, step: int, values: Mapping[str, float]) -> None:
        """Log the values of ``step``."""
        if self._run is not None:
            self._run.log({name: float(value) for name, value in values.items()}, step=step)

    def close(self) -> None:
        """Finish the run."""
        if self._run is not None:
            self._run.finish()
            self._run = None


def _leave(sink: Any, *outcome: Any) -> None:
    """Tell a sink how its block ended, if it wants to know."""
    if hasattr(sink, "__exit__"):
        sink.__exit__(*outcome)
    else:
        sink.close()


def _each(calls: list[Callable[[], None]]) -> None:
    """Make every call; raise the first error at the end."""
    failure: Exception | None = None
    for call in calls:
        try:
            call()
        except Exception as error:
            failure = failure or error
    if failure is not None:
        raise failure
