"""What the replicas of test_xla.py run; in a module of its own, as the child process imports it."""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Callable
from typing import Any

import torch

from shardkit.backend import Group, ReduceOp, get_backend
from shardkit.errors import OutOfStepError, RankLostError

STEPS = 20
BATCH = 8


def group() -> Group:
    return get_backend("xla").group()


def device() -> torch.device:
    return get_backend("xla").device()


def step(wait: bool = False) -> None:
    get_backend("xla").mark_step(wait=wait)


# -- training


def net() -> torch.nn.Module:
    torch.manual_seed(7)
    return torch.nn.Sequential(torch.nn.Linear(6, 16), torch.nn.Tanh(), torch.nn.Linear(16, 3))


def batch(index: int) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(1000 + index)
    return torch.randn(BATCH, 6, generator=generator), torch.randint(3, (BATCH,), generator=generator)


def train_single() -> tuple[list[float], list[torch.Tensor]]:
    model = net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    losses = []
    for index in range(STEPS):
        inputs, labels = batch(index)
        optimizer.zero_grad()
        loss = torch.nn.functional.cross_entropy(model(inputs), labels)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses, [p.detach() for p in model.parameters()]


def train(rank: int, reduce_in_hook: bool, read_every_step: bool) -> dict[str, Any]:
    """Data-parallel training with nothing but the group's all-reduce."""
    from shardkit.backends.xla import metrics

    g = group()
    model = net().to(device())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    hooked: list[tuple[int, int]] = []
    finished: list[int] = []

    def reduce(parameter: torch.Tensor) -> None:
        inside = group()  # autograd's device thread, not the replica's
        hooked.append((inside.rank, threading.get_ident()))
        assert parameter.grad is not None
        inside.all_reduce(parameter.grad, op=ReduceOp.AVG)
        if len(hooked) % 4 == 1:
            torch.autograd.Variable._execution_engine.queue_callback(lambda: finished.append(group().rank))

    if reduce_in_hook:
        for parameter in model.parameters():
            parameter.register_post_accumulate_grad_hook(reduce)
    losses, compiled = [], []
    for index in range(STEPS):
        inputs, labels = (t.chunk(g.world_size)[rank].to(device()) for t in batch(index))
        optimizer.zero_grad()
        loss = torch.nn.functional.cross_entropy(model(inputs), labels)
        loss.backward()
        if not reduce_in_hook:
            for parameter in model.parameters():
                assert parameter.grad is not None
                g.all_reduce(parameter.grad, op=ReduceOp.AVG)
        optimizer.step()
        shown = loss.detach().clone()
        g.all_reduce(shown, op=ReduceOp.AVG)
        in_program = metrics.collectives([*model.parameters(), shown]) if index == 3 else None
        if in_program is not None:
            found = dict(in_program)
        if read_every_step:
            losses.append(shown.item())
        step(wait=True)
        losses.append(shown.item()) if not read_every_step else None
        g.barrier()  # so that the counter, which is the process's, holds still
        compiled.append(metrics.compiles())
        g.barrier()
    return {
        "losses": losses,
        "compiled": compiled,
        "parameters": list(model.parameters()),
        "found": found,
        "hooked": {r for r, _ in hooked},
        "other thread": threading.get_ident() not in {t for _, t in hooked},
        "finished": finished,
    }


# -- collectives


def nan_stays(rank: int) -> tuple[torch.Tensor, torch.Tensor]:
    g = group()
    bad = torch.full((g.world_size,), float("nan"), device=device())
    good = torch.full((g.world_size,), float(rank), device=device())
    part = torch.zeros(1, device=device())
    g.reduce_scatter_into(part, bad)
    gathered = torch.zeros(g.world_size**2, device=device())
    g.all_gather_into(gathered, bad)
    g.all_reduce(good)
    everything = torch.zeros(g.world_size, device=device())
    g.all_gather_into(everything, torch.full((1,), float(rank), device=device()))
    step()
    return good, everything


