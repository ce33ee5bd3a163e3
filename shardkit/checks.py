"""Comparisons between ranks before it matters: names, shapes, options, and of which run a file is.

[Note: facts] A pickle can hold calls of any function, and whoever can write to a rank's connection could send one. What
ranks tell each other is JSON with a tag where JSON has no type, and nothing else is understood.

[Note: runs] Files of shards say which run they are of, and when they were made: those of other runs or moments are not
mixed. Ranks agree on an id once a job and group, in an exchange that they make anyway; what is built after that is
counted, alike on all ranks. So units have ids that other jobs, and other models of the same job, have not, and no file
needs a rank to talk to another.
"""

from __future__ import annotations

import dataclasses
import functools
import json
import os
import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence, Set
from dataclasses import dataclass
from itertools import zip_longest
from types import BuiltinFunctionType, FunctionType, MethodType
from typing import TypeVar

import torch
from torch import nn
from torch.nn.parameter import is_lazy

from .backend import Group
from .errors import BackendError, ConfigurationError, RankMismatchError
from .types import Facts, StateDict, Tree

T = TypeVar("T")
_PLAIN = (bool, int, float, str, type(None))
_DTYPES = {str(v): v for v in vars(torch).values() if isinstance(v, torch.dtype)}


def all_gather_facts(group: Group, value: T, *, label: str = "") -> list[T]:
    """Returns each rank's value, in rank order, on every rank (collective).

    Args:
        value: None, bool, int, float, str, bytes, torch.dtype, and tuples, lists and dicts of them; torch.Size arrives
            as a tuple.
        label: names the call in errors.
    """
    return [decode(data) for data in group.all_gather_bytes(encode(value), label=label)]


def facts_of_all(groups: Sequence[Group], value: T, *, label: str = "") -> list[T]:
    """Gathers values over all groups, of which the ranks of the first have those of the second each, and so on.

    The ranks of the first group come together (collective). A group of one rank sends nothing.
    """
    said = [value]
    for group in groups:
        if group.world_size > 1:
            facts = all_gather_facts(group.channel("control"), said, label=label)
            said = [fact for each in facts for fact in each]
    return said


def attempt(work: Callable[[], T]) -> tuple[T | None, Exception | None]:
    """Runs some work; returns its result, or the error that it raised."""
    try:
        return work(), None
    except Exception as error:  # noqa: BLE001 - whatever it is, all ranks have to hear of it
        return None, error


def problems_of_ranks(group: Group, problem: str | None, label: str) -> list[tuple[int, str]]:
    """Lists what is wrong on any rank, with the rank's number in the whole job, on all of them (collective)."""
    everybody = facts_of_all([group], problem, label=label)
    return [(rank, what) for rank, what in zip(group.ranks, everybody, strict=True) if what is not None]


def all_gather_facts_or_objects(group: Group, value: T, *, label: str = "") -> list[T]:
    """Gathers values that may be anything: where those of all ranks are facts, nothing is pickled (collective)."""
    try:
        mine = encode(value)
    except ConfigurationError:
        mine = b""
    everybody = group.all_gather_bytes(mine, label=label)
    if all(everybody):
        return [decode(data) for data in everybody]
    return group.all_gather_object(value, label=label)


def encode(value: object) -> bytes:
    return json.dumps(_tagged(value), separators=(",", ":")).encode()


def decode(data: bytes) -> Tree:
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


@dataclass
class _RunIds:
    """``id`` is the same on all ranks of a group; ``built`` counts units so far."""

    id: str
    built: int = 0


_jobs: weakref.WeakKeyDictionary[Group, _RunIds] = weakref.WeakKeyDictionary()


def proposed_run_id() -> str:
    """Makes an id for a rank to propose; the first rank's is taken. No generator is drawn from."""
    return os.urandom(6).hex()


def new_run_ids(group: Group, proposed: str, count: int = 1) -> list[str]:
    """Returns the ids of the units that are being built, the same on all ranks.

    Args:
        group: the ranks of the units.
        proposed: by the first of them; taken for the group's first unit.
        count: how many units.
    """
    job = _jobs.setdefault(group, _RunIds(proposed))
    before, job.built = job.built, job.built + count
    return [f"{job.id}-{number}" for number in range(before + 1, job.built + 1)]


