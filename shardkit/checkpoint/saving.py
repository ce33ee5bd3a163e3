"""``shardkit.save_training``: a checkpoint of a training; ``shardkit.save``: a file of one object.

Ranks meet three times, to exchange some hundred bytes each: before anything is written, when all have written, and when
the checkpoint has its name. In the background they do not meet at all: each tells what it has done by a small file in
the temporary folder, and the first rank, which finds all of them there, makes the checkpoint complete.

[Note: lacking state] Where nothing in a rank's shard has ever had a gradient, its optimizer has no state of it, while
other ranks' optimizers have state of theirs. A parameter that lies on both would be stored in part. So the rank writes
what its state would be: zeros, and the numbers that others have. Whether there is such a case all ranks learn from what
they tell each other anyway; then, and only then, they exchange the kinds of state.
"""

from __future__ import annotations

import contextlib
import glob
import hashlib
import json
import os
import shutil
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from typing import overload

import torch
from torch import nn
from torch.optim import Optimizer

from .. import errors
from ..checks import attempt, check_same_everywhere, facts_of_all
from ..errors import (
    CheckpointError,
    ConfigurationError,
    FileNotWrittenError,
    RankMismatchError,
    ShardkitError,
    noting_errors,
)
from ..fsdp.state import units_in
from ..launching.run_folder import note_checkpoints
from ..optimizer_state.forms import kinds_everywhere
from ..optimizer_state.kinds import Leaf, Ranks
from ..progress import note_error
from ..types import ProcessGroup, Tree
from .collecting import (
    Collected,
    Entry,
    Parts,
    RecordPart,
    backend_and_ranks,
    collect,
    has_torchs_ranks,
    parts_of_rank,
)
from .data_file import compose, index_of, name_of, on_host, write_parts
from .files.writing import save as save_file
from .format import folders
from .format.folders import last_change
from .format.manifest import best_hash
from .format.metadata import dotted
from .rank_states import Stateful


def lacking_entries(collected: Collected, ranks: Ranks, everybody: Sequence[str]) -> list[Entry]:
    """Makes what this rank writes in place of state that it lacks (collective where ranks differ)."""
    holder = collected.holder
    if holder is None or ranks.group is None or len(set(everybody)) == 1:
        return []
    shards = holder.shards()
    states = {id(slot.param): state for slot, state in collected.slots}
    own = [states.get(id(slot.param), {}) for slot in shards]
    found: list[Entry] = []
    for slot, mine, theirs in zip(shards, own, kinds_everywhere(shards, own), strict=True):
        kinds = {key: kind for each in theirs for key, kind in each.items()}
        if kinds and not mine:
            state = {
                key: slot.zeros(kind.dtype) if kind.spread else kind.made() for key, kind in kinds.items()
            }
            for name, values in slot.leaves(state, ranks).items():
                found += [Entry(("optimizer", "state", name, key), value) for key, value in values.items()]
    return found


