"""Reads pickles that hold data alone.

[Note: pickles as data]
A pickle is a program for a stack machine, two of whose instructions call what the file names: REDUCE calls, BUILD sets
the state of what was made. ``torch.load(weights_only=True)`` allows both for torch's own functions and classes, some of
which return memory that nobody has written (``torch.FloatTensor(64)``; a tensor whose strides go beyond its storage).
Here a name in a file stands for a :class:`Function` of this package, which checks what it is given, or for a value.
No class is looked up anywhere, and nothing but containers, numbers, text, tensors and arrays can be made.
Instructions that are in no state dict are refused. What is made takes memory in proportion to the pickle: lengths that
it claims are those of bytes that are there, and what is given to functions again and again is counted (a few bytes
that double a text thirty times are a gigabyte).
"""

from __future__ import annotations

import pickletools
from collections import Counter, OrderedDict
from collections.abc import Callable
from typing import IO, Any, TypeAlias

from ...types import AnyCallable, Memo, SavedState, Tree

_VALUES = {
    "BININT",
    "BININT1",
    "BININT2",
    "LONG1",
    "LONG4",
    "BINFLOAT",
    "BINUNICODE",
    "SHORT_BINUNICODE",
    "SHORT_BINSTRING",
    "BINSTRING",
    "BINBYTES",
    "SHORT_BINBYTES",
}
_CONSTANTS = {"NONE": None, "NEWTRUE": True, "NEWFALSE": False, "EMPTY_TUPLE": ()}
Data: TypeAlias = Any
"""A value of a file, of which nothing is known."""

_EMPTY: dict[str, Callable[[], object]] = {"EMPTY_DICT": dict, "EMPTY_LIST": list, "EMPTY_SET": set}
_PUT = frozenset({"BINPUT", "LONG_BINPUT"})
_GET = frozenset({"BINGET", "LONG_BINGET"})
_TUPLES = {"TUPLE": None, "TUPLE1": 1, "TUPLE2": 2, "TUPLE3": 3}
_MAPPINGS = (dict, OrderedDict, Counter)
_KEYS = (str, int, float, bool, bytes, type(None))
_SIZED = (str, bytes, bytearray, list, tuple, dict)
_GIVEN = 1 << 16  # elements that functions may be given in any case
# Python 2's names, which protocol 2 keeps.
_MODERN = {"__builtin__": "builtins"}


class NotData(Exception):
    """A pickle holds more than data; the arguments are what it names, or does."""


class Function:
    """Stands for a function that a file names. The machine calls nothing else."""

    def __init__(self, call: AnyCallable) -> None:
        self.call = call


class Instance:
    """An object of a class that a file names, as data: equal to itself alone, and without methods.

    Attributes:
        state: as the file sets it.
    """

    __slots__ = ("kind", "state")

    def __init__(self, kind: str) -> None:
        self.kind = kind
        self.state: Data = None

    def get(self, name: str) -> Data:
        """Returns an attribute; None if there is none."""
        return self.state.get(name) if type(self.state) is dict else None


class PickleHandle:
    """A value that the machine works with and no result holds, like :class:`Function`: a storage, a class by name."""


def named_globals(source: IO[bytes]) -> set[str]:
    """Returns all that a pickle names, without interpreting it."""
    names = set()
    for opcode, argument, _ in pickletools.genops(source):
        if opcode.name in ("GLOBAL", "INST"):
            names.add(_dotted(argument))
        elif opcode.name == "STACK_GLOBAL":
            names.add("STACK_GLOBAL (write it with torch's own pickle protocol, 2)")
    return names


def _dotted(argument: object) -> str:
    module, _, name = str(argument).partition(" ")
    return f"{_MODERN.get(module, module)}.{name}"