def numbers_of(units: Sequence[tuple[Group, str]]) -> list[str]:
    """Tells units from all others of their groups in a few characters; those of other jobs, unpickled, take more.

    Args:
        units: the ranks of each, and its run id.
    """
    own = {job.id for job in map(_jobs.get, {group for group, _ in units}) if job is not None}
    found = [(run_id, *run_id.partition("-")[::2]) for _, run_id in units]
    return [number if job in own else run_id for run_id, job, number in found]


def objects_of(group: Group, mine: T, recipient: int, what: str) -> list[T] | None:
    """Returns each rank's object on a rank, or on all for -1; None elsewhere (collective).

    Args:
        what: is done, and of what: ranks that do something else would send another thing's.
    """
    group.channel("parameters").agree(what)
    control = group.channel("control")
    if recipient == -1:
        return control.all_gather_object(mine, label=what)
    return control.gather_object(mine, recipient, label=what)


def are_several(group: Group) -> bool:
    """Tells whether more than one unit has been built of a group's ranks."""
    mine = _jobs.get(group)
    return mine is not None and mine.built > 1


def stamp(run_id: str, backwards: int) -> StateDict:
    """Returns what files carry of a run.

    Args:
        run_id: of the outermost unit.
        backwards: how many have gone through it, which is the same on all ranks whenever they save.
    """
    return {"run_id": run_id, "backwards": backwards}


def check_one_save(names: Sequence[str], facts: Sequence[Mapping[str, object] | None]) -> None:
    """Refuses shards of several runs, or of several moments of one.

    Args:
        names: of the files, for the message.
        facts: what each holds of :func:`stamp`; those of other libraries have nothing.
    """
    by_run: dict[str, list[str]] = {}
    for name, fact in zip(names, facts, strict=True):
        fact = fact or {}
        run = "no run id" if fact.get("run_id") is None else f"run id {fact['run_id']!r}"
        moment = "" if "backwards" not in fact else f" after {fact['backwards']} backwards"
        by_run.setdefault(run + moment, []).append(name)
    if len(by_run) > 1:
        found = "; ".join(f"{', '.join(files)}: {run}" for run, files in by_run.items())
        raise ConfigurationError(
            f"these shards were not saved together, and would make a model that never was: {found}. Leave those of "
            "one save (a save that was killed leaves files of the one before); each job, and each model in it, has an "
            "id of its own, and files without one are another library's"
        )


def check_same_everywhere(group: Group, facts: Facts, what: str, aside: Tree = None) -> list[Tree]:
    """Compares a list of (name, value) facts between ranks; raises on all of them at the first difference.

    Args:
        what: they are of, for messages.
        aside: more facts, which are told in the same exchange and not compared.

    Returns:
        What each rank told aside.
    """
    if group.world_size == 1:
        return [aside]
    # as one text: ranks mostly tell the same, and then nobody takes it apart
    mine = json.dumps(facts, default=str)
    told = all_gather_facts(group.channel("control"), (mine, aside), label=f"check of {what}")
    if any(theirs != mine for theirs, _ in told):
        _refuse_differences(group, [json.loads(theirs) for theirs, _ in told], what)
    return [beside for _, beside in told]


def _shown(fact: Sequence[Tree]) -> str:
    name, value = fact
    equals = " =" if name.startswith(_OPTION) else ""
    return f"{name} ({', '.join(map(str, value))})" if isinstance(value, list) else f"{name}{equals} {value}"


def _refuse_differences(group: Group, everybody: list[Tree], what: str) -> None:
    for rank, other in enumerate(everybody):
        for i, (mine, theirs) in enumerate(zip_longest(everybody[0], other, fillvalue=("nothing", "-"))):
            if mine != theirs:
                remedy = "Build the same model in the same order on every rank"
                if _OPTION in (mine[0].partition(" ")[0], theirs[0].partition(" ")[0]):
                    remedy = "Pass the same options on every rank"
                    if what.startswith("the optimizer's"):
                        remedy += "; an argument of yours that differs by rank, by functools.partial(Class, name=...)"
                raise RankMismatchError(
                    f"{what} differ between ranks: at position {i} rank {group.ranks[0]} has {_shown(mine)}, rank "
                    f"{group.ranks[rank]} has {_shown(theirs)}. {remedy} (this rank is {group.ranks[group.rank]})."
                )