class Save:
    """A checkpoint that is about to be written.

    Args:
        keep: see :func:`shardkit.save_training`.
        copies: values are copied before anything is written.

    Attributes:
        target: the checkpoint's folder, once it is complete.
    """

    def __init__(self, folder: str, ranks: Ranks, step: int | None, keep: int | None, copies: bool) -> None:
        self.folder, self.ranks, self.keep, self._copies = folder, ranks, keep, copies
        self.step = -1 if step is None else step
        self.target = os.path.join(folder, folders.step_name(max(0, self.step) if _is_number(step) else 0))
        self.what = f"saving step {step} in {folder}"
        self.temporary = self.run = self.kind = ""
        self.parts: list[RecordPart] = []
        self.values: list[torch.Tensor | None] | None = None

    # ------------------------------------------------------------ before anything is written
    def begin(self, collect: Callable[[], Collected]) -> None:
        """Finds out what there is to write, and that all ranks are in this (collective)."""
        before = _running.pop(self.ranks.rank, None)  # this rank's earlier save
        _, earlier = (None, None) if before is None else attempt(before.wait)
        collected, problem = (
            attempt(lambda: self._collect(collect, before)) if earlier is None else (None, None)
        )
        self._given = [] if collected is None else _facts(collected, self.ranks, self._copies)
        digest = hashlib.sha256(repr(self._given).encode()).hexdigest()[:16]
        with_state = ""  # which shards of the optimizer have state here, one digit each
        if collected is not None and collected.holder is not None:
            there = {id(slot.param) for slot, _ in collected.slots}
            with_state = "".join("01"[id(slot.param) in there] for slot in collected.holder.shards())
        fact = (self.step, self.temporary, self.run, self.kind, digest, with_state)
        what = self.what if earlier is None else "the save before"
        try:
            everybody = agree(self.ranks, earlier or problem, what, fact)
            # the save before may have failed here alone; now no rank writes there
            if before is not None and self.ranks.rank == 0:
                shutil.rmtree(before.temporary, ignore_errors=True)
            self._compare(everybody, collected)
        except Exception:
            self._give_up()
            raise
        _, self.temporary, self.run, self.kind, _, _ = everybody[0]

    def _collect(self, collect: Callable[[], Collected], before: Handle | None) -> Collected:
        if not _is_number(self.step) or self.step < 0:
            raise ConfigurationError("step= has to be the number of steps done, 0 or more")
        if self.keep is not None and (not _is_number(self.keep) or self.keep < 1):
            raise ConfigurationError(
                f"keep={self.keep!r}: at least the new checkpoint is kept; None keeps all"
            )
        if self.ranks.rank == 0:
            self.run, self.kind = folders.run_of(self.folder), best_hash()
            self.temporary = folders.begin(self.folder, self.step, "" if before is None else before.temporary)
        collected = collect()
        self.parts = parts_of_rank(collected.entries, self.ranks.rank)
        if self._copies:
            self.values = list(on_host(self.parts, copied=True))
        return collected

    def _compare(self, everybody: list[tuple[object, ...]], collected: Collected | None) -> None:
        steps = [fact[0] for fact in everybody]
        if len(set(steps)) > 1:
            raise RankMismatchError(
                f"ranks save different steps: {steps} in the order of ranks. Pass the same step="
            )
        if collected is None or self.ranks.group is None:
            return
        if len({fact[4] for fact in everybody}) > 1:
            check_same_everywhere(self.ranks.group, self._given, "what shardkit.save_training was given")
        lacking = lacking_entries(collected, self.ranks, [str(fact[5]) for fact in everybody])
        self.parts += parts_of_rank(lacking, self.ranks.rank)
        if self.values is not None:
            self.values += list(on_host(self.parts[len(self.values) :]))

    # ------------------------------------------------------------ writing
    def write(self) -> Handle:
        """Writes everything, and returns when the checkpoint is complete (collective)."""
        _, problem = attempt(self.write_own)
        try:
            agree(self.ranks, problem, self.what)
            _, problem = attempt(self.complete) if self.ranks.rank == 0 else (None, None)
            agree(self.ranks, problem, self.what)
        except Exception as error:
            self._give_up()
            note_error(error)
            raise
        return Handle(self.target)

    def write_own(self) -> None:
        if not folders.is_there(self.temporary):
            raise ConfigurationError(
                f"rank {self.ranks.world[self.ranks.rank]} does not see {self.temporary}, which rank "
                f"{self.ranks.world[0]} has made: a checkpoint's folder has to be on a file system that all ranks "
                "share. Save to shared storage (NFS, Lustre, a mounted bucket)"
            )
        values = on_host(self.parts) if self.values is None else self.values
        write_parts(self.temporary, self.ranks.rank, self.parts, self.kind, values)

    def complete(self) -> None:
        """Gives the checkpoint its name, as all ranks have written; then old ones go."""
        compose(self.temporary, self.ranks.size, self.step, self.run, self.kind)
        folders.finish(self.temporary, self.folder, self.step)
        folders.keep_newest(self.folder, self.keep, self.step)

    def _give_up(self) -> None:
        if self.ranks.rank == 0 and self.temporary:
            shutil.rmtree(self.temporary, ignore_errors=True)

    # ------------------------------------------------------------ in the background
    def in_background(self) -> Handle:
        handle = Handle(self.target, self.temporary)
        handle.start(self.ranks.rank, self.write_alone)
        group = self.ranks.group
        if group is not None and not has_torchs_ranks():
            # ranks that are threads may take turns: one that waits for the others' files would keep them from beginning
            group.channel("control").barrier(label=self.what)
        return handle

    def write_alone(self) -> None:
        """Writes this rank's part, and returns when the checkpoint is complete; ranks tell each other by files."""
        rank, told = self.ranks.rank, None
        try:
            self.write_own()
            if rank == 0:
                indices = [os.path.join(self.temporary, index_of(r)) for r in range(self.ranks.size)]
                if (told := self._wait_for(lambda: all(map(os.path.exists, indices)))) is None:
                    self.complete()
        except Exception as error:
            self._tell(error)
            where = self.ranks.world[rank] if self.ranks.size > 1 else None
            raise raised(described(error), self.what, where) from error
        if rank != 0:
            told = self._wait_for(self._is_complete)
        if told is not None:
            raise told

    def _wait_for(self, there: Callable[[], bool]) -> Exception | None:
        """Returns when it is there, or the error that another rank has told of."""
        pause, last = 0.005, time.time()
        while not there():
            for path in glob.glob(os.path.join(glob.escape(self.temporary), f"{_FAILED}*.json")):
                return self._read(path)
            last = max(last, min(time.time(), last_change(self.temporary)))
            over = not threading.main_thread().is_alive()
            if time.time() - last > (AT_THE_END if over else PATIENCE):
                raise CheckpointError(
                    f"nothing was written to {self.temporary} for {time.time() - last:.0f} s, and not all ranks have "
                    "finished; is one of them gone?"
                )
            time.sleep(pause)
            pause = min(0.5, pause * 1.5)
        return None

    def _is_complete(self) -> bool:
        if os.path.isdir(self.temporary):
            return False
        if os.path.isdir(self.target):
            return True
        raise CheckpointError(f"{self.what}: the checkpoint was given up on another rank")

    def _tell(self, error: Exception) -> None:
        rank = self.ranks.rank
        with contextlib.suppress(OSError):  # a disk that was full has room now
            os.unlink(os.path.join(self.temporary, name_of(rank)))
        try:
            with open(os.path.join(self.temporary, f"{_FAILED}{rank}.json"), "w") as file:
                json.dump([self.ranks.world[rank], described(error)], file)
        except OSError:  # whoever waits sees that the folder is gone
            self._give_up()

    def _read(self, path: str) -> Exception:
        for _ in range(20):
            with contextlib.suppress(OSError, ValueError):  # being written
                with open(path) as file:
                    rank, fact = json.load(file)
                return raised(tuple(fact), self.what, rank if self.ranks.size > 1 else None)
            time.sleep(0.01)
        return CheckpointError(f"{self.what} failed on another rank ({os.path.basename(path)})")


