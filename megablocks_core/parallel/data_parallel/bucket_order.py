"""In which order buckets are sent: one that all ranks share, so that messages meet their own."""

from __future__ import annotations

from collections.abc import Sequence

from megablocks_core.groups import LOCAL, Group
from megablocks_core.parallel.data_parallel.buckets import Bucket


class BucketOrder:
    """The order of dense buckets and that of experts', each agreed by the ranks that reduce it.

    There is one order for both if they share a process group, where messages must not cross.

    Until the first backward is over, buckets are sent at its end, in the order of the plan. From
    then on they are sent as soon as they are complete, but in the order in which they were
    complete on the first rank in the first backward.

    Attributes:
        known: Whether that order is known.
        kinds: For each bucket, which of the orders it stands in.
    """

    def __init__(
        self,
        buckets: Sequence[Bucket],
        *,
        group: Group,
        expert_group: Group,
        replicate: Group = LOCAL,
    ) -> None:
        self.known = False
        joined = expert_group.ranks in (group.ranks, replicate.ranks)
        self.kinds = [int(bucket.expert and not joined) for bucket in buckets]
        self._groups = ((group, replicate), (expert_group,))
        self._queues = [
            [index for index, kind in enumerate(self.kinds) if kind == wanted] for wanted in (0, 1)
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
        kind = self.kinds[index]
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
        """After the first backward: take one rank's order of completion; incomplete ones last."""
        for kind, (queue, groups) in enumerate(zip(self._queues, self._groups, strict=True)):
            if queue:
                done = [index for index in self._complete if self.kinds[index] == kind]
                done += [index for index in queue if index not in self._complete]
                for group in groups:
                    done = group.broadcast_object(done)
                self._queues[kind] = done
        self.known = True
