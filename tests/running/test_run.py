"""``shardkit run``: the page about a failure, restarts, fewer ranks, and stopping."""

from __future__ import annotations

import re
import signal
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

import shardkit
from shardkit.tools.cli import main
from tests.started import ROOT, environment, output_of, program

EXPECTED = [(0, 2, []), (1, 2, [2]), (2, 1, [2])]
# Steps end in "checkpoints", as shardkit.save writes them. By attempt: rank 1 raises; dies; is left out.
PROGRAM = Path(program("fail_twice")).read_text()


def _begin(folder: Path, *arguments: str, program: str = PROGRAM) -> subprocess.Popen[str]:
    (folder / "train.py").write_text(program)
    return subprocess.Popen(
        [sys.executable, "-m", "shardkit", "run", *arguments], cwd=folder, env=environment(),
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
    )  # fmt: skip


def test_failures_restarts_and_fewer_ranks(tmp_path: Path) -> None:
    arguments = ("--ranks", "2", "--restarts", "2", "--min-ranks", "1", "--id", "one", "train.py")
    job = _begin(tmp_path, *arguments)
    out, err = job.communicate(timeout=400)
    assert job.returncode == 0, err
    began = [line for line in out.splitlines() if line.startswith("attempt")]
    assert began == [f"attempt {n} of {ranks} ranks from {saved}" for n, ranks, saved in EXPECTED]
    pages = re.findall(r"=====\n(rank .*?)=====", err, re.S)
    assert [page.partition("\n")[0].partition(" (")[0] for page in pages] == [
        "rank 1 of 2 failed: KeyError: 'what went wrong'",
        "rank 1 of 2 failed: ended by SIGKILL",
    ], err
    first = pages[0]
    assert "after optimizer step 2 of this attempt" in first
    assert 'raise KeyError("what went wrong")' in first
    assert re.search(
        r"  rank 0 (waited in|(?:ended:|raised) RankLostError: .*during) \w+ of \d+ elements", first
    ), first
    assert f"Last complete checkpoint: {tmp_path}/saved/step-00000002\n" in first
    assert "Restart 1 of 2, with 2 ranks" in first
    assert "Restart 2 of 2, with 1 rank on this machine, since the same rank failed twice" in pages[1]
    run = tmp_path / "runs" / "one"
    assert run.joinpath("failure.txt").read_text().strip("=\n") == pages[1].strip("=\n")
    assert "attempt 0" in (run / "attempt-0" / "rank1.out").read_text()
    assert "what went wrong" in (run / "attempt-0" / "rank1.err").read_text()
    around = err.replace(first, "").replace(pages[1], "")
    assert "Traceback" not in around, around  # of rank 0, which has lost rank 1: its log has it
    assert "Traceback" in (run / "attempt-0" / "rank0.err").read_text()


# Rank 1 hangs; is gone without a word; then all hang, and don't hear that they are to stop. Silence would be a hang.
HANGS = Path(program("hang_or_leave")).read_text()


def test_ranks_that_hang_or_leave_are_failures(tmp_path: Path) -> None:
    arguments = ("--ranks", "2", "--restarts", "2", "--stuck-after", "15", "--grace", "2", "--id", "one")
    job = _begin(tmp_path, *arguments, "train.py", program=HANGS)
    for rank in range(2):
        _wait_for(job, tmp_path / f"deaf{rank}")
    job.send_signal(signal.SIGTERM)
    out, err = job.communicate(timeout=60)
    assert job.returncode == 1, err
    line = HANGS[: HANGS.index("while attempt == 0")].count("\n") + 1
    hung, left, deaf = re.findall(r"=====\n(rank.*?)=====", err, re.S)
    assert re.match(
        rf"rank 1 of 2 hangs: stood at \S*train.py:{line} in train\n.*after optimizer step 2 of", hung
    ), hung
    assert "for 15 s no rank made a step or printed anything (--stuck-after)" in hung
    assert re.search(r"  rank 0 waited in \w+ of \d+ elements", hung), hung
    assert "Restart 1 of 2, with 2 ranks on this machine" in hung
    assert left.startswith("rank 1 of 2 left with status 0 in mid-training\n"), left
    assert "sys.exit(0)  # gone" in left
    assert re.search(r"  rank 0 ended: (RankLost|OutOfStep)Error", left), left
    assert deaf.startswith("ranks had not ended 2 s after they were asked to save and end (--grace)\n"), deaf
    assert all(re.search(rf"  rank {rank} stood at .* in train", deaf) for rank in range(2)), deaf
    assert "To resume: shardkit run --ranks 2" in deaf
    assert out.count("attempt 2 step 3") == 1
    assert "Traceback" not in err.replace(left, ""), err


