"""``FlattenParamsWrapper``: the parameters of a module as a few flat ones.

An optimizer, a collective or a checkpoint then deals with one tensor where there were hundreds. The wrapped module
finds its parameters where they were, as views; outside, ``state_dict`` speaks their original names.

Legend: N numel of one flat parameter, the sum of its original parameters' numels.

[Note: three states of an original parameter] *Flattened*, an original parameter is a plain attribute: a view of the
flat parameter, created anew in each forward, so that its gradient reaches the flat parameter through autograd.
*Unflattened* (within ``unflatten_params``), it is a real parameter that shares the flat parameter's memory, and the
flat parameter isn't registered. While the wrapper is *copied*, it is None: a view can't be copied, and both sides make
new ones afterwards.
"""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Callable, Iterable, Iterator, MutableMapping, Sequence
from contextvars import ContextVar
from itertools import chain
from typing import Any, NamedTuple, SupportsIndex

import torch
from torch import nn

from ..errors import ConfigurationError, LifecycleError, without_arguments
from ..torch_seams.wrappers import versions_of
from ..types import IncompatibleKeys, Memo, SavedState, StateDict, Tree


def _saved(wrapper: FlattenParamsWrapper, state_dict: StateDict, prefix: str, *_: object) -> StateDict:
    rename_saved(state_dict, prefix)
    return state_dict


def _loaded(wrapper: FlattenParamsWrapper, incompatible: IncompatibleKeys) -> None:
    wrapper._finish_load()
    for keys in (incompatible.missing_keys, incompatible.unexpected_keys):
        keys[:] = [key.replace(WRAPPED + ".", "") for key in keys]


