"""Unchanged scripts under ``shardkit rehearse``."""

from __future__ import annotations

import inspect
import io
import json
import os
import re
import shutil
import sys
import textwrap
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

import digits
import shardkit
from shardkit.errors import ConfigurationError
from shardkit.tools.cli import main
from shardkit.tools.rehearsal import rehearse, surroundings
from tests.pools import rank_pool
from tests.rehearsal import hangs, trainings
from tests.rehearsal.test_collectives import same
from tests.started import output_of, program

ROOT = Path(__file__).resolve().parents[2]


def written(folder: Path, text: str, name: str = "train.py") -> str:
    path = folder / name
    path.write_text(textwrap.dedent(text))
    return str(path)


def test_a_script_for_torchrun(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Each rank has its own environment, ``__main__`` and generators; the end is as the beginning."""
    script = written(
        tmp_path,
        """
        import os, pickle, random, sys
        import helper
        import torch
        import torch.distributed as dist

        SEEN = []


        class Message:
            def __init__(self):
                self.rank = int(os.environ["RANK"])


        def main():
            assert sys.argv[1:] == ["--lr", "3"], sys.argv
            first = torch.rand(1)
            dist.init_process_group("nccl" if helper.on_gpu() else "gloo")
            rank, world = dist.get_rank(), dist.get_world_size()
            os.environ["MINE"] = str(rank)
            SEEN.append(rank)
            dist.barrier()
            assert os.environ["MINE"] == str(rank) and "MINE" in os.environ and dict(os.environ)["MINE"] == str(rank)
            assert SEEN == [rank] and sys.modules["__main__"].SEEN is SEEN
            assert int(os.environ["LOCAL_RANK"]) == rank and int(os.environ["WORLD_SIZE"]) == world == 3
            found = [None] * world
            dist.all_gather_object(found, (Message(), first.item(), random.random()))
            assert [m.rank for m, _, _ in found] == [0, 1, 2] and type(found[1][0]) is Message
            assert len({t for _, t, _ in found}) == 1 and len({r for _, _, r in found}) == 3
            print(f"this is rank {rank}")
            dist.destroy_process_group()


        if __name__ == "__main__":
            main()
        """,
    )
    written(tmp_path, "def on_gpu():\n    return False\n", "helper.py")
    before = dict(os.environ), sys.argv, list(sys.path), sys.modules["__main__"], sys.stdout, type(os.environ)
    assert main(["rehearse", "--ranks", "3", "--show", "0,2", script, "--lr", "3"]) == 0
    assert before == (
        dict(os.environ),
        sys.argv,
        sys.path,
        sys.modules["__main__"],
        sys.stdout,
        type(os.environ),
    )
    sys.modules.pop("helper")
    out = capsys.readouterr().out
    assert "[rank 0] this is rank 0" in out
    assert "[rank 2] this is rank 2" in out
    assert "this is rank 1" not in out
    assert "3 simulated ranks: every rank came to its end" in out


def test_scripts_that_start_ranks_themselves(tmp_path: Path) -> None:
    script = written(
        tmp_path,
        """
        import torch
        import torch.distributed as dist
        import torch.multiprocessing as mp
        import shardkit


        def work(rank, world, name):
            dist.init_process_group("gloo", init_method="tcp://127.0.0.1:29511", rank=rank, world_size=world)
            total = torch.tensor([float(rank)])
            dist.all_reduce(total)
            assert total.item() == 3 and name == "x"
            dist.destroy_process_group()


        if __name__ == "__main__":
            mp.spawn(work, args=(3, "x"), nprocs=3)
            offset = 5
            for backend in ("gloo", "simulated"):
                assert shardkit.launch(lambda rank: rank + offset, 3, backend=backend) == [5, 6, 7]
        """,
    )
    report = rehearse(script, 3)
    assert report.is_good, str(report)
    report = rehearse(script, 2)
    assert report.failure is not None
    assert "spawns 3 processes, and the rehearsal has 2 ranks" in report.failure.remote_traceback


TRAINING = program("train_for_long")


def test_steps_end_all_ranks_together(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A rank that trains something by itself before is no rank that would hang."""
    script = str(shutil.copy(TRAINING, tmp_path / "train.py"))
    assert main(["rehearse", "--ranks", "4", "--steps", "3", "--json", script]) == 0
    out = capsys.readouterr().out
    assert "never here" not in out
    data = json.loads(out)
    assert data["steps"] == [3, 3, 3, 3]
    assert len(data["losses"]) == 3
    weights = (64 * 64 + 64) * 4
    # parameters, gradients, two averages, what comes and goes
    assert weights * 3 < data["peak_bytes"][1] < weights * 8
    assert 3 * weights * 6 // 4 <= data["sent_bytes"][0] < 6 * weights * 6 // 4
    kinds = {(k["operation"], k["place"].rpartition(":")[2]): k["calls"] for k in data["collectives"]}
    assert kinds["all_reduce", "19"] == 3


def _taking_turns(rank: int, once: bool) -> None:
    """Of two micro-batches each rank has a long one, while the other has a short one."""
    model = shardkit.fully_shard(torch.nn.Linear(2, 2))
    with shardkit.uneven(model, once=once):
        for k in range(2):
            loss = model(torch.ones(1, 2)).sum()
            time.sleep(0.3 if k == rank else 0.0)
            loss.backward()


def test_the_clock_tells_who_waited() -> None:
    each, together = (
        rehearse(lambda rank, once=once: _taking_turns(rank, once), 2) for once in (False, True)
    )
    for seen in each.ranks:
        assert 0.6 <= seen.seconds < 0.75
        assert 0.2 < seen.waited < 0.4
    for seen in together.ranks:
        assert 0.3 <= seen.seconds < 0.45
        assert seen.waited < 0.1
    assert each.as_data()["waited_seconds"] == [seen.waited for seen in each.ranks]
    assert "of these waited" in str(each)


def test_what_went_wrong_is_the_status(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    script = written(
        tmp_path,
        """
        import torch, torch.distributed as dist
        dist.init_process_group("gloo")
        if dist.get_rank() == 5:
            raise KeyError("a sample")
        dist.all_reduce(torch.ones(2))
        """,
    )
    assert main(["rehearse", "--ranks", "8", script]) == 1
    out = capsys.readouterr().out
    assert "rank 5 failed with KeyError: 'a sample' at" in out
    assert "train.py:5" in out
    assert "ranks 0, 1, 2, 3, 4, 6, 7 are in all_reduce of 2 elements" in out
    assert "train.py:6" in out
    assert main(["rehearse", str(tmp_path / "other.py")]) == 2
    assert "no such script" in capsys.readouterr().err
    with pytest.raises(ConfigurationError, match="from 1"):
        rehearse(script, 0)


def test_a_debugger_stops_all_ranks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    script = written(
        tmp_path,
        """
        import torch.distributed as dist
        dist.init_process_group("gloo")
        if dist.get_rank() == 1:
            secret = 6 * 7
            breakpoint()
            secret += 1
        dist.barrier()
        """,
    )
    monkeypatch.setattr(sys, "stdin", io.StringIO("p secret\nc\n"))
    assert main(["rehearse", "--ranks", "2", script]) == 0
    out = capsys.readouterr().out
    assert "rank 1 of 2 stops here; the others wait" in out
    assert "(Pdb) 42" in out


def test_accelerate(tmp_path: Path) -> None:
    pytest.importorskip("accelerate")
    script = written(
        tmp_path,
        """
        import torch
        from accelerate import Accelerator
        from torch.utils.data import DataLoader, TensorDataset

        torch.manual_seed(0)
        accelerator = Accelerator(cpu=True)
        model = torch.nn.Linear(8, 2)
        data = DataLoader(TensorDataset(torch.randn(36, 8)), batch_size=4, shuffle=True)
        model, optimizer, data = accelerator.prepare(model, torch.optim.AdamW(model.parameters()), data)
        for (batch,) in data:
            accelerator.backward(model(batch).square().mean())
            optimizer.step()
            optimizer.zero_grad()
        assert accelerator.num_processes == 3
        ranks = accelerator.gather(torch.tensor([accelerator.process_index]))
        assert ranks.tolist() == [0, 1, 2]
        """,
    )
    report = rehearse(script, 3)
    assert report.is_good, str(report)
    assert [seen.steps for seen in report.ranks] == [3, 3, 3]


def test_sixty_four_ranks_need_little(tmp_path: Path) -> None:
    """Of the digits example's model, in less than 4 GiB: threads share the process."""
    script = written(
        tmp_path,
        """
        import torch
        import torch.distributed as dist
        from digits import DigitTransformer, nested_fsdp

        dist.init_process_group("gloo")
        model = nested_fsdp(DigitTransformer())
        optimizer = torch.optim.AdamW(model.parameters())
        while True:
            model(torch.randn(1, 1, 8, 8)).square().mean().backward()
            optimizer.step()
        """,
    )
    program = (
        "import resource, sys; from shardkit.tools.cli import main; code = main(sys.argv[1:]);"
        "print('MiB', resource.getrusage(resource.RUSAGE_SELF).ru_maxrss // 1024); sys.exit(code)"
    )
    call = ["-c", program, "rehearse", "--ranks", "64", "--steps", "1", "--no-memory", script]
    printed = output_of(*call, PYTHONPATH=os.pathsep.join(map(str, (ROOT, ROOT / "examples"))))
    assert int(printed.split("MiB")[-1]) < 4096


@pytest.mark.parametrize("divided", [True, False])
def test_losses_beside_one_process(tmp_path: Path, divided: bool) -> None:
    """The same samples in each step, whether the script divides the batch size or not."""
    script = written(
        tmp_path,
        """
        import sys
        import torch
        import torch.distributed as dist
        from torch.nn.parallel import DistributedDataParallel as DDP
        from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

        dist.init_process_group("gloo")
        torch.manual_seed(0)
        data = TensorDataset(torch.randn(48, 8))
        size = 12 // dist.get_world_size() if sys.argv[1] == "True" else 4
        loader = DataLoader(data, batch_size=size, sampler=DistributedSampler(data))
        model = DDP(torch.nn.Linear(8, 2))
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
        for (batch,) in loader:
            loss = model(batch).square().mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
        """,
    )
    report = rehearse(script, 3, arguments=[str(divided)], compare=True)
    assert report.alone is not None
    assert len(report.losses()) == 4
    assert report.alone.losses() == pytest.approx(report.losses(), rel=1e-5)
    assert report.losses()[-1] < report.losses()[0]
    assert "they differ by at most" in str(report)


def test_cuda_means_the_cpu_where_there_is_none(tmp_path: Path) -> None:
    script = written(
        tmp_path,
        """
        import os
        import torch
        import torch.distributed as dist
        from torch.distributed.fsdp import fully_shard
        from torch.nn.parallel import DistributedDataParallel as DDP

        local = int(os.environ["LOCAL_RANK"])
        torch.cuda.set_device(local)
        device = torch.device("cuda", local)
        dist.init_process_group("nccl", device_id=device)
        assert dist.get_backend() == "nccl"
        for place in (device, local, f"cuda:{local}"):
            model = DDP(torch.nn.Linear(8, 2).to(place), device_ids=[local])
            model(torch.ones(2, 8, device=place).to(place, non_blocking=True).cuda()).sum().backward()
        mesh = dist.init_device_mesh("cuda", (2,))
        sharded = torch.nn.Linear(8, 2, device="cuda").cuda()
        fully_shard(sharded, mesh=mesh)
        sharded(torch.ones(2, 8).cuda(local)).sum().backward()
        dist.barrier(device_ids=[local])
        torch.cuda.synchronize()
        """,
    )
    report = rehearse(script, 2, cpu=True)
    assert report.is_good, str(report)
    assert torch.cuda.set_device.__module__ == "torch.cuda"


def test_a_lock_that_another_rank_holds_is_told(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Ranks of a rehearsal share locks, where processes have one each: said, and ended by the timeout."""
    monkeypatch.setattr(surroundings.noticing_stillness.__wrapped__, "__defaults__", (0.3,))  # type: ignore[attr-defined]
    lock = threading.Lock()

    def work(rank: int) -> None:
        with lock:
            dist.barrier()

    report = rehearse(work, 2, timeout=1.0)
    assert not report.is_good
    assert "no answer after 1.0 s; rank 0 was running" in str(report)
    assert re.search(
        r"rank 0 has done nothing for 0 s, at .*test_scripts\.py:\d+ in work", capsys.readouterr().err
    )


def test_other_ranks_run_while_one_waits_elsewhere(tmp_path: Path) -> None:
    """For a file, and for a thread that another rank's thread helps."""
    helped = [threading.Event(), threading.Event()]

    def work(rank: int) -> int:
        path = tmp_path / "downloaded"
        if rank == 1:
            path.write_text("x")
        while not path.exists():
            time.sleep(0.01)
        helper = threading.Thread(target=helped[1 - rank].wait)
        helper.start()
        if rank == 1:
            helped[0].set()
            helped[1].set()
        helper.join()
        drawn = torch.rand(1)
        dist.all_reduce(drawn)
        model = torch.nn.Linear(3, 3)
        optimizer = torch.optim.AdamW(model.parameters())
        model = shardkit.FSDP(model)
        checkpoint: Any = shardkit.save(tmp_path / "checkpoints", model=model, step=1, async_=True)
        checkpoint.wait()
        return len(optimizer.param_groups)

    report = rehearse(work, 2, timeout=30)
    assert report.results == [1, 1], str(report)


# ------------------------------------------------------------ What would hang is named, with the lines of both ranks.
PROGRAMS = [f for _, f in inspect.getmembers(hangs, inspect.isfunction) if f.__module__ == hangs.__name__]


def lines_with(program: Callable[[int], None], mark: str) -> list[int]:
    lines, first = inspect.getsourcelines(program)
    return [first + k for k, line in enumerate(lines) if re.search(rf"#.*\b{mark}\b", line)]


@pytest.mark.parametrize("program", PROGRAMS, ids=lambda f: f.__name__)
def test_both_places_are_named(program: Callable[[int], None]) -> None:
    report = rehearse(program, 3, memory=False)
    assert not report.is_good
    assert report.hang is not None
    for mark in ("here", "there"):
        for line in lines_with(program, mark):
            where = report.hang.what if program.__name__ != "exception_on_one_rank" else str(report)
            assert f"hangs.py:{line}" in where, str(report)
    assert set(report.hang.stands) == {0, 1, 2}


def test_uneven_batches_are_seen_before_they_matter() -> None:
    report = rehearse(hangs.one_rank_fewer_batches, 3, steps=1)
    assert report.is_good
    (text,) = report.uneven_batches()
    assert "4 on ranks 0, 2, 3 on rank 1" in text


# ------------ Trainings give the bits of processes over gloo; many ranks need little memory.
WORLDS = pytest.mark.parametrize("world_size", [2, 3, 4])


@WORLDS
def test_digits_equal_gloo(world_size: int) -> None:
    drawn = torch.Generator().manual_seed(0)
    images = digits.Split(torch.randn(128, 1, 8, 8, generator=drawn), torch.arange(128) % 10)
    start = digits.Start(images, images, digits.DigitTransformer().state_dict())
    arguments = (digits.STRATEGIES, world_size, start)
    expected = rank_pool(world_size).run(trainings.digits, *arguments)
    report = rehearse(lambda rank: trainings.digits(rank, *arguments), world_size, memory=False)
    assert report.is_good, str(report)
    assert report.results == expected


def test_llama_equals_gloo() -> None:
    """With three ranks: orders of sums matter, and shards are uneven. Processes import transformers for seconds."""
    world_size = 3
    pytest.importorskip("transformers")
    strategies = ("fsdp", "ddp", "fsdp2")
    expected = rank_pool(world_size).run(trainings.llama, strategies)
    report = rehearse(lambda rank: trainings.llama(rank, strategies), world_size, memory=True)
    assert report.is_good, str(report)
    for rank in range(world_size):
        for strategy, one, other in zip(strategies, expected[rank], report.results[rank], strict=True):
            assert same(one, other), (rank, strategy)
