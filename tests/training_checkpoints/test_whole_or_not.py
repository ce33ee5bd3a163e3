"""A checkpoint is complete or not there: kills, errors on one rank, what is kept, what runs in the background."""

from __future__ import annotations

import importlib
import inspect
import os
import socket
import subprocess
import sys
import textwrap
import threading
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import shardkit
from shardkit.checkpoint import data_file, saving
from shardkit.checkpoint.format import folders
from shardkit.checkpoint.format.manifest import read_manifest, refuse_damage
from shardkit.errors import (
    CheckpointError,
    ConfigurationError,
    DamagedFileError,
    FileNotWrittenError,
    RankMismatchError,
)
from tests.pools import on_ranks
from tests.started import output_of, program
from tests.training_checkpoints.programs import Place

ROOT = Path(__file__).parents[2]

# Simulated ranks in forks of a process, killed before or after each call that changes a folder, in turn.
KILLED = program("save_all_until_killed")


def test_killed_at_any_moment(tmp_path: Path) -> None:
    assert output_of(KILLED, str(tmp_path)) == "True\nTrue\n"


def _model(value: float = 0.0) -> nn.Linear:
    model = nn.Linear(4, 4)
    with torch.no_grad():
        model.weight.fill_(value)
    return model


def _full(*_: Any) -> Any:
    raise OSError(28, "No space left on device", "a file")


@pytest.mark.parametrize("in_background", [False, True])
@on_ranks(2)
def test_an_error_on_one_rank_is_everybodys(rank: int, tmp_path: Path, in_background: bool) -> None:
    """Each on the second rank alone; all ranks raise."""
    shardkit.save(tmp_path, model=_model(1.0), step=1)

    def save(**options: Any) -> None:
        given: Any = {"model": _model(2.0), "step": 2, "async_": in_background, **options}
        shardkit.save(tmp_path, **given).wait()

    class NoData:
        pass

    with pytest.raises(ConfigurationError, match=r"rank 1: 'rank_states\.1\.loader' can't be saved"):
        save(loader=Place(NoData() if rank else {}))
    with pytest.raises(CheckpointError, match="rank 1: KeyError: 'a loader that fails'"):
        save(loader=Place(KeyError("a loader that fails") if rank else {}))
    with pytest.raises(RankMismatchError, match=r"different steps: \[2, 3\]"):
        save(step=2 + rank)
    with pytest.raises(RankMismatchError, match=r"what shardkit\.save_training was given"):
        save(model=nn.Linear(4, 4 + rank))
    with pytest.raises(RankMismatchError, match="async_"):  # they waited for each other
        save(async_=rank == 1)
    if rank:
        folders.is_there = lambda path: False
    with pytest.raises(ConfigurationError, match=r"rank 1 does not see .* file system that all ranks share"):
        save()
    importlib.reload(folders)
    writes = data_file.torch.save
    try:
        if rank:
            data_file.write_parts.__globals__["_write"], kept = _full, data_file._write
        with pytest.raises(FileNotWrittenError, match="on rank 1: No space left") as raised:
            save()
        assert raised.value.errno == 28
    finally:
        if rank:
            data_file.write_parts.__globals__["_write"] = kept
    assert data_file.torch.save is writes
    found = shardkit.latest(tmp_path)
    assert found is not None
    refuse_damage(found, manifest := read_manifest(found))
    assert manifest.step == 1
    save()
    assert sorted(os.listdir(tmp_path)) == ["step-00000001", "step-00000002"]


@on_ranks(2)
def test_rank_0_fails_and_saves_again_while_another_writes(rank: int, tmp_path: Path) -> None:
    """All raise its cause: the other one's was the folder, which rank 0 had removed for the next save."""
    names, kept = data_file.write_parts.__globals__, data_file._write

    def late(*args: Any) -> Any:
        time.sleep(0.5)
        return kept(*args)

    names["_write"] = late if rank else _full
    try:
        with pytest.raises(FileNotWrittenError, match="on rank 0: No space left"):
            shardkit.save(tmp_path, model=_model(), step=1, async_=True).wait()
    finally:
        names["_write"] = kept
    shardkit.save(tmp_path, model=_model(), step=2)
    assert os.listdir(tmp_path) == ["step-00000002"]


