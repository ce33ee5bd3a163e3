"""Replicas under a TPU's rules: what is refused, what a pod's ranks are, and sharding over a part of the ranks."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import shardkit
from shardkit.backend import Group, get_backend
from shardkit.errors import ConfigurationError, OutOfStepError
from tests.pools import on_ranks, rank_pool
from tests.xla.models import batch, build

pytest.importorskip("torch_xla")

from shardkit.backends.xla import runtime
from shardkit.backends.xla.runtime import Rules, rules_here

pytestmark = pytest.mark.xla


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
    from shardkit.backends.xla.runtime import current_world

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
    from shardkit.backends.xla import XlaBackend

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


# ------------------------------------------------------------------ refused under the rules, and only there
@pytest.mark.parametrize(
    ("case", "kind", "words"),
    [
        ("part by xm", "ConfigurationError", ["only global rendezvous", "'half'"]),
        ("part alone", "OutOfStepError", ["rank 1: all_gather_object", "rank 2: barrier"]),
        ("constructed on a part", "OutOfStepError", ["rank 2: barrier", "rank 0: all_gather"]),
        ("more in one part", "OutOfStepError", ["First difference, at collective 1", "nothing"]),
        ("other parts", "OutOfStepError", ["don't divide the ranks"]),
        (
            "read on one rank",
            "OutOfStepError",
            ["rank 0: reading a value (which needs 1", "rank 1: sync with 1"],
        ),
        ("other values read", "OutOfStepError", ["rank 0: reading a value (which needs 1", "(which needs 2"]),
    ],
)
def test_what_a_tpu_refuses_is_refused_on_all_ranks(case: str, kind: str, words: list[str]) -> None:
    found = rank_pool(4, "xla").run(refused, case)
    assert {name for name, _ in found} == {kind}
    for _, message in found:
        assert all(word in message for word in words), message


def test_without_the_rules_threads_may_do_more() -> None:
    pool = rank_pool(4, "xla without rules")
    assert pool.run(allowed, "part by xm") == [[b"0", b"1"]] * 2 + [[b"2", b"3"]] * 2
    assert pool.run(allowed, "read on one rank") == [[4.0, 4.0]] * 4
    assert pool.run(allowed, "other values read") == [[4.0, 4.0]] * 4
    assert pool.run(allowed, "more in one part") == [[4.0, 4.0]] * 2 + [[2.0, 2.0]] * 2


@on_ranks((4, "xla"))
def test_different_exchanges_of_one_size(rank: int) -> None:
    group = get_backend("xla").group()
    with pytest.raises(OutOfStepError) as caught:
        _ = group.all_gather_object(1) if rank else group.broadcast_object(1, 0)
    assert all(call in str(caught.value) for call in ("broadcast_object(src=0)", "all_gather_object"))


# ------------------------------------------------------------------ rows
def _rows(groups: dict[int, list[int]], what: str = "facts") -> list[runtime.Row]:
    return [
        runtime.read(runtime.written(rank, groups[rank], what, "", b"x" * rank))
        for rank in range(len(groups))
    ]


def test_parts_are_what_the_ranks_say() -> None:
    """Also where no rank could have guessed those of the others."""
    parts = [[4, 1], [0, 3], [5, 2]]
    rows = _rows({rank: part for part in parts for rank in part})
    assert runtime.partition(rows) == [[0, 3], [4, 1], [5, 2]]
    assert [row.payload for row in rows] == [b"x" * rank for rank in range(6)]


def test_what_ranks_exchange_for_has_to_be_the_same() -> None:
    everyone = {rank: [0, 1] for rank in range(2)}
    rows = [_rows(everyone, "new_group([0])")[0], _rows(everyone, "x" * 600)[1]]
    with pytest.raises(
        OutOfStepError, match=r"rank 0: new_group\(\[0\]\) in its group of 2.*\n.*rank 1: xxxx"
    ):
        runtime.partition(rows)


@pytest.mark.parametrize(
    ("groups", "error", "words"),
    [
        ([[0, 1], [0, 1], [2], [3]], ConfigurationError, "different sizes"),
        ([[0, 1], [1, 0], [2, 3], [2, 3]], OutOfStepError, "don't divide"),
        ([[0, 1], [0, 1], [2, 3], [0, 1, 2, 3]], OutOfStepError, "don't divide"),
        ([[0, 1, 2], [0, 1, 3], [0, 1, 2], [0, 2, 3]], OutOfStepError, "don't divide"),
    ],
)
def test_groups_that_do_not_fit_together(groups: list[list[int]], error: type[Exception], words: str) -> None:
    with pytest.raises(error, match=words):
        runtime.partition(_rows(dict(enumerate(groups))))


def test_sizes_that_travel_are_few() -> None:
    widths = {runtime.room_for(length) for length in range(runtime.ROOM + 1, 100_000, 97)}
    assert widths == {2**n for n in range(10, 18)}
    assert all(runtime.room_for(n) >= n for n in (runtime.ROOM + 1, 512, 513, 1024, 1025, 4096))


# ------------------------------------------------------------------ a pod's ranks
def test_ordinals_of_two_hosts() -> None:
    for rank, found in enumerate(rank_pool(4, "xla").run(ordinals)):
        assert found == {
            "local_ordinal": rank % 2, "process_index": rank, "process_count": 4, "host_index": rank // 2,
            "local_process_count": 2, "masters": [rank % 2 == 0, rank == 0], "theirs": [rank % 2 == 0, rank % 2],
        }  # fmt: skip
    for rank, found in enumerate(rank_pool(4, "xla without rules").run(ordinals)):
        assert found["masters"] == [rank == 0, rank == 0]
        assert found["local_ordinal"] == rank


def test_rules_come_from_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SHARDKIT_XLA_RULES", "tpu")
    assert (rules_here(4), rules_here(3)) == (Rules(True, 2), Rules(True, 1))
    monkeypatch.setenv("SHARDKIT_XLA_HOSTS", "4")
    assert rules_here(8) == Rules(True, 4)
    for hosts in ("3", "0", "two"):
        monkeypatch.setenv("SHARDKIT_XLA_HOSTS", hosts)
        with pytest.raises(ConfigurationError, match="can't be on so many hosts"):
            rules_here(4)
    monkeypatch.setenv("SHARDKIT_XLA_RULES", "gpu")
    with pytest.raises(ConfigurationError, match="rules of a 'tpu'"):
        rules_here(4)
    monkeypatch.setenv("SHARDKIT_XLA_RULES", "")
    assert rules_here(4) == Rules()


def test_every_host_has_its_files(tmp_path: Path) -> None:
    rank_pool(4, "xla").run(files, str(tmp_path))
    names = [
        "host0-each",
        "host0-first",
        "host0-rank0",
        "host0-rank1",
        "host1-each",
        "host1-rank2",
        "host1-rank3",
    ]
    assert sorted(path.name for path in tmp_path.iterdir()) == names
    for path in tmp_path.iterdir():
        assert torch.load(path)["weight"].tolist() == [7.0, 7.0]


def test_objects_go_through_the_device() -> None:
    lengths = [0, 1, runtime.ROOM, runtime.ROW, 20_000]
    for moved, count in rank_pool(4, "xla").run(objects, lengths):
        assert moved >= 4 * count
    for moved, _ in rank_pool(4, "xla without rules").run(objects, lengths):
        assert moved == 0


# ------------------------------------------------------------------ sharding over a part of the ranks
@pytest.mark.parametrize("how", ["group of shardkit", "group of torch.distributed", "hybrid"])
def test_fsdp_over_a_part_of_the_ranks_equals_one_process(how: str) -> None:
    results = rank_pool(4, "xla").run(train_fsdp, how)
    for rank, result in enumerate(results):
        norms, parameters = truth([0, 1, 2, 3] if how == "hybrid" else HALVES[rank % 2])
        assert result["norms"] == pytest.approx(norms, rel=1e-4)
        _assert_equal(result["state"], parameters)


@pytest.mark.parametrize("program", [train_oss, train_zero])
def test_optimizers_over_a_part_of_the_ranks_equal_one_process(program: Any) -> None:
    for rank, result in enumerate(rank_pool(4, "xla").run(program)):
        _assert_equal(result["state"], truth(HALVES[rank % 2])[1])


def _assert_equal(state: dict[str, torch.Tensor], parameters: dict[str, torch.Tensor]) -> None:
    assert set(parameters) <= set(state)
    for name, value in parameters.items():
        torch.testing.assert_close(
            state[name], value.detach(), rtol=1e-4, atol=1e-5, msg=lambda m, n=name: f"{n}: {m}"
        )


# ------------------------------------------------------------------ costs
@pytest.mark.parametrize("flatten", [True, False])
@pytest.mark.parametrize("sync_module_states", [True, False])
def test_a_unit_is_compared_in_one_exchange(flatten: bool, sync_module_states: bool) -> None:
    """Names, shapes, options, values and the run id."""
    options = {"flatten": flatten, "sync_module_states": sync_module_states}
    for labels in rank_pool(4, "xla").run(exchanges_of_construction, 2, options):
        assert labels == ["check of parameters of the wrapped module or options"] * 3
