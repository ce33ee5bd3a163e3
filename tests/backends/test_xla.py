"""XLA replicas on a CPU with real collectives: training, syncs, errors, random states, processes."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from shardkit.backend import get_backend
from shardkit.errors import RankFailedError

pytest.importorskip("torch_xla", reason="needs torch_xla")

from shardkit.backends.xla import ReplicaPool
from tests.backends import xla_programs as programs
from tests.pools import Pool, rank_pool

pytestmark = pytest.mark.xla


@pytest.fixture
def four() -> Pool:
    return rank_pool(4, "xla")


@pytest.fixture
def two() -> Pool:
    return rank_pool(2, "xla")


@pytest.fixture(params=[2, 4])
def pool(request: pytest.FixtureRequest) -> Pool:
    return rank_pool(request.param, "xla")


def assert_trained(results: list[dict[str, Any]]) -> None:
    losses, parameters = programs.train_single()
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
    results = pool.run(programs.train, reduce_in_hook, read_every_step)
    assert_trained(results)
    for rank, result in enumerate(results):
        if reduce_in_hook:
            assert result["hooked"] == {rank}
            assert result["other thread"]
            assert result["finished"] == [rank] * programs.STEPS


def test_replicas_share_compiled_programs(four: Pool) -> None:
    compiled = four.run(programs.train, False, False)[0]["compiled"]
    # Everything was compiled by the test above or is compiled once here, never once a replica.
    assert compiled[-1] - compiled[0] <= 2


def test_nan_does_not_spread_to_later_collectives(four: Pool) -> None:
    for total, gathered in four.run(programs.nan_stays):
        assert total.tolist() == [6.0] * 4
        assert gathered.tolist() == [0.0, 1.0, 2.0, 3.0]


PARTS = [[[0, 1], [2, 3]], [[2, 0], [3, 1]]]
UNEVEN = [[[0, 1, 2], [3]], [[1], [3, 0, 2]]]  # which a TPU can't have


@pytest.mark.parametrize(
    ("rules", "parts"), [("xla", p) for p in PARTS] + [("xla without rules", p) for p in PARTS[1:] + UNEVEN]
)
def test_sub_groups(rules: str, parts: list[list[int]]) -> None:
    results = rank_pool(4, rules).run(programs.sub_groups, parts)
    for rank, result in enumerate(results):
        members = next(part for part in parts if rank in part)
        mine = members.index(rank)
        assert result["ranks"] == tuple(members)
        assert result["rank"] == mine
        assert result["gathered"] == [float(r) for r in members for _ in range(2)]
        assert result["total"] == [float(sum(members))] * 2
        assert result["part"] == sum(mine + r for r in members)
        assert result["exchanged"] == [10.0 * r + mine for r in members]
        assert result["everyone"] == [6.0, 6.0]
        assert result["objects"] == members


def test_the_collectives_of_a_tpu(four: Pool) -> None:
    source = torch.stack([torch.arange(4.0) + 10 * rank for rank in range(4)])
    for rank, result in enumerate(four.run(programs.native)):
        assert result["found"] == {"all-gather": 1, "reduce-scatter": 1, "all-to-all": 1, "all-reduce": 2}
        assert torch.equal(result["gathered"], source.flatten())
        assert torch.equal(result["part"], source.sum(0)[rank : rank + 1])
        assert torch.equal(result["exchanged"], source[:, rank])
        assert torch.equal(result["sent"], source[2])
        assert torch.equal(result["pair"], source[1 if rank < 2 else 3])


def test_group_of_what_users_pass(two: Pool) -> None:
    for rank, found in enumerate(two.run(programs.groups_of_objects)):
        assert found == [(0, 1, (rank,))] + [(rank, 2, (0, 1))] * 3


def test_wrong_calls_are_refused(two: Pool) -> None:
    for rank, messages in enumerate(two.run(programs.refuses)):
        expected = [
            "move it to",
            "fit this rank's shard",
            "fit this rank's shard",
            "use SUM",
            "not global ones",
        ]
        expected += ["distinct ranks", "expected a process group"]
        assert len(messages) == len(expected)
        for message, part in zip(messages, expected, strict=True):
            assert part in message
            assert f"rank {rank}" in message


def test_host_random_state_is_each_replicas_own(four: Pool) -> None:
    first, second = four.run(programs.host_random), four.run(programs.host_random)
    drawn = [result["drawn"] for result in first]
    assert drawn == [drawn[0]] * 4
    assert len(set(drawn[0])) == 5
    starts = [tuple(result["first"].tolist()) for result in first]
    assert len(set(starts)) == 4, "ranks start differently, as processes do"
    assert starts == [tuple(result["first"].tolist()) for result in second], "and the same in each run"


def test_device_random_state(two: Pool) -> None:
    results = two.run(programs.device_random)
    for result in results:
        assert torch.equal(result["first"], result["again"])
        assert result["state"].dtype == torch.int64
    assert not torch.equal(results[0]["first"], results[1]["first"])


def test_every_way_to_read_a_value(four: Pool) -> None:
    for result in four.run(programs.reads):
        assert result["item"] == 4.0
        assert result["cpu"].tolist() == result["tolist"] == result["copy_"].tolist() == [4.0, 4.0]
        assert "4." in result["repr"]
        assert result["bool"]
        assert result["equal"]
        assert result["nonzero"] == 2


def test_one_rank_may_read_what_depends_on_no_collective(four: Pool) -> None:
    results = four.run(programs.one_reads_local)
    assert [value for _, value in results] == [[4.0, 4.0]] * 4
    assert results[0][0] == 0.0


def test_one_rank_may_return_what_all_computed(four: Pool) -> None:
    results = four.run(programs.one_returns)
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
    for ((kind, message, seconds),) in four.run(programs.out_of_step, case):
        assert kind == "OutOfStepError"
        assert seconds < 60
        for part in named:
            assert part in message
        assert all(f"rank {rank}:" in message for rank in range(4))
        assert "First difference, at collective" in message


def test_a_rank_that_ends_early_leaves_no_other_waiting(four: Pool) -> None:
    first, *others = four.run(programs.leaves_early)
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


@pytest.mark.parametrize("program", [programs.fails, programs.fails_while_others_work])
def test_first_error_comes_back_at_once(failing: ReplicaPool, program: Callable[..., Any]) -> None:
    before = failing.run(programs.process_id)
    assert len(set(before)) == 1
    start = time.monotonic()
    with pytest.raises(RankFailedError, match="no luck") as failure:
        failing.run(program)
    assert time.monotonic() - start < 60  # not the limit of the call
    assert failure.value.rank == 1
    assert failure.value.remote_type == "ValueError"
    assert "xla_programs.py" in failure.value.remote_traceback
    assert _ends(before[0])


def test_timeout_shows_where_every_replica_is(failing: ReplicaPool) -> None:
    failing.run(programs.process_id)
    failing.timeout = 2
    with pytest.raises(RankFailedError, match="in hangs") as failure:
        failing.run(programs.hangs)
    assert failure.value.remote_type == "TimeoutError"
    failing.timeout = 60


def test_death_of_the_process(failing: ReplicaPool) -> None:
    with pytest.raises(RankFailedError, match="exit code 17"):
        failing.run(programs.dies)


def test_launch_through_the_backend_as_compiled_for_users(monkeypatch: pytest.MonkeyPatch) -> None:
    """All other tests compile without optimization."""
    monkeypatch.delenv("XLA_FLAGS")
    results = get_backend("xla").launch(programs.train, 2, (False, False), timeout=400)
    assert len(results) == 2
    assert_trained(results)


def _ends(process: int) -> bool:
    for _ in range(100):
        try:
            os.kill(process, 0)
        except ProcessLookupError:
            return True
        time.sleep(0.1)
    return False


def test_the_launch_of_a_tpu() -> None:
    code = (
        "from tests.backends import xla_programs\n"
        "if __name__ == '__main__':\n"
        "    xla_programs.launch_by_runtime()\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        timeout=400,
        check=False,
        env={**os.environ, "PJRT_DEVICE": "CPU"},
    )
    assert done.returncode == 0, done.stderr
    assert [line for line in done.stdout.splitlines() if not line.startswith("[Gloo]")] == [
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
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    done = subprocess.run(
        [*command, str(script)],
        capture_output=True,
        text=True,
        timeout=400,
        check=False,
        env={**os.environ, "PJRT_DEVICE": "CPU", "PYTHONPATH": str(Path(__file__).parents[2])},
    )
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
def test_sizes_and_dtypes(four: Pool, dtype: torch.dtype, sizes: list[int]) -> None:
    whole = torch.arange(sum(sizes)).to(dtype)
    for rank, result in enumerate(four.run(programs.uneven, dtype, sizes)):
        assert all(value.dtype is dtype for value in result.values())
        assert result["full"][0].tolist() == [0] * sum(sizes)
        assert result["full"][1].tolist() == [r + 1 for r in range(4) for _ in range(sizes[r])]
        assert torch.equal(result["part"], whole.split(sizes)[rank])
        assert result["received"].tolist() == [r for r in range(4) for _ in range(sizes[rank])]
        assert result["transposed"].tolist() == [[3] * 3] * 2
        assert rank != 0 or result["scalar"].item() == 6
