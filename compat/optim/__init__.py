"""fairscale.optim, with all of its modules: fairscale's arguments, formats of state, and private attributes."""

from __future__ import annotations

import enum
from collections.abc import Callable, Iterable
from operator import attrgetter
from typing import Any

import torch
from torch import nn
from torch.amp.grad_scaler import OptState
from torch.optim import SGD, Optimizer
from torch.optim.optimizer import ParamsT
from torch.utils.hooks import RemovableHandle

from shardkit.compat.redirected import redirected_function
from shardkit.errors import ConfigurationError, LifecycleError
from shardkit.internal.params import get_global_rank
from shardkit.oss import optimizer as _oss
from shardkit.oss.optimizer import part_of_rank
from shardkit.oss.placement import OwnedParameters
from shardkit.training import adascale as _adascale
from shardkit.training import grad_scaler
from shardkit.training.adascale import SQUARE, VARIANCE
from shardkit.types import AnyCallable, ParamGroup, ProcessGroup, StateDict, T, Tree

__all__ = ["OSS", "AdaScale", "AdaScaleWrapper", "Adam", "GradScaler", "Precision"]


class GradScaler(grad_scaler.GradScaler, torch.cuda.amp.GradScaler):  # noqa: TID251 - a name alone
    """shardkit's, of the class of torch's that annotations of fairscale's users name, on any device."""


class ShardedGradScaler(grad_scaler.ShardedGradScaler, torch.cuda.amp.GradScaler):  # noqa: TID251 - a name alone
    """The same of shardkit's ShardedGradScaler."""


# ------------------------------------------------------------ OSS, with private attributes that users of fairscale read
class OSS(_oss.OSS):
    """fairscale's OSS: see :class:`shardkit.OSS` for what it does.

    Args:
        params: parameters, param groups or named parameters.
        optim: optimizer class.
        group: process group; None for all ranks.
        broadcast_buffer_size: no effect (deprecated in fairscale).
        broadcast_fp16: updated fp32 parameters travel as fp16; every rank's copy is rounded. Other dtypes travel as
            they are (fairscale turns them into fp32).
        force_broadcast_object: no effect: state always travels in a way that works on every device.
        **default: arguments of ``optim``.
    """

    _tells_empty_state = False

    def __init__(
        self,
        params: ParamsT,
        optim: Callable[..., Optimizer] = SGD,
        group: ProcessGroup = None,
        broadcast_buffer_size: int = -1,
        broadcast_fp16: bool = False,
        force_broadcast_object: bool = False,
        **default: Tree,
    ) -> None:
        kind: object = optim
        if isinstance(kind, type) and issubclass(kind, _adascale.AdaScale):
            raise ConfigurationError(
                f"OSS would give each rank's {kind.__name__} some of the parameters, and gains are of all ranks' "
                "gradients of one parameter. Put AdaScale around OSS: AdaScale(OSS(...)), or AdaScaleWrapper(params, "
                "optim_cls=OSS, optim=SGD, ...)"
            )
        self.broadcast_fp16 = broadcast_fp16
        self.force_broadcast_object = force_broadcast_object
        super().__init__(
            params, optim, group, broadcast_dtype=torch.float16 if broadcast_fp16 else None, **default
        )
        if group is None and torch.distributed.is_available() and torch.distributed.is_initialized():
            self.group = torch.distributed.group.WORLD

    # fairscale's private attributes, read by trainers in the wild
    _param_to_rank = property(lambda self: dict(self._owner))
    _param_to_index = property(lambda self: {id(p): i for i, p in enumerate(self._parameters())})
    _index_to_param = property(lambda self: dict(enumerate(self._parameters())))
    _partition_parameters = property(_oss.OSS.partition_parameters)
    _default_device = property(lambda self: next(self._parameters()).device)

    @property
    def _per_device_params(self) -> dict[torch.device, list[list[nn.Parameter]]]:
        """Returns the device -> rank -> parameters, smallest first."""
        per_device: dict[torch.device, list[list[nn.Parameter]]] = {}
        for p in self._parameters():
            ranks = per_device.setdefault(p.device, [[] for _ in range(self.world_size)])
            ranks[self._owner[p]].append(p)
        for ranks in per_device.values():
            for params in ranks:
                params.sort(key=lambda p: p.numel())
        return per_device

    _local_params = property(  # owned ones that have a gradient
        lambda self: [p for p in self._parameters() if self._owner[p] == self.rank and p.grad is not None]
    )

    @property
    def _all_states(self) -> list[StateDict]:
        """Returns each rank's inner state dict as of the last consolidation; empty before."""
        if self._consolidated is None:
            return []
        whole = self.state_dict()
        owners = [self.owner_of(p) for p in self._parameters()]
        return [part_of_rank(whole, owners, rank) for rank in range(self.world_size)]

    @property
    def buckets(self) -> dict[torch.device, dict[int, torch.Tensor]]:
        """Returns the device -> rank -> the flat buffer that the rank's trainable parameters are views of."""
        found: dict[torch.device, dict[int, torch.Tensor]] = {}
        if not isinstance(self.placement, OwnedParameters):
            return found
        for flat in self.placement.buffers:
            for rank in range(self.world_size):
                segment = flat.segment(rank)
                if segment.numel():
                    found.setdefault(segment.device, {})[rank] = segment
        return found

    # names of fairscale before 0.3.7
    get_global_rank = staticmethod(get_global_rank)
    rank_local_state_dict = staticmethod(
        redirected_function(
            "optim.oss.OSS.rank_local_state_dict",
            "OSS.load_state_dict(state_dict), which takes a rank's part",
            why="it read a format that fairscale gave up in 0.3.7",
        )
    )

    param_to_rank = _param_to_rank
    param_to_index = _param_to_index
    per_device_params = _per_device_params
    local_params = _local_params
    index_to_param = _index_to_param


