"""How benchmarks measure: two pieces of work in turns, in one process tree, and one schema.

A round times both, the first one first in every second round. After 8 warm-ups the ratio is the
median of the rounds' ratios, so that a machine whose speed drifts still gives a figure. On
several ranks a round takes as long as its slowest rank.
"""

import json
import tempfile
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch.distributed import FileStore  # pyright: ignore[reportPrivateImportUsage]
from torch.multiprocessing.spawn import spawn

from megablocks_core.groups import LOCAL, Group

WARM_UPS, ROUNDS = 8, 21

Work = Callable[[], Any]


class Times(NamedTuple):
    """Seconds of both sides in each round."""

    ours: list[float]
    peer: list[float]


@dataclass(frozen=True)
class Result:
    """One line of JSON.

    Attributes:
        benchmark: The mirrored module, such as "parallel/linear".
        peer: What ours is compared with.
        case: The sizes.
        ranks: Processes that communicate.
        threads: Threads of each.
        ours_ms: Median time of ours.
        peer_ms: Median time of the peer.
        ratio: Median of the rounds' ours / peer.
        limit: The ratio promised, if one is.
    """

    benchmark: str
    peer: str
    case: Mapping[str, int | str]
    ranks: int
    threads: int
    ours_ms: float
    peer_ms: float
    ratio: float
    limit: float | None


def report(
    times: Times,
    *,
    benchmark: str,
    peer: str,
    case: Mapping[str, int | str],
    limit: float | None = None,
    threads: int = 1,
    group: Group = LOCAL,
) -> None:
    """Print one result, on the first rank."""
    ratios = [ours / peer for ours, peer in zip(*times, strict=True)]
    ours_ms, peer_ms = (round(1e3 * median(seconds), 4) for seconds in times)
    ratio = round(median(ratios), 3)
    result = Result(benchmark, peer, case, group.size, threads, ours_ms, peer_ms, ratio, limit)
    if group.rank == 0:
        print(json.dumps(asdict(result)), flush=True)


def take_turns(
    ours: Work, peer: Work, *, repeats: int = 1, rounds: int = ROUNDS, group: Group = LOCAL
) -> Times:
    """Time ``repeats`` runs of both in every round, one after the other."""
    seconds_R2 = torch.empty(WARM_UPS + rounds, 2, dtype=torch.float64)
    for index in range(WARM_UPS + rounds):
        for side in (0, 1) if index % 2 else (1, 0):
            group.barrier()
            seconds_R2[index, side] = _seconds((ours, peer)[side], repeats)
    seconds_2R = group.all_reduce(seconds_R2[WARM_UPS:], "max").T
    return Times(*seconds_2R.tolist())


def _seconds(work: Work, repeats: int) -> float:
    start = time.perf_counter()
    for _ in range(repeats):
        work()
    return (time.perf_counter() - start) / repeats


def on_ranks(body: Callable[[Group], None], size: int = 2) -> None:
    """Run ``body`` on every rank of a gloo world, each with one thread."""
    with tempfile.TemporaryDirectory() as folder:
        spawn(_rank, (body, size, folder), nprocs=size)


def _rank(rank: int, body: Callable[[Group], None], size: int, folder: str) -> None:
    torch.set_num_threads(1)
    store = FileStore(str(Path(folder) / "store"), size)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=size)
    body(Group.of(dist.group.WORLD))
    dist.destroy_process_group()
