"""Jobs of ``shardkit run`` on machines that are network namespaces: what is lost, what the page says, how they go on.

``python -m tests.faults.jobs [CASE ...]`` tries all cases, as root on Linux, and prints a table.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

from tests.started import program

ROOT = Path(__file__).resolve().parents[2]
SOON = 10.0  # seconds until the page
LIMIT = 120.0  # for a job
PORT = 29417
_TICK = 0.1
_numbers = itertools.count()  # what is removed may live on for a moment

# Trains over 480 samples, 12 in a step, and notes which it has used; dies where it is told to, once.
PROGRAM = program("train_and_die")


@contextlib.contextmanager
def machines(count: int) -> Iterator[list[str]]:
    """Namespaces with addresses 10.213.78.1 and up, on one bridge."""
    number = f"{os.getpid() % 1000}{next(_numbers)}"
    names, bridge = [f"skm{number}x{k}" for k in range(count)], f"skb{number}"
    try:
        _ip("link", "add", bridge, "type", "bridge")
        _ip("link", "set", bridge, "up")
        for k, name in enumerate(names):
            _ip("netns", "add", name)
            _ip("link", "add", f"{bridge}v{k}", "type", "veth", "peer", "name", "eth0", "netns", name)
            _ip("link", "set", f"{bridge}v{k}", "master", bridge, "up")
            _ip("-n", name, "addr", "add", f"10.213.78.{k + 1}/24", "dev", "eth0")
            for interface in ("eth0", "lo"):
                _ip("-n", name, "link", "set", interface, "up")
        yield names
    finally:
        for words in (*(("netns", "del", name) for name in names), ("link", "del", bridge)):
            subprocess.run(["ip", *words], check=False, capture_output=True, timeout=10)


def _ip(*words: str) -> None:
    subprocess.run(["ip", *words], check=True, capture_output=True, timeout=10)


@dataclass
class Outcome:
    """What became of a job.

    Attributes:
        statuses: of each machine's ``shardkit run``.
        page: the first headline; ``seconds`` after the fault.
        began: ranks and first step of each attempt; ``used`` the samples at the end, and how many different ones.
    """

    statuses: list[int | None]
    page: str = ""
    seconds: float = float("nan")
    began: list[tuple[int, int]] = field(default_factory=list)
    used: tuple[int, int] = (0, 0)
    output: str = ""


@dataclass(frozen=True)
class JobCase:
    """Something that happens to the last machine of a job.

    Attributes:
        dies_in: the phase in which its rank is killed; "" for what ``happens`` does.
        page: pattern of the headline.
        left: ranks that go on; 0: the job ends.
        variables: of that machine.
    """

    name: str
    page: str
    left: int
    dies_in: str = ""
    happens: Callable[[str, int], None] | None = None
    variables: tuple[tuple[str, str], ...] = ()


def _link_down(namespace: str, agent: int) -> None:
    _ip("-n", namespace, "link", "set", "eth0", "down")


def _machine_lost(namespace: str, agent: int) -> None:
    os.kill(agent, signal.SIGKILL)


def _loss(namespace: str, agent: int) -> None:
    words = ("netns", "exec", namespace, "tc", "qdisc", "add", "dev", "eth0", "root", "netem", "loss", "10%")
    _ip(*words)


def cases(count: int) -> list[JobCase]:
    """All, for that many machines."""
    lost = rf"machine {count - 1} \(10.213.78.{count}.*has not been heard of"
    killed = rf"rank {count - 1} of {count} failed: ended by SIGKILL"
    return [
        JobCase("link down", lost, count - 1, happens=_link_down),
        JobCase("machine lost", f"{lost}|rank . of {count} failed", count - 1, happens=_machine_lost),
        *[
            JobCase(f"killed in {phase}", killed, count, dies_in=phase)
            for phase in ("start", "forward", "backward", "optimizer", "save")
        ],
        JobCase(
            "wrong interface",
            r"failed: RuntimeError.*eth7",
            0,
            variables=(("GLOO_SOCKET_IFNAME", "eth7"),),
        ),
        JobCase("10 % of packets lost", "^$", count, happens=_loss),
    ]


def try_case(case: JobCase, names: list[str], folder: Path) -> Outcome:
    """Runs a job in which it happens after step 12."""
    shutil.copy(PROGRAM, folder / "train.py")
    common = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "FAULT": str(folder / "fault")}
    common.pop("GLOO_SOCKET_IFNAME", None)
    command = [sys.executable, "-m", "shardkit", "run", "--ranks", "1", "--nodes", f"{len(names) - 1}:{len(names)}",
               "--rdzv", f"10.213.78.1:{PORT}", "--id", "job", "--restarts", "1" if case.left == 0 else "3",
               "--join-timeout", "60", "train.py"]  # fmt: skip
    agents, files = [], [folder / f"machine{k}" for k in range(len(names))]
    for k, name in enumerate(names):
        own = dict(case.variables) | {"DIES_IN": case.dies_in} if k == len(names) - 1 else {}
        with files[k].open("w") as out:
            agents.append(
                subprocess.Popen(
                    ["ip", "netns", "exec", name, *command],
                    cwd=folder,
                    env=common | own,
                    stdout=out,
                    stderr=out,
                )
            )
    try:
        return _watched(case, names[-1], agents, files, folder)
    finally:
        for agent in agents:
            agent.kill()
            agent.wait()


def _watched(
    case: JobCase, victim: str, agents: list[subprocess.Popen[bytes]], files: list[Path], folder: Path
) -> Outcome:
    outcome, began, fault = Outcome([]), time.monotonic(), folder / "fault"
    happens = case.happens
    survivors = agents[:-1] if case.left == len(agents) - 1 else agents
    while any(a.poll() is None for a in survivors) and time.monotonic() < began + LIMIT:
        time.sleep(_TICK)
        if happens is not None and _step(folder) >= 12:
            fault.write_text(str(time.time()))
            happens(victim, agents[-1].pid)
            happens = None
        if not outcome.page:
            found = re.search(r"^=+\n(.*)\n", files[0].read_text(errors="replace"), re.M)
            if found:
                since = float(fault.read_text()) if fault.exists() else time.time()
                outcome.page, outcome.seconds = found[1], time.time() - since
    outcome.statuses = [agent.poll() for agent in agents]
    outcome.output = "\n".join(f.read_text(errors="replace") for f in files)
    outcome.began = [
        (int(a), int(b)) for a, b in re.findall(r"^WITH (\d+) FROM (\d+)$", outcome.output, re.M)
    ]
    used = re.search(r"^USED (\d+) (\d+)$", outcome.output, re.M)
    outcome.used = (int(used[1]), int(used[2])) if used else (0, 0)
    return outcome


def _step(folder: Path) -> int:
    try:
        return int((folder / "step").read_text() or 0)
    except (OSError, ValueError):
        return 0


def faults(case: JobCase, outcome: Outcome, count: int) -> list[str]:
    """What is not as it should be."""
    wrong = []
    if not re.search(case.page, outcome.page):
        wrong.append(f"the page says {outcome.page!r}")
    if outcome.page and not outcome.seconds <= SOON + 3 * (case.left == 0):
        wrong.append(f"it took {outcome.seconds:.1f} s")
    if case.left == 0:
        return wrong
    if outcome.used != (480, 480):
        wrong.append(f"samples {outcome.used}")
    if outcome.began[-1][0] != case.left:
        wrong.append(f"it went on as {outcome.began}")
    if any(outcome.statuses[: case.left]):
        wrong.append(f"statuses {outcome.statuses}")
    return wrong


def main() -> int:
    """Tries cases; the number of those with faults."""
    count, failed = 4, 0
    for case in cases(count):
        if sys.argv[1:] and case.name not in sys.argv[1:]:
            continue
        with tempfile.TemporaryDirectory() as folder, machines(count) as names:
            try:
                outcome = try_case(case, names, Path(folder))
            except subprocess.CalledProcessError as error:
                print(f"{case.name:22} not here: {error.stderr.decode().strip()}", flush=True)
                continue
        wrong = faults(case, outcome, count)
        failed += bool(wrong)
        told = f"{outcome.seconds:5.1f} s  ranks and first steps {outcome.began}  {outcome.page[:90]}"
        print(f"{case.name:22} {'; '.join(wrong) or 'right':8} {told}", flush=True)
        if wrong:
            print(outcome.output[-6000:])
    return failed


if __name__ == "__main__":
    sys.exit(main())