# ------------------------------------------------------------ AdaScale
def numpy_globals() -> list[Any]:
    """Lists what ``torch.load(weights_only=True)`` has to be allowed for the numpy arrays in an AdaScale state dict.

    ::

        with torch.serialization.safe_globals(numpy_globals()):
            state = torch.load(path)
    """
    import numpy as np  # torch does without

    rebuild = np.ones(1).__reduce__()[0]  # its module's name depends on the version of numpy
    return [rebuild, np.ndarray, np.dtype, type(np.dtype(np.float64))]


class AdaScale(_adascale.AdaScale):
    """fairscale's AdaScale: see :class:`shardkit.AdaScale` for what it does, and its arguments."""

    def state_dict(self) -> StateDict:
        """Returns the wrapped optimizer's, with ``state["adascale"]`` as fairscale's: name -> fp64 numpy array [G].

        With ``weights_only=True`` such a file loads under :func:`numpy_globals`.
        """
        found = super().state_dict()
        found["state"]["adascale"] = {k: v.numpy() for k, v in found["state"]["adascale"].items()}
        return found

    # fairscale's private attributes
    _state = property(lambda self: {k: v.numpy() for k, v in self._averages.items()})
    _local_grad_sqr = property(lambda self: self._meter.sums() if self._meter.has_begun else None)
    _num_grads_to_accum = property(attrgetter("_meter.expected"))
    # one for each parameter, of two that there are
    _hook_handles = property(attrgetter("_meter.hooks.before"))

    def _grad_sqr_avg(self, pg_idx: int | None = None, name: str = SQUARE) -> float:
        return float(self._averages[name][slice(None) if pg_idx is None else pg_idx].sum())

    def _grad_var_avg(self, pg_idx: int | None = None) -> float:
        return self._grad_sqr_avg(pg_idx, VARIANCE)

    def _gather_flat_grad(self) -> torch.Tensor:
        return self._averaging.flat_gradient(self._meter.like)

    _compute_intra_grad_corr_mean = _adascale.AdaScale.gradient_correlation


class AdaScaleWrapper(AdaScale):
    """An AdaScale that makes its optimizer itself, so that its constructor looks like an optimizer's.

    Put AdaScale around OSS, not into it: there each rank would compare other parameters.

    Args:
        params: of the optimizer.
        world_size, scale, smoothing, num_gradients_to_accumulate, debias_ewma: as :class:`AdaScale`.
        optim_cls: the optimizer's class.
    """

    def __init__(
        self,
        params: ParamsT,
        world_size: int | None = None,
        scale: float | None = None,
        smoothing: float | None = None,
        num_gradients_to_accumulate: int = 1,
        debias_ewma: bool = True,
        optim_cls: type[Optimizer] = SGD,
        **additional_optim_args: Tree,
    ) -> None:
        # by name: fairscale passes debias_ewma where is_scaled_loss is expected
        super().__init__(
            optim_cls(params, **additional_optim_args),
            world_size,
            scale,
            smoothing,
            num_gradients_to_accumulate,
            debias_ewma=debias_ewma,
        )


