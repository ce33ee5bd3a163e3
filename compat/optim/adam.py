"""Adam whose parameters and state may be half precision.

fairscale's is a CUDA extension that few installations have; this one runs wherever torch does. One step is

    m = beta1 m + (1 - beta1) g,    v = beta2 v + (1 - beta2) g^2
    p = p - lr c (m / (sqrt(v) + eps) + weight_decay p),    c = sqrt(1 - beta2^t) / (1 - beta1^t)

in fp32: the form at the end of section 2 of Kingma and Ba (https://arxiv.org/abs/1412.6980), with decay beside the
gradient as in the kernel of apex that fairscale took over. Without decay it is torch's Adam but for eps, which torch
adds to the corrected root (eps / sqrt(1 - beta2^t) there gives the same).
"""

from __future__ import annotations

import enum
from collections.abc import Callable, Iterable

import torch
from torch import nn
from torch.optim.optimizer import ParamsT

from shardkit.errors import ConfigurationError, LifecycleError
from shardkit.types import ParamGroup, StateDict, T, Tree

_Row = tuple[nn.Parameter, torch.Tensor, "StateDict"]  # parameter, gradient, state
_STATE = ("exp_avg", "exp_avg_sq")
_TOP_SCALE = 2.0**16


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
        mine = (
            "precision",
            "eps_mode",
            "optim_type",
            "_optim_scale",
            "_steps_since_optim_scale_change",
            "_optim_scale_update_freq",
            "_copies",
        )
        return {**super().__getstate__(), **{name: self.__dict__[name] for name in mine}}

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
