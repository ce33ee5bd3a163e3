"""What the replicas of test_pod.py run; in a module of its own, as their process imports it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

import shardkit
from shardkit.backend import Group, get_backend
from tests.xla.models import batch, build

STEPS = 3
HALVES = [[0, 2], [1, 3]]


# ------------------------------------------------------------------ what is refused
def _caught(run: Callable[[], Any]) -> tuple[str, str]:
    try:
        run()
    except (shardkit.ShardkitError, ValueError) as error:
        return type(error).__name__, str(error)
    return "", ""


def _parts(rank: int, parts: list[list[int]]) -> Group:
    everyone = get_backend("xla").group()
    return next(group for group in [everyone.new_group(ranks) for ranks in parts] if group is not None)


def _part_by_xm(rank: int) -> Any:
    import torch_xla.core.xla_model as xm

    return xm.rendezvous("half", str(rank).encode(), [0, 1] if rank < 2 else [2, 3])


def _part_alone(rank: int) -> Any:
    half = _parts(rank, [[0, 1], [2, 3]])
    return half.all_gather_object(rank) if rank < 2 else get_backend("xla").group().barrier()


def _constructed_on_a_part(rank: int) -> Any:
    half = _parts(rank, [[0, 1], [2, 3]])
    return (
        shardkit.FSDP(nn.Linear(4, 4).to("xla"), group=half)
        if rank < 2
        else get_backend("xla").group().barrier()
    )


def _more_in_one_part(rank: int) -> Any:
    half = _parts(rank, [[0, 1], [2, 3]])
    value = torch.ones(2, device="xla")
    for _ in range(2 if rank < 2 else 1):
        half.all_reduce(value)
    return value.tolist()


def _other_parts(rank: int) -> Any:
    """All groups are of two ranks, but don't divide the four."""
    from shardkit.backends.xla.cpu_replicas import current_world

    world = current_world()
    assert world is not None
    replica = world.here().replica
    assert replica is not None
    return replica.host.exchange([[0, 1], [0, 1], [2, 0], [3, 2]][rank], "facts", "", b"")


def _read_on_one_rank(rank: int) -> Any:
    """The others sync at the same point, with the same collectives."""
    value = torch.ones(2, device="xla")
    get_backend("xla").group().all_reduce(value)
    if rank == 0:
        return value.tolist()
    get_backend("xla").mark_step()
    return [4.0, 4.0]


def _other_values_read(rank: int) -> Any:
    """The value that one rank reads needs a collective more than those of the others."""
    first, second = torch.ones(2, device="xla"), torch.ones(2, device="xla")
    get_backend("xla").group().all_reduce(first)
    get_backend("xla").group().all_reduce(second)
    return (second if rank == 1 else first).tolist()


REFUSED: dict[str, Callable[[int], Any]] = {
    "part by xm": _part_by_xm,
    "part alone": _part_alone,
    "constructed on a part": _constructed_on_a_part,
    "more in one part": _more_in_one_part,
    "other parts": _other_parts,
    "read on one rank": _read_on_one_rank,
    "other values read": _other_values_read,
}


def refused(rank: int, case: str) -> tuple[str, str]:
    """Then all go on together."""
    found = _caught(lambda: REFUSED[case](rank))
    value = torch.ones(2, device="xla")
    get_backend("xla").group().all_reduce(value)
    assert value.tolist() == [4.0, 4.0]
    return found


def allowed(rank: int, case: str) -> Any:
    return REFUSED[case](rank)


def different_calls(rank: int) -> tuple[str, str]:
    """Exchanges of one size that are not the same."""
    group = get_backend("xla").group()
    return _caught(lambda: group.all_gather_object(1) if rank else group.broadcast_object(1, 0))


# ------------------------------------------------------------------ ordinals, objects, files
def ordinals(rank: int) -> dict[str, Any]:
    import torch_xla.core.xla_model
    import torch_xla.runtime as xr

    from shardkit.xla import xla_model as xm

    names = ("local_ordinal", "process_index", "process_count", "host_index", "local_process_count")
    found: dict[str, Any] = {name: getattr(xr, name)() for name in names}
    found["masters"] = [xm.is_master_ordinal(), xm.is_master_ordinal(local=False)]
    found["theirs"] = [
        torch_xla.core.xla_model.is_master_ordinal(),
        torch_xla.core.xla_model.get_local_ordinal(),
    ]
    return found


def files(rank: int, folder: str) -> None:
    """Each host has a disk of its own."""
    import torch_xla.runtime as xr

    from shardkit.xla import xla_model as xm

    host = f"{folder}/host{xr.host_index()}"
    weight = torch.full((2,), 7.0, device="xla")
    xm.save({"weight": weight}, f"{host}-each")
    xm.save({"weight": weight}, f"{host}-first", global_master=True)
    xm.save({"weight": weight}, f"{host}-rank{rank}", master_only=False)


def objects(rank: int, lengths: list[int]) -> list[int]:
    """Of any size, and through the device: the process's memory is no way from one rank to another."""
    from shardkit.backends.xla import metrics

    everyone = get_backend("xla").group()
    half = _parts(rank, HALVES)
    before = metrics.transfers()["from device"]
    for length in lengths:
        for group in (everyone, half):
            found = group.all_gather_bytes(bytes([rank]) * (length * (rank + 1)))
            assert found == [bytes([r]) * (length * (r + 1)) for r in group.ranks]
            half_at = HALVES[rank % 2]
            assert group.broadcast_object({"from": rank}, 1) == {
                "from": 1 if group is everyone else half_at[1]
            }
    moved = metrics.transfers()["from device"] - before
    return [moved, len(lengths)]


