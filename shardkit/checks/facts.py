"""Facts that ranks tell each other (names, shapes, options): data, and read as data.

A pickle can hold calls of any function, and whoever can write to a rank's connection could send one. Facts are JSON
with a tag where JSON has no type, and nothing else is understood.
"""

from __future__ import annotations

import json
from typing import TypeVar

import torch

from ..backend import Group
from ..errors import BackendError, ConfigurationError
from ..types import Tree

T = TypeVar("T")
_PLAIN = (bool, int, float, str, type(None))
_DTYPES = {str(v): v for v in vars(torch).values() if isinstance(v, torch.dtype)}


def all_gather_facts(group: Group, value: T, *, label: str = "") -> list[T]:
    """Each rank's value, in rank order, on every rank (collective).

    Args:
        group: the ranks.
        value: None, bool, int, float, str, bytes, torch.dtype, and tuples, lists and dicts of them; torch.Size arrives
            as a tuple.
        label: names the call in errors.

    Raises:
        ConfigurationError: it is something else.
        BackendError: what another rank sent is no fact.
    """
    return [decode(data) for data in group.all_gather_bytes(encode(value), label=label)]


def all_gather_facts_or_objects(group: Group, value: T, *, label: str = "") -> list[T]:
    """The same of values that may be anything: where those of all ranks are facts, nothing is pickled."""
    try:
        mine = encode(value)
    except ConfigurationError:
        mine = b""
    everybody = group.all_gather_bytes(mine, label=label)
    if all(everybody):
        return [decode(data) for data in everybody]
    return group.all_gather_object(value, label=label)


def encode(value: object) -> bytes:
    """A value as bytes.

    Raises:
        ConfigurationError: it is no fact.
    """
    return json.dumps(_tagged(value), separators=(",", ":")).encode()


def decode(data: bytes) -> Tree:
    """The value of some bytes.

    Raises:
        BackendError: they are no fact.
    """
    try:
        return _untagged(json.loads(data))
    except (ValueError, TypeError, LookupError, RecursionError) as error:
        raise BackendError(
            f"a rank sent {data[:40]!r}, which is no fact: {error}; do all ranks run one version?"
        ) from error


def _tagged(value: object) -> object:
    if type(value) in _PLAIN:
        return value
    if isinstance(value, torch.Size) or type(value) is tuple:
        return ["tuple", *map(_tagged, value)]
    if type(value) is list:
        return ["list", *map(_tagged, value)]
    if type(value) is dict:
        return ["dict", *([_tagged(k), _tagged(v)] for k, v in value.items())]
    if type(value) is bytes:
        return ["bytes", value.hex()]
    if isinstance(value, torch.dtype):
        return ["dtype", str(value)]
    raise ConfigurationError(f"{type(value).__name__} is no fact that ranks can tell each other: {value!r}")


def _untagged(value: object) -> Tree:
    if type(value) in _PLAIN:
        return value
    if type(value) is not list:
        raise ValueError("an object")
    tag, *parts = value
    if tag == "tuple":
        return tuple(map(_untagged, parts))
    if tag == "list":
        return [*map(_untagged, parts)]
    if tag == "dict":
        return {_untagged(k): _untagged(v) for k, v in parts}
    if tag == "bytes":
        return bytes.fromhex(parts[0])
    if tag == "dtype":
        return _DTYPES[parts[0]]
    raise ValueError(f"the tag {tag!r}")
