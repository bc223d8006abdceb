"""In which order buckets are sent: one that all ranks share, so that messages meet their own."""

from __future__ import annotations

from collections.abc import Sequence

from megablocks_core.groups import Group
from megablocks_core.parallel.buckets import Bucket


class BucketOrder:
    """The order of dense buckets and that of experts', each agreed by the ranks that reduce it.

    Until the first backward is over, buckets are sent at its end, in the order of the plan. From
    then on they are sent as soon as they are complete, but in the order in which they were
    complete on rank 0 in the first backward.

    Attributes:
        known: Whether that order is known.
    """

    def __init__(self, buckets: Sequence[Bucket], *, group: Group, expert_group: Group) -> None:
        self.known = False
        self._groups = (group, expert_group)
        # Messages of one group need one order, also where experts are copied on all its ranks.
        apart = group.size == 1 or group != expert_group
        self._kinds = [int(bucket.expert and apart) for bucket in buckets]
        self._queues = [
            [index for index, kind in enumerate(self._kinds) if kind == wanted] for wanted in (0, 1)
        ]
        self.start()

    def start(self) -> None:
        """Begin a backward: nothing is complete, nothing sent."""
        self._next = [0, 0]
        self._complete: dict[int, None] = {}

    def complete(self, index: int) -> list[int]:
        """Note that a bucket is complete; the buckets that are to be sent now, in order."""
        self._complete[index] = None
        if not self.known:
            return []
        kind = self._kinds[index]
        queue, sent = self._queues[kind], self._next[kind]
        while self._next[kind] < len(queue) and queue[self._next[kind]] in self._complete:
            self._next[kind] += 1
        return queue[sent : self._next[kind]]

    def rest(self) -> list[int]:
        """The buckets that are still to be sent, in order."""
        rest = [queue[sent:] for queue, sent in zip(self._queues, self._next, strict=True)]
        self._next = [len(queue) for queue in self._queues]
        return [index for part in rest for index in part]

    def agree(self) -> None:
        """After the first backward: take rank 0's order of completion; incomplete ones last."""
        for kind, (queue, group) in enumerate(zip(self._queues, self._groups, strict=True)):
            if queue:
                done = [index for index in self._complete if self._kinds[index] == kind]
                done += [index for index in queue if index not in self._complete]
                self._queues[kind] = group.broadcast_object(done)
        self.known = True