def sub_groups(rank: int, parts: list[list[int]]) -> dict[str, Any]:
    g = group()
    mine = next(s for s in [g.new_group(ranks) for ranks in parts] if s is not None)
    value = torch.full((2,), float(rank), device=device())
    gathered = torch.zeros(2 * mine.world_size, device=device())
    mine.all_gather_into(gathered, value)
    total = value.clone()
    mine.all_reduce(total)
    part = torch.zeros(1, device=device())
    mine.reduce_scatter_into(part, torch.arange(mine.world_size, device=device()).float() + rank)
    exchanged = torch.zeros(mine.world_size, device=device())
    mine.all_to_all(exchanged, torch.arange(mine.world_size, device=device()) + 10.0 * rank)
    everyone = value.clone()
    g.all_reduce(everyone)
    step()
    return {
        "ranks": mine.ranks,
        "rank": mine.rank,
        "gathered": gathered.tolist(),
        "total": total.tolist(),
        "part": part.item(),
        "exchanged": exchanged.tolist(),
        "everyone": everyone.tolist(),
        "objects": mine.all_gather_object(rank),
    }


def native(rank: int) -> dict[str, Any]:
    """The collectives a TPU uses. On a CPU they meet only if all replicas share one executable."""
    from shardkit.backends.xla import metrics
    from shardkit.backends.xla.collectives import NativeCollectives
    from shardkit.backends.xla.cpu_replicas import current_world
    from shardkit.backends.xla.group import XlaGroup
    from shardkit.backends.xla.runtime import Replica
    from tests.xla.meeting import in_memory

    world = current_world()
    assert world is not None
    backend = get_backend("xla")
    replica = Replica(rank, world.size, NativeCollectives(), in_memory(world.here()))
    g = XlaGroup(backend, replica, range(world.size))  # type: ignore[arg-type]
    sub = next(s for s in [g.new_group([0, 1]), g.new_group([2, 3])] if s is not None)
    source = (torch.arange(4.0) + 10 * rank).to(device())
    step()
    gathered = torch.zeros(16, device=device())
    g.all_gather_into(gathered, source)
    part = torch.zeros(1, device=device())
    g.reduce_scatter_into(part, source)
    exchanged = torch.zeros(4, device=device())
    g.all_to_all(exchanged, source)
    sent = source.clone()
    g.broadcast(sent, 2)
    pair = source.clone()
    sub.all_reduce(pair, op=ReduceOp.MAX)
    found = metrics.collectives([gathered, part, exchanged, sent, pair])
    step()
    return {
        "found": dict(found),
        "gathered": gathered,
        "part": part,
        "exchanged": exchanged,
        "sent": sent,
        "pair": pair,
    }


def groups_of_objects(rank: int) -> list[tuple[int, int, tuple[int, ...]]]:
    class Alone:
        def rank(self) -> int:
            return 0

        def size(self) -> int:
            return 1

    backend = get_backend("xla")
    every = backend.group()
    found = [backend.group(Alone()), backend.group(every), backend.group(None), every.channel("x")]
    return [(g.rank, g.world_size, g.ranks) for g in found]


def refuses(rank: int) -> list[str]:
    """Messages of wrong calls; all of them are refused before anything is recorded."""
    from shardkit.errors import ConfigurationError

    g = group()
    size = g.world_size
    xla = torch.zeros(size, device=device())
    wrong: list[Callable[[], Any]] = [
        lambda: g.all_reduce(torch.zeros(2)),
        lambda: g.all_gather_into(torch.zeros(size * 2, device=device()), torch.zeros(1, device=device())),
        lambda: g.reduce_scatter_into(torch.zeros(1, device=device()), xla, [size + 1] + [0] * (size - 1)),
        lambda: g.all_reduce(xla.int(), op=ReduceOp.AVG),
        lambda: g.broadcast(xla, size),
        lambda: g.new_group([0, 0]),
        lambda: get_backend("xla").group(object()),
    ]
    messages = []
    for call in wrong:
        try:
            call()
        except ConfigurationError as error:
            messages.append(str(error))
    return messages


# -- random numbers


def host_random(rank: int) -> dict[str, Any]:
    first = torch.rand(3)
    drawn = []
    torch.manual_seed(5)
    random.seed(5)
    for _ in range(5):
        drawn.append((torch.rand(1).item(), random.random()))
        group().all_gather_object(None)  # the turn goes round
    return {"first": first, "drawn": drawn}


