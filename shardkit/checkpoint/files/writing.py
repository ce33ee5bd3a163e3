"""Writes files, and folders, that are whole or not there, whatever ends the process or fills the disk."""

from __future__ import annotations

import contextlib
import os
import shutil
import socket
import stat
import threading
from collections.abc import Callable, Iterator
from typing import Any, BinaryIO, cast

import torch

from ...errors import ConfigurationError, FileNotWrittenError, ShardkitError

_ENDING = ".part"
_CLOCKS = 5.0  # seconds between the clocks of a file system and of this machine


@contextlib.contextmanager
def write_atomically(
    path: str | os.PathLike[str], *, before_replacing: Callable[[], None] | None = None
) -> Iterator[BinaryIO]:
    """Yields a file to write to, which takes the place of ``path`` in one move when the block ends without an error.

    Written beside it, synced, renamed; then the folder is synced. Until the move, and if anything fails, what was there
    stays as it was. Of a link, what it points to is replaced. Permissions stay, and the owner where that is allowed. A
    process that is killed leaves a hidden ``.NAME.HOST.PID.THREAD.part``, which the next one that writes the same path
    on that machine removes.

    Args:
        path: a regular file, or none yet, in a folder that exists.
        before_replacing: called at the last moment; if it raises, nothing is replaced.
    """
    target = os.path.realpath(path)
    old: os.stat_result | None = None
    with contextlib.suppress(FileNotFoundError):
        old = os.stat(target)
    if old is not None and not stat.S_ISREG(old.st_mode):
        raise ConfigurationError(f"{os.fspath(path)} is no regular file; pass the path of a file")
    folder, name = os.path.split(target)
    temporary = os.path.join(folder, f"{_prefix(name)}{os.getpid()}.{threading.get_ident()}{_ENDING}")
    try:
        _remove_what_was_left(folder, _prefix(name))
        with open(temporary, "wb") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        if old is not None:
            now = os.stat(temporary)
            if (now.st_uid, now.st_gid) != (old.st_uid, old.st_gid):
                with contextlib.suppress(PermissionError):  # files stay others' only where that is allowed
                    os.chown(temporary, old.st_uid, old.st_gid)
            os.chmod(temporary, stat.S_IMODE(old.st_mode))
        if before_replacing is not None:
            before_replacing()
        os.replace(temporary, target)
        sync(folder)
    except OSError as error:
        there = "the file that was there is whole" if old is not None else "there is no such file"
        what = f"{os.fspath(path)} was not written ({error.strerror or error}); {there}"
        raise FileNotWrittenError(what, error.errno) from error
    finally:
        with contextlib.suppress(OSError):
            os.unlink(temporary)


@contextlib.contextmanager
def folder_written_whole(path: str, overwrite: bool) -> Iterator[str]:
    """Yields a folder to write into, which gets its name in one move when the block ends without an error.

    It is written beside, synced and renamed. A process that is killed leaves a hidden ``.NAME.HOST.PID.part``, which
    the next one that writes the same path on that machine removes.

    Args:
        overwrite: an old folder of that name makes place; it is removed only when the new one has its name.
    """
    target = os.path.realpath(path)
    above, name = os.path.split(target)
    if os.path.lexists(target) and not overwrite:
        raise ConfigurationError(f"{path} is there already; pass another path")
    before = _prefix(name)
    temporary = os.path.join(above, f"{before}{os.getpid()}{_ENDING}")
    try:
        _remove_what_was_left(above, before)
        os.mkdir(temporary)
        yield temporary
        for file in os.scandir(temporary):
            sync(file.path)
        sync(temporary)
        take_name_of_folder(temporary, target, os.path.join(above, f"{before}{os.getpid()}.old{_ENDING}"))
    except OSError as error:
        if isinstance(error, ShardkitError):
            raise
        there = "what was there is whole" if os.path.lexists(target) else "there is no such folder"
        what = f"{path} was not written ({error.strerror or error}); {there}"
        raise FileNotWrittenError(what, error.errno) from error
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


