"""launch, plain multiprocessing.spawn and torchrun: results, failures of one rank, no orphans."""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import subprocess
import sys
import textwrap
import time
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.multiprocessing

import shardkit
from shardkit.backend import get_backend
from shardkit.backends.processes import RankPool
from shardkit.errors import OutOfStepError
from shardkit.launching import _of_machine
from shardkit.optim.oss import OSS
from tests.started import TORCHRUN, environment, output_of, program, ran


def _sum_of_ranks(rank: int, extra: int) -> tuple[int, float, dict[str, str]]:
    total = torch.tensor([float(rank)])
    torch.distributed.all_reduce(total)
    return rank, total.item() + extra, dict(os.environ)


def test_results_of_every_rank() -> None:
    """Ranks find what torchrun sets."""
    results = shardkit.launch(_sum_of_ranks, 2, args=(10,))
    assert [r[:2] for r in results] == [(0, 11.0), (1, 11.0)]
    assert not torch.distributed.is_initialized()
    for rank, (_, _, variables) in enumerate(results):
        for name in ("RANK", "LOCAL_RANK", "ROLE_RANK"):
            assert variables[name] == str(rank)
        for name in ("WORLD_SIZE", "LOCAL_WORLD_SIZE", "ROLE_WORLD_SIZE"):
            assert variables[name] == "2"
        assert variables["GROUP_RANK"] == "0"
        assert variables["GROUP_WORLD_SIZE"] == "1"
        assert variables["MASTER_ADDR"]
        assert 0 < int(variables["MASTER_PORT"]) < 65536


def _one_raises(rank: int) -> None:
    if rank == 1:
        raise KeyError("the reason")
    torch.distributed.barrier()  # would wait for ever


def _one_hears_of_it_first(rank: int) -> None:
    if rank == 0:
        raise shardkit.RankLostError("rank 1 is not there any more")
    time.sleep(0.5)
    raise KeyError("the reason")


def _one_is_killed(rank: int) -> None:
    if rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    torch.distributed.barrier()


def _one_crashes(rank: int) -> None:
    if rank == 1:
        ctypes.string_at(0)
    torch.distributed.barrier()


def _all_hang(rank: int) -> None:
    time.sleep(600)


def _pid(rank: int) -> int:
    return os.getpid()


def test_failures_come_back_at_once() -> None:
    with RankPool(2, timeout=400) as pool:
        first = pool.run(_pid)
        for fn, kind, text in (
            (_one_raises, "KeyError", "the reason"),
            (_one_hears_of_it_first, "KeyError", "the reason"),
            (_one_is_killed, "SIGKILL", "rank 1"),
            (_one_crashes, "SIGSEGV", r"rank 1 was ended by SIGSEGV[\s\S]* in _one_crashes"),
        ):
            began = time.monotonic()
            with pytest.raises(shardkit.RankFailedError, match=text) as caught:
                pool.run(fn)
            if fn is _one_raises:
                assert time.monotonic() - began < 60  # not the limit of the call
            assert caught.value.rank == 1
            assert caught.value.remote_type == kind
        for pid in first:
            with pytest.raises(ProcessLookupError):
                os.kill(pid, 0)
        pool.run(_pid)
        pool.timeout = 5
        with pytest.raises(shardkit.RankFailedError, match="_all_hang"):
            pool.run(_all_hang)


def test_what_can_not_be_launched() -> None:
    with pytest.raises(shardkit.BackendError, match="no backend named 'nccl'"):
        shardkit.launch(_pid, 2, backend="nccl")
    with pytest.raises(shardkit.ConfigurationError, match="at least 1"):
        shardkit.launch(_pid, 0)


def _script(path: Path, text: str) -> str:
    path.write_text(textwrap.dedent(text))
    return str(path)


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM, signal.SIGINT])
def test_a_launcher_that_is_ended_leaves_nothing(tmp_path: Path, number: signal.Signals) -> None:
    script = _script(
        tmp_path / "script.py",
        """
        import os, sys, time, shardkit
        def rank_main(rank, folder):
            os.rename(_write(f"{folder}/new{rank}", str(os.getpid())), f"{folder}/pid{rank}")
            time.sleep(600)
        def _write(path, text):
            with open(path, "w") as file:
                file.write(text)
            return path
        if __name__ == "__main__":
            shardkit.launch(rank_main, 2, args=(sys.argv[1],))
        """,
    )
    (tmp_path / "temporary").mkdir()
    parent = subprocess.Popen(
        [sys.executable, script, str(tmp_path)],
        env=environment(TMPDIR=str(tmp_path / "temporary")),
        stderr=subprocess.DEVNULL,
        # a suite that a shell runs in the background ignores it, and so would what it starts
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    )
    deadline = time.monotonic() + 90
    files = [tmp_path / "pid0", tmp_path / "pid1"]
    while not all(f.exists() for f in files):
        assert parent.poll() is None
        assert time.monotonic() < deadline
        time.sleep(0.1)
    parent.send_signal(number)
    parent.wait(60)
    pids = [int(f.read_text()) for f in files]
    while any(_alive(pid) for pid in pids):
        assert time.monotonic() < deadline, "orphans"
        time.sleep(0.1)
    assert list((tmp_path / "temporary").iterdir()) == []


def _alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().split()[2] != "Z"
    except OSError:
        return False