class FlattenParamsWrapper(nn.Module):
    """A module whose parameters are flat ones: ``flat_param_0`` and so on.

    Frozen parameters and those of other dtypes need groups of their own.

    Args:
        module: its tree is changed in place: parameters become views, plain attributes.
        param_list: parameters to flatten: None for all; a list; a list of lists for several flat parameters.
            Parameters that aren't in the module are ignored, and so are groups without any that are.
        flat_param_names: what follows after ``flat_param_`` in the names; default 0, 1, ...

    Attributes:
        flat_params: the flat parameters; empty within :meth:`unflatten_params`.
        num_params_managed: how many parameters they consist of; a shared one counts once.
        is_flattened: False within :meth:`unflatten_params`.

    Raises:
        ConfigurationError: parameters can't be flattened as asked; the module is as it was.
    """

    flat_params: list[FlatParameter]

    @without_arguments(
        ssd_offload="take FSDP's move_params_to_cpu=True (or OffloadPolicy)", ssd_directory="see there"
    )
    def __init__(
        self,
        module: nn.Module,
        param_list: ParamGroups = None,
        flat_param_names: Sequence[str] | None = None,
    ) -> None:
        super().__init__()
        self._fpw_module = module
        self.is_flattened = False
        self.flat_params = []
        self._unflattened_for_load: list[FlatParameter] | None = None
        self._auto_unflatten_state_dict = True
        found = [f for group in as_groups(param_list, module) if (f := find_params(self, group)).params]
        self.num_params_managed = sum(len(f.params) for f in found)
        self.flat_param_names = flat_names(flat_param_names, len(found))
        for group in found:
            check_uniform(group)
            flat_param = FlatParameter(group.params, group.params[0].requires_grad)
            flat_param._param_infos, flat_param._shared_param_infos = group.infos, group.shared_infos
            self.flat_params.append(flat_param)
        self._flatten_params(self.flat_params)
        self._register_hooks()

    def _register_hooks(self) -> None:
        self._register_state_dict_hook(_saved)
        self.register_load_state_dict_post_hook(_loaded)

    @property
    def module(self) -> Tree:
        """Returns the wrapped module."""
        return self._fpw_module

    @property
    def flat_param(self) -> FlatParameter:
        """Returns the flat parameter, where there is exactly one.

        Raises:
            LifecycleError: there are none or several.
        """
        if len(self.flat_params) != 1:
            raise LifecycleError(
                f"flat_param needs exactly one flat parameter, there are {len(self.flat_params)}; use flat_params"
            )
        return self.flat_params[0]

    _param_infos = property(lambda self: (i for p in self.flat_params for i in p._param_infos))
    _shared_param_infos = property(lambda self: (i for p in self.flat_params for i in p._shared_param_infos))

    # -------------------------------------------------------- flattening; subclasses that shard override these
    def _flatten_params(self, flat_params: list[FlatParameter]) -> None:
        """Registers the flat parameters in place of their original parameters, which become views."""
        self.flat_params = flat_params
        for name, flat_param in zip(self.flat_param_names, flat_params, strict=True):
            self.register_parameter(name, flat_param)
        for _, module, name in self._param_infos:
            delattr(module, name)
        for _, _, module, name, _, _ in self._shared_param_infos:
            delattr(module, name)
        self.is_flattened = True
        self._unflatten_params_as_views()

    def _unflatten_params(self, external_data: Sequence[torch.Tensor | None] | None = None) -> None:
        """Registers original parameters in place of the flat ones, with the memory of these or other data."""
        views = list(self.get_param_views(external_data))
        grads = [p.requires_grad for p in self.flat_params for _ in p._param_infos]
        self.is_flattened = False
        self._put([nn.Parameter(view.detach(), g) for view, g in zip(views, grads, strict=True)])
        self._fpw_module.__dict__.pop("_unflattened_param_views", None)
        for name in self.flat_param_names:
            delattr(self, name)
        self.flat_params = []

    def _unflatten_params_as_views(self) -> None:
        views = list(self.get_param_views())
        self._put(views)
        # Activation checkpoints ask it whether something in the module needs a gradient.
        object.__setattr__(self._fpw_module, "_unflattened_param_views", views)

    def _put(self, values: Sequence[torch.Tensor | None]) -> None:
        """Makes these the attributes of modules where original parameters were."""
        # setattr, not register_parameter: recurrent layers keep a list of their weights that way.
        for (_, module, name), value in zip(self._param_infos, values, strict=True):
            setattr(module, name, value)
        for _, _, module, name, there, there_name in self._shared_param_infos:
            setattr(module, name, getattr(there, there_name))

    @contextlib.contextmanager
    def unflatten_params(self, flat_params: Sequence[torch.Tensor] | None = None) -> Iterator[None]:
        """Gives the module real parameters under their own names within this block; what is written to them stays.

        Within another such block it does nothing.

        Args:
            flat_params: values for this block, each [N], in place of the flat parameters'; writes are lost.

        Raises:
            LifecycleError: ``flat_params`` is given and the parameters are unflattened already.
        """
        if not self.is_flattened:
            if flat_params is not None:
                raise LifecycleError(
                    "unflatten_params with other values needs flattened parameters; end the outer block first"
                )
            yield
            return
        flattened = self.flat_params
        self._unflatten_params(flat_params)
        try:
            yield
            if flat_params is None:
                flattened = take_over_originals(flattened, self._fpw_module)
        finally:
            self._flatten_params(flattened)

    def get_param_views(
        self, external_data_list: Sequence[torch.Tensor | None] | None = None
    ) -> Iterator[torch.Tensor]:
        """Yields original parameters as views of the flat parameters, or of tensors [N] in a list (None: of its own).

        Raises:
            ConfigurationError: the list has another length.
        """
        if external_data_list is None:
            external_data_list = [None] * len(self.flat_params)
        if len(external_data_list) != len(self.flat_params):
            raise ConfigurationError(
                f"expected one tensor for each of the {len(self.flat_params)} flat parameters, "
                f"got {len(external_data_list)}"
            )
        pairs = zip(self.flat_params, external_data_list, strict=True)
        return chain.from_iterable([param.get_param_views(data) for param, data in pairs])

    def metadata(self, flat_param_idx: int) -> tuple[list[str], Sequence[torch.Size], list[int]]:
        """Returns names, shapes and numels of one flat parameter's original parameters."""
        return self.flat_params[flat_param_idx].metadata()

    # -------------------------------------------------------- module
    def forward(self, *inputs: object, **kwinputs: object) -> Tree:
        """Runs the wrapped module's forward."""
        if self.is_flattened:
            self._unflatten_params_as_views()
        return self._fpw_module(*inputs, **kwinputs)

    def __getattr__(self, name: str) -> Tree:
        try:
            return super().__getattr__(name)
        except AttributeError:
            if name == WRAPPED:  # not there yet, while being unpickled
                raise
            return getattr(self._fpw_module, name)

    def __getitem__(self, key: object) -> Tree:
        return self.module[key]

    def _apply(
        self, fn: Callable[[torch.Tensor], torch.Tensor], recurse: bool = True
    ) -> FlattenParamsWrapper:
        flattened = self.flat_params
        super()._apply(fn, recurse)
        self._adopt_registered(flattened)
        return self

    def _adopt_registered(self, previous: Sequence[FlatParameter]) -> None:
        """Makes plain parameters flat that torch has put in place of flat ones (it does for a new device)."""
        if not self.is_flattened:
            return
        current: list[FlatParameter] = []
        for name, before in zip(self.flat_param_names, previous, strict=True):
            now = self._parameters[name]
            if not isinstance(now, FlatParameter):
                now = before if now is None else before._like_this(now)
                self._parameters[name] = now
            current.append(now)
        self.flat_params = current
        self._unflatten_params_as_views()

    # -------------------------------------------------------- copies
    def __deepcopy__(self, memo: Memo) -> FlattenParamsWrapper:
        made = memo[id(self)] = type(self).__new__(type(self))
        flattened = self.is_flattened
        if flattened:  # without views; see [Note: three states of an original parameter]
            self._put([None] * len(list(self._param_infos)))
            self._fpw_module.__dict__.pop("_unflattened_param_views", None)
        try:
            # Only object's own __getstate__ is missing in Python 3.10.
            state = self.__getstate__() if "__getstate__" in dir(type(self)) else self.__dict__
            made.__setstate__(copy.deepcopy(state, memo))
        finally:
            if flattened:
                self._unflatten_params_as_views()
        return made

    def __setstate__(self, state: StateDict) -> None:
        super().__setstate__(state)
        if "_unflattened_for_load" not in self.__dict__:  # written by fairscale
            self._unflattened_for_load = None
            self._register_hooks()
        if self.is_flattened:
            self._unflatten_params_as_views()

    # -------------------------------------------------------- state dicts
    def state_dict(self, *args: Any, **kwargs: Any) -> Tree:
        """Returns state under the names that parameters have in the wrapped module. Arguments as in torch."""
        if self.is_flattened and self._auto_unflatten_state_dict:
            with self.unflatten_params():
                return super().state_dict(*args, **kwargs)
        return super().state_dict(*args, **kwargs)

    def flat_state_dict(self, *args: object, **kwargs: object) -> StateDict:
        """Returns state with the flat parameters as they are. Wrappers within the module still give original names.

        Raises:
            LifecycleError: within :meth:`unflatten_params`.
        """
        if not self.is_flattened:
            raise LifecycleError(
                "flat_state_dict needs flattened parameters; end the unflatten_params block first"
            )
        before, self._auto_unflatten_state_dict = self._auto_unflatten_state_dict, False
        try:
            result: StateDict = self.state_dict(*args, **kwargs)
        finally:
            self._auto_unflatten_state_dict = before
        return result

    def load_state_dict(
        self, state_dict: SavedState, strict: bool = True, assign: bool = False
    ) -> IncompatibleKeys:
        """Loads a dict of either kind: with original names or with flat parameters. It isn't changed.

        Returns:
            Missing and unexpected keys, under the names in :meth:`state_dict`.
        """
        try:
            return super().load_state_dict(state_dict, strict, assign)
        finally:
            self._finish_load()

    def _load_from_state_dict(self, state_dict: StateDict, prefix: str, *args: Any) -> None:
        # Here, not in load_state_dict: torch calls this for wrappers inside of other modules too.
        old, own = prefix + OLD_FLAT_NAME, prefix + FLAT_PREFIX  # not those of wrappers inside
        has_flat = any(k == old or (k.startswith(own) and "." not in k[len(prefix) :]) for k in state_dict)
        if self.is_flattened and self.num_params_managed > 0 and not has_flat:  # it needs real parameters
            self._unflattened_for_load = self.flat_params
            self._unflatten_params()
        rename_loaded(state_dict, prefix, self.flat_param_names)
        super()._load_from_state_dict(state_dict, prefix, *args)

    def _finish_load(self) -> None:
        if self._unflattened_for_load is not None:
            flattened, self._unflattened_for_load = self._unflattened_for_load, None
            try:
                flattened = take_over_originals(flattened, self._fpw_module)
            finally:
                self._flatten_params(flattened)
        else:
            self._adopt_registered(self.flat_params)


