"""XLA replicas on a CPU with real collectives: training, syncs, errors, random states, processes."""

from __future__ import annotations

import os
import random
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from shardkit.backend import Group, ReduceOp, get_backend
from shardkit.errors import OutOfStepError, RankFailedError, RankLostError

pytest.importorskip("torch_xla", reason="needs torch_xla")

from shardkit.backends.xla import ReplicaPool
from tests.backends.contract_programs import Ranks, check_group
from tests.backends.xla_process_programs import ends
from tests.doors import linears
from tests.pools import Pool, on_ranks, rank_pool
from tests.started import TORCHRUN, output_of, ran

pytestmark = pytest.mark.xla


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
    return linears(6, 16, 3, seed=7)


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
    from tests.xla import pending_program

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
        in_program = pending_program.collectives([*model.parameters(), shown]) if index == 3 else None
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


def host_random(rank: int) -> dict[str, Any]:
    first = torch.rand(3)
    drawn = []
    torch.manual_seed(5)
    random.seed(5)
    for _ in range(5):
        drawn.append((torch.rand(1).item(), random.random()))
        group().all_gather_object(None)  # the turn goes round
    return {"first": first, "drawn": drawn}


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
    if rank == 1:
        os._exit(17)
    group().barrier()


def process_id(rank: int) -> int:
    return os.getpid()


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
    try:
        run()
    except RankFailedError as error:
        return error
    raise AssertionError("no error")


def _is_this_process(index: int, process: int) -> None:
    print(index, os.getpid() == process)


def _beside_gloo(*, started: bool) -> None:
    """Where XLA has an accelerator, a default group over gloo hides it only from a process that doesn't use it."""
    import torch.distributed as dist

    from shardkit.backends import xla as backend
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
    from shardkit.backends.xla.pool import DevicePool

    (result,) = DevicePool(1, 100, 100).run(one_device)
    assert result["rank"] == (0, 0, 1)
    assert all(value.tolist() == [0.0, 1.0, 2.0, 3.0] for value in result["values"])
    assert result["objects"] == [[0], 0, [0]]
    os.environ["CPU_NUM_DEVICES"] = "2"  # threads of one process, without collectives between them
    error = _error_of(lambda: DevicePool(2, 100, 100).run(fails_or_waits))
    print(error.rank, error.remote_type)
    error = _error_of(lambda: DevicePool(2, 1, 100).run(waits))
    print(error.remote_type, "timeout=1" in str(error), "in waits" in str(error))
    del os.environ["CPU_NUM_DEVICES"]
    _beside_gloo(started=False)
    one_device(0)  # and in a process that was not launched at all
    _beside_gloo(started=True)
    print("done")


def _sub_groups(rank: int, parts: list[list[int]]) -> None:
    """Every call in each of them, whatever the order of its ranks; then one of all ranks."""
    mine = next(s for s in [group().new_group(ranks) for ranks in parts] if s is not None)
    members = next(part for part in parts if rank in part)
    assert (mine.ranks, mine.rank) == (tuple(members), members.index(rank))
    check_group(Ranks(mine))
    everyone = torch.full((2,), float(rank), device=device())
    group().all_reduce(everyone)
    assert everyone.tolist() == [6.0, 6.0]
    assert mine.all_gather_object(rank) == members


# ------------------------------------------------------------------ tests
@pytest.fixture
def four() -> Pool:
    return rank_pool(4, "xla")


@pytest.fixture(params=[2, 4])
def pool(request: pytest.FixtureRequest) -> Pool:
    return rank_pool(request.param, "xla")


def assert_trained(results: list[dict[str, Any]]) -> None:
    losses, parameters = train_single()
    for result in results:
        torch.testing.assert_close(torch.tensor(result["losses"]), torch.tensor(losses), rtol=1e-5, atol=1e-6)
        torch.testing.assert_close(
            [p.detach() for p in result["parameters"]], parameters, rtol=1e-5, atol=1e-6
        )
        # Momentum buffers exist from the second step on, so the first step's graph is another one.
        assert len(set(result["compiled"][2:])) == 1, result["compiled"]
        assert result["found"] == {"all-reduce": 5}  # four gradients and the loss


@pytest.mark.parametrize("reduce_in_hook", [False, True])
@pytest.mark.parametrize("read_every_step", [False, True])
def test_training_equals_one_process_with_one_compile(
    pool: Pool, reduce_in_hook: bool, read_every_step: bool
) -> None:
    results = pool.run(train, reduce_in_hook, read_every_step)
    assert_trained(results)
    for rank, result in enumerate(results):
        if reduce_in_hook:
            assert result["hooked"] == {rank}
            assert result["other thread"]
            assert result["finished"] == [rank] * STEPS


