"""Takes a module's parameters apart into vectors, when it is wrapped.

Legend: W world size, S shard numel.
"""

from __future__ import annotations

import logging
import sys
from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import nn
from torch.nn.parameter import is_lazy

from ..backend import Backend, Group
from ..checks.facts import all_gather_facts
from ..checks.same_everywhere import check_same_everywhere, option_facts
from ..errors import ConfigurationError, RankMismatchError
from ..flattening.flat_parameter import FLAT_PREFIX, ParamInfo, SharedParamInfo
from ..layout import ShardLayout
from ..policy import OffloadPolicy, ReducePolicy
from .flat_param import FlatParam, Member, Place, part_as_data
from .members import managing

logger = logging.getLogger("shardkit")


def check_options(reduce: ReducePolicy, offload: OffloadPolicy, backend: Backend) -> None:
    """Raises ConfigurationError for options that would have no effect."""
    if reduce.bucket_numel is not None:
        raise ConfigurationError(
            f"bucket_numel={reduce.bucket_numel} is for ShardedDDP; FSDP reduces the gradients of a unit together: "
            "wrap smaller units to send less at a time"
        )
    if offload.gradients and not offload.parameters and backend.device_type != "cpu":
        raise ConfigurationError(
            f"gradients=True without parameters=True: the shards are on {backend.device_type}, and gradients are where "
            "their parameters are; offload both"
        )


def modules_outside_units(
    module: nn.Module, unit_type: type[nn.Module], prefix: str = ""
) -> Iterator[tuple[str, nn.Module]]:
    """``named_modules``, without those below other units."""
    seen: set[nn.Module] = set()

    def walk(prefix: str, m: nn.Module) -> Iterator[tuple[str, nn.Module]]:
        if m in seen or isinstance(m, unit_type):
            return
        seen.add(m)
        yield prefix, m
        for name, child in m._modules.items():
            if child is not None:
                yield from walk(f"{prefix}.{name}" if prefix else name, child)

    yield from walk(prefix, module)


_CALLS_OF_A_UNIT = 20  # Python frames, at most, that a unit adds to a walk over modules or a forward


def nesting_of(module: nn.Module, unit_type: type[nn.Module]) -> int:
    """How many units lie one inside another in a module that is to be the next; makes room for calls through them.

    Python ends recursion at a depth that a plain module of some hundred levels stays below. Wrappers add levels of
    their own, which are not to end what works without them.
    """
    deepest, waiting, seen = 0, [module], {module}
    while waiting:
        m = waiting.pop()
        if isinstance(m, unit_type):
            unit: Any = m
            deepest = max(deepest, unit._nesting)
            continue
        for child in m._modules.values():
            if child is not None and child not in seen:
                seen.add(child)
                waiting.append(child)
    nesting = deepest + 1
    if nesting > 10:
        sys.setrecursionlimit(max(sys.getrecursionlimit(), 1000 + _CALLS_OF_A_UNIT * nesting))
    return nesting


class Found:
    """What a module holds outside of other units.

    Attributes:
        members: parameters of its own, once each, with all places.
        names: path of each member's first place.
        borrowed: vectors of other units that manage parameters which this module uses too.
    """

    def __init__(self, module: nn.Module, unit_type: type[nn.Module]) -> None:
        self.members: list[Member] = []
        self.names: list[str] = []
        self.borrowed: list[FlatParam] = []
        self.infos: list[ParamInfo] = []  # first places as FlattenParamsWrapper tells them
        self.shared: list[SharedParamInfo] = []  # and further ones
        self.lazy: list[str] = []  # those whose shape is not known yet
        by_param: dict[nn.Parameter, int] = {}
        for path, m in modules_outside_units(module, unit_type):
            for name, p in list(m._parameters.items()):
                if p is None:
                    continue
                full = f"{path}.{name}" if path else name
                flat = managing(p)
                if flat is not None:
                    self._borrow(flat, p, Place(m, name))
                elif p in by_param:
                    self.members[by_param[p]].places.append(Place(m, name))
                    first_path, first, attribute = self.infos[by_param[p]]
                    self.shared.append((path, first_path, m, name, first, attribute))
                else:
                    by_param[p] = len(self.members)
                    self.members.append(Member(p, [Place(m, name)]))
                    self.names.append(full)
                    if is_lazy(p):
                        self.lazy.append(full)
                    self.infos.append((path, m, name))

    def _borrow(self, flat: FlatParam, param: nn.Parameter, place: Place) -> None:
        for member in flat.members:
            if member.param is param:
                member.places.append(place)
        place.module._parameters[place.name] = None
        place.module.__dict__[place.name] = param
        flat.is_borrowed = True
        if flat not in self.borrowed:
            self.borrowed.append(flat)


def alike(members: Iterable[int], all_members: list[Member]) -> list[list[int]]:
    """Indices of members grouped by dtype and by whether they are trainable, in order of first appearance."""
    groups: dict[tuple[torch.dtype, bool], list[int]] = {}
    for i in members:
        p = all_members[i].param
        groups.setdefault((p.dtype, p.requires_grad), []).append(i)
    return list(groups.values())


