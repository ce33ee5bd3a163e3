"""Replicas under a TPU's rules: what is refused, what a pod's ranks are, and sharding over a part of the ranks."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from shardkit.errors import ConfigurationError, OutOfStepError
from tests.pools import rank_pool

pytest.importorskip("torch_xla")

from shardkit.backends.xla import runtime
from shardkit.backends.xla.cpu_replicas import Rules, rules_here
from tests.xla import pod_programs as programs

pytestmark = pytest.mark.xla


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
    found = rank_pool(4, "xla").run(programs.refused, case)
    assert {name for name, _ in found} == {kind}
    for _, message in found:
        assert all(word in message for word in words), message


def test_without_the_rules_threads_may_do_more() -> None:
    pool = rank_pool(4, "xla without rules")
    assert pool.run(programs.allowed, "part by xm") == [[b"0", b"1"]] * 2 + [[b"2", b"3"]] * 2
    assert pool.run(programs.allowed, "read on one rank") == [[4.0, 4.0]] * 4
    assert pool.run(programs.allowed, "other values read") == [[4.0, 4.0]] * 4
    assert pool.run(programs.allowed, "more in one part") == [[4.0, 4.0]] * 2 + [[2.0, 2.0]] * 2


def test_different_exchanges_of_one_size() -> None:
    for kind, message in rank_pool(4, "xla").run(programs.different_calls):
        assert kind == "OutOfStepError"
        assert "broadcast_object(src=0)" in message
        assert "all_gather_object" in message


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
    for rank, found in enumerate(rank_pool(4, "xla").run(programs.ordinals)):
        assert found == {
            "local_ordinal": rank % 2, "process_index": rank, "process_count": 4, "host_index": rank // 2,
            "local_process_count": 2, "masters": [rank % 2 == 0, rank == 0], "theirs": [rank % 2 == 0, rank % 2],
        }  # fmt: skip
    for rank, found in enumerate(rank_pool(4, "xla without rules").run(programs.ordinals)):
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
    rank_pool(4, "xla").run(programs.files, str(tmp_path))
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
    for moved, count in rank_pool(4, "xla").run(programs.objects, lengths):
        assert moved >= 4 * count
    for moved, _ in rank_pool(4, "xla without rules").run(programs.objects, lengths):
        assert moved == 0


# ------------------------------------------------------------------ sharding over a part of the ranks
@pytest.mark.parametrize("how", ["group of shardkit", "group of torch.distributed", "hybrid"])
def test_fsdp_over_a_part_of_the_ranks_equals_one_process(how: str) -> None:
    results = rank_pool(4, "xla").run(programs.train_fsdp, how)
    for rank, result in enumerate(results):
        norms, parameters = programs.truth([0, 1, 2, 3] if how == "hybrid" else programs.HALVES[rank % 2])
        assert result["norms"] == pytest.approx(norms, rel=1e-4)
        _assert_equal(result["state"], parameters)


@pytest.mark.parametrize("program", [programs.train_oss, programs.train_zero])
def test_optimizers_over_a_part_of_the_ranks_equal_one_process(program: Any) -> None:
    for rank, result in enumerate(rank_pool(4, "xla").run(program)):
        _assert_equal(result["state"], programs.truth(programs.HALVES[rank % 2])[1])


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
    for labels in rank_pool(4, "xla").run(programs.exchanges_of_construction, 2, options):
        assert labels == ["check of parameters of the wrapped module or options"] * 3
