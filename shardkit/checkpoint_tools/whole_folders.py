"""Folders that are whole or not there, whatever ends the process."""

from __future__ import annotations

import contextlib
import os
import shutil
import socket
from collections.abc import Iterator

from ..checkpoint.writing import is_alive, sync_folder
from ..errors import ConfigurationError, FileNotWrittenError, ShardkitError

_ENDING = ".part"


@contextlib.contextmanager
def folder_written_whole(path: str, overwrite: bool) -> Iterator[str]:
    """A folder to write into, which gets its name in one move when the block ends without an error.

    It is written beside, synced and renamed. A process that is killed leaves a hidden ``.NAME.HOST.PID.part``, which
    the next one that writes the same path on that machine removes.

    Args:
        overwrite: an old folder of that name makes place; it is removed only when the new one has its name.

    Raises:
        ConfigurationError: there is one, and it is not to be overwritten.
        FileNotWrittenError: the disk is full, or the folder above is missing or can't be written to.
    """
    target = os.path.realpath(path)
    above, name = os.path.split(target)
    if os.path.lexists(target) and not overwrite:
        raise ConfigurationError(f"{path} is there already; pass --overwrite, or another path")
    before = f".{name[:120]}.{socket.gethostname()[:64]}."
    temporary = os.path.join(above, f"{before}{os.getpid()}{_ENDING}")
    try:
        _remove_what_was_left(above, before)
        os.mkdir(temporary)
        yield temporary
        for file in os.scandir(temporary):
            _sync(file.path)
        _sync(temporary)
        _take_name(temporary, target, os.path.join(above, f"{before}{os.getpid()}.old{_ENDING}"))
        sync_folder(above)
    except OSError as error:
        if isinstance(error, ShardkitError):
            raise
        raise FileNotWrittenError(
            f"{path} was not written ({error.strerror or error}); "
            + ("what was there is whole" if os.path.lexists(target) else "there is no such folder"),
            error.errno,
        ) from error
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


def _take_name(temporary: str, target: str, aside: str) -> None:
    if not os.path.lexists(target):
        os.rename(temporary, target)
        return
    os.rename(target, aside)
    try:
        os.rename(temporary, target)
    except OSError:
        os.rename(aside, target)
        raise
    if os.path.isdir(aside):
        shutil.rmtree(aside, ignore_errors=True)
    else:
        os.unlink(aside)


def _remove_what_was_left(above: str, before: str) -> None:
    """By processes of this machine that are gone. What was put aside for a new one is kept."""
    for entry in os.scandir(above):
        owner = entry.name.removeprefix(before).partition(".")[0]
        is_left = entry.name.startswith(before) and entry.name.endswith(_ENDING) and ".old." not in entry.name
        if is_left and not is_alive(owner):
            shutil.rmtree(entry.path, ignore_errors=True)


def _sync(path: str) -> None:
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
