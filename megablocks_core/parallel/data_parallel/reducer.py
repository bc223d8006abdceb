"""Sum gradients over ranks while backward runs.

A hook on every parameter takes its gradient before torch accumulates it, and writes it to the
flat buffer of its bucket. A complete bucket is sent at once; when backward is over, the rest
is sent, all is waited for, and ``.grad`` is set. ``DataParallel`` and ``ShardedOptimizer``
stand on it.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from itertools import takewhile
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd import Variable
from torch.autograd.graph import get_gradient_edge
from torch.utils.weak import WeakIdKeyDictionary

from megablocks_core.groups import LOCAL, Group, Specs
from megablocks_core.groups.gradient_shards import hide_sharded
from megablocks_core.parallel.data_parallel.bucket_messages import (
    ShardMessage,
    UsedFlags,
    WholeMessage,
)
from megablocks_core.parallel.data_parallel.bucket_order import BucketOrder
from megablocks_core.parallel.data_parallel.buckets import Bucket, Described, plan_buckets
from megablocks_core.parallel.data_parallel.gradient_buffers import (
    AliasedBuffer,
    CastBuffer,
    HiddenBuffer,
    set_gradient_dtype,
)
from megablocks_core.parallel.data_parallel.graph import reaches, tensors_in
from megablocks_core.parallel.data_parallel.options import check_arguments
from megablocks_core.parallel.wrapping.claims import claim, refuse_claimed, release

BUCKET_BYTES = 25 << 20
# Messages under way at a time where the memory of buckets is freed once they have arrived.
_FLYING = 2


class Reducer:
    """Reduces the gradients of parameters during every backward that reaches them.

    What a backward leaves in ``.grad`` (or, with ``shards``, in ``self.shards``) is the sum
    over all backwards since the gradient was dropped. Under ``no_sync`` nothing is sent, and
    the next backward outside it reduces what has gathered.

    Args:
        named: (name, parameter, specs) as ``marks`` gives them; frozen ones are left out.
        group: The ranks that share the dense parameters.
        expert_group: The ranks that share the experts.
        replicate: With ``shards``: the ranks that hold copies of a dense shard.
        reduction: "sum", or "mean": divided by ``group.size * replicate.size``, experts too.
        reduce_dtype: Sum in this dtype; default float32 for 16-bit parameters, else their own.
        wire_dtype: Send in this 16-bit dtype, and sum in ``reduce_dtype``.
        bucket_bytes: The largest size of a bucket, in bytes of parameters.
        shards: Keep this rank's share of each bucket's sum. ``.grad`` is a stand-in, and set to
            ``None``, on all ranks alike, it drops the parameter's sum.
        keep_full: With ``shards``: keep the buckets' memory. Otherwise it is given back while
            backward goes on, and two dense messages at most are under way.
        wide_gradients: ``.grad`` of 16-bit parameters has the dtype of the sums.

    Attributes:
        names: Of the parameters that are reduced.
        parameters: They themselves.
        buckets: Where they lie; indices of slots count ``parameters``.
        reduces: Whether backward sends anything.
        shards: With ``shards``: for each bucket this rank's sum [length / shares], or ``None``
            where no backward has come since ``drop``.
        after: Called, if set, at the end of every backward that has reduced gradients.
        used: For each parameter, whether any rank has had a gradient since ``drop``.

    Raises:
        ValueError: An argument is none of these, or a parameter is reduced already.
    """

    def __init__(
        self,
        named: Iterable[tuple[str, nn.Parameter, Specs]],
        *,
        group: Group,
        expert_group: Group = LOCAL,
        replicate: Group = LOCAL,
        reduction: str = "mean",
        reduce_dtype: torch.dtype | None = None,
        wire_dtype: torch.dtype | None = None,
        bucket_bytes: int = BUCKET_BYTES,
        shards: bool = False,
        keep_full: bool = True,
        wide_gradients: bool = False,
    ) -> None:
        check_arguments(group, expert_group, replicate, reduction, reduce_dtype, wire_dtype)
        self._group, self._expert_group, self._replicate = group, expert_group, replicate
        self._scale = 1.0 / (group.size * replicate.size) if reduction == "mean" else 1.0
        self._reduce_dtype, self._wire_dtype = reduce_dtype, wire_dtype
        self._cuts, self._keep_full, self._wide = shards, keep_full or not shards, wide_gradients
        trained = [one for one in named if one[1].requires_grad and self._has_work(one[2].expert)]
        refuse_claimed(trained)
        self.names = [name for name, _, _ in trained]
        self.parameters = [parameter for _, parameter, _ in trained]
        self.buckets = self._plan(trained, bucket_bytes)
        self._order = BucketOrder(
            self.buckets, group=group, expert_group=expert_group, replicate=replicate
        )
        self._buffers = [self._buffer(bucket) for bucket in self.buckets]
        self._places = {
            slot.index: (number, place)
            for number, bucket in enumerate(self.buckets)
            for place, slot in enumerate(bucket.slots)
        }
        self._expected = [1] * len(trained)  # contributions of one backward
        self.reduces = True
        self._run: _Run | None = None
        self._leaves = WeakIdKeyDictionary()  # hooked already: whoever returns them does so again
        self.after: Callable[[], None] | None = None
        self.shards: list[Tensor | None] = [None] * len(self.buckets)
        self.used = [False] * len(trained)
        self._hook()

    # Called by wrappers.

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Backward in it sends nothing; this rank's gradients gather."""
        before, self.reduces = self.reduces, False
        try:
            yield
        finally:
            self.reduces = before

    def drop(self) -> None:
        """With ``shards``: forget all sums, this rank's and reduced ones."""
        for buffer in self._buffers:
            buffer.drop()
        self.shards = [None] * len(self.buckets)
        self.used = [False] * len(self.parameters)
        for parameter in self.parameters:
            hide_sharded(parameter)

    def forget_dropped(self) -> None:
        """With ``shards``: forget the reduced sums of parameters whose ``.grad`` was dropped."""
        for index, parameter in enumerate(self.parameters):
            if not self.used[index] or parameter.grad is not None:
                continue
            self.used[index] = False
            number, place = self._places[index]
            bucket, total = self.buckets[number], self.shards[number]
            first, last = bucket.shard(self._group_of(bucket).rank)
            _, start, stop = bucket.slots[place]
            if total is not None and max(start, first) < min(stop, last):
                total[max(start, first) - first : min(stop, last) - first] = 0

    def remove(self) -> None:
        """Take the hooks off; the parameters are plain again."""
        self._remove()

    def holds_own(self) -> bool:
        """Whether gradients have gathered under ``no_sync`` that no backward has reduced yet."""
        return any(buffer.holds_own() for buffer in self._buffers)

    def check(self) -> None:
        """Raise if an earlier backward was broken off; called before a forward pass.

        Raises:
            RuntimeError: It was.
        """
        if self._run is not None and torch._C._current_graph_task_id() == -1:
            raise _broken_off()

    def watch(self, outputs: Any) -> None:
        """Let backward through any of ``outputs`` take part in the reduction.

        So a rank on which no parameter is used does not keep the others waiting.
        """
        for tensor in tensors_in(outputs):
            if tensor.requires_grad and tensor not in self._leaves:
                tensor.register_hook(self._passed)
                if tensor.is_leaf:  # it and its hooks outlive the pass
                    self._leaves[tensor] = None

    # Called by hooks.

    def begin(self) -> None:
        """Begin a backward, if none runs; it ends when torch's engine is done.

        Raises:
            RuntimeError: An earlier backward was broken off by an error.
        """
        task = torch._C._current_graph_task_id()
        if self._run is None:
            if self._cuts:
                self.forget_dropped()
            self._order.start()
            self._run = _Run(self, task)
            Variable._execution_engine.queue_callback(self._finish)
        elif self._run.task != task:
            raise _broken_off()

    def _take(self, index: int, gradient: Tensor | None) -> tuple[None] | None:
        """Take one contribution; torch, told that there is none, leaves ``.grad`` alone."""
        if gradient is None:
            return None
        if gradient.layout != torch.strided or torch.is_grad_enabled():
            kind = "a sparse gradient" if gradient.layout != torch.strided else "create_graph=True"
            raise RuntimeError(f"the gradient of {self.names[index]!r} cannot be reduced: {kind}")
        if self.parameters[index]._post_accumulate_grad_hooks:
            raise RuntimeError(_sees_too_early(self.names[index]))
        if self._run is None:
            self.begin()
        run = self._run
        assert run is not None
        number, place = self._places[index]
        if number in run.messages:
            raise RuntimeError(
                f"{self.names[index]!r} got another gradient in one backward, after its bucket "
                "was sent: a nested backward (use_reentrant=True) uses it again"
            )
        self._buffers[number].take(place, gradient)
        if run.reduces:
            run.counts[index] += 1
            if run.counts[index] == self._expected[index]:
                run.missing[number] -= 1
                if run.missing[number] == 0:
                    for complete in self._order.complete(number):
                        self._send(run, complete)
        return (None,)

    def _passed(self, gradient: Tensor) -> None:
        known = self._run is not None and self._run.task == torch._C._current_graph_task_id()
        if not known and not torch.is_grad_enabled() and self._accumulates():
            self.begin()

    def _accumulates(self) -> bool:
        """Whether this is a backward, and no ``autograd.grad``, which leaves ``.grad`` alone."""
        try:
            if any(map(torch._C._will_engine_execute_node, self._nodes)):
                return True
        except RuntimeError:  # ``autograd.grad`` of a parameter
            return False
        # None of the parameters is reached here, or none was used.
        return not reaches(torch._C._current_autograd_node(), set(self._nodes))

    def _send(self, run: _Run, number: int) -> None:
        bucket, buffer = self.buckets[number], self._buffers[number]
        run.used[number] = buffer.fill()
        group = self._group_of(bucket)
        if self._cuts:
            replicate = LOCAL if bucket.expert else self._replicate
            message = ShardMessage(
                buffer.flat, group=group, replicate=replicate, wire_dtype=self._wire_dtype
            )
        else:
            message = WholeMessage(buffer.flat, group=group, wire_dtype=self._wire_dtype)
        run.messages[number] = message
        run.flying.append(number)
        if not self._keep_full:
            self._land(run, self._due(run, self._order.kinds[number]))

    def _due(self, run: _Run, kind: int) -> list[int]:
        """The messages to be landed before the next one is sent, so that memory is given back.

        Those of the first order are waited for. Experts' with an order of their own are not: ranks
        may come to the two orders in turns of their own, and each would wait for what the other
        is to send after its own wait.
        """
        due = [number for number in run.flying if self._order.kinds[number] == kind][:-_FLYING]
        if kind == 0:
            return due
        return list(takewhile(lambda number: run.messages[number].has_arrived(), due))

    @torch.no_grad()
    def _finish(self) -> None:
        """End the backward; called by torch's engine after all else."""
        run = self._run
        assert run is not None
        if run.reduces:
            for number in self._order.rest():
                self._send(run, number)
            try:
                self._receive(run)
            except RuntimeError as error:
                raise RuntimeError(
                    f"gradients did not arrive over the ranks {list(self._group.ranks)} (experts: "
                    f"{list(self._expert_group.ranks)}): a rank has died, raised in backward, or "
                    f"not called it: {error}"
                ) from error
            self._expected = list(map(max, self._expected, run.counts))
            if not self._order.known:
                self._order.agree()
            if self.after is not None:
                self.after()
        else:
            for buffer in self._buffers:
                buffer.keep()
        self._run = None

    def _receive(self, run: _Run) -> None:
        flags = self._flags(run)
        self._land(run, list(run.flying))
        for number in run.messages:
            used = flags[self.buckets[number].expert].of(number)
            self._buffers[number].give(used)
            for slot, any_rank in zip(self.buckets[number].slots, used, strict=True):
                self.used[slot.index] |= any_rank
        for some in flags.values():
            some.wait()

    def _land(self, run: _Run, numbers: list[int]) -> None:
        """Wait for messages, in the order in which they were sent; take over shards."""
        for number in numbers:
            run.messages[number].go_on()
        for number in numbers:
            run.flying.remove(number)
            message = run.messages[number]
            message.finish()
            if isinstance(message, ShardMessage):
                total = self.shards[number]
                self.shards[number] = message.own if total is None else total.add_(message.own)
                if not self._keep_full:
                    self._buffers[number].free()

    def _flags(self, run: _Run) -> dict[bool, UsedFlags]:
        """One message for dense parameters, one for experts."""
        flags = {}
        for expert in (False, True):
            own = {n: used for n, used in run.used.items() if self.buckets[n].expert == expert}
            if own:
                flags[expert] = UsedFlags(
                    own,
                    group=self._expert_group if expert else self._group,
                    replicate=LOCAL if expert else self._replicate,
                    device=self.buckets[next(iter(own))].device,
                )
        return flags

    # The plan.

    def _group_of(self, bucket: Bucket) -> Group:
        return self._expert_group if bucket.expert else self._group

    def _has_work(self, expert: bool) -> bool:
        group = self._expert_group if expert else self._group
        return self._cuts or group.size > 1 or self._scale != 1.0

    def _sum_dtype(self, dtype: torch.dtype) -> torch.dtype:
        return self._reduce_dtype or (torch.float32 if dtype.itemsize < 4 else dtype)

    def _plan(
        self, trained: list[tuple[str, nn.Parameter, Specs]], bucket_bytes: int
    ) -> list[Bucket]:
        described = [
            Described(index, one.numel(), one.dtype, one.device, specs.expert)
            for index, (_, one, specs) in enumerate(trained)
        ]
        cut = self._cuts or self._wire_dtype is not None
        return plan_buckets(
            described,
            bucket_bytes=bucket_bytes,
            shares=self._group.size if cut else 1,
            expert_shares=self._expert_group.size if cut else 1,
        )

    def _buffer(self, bucket: Bucket) -> AliasedBuffer | CastBuffer | HiddenBuffer:
        dtype = self._sum_dtype(bucket.dtype)
        shown = dtype if self._wide else bucket.dtype
        kind = HiddenBuffer if self._cuts else AliasedBuffer if shown == dtype else CastBuffer
        parameters = [self.parameters[slot.index] for slot in bucket.slots]
        for parameter in parameters:
            if not self._cuts:
                set_gradient_dtype(parameter, shown)
        return kind(bucket, parameters, dtype=dtype, scale=self._scale)

    def _hook(self) -> None:
        """Hook every parameter, for as long as this reducer lives."""
        for name, parameter in zip(self.names, self.parameters, strict=True):
            if parameter._post_accumulate_grad_hooks:
                raise ValueError(_sees_too_early(name))
        # The hooks go with the nodes, which live as long as somebody holds them.
        self._nodes = [get_gradient_edge(parameter).node for parameter in self.parameters]
        this: weakref.ref[Reducer] = weakref.ref(self)
        handles = []
        for index, (node, parameter) in enumerate(zip(self._nodes, self.parameters, strict=True)):
            handles.append(node.register_prehook(_hook(this, index)))
            claim(parameter, self)
        self._remove = weakref.finalize(self, _unhook, handles, self.parameters)