def device_random(rank: int) -> dict[str, Any]:
    backend = get_backend("xla")
    state = backend.rng_state()
    first = torch.rand(4, device=device()).cpu()
    backend.set_rng_state(state)
    again = torch.rand(4, device=device()).cpu()
    return {"state": state, "first": first, "again": again}


# -- reading values


def reads(rank: int) -> dict[str, Any]:
    """Everything that reads a value, on all replicas, of tensors that depend on collectives."""
    g = group()

    def summed() -> torch.Tensor:
        value = torch.ones(2, device=device())
        g.all_reduce(value)
        return value

    host = torch.zeros(2)
    host.copy_(summed())
    return {
        "item": summed()[0].item(),
        "cpu": summed().cpu(),
        "tolist": summed().tolist(),
        "repr": repr(summed()),
        "bool": bool((summed() > 0).all()),
        "equal": torch.equal(summed(), summed()),
        "nonzero": summed().nonzero().shape[0],
        "copy_": host,
    }


def one_reads_local(rank: int) -> tuple[float, list[float]]:
    """Rank 0 alone reads a value that depends on no collective while one is pending."""
    g = group()
    value = torch.ones(2, device=device())
    g.all_reduce(value)
    local = torch.full((), float(rank), device=device()) * 2
    seen = local.item() if rank == 0 else -1.0
    step()
    return seen, value.tolist()


def one_returns(rank: int) -> torch.Tensor | None:
    value = torch.ones(2, device=device())
    group().all_reduce(value)
    return value if rank == 0 else None


# -- out of step


def _caught(run: Callable[[], Any]) -> tuple[str, str, float]:
    start = time.monotonic()
    try:
        run()
    except (OutOfStepError, RankLostError) as error:
        return type(error).__name__, str(error), time.monotonic() - start
    return "", "", time.monotonic() - start


def _sum(label: str = "", numel: int = 2) -> torch.Tensor:
    value = torch.ones(numel, device=device())
    group().all_reduce(value, label=label)
    return value


def out_of_step(rank: int, case: str) -> list[tuple[str, str, float]]:
    """Ranks do different things; then all go on together, which has to work."""

    def wrong() -> None:
        if case == "shape":
            _sum("of different shapes", 2 + rank)
        elif case == "operation":
            if rank == 0:
                value = torch.ones(2, device=device())
                group().broadcast(value, 0, label="weights")
            else:
                _sum("gradients")
        elif case == "missing":
            _sum("first")
            if rank != 1:
                _sum("second")
        elif case == "read on one rank":
            value = _sum("loss")
            if rank == 0:
                value[0].item()
            _sum("more")
        elif case == "host against device":
            if rank == 0:
                group().all_gather_object(1, label="objects")
            else:
                _sum("gradients")
        step()

    caught = [_caught(wrong)]
    value = _sum("together again")
    step()
    assert value.tolist() == [group().world_size] * 2
    return caught


def leaves_early(rank: int) -> tuple[str, str, float] | None:
    if rank == 0:
        return None
    _sum("gradients")
    return _caught(step)


def fails(rank: int) -> None:
    if rank == 1:
        raise ValueError("no luck")
    group().barrier()


def fails_while_others_work(rank: int) -> None:
    if rank == 1:
        raise ValueError("no luck")
    group().all_gather_object(1)
    time.sleep(60)


def hangs(rank: int) -> None:
    if rank == 0:
        time.sleep(120)
    group().barrier()


def dies(rank: int) -> None:
    import os

    if rank == 1:
        os._exit(17)
    group().barrier()


def process_id(rank: int) -> int:
    import os

    return os.getpid()


# -- programs that know only torch_xla and torch.distributed


# -- ranks that torch_xla's own runtime starts