# ------------------------------------------------------------ original parameters
def _same_memory(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Says whether two tensors surely are the same view of the same memory."""
    try:
        return a.is_set_to(b)
    except (NotImplementedError, RuntimeError):  # tensors without storage
        return False


def _with_data(flat_param: FlatParameter, data: torch.Tensor) -> FlatParameter:
    """Gives the flat parameter other data, as the same object if a tensor can go from one device to the other."""
    grad, flat_param.grad = flat_param.grad, None
    if flat_param.device.type != data.device.type:
        return flat_param._like_this(data.requires_grad_(flat_param.requires_grad))
    flat_param.data = data
    flat_param.grad = None if grad is None else grad.to(data)
    return flat_param


@torch.no_grad()
def take_over_originals(flat_params: Sequence[FlatParameter], module: nn.Module) -> list[FlatParameter]:
    """Gives flat parameters the values of tensors that took original parameters' places while they were unflattened.

    Returns:
        The flat parameters; new ones where original parameters moved to a device that a tensor can't change to.

    Raises:
        LifecycleError: original parameters have other shapes, or several dtypes or devices.
    """
    taken = []
    for flat_param in flat_params:
        views = list(flat_param.get_param_views(flat_param.data))
        originals = [getattr(module, name).detach() for _, module, name in flat_param._param_infos]
        kinds = {(m.dtype, m.device) for m in originals}
        if [m.shape for m in originals] != [v.shape for v in views] or len(kinds) > 1:
            raise LifecycleError(
                f"parameters of {type(module).__name__} can't be flattened again as they were left; "
                f"expected one dtype and device and the shapes {[tuple(v.shape) for v in views]}, got {kinds} and "
                f"{[tuple(m.shape) for m in originals]}"
            )
        if kinds != {(flat_param.dtype, flat_param.device)}:
            flat_param = _with_data(flat_param, torch.cat([m.reshape(-1) for m in originals]))
        else:
            for original, view in zip(originals, views, strict=True):
                if not _same_memory(view, original):
                    view.copy_(original)
        taken.append(flat_param)
    return taken


# ------------------------------------------------------------ flat parameters
# ``FlatParameter``: several parameters as one, and where in a tree of modules its original parameters are.
#
# Legend: N numel of one flat parameter, the sum of its original parameters' numels.
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
    _fsdp_flattened = True  # torch's mark of its own, which Lightning looks for

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
        return memo[id(self)]  # type: ignore[no-any-return]

    def _like_this(self, other: torch.Tensor) -> FlatParameter:
        """Makes a flat parameter of the same parameters with the data, gradient and requires_grad of another tensor."""
        made = FlatParameter([other.detach()], other.requires_grad)
        made.__setstate__(self._state())
        made.grad = other.grad
        return made


# ------------------------------------------------------------ keys: with and without the wrapper, and flat parameters
WRAPPED = "_fpw_module"
OLD_FLAT_NAME = "flat_param"  # when there was always exactly one

_translate_loaded: ContextVar[bool] = ContextVar("shardkit.flattening.wrapper.translate_loaded", default=True)


def rename_prefix(state_dict: MutableMapping[str, Any], old: str, new: str) -> None:
    """Makes keys that begin with ``old`` begin with ``new``, in place; they go to the end."""
    for key in [k for k in state_dict if k.startswith(old)]:
        state_dict[new + key[len(old) :]] = state_dict.pop(key)


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