# ------------------------------------------------------------ Adam whose parameters and state may be half precision
# fairscale's is a CUDA extension that few installations have; this one runs wherever torch does. One step is
#
#     m = beta1 m + (1 - beta1) g,    v = beta2 v + (1 - beta2) g^2
#     p = p - lr c (m / (sqrt(v) + eps) + weight_decay p),    c = sqrt(1 - beta2^t) / (1 - beta1^t)
#
# in fp32: the form at the end of section 2 of Kingma and Ba (https://arxiv.org/abs/1412.6980), with decay beside the
# gradient as in the kernel of apex that fairscale took over. Without decay it is torch's Adam but for eps, which torch
# adds to the corrected root (eps / sqrt(1 - beta2^t) there gives the same).
_Row = tuple[nn.Parameter, torch.Tensor, "StateDict"]  # parameter, gradient, state
_STATE = ("exp_avg", "exp_avg_sq")
_TOP_SCALE = 2.0**16
_OWN = "precision eps_mode optim_type _optim_scale _steps_since_optim_scale_change _optim_scale_update_freq _copies"


class Precision(enum.Enum):
    """Says what is kept in half precision.

    FULL_PRECISION: nothing. MIXED_PRECISION: parameters, of which the optimizer keeps fp32 copies that it updates.
    MEMORY_EFFICIENT_MIXED_PRECISION: parameters, without copies. PURE_FP16: parameters and state, the latter scaled.
    """

    FULL_PRECISION = enum.auto()
    MIXED_PRECISION = enum.auto()
    MEMORY_EFFICIENT_MIXED_PRECISION = enum.auto()
    PURE_FP16 = enum.auto()


def _check(group: ParamGroup) -> None:
    for name in ("lr", "eps", "weight_decay"):
        if not group[name] >= 0.0:
            raise ConfigurationError(f"{name} is {group[name]}; it must be at least 0")
    if not all(0.0 <= beta < 1.0 for beta in group["betas"]):
        raise ConfigurationError(f"betas are {group['betas']}; both must be at least 0 and below 1")


def _first_of(params: Iterable[Tree]) -> torch.Tensor:
    first = next(iter(params))
    if isinstance(first, dict):
        return _first_of([first["params"]])
    return first if isinstance(first, torch.Tensor) else _first_of(first)