def take_name_of_folder(temporary: str, target: str, aside: str) -> None:
    """Gives a folder its name; what has it makes place, and is removed once the new one has it."""
    is_taken = os.path.lexists(target)
    if is_taken:
        os.rename(target, aside)
    try:
        os.rename(temporary, target)
    except OSError:
        if is_taken:
            os.rename(aside, target)
        raise
    sync(os.path.dirname(target))
    if is_taken and os.path.isdir(aside):
        shutil.rmtree(aside, ignore_errors=True)
    elif is_taken:
        os.unlink(aside)


def _prefix(name: str) -> str:
    return f".{name[:120]}.{socket.gethostname()[:64]}."


def _remove_what_was_left(folder: str, prefix: str) -> None:
    """Removes files that killed processes of this machine have left."""
    for entry in os.scandir(folder):
        owner = entry.name.removeprefix(prefix).partition(".")[0]
        is_left = entry.name.startswith(prefix) and entry.name.endswith(_ENDING)
        if is_left and not entry.name.endswith(f".old{_ENDING}"):  # what was put aside for a new one is kept
            with contextlib.suppress(OSError):  # another process may remove it too
                if not is_alive(owner, entry.stat().st_mtime):
                    shutil.rmtree(entry.path) if entry.is_dir() else os.unlink(entry.path)


def is_alive(process: str, wrote: float) -> bool:
    """Says whether a process of this machine, by its number, runs.

    Args:
        wrote: when it has written something, in seconds since 1970. A process that began later only has its number: in
            containers, where numbers begin anew, that is common after a restart.
    """
    try:
        os.kill(int(process), 0)
    except ProcessLookupError:
        return False
    except (PermissionError, ValueError):
        pass
    began = _began(process)
    return began is None or began <= wrote + _CLOCKS


def _began(process: str) -> float | None:
    """Returns when a process began, in seconds since 1970; None where the system does not tell."""
    with contextlib.suppress(OSError, ValueError, IndexError, StopIteration):
        with open(f"/proc/{process}/stat") as file:
            ticks = int(file.read().rpartition(")")[2].split()[19])
        with open("/proc/stat") as file:
            boot = next(int(line.split()[1]) for line in file if line.startswith("btime "))
        return boot + ticks / os.sysconf("SC_CLK_TCK")
    return None


def sync(path: str) -> None:
    """Has the bytes of a file, or the names in a folder, outlive a loss of power."""
    try:
        handle = os.open(path, os.O_RDONLY)
    except PermissionError:  # a folder one may write to but not read, and Windows
        return
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def save(obj: object, path: str | os.PathLike[str]) -> None:
    """Writes one object as :func:`shardkit.save` says."""
    with write_atomically(path) as file, _checksums():
        GuardedFile(file).save(obj)


@contextlib.contextmanager
def _checksums() -> Iterator[None]:
    """Has torch write checksums inside, for it can be told to leave them out."""
    before = torch.serialization.get_crc32_options()
    torch.serialization.set_crc32_options(True)
    try:
        yield
    finally:
        torch.serialization.set_crc32_options(before)


class GuardedFile:
    """A file that remembers the error of a failed write: torch's writer goes on after one and reports another."""

    def __init__(self, file: BinaryIO) -> None:
        self._file = file
        self.failed: OSError | None = None

    def write(self, data: bytes | memoryview) -> int:
        if self.failed is None:
            try:
                return self._file.write(data)
            except OSError as error:
                self.failed = error
        return len(data)

    def flush(self) -> None:
        """Does nothing; torch asks for it before the end."""

    def save(self, obj: object) -> None:
        """Does ``torch.save``; raises the error of a failed write."""
        try:
            torch.save(obj, cast(Any, self))
        except RuntimeError as error:
            raise self.failed or error from None
        self.check()

    def check(self) -> None:
        """Raises the error of a failed write."""
        if self.failed is not None:
            raise self.failed
