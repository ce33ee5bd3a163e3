"""Parameters and buffers of a model under the names that it was written with, as this rank has them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import cast

import torch
from torch import nn
from torch.nn.parallel import DataParallel, DistributedDataParallel

from ..errors import ConfigurationError, LifecycleError
from ..fsdp.construct import wake
from ..fsdp.flat_param import SUMMONED, FlatParam
from ..fsdp.state import ShardingState, plain_name, state_of
from ..fsdp.state_dict import buffers_of, check_saved, leaves_of, name_at, written_parameters
from ..optimizer_state.kinds import Fixed, Leaf, Ranks, add_named, noted, of_dtensor, whole
from ..oss.sharded_ddp import ShardedDDP
from ..torch_seams.tensors import facts_beside, is_dtensor, named_parts
from ..types import StateDict, Tree

EXTRA = "_extra_state"
_WRAPPERS = (ShardedDDP, DistributedDataParallel, DataParallel)  # which average gradients


class ModelState:
    """A model, unwrapped, and where its parameters are.

    Args:
        model: as it trains: plain, wrapped by anything that averages gradients, or sharded.
        ranks: those that save or restore.

    Attributes:
        module: the model without what averages its gradients.
        is_sharded: some of it lies in flat parameters.
        same: ranks that write what every rank has as a whole.
    """

    def __init__(self, model: nn.Module, ranks: Ranks) -> None:
        self.module = model
        while isinstance(self.module, _WRAPPERS):
            self.module = self.module.module
        self._inner, inner = "module.", getattr(self.module, "module", None)  # of an AveragedModel
        while isinstance(inner, _WRAPPERS):
            self._inner, inner = self._inner + "module.", inner.module
        # who wraps a model keeps it the same on all ranks; else nobody says so, and the first rank's counts
        self.same = ranks.everybody if self.module is not model else (0,)
        self.ranks = ranks
        self._copies: dict[int, tuple[int, ...]] = {}
        self._taken: StateDict = {}
        self.states = [s for s in (state_of(m) for m in self.module.modules()) if s is not None]
        for state in self.states:
            wake(state)
        for state in self.states:
            self._add(state)
        self.is_sharded = bool(self.states)

    def _add(self, state: ShardingState) -> None:
        for flat in state.flats:
            check_saved(flat, "a training checkpoint", "Save with torch.distributed.checkpoint")
            if flat.store.state is SUMMONED:
                raise LifecycleError(
                    "parameters are summoned or unsharded at this moment, and changes to them not yet in the shards: "
                    "save and restore after `with summon_full_params()` has ended (or after reshard())"
                )
            replicas = state.replicas.ranks if state.replicas is not None else ()
            held = len(flat.group.ranks) * max(1, len(replicas))
            if not set(flat.group.ranks) <= set(self.ranks.world) or held != self.ranks.size:
                self.ranks.refuse_others(flat.names[0], flat.group.ranks)
            self._copies[id(flat)] = self.ranks.places(replicas) if replicas else self.ranks.alone

    # ------------------------------------------------------------ facts
    def copies_of(self, flat: FlatParam, number: int | None = None) -> tuple[int, ...]:
        """Returns the ranks that have the same shard, or the same part of an original parameter in it."""
        return self.ranks.everybody if number in flat.layout.copied else self._copies[id(flat)]

    # ------------------------------------------------------------ leaves
    def name(self, name: str) -> str:
        """Returns a name without what wrappers, around the model or in an average of it, added to it."""
        return plain_name(name).replace(self._inner, "module.", 1)

    def leaves(self) -> dict[str, Leaf | Fixed]:
        """Lists everything that a state dict has, by name; what is no tensor as it is."""
        found: dict[str, Leaf | Fixed] = {}
        if not self.is_sharded:
            self._taken = self.module.state_dict(keep_vars=True)
            for name, value in self._taken.items():
                add_named(found, self._leaves(self.name(name), value))
            return found
        for name, param, flat, number in written_parameters(self.module):
            if flat is None:
                add_named(found, self._leaves(name, param))
            else:
                own = self.copies_of(flat, number) if flat.originals[number].shape.numel() else (0,)
                add_named(found, leaves_of(name, flat, number, own, self.ranks.everybody))
        modules = list(self.module.named_modules(remove_duplicate=False))
        extras = [(p, m) for p, m in modules if type(m).get_extra_state is not nn.Module.get_extra_state]
        given = [(name_at(path, EXTRA), m.get_extra_state()) for path, m in extras]
        for name, value in [*buffers_of(modules), *given]:
            add_named(found, self._leaves(name, value, of_first=True))
        return found

    def _leaves(self, name: str, value: object, of_first: bool = False) -> dict[str, Leaf | Fixed]:
        if not isinstance(value, torch.Tensor):
            return {name: Fixed(value)}
        if value.is_meta:
            raise ConfigurationError(f"{name!r} has no values yet: it is on the meta device")
        if is_dtensor(value):
            return {name: of_dtensor(name, value, self.ranks)}
        facts = facts_beside(value)
        parts = {name: value} if facts is None else named_parts(name, value)  # untold, it is refused as one
        # buffers may differ between ranks: those of the first count, as in state dicts
        ranks = (0,) if of_first or not isinstance(value, nn.Parameter) else self.same
        return {n: whole(n, part, ranks) for n, part in parts.items()} | noted(name, facts)

    # ------------------------------------------------------------ loading
    def loaded(self, found: Mapping[str, object]) -> None:
        """Takes what is no tensor, after values were written into the leaves."""
        for state in self.states:
            for flat in state.flats:
                flat.drop()  # what is gathered is of before
        if self.is_sharded:
            for path, m in self.module.named_modules(remove_duplicate=False):
                if (name := name_at(path, EXTRA)) in found:
                    m.set_extra_state(cast(Tree, found[name]))
            return
        given = {name: found.get(self.name(name), value) for name, value in self._taken.items()}
        with torch.no_grad():
            self.module.load_state_dict(given, strict=True)