def _train_under_spawn(rank: int, world_size: int, rendezvous: str) -> None:
    """What scripts in the manner of fairscale's guide do: their own spawn and process group."""
    torch.distributed.init_process_group(
        "gloo", init_method=f"file://{rendezvous}", rank=rank, world_size=world_size
    )
    model = torch.nn.Linear(3, 2)
    optimizer = OSS(model.parameters(), lr=0.1)
    wrapped = shardkit.ShardedDDP(model, optimizer)
    wrapped(torch.ones(1, 3) * rank).sum().backward()
    optimizer.step()
    values: list[Any] = [None] * world_size
    torch.distributed.all_gather_object(values, model.weight.tolist())
    assert values[0] == values[1]
    torch.distributed.destroy_process_group()


def test_plain_multiprocessing_spawn(tmp_path: Path) -> None:
    torch.multiprocessing.spawn(_train_under_spawn, (2, str(tmp_path / "rendezvous")), nprocs=2)  # type: ignore[no-untyped-call]


def test_ranks_that_end_right_after_a_collective(tmp_path: Path) -> None:
    """gloo's thread is still busy with the tensors then; without an interpreter it would abort the process."""
    script = _script(
        tmp_path / "script.py",
        """
        import os, sys, torch, torch.distributed as dist
        from shardkit.backend import get_backend
        torch.set_num_threads(1)

        def rank_main(rank, rendezvous):
            dist.init_process_group("gloo", init_method=f"file://{rendezvous}", rank=rank, world_size=2)
            process_group = get_backend("gloo").group().channel("other").process_group
            options = dist.AllreduceCoalescedOptions()
            options.reduceOp = dist.ReduceOp.SUM
            tensors = [torch.ones(1) for _ in range(50_000)]
            process_group.allreduce_coalesced(tensors, options).wait()
            del tensors, process_group
            dist.destroy_process_group()

        for attempt in range(3):
            ranks = []
            for rank in range(2):
                process = os.fork()
                if process == 0:
                    rank_main(rank, f"{sys.argv[1]}/rendezvous{attempt}")
                    sys.exit()  # an orderly end of the interpreter
                ranks.append(process)
            print([os.waitpid(process, 0)[1] for process in ranks], flush=True)
        """,
    )
    printed = output_of(script, str(tmp_path))
    assert [line for line in printed.splitlines() if line.startswith("[0")] == ["[0, 0]"] * 3


def test_torchrun() -> None:
    printed = output_of(*TORCHRUN, program("step_once"), "2")
    assert printed.count("[('rank 0', '0'), ('rank 1', '1')]") == 2


# ------------------------------------------------------------------ start
def test_late_ranks_are_ended_and_say_where_they_are(tmp_path: Path) -> None:
    script = _script(
        tmp_path / "script.py",
        """
        import time
        def heavy_import():
            time.sleep(600)
        if __name__ != "__main__":
            heavy_import()
        import shardkit
        def rank_main(rank): ...
        if __name__ == "__main__":
            try:
                shardkit.launch(rank_main, 2, start_timeout=8)
            except shardkit.RankFailedError as error:
                print(error.remote_type, error)
        """,
    )
    printed = output_of(script)
    for word in ("TimeoutError", "start_timeout", "heavy_import"):
        assert word in printed


def test_functions_that_can_not_travel() -> None:
    def inner(rank: int) -> int:
        return rank

    for fn in (inner, lambda rank: rank):
        with pytest.raises(shardkit.ConfigurationError, match="top of a module"):
            shardkit.launch(fn, 2)
    with pytest.raises(shardkit.ConfigurationError, match="arguments have to be picklable"):
        shardkit.launch(_sum_of_ranks, 2, args=(inner,))


def test_a_function_of_an_interactive_session() -> None:
    code = "import shardkit\ndef f(rank): ...\nshardkit.launch(f, 2)"  # fails, and says why
    done = ran("-c", code)
    assert "ConfigurationError" in done.stderr
    assert "put it into a file" in done.stderr


# ------------------------------------------------------------------ the backend where none is named
@pytest.mark.parametrize(
    ("kind", "devices", "ranks", "expected"),
    [
        (None, 0, 2, "gloo"),
        ("cuda", 4, 4, "cuda"),
        ("cuda", 1, 2, "gloo"),  # and a warning
        ("mps", 1, 1, "gloo"),  # no library of collectives
    ],
)
def test_the_backend_of_the_machine(
    kind: str | None, devices: int, ranks: int, expected: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = None if kind is None else torch.device(kind)
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda check_available=False: found)
    monkeypatch.setattr(torch.accelerator, "device_count", lambda: devices)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: kind == "cuda")
    monkeypatch.setattr(torch.cuda, "device_count", lambda: devices)
    monkeypatch.delenv("LOCAL_WORLD_SIZE", raising=False)
    few = kind == "cuda" and devices < ranks
    with pytest.warns(UserWarning, match="2 ranks are on the host") if few else contextlib.nullcontext():
        chosen = _of_machine(ranks)
    assert (chosen if isinstance(chosen, str) else chosen.name) == expected


def _returns_early(rank: int) -> None:
    if rank == 1:
        get_backend("gloo").group().all_reduce(torch.ones(4), label="loss")


def test_a_rank_that_returns_early() -> None:
    began = time.monotonic()
    with pytest.raises(shardkit.RankFailedError, match="rank 0 has returned from its function") as caught:
        shardkit.launch(_returns_early, 2)
    assert time.monotonic() - began < 30
    assert caught.value.rank == 1
    assert caught.value.remote_type == OutOfStepError.__name__
    assert "(loss)" in str(caught.value)
