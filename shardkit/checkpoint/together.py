"""Several optimizers over the parts of one model, as one; several schedulers likewise."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence

from ..errors import ConfigurationError
from ..types import StateDict
from .optimizer_state import Holder
from .rank_states import Stateful
from .slots import Slot


class Together(Holder):
    """Optimizers whose parameters have nothing in common: their states by name, their groups one after the other.

    That is what torch's ``get_state_dict(model, [first, second])`` makes of them.
    """

    def __init__(self, holders: Sequence[Holder]) -> None:
        self._holders = list(holders)
        self.names = self._holders[0].names
        seen: set[str] = set()
        for k, holder in enumerate(self._holders):
            names = {n for group in holder.groups() for n in group["params"]}
            if twice := sorted(seen & names):
                raise ConfigurationError(
                    f"optimizer {k} of the list has {twice[0]!r}, which one before it has too; a checkpoint keeps "
                    "optimizer state by the model's names, so each parameter can be in one of them"
                )
            seen |= names

    def states(self) -> list[tuple[Slot, StateDict]]:
        return [state for holder in self._holders for state in holder.states()]

    def groups(self) -> list[StateDict]:
        return [group for holder in self._holders for group in holder.groups()]

    def needed(self) -> list[Slot]:
        return [slot for holder in self._holders for slot in holder.needed()]

    def shards(self) -> list[Slot]:
        return [slot for holder in self._holders for slot in holder.shards()]

    def writers_of(self, group: int) -> tuple[int, ...]:
        for holder in self._holders:
            count = len(holder.groups())
            if group < count:
                return holder.writers_of(group)
            group -= count
        raise IndexError(group)

    def others(self) -> StateDict:
        return self._merged(lambda holder: holder.others())

    def named(self) -> dict[str, object]:
        return self._merged(lambda holder: holder.named())

    def _merged(self, part: Callable[[Holder], StateDict]) -> StateDict:
        merged: StateDict = {}
        for holder in self._holders:
            found = part(holder)
            if twice := sorted(merged.keys() & found.keys()):
                raise ConfigurationError(
                    f"two optimizers of the list keep state called {twice[0]!r} beside that of parameters; which is "
                    "whose would not be known. Save one of them in extra="
                )
            merged.update(found)
        return merged

    def unclaimed(self, others: Iterable[str], named: Iterable[str]) -> set[str]:
        return (set(others) - self.others().keys()) | (set(named) - self.named().keys())

    def load(self, states: Sequence[StateDict], groups: Sequence[StateDict], others: StateDict) -> None:
        rest, rest_of_groups = iter(states), iter(groups)
        for holder in self._holders:
            own = holder.others()
            holder.load(
                [next(rest) for _ in holder.needed()],
                [next(rest_of_groups) for _ in holder.groups()],
                {key: value for key, value in others.items() if key in own},
            )

    def load_named(self, found: Mapping[str, object]) -> None:
        for holder in self._holders:
            own = holder.named()
            holder.load_named({key: value for key, value in found.items() if key in own})


class Schedulers:
    """Several as one, in the order of the list."""

    def __init__(self, schedulers: Sequence[Stateful]) -> None:
        self._schedulers = list(schedulers)

    def state_dict(self) -> StateDict:
        return {str(k): s.state_dict() for k, s in enumerate(self._schedulers)}

    def load_state_dict(self, state: StateDict) -> None:
        for k, scheduler in enumerate(self._schedulers):
            scheduler.load_state_dict(state[str(k)])


def check_schedulers(given: Stateful | Sequence[Stateful], saved: StateDict, folder: str) -> None:
    """Refuses a list where one was saved, one where a list was, and lists of other lengths.

    Args:
        given: what is to be restored.
        saved: the state of one, or what :class:`Schedulers` has made of several.
        folder: of the checkpoint.

    Raises:
        ConfigurationError: see above; nothing was changed.
    """
    is_list = isinstance(given, Sequence)
    was_list = list(saved) == [str(k) for k in range(len(saved))]  # a scheduler's own state has names
    here = f"a list of {len(given)}" if isinstance(given, Sequence) else "one"
    there = f"a list of {len(saved)}" if was_list else "one"
    if here != there and (is_list or saved):
        raise ConfigurationError(
            f"scheduler= is {here}, and {folder} was saved with {there}; pass what was passed then, in the same order"
        )