PATIENCE = 600.0  # seconds without a byte from any rank, until a save in the background is given up
AT_THE_END = 30.0  # the same once the program has ended: another rank may have been killed
_FAILED = "failed-"


def _is_number(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _facts(collected: Collected, ranks: Ranks, is_async: bool) -> list[tuple[str, object]]:
    return [("async_", is_async)] + [
        (dotted(entry.path), (tuple(entry.value.shape), str(entry.value.base.dtype)))
        for entry in collected.entries
        if isinstance(entry.value, Leaf)
        and (entry.path[0] == "model" or entry.value.copies == ranks.everybody)
    ]


_PathLike = str | os.PathLike[str]


@noting_errors
def save_training(
    dir: _PathLike,
    *,
    step: int,
    model: nn.Module | None = None,
    optimizer: Optimizer | Sequence[Optimizer] | None = None,
    scheduler: Stateful | Sequence[Stateful] | None = None,
    scaler: Stateful | None = None,
    loader: Stateful | None = None,
    ema: nn.Module | None = None,
    extra: Mapping[str, object] | None = None,
    async_: bool = False,
    keep: int | None = None,
    group: ProcessGroup = None,
) -> Handle:
    """Saves a training in a folder of checkpoints (collective).

    ::

        shardkit.save_training("checkpoints", model=model, optimizer=optimizer, step=17)

    All ranks write what they have, in torch.distributed.checkpoint's format and by the model's own names, to
    ``dir/step-00000017``. That folder is complete or is not there. :func:`shardkit.restore_training` reads it at any
    number of ranks, sharded in whatever way. See ``docs/CHECKPOINTS.md``.

    Args:
        dir: folder of checkpoints, which all ranks see; it is made if need be.
        step: that the training has done; a checkpoint of it is replaced.
        model: plain, wrapped by ShardedDDP or DistributedDataParallel, or sharded by FSDP, fully_shard or FSDP2.
        optimizer: over the model's parameters: plain, an OSS, WholeParameters, AdaScale around one; or a list (Muon
            beside AdamW; with ``nn.ModuleDict`` as model, those of several models).
        scheduler, scaler, loader: have state_dict() and load_state_dict(). Schedulers may be a list.
        ema: a second module like ``model``, as torch's AveragedModel makes one.
        extra: whatever else by name, as data; the first rank's is kept.
        async_: returns as soon as values are copied to the host; they are written in the background. The next save
            waits for it, and so does the end of the program.
        keep: how many checkpoints to keep; older ones are deleted once the new one is complete. None: all are kept.
        group: ranks that take part; default all.

    Returns:
        A handle with ``path``, ``done`` and ``wait()``; without ``async_`` all is done.

    Raises:
        FileNotWrittenError: the disk is full, or the folder can't be written to (also an OSError). This and all errors
            below are raised on all ranks, and earlier checkpoints are whole.
        ConfigurationError: something can't be kept in a checkpoint, and the message says what; ranks don't see the same
            folder.
        CheckpointError: something else went wrong on a rank.
        RankMismatchError: ranks were called with different steps, or have different models.
    """
    backend, ranks = backend_and_ranks(model, group)
    parts = Parts(model, optimizer, scheduler, scaler, loader, ema)
    note_checkpoints(dir)
    saving = Save(os.path.realpath(dir), ranks, step, keep, async_)
    states = [s for m in (model, ema) if m is not None for s in units_in(m) if not s.is_asleep]
    for shards in dict.fromkeys(flat.group for state in states for flat in state.flats):
        shards.channel("parameters").agree("a checkpoint")  # one rank may have left out the step before
    with torch.no_grad():
        saving.begin(lambda: collect(parts, saving.step, extra, backend, ranks))
    return saving.in_background() if async_ else saving.write()


@overload
def save(obj: object, path: _PathLike) -> None: ...
@overload
def save(dir: _PathLike, /, *, step: int, **training: Tree) -> Handle: ...
def save(*args: Tree, **kwargs: Tree) -> Handle | None:
    """Saves one object in a file: ``torch.save``, but a kill or a full disk leaves the file that was there.

    ::

        shardkit.save(obj, "file.pt")

    All bytes have checksums, which :func:`shardkit.load` compares. The file is written beside the old one and renamed;
    the disk holds both then. ``save(dir, step=..., model=...)`` is :func:`shardkit.save_training`.

    Args:
        obj: what ``torch.save`` takes; :func:`shardkit.load` reads data alone: tensors, numbers, text, lists.
        path: a regular file, or none yet, in a folder that exists.

    Raises:
        FileNotWrittenError: the disk is full, or the folder can't be written to (also an OSError).
        ConfigurationError: the path is a folder, a pipe or a device.
    """
    if len(args) + ("obj" in kwargs) + ("path" in kwargs) > 1:
        return save_file(*args, **kwargs)  # type: ignore[func-returns-value]
    if len(args) != 1 or not isinstance(args[0], str | os.PathLike):
        raise ConfigurationError(
            "shardkit.save takes an object and a path, save(obj, 'file.pt'); a training is saved by "
            "save_training('checkpoints', model=model, optimizer=optimizer, step=17)"
        )
    return save_training(args[0], **{"step": None, **kwargs})


# ------------------------------------------------------------ what happened on each rank, told to all
def agree(ranks: Ranks, problem: Exception | None, what: str, fact: object = None) -> list[Tree]:
    """Returns each rank's fact, on every rank, unless something went wrong on one (collective).

    Args:
        problem: what went wrong on this rank.
        what: was done, for messages: "saving step 17".
        fact: see :func:`all_gather_facts`.
    """
    mine = None if problem is None else described(problem)
    everybody = facts_of_all([] if ranks.group is None else [ranks.group], (mine, fact), label=what)
    for rank, (theirs, _) in zip(ranks.world, everybody, strict=True):
        if theirs is not None:
            raise raised(theirs, what, rank if ranks.size > 1 else None) from problem
    return [found for _, found in everybody]


def described(problem: BaseException) -> tuple[str, str, int | None]:
    """Returns an error as a fact: class, message and the system's number."""
    number = problem.errno if isinstance(problem, OSError) else None
    if isinstance(problem, ShardkitError):
        return type(problem).__name__, str(problem), number
    if isinstance(problem, OSError):
        return FileNotWrittenError.__name__, f"{problem.strerror or problem}: {problem.filename}", number
    return CheckpointError.__name__, f"{type(problem).__name__}: {problem}", None


def raised(fact: tuple[str, str, int | None], what: str, rank: int | None) -> ShardkitError:
    """Returns the error that all ranks raise.

    Args:
        rank: where it happened; None for here.
    """
    name, message, number = fact
    where = "" if rank is None else f" on rank {rank}"
    text = f"{what} failed{where}: {message}"
    kind = getattr(errors, name, CheckpointError)
    if kind is FileNotWrittenError:
        return FileNotWrittenError(text, number)
    try:
        return kind(text)
    except TypeError:  # an error with more arguments
        return CheckpointError(f"{what} failed{where}: {name}: {message}")


# By rank: ranks may be threads of one process. What is written in the background is waited for by the next save.
_running: dict[int, Handle] = {}


class Handle:
    """A checkpoint that is being written, or has been.

    Attributes:
        path: of its folder, once it is complete.
        temporary: of the folder that it is written in.
    """

    def __init__(self, path: str, temporary: str = "") -> None:
        self.path, self.temporary = path, temporary
        self._thread: threading.Thread | None = None
        self._error: Exception | None = None

    def __repr__(self) -> str:
        how = "failed" if self.done and self._error else "complete" if self.done else "being written"
        return f"Handle({self.path!r}, {how})"

    @property
    def done(self) -> bool:
        """Says whether :meth:`wait` would return, or raise, at once."""
        return self._thread is None or not self._thread.is_alive()

    def wait(self, timeout: float | None = None) -> bool:
        """Waits until the checkpoint is complete on the disk, with the files of all ranks.

        Args:
            timeout: in seconds.

        Returns:
            Whether it is; else the time is over.

        Raises:
            ShardkitError: it could not be written on some rank; raised on all ranks that wait, and by the next save.
        """
        if self._thread is not None:
            self._thread.join(timeout)
            if self._thread.is_alive():
                return False
        error, self._error = self._error, None
        if error is not None:
            raise error
        return True

    def start(self, rank: int, work: Callable[[], None]) -> None:
        """Begins, in a thread that the end of the program waits for."""

        def run() -> None:
            _, self._error = attempt(work)  # raised where the training waits

        self._thread = threading.Thread(target=run, name="shardkit checkpoint")
        _running[rank] = self
        self._thread.start()


def wait_for_earlier(rank: int) -> None:
    """Waits for this rank's earlier save; what went wrong is told to the next one."""
    handle = _running.get(rank)
    if handle is not None and handle._thread is not None:
        handle._thread.join()