def shape_fact(tensor: torch.Tensor) -> object:
    """Makes a shape a fact for :func:`check_same_everywhere`; lazy modules have none before their first forward."""
    return "no shape yet" if is_lazy(tensor) else tuple(tensor.shape)


def parameter_fact(param: torch.Tensor) -> object:
    """Makes a parameter, but for its values, a fact for :func:`check_same_everywhere`."""
    return shape_fact(param), str(param.dtype), "trainable" if param.requires_grad else "frozen"


def some(names: Iterable[object]) -> str:
    """Lists the first of these names for a message, in their order if they have one, and how many there are besides."""
    found = [*map(str, sorted(names, key=str) if isinstance(names, Set) else names)]
    more = f" and {len(found) - 5} more" if len(found) > 5 else ""
    return f"{', '.join(found[:5])}{more}" if found else "none"


def refuse_lazy(facts: Facts, what: str) -> None:
    """Raises ConfigurationError if one of these facts, alike on all ranks, is a tensor without a shape."""
    lazy = [n for n, value in facts if isinstance(value, tuple) and value[0] == "no shape yet"]
    if lazy:
        raise ConfigurationError(
            f"{what} was given {some(lazy)}, which have no shape before "
            "their module's first forward (lazy modules). Run one forward on example inputs, alike on all ranks, first"
        )


_OPTION = "option"


def option_facts(**options: object) -> list[tuple[str, object]]:
    """Returns options as facts for :func:`check_same_everywhere`, in text; those of a dataclass one by one."""
    facts: list[tuple[str, object]] = []
    for name, value in options.items():
        if dataclasses.is_dataclass(value) and not isinstance(value, type):
            parts = {f"{name}.{f.name}": getattr(value, f.name) for f in dataclasses.fields(value)}
            facts += option_facts(**parts)
        else:
            facts.append((f"{_OPTION} {name}", in_words(value)))
    return facts


def in_words(value: object) -> str:
    """Returns a value as text that is the same on all ranks if the value is."""
    if isinstance(value, torch.Tensor):
        return str(value.tolist()) if value.device.type == "cpu" else f"a tensor {tuple(value.shape)}"
    if isinstance(value, tuple | list):
        return f"({', '.join([in_words(v) for v in value])})"
    if isinstance(value, dict):
        return f"{{{', '.join(f'{k}: {in_words(v)}' for k, v in value.items())}}}"
    if value is None or isinstance(value, bool | int | float | str | torch.dtype):
        return str(value)
    plain = value.func if isinstance(value, functools.partial) else value
    kind = plain if isinstance(plain, type | FunctionType | BuiltinFunctionType | MethodType) else type(plain)
    return f"{kind.__module__}.{kind.__qualname__}"


def refuse_writers(modules: Iterable[tuple[str, nn.Module]], group: Group) -> None:
    """Raises ConfigurationError for layers that write to their own parameters in forward, where that would be lost."""
    for path, m in modules:
        if isinstance(m, nn.Embedding | nn.EmbeddingBag) and m.max_norm is not None and group.world_size > 1:
            raise ConfigurationError(
                f"rank {group.rank}: {path or 'the module'!r} is an {type(m).__name__} with max_norm={m.max_norm}, "
                "which writes to a copy of its weight in forward, and that would be lost. Leave it outside of what is "
                "wrapped, or set max_norm to None and renormalise between steps (FSDP: in summon_full_params())"
            )


def check_one_device(params: Iterable[nn.Parameter]) -> None:
    """Raises ConfigurationError unless all parameters are on one device."""
    devices = sorted({str(p.device) for p in params})
    if len(devices) > 1:
        raise ConfigurationError(
            f"the parameters are on several devices: {', '.join(devices)}. Move the module to one device before "
            "sharding it; a model spread over devices needs one optimizer for each."
        )