def test_replicas_share_compiled_programs(four: Pool) -> None:
    compiled = four.run(train, False, False)[0]["compiled"]
    # Everything was compiled by the test above or is compiled once here, never once a replica.
    assert compiled[-1] - compiled[0] <= 2


@on_ranks((4, "xla"))
def test_nan_does_not_spread_to_later_collectives(rank: int) -> None:
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
    assert good.tolist() == [6.0] * 4
    assert everything.tolist() == [0.0, 1.0, 2.0, 3.0]


PARTS = [[[0, 1], [2, 3]], [[2, 0], [3, 1]]]
UNEVEN = [[[0, 1, 2], [3]], [[1], [3, 0, 2]]]  # which a TPU can't have


@pytest.mark.parametrize(
    ("rules", "parts"), [("xla", p) for p in PARTS] + [("xla without rules", p) for p in PARTS[1:] + UNEVEN]
)
def test_sub_groups(rules: str, parts: list[list[int]]) -> None:
    rank_pool(4, rules).run(_sub_groups, parts)


@on_ranks((4, "xla"))
def test_the_collectives_of_a_tpu(rank: int) -> None:
    """The collectives a TPU uses. On a CPU they meet only if all replicas share one executable."""
    from shardkit.backends.xla.group import XlaGroup
    from shardkit.backends.xla.runtime import NativeCollectives, Replica, current_world
    from tests.xla import pending_program
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
    found = pending_program.collectives([gathered, part, exchanged, sent, pair])
    step()
    assert dict(found) == {"all-gather": 1, "reduce-scatter": 1, "all-to-all": 1, "all-reduce": 2}
    whole = torch.stack([torch.arange(4.0) + 10 * r for r in range(4)])
    wanted = [
        whole.flatten(),
        whole.sum(0)[rank : rank + 1],
        whole[:, rank],
        whole[2],
        whole[1 if rank < 2 else 3],
    ]
    assert all(map(torch.equal, [t.cpu() for t in (gathered, part, exchanged, sent, pair)], wanted))


def test_host_random_state_is_each_replicas_own(four: Pool) -> None:
    first, second = four.run(host_random), four.run(host_random)
    drawn = [result["drawn"] for result in first]
    assert drawn == [drawn[0]] * 4
    assert len(set(drawn[0])) == 5
    starts = [tuple(result["first"].tolist()) for result in first]
    assert len(set(starts)) == 4, "ranks start differently, as processes do"
    assert starts == [tuple(result["first"].tolist()) for result in second], "and the same in each run"


@on_ranks((4, "xla"))
def test_every_way_to_read_a_value(rank: int) -> None:
    """Everything that reads a value, on all replicas, of tensors that depend on collectives."""
    g = group()

    def summed() -> torch.Tensor:
        value = torch.ones(2, device=device())
        g.all_reduce(value)
        return value

    host = torch.zeros(2)
    host.copy_(summed())
    assert host.tolist() == summed().cpu().tolist() == summed().tolist() == [4.0, 4.0]
    assert summed()[0].item() == 4.0
    assert "4." in repr(summed())
    assert bool((summed() > 0).all())
    assert torch.equal(summed(), summed())
    assert summed().nonzero().shape[0] == 2


def test_one_rank_may_read_what_depends_on_no_collective(four: Pool) -> None:
    results = four.run(one_reads_local)
    assert [value for _, value in results] == [[4.0, 4.0]] * 4
    assert results[0][0] == 0.0


def test_one_rank_may_return_what_all_computed(four: Pool) -> None:
    results = four.run(one_returns)
    assert results[0].tolist() == [4.0, 4.0]
    assert results[0].device.type == "cpu"


@pytest.mark.parametrize(
    ("case", "named"),
    [
        ("shape", ["float32[2]", "float32[3]", "of different shapes"]),
        ("operation", ["broadcast(float32[2], src=0) 'weights'", "all_reduce(float32[2], sum) 'gradients'"]),
        ("missing", ["'second'", "nothing"]),
        ("read on one rank", ["reading a value", "'more'"]),
        ("host against device", ["all_gather_object 'objects'", "'gradients'"]),
    ],
)
def test_out_of_step_is_an_error_on_all_ranks(four: Pool, case: str, named: list[str]) -> None:
    for ((kind, message, seconds),) in four.run(out_of_step, case):
        assert kind == "OutOfStepError"
        assert seconds < 60
        for part in named:
            assert part in message
        assert all(f"rank {rank}:" in message for rank in range(4))
        assert "First difference, at collective" in message


