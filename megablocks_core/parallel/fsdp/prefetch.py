"""The order in which units run: recorded in one step, then a place and a successor for each."""

from __future__ import annotations

from collections.abc import Sequence


class IndexedOrder:
    """An order of units with the place of each.

    A unit that comes more than once has no single successor.
    """

    def __init__(self, units: Sequence[int]) -> None:
        self._units = tuple(units)
        self._places: dict[int, int] = {}
        for place, unit in enumerate(units):
            self._places[unit] = -1 if unit in self._places else place

    def place(self, unit: int) -> int | None:
        """Where ``unit`` comes; ``None`` for one that does not, or more than once."""
        found = self._places.get(unit, -1)
        return None if found < 0 else found

    def successor(self, unit: int) -> int | None:
        """The unit after ``unit``, if both come once."""
        place = self.place(unit)
        if place is None or place + 1 == len(self._units):
            return None
        following = self._units[place + 1]
        return None if self.place(following) is None else following


class Recording:
    """Takes down the units of one step, forward and backward, as they begin."""

    def __init__(self) -> None:
        self.forward: list[int] = []
        self.backward: list[int] = []

    def orders(self) -> tuple[IndexedOrder, IndexedOrder]:
        """The forward and the backward order."""
        return IndexedOrder(self.forward), IndexedOrder(self.backward)