class Adam(torch.optim.Optimizer):
    """Adam with parameters, copies and state as ``precision`` says.

    Args:
        params: parameters or groups of them.
        lr, betas, eps, weight_decay: as in the formula above.
        bias_correction: False: c = 1.
        eps_inside_sqrt: add eps below the root.
        max_grad_norm: kept in the groups and not used, as in fairscale: clip before.
        amsgrad: not supported.
        precision: by default FULL_PRECISION for fp32 (or fp64) parameters and MIXED_PRECISION for half-precision ones.

    Raises:
        ConfigurationError: (a ValueError) ``amsgrad``, a precision that the parameters don't have, or a number out of
            its range.
    """

    def __init__(
        self,
        params: ParamsT,
        lr: float | None = 1e-3,
        bias_correction: bool | None = True,
        betas: tuple[float, float] | None = (0.9, 0.999),
        eps: float | None = 1e-8,
        eps_inside_sqrt: bool | None = False,
        weight_decay: float | None = 0.0,
        max_grad_norm: float | None = 0.0,
        amsgrad: bool | None = False,
        precision: Precision | None = None,
    ) -> None:
        if amsgrad:
            raise ConfigurationError("this Adam has no amsgrad; take torch.optim.Adam(amsgrad=True)")
        params = list(params)  # type: ignore[assignment]
        if precision is None and params:
            half = _first_of(params).dtype in (torch.float16, torch.bfloat16)
            precision = Precision.MIXED_PRECISION if half else Precision.FULL_PRECISION
        self.precision = precision
        self.eps_mode = 0 if eps_inside_sqrt else 1
        self.optim_type = torch.float16 if precision is Precision.PURE_FP16 else torch.float32
        self._optim_scale = _TOP_SCALE if precision is Precision.PURE_FP16 else 1.0
        self._steps_since_optim_scale_change = 0
        self._optim_scale_update_freq = 2000
        self._copies: dict[nn.Parameter, nn.Parameter] = {}
        defaults = {
            "lr": lr,
            "bias_correction": bias_correction,
            "betas": betas,
            "eps": eps,
            "weight_decay": weight_decay,
            "max_grad_norm": max_grad_norm,
        }
        super().__init__(params, defaults)

    def add_param_group(self, param_group: ParamGroup) -> None:
        """See :meth:`torch.optim.Optimizer.add_param_group`.

        Raises:
            ConfigurationError: parameters of another precision.
        """
        _check({**self.defaults, **param_group})
        super().add_param_group(param_group)
        full = self.precision is Precision.FULL_PRECISION
        pure = self.precision is Precision.PURE_FP16
        allowed = (
            (torch.float32, torch.float64) if full else (torch.float16, torch.bfloat16)[: 1 if pure else 2]
        )
        for p in self.param_groups[-1]["params"]:
            if p.dtype not in allowed:
                del self.param_groups[-1]
                raise ConfigurationError(
                    f"{self.precision} is for parameters of {allowed}; one of shape "
                    f"{tuple(p.shape)} is {p.dtype}"
                )
        if self.mixed_precision:
            self._build_fp32_params(self.param_groups[-1]["params"])

    def _build_fp32_params(self, params: Iterable[nn.Parameter]) -> None:
        """Makes the fp32 copies (MIXED_PRECISION) anew, from what the parameters are now; fairscale's name."""
        for p in params:
            self._copies[p] = nn.Parameter(p.detach().float())

    @property
    def fp32_param_groups(self) -> list[StateDict]:
        """Lists the groups with the fp32 copies (MIXED_PRECISION) in place of the parameters."""
        if not self.mixed_precision:
            return []
        return [{**g, "params": [self._copies[p] for p in g["params"]]} for g in self.param_groups]

    supports_memory_efficient_fp16 = property(lambda _: True)  # read by fairseq
    _step_supports_amp_scaling = property(lambda _: False)

    @property
    def mixed_precision(self) -> bool:
        """Says whether there are fp32 copies of the parameters."""
        return self.precision is Precision.MIXED_PRECISION

    def __getstate__(self) -> StateDict:
        # torch's keeps groups and state only
        return {**super().__getstate__(), **{name: self.__dict__[name] for name in _OWN.split()}}

    def state_dict(self) -> StateDict:
        """Returns torch's, and ``"optim_scale"``."""
        return {**super().state_dict(), "optim_scale": self._optim_scale}

    def load_state_dict(self, state_dict: StateDict) -> None:
        """Takes what :meth:`state_dict` gave; state stays in its precision (fairscale rounds it to the parameters')."""
        super().load_state_dict(state_dict)
        # Optimizers around this one (OSS) hand on torch's entries only.
        self._optim_scale = state_dict.get("optim_scale", self._optim_scale)
        ours = [p for g in self.param_groups for p in g["params"]]
        saved = [i for g in state_dict["param_groups"] for i in g["params"]]
        for p, index in zip(ours, saved, strict=True):
            for key in _STATE:
                if key in self.state[p]:
                    value = state_dict["state"][index][key]
                    self.state[p][key] = value.detach().to(p.device, self._state_dtype(p), copy=True)
            # A model that was loaded before has new values.
            if p in self._copies and not torch.equal(self._copies[p].to(p.dtype), p):
                self._copies[p].data.copy_(p.detach())

    def _state_dtype(self, p: torch.Tensor) -> torch.dtype:
        return torch.float64 if p.dtype is torch.float64 else self.optim_type

    @torch.no_grad()
    def step(self, closure: Callable[[], T] | None = None) -> T | None:  # type: ignore[override]
        """Takes a step.

        Raises:
            ConfigurationError: a gradient is sparse.
            LifecycleError: (PURE_FP16) overflows have brought the scale of the state below 1.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        alike: dict[tuple[object, ...], tuple[ParamGroup, list[_Row]]] = {}
        for number, group in enumerate(self.param_groups):
            for p in group["params"]:
                if p.grad is None:
                    continue
                if p.grad.is_sparse:
                    raise ConfigurationError(
                        "this Adam takes no sparse gradients; use torch.optim.SparseAdam"
                    )
                state = self.state[p]
                if not state:
                    state["step"] = 0
                    for key in _STATE:
                        state[key] = torch.zeros_like(p, dtype=self._state_dtype(p))
                state["step"] += 1
                kind = (number, p.device, p.dtype, state["step"])
                alike.setdefault(kind, (group, []))[1].append((p, p.grad, state))
        overflows = [self._update(group, rows) for group, rows in alike.values()]
        if self.precision is Precision.PURE_FP16:
            self._adapt_scale(any(bool(o) for o in overflows))
        return loss

    def _update(self, group: ParamGroup, rows: list[_Row]) -> torch.Tensor | None:
        """Makes one step of parameters that have taken as many; returns (PURE_FP16) whether their state overflowed."""
        (beta1, beta2), eps, t = group["betas"], group["eps"], rows[0][2]["step"]
        step_size = group["lr"]
        if group["bias_correction"]:
            step_size *= (1 - beta2**t) ** 0.5 / (1 - beta1**t)
        wide = self._state_dtype(rows[0][0]) if self.optim_type is torch.float32 else torch.float32
        params = [self._copies.get(p, p).to(wide) for p, _, _ in rows]
        grads = [g.to(wide) for _, g, _ in rows]
        m, v = ([s[key].to(wide) for _, _, s in rows] for key in _STATE)
        if self._optim_scale != 1.0:
            torch._foreach_div_(m, self._optim_scale)
            torch._foreach_div_(v, self._optim_scale)
        torch._foreach_lerp_(m, grads, 1 - beta1)
        torch._foreach_mul_(v, beta2)
        torch._foreach_addcmul_(v, grads, grads, 1 - beta2)
        if self.eps_mode == 0:
            roots = torch._foreach_sqrt(torch._foreach_add(v, eps))
        else:
            roots = torch._foreach_add(torch._foreach_sqrt(v), eps)
        torch._foreach_mul_(params, 1 - step_size * group["weight_decay"])
        torch._foreach_addcdiv_(params, m, roots, -step_size)
        if self.precision is Precision.PURE_FP16:
            torch._foreach_mul_(m, self._optim_scale)
            torch._foreach_mul_(v, self._optim_scale)
        for (p, _, state), new, *moments in zip(rows, params, m, v, strict=True):
            p.copy_(new)  # no work where it is p itself
            for key, moment in zip(_STATE, moments, strict=True):
                state[key].copy_(moment)
        if self.precision is not Precision.PURE_FP16:
            return None
        return torch.stack([(~torch.isfinite(s[key])).any() for _, _, s in rows for key in _STATE]).any()

    def _adapt_scale(self, overflow: bool) -> None:
        """Halves the scale of the fp16 state and forgets the state after an overflow; doubles it after a while."""
        self._steps_since_optim_scale_change += 1
        if overflow:
            self._steps_since_optim_scale_change = 0
            self._optim_scale /= 2
            if self._optim_scale < 1.0:
                raise LifecycleError(
                    "the scale of the optimizer state is below 1; the gradients may be exploding"
                )
            for state in self.state.values():
                for key in _STATE:
                    state[key].zero_()
        elif self._steps_since_optim_scale_change == self._optim_scale_update_freq:
            self._steps_since_optim_scale_change = 0
            if self._optim_scale < _TOP_SCALE:
                for state in self.state.values():
                    for key in _STATE:
                        state[key].mul_(2)
                self._optim_scale *= 2


# ------------------------------------------------------------ a factor for each layer's gradients, as fp16 may need
class LayerInfo:
    """A layer and its factor.

    Args:
        scale_layer: whether the factor changes over time.
    """

    def __init__(self, name: str, layer: nn.Module, scale: float = 1.0, scale_layer: bool = False) -> None:
        self.layer_name = name
        self.layer = layer
        self.scaling_factor = scale
        self.found_inf_or_nan = False
        self.growth_tracker = 0
        self.scale_layer = scale_layer


class GradientHelper:
    """A backward hook that takes gradients from one layer's factor to that of the layer before it.

    Args:
        name: path of the layer.
        inputs_multiplier: factor of the layer before.
        outputs_multiplier: one over the layer's own.
    """

    def __init__(self, name: str, inputs_multiplier: float, outputs_multiplier: float) -> None:
        self.layer_name = name
        self.inputs_multiplier = inputs_multiplier
        self.outputs_multiplier = outputs_multiplier

    def scale_gradients(self, m: nn.Module, inputs: Tree, outputs: Tree) -> tuple[torch.Tensor | None, ...]:
        """Serves as the hook: gradients of the layer's inputs, multiplied at once (a step between could underflow)."""
        factor = self.inputs_multiplier * self.outputs_multiplier
        return tuple(None if x is None else x * factor for x in inputs)