def test_what_is_kept(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    folder = tmp_path / "checkpoints"
    for step in range(5):  # nothing is deleted unless that is asked for, by the earlier name as well
        save: Any = (shardkit.save, shardkit.save_training)[step % 2]
        save(folder, model=_model(step), step=step)
    assert len(os.listdir(folder)) == 5
    assert inspect.signature(shardkit.save_training).parameters["keep"].default is None
    assert list(inspect.signature(shardkit.restore_training).parameters) == list(
        inspect.signature(shardkit.restore).parameters
    )
    shardkit.save_training(folder, model=_model(4), step=4, keep=2)
    assert sorted(os.listdir(folder)) == ["step-00000003", "step-00000004"]
    assert read_manifest(folder / "step-00000003").run == read_manifest(folder / "step-00000004").run
    shardkit.save(folder, model=_model(1), step=1, keep=2)  # earlier than others: it stays
    assert sorted(os.listdir(folder)) == ["step-00000001", "step-00000004"]
    assert "later steps (4) than step 1" in caplog.text
    shardkit.save(folder, model=_model(3), step=3, keep=2)
    with folders.being_read(str(folder / "step-00000003")):
        shardkit.save(folder, model=_model(5), step=5, keep=1)
        assert sorted(os.listdir(folder)) == ["step-00000003", "step-00000005"]
    shardkit.save(folder, model=_model(7), step=5, keep=1)  # takes the other's place
    assert os.listdir(folder) == ["step-00000005"]
    model = _model()
    found = shardkit.restore(folder / "step-00000005", model=model)
    assert (found.step, found.world_size, model.weight[0, 0].item()) == (5, 1, 7.0)
    (folder / f".step-00000006.{socket.gethostname()}.1.aa.part").mkdir()
    with pytest.raises(ConfigurationError, match=r"another process \(number 1\) writes step-00000006"):
        shardkit.save(folder, model=model, step=6)
    for wrong in (0, -1, True, "3"):
        with pytest.raises(ConfigurationError, match="keep="):
            shardkit.save(folder, model=model, step=6, keep=wrong)  # type: ignore[call-overload]
    with pytest.raises(ConfigurationError, match="step="):
        shardkit.save(folder, model=model)  # type: ignore[call-overload]


def test_a_process_that_has_but_the_number_of_a_killed_one(tmp_path: Path) -> None:
    """In a container that was started again, numbers begin anew."""
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as other:
        left = tmp_path / f".step-00000006.{socket.gethostname()}.{other.pid}.aa.part"
        left.mkdir()
        with pytest.raises(ConfigurationError, match=rf"another process \(number {other.pid}\)"):
            shardkit.save(tmp_path, model=_model(), step=6)
        os.utime(left, (time.time() - 60,) * 2)
        shardkit.save(tmp_path, model=_model(), step=6)
        assert os.listdir(tmp_path) == ["step-00000006"]
        other.communicate(b"\n")


def test_training_goes_on_while_it_is_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    go_on = threading.Event()
    real = data_file.write_parts

    def slow(*args: Any) -> None:
        assert go_on.wait(30)
        real(*args)

    monkeypatch.setattr(saving, "write_parts", slow)
    model = _model(1.0)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0, momentum=0.9)
    model(torch.ones(4)).sum().backward()
    optimizer.step()
    kept, momentum = model.weight.detach().clone(), optimizer.state[model.weight]["momentum_buffer"].clone()
    extra = {"ema": torch.ones(3)}
    handle = shardkit.save(tmp_path, model=model, optimizer=optimizer, step=1, extra=extra, async_=True)
    assert not handle.done
    assert not handle.wait(timeout=0.01)
    assert shardkit.latest(tmp_path) is None
    optimizer.step()
    extra["ema"].zero_()
    go_on.set()
    # waits for the first
    later = shardkit.save(tmp_path, model=model, optimizer=optimizer, step=2, async_=True)
    assert handle.done
    assert handle.wait()
    later.wait()
    found = shardkit.restore(handle.path, model=model, optimizer=optimizer)
    assert torch.equal(model.weight, kept)
    assert torch.equal(optimizer.state[model.weight]["momentum_buffer"], momentum)
    assert torch.equal(found.extra["ema"], torch.ones(3))  # type: ignore[arg-type]


def test_the_end_of_the_program_waits(tmp_path: Path) -> None:
    code = """
    import sys, time, torch, shardkit
    from shardkit.checkpoint import saving

    real = saving.write_parts
    def slow(*arguments):
        time.sleep(0.5)
        real(*arguments)
    saving.write_parts = slow
    shardkit.save(sys.argv[1], model=torch.nn.Linear(2, 2), step=1, async_=True)
    assert shardkit.latest(sys.argv[1]) is None
    """
    output_of("-c", textwrap.dedent(code), str(tmp_path))
    assert shardkit.latest(tmp_path) == str(tmp_path / "step-00000001")


@on_ranks(2)
def test_models_that_differ(rank: int, tmp_path: Path) -> None:
    """Models that nobody keeps the same: the first rank's, whole."""
    shardkit.save(tmp_path, model=_model(float(rank + 1)), step=1)
    model = _model()
    shardkit.restore(tmp_path, model=model)
    assert torch.equal(model.weight, torch.ones(4, 4))


def test_the_next_save_raises_what_went_wrong(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(saving, "write_parts", _full)
    shardkit.save(tmp_path, model=_model(), step=1, async_=True)
    with pytest.raises(FileNotWrittenError, match="the save before failed"):
        shardkit.save(tmp_path, model=_model(), step=2)
    monkeypatch.undo()
    shardkit.save(tmp_path, model=_model(), step=3)
    assert os.listdir(tmp_path) == ["step-00000003"]


def test_a_rank_that_is_gone_is_not_waited_for_for_ever(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(saving, "PATIENCE", 0.2)
    from shardkit.optimizer_state.kinds import Ranks

    work = saving.Save(str(tmp_path), Ranks(None, 0, (0, 1)), 1, None, copies=False)
    work.temporary = folders.begin(str(tmp_path), 1)
    begin = time.time()
    with pytest.raises(CheckpointError, match="is one of them gone"):
        work.write_alone()
    assert time.time() - begin < 60


def test_damage_is_found_before_anything_is_changed(tmp_path: Path) -> None:
    model = _model(1.0)
    shardkit.save(tmp_path, model=model, step=1)
    path = tmp_path / "step-00000001" / "__0_0.distcp"
    item = next(i for i in read_manifest(path.parent).files[path.name].items if i.name == "model.weight")
    data = bytearray(path.read_bytes())
    data[item.offset + item.length // 2] ^= 1
    path.write_bytes(data)
    other = _model(2.0)
    with pytest.raises(DamagedFileError, match=r"__0_0\.distcp \(model\.weight\) has other bytes"):
        shardkit.restore(tmp_path, model=other)
    assert torch.equal(other.weight, torch.full((4, 4), 2.0))
