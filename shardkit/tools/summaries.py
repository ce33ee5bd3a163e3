"""Summaries of a sharded model, and what each part takes: ``print(shardkit.summary(model))``."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import nn

from ..checks import some
from ..errors import ConfigurationError
from ..fsdp.flat_param import FlatParam
from ..fsdp.state import ShardingState, clean, state_of
from ..oss.optimizer import OSS
from ..oss.sharded_ddp import ShardedDDP
from ..policy import OffloadPolicy
from ..reduction.ordered import order_in_words, ranks_of
from ..tracing.tables import counted, in_bytes, plain_table

_SMALL = 2**20  # bytes gathered; below, sending takes longer to start than to do
_LARGE = 0.5  # of a model's parameters
_WORTH = 2**24  # bytes of parameters from which on that matters


@dataclass(frozen=True)
class UnitFacts:
    """One unit. Bytes are one rank's.

    Attributes:
        name: its path in the model.
        parameters: how many numbers its parameters have in all, frozen ones too.
        dtype: of its shards, and of computation where that is another one.
        shard: bytes of its shards.
        gathered: bytes of its parameters while they are in use.
        padding: share of what is gathered that belongs to no parameter.
        cuts_rows: ranks have parts of rows, since whole ones would pad more.
        stays: when it is gathered for longer than it is used.
        on_host: what of it is in host memory.
    """

    name: str
    parameters: int
    dtype: str
    shard: int
    gathered: int
    stays: str
    kind: str = ""
    padding: float = 0.0
    on_host: str = ""
    cuts_rows: bool = False


@dataclass(frozen=True)
class Summary:
    """A model's units, in the order of its modules; prints as a table.

    Attributes:
        title: the model, and on how many ranks.
        warnings: units that cost more than they have to.
    """

    title: str
    units: Sequence[UnitFacts]
    warnings: Sequence[str] = field(default_factory=list)

    def __str__(self) -> str:
        rows = [
            {
                "unit": u.name,
                "class": u.kind,
                "parameters": f"{u.parameters:,}",
                "dtype": u.dtype,
                "on this rank": in_bytes(u.shard),
                "gathered": in_bytes(u.gathered),
                "padding": f"{100 * u.padding:.1f} %",
                "stays": u.stays,
                "on the host": u.on_host,
            }
            for u in self.units
        ]
        total, shard = sum(u.parameters for u in self.units), sum(u.shard for u in self.units)
        rows.append({"unit": "all", "parameters": f"{total:,}", "on this rank": in_bytes(shard)})
        head = list(rows[0])
        cells = [[row.get(name, "") for name in head] for row in rows]
        lines = [self.title, plain_table(head, cells, right=(2, 4, 5, 6))]
        return "\n".join([*lines, *[f"! {text}" for text in self.warnings]])


def summary(model: nn.Module) -> Summary:
    """Lists the units of a model that FSDP or ``fully_shard`` has sharded, or what ranks own of one under ShardedDDP.

    Nothing is sent and nothing is gathered.

    Raises:
        ConfigurationError: nothing of the model is sharded.
    """
    if isinstance(model, ShardedDDP):
        return _of_owners(model)
    states = [s for s in map(state_of, model.modules()) if s is not None and s.home == 0]
    if not states:
        raise ConfigurationError(
            f"nothing of this {type(model).__name__} is sharded; call summary after FSDP(model), fully_shard(model) or "
            "ShardedDDP(model, optimizer)"
        )
    paths = {id(m): name for name, m in model.named_modules()}
    inside = {id(below) for s in states for below in s.states() if below is not s}
    units = [_facts(s, paths[id(s.door)], id(s) not in inside) for s in states]
    group = states[0].group
    kind = type(states[0].module).__name__
    title = f"{kind} in {counted(len(units), 'unit')} on {counted(group.world_size, 'rank')} (this is {group.rank})"
    title += order_in_words(states[0].options.reduce, ranks_of(group, states[0].replicas))
    return Summary(title, units, _warnings(units, group.world_size))


def _facts(state: ShardingState, path: str, is_root: bool) -> UnitFacts:
    options, flats = state.options, state.flats
    numel = sum(sum(f.layout.numels) for f in flats)
    padded = sum(f.layout.padded_numel for f in flats)
    return UnitFacts(
        name=clean(path) or "(the root)",
        kind=type(state.module).__name__,
        parameters=sum(original.written.numel() for f in flats for original in f.originals),
        dtype=", ".join(dict.fromkeys(map(_dtype, flats))),
        shard=sum(f.param.nbytes for f in flats),
        gathered=sum(
            max(f.layout.padded_numel * f.compute_dtype.itemsize, f.store.gathered.nbytes) for f in flats
        ),
        padding=(padded - numel) / padded if padded else 0.0,
        stays=_stays(state, is_root),
        on_host=_on_host(options.offload, flats),
        cuts_rows=any(
            p.start % max(1, math.prod(f.originals[p.item].shape[1:]))
            for f in flats
            for p in (f.layout.pieces() if f.layout.grains is not None else ())
        ),
    )


def _on_host(offload: OffloadPolicy, flats: Sequence[FlatParam]) -> str:
    found = ["masters, gradients and states"] if offload.masters else []
    found += ["parameters and gradients"] if offload.parameters else []
    if not found and any(f.keeps_on_host and not f.trains for f in flats):
        found = ["what is frozen"]
    return ", ".join(found + (["activations"] if offload.activations else []))


def _stays(state: ShardingState, is_root: bool) -> str:
    reshard = state.options.reshard
    if reshard.sends_changes or (state.flats and all(f.store.is_whole for f in state.flats)):
        return "always"
    if reshard.frozen == "keep" and any(not f.trains for f in state.flats):
        return "what is frozen" if any(f.trains for f in state.flats) else "always"
    if reshard.after_forward is False or (is_root and not reshard.root):
        return "to backward"
    mesh = state.post_forward_mesh
    return "" if mesh is None else f"to backward, over {mesh.world_size} ranks"


def _dtype(flat: FlatParam) -> str:
    own, compute = (str(d).removeprefix("torch.") for d in (flat.param.dtype, flat.compute_dtype))
    return own if own == compute else f"{own} -> {compute}"


def _warnings(units: Sequence[UnitFacts], world_size: int) -> list[str]:
    total = sum(u.parameters for u in units)
    found = []
    if cut := [u.name for u in units if u.cuts_rows and u.gathered >= _SMALL]:
        found.append(f"{some(cut)}: rows are cut between ranks, since whole ones would need more padding")
    small = [u.name for u in units[1:] if u.gathered < _SMALL]
    if small and world_size > 1:
        found.append(
            f"{some(small)}: gathers less than {in_bytes(_SMALL)}, which takes longer to start than to send. Make "
            "larger parts units (wrap what is around them)"
        )
    for u in units:
        if u.gathered >= _WORTH and u.parameters > _LARGE * total and world_size > 1:
            found.append(
                f"{u.name} has {100 * u.parameters / total:.0f} % of the parameters: while it is in use they are all "
                "there, and nothing is computed while they are gathered. Make its blocks units"
            )
    return found


def _of_owners(model: ShardedDDP) -> Summary:
    group = model._group
    owned = enumerate(model._sharded_optimizers)
    rows = [_owned(optimizer, rank, k) for k, optimizer in owned for rank in range(group.world_size)]
    where = f"{counted(group.world_size, 'rank')} (this is {group.rank})"
    title = f"{type(model.module).__name__} under ShardedDDP on {where}"
    return Summary(title + order_in_words(model._connected().policy, group.world_size), rows)


def _owned(optimizer: OSS, rank: int, number: int) -> UnitFacts:
    params = [p for group in optimizer.param_groups for p in group["params"]]
    own: list[torch.Tensor] = [p for p in params if p.requires_grad and optimizer.owner_of(p) == rank]
    return UnitFacts(
        name=f"optimizer {number}, rank {rank} owns",
        parameters=sum(p.numel() for p in own),
        dtype=", ".join(dict.fromkeys(str(p.dtype).removeprefix("torch.") for p in own)),
        shard=sum(p.nbytes for p in own),
        gathered=sum(p.nbytes for p in params),
        stays="always",
    )
