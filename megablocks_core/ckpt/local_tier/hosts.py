"""Which ranks keep a copy of whose part. Pure arithmetic."""

from __future__ import annotations

from collections.abc import Sequence


def partners(hosts: Sequence[str], copies: int) -> list[list[int]]:
    """For each rank, the ranks that keep a copy of its part, every one on another host.

    Rank number i of a host has its copies on the next hosts, round about, each time on the rank
    with the same number there; where a host has fewer ranks they are counted round about too.

    Args:
        hosts: The host of each rank; ranks of one host need not be neighbours.
        copies: How many.

    Raises:
        ValueError: There are not as many other hosts.
    """
    members: dict[str, list[int]] = {}
    for rank, host in enumerate(hosts):
        members.setdefault(host, []).append(rank)
    if not 0 <= copies < len(members):
        raise ValueError(
            f"copies={copies} must be from 0 to {len(members) - 1}, the number of other hosts of "
            f"the {len(members)} that the ranks are on"
        )
    names = list(members)
    found = []
    for rank, host in enumerate(hosts):
        place, number = names.index(host), members[host].index(rank)
        others = [members[names[(place + step) % len(names)]] for step in range(1, copies + 1)]
        found.append([ranks[number % len(ranks)] for ranks in others])
    return found
