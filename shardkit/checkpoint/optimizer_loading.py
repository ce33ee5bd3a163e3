"""Optimizer state of a checkpoint, in the form that this rank's optimizer has it."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, NamedTuple

import torch

from ..errors import ConfigurationError
from ..types import StateDict
from .leaves import whole
from .optimizer_state import Holder
from .reading import Wanted
from .slots import Slot

if TYPE_CHECKING:
    from .format.stored import Stored

_ONE = ("state", "param_groups")
# Options that schedulers add to groups.
_OF_SCHEDULERS = frozenset({"initial_lr", "max_lr", "min_lr", "max_momentum", "base_momentum", "swa_lr"})


class _Number(NamedTuple):
    """What is one number (or one record) for a slot, and is stored for each of its parameters."""

    state: StateDict
    key: str
    read: list[tuple[str, torch.Tensor]]  # by parameter


class OptimizerReads:
    """What an optimizer needs of a checkpoint.

    Raises:
        ConfigurationError: it is of other parameters, or its state can't be cut as this optimizer's is.
    """

    def __init__(self, holder: Holder, stored: Stored) -> None:
        self._holder, self._stored = holder, stored
        self._of: dict[str, dict[str, str]] = {}
        self._named: dict[str, str] = {}
        for path, name in stored.under("optimizer", "state").items():
            if len(path) == 1:
                self._named[str(path[0])] = name
            else:
                self._of.setdefault(str(path[0]), {})[".".join(map(str, path[1:]))] = name
        self._groups = self._matched_groups()
        self._others = {
            str(path[0]): name
            for path, name in stored.under("optimizer").items()
            if len(path) == 1 and path[0] not in _ONE
        }
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
        """Of each group the names of its options in the checkpoint."""
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
            self._check_class(k, set(theirs), set(mine))
            there, here = set(self._stored.object(theirs["params"])), set(mine["params"])
            # frozen ones may be listed or not: they have no state
            there, here = (
                {n for n in there if n in here or n in self._of},
                here - (self._holder.names.frozen - there),
            )
            if there != here:
                raise ConfigurationError(
                    f"group {k} of the optimizer in {self._stored.folder} has parameters {_some(there - here)} that it "
                    f"has not here, and lacks {_some(here - there)}; build the groups as they were"
                )
        return saved

    def _check_class(self, group: int, theirs: set[str], mine: set[str]) -> None:
        # later versions of a class have more options; of another class each has some that the other lacks
        saved, own = theirs - mine - _OF_SCHEDULERS, mine - theirs - _OF_SCHEDULERS
        if saved and own:
            raise ConfigurationError(
                f"group {group} of the optimizer in {self._stored.folder} has options {_some(saved)}, and here it has "
                f"{_some(own)}: that was another class of optimizer. Build the same, or restore without optimizer="
            )

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
            if all(found is not None and slot.can_spread(key, span, found.shape) for span, found in stored):
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
        """All that was wanted is there: the optimizer takes it.

        Raises:
            ConfigurationError: parameters of one shard were updated for other numbers of steps.
        """
        for state, key, read in self._numbers:
            (first, value), *others = read
            for name, other in others:
                if not _same(value, other):
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


def _same(a: object, b: object) -> bool:
    if isinstance(a, torch.Tensor) and isinstance(b, torch.Tensor):
        return torch.equal(a, b)
    return bool(a == b)


def _shown(value: object) -> object:
    return value.item() if isinstance(value, torch.Tensor) and value.numel() == 1 else value


def _some(names: set[str]) -> str:
    found = sorted(names)
    return f"{', '.join(found[:3])}{', ...' if len(found) > 3 else ''}" if found else "none"
