"""A module's parameters while their memory is being filled: whoever reads them waits.

Every way to a parameter through its module (an attribute, ``parameters()``, ``state_dict()``,
marks, a forward pass, copies) reads the module's dict ``_parameters``. While messages are in
flight a dict stands there that waits when a value is read, and gives its place back.
"""

from __future__ import annotations

from collections.abc import Callable, ItemsView, Iterator, KeysView, ValuesView
from typing import Any

from torch import nn


class LateParameters(dict[str, nn.Parameter | None]):
    """Stands in for ``owner._parameters`` until a value is read.

    The dict itself is empty, so that code which reads dicts past their methods (a compiler's
    guards) finds no parameter that is not there yet.

    Args:
        owner: The module.
        wait: Returns when the memory of its parameters is filled.
    """

    def __init__(self, owner: nn.Module, wait: Callable[[], None]) -> None:
        super().__init__()
        self._owner, self._wait, self._plain = owner, wait, owner._parameters
        owner.__dict__["_parameters"] = self

    def settled(self) -> dict[str, nn.Parameter | None]:
        """Wait, and give the place back to the module's own dict."""
        if self._owner.__dict__["_parameters"] is self:
            self._wait()
            self._owner.__dict__["_parameters"] = self._plain
        return self._plain

    # Names are known; only values come late.

    def __contains__(self, name: object) -> bool:
        return name in self._plain

    def __len__(self) -> int:
        return len(self._plain)

    def __iter__(self) -> Iterator[str]:
        return iter(self._plain)

    def keys(self) -> KeysView[str]:
        """The names."""
        return self._plain.keys()

    def __getitem__(self, name: str) -> nn.Parameter | None:
        return self.settled()[name]

    def __setitem__(self, name: str, value: nn.Parameter | None) -> None:
        self.settled()[name] = value

    def __delitem__(self, name: str) -> None:
        del self.settled()[name]

    def get(self, name: str, default: Any = None) -> Any:
        """One value."""
        return self.settled().get(name, default)

    def values(self) -> ValuesView[nn.Parameter | None]:
        """All of them."""
        return self.settled().values()

    def items(self) -> ItemsView[str, nn.Parameter | None]:
        """With their names."""
        return self.settled().items()

    def pop(self, *arguments: Any) -> Any:
        """Take one away."""
        return self.settled().pop(*arguments)

    def popitem(self) -> tuple[str, nn.Parameter | None]:
        """Take the last away."""
        return self.settled().popitem()

    def setdefault(self, name: str, default: Any = None) -> Any:
        """One value, set if there is none."""
        return self.settled().setdefault(name, default)

    def update(self, *arguments: Any, **values: Any) -> None:
        """Set several."""
        self.settled().update(*arguments, **values)

    def clear(self) -> None:
        """Take all away."""
        self.settled().clear()

    def copy(self) -> dict[str, nn.Parameter | None]:
        """A plain dict."""
        return self.settled().copy()

    def __eq__(self, other: object) -> bool:
        return self.settled() == other

    def __or__(self, other: Any) -> Any:
        return self.settled() | other

    def __ior__(self, other: Any) -> Any:
        plain = self.settled()
        plain |= other
        return plain

    def __reduce_ex__(self, protocol: Any) -> tuple[Any, ...]:
        return (dict, (self.settled(),))

    def __repr__(self) -> str:
        return repr(self.settled())

    __hash__ = None  # type: ignore[assignment]
