"""One save of a checkpoint: what ranks do, and where they meet.

Ranks meet three times, to exchange some hundred bytes each: before anything is written, when all have written, and when
the checkpoint has its name. In the background they do not meet at all: each tells what it has done by a small file in
the temporary folder, and the first rank, which finds all of them there, makes the checkpoint complete.
"""

from __future__ import annotations

import hashlib
import os
import shutil
from collections.abc import Callable

import torch

from ..checks.same_everywhere import check_same_everywhere
from ..errors import ConfigurationError, RankMismatchError
from ..progress import note_error
from .agreeing import agree, attempt
from .background import Background
from .collecting import Collected, has_torchs_ranks
from .data_file import on_host, write_parts
from .entries import Part, parts_of_rank
from .format import folders
from .format.hashing import best_hash
from .handles import Handle, join_earlier
from .lacking import lacking_entries, shards_with_state
from .leaves import Leaf, Ranks


class Save:
    """A checkpoint that is about to be written.

    Args:
        folder: of checkpoints.
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
        self.parts: list[Part] = []
        self.values: list[torch.Tensor | None] | None = None

    @property
    def is_first(self) -> bool:
        """Whether this rank puts the checkpoint together."""
        return self.ranks.rank == 0

    # ------------------------------------------------------------ before anything is written
    def begin(self, collect: Callable[[], Collected]) -> None:
        """Finds out what there is to write, and that all ranks are in this (collective).

        Raises:
            ShardkitError: on all ranks; nothing was written.
        """
        _, earlier = attempt(lambda: join_earlier(self.ranks.rank))
        collected, problem = attempt(lambda: self._collect(collect)) if earlier is None else (None, None)
        digest = "" if collected is None else _digest(collected, self.ranks)
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
        if self.is_first:
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
        """Writes everything, and returns when the checkpoint is complete (collective).

        Raises:
            ShardkitError: on all ranks; there is no such checkpoint, and earlier ones are whole.
        """
        _, problem = attempt(self.write_own)
        try:
            agree(self.ranks, problem, self.what)
            _, problem = attempt(self.complete) if self.is_first else (None, None)
            agree(self.ranks, problem, self.what)
        except Exception as error:
            self._give_up()
            note_error(error)
            raise
        return Handle(self.target)

    def write_own(self) -> None:
        """This rank's files."""
        if not folders.is_there(self.temporary):
            raise ConfigurationError(
                f"rank {self.ranks.world[self.ranks.rank]} does not see {self.temporary}, which rank "
                f"{self.ranks.world[0]} has made: a checkpoint's folder has to be on a file system that all ranks "
                "share. Save to shared storage (NFS, Lustre, a mounted bucket)"
            )
        values = on_host(self.parts) if self.values is None else self.values
        write_parts(self.temporary, self.ranks.rank, self.parts, self.kind, values)

    def complete(self) -> None:
        """All ranks have written: the checkpoint gets its name, then old ones go."""
        from .composing import compose  # torch's part takes long to import

        compose(self.temporary, self.ranks.size, self.step, self.run, self.kind)
        folders.finish(self.temporary, self.folder, self.step)
        folders.keep_newest(self.folder, self.keep, self.step)

    def _give_up(self) -> None:
        if self.is_first and self.temporary:
            shutil.rmtree(self.temporary, ignore_errors=True)

    # ------------------------------------------------------------ in the background
    def in_background(self) -> Handle:
        """Begins to write."""
        handle = Handle(self.target)
        work = Background(self.temporary, self.target, self.ranks, self.what)
        handle.start(self.ranks.rank, lambda: work.run(self.write_own, self.complete))
        group = self.ranks.group
        if group is not None and not has_torchs_ranks():
            # ranks that are threads may take turns: one that waits for the others' files would keep them from beginning
            group.channel("control").barrier(label=self.what)
        return handle


def _is_number(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _facts(collected: Collected, ranks: Ranks) -> list[tuple[str, object]]:
    """What all ranks have alike."""
    return [
        (entry.name, (tuple(entry.value.shape), str(entry.value.base.dtype)))
        for entry in collected.entries
        if isinstance(entry.value, Leaf)
        and (entry.path[0] == "model" or entry.value.copies == ranks.everybody)
    ]


def _digest(collected: Collected, ranks: Ranks) -> str:
    return hashlib.sha256(repr(_facts(collected, ranks)).encode()).hexdigest()[:16]
