"""``shardkit doctor``: what it measures on this machine, and what it finds wrong with others."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from shardkit.tools import doctor
from shardkit.tools.cli import main
from shardkit.tools.doctor import (
    ERROR,
    NOTE,
    WARNING,
    Finding,
    Link,
    _names,
    check_links,
    check_segments,
    in_order,
)

ETH = {"eth0": {"address": "10.0.0.1", "state": "up"}, "ib0": {"address": "", "state": "down"}}


def test_this_machine(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    for name in ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", "GLOO_SOCKET_IFNAME"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("TORCH_DISTRIBUTED_DEBUG", "DETAIL")
    status = main(["doctor", "--json", "--ranks", "10000000"])
    report = json.loads(capsys.readouterr().out)
    assert [link["gbytes"] > 0.001 for link in report["links"]] == [True] * 3
    assert all(abs(link["clock"]) < 0.5 for link in report["links"])
    found = {f["what"].partition(" ")[0]: f["level"] for f in report["findings"]}
    assert found["TORCH_DISTRIBUTED_DEBUG=DETAIL:"] == NOTE
    assert report["machines"][0]["versions"]["torch"]
    if report["machines"][0]["limits"]["open_files"] >= 0 and Path("/proc/self/fd").is_dir():
        files = report["open_files_of_a_rank"]
        assert 5 <= files["each"] <= 20  # a connection in each of five groups, at least
        assert status == 1
        assert "ulimit -n" in next(f["do"] for f in report["findings"] if f["level"] == ERROR)


def test_limits() -> None:
    assert list(doctor.check_open_files({"open_files": 1024, "open_files_hard": 4096}, 40, 5, 100)) == []
    (low,) = doctor.check_open_files({"open_files": 1024, "open_files_hard": 4096}, 40, 5, 200)
    assert low.level == ERROR
    assert low.do == "ulimit -n 1294 before the ranks start"
    (hard,) = doctor.check_open_files({"open_files": 1024, "open_files_hard": 1024}, 40, 5, 200)
    assert "as root" in hard.do


def test_interfaces() -> None:
    def check(**environment: str) -> list[str]:
        return [f.what for f in doctor.check_names(ETH, environment)]

    assert check(GLOO_SOCKET_IFNAME="eth0", NCCL_SOCKET_IFNAME="^lo,docker") == []
    assert check(NCCL_SOCKET_IFNAME="eth") == check(NCCL_SOCKET_IFNAME="=eth0:1") == []
    assert "no such interface" in check(GLOO_SOCKET_IFNAME="eth1")[0]
    assert "is down" in check(GLOO_SOCKET_IFNAME="ib0")[0]
    assert list(doctor.check_own_address("127.0.1.1", 1, {})) == []
    assert list(doctor.check_own_address("127.0.1.1", 2, {"GLOO_SOCKET_IFNAME": "eth0"})) == []
    (found,) = doctor.check_own_address("127.0.1.1", 2, {})
    assert "GLOO_SOCKET_IFNAME" in found.do
    assert "lo" in doctor.interfaces()


@pytest.mark.parametrize(
    ("environment", "devices", "says"),
    [
        ({"RANK": "0", "WORLD_SIZE": "4", "MASTER_ADDR": "a", "MASTER_PORT": "1"}, 0, ""),
        ({"WORLD_SIZE": "4"}, 0, "WORLD_SIZE set, but not RANK, MASTER_ADDR, MASTER_PORT"),
        (
            {"TORCHELASTIC_RUN_ID": "a", "RANK": "0", "WORLD_SIZE": "4", "LOCAL_WORLD_SIZE": "2",
             "MASTER_ADDR": "localhost"},
            0, "only 2 of 4 ranks are on this machine",
        ),
        (
            {"RANK": "0", "WORLD_SIZE": "4", "MASTER_ADDR": "a", "MASTER_PORT": "1", "SLURM_STEP_NUM_TASKS": "8"},
            0, "srun started 8 tasks, and WORLD_SIZE says 4",
        ),
        ({"LOCAL_WORLD_SIZE": "8"}, 4, "8 ranks on a machine with 4 visible accelerators"),
        ({"CUDA_LAUNCH_BLOCKING": "1"}, 0, "is waited for"),
    ],
)  # fmt: skip
def test_variables(environment: dict[str, str], devices: int, says: str) -> None:
    found = [f.what for f in doctor.check_variables(environment, devices)]
    assert len(found) == bool(says)
    assert all(says in what for what in found), found


def test_links() -> None:
    hosts = ["a", "b", "c"]
    links = [
        Link(0, 1, 1.2, 1e-4, 1e-4, 0.0),
        Link(0, 2, 0.02, 1e-4, 1e-4, -7.5),
        Link(1, 2, 1.1, 1e-4, 1e-4, 0.0),
    ]
    slow, clocks = check_links(links, hosts)
    assert slow.what == "ranks 0 and 2 (a, c): 0.02 GB/s, where 1.1 is usual here"
    assert "clocks differ by 7.5 s" in clocks.what
    assert list(check_segments("a", 1000, 5)) == []
    assert "10 %" in next(check_segments("a", 1000, 100)).what


def test_machines_that_differ() -> None:
    here = doctor.look(1)
    other = doctor.Machine(
        "other", "10.0.0.2", {**here.versions, "torch": "1.13"}, {"type": "cuda", "count": 9}, {}, {}, {}
    )
    assert list(doctor.compare([here, here])) == []
    versions, devices = doctor.compare([here, other])
    assert (versions.level, devices.level) == (ERROR, WARNING)
    assert "1.13 on other" in versions.what
    (xla,) = doctor._check_versions({"torch": "2.13.0+cpu", "torch_xla": "2.9.0"})
    assert "torch==2.9.0" in xla.do


def test_names_and_order() -> None:
    assert _names([("a", "1"), ("a", "2"), ("b", "3"), ("a", "1")]) == ["a#1", "a#2", "b", "a#1"]
    note, error = Finding(NOTE, "n", "", "a"), Finding(ERROR, "e", "", "b")
    assert in_order([note, error, note._replace(where="c")]) == [error, note._replace(where="a, c")]