class LayerwiseGradientScaler:
    """Gives chosen layers a factor of their own during backward; an overflow in one layer lowers only that one.

    Layers pass gradients on in the order of ``model.named_modules()``, so this has to be the order in which they run.
    The last layer gets its gradients from the loss: if it is scaled, multiply the loss by its factor. ::

        scaler = LayerwiseGradientScaler(model, {"conv1": 2**10, "fc1": 2**8})
        for inputs, targets in data:
            optimizer.zero_grad()
            scaler.scale()
            criterion(model(inputs), targets).backward()
            scaler.unscale()
            scaler.step(optimizer)

    fairscale leaves gradients scaled in the step after an overflow and takes that step; here every step is unscaled.

    Args:
        model: the module.
        layer_scale_dict: path of a layer -> its factor; empty: nothing is scaled.
        growth_factor, growth_interval: a factor is multiplied by the one after so many steps without overflow.
        backoff_factor: and by this after an overflow in its layer.
        min_scale, max_scale: bounds of factors.

    Raises:
        ConfigurationError: a factor that does not grow or shrink, or a name that is not that of a layer without
            children (gradients within a container can't be scaled by its input and output).
    """

    def __init__(
        self,
        model: nn.Module,
        layer_scale_dict: dict[str, float],
        growth_factor: float = 2.0,
        backoff_factor: float = 0.5,
        growth_interval: int = 10000,
        min_scale: float = torch.finfo(torch.float32).tiny,
        max_scale: float = torch.finfo(torch.float32).max,
    ) -> None:
        self._model = model
        self._growth_factor = growth_factor
        self._backoff_factor = backoff_factor
        self._growth_interval = growth_interval
        self._min_scale = min_scale
        self._max_scale = max_scale
        self._handles: list[RemovableHandle] = []
        self.layer_info: list[LayerInfo] = []
        if not layer_scale_dict:
            return
        if growth_factor <= 1.0 or backoff_factor >= 1.0:
            raise ConfigurationError(
                f"growth_factor has to be above 1 and backoff_factor below; got {growth_factor} and {backoff_factor}"
            )
        layers = {name: layer for name, layer in model.named_modules() if name}
        for name in layer_scale_dict:
            if name not in layers or any(True for _ in layers[name].children()):
                leaves = [n for n, layer in layers.items() if not any(True for _ in layer.children())]
                raise ConfigurationError(
                    f"layer_scale_dict names {name!r}, which is no layer without children; there are {leaves}"
                )
        self.layer_info = [
            LayerInfo(name, layer, layer_scale_dict.get(name, 1.0), name in layer_scale_dict)
            for name, layer in layers.items()
        ]

    def scale(self) -> None:
        """Makes the next backward scale; to be called before forward."""
        before = 1.0
        for info in self.layer_info:
            helper = GradientHelper(info.layer_name, before, 1.0 / info.scaling_factor)
            self._handles.append(info.layer.register_full_backward_hook(helper.scale_gradients))
            before = info.scaling_factor

    @torch.no_grad()
    def unscale(self) -> None:
        """Divides the gradients of each scaled layer by its factor; to be called after backward."""
        for info in self.layer_info:
            for param in info.layer.parameters() if info.scale_layer else ():
                if param.grad is not None:
                    param.grad.mul_(1.0 / info.scaling_factor)
        while self._handles:
            self._handles.pop().remove()

    def step(self, optimizer: torch.optim.Optimizer) -> None:
        """Steps unless a gradient is inf or nan, and adapts the factors."""
        found = [(p, p.grad) for p in self._model.parameters() if p.grad is not None]
        # one transfer to the host for all of them
        flags = [torch.isfinite(g).all().to(found[0][1].device) for _, g in found]
        finite = torch.stack(flags).tolist() if flags else []
        overflowed = {p for (p, _), good in zip(found, finite, strict=True) if not good}
        for info in self.layer_info:
            info.found_inf_or_nan = any(p in overflowed for p in info.layer.parameters())
        if not any(info.found_inf_or_nan for info in self.layer_info):
            optimizer.step()
        for info in self.layer_info:
            factor = self._backoff_factor
            if not info.found_inf_or_nan:
                info.growth_tracker += 1
                factor = self._growth_factor if info.growth_tracker == self._growth_interval else 1.0
            if info.scale_layer and factor != 1.0:
                info.scaling_factor = max(self._min_scale, min(factor * info.scaling_factor, self._max_scale))
                info.growth_tracker = 0

    def get_layer_info(self) -> list[LayerInfo]:
        """Returns all layers, in order."""
        return self.layer_info

    def get_backward_hooks(self) -> list[tuple[str, AnyCallable]]:
        """Returns the path of each module below the model, and its backward hooks."""
        return [(name, layer._get_backward_hooks()) for name, layer in self._model.named_modules() if name]
