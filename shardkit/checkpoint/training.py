"""``shardkit.save_training`` and ``restore_training``: a checkpoint of a training, which goes on from it, whoever wrote
which part of it; ``shardkit.save``: a file of one object.

In a save ranks meet three times, to exchange some hundred bytes each: before anything is written, when all have
written, and when the checkpoint has its name. In the background they do not meet at all: each tells what it has done by
a small file in the temporary folder, and the first rank, which finds all of them there, makes the checkpoint complete.

[Note: lacking state] Where nothing in a rank's shard has ever had a gradient, its optimizer has no state of it, while
other ranks' optimizers have state of theirs. A parameter that lies on both would be stored in part. So the rank writes
what its state would be: zeros, and the numbers that others have. Whether there is such a case all ranks learn from what
they tell each other anyway; then, and only then, they exchange the kinds of state.
"""

from __future__ import annotations

import contextlib
import dataclasses
import glob
import hashlib
import json
import os
import shutil
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import NamedTuple, NoReturn, overload

import torch
from torch import nn
from torch.optim import Optimizer

from .. import errors
from ..backend import Backend
from ..checks import all_gather_facts, check_same_everywhere
from ..errors import (
    CheckpointError,
    ConfigurationError,
    FileNotWrittenError,
    RankMismatchError,
    ShardkitError,
)
from ..launching import note_checkpoints
from ..layout import Box
from ..optimizer_state.forms import kinds_everywhere
from ..optimizer_state.kinds import Fixed, Leaf, Ranks, Slot, whole
from ..progress import note_error, noting_errors
from ..torch_seams.tensors import narrowed
from ..types import ProcessGroup, StateDict, T, Tree
from .files.writing import save as save_file
from .format import folders
from .format.contents import Chunk, Record, StoredCheckpoint, best_hash, dotted, read_tensor
from .format.folders import last_change
from .records import (
    Collected,
    Entry,
    Parts,
    RecordPart,
    backend_and_ranks,
    collect,
    compose,
    has_torchs_ranks,
    holder_for,
    index_of,
    name_of,
    on_host,
    parts_of_rank,
    write_parts,
)
from .trained import Holder, ModelState, Stateful, check_schedulers, equal, load_loader, set_random_states


def shards_with_state(holder: Holder | None, slots: Sequence[tuple[Slot, StateDict]]) -> str:
    """Tells which shards of an optimizer have state here, as a fact: one digit each."""
    if holder is None:
        return ""
    there = {id(slot.param) for slot, _ in slots}
    return "".join("01"[id(slot.param) in there] for slot in holder.shards())


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
        collected, problem = attempt(lambda: self._collect(collect)) if earlier is None else (None, None)
        facts = "" if collected is None else repr(_facts(collected, self.ranks))
        digest = hashlib.sha256(facts.encode()).hexdigest()[:16]
        with_state = "" if collected is None else shards_with_state(collected.holder, collected.slots)
        fact = (self.step, self.temporary, self.run, self.kind, digest, with_state)
        what = self.what if earlier is None else "the save before"
        try:
            everybody = agree(self.ranks, earlier or problem, what, fact)
            self._compare(everybody, collected)
        except Exception:
            self._give_up()
            raise
        _, self.temporary, self.run, self.kind, _, _ = everybody[0]

    def _collect(self, collect: Callable[[], Collected]) -> Collected:
        if not _is_number(self.step) or self.step < 0:
            raise ConfigurationError("step= has to be the number of steps done, 0 or more")
        if self.keep is not None and (not _is_number(self.keep) or self.keep < 1):
            raise ConfigurationError(
                f"keep={self.keep!r}: at least the new checkpoint is kept; None keeps all"
            )
        if self.ranks.rank == 0:
            self.run, self.kind = folders.run_of(self.folder), best_hash()
            self.temporary = folders.begin(self.folder, self.step)
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
            check_same_everywhere(
                self.ranks.group, _facts(collected, self.ranks), "what shardkit.save_training was given"
            )
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
        handle = Handle(self.target)
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
                told = self._wait_for(lambda: all(map(os.path.exists, indices)))
                if told is None:
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
        with contextlib.suppress(OSError):
            with open(os.path.join(self.temporary, f"{_FAILED}{rank}.json"), "w") as file:
                json.dump([self.ranks.world[rank], described(error)], file)

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


