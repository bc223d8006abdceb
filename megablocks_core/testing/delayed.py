"""A back end over gloo on which nothing is ready before it was waited for.

Gloo answers so fast that code which reads a result too early, or writes into a tensor that
is still being sent, works by luck. Here each message leaves late, after a pause of its own
on every rank. Its input is read when it leaves, so that an early overwrite is what is sent;
its output is NaN until it is waited for. The results are gloo's, to the bit, and modes that
count messages (``CommDebugMode``) count the same ones.
"""

# ruff: noqa: D102 (the messages are torch's)

import queue
import random
import threading
import time
import weakref
from collections.abc import Callable
from concurrent.futures import Future
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import FakeProcessGroup
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import _get_current_dispatch_mode

PAUSE = (0.005, 0.03)  # seconds

_CPU = torch.device("cpu")


def register() -> None:
    """Make the back end "delayed" known to torch.distributed."""
    if "delayed" not in dist.Backend.backend_list:
        dist.Backend.register_backend("delayed", DelayedGroup, devices=["cpu"])


class DelayedWork(dist.Work):
    """A message under way. ``wait`` puts its result where the caller asked for it."""

    def __init__(self, started: "Future[Any]", arrived: Any, outputs: Any) -> None:
        super().__init__()
        self._started, self._arrived, self._outputs = started, arrived, outputs
        self._done = False

    def wait(self, timeout: timedelta = timedelta(0)) -> bool:
        """Return when the message has arrived."""
        if not self._done:
            for work in pytree.tree_leaves(self._started.result()):
                work.wait()
            _each(lambda output, value: output.data.copy_(value), self._outputs, self._arrived)
            self._done = True
        return True

    def get_future(self) -> "torch.futures.Future[Any]":
        """A future that is done: there is no thread to wait in behind the caller's back."""
        self.wait()
        future: torch.futures.Future[Any] = torch.futures.Future()
        future.set_result(self._outputs)
        return future


class DelayedGroup(dist.ProcessGroup):
    """A process group whose messages leave in order, each after a pause."""

    def __init__(self, store: Any, rank: int, size: int, timeout: timedelta) -> None:
        super().__init__(rank, size)  # pyright: ignore[reportCallIssue]
        self._gloo: Any = dist.ProcessGroupGloo(store, rank, size, timeout=timeout)
        # It carries the group's name, and serves what is not delayed below.
        self._register_backend(_CPU, dist.ProcessGroup.BackendType.GLOO, self._gloo)
        self._shown = _silent_group(rank, size)
        self._outbox: Any = queue.SimpleQueue()
        threading.Thread(target=_leave_late, args=(self._outbox, rank), daemon=True).start()
        weakref.finalize(self, self._outbox.put, None)

    def getBackendName(self) -> str:
        return "delayed"

    # Messages whose tensors are input and output at once.

    def allreduce(self, tensors: list[Tensor], opts: Any = None) -> DelayedWork:
        return self._send(tensors, self._gloo.allreduce, opts=opts, in_place=True)

    def allreduce_coalesced(self, tensors: list[Tensor], opts: Any = None) -> DelayedWork:
        return self._send(tensors, self._gloo.allreduce_coalesced, opts=opts, in_place=True)

    def broadcast(self, tensors: list[Tensor], opts: Any = None) -> DelayedWork:
        return self._send(tensors, self._gloo.broadcast, opts=opts, in_place=True)

    def reduce(self, tensors: list[Tensor], opts: Any = None) -> DelayedWork:
        return self._send(tensors, self._gloo.reduce, opts=opts, in_place=True)

    # Messages with an output of its own.

    def allgather(self, outputs: Any, inputs: list[Tensor], opts: Any = None) -> DelayedWork:
        return self._send(outputs, self._gloo.allgather, inputs, opts=opts)

    def gather(self, outputs: Any, inputs: list[Tensor], opts: Any = None) -> DelayedWork:
        return self._send(outputs, self._gloo.gather, inputs, opts=opts)

    def scatter(self, outputs: list[Tensor], inputs: Any, opts: Any = None) -> DelayedWork:
        return self._send(outputs, self._gloo.scatter, inputs, opts=opts)

    def reduce_scatter(self, outputs: list[Tensor], inputs: Any, opts: Any = None) -> DelayedWork:
        return self._send(outputs, self._gloo.reduce_scatter, inputs, opts=opts)

    def alltoall(self, outputs: list[Tensor], inputs: Any, opts: Any = None) -> DelayedWork:
        return self._send(outputs, self._gloo.alltoall, inputs, opts=opts)

    def all_gather_single(self, output: Tensor, input: Tensor, opts: Any = None) -> DelayedWork:
        return self._send(output, self._gloo._allgather_base, input, opts=opts)

    def reduce_scatter_single(self, output: Tensor, input: Tensor, opts: Any = None) -> DelayedWork:
        return self._send(output, self._gloo._reduce_scatter_base, input, opts=opts)

    def all_gather_single_coalesced(
        self, outputs: list[Tensor], inputs: list[Tensor], opts: Any = None
    ) -> DelayedWork:
        return self._send(outputs, _for_each(self._gloo._allgather_base), inputs, opts=opts)

    def reduce_scatter_single_coalesced(
        self, outputs: list[Tensor], inputs: list[Tensor], opts: Any = None
    ) -> DelayedWork:
        return self._send(outputs, _for_each(self._gloo._reduce_scatter_base), inputs, opts=opts)

    def all_to_all_single(
        self, output: Tensor, input: Tensor, receive: list[int], send: list[int], opts: Any = None
    ) -> DelayedWork:
        return self._send(output, self._gloo.alltoall_base, input, receive, send, opts=opts)

    # Messages between two ranks, and none at all.

    def send(self, tensors: list[Tensor], rank: int, tag: int) -> DelayedWork:
        return self._send([], lambda _: self._gloo.send(tensors, rank, tag))

    def recv(self, tensors: list[Tensor], rank: int, tag: int) -> DelayedWork:
        return self._send(tensors, self._gloo.recv, rank, tag)

    def recv_anysource(self, tensors: list[Tensor], tag: int) -> DelayedWork:
        return self._send(tensors, self._gloo.recv_anysource, tag)

    def barrier(self, opts: Any = None) -> DelayedWork:
        return self._send([], lambda _, *opts: self._gloo.barrier(*opts), opts=opts)

    def _send(
        self,
        outputs: Any,
        message: Callable[..., Any],
        *inputs: Any,
        opts: Any = None,
        in_place: bool = False,
    ) -> DelayedWork:
        """Post ``message(private outputs, *inputs)`` and poison the outputs until it is waited."""
        options = () if opts is None else (opts,)
        fresh = torch.clone if in_place else torch.empty_like
        places = {x.untyped_storage().data_ptr() for x in pytree.tree_leaves(outputs)}
        # What the message writes is no inference tensor: gloo's thread is in no inference mode.
        with torch.inference_mode(False), torch.no_grad():
            # An input that lies in the output (this rank's part of a gather) is not overwritten
            # early: the message itself writes there.
            inputs = pytree.tree_map(lambda x: _apart(x, places), inputs)
            arrived = pytree.tree_map(lambda x: fresh(x.detach()), outputs)
        with torch.no_grad():
            self._show(message, outputs, *inputs, *options)
            pytree.tree_map(_poison, outputs)
        started: Future[Any] = Future()
        self._outbox.put((lambda: message(arrived, *inputs, *options), started))
        return DelayedWork(started, arrived, outputs)

    def _show(self, message: Callable[..., Any], *arguments: Any) -> None:
        """Let modes that see torch's operators see a message: a group in Python calls none."""
        shown = getattr(self._shown, message.__name__, None)
        if shown is not None and _get_current_dispatch_mode() is not None:
            shown(*arguments)


