"""Read a pickle that may be hostile: only named classes are made, and those are ours.

A pickle is a program that calls what it names. This is a machine for the few operations that
torch's pickles need. Each name that one may use stands for a harmless stand-in of this library; any
other name, and any other operation, is refused, so nothing of torch or of anyone else is called.
Python's own machine is not used: a few bytes can make it take all memory, or hash a key for ever.
"""

from __future__ import annotations

import pickletools
from collections.abc import Callable, Mapping
from typing import Any

import torch

from megablocks_core.ckpt.manifest import CheckpointError

Names = Mapping[tuple[str, str], Callable[..., Any] | torch.dtype | None]


class Record:
    """Stands for an object with attributes, or with a state that is no dict."""

    state: Any = None

    def __setstate__(self, state: Any) -> None:
        if isinstance(state, dict) and all(type(key) is str for key in state):
            self.__dict__.update(state)
        else:
            self.state = state


_LITERALS = {"BININT", "BININT1", "BININT2", "LONG1", "BINFLOAT"} | {
    "BINUNICODE",
    "SHORT_BINUNICODE",
    "BINUNICODE8",
}
_NEW: dict[str, Callable[[], Any]] = {
    "NONE": lambda: None,
    "NEWTRUE": lambda: True,
    "NEWFALSE": lambda: False,
    "EMPTY_DICT": dict,
    "EMPTY_LIST": list,
    "EMPTY_TUPLE": tuple,
}
_SHORT_TUPLES = {"TUPLE1": 1, "TUPLE2": 2, "TUPLE3": 3}


class _Machine:
    """Runs one pickle. What ``_op_...`` does is what the operation of that name does."""

    def __init__(self, names: Names, load_storage: Callable[[Any], Any] | None) -> None:
        self._names, self._load_storage = names, load_storage
        self._stack: list[Any] = []
        self._marks: list[int] = []
        self._memo: dict[int, Any] = {}

    def run(self, data: bytes) -> Any:
        """The object that the pickle makes."""
        actions = dict.fromkeys(_LITERALS, self._stack.append)
        for name in dir(self):
            if name.startswith("_op_"):
                actions[name.removeprefix("_op_").upper()] = getattr(self, name)
        for opcode, argument, _ in pickletools.genops(data):
            name = opcode.name
            if name in actions:
                actions[name](argument)
            elif name in _NEW:
                self._stack.append(_NEW[name]())
            elif name in _SHORT_TUPLES:
                self._stack.append(tuple(self._take(_SHORT_TUPLES[name])))
            elif name != "STOP":
                raise ValueError(f"it has the operation {name}, which is not allowed")
        return self._stack.pop()

    def _op_proto(self, _: Any) -> None:
        pass

    _op_frame = _op_proto

    def _op_binget(self, place: int) -> None:
        self._stack.append(self._memo[place])

    _op_long_binget = _op_binget

    def _op_binput(self, place: int) -> None:
        self._memo[place] = self._stack[-1]

    _op_long_binput = _op_binput

    def _op_memoize(self, _: Any) -> None:
        self._op_binput(len(self._memo))

    def _op_mark(self, _: Any) -> None:
        self._marks.append(len(self._stack))

    def _take(self, count: int) -> list[Any]:
        """The last values of the stack, down to the last mark at most."""
        start = len(self._stack) - count
        if start < (self._marks[-1] if self._marks else 0):
            raise ValueError("it takes more than there is")
        values = self._stack[start:]
        del self._stack[start:]
        return values

    def _take_marked(self) -> list[Any]:
        values = self._take(len(self._stack) - self._marks[-1])
        self._marks.pop()
        return values

    def _op_tuple(self, _: Any) -> None:
        self._stack.append(tuple(self._take_marked()))

    def _op_append(self, _: Any) -> None:
        self._extend(self._take(1))

    def _op_appends(self, _: Any) -> None:
        self._extend(self._take_marked())

    def _extend(self, values: list[Any]) -> None:
        if type(self._stack[-1]) is not list:
            raise ValueError("it appends to what is no list")
        self._stack[-1].extend(values)

    def _op_setitem(self, _: Any) -> None:
        self._update(self._take(2))

    def _op_setitems(self, _: Any) -> None:
        self._update(self._take_marked())

    def _update(self, values: list[Any]) -> None:
        if type(self._stack[-1]) is not dict or len(values) % 2:
            raise ValueError("it sets an item of what is no dict")
        for key, value in zip(values[::2], values[1::2], strict=True):
            if not isinstance(key, str | int | Record):
                raise ValueError(f"a key is of {type(key).__name__}, which is not allowed")
            self._stack[-1][key] = value

    def _op_global(self, argument: str) -> None:
        self._stack.append(self._named(*argument.split(" ", 1)))

    def _op_stack_global(self, _: Any) -> None:
        self._stack.append(self._named(*self._take(2)))

    def _named(self, module: Any, name: Any) -> Any:
        if type(module) is not str or type(name) is not str:
            raise ValueError("a name is no text")
        if (module, name) in self._names:
            return self._names[module, name]
        value = getattr(torch, name, None) if module == "torch" else None
        if isinstance(value, torch.dtype):
            return value
        raise ValueError(f"it names {module}.{name}, which is not allowed")

    def _op_reduce(self, _: Any) -> None:
        function, arguments = self._take(2)
        if not callable(function) or type(arguments) is not tuple:
            raise ValueError("it calls what is no function")
        self._stack.append(function(*arguments))

    def _op_newobj(self, _: Any) -> None:
        made, arguments = self._take(2)
        if not isinstance(made, type) or not issubclass(made, Record) or arguments != ():
            raise ValueError("it makes an object of what is no class")
        self._stack.append(made())

    def _op_build(self, _: Any) -> None:
        (state,) = self._take(1)
        if not isinstance(self._stack[-1], Record):
            raise ValueError("it gives a state to what has none")
        Record.__setstate__(self._stack[-1], state)

    def _op_binpersid(self, _: Any) -> None:
        if self._load_storage is None:
            raise ValueError("it names a storage")
        (pid,) = self._take(1)
        self._stack.append(self._load_storage(pid))


def load_pickle(
    data: bytes, what: str, names: Names, *, load_storage: Callable[[Any], Any] | None = None
) -> Any:
    """The object in a pickle.

    It takes no more memory and time than the pickle is long. What is in it may be shared many
    times over, so it must not be printed or compared as a whole.

    Args:
        data: The pickle.
        what: What to call it in an error.
        names: For each (module, name) that it may use, what stands for it. dtypes of torch are
            always allowed.
        load_storage: Makes an object of a persistent id.

    Raises:
        CheckpointError: It names or does anything else, or is damaged.
    """
    try:
        return _Machine(names, load_storage).run(data)
    except Exception as error:  # a damaged pickle raises anything
        reason = str(error) or type(error).__name__
        raise CheckpointError(f"{what} is not read: {reason[:300]}") from error
