"""Copies between a device and the host that run beside the main stream.

On CPU a copy is done when ``start`` returns. On CUDA it runs on a stream of its own, after
everything that the main stream was given before; the main stream goes on, and waits for the
copy where ``wait`` is called. Until then the copy holds both tensors, so that nothing that is
in flight is freed or handed to somebody else.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch import Tensor


class Copies:
    """Starts copies, which run one after another on each device."""

    def __init__(self) -> None:
        self._streams: dict[Any, Any] = {}

    def start(self, source: Tensor, target: Tensor) -> Copy:
        """Start to copy ``source`` into ``target``, which has its shape and dtype.

        A host tensor must be pinned, or the host waits for the device.
        """
        on_device = [x.device for x in (source, target) if x.device.type == "cuda"]
        if not on_device:
            target.copy_(source)
            return Copy(source, target)
        import torch

        device = on_device[0]
        if device not in self._streams:
            self._streams[device] = torch.cuda.Stream(device)
        stream = self._streams[device]
        stream.wait_stream(torch.cuda.current_stream(device))
        with torch.cuda.stream(stream):
            target.copy_(source, non_blocking=True)
        return Copy(source, target, device=device, event=stream.record_event())


class Copy:
    """A copy that was started."""

    def __init__(
        self, source: Tensor, target: Tensor, *, device: Any = None, event: Any = None
    ) -> None:
        self._held: tuple[Tensor, Tensor] | None = (source, target)
        self._device, self._event = device, event

    def wait(self) -> None:
        """Let the main stream go on after the copy; the tensors are held no longer."""
        if self._event is not None:
            import torch

            torch.cuda.current_stream(self._device).wait_event(self._event)
        self._held = self._event = None