def one_device(rank: int) -> dict[str, Any]:
    backend = get_backend("xla")
    g = backend.group()
    x = torch.arange(4.0).to(device())
    gathered, part, exchanged = torch.zeros_like(x), torch.zeros_like(x), torch.zeros_like(x)
    g.all_gather_into(gathered, x)
    g.reduce_scatter_into(part, x.clone())
    g.all_to_all(exchanged, x)
    g.broadcast(x, 0)
    g.all_reduce(x, op=ReduceOp.AVG)
    g.barrier()
    assert g.new_group([0]) is not None
    state = backend.rng_state()
    backend.set_rng_state(state)
    assert torch.equal(backend.rng_state(), state)
    return {
        "rank": (rank, g.rank, g.world_size),
        "values": [gathered, part, exchanged, x],
        "objects": [g.all_gather_object(rank), g.broadcast_object(rank, 0), g.gather_object(rank, 0)],
    }


def fails_or_waits(rank: int) -> None:
    if rank == 1:
        raise ValueError("no luck")
    time.sleep(1000)


def waits(rank: int) -> None:
    time.sleep(1000)


def _error_of(run: Callable[[], Any]) -> Any:
    from shardkit.errors import RankFailedError

    try:
        run()
    except RankFailedError as error:
        return error
    raise AssertionError("no error")


def _is_this_process(index: int, process: int) -> None:
    import os

    print(index, os.getpid() == process)


def _beside_gloo(*, started: bool) -> None:
    """Where XLA has an accelerator, a default group over gloo hides it only from a process that doesn't use it."""
    import os

    import torch.distributed as dist

    from shardkit.backends.xla import backend
    from shardkit.xla import ranks, xla_multiprocessing

    known = backend.has_accelerator
    backend.has_accelerator = xla_multiprocessing.has_accelerator = lambda: True
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    print(ranks.current_backend().name)
    dist.destroy_process_group()
    if started:
        xla_multiprocessing.spawn(_is_this_process, (os.getpid(),), nprocs=1)
    backend.has_accelerator = xla_multiprocessing.has_accelerator = known


def launch_by_runtime() -> None:
    """The way of a TPU, with the devices that a CPU is: run in a process of its own."""
    import os

    from shardkit.backends.xla.pool import launch

    (result,) = launch(one_device, 1, (), 100, 100)
    assert result["rank"] == (0, 0, 1)
    assert all(value.tolist() == [0.0, 1.0, 2.0, 3.0] for value in result["values"])
    assert result["objects"] == [[0], 0, [0]]
    os.environ["CPU_NUM_DEVICES"] = "2"  # threads of one process, without collectives between them
    error = _error_of(lambda: launch(fails_or_waits, 2, (), 100, 100))
    print(error.rank, error.remote_type)
    error = _error_of(lambda: launch(waits, 2, (), 1, 100))
    print(error.remote_type, "timeout=1" in str(error), "in waits" in str(error))
    del os.environ["CPU_NUM_DEVICES"]
    _beside_gloo(started=False)
    one_device(0)  # and in a process that was not launched at all
    _beside_gloo(started=True)
    print("done")


# -- sizes and dtypes


def uneven(rank: int, dtype: torch.dtype, sizes: list[int]) -> dict[str, torch.Tensor]:
    """Parts of different sizes, outputs that are views, and a shard that is a slice of its output."""
    g = group()
    total = sum(sizes)
    start = sum(sizes[:rank])
    full = torch.zeros(2, total, dtype=dtype, device=device())
    output = full[1]
    output[start : start + sizes[rank]] = torch.full((sizes[rank],), rank + 1).to(dtype).to(device())
    g.all_gather_into(output, output[start : start + sizes[rank]], sizes)
    part = torch.zeros(sizes[rank], dtype=dtype, device=device())
    g.reduce_scatter_into(part, torch.arange(total).to(dtype).to(device()), sizes, op=ReduceOp.MAX)
    # rank r sends sizes[d] elements of value r to rank d
    received = torch.zeros(sizes[rank] * g.world_size, dtype=dtype, device=device())
    sent = torch.full((total,), rank).to(dtype).to(device())
    g.all_to_all(received, sent, [sizes[rank]] * g.world_size, sizes)
    transposed = torch.zeros(3, 2, dtype=dtype, device=device()).t()
    transposed.copy_(torch.full((2, 3), rank).to(dtype))
    g.broadcast(transposed, g.world_size - 1)
    scalar = torch.full((), rank).to(dtype).to(device())
    g.reduce(scalar, 0)
    step()
    return {"full": full, "part": part, "received": received, "transposed": transposed, "scalar": scalar}