# ------------------------------------------------------------------ training
def truth(ranks: list[int]) -> tuple[list[float], dict[str, torch.Tensor]]:
    """One process with the batches of these ranks, each normalised by itself.

    With Adam's usual eps, rounding of a gradient that is about zero would decide on the direction of a step.
    """
    model = build()
    optimizer = torch.optim.Adam(model.parameters(), lr=0.05, eps=1e-3)
    norms = []
    for step in range(STEPS):
        optimizer.zero_grad()
        for rank in ranks:
            (_loss(model, rank, step, "cpu") / len(ranks)).backward()
        norms.append(
            float(nn.utils.get_total_norm([p.grad for p in model.parameters() if p.grad is not None]))
        )
        optimizer.step()
    return norms, dict(model.named_parameters())


def _loss(model: nn.Module, rank: int, step: int, device: str) -> torch.Tensor:
    loss: torch.Tensor = model(batch(rank, step).to(device)).square().mean()
    return loss


def _torch_group(ranks: list[list[int]], rank: int) -> Any:
    import torch.distributed as dist
    import torch_xla.distributed.xla_backend  # noqa: F401

    dist.init_process_group("xla", init_method="xla://")
    made = [dist.new_group(part) for part in ranks]
    return next(group for group, part in zip(made, ranks, strict=True) if rank in part)


def train_fsdp(rank: int, how: str) -> dict[str, Any]:
    """Whole state, and norms of gradients, of a training that is sharded over a part of the ranks."""
    import torch.distributed as dist

    options: dict[str, Any] = {}
    if how == "hybrid":
        options["group"], options["replicas"] = shardkit.hybrid_groups(2, backend="xla")
    elif how == "group of torch.distributed":
        options["group"] = _torch_group(HALVES, rank)
    else:
        options["group"] = _parts(rank, HALVES)
    model = build().to("xla")
    model.second = shardkit.FSDP(model.second, **options)
    model = shardkit.FSDP(model, **options)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.05, eps=1e-3)
    norms = []
    for step in range(STEPS):
        optimizer.zero_grad()
        _loss(model, rank, step, "xla").backward()
        norms.append(model.clip_grad_norm_(1e9))
        optimizer.step()
        get_backend("xla").mark_step()
    state = {name: value.cpu() for name, value in model.state_dict().items()}
    again = shardkit.FSDP(build(seed=1).to("xla"), **options)
    again.load_state_dict(state)
    loaded = {name: value.cpu() for name, value in again.state_dict().items()}
    for name, value in state.items():
        torch.testing.assert_close(loaded[name], value, rtol=0, atol=0)
    if dist.is_initialized():
        dist.destroy_process_group()
    return {"norms": [float(norm) for norm in norms], "state": state}


def train_oss(rank: int) -> dict[str, Any]:
    """OSS and ShardedDDP over a part of the ranks, and a second optimizer that goes on from the state."""
    half = _parts(rank, HALVES)
    model = build().to("xla")
    optimizer = shardkit.OSS(model.parameters(), torch.optim.Adam, group=half, lr=0.05, eps=1e-3)
    wrapped = shardkit.ShardedDDP(model, optimizer, group=half, broadcast_buffers=False)
    for step in range(STEPS):
        if step == STEPS - 1:
            state = optimizer.state_dict(all_ranks=True)
            optimizer = shardkit.OSS(model.parameters(), torch.optim.Adam, group=half, lr=0.05, eps=1e-3)
            optimizer.load_state_dict(state)
            wrapped = shardkit.ShardedDDP(model, optimizer, group=half, broadcast_buffers=False)
        optimizer.zero_grad()
        _loss(wrapped, rank, step, "xla").backward()
        optimizer.step()
        get_backend("xla").mark_step()
    return {"state": {name: p.detach().cpu() for name, p in model.named_parameters()}}


def train_zero(rank: int) -> dict[str, Any]:
    """torch_xla's optimizer, whose state is sharded within ``sharding_groups``."""
    from shardkit.xla.zero_redundancy_optimizer import ZeroRedundancyOptimizer

    model = build().to("xla")

    def make() -> ZeroRedundancyOptimizer:
        return ZeroRedundancyOptimizer(
            model.parameters(),
            torch.optim.Adam,
            grad_clipping=False,
            sharding_groups=HALVES,
            lr=0.05,
            eps=1e-3,
        )

    optimizer = make()
    for step in range(STEPS):
        if step == STEPS - 1:
            state = optimizer.state_dict()
            optimizer = make()
            optimizer.load_state_dict(state)
        optimizer.zero_grad()
        _loss(model, rank, step, "xla").backward()
        optimizer.step()
        get_backend("xla").mark_step()
    return {"state": {name: p.detach().cpu() for name, p in model.named_parameters()}}


# ------------------------------------------------------------------ what construction costs
def exchanges_of_construction(rank: int, units: int, options: dict[str, Any]) -> list[str]:
    """Labels of this replica's exchanges while a model of so many units, and a root, is built."""
    from shardkit.backends.xla.backend import XlaBackend

    backend = get_backend("xla")
    assert isinstance(backend, XlaBackend)
    host = backend._replica().host
    exchange, labels = host.exchange, []

    def counted(ranks: Any, what: str, label: str, payload: bytes) -> list[bytes]:
        labels.append(label or what)
        return exchange(ranks, what, label, payload)

    host.exchange = counted  # type: ignore[method-assign]
    try:
        torch.manual_seed(0)
        inner = [shardkit.FSDP(nn.Linear(5, 5).to("xla"), **options) for _ in range(units)]
        shardkit.FSDP(nn.Sequential(*inner, nn.Linear(5, 1).to("xla")), **options)
    finally:
        host.exchange = exchange  # type: ignore[method-assign]
    return labels
