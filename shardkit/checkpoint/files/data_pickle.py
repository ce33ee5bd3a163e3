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

import dataclasses
import functools
import pickletools
from collections import Counter, OrderedDict
from collections.abc import Callable
from typing import IO, Any, TypeAlias

import torch
from torch import nn

from ...types import AnyCallable, Memo, SavedState, StateDict, Tree

_VALUES = {"BININT", "BININT1", "BININT2", "LONG1", "LONG4", "BINFLOAT", "BINUNICODE", "SHORT_BINUNICODE"}
_VALUES |= {"SHORT_BINSTRING", "BINSTRING", "BINBYTES", "SHORT_BINBYTES"}
_CONSTANTS = {"NONE": None, "NEWTRUE": True, "NEWFALSE": False, "EMPTY_TUPLE": ()}
Data: TypeAlias = Any
"""A value of a file, of which nothing is known."""

_EMPTY: dict[str, Callable[[], object]] = {"EMPTY_DICT": dict, "EMPTY_LIST": list, "EMPTY_SET": set}
_PUT = frozenset({"BINPUT", "LONG_BINPUT"})
_GET = frozenset({"BINGET", "LONG_BINGET"})
# of so many elements; 0: of those since the mark
_TUPLES = {"TUPLE": 0, "TUPLE1": 1, "TUPLE2": 2, "TUPLE3": 3}
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
                items = self._last(_TUPLES[name]) if _TUPLES[name] else self._since_mark()
                self._stack.append(tuple(items))
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


# ------------------------------------------------------------ what names in files of torch.save stand for
# Functions that make tensors and arrays of checked parts.

STORAGES = {
    "Double": torch.float64,
    "Float": torch.float32,
    "Half": torch.float16,
    "BFloat16": torch.bfloat16,
    "Long": torch.int64,
    "Int": torch.int32,
    "Short": torch.int16,
    "Char": torch.int8,
    "Byte": torch.uint8,
    "Bool": torch.bool,
    "ComplexDouble": torch.complex128,
    "ComplexFloat": torch.complex64,
}
_NUMBERS = frozenset("?bBhHiIlLqQefdFD")  # numpy's characters: booleans, integers, floats, complex numbers
# What looks at values while it is made.
LOOKING = frozenset(
    {"torch._utils._rebuild_sparse_tensor", "torch._utils._rebuild_device_tensor_from_cpu_tensor"}
)
_PLACES = 64  # more dimensions than this are nobody's tensor


@dataclasses.dataclass(frozen=True)
class StorageType(PickleHandle):
    """A storage class of torch by name; ``dtype`` is None for bytes, whose tensors say theirs."""

    dtype: torch.dtype | None


@dataclasses.dataclass(frozen=True, eq=False)
class Storage(PickleHandle):
    """Memory that was read from the file. ``dtype``: None for bytes, whose tensors say theirs."""

    memory: torch.UntypedStorage
    dtype: torch.dtype | None


@dataclasses.dataclass(frozen=True)
class _Class(PickleHandle):
    name: str


def _short(value: Data) -> str:
    """Shortens for messages: the text of foreign containers and tensors could take for ever, or fill the memory."""
    return str(value)[:80] if isinstance(value, str | int | float) else f"a {type(value).__name__}"


# ------------------------------------------------------------ tensors
def natural(values: Tree) -> tuple[int, ...]:
    if not isinstance(values, tuple | list | torch.Size) or len(values) > _PLACES:
        raise ValueError("sizes are no tuple")
    if not all(type(v) is int and 0 <= v < 2**62 for v in values):
        raise ValueError("sizes are no whole numbers")
    return tuple(values)


def _view(storage: Data, dtype: Data, offset: Data, size: Data, stride: Data) -> torch.Tensor:
    """Views elements of a storage, all of which it has. ``offset`` and ``stride`` count elements."""
    if type(storage) is not Storage or not isinstance(dtype, torch.dtype):
        raise ValueError("a tensor without storage")
    size, stride = natural(size), natural(stride)
    if type(offset) is not int or offset < 0 or len(size) != len(stride):
        raise ValueError(f"a tensor of size {size}, strides {stride}, offset {_short(offset)}")
    if 0 not in size:
        last = offset + sum((n - 1) * s for n, s in zip(size, stride, strict=True))
        if (last + 1) * dtype.itemsize > storage.memory.nbytes():
            raise ValueError(
                f"a tensor of size {size}, strides {stride}, offset {offset} goes beyond its storage"
            )
    else:
        offset = 0  # no element is looked at
    return torch.empty(0, dtype=dtype, device=storage.memory.device).set_(
        storage.memory, offset, size, stride
    )