def test_sigterm_lets_ranks_save_and_end(tmp_path: Path) -> None:
    """The example, which has all that a program needs for it."""
    example = str(ROOT / "examples" / "train_anything.py")
    job = _begin(tmp_path, "--ranks", "2", example, "--epochs", "1000", "--save-every", "5")
    _wait_for(job, tmp_path / "saved" / "step-00000005")
    job.send_signal(signal.SIGTERM)
    _, err = job.communicate(timeout=400)
    assert job.returncode == 75, err
    saved = shardkit.latest(tmp_path / "saved")
    assert f"ranks have stopped. Last complete checkpoint: {saved}. To resume: shardkit run --ranks 2" in err
    assert not list(tmp_path.glob("runs/*/failure.txt"))


TWICE = """
import shardkit
def meet(rank):
    return shardkit.gather(rank)
if __name__ == "__main__":
    print([shardkit.launch(meet, 2) for _ in range(2)])
"""


def test_a_program_that_launches_twice(tmp_path: Path) -> None:
    """The agent's store outlives the first process group, whose addresses the second one must not take for its own."""
    (tmp_path / "twice.py").write_text(TWICE)
    printed = output_of("-m", "shardkit", "run", "--ranks", "2", "twice.py", folder=tmp_path)
    assert "[[[0, 1], [0, 1]], [[0, 1], [0, 1]]]" in printed


def _wait_for(job: subprocess.Popen[str], file: Path) -> None:
    while not file.exists():
        assert job.poll() is None, job.communicate()
        time.sleep(0.05)


def test_a_machine_whose_ranks_left_early_starts_again_with_the_others(tmp_path: Path) -> None:
    """Its own ranks all ended with status 0: that is success only if the other machine's do, too."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        place = f"127.0.0.1:{free.getsockname()[1]}"
    program = HANGS.replace("attempt == 1", "attempt == 0").replace(
        "    shardkit.stop_requested()", "    return"
    )
    arguments = (
        "--nodes",
        "2",
        "--rdzv",
        place,
        "--id",
        "two",
        "--ranks",
        "1",
        "--restarts",
        "1",
        "train.py",
    )
    jobs = []
    for machine in "ab":
        (tmp_path / machine).mkdir()
        jobs.append(_begin(tmp_path / machine, *arguments, program=program))
    said = [job.communicate(timeout=400) for job in jobs]
    assert [job.returncode for job in jobs] == [0, 0], said
    assert sum("rank 1 of 2 left with status 0 in mid-training" in err for _, err in said) == 1, said
    # of rank 0, the only one that is shown
    assert sum("attempt 1 step 3" in out for out, _ in said) == 1, said


def test_a_machine_that_waits_for_others_ends_when_it_is_asked_to(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as free:
        place = f"127.0.0.1:{free.getsockname()[1]}"
    job = _begin(tmp_path, "--nodes", "2", "--rdzv", place, "--id", "two", "--grace", "0", "train.py")
    _wait_for(job, tmp_path / "runs" / "two" / "agent.log")
    time.sleep(1)  # the handler of signals comes a moment later
    job.send_signal(signal.SIGTERM)
    _, err = job.communicate(timeout=60)
    assert job.returncode == 143, err


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["--ranks", "0", "x.py"], "a machine has at least one"),
        (["--ranks", "2", "--min-ranks", "3", "x.py"], "between 1 and --ranks, 2"),
        (["--ranks", "2", "--min-ranks", "1", "x.py"], "needs --restarts of at least 2"),
        (["--ranks", "2", "--nodes", "2", "x.py"], "needs --rdzv HOST:PORT"),
        (["--ranks", "2", "--nodes", "2", "--rdzv", "a:1", "x.py"], "needs --id NAME"),
        (["--ranks", "2", "--nodes", "3:2", "x.py"], "MIN:MAX"),
        (["--ranks", "2", "--grace", "-1", "x.py"], "--grace -1 --stuck-after 3600: at least 0 seconds"),
        (["--ranks", "2", "missing.py"], "there is no program 'missing.py'"),
        (["--ranks", "1", "--nodes", "2", "--id", "a", "--rdzv", "nowhere.invalid:1", "x.py"], "nowhere.invalid:1"),
    ],
)  # fmt: skip
def test_what_can_not_be_started(
    arguments: list[str],
    says: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("SLURM_JOB_ID", raising=False)
    monkeypatch.setenv("SHARDKIT_RUN_DIR", "")
    (tmp_path / "x.py").write_text("")
    assert main(["run", *arguments]) == 2
    assert says in capsys.readouterr().err


def test_a_port_that_something_else_has(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("SHARDKIT_RUN_DIR", "")
    (tmp_path / "x.py").write_text("")
    with socket.create_server(("127.0.0.1", 0)) as other:
        threading.Thread(target=lambda: other.accept()[0].close(), daemon=True).start()
        place = f"127.0.0.1:{other.getsockname()[1]}"
        assert main(["run", "--ranks", "1", "--nodes", "2", "--id", "a", "--rdzv", place, "x.py"]) == 2
    assert f"{place}: the port is taken by something else" in capsys.readouterr().err
