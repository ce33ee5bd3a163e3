"""``shardkit trace``, and ``shardkit run --trace``."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from shardkit.tools.cli import main
from shardkit.tools.trace import advice, analyse
from shardkit.tracing.ranges import What
from shardkit.tracing.timeline import FORMAT, TracePart, of_events, read_events
from tests.started import program, ran

MS = 1_000_000


class Written:
    """A trace made by hand: two steps of two units on two ranks, times in ms."""

    def __init__(self, ranks: int = 2) -> None:
        self.ranks = ranks
        self.events: list[list[tuple[What, float, float]]] = [[] for _ in range(ranks)]
        self.at = [0.0] * ranks
        self.steps: list[list[tuple[int, int]]] = [[] for _ in range(ranks)]

    def add(self, rank: int, kind: str, unit: str, ms: float, nbytes: int = 0) -> None:
        meets = tuple(range(self.ranks)) if kind in ("all_gather", "reduce_scatter") else ()
        self.events[rank].append((What(kind, unit, meets, nbytes), self.at[rank], self.at[rank] + ms))
        self.at[rank] += ms

    def parts(self, folder: Path) -> None:
        for rank, events in enumerate(self.events):
            whats = list(dict.fromkeys(what for what, _, _ in events))
            part = TracePart(
                format=FORMAT, rank=rank, world_size=self.ranks, backend="gloo", host="h", process=1, torch="2",
                began=0, ended=round(self.at[rank] * MS), threads=[0],
                whats=[tuple(w) for w in whats],  # type: ignore[misc]
                events=[(whats.index(w), round(a * MS), round(b * MS), 0, None, None) for w, a, b in events],
                steps=self.steps[rank], clock=[(0, 0.0, 0.0)],
            )  # fmt: skip
            (folder / f"t.rank-{rank}.json").write_text(json.dumps(part))


def _step(trace: Written, number: int, late: float, gather: float, nbytes: int) -> None:
    """Rank 1 is ``late`` in its data; gathers of unit b take ``gather`` longer than they can be hidden."""
    for rank in range(trace.ranks):
        trace.add(rank, "data", "DataLoader", 1.0 + late * (rank == 1))
        for unit in ("a", "b"):
            trace.add(rank, "all_gather", unit, 0.1, nbytes)
        first = trace.at[rank]
        if rank == 0:
            trace.add(rank, "all_gather.wait", "a", late)
        trace.add(rank, "forward", "a", 5.0)
        trace.add(rank, "all_gather.wait", "b", gather)
        trace.add(rank, "forward", "b", 5.0)
        trace.add(rank, "backward", "b", 0.0)
        trace.at[rank] += 10.0
        trace.add(rank, "reduce_scatter", "b", 0.1, nbytes)
        trace.add(rank, "step", "AdamW", 1.0)
        assert trace.at[rank] > first
        trace.steps[rank].append((number, round(trace.at[rank] * MS)))


def _folder(
    tmp_path: Path, late: float = 0.0, gather: float = 0.0, nbytes: int = 2**24, ranks: int = 2
) -> Path:
    trace = Written(ranks)
    for number in range(2):
        _step(trace, number, late, gather, nbytes)
    trace.parts(tmp_path)
    return tmp_path


def test_times_add_up(tmp_path: Path) -> None:
    found = analyse(of_events(read_events([_folder(tmp_path, late=20.0, gather=4.0, ranks=3)])))
    assert found.step_us == pytest.approx(46_300, rel=0.01)
    # rank 1's data and gathers end 20 ms after those of rank 0, which waits for a as long
    assert [round(found.exposed_us[r]) for r in range(3)] == [24_000, 4_000, 4_000]
    assert round(found.waiting_us[0]) == pytest.approx(20_000, abs=200)
    assert found.busy_us[0] == pytest.approx(22_300, rel=0.01)
    assert found.busy_us[1] == pytest.approx(42_300, rel=0.01)
    assert found.units["b"].exposed["all_gather"] == pytest.approx(4_000, rel=0.01)
    assert found.units["b"].work["backward"] == pytest.approx(10_100, rel=0.02)
    assert (found.late[0].rank, *found.late[0].place) == (1, "data", "DataLoader")
    assert found.late[0].total_us == pytest.approx(40_000, rel=0.01)


def test_machines_have_clocks_of_their_own_and_processes_of_one_machine_do_not(tmp_path: Path) -> None:
    """Rank 1's is 3 ms ahead, known to within 0.1 ms; the 0.2 ms of one machine are within the error."""
    for ahead, host, shown in ((3.0, "other", 7.0), (3.0, "h", 7.0), (0.2, "other", 9.8), (0.2, "h", 10.0)):
        trace = Written()
        for rank in range(2):
            trace.add(rank, "forward", "a", 10.0)
            trace.add(rank, "all_gather", "a", 1.0)
        trace.parts(tmp_path)
        path = tmp_path / "t.rank-1.json"
        part = json.loads(path.read_text())
        error = 0.1 if ahead > 1 else 0.3
        path.write_text(json.dumps({**part, "host": host, "clock": [(0, ahead * MS, error * MS)]}))
        ((_, ranks),) = of_events(read_events([tmp_path])).meetings
        assert ranks[1].start - ranks[0].start == pytest.approx((shown - 10.0) * 1e3, abs=1e-3)


