"""``shardkit.restore_training``: a training goes on from a checkpoint."""

from __future__ import annotations

import contextlib
import dataclasses
import os
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, NoReturn

from torch import nn
from torch.optim import Optimizer

from ..backend import Backend
from ..errors import ConfigurationError
from ..progress import noting_errors
from ..running.folder import note_checkpoints
from ..types import ProcessGroup, StateDict, Tree
from .agreeing import agree, attempt
from .collecting import Parts, backend_and_ranks, holder_for
from .format import folders
from .handles import wait_for_earlier
from .leaves import Fixed, Leaf, Ranks
from .model_state import ModelState
from .optimizer_loading import OptimizerReads
from .rank_states import Stateful, load_loader, set_random_states
from .reading import Reads, Wanted, whole_tensor
from .together import check_schedulers

if TYPE_CHECKING:
    from .format.stored import Stored


@dataclasses.dataclass(frozen=True)
class Restored:
    """What a checkpoint was of.

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
            lambda: _prepared(path, parts, backend, ranks, with_random, verify, held)
        )
        agree(ranks, problem, what)
        if restoring is None:
            raise ConfigurationError(what)
        _, problem = attempt(restoring.run)
        agree(ranks, problem, f"{what}: the model may be restored in part, and the training can't go on. It")
        return restoring.result()


restore = restore_training


def _prepared(
    path: str, parts: Parts, backend: Backend, ranks: Ranks, with_random: bool, verify: bool,
    held: contextlib.ExitStack,
) -> _Restoring:  # fmt: skip
    from .format.stored import Stored  # torch's part takes long to import

    if not folders.is_there(path):
        raise ConfigurationError(
            f"rank {ranks.world[ranks.rank]} does not see {path}, which rank {ranks.world[0]} restores: a checkpoint "
            "has to be on a file system that all ranks share"
        )
    held.enter_context(folders.being_read(path))
    return _Restoring(Stored(path, verify), parts, backend, ranks, with_random)


class _Restoring:
    """Everything is compared when it is made; :meth:`run` changes the training's objects."""

    def __init__(
        self, stored: Stored, parts: Parts, backend: Backend, ranks: Ranks, with_random: bool
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
            path: whole_tensor(stored, name)
            for path, name in stored.under("extra").items()
            if name in stored.tensors
        }
        self._reads = Reads(stored, [*wanted, *self._extra.values()])
        self._check_others()
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
        missing, unexpected = sorted(set(leaves) - set(there)), sorted(set(there) - set(leaves))
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

    def _check_others(self) -> None:
        for name in ("scheduler", "scaler"):
            if getattr(self._parts, name) is not None and name not in self._stored.objects:
                self._refuse(name)

    def _refuse(self, name: str) -> NoReturn:
        raise ConfigurationError(f"{self._stored.folder} was saved without {name}=. Restore without it")

    # ------------------------------------------------------------ changing things
    def run(self) -> None:
        """Restores everything."""
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
        """What was restored."""
        manifest = self._stored.manifest
        extra: dict[str, Tree] = {}
        for path, name in self._stored.under("extra").items():
            inner = extra
            for key in path[:-1]:
                inner = inner.setdefault(str(key), {})
            read = self._extra.get(path)
            inner[str(path[-1])] = self._stored.object(name) if read is None else read.leaf.base
        return Restored(self._stored.folder, manifest.step, extra, manifest.run, manifest.world_size)


def _some(names: list[str]) -> str:
    more = f" and {len(names) - 5} more" if len(names) > 5 else ""
    return f"{', '.join(names[:5])}{more}" if names else "none"