def _tensor(storage: Data, offset: Data, size: Data, stride: Data, *more: Data) -> torch.Tensor:
    """Makes a tensor of the storage's dtype: torch's functions of versions 1 and 2, which takes more."""
    dtype = storage.dtype if type(storage) is Storage else None
    requires_grad, hooks, *metadata = more or (False, None)
    return _tensor_v3(storage, offset, size, stride, requires_grad, hooks, dtype, *metadata)


def _tensor_v3(
    storage: Data,
    offset: Data,
    size: Data,
    stride: Data,
    requires_grad: Data,
    hooks: Data,
    dtype: Data,
    metadata: Data = None,
) -> torch.Tensor:
    if metadata:
        raise NotData("a tensor with metadata (conjugate or negative views)")
    if hooks:
        raise NotData("a tensor with hooks")
    return _view(storage, dtype, offset, size, stride).requires_grad_(bool(requires_grad))


def _parameter(data: Data, requires_grad: Data, hooks: Data, state: Data = None) -> nn.Parameter:
    if not isinstance(data, torch.Tensor) or hooks:
        raise NotData("a parameter with hooks, or without values")
    return _with_attributes(nn.Parameter(data.detach(), requires_grad=bool(requires_grad)), state)


def _with_attributes(tensor: Data, state: Data) -> Data:
    """Sets what users have set on a tensor; not what tensors have by themselves."""
    if state is not None and type(state) is not dict:
        raise NotData("a tensor with slots")
    for key, value in (state or {}).items():
        if type(key) is not str or hasattr(torch.Tensor, key) or key.startswith("__"):
            raise NotData(f"a tensor with another {_short(key)}")
        tensor.__dict__[key] = value
    return tensor


def _from_type(function: Data, kind: Data, arguments: Data, state: Data) -> torch.Tensor:
    if type(function) is not Function or kind not in (_Class("Tensor"), _Class("Parameter")):
        raise NotData("a tensor of a class of its own")
    tensor = function.call(*arguments)
    if not isinstance(tensor, torch.Tensor):
        raise NotData("a tensor made otherwise")
    return _with_attributes(tensor, state)


def whole(tensor: Data) -> Data:
    """Refuses a tensor whose copy would take more memory than the file has bytes: one that repeats its elements."""
    is_plain = isinstance(tensor, torch.Tensor) and tensor.layout == torch.strided and not tensor.is_meta
    if is_plain and tensor.numel() * tensor.itemsize > tensor.untyped_storage().nbytes():
        raise ValueError(f"a tensor of size {tuple(tensor.shape)} that repeats what it is made of")
    return tensor


def _sparse(layout: Data, data: Data) -> torch.Tensor:
    data = [whole(part) for part in data]
    if layout == torch.sparse_coo:
        indices, values, size, *_ = data
        return torch.sparse_coo_tensor(indices, values, natural(size), check_invariants=True)
    compressed, plain, values, size = data
    return torch.sparse_compressed_tensor(
        compressed, plain, values, natural(size), layout=layout, check_invariants=True
    )


def _meta(dtype: Data, size: Data, stride: Data, requires_grad: Data) -> torch.Tensor:
    return torch.empty_strided(
        natural(size), natural(stride), dtype=dtype, device="meta", requires_grad=bool(requires_grad)
    )


def _layout(name: Data) -> Data:
    if type(name) is not str:
        raise ValueError("a layout without a name")
    layout = {"torch.strided": torch.strided, "torch.sparse_coo": torch.sparse_coo}
    layout |= {
        f"torch.{n}": getattr(torch, n) for n in ("sparse_csr", "sparse_csc", "sparse_bsr", "sparse_bsc")
    }
    return layout[name]


# ------------------------------------------------------------ containers and numbers
def _encode(text: Data, encoding: Data = "latin1") -> bytes:
    """Makes bytes, which protocol 2 writes as text."""
    if type(text) is not str or encoding not in ("latin1", "latin-1"):
        raise NotData(f"text in {_short(encoding)}")
    return text.encode("latin1")


def _bytearray(text: Data = "", encoding: Data = "latin1") -> bytearray:
    return bytearray(text if type(text) is bytes else _encode(text, encoding))


# ------------------------------------------------------------ numpy
def _numpy_dtype(code: Data, align: Data = False, copy: Data = True) -> Data:
    import numpy as np

    # A copy: its byte order may be set by what follows, and the plain one is everybody's.
    kind = np.dtype(code, copy=True) if type(code) is str else None
    if kind is None or kind.char not in _NUMBERS:
        raise NotData(f"a numpy array of {_short(code)}, which are no numbers")
    return kind


def _array(kind: Data, shape: Data, code: Data) -> Data:
    """Returns the empty array whose shape and values :func:`build` sets."""
    import numpy as np

    if kind != _Class("ndarray"):
        raise NotData("a numpy array of a class of its own")
    return np.zeros(0, dtype="b")