@pytest.mark.parametrize(
    ("options", "about", "said", "change"),
    [
        ({"late": 20.0}, "late rank", "rank 1 takes 20 ms a step longer", "num_workers"),
        ({"gather": 8.0}, "exposed all_gather", "8 ms of it b's (16 MiB)", "prefetch=2"),
        ({}, "data", "all ranks wait for their batches", "num_workers"),
    ],
)
def test_what_is_to_be_changed(
    tmp_path: Path, options: dict[str, Any], about: str, said: str, change: str
) -> None:
    first = advice(analyse(of_events(read_events([_folder(tmp_path, **options)]))))[0]
    assert first.about == about
    assert said in first.found
    assert change in first.change


def test_the_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = _folder(tmp_path, late=20.0)
    assert main(["trace", str(folder), "--merge", str(tmp_path / "trace.json")]) == 0
    text = capsys.readouterr().out
    assert "2 steps of 2 ranks (gloo)" in text
    assert "1     data loading" in text
    assert main(["trace", str(tmp_path / "trace.json"), "--json"]) == 0
    data = json.loads(capsys.readouterr().out)
    assert data["late"][0]["rank"] == 1
    assert data["advice"][0]["about"] == "late rank"
    assert main(["trace", str(tmp_path / "none.json")]) == 2
    assert "none.json" in capsys.readouterr().err


def test_pictures(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("matplotlib")
    folder = _folder(tmp_path, late=20.0)
    assert main(["trace", str(folder), "--plot", str(tmp_path / "p.svg"), "--step", "0"]) == 0
    assert "<svg" in (tmp_path / "p.svg").read_text()
    assert main(["trace", str(folder), "--plot", str(tmp_path / "p.svg"), "--step", "7"]) == 2
    assert "it has [0, 1]" in capsys.readouterr().err


# ------------ ``shardkit run --trace``
@pytest.mark.parametrize(("steps", "traced"), [("2:3", 2), ("3:9", 2)])
def test_some_steps_of_a_run(tmp_path: Path, steps: str, traced: int) -> None:
    """The second asks for more than there are: each rank leaves its part."""
    shutil.copy(program("train_with_a_late_rank"), tmp_path / "train.py")
    run = ["-m", "shardkit", "run", "--ranks", "2", "--id", "a", "--trace"]
    done = ran(*run, f"steps={steps}", "train.py", folder=tmp_path)
    assert done.returncode == 0, done.stderr
    assert f"shardkit trace {tmp_path / 'runs' / 'a'}" in done.stderr
    found = analyse(of_events(read_events([tmp_path / "runs" / "a"])))
    assert found.steps == traced
    assert (found.late[0].rank, *found.late[0].place) == (1, "forward", "1")


def test_steps_that_are_none(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["run", "--trace", "10-12", __file__]) == 2
    assert "--trace '10-12': write steps=FIRST:LAST" in capsys.readouterr().err
