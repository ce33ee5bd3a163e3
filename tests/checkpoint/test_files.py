"""What shardkit writes is whole or not there: kills, full disks, damage."""

from __future__ import annotations

import json
import os
import re
import stat
import subprocess
import sys
import textwrap
from pathlib import Path
from typing import Any

import pytest
import torch

import shardkit
from shardkit.checkpoint.files.writing import write_atomically
from shardkit.errors import ConfigurationError, DamagedFileError, FileNotWrittenError
from shardkit.xla import xla_model as xm

ROOT = Path(__file__).parents[2]

# Forks of a process that has torch loaded, each ended at another moment by a signal that nobody handles.
KILLED = """
import os, signal, sys
import torch, shardkit
path, count = sys.argv[1], int(sys.argv[2])
versions = [{"version": k, "values": torch.full((1 << 16,), float(k))} for k in range(2)]
shardkit.save(versions[0], path)
for k in range(count):
    child = os.fork()
    if not child:
        signal.setitimer(signal.ITIMER_REAL, 1e-4 + k * 1e-2 / count)
        while True:
            for version in versions:
                shardkit.save(version, path)
    _, status = os.waitpid(child, 0)
    assert os.WIFSIGNALED(status) and os.WTERMSIG(status) == signal.SIGALRM, status
    found = shardkit.load(path)
    assert set(found["values"].tolist()) == {float(found["version"])}, k
shardkit.save(versions[1], path)
print(sorted(os.listdir(os.path.dirname(path))))
"""


def run(code: str, *arguments: str) -> str:
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(code), *arguments],
        cwd=ROOT, capture_output=True, text=True, timeout=400,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_a_kill_at_any_moment_leaves_a_whole_file(tmp_path: Path) -> None:
    """And the next one that writes removes what was left."""
    assert run(KILLED, str(tmp_path / "a.pt"), "30") == "['a.pt']\n"


def test_every_system_call_may_be_the_last(tmp_path: Path) -> None:
    """Killed before or after each of those that change anything, in turn."""
    code = """
    import os, sys
    import shardkit.checkpoint.files.writing as writing
    path, whole = sys.argv[1], b"new" * 1000
    for k in range(100):
        with open(path, "wb") as file:
            file.write(b"old")
        child = os.fork()
        if not child:
            left = k
            def counted(call):
                def wrapper(*arguments, **options):
                    global left
                    for moment in range(2):
                        if left == 0:
                            os.kill(os.getpid(), 9)
                        left -= 1
                        if not moment:
                            result = call(*arguments, **options)
                    return result
                return wrapper
            for name in ("fsync", "replace", "unlink", "chmod"):
                setattr(os, name, counted(getattr(os, name)))
            with writing.write_atomically(path) as file:
                file.write(whole)
            os._exit(0)
        _, status = os.waitpid(child, 0)
        with open(path, "rb") as file:
            assert file.read() in (b"old", whole), k
        if status == 0:
            break
    assert k > 6 and status == 0
    with writing.write_atomically(path) as file:
        file.write(whole)
    print(os.listdir(os.path.dirname(path)))
    """
    assert run(code, str(tmp_path / "a")) == "['a']\n"


FULL = """
import errno, os, sys
import torch, shardkit
path = sys.argv[1]
old = {"a": torch.ones(1000)}
shardkit.save(old, path)
before = open(path, "rb").read()
limit()
for size in (1 << 20, 1 << 22):
    try:
        shardkit.save({"a": torch.ones(size), "b": torch.ones(3)}, path)
    except shardkit.FileNotWrittenError as error:
        assert isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EFBIG), error.errno
        assert path in str(error) and "the file that was there is whole" in str(error), error
    else:
        raise AssertionError("no error")
    assert open(path, "rb").read() == before
    assert os.listdir(os.path.dirname(path)) == [os.path.basename(path)]
shardkit.save(old, path)
"""


def test_a_limit_of_a_files_size_leaves_the_old_one(tmp_path: Path) -> None:
    limit = """
def limit():
    import resource, signal
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, 1 << 20))
"""
    run(limit + FULL, str(tmp_path / "a.pt"))


def test_a_full_disk_leaves_the_old_one(tmp_path: Path) -> None:
    disk = tmp_path / "disk"
    disk.mkdir()
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", str(disk)], capture_output=True, check=False
    )
    if mounted.returncode:
        pytest.skip("mounting needs root")
    try:
        run("def limit(): pass\n" + FULL, str(disk / "a.pt"))
    finally:
        subprocess.run(["umount", str(disk)], check=True)


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
