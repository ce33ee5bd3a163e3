"""What makes an FSDP module look like the module that it wraps."""

from __future__ import annotations

import abc
import sys
from collections.abc import Iterator
from typing import Any, NoReturn

from torch import nn

from ..errors import ConfigurationError
from ..optimizer_state.marking import check_request
from ..torch_seams.other_wrappers import PreparedForAccelerate
from ..types import Tree
from .methods import through
from .names import WRAPPED
from .refusals import put_into_wrapper
from .state import ShardingState
from .tracing import EXPORT, is_listed_for_export, refusal


class StandingIn(PreparedForAccelerate, nn.Module, abc.ABC):
    """Attributes, methods and items are those of the wrapped module; parameters and forward are not."""

    _state: ShardingState

    @property
    @abc.abstractmethod
    def module(self) -> nn.Module:
        """The wrapped module, or the wrapper's inner part around it."""

    def __getattr__(self, name: str) -> Tree:
        try:
            return super().__getattr__(name)
        except AttributeError:
            if name in (WRAPPED, "_state") or name.startswith("__"):
                raise
            unit: Any = nn.Module.__getattr__(self, WRAPPED)
            return through(self._state, getattr(unit._fpw_module, name))

    # ------------------------------------------------------------ what needs parameters in their places
    def register_parameter(self, name: str, param: nn.Parameter | None) -> None:
        """As of any module; the wrapped module's own can't be replaced."""
        try:
            super().register_parameter(name, param)
        except KeyError:
            raise put_into_wrapper(name) from None

    def named_modules(
        self, memo: set[nn.Module] | None = None, prefix: str = "", remove_duplicate: bool = True
    ) -> Iterator[tuple[str, nn.Module]]:
        """As of any module; torch.export asks for it before it records anything."""
        if EXPORT in sys.modules and is_listed_for_export(sys.modules[EXPORT]):
            raise refusal(self._state.unit, "torch.export (torch.onnx.export too)")
        return super().named_modules(memo, prefix, remove_duplicate)

    def __prepare_scriptable__(self) -> NoReturn:
        """What torch.jit.script asks for first."""
        raise refusal(self._state.unit, "torch.jit.script")

    # ------------------------------------------------------------ containers
    def __getitem__(self, key: object) -> Tree:
        return self.module[key]  # type: ignore[index]

    def __setitem__(self, key: object, value: object) -> None:
        container: Any = self.module
        container[key] = value

    def __len__(self) -> int:
        return len(self.module)  # type: ignore[arg-type]

    def __iter__(self) -> Iterator[Tree]:
        return iter(self.module)  # type: ignore[call-overload, no-any-return]

    def __contains__(self, key: object) -> bool:
        return key in self.module  # type: ignore[operator]

    def __bool__(self) -> bool:
        return bool(self.module)  # not every module has a length

    # ------------------------------------------------------------ torch's own checkpoints and FSDP
    def _fqn_modifiers(self) -> dict[str, str]:
        """What torch.distributed.checkpoint leaves out of names; it asks before it does anything."""
        wrapper: Any = self
        check_request(self._state.all_flats)
        inner: dict[str, str] = getattr(self.module, "_fqn_modifiers", dict)()
        return {**inner, **dict.fromkeys(wrapper._fsdp_wrapped_module.flat_param_names, WRAPPED), "": WRAPPED}

    @property
    def _is_fsdp_managed_module(self) -> bool:
        """Torch's own FSDP, 1 and 2, sets this on all that it is about to manage, and its compiler reads it."""
        return False

    @_is_fsdp_managed_module.setter
    def _is_fsdp_managed_module(self, value: bool) -> None:
        raise ConfigurationError(
            "torch's FSDP can't wrap a module that shardkit's FSDP has sharded: it would shard the shards. Use one of "
            "them; torch's FullyShardedDataParallel can leave this module alone (ignored_modules=[module])"
        )