def _silent_group(rank: int, size: int) -> Any:
    """A group of torch's own kind that sends nothing."""
    group: Any = dist.ProcessGroup(rank, size)  # pyright: ignore[reportCallIssue]
    kind: Any = FakeProcessGroup  # its stub has other arguments
    silent = kind._create_internal(rank, size, kind.Options())
    group._register_backend(_CPU, dist.ProcessGroup.BackendType.CUSTOM, silent)
    group._set_default_backend(dist.ProcessGroup.BackendType.CUSTOM)
    return group


# The names by which torch's own functions and earlier versions call the same messages.
for _alias, _message in {
    "_allgather_base": DelayedGroup.all_gather_single,
    "_reduce_scatter_base": DelayedGroup.reduce_scatter_single,
    "allgather_into_tensor_coalesced": DelayedGroup.all_gather_single_coalesced,
    "reduce_scatter_tensor_coalesced": DelayedGroup.reduce_scatter_single_coalesced,
    "alltoall_base": DelayedGroup.all_to_all_single,
}.items():
    setattr(DelayedGroup, _alias, _message)


def _leave_late(outbox: Any, rank: int) -> None:
    pauses = random.Random(rank)
    while (item := outbox.get()) is not None:
        start, started = item
        time.sleep(pauses.uniform(*PAUSE))
        try:
            started.set_result(start())
        except Exception as error:
            started.set_exception(error)
        del item, start, started  # a sent tensor lives no longer than its message


def _for_each(message: Callable[..., Any]) -> Callable[..., list[Any]]:
    def messages(outputs: list[Tensor], inputs: list[Tensor], *_: Any) -> list[Any]:
        return [message(output, x) for output, x in zip(outputs, inputs, strict=True)]

    return messages


def _apart(x: Any, places: set[int]) -> Any:
    inside = isinstance(x, Tensor) and x.untyped_storage().data_ptr() in places
    return x.clone() if inside else x


def _poison(x: Tensor) -> None:
    if x.is_floating_point() or x.is_complex():
        x.data.fill_(torch.nan)
    elif x.dtype == torch.bool:
        x.data.logical_not_()
    else:
        x.data.fill_(torch.iinfo(x.dtype).max)


def _each(call: Callable[..., Any], *nests: Any) -> None:
    for leaves in zip(*(pytree.tree_leaves(nest) for nest in nests), strict=True):
        call(*leaves)