class _Run:
    """One backward: what has come, and what was sent."""

    def __init__(self, reducer: Reducer, task: int) -> None:
        self.task, self.reduces = task, reducer.reduces
        self.counts = [0] * len(reducer.parameters)
        self.missing = [len(bucket.slots) for bucket in reducer.buckets]
        self.messages: dict[int, WholeMessage | ShardMessage] = {}
        self.flying: list[int] = []  # buckets whose messages nobody has waited for
        self.used: dict[int, list[bool]] = {}


def _hook(this: weakref.ref[Reducer], index: int) -> Callable[[tuple[Tensor | None]], Any]:
    def hook(gradients: tuple[Tensor | None]) -> tuple[None] | None:
        reducer = this()
        return None if reducer is None else reducer._take(index, gradients[0])

    return hook


def _unhook(handles: list[Any], parameters: list[nn.Parameter]) -> None:
    for handle in handles:
        handle.remove()
    for parameter in parameters:
        release(parameter)


def _sees_too_early(name: str) -> str:
    return (
        f"parameter {name!r} must have no hook of register_post_accumulate_grad_hook: torch would "
        "call it before the gradient is reduced"
    )


def _broken_off() -> RuntimeError:
    return RuntimeError(
        "an earlier backward of this module was broken off by an error, and the ranks' messages "
        "no longer match: end the run, or build the groups and the wrapper anew"
    )
