"""``FlatParameter``: several parameters as one, and where in a tree of modules its original parameters are.

Legend: N numel of one flat parameter, the sum of its original parameters' numels.
"""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Iterable, Iterator, MutableMapping, Sequence
from contextvars import ContextVar
from itertools import chain
from typing import Any, NamedTuple, SupportsIndex

import torch
from torch import nn

from ..errors import ConfigurationError
from ..torch_seams.wrappers import versions_of
from ..types import Memo, SavedState, StateDict

# Where an original parameter is: name of its module within the wrapper, the module, name of the attribute.
ParamInfo = tuple[str, nn.Module, str]
# A further place of it: module's name here and at the first place, then module and attribute here and there.
SharedParamInfo = tuple[str, str, nn.Module, str, nn.Module, str]
# numels, shapes, and both
FlatState = tuple[list[int], list[torch.Size], list[ParamInfo], list[SharedParamInfo]]
ParamGroups = Iterable[Iterable[nn.Parameter]] | Iterable[nn.Parameter] | None

FLAT_PREFIX = "flat_param_"


class FoundParams(NamedTuple):
    """Distinct parameters in the order in which their modules list them, and all their places.

    Attributes:
        params: each parameter once.
        infos: the first place of each.
        shared_infos: further places of those that are found at several.
    """

    params: list[nn.Parameter]
    infos: list[ParamInfo]
    shared_infos: list[SharedParamInfo]


def find_params(root: nn.Module, wanted: Iterable[nn.Parameter]) -> FoundParams:
    """Finds the wanted parameters in the tree of ``root``; those that aren't in it are left out.

    A module that has two names goes by the first one.
    """
    chosen = {id(p) for p in wanted}
    found = FoundParams([], [], [])
    first: dict[int, ParamInfo] = {}
    for module_name, module in root.named_modules():
        # Not named_parameters(): that leaves out a parameter's second name within the same module.
        for name, param in module._parameters.items():
            if param is None or id(param) not in chosen:
                continue
            if id(param) in first:
                there_name, there, there_attribute = first[id(param)]
                found.shared_infos.append((module_name, there_name, module, name, there, there_attribute))
            else:
                first[id(param)] = (module_name, module, name)
                found.infos.append(first[id(param)])
                found.params.append(param)
    return found


def as_groups(param_list: ParamGroups, module: nn.Module) -> list[list[nn.Parameter]]:
    """Returns the argument ``param_list`` of :class:`FlattenParamsWrapper` as a list of groups.

    Raises:
        ConfigurationError: something in it is no parameter, or a parameter is in two groups.
    """
    given: list[Any] = list(module.parameters() if param_list is None else param_list)
    if given and isinstance(given[0], torch.Tensor):
        given = [given]
    groups = [list(dict.fromkeys(group)) for group in given]
    for param in chain(*groups):
        if not isinstance(param, nn.Parameter):
            raise ConfigurationError(
                "param_list has to be a list of parameters or a list of such lists; "
                f"found a {type(param).__name__}"
            )
    total, distinct = sum(len(g) for g in groups), len(set(chain(*groups)))
    if total != distinct:
        raise ConfigurationError(
            f"{total - distinct} parameters are in more than one group of param_list; a parameter can be part of one "
            "flat parameter only. Put parameters that are shared between modules into the same group"
        )
    return groups


def flat_names(names: Sequence[str] | None, count: int) -> list[str]:
    """Returns the names of ``count`` flat parameters.

    Raises:
        ConfigurationError: the names are too many, too few, or not distinct.
    """
    if names is None:
        names = [str(i) for i in range(count)]
    if len(names) != count or len(set(names)) != count:
        raise ConfigurationError(
            f"flat_param_names has to hold one distinct name for each of the {count} groups of parameters that are "
            f"found in the module, got {list(names)}"
        )
    return [FLAT_PREFIX + name for name in names]


def check_uniform(found: FoundParams) -> None:
    """Refuses what one tensor can't hold.

    Raises:
        ConfigurationError: original parameters differ in dtype or in requires_grad.
    """
    for what in ("dtype", "requires_grad"):
        by_value: dict[object, list[str]] = {}
        for param, (module_name, _, name) in zip(found.params, found.infos, strict=True):
            by_value.setdefault(getattr(param, what), []).append(f"{module_name}.{name}")
        if len(by_value) > 1:
            raise ConfigurationError(
                f"all parameters of a flat parameter need the same {what}, got "
                + "; ".join(f"{value}: {', '.join(names)}" for value, names in by_value.items())
                + ". Give param_list one group for each"
            )