class PickleMachine:
    """Reads one pickle.

    Args:
        names: what names in the file (``module.name``) are: a :class:`Function`, a :class:`PickleHandle`, or a value.
        storage: returns the storage that a persistent id stands for.
        build: sets the state of an object that a function returned; raises NotData for any other.
    """

    def __init__(
        self,
        names: SavedState,
        storage: Callable[[tuple[object, ...]], Data],
        build: Callable[[object, object], None],
    ) -> None:
        self._names, self._storage, self._build = names, storage, build
        self._stack: list[object] = []
        self._below: list[list[object]] = []
        self._memo: Memo = {}
        self._at = self._given = 0  # bytes read; elements that functions were given
        self._operations: dict[str, Callable[[object], None]] = {
            "GLOBAL": self._global,
            "STACK_GLOBAL": self._global_on_stack,
            "REDUCE": self._reduce,
            "NEWOBJ": self._reduce,
            "BUILD": self._set_state,
            "BINPERSID": self._persistent,
            "MEMOIZE": self._memoize,
            "MARK": self._mark,
            "APPEND": lambda _: self._extend(self._last(1)),
            "APPENDS": lambda _: self._extend(self._since_mark()),
            "SETITEM": lambda _: self._set_items(self._last(2)),
            "SETITEMS": lambda _: self._set_items(self._since_mark()),
        }

    def run(self, source: IO[bytes]) -> Tree:
        """Returns the object of a pickle. ``source`` stands behind its end afterwards."""
        argument: Data
        for opcode, argument, position in pickletools.genops(source):
            name, self._at = opcode.name, position or 0
            if name in _VALUES:
                self._stack.append(argument)
            elif name in _PUT:
                self._memo[argument] = self._stack[-1]
            elif name in _GET:
                self._stack.append(self._memo[argument])
            elif name in self._operations:
                self._operations[name](argument)
            elif name in _CONSTANTS:
                self._stack.append(_CONSTANTS[name])
            elif name in _EMPTY:
                self._stack.append(_EMPTY[name]())
            elif name in _TUPLES:
                self._tuple(_TUPLES[name])
            elif name == "STOP":
                return _kept(self._stack.pop())
            elif name not in ("PROTO", "FRAME"):
                raise NotData(f"the instruction {name}")
        raise ValueError("it has no end")

    # ------------------------------------------------------------ what calls
    def _global(self, argument: object) -> None:
        name = _dotted(argument)
        if name not in self._names:
            raise NotData(name)
        self._stack.append(self._names[name])

    def _global_on_stack(self, _: object) -> None:
        name, module = self._stack.pop(), self._stack.pop()
        if type(name) is not str or type(module) is not str:
            raise NotData("a name that is no text")
        self._global(f"{module} {name}")

    def _reduce(self, _: object) -> None:
        arguments = self._stack.pop()
        function = self._stack[-1]
        if type(function) is not Function or type(arguments) is not tuple:
            raise NotData("a call of what is no function")
        self._count(arguments)
        self._stack[-1] = function.call(*arguments)

    def _set_state(self, _: object) -> None:
        state = self._stack.pop()
        if type(self._stack[-1]) is not Instance:  # it keeps what it gets, others copy
            self._count(state if type(state) is tuple else (state,))
        self._build(self._stack[-1], state)

    def _count(self, given: tuple[Data, ...]) -> None:
        """Refuses the same elements being given to functions over and over, each of which may copy them."""
        self._given += sum(len(value) for value in given if isinstance(value, _SIZED))
        if self._given > _GIVEN + 4 * self._at:
            raise NotData(f"calls that are given {self._given} elements by {self._at} bytes")

    def _persistent(self, _: object) -> None:
        name = self._stack.pop()
        if type(name) is not tuple:
            raise NotData("a reference to an object outside of the file")
        self._stack.append(self._storage(name))

    def _memoize(self, _: object) -> None:
        self._memo[len(self._memo)] = self._stack[-1]

    # ------------------------------------------------------------ containers
    def _mark(self, _: object) -> None:
        self._below.append(self._stack)
        self._stack = []

    def _since_mark(self) -> list[object]:
        items, self._stack = self._stack, self._below.pop()
        return items

    def _last(self, count: int) -> list[object]:
        items = self._stack[-count:]
        del self._stack[-count:]
        if len(items) < count:
            raise IndexError("more elements than there are")
        return items

    def _tuple(self, count: int | None) -> None:
        items = tuple(self._since_mark() if count is None else self._last(count))
        self._stack.append(items)

    def _extend(self, items: list[object]) -> None:
        if type(self._stack[-1]) is not list:
            raise ValueError("appends to what is no list")
        self._stack[-1].extend(map(_kept, items))

    def _set_items(self, items: list[object]) -> None:
        target: Data = self._stack[-1]
        if len(items) % 2:
            raise ValueError("a key without a value")
        if type(target) not in _MAPPINGS:
            raise ValueError("sets an item of what is no dict")
        for key, value in zip(items[::2], items[1::2], strict=True):
            target[key_of(key)] = _kept(value)


def _kept(value: object) -> Data:
    if isinstance(value, Function | PickleHandle):
        raise NotData("a function, a class or a storage by itself")
    return value


def key_of(value: object) -> Data:
    """Returns a key of a dict or an element of a set if it is plain: hashing any other could take for ever, or call."""
    plain = isinstance(value, (*_KEYS, Instance)) or type(value).__module__ == "torch"
    if not plain and not (type(value) is tuple and all(isinstance(v, _KEYS) for v in value)):
        raise NotData(f"a key of type {type(value).__name__}")
    return value
