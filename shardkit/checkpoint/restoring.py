"""``shardkit.restore_training``: a training goes on from a checkpoint, whoever wrote which part of it."""

from __future__ import annotations

import contextlib
import dataclasses
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import NamedTuple, NoReturn

import torch
from torch import nn
from torch.optim import Optimizer

from ..backend import Backend
from ..checks import attempt, some
from ..errors import ConfigurationError, DamagedFileError, noting_errors
from ..launching.run_folder import note_checkpoints
from ..layout import Box
from ..optimizer_state.kinds import Fixed, Leaf, Ranks, Slot, whole
from ..torch_seams.tensors import narrowed
from ..types import ProcessGroup, StateDict, Tree
from .collecting import Parts, backend_and_ranks, holder_for
from .format import folders
from .format.manifest import StoredCheckpoint, read_object
from .format.metadata import Chunk, Record
from .model_state import ModelState
from .optimizers import Holder, check_schedulers
from .rank_states import Stateful, equal, load_loader, set_random_states
from .saving import agree, wait_for_earlier


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
                    if (common := box.meet(chunk.box)) is not None:
                        self._copies.setdefault(chunk.record, []).append(_Copy(leaf, box, chunk, common))

    @property
    def records(self) -> Iterator[Record]:
        return iter(self._copies)

    @torch.no_grad()
    def run(self) -> None:
        """Reads them, each once, in the order in which they lie."""
        for record in sorted(self._copies):
            copies, name = self._copies[record], f"{self._stored.folder}: {record.name} in {record.file}"
            tensor, sizes = read_object(name, self._stored.read(record)), copies[0].chunk.box.sizes
            if not isinstance(tensor, torch.Tensor) or tuple(tensor.shape) != sizes:
                raise DamagedFileError(
                    f"{name} is no tensor of sizes {sizes}, which the checkpoint should have there"
                )
            for leaf, box, chunk, common in copies:
                narrowed(leaf.values(box), common, box).copy_(narrowed(tensor.detach(), common, chunk.box))


_ONE = ("state", "param_groups")
# Options that schedulers add to groups.
_OF_SCHEDULERS = frozenset({"initial_lr", "max_lr", "min_lr", "max_momentum", "base_momentum", "swa_lr"})


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
                f"{stored.folder} has {some(unclaimed)} beside the state of parameters, which no optimizer of the "
                "list has now, so whose it is can't be told. Build them as they were, or keep such state in extra="
            )
        # state and key of what is one number (or one record) for a slot, and is stored for each of its parameters
        self._numbers: list[tuple[StateDict, str, list[tuple[str, torch.Tensor]]]] = []
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
            theirs_alone = {*theirs} - {*mine} - _OF_SCHEDULERS
            mine_alone = {*mine} - {*theirs} - _OF_SCHEDULERS
            if theirs_alone and mine_alone:
                raise ConfigurationError(
                    f"group {k} of the optimizer in {self._stored.folder} has options {some(theirs_alone)}, and here "
                    f"it has {some(mine_alone)}: that was another class of optimizer. Build the same, or restore "
                    "without optimizer="
                )
            listed, own_names = set(self._stored.object(theirs["params"])), set(mine["params"])
            # frozen ones may be listed or not: they have no state
            there = {n for n in listed if n in own_names or n in self._of}
            here = own_names - (self._holder.names.frozen - listed)
            if there != here:
                raise ConfigurationError(
                    f"group {k} of the optimizer in {self._stored.folder} has parameters {some(there - here)} that it "
                    f"has not here, and lacks {some(here - there)}; build the groups as they were"
                )
        return saved

    # ------------------------------------------------------------ state
    def _fill(self, slot: Slot, state: StateDict) -> Iterator[Wanted]:
        have = [span for span in slot.spans if self._of.get(span.name)]
        for key in list(dict.fromkeys(key for span in have for key in self._of[span.name])):
            names = {span: self._of[span.name].get(key) for span in have}
            lacking = [span.name for span, name in names.items() if name is None]
            if lacking:
                raise ConfigurationError(
                    f"optimizer state {key!r} of {lacking[0]!r} is not in {self._stored.folder}, and that of others of "
                    "its flat parameter is"
                )
            stored = [(span, self._stored.tensors.get(name or "")) for span, name in names.items()]
            if all(found is not None and slot.is_cut(key, span, found.shape) for span, found in stored):
                state[key] = slot.zeros(next(found.dtype for _, found in stored if found is not None))
                for span, name in names.items():
                    yield Wanted(name or "", slot.wanted(span, state[key], self._holder.names.ranks))
            else:
                yield from self._numbers_of(slot, state, key, {s.name: n or "" for s, n in names.items()})

    def _numbers_of(self, slot: Slot, state: StateDict, key: str, names: dict[str, str]) -> Iterator[Wanted]:
        read = []
        for span, name in names.items():
            if (found := self._stored.tensors.get(name)) is None:
                continue
            if slot.is_shard and found.shape.numel() != 1:
                raise ConfigurationError(
                    f"optimizer state {key!r} of {span!r} has shape {tuple(found.shape)} in {self._stored.folder}, "
                    "which is neither the parameter's nor one number: it can't be cut into shards. Use "
                    "shardkit.WholeParameters for this optimizer"
                )
            device = slot.param.device if len(found.shape) else "cpu"
            value = torch.zeros(found.shape, dtype=found.dtype, device=device)
            read.append((span, value))
            yield Wanted(name, whole(name, value, (0,)))
        read = read or [(span, self._stored.object(name)) for span, name in names.items()]
        self._numbers.append((state, key, read))

    def finish(self) -> None:
        """Gives the optimizer what was wanted, all of which is there."""
        for state, key, read in self._numbers:
            (first, value), *others = read
            for name, other in others:
                if not equal(value, other):
                    raise ConfigurationError(
                        f"optimizer state {key!r} is {_shown(value)} for {first!r} and {_shown(other)} for {name!r}, "
                        "which lie in one flat parameter and have one such number here: one of them had no gradient in "
                        "some steps. Shard with fully_shard(module) or FSDP(module, flatten=False) (fairscale's "
                        "flatten_parameters=False), or wrap them in units of their own"
                    )
            state[key] = value
        beside = {key: self._stored.object(name) for key, name in self._others.items()}
        options = [
            {key: self._stored.object(name) for key, name in group.items() if key != "params"}
            for group in self._groups
        ]
        self._holder.load(self._states, options, beside)
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
            path: Wanted(name, whole(name, torch.zeros(found.shape, dtype=found.dtype, device="cpu"), (0,)))
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
        if len(there) == len(leaves) and there.keys() != leaves.keys():
            there = {module.name(name): full for name, full in there.items()}  # as ema= was saved once
        missing, unexpected = set(leaves) - set(there), set(there) - set(leaves)
        if not there:
            self._refuse(part)
        if missing or unexpected:
            raise ConfigurationError(
                f"the {part} is not the one in {self._stored.folder}: not in the checkpoint are {some(missing)}; not "
                f"in the {part} are {some(unexpected)}. Nothing was restored"
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
        manifest = self._stored.manifest
        extra: dict[str, Tree] = {}
        for path, name in self._stored.under("extra").items():
            inner = extra
            for key in path[:-1]:
                inner = inner.setdefault(str(key), {})
            read = self._extra.get(path)
            inner[str(path[-1])] = self._stored.object(name) if read is None else read.leaf.base
        return Restored(self._stored.folder, manifest.step, extra, manifest.run, manifest.world_size)