def _facts(collected: Collected, ranks: Ranks) -> list[tuple[str, object]]:
    """Lists what all ranks have alike."""
    return [
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
def attempt(work: Callable[[], T]) -> tuple[T | None, Exception | None]:
    """Runs some work; returns its result, or the error that it raised."""
    try:
        return work(), None
    except Exception as error:  # noqa: BLE001 - whatever it is, all ranks have to hear of it
        return None, error


def agree(ranks: Ranks, problem: Exception | None, what: str, fact: object = None) -> list[Tree]:
    """Returns each rank's fact, on every rank, unless something went wrong on one (collective).

    Args:
        problem: what went wrong on this rank.
        what: was done, for messages: "saving step 17".
        fact: see :func:`all_gather_facts`.
    """
    mine = None if problem is None else described(problem)
    if ranks.group is None:
        everybody = [(mine, fact)]
    else:
        control = ranks.group.channel("control")
        everybody = all_gather_facts(control, (mine, fact), label=what)
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
    """

    def __init__(self, path: str) -> None:
        self.path = path
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
            try:
                work()
            except Exception as error:  # noqa: BLE001 - raised where the training waits
                self._error = error

        self._thread = threading.Thread(target=run, name="shardkit checkpoint")
        _running[rank] = self
        self._thread.start()


def wait_for_earlier(rank: int) -> None:
    """Waits for this rank's earlier save; what went wrong is told to the next one."""
    handle = _running.get(rank)
    if handle is not None and handle._thread is not None:
        handle._thread.join()


# ------------------------------------------------------------ restoring
class Wanted(NamedTuple):
    """A tensor that is to be filled."""

    name: str
    leaf: Leaf


class _Copy(NamedTuple):
    """The elements that a stored chunk and a box of a leaf have in common."""

    leaf: Leaf
    box: Box
    chunk: Chunk
    common: Box


class Reads:
    """The records of a checkpoint that this rank reads."""

    def __init__(self, stored: StoredCheckpoint, wanted: Iterable[Wanted]) -> None:
        self._stored = stored
        self._copies: dict[Record, list[_Copy]] = {}
        for name, leaf in wanted:
            found = stored.tensors[name]
            if found.shape != leaf.shape:
                raise ConfigurationError(
                    f"{name!r} has shape {tuple(found.shape)} in {stored.folder}, and {tuple(leaf.shape)} here; "
                    "nothing was restored"
                )
            for box in leaf.boxes:
                for chunk in found.chunks:
                    common = box.meet(chunk.box)
                    if common is not None:
                        self._copies.setdefault(chunk.record, []).append(_Copy(leaf, box, chunk, common))

    @property
    def records(self) -> Iterator[Record]:
        return iter(self._copies)

    @torch.no_grad()
    def run(self) -> None:
        """Reads them, each once, in the order in which they lie."""
        for record in sorted(self._copies):
            copies, name = self._copies[record], f"{self._stored.folder}: {record.name} in {record.file}"
            tensor = read_tensor(name, self._stored.read(record), copies[0].chunk.box.sizes)
            for leaf, box, chunk, common in copies:
                narrowed(leaf.values(box), common, box).copy_(narrowed(tensor, common, chunk.box))


_ONE = ("state", "param_groups")
# Options that schedulers add to groups.
_OF_SCHEDULERS = frozenset({"initial_lr", "max_lr", "min_lr", "max_momentum", "base_momentum", "swa_lr"})


class _Number(NamedTuple):
    """A state that is one number (or one record) for a slot, and is stored for each of its parameters."""

    state: StateDict
    key: str
    read: list[tuple[str, torch.Tensor]]  # by parameter


class OptimizerReads:
    """The state that an optimizer needs of a checkpoint."""

    def __init__(self, holder: Holder, stored: StoredCheckpoint) -> None:
        self._holder, self._stored = holder, stored
        self._of: dict[str, dict[str, str]] = {}
        self._named: dict[str, str] = {}
        for path, name in stored.under("optimizer", "state").items():
            if len(path) == 1:
                self._named[str(path[0])] = name
            else:
                self._of.setdefault(str(path[0]), {})[".".join(map(str, path[1:]))] = name
        self._groups = self._matched_groups()
        beside = {path[0]: name for path, name in stored.under("optimizer").items() if len(path) == 1}
        self._others = {str(key): name for key, name in beside.items() if key not in _ONE}
        if unclaimed := holder.unclaimed(self._others, self._named):
            raise ConfigurationError(
                f"{stored.folder} has {_some(unclaimed)} beside the state of parameters, which no optimizer of the "
                "list has now, so whose it is can't be told. Build them as they were, or keep such state in extra="
            )
        self._numbers: list[_Number] = []
        self._slots = holder.needed()
        self._states: list[StateDict] = [{} for _ in self._slots]
        self.wanted = [
            w for slot, state in zip(self._slots, self._states, strict=True) for w in self._fill(slot, state)
        ]

    # ------------------------------------------------------------ groups
    def _matched_groups(self) -> list[dict[str, str]]:
        """Finds the names of each group's options in the checkpoint."""
        found: dict[int, dict[str, str]] = {}
        for path, name in self._stored.under("optimizer", "param_groups").items():
            found.setdefault(int(path[0]), {})[".".join(map(str, path[1:]))] = name
        if not found:
            raise ConfigurationError(
                f"{self._stored.folder} was saved without optimizer=. Restore without it, and the optimizer begins anew"
            )
        saved, own = [found[k] for k in sorted(found)], self._holder.groups()
        if len(saved) != len(own):
            raise ConfigurationError(
                f"the optimizer has {len(own)} param groups, and {len(saved)} in {self._stored.folder}; build it as it "
                "was when the checkpoint was saved"
            )
        for k, (theirs, mine) in enumerate(zip(saved, own, strict=True)):
            # later versions of a class have more options; of another class each has some that the other lacks
            theirs_alone, mine_alone = (
                {*theirs} - {*mine} - _OF_SCHEDULERS,
                {*mine} - {*theirs} - _OF_SCHEDULERS,
            )
            if theirs_alone and mine_alone:
                raise ConfigurationError(
                    f"group {k} of the optimizer in {self._stored.folder} has options {_some(theirs_alone)}, and here "
                    f"it has {_some(mine_alone)}: that was another class of optimizer. Build the same, or restore "
                    "without optimizer="
                )
            listed, own_names = set(self._stored.object(theirs["params"])), set(mine["params"])
            # frozen ones may be listed or not: they have no state
            there = {n for n in listed if n in own_names or n in self._of}
            here = own_names - (self._holder.names.frozen - listed)
            if there != here:
                raise ConfigurationError(
                    f"group {k} of the optimizer in {self._stored.folder} has parameters {_some(there - here)} that it "
                    f"has not here, and lacks {_some(here - there)}; build the groups as they were"
                )
        return saved

    def _options(self) -> list[StateDict]:
        return [
            {key: self._stored.object(name) for key, name in group.items() if key != "params"}
            for group in self._groups
        ]

    # ------------------------------------------------------------ state
    def _fill(self, slot: Slot, state: StateDict) -> Iterator[Wanted]:
        have = [span for span in slot.spans if self._of.get(span.name)]
        keys = list(dict.fromkeys(key for span in have for key in self._of[span.name]))
        for key in keys:
            names = {span: self._of[span.name].get(key) for span in have}
            lacking = [span.name for span, name in names.items() if name is None]
            if lacking:
                raise ConfigurationError(
                    f"optimizer state {key!r} of {lacking[0]!r} is not in {self._stored.folder}, and that of others of "
                    "its flat parameter is"
                )
            stored = [(span, self._stored.tensors.get(name or "")) for span, name in names.items()]
            if all(found is not None and slot.is_cut(key, span, found.shape) for span, found in stored):
                dtype = next(found.dtype for _, found in stored if found is not None)
                state[key] = slot.zeros(dtype)
                for span, name in names.items():
                    yield Wanted(name or "", slot.wanted(span, state[key], self._holder.names.ranks))
            else:
                yield from self._numbers_of(slot, state, key, {s.name: n or "" for s, n in names.items()})

    def _numbers_of(self, slot: Slot, state: StateDict, key: str, names: dict[str, str]) -> Iterator[Wanted]:
        read = []
        for span, name in names.items():
            found = self._stored.tensors.get(name)
            if found is None:
                continue
            if slot.is_shard and found.shape.numel() != 1:
                raise ConfigurationError(
                    f"optimizer state {key!r} of {span!r} has shape {tuple(found.shape)} in {self._stored.folder}, "
                    "which is neither the parameter's nor one number: it can't be cut into shards. Use "
                    "shardkit.WholeParameters for this optimizer"
                )
            device = slot.param.device if len(found.shape) else None
            value = torch.zeros(found.shape, dtype=found.dtype, device=device)
            read.append((span, value))
            yield Wanted(name, whole(value, (0,)))
        if not read:
            for span, name in names.items():
                read.append((span, self._stored.object(name)))
        self._numbers.append(_Number(state, key, read))

    def finish(self) -> None:
        """Gives the optimizer what was wanted, all of which is there."""
        for state, key, read in self._numbers:
            (first, value), *others = read
            for name, other in others:
                if not equal(value, other):
                    raise ConfigurationError(
                        f"optimizer state {key!r} is {_shown(value)} for {first!r} and {_shown(other)} for {name!r}, "
                        "which lie in one flat parameter and have one such number here: one of them had no gradient in "
                        "some steps. Shard with fully_shard(module) or FSDP(module, flatten=False), or wrap them in "
                        "units of their own"
                    )
            state[key] = value
        beside = {key: self._stored.object(name) for key, name in self._others.items()}
        self._holder.load(self._states, self._options(), beside)
        self._holder.load_named({key: self._stored.object(name) for key, name in self._named.items()})


def _shown(value: object) -> object:
    return value.item() if isinstance(value, torch.Tensor) and value.numel() == 1 else value


@dataclasses.dataclass(frozen=True)
class Restored:
    """Facts about the checkpoint that was restored.

    Attributes:
        path: its folder.
        step: that the training had done.
        extra: what was saved as ``extra``, with tensors on the CPU.
        run: name of the training, the same for all checkpoints of one folder.
        world_size: of the ranks that wrote it.
    """

    path: str
    step: int
    extra: Mapping[str, object]
    run: str
    world_size: int


@noting_errors
def restore_training(
    dir: str | os.PathLike[str],
    *,
    model: nn.Module | None = None,
    optimizer: Optimizer | Sequence[Optimizer] | None = None,
    scheduler: Stateful | Sequence[Stateful] | None = None,
    scaler: Stateful | None = None,
    loader: Stateful | None = None,
    ema: nn.Module | None = None,
    random_states: bool | None = None,
    verify: bool = True,
    group: ProcessGroup = None,
) -> Restored:
    """Gives a model, and what else is passed, the state that :func:`shardkit.save_training` has kept (collective).

    Any number of ranks reads what any other has written, however either is sharded: each reads what it needs. Names and
    shapes have to be the checkpoint's. They, and checksums, are compared before anything is changed.

    Args:
        dir: a checkpoint, or a folder of them, of which the latest complete one is taken.
        model, optimizer, scheduler, scaler, loader, ema: built as for :func:`shardkit.save_training`.
        random_states: set the states of generators of random numbers; default: where ``optimizer`` is passed.
        verify: compare checksums of all that is read. It is read twice for that, the second time from the system's
            cache where there is room.
        group: ranks that take part; default all.

    Raises:
        ConfigurationError: there is no complete checkpoint; it lacks what is asked for; names or shapes differ. This
            and all others are raised on all ranks.
        DamagedFileError: a checksum differs; the message names the file and the tensor.
        CheckpointError: something else went wrong on a rank.
    """
    backend, ranks = backend_and_ranks(model, group)
    parts = Parts(model, optimizer, scheduler, scaler, loader, ema)
    with_random = optimizer is not None if random_states is None else random_states
    what = f"restoring {os.fspath(dir)}"
    wait_for_earlier(ranks.rank)
    path, problem = attempt(lambda: folders.chosen(dir)) if ranks.rank == 0 else ("", None)
    path = agree(ranks, problem, what, path)[0]
    note_checkpoints(os.path.dirname(path))
    with contextlib.ExitStack() as held:
        restoring, problem = attempt(
            lambda: _Restoring(_opened(path, ranks, verify, held), parts, backend, ranks, with_random)
        )
        agree(ranks, problem, what)
        if restoring is None:
            raise ConfigurationError(what)
        _, problem = attempt(restoring.run)
        agree(ranks, problem, f"{what}: the model may be restored in part, and the training can't go on. It")
        return restoring.result()


restore = restore_training


def _opened(path: str, ranks: Ranks, verify: bool, held: contextlib.ExitStack) -> StoredCheckpoint:
    if not folders.is_there(path):
        raise ConfigurationError(
            f"rank {ranks.world[ranks.rank]} does not see {path}, which rank {ranks.world[0]} restores: a checkpoint "
            "has to be on a file system that all ranks share"
        )
    held.enter_context(folders.being_read(path))
    return StoredCheckpoint(path, verify)


class _Restoring:
    """One restore. Everything is compared when it is made; :meth:`run` changes the training's objects."""

    def __init__(
        self, stored: StoredCheckpoint, parts: Parts, backend: Backend, ranks: Ranks, with_random: bool
    ) -> None:
        parts.check()
        self._stored, self._parts, self._backend, self._ranks = stored, parts, backend, ranks
        self._with_random = with_random
        self._modules = {name: ModelState(m, ranks) for name, m in parts.modules.items()}
        wanted: list[Wanted] = []
        self._objects: dict[str, dict[str, str]] = {}
        for name, module in self._modules.items():
            wanted += self._of_module(name, module)
        self._holder = holder_for(parts, self._modules.get("model"))
        self._optimizer = None if self._holder is None else OptimizerReads(self._holder, stored)
        if self._optimizer is not None:
            wanted += self._optimizer.wanted
        self._extra = {
            path: Wanted(name, whole(torch.zeros(found.shape, dtype=found.dtype), (0,)))
            for path, name in stored.under("extra").items()
            if (found := stored.tensors.get(name)) is not None
        }
        self._reads = Reads(stored, [*wanted, *self._extra.values()])
        for name in ("scheduler", "scaler"):
            if getattr(parts, name) is not None and name not in stored.objects:
                self._refuse(name)
        # what is other ranks' own is compared when it is read, if it is
        own = f"rank_states.{ranks.rank % stored.manifest.world_size}."
        objects = [
            r for n, r in stored.objects.items() if n.startswith(own) or not n.startswith("rank_states.")
        ]
        stored.refuse_damage([*self._reads.records, *objects])
        if parts.scheduler is not None:
            check_schedulers(parts.scheduler, stored.object("scheduler"), stored.folder)

    def _of_module(self, part: str, module: ModelState) -> Iterable[Wanted]:
        there = {str(path[0]): name for path, name in self._stored.under(part).items()}
        objects: dict[str, str] = {}
        self._objects[part] = objects
        leaves = module.leaves()
        missing, unexpected = set(leaves) - set(there), set(there) - set(leaves)
        if not there:
            self._refuse(part)
        if missing or unexpected:
            raise ConfigurationError(
                f"the {part} is not the one in {self._stored.folder}: not in the checkpoint are {_some(missing)}; not "
                f"in the {part} are {_some(unexpected)}. Nothing was restored"
            )
        for name, leaf in leaves.items():
            if isinstance(leaf, Leaf) is not (there[name] in self._stored.tensors):
                raise ConfigurationError(
                    f"{name!r} is a tensor in the {part} or the checkpoint, and none in the other"
                )
            if isinstance(leaf, Fixed):
                objects[name] = there[name]
            else:
                yield Wanted(there[name], leaf)

    def _refuse(self, name: str) -> NoReturn:
        raise ConfigurationError(f"{self._stored.folder} was saved without {name}=. Restore without it")

    # ------------------------------------------------------------ changing things
    def run(self) -> None:
        self._reads.run()
        for part, module in self._modules.items():
            module.loaded({k: self._stored.object(name) for k, name in self._objects[part].items()})
        if self._optimizer is not None:
            self._optimizer.finish()
        for name, given in (("scheduler", self._parts.schedulers), ("scaler", self._parts.scaler)):
            if given is not None:
                given.load_state_dict(self._stored.object(name))
        if self._parts.loader is not None:
            size, saved = self._ranks.size, self._stored.manifest.world_size
            ranks = [self._ranks.rank] if size == saved else range(saved)
            states = [self._of_rank(rank, "loader") for rank in ranks]
            load_loader(self._parts.loader, states, None if size == saved else size)
        if self._with_random:
            own = self._of_rank(self._ranks.rank % self._stored.manifest.world_size, "random")
            set_random_states(self._backend, own or {})

    def _of_rank(self, rank: int, name: str) -> StateDict | None:
        full = f"rank_states.{rank}.{name}"
        return self._stored.object(full) if full in self._stored.objects else None

    def result(self) -> Restored:
        """Returns the facts, and what was saved as ``extra``."""
        manifest = self._stored.manifest
        extra: dict[str, Tree] = {}
        for path, name in self._stored.under("extra").items():
            inner = extra
            for key in path[:-1]:
                inner = inner.setdefault(str(key), {})
            read = self._extra.get(path)
            inner[str(path[-1])] = self._stored.object(name) if read is None else read.leaf.base
        return Restored(self._stored.folder, manifest.step, extra, manifest.run, manifest.world_size)


def _some(names: Iterable[str]) -> str:
    found = sorted(names)
    more = f" and {len(found) - 5} more" if len(found) > 5 else ""
    return f"{', '.join(found[:5])}{more}" if found else "none"