def announce(root: nn.Module, units: int, parameters: int, group: Group) -> None:
    """One line about what was wrapped, for the log."""
    held = sum(p.numel() * p.element_size() for p in root.parameters())
    logger.info(
        "rank %d: %s of %d units, %d parameters in shards of %d bytes a rank; backend %s, world size %d",
        group.rank, type(root).__name__, units, parameters, held, group.backend.name, group.world_size,
    )  # fmt: skip


def check_names(module: nn.Module, found: Found, rank: int) -> None:
    """Raises ConfigurationError if the module has attributes by the names under which its vectors are to be listed."""
    for k in range(len(alike(range(len(found.members)), found.members))):
        name = f"{FLAT_PREFIX}{k}"
        if hasattr(module, name):
            raise ConfigurationError(
                f"rank {rank}: {type(module).__name__} has an attribute {name!r}, the name that FSDP lists its shard "
                "under; rename it, or pass flatten=False (in the compat API: flatten_parameters=False)"
            )


def check_no_writers(module: nn.Module, group: Group, unit_type: type[nn.Module]) -> None:
    """Raises ConfigurationError for layers that write to their own parameters in forward, where that would be lost."""
    if group.world_size == 1:
        return
    for path, m in modules_outside_units(module, unit_type):
        if isinstance(m, nn.Embedding | nn.EmbeddingBag) and m.max_norm is not None:
            raise ConfigurationError(
                f"rank {group.rank}: {path or 'the module'!r} is an {type(m).__name__} with max_norm={m.max_norm}, "
                "which writes to its weight in forward; in an FSDP module that is a copy of what the shards hold, and "
                "the change would be lost. Leave it outside of what is wrapped, or set its max_norm to None and "
                "renormalise between steps, inside of summon_full_params()"
            )


def backend_nearby(
    module: nn.Module, borrowed: list[FlatParam], unit_type: type[nn.Module]
) -> Backend | None:
    """That of units below, or of units whose parameters the module uses."""
    for m in module.modules():
        if isinstance(m, unit_type):
            unit: Any = m
            return unit._group.backend  # type: ignore[no-any-return]
    return borrowed[0].group.backend if borrowed else None


def check_ranks_agree(found: Found, group: Group, options: dict[str, Any]) -> None:
    """Raises RankMismatchError on all ranks if options differ, or parameters in names, shapes or dtypes."""
    facts: list[tuple[str, Any]] = []
    for name, member in zip(found.names, found.members, strict=True):
        shape = "no shape yet" if is_lazy(member.param) else tuple(member.shape)
        trainable = "trainable" if member.param.requires_grad else "frozen"
        facts.append((name, (shape, str(member.param.dtype), trainable)))
    facts += option_facts(**options)
    check_same_everywhere(group, facts, "parameters of the wrapped module or options")
    if found.lazy:
        raise ConfigurationError(
            f"rank {group.rank}: {', '.join(map(repr, found.lazy))} of the wrapped module have no shape before its "
            "first forward (lazy modules); run one forward on example inputs, alike on all ranks, then wrap it"
        )


@torch.no_grad()
def shard_of(
    members: list[Member], layout: ShardLayout, group: Group, device: torch.device, from_rank_0: bool
) -> torch.Tensor:
    """This rank's shard of the members, [S], in their dtype.

    Args:
        layout: of the vector.
        device: where the members are gathered; the shard is there too.
        from_rank_0: rank 0's values count; else ranks must hold the same ones.

    Raises:
        RankMismatchError: on all ranks, without ``from_rank_0``, if values differ between ranks.
    """
    dtype = members[0].param.dtype
    if any(m.param.is_meta for m in members):
        return torch.empty(layout.shard_numel, dtype=dtype, device="meta")
    rows = [m.param.detach().reshape(-1).to(device) for m in members]
    rows.append(torch.zeros(layout.padded_numel - layout.numel, dtype=dtype, device=device))
    vector = torch.cat(rows)
    if group.world_size == 1:
        return vector
    if from_rank_0:
        group.channel("buffers").broadcast(vector, 0, label="parameters of rank 0")
    else:
        _check_same_values(vector, members, group)
    if group.backend.has_storage:
        return vector[group.rank * layout.shard_numel : (group.rank + 1) * layout.shard_numel].clone()
    return part_as_data(vector, group)


def _check_same_values(vector: torch.Tensor, members: list[Member], group: Group) -> None:
    import hashlib

    sums = [
        hashlib.sha1(
            m.param.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy().tobytes()
        ).hexdigest()
        for m in members
    ]
    everybody = all_gather_facts(group.channel("control"), sums, label="check of start values")
    for rank, theirs in enumerate(everybody):
        if theirs != everybody[0]:
            k = next(i for i, (a, b) in enumerate(zip(theirs, everybody[0], strict=True)) if a != b)
            raise RankMismatchError(
                f"parameter {k} of the wrapped module, of shape {tuple(members[k].shape)}, has other values on rank "
                f"{group.ranks[rank]} than on rank {group.ranks[0]}; the shards would mix both. Seed all ranks alike, "
                "or pass sync_module_states=True to start from rank 0's"
            )
