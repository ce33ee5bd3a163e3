"""Folders of checkpoints: which are complete, how one gets its name, and which are removed.

[Note: complete or not there] A checkpoint is written in a folder whose name begins with a dot, beside the others. When
all of its files are synced, and it is, it gets its name in one move. What is being removed loses its name in the same
way first. So ``step-00000017`` is complete whenever it is there, whatever was killed at what moment.
"""

from __future__ import annotations

import contextlib
import fcntl
import logging
import os
import re
import shutil
import socket
import time
import uuid
from collections.abc import Iterator
from typing import NamedTuple

from ...errors import ConfigurationError
from ..files.writing import is_alive, sync, take_name_of_folder
from .manifest import NAME, read_manifest

logger = logging.getLogger("shardkit")

_STEP = re.compile(r"step-(\d{8,})")
TEMPORARY = re.compile(
    r"\.(?P<name>step-(?P<step>\d{8,}))\.(?P<host>.*)\.(?P<pid>\d+)\.(?P<token>[0-9a-f]+)\.(?P<kind>part|old)"
)
_SHOWN = 5.0  # seconds
_ABANDONED = 3600.0  # seconds in which nobody wrote to another machine's temporary folder


def step_name(step: int) -> str:
    return f"step-{step:08d}"


class StepFolder(NamedTuple):
    """A folder of one step; ``is_complete``: it has a ``shardkit.json``, which comes last."""

    step: int
    path: str
    is_complete: bool


def steps_in(folder: str | os.PathLike[str]) -> list[StepFolder]:
    """Lists the folders of steps in a folder, by step in ascending order."""
    found = []
    with contextlib.suppress(FileNotFoundError, NotADirectoryError):
        for name in os.listdir(folder):
            matched, path = _STEP.fullmatch(name), os.path.join(folder, name)
            if matched and os.path.isdir(path):
                found.append(StepFolder(int(matched[1]), path, os.path.isfile(os.path.join(path, NAME))))
    return sorted(found)


def complete(folder: str | os.PathLike[str]) -> dict[int, str]:
    """Returns the complete checkpoints in a folder, by step in ascending order."""
    return {step: path for step, path, is_complete in steps_in(folder) if is_complete}


def latest(folder: str | os.PathLike[str]) -> str | None:
    """Returns the path of the complete checkpoint with the highest step in a folder; None if there is none.

    What is being written, or was when a process died, is never it. ``restore_training`` takes the folder itself, too.
    """
    return next(iter(reversed(complete(folder).values())), None)


def begin(folder: str, step: int, spare: str = "") -> str:
    """Returns a temporary folder for a step's files; of those that were left it leaves ``spare``."""
    os.makedirs(folder, exist_ok=True)
    others = _clear(folder, spare)
    if step_name(step) in others:
        raise ConfigurationError(
            f"another process (number {others[step_name(step)]}) writes {step_name(step)} in {folder} at this moment. "
            "Give each training, and each group of ranks with a model of its own, a folder of its own"
        )
    path = _temporary(folder, step, "part")
    os.mkdir(path)
    return path


def finish(temporary: str, folder: str, step: int) -> None:
    """Gives a folder, all files of which are synced, its name; a checkpoint of the same step gives way."""
    sync(temporary)
    take_name_of_folder(temporary, os.path.join(folder, step_name(step)), _temporary(folder, step, "old"))


def keep_newest(folder: str, count: int | None, new: int) -> None:
    """Removes all checkpoints but so many: the new one, and those with the highest steps; none that somebody reads."""
    there = complete(folder)
    others = [step for step in there if step != new]
    for step in [] if count is None else others[: max(0, len(there) - count)]:
        path = there.pop(step)
        with _for_removal(path) as free, contextlib.suppress(OSError):  # others' files, or removed by others
            if free:
                gone = _temporary(folder, step, "part")
                os.rename(path, gone)
                shutil.rmtree(gone, ignore_errors=True)
    later = [step for step in there if step > new]
    if later:
        logger.warning(
            "%s has checkpoints of later steps (%s) than step %d, which was saved now: restore takes the latest. Give "
            "a training that goes another way from an earlier step a folder of its own, or remove them",
            folder,
            ", ".join(map(str, later[:3])),
            new,
        )