def test_a_rank_that_ends_early_leaves_no_other_waiting(four: Pool) -> None:
    first, *others = four.run(leaves_early)
    assert first is None
    for kind, message, seconds in others:
        assert kind == "OutOfStepError"
        assert "rank 0: has finished its function" in message
        assert seconds < 60


@pytest.fixture(scope="module")
def failing() -> Iterator[ReplicaPool]:
    """Every test with it ends its process; the next one shows that the pool goes on."""
    with ReplicaPool(2, timeout=400) as pool:
        yield pool


@pytest.mark.parametrize("program", [fails, fails_while_others_work])
def test_first_error_comes_back_at_once(failing: ReplicaPool, program: Callable[..., Any]) -> None:
    before = failing.run(process_id)
    assert len(set(before)) == 1
    start = time.monotonic()
    with pytest.raises(RankFailedError, match="no luck") as failure:
        failing.run(program)
    assert time.monotonic() - start < 60  # not the limit of the call
    assert failure.value.rank == 1
    assert failure.value.remote_type == "ValueError"
    assert "test_xla.py" in failure.value.remote_traceback
    assert ends(before[0])


def test_timeout_shows_where_every_replica_is(failing: ReplicaPool) -> None:
    failing.run(process_id)
    failing.timeout = 2
    with pytest.raises(RankFailedError, match="in hangs") as failure:
        failing.run(hangs)
    assert failure.value.remote_type == "TimeoutError"
    failing.timeout = 60


def test_death_of_the_process(failing: ReplicaPool) -> None:
    with pytest.raises(RankFailedError, match="exit code 17"):
        failing.run(dies)


def test_launch_through_the_backend_as_compiled_for_users(monkeypatch: pytest.MonkeyPatch) -> None:
    """All other tests compile without optimization."""
    monkeypatch.delenv("XLA_FLAGS")
    results = get_backend("xla").launch(train, 2, (False, False), timeout=400)
    assert len(results) == 2
    assert_trained(results)


def test_the_launch_of_a_tpu() -> None:
    code = (
        "from tests.backends import test_xla\nif __name__ == '__main__':\n    test_xla.launch_by_runtime()\n"
    )
    printed = output_of("-c", code, PJRT_DEVICE="CPU")
    assert [line for line in printed.splitlines() if not line.startswith("[Gloo]")] == [
        "1 ValueError",  # at once, although the other one waits
        "TimeoutError True True",
        "gloo",
        "xla",
        "0 True",  # spawn(nprocs=1): this process, as torch_xla has it
        "done",
    ]


def test_processes_that_the_runtime_does_not_connect_are_refused(tmp_path: Path) -> None:
    """On a CPU, each process that torchrun starts would be a world of its own."""
    script = tmp_path / "script.py"
    script.write_text(
        "import shardkit\n"
        "def rank_main(rank):\n"
        "    return shardkit.backend.get_backend('xla').group().world_size\n"
        "shardkit.launch(rank_main, 2, backend='xla')\n"
    )
    done = ran(*TORCHRUN, str(script), PJRT_DEVICE="CPU")
    assert done.returncode != 0
    assert "is one of 2 processes, but its XLA runtime connects to no other" in done.stderr


DTYPES = [
    torch.float32,
    torch.float64,
    torch.bfloat16,
    torch.float16,
    torch.int64,
    torch.int32,
    torch.uint8,
]


@pytest.mark.parametrize("sizes", [[3, 0, 5, 1], [2, 2, 2, 2], [0, 0, 0, 4]])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@on_ranks((4, "xla"))
def test_sizes_and_dtypes(rank: int, dtype: torch.dtype, sizes: list[int]) -> None:
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
    assert all(t.dtype is dtype for t in (full, part, received, transposed, scalar))
    assert full.tolist() == [[0] * total, [r + 1 for r in range(4) for _ in range(sizes[r])]]
    assert torch.equal(part.cpu(), torch.arange(total).to(dtype).split(sizes)[rank])
    assert received.tolist() == [r for r in range(4) for _ in range(sizes[rank])]
    assert transposed.tolist() == [[3] * 3] * 2
    assert scalar.item() == 6 or rank != 0