class FlatParameter(nn.Parameter):
    """Several tensors as one parameter [N], and how to get them back as views.

    Args:
        params: tensors of one dtype and device, at least one, none of them flat already. Their values are copied.
        requires_grad: as for any parameter.

    Raises:
        ConfigurationError: ``params`` is nothing of the kind.
    """

    _param_numels: list[int]
    _param_shapes: list[torch.Size]
    _param_infos: list[ParamInfo]
    _shared_param_infos: list[SharedParamInfo]

    def __new__(cls, params: Sequence[torch.Tensor], requires_grad: bool = True) -> FlatParameter:
        if not isinstance(params, list | tuple) or not params:
            raise ConfigurationError("a FlatParameter needs a list or tuple of at least one parameter")
        for p in params:
            if not isinstance(p, torch.Tensor) or isinstance(p, FlatParameter):
                raise ConfigurationError(
                    f"a FlatParameter can't hold a {type(p).__name__}; it takes parameters that aren't flat themselves "
                    "(leave out of param_list what an inner wrapper has flattened)"
                )
        data = torch.cat([p.detach().reshape(-1) for p in params])
        return super().__new__(cls, data, requires_grad=requires_grad)

    def __init__(self, params: Sequence[torch.Tensor], requires_grad: bool = True) -> None:
        self._param_numels = [p.numel() for p in params]
        self._param_shapes = [p.size() for p in params]
        self._param_infos = []
        self._shared_param_infos = []

    def get_param_views(self, external_data: torch.Tensor | None = None) -> Iterator[torch.Tensor]:
        """Returns original parameters as views of ``external_data`` [N], or of this parameter.

        Raises:
            ConfigurationError: the tensor has another numel (one rank's shard, say).
        """
        data = self if external_data is None else external_data
        expected = sum(self._param_numels)
        if data.numel() != expected:
            raise ConfigurationError(
                f"expected a tensor with all {expected} elements of the {len(self._param_numels)} original parameters, "
                f"got one with {data.numel()}"
            )
        pieces = torch.split_with_sizes(data.reshape(-1), self._param_numels)
        return (piece.view(shape) for piece, shape in zip(pieces, self._param_shapes, strict=True))

    def metadata(self) -> tuple[list[str], list[torch.Size], list[int]]:
        """Returns names (from the wrapper on), shapes and numels of the original parameters."""
        names = [f"{module}.{name}" if module else name for module, _, name in self._param_infos]
        return names, self._param_shapes, self._param_numels

    def _state(self) -> FlatState:
        return self._param_numels, self._param_shapes, self._param_infos, self._shared_param_infos

    def __setstate__(self, state: FlatState) -> None:
        self._param_numels, self._param_shapes, self._param_infos, self._shared_param_infos = state

    def __reduce_ex__(self, protocol: SupportsIndex) -> str | tuple[object, ...]:
        return FlatParameter, ([self.data], self.requires_grad), self._state()

    def __deepcopy__(self, memo: Memo) -> FlatParameter:
        if id(self) not in memo:
            copied = FlatParameter([self.data], self.requires_grad)
            memo[id(self)] = copied
            copied.__setstate__(copy.deepcopy(self._state(), memo))
        result: FlatParameter = memo[id(self)]
        return result

    def _like_this(self, other: torch.Tensor) -> FlatParameter:
        """Makes a flat parameter of the same parameters with the data, gradient and requires_grad of another tensor."""
        made = FlatParameter([other.detach()], other.requires_grad)
        made.__setstate__(self._state())
        made.grad = other.grad
        return made


# ------------------------------------------------------------ keys: with and without the wrapper, and flat parameters
WRAPPED = "_fpw_module"
OLD_FLAT_NAME = "flat_param"  # when there was always exactly one

_translate_loaded: ContextVar[bool] = ContextVar(
    "shardkit.flattening.flat_parameter.translate_loaded", default=True
)


def rename_prefix(state_dict: MutableMapping[str, Any], old: str, new: str) -> None:
    """Makes keys that begin with ``old`` begin with ``new``, in place; they go to the end."""
    for key in [k for k in state_dict if k.startswith(old)]:
        state_dict[new + key[len(old) :]] = state_dict.pop(key)


def has_flat_keys(state_dict: SavedState, prefix: str) -> bool:
    """Says whether the dict has flat parameters for the wrapper at ``prefix``; not for those within it."""
    start = prefix + OLD_FLAT_NAME
    return any(
        key == start or (key.startswith(prefix + FLAT_PREFIX) and "." not in key[len(prefix) :])
        for key in state_dict
    )


def translates_loaded() -> bool:
    """Says whether keys that are loaded get the names that wrapping made."""
    return _translate_loaded.get()


@contextlib.contextmanager
def no_key_translation() -> Iterator[None]:
    """Lets ``load_state_dict`` take keys as they are, with names of wrappers' attributes, within this block."""
    token = _translate_loaded.set(False)
    try:
        yield
    finally:
        _translate_loaded.reset(token)


def rename_saved(state_dict: StateDict, prefix: str) -> None:
    """Names the wrapped module's entries as if there were no wrapper at ``prefix``."""
    rename_prefix(state_dict, f"{prefix}{WRAPPED}.", prefix)
    versions: StateDict = versions_of(state_dict) or {}
    inner = prefix + WRAPPED
    for key in [k for k in versions if k == inner or k.startswith(inner + ".")]:
        # Both names stay: the plain module looks for one, the wrapped module for the other.
        versions.setdefault((prefix + key[len(inner) :].removeprefix(".")).removesuffix("."), versions[key])


def rename_loaded(state_dict: StateDict, prefix: str, flat_names: Sequence[str]) -> None:
    """Reverses :func:`rename_saved`; the flat parameters of the wrapper at ``prefix`` stay where they are."""
    if not translates_loaded():
        return
    if prefix + OLD_FLAT_NAME in state_dict and flat_names:
        state_dict[prefix + flat_names[0]] = state_dict.pop(prefix + OLD_FLAT_NAME)
    down = f"{prefix}{WRAPPED}."
    for key in [k for k in state_dict if k.startswith(prefix) and not k.startswith(down)]:
        if key[len(prefix) :] not in flat_names:
            state_dict[down + key[len(prefix) :]] = state_dict.pop(key)