@contextlib.contextmanager
def being_read(path: str) -> Iterator[None]:
    """Keeps saves from removing this checkpoint, inside."""
    with open(os.path.join(path, NAME), "rb") as file:
        with contextlib.suppress(OSError):  # file systems without locks
            fcntl.flock(file, fcntl.LOCK_SH)
        yield


@contextlib.contextmanager
def _for_removal(path: str) -> Iterator[bool]:
    with contextlib.ExitStack() as opened:
        try:
            file = opened.enter_context(open(os.path.join(path, NAME), "rb"))
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            yield False
            return
        except OSError:  # file systems without locks
            pass
        yield True


def _temporary(folder: str, step: int, kind: str) -> str:
    token = uuid.uuid4().hex[:12]
    return os.path.join(folder, f".{step_name(step)}.{_host()}.{os.getpid()}.{token}.{kind}")


def _clear(folder: str, spare: str) -> dict[str, str]:
    """Removes what killed saves have left; what was to be replaced comes back, if its place is free.

    Returns:
        The steps that other processes of this machine write, and their numbers.
    """
    busy: dict[str, str] = {}
    for name in os.listdir(folder):
        matched = TEMPORARY.fullmatch(name)
        if matched is None or name == os.path.basename(spare):
            continue
        path, target = os.path.join(folder, name), os.path.join(folder, matched["name"])
        if not _is_left_over(path, matched):
            if matched["kind"] == "part" and matched["host"] == _host():
                busy[matched["name"]] = matched["pid"]
            continue
        if matched["kind"] == "old" and not os.path.lexists(target):
            with contextlib.suppress(OSError):
                os.rename(path, target)
        else:
            shutil.rmtree(path, ignore_errors=True)
    return busy


def _host() -> str:
    return socket.gethostname()[:64]


def _is_left_over(path: str, matched: re.Match[str]) -> bool:
    if matched["host"] == _host():
        return matched["pid"] == str(os.getpid()) or not is_alive(matched["pid"], last_change(path))
    return time.time() - last_change(path) > _ABANDONED


def is_there(path: str) -> bool:
    """Says whether a folder that another rank has made is seen here; network file systems may take seconds."""
    end = time.monotonic() + _SHOWN
    while not os.path.isdir(path):
        if time.monotonic() > end:
            return False
        time.sleep(0.05)
    return True


def last_change(path: str) -> float:
    """Returns when something in a folder was last written, in seconds since 1970; 0 if it is not there."""
    times = [0.0]
    with contextlib.suppress(OSError):
        times.append(os.stat(path).st_mtime)
        for entry in os.scandir(path):
            with contextlib.suppress(OSError):
                times.append(entry.stat().st_mtime)
    return max(times)


def chosen(path: str | os.PathLike[str]) -> str:
    """Returns the checkpoint that a path means: itself, or the latest of those in it."""
    folder = os.path.realpath(path)
    if os.path.isfile(os.path.join(folder, NAME)):
        return folder
    if (newest := latest(folder)) is None:
        raise ConfigurationError(
            f"{os.fspath(path)} has no complete checkpoint: expected the folder that was given to save_training, or a "
            f"{step_name(17)} in it (an interrupted save leaves none). Of a checkpoint of another kind (torch's, "
            "fairscale's, torch_xla's, Hugging Face's) `shardkit ckpt convert THAT NEW --to dcp` makes one"
        )
    return newest


def run_of(folder: str) -> str:
    """Returns the name of the training that a folder's checkpoints are of; a new one for a folder without any."""
    if (newest := latest(folder)) is not None:
        with contextlib.suppress(Exception):
            return read_manifest(newest).run
    return uuid.uuid4().hex[:12]
