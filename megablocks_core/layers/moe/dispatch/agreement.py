"""What ranks that exchange tokens must hold alike, compared before anything else is sent.

A message that one rank sends and another does not, or that is of another size there, makes ranks
wait or ends their processes without a word. So a small message of a fixed size goes first.
"""

from collections.abc import Mapping, Sequence

import torch

from megablocks_core.groups import Group
from megablocks_core.parallel.checks import require

REFUSED = "refused"
_DTYPES = (torch.float64, torch.float32, torch.bfloat16, torch.float16)


def agree(facts: Mapping[str, int], *, groups: Sequence[Group], device: torch.device) -> None:
    """Return once all ranks have come with equal numbers under the same names.

    A rank that raises instead of exchanging tokens comes with ``REFUSED`` set, so that none waits.

    Sends an all-reduce of 16 bytes a fact over each group of more than one rank. No value is read
    on the host unless it differs.

    Args:
        facts: Name to number.
        groups: Together they hold all ranks; each rank comes to them in this order.
        device: Of the message.

    Raises:
        ValueError: Numbers differ; on every rank, with their names. In compiled code and on a GPU
            it is torch's asynchronous assertion.
    """
    own = torch.tensor([*facts.values()], device=device)
    both = torch.cat([own, -own])
    for group in groups:
        if group.size > 1:
            both = group.all_reduce(both, "max")
    highest, lowest = both.chunk(2)
    lowest = -lowest
    message = f"{', '.join(facts)} must be equal on all ranks"
    require(
        (highest == lowest).all(),
        message,
        lambda: _differences(facts, lowest.tolist(), highest.tolist()),
    )


def number_of(dtype: torch.dtype) -> int:
    """A number that stands for a dtype."""
    return _DTYPES.index(dtype) if dtype in _DTYPES else -1


def _name(number: int) -> str:
    return {-2: "off", -1: "another"}.get(number) or str(_DTYPES[number])


def _differences(facts: Mapping[str, int], lowest: list[int], highest: list[int]) -> str:
    parts = {}
    for (name, own), low, high in zip(facts.items(), lowest, highest, strict=True):
        if low != high:
            write = _name if name in ("autocast", "dtype") else str
            rule = f"must be equal on all ranks, which have from {write(low)} to {write(high)}"
            parts[name] = f"{name}={write(own)} {rule}"
    if REFUSED in parts:
        return "a rank refused its arguments, as its own error says"
    return "; ".join(parts.values())
