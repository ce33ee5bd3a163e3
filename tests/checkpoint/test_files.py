"""What shardkit writes is whole or not there: kills, full disks, damage."""

from __future__ import annotations

import json
import os
import re
import stat
import subprocess
from pathlib import Path
from typing import Any

import pytest
import torch

import shardkit
from shardkit.checkpoint.files.writing import write_atomically
from shardkit.errors import ConfigurationError, DamagedFileError, FileNotWrittenError
from shardkit.xla import xla_model as xm
from tests.started import output_of, program

ROOT = Path(__file__).parents[2]

# Forks of a process that has torch loaded, each ended at another moment by a signal that nobody handles.
KILLED = program("save_until_killed")


def test_a_kill_at_any_moment_leaves_a_whole_file(tmp_path: Path) -> None:
    """And the next one that writes removes what was left."""
    assert output_of(KILLED, str(tmp_path / "a.pt"), "30") == "['a.pt']\n"


def test_every_system_call_may_be_the_last(tmp_path: Path) -> None:
    """Killed before or after each of those that change anything, in turn."""
    assert output_of(program("write_until_killed"), str(tmp_path / "a")) == "['a']\n"


def test_a_full_disk_and_a_limit_of_a_files_size_leave_the_old_one(tmp_path: Path) -> None:
    limited, disk = tmp_path / "limited", tmp_path / "disk"
    limited.mkdir()
    disk.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", str(disk)]
    is_mounted = subprocess.run(mount, capture_output=True, check=False).returncode == 0  # needs root
    try:
        disks = [str(disk / "a.pt")] if is_mounted else []
        output_of(program("save_until_full"), str(limited / "a.pt"), *disks)
    finally:
        subprocess.run(["umount", str(disk)], check=True) if is_mounted else None


def test_an_error_while_writing_leaves_the_old_one(tmp_path: Path) -> None:
    path = tmp_path / "a.pt"
    shardkit.save({"a": 1}, path)
    with pytest.raises(AttributeError):
        shardkit.save({"a": lambda: 0}, path)  # can't be pickled

    def fails() -> None:
        with write_atomically(path) as file:
            file.write(b"x")
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        fails()
    assert shardkit.load(path) == {"a": 1}
    assert os.listdir(tmp_path) == ["a.pt"]


def test_what_was_there_is_kept_until_the_end(tmp_path: Path) -> None:
    path, refused = tmp_path / "a", []

    def refuse() -> None:
        refused.append(path.read_bytes())
        raise FileNotWrittenError("it changed")

    path.write_bytes(b"old")
    with (
        pytest.raises(FileNotWrittenError, match="it changed"),
        write_atomically(path, before_replacing=refuse) as file,
    ):
        file.write(b"new")
    assert refused == [path.read_bytes()] == [b"old"]
    with write_atomically(path) as file:
        file.write(b"new")
        assert path.read_bytes() == b"old"
    assert path.read_bytes() == b"new"


def test_permissions_and_links_stay(tmp_path: Path) -> None:
    real, link = tmp_path / "real.pt", tmp_path / "link.pt"
    torch.save(1, tmp_path / "plain.pt")
    shardkit.save(1, real)
    assert stat.S_IMODE(real.stat().st_mode) == stat.S_IMODE((tmp_path / "plain.pt").stat().st_mode)
    real.chmod(0o640)
    if os.geteuid() == 0:
        os.chown(real, 1234, 4321)
    link.symlink_to("real.pt")
    shardkit.save(2, link)
    assert link.is_symlink()
    assert shardkit.load(real) == 2
    found = real.stat()
    assert stat.S_IMODE(found.st_mode) == 0o640
    if os.geteuid() == 0:
        assert (found.st_uid, found.st_gid) == (1234, 4321)


def test_what_is_no_file_is_refused(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    for path in (tmp_path, tmp_path / "pipe", Path("/dev/full")):
        with pytest.raises(ConfigurationError, match="no regular file"):
            shardkit.save(1, path)
    with pytest.raises(FileNotWrittenError, match=r"No such file or directory.*there is no such file"):
        shardkit.save(1, tmp_path / "nowhere" / "a.pt")
    assert stat.S_ISFIFO((tmp_path / "pipe").stat().st_mode)


def test_files_are_torchs_and_always_have_checksums(tmp_path: Path) -> None:
    before = torch.serialization.get_crc32_options()
    torch.serialization.set_crc32_options(False)
    try:
        shardkit.save({"a": torch.ones(64)}, tmp_path / "a.pt")
        assert torch.serialization.get_crc32_options() is False
    finally:
        torch.serialization.set_crc32_options(before)
    assert torch.load(tmp_path / "a.pt", weights_only=True)["a"].sum() == 64
    data = bytearray((tmp_path / "a.pt").read_bytes())
    data[data.find(torch.ones(64).numpy().tobytes()) + 9] ^= 1
    (tmp_path / "a.pt").write_bytes(data)
    with pytest.raises(DamagedFileError, match="tensor 'a'"):
        shardkit.load(tmp_path / "a.pt")


def test_other_writers_write_this_way(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What fails in the middle leaves the old file: of ``xm.save``, of consolidation and of memory traces."""
    from shardkit.experimental.tooling.layer_memory_tracker import LayerwiseMemoryTracker
    from shardkit.xla.fsdp.state_dict_utils import consolidate_sharded_model_checkpoints

    def consolidate(path: Path) -> None:
        info = {"rank": 0, "world_size": 1, "shard_info": {}}
        shardkit.save({"model": {"b": torch.ones(1)}, "shard_metadata": info}, tmp_path / "m_rank-0.pth")
        consolidate_sharded_model_checkpoints(str(tmp_path / "m"), "_rank-*.pth", str(path))

    def interrupt(*_: Any) -> None:
        raise KeyboardInterrupt

    def traces(path: Path) -> None:
        LayerwiseMemoryTracker().save_traces(str(path))

    writers: list[Any] = [lambda path: xm.save({"a": torch.ones(2)}, path), consolidate, traces]
    for write in writers:
        path = tmp_path / "out"
        path.write_bytes(b"old")
        with monkeypatch.context() as patch:
            patch.setattr(os, "replace", interrupt)
            with pytest.raises(KeyboardInterrupt):
                write(path)
        assert path.read_bytes() == b"old"
        write(path)
        assert path.read_bytes() != b"old"


def test_memory_traces_have_a_checksum(tmp_path: Path) -> None:
    from shardkit.experimental.tooling.layer_memory_tracker import LayerwiseMemoryTracker

    tracker = LayerwiseMemoryTracker()
    model = torch.nn.Linear(4, 4)
    tracker.monitor(model)
    model(torch.ones(1, 4)).sum().backward()
    tracker.stop()
    path = str(tmp_path / "traces.json")
    tracker.save_traces(path)
    assert LayerwiseMemoryTracker.load(path).memory_traces == tracker.memory_traces
    found = json.loads(Path(path).read_text())
    Path(path).write_text(json.dumps({"traces": found["traces"]}))  # as fairscale writes it
    assert LayerwiseMemoryTracker.load(path).memory_traces == tracker.memory_traces
    found["traces"][0]["allocated"] += 1
    for text in (json.dumps(found), json.dumps(found)[:-20], "[]"):
        Path(path).write_text(text)
        with pytest.raises(DamagedFileError, match=re.escape(path)):
            LayerwiseMemoryTracker.load(path)
