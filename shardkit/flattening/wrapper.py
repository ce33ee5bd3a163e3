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
from collections.abc import Callable, Iterator, Sequence
from itertools import chain
from typing import Any

import torch
from torch import nn

from ..errors import ConfigurationError, LifecycleError, without_arguments
from ..types import IncompatibleKeys, Memo, SavedState, StateDict, Tree
from .flat_parameter import (
    WRAPPED,
    FlatParameter,
    ParamGroups,
    ParamInfo,
    SharedParamInfo,
    as_groups,
    check_uniform,
    find_params,
    flat_names,
    has_flat_keys,
    rename_loaded,
    rename_saved,
)


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
        ssd_offload="keep parameters on the CPU, with FSDP's OffloadPolicy", ssd_directory="see there"
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

    @property
    def _param_infos(self) -> Iterator[ParamInfo]:
        return chain.from_iterable(p._param_infos for p in self.flat_params)

    @property
    def _shared_param_infos(self) -> Iterator[SharedParamInfo]:
        return chain.from_iterable(p._shared_param_infos for p in self.flat_params)

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
        """Gives modules views of the flat parameters as they are now."""
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
        made = type(self).__new__(type(self))
        memo[id(self)] = made
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
        has_flat = has_flat_keys(state_dict, prefix)
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