def _scalar(kind: Data, data: Data) -> Data:
    import numpy as np

    if not isinstance(kind, np.dtype) or type(data) is not bytes or len(data) != kind.itemsize:
        raise ValueError("a numpy number of another size")
    return np.frombuffer(data, dtype=kind)[0]


def build(made: Data, state: Data) -> None:
    """Sets the state of an array, a numpy dtype, or an OrderedDict (which keeps attributes, as of ``_metadata``)."""
    if type(made) is OrderedDict:
        if type(state) is not dict or not all(type(k) is str and not hasattr(OrderedDict, k) for k in state):
            raise NotData("an OrderedDict with other methods")
        made.__dict__.update(state)
        return
    if type(made).__module__.partition(".")[0] != "numpy":
        raise NotData(f"the state of a {type(made).__name__}")
    import numpy as np

    set_state: Data = made.__setstate__
    if isinstance(made, np.dtype):
        version, order, *rest = state
        is_plain = version in (3, 4) and rest[:6] == [None, None, None, -1, -1, 0]
        if not is_plain or order not in ("<", ">", "|", "="):
            raise NotData("a numpy dtype with fields")
        set_state((version, order, *rest[:6]))
        return
    if not isinstance(made, np.ndarray):
        raise NotData(f"the state of a {type(made).__name__}")
    version, shape, kind, fortran, data = state
    shape = natural(shape)
    if version != 1 or not isinstance(kind, np.dtype) or kind.char not in _NUMBERS or type(data) is not bytes:
        raise NotData("a numpy array of what are no numbers")
    if torch.Size(shape).numel() * kind.itemsize != len(data):
        raise ValueError(f"a numpy array of shape {shape} and {len(data)} bytes")
    set_state((1, shape, kind, bool(fortran), data))


# ------------------------------------------------------------ names
@functools.cache  # a checkpoint may have a million chunks, each a file
def _names_of_all() -> StateDict:
    functions: dict[str, AnyCallable] = {
        "_rebuild_tensor": _tensor,
        "_rebuild_tensor_v2": _tensor,
        "_rebuild_tensor_v3": _tensor_v3,
        "_rebuild_parameter": _parameter,
        "_rebuild_parameter_with_state": _parameter,
        "_rebuild_sparse_tensor": _sparse,
        "_rebuild_meta_tensor_no_storage": _meta,
    }
    found: StateDict = {f"torch._utils.{name}": Function(call) for name, call in functions.items()}
    found["torch._tensor._rebuild_from_type_v2"] = Function(_from_type)
    found["torch.serialization._get_layout"] = Function(_layout)
    found["torch.Size"] = Function(lambda values=(): torch.Size(natural(values)))
    found["torch.device"] = Function(lambda *place: torch.device(*place))
    found["torch.Tensor"] = _Class("Tensor")
    found["torch.nn.parameter.Parameter"] = _Class("Parameter")
    for name, dtype in STORAGES.items():
        found[f"torch.{name}Storage"] = found[f"torch.cuda.{name}Storage"] = StorageType(dtype)
    found["torch.storage.UntypedStorage"] = found["torch.UntypedStorage"] = StorageType(None)
    found |= {f"torch.{n}": v for n, v in vars(torch).items() if isinstance(v, torch.dtype)}
    found |= {
        "collections.OrderedDict": Function(lambda items=(): OrderedDict((key_of(k), v) for k, v in items)),
        "collections.Counter": Function(
            lambda items=(): Counter({key_of(k): v for k, v in dict(items).items()})
        ),
        "builtins.set": Function(lambda items=(): {key_of(v) for v in items}),
        "builtins.bytes": Function(lambda: b""),  # how protocol 2 writes it; others come as text
        "builtins.bytearray": Function(_bytearray),
        "builtins.complex": Function(lambda real, imag: complex(float(real), float(imag))),
        "_codecs.encode": Function(_encode),
        "numpy.dtype": Function(_numpy_dtype),
        "numpy.ndarray": _Class("ndarray"),
    }
    for module in ("numpy.core.multiarray", "numpy._core.multiarray"):  # numpy 1 and 2
        found[f"{module}._reconstruct"] = Function(_array)
        found[f"{module}.scalar"] = Function(_scalar)
    return found


def names(device_tensor: Callable[..., torch.Tensor]) -> SavedState:
    """Returns all that a file may name.

    Args:
        device_tensor: from a CPU tensor, a dtype, a device and requires_grad makes a tensor of a device that has no
            storages (XLA).
    """
    of_device = {"torch._utils._rebuild_device_tensor_from_cpu_tensor": Function(device_tensor)}
    return {**_names_of_all(), **of_device}


def without_values(named: SavedState) -> SavedState:
    """Replaces functions that look at values, while storages are not filled: they give an empty tensor."""

    def nothing(*_: Data) -> torch.Tensor:
        return torch.empty(0, device="cpu")

    return {**named, **dict.fromkeys(LOOKING, Function(nothing))}
